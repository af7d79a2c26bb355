"""Renders a comparison of the paths as the table that ``policylang agree`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from policylang.language.wording import counted, figure, joined, listed, uncounted_text
from policylang.report.width import table
from policylang.testing.path_comparison.results import (
    Agreement,
    Beside,
    Equality,
    PathDecision,
    PathDifference,
    PathResult,
    PathWork,
    ValuePlace,
    ValuesAccount,
    WorkDifference,
)

_MOST = 8
_HEAD = ("path", "saved", "offloaded", "recomputed", "", "loss", "gradients", "buffers")


def agreement_text(found: Agreement) -> str:
    """Plain text, no line end at the end."""
    rows = [_HEAD, *(_row(result) for result in found.results)]
    if all(result.numbers is None or result.numbers.buffers.bitwise for result in found.results):
        rows = [row[:-1] for row in rows]
    moves = any(result.offloaded_bytes for result in found.results)
    if not moves:
        rows = [(*row[:2], *row[3:]) for row in rows]
    parts = [
        f"policy {found.policy}, one step, held against the plain model: loss {found.loss:.6g}, "
        f"{counted(found.gradients, 'gradient')}, torch {found.torch_version}",
        table(rows, right=range(1, 5 if moves else 4)),
        "\n".join([*_refusals(found.results), *_numbers(found.results), *_audits(found.results)]),
        "\n".join(_account(found)),
        "\n".join(_differences(found.account.differences)),
        "\n".join(_other_work(found.account.other_work)),
        _verdict(found),
    ]
    return "\n\n".join(part for part in parts if part)


def _row(result: PathResult) -> tuple[str, ...]:
    if result.ran is None or result.numbers is None:
        return (result.path, "refused", *[""] * (len(_HEAD) - 2))
    report, numbers = result.ran.report, result.numbers
    saved = figure(report.saved.bytes, "bytes") if report.saved is not None else ""
    moved = figure(result.offloaded_bytes, "bytes")
    again = report.recomputed
    count = counted(len(again), "value") if again is not None else ""
    flops = figure(again.flops, "flops") if again is not None else ""
    cells = (_equality(each) for each in (numbers.loss, numbers.gradients, numbers.buffers))
    return (result.path, saved, moved, count, flops, *cells)


def _equality(found: Equality) -> str:
    if found.bitwise:
        return "equal to the bit"
    return f"{len(found.differing)} of {found.tensors} differ, by {found.largest:.1e} at most"


def _refusals(results: Iterable[PathResult]) -> Iterator[str]:
    for path, refused in ((result.path, result.refused) for result in results if result.refused is not None):
        if not refused.diagnostics:
            yield f"{path} cannot run the model: {refused.error}"
        for found in refused.diagnostics[:_MOST]:
            where = f"{found.span.location}: " if found.span else ""
            yield f"{path} cannot carry it out: {found.code}: {where}{found.message}"
            if found.help is not None:
                yield f"  help: {found.help}"
        if len(refused.diagnostics) > _MOST:
            yield f"  and {len(refused.diagnostics) - _MOST} more reasons"


def _numbers(results: Iterable[PathResult]) -> Iterator[str]:
    """What is to be said of numbers that are not those of the plain model to the bit."""
    for result in results:
        numbers = result.numbers
        if numbers is None or numbers.bitwise:
            continue
        if numbers.agrees:
            yield (
                f"{result.path} rounds otherwise than the plain model, within tolerance; "
                "without the policy it gives the same bits as with it"
            )
            continue
        if numbers.as_without_policy:
            yield f"{result.path} COMPUTES something else than the plain model, without the policy too"
        else:
            yield f"{result.path} COMPUTES something else: its bits are not those without the policy"
        names = [name for each in (numbers.loss, numbers.gradients, numbers.buffers) for name in each.differing]
        yield f"  {listed(names, _MOST)}"


def _audits(results: Iterable[PathResult]) -> list[str]:
    return [
        f"{result.path}: {difference}"
        for result in results
        if result.ran is not None and result.ran.report.audit is not None
        for difference in result.ran.report.audit.differences
    ]


# --- the values ----------------------------------------------------------------------------------------------------


def _account(found: Agreement) -> list[str]:
    account = found.account
    if len(account.saved) < 2:
        return []
    lines = [
        f"decisions   {counted(account.alike, 'value')} decided alike, "
        f"{account.undecided} undecided and left to each path, {len(account.differences)} decided otherwise"
    ]
    lines += [f"            {path} alone: {_operators(counts)}" for path, counts in account.alone.items()]
    lines += _amounts("saved", account.common_bytes, account.saved, "bytes")
    lines += _amounts("recomputed", account.common_flops, account.recomputed, "flops", account)
    for result in found.results:
        missing = result.ran.report.uncounted_recomputed if result.ran is not None else {}
        lines += [f"            {result.path} without {uncounted_text(missing)}"] if missing else []
    if account.same_work:
        said = counted(account.same_work, "module does", "modules do")
        lines.append(f"            {said} the same work by other operators on each path, decided alike")
    return lines


def _amounts(
    label: str,
    common: int,
    beside: Mapping[str, Beside],
    unit: Literal["bytes", "flops"],
    calls: ValuesAccount | None = None,
) -> list[str]:
    """``calls``: where these are counted beside the amounts."""
    many = f" in {counted(calls.common_calls, 'call')}" if calls is not None else ""
    lines = [f"{label:<12}{figure(common, unit)}{many} of the same values on all paths"]
    for path, each in beside.items():
        number = calls.recomputed_calls[path] if calls is not None else Beside()
        said = (
            (each.undecided, number.undecided, "undecided"),
            (each.graph, number.graph, "not in every path's graph"),
            (each.read, number.read, "not needed on every path"),
            (each.decided, number.decided, "decided otherwise elsewhere"),
        )
        reasons = [f"{figure(amount, unit)}{_in_calls(times)} {why}" for amount, times, why in said if amount or times]
        if reasons:
            lines.append(f"            {path} beside that: {', '.join(reasons)}")
    return lines


def _in_calls(times: int) -> str:
    return f" in {counted(times, 'call')}" if times else ""


def _operators(counts: Mapping[str, int]) -> str:
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{operator} ×{count}" if count > 1 else operator for operator, count in most[:_MOST])
    rest = len(most) - _MOST
    values = counted(sum(counts.values()), "value")
    return f"{values} ({shown}{f' and {rest} more operators' if rest > 0 else ''})"


def _differences(differences: Sequence[PathDifference]) -> list[str]:
    lines = []
    for each in differences[:_MOST]:
        lines.append(_name(each.place, each.number))
        lines += [f"  {path:<6} {', '.join(map(_side, sides))}" for path, sides in each.sides.items()]
    rest = len(differences) - _MOST
    return [*lines, *([f"and {counted(rest, 'more value')} decided otherwise"] if rest > 0 else [])]


def _other_work(differences: Sequence[WorkDifference]) -> list[str]:
    """Modules that differ in the same way are one."""
    alike: dict[tuple[tuple[str, tuple[PathWork, ...]], ...], list[str]] = {}
    for each in differences:
        alike.setdefault(tuple(each.sides.items()), []).append(each.module)
    lines = []
    for sides, modules in list(alike.items())[:_MOST]:
        more = f" and {counted(len(modules) - 1, 'more module')}" if len(modules) > 1 else ""
        lines.append(f"other operators in {modules[0] or 'no module'}{more}")
        lines += [f"  {path:<6} {'; '.join(map(_work, works)) or 'none of them'}" for path, works in sides]
    rest = len(alike) - _MOST
    return [*lines, *([f"and {counted(rest, 'more difference')} of work"] if rest > 0 else [])]


def _work(work: PathWork) -> str:
    times = f" ×{work.count}" if work.count > 1 else ""
    flops = "no FLOP formula" if work.uncounted and not work.flops else figure(work.flops, "flops")
    return f"{work.action}  {work.operator}{times}, {flops}"


def _name(place: ValuePlace, number: int | None) -> str:
    shape = "×".join(map(str, place.shape)) if place.shape is not None else "several results"
    which = "all of them" if number is None else f"number {number}"
    return f"{place.operator} in {place.module or 'no module'}, {shape}, {which}"


def _side(side: PathDecision) -> str:
    by = side.rule or side.reason or "no rule"
    extra = f" ({side.reason})" if side.reason and side.rule else ""
    return f"{side.action}{f' ×{side.count}' if side.count > 1 else ''}  {by}{extra}"


def _verdict(found: Agreement) -> str:
    ran = [result.path for result in found.results if result.ran is not None]
    refused = [result.path for result in found.results if result.ran is None]
    wrong = [result.path for result in found.results if result.ran is not None and not result.agrees]
    if not ran:
        return "no path carries the policy out on this model"
    problems = []
    if wrong:
        problems.append(f"{joined(wrong)} {'is' if len(wrong) == 1 else 'are'} not the plain model")
    if found.account.differences:
        problems.append(f"{counted(len(found.account.differences), 'value')} decided otherwise")
    if found.account.other_work:
        problems.append(f"{counted(len(found.account.other_work), 'module')} with other work")
    if refused:
        problems.append(f"{joined(refused)} refused")
    if problems:
        return f"the paths do NOT agree: {'; '.join(problems)}"
    if len(ran) < 2:
        return f"{joined(ran)} agrees with the plain model; there is no other path to compare it with"
    return f"{joined(ran)} agree"
