"""A plan as one page that needs nothing else: no server, no network, no fonts or scripts from elsewhere.

The figures, the chart, what is alive at the peak and the blocks are written here and need no script. The values beside
the policy are drawn in the browser from data that is embedded as JSON. Nothing of a policy or a graph is ever markup:
text is escaped where it is written, and in the data every character that HTML or a script could take for its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from policylang.language.wording import counted, printable
from policylang.planning.inspection.breakdown import Breakdown
from policylang.planning.inspection.communication import Communication, as_decided
from policylang.planning.inspection.marginal_cost import Worth
from policylang.planning.inspection.peak_values import values_at_peak
from policylang.planning.plan import Plan
from policylang.report.order.page_section import order_section
from policylang.report.plan.page_data import page_data
from policylang.report.plan.sections import at_peak_section, blocks_section, memory_section, tiles

_PIECES = Path(__file__).parent / "page"
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}
_SCRIPTS = ("figures.js", "memory.js", "lanes.js", "policy.js", "nodes.js", "page.js")


def plan_page(found: Breakdown, worth: Sequence[Worth], graph: str) -> str:
    """The whole page. ``graph`` is what it calls the graph."""
    data = page_data(found, worth, graph)
    order, data["order"] = order_section(*_communication(found))
    values = {
        "title": escape(f"{found.plan.policy.name} on {graph}"),
        "subtitle": escape(subtitle(found.plan)),
        "tiles": tiles(found),
        "memory": memory_section(data["memory"], [found.under.peak, found.without.peak]),
        "order": order,
        "at_peak": at_peak_section(values_at_peak(found)),
        "blocks": blocks_section(found),
    }
    return filled("page.html", values, data, _SCRIPTS)


def _communication(found: Breakdown) -> tuple[Communication | None, Sequence[str]]:
    """What the scheduling lines come to, and the names of its blocks; of a policy without any, what the collectives of
    the graph come to as they are, where there is a device."""
    plan = found.plan
    if plan.order is not None:
        return found.communication, plan.order.block_names
    return as_decided(plan), plan.block_names


def subtitle(plan: Plan) -> str:
    """What graph it is, and which plan."""
    facts = plan.facts
    parts = [
        f"{facts.kind.value} graph of {counted(len(facts), 'node')}",
        counted(sum(decision is not None for decision in plan.decisions), "forward value"),
        counted(len(plan.block_names), "block") if plan.block_names else "no blocks",
        f"torch {facts.torch_version}" if facts.torch_version else "",
        f"plan {plan.digest[:12]}",
    ]
    return " · ".join(filter(None, parts))


def filled(shell: str, values: Mapping[str, str], data: Mapping[str, Any], scripts: Sequence[str]) -> str:
    """A page of markup that is escaped already, with data for its scripts."""
    values = {
        **values,
        "style": _piece("page.css"),
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False).translate(_ESCAPES),
        "script": "\n".join(map(_piece, scripts)),
    }
    head, *rest = _piece(shell).split("{{")
    parts = [head]
    for each in rest:
        name, _, after = each.partition("}}")
        parts += [values[name.strip()], after]
    return printable("".join(parts))


def _piece(name: str) -> str:
    return (_PIECES / name).read_text(encoding="utf-8")
