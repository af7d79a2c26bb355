"""Why no policy meets a budget: the smallest peak that can be reached, where it is, and what is alive there."""

from __future__ import annotations

from math import ceil

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.wording import beside, counted, figure
from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.breakdown import Breakdown, breakdown
from policylang.planning.inspection.peak_values import AliveValue, PeakValues, values_at_peak
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.evaluation import Evaluation
from policylang.tuning.trade_off import Besides, Infeasible

INFEASIBLE = "APL625"
BELOW_PARAMETERS = "APL626"

_RESIDENT = ("parameter", "buffer")
_ALL = 1 << 30
_LARGE = 0.25
"""Of what is alive beside parameters and buffers: what takes so much stands in the way."""
_MOST_SHARES = 6
_MOST_SAVED = 4
_WORDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "returned": "returned by the graph: gradients, for the most part",
    "backward": "of the backward's own",
    "in use": "of the forward, in use",
    "saved": "saved for the backward",
    "recomputed": "computed again",
    "copied back": "copied back from the host",
    "offloaded": "on the way to the host",
    "left to PyTorch": "left to PyTorch",
    "input": "inputs of the step",
    "constant": "constants",
    "tangent": "tangents",
    "generator state": "states of random generators",
}


def infeasible(found: Infeasible, facts: Facts, times: NodeTimes, capabilities: Capabilities) -> Diagnostic:
    """The error for a budget that no policy meets."""
    plan = Evaluation(facts, times, capabilities).planned(found.smallest.rules)
    assert plan is not None, "a candidate is a policy against which nothing is to be said"
    under = breakdown(plan)
    if found.budget.figure == "saved":
        return _too_much_saved(found, under)
    if found.budget.figure == "recompute time":
        message = (
            f"no policy recomputes for as little as {figure(found.budget.limit, 'fraction')} of the forward's time"
        )
        return diagnose(INFEASIBLE, message, help="the model's own checkpoints recompute too: leave them out")
    return _too_high(found, under)


def _too_high(found: Infeasible, under: Breakdown) -> Diagnostic:
    besides, limit = found.besides, int(found.budget.limit)
    smallest = besides.on(found.smallest.peak)
    at_peak = values_at_peak(under, _ALL)
    resident = sum(share.bytes for share in at_peak.shares if share.what in _RESIDENT)
    details = (*_alive(at_peak), *_besides(besides), *_in_the_way(at_peak, resident, under.plan.facts))
    help = f"the least that can be met is a peak of {_rounded_up(smallest)}"
    if besides.on(resident) > limit:
        alone = f"{figure(resident, 'bytes')} of parameters and buffers"
        beside_them = "".join(f", {each.removeprefix('besides the graph: ')}" for each in _besides(besides))
        message = f"a peak of {figure(limit, 'bytes')} is less than what is there before the step: {alone}{beside_them}"
        mend = f"{help}; shard the parameters over more ranks to have less there"
        return diagnose(BELOW_PARAMETERS, message, help=mend, details=details)
    place = f", at `{found.smallest.peak_at}`" if found.smallest.peak_at else ""
    message = (
        f"no policy keeps the peak within {figure(limit, 'bytes')}: "
        f"the smallest is {beside(smallest, limit, 'bytes')}{place}"
    )
    return diagnose(INFEASIBLE, message, help=help, details=details)


def _alive(at_peak: PeakValues) -> tuple[str, ...]:
    by_what: dict[str, int] = {}
    for share in at_peak.shares:
        by_what[share.what] = by_what.get(share.what, 0) + share.bytes
    largest = sorted(by_what.items(), key=lambda each: (-each[1], each[0]))
    lines = [f"  {figure(size, 'bytes')} {_WORDS.get(what, what)}" for what, size in largest[:_MOST_SHARES]]
    rest = sum(size for _, size in largest[_MOST_SHARES:])
    return (
        f"alive there, {figure(at_peak.bytes, 'bytes')}:",
        *lines,
        *([f"  {figure(rest, 'bytes')} more"] if rest else []),
    )


def _besides(besides: Besides) -> tuple[str, ...]:
    parts = [
        f"{figure(besides.optimizer, 'bytes')} of the optimizer's state" if besides.optimizer else "",
        f"{figure(besides.gradients, 'bytes')} of gradients" if besides.gradients else "",
        f"{figure(besides.reserve, 'fraction')} in reserve" if besides.reserve else "",
    ]
    said = " and ".join(filter(None, parts))
    return (f"besides the graph: {said}",) if said else ()


def _in_the_way(at_peak: PeakValues, resident: int, facts: Facts) -> tuple[str, ...]:
    """The one thing that a user can change, where there is one: parameters, the logits, a single value."""
    others = [value for value in at_peak.values if value.what not in _RESIDENT]
    rest = at_peak.bytes - resident
    vocabulary = _vocabulary(facts)
    wide = [value for value in others if vocabulary and _width(facts, value) == vocabulary]
    size = sum(value.bytes for value in wide)
    if size and size >= _LARGE * rest:
        named = f"`{wide[0].name}`{_where(wide[0])}"
        what = f"{counted(len(wide), 'value')} as wide as the vocabulary, such as {named}"
        line = f"in the way: the logits and what is made of them, {figure(size, 'bytes')} in {what}"
        return (line, "a loss that is computed over a part of the tokens at a time does not hold all of them")
    returned = resident + sum(value.bytes for value in others if value.what == "returned")
    if returned >= at_peak.bytes / 2:
        return (f"in the way: parameters and their gradients, {figure(returned, 'bytes')} on this rank",)
    if others and others[0].bytes >= _LARGE * rest:
        one = others[0]
        return (f"in the way: one value, `{one.name}`{_where(one)}, {figure(one.bytes, 'bytes')} ({one.what})",)
    return ()


def _where(value: AliveValue) -> str:
    return f" of `{value.module}`" if value.module else ""


def _vocabulary(facts: Facts) -> int:
    """The length of the longest table that an embedding looks into; 0 where there is none."""
    tables = (facts.inputs[row][0] for row, op in enumerate(facts.targets) if op.startswith("aten.embedding."))
    return max((shape[0] for table in tables if (shape := facts.shapes[table])), default=0)


def _width(facts: Facts, value: AliveValue) -> int:
    shape = facts.shapes[facts.index[value.name]]
    return shape[-1] if shape and len(shape) > 1 else 0


def _too_much_saved(found: Infeasible, under: Breakdown) -> Diagnostic:
    limit, least = int(found.budget.limit), found.smallest.saved
    message = (
        f"no policy saves as little as {figure(limit, 'bytes')} for the backward: "
        f"the least is {beside(least, limit, 'bytes')}"
    )
    kept = [
        (entry.bytes * group.times, entry, group)
        for group in under.groups
        for entry in group.entries
        if entry.outcome.on_device and entry.bytes
    ]
    kept.sort(key=lambda each: -each[0])
    lines = [
        f"  {figure(size, 'bytes')} {entry.operator}{f' of `{entry.module}`' if entry.module else ''} in {group.label}"
        for size, entry, group in kept[:_MOST_SAVED]
    ]
    rest = sum(size for size, _, _ in kept[_MOST_SAVED:])
    details = ("what stays:", *lines, *([f"  {figure(rest, 'bytes')} more"] if rest else []))
    return diagnose(INFEASIBLE, message, help=f"the least that can be met is {_rounded_up(least)}", details=details)


def _rounded_up(size: int) -> str:
    """A size that a person can write and that is not less: ``23.2 GiB``."""
    unit, scale = next(
        (
            (unit, 1024**power)
            for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"))
            if size >= 1024**power
        ),
        ("B", 1),
    )
    if scale == 1:
        return f"{size} B"
    tenths = ceil(size * 10 / scale)
    return f"{tenths // 10}.{tenths % 10} {unit}".replace(".0 ", " ")
