"""Which modules are the blocks: by default one list of layers, and of a model with several stacks all of them."""

from __future__ import annotations

from collections import Counter

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts
from policylang.language.globs import PathGlob

_LEAST = 0.1
"""The share of the forward's values that a stack has at least."""

Prefix = tuple[str, ...]


def stacks(facts: Facts) -> tuple[str, BlockTable]:
    """The glob of a ``blocks`` statement, and the blocks that there are then. The glob is empty where the language's
    own choice takes all that there is."""
    alone = blocks_of(facts)
    if not alone.names or any(region is not None for region in facts.ac_regions):
        return "", alone
    found = _outermost_lists(facts)
    if len(found) < 2:
        return "", alone
    parents = list(dict.fromkeys(prefix[-2] if len(prefix) > 1 else "" for prefix in found))
    names = list(dict.fromkeys(prefix[-1] for prefix in found))
    if len(names) == 1 and len(parents) > 1 and all(parents):
        glob = f"{{{','.join(parents)}}}.{names[0]}.*"
    else:
        glob = f"{{{','.join(names)}}}.*" if len(names) > 1 else f"{names[0]}.*"
    together = blocks_of(facts, PathGlob(glob))
    wanted = sum(1 for row in facts.forward if _is_in(facts.modules[row].split("."), found))
    got = sum(1 for row in facts.forward if facts.modules[row] and together.block_of[row] >= 0)
    return (glob, together) if wanted == got else ("", alone)


def _outermost_lists(facts: Facts) -> list[Prefix]:
    """The paths with two or more numbered children, none inside another, that hold a good part of the forward."""
    nodes: Counter[Prefix] = Counter()
    children: dict[Prefix, set[str]] = {}
    for path, count in Counter(facts.modules[row] for row in facts.forward).items():
        parts = path.split(".")
        at = next((at for at, part in enumerate(parts) if part.isdigit()), 0)
        if at:
            prefix = tuple(parts[:at])
            nodes[prefix] += count
            children.setdefault(prefix, set()).add(parts[at])
    least = _LEAST * len(facts.forward)
    return [prefix for prefix, count in nodes.items() if count >= least and len(children[prefix]) > 1]


def _is_in(parts: list[str], prefixes: list[Prefix]) -> bool:
    return any(
        len(parts) > len(prefix) and tuple(parts[: len(prefix)]) == prefix and parts[len(prefix)].isdigit()
        for prefix in prefixes
    )
