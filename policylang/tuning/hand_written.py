"""The policies that people write by hand, as texts."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.language.formatting.unparse import nth

SAVE_ALL = "save everything\n"
_CROSSING = "save everything in block where crosses block\n"
_REST = "undecided -> save\n"
_BY_OPERATOR = (
    "save matmul in block\n",
    "save attention in block\n",
    "save attention in block\nsave matmul in block\n",
    "save compute in block\n",
    "save attention in block\nsave matmul in block\nrecompute every 2nd matmul per block\n",
)


def hand_written(blocks: int) -> Iterator[str]:
    """Texts; some may not plan on a graph, as where it has no attention."""
    yield SAVE_ALL
    yield "recompute everything\n"
    if not blocks:
        for each in _BY_OPERATOR:
            yield "recompute everything\n" + each.replace(" in block", "").replace(" per block", "")
        return
    yield "recompute everything in block\n" + _REST
    yield "recompute everything\n" + _CROSSING
    for each in _BY_OPERATOR:
        yield "recompute everything in block\n" + each + _CROSSING + _REST
    for zone in zones(blocks):
        yield f"recompute everything in {zone}\n" + _CROSSING + _REST


def zones(blocks: int) -> Iterator[str]:
    """Choices of blocks: all, the first and the last so many, every so manyth."""
    yield "block"
    for number in range(1, blocks):
        counted = f"{number} blocks" if number > 1 else "block"
        yield f"first {counted}"
        yield f"last {counted}"
    for step in range(2, min(blocks, 8) + 1):
        yield f"every {nth(step)} block"

