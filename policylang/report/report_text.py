"""A report as text: one line a rule, then totals, rewrites, the order, expectations and the audit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from policylang.audit.report import (
    NO_GRADIENTS,
    CodeOrderReport,
    ExpectationReport,
    OrderAccount,
    Report,
    RewriteReport,
    RuleReport,
    ScheduledLine,
    ValuesReport,
)
from policylang.language.shown import (
    Measured,
    counted,
    file_name,
    folded_names,
    format_quantity,
    listed,
    shortened,
    uncounted_text,
)
from policylang.planning.plan import Plan
from policylang.report.layout import seconds_text, table

_IN_BLOCK = re.compile(r" in block \d+$")
_WORST_FIRST = ("failed", "deferred", "held")


def graph_rows(graphs: Sequence[Report]) -> list[tuple[str, ...]]:
    """The rows of a table, head first: a row for all graphs in which the same happens, with the figures of one and the
    sums of all."""
    named = all(graph.label for graph in graphs)
    first, blocks = ("block", []) if named else ("graph", ["blocks"])
    together = _alike(graphs)
    if len(together) == len(graphs):
        head = (first, "forward values", *blocks, "saved", "recomputed", "")
        return [
            head,
            *((_name(graph, at), *_graph_figures(graph, blocks), _cached(graph)) for at, graph in enumerate(graphs)),
        ]
    rows: list[tuple[str, ...]] = [
        (first, "times", "forward values", *blocks, "saved", "recomputed", "all saved", "all recomputed", "")
    ]
    for numbers in together:
        same = [graphs[number] for number in numbers]
        label = folded_names([_name(graph, number) for graph, number in zip(same, numbers, strict=True)])
        sums = (_sum([graph.saved for graph in same]), _sum([graph.recomputed for graph in same]))
        rows.append((label, str(len(same)), *_graph_figures(same[0], blocks), *sums, _cached(same[0])))
    return rows


def _alike(graphs: Sequence[Report]) -> list[list[int]]:
    """The numbers of the graphs that are alike in every decision and figure, in the order of the first of each."""
    found: dict[object, list[int]] = {}
    for number, graph in enumerate(graphs):
        key = (
            graph.policy,
            (graph.forward_nodes, graph.blocks, graph.forward_flops, graph.undecided, graph.from_cache, graph.half),
            graph.rules,
            tuple(graph.decisions.items()),
            tuple(_amounts(each) for each in (graph.saved, graph.recomputed, graph.offloaded)),
            graph.audit is None or graph.audit.agrees,
        )
        found.setdefault(key, []).append(number)
    return list(found.values())


def _amounts(values: ValuesReport | None) -> object:
    return None if values is None else (values.names, values.bytes, values.flops)


def _name(graph: Report, number: int) -> str:
    return graph.label or str(number)


def _graph_figures(graph: Report, blocks: Sequence[str]) -> tuple[str, ...]:
    amounts = (format_quantity(values.bytes, "bytes") if values else "" for values in (graph.saved, graph.recomputed))
    return f"{graph.forward_nodes:,}", *(f"{graph.blocks:,}" for _ in blocks), *amounts


def _sum(values: Sequence[ValuesReport | None]) -> str:
    there = [each.bytes for each in values if each is not None]
    return format_quantity(sum(there), "bytes") if there else ""


def _cached(graph: Report) -> str:
    return "from the compile cache" if graph.from_cache else ""


def expectation_lines(report: Report) -> Iterator[str]:
    """Each expectation once, in the order of the policy: what all graphs found, or the worst of it and where."""
    graphs = report.graphs or (report,)
    asked: dict[tuple[str, str], list[tuple[ExpectationReport, str]]] = {}
    for number, graph in enumerate(graphs):
        for each in graph.expectations:
            asked.setdefault((each.source, each.text), []).append((each, _name(graph, number)))
    for answers in asked.values():
        yield _answer(answers, "block" if all(graph.label for graph in graphs) else "graph")


def _answer(answers: Sequence[tuple[ExpectationReport, str]], noun: str) -> str:
    worst = min(answers, key=lambda answer: (_WORST_FIRST.index(answer[0].status), _margin(answer[0])))[0]
    text = f"{worst.text.removeprefix('expect ')}: {worst.status}, {worst.found}"
    if len({(each.status, each.found) for each, _ in answers}) == 1:
        return text
    if len({(each.status, each.margin) for each, _ in answers}) == 1 and worst.margin is not None:
        return f"{_IN_BLOCK.sub('', text)} in each of {counted(len(answers), noun)}"
    same = [where for each, where in answers if each.status == worst.status]
    if len(same) == len(answers):
        return f"{text}, the worst of {counted(len(answers), noun)}"
    places = folded_names(same)
    return f"{text}; {worst.status} in {len(same)} of {counted(len(answers), noun)}: {places}"


def _margin(expectation: ExpectationReport) -> float:
    return float("inf") if expectation.margin is None else expectation.margin


_MOST_NAMES = 2
_MOST_ORDER_REASONS = 3


def order_lines(report: Report) -> list[str]:
    """The totals of the step and its scheduling lines; for a forward or backward graph the totals alone. Lines that
    several graphs share are written once."""
    told = {rewrite.source for rewrite in report.rewrites}
    found = Counter(line for account in report.orders for line in _lines(account, told))
    return [f"{line}, in {counted(count, 'graph')} each" if count > 1 else line for line, count in found.items()]


def _lines(account: OrderAccount, told: Collection[str]) -> Iterator[str]:
    where = f"{account.half}: " if account.half else ""
    yield where + totals_line(account)
    if account.half:
        return
    for line in account.lines:
        if line.source not in told:  # a bucket line is among the rewrites, with its proofs
            yield f"{file_name(line.source)} {line.text}: {_order_what(line)}"
            yield from _left(line.left)
    if account.barriers:
        yield barriers_text(account.barriers)


def totals_line(account: OrderAccount) -> str:
    """``exposed 365.6 ms -> 42.4 ms of 1.2 s, 291 -> 66 collectives, peak 32.2 GiB -> 32.9 GiB``."""
    before, after = account.traced, account.planned
    said = []
    if after.exposed is not None and before.exposed is not None and after.step is not None:
        least = f" (no order less than {format_quantity(account.bound, 'seconds')})" if account.bound else ""
        exposed = _change(before.exposed, after.exposed, "seconds")
        said.append(f"exposed {exposed} of {format_quantity(after.step, 'seconds')}{least}")
    said.append(f"{_change(before.collectives, after.collectives, 'number')} collectives")
    said.append(f"peak {_change(before.peak, after.peak, 'bytes')}")
    said.append(f"at most {format_quantity(after.in_flight, 'bytes')} in flight")
    return ", ".join(said)


def _change(before: float, after: float, dimension: Measured) -> str:
    old, new = (format_quantity(each, dimension) for each in (before, after))
    return new if old == new else f"{old} -> {new}"


def _order_what(line: ScheduledLine) -> str:
    joined = f"joined into {line.buckets:,}" if line.buckets else "moved"
    return f"{counted(line.matched, 'collective')}, {line.moved:,} {joined}"


def _left(left: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    reasons = sorted(left.items(), key=lambda each: -len(each[1]))
    for reason, names in reasons[:_MOST_ORDER_REASONS]:
        yield f"  left: {listed(names, _MOST_NAMES)}: {reason}"
    if rest := reasons[_MOST_ORDER_REASONS:]:
        yield f"  left: {sum(len(names) for _, names in rest):,} more, for {len(rest)} other reasons"


def barriers_text(barriers: Mapping[str, int]) -> str:
    """Unknown operators, each once."""
    calls = [f"{name} ×{count}" if count > 1 else name for name, count in barriers.items()]
    return f"nothing is moved across operators that nobody knows: {', '.join(calls)}"


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
    if _timed(report):
        times = ["time", *(seconds_text(rule.recomputed_seconds) for rule in report.rules), ""]
        rows = [(*row, words) for row, words in zip(rows, times, strict=False)]
    if report.offloaded:
        moved = ["offloaded", *(bytes_text(rule.offloaded_bytes or None) for rule in report.rules), ""]
        rows = [(*row, words) for row, words in zip(rows, moved, strict=False)]
    return table(rows, right=range(2, len(rows[0])), ends=(0,), spare=(2,))


def _rule_row(rule: RuleReport) -> tuple[str, ...]:
    flops = format_quantity(rule.recomputed_flops, "flops") if rule.recomputed_flops else ""
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
    """The rewrites that were made, then those that were not, and why."""
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
    """The order of collectives in Inductor's generated code."""
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
    return f"{text}, {format_quantity(values.flops, 'flops')}" if values.flops else text


def _share(report: Report) -> str:
    if not report.recomputed or not report.recomputed.flops or not report.forward_flops:
        return ""
    return f", {report.recomputed.flops / report.forward_flops:.0%} of the forward"


def plan_line(plan: Plan) -> str:
    """``policy llama3_sac on a joint graph of 1,204 nodes: 675 forward values, 8 blocks``."""
    values = sum(decision is not None for decision in plan.decisions)
    nodes = counted(len(plan.facts), "node")
    found = [counted(values, "forward value"), counted(len(plan.block_names), "block")]
    if plan.diagnostics:
        found.append(counted(len(plan.diagnostics), "diagnostic"))
    return f"policy {plan.policy.name} on a {plan.facts.kind.value} graph of {nodes}: {', '.join(found)}"


def _timed(report: Report) -> bool:
    return report.recomputed is not None and report.recomputed.seconds is not None


def _time(report: Report) -> str:
    """``, 12.3 ms on h100-sxm, 21% of its time``."""
    seconds = report.recomputed.seconds if report.recomputed else None
    if not seconds:
        return ""
    share = f", {seconds / report.forward_seconds:.0%} of its time" if report.forward_seconds else ""
    return f", {format_quantity(seconds, 'seconds')} on {report.device}{share}"


def bytes_text(amount: int | None) -> str:
    return "" if amount is None else format_quantity(amount, "bytes")
