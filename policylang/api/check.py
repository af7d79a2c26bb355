"""Checks policy files, by themselves or on snapshots of graphs: what ``policylang check`` prints, as data.

Needs no torch, no model and no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import field, frozen

from policylang.api.devices import DeviceLike, device_of
from policylang.api.load import PolicyLike, operators_at_hand, operators_in
from policylang.language.diagnostics import Diagnostic, Severity, Source, is_error
from policylang.language.files import policy_files
from policylang.language.loader import Loaded, load_policy, load_source
from policylang.language.operators import OperatorTable
from policylang.language.public_names import SELDOM_IN_GRAPHS
from policylang.language.syntax import Policy

if TYPE_CHECKING:
    from policylang.api.planned_graphs import GraphLike, PathName
    from policylang.planning.plan import ExpectationOutcome, Plan

_CANNOT_BE_READ = {"APL103", "APL104", "APL152", "APL153", "APL355", "APL416", "APL515"}


@frozen
class CheckResult:
    """The diagnostics of one or more policy files, file by file, each in the order of its text.

    On snapshots: those of the snapshots first; of a file first what is wrong with its text, then, graph by graph, what
    is wrong between it and the graph.
    """

    files: tuple[str, ...]
    """The files that were checked, of a folder each one below it; a policy that was loaded already by its name."""
    diagnostics: tuple[Diagnostic, ...]
    """What is wrong, in the order that is said above."""
    graphs: tuple[str, ...] = ()
    """The snapshots that could be read."""
    plans: tuple[Plan, ...] = field(default=(), repr=False)
    """Of each file that can be read on each graph, file by file."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The device profiles that times were worked out from."""
        return tuple(dict.fromkeys(plan.shown_times.device.name for plan in self.plans if plan.shown_times is not None))

    @property
    def expectations(self) -> tuple[tuple[str, ExpectationOutcome], ...]:
        """Every expectation on every graph: the graph's name, and what came of it."""
        names = [name for _ in range(len(self.plans) // max(len(self.graphs), 1)) for name in self.graphs]
        return tuple(
            (name, outcome) for name, plan in zip(names, self.plans, strict=True) for outcome in plan.expectations
        )

    @property
    def errors(self) -> int:
        """How many of the diagnostics are errors."""
        return sum(map(is_error, self.diagnostics))

    @property
    def warnings(self) -> int:
        """How many of them are warnings."""
        return sum(diagnostic.severity is Severity.WARNING for diagnostic in self.diagnostics)

    @property
    def unreadable(self) -> bool:
        """Whether one of the files itself could not be read; an include that is missing is an error of its file."""
        return any(d.span is None and d.code in _CANNOT_BE_READ for d in self.diagnostics)


def check(
    *paths: PolicyLike | Source,
    graph: GraphLike | Sequence[GraphLike] = (),
    path: PathName | None = None,
    one_model: bool = False,
    device: DeviceLike | None = None,
) -> CheckResult:
    """Check policy files, or bundled policies by their bare names. A folder stands for every ``.apl`` file below it.

    Args:
        graph: snapshots (see ``policylang.snapshot``), or facts that are loaded already, to plan each policy on: rules
            that match nothing or decide nothing, expectations, values that cannot be recomputed.
        path: ``"joint"`` to plan as ``policylang.backend`` does, ``"flat"`` as ``policylang.apply`` does on a traced
            step, ``"eager"`` as ``policylang.checkpoint_model`` does, and so on: what that path refuses is an error,
            without a graph what it refuses of any. By default what each graph is.
        one_model: whether the snapshots are the graphs of one model, where a rule has to match in one of them.
        device: the device that times are worked out for, as :func:`policylang.load_device` takes it, or what that
            returned; by default the one that a policy's ``device`` line names. A name that there is not raises
            ``PolicyError``.

    Operators are looked up in the bundled manifest, in the graphs, and, where torch is loaded, in torch's registry too.
    A ``Source`` is a text that was read already. Of a ``Policy``, whose text was checked when it was loaded, only what
    is wrong between it and the graphs is said.

    It never raises for what is in a policy or a graph, for a file of theirs that is not there, or for what is none:
    that is a diagnostic.
    """
    sources = [each for path in paths for each in _sources(path)]
    files = tuple(map(_name, sources))
    profile = device_of(device)
    given = [graph] if not isinstance(graph, Sequence) or isinstance(graph, str) else graph
    if not given:
        operators = operators_at_hand()
        alone = [_loaded(each, operators) for each in sources]
        return CheckResult(files, tuple(_once(found for each in alone for found in _of_any_graph(each, path))))
    from policylang.api.planned_graphs import (  # planning, which a check of the text can do without
        on_graph,
        read_graphs,
    )

    graphs, problems = read_graphs(given)
    operators = operators_at_hand(met=dict.fromkeys(name for facts in graphs.values() for name in operators_in(facts)))
    found = list(problems)  # a graph says itself what it holds
    plans: list[Plan] = []
    for each in (_loaded(each, operators) for each in sources):
        found.extend(said for said in each.diagnostics if not (graphs and said.code == SELDOM_IN_GRAPHS))
        if each.policy is not None and graphs:
            made, more = on_graph(each.policy, graphs, path, one_model=one_model, device=profile)
            plans.extend(made)
            found.extend(more)
    return CheckResult(files, tuple(_once(found)), tuple(graphs), tuple(plans))


def _sources(path: PolicyLike | Source) -> Sequence[PolicyLike | Source]:
    return policy_files(os.fsdecode(path)) if isinstance(path, str | os.PathLike) else [path]


def _name(each: PolicyLike | Source) -> str:
    if isinstance(each, Source | Policy):
        return each.name
    return each if isinstance(each, str) else f"<{type(each).__name__}>"


def _loaded(each: PolicyLike | Source, operators: OperatorTable) -> Loaded:
    if isinstance(each, Policy):
        return Loaded(each, ())
    if isinstance(each, Source):
        return load_source(each, None, operators=operators)
    return load_policy(each, operators=operators)


def _of_any_graph(each: Loaded, path: PathName | None) -> Sequence[Diagnostic]:
    if path is None or each.policy is None:
        return each.diagnostics
    from policylang.api.planned_graphs import refused_of_any_graph  # planning, which a text alone can do without

    return (*each.diagnostics, *refused_of_any_graph(each.policy, path))


def _once(diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
    """Without repetitions: two files that include the same faulty one report its faults once."""
    return dict.fromkeys(diagnostics)
