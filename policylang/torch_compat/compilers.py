"""The private names of torch.compile: of Dynamo, Inductor, and the traces and profiles of what they do."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial, wraps
from types import FrameType, FunctionType
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from policylang.torch_compat.graphs import require

# --- the compilation that is running ------------------------------------------------------------------------------


def code_being_compiled() -> int:
    """A number for the piece of code that Dynamo compiles, the same each time it does; -1 outside of a compilation."""
    from torch._guards import CompileContext

    return int(getattr(CompileContext.current_compile_id(), "frame_id", -1))


def code_location() -> str:
    """The code that Dynamo compiles, alike on every rank: ``forward (model.py:12)``; empty outside of a compilation."""
    translator = _translator()
    if translator is None:
        return ""
    code = translator.f_code
    return f"{code.co_qualname} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def dynamo_graphs() -> list[fx.Graph]:
    """The graph that Dynamo is handing to its backend and those nested in it; empty outside of that. A partitioner is
    handed the joint graph alone, and torch's caches ask for its key before there is one."""
    translator = _translator()
    if translator is None:
        return []
    output = translator.output
    modules = (module for module in output.nn_modules.values() if isinstance(module, torch.nn.Module))
    nested = (part for module in modules for part in module.modules() if isinstance(part, fx.GraphModule))
    return [output.graph, *(part.graph for part in nested)]


def running_dynamo_inputs() -> list[fx.Node]:
    """The inputs of the graph that Dynamo is having compiled, in order; empty where it is not compiling. AOTAutograd
    gives a partitioner only the position of an input that Dynamo lifted."""
    translator = _translator()
    return [] if translator is None else list(translator.output.placeholders)


def _translator() -> Any:
    """Dynamo's translator of Python's code in this thread; None outside of a compilation. Dynamo is not imported for
    that: where nobody has, nothing is being compiled."""
    translating = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return None if translating is None else translating.InstructionTranslator.current_tx()
    except AttributeError:  # none is running in this thread
        return None


def input_source(placeholder: fx.Node) -> tuple[str, bool]:
    """The source of an input of Dynamo's graph, empty where it has none; and whether it is a ``Parameter``."""
    source, value = getattr(placeholder, "_dynamo_source", None), input_value(placeholder)
    name = "" if source is None or not isinstance(value, torch.Tensor) else source.name
    return str(name() if callable(name) else name), isinstance(value, torch.nn.Parameter)  # a method up to 2.11


def input_value(placeholder: fx.Node) -> Any:
    """The value that Dynamo has traced an input of its graph with; other graphs keep it as ``val``."""
    return placeholder.meta.get("example_value")


# --- what was compiled, and with which backend --------------------------------------------------------------------


def is_compiled(module: torch.nn.Module) -> bool:
    """True if a module was given to ``torch.compile`` or had ``.compile()`` called on it."""
    return is_wrapped_by_compiler(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_wrapped_by_compiler(module: torch.nn.Module) -> bool:
    """True if a module is what ``torch.compile(module)`` returns, and not itself a part of any model."""
    from torch._dynamo.eval_frame import OptimizedModule

    return isinstance(module, OptimizedModule)


def compiled_in_place(modules: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """Positions of the modules that had ``.compile()`` called on them. Cheap, since every call asks."""
    return tuple([at for at, module in enumerate(modules) if "_compiled_call_impl" in module.__dict__])


def compiler_of(module: torch.nn.Module) -> Any:
    """The backend of a compiled module; None if unknown. ``module.compile()`` keeps the wrapper of a function."""
    function = getattr(module, "_compiled_call_impl", None)
    return backend_of(module if function is None else function)


def backend_of(compiled: Any) -> Any:
    """The backend of what ``torch.compile`` returned for a module or a function; None if unknown. The wrapper of a
    function has it in its closure alone."""
    if not isinstance(compiled, FunctionType):
        return backend_behind(getattr(getattr(compiled, "dynamo_ctx", None), "callback", None))
    cells = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=False))
    is_compiled = "callback" in cells and hasattr(compiled, "_torchdynamo_orig_callable")
    return backend_behind(cells["callback"].cell_contents) if is_compiled else None


def backend_behind(wrapper: Any) -> Any:
    while True:
        inner = getattr(wrapper, "_torchdynamo_orig_backend", None) or getattr(wrapper, "compiler_fn", None)
        if inner is None:
            return wrapper
        wrapper = inner


def was_left_uncompiled(error: BaseException | None) -> bool:
    """True if ``torch.compile(…, fullgraph=True)`` raised this because it ran as it is, as under a dispatch mode. It is
    a plain RuntimeError, identified by the frame that raised it."""
    raised = None if error is None else error.__traceback__
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    return raised is not None and raised.tb_frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def compiles_backwards_anew() -> bool:
    """True if compiled autograd is on: it takes compiled backwards apart, and compiles what it makes of them."""
    import torch._dynamo.compiled_autograd as compiled_autograd
    import torch._dynamo.config as config

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def recompile_limit() -> int:
    """The number of times Dynamo compiles one piece of code before it runs it eagerly."""
    import torch._dynamo.config as config

    return config.recompile_limit


# --- what was not compiled ----------------------------------------------------------------------------------------


class FrameLeft(NamedTuple):
    """A piece of code that Dynamo took up and compiled nothing of: it runs as it is."""

    name: str
    file: str
    line: int
    why: str
    """The first line of Dynamo's message, and its place; the rest is advice about torch."""


def frames_left(since: int = 0) -> list[FrameLeft]:
    """The code that Dynamo gave up on since a time (microseconds since the epoch), among the last 64 compilations. From
    the records that Dynamo keeps for its logs. A frame is identified by its number: at a limit on recompilations, the
    record does not name the code."""
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo import exc
    from torch._dynamo.utils import get_compilation_metrics

    places: dict[str, tuple[str, str, int]] = {}
    found: dict[str, FrameLeft] = {}
    for record in get_compilation_metrics():
        frame = str(record.compile_id).partition("/")[0]
        if record.co_name is not None:
            places[frame] = record.co_name, record.co_filename, record.co_firstlineno
            found.pop(frame, None)
        if record.fail_type is None or record.is_forward is False or frame not in places:
            continue
        kind = getattr(exc, record.fail_type, Exception)  # other errors are raised, unless the program suppresses them
        if not (issubclass(kind, exc.Unsupported | exc.UserError | exc.SkipFrame) or record.config_suppress_errors):
            continue
        if (record.start_time_us or 0) >= since:
            why = _why(record.fail_reason or record.fail_type)
            file, line = record.fail_user_frame_filename, record.fail_user_frame_lineno
            found[frame] = FrameLeft(*places[frame], f"{why} ({os.path.basename(file)}:{line})" if file else why)
    return list(found.values())


def _why(said: str) -> str:
    """The first line of Dynamo's message; if it only reports a delayed graph break (a recurrent module, from torch 2.15
    on), the reason for the break."""
    first, _, rest = said.partition("\n")
    reason = re.search(r"\bReason: (.+?)(?:\. |\.?$)", rest, re.MULTILINE) if "(delayed)" in first else None
    return reason[1] if reason else first.strip()


# --- errors -------------------------------------------------------------------------------------------------------


def through_dynamo(error: Exception, frame: FrameType | None) -> Exception:
    """A copy of an error that ``torch.compile`` passes on to the user as it is. Dynamo wraps what a backend raises in
    ``BackendCompilerFailed``, whose type no ``except PolicyError`` catches; exceptions that are also a
    ``ShortenTraceback`` pass, and lose the frames before ``frame``."""
    kind: Any = type(error)  # exception classes are hashable, whatever their stubs claim
    return _passing(kind)(error, frame)


@cache
def _passing(kind: Any) -> Any:
    from torch._dynamo.exc import ShortenTraceback

    def __init__(self: Any, error: Exception, frame: FrameType | None) -> None:
        ShortenTraceback.__init__(self, *error.args, first_useful_frame=frame)
        vars(self).update(vars(error))
        self._said = str(error)

    def __str__(self: Any) -> str:  # Dynamo appends to the arguments how to see its stack
        return str(self._said)

    def __reduce__(self: Any) -> Any:  # this class cannot be imported: pickled as the original one
        return (kind, *kind.__reduce__(self)[1:])

    names = {each.__name__: each for each in (__init__, __str__, __reduce__)}
    said = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind, ShortenTraceback), names | said)


WatchGraph = Callable[[fx.Graph, bool], Callable[[str], None]]
"""From a graph as Inductor receives it, and True for the backward, to a function that receives the generated code."""

ChangeInference = Callable[[fx.GraphModule], object]
"""Changes a graph without gradients, in place, before it is compiled."""


def compile_with_inductor(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    watch: WatchGraph | None = None,
    inference: ChangeInference | None = None,
) -> Any:
    """Inductor's entry for a graph of Dynamo's. ``settings`` also hold when the backward is compiled, later, and
    ``watch`` is asked then too. It is not asked of a graph without gradients, which ``inference`` is given instead.
    Neither is called if AOTAutograd has the compiled graph in its cache (:func:`code_from_caches`).

    ``torch.compile`` cannot call Inductor with a custom partitioner.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def watched(gm: fx.GraphModule, graph_inputs: Sequence[Any], **options: Any) -> Any:
        if inference is not None and options.get("is_inference"):
            inference(gm)
        if watch is None or options.get("is_inference"):
            return compile_fx_inner(gm, graph_inputs, **options)
        tell = watch(gm.graph, bool(options.get("is_backward")))
        compiled = compile_fx_inner(gm, graph_inputs, **options)
        tell(str(getattr(compiled, "source_code", "")))
        return compiled

    if watch is None and inference is None:
        return compile_fx(graph, inputs, config_patches=dict(settings))
    return compile_fx(graph, inputs, inner_compile=watched, config_patches=dict(settings))


_loaded: ContextVar[list[tuple[bool, str]] | None] = ContextVar("policylang_loaded", default=None)


@contextmanager
def code_from_caches() -> Iterator[list[tuple[bool, str]]]:
    """Collects the code of every graph that is made ready to run meanwhile, with whether it is the backward.
    AOTAutograd's cache returns one callable around forward and backward, whose code nobody can ask for. So the method
    that makes compiled code ready is wrapped, once a process."""
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
    """Have nodes run after others that they do not read, through all that Inductor does to a graph from here on. The
    nodes are in the order of the graph, and so are those that each runs after. The dependencies are torch's
    ``control_deps``: they hold in the lowering, for the fusion of kernels and in every reordering of the scheduler."""
    from torch._inductor.fx_passes import control_dependencies
    from torch.utils._ordered_set import OrderedSet

    require(control_dependencies, ("preserve_node_ordering",), "keeps the order of collectives with it")
    found = {node: OrderedSet(others) for node, others in before.items()}
    control_dependencies.preserve_node_ordering(graph, found)


def invoke_subgraph() -> Any:
    """The operator that calls a subgraph, which Inductor lowers once for all calls; None where it generates C++ around
    its kernels (``cpp_wrapper``), which cannot call one."""
    return None if setting("cpp_wrapper") else torch.ops.higher_order.invoke_subgraph


def is_lowered_as_one(target: Any) -> bool:
    """True if a pattern of Inductor's has replaced operators by this function, which makes the kernel."""
    return getattr(target, "_inductor_lowering_function", False)


_OVERLAP = ("enable_overlap_scheduling", "enable_simple_overlap", "enable_low_contention_collectives")
_REORDER: dict[str, Any] = {
    **dict.fromkeys(("reorder_for_peak_memory", "reorder_for_compute_comm_overlap"), False),
    **dict.fromkeys(("bucket_all_gathers_fx", "bucket_reduce_scatters_fx", "bucket_all_reduces_fx"), "none"),
    **dict.fromkeys(("dedup_reduce_scatters", "_fuse_ddp_communication", "_micro_pipeline_tp"), False),
    **{f"aten_distributed_optimizations.{name}": False for name in (*_OVERLAP, "allow_comms_decompositions")},
}


def settings_in_order() -> dict[str, Any]:
    """The values of the settings under which Inductor moves, joins and replaces no collective of itself: of those that
    this torch has, since it takes no unknown one."""
    known = inductor_settings()
    return {name: value for name, value in _REORDER.items() if name in known}


def is_set(name: str) -> bool:
    """True if the program has given a setting of Inductor's another value than torch does."""
    return not _inductor_config()._is_default(name)


def setting(name: str) -> Any:
    """The present value of a setting of Inductor's."""
    return getattr(_inductor_config(), name)


def takes_lists_of_passes() -> bool:
    """True if a hook of Inductor's may be given several passes."""
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
    ``as_called``: from a graph, what calls it with a list, and whether it is the backward, to what is called instead.
    ``inference`` is given a graph without gradients."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def run_eagerly(gm: fx.GraphModule, graph_inputs: Sequence[Any], *, is_backward: bool) -> Any:
        run = boxed_nop(gm, graph_inputs)
        return as_called(gm, run, is_backward) if isinstance(run, FunctionType) else run  # what a cache keeps stays

    def alone(gm: fx.GraphModule, graph_inputs: Sequence[Any]) -> Any:
        if inference is not None:
            inference(gm)
        return run_eagerly(gm, graph_inputs, is_backward=False)

    compiler = aot_autograd(
        fw_compiler=partial(run_eagerly, is_backward=False),
        inference_compiler=alone,
        bw_compiler=partial(run_eagerly, is_backward=True),
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
    """The settings of Inductor, by name, under which a pass is registered at present, alone or in a list. Read at the
    call: what ``torch.compile(options=…)`` sets holds only while a graph is compiled."""
    given = {name: setting(name) for name in _PASS_SETTINGS}
    lists = {name: each if isinstance(each, (list, tuple)) else (each,) for name, each in given.items()}
    return tuple(name for name, passes in lists.items() if any(each is custom_pass for each in passes))


_PASS_SETTINGS = (
    *("joint_custom_pre_pass", "joint_custom_post_pass", "pre_grad_custom_pass"),
    *("post_grad_custom_pre_pass", "post_grad_custom_post_pass"),
)


def inductor_settings() -> dict[str, Any]:
    """Every setting of Inductor with its present value."""
    return _inductor_config().get_config_copy()


def _inductor_config() -> Any:
    import torch._inductor.config as config

    return config


def settings_lines(module: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings as text that is the same in every process; the type of a value without such text."""
    plain = (bool, int, float, str, list, tuple, type(None))

    def text(value: Any) -> str:
        if isinstance(value, plain) and " at 0x" not in repr(value):
            return repr(value)
        return getattr(value, "__qualname__", type(value).__qualname__)

    return [f"{module}.{name} = {text(value)}" for name, value in sorted(settings.items())]


def inductor_mode(mode: str) -> dict[str, Any]:
    """The settings that ``torch.compile(mode=...)`` sets. Raises ``RuntimeError`` for a mode it does not know."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def inductor_cache_folder() -> str:
    """The folder of Inductor's caches (``TORCHINDUCTOR_CACHE_DIR``), created if missing."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def cache_hits() -> int:
    """The number of times AOTAutograd took a compiled graph from its cache: then no partitioner was called."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"])


def is_tracing() -> bool:
    """True if a structured trace is written; without ``TORCH_TRACE`` there is a handler without a folder at first."""
    from torch._logging._internal import trace_log

    return any(getattr(handler, "root_dir", None) is not None for handler in trace_log.handlers)


def trace_artifact(name: str, encoding: Literal["string", "json"], payload: Callable[[], str]) -> None:
    """Write a text to the trace, under the current compilation if any. tlparse gives each artifact a file."""
    from torch._logging import trace_structured

    described = {"name": name, "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: described, payload_fn=payload, expect_trace_id=False)


def is_profiling() -> bool:
    """True if a profiler runs, on any thread; the public functions know the calling thread alone."""
    return torch.autograd.profiler._is_profiler_enabled


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range of a profile. The public ``record_function`` is an operator: a dispatch mode around it would record it as
    one of the model's."""
    return torch._C._profiler._RecordFunctionFast(name)
