"""Selectors that can be read and will hardly denote what was meant: a name that graphs do not hold, an ``and`` of two
operators."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.globs import is_magic
from policylang.language.resolution.public_names import NEVER_TRACED, in_place_of, shown_forms, usual_forms
from policylang.language.syntax import Bucket, Intersection, Operator, Rule, Scheduling, Selector
from policylang.language.walk import parts, walk

SELDOM_IN_GRAPHS = "APL150"
OF_BOTH = "APL151"


def doubtful_selectors(rule: Rule | Bucket | Scheduling) -> Iterator[Diagnostic]:
    """A note where a line is about names alone that graphs do not hold, a warning for each ``and`` of two operators. A
    line that is ``optional`` may match nothing."""
    if rule.optional:
        return
    inside = list(walk(rule.selector))
    leaves = [part for part in inside if not parts(part)]
    names = [leaf for leaf in leaves if isinstance(leaf, Operator)]
    if len(names) == len(leaves) and all(_is_seldom(name) for name in names):
        for name in names:
            texts = usual_forms(name.name)
            message = f"graphs of a step seldom hold `{name.name}`: it is traced as {shown_forms(texts)}"
            if texts == ("everything",):
                message = f"`{name.name}` is the operator of that name, and every node is `everything`"
            write = [in_place_of(name.span, texts)]
            yield diagnose(SELDOM_IN_GRAPHS, message, name.span, help=f"write `{', '.join(texts)}`", write=write)
    for part in inside:
        if isinstance(part, Intersection) and (both := _two_operators(part.left, part.right)):
            left, right = both
            yield diagnose(
                OF_BOTH,
                f"`{left} and {right}` keeps what is both, and no node is both `{left}` and `{right}`",
                part.span,
                help=f"write `{left}, {right}` for the nodes of either",
                write=[in_place_of(part.span, both)],
            )


def _is_seldom(name: Operator) -> bool:
    return name.namespace is None and name.overload is None and name.name in NEVER_TRACED


def _two_operators(left: Selector, right: Selector) -> tuple[str, str] | None:
    """The names of two selectors that are an operator each, and not the same one."""
    if isinstance(left, Operator) and isinstance(right, Operator):
        if is_magic(left.text + right.text) or left.name == right.name:
            return None
        return left.text, right.text
    return None
