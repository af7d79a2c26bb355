"""A slow maker of schedules, written from the sentences of the documentation, to hold the fast one against.

Sets of rows, fixed points by repetition, lists that are searched from the front: quadratic, and plain.
"""

from __future__ import annotations

from collections.abc import Collection

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, StepKind, is_gradient

Steps = list[tuple[int, int, int]]
RUN, AGAIN = StepKind.FIRST_RUN, StepKind.SECOND_RUN
IN_FLIGHT = 2


def reference_schedule(
    facts: Facts, again: Collection[int], moved: Collection[int], ahead: tuple[int, list[int]] | None = None
) -> Steps:
    """``ahead``: so many blocks, and the block of each row."""
    if facts.kind is GraphKind.FLAT:
        return with_copies(facts, pieces_behind(facts, flat(facts, again), only=AGAIN), moved, ahead)
    return pieces_behind(facts, with_copies(facts, partition(facts, again), moved, ahead), only=None)


def calls(facts: Facts, phase: Phase) -> list[int]:
    return [row for row in range(len(facts)) if facts.ops[row] == "call_function" and facts.phases[row] == phase]


# --- partitions ------------------------------------------------------------------------------------------------------


def partition(facts: Facts, again: Collection[int]) -> Steps:
    forward, backward = halves(facts, again)
    everything = [row for row in range(len(facts)) if facts.ops[row] == "call_function"]
    steps: Steps = [(RUN, row, 0) for row in everything if row in forward]
    later = [row for row in everything if row in backward]
    if any(facts.phases[row] == Phase.FORWARD for row in later):
        later = late(facts, later)
    ran = {row for _, row, _ in steps}
    for row in later:
        second = facts.phases[row] == Phase.FORWARD or row in ran
        steps.append((AGAIN if second else RUN, row, 1))
    return steps


def halves(facts: Facts, again: Collection[int]) -> tuple[set[int], set[int]]:
    """What runs in the forward and in the backward: has an effect, is returned, or is read by what runs there."""
    forward: set[int] = set()
    backward: set[int] = set()
    for row in range(len(facts)):
        flags = facts.flags[row]
        writes = flags & Flag.WRITES and not flags & Flag.REPEATABLE
        if flags & (Flag.RANDOM | Flag.EFFECTFUL) or writes:
            (backward if facts.phases[row] == Phase.BACKWARD else forward).add(row)
        if facts.phases[row] == Phase.OUTPUT:
            for source in facts.inputs[row]:
                gradient = facts.kind is GraphKind.JOINT and is_gradient(facts, source) and source in again
                late_result = facts.phases[source] == Phase.BACKWARD or gradient
                if late_result:
                    backward.add(source)
                if not late_result or flags_of(facts, source) & Flag.FORWARD_OUTPUT:
                    forward.add(source)
    for _ in range(len(facts)):
        for row in sorted(forward):
            forward |= set(facts.inputs[row])
        for row in sorted(backward):
            for source in facts.inputs[row]:
                here = facts.phases[source] == Phase.BACKWARD or source in again
                (backward if here else forward).add(source)
    return forward, backward


def flags_of(facts: Facts, row: int) -> int:
    return facts.flags[row]


def late(facts: Facts, rows: list[int]) -> list[int]:
    """Nothing that can wait runs before what needs it."""
    hasty: set[int] = {row for row in range(len(facts)) if facts.input_kinds[row] == InputKind.TANGENT}
    effect = Flag.RANDOM | Flag.EFFECTFUL | Flag.WRITES
    for row in rows:
        if hasty & set(facts.inputs[row]):
            hasty.add(row)
    acts = {row for row in rows if facts.phases[row] == Phase.BACKWARD and flags_of(facts, row) & effect}
    order: list[int] = []
    output = [row for row in range(len(facts)) if facts.phases[row] == Phase.OUTPUT]
    for reader in [*(row for row in rows if row in hasty | acts), *output]:
        wanted: set[int] = set()
        reached = {reader}
        while reached:
            sources = {source for row in reached for source in facts.inputs[row]}
            if reader in output and reached == {reader}:
                sources = {s for s in sources if facts.phases[s] == Phase.BACKWARD or is_gradient(facts, s)}
            reached = (sources & set(rows)) - hasty - acts - set(order) - wanted
            wanted |= reached
        order += sorted(wanted)
        if reader not in output:
            order.append(reader)
    return order


def pieces_behind(facts: Facts, steps: Steps, only: StepKind | None) -> Steps:
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return steps
    runs = (RUN, AGAIN) if only is None else (only,)
    found = list(steps)
    for step in reversed(steps):
        kind, row, region = step
        if kind not in runs or facts.targets[row] != "builtin.getitem" or not facts.inputs[row]:
            continue
        source = [at for at, other in enumerate(found) if other[1:] == (facts.inputs[row][0], region)]
        source = [at for at in source if found[at][0] in runs]
        if source:
            moved_with_it = family(facts, found, step, runs)
            for each in moved_with_it:
                found.remove(each)
            at = next(
                at for at, other in enumerate(found) if other[1:] == (facts.inputs[row][0], region) and other[0] in runs
            )
            found[at + 1 : at + 1] = moved_with_it
    return found


def family(facts: Facts, steps: Steps, step: tuple[int, int, int], runs: Collection[int]) -> Steps:
    """A piece, and the pieces of it that stand behind it already."""
    found = [step]
    for other in steps:
        read = facts.inputs[other[1]][:1]
        piece = facts.targets[other[1]] == "builtin.getitem" and other[0] in runs and other[2] == step[2]
        if piece and read and read[0] in [row for _, row, _ in found]:
            found.append(other)
    return found


# --- flat graphs -----------------------------------------------------------------------------------------------------


def unit(facts: Facts, row: int) -> list[int]:
    """All that runs again with a row."""
    if not flags_of(facts, row) & Flag.REPEATABLE:
        return [row]
    owner = facts.owners[row]
    return [r for r in range(len(facts)) if facts.owners[r] == owner and flags_of(facts, r) & Flag.REPEATABLE]


def keeps_writing(facts: Facts, row: int) -> bool:
    flags = flags_of(facts, row)
    if not flags & Flag.WRITES:
        return False
    if not flags & Flag.REPEATABLE:
        return True
    return not flags & Flag.VIEW and (facts.owners[row] == row or bool(flags & Flag.MULTI_OUTPUT))


def kept_rows(facts: Facts, again: Collection[int]) -> set[int]:
    """The forward rows that run: not recomputed, with an effect, or read by such a row; of a unit all that comes before
    the row that runs, or reads of it."""
    forward = calls(facts, Phase.FORWARD)
    kept = {row for row in forward if row not in again}
    kept |= {row for row in forward if flags_of(facts, row) & (Flag.RANDOM | Flag.EFFECTFUL)}
    kept |= {row for row in forward if keeps_writing(facts, row)}
    kept |= {row for row in range(len(facts)) if facts.phases[row] == Phase.OUTPUT}
    for _ in range(len(facts)):
        for row in sorted(kept):
            if facts.phases[row] != Phase.BACKWARD:
                kept |= set(facts.inputs[row])
                units = [unit(facts, each) for each in (row, *facts.inputs[row])]
                kept |= {each for members in units for each in members if each < row}
    return kept


def flat(facts: Facts, again: Collection[int]) -> Steps:
    kept, roots = kept_rows(facts, again), facts.storage_roots
    steps: Steps = []
    region, inside, done = 0, False, set[int]()
    for row in range(len(facts)):
        if facts.ops[row] != "call_function":
            continue
        if facts.phases[row] != Phase.BACKWARD:
            if row in kept:
                steps.append((RUN, row, 0))
                inside = False
            continue
        if not inside:
            region, inside, done = region + 1, True, set()
        following = [r for r in range(row + 1, len(facts)) if facts.phases[r] == Phase.FORWARD and r in kept]
        end = min([r for r in following if facts.ops[r] == "call_function"], default=len(facts))
        last = max(r for r in range(row, end) if facts.phases[r] == Phase.BACKWARD)
        found: set[int] = set()
        pending = [source for source in facts.inputs[row] if source in again]
        while pending:
            source = pending.pop()
            readers = [
                r
                for r in range(last + 1, len(facts))
                if facts.phases[r] != Phase.BACKWARD
                and (r in kept or facts.ops[r] == "output")
                and roots[source] in [roots[read] for read in facts.inputs[r]]
            ]
            if source in done or (source in kept and readers):
                continue
            found |= set(unit(facts, source))
            done |= set(unit(facts, source))
            pending += [read for each in unit(facts, source) for read in facts.inputs[each] if read in again]
        steps += [(AGAIN, each, region) for each in sorted(found)]
        steps.append((RUN, row, region))
    return steps


# --- copies to the host and back -------------------------------------------------------------------------------------


def blocks_before(steps: Steps, region: int, first: int, ahead: tuple[int, list[int]]) -> int | None:
    """Where the block begins that runs so many before the one of a step; None for a step outside the blocks."""
    count, block_of = ahead
    if first == len(steps) or block_of[steps[first][1]] < 0:
        return None
    begun: list[int] = []
    for _, row, where in steps:
        if where == region and block_of[row] >= 0 and block_of[row] not in begun:
            begun.append(block_of[row])
    wanted = begun[max(begun.index(block_of[steps[first][1]]) - count, 0)]
    return next(at for at, (_, row, where) in enumerate(steps) if where == region and block_of[row] == wanted)


def with_copies(
    facts: Facts, steps: Steps, moved: Collection[int], ahead: tuple[int, list[int]] | None = None
) -> Steps:
    roots = facts.storage_roots
    reads: dict[int, list[tuple[int, int]]] = {}  # region → value and step that reads it first, in order
    for at, (_, row, region) in enumerate(steps):
        for source in facts.inputs[row] if region else ():
            if source in moved and source not in [value for value, _ in reads.setdefault(region, [])]:
                reads[region].append((source, at))
    if facts.kind is GraphKind.JOINT:
        for row in range(len(facts)):
            for source in facts.inputs[row] if facts.phases[row] == Phase.OUTPUT else ():
                known = [value for value, _ in reads.setdefault(1, [])]
                if source in moved and is_gradient(facts, source) and source not in known:
                    reads[1].append((source, len(steps)))
    wanted = {value for found in reads.values() for value, _ in found}
    leaving = []
    for value in wanted:
        touches = [
            (at, (row, *facts.inputs[row]).index(each))
            for at, (_, row, region) in enumerate(steps)
            if not region
            for each in (row, *facts.inputs[row])
            if roots[each] == roots[value] and each in calls(facts, Phase.FORWARD)
        ]
        if touches:
            leaving.append((*max(touches), value))
    leaving.sort()
    backward = next((at for at, step in enumerate(steps) if step[2]), len(steps))
    found: Steps = []
    for at in range(len(steps) + 1):
        if at == backward:
            found += [(StepKind.WAIT_TO_HOST, value, 0) for _, _, value in leaving[-IN_FLIGHT:]]
        for region, values in reads.items():
            begin = next((place for place, step in enumerate(steps) if step[2] == region), len(steps))
            for number, (value, first) in enumerate(values):
                start = begin if number < IN_FLIGHT else values[number - IN_FLIGHT][1]
                if ahead is not None and (early := blocks_before(steps, region, first, ahead)) is not None:
                    start = early
                if at == start:
                    found.append((StepKind.COPY_FROM_HOST, value, region))
                if at == first:
                    found.append((StepKind.WAIT_FROM_HOST, value, region))
        if at < len(steps):
            found.append(steps[at])
        for number, (last, _, value) in enumerate(leaving):
            if last == at:
                if number >= IN_FLIGHT:
                    found.append((StepKind.WAIT_TO_HOST, leaving[number - IN_FLIGHT][2], 0))
                found.append((StepKind.COPY_TO_HOST, value, 0))
    return found
