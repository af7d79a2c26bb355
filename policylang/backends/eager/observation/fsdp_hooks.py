"""Keeps what ``fully_shard`` does around the modules inside a block apart from the block's own operators.

Its hooks gather weights before a module runs and let them go afterwards. They do so in a recomputation as well, and in
another way: what the backward has gathered by then, or is about to, they leave out. The weights lie in memory that is
let go and filled again as FSDP sees fit, so nothing in there can be saved, and nothing that fills it may be left out.
What the hooks do to the data that goes through the module (a cast to the dtype of the weights) is the block's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attrs import define
from torch import nn

from policylang.backends.eager.observation.block_mode import only_readers
from policylang.backends.eager.observation.origins import tensors_in
from policylang.torch_compat.distributed import is_of_fsdp, mesh_groups


@define(eq=False)
class _Aside:
    """Stands in for a hook of FSDP's while blocks run that are watched."""

    hook: Any
    runs: int = 0
    """How many blocks that run have put it there."""

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        with only_readers(tensors_in(given)):
            return self.hook(module, *given)


def gathers(module: nn.Module) -> bool:
    """Whether FSDP gathers weights before a module runs."""
    return any(_is_either(hook) for hook in module._forward_pre_hooks.values())


def gathered_over(block: nn.Module) -> dict[str, tuple[int, ...]]:
    """The groups of the meshes over which FSDP gathers weights inside a block, as far as their parts are in place."""
    modules = (module for module in block.modules() if gathers(module))
    meshes = (getattr(weight, "device_mesh", None) for module in modules for weight in module.parameters())
    return {name: ranks for mesh in meshes if mesh is not None for name, ranks in mesh_groups(mesh).items()}


def is_first_fsdp(module: nn.Module) -> bool:
    """Whether a module is what ``FullyShardedDataParallel`` returns."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


@contextmanager
def gathers_aside(block: nn.Module) -> Iterator[None]:
    """Under it, what FSDP does of its own accord around the modules of a block is no operator of it."""
    put: list[tuple[dict[int, Any], int, _Aside]] = []
    if "torch.distributed.fsdp" in sys.modules:
        for module in block.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in [(key, hook) for key, hook in hooks.items() if _is_either(hook)]:
                    aside = hooks[key] = hook if isinstance(hook, _Aside) else _Aside(hook)
                    aside.runs += 1
                    put.append((hooks, key, aside))
    try:
        yield
    finally:
        for hooks, key, aside in put:
            aside.runs -= 1
            if not aside.runs and hooks.get(key) is aside:
                hooks[key] = aside.hook


def _is_either(hook: Any) -> bool:
    return isinstance(hook, _Aside) or is_of_fsdp(hook)
