"""A slow account of what is alive at each step, written from the sentences of the simulation, to hold the fast one
against: for each piece of memory every step is searched for its readers.
"""

from __future__ import annotations

from collections.abc import Iterator

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, Schedule, StepKind, is_gradient
from policylang.operators.names import GETITEM

Copy = tuple[int, int]
"""A row, and the region for which it was computed again or fetched; 0 for its first run."""
Piece = tuple[str, int, int, int]
"""Why it is there, its row, its copy and its bytes."""


def slow_lifetimes(facts: Facts, schedule: Schedule) -> Iterator[tuple[Piece, int, int]]:
    """Each piece of memory in no order, the step that makes it, -1 for what is there before the first, and the last
    step in which it is there, the number of steps for what stays."""
    steps = list(schedule)
    end = len(steps)
    touched = _touched(facts, steps)
    in_backward = [at for at, (_, _, region) in enumerate(steps) if region]
    for row, op in enumerate(facts.ops):
        if facts.input_kinds[row] == InputKind.TANGENT:
            if in_backward:
                yield ("input", row, 0, facts.bytes[row]), in_backward[0], max(touched.get((row, 0), [end]))
        elif op in ("placeholder", "get_attr"):
            yield ("input", row, 0, facts.bytes[row]), -1, end
    yield from _computed(facts, steps, touched)
    for row in range(len(facts)):
        runs = [at for at, (kind, ran, _) in enumerate(steps) if ran == row and kind in _RUNS]
        if facts.flags[row] & Flag.RANDOM and facts.owners[row] == row and len(runs) > 1:
            near = [row, *(each for each in range(len(facts)) if facts.owners[each] == row), *facts.inputs[row]]
            known = [facts.devices[each] for each in near if facts.devices[each]]
            on_cpu = known and known[0].startswith("cpu")
            yield ("state", row, 0, 5056 if on_cpu else 16), runs[0], runs[-1]


_RUNS = (StepKind.FIRST_RUN, StepKind.SECOND_RUN)


def _computed(facts: Facts, steps: list[tuple[int, int, int]], touched: dict[Copy, list[int]]) -> Iterator:
    roots = facts.storage_roots
    for at, (kind, row, region) in enumerate(steps):
        copy = 0 if kind == StepKind.FIRST_RUN else region
        if kind == StepKind.COPY_FROM_HOST:
            yield ("fetched", row, copy, facts.bytes[row]), at, max(touched[row, copy])
        if kind not in _RUNS or roots[row] != row:
            continue
        tuple_of = _tuple_of(facts, row)
        ran = {(r, 0 if k == StepKind.FIRST_RUN else g) for k, r, g in steps if k in _RUNS}
        if tuple_of is not None and (tuple_of, copy) in ran:
            continue  # its memory came with the tuple
        pieces = [
            each
            for each in range(len(facts))
            if roots[each] == each and _tuple_of(facts, each) == row and (each, copy) in touched
        ]
        for each in pieces:
            yield ("run", each, copy, facts.bytes[each]), at, max(touched[each, copy] + touched[row, copy])
        rest = facts.bytes[row] - sum(facts.bytes[each] for each in pieces)
        yield ("run", row, copy, rest), at, max(touched[row, copy])


def _tuple_of(facts: Facts, row: int) -> int | None:
    """Of a piece with memory of its own: the operator that it is a result of, through tuples of tuples."""
    found = None
    while facts.targets[row] == GETITEM and facts.storage_roots[row] == row and facts.inputs[row]:
        source = facts.inputs[row][0]
        if facts.ops[source] != "call_function":
            break
        found = row = source
    return found


def _touched(facts: Facts, steps: list[tuple[int, int, int]]) -> dict[Copy, list[int]]:
    """Memory → every step that makes it, reads it or awaits its copy to the host; past the end what is returned."""
    roots = facts.storage_roots
    lies_in: dict[Copy, Copy] = {}
    touched: dict[Copy, list[int]] = {}

    def seen(row: int, region: int) -> Copy:
        return lies_in.get((row, region), lies_in.get((row, 0), (row, 0)))

    for at, (kind, row, region) in enumerate(steps):
        copy = 0 if kind == StepKind.FIRST_RUN else region
        if kind == StepKind.COPY_FROM_HOST:
            lies_in[row, region] = (row, region)
            touched.setdefault((row, region), []).append(at)
        elif kind == StepKind.WAIT_TO_HOST:
            touched.setdefault(seen(row, 0), []).append(at)
        elif kind in _RUNS:
            lies_in[row, copy] = (row, copy) if roots[row] == row else seen(facts.inputs[row][0], region)
            for memory in (lies_in[row, copy], *(seen(source, region) for source in facts.inputs[row])):
                touched.setdefault(memory, []).append(at)
    last_region = max((region for _, _, region in steps), default=0)
    for row in range(len(facts)):
        if facts.phases[row] == Phase.OUTPUT:
            for source in facts.inputs[row]:
                late = facts.kind is GraphKind.JOINT and facts.ops[row] == "output" and is_gradient(facts, source)
                touched.setdefault(seen(source, last_region if late else 0), []).append(len(steps))
    return touched
