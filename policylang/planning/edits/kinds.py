"""The kinds of edits: which class plans which statement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policylang.planning.edits.bucketing.buckets import Buckets
from policylang.planning.edits.collectives.gathers import GatherChains
from policylang.planning.edits.collectives.round_trips import RoundTrips
from policylang.planning.edits.collectives.scatters import ScatterChains
from policylang.planning.edits.edit_planner import EditPlanner

KINDS: Mapping[str, type[EditPlanner[Any]]] = {
    each.kind: each for each in (GatherChains, ScatterChains, RoundTrips, Buckets)
}
"""By the ``kind`` of a statement."""
