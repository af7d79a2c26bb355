"""Rebuilds a recorded graph as an FX graph, with the metadata that facts are collected from."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from policylang.operators.categories import StandIn
from policylang.torch_compat.graphs import OpOverload, descriptor_classes, load_distributed_operators
from policylang.torch_compat.tracing import fixed_size_fake_mode, tree_leaves


class MalformedError(Exception):
    """What was read is no recorded graph. The message is a phrase that says why."""


_BUILTIN = "<built-in function "
_COPIED = ("seq_nr", "ac_graph_id", "custom")
_KINDS = ("placeholder", "get_attr", "call_function", "call_module", "call_method", "output")
_SAID: Mapping[str, type] = {
    "phase": str,
    "module": str,
    "fwd_module": str,
    "seq_nr": int,
    "ac_graph_id": int,
    "recompute": str,
    "custom": dict,
    "desc": str,
}
"""What ``meta`` may hold, and of which type; each may be null."""
_NOT_A_NODE = (MalformedError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def rebuilt(rows: Sequence[Mapping[str, Any]]) -> fx.Graph:
    """The graph of a recording's nodes. Raises :class:`MalformedError`, which names the node that cannot be rebuilt.

    A graph without a module: a module would make Python of it, with names from the file in it, and run that.
    """
    load_distributed_operators()
    builder = _Builder()
    with fixed_size_fake_mode():
        for number, record in enumerate(rows):
            try:
                builder.add(record)
            except _NOT_A_NODE as error:
                said = str(error).splitlines() or [type(error).__name__]
                raise MalformedError(f"node {number}, `{str(record['name'])[:80]}`: {said[0][:200]}") from None
    return builder.finished()


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

    def finished(self) -> fx.Graph:
        _describe_outputs(self.graph, self.descriptors, has_forward=self.last_desc.startswith("[PlainAOTOutput"))
        return self.graph

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
    """Of one node, what would otherwise be taken for something else."""
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
    """A joint graph returns its one output, then a gradient or None for each input; a backward half the latter."""
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
    if len(gradients) != len(plain):  # a backward half reads only some of the inputs that it returns gradients of
        plain = [descriptors["PlainAOTInput"](index) for index in range(len(gradients))]
    try:
        described = [
            None if gradient is None else descriptors["GradAOTOutput"](of)
            for gradient, of in zip(gradients, plain, strict=True)
        ]
    except AssertionError:  # of the descriptor
        raise MalformedError("it returns the gradient of an input that has none") from None
    output.meta["desc"] = forward + described
    output.args = (tuple(flat),)


def _descriptor(text: str, classes: Mapping[str, type]) -> Any:
    """What a descriptor prints is how it is made: names of its classes, called with constants and with each other."""
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
    found = _known(parts)
    if found is not None:
        return found
    strange = next((key for key in kwargs if not key.isidentifier()), None)
    if strange is not None:
        raise MalformedError(f"no argument can be called `{strange[:80]}`")
    several = isinstance(value, tuple) and len(value) > 1
    namespace, name, overload = parts
    return StandIn(namespace, name, overload, len(args), tuple(kwargs), several)


def _known(parts: Sequence[str]) -> OpOverload | None:
    namespace, name, overload = parts
    found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    return found if isinstance(found, OpOverload) else None
