"""Classifies graph inputs (parameter, buffer, the user's, tangent) and finds their names.

Three sources, in this order. Descriptors name kind and module path if AOTAutograd was given a module. Under Dynamo they
give only the position; then the expression that Dynamo reads an input from,
``L['self']._modules['linear']._parameters['weight']``, gives both. Without either, an input whose memory is the same in
every step is a parameter if it gets a gradient, and a buffer if not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import fx

from policylang.graph.facts import InputKind
from policylang.language.shown import one_line
from policylang.torch_compat.compilers import input_source, input_value, running_dynamo_inputs
from policylang.torch_compat.graphs import described_input, differentiated_input, underlying_input

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
    custom = meta.get("custom")
    if custom and (annotated := custom.get(MODULE_ANNOTATION)):
        return str(annotated)
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
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
    """``Facts.input_kinds``, and for ``Facts.input_names`` the keys into ``paths``: of placeholders, and of parameters
    read by ``get_attr``."""
    kinds = bytearray(len(nodes))
    names = [""] * len(nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    sources = _dynamo_sources(placeholders)
    gradients = (differentiated_input(desc) for desc in output_descs if desc is not None)
    differentiated = {underlying_input(desc) for desc in gradients if desc is not None}
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
    kind, name, index = described_input(desc)
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
        return InputKind.PARAMETER if underlying_input(desc) in differentiated else InputKind.BUFFER, ""
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
        if desc is None or (index := described_input(desc)[2]) is None:
            continue
        numbered.add(index)
        whole = underlying_input(desc) is desc
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
    wholes = [node if (desc := node.meta.get("desc")) is None else underlying_input(desc) for node in placeholders]
    return {node: places.setdefault(whole, len(places)) for node, whole in zip(placeholders, wholes, strict=True)}


def _attribute(module: fx.GraphModule | None, node: fx.Node) -> Input:
    """The subgraph, constant, or parameter not lifted to an input that a ``get_attr`` reads. Without a module, as in a
    recorded graph, the node's value decides."""
    path = str(node.target)
    value = node.meta.get("val") if module is None else attribute(module, path)
    if isinstance(value, torch.nn.Parameter):
        return InputKind.PARAMETER, path
    return (InputKind.BUFFER, path) if isinstance(value, torch.Tensor) else (InputKind.OTHER, "")


def attribute(module: Any, path: str) -> Any:
    """The attribute of a module under a dotted path; None where it has none."""
    return reduce(lambda value, name: getattr(value, name, None), path.split("."), module)


def _by_name(name: str, position: int, static: Collection[int] | None) -> Input:
    if name.startswith("tangents"):
        return InputKind.TANGENT, ""
    if _OTHER_NAMES.match(name):
        return InputKind.OTHER, ""
    if static is not None and position in static:
        return InputKind.PARAMETER, ""
    return InputKind.USER, ""
