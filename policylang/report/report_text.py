"""A report as text: one line a rule, then totals, rewrites, the order, expectations and the audit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf

from policylang.audit.report import (
    NO_GRADIENTS,
    CodeOrderReport,
    OrderAccount,
    Report,
    RewriteReport,
    ValuesReport,
)
from policylang.language.shown import (
    Dimension,
    counted,
    file_name,
    folded_names,
    format_quantity,
    listed,
    shortened,
    uncounted_text,
)
from policylang.planning.plan import ExpectationOutcome, Plan
from policylang.report.rendering import bytes_text, seconds_text, table

_IN_BLOCK = re.compile(r" in block \d+$")
_WORST_FIRST = ("failed", "deferred", "held")


def graph_rows(graphs: Sequence[Report]) -> list[tuple[str, ...]]:
    """The rows of a table, head first: a row for all equal graphs, with the figures of one and the sums of all."""
    named = all(graph.label for graph in graphs)
    first, blocks = ("block", []) if named else ("graph", ["blocks"])
    together = _alike(graphs)
    several = len(together) < len(graphs)
    sums = ("total saved", "total recomputed") if several else ()
    rows = [(first, *("times",)[:several], "forward values", *blocks, "saved", "recomputed", *sums, "")]
    for numbers in together:
        same = [graphs[number] for number in numbers]
        graph = same[0]
        label = folded_names([_name(each, number) for each, number in zip(same, numbers, strict=True)])
        row = [label, *(str(len(same)),)[:several], f"{graph.forward_nodes:,}", *(f"{graph.blocks:,}" for _ in blocks)]
        row += [bytes_text(values.bytes) if values else "" for values in (graph.saved, graph.recomputed)]
        for amounts in ([each.saved for each in same], [each.recomputed for each in same]) if several else ():
            there = [each.bytes for each in amounts if each is not None]
            row.append(bytes_text(sum(there)) if there else "")
        rows.append((*row, "from the compile cache" if graph.from_cache else ""))
    return rows


def _alike(graphs: Sequence[Report]) -> list[list[int]]:
    """The numbers of the graphs that are alike in every decision and figure, in the order of the first of each."""
    found: dict[object, list[int]] = {}
    for number, graph in enumerate(graphs):
        amounts = (graph.saved, graph.recomputed, graph.offloaded)
        key = (
            (graph.policy, graph.forward_nodes, graph.blocks, graph.forward_flops, graph.undecided, graph.from_cache),
            (graph.half, graph.rules, tuple(graph.decisions.items()), graph.audit is None or graph.audit.agrees),
            tuple(None if each is None else (each.names, each.bytes, each.flops) for each in amounts),
        )
        found.setdefault(key, []).append(number)
    return list(found.values())


def _name(graph: Report, number: int) -> str:
    return graph.label or str(number)


def expectation_lines(report: Report) -> Iterator[str]:
    """Each expectation once, in the order of the policy: what all graphs found, or the worst of it and where."""
    graphs = report.graphs or (report,)
    asked: dict[tuple[str, str], list[tuple[ExpectationOutcome, str]]] = {}
    for number, graph in enumerate(graphs):
        for each in graph.expectations:
            asked.setdefault((each.source, each.text), []).append((each, _name(graph, number)))
    for answers in asked.values():
        yield _answer(answers, "block" if all(graph.label for graph in graphs) else "graph")


def _answer(answers: Sequence[tuple[ExpectationOutcome, str]], noun: str) -> str:
    def severity(answer: tuple[ExpectationOutcome, str]) -> tuple[int, float]:
        margin = answer[0].margin
        return _WORST_FIRST.index(answer[0].status), inf if margin is None else margin

    worst = min(answers, key=severity)[0]
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


_MOST_NAMES = 2
_MOST_ORDER_REASONS = 3


def order_lines(report: Report) -> list[str]:
    """The totals and scheduling lines of the step; of a half the totals alone. What graphs share is written once."""
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
            moved = f"{line.moved:,} joined into {line.buckets:,}" if line.buckets else f"{line.moved:,} moved"
            yield f"{file_name(line.source)} {line.text}: {counted(line.matched, 'collective')}, {moved}"
            reasons = sorted(line.left.items(), key=lambda each: -len(each[1]))
            for reason, names in reasons[:_MOST_ORDER_REASONS]:
                yield f"  left: {listed(names, _MOST_NAMES)}: {reason}"
            if rest := reasons[_MOST_ORDER_REASONS:]:
                yield f"  left: {sum(len(names) for _, names in rest):,} more, for {len(rest)} other reasons"
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


def _change(before: float, after: float, dimension: Dimension) -> str:
    old, new = (format_quantity(each, dimension) for each in (before, after))
    return new if old == new else f"{old} -> {new}"


def barriers_text(barriers: Mapping[str, int]) -> str:
    """Unknown operators, each once."""
    calls = [f"{name} ×{count}" if count > 1 else name for name, count in barriers.items()]
    return f"nothing is moved across unknown operators: {', '.join(calls)}"


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
    kind = "graph without gradients" if report.half == NO_GRADIENTS else f"{report.half} graph of a partition"
    facts = [f"{kind}, {counted(report.operators, 'operator')}"] if report.half else []
    counts = (report.forward_nodes, "forward value"), (report.blocks, "block")
    facts += [counted(number, noun) for number, noun in counts if number]
    if len(report.graphs) > 1:
        facts.append(counted(len(report.graphs), "graph"))
    return f"policy {report.policy}" + (": " + ", ".join(facts) if facts else "")


def _rule_table(report: Report) -> str:
    if not report.rules and not report.undecided:
        return ""
    timed = report.recomputed is not None and report.recomputed.seconds is not None
    moves = bool(report.offloaded)
    narrows = any(rule.narrowed_bytes for rule in report.rules)
    rows = [(*_HEAD, *("time",)[:timed], *("offloaded",)[:moves], *("narrowed by",)[:narrows])]
    for rule in report.rules:
        flops = format_quantity(rule.recomputed_flops, "flops") if rule.recomputed_flops else ""
        cells = [file_name(rule.source), shortened(rule.text, _LONGEST_RULE), f"{rule.matched:,}", f"{rule.decided:,}"]
        cells += [bytes_text(rule.saved_bytes or None), flops, *(seconds_text(rule.recomputed_seconds),)[:timed]]
        cells += [bytes_text(rule.offloaded_bytes or None)][:moves]
        rows.append((*cells, *(bytes_text(rule.narrowed_bytes or None),)[:narrows]))
    if report.undecided:
        count = f"{report.undecided:,}"
        kept = bytes_text(report.undecided_saved_bytes)
        cells = ["", f"undecided -> {report.undecided_fate}", count, count, kept]
        rows.append((*cells, *[""] * (len(rows[0]) - len(cells))))
    return table(rows, right=range(2, len(rows[0])), ends=(0,), spare=(2,))


def _figures(report: Report) -> str:
    found: list[tuple[str, str]] = []

    def add(label: str, *said: str) -> None:
        found.extend((label, each) for each in said)

    if report.saved is not None:
        add("saved", _values(report.saved))
    if report.recomputed is not None:
        add("recomputed", _values(report.recomputed) + _shares(report, report.recomputed))
    again = report.uncounted_recomputed
    if again:
        add("", f"and {uncounted_text(again)}")
    rest = {name: count - again.get(name, 0) for name, count in report.uncounted.items() if count > again.get(name, 0)}
    if rest:
        add("uncounted", f"in the forward: {uncounted_text(rest)}")
    if report.offloaded:
        add("offloaded", _values(report.offloaded))
    if report.host is not None:
        add("host", str(report.host))
    if kept := sum(rule.kept_by_user for rule in report.rules):
        add("kept", f"{counted(kept, 'match', 'matches')} have a tag of the user's own checkpoint")
    add("rewrite", *(line for rewrite in report.rewrites for line in str(rewrite).splitlines()))
    by_fsdp = (each for order in report.by_fsdp for each in order.lines)
    add("order", *(f"{file_name(each.source)} {each.text}: {each.said}" for each in by_fsdp), *order_lines(report))
    add("expect", *expectation_lines(report))
    add("warning", *report.warnings)
    add("note", *report.notes)
    if report.audit is None:
        add("audit", *["not yet: the graph is planned, and not partitioned"][: bool(report.rules)])
    elif report.audit.agrees:
        by_fsdp_alone = report.by_fsdp and not report.forward_nodes
        said = "FSDP gathers as it was set" if by_fsdp_alone else "the changed graphs do what was planned"
        add("audit", said)
    else:
        add("audit", *report.audit.differences)
    add("code", *dict.fromkeys(map(_code, report.code)))
    if report.from_cache:
        add("cache", "served from torch's compile cache; planned and audited when it was compiled")
    return "\n".join(f"{label:<{_LABEL}}{said}" for label, said in found)


def rewrite_lines(report: RewriteReport) -> list[str]:
    """The rewrites that were made, then those that were not, and why."""
    where = f" in the {report.half}" if report.half else ""
    what = "nothing rewritten" if report.left else "nothing to rewrite"
    if report.done:
        how = "proven" if report.proven else "checked"
        fewer = f"{counted(report.gone, 'collective')} fewer"
        what = f"{report.done:,} rewritten, {fewer}, each {how} on {report.ranks} ranks"
        if not report.ranks:  # a rewrite without collectives
            what = f"{counted(report.done, 'region')} cut"
    lines = [f"{file_name(report.source)} {report.text}{where}: {what}"]
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


def _code(order: CodeOrderReport) -> str:
    """The order of collectives in Inductor's generated code."""
    if order.status == "not compiled":
        return f"of the {order.half}: compiled when the first backward starts, and read then"
    if order.status == "not read":
        return f"of the {order.half}: not Python, so its order of collectives was not read"
    is_so = "as planned" if order.status == "as planned" else "NOT as planned"
    beside = f", {counted(len(order.kernels), 'collective')} with computation beside" if order.kernels else ""
    return f"of the {order.half}: {order.starts} started and {order.waits} waits, in order {is_so}{beside}"


def _values(values: ValuesReport) -> str:
    text = f"{bytes_text(values.bytes)} in {counted(len(values), 'value')}"
    return f"{text}, {format_quantity(values.flops, 'flops')}" if values.flops else text


def _shares(report: Report, again: ValuesReport) -> str:
    """``, 12% of the forward, 12.3 ms on h100-sxm, 21% of its time``."""
    text = ""
    if again.flops and report.forward_flops:
        text = f", {again.flops / report.forward_flops:.0%} of the forward"
    if again.seconds:
        share = f", {again.seconds / report.forward_seconds:.0%} of its time" if report.forward_seconds else ""
        text += f", {format_quantity(again.seconds, 'seconds')} on {report.device}{share}"
    return text


def plan_line(plan: Plan) -> str:
    """``policy llama3_sac on a joint graph of 1,204 nodes: 675 forward values, 8 blocks``."""
    values = sum(decision is not None for decision in plan.decisions)
    nodes = counted(len(plan.facts), "node")
    found = [counted(values, "forward value"), counted(len(plan.block_names), "block")]
    if plan.diagnostics:
        found.append(counted(len(plan.diagnostics), "diagnostic"))
    return f"policy {plan.policy.name} on a {plan.facts.kind.value} graph of {nodes}: {', '.join(found)}"
