"""The operators of a block, below autograd, where torch's own selective checkpoint sees them: which count, draw, write.

A checkpoint puts the random generators back once, before the recomputation begins. That is not enough where an operator
that draws is saved: it does not run again, so the next one would draw its numbers. So each has its state noted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from attrs import define, field, frozen

from policylang.operators.calls import updated_statistics
from policylang.torch_compat.eager import default_generator, ignored_operators
from policylang.torch_compat.graphs import HigherOrderOperator, schema_of, side_effect_functions

_IGNORED = ignored_operators()
VIEW = torch.ops.aten.view.default


@define(eq=False)
class OperatorStream:
    """The operators of one call of a block; the other fields count them from 0."""

    operators: list[Any] = field(factory=list)
    """As the block calls them: on tensors made of tensors (DTensor), one of these is several operations, or none."""
    reach: int = 0
    """How many had run when the last value was saved: a checkpoint runs so many again."""
    differentiable: set[int] = field(factory=set)
    """Those that a gradient flows through."""
    numbers: set[int] = field(factory=set)
    """Those that have told Python what is in a tensor (``item``, ``equal``): a graph has no nodes for them, and what
    the block does next may hang on it."""
    numbered: set[int] = field(factory=set)
    """Those that are called with plain numbers."""
    from_outside: dict[int, tuple[int, ...]] = field(factory=dict)
    """Which of the tensors that an operator reads are parameters, buffers or constants that the block does not
    write to."""
    kept: dict[int, tuple[int, ...]] = field(factory=dict)
    """Which of the tensors that an operator reads autograd keeps, and lie in memory from outside: a second run hands
    it what is there by then, whatever the operator gives."""
    state: dict[int, tuple[int, ...]] = field(factory=dict)
    """Which of these the block writes to."""


@cache
def is_ignored(operator: Any) -> bool:
    """Whether an operator is none of the block's: autograd asks for it as often as it likes, or it only marks a place
    in a profile."""
    return operator in _IGNORED or getattr(operator, "namespace", "") == "profiler"


def is_same_view(args: Sequence[Any]) -> bool:
    """Of a call of ``view``: whether it gives its argument as it is. Those who track modules do that (``view_as``) to
    hang a hook on a tensor, in a forward and not in its recomputation."""
    return len(args) == 2 and tuple(args[1]) == tuple(args[0].shape)


def is_no_step(operator: Any, args: Sequence[Any]) -> bool:
    """Whether a call of an operator is passed by where the operators of a block are counted."""
    return is_ignored(operator) or (operator is VIEW and is_same_view(args))


@cache
def is_kept_unread(operator: Any) -> bool:
    """Whether a graph keeps an operator although nobody reads what it gives."""
    return schema_of(operator) is None or draws(operator) or operator in side_effect_functions()


_NUMBERS = frozenset((int, float, bool, complex))


def numbers_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The plain numbers that an operator is called with: a counter of Python's may be among them, or a draw."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if type(value) in _NUMBERS:
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend([part for part in value if type(part) in _NUMBERS])
    return found


def gives_number(out: Any) -> bool:
    """Whether this is what an operator tells Python of the bytes of a tensor."""
    return isinstance(out, bool | int | float | complex)


def draws(operator: Any) -> bool:
    """Whether torch says of an operator that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def gives_data(operator: Any, masked: bool) -> bool:
    """Whether torch says of an operator that what it gives is of a size that comes from data. ``masked``: whether it
    reads truth values, by which alone an ``index`` does."""
    by_data = torch.Tag.dynamic_output_shape in getattr(operator, "tags", ())
    return by_data and (masked or operator is not torch.ops.aten.index.Tensor)


@cache
def traces_again(operator: Any) -> bool:
    """Whether an operator takes functions, and its backward traces them, which fails where torch has not compiled
    them first (:func:`policylang.torch_compat.eager.failed_in`)."""
    return isinstance(operator, HigherOrderOperator) and operator.name() in ("cond", "map_impl", "scan")


@cache
def changes_only_geometry(operator: Any) -> bool:
    """Whether what an operator changes in place is the shape or the strides of a tensor, not its bytes."""
    return torch.Tag.inplace_view in getattr(operator, "tags", ())


@cache
def writes(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments and says so."""
    schema = schema_of(operator)
    return bool(schema is not None and schema.is_mutable)


@cache
def gives_what_it_writes(operator: Any) -> bool:
    """Whether an operator that writes gives nothing but the arguments that it has written to."""
    return all(each.alias_info is not None and each.alias_info.is_write for each in schema_of(operator).returns)


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that a call of an operator writes to, as it says, or running statistics."""
    if not writes(operator):
        return [args[at] for at in updated_statistics(operator, args)]
    return [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(schema_of(operator).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


@frozen(eq=False)
class GeneratorState:
    """The generator that a call draws from and the state it is in; None where its device has no generator."""

    generator: torch.Generator | None
    state: torch.Tensor | None

    @classmethod
    def before(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> GeneratorState:
        """The generator is the one that the call is given, else that of its device."""
        generator: torch.Generator | None = kwargs.get("generator")
        if generator is None:
            device = kwargs.get("device")
            if device is None:
                device = next((value.device for value in args if isinstance(value, torch.Tensor)), "cpu")
            generator = default_generator(torch.device(device))
        return cls(generator, None if generator is None else generator.get_state())

    @contextmanager
    def again(self) -> Iterator[None]:
        """Under it the generator draws what it drew then; afterwards it goes on as if it had not."""
        if self.generator is None or self.state is None:
            yield
            return
        now = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            yield
        finally:
            self.generator.set_state(now)
