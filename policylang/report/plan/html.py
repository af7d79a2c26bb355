"""A plan as one page that needs nothing else: no server, no network, no fonts or scripts from elsewhere.

The page is drawn in the browser from data that is embedded in it as JSON. Nothing of a policy or a graph is ever
markup: in the data every character that HTML or a script could take for its own is escaped, and the script writes text
alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from policylang.planning.inspection.breakdown import Breakdown
from policylang.planning.inspection.marginal_cost import Worth
from policylang.report.plan.page_data import page_data

_PIECES = Path(__file__).parent / "page"
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}
_SCRIPTS = ("figures.js", "memory.js", "blocks.js", "policy.js", "nodes.js", "page.js")


def plan_page(found: Breakdown, worth: Sequence[Worth], graph: str) -> str:
    """The whole page. ``graph`` is what it calls the graph."""
    values = {
        "title": escape(f"{found.plan.policy.name} on {graph}"),
        "style": _piece("page.css"),
        "data": json.dumps(page_data(found, worth, graph), separators=(",", ":")).translate(_ESCAPES),
        "script": "\n".join(map(_piece, _SCRIPTS)),
    }
    head, *rest = _piece("page.html").split("{{")
    parts = [head]
    for each in rest:
        name, _, after = each.partition("}}")
        parts += [values[name.strip()], after]
    return "".join(parts)


def _piece(name: str) -> str:
    return (_PIECES / name).read_text(encoding="utf-8")
