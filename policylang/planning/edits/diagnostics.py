"""What is wrong between a policy's rewrites and a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.syntax import Fuse, Policy, Rewriting
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.data import Refused, Rewrites

_MOST_NAMES = 8
_LOOKED_FOR = {
    "all_gather": "no gather of this graph reads another gather, straight or through layout operators",
    "reduce_scatter": "no scatter of this graph reads another scatter, straight or through layout operators",
}
_ROUND_TRIPS = "no value of this graph is gathered and cut again"


def rewrite_diagnostics(
    policy: Policy, rewrites: Rewrites, before: Facts, capabilities: Capabilities
) -> list[Diagnostic]:
    """A statement that the path cannot carry out, that finds nothing, or all of whose candidates were refused."""
    if not capabilities.rewrites:
        return [refusals.cannot_fuse(statement, capabilities) for statement in policy.rewrites]
    found: list[Diagnostic] = []
    done = Counter(rewrite.statement for rewrite in rewrites.done)
    for number, statement in enumerate(policy.rewrites):
        refused = [each for each in rewrites.refused if each.statement == number]
        if done[number] or statement.optional:
            continue
        found.append(_all_refused(statement, refused) if refused else _nothing(statement, before))
    return found


def _nothing(statement: Rewriting, before: Facts) -> Diagnostic:
    text = _text(statement)
    wanted = statement.collective if isinstance(statement, Fuse) else "all_gather"
    count = sum(f".{wanted}_" in target for target in before.targets)
    looked_for = _LOOKED_FOR[statement.collective] if isinstance(statement, Fuse) else _ROUND_TRIPS
    return Diagnostic(
        refusals.NOTHING_TO_REWRITE,
        f"`{text}` finds nothing to rewrite in this graph",
        span=statement.span,
        help=f"if that is as it should be, write `optional {text}`",
        details=(f"{wanted}: {count} node{'s' * (count != 1)}", looked_for),
    )


def _all_refused(statement: Rewriting, refused: Sequence[Refused]) -> Diagnostic:
    text = _text(statement)
    return Diagnostic(
        refusals.REWRITES_REFUSED,
        f"`{text}` changes nothing: {_candidates(len(refused))} refused",
        span=statement.span,
        help=f"where that is as it should be, write `optional {text}`",
        details=_listed(refused),
        severity=Severity.WARNING,
    )


def _listed(refused: Sequence[Refused]) -> tuple[str, ...]:
    lines = [f"{' → '.join(each.collectives)}: {each.reason}" for each in refused[:_MOST_NAMES]]
    if len(refused) > _MOST_NAMES:
        lines.append(f"and {len(refused) - _MOST_NAMES} more")
    return tuple(lines)


def _candidates(count: int) -> str:
    return "its one candidate is" if count == 1 else f"all of its {count} candidates are"


def _text(statement: Rewriting) -> str:
    return " ".join(statement.span.text.split()).removeprefix("optional ")
