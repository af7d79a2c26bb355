"""Explains why a selector matched nothing: how much each part of it matches, and the nearest names in the graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from difflib import SequenceMatcher
from weakref import WeakKeyDictionary

from attrs import evolve

from policylang.graph.facts import Facts, InputKind
from policylang.language.operators import PRELUDE_NAME
from policylang.language.public_names import forms_of
from policylang.language.selectors import nth, own_words
from policylang.language.syntax import (
    TIMES,
    Annotated,
    Compare,
    CrossesCut,
    InBlock,
    InModule,
    Is,
    Match,
    Operator,
    Ordinal,
    Predicate,
    Reference,
    Scope,
    Selector,
    Where,
)
from policylang.language.walk import predicates
from policylang.language.wording import counted, figure, first_lines, joined, listed
from policylang.planning.selection.cuts import Cuts
from policylang.planning.selection.predicates import GATHERED, ORIGINS, compile_predicate
from policylang.planning.selection.selectors import Selections, parts_first

_known: WeakKeyDictionary[Facts, dict[str, str]] = WeakKeyDictionary()
_MOST_PARTS = 12
_MOST_FORMS = 3
_MOST_ANNOTATIONS = 6
_KIND_WORDS = {InputKind.PARAMETER: "a parameter", InputKind.BUFFER: "a buffer", InputKind.USER: "the user's"}


def part_counts(selector: Selector, selections: Selections) -> tuple[str, ...]:
    """One line a part, innermost first: ``mm: 224 nodes``, ``in encoder.*: 0 of them; nearest module paths: …``."""
    lines: list[str] = []
    for part in parts_first(selector, selections.lets, is_one_part=lambda part: _is_one_part(part, selections)):
        count = len(selections.rows(part))
        narrows = isinstance(part, InModule | InBlock | Where | Ordinal)
        line = f"{part_label(part)}: {f'{count:,} of them' if narrows else counted(count, 'node')}"
        if not count:
            line += _hint(part, selections)
        if line not in lines:
            lines.append(line)
    return first_lines(lines, _MOST_PARTS, "more parts")


def missing_parts(selector: Selector, selections: Selections) -> str:
    """What is not in the graph of the names and paths that a selector is made of: ``0 nodes are `mm```; empty where
    all are there."""
    found = parts_first(selector, selections.lets, is_one_part=lambda part: _is_one_part(part, selections))
    named = (part for part in found if isinstance(part, Operator | Reference | InModule))
    missing = dict.fromkeys(f"`{part_label(part)}`" for part in named if not selections.rows(part))
    return f"0 nodes are {joined(list(missing))}" if missing else ""


def other_origin_hint(selector: Selector, selections: Selections) -> str:
    """What to write instead where a graph knows no input of the kind that is asked for: it may take all of them for the
    user's, as a recorded graph does. Empty where none of the user's is picked either."""
    wheres = (part for part in parts_first(selector, selections.lets) if isinstance(part, Where))
    for part, test in ((where, test) for where in wheres for test in predicates(where.predicate)):
        if isinstance(test, Is) and (instead := other_origin(test, part, selections)) is not None:
            count = _of_the_user(test, part, selections)
            return f"where a graph does not say what its inputs are, `{instead.name}` picks {count:,}; "
    return ""


def other_origin(test: Is, part: Where, selections: Selections) -> Is | None:
    """What asks for the user's inputs in place of a kind that the graph knows none of, where that picks something."""
    asked = _lacks_origin(test, selections) and _of_the_user(test, part, selections)
    return _of_users(test) if asked else None


def _lacks_origin(test: Is, selections: Selections) -> bool:
    return test.name in ORIGINS and ORIGINS[test.name] not in selections.facts.input_kinds


def _of_users(test: Is) -> Is:
    return evolve(test, name="gathered input" if test.name in GATHERED else "from input")


def _of_the_user(test: Is, part: Where, selections: Selections) -> int:
    """Of the nodes that were asked for another kind, how many are made of an input of the user's."""
    facts, chains = selections.facts, selections.chains
    holds = compile_predicate(_of_users(test), facts, selections.blocks, chains, selections.cuts)
    return sum(map(holds, selections.rows(part.selector)))


def _is_one_part(part: Selector, selections: Selections) -> bool:
    """A name that stands for something. One that stands for nothing here is taken apart in its turn, the groups that
    every policy knows excepted."""
    if not isinstance(part, Reference):
        return False
    return selections.lets[part.name].span.source.name == PRELUDE_NAME or bool(selections.rows(part))


def part_label(part: Selector) -> str:
    """What a selector adds to its parts, as its author wrote it."""
    if isinstance(part, InModule):
        return f"{'outside' if part.outside else 'in'} {part.glob}"
    if isinstance(part, Where):
        return f"where {part.predicate.span.one_line}"
    if isinstance(part, Ordinal):
        start = "" if part.start is None else f" from {nth(part.start)}"
        return f"{own_words(part)}{start}{'' if part.scope is None else f' per {part.scope.value}'}"
    return own_words(part)


def _hint(part: Selector, selections: Selections) -> str:
    if isinstance(part, InModule):
        return "; " + nearest_paths_hint(part.glob, selections.facts)
    if isinstance(part, Operator | Reference):
        return _traced_hint(part, selections)
    blocks = len(selections.blocks.names)
    if isinstance(part, InBlock) and blocks:
        return f"; the graph has {blocks} blocks"
    if isinstance(part, InBlock) or (isinstance(part, Ordinal) and part.scope is Scope.BLOCK and not blocks):
        return "; the graph has no blocks"
    if isinstance(part, Where):
        return "".join(_test_hint(test, part, selections) for test in predicates(part.predicate))
    return ""


def _traced_hint(part: Operator | Reference, selections: Selections) -> str:
    """What an operation of this name, or one of a group, is traced as in this graph."""
    if isinstance(part, Reference):
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
        return f"; it is taken apart here, and `{form.text}` is what comes of it ({counted(count, 'node')})"
    return ""


def _times_hint(test: Compare, part: Where, selections: Selections) -> str:
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
    return f"; the {least} {test.quantity} there is {figure(found, 'seconds')} ({facts.names[row]})"


def _test_hint(test: Predicate, part: Where, selections: Selections) -> str:
    if isinstance(test, Match) and test.property == "module" and test.op == "==":
        return "; " + nearest_paths_hint(test.pattern, selections.facts)
    if isinstance(test, Is) and _lacks_origin(test, selections):
        return f"; no input of the graph is known to be {_KIND_WORDS[ORIGINS[test.name]]}"
    if isinstance(test, Annotated):
        return _annotations_hint(selections.facts)
    if isinstance(test, Compare) and test.quantity in TIMES and selections.prices is not None:
        return _times_hint(test, part, selections)
    return _cuts_hint(test, selections.cuts)


def _annotations_hint(facts: Facts) -> str:
    """The annotations that there are, the most frequent first."""
    if not facts.annotations:
        return "; what is annotated is not known of this graph: its snapshot is older than that"
    counts = Counter(name for row in facts.forward for name in facts.annotations[row])
    if not counts:
        return "; no forward node is annotated"
    shown = [f"{name} ({count})" for name, count in counts.most_common()]
    return f"; annotations of forward nodes: {listed(shown, _MOST_ANNOTATIONS)}"


def _cuts_hint(test: Predicate, cuts: Cuts) -> str:
    """How much there is to cut, beside the size of stage that was asked for."""
    if not isinstance(test, CrossesCut):
        return ""
    count = len(cuts.positions(cuts.stage(test.bytes)))
    found = counted(count, "cut") if count else "no cut"
    each = f" at stages of {figure(cuts.stage(None), 'bytes')}" if test.size is None else ""
    return f"; the forward makes {figure(cuts.produced, 'bytes')} and has {found}{each}"


def nearest_paths_hint(glob: str, facts: Facts) -> str:
    near = nearest_paths(glob, facts)
    return f"nearest module paths: {', '.join(near)}" if near else "no node of the graph has a module path"


def nearest_paths(glob: str, facts: Facts, count: int = 3) -> tuple[str, ...]:
    """The module paths most like a glob: one of each family of paths that differ in numbers alone."""
    families = _known.get(facts)
    if families is None:
        families = _known[facts] = _families(facts.modules)
    wanted = numberless(glob.strip("/"))
    scored = sorted(
        ((-_likeness(wanted, family), order, path) for order, (family, path) in enumerate(families.items())),
    )
    return tuple(path for _, _, path in scored[:count])


def _families(modules: Iterable[str]) -> dict[str, str]:
    """Paths and their ancestors with numbers blanked out → the first path of each kind, in graph order."""
    families: dict[str, str] = {}
    seen: set[str] = set()
    for path in modules:
        if not path or path in seen:
            continue
        seen.add(path)
        components = path.split(".")
        for depth in range(1, len(components) + 1):
            ancestor = ".".join(components[:depth])
            families.setdefault(numberless(ancestor), ancestor)
    return families


def numberless(path: str) -> str:
    """A path or glob with `*` for each number in it."""
    return re.sub(r"(?<![^.])(\d+|\*|\[[^\]]*\]|\{[^}]*\})(?![^.])", "*", path)


def _likeness(wanted: str, family: str) -> float:
    """How like the glob the last components of a path are, as many as the glob has; a longer path loses ties."""
    components = family.split(".")
    length = wanted.count(".") + 1
    tail = ".".join(components[-length:])
    ratio = SequenceMatcher(None, wanted, tail, autojunk=False).ratio()
    return (ratio if len(components) >= length else ratio / 2) - 0.001 * len(components)
