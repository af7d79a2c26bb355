"""Facts in a file and back: everything is there, and nothing else is read."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from policylang.graph import snapshot
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from tests.support.shared_graphs import NAMES, shared_graph


def assert_same(left: Facts, right: Facts) -> None:
    for each in attrs.fields(Facts):
        one, other = getattr(left, each.name), getattr(right, each.name)
        if snapshot.is_column(each.name):
            one, other = list(one), list(other)
        assert one == other, each.name


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_graph_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    facts = collect(shared_graph(name))
    path = tmp_path / "recorded.graph"
    snapshot.write(facts, path)
    assert_same(snapshot.load(path), facts)
    assert path.stat().st_size < 3 * len(facts), "three bytes a node"
