"""Who reads and writes the same memory: what must not change places although no edge says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policylang.graph.facts import Facts, Flag, storage_roots
from policylang.operators.names import GETITEM, WAITS

_SETS = ("aten.set_", "aten.resize_", "inductor.resize_storage_bytes_")
"""Operators after which one tensor has the memory of another, or other memory than before."""
_WRITES_MORE = ("aten.rrelu_with_noise_",)


def memory_order(facts: Facts) -> Iterator[tuple[int, int]]:
    """Pairs of rows, the first of which has to run before the second: a write and what reads or writes the same memory
    next, and what reads it and the write after that. Linear in nodes and edges.

    A collective reads what it is given until it is awaited, and one that writes in place writes until then.
    """
    if not any(flag & Flag.WRITES for flag in facts.flags):
        return
    memory = _memory(facts)
    written_at_all = {memory[each] for row in range(len(facts)) for each in _writes(facts, row)}
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for row, op in enumerate(facts.ops):
        if op != "call_function":
            continue
        collective = awaited(facts, row)
        of = row if collective is None else collective
        read = {memory[each] for each in (*facts.inputs[row], *facts.inputs[of])} & written_at_all
        written = {memory[each] for each in _writes(facts, of)}
        for each in sorted(read | written):
            if each in last_write:
                yield last_write[each], row
        for each in sorted(written):
            for reader in readers.pop(each, ()):
                yield reader, row
            last_write[each] = row
        for each in sorted(read - written):
            readers.setdefault(each, []).append(row)


def awaited(facts: Facts, row: int) -> int | None:
    """The collective that a ``wait_tensor`` awaits; None of other rows, and where it awaits an input."""
    if facts.targets[row] not in WAITS or not facts.inputs[row]:
        return None
    source = facts.inputs[row][0]
    if facts.targets[source] == GETITEM and facts.inputs[source]:
        source = facts.inputs[source][0]
    return source if facts.flags[source] & Flag.COLLECTIVE else None


def _writes(facts: Facts, row: int) -> Sequence[int]:
    """The rows whose memory a row may write: what an operator writes to is its first argument where its name ends so,
    and may be any of them otherwise."""
    if not facts.flags[row] & Flag.WRITES or facts.ops[row] != "call_function":
        return ()
    return facts.inputs[row][:1] if _in_place(facts.targets[row]) else facts.inputs[row]


def _in_place(target: str) -> bool:
    """Of ``aten.add_.Tensor`` and its like; those that begin with an underscore write several."""
    namespace, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    plain = namespace == "aten" and name.endswith("_") and not name.startswith("_")
    return plain and not target.startswith((*_SETS, *_WRITES_MORE))


def _memory(facts: Facts) -> Sequence[int]:
    """By row a name of its memory. Operators that write are followed to what they may hand back, which is more than
    :func:`storage_roots` has to know."""
    roots = storage_roots(facts)
    parents = list(range(len(facts)))

    def find(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    def join(one: int, other: int) -> None:
        low, high = sorted((find(roots[one]), find(roots[other])))
        parents[high] = low

    for row, flag in enumerate(facts.flags):
        if not flag & Flag.WRITES:
            continue
        if facts.targets[row].startswith(_SETS):
            for each in facts.inputs[row]:
                join(each, row)
        elif _in_place(facts.targets[row]):
            for each in facts.inputs[row][:1]:
                join(each, row)
        else:
            for each in facts.inputs[row]:
                if facts.shapes[each] is not None and facts.shapes[each] == facts.shapes[row]:
                    join(each, row)
    return [find(root) for root in roots]
