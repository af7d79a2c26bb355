"""TorchTitan's real trainers on a CPU: :func:`trained` runs one on some ranks, each in a process of its own.

What stands in for a machine with GPUs: the CPU as TorchTitan's device, random tokens for its dataset and tokenizer, an
empty triton, gloo for NCCL. Everything between is TorchTitan's own: configuration, parallelize functions, passes, loop.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from attrs import asdict, field, frozen
from torch import Tensor

import policylang
from tests.support.process import TORCHRUN, python

LENGTH, BATCH, VOCABULARY, MICROBATCHES = 64, 2, 2048, 4
MARK = "OUTCOME "
COUNTED = {
    *("aten::mm", "aten::bmm", "aten::_grouped_mm", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::silu", "aten::topk", "aten::rsqrt", "aten::_fused_rms_norm", "aten::sort"),
}


@frozen
class Setting:
    """What is trained, by which trainer, under which policy."""

    trainer: str = "graph"
    """``graph`` or ``eager``."""
    model: str = "llama3"
    """``llama3``, ``deepseek_v3``, ``qwen3`` or ``qwen3_moe``."""
    policy: str | None = None
    """A policy of policylang's: its path or name. TorchTitan's own otherwise:"""
    theirs: str | None = None
    """A memory policy of the graph trainer; ``selective``, ``full`` or None for its eager trainer."""
    steps: int = 2
    layers: int = 2
    chunked_loss: bool = True
    reshard: str = "default"
    precision: str = "float32"
    """What parameters are gathered in."""
    experts: int = 1
    """How many ranks share out the experts of a layer."""
    disabled: tuple[str, ...] = ()
    """Passes of the graph trainer that do not run."""
    pipeline: str = ""
    """The schedule of a pipeline whose stages the ranks run; empty where each runs the whole model."""
    unshard: str = ""
    """The policy of each stage's graph that gathers weights, once the stages are cut."""
    example: str = ""
    """A script of ``examples/`` that makes the configuration, by its name."""


@frozen
class Outcome:
    """What the steps of one rank came to. Numbers are those of this rank's own part."""

    rank: int
    losses: list[float]
    weights: str
    """A digest of every parameter and buffer after the last step."""
    ran: dict[str, int]
    """How often some operators ran in the last step."""
    gathers: int = 0
    """All-gathers in the graph of a step."""
    multiplexed: int = 0
    """Graphs that run the forward of a stage and the backward of another as one."""
    planned: list[int] = field(factory=list)
    """Collectives as traced and as ordered, where the policy orders them; and those in the graph of a step."""
    recomputed: list[str] = field(factory=list)
    """The names of the copies in the graph of a step."""
    audit: bool | None = None
    reported: int = 0
    """How many values the report calls recomputed."""


@cache
def trained(setting: Setting, ranks: int = 1) -> list[Outcome]:
    """What each rank of a run came to. One that fails fails the test, with what it printed."""
    launch = (*TORCHRUN, ranks, "-m", __name__, json.dumps(asdict(setting)))
    with tempfile.TemporaryDirectory() as folder:  # TorchTitan dumps into where it runs
        done = python(*launch, cwd=Path(folder), timeout=600, OMP_NUM_THREADS="1")
    found = [json.loads(line.partition(MARK)[2]) for line in done.stdout.splitlines() if MARK in line]
    assert len(found) == ranks
    return [Outcome(**values) for values in sorted(found, key=lambda values: values["rank"])]


def main() -> None:
    torch.set_num_threads(1)
    _stand_in()
    outcome = train(Setting(**json.loads(sys.argv[1])))
    sys.stdout.write(f"{MARK}{json.dumps(asdict(outcome))}\n")  # in one piece: ranks share the stream
    sys.stdout.flush()


def train(setting: Setting) -> Outcome:
    trainer = configured(setting).build()
    step, losses, ran = trainer.forward_backward_step, [], {}

    def observed(**batch: Any) -> Tensor:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            loss = step(**batch)
        ran.update({event.key: event.count for event in profile.key_averages() if event.key in COUNTED})
        losses.append(loss.detach().item())
        return loss

    trainer.forward_backward_step = observed
    if setting.unshard:
        trainer.pp_schedule.graph_provider = OrderedGathers(trainer.pp_schedule.graph_provider, setting.unshard)
    trainer.train()
    found: dict[str, Any] = {}
    if setting.trainer == "graph":
        found = _graphs(_stage_graphs(trainer) if setting.pipeline else [trainer._traced_step.gm])
    if setting.trainer == "graph" and setting.pipeline:
        found["multiplexed"] = len(trainer.pp_schedule.overlap_graphs)
    if setting.policy is not None:
        found |= _report(trainer, setting)
    trainer.close()
    return Outcome(int(os.environ["RANK"]), losses, _digest(trainer.model_parts), ran, **found)


def configured(setting: Setting) -> Any:
    """TorchTitan's own configuration of its debugging model, cut down to a CPU."""
    from tests.support.titan import _triton

    with _triton():
        config = _of_example(setting) if setting.example else _debugging(setting)
        attention = import_module("torchtitan.models.common.attention").ScaledDotProductAttention
        losses = import_module("torchtitan.components.loss")
    model, training, parallelism = config.model_spec.model, config.training, config.parallelism
    model.layers = [model.layers[at % len(model.layers)] for at in range(setting.layers)]
    for layer in model.layers:
        layer.attention.inner_attention = attention.Config()
    training.steps, training.local_batch_size, training.seq_len = setting.steps, BATCH, LENGTH
    training.disable_cuda_graphs = True
    training.mixed_precision_param = setting.precision
    parallelism.data_parallel_shard_degree = int(os.environ["WORLD_SIZE"])
    if setting.pipeline:
        parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule = 2, setting.pipeline
        parallelism.data_parallel_shard_degree //= 2
        training.local_batch_size = MICROBATCHES
        _hand_over_microbatches()
        if setting.trainer == "graph":
            _leave_places_for_meshes()
    parallelism.fsdp_reshard_after_forward = setting.reshard
    parallelism.expert_parallel_degree = setting.experts
    parallelism.spmd_backend = "partial_dtensor"  # the other one's collectives have no CPU implementation
    config.tokenizer, config.dataloader = NoTokenizer(), RandomTokens()
    config.validator.enable = config.checkpoint.enable = False
    config.debug.seed = 0
    if not setting.chunked_loss:
        config.loss = losses.CrossEntropyLoss.Config(global_vocab_size=model.vocab_size)
    if setting.trainer == "graph":
        config.compile.disable_passes = ["cudagraph_pass", *setting.disabled]
    if not setting.example:
        _choose_policy(config, setting)
    return config


def _of_example(setting: Setting) -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    return import_module(setting.example).configure(setting.policy)


def _debugging(setting: Setting) -> Any:
    family = setting.model.removesuffix("_moe")
    if setting.trainer == "graph":
        registry = import_module(f"torchtitan.experiments.graph_trainer.{family}.config_registry")
        name = f"graph_trainer_{family}_debugmodel"
        return getattr(registry, f"{name}_moe" if setting.model.endswith("_moe") else name)()
    registry = import_module(f"torchtitan.models.{family}.config_registry")
    return getattr(registry, f"{family}_moe_debug" if setting.model.endswith("_moe") else f"{family}_debugmodel")()


def _choose_policy(config: Any, setting: Setting) -> None:
    if setting.trainer == "graph":
        config.compile.memory_policy = setting.theirs
        if setting.policy is not None:
            from policylang.integrations import torchtitan

            config.compile.memory_policy = torchtitan.register(setting.policy)
        return
    checkpointing = import_module("torchtitan.distributed.activation_checkpoint")
    own = {"selective": checkpointing.SelectiveAC, "full": checkpointing.FullAC}
    config.activation_checkpoint = own[setting.theirs].Config() if setting.theirs else None
    if setting.policy is not None:
        from policylang.integrations.torchtitan_eager import PolicyAC

        config.activation_checkpoint = PolicyAC.Config(policy=setting.policy)


def _stage_graphs(trainer: Any) -> list[torch.fx.GraphModule]:
    """The graphs that the stages of this rank are cut into, but for the whole backward where its parts run."""
    modules = [stage.graphs.modules for stage in trainer.pp_schedule.schedule._stages]
    return [gm for each in modules for gm in (each.fw, each.bw_di or each.full_bw, each.bw_dw, each.unshard) if gm]


class OrderedGathers:
    """In place of what builds the graphs of stages, in the first step: builds them, and orders their gathers."""

    def __init__(self, builder: Any, text: str) -> None:
        self.builder, self.policy = builder, policylang.parse(text)
        self.done = False

    def prepare_graphs(self, schedule: Any, *given: Any, **named: Any) -> Any:
        made = self.builder.prepare_graphs(schedule, *given, **named)
        for stage in () if self.done else schedule._stages:
            policylang.apply(stage.graphs.modules.unshard, self.policy)
        self.done = True
        return made


def _graphs(gms: Sequence[torch.fx.GraphModule]) -> dict[str, Any]:
    nodes = [node for gm in gms for node in gm.graph.nodes]
    return {
        "gathers": sum("all_gather_into_tensor" in str(node.target) for node in nodes),
        "recomputed": [node.name for node in nodes if node.name.endswith("_recomputed") and node.op != "placeholder"],
    }


def _report(trainer: Any, setting: Setting) -> dict[str, Any]:
    from policylang.integrations import torchtitan

    gm = None if setting.pipeline or setting.trainer == "eager" else trainer._traced_step.gm
    if gm is None and setting.trainer == "graph":
        reports = list(torchtitan.reports().values())
    else:
        reports = [policylang.report(each) for each in (trainer.model_parts if gm is None else [gm])]
    found = {
        "audit": all(each.audit.agrees for each in reports),
        "reported": sum(len(each.recomputed) for each in reports),
    }
    if gm is not None and reports[0].orders:
        (account,) = reports[0].orders
        sent = sum("_c10d_functional" in str(node.target) and "wait" not in str(node.target) for node in gm.graph.nodes)
        found["planned"] = [account.traced.collectives, account.planned.collectives, sent]
    return found


def _digest(parts: Sequence[torch.nn.Module]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted((name, value) for part in parts for name, value in part.state_dict().items()):
        local = value.to_local() if hasattr(value, "to_local") else value
        digest.update(name.encode() + local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class NoTokenizer:
    """In place of a tokenizer's configuration: the tokens are drawn, none is read."""

    def build(self, **_: Any) -> NoTokenizer:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {}


class RandomTokens:
    """In place of a dataset's configuration, and the loader that it makes: the same tokens in every run."""

    def build(self, *, dp_rank: int = 0, local_batch_size: int = BATCH, **_: Any) -> RandomTokens:
        self.rows = local_batch_size
        self.generator = torch.Generator().manual_seed(dp_rank)
        return self

    def to_dict(self) -> dict[str, Any]:
        return {}

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = torch.randint(VOCABULARY, (self.rows, LENGTH + 1), generator=self.generator)
            positions = torch.arange(LENGTH).repeat(self.rows, 1)
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()


def _stand_in() -> None:
    """The CPU as the device of TorchTitan, which looks for one when it is imported; and sums where gloo has no mean."""
    torch._utils._get_available_device_type = lambda: "cpu"
    properties = SimpleNamespace(total_memory=8 << 30, name="cpu")
    answers: dict[str, Any] = {
        "get_device_name": "cpu",
        "current_device": 0,
        "device_count": 8,
        "get_device_properties": properties,
        "memory_stats": defaultdict(int),
    }
    for name in ("reset_peak_memory_stats", "empty_cache", "set_device", "synchronize"):
        answers[name] = None
    for name, answer in answers.items():
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
    _model_of_costs()
    if not hasattr(torch.distributed, "set_timeout"):  # TorchTitan 0.3.0 calls what torch 2.13 does not have
        torch.distributed.set_timeout = lambda *_: None
    _list_attention_of_cpus()
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_sum(module: Any, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_after_sum


def _list_attention_of_cpus() -> None:
    """TorchTitan lists the attention kernels to save, of GPUs; this is what its models run here."""
    from tests.support.titan import _triton

    with _triton():
        checkpointing = import_module("torchtitan.distributed.activation_checkpoint")
        users = [checkpointing, import_module("torchtitan.experiments.graph_trainer.memory_policy")]
    listed = checkpointing._get_default_save_ops() | {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    }
    for user in users:
        user._get_default_save_ops = lambda: set(listed)


def _hand_over_microbatches() -> None:
    """TorchTitan 0.3.0 gives a schedule its microbatches ready split, which ``step`` of torch 2.13 does not take."""
    from torch.distributed.pipelining import schedules

    def step(self: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **options: Any) -> None:
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **options)

    schedules.PipelineScheduleSingle.step = schedules.PipelineScheduleMulti.step = step


def _leave_places_for_meshes() -> None:
    """A DTensor is two inputs, its local tensor and its mesh, and TorchTitan 0.3.0 counts both among those of a stage;
    its graph that gathers the weights returns tensors alone under torch 2.13."""
    builder = import_module("torchtitan.experiments.graph_trainer.graph_pp.graph_builder")
    gather = builder.GraphTrainerStageGraphs.unshard_params

    def padded(self: Any, values: Any, **options: Any) -> list[Any]:
        found = gather(self, values, **options)
        return [*found, *[None] * (self.meta.num_flat_param_values - len(found))]

    builder.GraphTrainerStageGraphs.unshard_params = padded


def _model_of_costs() -> None:
    """The figures by which torch's bucketing of collectives weighs them; a CPU has none."""
    for name in ("torch._inductor.utils", "torch.utils._runtime_estimation"):
        module = import_module(name)
        module.get_gpu_dram_gbps = lambda *_: 2000
        module.get_device_tflops = lambda *_: 300


if __name__ == "__main__":
    main()
