"""What the selectors of a text denote on the snapshot, also where the text has errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from policylang.editor.explaining.article import code, with_code
from policylang.editor.state import State
from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Phase
from policylang.language.diagnostics import Source
from policylang.language.syntax import Selector
from policylang.planning.selection.selectors import Selections


def selections_of(state: State) -> Selections | None:
    """None without a snapshot, and while what the policy denotes is being worked out. Of a text with errors, what needs
    none of its names can be asked."""
    if state.graph is not None:
        return state.graph.selections if state.graph.knows("selections") else None
    return None if state.facts is None else _without_policy(state.facts, state.document.source)


def rows_of(selections: Selections, selector: Selector) -> list[int] | None:
    """None for a selector with words that nobody has looked up."""
    try:
        return selections.rows(selector)
    except (TypeError, KeyError):
        return None


def part_lines(counts: Sequence[str]) -> list[str]:
    """The lines of ``part_counts``, what they are of marked as code."""
    found = (line.partition(": ") for line in counts)
    return [f"{code(label)}: {with_code(rest)}" if rest else label for label, _, rest in found]


@lru_cache(maxsize=2)
def backward_counts(facts: Facts) -> Mapping[str, int]:
    """Operator in full to how many backward nodes call it."""
    phases, ops, targets = facts.phases, facts.ops, facts.targets
    return Counter(
        targets[row] for row in range(len(facts)) if phases[row] == Phase.BACKWARD and ops[row] == "call_function"
    )


def forget_snapshots() -> None:
    """Hold none of those that were asked about."""
    for cache in (backward_counts, _without_policy, _blocks_and_chains):
        cache.cache_clear()


@lru_cache(maxsize=2)
def _without_policy(facts: Facts, source: Source) -> Selections:
    """``source``: the text whose selectors are asked of; they are kept as long as these answers."""
    return Selections(facts, {}, *_blocks_and_chains(facts))


@lru_cache(maxsize=2)
def _blocks_and_chains(facts: Facts) -> tuple[BlockTable, Chains]:
    return blocks_of(facts), Chains(facts)
