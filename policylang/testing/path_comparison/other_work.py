"""Matrix work that paths do by other operators: a model may choose a kernel by whether it is compiled.

Such values have no counterpart of their own place, so no two decisions can be compared. What can be compared is what
becomes of the work of their module: how many operations are saved and how many recomputed, on each path.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from policylang.testing.path_comparison.results import PathDecision, PathWork, ValuePlace, WorkDifference


class PathValues(Protocol):
    """Of one path, what is read off its graphs."""

    @property
    def modules(self) -> Collection[str]: ...
    @property
    def sides(self) -> Mapping[ValuePlace, Sequence[PathDecision]]: ...
    @property
    def work(self) -> Mapping[ValuePlace, Sequence[tuple[int, str]]]:
        """By place, of each of its values: its operations, and the operators that no FLOP formula counts."""


def compare_work(paths: Mapping[str, PathValues]) -> tuple[tuple[WorkDifference, ...], int]:
    """The modules in which paths do other work, and in how many they do the same by other operators.

    What has matrix work and stands in a module that another path's graph has as well, without a value of its place, is
    compared with all there that is so.
    """
    alone: dict[str, dict[str, list[PathWork]]] = {}
    for path, values in paths.items():
        for place, amounts in values.work.items():
            others = [each for other, each in paths.items() if other != path and place.module in each.modules]
            if all(place in each.sides for each in others):
                continue
            if any(flops or uncounted for flops, uncounted in amounts):
                found = alone.setdefault(place.module, {}).setdefault(path, [])
                found.extend(_of_place(place, values.sides[place], amounts))
    differences, same = [], 0
    for module, sides in alone.items():
        everywhere = {path: tuple(sides.get(path, ())) for path, each in paths.items() if module in each.modules}
        if _is_same(list(everywhere.values())):
            same += 1
        else:
            differences.append(WorkDifference(module, everywhere))
    return tuple(differences), same


def _of_place(place: ValuePlace, sides: Sequence[PathDecision], amounts: Sequence[tuple[int, str]]) -> list[PathWork]:
    """Values that are decided alike are one entry."""
    found: dict[tuple[str, str], PathWork] = {}
    for side, (flops, uncounted) in zip(sides, amounts, strict=True):
        before = found.get((side.action, uncounted), PathWork(place.operator, side.action, 0, 0, uncounted))
        found[side.action, uncounted] = PathWork(
            place.operator, side.action, before.count + 1, before.flops + flops, uncounted
        )
    return list(found.values())


def _is_same(sides: Sequence[Sequence[PathWork]]) -> bool:
    """Whether all is counted, and every path decides alike about as many operations."""
    if any(each.uncounted for side in sides for each in side):
        return False
    totals = []
    for side in sides:
        total: dict[str, int] = {}
        for each in side:
            total[each.action] = total.get(each.action, 0) + each.flops
        totals.append(total)
    return all(total == totals[0] for total in totals)
