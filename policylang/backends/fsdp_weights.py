"""The weights that ``fully_shard`` gathers around a block, as planning takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import nn

from policylang.graph.phases import normalise
from policylang.planning.decisions.rule_warnings import FsdpParameter, FsdpParameters
from policylang.torch_compat.distributed import ShardedWeight, own_class, sharded_weights


@frozen(eq=False)
class NamedBlock:
    """A block of a model: its module, its path where that is known, and which of the blocks it is."""

    module: nn.Module
    path: str
    number: int = 0


def weights_of_blocks(blocks: Iterable[NamedBlock], names: Sequence[str]) -> FsdpParameters | None:
    """The FSDP parameters in blocks with the paths ``names``; None where ``fully_shard`` gathers none."""
    found = tuple(weight for weight, _ in sharded_in(blocks))
    return FsdpParameters(found, tuple(names)) if found else None


def sharded_in(blocks: Iterable[NamedBlock]) -> Iterator[tuple[FsdpParameter, ShardedWeight]]:
    """The weights inside some blocks, as planning takes them and as ``fully_shard`` knows them."""
    for block in blocks:
        paths = {module: _joined(block.path, path) for path, module in block.module.named_modules()}
        for each in sharded_weights(block.module.modules()):
            yield _told(each, paths[each.module], paths, block.number), each


def weights_among(inputs: Sequence[Any], root: str) -> FsdpParameters | None:
    """The weights that a graph is called with; ``root`` is the path of the block that it was made of. Without one,
    those of the outermost module are left out: whether FSDP reshards them is rarely set."""
    parameters = {id(each) for each in inputs if isinstance(each, torch.nn.Parameter)}
    every = sharded_weights(None) if parameters else ()
    known = (each for each in every if each.gathered is not None and id(each.gathered) in parameters)
    given = [each for each in known if root or not each.outermost]
    found: list[FsdpParameter] = []
    for weight in given:
        inside = (path for path, module in weight.group[0].named_modules() if module is weight.module)
        found.append(_told(weight, _joined(root, next(inside, "")), {weight.group[0]: root}, 0))
    return FsdpParameters(tuple(found), (root or "the graph",)) if found else None


def _told(weight: ShardedWeight, path: str, paths: Mapping[nn.Module, str], number: int) -> FsdpParameter:
    unit = next((paths[each] for each in weight.group if paths.get(each)), own_class(weight.group[0]))
    value: torch.Tensor = getattr(weight.module, weight.name)  # sharded, or gathered at the moment
    size = value.numel() * value.element_size()
    ranks = max(2, len(weight.ranks))
    return FsdpParameter(path, weight.name, unit, weight.reshards, number, tuple(value.shape), size, ranks)


def _joined(root: str, path: str) -> str:
    return ".".join(part for part in (root, normalise(path)[1]) if part)
