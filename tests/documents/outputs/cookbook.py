"""What a policy of the cookbook comes to on the graph that its fence names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import policylang
from policylang.api.planned_graphs import on_graph
from policylang.graph.facts import Facts
from policylang.language.diagnostics import is_error
from policylang.language.loader import parse_policy
from policylang.language.shown import counted, format_quantity
from policylang.language.syntax import Policy
from policylang.planning.inspection.breakdown import Breakdown, breakdown
from policylang.report.diagnostics import render_text
from policylang.report.report_text import bytes_text
from tests.documents.outputs.pages import Shown

_POLICY = re.compile(r"^```apl graph=(?P<graph>\S+)[^\n]*\n(?P<text>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@cache
def facts_of(graph: Path) -> Facts:
    return policylang.load_snapshot(graph)


def sentence(shown: Shown) -> str:
    """One line on the policy above: what is kept, what runs again, the peak; each beside nothing recomputed."""
    policy = list(_POLICY.finditer(shown.above))[-1]
    facts = facts_of(shown.page.parent / policy["graph"])
    (plan,), found = on_graph(_policy(policy["text"]), {"": facts}, None, one_model=False)
    assert not any(map(is_error, found)), render_text(found)
    return _sentence(Path(policy["graph"]).stem, breakdown(plan))


def _policy(text: str) -> Policy:
    """By the operators that come with the package and not torch's registry, as a machine without the model reads it."""
    loaded = parse_policy(text)
    assert loaded.policy is not None, render_text(loaded.diagnostics)
    return loaded.policy


def _sentence(name: str, found: Breakdown) -> str:
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
    return f"On `{name}`: {fused}{saved}{moved}; {again}; {peak}."


PRODUCERS = {"cookbook": sentence}
