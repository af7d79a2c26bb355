"""The account of the order in the report on a graph: a line for what it comes to, and one for each scheduling line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from policylang.audit.summary.order_account import OrderAccount, ScheduledLine
from policylang.audit.summary.report import Report
from policylang.language.wording import Measured, counted, figure, file_name, listed

_MOST_NAMES = 2
_MOST_REASONS = 3


def order_lines(report: Report) -> list[str]:
    """Of the whole step what it comes to and each line; of the halves that it was cut into what they come to. What
    several graphs have alike is said once."""
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
            yield f"{file_name(line.source)} {line.text}: {_what(line)}"
            yield from _left(line.left)
    if account.barriers:
        yield barriers_text(account.barriers)


def totals_line(account: OrderAccount) -> str:
    """``exposed 365.6 ms -> 42.4 ms of 1.2 s, 291 -> 66 collectives, peak 32.2 GiB -> 32.9 GiB``."""
    before, after = account.traced, account.planned
    said = []
    if after.exposed is not None and before.exposed is not None and after.step is not None:
        least = f" (no order less than {figure(account.bound, 'seconds')})" if account.bound else ""
        exposed = _change(before.exposed, after.exposed, "seconds")
        said.append(f"exposed {exposed} of {figure(after.step, 'seconds')}{least}")
    said.append(f"{_change(before.collectives, after.collectives, 'number')} collectives")
    said.append(f"peak {_change(before.peak, after.peak, 'bytes')}")
    said.append(f"at most {figure(after.in_flight, 'bytes')} in flight")
    return ", ".join(said)


def _change(before: float, after: float, dimension: Measured) -> str:
    old, new = (figure(each, dimension) for each in (before, after))
    return new if old == new else f"{old} -> {new}"


def _what(line: ScheduledLine) -> str:
    joined = f"joined into {line.buckets:,}" if line.buckets else "moved"
    return f"{counted(line.matched, 'collective')}, {line.moved:,} {joined}"


def _left(left: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    reasons = sorted(left.items(), key=lambda each: -len(each[1]))
    for reason, names in reasons[:_MOST_REASONS]:
        yield f"  left: {listed(names, _MOST_NAMES)}: {reason}"
    if rest := reasons[_MOST_REASONS:]:
        yield f"  left: {sum(len(names) for _, names in rest):,} more, for {len(rest)} other reasons"


def barriers_text(barriers: Mapping[str, int]) -> str:
    """Unknown operators, each once."""
    calls = [f"{name} ×{count}" if count > 1 else name for name, count in barriers.items()]
    return f"nothing is moved across operators that nobody knows: {', '.join(calls)}"
