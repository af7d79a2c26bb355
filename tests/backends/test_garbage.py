"""The collector pauses while a graph is split, and goes on as it was before."""

from __future__ import annotations

import gc

import pytest

from policylang.backends import joint as module
from policylang.backends.runtime import collector_paused
from tests.support import models
from tests.support.run_partition import partitioner, trace


def fails_within_the_pause() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise ValueError("inside")


def test_it_goes_on_after_an_error():
    with pytest.raises(ValueError, match="inside"):
        fails_within_the_pause()
    assert gc.isenabled()


def test_it_stays_off_for_those_who_had_it_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_graph_is_split_without_it(monkeypatch):
    seen: list[bool] = []
    split = module.split

    def watched(*arguments, **options):
        seen.append(gc.isenabled())
        return split(*arguments, **options)

    monkeypatch.setattr(module, "split", watched)
    traced = trace(*models.mlp())
    assert traced.partition(partitioner("recompute everything")).audit.agrees
    assert seen
    assert not any(seen)
    assert gc.isenabled()
