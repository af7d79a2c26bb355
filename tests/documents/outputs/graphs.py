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
PICTURE = ROOT / "docs" / "first_policy.svg"


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


def totals(shown: Shown) -> tuple[list[tuple[str, int, int]], float]:
    """Of the page's first policy on a graph: bytes kept and peak, with the policy and without; recomputed share."""
    text = re.findall(r"^```apl\n(.*?)^```$", shown.page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)[0]
    facts = facts_of(GRAPHS / f"{shown.words[1]}.graph")
    (plan,), _ = on_graph(policylang.parse(text), {"": facts}, None, one_model=False)
    found = breakdown(plan)
    under, without = found.under, found.without
    rows = [
        ("kept for the backward", under.amounts.saved_bytes, without.amounts.saved_bytes),
        ("peak of the step, weights and gradients included", under.peak.bytes, without.peak.bytes),
    ]
    return rows, under.amounts.recomputed_flops / found.forward_flops


def front_page(shown: Shown) -> str:
    rows, share = totals(shown)
    lines = [
        f"| {what} | {format_quantity(one, 'bytes')} | {format_quantity(other, 'bytes')} |" for what, one, other in rows
    ]
    head = ["| | with the policy | nothing recomputed |", "|---|---|---|"]
    return "\n".join(
        [*head, *lines, f"| FLOPs of the forward recomputed | {format_quantity(share, 'fraction')} | 0% |"]
    )


def picture_line(shown: Shown) -> str:
    """The line of the README that shows ``picture``, for readers who see no pictures too."""
    (kept, peak), share = totals(shown)
    kept_under, kept_without, peak_under, peak_without = (
        format_quantity(each, "bytes") for each in (*kept[1:], *peak[1:])
    )
    return (
        f"![Llama-3 8B on 8,192 tokens: {kept_under} of {kept_without} kept for the backward, peak {peak_under} of "
        f"{peak_without}, {format_quantity(share, 'fraction')} of the forward's FLOPs recomputed]"
        f"({PICTURE.relative_to(ROOT)})"
    )


def picture(shown: Shown) -> str:
    """``totals`` as bars, readable on a light and on a dark page."""
    rows, share = totals(shown)
    scale = 430 / max(other for _, _, other in rows)
    drawn = []
    for at, (what, one, other) in enumerate(rows):
        top = 44 + 92 * at
        drawn.append(f'<text x="10" y="{top}" class="what">{what}</text>')
        for line, (name, size) in enumerate((("with the policy", one), ("nothing recomputed", other))):
            y = top + 10 + 28 * line
            drawn.append(
                f'<text x="150" y="{y + 15}" class="name">{name}</text>'
                f'<rect x="160" y="{y}" width="{size * scale:.0f}" height="20" rx="3" class="bar{line}"/>'
                f'<text x="{170 + size * scale:.0f}" y="{y + 15}">{format_quantity(size, "bytes")}</text>'
            )
    style = (
        "text{font:13px sans-serif;fill:#57606a}.what{font-weight:600}.name{text-anchor:end}"
        ".bar0{fill:#0b7a5e}.bar1{fill:#9aa4ae}@media(prefers-color-scheme:dark){text{fill:#c9d1d9}.bar0{fill:#2fbf94}}"
    )
    again = format_quantity(share, "fraction")
    head = f'<text x="10" y="18">Llama-3 8B, 8,192 tokens; {again} of the forward recomputed</text>'
    size = 'width="700" height="214" viewBox="0 0 700 214" role="img"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style>", head, *drawn, "</svg>", ""]
    )


def architectures(shown: Shown) -> str:
    """The bundled policies on every architecture, by planning each on a traced step."""
    from tests.support.architectures import table

    return table()


SLOW = ("architectures",)
PRODUCERS = {
    "architectures": architectures,
    "margins": margins,
    "nothing-matched": nothing_matched,
    "front-page": front_page,
    "picture": picture_line,
}
