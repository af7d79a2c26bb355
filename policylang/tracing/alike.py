"""Which layers of a model are alike, so that a trace of a few of them stands for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from policylang.graph.repeated import LEAST, Repeated

_LONGEST_PERIOD = 8


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
    layer whose code compares its own number, or a model that treats some layer by its number, is not seen here: of
    these, what the first layers show is found by :func:`policylang.graph.repeated.repeated`.
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
