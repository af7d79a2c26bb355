"""A report as text: one line a rule, then totals, rewrites, expectations and the audit."""

from __future__ import annotations

from collections import Counter

from policylang.audit.summary.report import (
    NO_GRADIENTS,
    CodeOrderReport,
    Report,
    RewriteReport,
    RuleReport,
    ValuesReport,
)
from policylang.language.wording import counted, figure, file_name, shortened, uncounted_text
from policylang.report.alike import expectation_lines, graph_rows
from policylang.report.device_times import seconds_text
from policylang.report.order.report_lines import order_lines
from policylang.report.width import table

_HEAD = ("line", "rule", "matched", "decided", "saved", "recomputed")
_LABEL = 12
_MOST_REASONS = 4
_LONGEST_RULE = 72


def report_text(report: Report) -> str:
    """Plain text, no colours, no line end at the end."""
    parts = [_heading(report), _rule_table(report), _figures(report)]
    if len(report.graphs) > 1:
        rows = graph_rows(report.graphs)
        parts.append(table(rows, right=range(1, len(rows[0]) - 1)))
    return "\n\n".join(part for part in parts if part)


def _heading(report: Report) -> str:
    kind = "graph without gradients" if report.half == NO_GRADIENTS else f"{report.half} half of a partition"
    facts = [f"{kind}, {counted(report.operators, 'operator')}"] if report.half else []
    if report.forward_nodes:
        facts.append(counted(report.forward_nodes, "forward value"))
    if report.blocks:
        facts.append(counted(report.blocks, "block"))
    if len(report.graphs) > 1:
        facts.append(counted(len(report.graphs), "graph"))
    return f"policy {report.policy}" + (": " + ", ".join(facts) if facts else "")


def _rule_table(report: Report) -> str:
    if not report.rules and not report.undecided:
        return ""
    rows: list[tuple[str, ...]] = [_HEAD, *(_rule_row(rule) for rule in report.rules)]
    if report.undecided:
        kept = bytes_text(report.undecided_saved_bytes)
        count = f"{report.undecided:,}"
        rows.append(("", f"undecided -> {report.undecided_fate}", count, count, kept, ""))
    if timed(report):
        times = ["time", *(seconds_text(rule.recomputed_seconds) for rule in report.rules), ""]
        rows = [(*row, words) for row, words in zip(rows, times, strict=False)]
    if report.offloaded:
        moved = ["offloaded", *(bytes_text(rule.offloaded_bytes or None) for rule in report.rules), ""]
        rows = [(*row, words) for row, words in zip(rows, moved, strict=False)]
    return table(rows, right=range(2, len(rows[0])), ends=(0,), spare=(2,))


def _rule_row(rule: RuleReport) -> tuple[str, ...]:
    flops = figure(rule.recomputed_flops, "flops") if rule.recomputed_flops else ""
    counts = f"{rule.matched:,}", f"{rule.decided:,}"
    text = shortened(rule.text, _LONGEST_RULE)
    return file_name(rule.source), text, *counts, bytes_text(rule.saved_bytes or None), flops


def _figures(report: Report) -> str:
    lines = []
    if report.saved is not None:
        lines.append(_line("saved", _values(report.saved)))
    if report.recomputed is not None:
        lines.append(_line("recomputed", _values(report.recomputed) + _share(report) + _time(report)))
    lines += _uncounted(report)
    if report.offloaded:
        lines.append(_line("offloaded", _values(report.offloaded)))
    kept = sum(rule.kept_by_user for rule in report.rules)
    if kept:
        lines.append(_line("kept", f"{counted(kept, 'match', 'matches')} have a tag of the user's own checkpoint"))
    lines += [_line("rewrite", line) for rewrite in report.rewrites for line in str(rewrite).splitlines()]
    lines += [
        _line("order", f"{file_name(each.source)} {each.text}: {each.said}")
        for order in report.by_fsdp
        for each in order.lines
    ]
    lines += [_line("order", line) for line in order_lines(report)]
    lines += [_line("expect", line) for line in expectation_lines(report)]
    lines += [_line("warning", warning) for warning in report.warnings]
    lines += [_line("note", note) for note in report.notes]
    lines += _audit(report)
    lines += [_line("code", line) for line in dict.fromkeys(map(_code, report.code))]
    if report.from_cache:
        lines.append(_line("cache", "served from torch's compile cache; planned and audited when it was compiled"))
    return "\n".join(lines)


def _uncounted(report: Report) -> list[str]:
    again = report.uncounted_recomputed
    lines = [_line("", f"and {uncounted_text(again)}")] if again else []
    rest = {name: count - again.get(name, 0) for name, count in report.uncounted.items() if count > again.get(name, 0)}
    return [*lines, *([_line("uncounted", f"in the forward: {uncounted_text(rest)}")] if rest else [])]


def rewrite_lines(report: RewriteReport) -> list[str]:
    """As a person reads it: what was done, then what was left and why."""
    where = f" in the {report.half}" if report.half else ""
    lines = [f"{file_name(report.source)} {report.text}{where}: {_what(report)}"]
    lines += [f"  {note}" for note in report.notes]
    reasons = Counter(left.reason for left in report.left)
    for reason, count in reasons.most_common(_MOST_REASONS):
        first = next(left for left in report.left if left.reason == reason)
        more = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"  left: {' → '.join(first.collectives)}{more}: {reason}")
    if len(reasons) > _MOST_REASONS:
        rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(_MOST_REASONS))
        lines.append(f"  left: {rest} more, for {len(reasons) - _MOST_REASONS} other reasons")
    return lines


def _what(report: RewriteReport) -> str:
    if not report.done:
        return "nothing to rewrite" if not report.left else "nothing rewritten"
    how = "proven" if report.proven else "checked"
    return f"{report.done:,} rewritten, {counted(report.gone, 'collective')} fewer, each {how} on {report.ranks} ranks"


def _audit(report: Report) -> list[str]:
    if report.audit is None:
        return [_line("audit", "not yet: the graph is planned, and not partitioned")] if report.rules else []
    if report.audit.agrees and report.by_fsdp and not report.forward_nodes:
        return [_line("audit", "FSDP gathers as it was told")]
    if report.audit.agrees:
        return [_line("audit", "the graphs that came out do what the plan says")]
    return [_line("audit", difference) for difference in report.audit.differences]


def _code(order: CodeOrderReport) -> str:
    """What Inductor's code of a half was read to do."""
    if order.status == "not compiled":
        return f"of the {order.half}: compiled when the first backward starts, and read then"
    if order.status == "not read":
        return f"of the {order.half}: not Python, so its order of collectives was not read"
    is_so = "as planned" if order.status == "as planned" else "NOT as planned"
    beside = f", {counted(len(order.kernels), 'collective')} with computation beside" if order.kernels else ""
    return f"of the {order.half}: {order.starts} started and {order.waits} waits, in order {is_so}{beside}"


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _values(values: ValuesReport) -> str:
    text = f"{bytes_text(values.bytes)} in {counted(len(values), 'value')}"
    return f"{text}, {figure(values.flops, 'flops')}" if values.flops else text


def _share(report: Report) -> str:
    if not report.recomputed or not report.recomputed.flops or not report.forward_flops:
        return ""
    return f", {report.recomputed.flops / report.forward_flops:.0%} of the forward"


def timed(report: Report) -> bool:
    """Whether there is a time to print of what is recomputed."""
    return report.recomputed is not None and report.recomputed.seconds is not None


def _time(report: Report) -> str:
    """``, 12.3 ms on h100-sxm, 21% of its time``."""
    seconds = report.recomputed.seconds if report.recomputed else None
    if not seconds:
        return ""
    share = f", {seconds / report.forward_seconds:.0%} of its time" if report.forward_seconds else ""
    return f", {figure(seconds, 'seconds')} on {report.device}{share}"


def bytes_text(amount: int | None) -> str:
    return "" if amount is None else figure(amount, "bytes")
