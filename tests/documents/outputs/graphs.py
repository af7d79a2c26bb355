"""What policies come to on the snapshots in docs/graphs, tables of that, and what an editor shows of it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import policylang
from policylang.api.load import load_device
from policylang.api.planned_graphs import on_graph
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Source, is_error
from policylang.language.files import read_source
from policylang.language.loader import parse_policy
from policylang.language.shown import counted, format_quantity
from policylang.planning.capabilities import capabilities_for
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.worth import worth_of_rules
from policylang.report.diagnostics import render_text
from policylang.report.report_text import bytes_text
from tests.documents.outputs.pages import ROOT, Shown

if TYPE_CHECKING:
    from policylang.editor.state import State

GRAPHS = ROOT / "docs" / "graphs"
PICTURE = ROOT / "docs" / "first_policy.svg"
_POLICY = re.compile(r"^```apl graph=(?P<graph>\S+)[^\n]*\n(?P<text>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@cache
def facts_of(graph: Path) -> Facts:
    return policylang.load_snapshot(graph)


def sentence(shown: Shown) -> str:
    """One line on the policy above: what is kept, what runs again, the peak; each beside nothing recomputed. It is read
    by the operators that come with the package and not torch's registry, as on a machine without the model."""
    policy = list(_POLICY.finditer(shown.above))[-1]
    loaded = parse_policy(policy["text"])
    assert loaded.policy is not None, render_text(loaded.diagnostics)
    (plan,), told = on_graph(loaded.policy, {"": facts_of(shown.page.parent / policy["graph"])}, None, one_model=False)
    assert not any(map(is_error, told)), render_text(told)
    found = breakdown(plan)
    under, without = found.under, found.without
    saved = f"{bytes_text(under.amounts.saved_bytes)} saved, of {bytes_text(without.amounts.saved_bytes)}"
    moved = f"; {bytes_text(under.amounts.offloaded_bytes)} on the host" if under.amounts.offloaded else ""
    flops = under.amounts.recomputed_flops
    share = f", {format_quantity(flops / found.forward_flops, 'fraction')} of the forward" if flops else ""
    names = ", ".join(f"`{operator}`" for operator in found.uncounted_again or ())
    share += f" (not counting {names}, which has no formula)" if names else ""
    again = f"{format_quantity(flops, 'flops')} recomputed{share}" if flops else f"no FLOPs recomputed{share}"
    peak = f"estimated peak {bytes_text(under.peak.bytes)}, of {bytes_text(without.peak.bytes)}"
    fused = f"{counted(len(found.plan.edits.done), 'pair')} of collectives fused; " if found.plan.edits.done else ""
    return f"On `{Path(policy['graph']).stem}`: {fused}{saved}{moved}; {again}; {peak}."


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


# --- the editor: hints at the ends of lines, and what is under the pointer ---

_WIDEST = 64
"""Of the statements beside which hints stand in one column."""


@cache
def _state(policy: str, graph: str, device: str) -> State:
    from policylang.editor.state import Document, State, read_graph, read_text

    path = ROOT / "policies" / f"{policy}.apl"
    document = Document(path.as_uri(), 1, Source(path.name, path.read_text(encoding="utf-8")), path)
    facts = facts_of(GRAPHS / graph)
    text = read_text(document, facts, read_source)
    planned = read_graph(text, facts, graph, None, load_device(device))
    planned.look()
    planned.weigh()
    return State(document, text, planned, facts)


def hints(shown: Shown) -> str:
    """``hints POLICY GRAPH DEVICE``: the statements of a bundled policy with the figures at their ends."""
    from policylang.editor.hover import hints as made

    state = _state(*shown.words[1:])
    text = state.document.source.text
    lines = text.split("\n")
    found = [(each.position, each.label) for each in made(state, 0, len(text))]
    width = max(place.character for place, _ in found if place.character <= _WIDEST)
    return "\n".join(f"{lines[place.line][: place.character]:{width}}  {label}" for place, label in found)


PRODUCERS = {
    "cookbook": sentence,
    "margins": margins,
    "nothing-matched": nothing_matched,
    "front-page": front_page,
    "hints": hints,
    "picture": picture_line,
    "architectures": architectures,
}
