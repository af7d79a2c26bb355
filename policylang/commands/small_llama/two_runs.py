"""The comparison of two training runs, as data, text and JSON."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from policylang.audit.report import Report
from policylang.commands.small_llama.training import Settings, TrainingRun, differences
from policylang.language.wording import figure
from policylang.report.layout import table

_MOST_DIFFERENCES = 10


@frozen
class RunComparison:
    settings: Settings
    without: TrainingRun
    with_policy: TrainingRun
    report: Report
    torch_version: str

    @property
    def differences(self) -> list[str]:
        """What is not bitwise equal; empty if all is well."""
        return differences(self.without, self.with_policy)

    @property
    def agrees(self) -> bool:
        """Bitwise equal, and the compiled graphs do what the policy says."""
        return not self.differences and self.report.audit is not None and self.report.audit.agrees

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.settings.text,
            "torch": self.torch_version,
            "steps": self.settings.steps,
            "without": _run(self.without),
            "with": _run(self.with_policy),
            "bitwise_equal": not self.differences,
            "differences": self.differences,
            "report": self.report.to_dict(),
        }

    def __str__(self) -> str:
        return "\n\n".join((str(self.report), self._figures(), self._verdict()))

    def _figures(self) -> str:
        a, b = self.without, self.with_policy
        rows = [
            ("", f"without ({a.name})", f"with {b.name}", "ratio"),
            _row("kept for the backward", a.memory.saved, b.memory.saved),
            _row("peak of a step", a.memory.peak, b.memory.peak),
            _row("the fastest step", a.step_seconds, b.step_seconds),
        ]
        return f"measured on a {self.settings.text}, torch {self.torch_version}\n\n" + table(rows, right=range(1, 4))

    def _verdict(self) -> str:
        losses = [float.fromhex(step.loss) for step in self.with_policy.steps]
        gradients = len(self.with_policy.steps[0].gradients)
        if not self.differences:
            return (
                f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}: "
                f"every loss and all {gradients} gradients of every step are bitwise equal"
            )
        rest = len(self.differences) - _MOST_DIFFERENCES
        lines = [*self.differences[:_MOST_DIFFERENCES], *([f"and {rest} more"] if rest > 0 else [])]
        return "\n  ".join(["NOT bitwise equal:", *lines])


def _run(run: TrainingRun) -> dict[str, Any]:
    return {
        "name": run.name,
        "saved_bytes": run.memory.saved,
        "peak_bytes": run.memory.peak,
        "step_seconds": run.step_seconds,
        "losses": [float.fromhex(step.loss) for step in run.steps],
    }


def _row(label: str, a: float, b: float) -> tuple[str, ...]:
    def write(value: float) -> str:
        return figure(value, "bytes") if isinstance(value, int) else f"{value * 1000:.0f} ms"

    return label, write(a), write(b), f"{b / a:.2f}×"
