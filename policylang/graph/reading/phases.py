"""Tells whether a graph is joint, flat or a half of a partition, and which nodes are forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen
from torch import fx

from policylang.errors import PolicyGraphError
from policylang.graph.facts import GraphKind, Phase
from policylang.graph.reading.flat_phases import flat_phases
from policylang.language.diagnostics import diagnose
from policylang.torch_compat.graphs import is_backward_output, is_saved_output

NO_PHASES = "APL340"
NOT_FLAT_ATEN = "APL341"

_PHASE_OF = {"placeholder": Phase.INPUT, "get_attr": Phase.INPUT, "output": Phase.OUTPUT}
_FORWARD_TAGS = ("is_forward", "must_be_in_forward")
_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")
_BACKWARD_WORDS = ("_backward.", "_backward_", "_grad_")


@frozen(eq=False)
class PhaseMarks:
    """What a first look at the nodes finds; rows are those of the graph."""

    tags: Sequence[str | None]
    """``partitioner_tag``."""
    said: bytearray
    """The phase that a flat graph's tracer, or the user, states; 0 where nobody does."""
    hooked: bytearray
    """Whether autograd's hooks marked the node as backward: ``autograd_backward``, from torch 2.12 on."""
    recorded: bytearray
    """Whether an earlier partition saved the value: its forward made it, whatever autograd's hooks saw."""
    seeds: Sequence[int]
    """Where the backwards of a flat graph begin."""
    tangents: Sequence[int]
    output_descs: Sequence[Any]
    some_undescribed: bool = False
    """Whether some graph inputs have a descriptor and some do not, which are then saved values."""

    @property
    def marked(self) -> bool:
        """Whether any node is said to be backward."""
        return any(self.hooked) or Phase.BACKWARD in self.said


def is_tangent(node: fx.Node) -> bool:
    """Whether a node is a graph input that the backward begins with."""
    desc = node.meta.get("desc")
    named = desc is None and node.name.startswith("tangents")
    return node.op == "placeholder" and (named or type(desc).__name__ == "TangentAOTInput")


def has_backward(graph: fx.Graph) -> bool:
    """Whether anything says that a graph contains a backward: then it can be read as a joint graph."""
    return any(is_tangent(node) or node.meta.get("partitioner_tag") in _BACKWARD_TAGS for node in graph.nodes)


def kind_of(marks: PhaseMarks, targets: Sequence[str]) -> GraphKind:
    """What kind of graph the marks speak of.

    Raises:
        PolicyGraphError: APL340 where the graph calls backward operators and nothing says where its backward is.
    """
    tagged_backward = any(tag in _BACKWARD_TAGS for tag in marks.tags)
    descs = [desc for desc in marks.output_descs if desc is not None]
    if descs and (tagged_backward or marks.tangents):
        if all(is_backward_output(desc) for desc in descs):
            return GraphKind.BACKWARD
        if any(is_saved_output(desc) for desc in descs):
            return GraphKind.FORWARD
        return GraphKind.JOINT
    if marks.tangents:
        return GraphKind.BACKWARD if marks.some_undescribed else GraphKind.JOINT
    if marks.marked:
        return GraphKind.BACKWARD if tagged_backward else GraphKind.FLAT
    if any(tag is not None for tag in marks.tags):
        return GraphKind.BACKWARD if tagged_backward else GraphKind.FORWARD
    if marks.seeds:
        return GraphKind.FLAT
    for target in targets:
        if target and any(word in target for word in _BACKWARD_WORDS):
            raise _unknown_phases(f"the graph calls `{target}`, but nothing")
    return GraphKind.FORWARD


def phases_of(
    kind: GraphKind,
    marks: PhaseMarks,
    ops: Sequence[str],
    inputs: Sequence[tuple[int, ...]],
    output_rows: Sequence[int | None],
) -> bytearray:
    """The phase of every row. O(nodes + edges). Of flat graphs see :mod:`policylang.graph.reading.flat_phases`.

    What depends on a tangent is backward, whatever it is tagged. Of a joint graph's other nodes the tag decides, except
    that a value which the forward needs is forward: autograd interleaves, and tags by the thread that ran a node rather
    than by who reads it. What has no tag and stands behind the last node tagged forward is backward, as PyTorch's
    default partitioner has it: Dynamo traces the backward of an ``autograd.Function`` without tags. What autograd's
    hooks saw in a backward and is tagged forward is a copy: an earlier partition's backward, traced again with the
    metadata of its nodes, computes it anew.
    """
    if kind is GraphKind.FLAT:
        return flat_phases(ops, inputs, marks.said, marks.hooked, marks.seeds)
    length = len(ops)
    phases = bytearray(_PHASE_OF.get(op, Phase.FORWARD) for op in ops)
    if kind is GraphKind.FORWARD:
        return phases
    late = bytearray(length)  # depends on a tangent
    for row in marks.tangents:
        late[row] = 1
    copies = _copies(marks) if kind is GraphKind.JOINT else bytes(length)
    forward_ends = _last_tagged_forward(marks.tags, ops, copies) if kind is GraphKind.JOINT else length
    for row, phase in enumerate(phases):
        if phase != Phase.FORWARD:
            continue
        late[row] = any(map(late.__getitem__, inputs[row]))
        untagged = row > forward_ends and marks.tags[row] is None
        if late[row] or copies[row] or untagged or marks.tags[row] in _BACKWARD_TAGS:
            phases[row] = Phase.BACKWARD
    if kind is GraphKind.JOINT:
        _claim_for_forward(phases, late, marks, inputs, output_rows)
    return phases


def _copies(marks: PhaseMarks) -> Sequence[int]:
    """Which rows an earlier partition's backward recomputes, as far as the outputs tell what the forward needs of a
    backward inside it; torch before 2.12 does not mark them."""
    if all(desc is None for desc in marks.output_descs):
        return bytes(len(marks.tags))
    tags = marks.tags
    return bytearray(
        hooked and tags[row] in _FORWARD_TAGS and not marks.recorded[row] for row, hooked in enumerate(marks.hooked)
    )


def _last_tagged_forward(tags: Sequence[str | None], ops: Sequence[str], copies: Sequence[int]) -> int:
    """The last operator that is tagged forward; the end of the graph where none is."""
    for row in range(len(tags) - 1, -1, -1):
        if tags[row] in _FORWARD_TAGS and ops[row] == "call_function" and not copies[row]:
            return row
    return len(tags)


def _claim_for_forward(
    phases: bytearray,
    late: bytearray,
    marks: PhaseMarks,
    inputs: Sequence[tuple[int, ...]],
    output_rows: Sequence[int | None],
) -> None:
    """Make forward what would be backward, depends on no tangent and is read by the forward or returned by it."""
    needed = bytearray(len(phases))
    for row, desc in zip(output_rows, marks.output_descs, strict=False):
        if row is not None and desc is not None and not is_backward_output(desc):
            needed[row] = 1
    for row in range(len(phases) - 1, -1, -1):
        if needed[row] and phases[row] == Phase.BACKWARD and not late[row]:
            if marks.tags[row] == "must_be_in_backward":
                continue
            phases[row] = Phase.FORWARD
        if phases[row] == Phase.FORWARD:
            for read in inputs[row]:
                needed[read] = 1


def check_kind(kind: GraphKind, marks: PhaseMarks) -> None:
    """Whether a graph can be of the kind that the caller says it is.

    Raises:
        PolicyGraphError: APL340 where a backward is expected and nothing says where it is.
    """
    tagged = any(tag in _BACKWARD_TAGS for tag in marks.tags)
    flat_unknown = kind is GraphKind.FLAT and not (marks.marked or marks.seeds)
    if flat_unknown or (kind is GraphKind.JOINT and not (marks.tangents or tagged)):
        raise _unknown_phases()


def check_operators(nodes: Sequence[fx.Node]) -> None:
    """Refuse a graph that is not flat: modules and methods that are called rather than operators.

    Raises:
        PolicyGraphError: APL341.
    """
    for node in nodes:
        if node.op in ("call_module", "call_method"):
            kind = node.op.removeprefix("call_")
            message = f"`{node.name}` calls the {kind} `{node.target}`, and a policy speaks of operators"
            help = "give the graph that AOTAutograd or make_fx traces, or compile the model with `policylang.backend`"
            raise PolicyGraphError([diagnose(NOT_FLAT_ATEN, message, help=help)])


def _unknown_phases(found: str = "nothing in the graph") -> PolicyGraphError:
    help = (
        'trace the backward under `torch.fx.traceback.annotate({"phase": "backward"})`, '
        "differentiate a scalar loss, or trace the step with `policylang.trace_step`"
    )
    return PolicyGraphError([diagnose(NO_PHASES, f"{found} says which nodes are backward", help=help)])
