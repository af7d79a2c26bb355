"""The picture of the page about order: a step as traced and as planned, as the page of a plan draws it."""

from __future__ import annotations

import re
from pathlib import Path

import policylang
from policylang.graph.facts import Facts
from policylang.language.wording import figure
from policylang.planning.capabilities import capabilities_for
from policylang.planning.inspection.communication import communication
from policylang.planning.planner import plan
from policylang.report.markup import Markup, element
from policylang.report.order.lane_chart import LaneScale, chart_height, described, drawn_parts, lane_names
from policylang.report.order.lane_data import DrawnStep, drawn_steps
from tests.documents.outputs.pages import ROOT

PICTURE = ROOT / "docs" / "order.svg"
PAGE = ROOT / "docs" / "order.md"
GRAPH = ROOT / "docs" / "graphs" / "fsdp.graph"
_FILE = re.compile(r"^<!-- file: order.apl -->\n```[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_LEFT, _WIDTH, _HEAD, _BELOW = 92, 960, 26, 30
_STYLE = """
text { font: 12px system-ui, "Segoe UI", Roboto, sans-serif; fill: #5c656e; }
.ground { fill: #fff; } .memory.area { fill: #2364aa; fill-opacity: .22; }
.memory.edge { fill: none; stroke: #2364aa; vector-effect: non-scaling-stroke; }
.compute { fill: #56667b; } .sent { fill: #6d3fb0; } .exposed { fill: #a64b08; }
.wait { fill: #a64b08; fill-opacity: .16; }
.parting { stroke: #1d2125; stroke-opacity: .5; stroke-dasharray: 5 4; vector-effect: non-scaling-stroke; }
"""


def picture(graph: Path | Facts = GRAPH) -> str:
    """Of the policy that the page shows."""
    (policy,) = _FILE.findall(PAGE.read_text(encoding="utf-8"))
    facts = graph if isinstance(graph, Facts) else policylang.load_snapshot(graph)
    device = policylang.load_device("h100-sxm")
    made = plan(policylang.parse(policy), facts, capabilities_for(facts.kind), device=device)
    found = communication(made)
    assert found is not None
    assert made.order is not None
    planned, traced = drawn_steps(found, made.order.block_names)
    return order_svg([traced, planned])


def order_svg(steps: list[DrawnStep]) -> str:
    """One below the other, on one scale."""
    scale = LaneScale.of(steps)
    parts: list[Markup] = []
    top = 0
    for step in steps:
        parts += _chart(step, scale, top)
        top += _HEAD + chart_height(step) + _BELOW
    return (
        element(
            "svg",
            element("title", "A step as traced and as planned: memory, computation and communication over time"),
            element("style", Markup(_STYLE)),
            element("rect", class_="ground", width=_WIDTH, height=top),
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {_WIDTH} {top}",
            role="img",
        )
        + "\n"
    )


def _chart(step: DrawnStep, scale: LaneScale, top: int) -> list[Markup]:
    height, width = chart_height(step), _WIDTH - _LEFT - 12
    drawn = element(
        "svg",
        *drawn_parts(step, scale),
        x=_LEFT,
        y=top + _HEAD,
        width=width,
        height=height,
        viewBox=f"0 0 1000 {height}",
        preserveAspectRatio="none",
    )
    names = [
        element("text", name, x=_LEFT - 8, y=top + _HEAD + down + (10 if not down else 4), text_anchor="end")
        for name, down in lane_names(step, scale)
    ]
    ticks = [
        element(
            "text",
            figure(share * scale.seconds, "seconds"),
            x=f"{_LEFT + share * width:.0f}",
            y=top + _HEAD + height + 12,
            text_anchor={0.0: "start", 1.0: "end"}.get(share, "middle"),
        )
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    return [element("text", described(step), x=_LEFT, y=top + 17), drawn, *names, *ticks]
