"""Reads the budget of a tuning and the memory that is used besides, and explains budgets that cannot be met."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, is_gradient
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.shown import UNITS, beside, counted, did_you_mean, format_quantity, nearest
from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.breakdown import AliveValue, Breakdown, PeakValues, breakdown, values_at_peak
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.evaluation import Budget, BudgetFigure, Evaluation, Infeasible
from policylang.tuning.tuned_policy import besides_words, rounded_up

NO_BUDGET = "APL624"
NO_OPTIMIZER = "APL628"
NO_RESERVE = "APL629"

Size = str | int | float
"""Bytes as a number, or ``70 GiB``."""
Share = str | float
"""A fraction, or ``5%``."""

_AMOUNT = re.compile(
    r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?nan|[+-]?inf)\s*([^\W\d_]*|%)\s*", re.IGNORECASE
)
_BARE_UNITS = {prefix: (f"{prefix}iB", f"{prefix}B") for prefix in "KMGT"}
_BYTE_UNITS = tuple(unit for unit, (_, dimension) in UNITS.items() if dimension == "bytes")
_MOST_OF_A_TEXT = 40
_STATE_IN_GRAPH = "optimizer."
"""Prefixes of the inputs of a traced step that are an optimizer's state."""

STATES: Mapping[str, int] = {
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "muon": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "radam": 2,
    "adamax": 2,
    "adadelta": 2,
    "rprop": 2,
    "adam-amsgrad": 3,
    "adamw-amsgrad": 3,
}
"""The values that an optimizer keeps per element of a parameter, in the parameter's dtype: ``torch.optim`` makes its
state with ``zeros_like(parameter)``, so a step that trains bfloat16 weights has bfloat16 state."""


def read_budget(
    peak: Size | None = None, saved: Size | None = None, recompute_time: Share | None = None
) -> Budget | Diagnostic | None:
    """The one budget that is given, None where none is. More than one is a mistake: each leaves the others free."""
    figures: dict[BudgetFigure, Size | None] = {"peak": peak, "saved": saved, "recompute time": recompute_time}
    given = [name for name, each in figures.items() if each is not None]
    if len(given) > 1:
        message = f"a budget is one figure, and {len(given)} are given: {', '.join(given)}"
        return diagnose(NO_BUDGET, message, help="give one of them; the account lists the others")
    if peak is not None:
        limit: float | Diagnostic = read_size(peak, "peak")
    elif saved is not None:
        limit = read_size(saved, "saved bytes")
    elif recompute_time is not None:
        limit = _share(recompute_time, "recompute time", NO_BUDGET)
    else:
        return None
    return limit if isinstance(limit, Diagnostic) else Budget(given[0], limit)


def read_size(given: Size, what: str) -> int | Diagnostic:
    """Whole bytes, more than none. ``what`` is what messages call the figure."""
    size = _bytes(given, what, NO_BUDGET, "write a number and a unit: `70 GiB`")
    if isinstance(size, Diagnostic):
        return size
    if size >= 1:
        return int(size)
    help = "a budget is more than 0: `70 GiB`"
    if size > 0:
        return diagnose(NO_BUDGET, f"the {what} of {_quoted(given)} is less than a byte", help=help)
    found = "negative" if size < 0 else "zero"
    return diagnose(NO_BUDGET, f"the {what} of {_quoted(given)} is {found}", help=help)


def read_optimizer(given: Size | None, facts: Facts) -> int | Diagnostic:
    """Bytes of the optimizer's state: of a name in :data:`STATES` by the parameters that the graph has gradients for,
    else the size that is given. None is no optimizer."""
    if given is None:
        return 0
    if any(each.startswith(_STATE_IN_GRAPH) for each in facts.input_names):
        message = "the graph holds the state of its optimizer already: the update is part of the step"
        return diagnose(NO_OPTIMIZER, message, help="leave `optimizer` out")
    name = given.strip().lower() if isinstance(given, str) else ""
    if name in STATES:
        trained = trained_bytes(facts)
        if STATES[name] and not trained:
            message = f"the state of `{name}` is not known: the graph does not mark its parameters"
            return diagnose(NO_OPTIMIZER, message, help="give the state as a size: `24 GiB`")
        return STATES[name] * trained
    help = f"write one of {', '.join(f'`{each}`' for each in STATES)}, or the size of its state: `24 GiB`"
    if isinstance(given, str) and not any(map(str.isdigit, given.partition(" ")[0])):
        near = did_you_mean(nearest(name, STATES))
        return diagnose(NO_OPTIMIZER, f"there is no optimizer {_quoted(given)}", help=near or help)
    size = _bytes(given, "optimizer's state", NO_OPTIMIZER, help)
    if isinstance(size, Diagnostic):
        return size
    if size < 0:
        return diagnose(NO_OPTIMIZER, f"the optimizer's state of {_quoted(given)} is negative", help=help)
    return int(size)


def read_reserve(given: Share) -> float | Diagnostic:
    """The share of the memory that is set aside, from 0 to less than 1."""
    share = _share(given, "reserve", NO_RESERVE)
    if not isinstance(share, Diagnostic) and share >= 1:
        return diagnose(NO_RESERVE, f"a reserve of {_quoted(given)} leaves no memory", help="write less, such as `5%`")
    return share


def trained_bytes(facts: Facts) -> int:
    """Bytes of the parameters that the graph returns gradients for, matched by their shapes: a frozen parameter, as
    beside an adapter, has no gradient and no state. All parameters where the graph returns none of any."""
    parameters = [row for row, kind in enumerate(facts.input_kinds) if kind == InputKind.PARAMETER]
    returned = Counter(
        facts.shapes[row]
        for output, op in enumerate(facts.ops)
        if op == "output"
        for row in facts.inputs[output]
        if facts.phases[row] == Phase.BACKWARD or is_gradient(facts, row)
    )
    total = 0
    for row in parameters:
        if returned[facts.shapes[row]] > 0:
            returned[facts.shapes[row]] -= 1
            total += facts.bytes[row]
    return total or sum(facts.bytes[row] for row in parameters)


def _bytes(given: Size, what: str, code: str, help: str) -> float | Diagnostic:
    if isinstance(read := _amount(given, what, code, "size", help), Diagnostic):
        return read
    number, written, unit = read
    if written and not unit and number:
        return diagnose(code, f"the {what} of {_quoted(given)} has no unit", help=f"did you mean `{written} GiB`?")
    if unit and unit not in _BYTE_UNITS:
        near = did_you_mean(
            f"{written} {each}" for each in _BARE_UNITS.get(unit.upper(), ()) or nearest(unit, _BYTE_UNITS)
        )
        return diagnose(code, f"the {what} of {_quoted(given)} has no unit of bytes: `{unit}`", help=near or help)
    size = number * (UNITS[unit][0] if unit else 1)
    return size if isfinite(size) else diagnose(code, f"the {what} of {_quoted(given)} is no size", help=help)


def _share(given: Share, what: str, code: str) -> float | Diagnostic:
    help = "write a percentage: `5%`"
    if isinstance(read := _amount(given, what, code, "percentage", help), Diagnostic):
        return read
    number, written, unit = read
    if written and unit != "%":
        fix = help if unit else f"did you mean `{written}%`?"
        return diagnose(code, f"the {what} of {_quoted(given)} has no `%`", help=fix)
    if not written and number > 1:
        help = "write a fraction, such as 0.05, or a percentage: `5%`"
        return diagnose(code, f"the {what} of {_quoted(given)} is more than all of it", help=help)
    if number < 0:
        return diagnose(code, f"the {what} of {_quoted(given)} is negative", help=help)
    return number * 0.01 if written else number


def _amount(given: object, what: str, code: str, kind: str, help: str) -> tuple[float, str, str] | Diagnostic:
    """A number, and as a text has it, with its unit; these are empty where no text is given."""
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        return diagnose(code, f"the {what} is a {kind}, and not {_quoted(given)}", help=help)
    found = _AMOUNT.fullmatch(str(given))
    if found is None or not isfinite(number := float(found[1])):
        none = f"no {kind}" if isinstance(given, str) else "no number"
        return diagnose(code, f"the {what} of {_quoted(given)} is {none}", help=help)
    return (number, found[1], found[2]) if isinstance(given, str) else (number, "", "")


def _quoted(given: object) -> str:
    text = " ".join((given if isinstance(given, str) else repr(given)).split())
    return f"`{text if len(text) <= _MOST_OF_A_TEXT else text[:_MOST_OF_A_TEXT] + '…'}`"


UNSUITABLE = "APL630"
NO_BLOCKS = "APL631"
NO_COPIES = "APL632"

_WHOLE = "take a snapshot of a whole step: of `policylang.trace_step`, or of a model compiled under a policy"


def unsuitable(facts: Facts, called: str) -> Diagnostic | None:
    """Why there is nothing to tune in a graph; None where there is. ``called``: what messages call the graph."""
    help = _WHOLE
    if not any(op == "call_function" for op in facts.ops):
        message = f"{called} is empty: no operator runs in it"
    elif facts.kind is GraphKind.BACKWARD:
        message = f"{called} is the backward graph of a partition, where all is decided"
    elif Phase.BACKWARD not in facts.phases:
        is_half = facts.kind is GraphKind.FORWARD
        half = "a partition's forward graph, or" if is_half else "a graph"
        message = f"{called} is {half} of a forward alone: without its backward nothing is kept"
        help = _WHOLE if is_half else f"{_WHOLE}, with gradients on"
    elif not facts.forward:
        message = f"{called} has no forward: what its backward reads is given to it"
    elif not any(facts.has(row, Flag.FEEDS_BACKWARD) for row in facts.forward):
        message = f"the backward of {called} reads nothing that its forward computes: there is nothing to decide"
        help = "no policy changes what it takes"
    else:
        return None
    return diagnose(UNSUITABLE, message, help=help)


def decides_nothing(capabilities: Capabilities) -> Diagnostic | None:
    """Why a path leaves a tuned policy nothing to decide; None where it does not."""
    if not capabilities.settled:
        return None
    message = f"{capabilities.name} is given a policy's rewrites alone: {capabilities.settled}"
    return diagnose(UNSUITABLE, message, help="tune for `joint`, which decides what is saved, or for another path")


def no_copies(capabilities: Capabilities) -> Diagnostic | None:
    """Why values cannot be offloaded on a path; None where they can."""
    if capabilities.offloads:
        return None
    message = f"values cannot be offloaded: {capabilities.name} does not copy to the host"
    return diagnose(NO_COPIES, message, help="leave `offload` out, or tune for another path")


def without_blocks(facts: Facts, called: str) -> Diagnostic | None:
    """The note that goes with a graph in which no layer is numbered."""
    if blocks_of(facts, None).names:
        return None
    message = f"{called} has no numbered layers: its rules go by module, operator and size"
    return diagnose(NO_BLOCKS, message, help="where its layers have other names, a policy may say `blocks GLOB`")


INFEASIBLE = "APL625"
BELOW_PARAMETERS = "APL626"

_RESIDENT = ("parameter", "buffer")
_ALL = 1 << 30
_LARGE = 0.25
"""The share of live memory, beside parameters and buffers, from which on a value is an obstacle."""
_MOST_SHARES = 6
_MOST_SAVED = 4
_WORDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "returned": "returned by the graph: gradients, for the most part",
    "backward": "of the backward's own",
    "in use": "of the forward, in use",
    "saved": "saved for the backward",
    "recomputed": "recomputed",
    "copied back": "copied back from the host",
    "offloaded": "in flight to the host",
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
        least = format_quantity(found.budget.limit, "fraction")
        message = f"no policy recomputes for as little as {least} of the forward's time"
        return diagnose(INFEASIBLE, message, help="the model's own checkpoints recompute too: leave them out")
    return _too_high(found, under)


def _too_high(found: Infeasible, under: Breakdown) -> Diagnostic:
    besides, limit = found.besides, int(found.budget.limit)
    smallest = besides.on(found.smallest.peak)
    at_peak = values_at_peak(under, _ALL)
    resident = sum(share.bytes for share in at_peak.shares if share.what in _RESIDENT)
    said = besides_words(besides)
    beside_graph = (f"besides the graph: {said}",) if said else ()
    details = (*_alive(at_peak), *beside_graph, *_in_the_way(at_peak, resident, under.plan.facts))
    help = f"the least that can be met is a peak of {rounded_up(smallest)}"
    if besides.on(resident) > limit:
        alone = f"{format_quantity(resident, 'bytes')} of parameters and buffers"
        peak = format_quantity(limit, "bytes")
        there = ", ".join(filter(None, (alone, said)))
        message = f"a peak of {peak} is less than what is alive before the step: {there}"
        fix = f"{help}; shard the parameters over more ranks to have less there"
        return diagnose(BELOW_PARAMETERS, message, help=fix, details=details)
    place = f", at `{found.smallest.peak_at}`" if found.smallest.peak_at else ""
    message = (
        f"no policy keeps the peak within {format_quantity(limit, 'bytes')}: "
        f"the smallest is {beside(smallest, limit, 'bytes')}{place}"
    )
    return diagnose(INFEASIBLE, message, help=help, details=details)


def _alive(at_peak: PeakValues) -> tuple[str, ...]:
    by_what = Counter[str]()
    for share in at_peak.shares:
        by_what[_WORDS.get(share.what, share.what)] += share.bytes
    return f"alive there, {format_quantity(at_peak.bytes, 'bytes')}:", *_largest(by_what.items(), _MOST_SHARES)


def _largest(sized: Iterable[tuple[str, int]], most: int) -> Iterator[str]:
    """What takes the most, a line each, and what the rest comes to."""
    ranked = sorted(sized, key=lambda each: (-each[1], each[0]))
    yield from (f"  {format_quantity(size, 'bytes')} {what}" for what, size in ranked[:most])
    if rest := sum(size for _, size in ranked[most:]):
        yield f"  {format_quantity(rest, 'bytes')} more"


def _in_the_way(at_peak: PeakValues, resident: int, facts: Facts) -> tuple[str, ...]:
    """What the user can change to fit, if anything: parameters, the logits, a single value."""
    others = [value for value in at_peak.values if value.what not in _RESIDENT]
    rest = at_peak.bytes - resident
    tables = (facts.inputs[row][0] for row, op in enumerate(facts.targets) if op.startswith("aten.embedding."))
    vocabulary = max((shape[0] for table in tables if (shape := facts.shapes[table])), default=0)
    wide = [value for value in others if vocabulary and _width(facts, value) == vocabulary]
    size = sum(value.bytes for value in wide)
    if size and size >= _LARGE * rest:
        named = f"`{wide[0].name}`{_where(wide[0])}"
        what = f"{counted(len(wide), 'value')} as wide as the vocabulary, such as {named}"
        line = f"too large: the logits and what is made of them, {format_quantity(size, 'bytes')} in {what}"
        return (line, "a loss that is computed over a part of the tokens at a time does not hold all of them")
    returned = resident + sum(value.bytes for value in others if value.what == "returned")
    if returned >= at_peak.bytes / 2:
        return (f"too large: parameters and their gradients, {format_quantity(returned, 'bytes')} on this rank",)
    if others and others[0].bytes >= _LARGE * rest:
        one = others[0]
        return (f"too large: one value, `{one.name}`{_where(one)}, {format_quantity(one.bytes, 'bytes')} ({one.what})",)
    return ()


def _where(value: AliveValue) -> str:
    return f" of `{value.module}`" if value.module else ""


def _width(facts: Facts, value: AliveValue) -> int:
    shape = facts.shapes[facts.index[value.name]]
    return shape[-1] if shape and len(shape) > 1 else 0


def _too_much_saved(found: Infeasible, under: Breakdown) -> Diagnostic:
    limit, least = int(found.budget.limit), found.smallest.saved
    message = (
        f"no policy saves as little as {format_quantity(limit, 'bytes')} for the backward: "
        f"the least is {beside(least, limit, 'bytes')}"
    )
    kept = [
        (
            f"{entry.operator}{f' of `{entry.module}`' if entry.module else ''} in {group.label}",
            entry.bytes * group.times,
        )
        for group in under.groups
        for entry in group.entries
        if entry.outcome.on_device and entry.bytes
    ]
    details = ("what stays:", *_largest(kept, _MOST_SAVED))
    return diagnose(INFEASIBLE, message, help=f"the least that can be met is {rounded_up(least)}", details=details)
