"""The stages of a pipeline: a whole model cut by its blocks, or the stages' own graphs as one.

In one graph, what a stage sends is read by the next, and the gradient that the next returns for it is read in the place
of the tangent. So it is planned as a whole model that was cut.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import (
    COLUMNS,
    Facts,
    Flag,
    InputKind,
    Phase,
    Ref,
    Stored,
    read_by_backward,
    replaced_in,
    users_of,
)
from policylang.graph.snapshot import graph_error
from policylang.language.syntax import Pipeline

NO_CHAIN = "APL670"
_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.TANGENT)


@frozen(eq=False)
class Stages:
    """Which stage a node and a block are in."""

    of: Sequence[int]
    """Node → stage; -1 for inputs and the output."""
    firsts: tuple[int, ...]
    """The first block of each stage; of one without blocks, that of the stage behind it."""


def stages_of(facts: Facts, blocks: BlockTable, pipeline: Pipeline) -> Stages:
    """The stages that the graph was joined from, else those that the pipeline cuts it into, evenly unless it says the
    first blocks."""
    count = len(blocks.names)
    if not facts.stage_count:
        firsts = pipeline.firsts or tuple(stage * count // pipeline.stages for stage in range(pipeline.stages))
        return Stages(_cut(facts, blocks.block_of, firsts), firsts)
    first, found = count, list[int]()
    for stage in reversed(range(facts.stage_count)):
        own = (blocks.block_of[row] for row in facts.forward if facts.stages[row] == stage)
        first = min((first, *(block for block in own if block >= 0)))
        found.insert(0, first)
    return Stages(facts.stages, tuple(found))


def _cut(facts: Facts, block_of: Sequence[int], firsts: Sequence[int]) -> array[int]:
    """Node → stage, given the first block of each. A forward node outside the blocks is in the first stage that reads
    it; behind the last block it is in the last. A backward node outside them is where the gradient that it reads has
    come to. One pass in each direction."""
    found, last = array("i", [-1]) * len(facts), len(firsts) - 1
    reads: dict[int, int] = {}
    is_behind, behind = bytearray(len(facts)), False
    top = max(block_of, default=-1)
    for row in facts.forward:
        behind = behind or (block_of[row] == top and top >= 0)
        is_behind[row] = behind
    for row in reversed(facts.forward):
        block = block_of[row]
        inside = bisect_right(firsts, block) - 1 if block >= 0 else -1
        found[row] = inside if block >= 0 else reads.get(row, last if is_behind[row] else 0)
        for source in facts.inputs[row]:
            reads[source] = min(reads.get(source, last), found[row])
    for row, phase in enumerate(facts.phases):
        if phase == Phase.BACKWARD and found[row] < 0:
            before = [found[each] for each in facts.inputs[row] if facts.phases[each] == Phase.BACKWARD]
            block = block_of[row]
            found[row] = bisect_right(firsts, block) - 1 if block >= 0 else min(before, default=last)
    return found


# --- the stages' own graphs -----------------------------------------------------------------------------------------


def joined_stages(graphs: Sequence[Facts]) -> Facts:
    """The graphs of all stages, in their order, as one: node names begin with ``stage1_``, and blocks that each stage
    numbers from 0 are numbered over the whole model. O(nodes + edges).

    Raises ``PolicyGraphError`` (APL670) for graphs of different kinds, and where what a stage returns is not what the
    next one takes first and returns gradients of.
    """
    kinds = [each.kind.value for each in graphs]
    if len({*kinds}) > 1 or any(each.stage_count for each in graphs):
        what = f"are {', '.join(kinds)} graphs" if len({*kinds}) > 1 else "hold stages already"
        raise graph_error(NO_CHAIN, f"the graphs of the stages {what}", "take each stage's graph alone, all in one way")
    place: dict[tuple[int, int], int] = {}
    instead: dict[tuple[int, int], tuple[int, int]] = {}
    for stage in range(1, len(graphs)):
        instead.update(_links(stage, graphs[stage - 1], graphs[stage]))
    order = list[tuple[int, int]]()
    for phase in Phase:
        backwards = phase in (Phase.BACKWARD, Phase.OUTPUT)
        for stage in reversed(range(len(graphs))) if backwards else range(len(graphs)):
            facts = graphs[stage]
            own = ((stage, row) for row, each in enumerate(facts.phases) if each == phase)
            order += [at for at in own if at not in instead and facts.ops[at[1]] != "output"]
    place.update((at, number) for number, at in enumerate(order))
    place.update((at, place[to]) for at, to in instead.items())
    order.append((len(graphs) - 1, len(graphs[-1]) - 1))
    columns = {name: _column(name, graphs, order, place) for name in COLUMNS if name != "users"}
    inputs, flags = columns["inputs"], columns["flags"]
    returned = [(stage, row) for stage, facts in reversed([*enumerate(graphs)]) for row in facts.inputs[-1]]
    inner = {*instead.values()}
    inputs[-1] = tuple(dict.fromkeys(place[at] for at in returned if at not in inner))
    for at in inner:
        flags[place[at]] &= ~Flag.FORWARD_OUTPUT
    for row in read_by_backward(columns["phases"], inputs, columns["owners"]):
        flags[row] |= Flag.FEEDS_BACKWARD
    groups = {name: group for facts in reversed(graphs) for name, group in facts.groups.items()}
    meshes = tuple(dict.fromkeys(mesh for facts in graphs for mesh in facts.meshes))
    lost = tuple(each for facts in graphs for each in facts.lost_records)
    return evolve(graphs[0], **columns, users=users_of(inputs), groups=groups, meshes=meshes, lost_records=lost)


def _links(stage: int, before: Facts, after: Facts) -> Mapping[tuple[int, int], tuple[int, int]]:
    """By input of two neighbours that the other one computes, the node that does: what is received, and tangents.
    ``stage`` is that of ``after``."""

    def alike(one: tuple[Facts, int], other: tuple[Facts, int]) -> bool:
        return all(getattr(one[0], name)[one[1]] == getattr(other[0], name)[other[1]] for name in ("shapes", "dtypes"))

    def refused(facts: Facts, row: int, what: str) -> Exception:
        size = f"{facts.dtypes[row]}{list(facts.shapes[row] or ())}"
        message = f"stages {stage - 1} and {stage} do not fit together: `{facts.names[row]}` ({size}) {what}"
        help = "give the stages in order, each traced with what the one before sends, which requires a gradient"
        return graph_error(NO_CHAIN, message, help)

    def given(facts: Facts) -> list[int]:
        return [row for row, op in enumerate(facts.ops) if op == "placeholder" and facts.input_kinds[row] not in _STATE]

    sent = [row for row in before.inputs[-1] if before.flags[row] & Flag.FORWARD_OUTPUT]
    own = iter(given(after))
    taken = {row: next((into for into in own if alike((before, row), (after, into))), None) for row in sent}
    tangents = [row for row, kind in enumerate(before.input_kinds) if kind == InputKind.TANGENT]
    if not tangents:  # a flat graph does not mark them: the backward alone reads them
        readers = {row: {before.phases[user] for user in before.users[row]} for row in given(before)}
        tangents = [row for row, phases in readers.items() if phases == {Phase.BACKWARD}]
    gradients = [row for row in after.inputs[-1] if after.phases[row] == Phase.BACKWARD]
    kinds, received = after.input_kinds, {*taken.values()}
    trained = [row for row, kind in enumerate(kinds) if kind == InputKind.PARAMETER or row in received]
    pairs = dict(zip(trained, gradients, strict=True)) if len(trained) == len(gradients) else {}
    found = dict[tuple[int, int], tuple[int, int]]()
    for row, into in taken.items():
        if into is None:
            raise refused(before, row, f"is no input of stage {stage}")
        found[stage, into] = (stage - 1, row)
        if "float" not in before.dtypes[row]:
            continue
        fitting = [each for each in gradients if alike((after, into), (after, each))]
        gradient = fitting[0] if len(fitting) == 1 else pairs.get(into)
        tangent = next((each for each in tangents if alike((before, row), (before, each))), None)
        if gradient is None or tangent is None:
            raise refused(
                *((after, into) if gradient is None else (before, row)), "gets no gradient that is to be found"
            )
        tangents.remove(tangent)
        found[stage - 1, tangent] = (stage, gradient)
    return found


def _column(name: str, graphs: Sequence[Facts], order: Sequence[tuple[int, int]], place: Mapping[Any, int]) -> Any:
    """A column of the joined graph. ``order``: by its row, a stage and a row of that; ``place``: the reverse."""
    if name == "stages":
        inside = (Phase.FORWARD, Phase.BACKWARD)
        return array("i", [stage if graphs[stage].phases[row] in inside else -1 for stage, row in order])
    said = COLUMNS[name]
    found = [getattr(each, name) or [said.blank] * len(each) for each in graphs]
    if said.later and not any(getattr(each, name) for each in graphs):
        return ()
    match name:
        case "modules" | "input_names":
            found = [_renamed(each, paths) for each, paths in zip(_numbering(graphs), found, strict=True)]
        case "ac_regions":
            found = _apart(found)
    match said.stored:
        case Stored.NAMES:
            return [f"stage{stage}_{found[stage][row]}" for stage, row in order]
        case Stored.ROW:
            return array("i", [place.get((stage, found[stage][row]), at) for at, (stage, row) in enumerate(order)])
        case Stored.READS:
            every = ((place.get((stage, read)) for read in found[stage][row]) for stage, row in order)
            return [tuple(dict.fromkeys(read for read in reads if read is not None)) for reads in every]
        case Stored.ARGUMENTS:
            return [_moved(found[stage][row], stage, place) for stage, row in order]
        case Stored.VALUES | Stored.NOT:
            values = [found[stage][row] for stage, row in order]
            return array("i", values) if name == "flags" else values


def _moved(arguments: Any, stage: int, place: Mapping[Any, int]) -> Any:
    return replaced_in(arguments, Ref, lambda read: Ref(place[stage, read.row]))


def _apart(regions: Sequence[Sequence[int | None]]) -> list[list[int | None]]:
    """The checkpoint regions of each stage, numbered behind those of the stages before."""
    found, first = list[list[int | None]](), 0
    for own in regions:
        found.append([None if each is None else first + each for each in own])
        first = max((each + 1 for each in found[-1] if each is not None), default=first)
    return found


def _numbering(graphs: Sequence[Facts]) -> list[Mapping[str, str]]:
    """By stage the paths of its blocks, and what they are called in the whole model, where each stage numbers its own
    from 0."""
    found, taken = list[Mapping[str, str]](), set[str]()
    for facts in graphs:
        names = [name for name in blocks_of(facts).names if name.rpartition(".")[2].isdecimal()]
        again = dict[str, str]()
        if not taken.isdisjoint(names):
            again = {name: f"{name.rpartition('.')[0]}.{len(taken) + number}" for number, name in enumerate(names)}
        taken.update(again.get(name, name) for name in names)
        found.append(again)
    return found


def _renamed(again: Mapping[str, str], paths: Sequence[str]) -> Sequence[str]:
    found = {path: path for path in paths}
    for old, new in again.items():
        found.update((path, new + path[len(old) :]) for path in found if path == old or path.startswith(f"{old}."))
    return [found[path] for path in paths]
