"""A machine whose rates are known, with a clock that only counts: what is measured of it can be told beforehand."""

from __future__ import annotations

from attrs import define, field

from policylang.profiling.families import ATTENTION, BEFORE, CONVOLUTION, FUSED, OVERHEAD, STREAM, UNFUSED
from policylang.profiling.trials import Trial

OVERHEAD_SECONDS = 2e-6


@define
class FakeMachine:
    """A clock whose seconds follow from the work of a trial; nothing is run."""

    rates: dict[str, float] = field(
        factory=lambda: {
            "float32": 100e9,
            "bfloat16": 400e9,
            "float64": 50e9,
            STREAM: 20e9,
            ATTENTION: 80e9,
            CONVOLUTION: 150e9,
            "to host": 5e9,
            "from host": 4e9,
            BEFORE + "tanh": 3e9,
        }
    )
    """FLOPs or bytes a second by key; a function without one is as fast as a stream."""
    refuses: dict[str, str] = field(factory=dict)
    """What it says to trials of a key."""
    disturbed: int | None = None
    """The round in which everything takes ten times as long."""
    time: float = 0.0
    timed: list[tuple[str, float]] = field(factory=list)
    _rounds: dict[Trial, int] = field(factory=dict)

    def now(self) -> float:
        return self.time

    def seconds(self, trial: Trial) -> float:
        if trial.key in self.refuses:
            raise RuntimeError(self.refuses[trial.key])
        self.timed.append((trial.name, trial.work))
        self._rounds[trial] = self._rounds.get(trial, 0) + 1
        took = self._undisturbed(trial) * (10 if self._rounds[trial] == self.disturbed else 1)
        self.time += took
        return took

    def _undisturbed(self, trial: Trial) -> float:
        if trial.key == OVERHEAD:
            return OVERHEAD_SECONDS
        if trial.key in (FUSED, UNFUSED):
            return 1e-3 if trial.key == UNFUSED else 0.4e-3
        rate = self.rates.get(trial.key, self.rates[STREAM] if trial.key.startswith(BEFORE) else 1e9)
        return OVERHEAD_SECONDS + trial.work / rate
