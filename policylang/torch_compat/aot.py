"""Every private name of torch that policylang uses, one function each, and why.

Supported: torch 2.11 to the newest; seen to run on 2.13.0. Where a version lacks a name, the function says what is
missing and what needs it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

# --- partitioning a joint graph ------------------------------------------------------------------------------------


def extract_forward_backward(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_opaque: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two halves of a joint graph for given saved values.

    Private because there is no public way to build a partitioner; it carries output descriptors, version-counter
    classes and symbol bindings, which change from version to version. The lists are changed to what was really saved.
    """
    partitioners = _partitioners()
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if _is_primal(node)]
    lists = [saved, saved_symbols]
    if "saved_opaque_nodes" in _parameters(partitioners._extract_fwd_bwd_modules):  # from 2.12
        lists.append(saved_opaque)
    else:
        saved.extend(saved_opaque)
    static = _ordered_set(primals[index] for index in static_inputs if index < len(primals))
    halves: tuple[fx.GraphModule, fx.GraphModule] = partitioners._extract_fwd_bwd_modules(
        joint, *lists, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_nodes=static
    )
    return halves


def replay_random(
    nodes: list[fx.Node], forward: fx.GraphModule, backward: fx.GraphModule, num_symbols: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Let the recomputation of the given joint nodes draw what the forward drew.

    ``functionalize_rng_ops`` reads the joint module's node list alone, so it is shown only the nodes that are meant:
    an SDPA without dropout is tagged random, and wrapping it would cost a state for nothing.
    """
    shown = SimpleNamespace(graph=SimpleNamespace(nodes=nodes))
    with _fake_mode_of(nodes):
        halves: tuple[fx.GraphModule, fx.GraphModule] = _partitioners().functionalize_rng_ops(
            shown, forward, backward, num_symbols
        )
    return halves


def _fake_mode_of(nodes: list[fx.Node]) -> AbstractContextManager[Any]:
    """The mode that the nodes' values were traced in: outside a compilation torch looks for an active one alone."""
    from torch._guards import detect_fake_mode

    values = [leaf for node in nodes for leaf in tree_leaves(node.meta.get("val"))]
    mode: AbstractContextManager[Any] | None = None if detect_fake_mode() else detect_fake_mode(values)
    return nullcontext() if mode is None else mode


def modules_without_code() -> AbstractContextManager[None]:
    """Within, modules that torch makes of graphs generate their code on first use: a graph is changed many times first.

    PyTorch's own compile path runs its partitioner under this.
    """
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    context: AbstractContextManager[None] = _use_lazy_graph_module(True)
    return context


def thread_random_states(module: fx.GraphModule, *, is_backward: bool) -> fx.GraphModule:
    """Pass on the generator states that nested subgraphs ask for (CUDA-graph-safe random numbers)."""
    threaded: fx.GraphModule = _partitioners().thread_graphsafe_rng_from_hops(module, is_backward=is_backward)
    return threaded


def offload_activations(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> None:
    """PyTorch's own activation offloading, where its configuration asks for it; partitioners are to call it."""
    if not getattr(_functorch_config(), "enable_activation_offloading", False):
        return
    from torch._functorch._activation_offloading.activation_offloading import enable_activation_offloading

    placeholders = forward.graph.find_nodes(op="placeholder")
    primals = [node for node in placeholders if _is_primal(node)]
    static = _ordered_set(primals[index] for index in static_inputs if index < len(primals))
    enable_activation_offloading(forward, backward, num_fwd_outputs, static)


def is_symbolic(node: fx.Node) -> bool:
    """Whether a node's value is a symbolic size, bool or float: those are saved apart from tensors."""
    from torch.fx.experimental.proxy_tensor import py_sym_types

    return isinstance(node.meta.get("val"), py_sym_types)


def is_opaque(node: fx.Node) -> bool:
    """Whether a node's value is a script object or process group; torch before 2.12 knows no such saved values."""
    check = getattr(_partitioners(), "is_opaque_node", None)
    return bool(check and check(node))


def must_be_in_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd pinned a node to the backward: a mutation that has to happen there."""
    return bool(_partitioners()._must_be_in_backward(node))


def storage_key(value: torch.Tensor) -> int | None:
    """The same for two tensors, fake ones too, that share memory; None for a tensor without storage of its own."""
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:
        return None


def cse_enabled() -> bool:
    """``torch._functorch.config.cse``, which our own elimination respects."""
    return bool(_functorch_config().cse)


def min_cut_saved_values(
    joint: fx.GraphModule, *, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> list[fx.Node] | None:
    """What PyTorch's min-cut would save of a tagged joint graph; None where the graph has no backward to save for.

    The steps of ``min_cut_rematerialization_partition`` between its CSE and its extraction. It honours the memory
    budget of the configuration and of annotated regions, and agrees across ranks as PyTorch does.
    """
    partitioners = _partitioners()
    config = _functorch_config()
    if not config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(joint)
    partitioners.force_save_effectful_ops(joint)
    partitioners.force_save_bw_mutation_src(joint)
    info = partitioners.classify_nodes(joint, list(static_inputs), num_fwd_outputs)
    if not info.required_bw_nodes:
        return None
    _measure_distance_from_backward(joint.graph, info)
    saved: list[fx.Node] = partitioners.choose_saved_values_set(
        joint.graph, info, memory_budget=_memory_budget(joint.graph)
    )
    if config._sync_decision_cross_ranks:
        saved = partitioners._sync_decision_cross_ranks(joint.graph, saved)
    return saved


def _measure_distance_from_backward(graph: fx.Graph, info: Any) -> None:
    """The attribute by which min-cut weighs nodes near the backward: steps to the nearest backward node."""
    far = 10**9
    for node in reversed(graph.nodes):
        if node.op == "output":
            distance = far
        elif not info.is_required_fw(node):
            distance = 0
        else:
            distance = min((user.dist_from_bw + 1 for user in node.users), default=far)
        node.dist_from_bw = min(distance, far)


def _memory_budget(graph: fx.Graph) -> float:
    """The configured budget, or the one that the user annotated the graph's nodes with."""
    annotated = getattr(fx.traceback, "_get_memory_budget_annotation", lambda node: None)  # from 2.13
    for node in graph.nodes:
        for budget in (annotated(node), node.meta.get("memory_budget")):
            if isinstance(budget, float):
                return budget
    return float(_functorch_config().activation_memory_budget)


def _is_primal(node: fx.Node) -> bool:
    """Whether a placeholder is an input of the forward."""
    return bool(_partitioners()._is_primal(node))


def _ordered_set(nodes: Iterable[fx.Node]) -> Any:
    from torch.utils._ordered_set import OrderedSet

    return OrderedSet(nodes)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _functorch_config() -> Any:
    import torch._functorch.config as config

    return config


@cache
def _partitioners() -> Any:
    """The module of PyTorch's own partitioners, with the names that the joint-graph backend stands on."""
    import torch._functorch.partitioners as partitioners

    wanted = (
        "_extract_fwd_bwd_modules",
        "functionalize_rng_ops",
        "thread_graphsafe_rng_from_hops",
        "classify_nodes",
        "choose_saved_values_set",
        "force_save_collectives",
        "force_save_effectful_ops",
        "force_save_bw_mutation_src",
        "_must_be_in_backward",
        "_is_primal",
    )
    missing = [name for name in wanted if not hasattr(partitioners, name)]
    if missing:
        raise ImportError(
            f"torch {torch.__version__} has no `{'`, `'.join(missing)}` in torch._functorch.partitioners; "
            "policylang partitions joint graphs with torch 2.11 and later"
        )
    return partitioners


# --- watching a step run --------------------------------------------------------------------------------------------


def watching_results(watch: Callable[[torch.Tensor], None]) -> AbstractContextManager[object]:
    """A context in which ``watch`` sees every tensor that an operator returns, in compiled code too.

    Private because dispatch modes are; there is no public way to see the operators of code that another compiler runs.
    Inductor's kernels are no operators: under that inner compiler only what it leaves to aten is seen.
    """
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watching(TorchDispatchMode):  # type: ignore[misc]  # the type checker does not follow torch
        @classmethod
        def ignore_compile_internals(cls) -> bool:  # else compiled code would run uncompiled under the mode
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    watch(leaf)
            return result

    return Watching()


# --- compiling through torch.compile -------------------------------------------------------------------------------


def compile_with_inductor(graph: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Inductor's entry for a graph of Dynamo's. ``settings`` also hold when the backward is compiled, later.

    Private because ``torch.compile`` offers no way to call Inductor with a partitioner of one's own; a configuration
    patched around the call would have expired by the first backward.
    """
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=dict(settings))


def compile_with_aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Any]) -> Any:
    """AOTAutograd with a partitioner and no compiler behind it: torch's ``aot_eager`` backend fixes the partitioner."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compiler = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True
    )
    return compiler(graph, inputs)


def partitioner_base() -> type[Any]:
    """Inductor takes a partitioner only as an instance of this class, whose ``uuid`` its caches ask for."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    base: type[Any] = CustomPartitionerFn
    return base


def graph_pass_base() -> type[Any]:
    """Inductor's caches take a custom pass only as an instance of this class, whose ``uuid`` they ask for."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    base: type[Any] = CustomGraphPass
    return base


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

    settings: dict[str, Any] = config.get_config_copy()
    return settings


def settings_lines(module: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings as text that is the same in every process; of what has no such text, what kind of thing it is."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return [
        f"{module}.{name} = {value!r}" if isinstance(value, plain) and " at 0x" not in repr(value)
        else f"{module}.{name} = {getattr(value, '__qualname__', type(value).__qualname__)}"
        for name, value in sorted(settings.items())
    ]  # fmt: skip


def functorch_settings() -> dict[str, Any]:
    """Every setting of AOTAutograd with its present value."""
    settings: dict[str, Any] = _functorch_config().get_config_copy()
    return settings


def inductor_mode(mode: str) -> dict[str, Any]:
    """The settings that ``torch.compile(mode=...)`` stands for. Raises ``RuntimeError`` for a mode it does not know."""
    from torch._inductor import list_mode_options

    settings: dict[str, Any] = list_mode_options(mode)
    return settings


def inductor_cache_folder() -> str:
    """Where Inductor keeps its caches (``TORCHINDUCTOR_CACHE_DIR``), created on the way."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def backend_of(compiled: Any) -> Any:
    """The backend that what ``torch.compile(module)`` returned was given; None where it cannot be told.

    Private because the compiled module keeps it behind Dynamo's wrappers only, one attribute each.
    """
    return backend_behind(getattr(getattr(compiled, "dynamo_ctx", None), "callback", None))


def backend_behind(wrapper: Any) -> Any:
    """The backend that Dynamo's wrappers are around."""
    while True:
        inner = getattr(wrapper, "_torchdynamo_orig_backend", None) or getattr(wrapper, "compiler_fn", None)
        if inner is None:
            return wrapper
        wrapper = inner


def recompile_limit() -> int:
    """How often Dynamo compiles one piece of code before it gives up and runs it eagerly."""
    import torch._dynamo.config as config

    return int(config.recompile_limit)


def code_being_compiled() -> int:
    """A number for the piece of code that Dynamo compiles, the same each time it does; -1 outside of a compilation.

    Private because the number of a compilation is in the tracing context alone.
    """
    from torch._guards import CompileContext

    return int(getattr(CompileContext.current_compile_id(), "frame_id", -1))


def code_location() -> str:
    """The piece of code that Dynamo compiles, in words that are the same on every rank: ``forward (model.py:12)``;
    empty outside of a compilation.

    Private because the code is known to the running translator alone.
    """
    translating = sys.modules.get("torch._dynamo.symbolic_convert")
    if translating is None:
        return ""
    try:
        code = translating.InstructionTranslator.current_tx().f_code
    except AttributeError:  # none is running in this thread
        return ""
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def dynamo_graphs() -> list[fx.Graph]:
    """The graph that Dynamo is handing to its backend and those nested in it; empty outside of that.

    Private because a partitioner is handed the joint graph alone, and torch's caches ask for its key before there is
    one.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return []
    nested = [
        part
        for module in output.nn_modules.values()
        if isinstance(module, torch.nn.Module)
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
    ]
    return [output.graph, *(module.graph for module in nested)]


def cache_hits() -> int:
    """How often AOTAutograd took a compiled graph from its cache: then no partitioner was called."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"])


def through_dynamo(error: Exception, frame: FrameType | None) -> Exception:
    """The same error, such that ``torch.compile`` hands it to the user as it is.

    Dynamo wraps what a backend raises in ``BackendCompilerFailed``, whose type no ``except PolicyError`` catches;
    exceptions that are also a ``ShortenTraceback`` pass, and lose the frames before ``frame``.
    """
    kind: Any = type(error)  # exception classes are hashable, whatever their stubs say
    passing: Exception = _passing(kind)(error, frame)
    return passing


@cache
def _passing(kind: Any) -> Any:
    from torch._dynamo.exc import ShortenTraceback

    def __init__(self: Any, error: Exception, frame: FrameType | None) -> None:
        ShortenTraceback.__init__(self, *error.args, first_useful_frame=frame)
        vars(self).update(vars(error))
        self._said = str(error)

    def __str__(self: Any) -> str:  # Dynamo appends to the arguments how to see its own stack
        return str(self._said)

    names = {
        "__init__": __init__,
        "__str__": __str__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (_original_on_pickling(kind), kind, ShortenTraceback), names)


def _original_on_pickling(kind: type[Exception]) -> type[Any]:
    """A mixin: the class made for Dynamo cannot be imported, so its instances are pickled as what they stand for."""

    class Travelling:
        def __reduce__(self) -> Any:
            reduced = kind.__reduce__(self)
            return (kind, *reduced[1:])

    return Travelling


# --- random numbers on a flat graph -------------------------------------------------------------------------------


def random_state_operators() -> tuple[Any, Any]:
    """``run_and_save_rng_state(op, …) -> (state, result)`` and ``run_with_rng_state(state, op, …) -> result``.

    Private because torch's own partitioner is their only other user; they are the one way to draw the same numbers
    twice that needs no counter-based generator, so it works on the CPU too.
    """
    from torch._prims import rng_prims

    wanted = ("run_and_save_rng_state", "run_with_rng_state")
    if missing := [name for name in wanted if not hasattr(rng_prims, name)]:
        raise ImportError(
            f"torch {torch.__version__} has no `{'`, `'.join(missing)}` in torch._prims.rng_prims; policylang needs "
            "them to recompute dropout and other random operators on a flat graph"
        )
    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state


def recompile_when_called(module: fx.GraphModule) -> None:
    """Generate a changed graph's code when it is first called, printed or pickled, not now.

    Generating code costs more than all that a pass over a flat graph does, and of a list of passes only the last one's
    code is run. Private because only Dynamo makes such graph modules; every graph module has a class of its own, so
    this one alone changes. Where torch has no such class, the code is generated now.
    """
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        module.recompile()
        return
    own = type(module)
    if own is not fx.GraphModule and own.__bases__ == (fx.GraphModule,) and "GraphModuleImpl" in own.__qualname__:
        own.__bases__ = (_LazyGraphModule,)
        own._lazy_forward = _first_forward
    module.recompile()


def _first_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of torch's, which goes through ``__call__`` again: hooks would run twice."""
    self.real_recompile()
    return self.forward(*args, **kwargs)
