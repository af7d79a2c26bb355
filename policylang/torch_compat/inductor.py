"""The private names of torch that compiling through Inductor and AOTAutograd stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any

from torch import fx

from policylang.torch_compat.missing import require

WatchHalf = Callable[[fx.Graph, bool], Callable[[str], None]]
"""From a half as it comes to Inductor, and whether it is the backward, to what is told the code that was made of it."""

ChangeInference = Callable[[fx.GraphModule], object]
"""Changes a graph without gradients, in place, before it is compiled."""


def compile_with_inductor(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    watch: WatchHalf | None = None,
    inference: ChangeInference | None = None,
) -> Any:
    """Inductor's entry for a graph of Dynamo's. ``settings`` also hold when the backward is compiled, later, and
    ``watch`` is asked then too. It is not asked of a graph without gradients, which ``inference`` is given instead.
    Neither is called where AOTAutograd has what was compiled in its cache (:func:`code_from_caches`).

    Private because ``torch.compile`` offers no way to call Inductor with a partitioner of one's own; a configuration
    patched around the call would have expired by the first backward.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def watched(gm: fx.GraphModule, half_inputs: Sequence[Any], **options: Any) -> Any:
        if inference is not None and options.get("is_inference"):
            inference(gm)
        if watch is None or options.get("is_inference"):
            return compile_fx_inner(gm, half_inputs, **options)
        tell = watch(gm.graph, bool(options.get("is_backward")))
        compiled = compile_fx_inner(gm, half_inputs, **options)
        tell(str(getattr(compiled, "source_code", "")))
        return compiled

    if watch is None and inference is None:
        return compile_fx(graph, inputs, config_patches=dict(settings))
    return compile_fx(graph, inputs, inner_compile=watched, config_patches=dict(settings))


_loaded: ContextVar[list[tuple[bool, str]] | None] = ContextVar("policylang_loaded", default=None)


@contextmanager
def code_from_caches() -> Iterator[list[tuple[bool, str]]]:
    """Collects the code of every half that is made ready to run meanwhile, with whether it is the backward.

    What AOTAutograd has in its cache is handed out as one callable around both halves, whose code nobody can ask for.
    So the method that makes a compiled half ready is wrapped, once a process; outside of this it does what it did.
    """
    _watch_loading()
    collected: list[tuple[bool, str]] = []
    token = _loaded.set(collected)
    try:
        yield collected
    finally:
        _loaded.reset(token)


@cache
def _watch_loading() -> None:
    from torch._inductor.output_code import CompiledFxGraph

    require(CompiledFxGraph, ("post_compile",), "reads the order of collectives off cached code with it")
    make_ready = CompiledFxGraph.post_compile

    @wraps(make_ready)
    def post_compile(self: Any, *args: Any, **options: Any) -> Any:
        collected = _loaded.get()
        if collected is not None:
            is_backward = bool((getattr(self, "fx_kwargs", None) or {}).get("is_backward"))
            collected.append((is_backward, str(getattr(self, "source_code", ""))))
        return make_ready(self, *args, **options)

    CompiledFxGraph.post_compile = post_compile


def run_after(graph: fx.Graph, before: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
    """Have nodes run after others that they do not read, through all that Inductor does to a graph from here on.

    The nodes are in the order of the graph, and so are those that each runs after. Private, because the dependencies
    are torch's own ``control_deps``, which its overlap scheduler places: they hold in the lowering, for the fusion of
    kernels and in every reordering of the scheduler.
    """
    from torch._inductor.fx_passes import control_dependencies
    from torch.utils._ordered_set import OrderedSet

    require(control_dependencies, ("preserve_node_ordering",), "keeps the order of collectives with it")
    found = {node: OrderedSet(others) for node, others in before.items()}
    control_dependencies.preserve_node_ordering(graph, found)


def is_lowered_as_one(target: Any) -> bool:
    """Whether a pattern of Inductor's has replaced operators by this function of its own, which makes the kernel."""
    return bool(getattr(target, "_inductor_lowering_function", False))


_REORDER: dict[str, Any] = {
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "dedup_reduce_scatters": False,
    "_fuse_ddp_communication": False,
    "_micro_pipeline_tp": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_low_contention_collectives": False,
    "aten_distributed_optimizations.allow_comms_decompositions": False,
}


def settings_in_order() -> dict[str, Any]:
    """The values of the settings under which Inductor moves, joins and replaces no collective of itself: of those that
    this torch has, since it takes no unknown one."""
    known = inductor_settings()
    return {name: value for name, value in _REORDER.items() if name in known}


def is_set(name: str) -> bool:
    """Whether the program has given a setting of Inductor's another value than torch does."""
    import torch._inductor.config as config

    return not config._is_default(name)


def setting(name: str) -> Any:
    """The present value of a setting of Inductor's."""
    import torch._inductor.config as config

    return getattr(config, name)


def takes_lists_of_passes() -> bool:
    """Whether a hook of Inductor's may be given several passes."""
    import torch._inductor.custom_graph_pass as custom_graph_pass

    return hasattr(custom_graph_pass, "get_custom_graph_passes")


def compile_with_aot_eager(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., Any],
    as_called: Callable[[fx.GraphModule, Callable[..., Any], bool], Callable[..., Any]],
    inference: ChangeInference | None = None,
) -> Any:
    """AOTAutograd with a partitioner and no compiler behind it: torch's ``aot_eager`` backend fixes the partitioner.

    ``as_called``: from a half, what calls it with a list, and whether it is the backward, to what is called instead.
    ``inference`` is given a graph without gradients.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def half(gm: fx.GraphModule, half_inputs: Sequence[Any], *, is_backward: bool) -> Any:
        run = boxed_nop(gm, half_inputs)
        return as_called(gm, run, is_backward) if isinstance(run, FunctionType) else run  # what a cache keeps stays

    def alone(gm: fx.GraphModule, graph_inputs: Sequence[Any]) -> Any:
        if inference is not None:
            inference(gm)
        return half(gm, graph_inputs, is_backward=False)

    compiler = aot_autograd(
        fw_compiler=partial(half, is_backward=False),
        inference_compiler=alone,
        bw_compiler=partial(half, is_backward=True),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, inputs)


def partitioner_base() -> type[Any]:
    """Inductor takes a partitioner only as an instance of this class, whose ``uuid`` its caches ask for."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def graph_pass_base() -> type[Any]:
    """Inductor's caches take a custom pass only as an instance of this class, whose ``uuid`` they ask for."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def hooks_that_hold(custom_pass: object) -> tuple[str, ...]:
    """The settings of Inductor, by name, under which a pass is registered at present, alone or in a list.

    Read at the call: what ``torch.compile(options=…)`` sets holds only while a graph is compiled.
    """
    import torch._inductor.config as config

    return tuple(name for name in _PASS_SETTINGS if _holds(getattr(config, name, None), custom_pass))


_PASS_SETTINGS = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "pre_grad_custom_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def _holds(setting: Any, custom_pass: object) -> bool:
    return any(each is custom_pass for each in (setting if isinstance(setting, (list, tuple)) else (setting,)))


def inductor_settings() -> dict[str, Any]:
    """Every setting of Inductor with its present value."""
    import torch._inductor.config as config

    return config.get_config_copy()


def settings_lines(module: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings as text that is the same in every process; of what has no such text, what kind of thing it is."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return [
        f"{module}.{name} = {value!r}" if isinstance(value, plain) and " at 0x" not in repr(value)
        else f"{module}.{name} = {getattr(value, '__qualname__', type(value).__qualname__)}"
        for name, value in sorted(settings.items())
    ]  # fmt: skip


def inductor_mode(mode: str) -> dict[str, Any]:
    """The settings that ``torch.compile(mode=...)`` stands for. Raises ``RuntimeError`` for a mode it does not know."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def inductor_cache_folder() -> str:
    """Where Inductor keeps its caches (``TORCHINDUCTOR_CACHE_DIR``), created on the way."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def cache_hits() -> int:
    """How often AOTAutograd took a compiled graph from its cache: then no partitioner was called."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"])
