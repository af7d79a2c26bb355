"""Checking policy files, by themselves or on snapshots of graphs: what ``policylang check`` prints, as data.

Needs no torch, no model and no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from attrs import evolve, field, frozen

from policylang.backends import deferred
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts
from policylang.graph.snapshot import UNREADABLE, load
from policylang.language.codes import diagnose, is_error
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.loader import load_policy
from policylang.language.syntax import Policy
from policylang.loading import operators_at_hand
from policylang.planning.conflicts import conflicts
from policylang.planning.paths import FLAT, JOINT, capabilities_for
from policylang.planning.plan import Capabilities, Plan
from policylang.planning.planner import plan

SUFFIX = ".apl"
DEFERRED = "APL315"
_CANNOT_BE_READ = {"APL103", "APL104", UNREADABLE}

PathName = Literal["joint", "flat"]
PATHS: dict[PathName, Capabilities] = {"joint": JOINT, "flat": FLAT}
"""By the word for each way of carrying a policy out: under ``torch.compile``, or on a traced step."""
GraphLike = str | os.PathLike[str] | Facts


@frozen
class CheckResult:
    """The diagnostics of one or more policy files, file by file, each in the order of its text.

    On snapshots: those of the snapshots first; of a file first what is wrong with its text, then, graph by graph, what
    is wrong between it and the graph.
    """

    files: tuple[str, ...]
    diagnostics: tuple[Diagnostic, ...]
    graphs: tuple[str, ...] = ()
    """The snapshots that could be read."""
    plans: tuple[Plan, ...] = field(default=(), repr=False)
    """Of each file that can be read on each graph, file by file."""

    @property
    def errors(self) -> int:
        return sum(map(is_error, self.diagnostics))

    @property
    def warnings(self) -> int:
        return sum(diagnostic.severity is Severity.WARNING for diagnostic in self.diagnostics)

    @property
    def unreadable(self) -> bool:
        """Whether one of the files itself could not be read; an include that is missing is an error of its file."""
        return any(d.span is None and d.code in _CANNOT_BE_READ for d in self.diagnostics)


def check(
    *paths: str | os.PathLike[str],
    graph: GraphLike | Sequence[GraphLike] = (),
    path: PathName | None = None,
    one_model: bool = False,
) -> CheckResult:
    """Check policy files, or bundled policies by their bare names. A folder stands for every ``.apl`` file below it.

    Args:
        graph: snapshots (see ``policylang.snapshot``), or facts that are loaded already, to plan each policy on: rules
            that match nothing or decide nothing, expectations, values that cannot be recomputed.
        path: ``"joint"`` to plan as ``policylang.backend`` does, ``"flat"`` as ``policylang.apply`` does on a traced
            step; by default what each graph is.
        one_model: whether the snapshots are the graphs of one model, where a rule has to match in one of them.

    Operators are looked up in the bundled manifest and, where torch is loaded, in torch's registry too.

    Never raises for what is in a file, or for a file that is not there: that is a diagnostic.
    """
    files = tuple(name for each in paths for name in _files(os.fspath(each)))
    graphs, found = _graphs([graph] if isinstance(graph, str | os.PathLike | Facts) else graph)
    plans: list[Plan] = []
    for file in files:
        loaded = load_policy(file, operators=operators_at_hand())
        found.extend(loaded.diagnostics)
        if loaded.policy is not None and graphs:
            made = [_plan(loaded.policy, facts, path) for _, facts in graphs]
            plans.extend(made)
            found.extend(_on_graphs(loaded.policy, [name for name, _ in graphs], made, one_model))
    return CheckResult(files, tuple(_once(found)), tuple(name for name, _ in graphs), tuple(plans))


def _plan(policy: Policy, facts: Facts, path: PathName | None) -> Plan:
    return plan(policy, facts, capabilities_for(facts.kind) if path is None else PATHS[path])


def _graphs(graphs: Sequence[GraphLike]) -> tuple[list[tuple[str, Facts]], list[Diagnostic]]:
    """The graphs by name, and what kept the others from being read."""
    found: list[tuple[str, Facts]] = []
    problems: list[Diagnostic] = []
    for number, graph in enumerate(graphs):
        if isinstance(graph, Facts):
            found.append((f"graph {number}", graph))
            continue
        try:
            found.append((os.fsdecode(graph), load(graph)))
        except PolicyGraphError as error:
            problems.extend(error.diagnostics)
    return found, problems


def _on_graphs(policy: Policy, names: Sequence[str], plans: Sequence[Plan], one_model: bool) -> Iterable[Diagnostic]:
    waiting = deferred.DEFERRED_CODES if one_model and len(plans) > 1 else ()
    for name, made in zip(names, plans, strict=True):
        for diagnostic in findings(made):
            if diagnostic.code in waiting and is_error(diagnostic):
                continue
            if len(plans) > 1:
                diagnostic = evolve(diagnostic, details=(f"on `{name}`", *diagnostic.details))
            yield diagnostic
    if waiting:
        complaints = [deferred.complaints(policy, made.diagnostics) for made in plans]
        yield from deferred.shared_by_all(policy, list(zip(names, complaints, strict=True)), root="layers.0")


def findings(made: Plan) -> tuple[Diagnostic, ...]:
    """All that a check says of a policy on a graph."""
    return (*made.diagnostics, *conflicts(made), *_unsettled(made))


def _unsettled(made: Plan) -> Iterable[Diagnostic]:
    for expectation, outcome in zip(made.policy.expectations, made.expectations, strict=True):
        if outcome.status == "deferred":
            message = f"`{outcome.text}` cannot be told from a snapshot: {outcome.found}"
            yield diagnose(DEFERRED, message, expectation.span)


def _files(path: str) -> list[str]:
    """The files a path stands for, in order. An empty folder stands for itself, so that someone says so."""
    if not os.path.isdir(path):  # nor is the empty path, which `Path` takes for the current folder
        return [path]
    found = sorted(str(file) for file in Path(path).rglob(f"*{SUFFIX}") if file.is_file())
    return found or [path]


def _once(diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
    """Without repetitions: two files that include the same faulty one report its faults once."""
    return dict.fromkeys(diagnostics)
