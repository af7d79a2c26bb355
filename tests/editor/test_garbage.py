"""What is kept out of the collector's way is let go of once nothing needs it."""

from __future__ import annotations

import gc
import weakref

from policylang.editor.garbage import keep_what_is_there


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
