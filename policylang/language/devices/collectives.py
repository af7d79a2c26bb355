"""The kinds of collectives, by the many names that libraries and tables have for them."""

from __future__ import annotations

from enum import Enum
from functools import cache


class CollectiveKind(Enum):
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    """From one rank to all, or from all to one."""
    SCATTER = "scatter"
    """A piece from one rank to each, or from each to one."""
    POINT_TO_POINT = "send and receive"
    BARRIER = "barrier"


_PARTS = (
    # Two that hold the names of others come first.
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("reduce", CollectiveKind.BROADCAST),
    ("scatter", CollectiveKind.SCATTER),
    ("gather", CollectiveKind.SCATTER),
    ("barrier", CollectiveKind.BARRIER),
    ("permute", CollectiveKind.POINT_TO_POINT),
    ("send", CollectiveKind.POINT_TO_POINT),
    ("recv", CollectiveKind.POINT_TO_POINT),
)


@cache
def collective_kind(name: str) -> CollectiveKind | None:
    """Of ``all_gather_into_tensor``, ``_allgather_base_`` or ``AllGather``; None where the name says none."""
    folded = name.lower().replace("_", "").replace("-", "")
    return next((kind for part, kind in _PARTS if part in folded), None)
