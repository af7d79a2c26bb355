"""Why a selector matches nothing, or not a node, and what to write in its place."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from itertools import accumulate
from typing import assert_never
from weakref import WeakKeyDictionary

from attrs import evolve

from policylang.graph.facts import Facts, InputKind
from policylang.language import syntax
from policylang.language.diagnostics import Fix, Span, written
from policylang.language.globs import is_magic
from policylang.language.names import as_one, forms_of
from policylang.language.operators import PRELUDE_NAME
from policylang.language.selectors import nth, own_words, predicates, rebuild, replaced, walk
from policylang.language.shown import counted, first_lines, format_quantity, joined, listed
from policylang.language.syntax import NOWHERE, TIMES, Scope, Selector
from policylang.planning.selection import selectors

_known: WeakKeyDictionary[Facts, dict[str, str]] = WeakKeyDictionary()
_MOST_PARTS = 12
_MOST_FORMS = 3
_MOST_ANNOTATIONS = 6
_KIND_WORDS = {InputKind.PARAMETER: "a parameter", InputKind.BUFFER: "a buffer", InputKind.USER: "the user's"}


def part_counts(selector: Selector, selections: selectors.Selections) -> tuple[str, ...]:
    """One line a part, innermost first: ``mm: 224 nodes``, ``in encoder.*: 0 of them; nearest module paths: …``."""
    lines: list[str] = []
    for part in selectors.parts_first(
        selector, selections.lets, is_one_part=lambda part: _is_one_part(part, selections)
    ):
        count = len(selections.rows(part))
        narrows = isinstance(part, syntax.InModule | syntax.InBlock | syntax.Where | syntax.Ordinal)
        line = f"{part_label(part)}: {f'{count:,} of them' if narrows else counted(count, 'node')}"
        if not count:
            line += _hint(part, selections)
        if line not in lines:
            lines.append(line)
    return first_lines(lines, _MOST_PARTS, "more parts")


def missing_parts(selector: Selector, selections: selectors.Selections) -> str:
    """The names and paths of a selector that are not in the graph: ``0 nodes are `mm```; empty where all are there."""
    found = selectors.parts_first(selector, selections.lets, is_one_part=lambda part: _is_one_part(part, selections))
    named = (part for part in found if isinstance(part, syntax.Operator | syntax.Reference | syntax.InModule))
    missing = dict.fromkeys(f"`{part_label(part)}`" for part in named if not selections.rows(part))
    return f"0 nodes are {joined(list(missing))}" if missing else ""


def other_origin_hint(selector: Selector, selections: selectors.Selections) -> str:
    """The test to write instead where a graph knows no input of the kind that is asked for: it may take all of them for
    the user's, as a recorded graph does. Empty where none of the user's is picked either."""
    wheres = (part for part in selectors.parts_first(selector, selections.lets) if isinstance(part, syntax.Where))
    for part, test in ((where, test) for where in wheres for test in predicates(where.predicate)):
        if isinstance(test, syntax.Is) and (found := _other_origin(test, part, selections)) is not None:
            return f"in a graph that does not mark its inputs, `{found[0].name}` selects {found[1]:,}; "
    return ""


def _other_origin(
    test: syntax.Is, part: syntax.Where, selections: selectors.Selections
) -> tuple[syntax.Is, int] | None:
    """The test for the user's inputs in place of a kind that the graph knows none of, and how many nodes it picks."""
    if not _lacks_origin(test, selections):
        return None
    instead = evolve(test, name="gathered input" if test.name in selectors.GATHERED else "from input")
    count = sum(map(selectors.compile_predicate(instead, selections), selections.rows(part.selector)))
    return (instead, count) if count else None


def _lacks_origin(test: syntax.Is, selections: selectors.Selections) -> bool:
    return test.name in selectors.ORIGINS and selectors.ORIGINS[test.name] not in selections.facts.input_kinds


def _is_one_part(part: Selector, selections: selectors.Selections) -> bool:
    """True for a name that matches something, or a built-in group; another name is split into its parts in turn."""
    if not isinstance(part, syntax.Reference):
        return False
    return selections.lets[part.name].span.source.name == PRELUDE_NAME or bool(selections.rows(part))


def part_label(part: Selector) -> str:
    """A selector without its parts, as its author wrote it."""
    match part:
        case syntax.InModule():
            return f"{'outside' if part.outside else 'in'} {part.glob}"
        case syntax.Where():
            return f"where {part.predicate.span.one_line}"
        case syntax.Ordinal():
            start = "" if part.start is None else f" from {nth(part.start)}"
            return f"{own_words(part)}{start}{'' if part.scope is None else f' per {part.scope.value}'}"
        case syntax.Everything() | syntax.Word() | syntax.Operator() | syntax.Reference() | syntax.InBlock():
            return own_words(part)
        case syntax.ChainOf() | syntax.Step() | syntax.Chain() | syntax.Union() | syntax.Intersection():
            return own_words(part)
        case syntax.Difference() | syntax.Feeding():
            return own_words(part)
        case _:
            assert_never(part)


def _hint(part: Selector, selections: selectors.Selections) -> str:
    """Names what the graph has instead of a part that matches nothing."""
    blocks = len(selections.blocks.names)
    match part:
        case syntax.InModule():
            return "; " + nearest_paths_hint(part.glob, selections.facts)
        case syntax.Operator() | syntax.Reference():
            return _traced_hint(part, selections)
        case syntax.InBlock() if part.which.of == "stage":
            pipeline = selections.pipeline
            return "" if pipeline is None else f"; the pipeline has {pipeline.stages} stages"
        case syntax.InBlock() if blocks:
            return f"; the graph has {blocks} blocks"
        case syntax.Ordinal() if blocks or part.scope is not Scope.BLOCK:
            return ""
        case syntax.InBlock() | syntax.Ordinal():
            return "; the graph has no blocks"
        case syntax.Where():
            return "".join(_test_hint(test, part, selections) for test in predicates(part.predicate))
        case syntax.Everything() | syntax.Word() | syntax.ChainOf() | syntax.Step() | syntax.Chain() | syntax.Union():
            return ""
        case syntax.Intersection() | syntax.Difference() | syntax.Feeding():
            return ""
        case _:
            assert_never(part)


def _traced_hint(part: syntax.Operator | syntax.Reference, selections: selectors.Selections) -> str:
    """The form in which an operation of this name, or one of a group, is traced in this graph."""
    if isinstance(part, syntax.Reference):
        is_known = selections.lets[part.name].span.source.name == PRELUDE_NAME  # else it is a name of the policy's own
    else:
        is_known = part.overload is None and part.namespace in (None, "aten")
    if not is_known:
        return ""
    found = [(form, len(selections.rows(form.selector))) for form in forms_of(part.name)]
    present = [(form, count) for form, count in found if count]
    whole = [(form, count) for form, count in present if form.is_whole]
    if whole:
        shown = " or ".join(f"`{form.text}` ({counted(count, 'node')})" for form, count in whole[:_MOST_FORMS])
        return f"; it is traced as {shown} here"
    if present:
        form, count = present[0]
        return f"; it is decomposed in this graph, into `{form.text}` ({counted(count, 'node')})"
    return ""


def _times_hint(test: syntax.Compare, part: syntax.Where, selections: selectors.Selections) -> str:
    """The time that comes nearest to what was asked for, among the nodes that were left."""
    prices, facts = selections.prices, selections.facts
    assert prices is not None
    rows = selections.rows(part.selector)
    known = [(found, row) for row in rows if (found := prices.of(test.quantity, row)) is not None]
    if not known:
        return f"; none of them has a {test.quantity}" if rows else ""
    quick = test.op in ("<", "<=")
    found, row = min(known) if quick else max(known, key=lambda each: each[0])
    least = "least" if quick else "largest"
    return f"; the {least} {test.quantity} there is {format_quantity(found, 'seconds')} ({facts.names[row]})"


def _test_hint(test: syntax.Test, part: syntax.Where, selections: selectors.Selections) -> str:
    match test:
        case syntax.Match(property="module", op="=="):
            return "; " + nearest_paths_hint(test.pattern, selections.facts)
        case syntax.Is() if _lacks_origin(test, selections):
            return f"; no input of the graph is known to be {_KIND_WORDS[selectors.ORIGINS[test.name]]}"
        case syntax.Annotated():
            return _annotations_hint(selections.facts)
        case syntax.Compare() if test.quantity in TIMES and selections.prices is not None:
            return _times_hint(test, part, selections)
        case syntax.CrossesCut():  # the bytes that there are to cut, beside the size of stage that was asked for
            cuts = selections.cuts
            count = len(cuts.positions(cuts.stage(test.bytes)))
            found = counted(count, "cut") if count else "no cut"
            each = f" at stages of {format_quantity(cuts.stage(None), 'bytes')}" if test.size is None else ""
            return f"; the forward makes {format_quantity(cuts.produced, 'bytes')} and has {found}{each}"
        case syntax.Match() | syntax.Is() | syntax.Compare():
            return ""
        case _:
            assert_never(test)


def _annotations_hint(facts: Facts) -> str:
    """The annotations that there are, the most frequent first."""
    if not facts.annotations:
        return "; this snapshot has no annotations: an older policylang wrote it"
    counts = Counter(name for row in facts.forward for name in facts.annotations[row])
    if not counts:
        return "; no forward node is annotated"
    shown = [f"{name} ({count})" for name, count in counts.most_common()]
    return f"; annotations of forward nodes: {listed(shown, _MOST_ANNOTATIONS)}"


def nearest_paths_hint(glob: str, facts: Facts) -> str:
    near = nearest_paths(glob, facts)
    return f"nearest module paths: {', '.join(near)}" if near else "no node of the graph has a module path"


def nearest_paths(glob: str, facts: Facts, count: int = 3) -> tuple[str, ...]:
    """The module paths most like a glob: one of each family of paths that differ in numbers alone."""
    families = _known.get(facts)
    if families is None:
        families = _known[facts] = _families(facts.modules)
    wanted = numberless(glob.strip("/"))
    # the last components of a path count, as many as the glob has; a longer path loses ties
    length = wanted.count(".") + 1
    scored: list[tuple[float, int, str]] = []
    for order, (family, path) in enumerate(families.items()):
        components = family.split(".")
        ratio = SequenceMatcher(None, wanted, ".".join(components[-length:]), autojunk=False).ratio()
        likeness = (ratio if len(components) >= length else ratio / 2) - 0.001 * len(components)
        scored.append((-likeness, order, path))
    return tuple(path for _, _, path in sorted(scored)[:count])


def _families(modules: Iterable[str]) -> dict[str, str]:
    """Paths and their ancestors with numbers blanked out → the first path of each kind, in graph order."""
    families: dict[str, str] = {}
    for path in filter(None, dict.fromkeys(modules)):
        for ancestor in accumulate(path.split("."), "{}.{}".format):
            families.setdefault(numberless(ancestor), ancestor)
    return families


def numberless(path: str) -> str:
    """A path or glob with `*` for each number in it."""
    return re.sub(r"(?<![^.])(\d+|\*|\[[^\]]*\]|\{[^}]*\})(?![^.])", "*", path)


_MOST = 3


def would_match(selector: Selector, selections: selectors.Selections) -> tuple[Fix, ...]:
    """A fix for each other word of a selector, as it is written, with which it picks something."""
    found = (fix for fix, other in _candidates(selector, selections) if selections.rows(other))
    return tuple(dict.fromkeys(found))[:_MOST]


def near_globs(glob: str, facts: Facts) -> tuple[str, ...]:
    """The globs over module paths of the graph that are most like one; with `*` for numbers where it has wildcards."""
    near = nearest_paths(glob, facts)
    return tuple(dict.fromkeys(map(numberless, near))) if is_magic(glob) else near


def numbered_globs(glob: str, facts: Facts) -> tuple[str, ...]:
    """The near ones that name numbered modules, as blocks are."""
    return tuple(each for each in map(numberless, nearest_paths(glob, facts)) if "*" in each)


def block_globs(glob: str, facts: Facts) -> tuple[str, ...]:
    """Globs that could name the blocks of a graph: modules with numbers, else those with the names most like a glob."""
    return numbered_globs(glob, facts) or nearest_paths(glob, facts)


def naming_blocks(facts: Facts, glob: str = "layers.*") -> str:
    """The help if no blocks are found."""
    found, near = block_globs(glob, facts), nearest_paths_hint(glob, facts)
    return f"name them, `blocks {found[0]}`; {near}" if found else near


def glob_span(glob: str, phrase: Span) -> Span:
    at = phrase.text.rfind(glob)
    start, end = phrase.start + at, phrase.start + at + len(glob)
    quoted = phrase.source.text[start - 1 : start] == '"' == phrase.source.text[end : end + 1]
    return Span(phrase.source, start - quoted, end + quoted)


def _candidates(selector: Selector, selections: selectors.Selections) -> Iterator[tuple[Fix, Selector]]:
    for part in walk(selector):
        if part.span is NOWHERE:
            continue
        if isinstance(part, syntax.InModule) and not part.outside and not selections.rows(part):
            for glob in near_globs(part.glob, selections.facts):
                (fix,) = written(glob_span(part.glob, part.span), [glob], near=True)
                yield fix, _with(selector, part, evolve(part, glob=glob))
        elif isinstance(part, syntax.Operator | syntax.Reference) and not selections.rows(part):
            for form in forms_of(part.name) if getattr(part, "namespace", None) in (None, "aten") else ():
                if form.is_whole and selections.rows(form.selector):
                    (fix,) = written(part.span, [as_one([form.text])])
                    yield fix, _with(selector, part, form.selector)
        elif isinstance(part, syntax.Where):
            for test in predicates(part.predicate):
                if isinstance(test, syntax.Match) and test.property == "module" and test.op == "==":
                    for glob in near_globs(test.pattern, selections.facts):
                        (fix,) = written(glob_span(test.pattern, test.span), [glob], near=True)
                        predicate = replaced(part.predicate, test, evolve(test, pattern=glob))
                        yield fix, _with(selector, part, evolve(part, predicate=predicate))
                elif isinstance(test, syntax.Is) and (other := _other_origin(test, part, selections)) is not None:
                    (fix,) = written(test.span, [other[0].name])
                    yield fix, _with(selector, part, evolve(part, predicate=replaced(part.predicate, test, other[0])))


def _with(selector: Selector, part: Selector, other: Selector) -> Selector:
    """A selector with another one in place of one of its parts, which has not been rebuilt from others."""

    def change(current: Selector) -> Selector:
        if type(current) is not type(part) or current.span != part.span:
            return current
        if isinstance(current, syntax.InModule) and isinstance(other, syntax.InModule):
            return evolve(current, glob=other.glob)
        if isinstance(current, syntax.Where) and isinstance(other, syntax.Where):
            return evolve(current, predicate=other.predicate)
        return other

    return rebuild(selector, change)


_MOST_BRANCHES = 6


def why_not(selector: Selector, row: int, selections: selectors.Selections) -> str:
    """For a node that the selector does not denote, by the one part that leaves it out already where there is just one.
    Costs no more than evaluating the selector."""
    node, facts, rows = selector, selections.facts, selections.rows
    while True:
        match node:
            case syntax.Everything():
                return "`everything` is every forward call, and it is none"
            case syntax.Reference() if (let := selections.lets[node.name]).span.source.name != PRELUDE_NAME:
                node = let.selector
            case syntax.Operator() | syntax.Reference():
                return f"`{part_label(node)}`: it is {facts.targets[row]}"
            case syntax.InModule() | syntax.InBlock() if row not in rows(node.selector):
                node = node.selector
            case syntax.Where() | syntax.Ordinal() if row not in rows(node.selector):
                node = node.selector
            case syntax.InModule():
                return f"`{part_label(node)}`: it is in {facts.modules[row] or 'no module'}"
            case syntax.InBlock():
                if node.which.of == "stage":
                    return f"`{part_label(node)}`: it is in stage {selections.stage_of[row]}"
                block = selections.blocks.block_of[row]
                lies = "outside every block" if block < 0 else f"in block {block}, {selections.blocks.names[block]}"
                return f"`{part_label(node)}`: it is {lies}"
            case syntax.Where():
                return f"`{part_label(node)}` does not hold{_times(node, row, selections)}"
            case syntax.Ordinal():
                return f"`{part_label(node)}`: it is {_position(node, row, selections)}"
            case syntax.Union():
                reasons = dict.fromkeys(why_not(part, row, selections) for part in node.parts[:_MOST_BRANCHES])
                more = [f"and {len(node.parts) - _MOST_BRANCHES} more"] if len(node.parts) > _MOST_BRANCHES else []
                return "; ".join([*reasons, *more])
            case syntax.Intersection():
                node = node.right if row in rows(node.left) else node.left
            case syntax.Difference() | syntax.Feeding() if row not in rows(node.left):
                node = node.left
            case syntax.Difference():
                return f"`except` takes it out of `{node.span.one_line}`"
            case syntax.Feeding() | syntax.Step() | syntax.Chain() | syntax.ChainOf() | syntax.Word():
                return f"it is not among `{node.span.one_line}`"
            case _:
                assert_never(node)


def _times(node: syntax.Where, row: int, selections: selectors.Selections) -> str:
    """The node's time, where the predicate asks for it."""
    measures = (test.quantity for test in predicates(node.predicate) if isinstance(test, syntax.Compare))
    asked = [each for each in dict.fromkeys(measures) if each in TIMES]
    if selections.prices is None or not asked:
        return ""
    found = ((each, selections.prices.of(each, row)) for each in asked)
    said = (
        f"its {each} is {format_quantity(value, 'seconds')}" if value is not None else f"it has no {each}"
        for each, value in found
    )
    return f": {joined(list(said))}"


def _position(node: syntax.Ordinal, row: int, selections: selectors.Selections) -> str:
    """``the 3rd of 7 in block 4``."""
    rows, block = selections.rows(node.selector), selections.blocks.block_of[row]
    scope = selectors.effective_scope(node.scope, bool(selections.blocks.names))
    keys = selectors.group_keys(scope, rows, selections.facts, selections.blocks, selections.chains)
    key = keys[rows.index(row)]
    if key is None:
        return "outside every block"
    group = [each for each, other in zip(rows, keys, strict=True) if other == key]
    named = {Scope.BLOCK: f"block {block}", Scope.MODULE: selections.facts.modules[row] or "the root module"}
    where = named.get(scope, "the graph" if scope is Scope.GRAPH else f"its {scope.value}")
    return f"the {nth(group.index(row) + 1)} of {len(group)} in {where}"
