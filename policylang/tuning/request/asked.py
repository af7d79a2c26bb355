"""What a user asks of a tuned policy, read from text or numbers: a budget, the optimizer's state, a reserve."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import isfinite

from policylang.graph.facts import Facts, InputKind, Phase, is_gradient
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.units import UNITS
from policylang.language.wording import did_you_mean, nearest
from policylang.tuning.trade_off import Budget

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
"""How the inputs of a traced step begin that are an optimizer's state."""

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
"""How many values an optimizer keeps for each element of a parameter, in the parameter's dtype: ``torch.optim`` makes
its state with ``zeros_like(parameter)``, so a step that trains bfloat16 weights has bfloat16 state."""


def read_budget(
    peak: Size | None = None, saved: Size | None = None, recompute_time: Share | None = None
) -> Budget | Diagnostic | None:
    """The one budget that is given, None where none is. More than one is a mistake: each leaves the others free."""
    given = [
        name
        for name, each in (("peak", peak), ("saved", saved), ("recompute time", recompute_time))
        if each is not None
    ]
    if len(given) > 1:
        message = f"a budget is one figure, and {len(given)} are given: {', '.join(given)}"
        return diagnose(NO_BUDGET, message, help="give one of them; what the others come to is in the account")
    if peak is not None:
        limit = read_size(peak, "peak")
        return limit if isinstance(limit, Diagnostic) else Budget("peak", limit)
    if saved is not None:
        limit = read_size(saved, "saved bytes")
        return limit if isinstance(limit, Diagnostic) else Budget("saved", limit)
    if recompute_time is None:
        return None
    share = _share(recompute_time, "recompute time", "5%", NO_BUDGET)
    return share if isinstance(share, Diagnostic) else Budget("recompute time", share)


def read_size(given: Size, what: str) -> int | Diagnostic:
    """Whole bytes, more than none. ``what`` is what messages call the figure."""
    size = _bytes(given, what, NO_BUDGET, "write a number and a unit: `70 GiB`")
    if isinstance(size, Diagnostic) or size >= 1:
        return size if isinstance(size, Diagnostic) else int(size)
    help = "a budget is more than nothing: `70 GiB`"
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
            message = f"the state of `{name}` cannot be told: the graph does not say what its parameters are"
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
    share = _share(given, "reserve", "5%", NO_RESERVE)
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
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        return diagnose(code, f"the {what} is a size, and not {_quoted(given)}", help=help)
    if not isinstance(given, str):
        return given if isfinite(given) else diagnose(code, f"the {what} of {_quoted(given)} is no number", help=help)
    found = _AMOUNT.fullmatch(given)
    if found is None or not isfinite(number := float(found[1])):
        return diagnose(code, f"the {what} of {_quoted(given)} is no size", help=help)
    unit = found[2]
    if not unit and number:
        return diagnose(code, f"the {what} of {_quoted(given)} has no unit", help=f"did you mean `{found[1]} GiB`?")
    if unit and unit not in _BYTE_UNITS:
        near = did_you_mean(
            f"{found[1]} {each}" for each in _BARE_UNITS.get(unit.upper(), ()) or nearest(unit, _BYTE_UNITS)
        )
        return diagnose(code, f"the {what} of {_quoted(given)} has no unit of bytes: `{unit}`", help=near or help)
    size = number * (UNITS[unit][0] if unit else 1)
    return size if isfinite(size) else diagnose(code, f"the {what} of {_quoted(given)} is no size", help=help)


def _share(given: Share, what: str, example: str, code: str) -> float | Diagnostic:
    help = f"write a percentage: `{example}`"
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        return diagnose(code, f"the {what} is a share, and not {_quoted(given)}", help=help)
    if isinstance(given, str):
        found = _AMOUNT.fullmatch(given)
        if found is None or not isfinite(number := float(found[1])):
            return diagnose(code, f"the {what} of {_quoted(given)} is no percentage", help=help)
        if found[2] != "%":
            mend = f"did you mean `{found[1]}%`?" if not found[2] else help
            return diagnose(code, f"the {what} of {_quoted(given)} has no `%`", help=mend)
        share = number * 0.01
    else:
        share = float(given)
        if share > 1:
            help = f"write a fraction, such as 0.05, or a percentage: `{example}`"
            return diagnose(code, f"the {what} of {_quoted(given)} is more than all of it", help=help)
    if not share >= 0:
        found_as = "negative" if share < 0 else "no number"
        return diagnose(code, f"the {what} of {_quoted(given)} is {found_as}", help=help)
    return share


def _quoted(given: object) -> str:
    text = " ".join((given if isinstance(given, str) else repr(given)).split())
    return f"`{text if len(text) <= _MOST_OF_A_TEXT else text[:_MOST_OF_A_TEXT] + '…'}`"
