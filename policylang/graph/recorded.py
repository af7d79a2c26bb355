"""Reads recorded graphs, JSON that ``docs/snapshots.md`` describes, as facts.

The graph is rebuilt as an FX graph, so that its facts are collected as those of a live one are. An operator that this
torch does not have counts as one that reads its arguments and returns new tensors. No text of a recording is run.
"""

from __future__ import annotations

import ast
import gzip
import json
import operator
import os
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from attrs import evolve
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Group, Mesh
from policylang.language.files import reason_of
from policylang.operators.calls import StandIn
from policylang.torch_compat.graphs import OpOverload, descriptor_classes, load_distributed_operators
from policylang.torch_compat.tracing import fixed_size_fake_mode, tree_leaves


class MalformedError(Exception):
    """The file is no recorded graph. The message is a phrase that gives the reason."""


_BUILTIN = "<built-in function "
_COPIED = ("seq_nr", "ac_graph_id", "custom")
_KINDS = ("placeholder", "get_attr", "call_function", "call_module", "call_method", "output")
_SAID: Mapping[str, type] = {
    **dict.fromkeys(("phase", "module", "fwd_module"), str),
    **dict.fromkeys(("seq_nr", "ac_graph_id"), int),
    **dict.fromkeys(("recompute", "desc"), str),
    "custom": dict,
}
"""The keys of ``meta``, and their types; each may be null."""
_NOT_A_NODE = (MalformedError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def rebuilt(rows: Sequence[Mapping[str, Any]]) -> fx.Graph:
    """The graph of a recording's nodes. Raises :class:`MalformedError`, which names the node that cannot be rebuilt. A
    graph without a module: a module would make Python of it, with names from the file in it, and run that."""
    load_distributed_operators()
    builder = _Builder()
    with fixed_size_fake_mode():
        for number, record in enumerate(rows):
            try:
                builder.add(record)
            except _NOT_A_NODE as error:
                said = str(error).splitlines() or [type(error).__name__]
                raise MalformedError(f"node {number}, `{str(record['name'])[:80]}`: {said[0][:200]}") from None
    has_forward = builder.last_desc.startswith("[PlainAOTOutput")
    _describe_outputs(builder.graph, builder.descriptors, has_forward=has_forward)
    return builder.graph


class _Builder:
    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.stacks: dict[str, dict[str, tuple[str, type]]] = {}
        self.tensors: dict[str, Any] = {}  # equal values are one object: making 20,000 would take longer than all else
        self.descriptors = descriptor_classes()
        self.last_desc = ""
        self.returned = False

    def add(self, record: Mapping[str, Any]) -> None:
        name, op, meta = record["name"], record["op"], record["meta"] or {}
        if not isinstance(name, str) or name in self.nodes:
            raise MalformedError("its name is none, or is another node's")
        _check(record, meta)
        if self.returned:
            raise MalformedError("it comes after the output")
        self.returned = op == "output"
        args = self._value(record["args"])
        kwargs = {key: self._value(given) for key, given in record["kwargs"].items()}
        value = self._tensor(record["val"])
        target = _target(record["target"], args, kwargs, value) if op == "call_function" else record["target"]
        node = self.graph.create_node(op, target, tuple(args), kwargs, name=name)
        if node.name != name:
            raise MalformedError("its name is not one that a node can have")
        self.nodes[name] = node
        if value is not None:
            node.meta["val"] = value
        self._annotate(node, meta)
        self.last_desc = meta.get("desc") or ""

    def _annotate(self, node: fx.Node, meta: Mapping[str, Any]) -> None:
        if meta.get("phase") is not None:
            node.meta["partitioner_tag"] = meta["phase"]
        for key in _COPIED:
            if meta.get(key) is not None:
                node.meta[key] = meta[key]
        if meta.get("recompute"):
            node.meta["recompute"] = CheckpointPolicy[meta["recompute"]]
        for key, stack in (("module", "nn_module_stack"), ("fwd_module", "fwd_nn_module_stack")):
            if path := meta.get(key):
                node.meta[stack] = self.stacks.setdefault(path, {str(len(self.stacks)): (path, torch.nn.Module)})
        if meta.get("desc") is not None and node.op == "placeholder":
            node.meta["desc"] = _descriptor(meta["desc"], self.descriptors)

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(part) for part in value]
        if not isinstance(value, dict):
            return value
        if "n" in value:
            if value["n"] not in self.nodes:
                raise MalformedError(f"it reads `{str(value['n'])[:80]}`, which does not come before it")
            return self.nodes[value["n"]]
        if isinstance(value.get("dtype"), str):
            return _of_torch(value["dtype"])
        if isinstance(value.get("device"), str):
            return torch.device("cpu")  # recorded on a machine that may have had another one
        if "slice" in value:
            return slice(*self._value(value["slice"]))
        if "repr" in value:
            return _of_torch(str(value["repr"]))
        return {key: self._value(part) for key, part in value.items()}

    def _tensor(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple([self._tensor(part) for part in value])
        if value is None or "scalar" in value:
            return value and value["scalar"]
        key = repr(value)
        if key not in self.tensors:
            dtype = _of_torch(value["dtype"])
            self.tensors[key] = torch.empty_strided(value["shape"], value["stride"], dtype=dtype)
        return self.tensors[key]


def _check(record: Mapping[str, Any], meta: Any) -> None:
    """Refuses a node whose fields have other types than expected."""
    if record["op"] not in _KINDS:
        raise MalformedError(f"there is no kind of node `{str(record['op'])[:80]}`")
    if not isinstance(record["target"], str):
        raise MalformedError("its target has no name")
    if not isinstance(record["args"], list) or not isinstance(record["kwargs"], dict):
        raise MalformedError("its arguments are not a list and an object")
    if not isinstance(meta, dict):
        raise MalformedError("its `meta` is not an object")
    for key, kind in _SAID.items():
        if meta.get(key) is not None and type(meta[key]) is not kind:
            raise MalformedError(f"its `{key}` cannot be `{str(meta[key])[:80]}`")


def _describe_outputs(graph: fx.Graph, descriptors: Mapping[str, type], *, has_forward: bool) -> None:
    """A joint graph returns its one output, then a gradient or None for each input; a backward graph the latter."""
    output = next(iter(reversed(graph.nodes)), None)
    if output is None or output.op != "output":
        raise MalformedError("its last node is not the output")
    if len(output.args) != 1:
        raise MalformedError("its output does not return one thing")
    inputs = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder")]
    plain = [desc for desc in inputs if desc is not None and type(desc).__name__ != "TangentAOTInput"]
    flat = tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    forward = [descriptors["PlainAOTOutput"](0)] if has_forward else []
    gradients = flat[len(forward) :]
    if len(gradients) != len(plain):  # a backward graph reads only some of the inputs that it returns gradients of
        plain = [descriptors["PlainAOTInput"](index) for index in range(len(gradients))]
    try:
        pairs = zip(gradients, plain, strict=True)
        described = [None if gradient is None else descriptors["GradAOTOutput"](of) for gradient, of in pairs]
    except AssertionError:  # of the descriptor
        raise MalformedError("it returns the gradient of an input that has none") from None
    output.meta["desc"] = forward + described
    output.args = (tuple(flat),)


def _descriptor(text: str, classes: Mapping[str, type]) -> Any:
    """Makes a descriptor from what it prints: names of classes, called with constants and with each other."""
    try:
        found = _made(ast.parse(text, mode="eval").body, classes)
    except (SyntaxError, TypeError, ValueError, AssertionError, RecursionError, MemoryError):
        found = None
    if not type(found).__name__.endswith("Input") or type(found) not in classes.values():
        raise MalformedError(f"`{text[:80]}` describes no input")
    if not isinstance(getattr(found, "target", ""), str):
        raise MalformedError(f"`{text[:80]}` has a name that is no text")
    return found


def _made(tree: ast.expr, classes: Mapping[str, type]) -> Any:
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in classes:
        keywords = {str(each.arg): _made(each.value, classes) for each in tree.keywords}
        return classes[tree.func.id](*[_made(each, classes) for each in tree.args], **keywords)
    return ast.literal_eval(tree)


def _of_torch(name: str) -> Any:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype | torch.memory_format | torch.layout):
        raise MalformedError(f"torch has no `{name[:80]}`")
    return found


def _target(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> Any:
    if name.startswith(_BUILTIN):
        found: Any = getattr(operator, name.removeprefix(_BUILTIN).rstrip(">"), None)
        if found is None:
            raise MalformedError(f"Python has no `{name[:80]}`")
        return found
    parts = name.split(".")
    if len(parts) != 3 or not all(part.isidentifier() for part in parts):
        raise MalformedError(f"`{name[:80]}` is not the full name of an operator")
    namespace, name, overload = parts
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if isinstance(found, OpOverload):
        return found
    strange = next((key for key in kwargs if not key.isidentifier()), None)
    if strange is not None:
        raise MalformedError(f"no argument can be called `{strange[:80]}`")
    several = isinstance(value, tuple) and len(value) > 1
    return StandIn(namespace, name, overload, len(args), tuple(kwargs), several)


NOT_RECORDED = "APL357"
_GZIP = b"\x1f\x8b"
_UNPACKED, _ANY_BYTES = 128, 1 << 23
"""Bytes for each byte of a file that is packed, and of any: recordings unpack to some twenty times their size."""
_ANY_NODES = 1 << 14  # beside one for each byte of the file
_FIELDS = ("name", "op", "target", "args", "kwargs", "val", "meta")


def recorded_facts(path: str | os.PathLike[str]) -> Facts:
    """The facts of a recorded graph, ``.json`` or ``.json.gz``. Needs torch. Raises ``PolicyGraphError`` for a file
    that cannot be read, is no recording, or is too large."""
    name = os.fsdecode(path)
    try:
        size, recording = _content(path, name)
        if not isinstance(recording, dict):
            raise MalformedError("it is not a JSON object")
        nodes = recording.get("nodes")
        if isinstance(nodes, list) and len(nodes) > min(snapshot.MOST_NODES, _ANY_NODES + size):
            raise _too_large(name, f"its {size:,} bytes hold {len(nodes):,} nodes")
        return facts_of_recording(recording)
    except MalformedError as error:
        raise snapshot.graph_error(NOT_RECORDED, f"`{name}` is not a recorded graph: {error}") from None


def facts_of_recording(recording: Mapping[str, Any]) -> Facts:
    """The facts of a recording that was read. Raises :class:`MalformedError`."""
    graph = rebuilt(_rows(recording))
    mesh = _mesh(recording.get("mesh"))
    groups = _groups(recording.get("groups") or {}, mesh)
    facts = collect(graph, groups=groups)
    groups = {name: groups.get(name, Group(name, (), 0)) for name in facts.groups}
    facts = evolve(facts, groups=groups, meshes=() if mesh is None else (mesh,), rank=None)  # none of this process's
    try:
        snapshot.check_facts(facts)
    except snapshot.DamagedError as error:
        raise MalformedError(str(error)) from None
    return facts


def _rows(recording: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of each node, by key."""
    fields, nodes = recording.get("fields"), recording.get("nodes")
    if not isinstance(fields, list) or not isinstance(nodes, list):
        raise MalformedError("it has no `fields` and `nodes`")
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise MalformedError(f"its nodes have no `{missing[0]}`")
    found = []
    for number, node in enumerate(nodes):
        if not isinstance(node, list) or len(node) != len(fields):
            raise MalformedError(f"node {number} is not a list of {len(fields)} fields")
        found.append(dict(zip(fields, node, strict=True)))
    return found


def _mesh(recorded: Any) -> Mesh | None:
    if recorded is None:
        return None
    dims, shape = (recorded.get("dims"), recorded.get("shape")) if isinstance(recorded, dict) else (None, None)
    if not isinstance(dims, list) or not isinstance(shape, list) or len(dims) != len(shape):
        raise MalformedError("its `mesh` is not `dims` and `shape`")
    if not all(isinstance(dim, str) for dim in dims) or not all(type(size) is int and size > 0 for size in shape):
        raise MalformedError("its `mesh` is not names and sizes of dimensions")
    if prod(shape) > 1 << 20:
        raise MalformedError("its `mesh` has more than a million ranks")
    return Mesh(tuple(dims), tuple(shape), tuple(range(prod(shape))))


def _groups(recorded: Any, mesh: Mesh | None) -> dict[str, Group]:
    if not isinstance(recorded, dict):
        raise MalformedError("its `groups` are not lists of ranks by name")
    groups = {}
    for name, ranks in recorded.items():
        if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise MalformedError(f"its group `{name}` is not a list of ranks")
        groups[name] = Group(name, tuple(ranks), len(ranks), _dim(ranks, mesh))
    return groups


def _dim(ranks: Sequence[int], mesh: Mesh | None) -> str | None:
    """The dimension of the mesh that a group runs along."""
    if mesh is None or not ranks:
        return None
    start = ranks[0]
    for position, (dim, size) in enumerate(zip(mesh.dims, mesh.shape, strict=True)):
        step = prod(mesh.shape[position + 1 :])
        if start // step % size == 0 and list(ranks) == list(range(start, start + size * step, step)):
            return dim
    return None


def _content(path: str | os.PathLike[str], name: str) -> tuple[int, Any]:
    """The size of the file, and its JSON: unpacked if it is gzipped, and never more than the limit."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            size = os.fstat(file.fileno()).st_size
            most = min(snapshot.MOST_BYTES, _ANY_BYTES + _UNPACKED * size) if packed else snapshot.MOST_BYTES
            data: bytes = gzip.GzipFile(fileobj=file).read(most + 1) if packed else file.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise MalformedError("it cannot be unpacked") from None
    except (OSError, ValueError) as error:
        raise snapshot.graph_error(snapshot.UNREADABLE, f"`{name}` cannot be read: {reason_of(error)}") from None
    if len(data) > most:
        raise _too_large(name, f"its {size:,} bytes hold more than {most:,} bytes of JSON")
    try:
        return size, json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedError("it is not JSON") from None


def _too_large(name: str, reason: str) -> PolicyGraphError:
    return snapshot.graph_error(snapshot.TOO_LARGE, f"`{name}` is larger than a recorded graph can be: {reason}")
