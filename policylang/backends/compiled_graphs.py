"""The graphs that the compile backends have compiled, each with the parameters that tie it to a model.

Modules that share their code share the compiled graph: the blocks of a model are mostly one graph, called once per
block. The parameters of a call identify the module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import define, field, frozen
from torch import fx

from policylang.audit.code import CodeAudit
from policylang.audit.report import Report
from policylang.backends.records import Findings
from policylang.graph.inputs import ModulePaths, raw_path
from policylang.torch_compat.distributed import gathered_parameters

_MOST_PLACES = 3

_Instance = tuple["weakref.ref[torch.Tensor]", ...]
"""The parameters that a graph was called with at once: those of one module."""


@define(eq=False)
class CompiledGraph:
    """One graph of Dynamo's and what the policy decided on it."""

    number: int
    """In order of compilation, from 0."""
    operators: int
    """The number of operators of Dynamo's graph."""
    places: tuple[str, ...] = ()
    """The first few modules that its operators belong to."""
    findings: tuple[Findings, ...] = ()
    """One for each partition: one in all, except for regions that torch partitions separately; of a graph without
    gradients, its rewrites."""
    from_cache: bool = False
    """Inductor had it in its caches; what is known of it is in the sidecar."""
    sharded_aside: bool = False
    """True if ``fully_shard`` gathers its weights around it."""
    code: CodeAudit | None = field(default=None, repr=False)
    """The audit of its generated code, if the policy orders and Inductor compiles."""
    _instances: dict[tuple[int, ...], _Instance] = field(factory=dict, repr=False)
    """By the ``id`` of each of its parameters, the modules that it was called for; some may have died since."""
    _positions: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def kind(self) -> Literal["training", "inference"]:
        """``inference``: no gradient is computed through it, so there was nothing to decide about values."""
        return "training" if any(not found.report.half for found in self.findings) else "inference"

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(found.report for found in self.findings)

    @property
    def label(self) -> str:
        """As errors name it: ``graph 1 (34 operators, in layers.0, norm)``."""
        place = f", in {', '.join(self.places)}" if self.places else ""
        return f"graph {self.number} ({self.operators} operators{place})"

    def note_call(self, arguments: Sequence[Any]) -> None:
        """Remember which parameters it is called with: that is what ties a graph to the modules it runs for."""
        if self._positions is None:
            found = enumerate(arguments)
            self._positions = tuple(at for at, each in found if isinstance(each, torch.nn.Parameter))
        if not self._positions:
            return
        own = [arguments[at] for at in self._positions]
        key = tuple([id(each) for each in own])
        known = self._instances.get(key)
        if known is None or known[0]() is not own[0]:  # an `id` is reused once its object has died
            self._instances = {one: refs for one, refs in self._instances.items() if _is_alive(refs)}
            self._instances[key] = tuple(weakref.ref(each) for each in own)

    def instances(self, parameters: Mapping[int, torch.Tensor] | None = None) -> list[frozenset[int]]:
        """The ``id`` of every parameter of each living module that it was called for; with ``parameters``, by ``id``,
        of those that were called with one of these."""
        return [
            frozenset(key)
            for key, refs in self._instances.items()
            if _is_alive(refs) and (parameters is None or any(parameters.get(id(ref())) is ref() for ref in refs))
        ]


def _is_alive(refs: _Instance) -> bool:
    return all(ref() is not None for ref in refs)


@frozen(eq=False)
class GraphUse:
    """A graph of a model's, and how many modules of the model run it in a step."""

    graph: CompiledGraph
    modules: int = 1


def described(gm: fx.GraphModule, *, number: int, root: str) -> CompiledGraph:
    """A graph as it comes from Dynamo. To be called before it is compiled, which may change it."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return CompiledGraph(number, len(nodes), _places(nodes, root))


def of_backend(graphs: Sequence[CompiledGraph]) -> tuple[GraphUse, ...]:
    """All graphs of a backend. One without parameters, or that has not run yet, counts once."""
    return tuple(GraphUse(graph, max(1, len(graph.instances()))) for graph in graphs)


def of_model(backends: Iterable[Sequence[CompiledGraph]], model: torch.nn.Module) -> tuple[GraphUse, ...]:
    """The graphs of each backend, earliest first, that were called with a parameter of ``model`` or what FSDP gathers
    for one; without the modules that later backends compiled anew."""
    parameters = {id(each): each for each in (*model.parameters(), *gathered_parameters(model))}
    kept: list[GraphUse] = []
    later: frozenset[int] = frozenset()
    for graphs in reversed(list(backends)):
        found = [(graph, graph.instances(parameters)) for graph in graphs]
        current = [(graph, [each for each in instances if not each <= later]) for graph, instances in found]
        kept[:0] = [GraphUse(graph, len(instances)) for graph, instances in current if instances]
        later = later.union(*(each for _, instances in found for each in instances))
    return tuple(kept)


def _places(nodes: Iterable[fx.Node], root: str) -> tuple[str, ...]:
    paths = ModulePaths(root)
    raw = dict.fromkeys(paths.add(raw_path(node.meta)) for node in nodes)
    table = paths.table()
    found = list(dict.fromkeys(_place(table[path]) for path in raw if table[path]))
    return (*found[:_MOST_PLACES], "…") if len(found) > _MOST_PLACES else tuple(found)


def _place(path: str) -> str:
    """Down to the first number: ``model.layers.0.self_attn.q_proj`` is in ``model.layers.0``."""
    parts = path.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1]) if number is not None else path
