"""A plan of a whole model as a pipeline of stages: what each stage and rank holds and computes over a whole schedule.

The snapshot is one microbatch through the whole model. Its steps are cut into stages; the memory of a stage's forward
and backward comes from the lifetimes of the step, and a rank runs them in the order of its schedule. What crosses from
one stage to the next is held on both sides, whatever the policy says, as ``torch.distributed.pipelining`` does: by the
sender until its backward, and in buffers of the receiver, which has one for each microbatch; between two stages of one
rank, in these buffers alone. Where a rank waits for its sends at the end of the step, what was sent stays until then.
Gradients of parameters add up in memory that stays from a stage's first backward on.

Where a backward is split, what is saved and the gradients that the weights' part reads stay until that part: the part
for the inputs frees neither. Both parts recompute, as eager checkpoints do.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from attrs import define, field, frozen

from policylang.graph.blocks import BlockTable, Chains
from policylang.graph.facts import Facts, Flag, InputKind, Phase, Schedule, StepKind
from policylang.graph.stages import stages_of
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.selectors import selectors_of, with_lets
from policylang.language.shown import counted, joined
from policylang.language.syntax import InBlock, Pipeline, Policy
from policylang.operators.names import is_all_gather
from policylang.planning.selection.selectors import Selections
from policylang.simulation.memory import Lifetimes, Origin, lifetimes
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import RunLog, walk

UNKNOWN_STAGES, NO_PIPELINE = "APL656", "APL657"


@frozen
class StageFigures:
    """One stage, over a whole schedule. Bytes and seconds; seconds are None without a device."""

    stage: int
    rank: int
    blocks: tuple[int, int]
    """The first, and the one behind the last."""
    in_flight: int
    """The most microbatches whose saved values it holds at once."""
    saved: int
    """The most bytes saved for all of them, received inputs and sent outputs included."""
    peak: int
    """The peak of its rank, with all of the rank's stages."""
    recomputed_seconds: float | None
    step_seconds: float | None
    """Its rank's time for this stage, all microbatches together."""

    def blocks_text(self, dash: str) -> str:
        """The first and the last, or ``none``."""
        first, end = self.blocks
        return f"{first}{dash}{end - 1}" if end > first else "none"


@frozen(eq=False)
class PipelineFigures:
    """Every stage of a pipeline, and the step."""

    stages: tuple[StageFigures, ...]
    step_seconds: float | None
    """From the first forward to the last backward of any rank, waits for other ranks included; sends take no time."""


@define(eq=False)
class StageCosts:
    """One microbatch in one stage. Bytes above what the rank holds anyway; seconds."""

    blocks: tuple[int, int] = (0, 0)
    """The first, and the one behind the last."""
    forward_peak: int = 0
    saved: int = 0
    backward_peak: int = 0
    """Saved values included; each gradient of a parameter counts while it is made."""
    first_backward_peak: int = 0
    """The backward's peak where gradients of parameters stay."""
    between: int = 0
    """The gradients that the weights' part of a split backward reads."""
    inputs_peak: int = 0
    """The peak of the inputs' part, which frees no saved value and keeps what the weights' part reads."""
    released: int = 0
    """Saved bytes that the inputs' part alone reads, before any gradient of a weight: mostly the loss."""
    weights_peak: int = 0
    """The peak of the weights' part: saved and recomputed values, and the largest gradient."""
    first_weights_peak: int = 0
    """The weights' peak where all gradients of parameters stay."""
    sent: tuple[int, int] = (0, 0)
    """A microbatch sends so much in the forward, and in the backward."""
    gradients: int = 0
    resident: int = 0
    per_step: int = 0
    """A microbatch receives so much, gradients and inputs included: a rank has buffers for all microbatches."""
    seconds: Counter[str] = field(factory=Counter)
    """Time of the forward (F), the inputs' and the weights' part of the backward (I, W), and recomputation (R)."""

    def taken(self, kind: str, is_first: bool) -> float:
        """The seconds of one action; the first stage has no gradient of an input, so it does all at the weights."""
        time = self.seconds
        match kind:
            case "F":
                return time["F"]
            case "B":
                return time["I"] + time["W"] + time["R"]
            case "I":
                return 0.0 if is_first else time["I"] + time["R"]
            case _:
                return time["W"] + time["R"] + (time["I"] if is_first else 0.0)

    def recomputes(self, kind: str, is_first: bool) -> bool:
        """True for an action that recomputes what is not saved."""
        return kind in "BW" or (kind == "I" and not is_first)


def received(facts: Facts, selections: Selections) -> frozenset[int]:
    """The producers of values that another stage than theirs reads: a stage holds what it is sent, whatever the policy
    says. What is made of one parameter alone each stage makes itself."""
    pipeline = selections.pipeline
    if pipeline is None or not pipeline.order:
        return frozenset()
    stage_of, own = selections.stage_of, selections.chains.from_parameter_mask
    owners, mask = facts.owners, facts.forward_mask
    found = set()
    for row in facts.forward:
        for source in facts.inputs[row]:
            if mask[source] and stage_of[source] != stage_of[row] and not own[source]:
                found.add(owners[source])
    return frozenset(found)


def unsharded(facts: Facts, chains: Chains) -> frozenset[int]:
    """The producers of a stage's gathered weights. Of the line from a parameter through its gathers, the last value
    that is no view is gathered once for all microbatches of a step."""
    own, first = chains.from_parameter_mask, chains.first
    lines = {first[row] for row in facts.forward if own[row] and is_all_gather(facts.targets[row])}
    whole = [row for row in facts.forward if own[row] and first[row] in lines and not facts.flags[row] & Flag.VIEW]
    return frozenset(facts.owners[row] for row in {first[row]: row for row in whole}.values())


def stage_errors(policy: Policy, selections: Selections, *, is_stage: bool) -> Iterator[Diagnostic]:
    """An error for each line that speaks of stages which nobody knows, and for stages that the graph has not.
    ``is_stage``: one block is planned by itself, as part of whatever stage has it."""
    pipeline = policy.pipeline
    for statement in policy.statements:
        for part in with_lets(policy, *selectors_of([statement])):
            if not isinstance(part, InBlock) or part.which.kind == "any":
                continue
            line = statement.span
            if part.which.of == "stage" and (pipeline is None or not pipeline.known):
                help = "say which stage this is: `policylang.load(…, stage=0)`"
                if pipeline is None:
                    write = "write `schedule 1f1b into 4 stages of 16 microbatches`"
                    help = f"{write}, or pass `--schedule` to `policylang plan`"
                message = f"`{line.one_line}` asks for stages, and it is not known which there are"
                yield diagnose(UNKNOWN_STAGES, message, line, help=help)
            elif part.which.of == "block" and pipeline is not None and pipeline.stage is not None:
                message = f"`{line.one_line}` asks which of the model's blocks this is, and a stage knows its own alone"
                help = "say in which stages instead, such as `in first half of stages`"
                yield diagnose(UNKNOWN_STAGES, message, line, help=help)
    if pipeline is None or pipeline.stage is not None or not pipeline.order or is_stage:
        return
    if (problem := unfit(pipeline, selections.facts, selections.blocks)) is not None:
        yield problem


def unfit(pipeline: Pipeline, facts: Facts, blocks: BlockTable) -> Diagnostic | None:
    """Why a model of these blocks cannot be cut into the pipeline's stages, or its own stages are others; None where it
    can."""
    count, own = len(blocks.names), facts.stage_count
    message, help = "", "ask for fewer stages, or name the blocks with `blocks`"
    if own:
        firsts, help = stages_of(facts, blocks, pipeline).firsts, f"ask for {own} stages, and for no first blocks"
        if own != pipeline.stages:
            message = f"the graph holds {counted(own, 'stage')}, and the pipeline has {pipeline.stages}"
        elif pipeline.firsts not in ((), firsts):
            has, asked = (joined([*map(str, each)]) for each in (firsts, pipeline.firsts))
            message = f"the stages of the graph begin with the blocks {has}, not with {asked}"
    elif count < pipeline.stages:
        message = f"the model is to be cut into {counted(pipeline.stages, 'stage')}, and has {counted(count, 'block')}"
    elif max(pipeline.firsts, default=0) >= count:
        message = f"a stage is to begin with block {max(pipeline.firsts)}, and the model has {counted(count, 'block')}"
    span = None if pipeline.span.source.text == "" else pipeline.span
    return diagnose(NO_PIPELINE, message, span, help=help) if message else None


def stage_costs(
    pipeline: Pipeline | None, facts: Facts, schedule: Schedule, times: NodeTimes | None, blocks: BlockTable
) -> Sequence[StageCosts] | None:
    """The costs of one microbatch in each stage of a step that runs in this order; None unless it is a whole model with
    a schedule."""
    if pipeline is None or not pipeline.order or unfit(pipeline, facts, blocks) is not None:
        return None
    stages = stages_of(facts, blocks, pipeline)
    found = _Cut(facts, schedule, times, stages.of, blocks.block_of, pipeline).stages
    for each, span in zip(found, pairwise((*stages.firsts, len(blocks.names))), strict=True):
        each.blocks = span
    return found


def pipeline_figures(pipeline: Pipeline, stages: Sequence[StageCosts], *, timed: bool = True) -> PipelineFigures:
    """The figures of each stage over the whole schedule. ``timed``: the costs have seconds."""
    end, busy, again = timetable(pipeline, stages)
    found: dict[int, StageFigures] = {}
    for rank, actions in enumerate(pipeline.order):
        peak, in_flight = rank_peak(pipeline.schedule, actions, stages, pipeline.microbatches)
        for stage in dict.fromkeys(stage for _, stage, _ in actions):
            saved = in_flight[stage] * stages[stage].saved
            again_seconds, seconds = (again[stage], busy[stage]) if timed else (None, None)
            span, count = stages[stage].blocks, in_flight[stage]
            found[stage] = StageFigures(stage, rank, span, count, saved, peak, again_seconds, seconds)
    return PipelineFigures(tuple(found[stage] for stage in sorted(found)), end if timed else None)


def rank_peak(
    schedule: str,
    actions: Sequence[tuple[str, int, int]],
    stages: Sequence[StageCosts] | Mapping[int, StageCosts],
    microbatches: int,
) -> tuple[int, Counter[int]]:
    """The peak of a rank over its schedule, and by stage the most microbatches in flight."""
    own = dict.fromkeys(stage for _, stage, _ in actions)
    live = sum(stages[each].resident + stages[each].per_step * microbatches for each in own)
    peak, holding, most = live, Counter[int](), Counter[int]()
    sent = max(max(stages[each].sent) for each in own)
    keeps_sent = waits_at_end(schedule)
    live += 0 if keeps_sent else sent  # 1F1B's list of a send lives until the next
    began: set[int] = set()
    for kind, at, _ in actions:
        stage, is_first = stages[at], at == 0
        if kind == "F":
            peak = max(peak, live + stage.forward_peak)
            live += stage.saved
            holding[at] += 1
            most[at] = max(most[at], holding[at])
            continue
        parts, released = (0, 0) if kind == "B" or is_first else (stage.between, stage.released)
        if kind != "I" or not is_first:
            without = live - stage.saved + released * (kind == "W")
            top = stage.backward_peak if at in began else stage.first_backward_peak
            if kind in "IW" and not is_first:
                weights = stage.weights_peak if at in began else stage.first_weights_peak
                top = stage.inputs_peak if kind == "I" else weights
            peak = max(peak, without + top)
        if kind != "I" and at not in began:
            began.add(at)
            live += stage.gradients
        if keeps_sent:
            live += stage.sent[0] * (kind in "BW") + stage.sent[1] * (kind in "BI")
        if kind == "I":
            live += parts - released
            peak = max(peak, live)
        else:
            live -= stage.saved + parts
            live += released * (kind == "W")
            holding[at] -= 1
    return peak, most


def waits_at_end(schedule: str) -> bool:
    """True where torch waits for sends at the end of the step, and holds until then what was sent."""
    return schedule != "1f1b"


def timetable(
    pipeline: Pipeline, stages: Sequence[StageCosts]
) -> tuple[float, Mapping[int, float], Mapping[int, float]]:
    """When the last rank is done; by stage the seconds that are computed for it, and those of recomputation. An action
    waits for its microbatch's in the stage before (of a backward, the one behind)."""
    done: dict[tuple[str, int, int], float] = {}
    busy, again = defaultdict[int, float](float), defaultdict[int, float](float)
    clock, at = [0.0] * len(pipeline.order), [0] * len(pipeline.order)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(pipeline.order):
            while at[rank] < len(actions):
                kind, stage, batch = actions[at[rank]]
                needed = ("F", stage - 1, batch) if kind == "F" else ("I", stage + 1, batch)
                is_free = kind == "W" or (stage == 0 if kind == "F" else stage == pipeline.stages - 1)
                if not is_free and needed not in done:
                    break
                length = stages[stage].taken(kind, stage == 0)
                clock[rank] = max(clock[rank], 0.0 if is_free else done[needed]) + length
                done["I" if kind == "B" else kind, stage, batch] = clock[rank]
                busy[stage] += length
                again[stage] += stages[stage].seconds["R"] if stages[stage].recomputes(kind, stage == 0) else 0.0
                at[rank] += 1
                moved = True
    return max(clock), busy, again


class _Cut:
    """The steps of one microbatch, by stage."""

    def __init__(
        self,
        facts: Facts,
        schedule: Schedule,
        times: NodeTimes | None,
        stage_of: Sequence[int],
        block_of: Sequence[int],
        pipeline: Pipeline,
    ) -> None:
        self.facts, self.schedule, self.times, self.stage_of = facts, schedule, times, stage_of
        self.block_of = block_of
        self.count = pipeline.stages
        self.rank_of = {stage: rank for rank, actions in enumerate(pipeline.order) for _, stage, _ in actions}

    @cached_property
    def seconds(self) -> Sequence[float] | None:
        """By step: until it is over, from the end of the step before."""
        if self.times is None:
            return None
        log = RunLog()
        walk(self.facts, self.schedule, self.times, log)
        ends = [
            log.ends.get((row, region if kind == StepKind.SECOND_RUN else 0), 0.0) if kind <= 1 else 0.0
            for kind, row, region in self.schedule
        ]
        latest = [0.0, *accumulate(ends, max)]
        return [now - before for before, now in pairwise(latest)]

    @cached_property
    def steps(self) -> list[list[int]]:
        """By stage its steps, those of the forward first."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for step, row in enumerate(self.schedule.rows):
            found[self.stage_of[row]].append(step)
        return found

    @cached_property
    def readers(self) -> tuple[Mapping[int, set[int]], Mapping[int, set[int]]]:
        """By memory that another stage made, the stages that read it; by input, its stages."""
        crossing, inputs = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
        facts, roots, stage_of = self.facts, self.facts.storage_roots, self.stage_of
        for kind, row, _ in self.schedule:
            for source in facts.inputs[row] if kind <= StepKind.SECOND_RUN else ():
                root = roots[source]
                if facts.ops[root] in ("placeholder", "get_attr"):
                    inputs[root].add(stage_of[row])
                elif stage_of[root] != stage_of[row]:
                    crossing[root].add(stage_of[row])
        return crossing, inputs

    @cached_property
    def stages(self) -> list[StageCosts]:
        found = [StageCosts() for _ in range(self.count)]
        starts = [bisect_right(steps, self.backward - 1) for steps in self.steps]
        changes = [[0] * (len(steps) + 2) for steps in self.steps]
        kept, inputs_part, weights_part, returned = ([[0] * (len(steps) + 2) for steps in self.steps] for _ in range(4))
        places, last_reads, waiting = self._places, self._last_reads, self._waiting

        def holds(stage: int, size: int, first: int, last: int) -> None:
            """From one of a stage's steps to another, as it numbers them."""
            if last < first:
                return
            changes[stage][first] += size
            changes[stage][last + 1] -= size
            found[stage].saved += size if first < starts[stage] <= last else 0

        made: Lifetimes = lifetimes(self.facts, self.schedule)
        crossing, inputs = self.readers
        for origin, row, _, size, begun, last in made:
            if origin == Origin.INPUT:
                self._input(row, size, sorted(inputs.get(row, ())), found)
                continue
            stage = self.stage_of[row] if origin != Origin.TANGENT else self.count - 1
            own, start = self.steps[stage], starts[stage]
            if not own:
                continue
            first, end = bisect_right(own, begun) - 1, len(own) - 1
            first = max(first, 0) if origin != Origin.TANGENT else start
            if last >= len(self.schedule) and begun >= self.backward:  # a gradient that the graph returns
                found[stage].gradients += size
                kept[stage][first + 1] += size
                returned[stage][places[stage].get(first, -1) + 1] += size
                last = begun
            others = crossing.get(row, ())
            there = [each for each in others if self.rank_of[each] != self.rank_of[stage]]
            if there and self._learned[row]:
                ahead, back = found[stage].sent
                found[stage].sent = (ahead + size, back) if begun < self.backward else (ahead, back + size)
            freed = max(first, min(end, bisect_right(own, last) - 1)) + 1
            at, read = places[stage].get(first, -1), last_reads[stage].get(row, -1) + 1
            if at >= 0 and (origin == Origin.SECOND_RUN or (begun >= self.backward and self._for_weights[row])):
                weights_part[stage][at] += size
                weights_part[stage][len(own) if row in self._held_by_inputs else max(at + 1, read)] -= size
            elif row in waiting[stage]:
                weights_part[stage][read] -= size
            if origin == Origin.SECOND_RUN or (begun >= self.backward and self._for_inputs[row]):
                inputs_part[stage][first] += size
                inputs_part[stage][len(own) if row in waiting[stage] or others else freed] -= size
            if others and not there and begun < self.backward and self._learned[row]:
                holds(stage, size, first, start - 1)  # then it is in the buffer of the stage beside it
            elif (others or row in self._output) and begun < self.backward:
                holds(stage, size, first, end)  # until its backward, with what autograd has of it
            else:
                holds(stage, size, first, freed - 1)
                if begun < self.backward <= last and freed <= start:  # given up as the stage's backward begins
                    found[stage].saved += size
            if begun < self.backward:
                is_output, behind = row in self._output, row in self._read_behind
                of_loss = stage == self.count - 1 and (is_output or not self.facts.modules[row])
                if of_loss:
                    found[stage].released += size if not behind and (is_output or freed > start) else 0
                elif freed > start and not others and read and row not in self._held:
                    weights_part[stage][read] -= size
            for other in others:
                if begun < self.backward and not self._learned[row]:  # masks and positions: it makes its own
                    holds(other, size, 0, len(self.steps[other]) - 1)
                else:
                    found[other].per_step += size
        for stage, each in enumerate(found):
            alive, gradients = [*accumulate(changes[stage])], [*accumulate(kept[stage])]
            start, end = starts[stage], len(self.steps[stage])
            each.forward_peak = max(alive[:start], default=0)
            each.backward_peak = max(alive[start:end], default=0)
            both = map(int.__add__, alive[start:end], gradients[start:end])
            each.first_backward_peak = max(both, default=0)
            each.between = sum(waiting[stage].values())
            each.inputs_peak = each.saved + max(accumulate(inputs_part[stage]))
            weights, held = [*accumulate(weights_part[stage])], each.saved - each.released
            each.weights_peak = held + max(weights)
            each.first_weights_peak = held + max(map(int.__add__, weights, accumulate(returned[stage])))
        self._time(found)
        return found

    @cached_property
    def backward(self) -> int:
        """The first step of the backward."""
        return next((step for step, region in enumerate(self.schedule.regions) if region), len(self.schedule))

    def _input(self, row: int, size: int, stages: Sequence[int], found: Sequence[StageCosts]) -> None:
        is_state = self.facts.input_kinds[row] in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.NOT_AN_INPUT)
        for stage in stages or (0,):
            if is_state:
                found[stage].resident += size
            else:
                found[stage].per_step += size

    @cached_property
    def _for_inputs(self) -> bytearray:
        """The backward nodes that the gradient of a stage's input needs, one byte each."""
        facts, mask = self.facts, bytearray(len(self.facts))
        for row in range(len(facts) - 1, -1, -1):
            if facts.phases[row] != Phase.BACKWARD:
                continue
            for source in facts.inputs[row]:
                same = self.stage_of[source] == self.stage_of[row]
                if facts.phases[source] == Phase.BACKWARD and (mask[row] or not same):
                    mask[source] = 1
        return mask

    @cached_property
    def _learned(self) -> bytearray:
        """The nodes that depend on a parameter, one byte each: others, as masks, each stage makes itself."""
        facts, mask = self.facts, bytearray(len(self.facts))
        for row, sources in enumerate(facts.inputs):
            is_parameter = facts.input_kinds[row] == InputKind.PARAMETER
            mask[row] = is_parameter or any(mask[source] for source in sources)
        return mask

    @cached_property
    def _output(self) -> frozenset[int]:
        """The memory of what the last stage returns to the loss: what a module makes and no module reads."""
        facts, modules, last = self.facts, self.facts.modules, self.count - 1
        reads = (source for row in facts.forward if not modules[row] for source in facts.inputs[row])
        return frozenset(facts.storage_roots[each] for each in reads if modules[each] and self.stage_of[each] == last)

    @cached_property
    def _for_weights(self) -> bytearray:
        """The backward nodes that no gradient of a stage's input needs, one byte each."""
        pairs = zip(self.facts.phases, self._for_inputs, strict=True)
        return bytearray(phase == Phase.BACKWARD and not needed for phase, needed in pairs)

    @cached_property
    def _read_for_weights(self) -> list[set[int]]:
        """By stage the memory that is read for its weights. A node that makes both gradients, as of a norm, runs in
        both parts and reads it twice."""
        facts, found = self.facts, [set[int]() for _ in range(self.count)]
        for row, is_for_weights in enumerate(self._for_weights):
            if is_for_weights:
                found[self.stage_of[row]].update(facts.storage_roots[each] for each in facts.inputs[facts.owners[row]])
        return found

    @cached_property
    def _waiting(self) -> list[dict[int, int]]:
        """By stage the gradients, and their bytes, that are made for its input and read for its weights. What another
        stage made is in a buffer."""
        return [
            {each: self.facts.bytes[each] for each in read if self._for_inputs[each] and self.stage_of[each] == stage}
            for stage, read in enumerate(self._read_for_weights)
        ]

    @cached_property
    def _behind(self) -> bytearray:
        """The backward nodes that a weight's gradient comes before or beside, one byte each."""
        facts, roots, stage_of, mask = self.facts, self.facts.storage_roots, self.stage_of, bytearray(len(self.facts))
        for row, phase in enumerate(facts.phases):
            for each in facts.inputs[row] if phase == Phase.BACKWARD else ():
                root, stage = roots[each], stage_of[row]
                if facts.phases[root] == Phase.BACKWARD or facts.input_kinds[root] == InputKind.TANGENT:
                    is_read = root in self._read_for_weights[stage]
                    mask[row] |= is_read or (mask[each] and stage_of[each] == stage)
        return mask

    @cached_property
    def _places(self) -> list[dict[int, int]]:
        """By stage the steps that the weights' part runs, with their places in it: it makes the gradients in the order
        in which they are returned, and recomputes a block before the first of its own."""
        kinds, rows, found = self.schedule.kinds, self.schedule.rows, list[dict[int, int]]()
        for steps in self.steps:
            first, keys = dict[int, int](), list[tuple[int, bool, int]]()
            for row in (rows[step] for step in steps if self._for_weights[rows[step]]):
                block, place = self.block_of[row], self._returned[row]
                first[block] = min(first.get(block, place), place)
            for at, (kind, row) in enumerate((kinds[step], rows[step]) for step in steps):
                if kind == StepKind.SECOND_RUN and self.block_of[row] in first:
                    keys.append((first[self.block_of[row]], False, at))
                elif self._for_weights[row]:
                    keys.append((self._returned[row], True, at))
            found.append({at: place for place, (*_, at) in enumerate(sorted(keys))})
        return found

    @cached_property
    def _returned(self) -> Sequence[int]:
        """By node that is for weights the place of its gradient among what the graph returns."""
        facts, end = self.facts, len(self.facts)
        found = [end] * end
        for row in range(end - 1, -1, -1):
            for at, source in enumerate(facts.inputs[row]):
                if self._for_weights[source]:
                    found[source] = min(found[source], at if facts.ops[row] == "output" else found[row])
        return found

    @cached_property
    def _last_reads(self) -> list[dict[int, int]]:
        """By stage and memory the last place of the weights' part that reads it."""
        facts, found = self.facts, [dict[int, int]() for _ in range(self.count)]
        for stage, steps in enumerate(self.steps):
            for at, place in self._places[stage].items():  # in their order
                row = self.schedule.rows[steps[at]]
                found[stage].update((facts.storage_roots[each], place) for each in facts.inputs[facts.owners[row]])
        return found

    @cached_property
    def _held(self) -> frozenset[int]:
        """The saved memory that stays until the weights' part is over: also what a block is called with, which its
        checkpoint holds."""
        of, facts = self.block_of, self.facts
        again = (row for kind, row, _ in self.schedule if kind == StepKind.SECOND_RUN)
        reads = ((row, facts.storage_roots[source]) for row in again for source in facts.inputs[row])
        return self._held_by_inputs | {root for row, root in reads if of[root] != of[row]}

    @cached_property
    def _held_by_inputs(self) -> frozenset[int]:
        """The memory that only the inputs' part reads, behind the gradient of a weight. Autograd's graph is freed from
        its end on: a node that the weights' part does not run stays for as long as one does that comes before it."""
        facts, in_both = self.facts, {self.facts.owners[row] for row, each in enumerate(self._for_weights) if each}
        rows = (row for row, each in enumerate(self._behind) if each and self._for_inputs[row] and row not in in_both)
        return frozenset(facts.storage_roots[each] for row in rows for each in facts.inputs[row])

    @cached_property
    def _read_behind(self) -> frozenset[int]:
        """The memory that a backward node reads which a weight's gradient comes before or beside."""
        rows, facts = (row for row, each in enumerate(self._behind) if each), self.facts
        return frozenset(facts.storage_roots[each] for row in rows for each in facts.inputs[row])

    def _time(self, found: Sequence[StageCosts]) -> None:
        for step, (kind, row, region) in enumerate(self.schedule if self.seconds is not None else ()):
            assert self.seconds is not None
            part = "R" if kind == StepKind.SECOND_RUN else "F" if not region else "I" if self._for_inputs[row] else "W"
            found[self.stage_of[row]].seconds[part] += self.seconds[step]  # type: ignore[assignment]
