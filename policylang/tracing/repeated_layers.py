"""The facts of a deep model from traces of a few of its layers, where a layer more is proven to add the same rows.

Equal layers give equal rows, up to names, module paths and which layer they read from. So the rows of one layer in the
middle are repeated. The proof has three parts. The layers are alike as objects. What is made for one layer more equals
a trace of one layer more in every column. And the whole model's forward, run on ``meta``, calls what follows from the
forwards of few layers: a model that treats one of its layers by its number is found by that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from types import FunctionType, MethodType
from typing import Any

from attrs import evolve, frozen
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from policylang.graph.facts import COLUMNS, OF_GRAPH, Derivation, Facts, Phase, Ref, rewritten
from policylang.graph.snapshot import joined, parted
from policylang.torch_compat import tracing
from policylang.torch_compat.eager import DispatchMode

LEAST = 3
"""The units that have to be there: one in the middle, whose neighbours are of its kind."""
_TRACED = (LEAST, 5)
_LONGEST_PERIOD = 8
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


Calls = Counter[tuple[str, str]]
"""How often a forward calls each operator with arguments of the same shapes, dtypes and values."""
Traced = Callable[[Mapping[str, int]], tuple[Facts, Calls]]
"""Traces a step with so many units of each list, by path, and counts the calls of its forward."""


@frozen(eq=False)
class Repetition:
    """A step with few units of each list, from which that of the whole model is proven to follow."""

    few: Facts
    lists: Mapping[Repeated, int]
    """For each list, as it is traced, the units of the whole model."""

    def whole(self) -> Facts:
        found = with_all_units(self.few, self.lists)
        assert isinstance(found, Facts), found
        return found


def repeated(traced: Traced, lists: Mapping[Repeated, int], whole: Calls) -> Repetition | Unlike:
    """A step with so many units in each list, proven from traces with few: three, or five where the first or the last
    two differ, as sums over all layers do; and one list after the other with one more.

    ``whole``: the calls of the whole model's forward.
    """
    found: Repetition | Unlike = Unlike("no layers repeat")
    for units in _TRACED:
        found = _repeated(traced, {evolve(run, units=units): number for run, number in lists.items()}, whole)
        if isinstance(found, Repetition) or min(lists.values()) <= _TRACED[1] + 1:
            break
    return found


def _repeated(traced: Traced, lists: Mapping[Repeated, int], whole: Calls) -> Repetition | Unlike:
    units = {each.path: each.units for each in lists}
    few, calls = traced(units)
    expected = Counter(calls)
    for each, number in lists.items():
        made = with_units(few, each, each.units + 1)
        if isinstance(made, Unlike):
            return made
        facts, more = traced({**units, each.path: each.units + 1})
        if (unlike := difference(made, facts)) is not None:
            return unlike
        for call in calls | more:
            expected[call] += (number - each.units) * (more[call] - calls[call])
    for call in expected | whole:
        if expected[call] != whole[call]:
            return Unlike(f"the model calls `{call[0]}` {whole[call]} times, and not {expected[call]}, with {call[1]}")
    return Repetition(few, lists)


def with_all_units(facts: Facts, lists: Mapping[Repeated, int]) -> Facts | Unlike:
    """:func:`with_units` of each list in turn."""
    for run, units in lists.items():
        made = with_units(facts, run, units)
        if isinstance(made, Unlike):
            return made
        facts = made
    return facts


class _Counted(DispatchMode):
    """Counts what it sees called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Calls = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_map_only(Tensor, lambda each: (tuple(each.shape), each.dtype), (args, kwargs or {}))
        self.calls[str(func), repr(given)] += 1
        return func(*args, **kwargs or {})


def calls_of(forward: Callable[[], Any]) -> Calls:
    """The calls of a forward on ``meta``, where no tensor has a value to ask for."""
    counted = _Counted()
    with tracing.compiling(), counted:
        forward()
    return counted.calls


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


# --- which layers are alike -----------------------------------------------------------------------------------------


def outer_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """The model's lists of layers by path, those inside a layer left out."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not any(path.startswith(f"{up}.") for up in found):
            found[path] = module
    return found


def alike(model: nn.Module) -> dict[Repeated, int]:
    """The longest stretch of each list of layers that repeats, as it is traced, and how many units it has.

    Layers are alike if their modules, the shapes of their parameters and buffers and all attributes are equal, but for
    a number that is the layer's own. A layer that shares a parameter with the rest of the model is like no other. A
    layer whose code compares its own number, or a model that treats some layer by its number, is found by
    :func:`repeated`.
    """
    found: dict[Repeated, int] = {}
    for path, layers in outer_lists(model).items():
        kinds = _kinds(model, path, list(layers))
        best = Repeated(path, 0, 1, LEAST), LEAST + 1  # no fewer layers would be traced
        for period in range(1, min(len(kinds) // LEAST, _LONGEST_PERIOD) + 1):
            first = 0
            for at in range(len(kinds) + 1 - period):
                if at == len(kinds) - period or kinds[at] != kinds[at + period]:
                    units = (at + period - first) // period
                    if (units - LEAST - 1) * period > (best[1] - LEAST - 1) * best[0].period:
                        best = Repeated(path, first, period, LEAST), units
                    first = at + 1
        if best[1] > LEAST + 1:
            found[best[0]] = best[1]
    return found


def shortened(model: nn.Module, lists: Mapping[Repeated, int], units: Mapping[str, int]) -> None:
    """Leave so many units of each list in a model that has them all, in place, before it is sharded."""
    for run, whole in lists.items():
        layers = list(model.get_submodule(run.path).children())
        end = run.first + run.period * whole
        kept = [*layers[: run.first + run.period * units[run.path]], *layers[end:]]
        model.set_submodule(run.path, nn.ModuleList(kept))


def _kinds(model: nn.Module, path: str, layers: Sequence[nn.Module]) -> list[int]:
    """For each layer the number of the first that it is like."""
    owners: dict[int, set[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        inside = name.startswith(f"{path}.")
        owners.setdefault(id(tensor), set()).add(name[len(path) + 1 :].partition(".")[0] if inside else "")
    shared = {number for each in owners.values() if len(each) > 1 for number in each}
    kinds: list[int] = []
    for number, layer in enumerate(layers):
        like = (
            other
            for other in dict.fromkeys(kinds)
            if not {str(number), str(other)} & shared and _same(layers[other], layer, (other, number), set())
        )
        kinds.append(next(like, number))
    return kinds


def _same(one: Any, other: Any, numbers: tuple[int, int], met: set[tuple[int, int]]) -> bool:
    """Two values are equal in all that a trace could see. ``numbers``: of the layers that they are from."""
    if one is other or (id(one), id(other)) in met:
        return True
    if type(one) is not type(other):
        return False
    met.add((id(one), id(other)))

    def all_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(some) == len(others) and all(_same(*each, numbers, met) for each in zip(some, others, strict=True))

    if isinstance(one, Tensor):
        facts = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in (one, other)]
        return facts[0] == facts[1]
    if type(one) is int:
        return one == other or (one, other) == numbers
    if isinstance(one, tuple | list):
        return all_same(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all_same([*one.values()], [*other.values()])
    if isinstance(one, FunctionType):
        cells = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (one, other)]
        return one.__code__ is other.__code__ and all_same(cells[0], cells[1])
    if isinstance(one, MethodType):
        return all_same([one.__func__, one.__self__], [other.__func__, other.__self__])
    if isinstance(one, partial):
        return all_same([one.func, one.args, one.keywords], [other.func, other.args, other.keywords])
    if hasattr(one, "__dict__"):
        return _same(vars(one), vars(other), numbers, met)
    return bool(one == other)
