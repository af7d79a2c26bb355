"""The proof for an eager checkpoint: what the running block really holds for its backward, held against the plan.

Measured on the tensors themselves: the storages that the checkpoint keeps alive, each once, those of the block's own
inputs and parameters left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from policylang.audit.joint import NOT_SAVED, SAVED_UNPLANNED, Audit
from policylang.graph.facts import Facts, InputKind, Phase
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.planning.liveness import Needs, with_cost
from policylang.planning.plan import Plan
from policylang.planning.schedule.sequential_recompute import kept_rows
from policylang.torch_compat.eager import storage_address, strided_parts
from policylang.torch_compat.subclasses import take_apart

OTHER_BYTES = "APL409"


def held_bytes(held: Iterable[Tensor], outside: Iterable[Tensor] = ()) -> int:
    """Of the distinct storages of some tensors, those of ``outside`` left out."""
    known = {_storage(tensor) for tensor in _strided(outside)}
    found: dict[int, int] = {}
    for tensor in _strided(held):
        key = _storage(tensor)
        if key not in known:
            found[key] = tensor.untyped_storage().nbytes()
    return sum(found.values())


def _strided(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for plain in take_apart(list(tensors))[0]:
        yield from strided_parts(plain)


def _storage(tensor: Tensor) -> int:
    address = storage_address(tensor)
    return id(tensor) if address is None else address


def audit_eager(plan: Plan, needs: Needs, held: Mapping[int, Sequence[Tensor]], outside: Iterable[Tensor]) -> Audit:
    """Compare one call of a block with its plan.

    Args:
        needs: what follows from the plan (:func:`policylang.planning.schedule.sequential_recompute.replayed_needs`).
        held: by row of the operator, the tensors that the checkpoint holds.
        outside: the block's parameters, buffers and inputs, which are alive anyway.
    """
    facts = plan.facts
    cost = with_cost(needs, facts, plan.block_of, len(plan.block_names))
    measured = held_bytes((tensor for tensors in held.values() for tensor in tensors), outside)
    differences = [*_other_values(plan, needs, held), *_other_bytes(measured, cost.saved_bytes)]
    return Audit(
        saved=_names(facts, needs.saved),
        saved_bytes=measured,
        recomputed=_names(facts, needs.recomputed),
        recomputed_bytes=cost.recomputed_bytes,
        recomputed_flops=cost.recomputed_flops,
        forward_flops=cost.forward_flops,
        auto_saved=(),
        auto_saved_bytes=0,
        auto_recomputed=(),
        inputs=_names(facts, _inputs_read(facts)),
        symbolic=(),
        random_states=0,
        saved_bytes_by_block=cost.saved_bytes_by_block,
        recomputed_flops_by_block=cost.recomputed_flops_by_block,
        differences=tuple(differences),
    )


def _other_values(plan: Plan, needs: Needs, held: Mapping[int, Sequence[Tensor]]) -> Iterator[Diagnostic]:
    facts = plan.facts
    planned = {facts.owners[row] for row in kept_rows(facts, needs)}
    found = {facts.owners[row] for row in held}
    for row in sorted(found ^ planned):
        happened = "is held, and the plan does not say so" if row in found else "is not held, and the plan says so"
        yield diagnose(
            SAVED_UNPLANNED if row in found else NOT_SAVED,
            f"`{facts.names[row]}` ({facts.targets[row]}) {happened}",
            help="this is a bug in policylang",
        )


def _other_bytes(measured: int, planned: int) -> Iterator[Diagnostic]:
    if measured != planned:
        yield diagnose(
            OTHER_BYTES,
            f"the checkpoint holds {measured:,} bytes, and the plan says {planned:,}",
            help="a kernel lays its result into a larger memory than it fills, or into one that another value has too",
        )


def _names(facts: Facts, rows: Iterable[int]) -> tuple[str, ...]:
    return tuple(facts.names[row] for row in rows)


def _inputs_read(facts: Facts) -> list[int]:
    given = (row for row in range(len(facts)) if facts.phases[row] == Phase.INPUT)
    return [row for row in given if facts.users[row] and facts.input_kinds[row] != InputKind.TANGENT]
