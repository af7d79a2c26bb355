"""The recorded graphs of ``tests/data`` as live FX graphs, with all the metadata that a partitioner would find."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Group
from policylang.graph.recorded import rebuilt

FOLDER = Path(__file__).parent.parent / "data"
ONE_DEVICE = "llama3_8b_one_device_joint"
JOINT = "llama3_8b_dp16_tp8_joint"
BACKWARD = "llama3_8b_dp16_tp8_backward"


@cache
def _own_operator() -> torch.library.Library:
    """The recordings' one custom operator, AutoParallel's cast, which is nothing but its schema here."""
    library = torch.library.Library("autoparallel", "FRAGMENT")
    if not hasattr(torch.ops.autoparallel, "dtype_cast"):
        library.define("dtype_cast(Tensor x, ScalarType dtype) -> Tensor")
    return library


def recorded(name: str | Path) -> dict[str, Any]:
    """One recording as it is in its file, by its name here or by its path."""
    with gzip.open(name if isinstance(name, Path) else FOLDER / f"{name}.json.gz", "rt") as file:
        found: dict[str, Any] = json.load(file)
    return found


def process_groups(name: str | Path) -> dict[str, tuple[int, ...]]:
    """The ranks of each process group that a recording names."""
    return {group: tuple(ranks) for group, ranks in recorded(name)["groups"].items()}


def shared_graph(name: str | Path) -> fx.GraphModule:
    """A recording rebuilt, anew for every call."""
    _own_operator()
    recording = recorded(name)
    rows = [dict(zip(recording["fields"], row, strict=True)) for row in recording["nodes"]]
    return fx.GraphModule(torch.nn.Module(), rebuilt(rows))


@cache
def shared_facts(name: str, with_groups: bool = False) -> Facts:
    """The facts of a recording as it is rebuilt; ``with_groups`` those of its process groups too. Tests share them."""
    groups = {group: Group(group, ranks, len(ranks)) for group, ranks in process_groups(name).items()}
    return collect(shared_graph(name), groups=groups if with_groups else None)
