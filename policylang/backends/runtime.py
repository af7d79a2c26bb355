"""Shared at run time: timed stages, process groups of rewritten collectives, and the ranges of a profile."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from attrs import frozen
from torch import fx

from policylang.backends import copies
from policylang.graph import marks
from policylang.torch_compat import distributed
from policylang.torch_compat.compilers import is_profiling, named_range
from policylang.torch_compat.graphs import group_ranks


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note under ``stage`` the wall seconds spent within, also where it ends in an error."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = time.perf_counter() - start


_PREFIX = "policylang_"


@frozen(order=True)
class RankOrder:
    """Ranks in an order, and what carries data between them."""

    ranks: tuple[int, ...]
    """Global."""
    backend: str
    """The backend's name in torch.distributed: ``nccl``."""

    @property
    def name(self) -> str:
        """The name of the group in collectives of a graph."""
        words = f"{self.backend} {' '.join(map(str, self.ranks))}"
        return f"{_PREFIX}{len(self.ranks)}_{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def ensure_groups(orders: Iterable[RankOrder]) -> None:
    """Have a group for each, made where there is none. Blocks until the other members do the same. A group's name
    follows from its ranks, so every member calls it the same without asking, and a compiled graph that a later process
    takes from a cache finds it. Where torch.distributed knows a group of exactly this order, a flattened mesh's for
    one, its name is used too. Only members make a group: what other ranks of the world do (another pipeline stage has
    another graph) does not matter. All make them in one order, that of the ranks, so that none waits in a circle."""
    for order in sorted(set(orders)):
        if group_ranks(order.name) == order.ranks:
            continue
        distributed.forget_group(order.name)  # of a group that was destroyed
        serving = (order.ranks, order.backend)
        same = next((known for known in distributed.known_groups() if (known.ranks, known.backend) == serving), None)
        if same is not None:
            distributed.rename_group(same.name, order.name)
        else:
            distributed.create_group(order.name, order.ranks, order.backend)


def are_joined(orders: Iterable[RankOrder]) -> bool:
    """True if this process is a member of them all: a compiled graph that names others is not this rank's."""
    wanted = list(orders)
    return not wanted or (dist.is_initialized() and all(dist.get_rank() in order.ranks for order in wanted))


def groups_around() -> str:
    """The groups of this rank, but for those made here: a rewrite depends on them, and no graph has them."""
    known = (known for known in distributed.known_groups() if not known.name.startswith(_PREFIX))
    return ";".join(f"{known.name} {known.ranks} {known.backend} {known.description}" for known in known)


# Ranges of a profile are opened where a graph runs, and only while a profiler does: a node for them would be in the
# keys of compile caches, in the way of fusion, and in the graph of whoever never profiles.

PREFIX = "policylang: "
_COPIES = {
    copies.OFFLOAD_OP: "copy to the host",
    copies.RELOAD_OP: "copy from the host",
    copies.WAIT_OP: "wait for a copy",
    copies.SCALES_OP: "narrow",
    copies.NARROW_OP: "narrow",
    copies.WIDEN_OP: "widen",
}


def recomputation(source: str) -> str:
    """The name of the range around a recomputed operator. ``source``: the line, or what else decided."""
    return f"{PREFIX}recompute, {source}".removesuffix(", ")


def asked_for(node: fx.Node, *, is_backward: bool = False) -> str | None:
    """The name of the range around a node; None for what the model itself does. ``is_backward``: in the backward graph
    of a partition, a node that was decided on is recomputed."""
    found = marks.custom(node.meta)
    source = found.get(marks.PROVENANCE, "")
    if node.op != "call_function":
        return None
    if marks.MOVED in found and node.target in _COPIES:
        return f"{PREFIX}{_COPIES[node.target]}, {source}".removesuffix(", ")
    if marks.REWRITTEN in found:
        return f"{PREFIX}fused collective, {found[marks.REWRITTEN]}"
    if marks.RECOMPUTED in found or (is_backward and marks.PROVENANCE in found):
        return recomputation(source)
    return None


class _Ranged(fx.Interpreter):  # type: ignore[misc]  # torch does not type it
    def __init__(self, gm: fx.GraphModule, is_backward: bool) -> None:
        super().__init__(gm)
        self._is_backward = is_backward

    def run_node(self, n: fx.Node) -> Any:
        name = asked_for(n, is_backward=self._is_backward)
        with nullcontext() if name is None else named_range(name):
            return super().run_node(n)


def run(gm: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Call a graph, node by node while a profiler runs: the same operators on the same values."""
    return _Ranged(gm, False).run(*arguments) if is_profiling() else gm(*arguments)


def boxed(gm: fx.GraphModule, compiled: Callable[[list[Any]], Any], is_backward: bool) -> Callable[[list[Any]], Any]:
    """Wrap a graph that AOTAutograd calls with a list, which it empties."""

    def call(arguments: list[Any]) -> Any:
        return _Ranged(gm, is_backward).boxed_run(arguments) if is_profiling() else compiled(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd asks for
    return call
