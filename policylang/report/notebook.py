"""Reports and plans as HTML tables, for the cell of a notebook. Whatever comes from a policy or a graph is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from policylang.audit.summary.report import Report
from policylang.language.wording import counted, figure, file_name
from policylang.planning.plan import Plan
from policylang.report.device_times import seconds_text
from policylang.report.report_text import bytes_text, report_text, timed

_WORDS, _NUMBERS = 'style="text-align: left"', 'style="text-align: right"'
"""Said of each cell: notebooks put all to the right."""
_FIXED = 'style="font-family: monospace"'
"""And notebooks take the font of a `pre` from around it."""


def report_html(report: Report) -> str:
    """The account of every rule as a table, and below it what ``str()`` of the report says beside its rules."""
    time = timed(report)
    rows: list[tuple[str, ...]] = [
        ("line", "rule", "matched", "decided", "saved", "recomputed", *("time",)[:time], "offloaded")
    ]
    for rule in report.rules:
        flops = figure(rule.recomputed_flops, "flops") if rule.recomputed_flops else ""
        seconds = [seconds_text(rule.recomputed_seconds)] if time else []
        amounts = bytes_text(rule.saved_bytes or None), flops, *seconds, bytes_text(rule.offloaded_bytes or None)
        rows.append((file_name(rule.source), rule.text, f"{rule.matched:,}", f"{rule.decided:,}", *amounts))
    if report.undecided:
        count, kept = f"{report.undecided:,}", bytes_text(report.undecided_saved_bytes)
        nothing = [""] * (len(rows[0]) - 5)
        rows.append(("", f"undecided -> {report.undecided_fate}", count, count, kept, *nothing))
    heading, _, rest = report_text(report).partition("\n")
    below = rest.strip().rpartition("\n\n")[2] if report.rules else rest.strip()
    return table_html(heading, rows if report.rules or report.undecided else (), below)


def plan_html(plan: Plan) -> str:
    """What each rule matches and decides, and what came of the expectations."""
    said = [f"{each.text}: {each.status}, {each.found}" for each in plan.expectations]
    said += [f"{each.code}: {each.message}" for each in plan.diagnostics]
    return table_html(str(plan), rule_rows(plan), "\n".join(said))


def rule_rows(plan: Plan) -> list[tuple[str, ...]]:
    """What each rule matches and decides, below the names of the columns."""
    rows: list[tuple[str, ...]] = [("line", "rule", "matched", "decided")]
    for outcome in plan.rules:
        numbers = f"{len(outcome.matched):,}", f"{len(outcome.decided):,}"
        rows.append((file_name(outcome.rule.source), outcome.rule.text, *numbers))
    return rows


def plan_line(plan: Plan) -> str:
    """``policy llama3_sac on a joint graph of 1,204 nodes: 675 forward values, 8 blocks``."""
    values = sum(decision is not None for decision in plan.decisions)
    nodes = counted(len(plan.facts), "node")
    found = [counted(values, "forward value"), counted(len(plan.block_names), "block")]
    if plan.diagnostics:
        found.append(counted(len(plan.diagnostics), "diagnostic"))
    return f"policy {plan.policy.name} on a {plan.facts.kind.value} graph of {nodes}: {', '.join(found)}"


def table_html(heading: str, rows: Sequence[Sequence[str]], below: str) -> str:
    """A heading, a table whose first row names its columns, and text in a fixed width."""
    parts = [f"<p><b>{escape(heading)}</b></p>"]
    if rows:
        head, *body = rows
        parts.append(f"<table><thead>{_row('th', head)}</thead><tbody>")
        parts += [_row("td", row) for row in body]
        parts.append("</tbody></table>")
    if below:
        parts.append(f"<pre {_FIXED}>{escape(below)}</pre>")
    return "".join(parts)


def _row(tag: str, cells: Sequence[str]) -> str:
    shown = (f"<{tag} {_WORDS if at < 2 else _NUMBERS}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))
    return f"<tr>{''.join(shown)}</tr>"
