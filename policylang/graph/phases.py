"""Classifies a graph as joint, flat, forward or backward, its nodes as forward or backward, and its inputs.

Graph inputs (parameter, buffer, the user's, tangent) have three sources, in this order. Descriptors name kind and
module path if AOTAutograd was given a module. Under Dynamo they give only the position; then the expression that Dynamo
reads an input from, ``L['self']._modules['linear']._parameters['weight']``, gives both. Without either, an input whose
memory is the same in every step is a parameter if it gets a gradient, and a buffer if not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
from attrs import frozen
from torch import fx

from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.facts import GraphKind, InputKind, Phase
from policylang.language.diagnostics import diagnose
from policylang.language.shown import one_line
from policylang.torch_compat import graphs
from policylang.torch_compat.compilers import input_source, input_value, running_dynamo_inputs

_UNWRITTEN = frozenset(
    (
        *("_modules", "_parameters", "_buffers", "__dict__"),
        *("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_export_root"),
    )
)
_ROOT = re.compile(r"^[LG]\[(['\"])(?P<name>.*?)\1\]")
_GETATTR = re.compile(r"getattr\((?P<of>[^()]+?), ?(['\"])(?P<name>[^'\"]*)\2\)")
_COMPONENT = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|(-?\d+))\s*\]|([^.\[\]]+)")
_INDIRECTION = ("cell_contents", "__self__")
MODULE_ANNOTATION = "module_fqn"
"""The key of ``node.meta["custom"]`` under which TorchTitan's graph trainer annotates the full name of a module."""
STAGE_ACTION = "graph_pp_action"
"""The key of ``node.meta`` that names the action of a pipeline, on each of the graphs that a stage is cut into."""
UNSHARD = "UNSHARD"
_ACTIONS = {
    "FORWARD": GraphKind.FORWARD,
    UNSHARD: GraphKind.FORWARD,
    "FULL_BACKWARD": GraphKind.BACKWARD,
    "BACKWARD_INPUT": GraphKind.BACKWARD,
    "BACKWARD_WEIGHT": GraphKind.BACKWARD,
    "REDUCE_GRAD": GraphKind.BACKWARD,
}


@lru_cache(maxsize=65536)
def normalise(raw: str) -> tuple[str, str]:
    """The local that a raw module path starts from (empty where it names none) and the normalised path. Dynamo names a
    module by the Python expression that reaches it, ``L['self']._modules['layers']._modules['0'].attn``, and wrappers
    add components; ``layers.0.attn`` is left."""
    text = raw
    while (flat := _GETATTR.sub(r"\g<of>.\g<name>", text)) != text:
        text = flat
    root = ""
    if match := _ROOT.match(text):
        root, text = match["name"], text[match.end() :]
    parts: list[str] = []
    for single, double, index, plain in _COMPONENT.findall(text):
        parts.extend((single or double or index or plain).split("."))
    for name in _INDIRECTION:  # what leads to a module through a closure or a bound method is not part of its name
        if name in parts:
            del parts[: len(parts) - parts[::-1].index(name)]
    return root, ".".join(part for part in parts if part and part not in _UNWRITTEN)


def raw_path(meta: Mapping[str, Any]) -> str:
    """The innermost module of a node as torch left it; a backward node has that of its forward node."""
    if annotated := marks.custom(meta).get(MODULE_ANNOTATION):
        return str(annotated)
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack or not isinstance(stack, dict):
        return ""
    entry = next(reversed(stack.values()))
    return str(entry[0] if isinstance(entry, tuple) else entry)


class ModulePaths:
    """Interned paths of one graph, of modules and of what they hold, reached from one local variable or several."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._known: dict[str, tuple[str, str]] = {}
        """By raw path the local that it starts from, and the normalised path."""

    def add(self, raw: str) -> str:
        """Take note of a raw path; returns the key to give to :meth:`path`."""
        if raw not in self._known:
            self._known[raw] = normalise(raw)
        return raw

    def table(self) -> dict[str, str]:
        """Raw path to path, for every path that was added. Where a graph holds modules of several locals, as a step
        over a generator and a discriminator does, each path but those of ``self`` starts with its local's name: two
        models' ``layers.0`` are not one block."""
        several = len({root for root, _ in self._known.values() if root}) > 1
        shared: dict[str, str] = {"": ""}
        table: dict[str, str] = {"": ""}
        for raw, (root, path) in self._known.items():
            lead = root if several and root != "self" else ""
            full = one_line(".".join(part for part in (self._prefix, lead, path) if part))
            table[raw] = shared.setdefault(full, full)
        return table


_OTHER_NAMES = re.compile(r"(fwd|bwd)_(seed|base_offset|rng_state)|.*token")
_FIELD = re.compile(r"(?<=\._)(?:parameters|buffers)\b|(?<=\['_)(?:parameters|buffers)(?='\])")
Input = tuple[InputKind, str]
"""Kind and name; the name as torch has it, not normalised."""
InputSource = tuple[str, bool]
"""The expression that Dynamo reads an input from, empty if it is no tensor, and whether it is a ``Parameter``."""


def input_columns(
    module: fx.GraphModule | None,
    nodes: Sequence[fx.Node],
    static: Collection[int] | None,
    output_descs: Sequence[Any],
    paths: ModulePaths,
) -> tuple[bytearray, list[str]]:
    """``Facts.input_kinds``, and keys into ``paths`` for ``Facts.input_names``: placeholders and ``get_attr``."""
    kinds = bytearray(len(nodes))
    names = [""] * len(nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    sources = _dynamo_sources(placeholders)
    gradients = (graphs.differentiated_input(desc) for desc in output_descs if desc is not None)
    differentiated = {graphs.underlying_input(desc) for desc in gradients if desc is not None}
    positions = _positions(placeholders)
    for row, node in enumerate(nodes):
        if node.op == "placeholder":
            found = _input(node, positions[node], sources, static, differentiated)
        elif node.op == "get_attr":
            found = _attribute(module, node)
        else:
            continue
        kinds[row], names[row] = found[0], paths.add(found[1])
    return kinds, names


def _input(
    placeholder: fx.Node,
    position: int,
    sources: Sequence[InputSource],
    static: Collection[int] | None,
    differentiated: Collection[Any],
) -> Input:
    """The kind and name of a graph input.

    Args:
        position: its place among the inputs as they were before tensor subclasses were taken apart.
        sources: by position among the traced function's inputs; empty where Dynamo was not there.
        static: positions of inputs whose memory is the same in every step; None where that is unknown.
        differentiated: descriptors of the whole inputs that the graph returns gradients of.
    """
    desc = placeholder.meta.get("desc")
    if desc is None:
        return _by_name(placeholder.name, position, static)
    kind, name, index = graphs.described_input(desc)
    if not isinstance(placeholder.meta.get("val"), torch.Tensor | torch.SymInt | int | None):
        return (InputKind.OTHER, "")  # the device mesh of a DTensor
    if kind != "user":
        return InputKind[kind.upper()], name
    expression, is_parameter = sources[index] if index is not None and index < len(sources) else ("", False)
    if expression:
        fields = _FIELD.findall(expression)
        if not fields and not is_parameter:
            return InputKind.USER, ""
        is_parameter = is_parameter or fields[-1] == "parameters"
        return InputKind.PARAMETER if is_parameter else InputKind.BUFFER, expression
    if static is not None and position in static:
        return InputKind.PARAMETER if graphs.underlying_input(desc) in differentiated else InputKind.BUFFER, ""
    return InputKind.USER, ""


def _dynamo_sources(placeholders: Sequence[fx.Node]) -> list[InputSource]:
    """The sources of a joint graph's inputs, by position; empty unless the graph takes the running compilation's inputs
    one for one: a graph that was kept from another compilation must not be given this one's names."""
    handed_over = running_dynamo_inputs()
    if not handed_over:
        return []
    numbered: set[int] = set()
    for placeholder in placeholders:
        desc = placeholder.meta.get("desc")
        if desc is None or (index := graphs.described_input(desc)[2]) is None:
            continue
        numbered.add(index)
        whole = graphs.underlying_input(desc) is desc
        if index >= len(handed_over) or (whole and not _alike(placeholder.meta.get("val"), handed_over[index])):
            return []
    return list(map(input_source, handed_over)) if len(numbered) == len(handed_over) else []


def _alike(value: Any, placeholder: fx.Node) -> bool:
    """A joint graph's input may be this input of Dynamo's graph. Sizes may be symbols, and are not compared."""
    other = input_value(placeholder)
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return isinstance(value, torch.Tensor) == isinstance(other, torch.Tensor)
    return bool(value.dtype == other.dtype and value.dim() == other.dim())


def _positions(placeholders: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Each input's place among the inputs of the traced function: the parts of a tensor subclass share one."""
    places: dict[Any, int] = {}
    descs = ((node, node.meta.get("desc")) for node in placeholders)
    wholes = [node if desc is None else graphs.underlying_input(desc) for node, desc in descs]
    return {node: places.setdefault(whole, len(places)) for node, whole in zip(placeholders, wholes, strict=True)}


def _attribute(module: fx.GraphModule | None, node: fx.Node) -> Input:
    """The subgraph, constant, or unlifted parameter that a ``get_attr`` reads. Without a module, its value decides."""
    path = str(node.target)
    value = node.meta.get("val") if module is None else attribute(module, path)
    if isinstance(value, torch.nn.Parameter):
        return InputKind.PARAMETER, path
    return (InputKind.BUFFER, path) if isinstance(value, torch.Tensor) else (InputKind.OTHER, "")


def attribute(module: Any, path: str) -> Any:
    return reduce(lambda value, name: getattr(value, name, None), path.split("."), module)


def _by_name(name: str, position: int, static: Collection[int] | None) -> Input:
    if name.startswith("tangents"):
        return InputKind.TANGENT, ""
    if _OTHER_NAMES.match(name):
        return InputKind.OTHER, ""
    if static is not None and position in static:
        return InputKind.PARAMETER, ""
    return InputKind.USER, ""


_SAID = {marks.FORWARD: Phase.FORWARD, marks.BACKWARD: Phase.BACKWARD, marks.EPILOGUE: Phase.OUTPUT}


def said_phase(meta: dict[str, Any]) -> int:
    """The phase that a node's tracer, or the user, recorded; 0 if none did. ``phase`` is what PyTorch's own pass for
    flat graphs looks for, under ``remat_pass_tag`` in 2.11."""
    found = marks.custom(meta)
    if not found:
        return 0
    if marks.RECOMPUTED in found:
        return Phase.BACKWARD  # whatever it has from the forward node that it repeats
    by_user = found.get("phase") == "backward" or found.get("remat_pass_tag") == "is_backward"
    return _SAID.get(found.get(marks.PHASE, ""), Phase.BACKWARD if by_user else 0)


def is_seed(node: fx.Node) -> bool:
    """A node is the gradient of a scalar with respect to itself, as ``torch.autograd`` makes it: a backward begins
    there. It passes ``memory_format``, which a user's ``ones_like(loss)`` does not."""
    if node.target is not torch.ops.aten.ones_like.default:
        return False
    if node.kwargs.get("memory_format") is not torch.preserve_format:
        return False
    shape = getattr(node.meta.get("val"), "shape", ())
    return all(isinstance(size, int) for size in shape) and math.prod(shape) == 1


def _flat_phases(marks: PhaseMarks, ops: Sequence[str], inputs: Sequence[tuple[int, ...]]) -> bytearray:
    """The phase of every node: as the tracer recorded it, else by data flow. O(nodes + edges).

    ``policylang.trace_step`` annotates every node. An annotation around ``torch.autograd.grad`` covers the backward
    except the sums of gradients after it. Torch's own mark (``autograd_backward``) is set by hooks and also stays on
    derivatives that are part of a forward: a Jacobian, a gradient penalty. Plain ``make_fx`` records nothing. But every
    backward starts at ``ones_like``, the gradient of a scalar with respect to itself. Whatever such a scalar is
    computed from is forward, a Jacobian included. Whatever depends on ``ones_like``, and is not needed for another such
    scalar, is backward.
    """
    said, hooked, seeds = marks.said, marks.hooked, marks.seeds
    needed = _needed_for_losses(inputs, seeds)
    late = bytearray(len(ops))  # backward, or depends on it
    for row in seeds:
        late[row] = not needed[row]
    phases = bytearray(len(ops))
    for row, op in enumerate(ops):
        if op == "placeholder" or op == "get_attr":
            phases[row] = Phase.INPUT
        elif op == "output":
            phases[row] = Phase.OUTPUT
        elif said[row]:
            phases[row] = said[row]
            late[row] = said[row] == Phase.BACKWARD
        elif needed[row]:
            phases[row] = Phase.FORWARD
        else:
            late[row] = late[row] or hooked[row] or any(late[read] for read in inputs[row])
            phases[row] = Phase.BACKWARD if late[row] else Phase.FORWARD
    if not any(said) and not any(hooked):
        _claim_for_backward(phases, inputs, needed, seeds)
    return phases


def _needed_for_losses(inputs: Sequence[tuple[int, ...]], seeds: Sequence[int]) -> bytearray:
    """The nodes that the differentiated scalars are computed from, themselves included."""
    needed, differentiated = bytearray(len(inputs)), frozenset(seeds)
    for row in range(max(seeds, default=-1), -1, -1):
        if needed[row] or row in differentiated:
            for read in inputs[row]:
                needed[read] = 1
    return needed


def _claim_for_backward(
    phases: bytearray, inputs: Sequence[tuple[int, ...]], needed: bytearray, seeds: Sequence[int]
) -> None:
    """Move nodes after the first seed that only the backward reads to the backward: a transposed weight, a derivative's
    factor. They depend on the forward alone, so the flow from the seed does not reach them."""
    first = next((row for row in seeds if phases[row] == Phase.BACKWARD), len(phases))
    by_forward = bytearray(len(phases))
    by_backward = bytearray(len(phases))
    for row in range(len(phases) - 1, -1, -1):
        only_backward = by_backward[row] and not by_forward[row] and not needed[row]
        if phases[row] == Phase.FORWARD and row > first and only_backward:
            phases[row] = Phase.BACKWARD
        readers = by_backward if phases[row] == Phase.BACKWARD else by_forward
        for read in inputs[row]:
            readers[read] = 1


NO_PHASES = "APL340"
NOT_FLAT_ATEN, SAME_NAME = "APL341", "APL300"

_PHASE_OF = {"placeholder": Phase.INPUT, "get_attr": Phase.INPUT, "output": Phase.OUTPUT}
_FORWARD_TAGS = ("is_forward", "must_be_in_forward")
_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")
_BACKWARD_WORDS = ("_backward.", "_backward_", "_grad_")


@frozen(eq=False)
class PhaseMarks:
    """The marks on nodes that decide their phases, by node."""

    tags: Sequence[str | None]
    """``partitioner_tag``."""
    said: bytearray
    """The phase that a flat graph's tracer, or the user, recorded; 0 if none did."""
    hooked: bytearray
    """Autograd's hooks marked the node as backward: ``autograd_backward``, from torch 2.12 on."""
    recorded: bytearray
    """An earlier partition saved the value: its forward made it, whatever autograd's hooks saw."""
    seeds: Sequence[int]
    """The nodes at which the backwards of a flat graph begin."""
    tangents: Sequence[int]
    output_descs: Sequence[Any]
    action: str = ""
    """The action of a pipeline that runs the graph, of those that a stage is cut into."""
    some_undescribed: bool = False
    """Some graph inputs have a descriptor and some do not, which are then saved values."""

    @property
    def marked(self) -> bool:
        """Some node is marked backward."""
        return any(self.hooked) or Phase.BACKWARD in self.said


def is_tangent(node: fx.Node) -> bool:
    """A node is a graph input that the backward begins with."""
    desc = node.meta.get("desc")
    named = desc is None and node.name.startswith("tangents")
    return node.op == "placeholder" and (named or type(desc).__name__ == "TangentAOTInput")


def has_backward(graph: fx.Graph) -> bool:
    """Some mark shows that a graph contains a backward: then it can be read as a joint graph."""
    return any(is_tangent(node) or node.meta.get("partitioner_tag") in _BACKWARD_TAGS for node in graph.nodes)


def kind_of(marks: PhaseMarks, targets: Sequence[str]) -> GraphKind:
    """The kind of graph. Raises ``PolicyGraphError`` (APL340) for backward operators with no node marked backward."""
    if marks.action in _ACTIONS:
        return _ACTIONS[marks.action]
    tagged_backward = any(tag in _BACKWARD_TAGS for tag in marks.tags)
    descs = [desc for desc in marks.output_descs if desc is not None]
    if descs and (tagged_backward or marks.tangents):
        if all(graphs.is_backward_output(desc) for desc in descs):
            return GraphKind.BACKWARD
        if any(graphs.is_saved_output(desc) for desc in descs):
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
    """The phase of every node. O(nodes + edges).

    What depends on a tangent is backward, whatever it is tagged. Of a joint graph's other nodes the tag decides, except
    that a value which the forward needs is forward: autograd interleaves, and tags by the thread that ran a node rather
    than by who reads it. An untagged node after the last node tagged forward is backward, as in PyTorch's default
    partitioner: Dynamo traces the backward of an ``autograd.Function`` without tags. A node that autograd's hooks saw
    in a backward and that is tagged forward is a recomputation in an earlier partition's backward, retraced with the
    metadata of its nodes.
    """
    if kind is GraphKind.FLAT:
        return _flat_phases(marks, ops, inputs)
    length = len(ops)
    phases = bytearray(_PHASE_OF.get(op, Phase.FORWARD) for op in ops)
    if kind is GraphKind.FORWARD:
        return phases
    late = bytearray(length)  # depends on a tangent
    for row in marks.tangents:
        late[row] = 1
    tags, copies, forward_ends = marks.tags, bytes(length), length
    if kind is GraphKind.JOINT:
        copies = _copies(marks)
        tagged = (row for row in range(length - 1, -1, -1) if tags[row] in _FORWARD_TAGS)
        forward_ends = next((row for row in tagged if ops[row] == "call_function" and not copies[row]), length)
    for row, phase in enumerate(phases):
        if phase != Phase.FORWARD:
            continue
        late[row] = any(map(late.__getitem__, inputs[row]))
        untagged = (row > forward_ends and tags[row] is None) or marks.action
        if late[row] or copies[row] or untagged or tags[row] in _BACKWARD_TAGS:
            phases[row] = Phase.BACKWARD
    if kind is GraphKind.JOINT:
        _claim_for_forward(phases, late, marks, inputs, output_rows)
    return phases


def _copies(marks: PhaseMarks) -> bytes:
    """The nodes that an earlier partition's backward recomputes, as far as the outputs show what the forward needs of a
    backward inside it; torch before 2.12 does not mark them."""
    if all(desc is None for desc in marks.output_descs):
        return bytes(len(marks.tags))
    rows = zip(marks.hooked, marks.tags, marks.recorded, strict=True)
    return bytes(hooked and tag in _FORWARD_TAGS and not recorded for hooked, tag, recorded in rows)


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
        if row is not None and desc is not None and not graphs.is_backward_output(desc):
            needed[row] = 1
    for row in range(len(phases) - 1, -1, -1):
        claimed = needed[row] and phases[row] == Phase.BACKWARD and not late[row]
        if claimed and marks.tags[row] != "must_be_in_backward":
            phases[row] = Phase.FORWARD
        if phases[row] == Phase.FORWARD:
            for read in inputs[row]:
                needed[read] = 1


def check_kind(kind: GraphKind, marks: PhaseMarks) -> None:
    """Raises ``PolicyGraphError`` (APL340) if a backward is expected and no node is marked backward."""
    tagged = any(tag in _BACKWARD_TAGS for tag in marks.tags)
    flat_unknown = kind is GraphKind.FLAT and not (marks.marked or marks.seeds)
    if flat_unknown or (kind is GraphKind.JOINT and not (marks.tangents or tagged)):
        raise _unknown_phases()


def check_operators(nodes: Sequence[fx.Node]) -> None:
    """Raises ``PolicyGraphError`` for a graph that calls modules and methods rather than operators (APL341), and for
    one in which two nodes have one name (APL300)."""
    names = set[str]()
    for node in nodes:
        if node.name in names:
            message = f"two nodes of the graph have the name `{node.name}`, and plans tell nodes apart by their names"
            help = "give each node a name of its own, as `torch.fx.Graph` does where nobody sets `node.name`"
            raise PolicyGraphError([diagnose(SAME_NAME, message, help=help)])
        names.add(node.name)
        if node.op in ("call_module", "call_method"):
            kind = node.op.removeprefix("call_")
            message = f"`{node.name}` calls the {kind} `{node.target}`, and policies are about operators"
            help = "give the graph that AOTAutograd or make_fx traces, or compile the model with `policylang.backend`"
            raise PolicyGraphError([diagnose(NOT_FLAT_ATEN, message, help=help)])


def _unknown_phases(found: str = "nothing in the graph") -> PolicyGraphError:
    help = (
        'trace the backward under `torch.fx.traceback.annotate({"phase": "backward"})`, '
        "differentiate a scalar loss, or trace the step with `policylang.trace_step`"
    )
    return PolicyGraphError([diagnose(NO_PHASES, f"{found} marks the backward nodes", help=help)])
