"""What policies come to on the snapshots in docs/graphs, and tables of that."""

from __future__ import annotations

import re

import policylang
from policylang.api.planned_graphs import on_graph
from policylang.language.shown import format_quantity
from policylang.planning.capabilities import capabilities_for
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.worth import worth_of_rules
from policylang.report.diagnostics import render_text
from tests.documents.outputs.cookbook import facts_of
from tests.documents.outputs.pages import ROOT, Shown

GRAPHS = ROOT / "docs" / "graphs"


def margins(shown: Shown) -> str:
    """What each rule of a bundled policy is worth on a graph: the table of the page about plans."""
    policy, graph = shown.words[1:]
    facts = facts_of(GRAPHS / f"{graph}.graph")
    (plan,), _ = on_graph(policylang.load(policy), {graph: facts}, None, one_model=False)
    rows = ["| rule | saved | recomputed | a GiB |", "|---|---|---|---|"]
    for worth in worth_of_rules(breakdown(plan).plan, capabilities_for(facts.kind, None)):
        price = "" if worth.flops_per_gib is None else format_quantity(worth.flops_per_gib, "flops")
        saved, again = _signed(worth.saved_bytes, "bytes"), _signed(worth.recomputed_flops, "flops")
        rows.append(f"| `{plan.policy.rules[worth.rule].text}` | {saved} | {again} | {price} |")
    return "\n".join(rows)


def _signed(amount: int, dimension: str) -> str:
    return f"{'+' if amount > 0 else '−'}{format_quantity(abs(amount), dimension)}" if amount else "0"  # type: ignore[arg-type]


def nothing_matched(shown: Shown) -> str:
    """The tutorial's rule that matches nothing, on the tutorial's model."""
    text = "\n\n\n\nsave attention in decoder.*\n"
    facts = facts_of(GRAPHS / "tutorial.graph")
    _, found = on_graph(policylang.parse(text, name="typo.apl"), {"tutorial": facts}, None, one_model=False)
    return render_text(found)


def front_page(shown: Shown) -> str:
    """The policy above, on a graph: the totals beside those of the step in which nothing is recomputed."""
    (text,) = re.findall(r"^```apl\n(.*?)^```$", shown.above, flags=re.MULTILINE | re.DOTALL)
    facts = facts_of(GRAPHS / f"{shown.words[1]}.graph")
    (plan,), _ = on_graph(policylang.parse(text), {"": facts}, None, one_model=False)
    found = breakdown(plan)
    under, without = found.under, found.without
    again = format_quantity(under.amounts.recomputed_flops / found.forward_flops, "fraction")
    rows = [
        ("kept for the backward", under.amounts.saved_bytes, without.amounts.saved_bytes),
        ("peak of the step, weights and gradients included", under.peak.bytes, without.peak.bytes),
    ]
    lines = [
        f"| {what} | {format_quantity(one, 'bytes')} | {format_quantity(other, 'bytes')} |" for what, one, other in rows
    ]
    head = ["| | with the policy | nothing recomputed |", "|---|---|---|"]
    return "\n".join([*head, *lines, f"| FLOPs of the forward computed again | {again} | 0% |"])


PRODUCERS = {"margins": margins, "nothing-matched": nothing_matched, "front-page": front_page}
