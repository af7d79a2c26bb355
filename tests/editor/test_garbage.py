"""The collector runs when nobody types, once, and not before."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from policylang.api.planned_graphs import facts_of
from policylang.editor import garbage
from policylang.editor.features.offers.graph_index import index_of
from policylang.editor.garbage import keep_what_is_there
from tests.editor.conftest import GRAPHS


def test_it_collects_once_after_changes_when_it_is_quiet(monkeypatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(garbage, "_REST", 0.01)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    changes, quiet = 0, False

    async def test() -> None:
        nonlocal changes, quiet
        task = asyncio.ensure_future(garbage.collect_when_quiet(lambda: changes, lambda: quiet))
        await asyncio.sleep(0.1)
        assert not collected, "nothing changed"
        changes = 1
        await asyncio.sleep(0.1)
        assert not collected, "something is under way"
        quiet = True
        await asyncio.sleep(0.2)
        assert len(collected) == 1
        monkeypatch.setattr(garbage, "_MUCH", -1)
        quiet = False
        await asyncio.sleep(0.1)
        assert len(collected) > 1, "very much has come together"
        task.cancel()

    asyncio.run(test())


class Knot:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.own = self


def test_what_was_kept_for_a_graph_that_was_replaced_is_freed() -> None:
    knot = Knot()
    alive = weakref.ref(knot)
    try:
        keep_what_is_there()
        assert gc.get_freeze_count()
        del knot
        keep_what_is_there(anew=True)
        assert alive() is None
    finally:
        gc.unfreeze()


def test_the_index_of_a_graph_lets_go_of_it() -> None:
    facts = facts_of(GRAPHS / "tutorial.graph")
    index = index_of(facts)
    assert index is not None
    index.prepare()
    _ = index.groups, index.operators, index.modules
    alive = weakref.ref(facts)
    del facts
    gc.collect()
    assert alive() is None
