"""The blocks of a model, looked up among its modules."""

from __future__ import annotations

from torch import nn

from policylang.graph.reading.modules import normalise
from policylang.language.globs import PathGlob
from policylang.language.syntax import Policy


def blocks_in(model: nn.Module, policy: Policy, root: str) -> dict[nn.Module, str]:
    """Each block below a model and its path, in the order of the model's modules.

    Those that the policy's ``blocks`` names; without it, the numbered children of the ``ModuleList`` with the most
    parameters; lists of one child give way to any list of two. A model that is itself a block has none below it.
    """
    if policy.blocks is None:
        return {} if root else _largest_list(model)
    glob = PathGlob(policy.blocks.glob)
    if root and glob.outermost(root) is not None:
        return {}
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        full = ".".join(part for part in (root, normalise(path)[1]) if part)
        if path and glob.outermost(full) == full:
            found.setdefault(module, full)
    return found


def _largest_list(model: nn.Module) -> dict[nn.Module, str]:
    modules = model.named_modules()
    lists = [(path, module) for path, module in modules if isinstance(module, nn.ModuleList)]
    if not lists:
        return {}
    path, largest = max(lists, key=lambda each: (len(each[1]) > 1, _size(each[1])))
    return {child: normalise(f"{path}.{name}")[1] for name, child in largest.named_children()}


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
