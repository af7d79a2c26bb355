"""Halves and steps to schedule, as FX graphs on fake tensors: recorded ones, and a Llama's that are traced here.

The values of a graph are made anew by running it on fake tensors: torch's schedulers tell by their storages what lies
in one memory. They are tensors of ``meta``: memory on a CPU is not counted by these schedulers, and what they trace
when they put collectives together writes into slices, which fake CUDA tensors cannot do where there is no CUDA.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

import policylang
from benchmarks.llama3_8b_128_ranks import fake_ranks, trace
from examples.sharded_llama import LLAMA3_8B, LlamaConfig
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Group, Mesh, Phase
from policylang.graph.recorded import facts_of_recording, rebuilt
from policylang.torch_compat.distributed import create_group, forget_group, rename_group

DEVICE = torch.device("meta")


@frozen(eq=False)
class Subject:
    """A graph to schedule, with what is known of its process groups."""

    name: str
    graph: fx.Graph
    groups: Mapping[str, Group]
    facts: Facts
    mode: FakeTensorMode = field(repr=False)

    def fresh(self) -> fx.GraphModule:
        """A copy for a pass that changes it; the fake values are shared."""
        root = torch.nn.Module()
        for node in self.graph.find_nodes(op="get_attr"):
            setattr(root, node.target, node.meta["val"])
        copies: dict[fx.Node, fx.Node] = {}
        graph = fx.Graph()
        returned = graph.graph_copy(self.graph, copies)
        graph.output(returned).meta = dict(next(iter(reversed(self.graph.nodes))).meta)
        return fx.GraphModule(root, graph)

    def read(self, module: fx.GraphModule) -> Facts:
        """The facts of what a pass made of a copy. The meshes of the process are looked for once, and not here."""
        return evolve(collect(module, kind=self.facts.kind, groups=self.groups), meshes=self.facts.meshes)


# --- recorded graphs -------------------------------------------------------------------------------------------------


def recorded(path: Path) -> Subject:
    """A graph recorded as JSON, as ``docs/snapshots.md`` describes it."""
    data = path.read_bytes()
    recording = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    known = facts_of_recording(recording)
    rows = [dict(zip(recording["fields"], node, strict=True)) for node in recording["nodes"]]
    groups = laid_out(known.groups)
    with process_groups(groups):
        return subject_of(path.name.partition(".")[0], rebuilt(rows), groups, known.meshes, known.kind)


def recorded_halves(path: Path) -> tuple[Subject, ...]:
    """A recorded half as it is; of a recorded joint graph both halves, with the weights gathered in the backward."""
    whole = recorded(path)
    if whole.facts.kind is not GraphKind.JOINT:
        return (whole,)
    module = whole.fresh()
    values = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    with process_groups(whole.groups):
        with whole.mode:
            halves = policylang.partition(
                module, values, num_fwd_outputs=1, policy=policylang.parse(_RESHARD), agree=False
            )
        return tuple(
            subject_of(f"{whole.name}_{kind.value}", half.graph, whole.groups, whole.facts.meshes, kind)
            for half, kind in zip(halves, (GraphKind.FORWARD, GraphKind.BACKWARD), strict=True)
        )


_RESHARD = "policy reshard\n\nblocks layers.*\ninclude <fsdp_reshard_always>\nundecided -> auto\n"


def laid_out(groups: Mapping[str, Group]) -> dict[str, Group]:
    """The groups of rank 0 with ranks of their own: where several are said to be of the same ranks, each was numbered
    from 0. They become the dimensions of one mesh then, the last name the innermost, within a server."""
    alike: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(groups, reverse=True):
        alike.setdefault(groups[name].ranks, []).append(name)
    found = dict(groups)
    for ranks, names in alike.items():
        step = 1
        for name in names if ranks and len(names) > 1 else ():
            found[name] = evolve(groups[name], ranks=tuple(range(0, step * len(ranks), step)))
            step *= len(ranks)
    return found


def subject_of(
    name: str, graph: fx.Graph, groups: Mapping[str, Group], meshes: tuple[Mesh, ...], kind: GraphKind
) -> Subject:
    """The graph with values of its own, on :data:`DEVICE`. The process groups have to be there."""
    mode = FakeTensorMode()
    with mode:
        values_anew(graph)
    return Subject(name, graph, groups, evolve(collect(graph, kind=kind, groups=groups), meshes=meshes), mode)


def values_anew(graph: fx.Graph) -> None:
    """Gives each node a value of its own, of the fake mode that is active."""
    for node in graph.nodes:
        value = _value(node)
        node.meta = dict(node.meta)  # the halves of a partition may share those of their inputs
        if value is not None:
            node.meta["val"] = value


def _value(node: fx.Node) -> Any:
    """What the operator gives on fake tensors; where it cannot run on them, memory of its own, as was recorded."""
    before = node.meta.get("val")
    if node.op == "call_function":
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
        args, kwargs = tree_map_only(torch.device, lambda _: DEVICE, (args, kwargs))
        try:
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            made = None
        if made is not None and (before is None or _layout(made) == _layout(before)):
            return made
    return tree_map_only(torch.Tensor, _moved, before)


def _layout(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_layout(part) for part in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def _moved(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


# --- process groups --------------------------------------------------------------------------------------------------


@contextmanager
def process_groups(groups: Mapping[str, Group]) -> Iterator[None]:
    """This process as rank 0, each group under its recorded name and of its recorded ranks.

    A policy that is carried out here reads from these ranks which groups lie within a server, and has to plan with the
    times that it is judged by. A group without known ranks, or that rank 0 is not in, becomes one of the first ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    members = {
        name: group.ranks if 0 in group.ranks else tuple(range(group.size or len(group.ranks) or 2))
        for name, group in groups.items()
    }
    world = 1 + max((1, *(max(ranks) for ranks in members.values())))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        for name, ranks in members.items():
            create_group(f"of {name}", ranks, "fake")
            forget_group(name)
            rename_group(f"of {name}", name)
        yield
    finally:
        for name in members:
            forget_group(name)
        dist.destroy_process_group()


# --- graphs that anyone can make -------------------------------------------------------------------------------------

_STEP = """
policy traced

blocks layers.*

recompute everything in block
save attention in block
save matmul in block
recompute every 2nd mm per block
save everything in block where crosses block
optional save reduce_scatter in block

include <fsdp_reshard_always>
"""
"""What a forward keeps for its backward, and that the backward gathers the weights again."""


def traced_halves(layout: str, dp: int, tp: int, config: LlamaConfig = LLAMA3_8B) -> tuple[Subject, Subject]:
    """The forward and the backward of the Llama of ``examples/sharded_llama.py`` on ``dp`` × ``tp`` ranks, with
    selective recomputation and gathers in the backward; one sequence a replica, bfloat16.

    ``layout``: ``tp`` for tensor-parallel blocks, ``fsdp`` for weights that are cut over all ranks.
    """
    with fake_ranks(dp * tp):
        module = trace(config, layout, "cpu", dp, tp).gm
        policylang.apply(module, policylang.parse(_STEP))
        forward, backward = cut(module.graph)
        facts = collect(module)
        name = f"llama_{dp}x{tp}_{layout}" if tp > 1 else f"llama_{dp}"
        return (
            subject_of(f"{name}_forward", forward, facts.groups, facts.meshes, GraphKind.FORWARD),
            subject_of(f"{name}_backward", backward, facts.groups, facts.meshes, GraphKind.BACKWARD),
        )


def cut(graph: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """A flat graph in two where its backward begins, recomputation included. What is read behind the cut is an output
    of the first graph and an input of the second."""
    nodes = list(graph.nodes)
    end = nodes[-1]
    phases = collect(graph).phases
    begin = next(at for at, phase in enumerate(phases) if phase == Phase.BACKWARD)
    before, behind = nodes[:begin], nodes[begin:-1]
    early = set(before)
    returned = [node for node in end.all_input_nodes if node in early]
    kept = dict.fromkeys(read for node in behind for read in node.all_input_nodes if read in early)
    forward, backward = fx.Graph(), fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in before:
        copies[node] = forward.node_copy(node, copies.__getitem__)
    forward.output(tuple(copies[node] for node in dict.fromkeys([*returned, *kept])))
    copies = {}
    for node in kept:
        copies[node] = backward.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in behind:
        copies[node] = backward.node_copy(node, copies.__getitem__)
        copies[node].meta["partitioner_tag"] = "is_backward"
    backward.output(tuple(copies[node] for node in end.all_input_nodes if node not in early))
    return forward, backward


def synthetic_half(nodes: int, weights: int = 7, ranks: int = 64) -> Subject:
    """A backward half of about ``nodes`` nodes: blocks that gather each weight, multiply with it, and scatter its
    gradient. Built by hand, since tracing a hundred thousand nodes would take longer than anything measured on it;
    nodes of one shape share a fake value."""
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    width, tokens = 4096, 16384
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        shard, cut = (torch.empty(width // ranks, width, dtype=dtype, device=DEVICE) for dtype in _DTYPES)
        whole = torch.empty(width, width, dtype=torch.bfloat16, device=DEVICE)
        value = torch.empty(tokens, width, dtype=torch.bfloat16, device=DEVICE)
    per_weight = 10
    blocks = max(1, nodes // (weights * per_weight + 1))
    parameters = [_node(graph.placeholder(f"primals_{number + 1}"), shard, None) for number in range(blocks * weights)]
    saved = [_node(graph.placeholder(f"mm_{block}"), value, None) for block in range(blocks)]
    gradient = _node(graph.placeholder("tangents_1"), value, None)
    returned = []
    for block in reversed(range(blocks)):
        path = f"L['self'].layers.{block}"

        def call(target: Any, value: Any, *args: Any, path: str = path, **kwargs: Any) -> fx.Node:
            return _node(graph.call_function(target, args, kwargs), value, path)

        for number in range(weights):
            small = call(aten._to_copy.default, cut, parameters[block * weights + number], dtype=torch.bfloat16)
            gathered = call(c10d.all_gather_into_tensor.default, whole, small, ranks, "0")
            weight = call(aten.t.default, whole, call(c10d.wait_tensor.default, whole, gathered))
            turned = call(aten.t.default, value.T, gradient)
            product = call(aten.mm.default, whole, turned, saved[block])
            scattered = call(c10d.reduce_scatter_tensor.default, cut, product, "sum", ranks, "0")
            awaited = call(c10d.wait_tensor.default, cut, scattered)
            returned.append(call(aten._to_copy.default, shard, awaited, dtype=torch.float32))
            gradient = call(aten.mm.default, value, gradient, weight)
        gradient = call(aten.mul.Tensor, value, gradient, saved[block])
    graph.output((gradient, *returned))
    groups = {"0": Group("0", tuple(range(ranks)), ranks)}
    return Subject(f"synthetic_{nodes}", graph, groups, collect(graph, kind=GraphKind.BACKWARD, groups=groups), mode)


_DTYPES = (torch.float32, torch.bfloat16)


def _node(node: fx.Node, value: Any, path: str | None) -> fx.Node:
    node.meta["val"] = value
    if path is not None:
        node.meta["nn_module_stack"] = {"0": (path, torch.nn.Module)}
    return node
