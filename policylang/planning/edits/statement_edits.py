"""Plans the ``fuse`` and ``collapse`` statements of a policy as graph edits, one after the other, before any rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from attrs import evolve

from policylang.graph.facts import Facts
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic, prefixed
from policylang.language.figures import counted
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.syntax import Bucket, Policy, Rewriting
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.edit_planner import NodeNames, Pick, Setting
from policylang.planning.edits.edited_facts import edited
from policylang.planning.edits.kinds import KINDS
from policylang.planning.edits.offers import Ledger, Ranks
from policylang.planning.edits.pieces import unread_pieces, with_pieces, without_pieces
from policylang.planning.edits.proof.equivalence import Prover
from policylang.planning.graph_edit import Edit, Edits, Node, Refusal

_MOST_NAMES = 8


def plan_edits(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    ranks: Ranks | None = None,
    pick: Pick | None = None,
    held: Collection[str] = (),
) -> tuple[Edits, Facts]:
    """What is to be done to the structure of a graph, and the facts as they are then.

    ``pick`` is given where values are decided already: then buckets are planned, and nothing else; it says what a
    statement's selector denotes. Otherwise everything but buckets is. ``held``: nodes that no collective crosses.

    Each statement is planned on what the ones before it leave. Linear in nodes and edges for each statement. ``ranks``
    that can be asked settle what all of them do; without them nothing is done that rests on what other ranks do.
    """
    planned = any((pick is not None) is isinstance(each, Bucket) for each in policy.rewrites)
    if not planned or not capabilities.rewrites:
        return Edits(), facts
    if not _keeps_rank_order(facts.torch_version):
        capabilities = evolve(capabilities, unsorted_groups=False)
    prover = Prover()
    left: dict[str, str] = {}
    while True:
        ledger = Ledger(ranks is not None, left)
        found = _attempt(policy, facts, capabilities, prover, ledger, pick, held)
        unshared = ranks.unshared(ledger.offers) if ranks is not None else {}
        if not unshared:
            return found
        left = {**left, **unshared}


def edit_diagnostics(policy: Policy, edits: Edits, before: Facts, capabilities: Capabilities) -> list[Diagnostic]:
    """A statement that the path cannot carry out, that finds nothing, or all of whose candidates were refused."""
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


def _attempt(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    prover: Prover,
    ledger: Ledger,
    pick: Pick | None,
    held: Collection[str],
) -> tuple[Edits, Facts]:
    """The edits as this rank would make them but for what has been left."""
    done: list[Edit] = []
    refused: list[Refusal] = []
    known = facts.groups
    for number, statement in enumerate(policy.rewrites):
        if (pick is not None) is not isinstance(statement, Bucket):
            continue
        check_cancelled()
        unread = unread_pieces(facts)
        own = without_pieces(facts, unread)
        setting = Setting(own, number, capabilities, NodeNames(facts.index), prover, known, ledger, pick, held)
        found = []
        for outcome in KINDS[statement.kind](statement, setting).outcomes():
            if isinstance(outcome, Refusal):
                refused.append(outcome)
            else:
                found.append(with_pieces(outcome, facts, unread))
        mine = _chained(found)
        facts = edited(facts, mine)
        done.extend(mine)
    return Edits(tuple(done), tuple(refused)), facts


def _keeps_rank_order(version: str) -> bool:
    """Whether the torch that a graph is from stands by process groups whose ranks are not sorted: from 2.12.

    Read off the facts, so that a plan on a snapshot is the plan on the graph.
    """
    numbers = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    return len(numbers) < 2 or tuple(numbers) >= (2, 12)


def _chained(found: Sequence[Edit]) -> list[Edit]:
    """With what an edit starts from called as the edits before it leave it."""
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
    text, kind = _text(statement), KINDS[statement.kind]
    nodes = counted(sum(f".{kind.counted}_" in target for target in before.targets), "node")
    return diagnose(
        refusals.NOTHING_TO_REWRITE,
        f"`{text}` finds nothing to rewrite in this graph",
        span=statement.span,
        help=f"if that is as it should be, write `optional {text}`",
        details=(f"{kind.counted}: {nodes}", kind.nothing_found),
        mends=[prefixed(statement.span, "optional")],
    )


def all_refused(statement: Rewriting, refused: Sequence[Refusal]) -> Diagnostic:
    """Of a statement that changes nothing, each of whose candidates has its own reason."""
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
        mends=[prefixed(statement.span, "optional")],
    )


def _text(statement: Rewriting) -> str:
    return statement.span.one_line.removeprefix("optional ")
