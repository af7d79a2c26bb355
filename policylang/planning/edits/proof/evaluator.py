"""Runs a chain of layout operators and collectives, element by element, for every rank of a world at once.

A proof runs two chains through it. It knows nothing of how rewrites are found: what each call does to elements is the
operator table's (:mod:`policylang.operators.moves`), which the tests hold against torch, and a view that torch would
refuse is refused here too. Ranks whose inputs are the same objects get the same result, computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from policylang.operators.layouts import Tensor
from policylang.operators.moves import GroupMove, Join, Move, MoveError
from policylang.planning.edits.proof.calls import ChainCall, group_of
from policylang.planning.graph_edit import FusedGroup

Value = Tensor | tuple[Tensor, ...]
Groups = Callable[[str | FusedGroup, int], tuple[int, ...]]
"""The ranks of the group in which a rank takes part, in group order."""


def run(
    calls: Iterable[ChainCall], inputs: Mapping[str, Mapping[int, Value]], groups: Groups
) -> dict[str, dict[int, Value]]:
    """What every call gives on every rank.

    Args:
        calls: in order.
        inputs: node name to rank to value.
        groups: who takes part in a collective.

    Raises:
        MoveError: where torch would raise, as a sentence.
    """
    values: dict[str, dict[int, Value]] = {name: dict(of_ranks) for name, of_ranks in inputs.items()}
    for call in calls:
        try:
            found = _together if isinstance(call.move, GroupMove) else _apart
            values[call.name] = found(call, values, groups)
        except MoveError as why:
            raise MoveError(f"`{call.name}` {why}") from None
    return values


def _together(call: ChainCall, values: Mapping[str, Mapping[int, Any]], groups: Groups) -> dict[int, Value]:
    shards, group = values[call.reads[0]], group_of(call)
    met: dict[tuple[int, ...], Sequence[Tensor]] = {}
    found: dict[int, Value] = {}
    for rank in shards:
        if rank in found:
            continue
        members = groups(group, rank)  # the same list for each of them
        read = [shards[member] for member in members]
        key = tuple(map(id, read))
        if key not in met:
            met[key] = _values(call, call.move, read)
        found.update(zip(members, met[key], strict=True))
    return found


def _apart(call: ChainCall, values: Mapping[str, Mapping[int, Any]], _: Groups) -> dict[int, Value]:
    reads = call.reads
    known: dict[Any, Value] = {}
    found: dict[int, Value] = {}
    for rank in values[reads[0]]:
        read, move = [values[name][rank] for name in reads], call.move.on(rank)
        key = move, tuple(map(id, read))
        if key not in known:
            known[key] = _values(call, move, read if isinstance(move, Join) else read[0])
        found[rank] = known[key]
    return found


def _values(call: ChainCall, move: Move, read: Any) -> Any:
    found = move.values(read)
    one = found[0] if isinstance(move, GroupMove) else found
    if isinstance(one, Tensor) and one.shape != call.shape:
        raise MoveError(f"returns {list(one.shape)}")
    return found
