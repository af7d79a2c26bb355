"""What is kept out of the collector's way is let go of once nothing needs it."""

from __future__ import annotations

import gc
import weakref

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from policylang.api.planned_graphs import facts_of
from policylang.editor.features.offers.graph_index import index_of
from policylang.editor.garbage import keep_what_is_there
from tests.editor.conftest import GRAPHS


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
        keep_what_is_there()
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
