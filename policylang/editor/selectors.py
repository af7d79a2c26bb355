"""Explains names, tests, modules and blocks in a selector, with what they denote on the snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import assert_never

from policylang.editor import statements
from policylang.editor.state import State
from policylang.editor.statements import Article, code, with_code
from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts, Flag
from policylang.language import shown, syntax
from policylang.language.globs import PathGlob, path_glob_problem
from policylang.language.lexer import comment_above
from policylang.language.names import TRACED_AS
from policylang.language.operators import PRELUDE_NAME, OperatorTable, group_names, prelude_group, split_operator
from policylang.language.resources import tagged
from policylang.planning.selection import selectors
from policylang.planning.selection.no_match import nearest_paths_hint, part_counts

_MOST_MODULES = 8


def modules_article(state: State, glob: str) -> Article:
    """The modules that a glob matches, the first ones by name, with the number of forward nodes in them."""
    selections = statements.selections_of(state)
    if selections is None or path_glob_problem(glob) is not None:
        return Article()
    found = modules_of(selections.facts, glob)
    if not found:
        hint = nearest_paths_hint(glob, selections.facts)
        return Article().say(f"No module matches {code(glob)}; {with_code(hint)}.")
    nodes = sum(found.values())
    article = Article().say(f"{shown.counted(len(found), 'module')}, {shown.counted(nodes, 'forward node')} in them.")
    lines = [f"{code(module)}: {shown.counted(count, 'node')}" for module, count in list(found.items())[:_MOST_MODULES]]
    more = len(found) - _MOST_MODULES
    return article.items((*lines, *([f"and {more:,} more"] if more > 0 else ())))


def modules_of(facts: Facts, glob: str) -> Counter[str]:
    """The outermost modules that match to the number of forward nodes in them, in graph order."""
    outermost = cache(PathGlob(glob).outermost)
    found = Counter[str]()
    for path, count in Counter(facts.modules[row] for row in facts.forward).items():
        module = outermost(path)
        if module is not None:
            found[module] += count
    return found


def blocks_article(state: State, which: syntax.BlockSet, *, outside: bool) -> Article:
    """The blocks of the snapshot that a place means."""
    selections = statements.selections_of(state)
    if selections is None:
        return Article()
    blocks = selections.blocks
    if which.of == "stage":
        return Article()
    if not blocks.names:
        return Article().say("The graph has no blocks.")
    holds = selectors.chosen_blocks(which, len(blocks.names))
    chosen = [block for block, is_in in enumerate(holds) if is_in]
    nodes = sum(block >= 0 and holds[block] for block in (blocks.block_of[row] for row in selections.facts.forward))
    of = shown.counted(len(blocks.names), "block")
    said = f"{len(chosen):,} of {of}: {_named(blocks, chosen)}" if chosen else f"None of {of}"
    of_them = f"{shown.counted(nodes, 'forward node')} in them"
    if outside:
        of_them = f"{shown.counted(len(selections.facts.forward) - nodes, 'forward node')} outside them"
    return Article().say(f"{said}. {of_them}.")


def all_blocks_article(state: State) -> Article:
    """The blocks that the model has under the policy."""
    return blocks_article(state, syntax.BlockSet("any"), outside=False)


def _named(blocks: BlockTable, chosen: list[int]) -> str:
    return code(shown.folded_names([blocks.names[block] for block in chosen]))


_BASE: dict[shown.Dimension, str] = {
    "bytes": "bytes",
    "flops": "operations",
    "seconds": "s",
    "fraction": "of the whole",
    "number": "",
}


def test_article(state: State, test: syntax.Test, where: syntax.Where) -> Article:
    """The number of nodes before ``where`` that pass the test by itself."""
    if (found := statements.denoted(state, where.selector)) is None:
        return Article()
    selections, rows = found
    if isinstance(test, syntax.Compare) and test.quantity in syntax.TIMES and selections.prices is None:
        return Article().say("Without a device nothing is known of times.")
    holds = selectors.compile_predicate(test, selections)
    count = sum(map(holds, rows))
    article = Article().say(
        f"{code(test.span.one_line)} holds of {count:,} of the {shown.counted(len(rows), 'forward node')} of "
        f"{code(where.selector.span.one_line)}."
    )
    if not count and test == where.predicate:
        article.items(statements.part_lines(part_counts(where, selections)[-1:]))
    return article


def selector_article(state: State, part: syntax.Selector) -> Article:
    """The number of nodes that a part of a selector denotes."""
    if (found := statements.denoted(state, part)) is None:
        return Article()
    return Article().say(f"{code(part.span.one_line)}: {shown.counted(len(found[1]), 'forward node')} here.")


def unit_article(unit: str, number: str) -> Article:
    """``1 GiB = 1,073,741,824 bytes``, and the figure that is written with it."""
    scale, dimension = shown.UNITS[unit]
    base = _BASE[dimension]
    lines = [f"{code(f'1 {unit}' if unit != '%' else '1%')} = {_plain(scale)} {base}"]
    if number and number != "1":
        try:
            value, _ = shown.read_quantity(number, unit)
        except ValueError:
            return Article().say(*lines)
        lines.append(f"{code(f'{number}{unit}' if unit == '%' else f'{number} {unit}')} = {_plain(value)} {base}")
    return Article().say(*lines)


def _plain(value: float) -> str:
    """Whole numbers with thousands, small ones without an exponent."""
    if value == int(value):
        return f"{int(value):,}"
    text = f"{value:.12f}".rstrip("0")
    return text if float(text) else f"{value:g}"


_MOST_OPERATORS = 8
_MOST_NAMES = 8
_KINDS = (
    (Flag.VIEW, "another look at the memory of what it reads"),
    (Flag.RANDOM, "draws random numbers"),
    (Flag.WRITES, "writes into what it is given"),
    (Flag.MULTI_OUTPUT, "returns several tensors"),
    (Flag.COLLECTIVE, "communicates with other ranks"),
    (Flag.COMPUTE, "on PyTorch's list of compute-intensive operators"),
    (Flag.EFFECTFUL, "has an effect beyond its result"),
)
_TAGS = {"view": Flag.VIEW, "random": Flag.RANDOM, "compute": Flag.COMPUTE}
"""The manifest's tags of an operator, as flags of a node."""


def name_article(state: State, part: syntax.Word | syntax.Operator | syntax.Reference) -> Article:
    """Explains a word that selects."""
    if isinstance(part, syntax.Word):
        return _of_word(state, part)
    if isinstance(part, syntax.Operator):
        return _operator(state, part)
    policy = state.text.loaded.policy
    let = policy.lets.get(part.name) if policy is not None else None
    if let is None:
        return Article()
    if let.span.source.name == PRELUDE_NAME:
        return _group(state, let, part)
    return let_article(state, let, part)


def let_article(state: State, let: syntax.Let, selector: syntax.Selector) -> Article:
    """Explains a ``let``: its text, its comment, and how many nodes it denotes."""
    article = Article().policy(let.span.text)
    own = let.span.source == state.document.source
    article.say(with_code(comment_above(let.span)), "" if own else f"Defined in {code(let.span.location)}.")
    collectives = None if state.graph is None else statements.picked(state.graph, let)
    if collectives is not None:
        article.say(f"The lines that use it pick {shown.counted(collectives, 'collective')} of the whole step.")
    elif (found := statements.denoted(state, selector)) is not None:
        selections, rows = found
        article.say(f"{_counted(rows, selections)}.")
        counts = part_counts(let.selector, selections)
        if len(counts) > 1 or not rows:
            article.items(statements.part_lines(counts))
    return article


def _of_word(state: State, word: syntax.Word) -> Article:
    """Explains a word of a text with errors; the text's names come first."""
    for placed in reversed(state.text.expansion.statements):
        let = placed.statement
        if isinstance(let, syntax.Let) and let.name == word.text:
            return let_article(state, let, word)
    group = prelude_group(word.text)
    if group is not None:
        return _group(state, group, group.selector)
    operator = split_operator(word.text, _table().has_namespace)
    return Article() if operator is None else _operator(state, operator)


# --- groups ---


def _group(state: State, let: syntax.Let, selector: syntax.Selector) -> Article:
    article = Article().say("A group that every policy knows.", with_code(comment_above(let.span)))
    article.policy(let.span.text)
    if (found := statements.denoted(state, selector)) is not None:
        selections, rows = found
        article.say(f"{_counted(rows, selections)}.").items(_by_operator(rows, selections.facts))
        if not rows:
            article.items(statements.part_lines(part_counts(selector, selections)))
    return article


def _by_operator(rows: Sequence[int], facts: Facts) -> list[str]:
    """``aten.mm.default: 225``, the most frequent first."""
    counts = Counter(facts.targets[row] for row in rows).most_common()
    lines = [f"{code(target)}: {count:,}" for target, count in counts[:_MOST_OPERATORS]]
    return [*lines, *([f"and {len(counts) - _MOST_OPERATORS} more"] if len(counts) > _MOST_OPERATORS else [])]


# --- operators ---


def _operator(state: State, operator: syntax.Operator) -> Article:
    found = statements.denoted(state, operator)
    article = Article().say(*(_from_manifest(operator) if found is None else _on_graph(operator, *found)))
    article.say(_overloads(operator))
    targets = _targets(operator, None if found is None else found[0].facts)
    groups = list(dict.fromkeys(name for target in targets for name in _groups(target)))
    if groups:
        article.say(f"In the groups {shown.joined([code(each) for each in groups])}." if len(groups) > 1 else
                    f"In the group {code(groups[0])}.")  # fmt: skip
    if people := traced_from(operator.name):
        said = shown.listed([code(each) for each in people], _MOST_NAMES)
        article.say(f"What people call {said} may be traced as it.")
    return article


def _on_graph(operator: syntax.Operator, selections: selectors.Selections, rows: Sequence[int]) -> Iterator[str]:
    facts = selections.facts
    matches = selectors.operator_matcher(operator)
    backward = sum(count for target, count in statements.backward_counts(facts).items() if matches(target))
    said = f"{code(operator.text)}: {_counted(rows, selections)}"
    yield said + (f"; {shown.counted(backward, 'node')} of the backward." if backward else ".")
    if not rows:
        yield from (line for line in statements.part_lines(part_counts(operator, selections)) if "; " in line)
        return
    targets = dict.fromkeys(facts.targets[row] for row in rows)
    if [*targets] != [operator.text]:
        yield f"Here it is {shown.listed(_by_operator(rows, facts), _MOST_OPERATORS + 1)}."
    flags = 0
    for row in rows:
        flags |= facts.flags[row]
    yield _kind(flags)
    yield _work(rows, facts)


def _counted(rows: Sequence[int], selections: selectors.Selections) -> str:
    """``225 nodes of the forward: 7 in each of 32 blocks, 1 outside``."""
    said = f"{shown.counted(len(rows), 'node')} of the forward"
    names, block_of = selections.blocks.names, selections.blocks.block_of
    if not rows or not names:
        return said
    by_block = Counter(block_of[row] for row in rows)
    outside = by_block.pop(-1, 0)
    parts = []
    if by_block:
        least, most = min(by_block.values()), max(by_block.values())
        count = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        if len(by_block) == 1:
            parts.append(f"{count} in block {code(names[next(iter(by_block))])}")
        else:
            all_of = "the " if len(by_block) == len(names) else f"{len(by_block):,} of "
            parts.append(f"{count} in each of {all_of}{len(names):,} blocks")
    if outside:
        parts.append(f"{outside:,} outside the blocks")
    return f"{said}: {', '.join(parts)}"


def _kind(flags: int) -> str:
    found = [said for bit, said in _KINDS if flags & bit]
    return f"Categories: {', '.join(found)}." if found else ""


def _work(rows: Sequence[int], facts: Facts) -> str:
    flops = sum(facts.flops[row] for row in rows)
    uncounted = sorted({facts.uncounted[row] for row in rows if facts.uncounted[row]}) if facts.uncounted else []
    if uncounted:
        said = shown.joined([code(each) for each in uncounted])
        rest = f"; the rest is {shown.format_quantity(flops, 'flops')}" if flops else ""
        return f"No FLOP formula counts {said}{rest}."
    return f"{shown.format_quantity(flops, 'flops')} in all." if flops else "It multiplies nothing: no FLOPs."


def _from_manifest(operator: syntax.Operator) -> Iterator[str]:
    flags = 0
    for target in _known(operator):
        flags |= sum(bit for tag, bit in _TAGS.items() if ".".join(selectors.split_target(target)[:2]) in tagged(tag))
    yield _kind(flags)


def _overloads(operator: syntax.Operator) -> str:
    """The overloads of an operator, or the operators that a glob matches, by the bundled manifest."""
    known = _known(operator)
    if not known:
        return "The bundled list of torch's operators has none of that name."
    names = dict.fromkeys(".".join(selectors.split_target(target)[:2]) for target in known)
    if len(names) > 1:
        return f"Among torch's operators it means {shown.listed([code(each) for each in names], _MOST_NAMES)}."
    return f"Overloads: {shown.listed([code(target) for target in known], _MOST_NAMES)}."


def _targets(operator: syntax.Operator, facts: Facts | None) -> list[str]:
    """The full names that it matches in the snapshot, else in the manifest."""
    matches = selectors.operator_matcher(operator)
    found = [] if facts is None else [target for target in facts.by_target if matches(target)]
    return found or list(_known(operator))


@lru_cache(maxsize=512)
def _known(operator: syntax.Operator) -> tuple[str, ...]:
    found = _table().matches(operator.namespace, operator.name, operator.overload)
    return tuple(filter(selectors.operator_matcher(operator), found))


@cache
def _table() -> OperatorTable:
    return OperatorTable.bundled()


@lru_cache(maxsize=4096)
def _groups(target: str) -> tuple[str, ...]:
    """The groups that contain an operator by its name alone."""
    lets = (prelude_group(name) for name in group_names())
    return tuple(let.name for let in lets if let is not None and _names(let.selector, target))


def _names(selector: syntax.Selector, target: str) -> bool:
    match selector:
        case syntax.Operator():
            return selectors.operator_matcher(selector)(target)
        case syntax.Union(parts):
            return any(_names(part, target) for part in parts)
        case syntax.Difference(left, right):
            return _names(left, target) and not _names(right, target)
        case syntax.Intersection(left, right):
            return _names(left, target) and _names(right, target)
        case syntax.Everything() | syntax.Word() | syntax.Reference() | syntax.InModule() | syntax.InBlock():
            return False  # more than a name is asked for
        case syntax.Where() | syntax.ChainOf() | syntax.Ordinal() | syntax.Step() | syntax.Chain() | syntax.Feeding():
            return False
        case _:
            assert_never(selector)


@cache
def traced_from(name: str) -> tuple[str, ...]:
    """The names that people use for operations that are traced as an operator of this name."""
    return tuple(people for people, forms in TRACED_AS.items() if name in forms and people != name)
