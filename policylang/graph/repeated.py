"""The facts of a deep model from those of a few of its layers, where a layer more is proven to add the same rows.

Equal layers give equal rows, up to names, module paths and which layer they read from. So the rows of one layer in the
middle are repeated. The proof is by comparison: what is made so for one layer more has to be what a trace of one layer
more holds, in every column. That each further layer adds the same then follows from the layers being alike, which is
for the caller to know (:mod:`policylang.tracing.alike`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import groupby
from typing import Any

from attrs import evolve, frozen

from policylang.graph.facts import COLUMNS, OF_GRAPH, Derivation, Facts, Phase, Ref, rewritten
from policylang.graph.snapshot import joined, parted

LEAST = 3
"""The units that have to be there: one in the middle, whose neighbours are of its kind."""
_TRACED = (LEAST, 5)
_OUTSIDE = -1
_CONSTANT, _CONSTANT_APART = re.compile(r"^(_tensor_constant)(\d+)$"), re.compile(r"^(_tensor_constant)_(\d+)$")
"""FX numbers constants of a graph without an underscore."""


@frozen
class Repeated:
    """A stretch of equal layers in a list, traced with few of them."""

    path: str
    """The path of the list: ``model.layers``."""
    first: int
    """The number of its first layer."""
    period: int
    """The layers of a unit: 2 where layers of two kinds take turns."""
    units: int
    """The number of units in the trace."""


@frozen
class Unlike:
    """Why the facts of more layers do not follow from those of few."""

    reason: str
    """A phrase that names a node."""


def repeated(traced: Callable[[Mapping[str, int]], Facts], lists: Mapping[Repeated, int]) -> Facts | Unlike:
    """The facts of a step with so many units in each list, proven from traces with few: three, or five where the first
    or the last two differ, as sums over all layers do; and one list after the other with one more. ``traced``: by path
    of each list, the units to trace with."""
    found: Facts | Unlike = Unlike("no layers repeat")
    for units in _TRACED:
        runs = {evolve(run, units=units): whole for run, whole in lists.items()}
        found = _repeated(traced, runs)
        if isinstance(found, Facts) or min(lists.values()) <= _TRACED[1] + 1:
            break
    return found


def _repeated(traced: Callable[[Mapping[str, int]], Facts], lists: Mapping[Repeated, int]) -> Facts | Unlike:
    few = {each.path: each.units for each in lists}
    found: Facts | Unlike = traced(few)
    for each in lists:
        assert isinstance(found, Facts)
        made = with_units(found, each, each.units + 1)
        if isinstance(made, Unlike):
            return made
        if (unlike := difference(made, traced({**few, each.path: each.units + 1}))) is not None:
            return unlike
    for each, units in lists.items():
        if isinstance(found, Facts):
            found = with_units(found, each, units)
    return found


def with_units(facts: Facts, run: Repeated, units: int) -> Facts | Unlike:
    """The facts of a step with more units, if each adds what the one in the middle did. O(nodes + edges) of both.

    A node outside the layers that reads the one in the middle reads all that take its place: the output does, for the
    gradients. A node of a layer reads the layer that is as far from its own.
    """
    extra, middle = units - run.units, run.units // 2
    keys = _keys(facts, run)
    unit_of = [_OUTSIDE if key is None else key[0] for key in keys]
    order = list(_order(facts, unit_of, middle, extra))
    place: dict[Hashable, int] = {}
    for at, (row, unit) in enumerate(order):
        key = keys[row]
        place[row if key is None else (unit, *key[1:])] = at

    def moved(value: Any, row: int, unit: int) -> Any:
        if type(value) is Ref:
            return moved((value,), row, unit)[0]
        if type(value) is not tuple:
            return value
        found: list[Any] = []
        for unit_read, group in groupby(value, key=lambda part: unit_of[part.row] if type(part) is Ref else None):
            parts = list(group)
            if unit_read is None:
                found.extend(moved(part, row, unit) for part in parts)
                continue
            if unit_read == _OUTSIDE:
                found.extend(Ref(place[part.row]) for part in parts)
                continue
            if unit >= 0:
                among = [unit + unit_read - unit_of[row]]
            elif unit_read == middle:
                among = list(range(middle, middle + extra + 1))
            else:
                among = [unit_read + (extra if unit_read > middle else 0)]
            for each in among:
                found.extend(Ref(place[each, *(keys[part.row] or ())[1:]]) for part in parts)
        return tuple(found)

    form = re.compile(rf"{re.escape(run.path)}\.(\d+)(?=\.|$)")
    behind = run.first + run.period * run.units  # the first layer behind the stretch

    def path(text: str, row: int, unit: int) -> str:
        if not (matched := form.match(text)):
            return text
        number = int(matched[1])
        by = unit - unit_of[row] if unit >= 0 else extra if number >= behind else 0
        return f"{run.path}.{number + by * run.period}{text[matched.end() :]}"

    bases, steps = parted([_CONSTANT.sub(r"\1_\2", name) for name in facts.names])
    under = run.path.replace(".", "_")

    def base(row: int, unit: int) -> str:
        named = facts.input_names[row]
        old = named.replace(".", "_")
        return bases[row].replace(old, path(named, row, unit).replace(".", "_")) if under in old else bases[row]

    try:
        names = joined([base(row, unit) for row, unit in order], [steps[row] for row, _ in order])
        inputs = [tuple(each.row for each in moved(tuple(map(Ref, facts.inputs[row])), row, at)) for row, at in order]
        given: dict[str, Any] = {
            "names": [_CONSTANT_APART.sub(r"\1\2", name) for name in names],
            "inputs": inputs,
            "owners": [moved(Ref(facts.owners[row]), row, unit).row for row, unit in order],
            "arguments": [moved(facts.arguments[row], row, unit) for row, unit in order],
        }
    except KeyError as error:
        *_, target, _ = error.args[0]
        return Unlike(f"a layer of `{run.path}` lacks a `{target}` that another has")
    for name in ("modules", "input_names"):
        column = getattr(facts, name)
        given[name] = [path(column[row], row, unit) for row, unit in order]
    for at, (row, _) in enumerate(order):
        if facts.ops[row] == "get_attr" and facts.input_names[row] == facts.names[row]:
            given["input_names"][at] = given["names"][at]
    return rewritten(facts, [(row, Derivation.SAME) for row, _ in order], **given)


def _keys(facts: Facts, run: Repeated) -> list[tuple[Any, ...] | None]:
    """For each node in the stretch its unit, and what it has in common with its like in other units; None outside. What
    autograd adds up has no module, and belongs with the node before it."""
    form = re.compile(rf"{re.escape(run.path)}\.(\d+)(\..*)?")
    found: list[tuple[Any, ...] | None] = []
    met: Counter[tuple[Any, ...]] = Counter()
    last: tuple[int, int, str] | None = None
    before = Phase.INPUT
    for row, phase in enumerate(_sides(facts)):
        text = facts.modules[row] or facts.input_names[row]
        if text:
            matched = form.fullmatch(text)
            unit, within = divmod(int(matched[1]) - run.first, run.period) if matched else (_OUTSIDE, 0)
            last = (unit, within, matched[2] or "") if matched and 0 <= unit < run.units else None
        elif phase in (Phase.INPUT, Phase.OUTPUT) or phase != before:
            last = None
        before = phase
        if last is None:
            found.append(None)
            continue
        key = (*last, "" if text else "?", phase, facts.ops[row], facts.targets[row])
        found.append((*key, met[key]))
        met[key] += 1
    return found


def _sides(facts: Facts) -> list[Phase]:
    """The part of the graph that each node is in: a constant is an input where it is used."""
    found: list[Phase] = []
    for phase, op in zip(facts.phases, facts.ops, strict=True):
        is_constant = op == "get_attr" and found
        found.append(max(found[-1], Phase.FORWARD) if is_constant else Phase(phase))
    return found


def _order(facts: Facts, unit_of: list[int], middle: int, extra: int) -> Iterator[tuple[int, int]]:
    """The nodes of the larger graph: the node that each is like, and its unit there. The copies of the middle are in
    the direction in which the layers go: the backward begins with the last."""
    sides = _sides(facts)
    grouped = groupby(range(len(facts)), lambda row: (unit_of[row], sides[row]))
    stretches = [(unit, list(rows)) for (unit, _), rows in grouped]
    for at, (unit, rows) in enumerate(stretches):
        copies = range(1)
        if unit == middle:
            following = (each for each, _ in stretches[at + 1 :] if each not in (_OUTSIDE, middle))
            rises = next(following, 0) > middle
            copies = range(extra + 1) if rises else range(extra, -1, -1)
        for copy in copies:
            for row in rows:
                yield row, unit + copy + (extra if unit > middle else 0)


def difference(made: Facts, traced: Facts) -> Unlike | None:
    """The first fact of a trace that is not as it was made, in words."""
    for name in COLUMNS:
        one, other = list(getattr(made, name)), list(getattr(traced, name))
        if one != other:
            unequal = (at for at, (mine, own) in enumerate(zip(one, other, strict=False)) if mine != own)
            row = next(unequal, len(one) - 1)
            node = f"`{traced.names[min(row, len(traced) - 1)]}`"
            if len(made) != len(traced):
                return Unlike(f"a layer more adds other nodes: they differ at {node}")
            return Unlike(f"of a layer more, {node} has {other[row]!r} in `{name}`, and not {one[row]!r}")
    other_graph = (name for name in OF_GRAPH if getattr(made, name) != getattr(traced, name))
    return next((Unlike(f"with a layer more, the graph has another `{name}`") for name in other_graph), None)
