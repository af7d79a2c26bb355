"""What a module glob and a set of blocks mean on the snapshot."""

from __future__ import annotations

from collections import Counter
from functools import cache

from policylang.editor.explaining.article import Article, code, with_code
from policylang.editor.explaining.on_snapshot import selections_of
from policylang.editor.state import State
from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts
from policylang.language.globs import PathGlob, path_glob_problem
from policylang.language.syntax import BlockSet
from policylang.language.wording import counted, folded_names
from policylang.planning.selection.no_match import nearest_paths_hint
from policylang.planning.selection.selectors import chosen_blocks

_MOST_MODULES = 8


def modules_article(state: State, glob: str) -> Article:
    """The modules that a glob matches, the first ones by name, and how many forward nodes lie in them."""
    selections = selections_of(state)
    if selections is None or path_glob_problem(glob) is not None:
        return Article()
    found = modules_of(selections.facts, glob)
    if not found:
        return Article().say(
            f"No module matches {code(glob)}; {with_code(nearest_paths_hint(glob, selections.facts))}."
        )
    nodes = sum(found.values())
    article = Article().say(f"{counted(len(found), 'module')}, {counted(nodes, 'forward node')} in them.")
    shown = [f"{code(module)}: {counted(count, 'node')}" for module, count in list(found.items())[:_MOST_MODULES]]
    more = len(found) - _MOST_MODULES
    return article.items((*shown, *([f"and {more:,} more"] if more > 0 else ())))


def modules_of(facts: Facts, glob: str) -> Counter[str]:
    """The outermost modules that match to how many forward nodes lie in them, in graph order."""
    outermost = cache(PathGlob(glob).outermost)
    found = Counter[str]()
    for path, count in Counter(facts.modules[row] for row in facts.forward).items():
        module = outermost(path)
        if module is not None:
            found[module] += count
    return found


def blocks_article(state: State, which: BlockSet, *, outside: bool) -> Article:
    """Which blocks of the snapshot a place means."""
    selections = selections_of(state)
    if selections is None:
        return Article()
    blocks = selections.blocks
    if not blocks.names:
        return Article().say("The graph has no blocks.")
    holds = chosen_blocks(which, len(blocks.names))
    chosen = [block for block, is_in in enumerate(holds) if is_in]
    nodes = sum(block >= 0 and holds[block] for block in (blocks.block_of[row] for row in selections.facts.forward))
    of = counted(len(blocks.names), "block")
    said = f"{len(chosen):,} of {of}: {_named(blocks, chosen)}" if chosen else f"None of {of}"
    of_them = f"{counted(nodes, 'forward node')} in them"
    if outside:
        of_them = f"{counted(len(selections.facts.forward) - nodes, 'forward node')} outside them"
    return Article().say(f"{said}. {of_them}.")


def all_blocks_article(state: State) -> Article:
    """The blocks that the model has under the policy."""
    return blocks_article(state, BlockSet("any"), outside=False)


def _named(blocks: BlockTable, chosen: list[int]) -> str:
    return code(folded_names([blocks.names[block] for block in chosen]))
