"""Refuses lines that treat one block of a model otherwise than another, where blocks share one compiled graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.globs import PathGlob
from policylang.language.syntax import InBlock, InModule, Match, Policy, Selector, Statement, Where
from policylang.language.walk import predicates, selectors_of, with_lets
from policylang.planning.refusals import PATH_CANNOT


def telling_apart(policy: Policy, names: Sequence[str]) -> tuple[Diagnostic, ...]:
    """An error for every line that treats one of the blocks of these names otherwise than another.

    Of a single name it is asked whether a block of another number would be treated alike; without any, only the
    numbers of blocks count.
    """
    names = tuple(names) if len(names) > 1 else tuple(_neighbours(names))
    reasons = [(each.span, _reason(each, policy, names)) for each in policy.deciding]
    shared = "and blocks that are compiled on their own share their compiled graphs"
    help = "compile the whole model with this policy, or give each kind of block a policy and a backend of its own"
    return tuple(
        diagnose(PATH_CANNOT, f"`{span.one_line}` {reason}, {shared}", span, help=help)
        for span, reason in reasons
        if reason is not None
    )


def _reason(statement: Statement, policy: Policy, names: Sequence[str]) -> str | None:
    for part in with_lets(policy, *selectors_of([statement])):
        if isinstance(part, InBlock) and part.which.kind != "any":
            return "asks which block this is"
        for glob in map(PathGlob, _globs(part)):
            ways = {name: glob.progress(name) for name in names}
            other = next((name for name in names if ways[name] != ways[names[0]]), None)
            if other is not None:
                return f"treats `{other}` otherwise than `{names[0]}`"
    return None


def _globs(part: Selector) -> Iterator[str]:
    if isinstance(part, InModule):
        yield part.glob
    elif isinstance(part, Where):
        yield from (
            each.pattern for each in predicates(part.predicate) if isinstance(each, Match) and each.property == "module"
        )


def _neighbours(names: Sequence[str]) -> Iterator[str]:
    """The name, and with another number in the place of its last one."""
    for name in names:
        yield name
        parts = name.split(".")
        last = max((at for at, part in enumerate(parts) if part.isdigit()), default=None)
        if last is not None:
            yield ".".join((*parts[:last], str(int(parts[last]) + 1), *parts[last + 1 :]))
