"""The graphs that the compile backends have compiled, each with the parameters that tie it to a model."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Any, Literal

import torch
from attrs import define, field
from torch import fx

from policylang.audit.summary.report import Report
from policylang.backends.findings import Findings
from policylang.graph.reading.modules import ModulePaths, raw_path

_MOST_PLACES = 3


@define(eq=False)
class CompiledGraph:
    """One graph of Dynamo's and what the policy came to on it."""

    number: int
    """In order of compilation, from 0."""
    operators: int
    """Of Dynamo's graph."""
    places: tuple[str, ...] = ()
    """The first few modules that its operators belong to."""
    findings: tuple[Findings, ...] = ()
    """One for each partition, which is one but for regions that torch partitions on their own."""
    from_cache: bool = False
    """Inductor had it in its caches; what is known of it stands in the sidecar."""
    _parameters: dict[int, weakref.ref[torch.Tensor]] = field(factory=dict, repr=False)

    @property
    def kind(self) -> Literal["training", "inference"]:
        """``inference``: no gradient is computed through it, so there was nothing to decide."""
        return "training" if self.findings else "inference"

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(found.report for found in self.findings)

    @property
    def label(self) -> str:
        """As errors name it: ``graph 1 (34 operators, in layers.0, norm)``."""
        place = f", in {', '.join(self.places)}" if self.places else ""
        return f"graph {self.number} ({self.operators} operators{place})"

    @property
    def called(self) -> bool:
        return bool(self._parameters)

    def note_parameters(self, arguments: Iterable[Any]) -> None:
        """Remember which parameters it was called with: that is what ties a graph to a model."""
        for argument in arguments:
            if isinstance(argument, torch.nn.Parameter) and id(argument) not in self._parameters:
                self._parameters[id(argument)] = weakref.ref(argument)

    @property
    def parameter_ids(self) -> Set[int]:
        """``id`` of each parameter it was called with; some may have died since."""
        return self._parameters.keys()

    def belongs_to(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether it was called with one of these."""
        noted = self._parameters
        return any((known := noted.get(id(one))) is not None and known() is one for one in parameters)


def described(gm: fx.GraphModule, *, number: int, root: str) -> CompiledGraph:
    """A graph as it comes from Dynamo. To be called before it is compiled, which may change it."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return CompiledGraph(number, len(nodes), _places(nodes, root))


def of_model(backends: Iterable[Sequence[CompiledGraph]], model: torch.nn.Module) -> tuple[CompiledGraph, ...]:
    """The graphs of each backend, earliest backend first, that were called with a parameter of ``model``.

    Without those that later backends compiled anew: their parameters were all handed to the graphs of later ones.
    """
    parameters: Sequence[torch.Tensor] = list(model.parameters())
    found = [[graph for graph in graphs if graph.belongs_to(parameters)] for graphs in backends]
    kept: list[CompiledGraph] = []
    later: set[int] = set()
    for graphs in reversed(found):
        kept[:0] = [graph for graph in graphs if not graph.parameter_ids <= later]
        later.update(*(graph.parameter_ids for graph in graphs))
    return tuple(kept)


def _places(nodes: Iterable[fx.Node], root: str) -> tuple[str, ...]:
    paths = ModulePaths(root)
    raw = dict.fromkeys(paths.add(raw_path(node.meta)) for node in nodes)
    table = paths.table()
    found = list(dict.fromkeys(_place(table[path]) for path in raw if table[path]))
    return (*found[:_MOST_PLACES], "…") if len(found) > _MOST_PLACES else tuple(found)


def _place(path: str) -> str:
    """Down to the first number: ``model.layers.0.self_attn.q_proj`` lies in ``model.layers.0``."""
    parts = path.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1]) if number is not None else path
