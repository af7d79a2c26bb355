"""The collector pauses while a graph is split, and goes on as it was before."""

from __future__ import annotations

import gc

import pytest

from policylang.backends import joint as module
from policylang.backends.runtime import collector_paused
from tests.support.run_partition import partitioner, traced


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_it_was_after_an_error_too(enabled: bool):
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="inside"), collector_paused():
            raise ValueError("inside" if not gc.isenabled() else "not paused")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_graph_is_split_without_it(monkeypatch):
    seen: list[bool] = []
    split = module.split

    def watched(*arguments, **options):
        seen.append(gc.isenabled())
        return split(*arguments, **options)

    monkeypatch.setattr(module, "split", watched)
    assert traced("mlp").partition(partitioner("recompute everything")).audit.agrees
    assert seen
    assert not any(seen)
    assert gc.isenabled()
