"""From timings to the figures of a device profile."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from attrs import field, frozen

from policylang.language.devices.profile import Rate
from policylang.profiling.functions import BEFORE, FUNCTIONS
from policylang.profiling.fused import FUSED, UNFUSED
from policylang.profiling.products import DTYPES
from policylang.profiling.streams import FROM_HOST, OVERHEAD, STREAM, TO_HOST
from policylang.profiling.trials import Timing, Timings, Trial

SLOW = 0.8
"""An operator has a rate of its own where it reaches less than this share of a stream's."""


@frozen
class Spread:
    """How far the rounds of timings lie apart, as shares of their medians."""

    middle: float
    worst: float
    rounds: int


@frozen(eq=False)
class MeasuredDevice:
    """What was measured, in the units of :class:`~policylang.language.devices.profile.DeviceProfile`."""

    compute: dict[str, Rate]
    shares: dict[str, float]
    """Of matrix work by its operator, ``convolution``: how much of the rate of products of its size it reaches."""
    bandwidth: Rate
    operators: dict[str, float]
    """Bytes/s of the operators that compute more than they move, ``tanh``."""
    pointwise: float
    overhead: float
    host_bandwidth: float | None
    spread: Spread
    refused: dict[str, str] = field(factory=dict)
    """What the machine cannot do, and what it said."""


def measured(timings: Timings, dtype: str) -> MeasuredDevice | None:
    """The figures; None where not even a stream of bytes could be timed. ``dtype`` is that of what has shares."""
    if not timings.of_key(STREAM):
        return None
    overhead = _median(timing.seconds for _, timing in timings.of_key(OVERHEAD))
    names = [str(each).removeprefix("torch.") for each in DTYPES]
    compute = {name: rate for name in names if (rate := _rate(timings.of_key(name), overhead)) is not None}
    return MeasuredDevice(
        compute=compute,
        shares=_shares(timings, compute.get(dtype), overhead),
        bandwidth=_rate(timings.of_key(STREAM), overhead) or Rate.constant(1.0),
        operators=_operators(timings, overhead),
        pointwise=_pointwise(timings),
        overhead=overhead,
        host_bandwidth=_host(timings),
        spread=_spread(timings),
        refused=dict(timings.refused),
    )


def _rate(timed: Sequence[tuple[Trial, Timing]], overhead: float) -> Rate | None:
    """By size what a run reaches beyond its overhead, all families of one size together. A size that is mostly overhead
    says nothing of the rate; the largest is always there."""
    sizes: dict[float, list[float]] = defaultdict(list)
    for trial, timing in timed:
        sizes[trial.work].append(timing.seconds)
    if not sizes:
        return None
    largest = max(sizes)
    points = []
    for size, seconds in sorted(sizes.items()):
        mean = statistics.fmean(seconds)
        if mean > 2 * overhead or size == largest:
            points.append((size, size / max(mean - overhead, mean / 2)))
    return Rate(tuple(points))


def _shares(timings: Timings, products: Rate | None, overhead: float) -> dict[str, float]:
    if products is None:
        return {}
    operators = {trial.key for trial in timings.of if trial.key not in _NOT_SHARES and not trial.key.startswith(BEFORE)}
    found = {}
    for operator in sorted(operators - {trial.key for trial in timings.of if trial.ladder}):
        reached = [
            trial.work / products.at(trial.work) / (timing.seconds - overhead)
            for trial, timing in timings.of_key(operator)
            if timing.seconds > overhead
        ]
        if reached:
            found[operator] = statistics.geometric_mean(reached)
    return found


_NOT_SHARES = frozenset((STREAM, OVERHEAD, TO_HOST, FROM_HOST, FUSED, UNFUSED))


def _operators(timings: Timings, overhead: float) -> dict[str, float]:
    def reached(name: str) -> float:
        return max((trial.work / timing.seconds for trial, timing in timings.of_key(BEFORE + name)), default=0.0)

    stream = reached("mul")
    return {name: rate for name in sorted(FUNCTIONS) if 0 < (rate := reached(name)) < SLOW * stream}


def _pointwise(timings: Timings) -> float:
    """The mean over the chains; 1 where none was compiled."""
    compiled, eager = (sum(timing.seconds for _, timing in timings.of_key(key)) for key in (FUSED, UNFUSED))
    return min(1.0, compiled / eager) if compiled and eager else 1.0


def _host(timings: Timings) -> float | None:
    """Of the slower way."""
    rates = [trial.work / timing.seconds for key in (TO_HOST, FROM_HOST) for trial, timing in timings.of_key(key)]
    return min(rates, default=None)


def _spread(timings: Timings) -> Spread:
    spreads = sorted(timing.spread for timing in timings.of.values())
    return Spread(_median(spreads), max(spreads, default=0.0), timings.rounds)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
