"""Finds or makes the process groups of rewritten collectives, with the order of ranks that a rewrite was proven for.

A group is found or made once a process. Its name follows from its ranks, so every member calls it the same without
asking, and a compiled graph that a later process takes from a cache finds the group that was made for it. Where
torch.distributed knows a group of exactly this order, a flattened mesh's for one, that name stands for it.

Only members make a group. Ranks that share a graph make the same groups; what other ranks of the world do (another
pipeline stage has another graph) does not matter. torch keeps the table of names: it ends with the default group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

import torch.distributed as dist
from attrs import frozen

from policylang.torch_compat import distributed
from policylang.torch_compat.graphs import group_ranks

_PREFIX = "policylang_"


@frozen(order=True)
class RankOrder:
    """Ranks in an order, and what carries data between them."""

    ranks: tuple[int, ...]
    """Global."""
    backend: str
    """As torch.distributed names it: ``nccl``."""

    @property
    def name(self) -> str:
        """What collectives of a graph call the group."""
        words = f"{self.backend} {' '.join(map(str, self.ranks))}"
        return f"{_PREFIX}{len(self.ranks)}_{hashlib.sha256(words.encode()).hexdigest()[:16]}"


def backend_of(name: str) -> str:
    """What carries data in the group that a collective names."""
    return distributed.group_backend(name)


def ensure(orders: Iterable[RankOrder]) -> None:
    """Have a group for each, made where there is none. Blocks until the other members do the same.

    All ranks make them in one order, that of the ranks: of the groups that are waited for, the first one's members all
    wait for that one.
    """
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


def can_ensure(orders: Iterable[RankOrder]) -> bool:
    """Whether this process is a member of them all: a compiled graph that names others is not this rank's."""
    wanted = list(orders)
    return not wanted or (dist.is_initialized() and all(dist.get_rank() in order.ranks for order in wanted))


def surroundings() -> str:
    """What a rewrite depends on that no graph says: the groups of this rank, but for those made here."""
    known = (known for known in distributed.known_groups() if not known.name.startswith(_PREFIX))
    return ";".join(f"{known.name} {known.ranks} {known.backend} {known.description}" for known in known)


def to_json(orders: Collection[RankOrder]) -> list[Any]:
    return [[list(order.ranks), order.backend] for order in sorted(set(orders))]


def from_json(data: Iterable[Any]) -> tuple[RankOrder, ...]:
    """Raises ``TypeError`` or ``ValueError`` for data that is not what :func:`to_json` writes."""
    return tuple(RankOrder(tuple(map(int, ranks)), str(backend)) for ranks, backend in data)
