"""A policy as a memory policy of TorchTitan's graph trainer (TorchTitan 0.3.0).

The graph trainer traces forward, loss and backward as one flat graph and runs passes over it. One of them asks a
registry for the memory policy that ``compile.memory_policy`` names. What is registered for a policy of ours carries it
out, whole. TorchTitan's own rematerialisation, two passes later, then has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from policylang.api.load import PolicyLike, policy_of
from policylang.backends.caching import policy_key
from policylang.backends.path import apply_policy
from policylang.errors import PolicyGraphError
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind
from policylang.language.diagnostics import diagnose
from policylang.language.syntax import Policy

__all__ = ["register"]

NO_GRAPH_TRAINER = "APL383"
NOT_FLAT = "APL384"
UNTOLD_NAME = "APL385"
ORDERED_LATER = "APL349"
NAME = "apl"

_DIGITS = 12
_TAGS = ("recompute", "ac_graph_id")
_JOINS = "joint_transformer_block_bucketing_reordering_pass"
_SWITCHED = {
    "enable_fsdp_ag_rs_overlap": "reassign_collective_pgs_pass",
    "enable_fsdp_dense_region_overlap": "schedule_fsdp_comms_to_dense_regions_pass",
    "enable_async_tensor_parallel": "async_tensor_parallel_pass",
}
"""Passes that move or replace collectives behind the memory policy, by the setting that switches each on."""


def register(policy: PolicyLike, name: str = NAME, *, mesh: Any = None) -> str:
    """Register a policy as a memory policy of TorchTitan, and return its name: ``config.compile.memory_policy =
    register("mine.apl")``.

    ``policy`` is a path, the bare name of a bundled policy, or what ``policylang.load`` returns. ``mesh`` names the
    dimensions of collectives, as in ``policylang.apply``. The returned name is ``name`` and a digest of the policy:
    TorchTitan identifies a precompiled step by its configuration, so an edited policy needs another name. ``name``
    alone means the policy that was registered last, and is refused for a precompiled step.

    Raises ``PolicyError`` for a policy that cannot be read or has errors, and ``PolicyGraphError`` if the graph trainer
    of TorchTitan cannot be imported.
    """
    made = MemoryPolicy(policy_of(policy), mesh)
    registered = f"{name}_{made.digest}"
    made.also_called = name
    registry = _registry()
    registry[registered] = registry[name] = made
    return registered


class MemoryPolicy:
    """The registered policy: TorchTitan calls it with the traced graph and its configuration."""

    def __init__(self, policy: Policy, mesh: Any = None) -> None:
        self.policy = policy
        self.mesh = mesh
        self.digest = policy_key(policy, root="")[:_DIGITS]
        self.also_called = ""
        """The name that does not change with the policy."""
        self.__name__ = f"apl_{policy.name}"  # what TorchTitan's log calls a pass

    def __call__(self, gm: fx.GraphModule, *, config: Any = None) -> fx.GraphModule:
        """Carry the policy out on ``gm``, in place. ``config`` decides nothing: the policy does.

        Raises as ``policylang.apply`` does, and ``PolicyGraphError`` for a graph that is not a whole step, for one
        that is precompiled under a name that any policy may have, and for a policy that orders collectives where
        TorchTitan's passes would order them anew.
        """
        options = getattr(config, "compile", None)
        chosen = getattr(options, "memory_policy", None)
        if chosen == self.also_called and getattr(options, "precompile_artifact_dir", ""):
            message = f"the step is to be precompiled under the name `{chosen}`, which does not identify the policy"
            help = "choose the memory policy by the name that `register` returns"
            raise PolicyGraphError([diagnose(UNTOLD_NAME, message, help=help)])
        if self.policy.orders and options is not None:
            _refuse_another_order(options)
        facts = collect(gm, static_inputs=parameters_of(gm), mesh=self.mesh)
        if facts.kind is not GraphKind.FLAT:
            message = f"a memory policy acts on the graph of a whole step, and this is a {facts.kind.value} graph"
            help = "the graph trainer makes one with `compile.mode = 'aot_fx_trace'` and without pipeline parallelism"
            raise PolicyGraphError([diagnose(NOT_FLAT, message, help=help)])
        apply_policy(gm, self.policy, self.mesh, facts=facts)
        # The tags were applied. TorchTitan's pass would read them as work to do, and refuses random operators.
        for node in gm.graph.nodes:
            for key in _TAGS:
                node.meta.pop(key, None)
        return gm


def _refuse_another_order(options: Any) -> None:
    """Refuse an order that TorchTitan's later passes would undo."""
    passes = [_JOINS, *(name for setting, name in _SWITCHED.items() if getattr(options, setting, False))]
    if getattr(getattr(options, "ep_overlap", None), "enabled", False):
        passes.append("ep_overlap_schedule_pass")
    off = getattr(options, "disable_passes", ())
    left = [name for name in passes if name not in off]
    fixes = [f"`config.compile.disable_passes += [{', '.join(map(repr, left))}]`"] if left else []
    if getattr(options, "inductor_compilation", "") == "full":
        left.append("full_inductor_compilation_pass")
        fixes.append("`config.compile.inductor_compilation = 'regional'`")
    if left:
        names = " and ".join(f"`{name}`" for name in left)
        message = f"the policy orders collectives, and behind it TorchTitan orders them anew: {names}"
        help = f"write {' and '.join(fixes)}, or take the scheduling lines out of the policy"
        raise PolicyGraphError([diagnose(ORDERED_LATER, message, help=help)])


def _registry() -> dict[str, Any]:
    try:
        # the module with the built-in policies; the registry alone would be filled by it later, over ours
        from torchtitan.experiments.graph_trainer import memory_policy
    except ImportError as error:
        message = f"TorchTitan's graph trainer cannot be imported: {error}"
        help = "install it beside torch: `pip install torchtitan==0.3.0`; its kernels import triton"
        raise PolicyGraphError([diagnose(NO_GRAPH_TRAINER, message, help=help)]) from error
    registry: dict[str, Any] = memory_policy.MEMORY_POLICY_REGISTRY
    return registry


# --- the inputs that are parameters ---------------------------------------------------------------------------------


def parameters_of(gm: fx.GraphModule) -> list[int]:
    """The positions, among the inputs of ``gm``, of those that hold a parameter. Never one that holds anything else.

    The graph does not mark them. The trainer calls its tracer with the model's parameters, in the order of
    ``named_parameters``, then buffers, then the batch. The outputs are the loss and the gradients of trained
    parameters, in that order too. A DTensor parameter, as SimpleFSDP makes every one, is its local tensor and then its
    mesh. Frozen parameters after the last trained one are found only if they are DTensors.
    """
    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    end = _behind_the_trained(inputs, list(_gradients(gm)))
    while end + 1 < len(inputs) and isinstance(inputs[end], torch.Tensor) and isinstance(inputs[end + 1], DeviceMesh):
        end += 2
    return [position for position in range(end) if isinstance(inputs[position], torch.Tensor)]


def _behind_the_trained(inputs: Sequence[Any], gradients: Sequence[torch.Tensor]) -> int:
    """The earliest end of the inputs that the gradients belong to; 0 if they do not match. Each gradient is paired with
    the first input that it fits, after the pair before it. With frozen parameters that may be an input before the right
    one, never one after it."""
    position = 0
    for gradient in gradients:
        while position < len(inputs) and not _fits(inputs[position], gradient):
            position += 1
        if position == len(inputs):
            return 0
        position += 1
    beyond_mesh = position < len(inputs) and isinstance(inputs[position], DeviceMesh)
    return position + beyond_mesh


def _fits(value: Any, gradient: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == gradient.shape and value.dtype == gradient.dtype


def _gradients(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """The outputs of the step behind the loss, without the meshes of DTensors."""
    output = next(iter(reversed(gm.graph.nodes)))
    for returned in output.args[0][1:]:
        value = returned.meta.get("val") if isinstance(returned, fx.Node) else None
        if isinstance(value, torch.Tensor):
            yield value
