"""The figures behind the statements of a policy, made from what ``policylang plan --output-format json`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lsprotocol import types

from policylang.language import syntax
from policylang.language.diagnostics import Source
from policylang.language.parser import parse_file
from policylang.language.predicates import dimensions_of
from policylang.language.syntax import Statement
from policylang.language.wording import figure

OPEN = "still being worked out"
"""What is said of a worth that is not there yet."""
_FILE = "<stdin>"
_MINUS = "−"
_SCHEDULING = (syntax.Bucket, syntax.Prefetch, syntax.Delay, syntax.Overlap, syntax.KeepOrder)
_EXPECTATIONS = (syntax.ExpectTotal, syntax.ExpectCount, syntax.ExpectFate)


def check_figures(text: str, plan: Any, hints: Sequence[types.InlayHint], *, weighed: bool = True) -> None:
    """Each rule, scheduling line and expectation of a text has the figures of its plan behind it, and its first
    statement those of the step. ``weighed``: also what each rule is worth."""
    shown: dict[tuple[int, int], list[str]] = {}
    for each in hints:
        shown.setdefault((each.position.line, each.position.character), []).append(str(each.label))
    statements, expected = parse_file(Source("edited.apl", text))[0].statements, []
    expected += list(_rules(statements, plan, weighed=weighed))
    expected += list(_expectations(statements, plan))
    expected += list(_scheduling(statements, plan))
    title = next((each for each in statements if isinstance(each, syntax.PolicyName)), statements[0])
    expected.append((title, totals(plan)))
    for statement, label in expected:
        end = text[: statement.span.end].split("\n")
        at = len(end) - 1, len(end[-1].encode("utf-16-le")) // 2
        found = shown.get(at, [])
        assert any(_same(each, label) for each in found), f"{statement.span.one_line}: {found}, not {label}\n{text}"


def _same(shown: str, label: str) -> bool:
    """What ends in dots begins with it."""
    return shown.startswith(label[:-1]) if label.endswith("…") else shown == label


def _rules(statements: Sequence[Statement], plan: Any, *, weighed: bool) -> Iterator[tuple[Statement, str]]:
    rules = [each for each in statements if isinstance(each, syntax.Rule)]
    for rule, planned in zip(rules, _own(plan["rules"]), strict=True):
        yield rule, rule_label(planned, timed=plan["device"] is not None, weighed=weighed)


def rule_label(planned: Any, *, timed: bool, weighed: bool = True) -> str:
    decided, worth = planned["decided"], planned["worth"]
    label = f"{decided:,} value{'' if decided == 1 else 's'}"
    if worth is None or not weighed:  # of what the user's own checkpoint keeps the plan says nothing
        return f"{label}…"
    pairs = [(worth["saved_bytes"], "bytes"), (worth["recomputed_flops"], "flops")]
    pairs += [(worth["recomputed_seconds"], "seconds")] if timed else []
    return " · ".join([label, *([signed(amount, unit) for amount, unit in pairs if amount] or ["changes nothing"])])


def totals(plan: Any) -> str:
    under, again = plan["with"], ""
    if under["recomputed"] and under["recomputed_flops"]:
        again = f"recomputes {figure(under['recomputed_flops'] / plan['forward_flops'], 'fraction')}"
    elif under["recomputed"]:
        again = f"recomputes {figure(under['recomputed_bytes'], 'bytes')}"
    parts = [
        f"keeps {figure(under['saved_bytes'], 'bytes')}",
        f"offloads {figure(under['offloaded_bytes'], 'bytes')}" if under["offloaded"] else "",
        again,
        f"peak {figure(max(under['peak']['forward'], under['peak']['backward']), 'bytes')}",
        f"step {figure(under['step_seconds'], 'seconds')}" if under["step_seconds"] is not None else "",
    ]
    return " · ".join(filter(None, parts))


def _expectations(statements: Sequence[Statement], plan: Any) -> Iterator[tuple[Statement, str]]:
    expected = [each for each in statements if isinstance(each, _EXPECTATIONS)]
    for statement, planned in zip(expected, _own(plan["expectations"]), strict=True):
        label, margin = f"{planned['status']}, {planned['found']}", planned["margin"]
        if margin and isinstance(statement, syntax.ExpectTotal):
            written = statement.limit.dimension
            meant = dimensions_of(statement.figure)[0] if written == "number" else written
            amount = figure(abs(margin), meant)
            label += f" · {amount} to spare" if planned["status"] == "held" else f" · off by {amount}"
        yield statement, label


def _scheduling(statements: Sequence[Statement], plan: Any) -> Iterator[tuple[Statement, str]]:
    """Buckets come before the other lines, as they are made first."""
    lines = [each for each in statements if isinstance(each, _SCHEDULING)]
    lines.sort(key=lambda each: not isinstance(each, syntax.Bucket))
    for statement, planned in zip(lines, _own((plan["order"] or {"lines": []})["lines"]), strict=bool(plan["order"])):
        matched, into = len(planned["matched"]), ""
        if planned["buckets"]:
            into = f" into {sum(len(bucket['collectives']) for bucket in planned['buckets']):,}"
        noun = "collective" if matched == 1 else "collectives"
        yield statement, f"{matched:,} {noun} · {len(planned['moved']):,} moved{into}…"


def _own(planned: Sequence[Any]) -> list[Any]:
    """Without what included files say."""
    return [each for each in planned if each["source"].rpartition(":")[0] == _FILE]


def signed(amount: float, dimension: Any) -> str:
    """``−1.9 GiB``, ``+8.2 TFLOP``."""
    return f"{'+' if amount > 0 else _MINUS}{figure(abs(amount), dimension)}" if amount else "0"
