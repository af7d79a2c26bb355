"""The same chain on small tensors: each length that no operator looks into becomes 2, 3 or 5.

Layout operators and collectives act alike on tensors of any size: only what is cut or counted matters, the sizes of
groups and the lengths that views deal out. So a length of a shard is split into factors just where some operator of
the chains cuts it, and each factor is then made small. Group sizes stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import evolve, field, mutable

from policylang.operators.factors import CallError, Factor, MoveError, leaves, small_shape
from policylang.planning.edits.proof.calls import Call

SMALL = (2, 3, 5)


@mutable
class Sizes:
    """Chains on their way through: every value as the factors of its lengths."""

    values: dict[str, Any] = field(factory=dict)
    """A list of dimensions, or the pieces of a split."""

    def start(self, name: str, shape: Sequence[int]) -> None:
        self.values[name] = [[Factor(length, fixed=False)] for length in shape]

    def run(self, calls: Iterable[Call]) -> None:
        """Raises :class:`MoveError` for what cannot be followed."""
        for call in calls:
            try:
                self.values[call.name] = call.move.factors(self._read(call))
            except CallError as why:
                raise MoveError(f"`{call.name}` {why}") from None

    def shrink(self) -> None:
        """Give each factor its small size."""
        count = 0
        for dims in self.values.values():
            for dim in dims if isinstance(dims, list) else ():
                for factor in leaves(dim):
                    if not factor.small:
                        small = factor.size if factor.fixed else min(factor.size, SMALL[count % len(SMALL)])
                        count += small != factor.size
                        factor.small = small

    def small_shape(self, name: str) -> tuple[int, ...]:
        return small_shape(self.values[name])

    def small_call(self, call: Call) -> Call:
        """The call with the sizes among its arguments made small."""
        return evolve(call, move=call.move.small(self._read(call), self.values[call.name]))

    def _read(self, call: Call) -> Any:
        reads = call.reads
        return self.values[reads] if isinstance(reads, str) else [self.values[name] for name in reads]
