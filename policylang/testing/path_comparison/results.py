"""Plain data of the comparison of the paths: one step on each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, field, frozen

from policylang.audit.summary.report import Report
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.wording import as_text

VERSION = 1
"""Of the plain data."""
_OF_ERRORS = ("code", "message", "help")


@frozen(eq=False)
class Numbers:
    """What one step computed: tensors by name."""

    loss: Any
    gradients: Mapping[str, Any]
    buffers: Mapping[str, Any]
    """As they are after the step."""


@frozen(eq=False)
class PathRun:
    """A path that carried the policy out."""

    numbers: Numbers
    report: Report
    graphs: tuple[tuple[Facts, Report], ...]
    """Of each graph, in order: as it was planned on, and what came of it."""


@frozen(eq=False)
class PathRefusal:
    """A path that did not: why."""

    diagnostics: tuple[Diagnostic, ...] = ()
    """The errors; empty where it was no diagnostic of policylang."""
    error: str = ""
    """``TypeError: …``, where something other than policylang refused."""


@frozen
class Equality:
    """Some tensors of a step, held against those of another run of the step."""

    tensors: int
    differing: tuple[str, ...] = ()
    """The names of those that are not equal to the bit."""
    largest: float = 0.0
    """The largest difference of two elements; infinite where names, shapes or types are not the same."""
    close: bool = True
    """Whether all are within the tolerance that ``torch.testing.assert_close`` has for their type."""

    @property
    def bitwise(self) -> bool:
        return not self.differing


@frozen
class NumbersComparison:
    """The numbers of a path, held against those of the plain model."""

    loss: Equality
    gradients: Equality
    buffers: Equality
    as_without_policy: bool | None = None
    """Whether the path gives the same bits without the policy; None where that was not asked, because the bits are
    those of the plain model."""

    @property
    def bitwise(self) -> bool:
        return self.loss.bitwise and self.gradients.bitwise and self.buffers.bitwise

    @property
    def agrees(self) -> bool:
        """The plain model's bits; or else those of the path without the policy, and within tolerance of the model's."""
        close = self.loss.close and self.gradients.close and self.buffers.close
        return self.bitwise or (close and self.as_without_policy is True)


@frozen
class ValuePlace:
    """Where a value stands in a model, whatever its node is called in a graph."""

    module: str
    operator: str
    shape: tuple[int, ...] | None


@frozen
class PathDecision:
    """What one path does with a value, or with all of one place."""

    action: str
    rule: str | None
    """``file:line``."""
    reason: str = ""
    count: int = 1


@frozen
class PathDifference:
    """A value that paths decide differently."""

    place: ValuePlace
    number: int | None
    """Which of the values of its place, counted from 1; None for all of them, where one path has more than another."""
    sides: dict[str, tuple[PathDecision, ...]]
    """By path. A path whose graph does not have the value is absent."""


@frozen
class PathWork:
    """Calls of an operator that do matrix work, on one path, which does the same with all of them."""

    operator: str
    action: str
    count: int
    flops: int
    uncounted: str = ""
    """The operators whose work is not in :attr:`flops`."""


@frozen
class WorkDifference:
    """A module whose matrix work the paths do by other operators, and not the same of it."""

    module: str
    sides: dict[str, tuple[PathWork, ...]]
    """By path: what it has there that some other path has not. Empty for a path that has none such."""


@frozen
class Beside:
    """Bytes that one path saves, or FLOPs or calls that it recomputes, beside those of the values where every path
    does: why."""

    undecided: int = 0
    """No rule speaks of the value: each path does what it does."""
    graph: int = 0
    """Some other path's graph does not have the value."""
    read: int = 0
    """Decided alike, and some other path does not come to need it for its backward."""
    decided: int = 0
    """Decided otherwise on another path."""

    @property
    def total(self) -> int:
        return self.undecided + self.graph + self.read + self.decided


@frozen
class ValuesAccount:
    """The values of the paths that carried the policy out, one by one."""

    alike: int = 0
    """Values that two paths or more have, decided in the same way on each that has them."""
    undecided: int = 0
    """Values that no rule speaks of and that the paths treat differently."""
    alone: dict[str, dict[str, int]] = field(factory=dict)
    """By path: values that no other path's graph has, counted by operator."""
    differences: tuple[PathDifference, ...] = ()
    common_bytes: int = 0
    """Of the memory that every path saves."""
    saved: dict[str, Beside] = field(factory=dict)
    """By path, in bytes."""
    common_flops: int = 0
    """Of the values that every path recomputes."""
    recomputed: dict[str, Beside] = field(factory=dict)
    """By path, in FLOPs."""
    common_calls: int = 0
    """Of matrix work that every path recomputes."""
    recomputed_calls: dict[str, Beside] = field(factory=dict)
    """By path, in calls of operators that do matrix work, whether or not a FLOP formula counts it."""
    other_work: tuple[WorkDifference, ...] = ()
    same_work: int = 0
    """Modules whose work the paths do by other operators, decided alike about as many operations."""


@frozen(eq=False)
class PathResult:
    """One row of the table."""

    path: str
    ran: PathRun | None = None
    refused: PathRefusal | None = None
    numbers: NumbersComparison | None = None

    @property
    def agrees(self) -> bool:
        """The policy was carried out as planned, and the numbers are right."""
        if self.ran is None or self.numbers is None:
            return False
        audit = self.ran.report.audit
        return self.numbers.agrees and (audit is None or audit.agrees)

    @property
    def offloaded_bytes(self) -> int:
        """What the path moves to the host."""
        moved = None if self.ran is None else self.ran.report.offloaded
        return 0 if moved is None else moved.bytes


@frozen(eq=False)
class Agreement:
    """What :func:`policylang.testing.agree` returns; ``str()`` of it is the table."""

    policy: str
    """Its name."""
    loss: float
    """Of the plain model."""
    gradients: int
    """How many it has."""
    results: tuple[PathResult, ...]
    """A path each: what it decided, kept and computed, or why it refused."""
    account: ValuesAccount
    """Where the decisions of the paths are the same, and where not."""
    torch_version: str

    @property
    def agrees(self) -> bool:
        """Every path carried the policy out, with the right numbers, decided every value that it shares with another
        path as that one does, and where their operators are not the same, decided alike about the same work."""
        decided_alike = not self.account.differences and not self.account.other_work
        return all(result.agrees for result in self.results) and decided_alike

    def __getitem__(self, path: str) -> PathResult:
        return next(result for result in self.results if result.path == path)

    def __str__(self) -> str:
        return as_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON. Bytes and FLOPs are whole numbers; differences of numbers are absolute."""
        account = asdict(self.account)
        return {
            "version": VERSION,
            "policy": self.policy,
            "torch": self.torch_version,
            "agrees": self.agrees,
            "loss": self.loss,
            "gradients": self.gradients,
            "paths": [_path(result) for result in self.results],
            "values": {
                **{name: account[name] for name in ("alike", "undecided", "alone")},
                "differences": [{**each.pop("place"), **each} for each in account["differences"]],
            },
            "saved": {"common_bytes": account["common_bytes"], "beside": account["saved"]},
            "recomputed": {
                "common_flops": account["common_flops"],
                "beside": account["recomputed"],
                "common_calls": account["common_calls"],
                "calls_beside": account["recomputed_calls"],
            },
            "other_work": account["other_work"],
        }


def _path(result: PathResult) -> dict[str, Any]:
    plain: dict[str, Any] = {"path": result.path, "agrees": result.agrees, "refused": None}
    if result.refused is not None:
        errors = [{name: getattr(each, name) for name in _OF_ERRORS} for each in result.refused.diagnostics]
        plain["refused"] = {"diagnostics": errors, "error": result.refused.error}
    if result.ran is not None and result.numbers is not None:
        report = result.ran.report
        assert report.saved is not None  # a path that ran has been partitioned
        assert report.recomputed is not None
        plain |= {
            "saved_bytes": report.saved.bytes,
            "saved_values": len(report.saved),
            "offloaded_bytes": result.offloaded_bytes,
            "recomputed_values": len(report.recomputed),
            "recomputed_flops": report.recomputed.flops,
            "uncounted_operators": report.uncounted_recomputed,
            "numbers": _comparison(result.numbers),
        }
    return plain


def _comparison(numbers: NumbersComparison) -> dict[str, Any]:
    found = asdict(numbers)
    for name in ("loss", "gradients", "buffers"):
        if found[name]["largest"] == float("inf"):
            found[name]["largest"] = None  # JSON has no infinity
    return {"bitwise": numbers.bitwise, **found}
