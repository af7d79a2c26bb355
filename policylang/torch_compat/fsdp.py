"""The private names of ``fully_shard``: what it gathers for the modules of a model, and when it lets go of it.

Torch names neither its state of a module nor its groups of parameters in public, and says of neither what it has been
told of ``reshard_after_forward``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch import nn


@frozen(eq=False)
class ShardedWeight:
    """A parameter that ``fully_shard`` gathers before the modules of one of its groups run."""

    module: nn.Module
    """Whose parameter it is."""
    name: str
    """In that module."""
    reshards: bool
    """Whether the gathered weight is let go after the forward, and gathered again in the backward."""
    gathered: torch.Tensor | None
    """What modules compute with; None before the first gather."""
    group: tuple[nn.Module, ...]
    """What ``fully_shard`` was called with."""
    outermost: bool
    """Whether no other call of it lies around that one. Unless told, it keeps the weights of this one gathered."""
    together: int = 0
    """The same number for all that is gathered at once."""
    ranks: tuple[int, ...] = ()
    """Over which it is gathered; empty where it is not."""
    over: str = ""
    """The name of their process group."""


def sharded_weights(modules: Iterable[nn.Module] | None) -> Iterator[ShardedWeight]:
    """The parameters of some modules that ``fully_shard`` gathers, in the order of the modules and of their names; of
    None, those of every model in the process.

    Also where it was called with a module around these.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    known = _by_owner()
    if modules is None:
        yield from known.values()
    elif known:
        for module in modules:
            yield from (known[key] for name in module._parameters if (key := (module, name)) in known)


def gathered_parameters(model: nn.Module) -> list[torch.Tensor]:
    """What ``fully_shard`` hands the modules of a model in the place of their parameters."""
    found = (each.gathered for each in sharded_weights(model.modules()))
    return [each for each in found if each is not None]


def _by_owner() -> dict[tuple[nn.Module, str], ShardedWeight]:
    """Of every model in the process: a module does not know who shards it where that is a module around it."""
    from torch.distributed import _composable_state

    states = {ref() for ref in getattr(_composable_state, "_module_state_mapping", {}).values()}
    return {owner: weight for state in states if state is not None for owner, weight in _weights(state)}


def _weights(state: Any) -> Iterator[tuple[tuple[nn.Module, str], ShardedWeight]]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 and before: one group
        groups = [each] if (each := getattr(state, "_fsdp_param_group", None)) is not None else []
    for group in groups:
        over = getattr(getattr(group, "mesh_info", None), "shard_process_group", None)
        ranks = _ranks(over)
        shared = (id(group), ranks, getattr(over, "group_name", "") if ranks else "")
        for parameter in group.fsdp_params:
            info = parameter._module_info
            reshards, gathered = bool(group._reshard_after_forward), getattr(parameter, "_unsharded_param", None)
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for module, name in owners:
                weight = ShardedWeight(
                    *(module, name, reshards, gathered, tuple(state._modules), bool(state._is_root)), *shared
                )
                yield (module, name), weight


def _ranks(group: torch.distributed.ProcessGroup | None) -> tuple[int, ...]:
    """Of a group that is there no more, as that of a model that was trained before, none."""
    try:
        return () if group is None else tuple(torch.distributed.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return ()


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def lies_within_another(module: nn.Module) -> bool:
    """Whether a forward has found a sharded module inside another: what FSDP gathers ahead has to share its streams.

    Private because torch finds out in the first forward, and keeps it in its state of the module.
    """
    return module._get_fsdp_state()._is_root is False


def gathered_ahead(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """What a sharded module has been told to gather ahead, in the forward and in the backward.

    Private because torch has a setter for each, and no getter.
    """
    state: Any = module._get_fsdp_state()
    lists = state._states_to_forward_prefetch, state._states_to_backward_prefetch
    forward, backward = ([each._modules[0] for each in states] for states in lists)
    return forward, backward


def ran_forward(module: nn.Module) -> list[nn.Module]:
    """What FSDP has seen run since the last backward, around and beside a sharded module, in order.

    Private because torch keeps it for the order of its own prefetching in the backward.
    """
    context: Any = module._get_fsdp_state()._comm_ctx
    return [module for group in context.post_forward_order for module in group.modules]


def own_class(module: nn.Module) -> str:
    """The name of a module's class, without what ``fully_shard`` has made of it."""
    own = (each for each in type(module).__mro__ if not each.__module__.startswith("torch.distributed.fsdp"))
    name = type(module).__name__
    return next((each.__name__ for each in own if each.__name__ == name.removeprefix("FSDP")), name)


def is_of_fsdp(hook: object) -> bool:
    """Whether a module's hook was put there by ``fully_shard``: such hooks gather weights and let them go.

    Private because they are methods of a class that torch does not name in public.
    """
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
