"""Plans the ``fuse``, ``collapse`` and ``bucket`` statements of a policy as graph edits, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language.cancellation import check_cancelled
from policylang.language.diagnostics import Diagnostic, diagnose, prefixed
from policylang.language.shown import counted
from policylang.language.syntax import Bucket, Policy, Rewriting
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.buckets import Buckets
from policylang.planning.edits.edit_planner import EditPlanner, SelectRows, Setting
from policylang.planning.edits.edited_facts import edited
from policylang.planning.edits.fusion import GatherChains, ScatterChains
from policylang.planning.edits.layout_chains import unread_pieces, with_pieces, without_pieces
from policylang.planning.edits.other_ranks import ConsensusRound, Ranks
from policylang.planning.edits.proof import Prover
from policylang.planning.edits.round_trips import RoundTrips
from policylang.planning.graph_edit import Edit, Edits, Node, Refusal

EDIT_KINDS: Mapping[str, type[EditPlanner[Any]]] = {
    each.kind: each for each in (GatherChains, ScatterChains, RoundTrips, Buckets)
}
"""By the ``kind`` of a statement."""
_MOST_NAMES = 8


def plan_edits(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    ranks: Ranks | None = None,
    select: SelectRows | None = None,
    held: Collection[str] = (),
) -> tuple[Edits, Facts]:
    """The edits of a graph, and its facts once they are made. Linear in nodes and edges for each statement.

    With ``select``, which evaluates selectors once values are decided, only buckets are planned; without it, all other
    kinds. ``held``: nodes that no collective crosses. Without ``ranks`` to ask, edits that depend on other ranks are
    not made.
    """
    planned = any((select is not None) is isinstance(each, Bucket) for each in policy.rewrites)
    if not planned or not capabilities.rewrites:
        return Edits(), facts
    numbers = [int(part) for part in facts.torch_version.split(".")[:2] if part.isdigit()]
    if len(numbers) == 2 and numbers < [2, 12]:
        # torch sorts the ranks of process groups before 2.12; the graph's, so that a snapshot gives the graph's plan.
        capabilities = evolve(capabilities, unsorted_groups=False)
    prover = Prover()
    rejected: dict[str, str] = {}
    while True:
        consensus = ConsensusRound(ranks is not None, rejected)
        found = _attempt(policy, Setting(facts, 0, capabilities, {}, prover, facts.groups, consensus, select, held))
        unshared = ranks.unshared(consensus.proposals) if ranks is not None else {}
        if not unshared:
            return found
        rejected = {**rejected, **unshared}


def edit_diagnostics(policy: Policy, edits: Edits, before: Facts, capabilities: Capabilities) -> list[Diagnostic]:
    """Statements that the path cannot apply, that find nothing, or all of whose candidates were refused."""
    if not capabilities.rewrites:
        asked = [statement for statement in policy.rewrites if not isinstance(statement, Bucket)]
        return [refusals.cannot_edit(statement, capabilities) for statement in asked]
    found: list[Diagnostic] = []
    for number, statement in enumerate(policy.rewrites):
        if isinstance(statement, Bucket):  # the order's own
            continue
        mine = edits.of(number)
        if not mine.done and not statement.optional:
            found.append(all_refused(statement, mine.refused) if mine.refused else _nothing(statement, before))
    return found


# --- planning ---


def _attempt(policy: Policy, start: Setting) -> tuple[Edits, Facts]:
    """The edits that this rank would make but for what is rejected. Each statement is planned on what those before it
    leave."""
    done: list[Edit] = []
    refused: list[Refusal] = []
    facts = start.facts
    for number, statement in enumerate(policy.rewrites):
        if (start.select is not None) is not isinstance(statement, Bucket):
            continue
        check_cancelled()
        unread = unread_pieces(facts)
        setting = evolve(start, facts=without_pieces(facts, unread), number=number, name_counts={})
        found = []
        for outcome in EDIT_KINDS[statement.kind](statement, setting).outcomes():
            if isinstance(outcome, Refusal):
                refused.append(outcome)
            else:
                found.append(with_pieces(outcome, facts, unread))
        mine = _chained(found)
        facts = edited(facts, mine)
        done.extend(mine)
    return Edits(tuple(done), tuple(refused)), facts


def _chained(found: Sequence[Edit]) -> list[Edit]:
    """With the sources of each edit renamed as the edits before it leave them."""
    replaced: dict[str, str] = {}
    result = []
    for edit in found:
        sources = tuple(replaced.get(source, source) for source in edit.sources)
        if sources != edit.sources:
            nodes = tuple(evolve(node, arguments=_renamed(node.arguments, replaced)) for node in edit.nodes)
            edit = evolve(edit, sources=sources, nodes=nodes)
        replaced.update(edit.replaced)
        result.append(edit)
    return result


def _renamed(value: Any, replaced: dict[str, str]) -> Any:
    if isinstance(value, Node):
        return Node(replaced.get(value.name, value.name))
    return tuple(_renamed(part, replaced) for part in value) if isinstance(value, tuple) else value


# --- what is wrong ---


def _nothing(statement: Rewriting, before: Facts) -> Diagnostic:
    text, kind = _text(statement), EDIT_KINDS[statement.kind]
    nodes = counted(sum(f".{kind.counted}_" in target for target in before.targets), "node")
    return diagnose(
        refusals.NOTHING_TO_REWRITE,
        f"`{text}` finds nothing to rewrite in this graph",
        span=statement.span,
        help=f"if that is as it should be, write `optional {text}`",
        details=(f"{kind.counted}: {nodes}", kind.nothing_found),
        fixes=[prefixed(statement.span, "optional")],
    )


def all_refused(statement: Rewriting, refused: Sequence[Refusal]) -> Diagnostic:
    """A statement that changes nothing; each of its candidates has a reason."""
    text, count = _text(statement), len(refused)
    listed = [f"{' → '.join(each.collectives)}: {each.reason}" for each in refused[:_MOST_NAMES]]
    if count > _MOST_NAMES:
        listed.append(f"and {count - _MOST_NAMES} more")
    all_of_them = "its one candidate is" if count == 1 else f"all of its {count} candidates are"
    return diagnose(
        refusals.REWRITES_REFUSED,
        f"`{text}` changes nothing: {all_of_them} refused",
        span=statement.span,
        help=f"where that is as it should be, write `optional {text}`",
        details=tuple(listed),
        fixes=[prefixed(statement.span, "optional")],
    )


def _text(statement: Rewriting) -> str:
    return statement.span.one_line.removeprefix("optional ")
