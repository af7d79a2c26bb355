"""What the pages show and a run prints: one source for the tests that compare, and for the script that writes.

A block of a page that is the output of a run has a comment before it, ``<!-- output: NAME -->``; the block is what
stands in the fence behind it, or else the lines up to the next empty one. ``PRODUCERS`` has a function for the first
word of each name. ``tests/documents/test_pages.py`` compares, ``scripts/update_docs_figures.py`` writes.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.documents.outputs import benchmark_tables, graphs, programs
from tests.documents.outputs.pages import PAGES, ROOT, Shown, blocks, masked, rewritten
from tests.documents.outputs.programs import SLOW

__all__ = ["PAGES", "PRODUCERS", "ROOT", "SLOW", "Shown", "blocks", "masked", "produce", "rewritten"]

PRODUCERS: dict[str, Callable[[Shown], str]] = {**programs.PRODUCERS, **graphs.PRODUCERS, **benchmark_tables.PRODUCERS}


def produce(shown: Shown) -> str:
    """What stands in the block, if the page is right: text with a line end."""
    return PRODUCERS[shown.words[0]](shown).rstrip("\n") + "\n"
