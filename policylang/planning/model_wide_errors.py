"""Errors of one graph that are only errors if every graph of the model has them.

A model compiles to several graphs: one for each graph break, separately compiled block, and shape. A rule has to match
in one of them, not in each, and nobody knows which graph is the last; so such errors wait until no further graph can be
compiled before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import asdict, evolve, frozen

from policylang.language.diagnostics import Diagnostic, Severity, Span, one_cause
from policylang.language.syntax import Policy
from policylang.planning import refusals
from policylang.planning.capabilities import FSDP2_BLOCKS, WHOLE_MODEL
from policylang.planning.order import order_errors
from policylang.planning.statement_errors import SHARE_OF_NONE

_COMPILE_BLOCKS = (
    "call `policylang.checkpoint_model(model, policy)`, "
    "then `block.compile(backend=policylang.backend(policy))` for each block"
)
_ROOT = 'give the backend the path of one, `root="layers.0"`'
_NOTHING_ORDERED = (
    *(order_errors.NONE_IN_GRAPH, order_errors.NO_BLOCKS, order_errors.NOTHING_MOVES),
    *(order_errors.NOTHING_FITS, order_errors.NONE_ALIKE, order_errors.NONE_IN_BLOCKS),
)
DEFERRED_CODES = (
    *(refusals.MATCHES_NOTHING, refusals.NO_SUCH_BLOCKS, refusals.NOTHING_TO_REWRITE, SHARE_OF_NONE),
    *_NOTHING_ORDERED,
)
"""The diagnostics that report "nothing here": a rule, a ``blocks`` glob, a ``fuse`` or ``collapse`` line, a share of
the blocks; a line that orders collectives, and one that joins them."""
_NOTHING_HERE = frozenset((refusals.MATCHES_NOTHING, refusals.NOTHING_TO_REWRITE, *_NOTHING_ORDERED))
"""Those that report it of one line for different reasons: one graph has no collective, another none that moves."""


@frozen
class Complaint:
    """One deferred diagnostic of one graph, as plain data that a sidecar can hold.

    ``statement`` numbers the sentences that planning acts on; ``start`` and ``end`` count from where it starts, so
    that a sidecar outlives an edit elsewhere in the file.
    """

    statement: int
    code: str
    message: str
    help: str | None
    details: tuple[str, ...]
    start: int
    end: int
    cause: str = ""
    """As in a diagnostic."""

    @property
    def identity(self) -> tuple[int, str]:
        return self.statement, refusals.MATCHES_NOTHING if self.code in _NOTHING_HERE else self.code


def complaints(policy: Policy, diagnostics: Iterable[Diagnostic]) -> tuple[Complaint, ...]:
    """Those of a plan's diagnostics that other graphs may answer."""
    spans = _statements(policy)
    found: list[Complaint] = []
    for diagnostic in diagnostics:
        span = diagnostic.span
        if span is None or diagnostic.code not in DEFERRED_CODES or diagnostic.severity is not Severity.ERROR:
            continue
        for number, statement in enumerate(spans):
            if statement.source == span.source and statement.start <= span.start and span.end <= statement.end:
                start, end = span.start - statement.start, span.end - statement.start
                texts = (diagnostic.code, diagnostic.message, diagnostic.help, diagnostic.details)
                found.append(Complaint(number, *texts, start, end, diagnostic.cause))
                break
    return tuple(found)


def shared_by_all(
    policy: Policy, graphs: Sequence[tuple[str, Sequence[Complaint]]], *, root: str, sharded: bool = False
) -> tuple[Diagnostic, ...]:
    """The diagnostics that every graph has, each with the findings of every graph. ``graphs``: labels and diagnostics.

    ``root``: the prefix that was given for the paths of the graphs. ``sharded``: whether ``fully_shard`` gathers the
    weights of one of them.
    """
    if not graphs:
        return ()
    by_graph = [{complaint.identity: complaint for complaint in complaints} for _, complaints in graphs]
    shared = set(by_graph[0]).intersection(*by_graph[1:])
    identities = sorted(shared, key=lambda identity: (identity[1] != refusals.NO_SUCH_BLOCKS, identity))
    spans = _statements(policy)
    labels = [label for label, _ in graphs]
    found = [
        _diagnostic(policy, spans, [(label, by[identity]) for label, by in zip(labels, by_graph, strict=True)])
        for identity in identities
        if identity[0] < len(spans)
    ]
    for at, each in enumerate(found):
        if root or each.code != refusals.NO_SUCH_BLOCKS:
            continue
        if sharded:
            why = "`fully_shard` gathers weights in hooks around each block, and `torch.compile` breaks the graph there"
            why += ": what is compiled of a block begins inside it, and its path is not known"
            help = f"{_COMPILE_BLOCKS}; see {FSDP2_BLOCKS}"
            found[at] = evolve(each, details=(why, *each.details), help=help)
        else:
            ways = f"{_COMPILE_BLOCKS}, or {_ROOT}; see {WHOLE_MODEL}"
            found[at] = evolve(each, help=f"{each.help}; of blocks that are compiled one by one: {ways}")
    return one_cause(found)


def to_json(complaints: Iterable[Complaint]) -> list[dict[str, Any]]:
    return [asdict(complaint) for complaint in complaints]


def from_json(data: Iterable[Mapping[str, Any]]) -> tuple[Complaint, ...]:
    """Raises ``TypeError`` or ``KeyError`` for data that is not what :func:`to_json` writes."""
    return tuple(Complaint(**{**entry, "details": tuple(entry["details"])}) for entry in data)


def _statements(policy: Policy) -> list[Span]:
    """``blocks`` last: a separately compiled block gets one if the policy has none."""
    blocks = [policy.blocks.span] if policy.blocks is not None else []
    return [*(each.span for each in policy.statements), *blocks]


def _diagnostic(policy: Policy, statements: Sequence[Span], found: Sequence[tuple[str, Complaint]]) -> Diagnostic:
    _, first = found[0]
    statement = statements[first.statement]
    span = Span(statement.source, statement.start + first.start, min(statement.start + first.end, statement.end))
    details, message, help = first.details, first.message, first.help
    if len(found) > 1:
        indented = ((label, [f"  {line}" for line in complaint.details]) for label, complaint in found)
        details = tuple(line for label, lines in indented for line in ((f"{label}:", *lines) if lines else (label,)))
        message = first.message.replace("this graph", f"any of the {len(found)} graphs of this model")
    # not of one graph alone: where another graph has what a rule lacks, the rule would match there
    causes = [complaint.cause for _, complaint in found]
    cause = refusals.NO_SUCH_BLOCKS if refusals.NO_SUCH_BLOCKS in causes else first.cause
    include = None if first.code == refusals.NOTHING_TO_REWRITE else policy.included_by(statement)
    return Diagnostic(first.code, message, span, help, details=details, cause=cause, include=include)
