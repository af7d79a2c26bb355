"""The recorded graphs of ``tests/data`` as live FX graphs, with all the metadata that a partitioner would find."""

from __future__ import annotations

import gzip
import json
import operator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives
import torch.distributed.tensor
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Group

FOLDER = Path(__file__).parent.parent / "data"
ONE_DEVICE = "llama3_8b_one_device_joint"
JOINT = "llama3_8b_dp16_tp8_joint"
BACKWARD = "llama3_8b_dp16_tp8_backward"
NAMES = (ONE_DEVICE, JOINT, BACKWARD)

_BUILTIN = "<built-in function "
_DESCRIPTORS = {name: getattr(descriptors, name) for name in dir(descriptors) if name.endswith(("Input", "Output"))}
_library: torch.library.Library | None = None


def recorded(name: str | Path) -> dict[str, Any]:
    """One recording as it stands in its file, by its name here or by its path."""
    with gzip.open(name if isinstance(name, Path) else FOLDER / f"{name}.json.gz", "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def process_groups(name: str | Path) -> dict[str, tuple[int, ...]]:
    """The ranks of each process group that a recording names."""
    return {group: tuple(ranks) for group, ranks in recorded(name)["groups"].items()}


def shared_graph(name: str | Path) -> fx.GraphModule:
    """A recording rebuilt, anew for every call."""
    _define_operators()
    recording = recorded(name)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    modules: dict[str, dict[str, tuple[str, type]]] = {}
    fakes: dict[str, Any] = {}  # equal values are one object: making 20,000 would take longer than all else
    with FakeTensorMode():
        for row in recording["nodes"]:
            record = dict(zip(recording["fields"], row, strict=True))
            args = _value(record["args"], nodes)
            kwargs = _value(record["kwargs"], nodes)
            target = _target(record["target"]) if record["op"] == "call_function" else record["target"]
            node = graph.create_node(record["op"], target, tuple(args), kwargs, name=record["name"])
            nodes[record["name"]] = node
            if record["val"] is not None:
                node.meta["val"] = _fake(record["val"], fakes)
            _annotate(node, record["meta"], modules)
    _describe_outputs(graph, has_forward=str(record["meta"].get("desc")).startswith("[PlainAOTOutput"))
    return fx.GraphModule(torch.nn.Module(), graph)


@cache
def shared_facts(name: str, with_groups: bool = False) -> Facts:
    """The facts of a recording as it is rebuilt; ``with_groups`` those of its process groups too. Tests share them."""
    groups = {group: Group(group, ranks, len(ranks)) for group, ranks in process_groups(name).items()}
    return collect(shared_graph(name), groups=groups) if with_groups else collect(shared_graph(name))


def _annotate(node: fx.Node, meta: dict[str, Any], modules: dict[str, dict[str, tuple[str, type]]]) -> None:
    if "phase" in meta:
        node.meta["partitioner_tag"] = meta["phase"]
    for key in ("seq_nr", "ac_graph_id", "custom"):
        if meta.get(key) is not None:
            node.meta[key] = meta[key]
    if meta.get("recompute"):
        node.meta["recompute"] = CheckpointPolicy[meta["recompute"]]
    for key, stack in (("module", "nn_module_stack"), ("fwd_module", "fwd_nn_module_stack")):
        if path := meta.get(key):
            node.meta[stack] = modules.setdefault(path, {str(len(modules)): (path, torch.nn.Module)})
    if "desc" in meta and node.op != "output":
        node.meta["desc"] = eval(meta["desc"], dict(_DESCRIPTORS))  # what a descriptor prints is how it is made


def _describe_outputs(graph: fx.Graph, *, has_forward: bool) -> None:
    """A joint graph returns its one output, then a gradient or None for each input; a backward half the latter."""
    output = next(iter(reversed(graph.nodes)))
    (returned,) = output.args
    inputs = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder")]
    plain = [desc for desc in inputs if desc is not None and not isinstance(desc, descriptors.TangentAOTInput)]
    flat = torch.utils._pytree.tree_leaves(returned, is_leaf=lambda leaf: leaf is None)
    forward: list[Any] = [descriptors.PlainAOTOutput(0)] if has_forward else []
    gradients = flat[len(forward) :]
    if len(gradients) != len(plain):  # a backward half reads only some of the inputs that it returns gradients of
        plain = [descriptors.PlainAOTInput(index) for index in range(len(gradients))]
    described = zip(gradients, plain, strict=True)
    output.meta["desc"] = forward + [None if grad is None else descriptors.GradAOTOutput(of) for grad, of in described]
    output.args = (tuple(flat),)


def _value(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_value(part, nodes) for part in value]
    if not isinstance(value, dict):
        return value
    if "n" in value:
        return nodes[value["n"]]
    if "dtype" in value and isinstance(value["dtype"], str):
        return getattr(torch, value["dtype"].removeprefix("torch."))
    if "device" in value and isinstance(value["device"], str):
        return torch.device("cpu")  # recorded on a machine with another one
    if "slice" in value:
        return slice(*_value(value["slice"], nodes))
    if "repr" in value:
        return getattr(torch, value["repr"].removeprefix("torch."), value["repr"])
    return {key: _value(part, nodes) for key, part in value.items()}


@cache
def _target(name: str) -> Any:
    if name.startswith(_BUILTIN):
        return getattr(operator, name.removeprefix(_BUILTIN).rstrip(">"))
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _fake(value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return tuple(_fake(part, known) for part in value)
    if value is None or "scalar" in value:
        return value and value["scalar"]
    key = repr(value)
    if key not in known:
        known[key] = torch.empty_strided(value["shape"], value["stride"], dtype=getattr(torch, value["dtype"]))
    return known[key]


def _define_operators() -> None:
    """The recording's one custom operator, AutoParallel's cast, which is nothing but its schema here."""
    global _library
    if _library is None:
        _library = torch.library.Library("autoparallel", "FRAGMENT")
        if not hasattr(torch.ops.autoparallel, "dtype_cast"):
            _library.define("dtype_cast(Tensor x, ScalarType dtype) -> Tensor")
