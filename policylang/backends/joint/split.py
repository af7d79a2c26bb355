"""Splits a joint graph in two around given saved values, and prepares each half for AOTAutograd."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx
from torch.utils import _pytree as pytree

from policylang.backends.surgery.order import arrange
from policylang.graph.facts import Facts, Flag, Phase
from policylang.planning.liveness import SavedForBackward
from policylang.planning.plan import Plan
from policylang.torch_compat import graphs, partition

_IN_BACKWARD = Flag.FEEDS_BACKWARD | Flag.GRADIENT


def split(
    joint: fx.GraphModule, plan: Plan, needs: SavedForBackward, *, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward that returns what ``needs`` keeps, and the backward that recomputes the rest of what it reads.

    Both run in the order of the plan's schedule. What is offloaded crosses as what is saved does: it is moved when the
    halves stand (:mod:`policylang.backends.joint.offload`).
    """
    facts = plan.facts
    nodes = {node.name: node for node in joint.graph.nodes}
    rows = (*needs.saved, *needs.offloaded, *needs.inputs, *needs.symbolic)
    symbols, opaque, tensors = list[fx.Node](), list[fx.Node](), list[fx.Node]()
    for node in (nodes[facts.names[row]] for row in sorted(rows)):
        if node.op != "get_attr":
            (symbols if partition.is_symbolic(node) else opaque if partition.is_opaque(node) else tensors).append(node)
    _exempt_statistics(joint.graph, facts)
    with partition.modules_without_code():
        forward, backward = partition.extract_forward_backward(
            joint, tensors, symbols, opaque, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs
        )
    erase_strays(forward.graph, facts, Phase.BACKWARD)
    erase_strays(backward.graph, facts, Phase.FORWARD)
    for half, is_backward in ((forward, False), (backward, True)):
        steps = (row for _, row, region in plan.schedule if (region > 0) == is_backward)
        arrange(half.graph, (facts.names[row] for row in steps))
    random = [nodes[facts.names[row]] for row in needs.recomputed if facts.flags[row] & Flag.RANDOM]
    if random:
        forward, backward = partition.replay_random(random, forward, backward, len(symbols))
    return forward, backward


def _exempt_statistics(graph: fx.Graph, facts: Facts) -> None:
    """Spare inputs that the step writes, and only recomputed operators read, autograd's check that nobody wrote them.

    Such an operator is recomputed only if what is written does not bear on its result: a BatchNorm in training takes
    its running statistics to return them updated, and its backward needs neither. What the backward itself reads
    stays under the check, as in eager.
    """
    output = graph.output_node()
    written = {graphs.mutated_input(desc) for desc in pytree.tree_leaves(output.meta.get("desc"))} - {None}
    for node in graph.find_nodes(op="placeholder"):
        desc = node.meta.get("desc")
        if desc is None or desc not in written or facts.has(facts.index[node.name], _IN_BACKWARD):
            continue
        node.meta["saved_tensor_with_no_vc_check"] = True


def finish(
    forward: fx.GraphModule, backward: fx.GraphModule, *, num_fwd_outputs: int, static_inputs: Sequence[int]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What PyTorch's partitioners do last, and AOTAutograd expects to be done."""
    partition.offload_activations(forward, backward, num_fwd_outputs, static_inputs)
    for half in (forward, backward):
        half.recompile()
    forward = partition.thread_random_states(forward, is_backward=False)
    if backward.graph.find_nodes(op="placeholder"):
        backward = partition.thread_random_states(backward, is_backward=True)
    return forward, backward


def erase_strays(graph: fx.Graph, facts: Facts, phase: Phase) -> None:
    """Remove the unused nodes of ``phase``, which belongs to the other half.

    Extraction copies whatever it has the inputs for, and dead-code elimination then spares random and effectful
    operators: a dropout whose mask is saved would be drawn again in the backward, for nothing.
    """
    index, phases = facts.index, facts.phases
    for node in reversed(graph.nodes):
        if node.users or node.op != "call_function" or partition.must_be_in_backward(node):
            continue
        row = index.get(node.name)
        if row is not None and phases[row] == phase:
            graph.erase_node(node)
