"""What is measured, one trial each, in rounds.

What disturbs a shared machine for a while then disturbs one round of all trials, and the median of the rounds is what
the machine does undisturbed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from attrs import define, field, frozen

Run = Callable[[], object]
MOST_ROUNDS = 7


@frozen(eq=False)
class Trial:
    """One operation of one size."""

    name: str
    """``float32 product, linear``: what is said where it cannot be measured."""
    key: str
    """What it is a measurement of: ``float32``, ``stream``."""
    work: float
    """What one run does: FLOPs, bytes, or kernels."""
    prepare: Callable[[], Run] = field(repr=False)
    """Makes its operands, and returns what is timed. Raises what torch raises where the machine cannot do it."""
    ladder: str = ""
    """Trials of one ladder differ in size alone, and rise: what follows one that takes too long is left out."""


class Clock(Protocol):
    """What times a trial."""

    def now(self) -> float:
        """Seconds since some moment, on a clock at the wall: what a budget is spent by."""

    def seconds(self, trial: Trial) -> float:
        """Of one run, on the device. Raises what torch raises where the machine cannot do it."""


@frozen
class Timing:
    """The seconds of one run of a trial, over the rounds."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """How far the rounds lie apart, as a share of their median: half of the distance from least to most."""
        return (max(self.rounds) - min(self.rounds)) / 2 / self.seconds if self.seconds else 0.0


@define(eq=False)
class Timings:
    """What came of the trials."""

    of: dict[Trial, Timing] = field(factory=dict)
    refused: dict[str, str] = field(factory=dict)
    """What the machine cannot do in any size, by its key, and the first line of what it said."""
    rounds: int = 0

    def of_key(self, key: str) -> list[tuple[Trial, Timing]]:
        return [(trial, timing) for trial, timing in self.of.items() if trial.key == key]


def measure(
    trials: Sequence[Trial], clock: Clock, budget: float, progress: Callable[[str], object] = lambda _: None
) -> Timings:
    """Time every trial in rounds, until the budget in seconds is spent or there were enough; the first round is whole.

    A single run may take a four hundredth of the budget: the sizes of a ladder end there.
    """
    start = clock.now()
    found = Timings()
    seconds: dict[Trial, list[float]] = {}
    ended: set[str] = set()
    refused: dict[str, str] = {}
    left: Iterable[Trial] = trials
    slowest = 0.0
    while found.rounds < MOST_ROUNDS:
        began = clock.now()
        if found.rounds and began - start + slowest > budget:
            break
        for trial in left:
            if found.rounds and clock.now() - start > budget:
                break
            if not found.rounds and _ends_before(trial, seconds, ended, budget):
                continue
            progress(f"round {found.rounds + 1}: {trial.name}")
            try:
                seconds.setdefault(trial, []).append(clock.seconds(trial))
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                seconds.pop(trial, None)
                ended.add(trial.ladder)
                refused.setdefault(trial.key, _first_line(error))
        left = list(seconds)
        found.rounds += 1
        slowest = max(slowest, clock.now() - began) if found.rounds > 1 else 0.0
    found.of = {trial: Timing(tuple(each)) for trial, each in seconds.items()}
    able = {trial.key for trial in found.of}
    found.refused = {key: said for key, said in refused.items() if key not in able}
    return found


def _ends_before(trial: Trial, seconds: dict[Trial, list[float]], ended: set[str], budget: float) -> bool:
    """Whether a smaller trial of its ladder could not be done, or says that this one takes too long."""
    if not trial.ladder:
        return False
    if trial.ladder in ended:
        return True
    before = [each for each in seconds if each.ladder == trial.ladder]
    return bool(before) and seconds[before[-1]][0] * trial.work / before[-1].work > budget / 400


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
