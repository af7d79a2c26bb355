"""The audit of compiled halves: what Inductor's code does, against the order in which the halves were handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import define, field
from torch import fx

from policylang.audit.communication import (
    CommunicationStep,
    between,
    differences,
    from_json,
    steps_of,
    to_json,
)
from policylang.audit.generated_code import read_code
from policylang.audit.summary.report import CodeOrderReport
from policylang.language.diagnostics import Diagnostic, diagnose

CANNOT_READ = "APL347"

HALVES = ("forward", "backward")
_Steps = tuple[CommunicationStep, ...]


@define(eq=False)
class CodeAudit:
    """Of the halves that one graph of Dynamo's was split in."""

    planned: dict[str, list[_Steps]] = field(factory=lambda: {half: [] for half in HALVES})
    """By half, those of each partition, which is one but for regions that torch partitions on their own."""
    found: dict[str, CodeOrderReport] = field(factory=dict)
    """By half, once it is compiled."""

    def note(self, forward: fx.Graph, backward: fx.Graph) -> None:
        """What was planned: to be called when a joint graph is split."""
        for half, graph in zip(HALVES, (forward, backward), strict=True):
            self.planned[half].append(steps_of(graph))

    def reader(self, graph: fx.Graph, *, is_backward: bool) -> Callable[[str], list[Diagnostic]]:
        """From a half as it comes to Inductor, which will change it, to what compares the code that is made of it."""
        return partial(self.check, HALVES[is_backward], arrived=steps_of(graph))

    def check_loaded(self, codes: Iterable[tuple[bool, str]]) -> list[Diagnostic]:
        """Compare the code of halves from a cache, each with whether it is the backward."""
        return [found for is_backward, source in codes for found in self.check(HALVES[is_backward], source)]

    def check(self, half: str, source: str, arrived: Iterable[CommunicationStep] = ()) -> list[Diagnostic]:
        """Compare the code of a half. ``arrived``: its steps as it came to Inductor, which say which partition it is of
        where there are several."""
        candidates, order = self.planned[half], list(arrived)
        planned = next((steps for steps in candidates if list(steps) == order), candidates[-1] if candidates else ())
        operators = {step.operator for step in planned}
        code = read_code(source, operators) if source else ()
        if code is None:
            self.found[half] = CodeOrderReport(half, "not read")
            return [
                diagnose(CANNOT_READ, f"the code of the {half} is not Python, so its order of collectives is not read")
            ]
        differing = list(differences(planned, code, half))
        self.found[half] = _report(half, planned, code, differing)
        return differing

    def reports(self) -> tuple[CodeOrderReport, ...]:
        """In the order in which the halves run."""
        return tuple(
            self.found.get(half) or CodeOrderReport(half, "not compiled") for half in HALVES if any(self.planned[half])
        )

    def to_json(self) -> dict[str, Any]:
        return {half: [to_json(steps) for steps in self.planned[half]] for half in HALVES}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CodeAudit:
        """Raises ``KeyError`` or ``TypeError`` for data that is not what :meth:`to_json` makes."""
        return cls({half: [from_json(steps) for steps in data[half]] for half in HALVES})


def _report(half: str, planned: _Steps, code: _Steps, differing: Sequence[Diagnostic]) -> CodeOrderReport:
    computed = between(code)
    status = "differs" if differing else "as planned"
    wanted = [number for number, products in between(planned).items() if products]
    kernels = {step.name: computed.get(step.number, 0) for step in planned if step.starts and step.number in wanted}
    starts = sum(step.starts for step in code)
    return CodeOrderReport(half, status, starts, len(code) - starts, kernels)
