"""What a policy of the cookbook comes to on the graph that its fence names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import policylang
from policylang.graph.facts import Facts
from policylang.language.figures import figure
from policylang.planning.inspection.breakdown import Breakdown, breakdown
from policylang.report.report_text import bytes_text
from tests.documents.outputs.pages import Shown

_POLICY = re.compile(r"^```apl graph=(?P<graph>\S+)[^\n]*\n(?P<text>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@cache
def facts_of(graph: Path) -> Facts:
    return policylang.load_snapshot(graph)


def sentence(shown: Shown) -> str:
    """One line on the policy above: what is kept, what runs again, the peak; each beside nothing recomputed."""
    policy = list(_POLICY.finditer(shown.above))[-1]
    result = policylang.check(policylang.parse(policy["text"]), graph=facts_of(shown.page.parent / policy["graph"]))
    assert not result.errors, str(result)
    (plan,) = result.plans
    return _sentence(Path(policy["graph"]).stem, breakdown(plan))


def _sentence(name: str, found: Breakdown) -> str:
    under, without = found.under, found.without
    saved = f"{bytes_text(under.amounts.saved_bytes)} saved, of {bytes_text(without.amounts.saved_bytes)}"
    moved = f"; {bytes_text(under.amounts.offloaded_bytes)} on the host" if under.amounts.offloaded else ""
    flops = under.amounts.recomputed_flops
    share = f", {figure(flops / found.forward_flops, 'fraction')} of the forward" if flops else ""
    again = f"{figure(flops, 'flops')} computed again{share}" if flops else "no FLOPs computed again"
    peak = f"estimated peak {bytes_text(_highest(under))}, of {bytes_text(_highest(without))}"
    return f"On `{name}`: {saved}{moved}; {again}; {peak}."


def _highest(scenario: object) -> int:
    peak = scenario.peak  # type: ignore[attr-defined]
    return int(max(peak.forward, peak.backward))


PRODUCERS = {"cookbook": sentence}
