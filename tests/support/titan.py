"""TorchTitan's models, traced by its own tracer. Skips where TorchTitan is not installed.

Its package imports triton for kernels that nothing here calls. Where there is none, an empty module stands for it while
TorchTitan is imported, and no longer.
"""

import copy
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.flat_graphs import copy_graph

LENGTH, VOCABULARY = 16, 2048
_TRAINER = "torchtitan.experiments.graph_trainer"


class Traced(NamedTuple):
    result: Any
    """TorchTitan's ``TracedResult``."""
    module: nn.Module
    batch: tuple[Any, ...]

    @property
    def gm(self) -> fx.GraphModule:
        return self.result.gm

    def run(self) -> list[Tensor]:
        """Loss and gradients, of this rank."""
        outputs = graph_trainer("make_fx_tracer").run_traced(self.result, module=self.module)(*self.batch)
        return [getattr(output, "_local_tensor", output).clone() for output in outputs]


def graph_trainer(name: str) -> Any:
    """A module of TorchTitan's graph trainer."""
    pytest.importorskip("torchtitan")
    with _triton():
        return pytest.importorskip(f"{_TRAINER}.{name}", exc_type=ImportError)


def config(memory_policy: str, reshard: str = "default") -> Any:
    """What the memory policies read of the graph trainer's configuration."""
    return SimpleNamespace(
        compile=SimpleNamespace(memory_policy=memory_policy),
        parallelism=SimpleNamespace(fsdp_reshard_after_forward=reshard, pipeline_parallel_degree=1),
    )


def model_of(layers: int) -> nn.Module:
    """TorchTitan's debugging Llama 3 of so many layers; the same weights each time."""
    common = graph_trainer("common_utils")
    from torchtitan.models.llama3 import Llama3Model, llama3_configs

    return _made(Llama3Model, common.build_decoder_config_for_backend(llama3_configs["debugmodel"], "sdpa"), layers)


def experts_of(name: str, layers: int = 2) -> nn.Module:
    """Its debugging models with experts: of DeepSeek V3 (the first layer has none) or of Qwen3."""
    common = graph_trainer("common_utils")
    if name == "qwen3":
        from torchtitan.models.qwen3 import Qwen3Model, qwen3_configs

        settings = common.build_decoder_config_for_backend(qwen3_configs["debugmodel_moe"], "sdpa")
        return _made(Qwen3Model, settings, layers)
    from torchtitan.models.deepseek_v3 import DeepSeekV3Model, deepseekv3_configs

    build = deepseekv3_configs["debugmodel"]
    settings = common.build_decoder_config_for_backend(build, "sdpa", moe_comm_backend="standard")
    return _made(DeepSeekV3Model, settings, layers)


def _made(kind: Any, settings: Any, layers: int) -> nn.Module:
    settings.layers = [settings.layers[i % len(settings.layers)] for i in range(layers)]
    torch.manual_seed(0)
    model: nn.Module = kind(settings)
    model.init_states(buffer_device=None)
    return model


def tokens_and_labels() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    tokens, labels = torch.randint(VOCABULARY, (2, 1, LENGTH))
    return tokens, labels


def llama(layers: int, **how: Any) -> Traced:
    """One step of that model, traced with the graph trainer's own functions: once, and each caller gets a copy."""
    return _copied(_llama(layers, **how))


def deepseek() -> Traced:
    """One step of a small DeepSeek V3, traced as :func:`llama` is. Its copies share the module and its counters."""
    return _copied(_deepseek())


def _copied(traced: Traced) -> Traced:
    result = copy.copy(traced.result)
    result.gm = copy_graph(traced.gm)
    for node in result.gm.graph.nodes:
        node.meta = {key: dict(value) if isinstance(value, dict) else value for key, value in node.meta.items()}
    return traced._replace(result=result)


@cache
def _llama(layers: int, **how: Any) -> Traced:
    return step_of(model_of(layers), **how)


@cache
def _deepseek() -> Traced:
    return step_of(experts_of("deepseek_v3"))


def step_of(model: nn.Module, *, ranks: int = 1, sharded: bool = True, chunked: bool = True) -> Traced:
    """A step as the trainer traces it: on one rank too it shards by its SimpleFSDP, and it chunks the loss.

    A step of several ranks can be looked at, and not run.
    """
    graph_trainer("common_utils").annotate_module_fqns(model)
    with group_of(ranks):
        if sharded:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            model = graph_trainer("simple_fsdp").data_parallel(model, mesh, "fully_shard")
        return _traced(model, _chunked_loss(model) if chunked else _loss())


class CutStage(NamedTuple):
    """A stage of a pipeline of the graph trainer's, cut into its graphs."""

    module: nn.Module
    graphs: Any
    """TorchTitan's ``GraphTrainerStageGraphs``."""
    given: tuple[Any, ...]
    """Arguments and keywords, the labels, and the loss's keywords."""

    def run(self, weights: str = "split") -> list[Tensor]:
        """What it returns, and its gradients: of its weights, and of its input where it has one."""
        values = [[each.detach() for each in found] for found in (self.module.parameters(), self.module.buffers())]
        torch.manual_seed(2)
        output, saved = self.graphs.forward(*self.given, unsharded_param_values=values[0], flat_buffer_values=values[1])
        sent = () if self.graphs.meta.is_last_stage else (torch.randn_like(output),)
        if weights == "split" and self.graphs.supports_backward_input_weight_split:
            received, left = self.graphs.backward_input((output,), saved, sent)
            return [output, *received, *self.graphs.backward_weight(left)]
        received, gradients = self.graphs.full_backward((output,), saved, sent)
        return [output, *received, *gradients]


def stages_of(policy: str, layers: int = 2, *, ranks: int = 1) -> list[CutStage]:
    """Llama in two stages, each traced, given to a policy and cut by TorchTitan's own functions; sharded on several
    ranks, of which the others are imagined. ``policy`` is the name of a memory policy."""
    builder, common = graph_trainer("graph_pp.graph_builder"), graph_trainer("common_utils")
    pipelines = import_module("torchtitan.distributed.pipeline_parallel")
    off = ["joint_transformer_block_bucketing_reordering_pass"]
    options = graph_trainer("configs").GraphTrainerCompileConfig(memory_policy=policy, disable_passes=off)
    boxed = graph_trainer("configs").GraphTrainerCompileConfig(enable_passes=False)
    parallelism = import_module("torchtitan.config").ParallelismConfig(pipeline_parallel_degree=2)
    model, (tokens, labels) = model_of(layers), tokens_and_labels()
    settings = SimpleNamespace(layers=[SimpleNamespace()] * layers)
    hidden = torch.randn(1, LENGTH, model.tok_embeddings.weight.shape[1])
    found = []
    with group_of(ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        for number, names in enumerate(pipelines._generate_llm_fqn_per_model_part(2, layers, 1, 1)):
            part = pipelines._split_module(model, names)
            common.annotate_module_fqns(part)
            if ranks > 1:
                part = graph_trainer("simple_fsdp").data_parallel(part, mesh, "fully_shard")
            given: tuple[Any, ...] = ((tokens,), {}, None, {})
            if number:
                received, kwargs = hidden.clone().requires_grad_(), {"global_valid_tokens": torch.tensor(float(LENGTH))}
                given = ((received,), {}, labels, kwargs)
            sent = SimpleNamespace(outputs=[hidden], output_grads=[hidden])
            numbers = {
                "stage_index": number,
                "is_last": number == 1,
                "_stage_meta": sent,
                "_to_tensor": lambda meta: meta,
            }
            stage: Any = SimpleNamespace(submod=part, **numbers)
            how = {"model_config": settings, "parallelism": parallelism, "compile_graphs": False}
            builder._build_stage_graphs(stage, *given, loss_fn=_loss(), compile_config=options, **how)
            builder._compile_stage_graphs(stage, compile_config=boxed)
            found.append(CutStage(part, stage.graphs, given))
    return found


def _traced(model: nn.Module, loss: Any) -> Traced:
    trainer, tracer = graph_trainer("trainer"), graph_trainer("make_fx_tracer")
    batch = (*tokens_and_labels(), torch.tensor(float(LENGTH)), {})
    step = trainer.make_fwd_bwd_step(model, loss)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "In CPU autocast")  # its router asks for float32, which a CPU does anyway
        return Traced(tracer.minimal_fx_tracer(step, module=model)(*batch), model, batch)


def _loss() -> Any:
    from torchtitan.components.loss import CrossEntropyLoss

    return CrossEntropyLoss.Config().build()


def _chunked_loss(model: nn.Module) -> Any:
    """What its configurations choose: the head and the loss, forward and backward, for some tokens at a time."""
    from torchtitan.components.loss import CrossEntropyLoss

    wrapper = graph_trainer("chunked_loss").ChunkedLossWrapperWithParamGrads
    loss = wrapper.Config(loss_fn=CrossEntropyLoss.Config()).build(compile_config=None)
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return loss


@contextmanager
def group_of(ranks: int) -> Iterator[None]:
    """A process group: of this process alone, or of several of which the others are imagined."""
    store = dist.HashStore() if ranks == 1 else FakeStore()
    dist.init_process_group("gloo" if ranks == 1 else "fake", store=store, rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _triton() -> Iterator[None]:
    """An empty triton where there is none. What torch remembers of triton it has asked before."""
    import_module("torch._inductor.compile_fx")
    from torch.utils._triton import has_triton_package

    if has_triton_package():
        yield
        return
    modules = {name: _Empty(name) for name in ("triton", "triton.language")}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


class _Empty(ModuleType):
    """Every name in it is a decorator that returns its function."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}", _decorator)


def _decorator(*arguments: Any, **options: Any) -> Any:
    alone = len(arguments) == 1 and callable(arguments[0]) and not options
    return arguments[0] if alone else _decorator
