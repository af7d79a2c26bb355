"""The private names of torch that splitting a graph, and recomputing parts of one, need."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from policylang.torch_compat.graphs import require

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
