"""A policy as a memory policy of TorchTitan's graph trainer (TorchTitan 0.3.0).

The graph trainer traces forward, loss and backward as one flat graph and runs passes over it. One of them asks a
registry for the memory policy that ``compile.memory_policy`` names. What is registered for a policy of ours carries it
out, whole. TorchTitan's own rematerialisation, two passes later, then has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from attrs import evolve
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from policylang.api.apply import report_on
from policylang.api.load import PolicyLike, policy_of, staged
from policylang.audit.report import Report
from policylang.backends.caching import policy_key
from policylang.backends.eager.problems import warn
from policylang.backends.path import apply_policy
from policylang.backends.refusals import Problem
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind
from policylang.graph.phases import raw_path
from policylang.language.diagnostics import diagnose
from policylang.language.shown import counted, listed
from policylang.language.syntax import Pipeline, Policy
from policylang.operators.calls import describe
from policylang.operators.names import is_all_gather
from policylang.planning.pipelines import NO_PIPELINE
from policylang.torch_compat.graphs import OpOverload, schema_of

__all__ = ["graphs", "register", "reports"]

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
JOINED_GATHERS = Problem(
    "APL659",
    "behind the policy TorchTitan's `{joins}` joins the gathers of a stage, and leaves them in the forward graph: each "
    "microbatch gathers the weights and keeps them until its backward",
    "write `config.compile.disable_passes += ['{joins}']`, and a stage gathers its weights once a step",
)
ALSO_IN_FORWARD = Problem(
    "APL662",
    "TorchTitan's forward graph of a stage recomputes what the policy has the backward recompute, up to {names}",
    "save these values: TorchTitan cuts a stage with a function that keeps operators that are tagged as random",
)
_MOST_NAMES = 4


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


def reports(name: str = NAME) -> dict[int | None, Report]:
    """The reports of the graphs that a registered policy was applied to in this process: by stage of a pipeline, and of
    a whole step under None. ``name`` is what ``register`` returned. Raises ``KeyError`` for another name."""
    return dict(_registry()[name].reports)


def graphs(name: str = NAME) -> dict[int | None, Facts]:
    """The facts of the graphs before a registered policy was applied to them in this process, by stage as ``reports``
    has them, for ``policylang.snapshot``. Raises ``KeyError`` for another name than ``register`` returned."""
    return dict(_registry()[name].graphs)


class MemoryPolicy:
    """The registered policy: TorchTitan calls it with the traced graph and its configuration."""

    def __init__(self, policy: Policy, mesh: Any = None) -> None:
        self.policy = policy
        self.mesh = mesh
        self.digest = policy_key(policy, root="")[:_DIGITS]
        self.also_called = ""
        """The name that does not change with the policy."""
        self.__name__ = f"apl_{policy.name}"  # what TorchTitan's log calls a pass
        self.reports: dict[int | None, Report] = {}
        self.graphs: dict[int | None, Facts] = {}

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
        pipeline = _pipeline_of(gm, config)
        policy = self.policy if pipeline is None else _part_for(self.policy, pipeline)
        if policy.orders and options is not None and pipeline is None:
            _refuse_another_order(options)
        facts = collect(gm, static_inputs=parameters_of(gm, later_stage=bool(policy.stage)), mesh=self.mesh)
        if facts.kind is not GraphKind.FLAT:
            message = f"a memory policy acts on the graph of a whole step, and this is a {facts.kind.value} graph"
            help = "the graph trainer makes one with `compile.mode = 'aot_fx_trace'`"
            raise PolicyGraphError([diagnose(NOT_FLAT, message, help=help)])
        joins = policy.stage is not None and _JOINS not in getattr(options, "disable_passes", ())
        if joins and any(map(is_all_gather, facts.by_target)):
            warn(JOINED_GATHERS.diagnostic(joins=_JOINS))
        self.graphs[policy.stage] = _told_buffers(facts)
        apply_policy(gm, policy, self.mesh, facts=facts)
        if policy.stage is not None:
            _leave_forward_alone(gm)
        self.reports[policy.stage] = report_on(gm)
        # The tags were applied. TorchTitan's pass would read them as work to do, and refuses random operators.
        for node in gm.graph.nodes:
            for key in _TAGS:
                node.meta.pop(key, None)
        return gm


def _pipeline_of(gm: fx.GraphModule, config: Any) -> Pipeline | None:
    """The pipeline that TorchTitan's configuration asks for, and by the names of a graph's modules the stage that the
    graph is; None without pipeline parallelism. Raises ``PolicyGraphError`` for a graph of no stage."""
    parallelism: Any = getattr(config, "parallelism", None)
    ranks = getattr(parallelism, "pipeline_parallel_degree", 1)
    if ranks < 2:
        return None
    from torchtitan.distributed import pipeline_parallel as theirs

    stages = parallelism.module_fqns_per_model_part
    if stages is None:
        numbers = theirs._get_pipeline_metadata(SimpleNamespace(pp=ranks), parallelism, config.model_spec.model)
        stages = theirs._generate_llm_fqn_per_model_part(*numbers)
    paths = {f"{raw_path(node.meta)}." for node in gm.graph.nodes}
    for number, names in enumerate(stages):
        if any(path.startswith(f"{name}.") for path in paths for name in names):
            schedule = parallelism.pipeline_parallel_schedule.lower()
            return Pipeline(schedule, len(stages), getattr(parallelism, "num_pp_microbatches", 0), stage=number)
    message = f"the graph has no module of the {counted(len(stages), 'stage')} that TorchTitan's configuration names"
    help = "name every module that a stage runs in `parallelism.module_fqns_per_model_part`"
    raise PolicyGraphError([diagnose(NOT_FLAT, message, help=help)])


def _part_for(policy: Policy, pipeline: Pipeline) -> Policy:
    """The policy for one stage. Raises ``PolicyGraphError`` where its ``schedule`` line has another number of them."""
    own = policy.pipeline
    if own is not None and own.stages != pipeline.stages:
        message = f"the policy has {counted(own.stages, 'stage')}, and TorchTitan runs {pipeline.stages}"
        help = f"write `schedule {own.schedule} into {pipeline.stages} stages of {own.microbatches} microbatches`"
        raise PolicyGraphError([diagnose(NO_PIPELINE, message, own.span, help=help)])
    return staged(evolve(policy, pipeline=own or pipeline), pipeline.stage)


def _leave_forward_alone(gm: fx.GraphModule) -> None:
    """Let recomputations in place return new memory, where nothing else reads the old. TorchTitan cuts a stage with a
    function of torch that keeps each operator that writes or is tagged as random, and what it reads: its forward graph
    would recompute too. Warns of those that stay so."""
    kept = []
    for node in gm.graph.nodes:
        if marks.RECOMPUTED not in marks.custom(node.meta) or not isinstance(node.target, OpOverload):
            continue
        schema, written = schema_of(node.target), node.args[0] if node.args else None
        if schema.is_mutable and isinstance(written, fx.Node):
            packet = getattr(torch.ops.aten, schema.name.partition("::")[2].removesuffix("_"), None)
            pure = getattr(packet, schema.overload_name or "default", None)
            dtypes = {each.meta["val"].dtype for each in (node, *node.all_input_nodes)}
            is_view = isinstance(written.target, OpOverload) and describe(written.target).flags & Flag.VIEW
            if pure is not None and len(written.users) == len(dtypes) == 1 and not is_view:
                node.target = pure
        if node.is_impure():
            kept.append(marks.custom(node.meta)[marks.RECOMPUTED])
    if kept:
        warn(ALSO_IN_FORWARD.diagnostic(names=listed([f"`{name}`" for name in kept], _MOST_NAMES)))
    gm.recompile()


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


def parameters_of(gm: fx.GraphModule, *, later_stage: bool = False) -> list[int]:
    """The positions, among the inputs of ``gm``, of those that hold a parameter. Never one that holds anything else.
    ``later_stage``: the last output is the gradient of what the stage before sends, and not of a parameter.

    The graph does not mark them. The trainer calls its tracer with the model's parameters, in the order of
    ``named_parameters``, then buffers, then the batch. The outputs are the loss and the gradients of trained
    parameters, in that order too. A DTensor parameter, as SimpleFSDP makes every one, is its local tensor and then its
    mesh. Frozen parameters after the last trained one are found only if they are DTensors.
    """
    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    gradients = list(_gradients(gm))
    end = _behind_the_trained(inputs, gradients[:-1] if later_stage else gradients)
    while end + 1 < len(inputs) and isinstance(inputs[end], torch.Tensor) and isinstance(inputs[end + 1], DeviceMesh):
        end += 2
    return [position for position in range(end) if isinstance(inputs[position], torch.Tensor)]


def _told_buffers(facts: Facts) -> Facts:
    """The facts with the inputs between parameters and batch as buffers, which a stage holds once for all microbatches.
    The batch begins with tokens, or with what the stage before sends: the last output is the gradient of that."""
    kinds, last = list(facts.input_kinds), facts.inputs[-1][-1]
    for row, kind in enumerate(kinds):
        if kind == InputKind.USER:
            is_received = (facts.shapes[row], facts.dtypes[row]) == (facts.shapes[last], facts.dtypes[last])
            if is_received or facts.dtypes[row].startswith("int"):
                break
            kinds[row] = int(InputKind.BUFFER)
    return evolve(facts, input_kinds=kinds)


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
