"""Matches the values of several paths: which are decided alike, which are not, and what each path keeps.

Nodes have other names on every path, and some have other neighbours: a compiler merges equal computations, takes a
dropout as one operator where a trace has four, and knows nothing of the loss. A value is known by its place instead:
its module, its operator, its shape, and which of these it is, in graph order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, evolve, field

from policylang.audit.summary.report import Report
from policylang.graph.facts import Facts, storage_roots
from policylang.testing.path_comparison.other_work import compare_work
from policylang.testing.path_comparison.results import (
    Beside,
    PathDecision,
    PathDifference,
    PathRun,
    ValuePlace,
    ValuesAccount,
)

Key = tuple[ValuePlace, int]


@define(eq=False)
class _Values:
    """What one path does, by place. Values of one operator with several results are one value."""

    sides: dict[ValuePlace, list[PathDecision]] = field(factory=dict)
    kept: dict[Key, int] = field(factory=dict)
    """The memory that is kept, by the value that allocated it, in bytes."""
    deciding: dict[Key, Key] = field(factory=dict)
    """That memory to the value whose decision keeps it, where that is another: a view of it."""
    again: dict[Key, int] = field(factory=dict)
    """What is recomputed, in FLOPs."""
    calls: dict[Key, int] = field(factory=dict)
    """Of that, the calls that do matrix work, whether or not a FLOP formula counts it."""
    work: dict[ValuePlace, list[tuple[int, str]]] = field(factory=dict)
    """By place, of each of its values: its operations, and the operators that no FLOP formula counts."""
    modules: set[str] = field(factory=set)
    """For look-ups alone."""

    def side(self, key: Key) -> PathDecision | None:
        place, number = key
        found = self.sides.get(place, ())
        return found[number] if 0 <= number < len(found) else None


def compare(paths: Mapping[str, PathRun]) -> ValuesAccount:
    """Of the paths that carried the policy out, in their order."""
    values = {path: _read(ran.graphs) for path, ran in paths.items()}
    places = dict.fromkeys(place for each in values.values() for place in each.sides)
    tally = _Tally()
    if len(values) > 1:
        for place in places:
            tally.add(place, {path: each.sides[place] for path, each in values.items() if place in each.sides})
    other_work, same_work = compare_work(values) if len(values) > 1 else ((), 0)
    return evolve(_account(tally, values), other_work=other_work, same_work=same_work)


@define(eq=False)
class _Tally:
    alike: int = 0
    undecided: int = 0
    alone: dict[str, Counter[str]] = field(factory=dict)
    differences: list[PathDifference] = field(factory=list)
    differing: set[Key] = field(factory=set)
    """For look-ups alone: its order reaches nothing."""

    def add(self, place: ValuePlace, found: Mapping[str, Sequence[PathDecision]]) -> None:
        """The values of one place, by path."""
        lengths = sorted(map(len, found.values()))
        shared = lengths[-2] if len(lengths) > 1 else 0
        for path, sides in found.items():
            if len(sides) > shared:
                counts = self.alone.setdefault(path, Counter())
                counts[place.operator] += len(sides) - shared
        if shared and lengths[0] != lengths[-1] and not _one_action(found):
            self._differ(place, None, {path: _folded(sides) for path, sides in found.items()}, range(lengths[-1]))
            return
        for number in range(shared):
            self._one(place, number, {path: sides[number] for path, sides in found.items() if number < len(sides)})

    def _one(self, place: ValuePlace, number: int, sides: Mapping[str, PathDecision]) -> None:
        if len({side.action for side in sides.values()}) == 1:
            self.alike += 1
        elif all(side.rule is None for side in sides.values()):
            self.undecided += 1
        else:
            self._differ(place, number + 1, {path: (side,) for path, side in sides.items()}, (number,))

    def _differ(
        self, place: ValuePlace, number: int | None, sides: dict[str, tuple[PathDecision, ...]], numbers: Iterable[int]
    ) -> None:
        self.differences.append(PathDifference(place, number, sides))
        self.differing.update((place, each) for each in numbers)


def _one_action(found: Mapping[str, Sequence[PathDecision]]) -> bool:
    """Whether it is all the same which of the values of one path is which of another: rules decide all of them alike,
    or none speaks of any."""
    every = [side for sides in found.values() for side in sides]
    return len({side.action for side in every}) == 1 or all(side.rule is None for side in every)


def _folded(sides: Iterable[PathDecision]) -> tuple[PathDecision, ...]:
    counts = Counter(sides)
    return tuple(PathDecision(side.action, side.rule, side.reason, count) for side, count in counts.items())


# --- reading -------------------------------------------------------------------------------------------------------


def _read(graphs: Iterable[tuple[Facts, Report]]) -> _Values:
    values = _Values()
    for facts, report in graphs:
        _read_graph(values, facts, report)
    return values


def _read_graph(values: _Values, facts: Facts, report: Report) -> None:
    keys: dict[int, Key] = {}
    for row in facts.forward:
        decision = report.decisions.get(facts.names[row])
        if facts.owners[row] != row or decision is None:
            continue
        place = ValuePlace(facts.modules[row], facts.targets[row], facts.shapes[row])
        sides = values.sides.setdefault(place, [])
        keys[row] = place, len(sides)
        sides.append(PathDecision(decision.action, decision.rule, decision.reason))
        missing = facts.uncounted[row] if facts.uncounted else ""
        values.work.setdefault(place, []).append((facts.flops[row], missing))
        values.modules.add(facts.modules[row])
    roots = storage_roots(facts)
    taken: set[int] = set()
    for name in report.saved.names if report.saved is not None else ():
        row = facts.index.get(name, -1)
        root = roots[row] if row >= 0 else -1
        if root in taken or root < 0 or facts.ops[root] != "call_function":
            continue
        taken.add(root)
        # PyTorch's partitioner also keeps what only the backward computes: no rule ranges over that, no path shares it
        own = ValuePlace(facts.modules[root], facts.targets[root], facts.shapes[root]), -1 - root
        memory = keys.get(facts.owners[root], own)
        values.kept[memory] = values.kept.get(memory, 0) + facts.bytes[root]
        values.deciding.setdefault(memory, keys.get(facts.owners[row], memory))
    for name in report.recomputed.names if report.recomputed is not None else ():
        row = facts.index.get(name, -1)
        key = keys.get(facts.owners[row]) if row >= 0 else None
        if key is not None:
            values.again[key] = values.again.get(key, 0) + facts.flops[row]
            if facts.flops[row] or (facts.uncounted and facts.uncounted[row]):
                values.calls[key] = values.calls.get(key, 0) + 1


# --- totals --------------------------------------------------------------------------------------------------------


def _account(tally: _Tally, values: Mapping[str, _Values]) -> ValuesAccount:
    every = list(values.values())
    kept, again = _common([each.kept for each in every]), _common([each.again for each in every])
    calls = _common([each.calls for each in every])
    return ValuesAccount(
        alike=tally.alike,
        undecided=tally.undecided,
        alone={path: dict(counts) for path, counts in tally.alone.items()},
        differences=tuple(tally.differences),
        common_bytes=sum(kept.values()),
        saved={path: _beside(each, each.kept, kept, tally, every) for path, each in values.items()},
        common_flops=sum(again.values()),
        recomputed={path: _beside(each, each.again, again, tally, every) for path, each in values.items()},
        common_calls=sum(calls.values()),
        recomputed_calls={path: _beside(each, each.calls, calls, tally, every) for path, each in values.items()},
    )


def _common(amounts: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    if not amounts:
        return {}
    return {key: found for key, found in amounts[0].items() if all(each.get(key) == found for each in amounts)}


def _beside(
    own: _Values, amounts: Mapping[Key, int], common: Mapping[Key, int], tally: _Tally, every: Sequence[_Values]
) -> Beside:
    totals = dict.fromkeys(("undecided", "graph", "read", "decided"), 0)
    for key, amount in amounts.items():
        if key not in common:
            totals[_why(own, key, tally, every)] += amount
    return Beside(**totals)


def _why(own: _Values, key: Key, tally: _Tally, every: Sequence[_Values]) -> str:
    deciding = own.deciding.get(key, key)
    side = own.side(deciding)
    if deciding in tally.differing:
        return "decided"
    if side is None or side.rule is None:
        return "undecided"
    missing = any(each.side(one) is None for each in every for one in (key, deciding))
    return "graph" if missing else "read"
