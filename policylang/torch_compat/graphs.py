"""The private names of torch that reading and splitting graphs needs, and the error where a torch lacks one."""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils._pytree import tree_leaves


def require(module: ModuleType, names: Iterable[str], why: str) -> None:
    """Raises ``ImportError`` where a module of torch lacks one of the names. ``why``: what policylang does with it."""
    if missing := [name for name in names if not hasattr(module, name)]:
        listed = "`, `".join(missing)
        raise ImportError(f"torch {torch.__version__} has no `{listed}` in {module.__name__}; policylang {why}")


_GRADIENTS = frozenset({"GradAOTOutput", "PhiloxUpdatedBackwardOffsetAOTOutput", "BackwardTokenAOTOutput"})
_SAVED = frozenset({"SavedForBackwardsAOTOutput", "SavedForBackwardsNoVcCheckAOTOutput"})
_BASES = ("base", "base_of")
_BUILTINS = ("abs", "bool", "float", "getattr", "int", "max", "min", "pow", "round", "sum")
UNBACKED_HINT = 4096
"""The number for a size that is known at run time only, as in PyTorch's own partitioner, unless it has to be less."""


def schema_of(operator: Any) -> Any:
    """The schema of an operator, with names and aliases; None for what has none. No public attribute holds it."""
    return getattr(operator, "_schema", None)


def described_input(desc: Any) -> tuple[str, str, int | None]:
    """The kind in a graph input's descriptor: ``parameter``, ``buffer``, ``user``, ``tangent`` or ``other``, the dotted
    name of a parameter or buffer, and, without anything else, the position among the traced function's inputs. A part
    of a tensor subclass (the local shard of a DTensor) and the base of a view have the kind of their source."""
    desc = underlying_input(desc)
    kind = type(desc).__name__
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        return ("parameter" if kind == "ParamAOTInput" else "buffer"), desc.target, None
    if kind == "PlainAOTInput":
        return "user", "", desc.idx
    return ("tangent" if kind == "TangentAOTInput" else "other"), "", None


def underlying_input(desc: Any) -> Any:
    """The descriptor of the whole input that a part of a tensor subclass, or the base of a view, belongs to."""
    while True:
        inner = next((found for name in _BASES if (found := getattr(desc, name, None)) is not None), None)
        if inner is None or not type(inner).__name__.endswith("AOTInput"):
            return desc
        desc = inner


def mutated_input(desc: Any) -> Any:
    """The descriptor of the input that an output's value is copied into after the graph has run; None for others. An
    input whose metadata alone changes (``MetadataMutationAOTOutput``) is not written to."""
    desc = _whole_output(desc)
    return desc.mutated_input if type(desc).__name__ == "InputMutationAOTOutput" else None


def differentiated_input(desc: Any) -> Any:
    """The descriptor of the input that an output is the gradient of; None for others."""
    desc = _whole_output(desc)
    return desc.grad_of if type(desc).__name__ == "GradAOTOutput" else None


def is_backward_output(desc: Any) -> bool:
    """True if a joint graph's output belongs to its backward."""
    return type(_whole_output(desc)).__name__ in _GRADIENTS


def _whole_output(desc: Any) -> Any:
    """The descriptor of the whole output that a part of a tensor subclass belongs to."""
    while type(desc).__name__.startswith("Subclass"):
        desc = desc.base
    return desc


def is_saved_output(desc: Any) -> bool:
    """True if an output of a partition's forward graph is there for the backward alone."""
    return type(desc).__name__ in _SAVED


def descriptor_classes() -> dict[str, type]:
    """The classes of descriptors by name: an imported graph has its descriptors as printed text."""
    from torch._functorch._aot_autograd import descriptors

    return {
        name: found
        for name in dir(descriptors)
        if name.endswith(("Input", "Output")) and isinstance(found := getattr(descriptors, name), type)
    }


def load_distributed_operators() -> None:
    """Registers the operators of collectives, functional and DTensor's; torch imports them only where they are used."""
    if torch.distributed.is_available():
        import_module("torch.distributed._functional_collectives")
        import_module("torch.distributed.tensor")


@cache
def side_effect_functions() -> frozenset[Any]:
    """The functions that torch's own dead-code elimination spares."""
    return frozenset(torch.fx.node._side_effectful_functions)


def value_of(meta: Mapping[str, Any]) -> Any:
    """The fake value of a node: AOTAutograd's, Dynamo's, or what a shape propagation left. Undocumented keys."""
    value = meta.get("val")
    if value is None:
        value = meta.get("example_value")
    if value is None and (recorded := meta.get("tensor_meta")) is not None and hasattr(recorded, "shape"):
        return torch.empty(recorded.shape, dtype=recorded.dtype, device="meta")
    return value


_NO_LIMIT = sys.maxsize - 1


def hint(length: int | torch.SymInt) -> int:
    """A size as a number, a symbolic one as it was traced. Adds no guard, unlike the public functions."""
    if isinstance(length, int):
        return length
    known = getattr(length.node, "hint", None)
    if known is not None:
        return int(known)
    least, most = size_range(length)
    return max(least, UNBACKED_HINT if most is None else min(UNBACKED_HINT, most))


def size_range(length: int | torch.SymInt) -> tuple[int, int | None]:
    """The least and the most that a size can be; None where there is no limit. Adds no guard."""
    if isinstance(length, int):
        return length, length
    found = length.node.shape_env.bound_sympy(length.node.expr)
    least, most = (int(each) if each.is_Integer else None for each in (found.lower, found.upper))
    return max(least or 0, 0), most if most is not None and most < _NO_LIMIT else None


def expressions(size: torch.Size) -> tuple[Any, ...]:
    """The sizes as what has a hash: numbers, and the expressions of symbolic ones."""
    return tuple(length if isinstance(length, int) else length.node.expr for length in size)


def hinted_shape(size: torch.Size) -> torch.Size:
    return torch.Size([hint(length) for length in size])


def has_data_symbol(value: Any) -> bool:
    """True if a size, or a size of a tensor, is a symbol for data (``item()``) rather than for an input's size."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, torch.Tensor | torch.SymInt) and bool(free_unbacked_symbols(value))


def data_terms(length: int | torch.SymInt) -> tuple[int, dict[str, int]] | None:
    """A size as a number and a sum of whole multiples of the symbols for data in it; None where it is no such sum."""
    if isinstance(length, int):
        return length, {}
    expr = length.node.expr
    env = length.node.shape_env
    hints = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # its name up to torch 2.11
    known = {symbol: hints[symbol] for symbol in expr.free_symbols if not _is_data(symbol)}
    constant, terms = 0, dict[str, int]()
    for symbol, times in expr.xreplace(known).as_coefficients_dict().items():
        if not times.is_Integer or not (symbol.is_Integer or symbol.is_Symbol):
            return None
        if symbol.is_Symbol:
            terms[str(symbol)] = int(times)
        else:
            constant += int(times) * int(symbol)
    return constant, terms


def _is_data(symbol: Any) -> bool:
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    return symbol_is_type(symbol, (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT))


def outside_of_modes() -> AbstractContextManager[Any]:
    """Within, no mode of a trace is active; fake tensors still use theirs. A graph may be changed while the
    ``FakeTensorMode`` of another trace is on, and torch mixes no two."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def group_ranks(name: str) -> tuple[int, ...]:
    """The global ranks of the process group that a collective names; empty where it is not known here."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return ()
    import torch.distributed.distributed_c10d as c10d

    try:
        group = c10d._resolve_process_group(name)
        return tuple(torch.distributed.get_process_group_ranks(group))
    except (AttributeError, KeyError, RuntimeError, ValueError, LookupError):
        return ()


def name_of_group(value: Any) -> str:
    """The name of a process group that a call passes as itself; empty for anything else. A group is an object of
    Python's or, where an operator of ``c10d`` is dispatched, TorchScript's box around one."""
    name = getattr(value, "group_name", None)
    if name is None and isinstance(value, torch.ScriptObject) and torch.distributed.is_available():
        try:
            name = torch.distributed.ProcessGroup.unbox(value).group_name
        except (AttributeError, RuntimeError):
            return ""
    return name if isinstance(name, str) else ""


def triton_kernel(index: Any) -> Any:
    """The Triton kernel that a graph calls by its number in a table; None where there is no such kernel, or no Triton.
    What tunes a kernel or chooses its constants is unwrapped, as ``torch.utils.flop_counter`` does."""
    try:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kernel = kernel_side_table.get_kernel(index)
    except (ImportError, AssertionError, LookupError, TypeError):
        return None
    while type(kernel).__name__ != "JITFunction" and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def compute_operators() -> frozenset[str]:
    """``namespace.name`` of PyTorch's compute-intensive operators (``get_default_op_list``)."""
    from torch._functorch.partitioners import get_default_op_list

    return frozenset(str(packet) for packet in get_default_op_list().compute_intensive_ops)


def operator_names() -> list[str]:
    """Every operator that the loaded torch knows, in full and sorted: ``aten.mm.default``, ``higher_order.cond``.
    Dispatched operators, custom ones included, come from the dispatcher and from the schema registry (some are in one
    of them alone), higher-order operators from the table they register in."""
    why = "lists operators with it"
    require(torch._C, ("_dispatch_get_all_op_names", "_jit_get_all_schemas"), why)
    require(torch._ops, ("_higher_order_ops",), why)
    full = set(torch._C._dispatch_get_all_op_names())
    for schema in torch._C._jit_get_all_schemas():
        full.add(f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name)
    names = {f"higher_order.{name}" for name in torch._ops._higher_order_ops}
    for name in full:
        namespace, found, rest = name.partition("::")
        if found:
            bare, _, overload = rest.partition(".")
            names.add(f"{namespace}.{bare}.{overload or 'default'}")
    # a graph with dynamic shapes calls `torch.sym_max` and its like, and Python's own functions on sizes and tuples
    symbolic = (name for name in dir(torch) if name.startswith(("sym_", "_sym_")) and callable(getattr(torch, name)))
    names.update(f"torch.{name}" for name in symbolic)
    public = (name for name in dir(operator) if not name.startswith("_"))
    names.update(f"builtin.{name}" for name in (*public, *_BUILTINS))
    return sorted(names)


def operator_facts() -> dict[str, list[str]]:
    """Facts of torch about its operators, as lists of ``namespace.name``. ``pointwise``, ``reduction`` and ``random``
    are tags that every overload with a functional result carries; ``view`` lists those whose every result aliases an
    argument; ``compute`` is the partitioner's own list of compute-intensive operators."""
    known = torch.Tag
    tags = {"pointwise": known.pointwise, "reduction": known.reduction, "random": known.nondeterministic_seeded}
    facts: dict[str, set[str]] = {fact: set() for fact in (*tags, "view")}
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace not in ("aten", "prims") or schema.is_mutable:
            continue
        packet = getattr(getattr(torch.ops, namespace), name, None)
        overload = getattr(packet, schema.overload_name or "default", None)
        if overload is None:
            continue
        for fact, tag in tags.items():
            if tag in overload.tags:
                facts[fact].add(f"{namespace}.{name}")
        if schema.returns and all(value.alias_info is not None for value in schema.returns):
            facts["view"].add(f"{namespace}.{name}")
    return {**{fact: sorted(names) for fact, names in facts.items()}, "compute": sorted(compute_operators())}


# --- splitting a joint graph --------------------------------------------------------------------------------------


def extract_forward_backward(
    joint: fx.GraphModule,
    saved: list[fx.Node],
    saved_symbols: list[fx.Node],
    saved_opaque: list[fx.Node],
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph of a joint graph for given saved values. It carries output descriptors,
    version-counter classes and symbol bindings, which change from version to version. The lists are changed to what was
    really saved."""
    extract = _partitioners()._extract_fwd_bwd_modules
    lists = [saved, saved_symbols]
    if "saved_opaque_nodes" in inspect.signature(extract).parameters:  # from 2.12
        lists.append(saved_opaque)
    else:
        saved.extend(saved_opaque)
    static = _static_primals(joint.graph, static_inputs)
    return extract(joint, *lists, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_nodes=static)


def modules_without_code() -> AbstractContextManager[None]:
    """Within, modules that torch makes of graphs generate their code on first use: a graph is changed many times first.
    PyTorch's own compile path runs its partitioner under this."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def offload_activations(
    forward: fx.GraphModule, backward: fx.GraphModule, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> None:
    """PyTorch's own activation offloading, where its configuration asks for it; partitioners are to call it."""
    if _functorch_config().enable_activation_offloading:
        from torch._functorch._activation_offloading.activation_offloading import enable_activation_offloading

        enable_activation_offloading(forward, backward, num_fwd_outputs, _static_primals(forward.graph, static_inputs))


def is_symbolic(node: fx.Node) -> bool:
    """True if a node's value is a symbolic size, bool or float: those are saved apart from tensors."""
    from torch.fx.experimental.proxy_tensor import py_sym_types

    return isinstance(node.meta.get("val"), py_sym_types)


def is_opaque(node: fx.Node) -> bool:
    """True if a node's value is a script object or process group; torch before 2.12 knows no such saved values."""
    check = getattr(_partitioners(), "is_opaque_node", None)
    return bool(check and check(node))


def must_be_in_backward(node: fx.Node) -> bool:
    """True if AOTAutograd pinned a node to the backward: a mutation that has to happen there."""
    return _partitioners()._must_be_in_backward(node)


def cse_enabled() -> bool:
    """``torch._functorch.config.cse``, which our own elimination respects."""
    return _functorch_config().cse


def functorch_settings() -> dict[str, Any]:
    """Every setting of AOTAutograd with its present value."""
    return _functorch_config().get_config_copy()


# --- what min-cut would save --------------------------------------------------------------------------------------


def min_cut_saved_values(
    joint: fx.GraphModule, *, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> list[fx.Node] | None:
    """The values that PyTorch's min-cut would save of a tagged joint graph; None where it has no backward. The steps of
    ``min_cut_rematerialization_partition`` between its CSE and its extraction. It honours the memory budget of the
    configuration and of annotated regions, and agrees across ranks as PyTorch does."""
    partitioners = _partitioners()
    config = _functorch_config()
    if not config.unsafe_allow_optimization_of_collectives:
        partitioners.force_save_collectives(joint)
    partitioners.force_save_effectful_ops(joint)
    partitioners.force_save_bw_mutation_src(joint)
    info = partitioners.classify_nodes(joint, list(static_inputs), num_fwd_outputs)
    if not info.required_bw_nodes:
        return None
    far = 10**9
    for node in reversed(joint.graph.nodes):  # min-cut weighs nodes by the steps to the nearest backward node
        if node.op == "output":
            node.dist_from_bw = far
        elif not info.is_required_fw(node):
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min((far, *(user.dist_from_bw + 1 for user in node.users)))
    saved = partitioners.choose_saved_values_set(joint.graph, info, memory_budget=_memory_budget(joint.graph))
    return partitioners._sync_decision_cross_ranks(joint.graph, saved) if config._sync_decision_cross_ranks else saved


def _memory_budget(graph: fx.Graph) -> float:
    """The configured budget, or the one that the user annotated the graph's nodes with."""
    annotated = getattr(fx.traceback, "_get_memory_budget_annotation", lambda node: None)  # from 2.13
    for node in graph.nodes:
        for budget in (annotated(node), node.meta.get("memory_budget")):
            if isinstance(budget, float):
                return budget
    return _functorch_config().activation_memory_budget


# --- replayed random numbers ---------------------------------------------------------------------------------------


def replay_random(
    nodes: list[fx.Node], forward: fx.GraphModule, backward: fx.GraphModule, num_symbols: int
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Let the recomputation of the given joint nodes draw what the forward drew. ``functionalize_rng_ops`` reads the
    joint module's node list alone, so it is shown only the nodes that are meant: an SDPA without dropout is tagged
    random, and wrapping it would cost a state for nothing."""
    from torch._guards import detect_fake_mode

    shown = SimpleNamespace(graph=SimpleNamespace(nodes=nodes))
    values = [leaf for node in nodes for leaf in tree_leaves(node.meta.get("val"))]
    mode = None if detect_fake_mode() else detect_fake_mode(values)  # outside a compilation torch looks for active ones
    with nullcontext() if mode is None else mode:
        return _partitioners().functionalize_rng_ops(shown, forward, backward, num_symbols)


def thread_random_states(module: fx.GraphModule, *, is_backward: bool) -> fx.GraphModule:
    """Pass on the generator states that nested subgraphs ask for (CUDA-graph-safe random numbers)."""
    return _partitioners().thread_graphsafe_rng_from_hops(module, is_backward=is_backward)


def random_state_operators() -> tuple[Any, Any]:
    """``run_and_save_rng_state(op, …) -> (state, result)`` and ``run_with_rng_state(state, op, …) -> result``, which
    draw the same numbers twice without a counter-based generator, so on the CPU too."""
    from torch._prims import rng_prims

    why = "needs them to recompute dropout and other random operators on a flat graph"
    require(rng_prims, ("run_and_save_rng_state", "run_with_rng_state"), why)
    return rng_prims.run_and_save_rng_state, rng_prims.run_with_rng_state


# --- a graph that was changed in place ----------------------------------------------------------------------------


def recompile_when_called(module: fx.GraphModule) -> None:
    """Generate a changed graph's code when it is first called, printed or pickled, not now. Generating code costs more
    than a pass over a flat graph, and of a list of passes only the last one's code is run. Every graph module has a
    separate class, so only this one changes."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    own = type(module)
    if own is not fx.GraphModule and own.__bases__ == (fx.GraphModule,) and "GraphModuleImpl" in own.__qualname__:
        own.__bases__ = (_LazyGraphModule,)
        own._lazy_forward = _first_forward
    module.recompile()


def _first_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces torch's function, which calls ``__call__`` once more: hooks would run twice."""
    self.real_recompile()
    return self.forward(*args, **kwargs)


# --- shared by the above ------------------------------------------------------------------------------------------


def _static_primals(graph: fx.Graph, static_inputs: Sequence[int]) -> Any:
    """The inputs of the forward whose memory is the same in every step, as the ordered set that torch asks for."""
    from torch.utils._ordered_set import OrderedSet

    primals = [node for node in graph.find_nodes(op="placeholder") if _partitioners()._is_primal(node)]
    return OrderedSet(primals[index] for index in static_inputs if index < len(primals))


def _functorch_config() -> Any:
    import torch._functorch.config as config

    return config


@cache
def _partitioners() -> Any:
    """The module of PyTorch's own partitioners, with the names that the joint path needs."""
    import torch._functorch.partitioners as partitioners

    wanted = (
        *("_extract_fwd_bwd_modules", "functionalize_rng_ops", "thread_graphsafe_rng_from_hops", "classify_nodes"),
        *("choose_saved_values_set", "force_save_collectives", "force_save_effectful_ops"),
        *("force_save_bw_mutation_src", "_must_be_in_backward", "_is_primal"),
    )
    require(partitioners, wanted, "partitions joint graphs with torch 2.11 and later")
    return partitioners
