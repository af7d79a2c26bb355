"""Checks policy files, by themselves or on snapshots of graphs: what ``policylang check`` prints, as data.

Needs no torch, no model and no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attrs import evolve

from policylang.api.load import DeviceLike, PolicyLike, device_of, operators_at_hand, operators_in
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.files import policy_files
from policylang.language.loader import Loaded, load_policy, load_source
from policylang.language.operators import OperatorTable
from policylang.language.public_names import SELDOM_IN_GRAPHS
from policylang.language.syntax import Policy
from policylang.report.diagnostics import CheckResult

if TYPE_CHECKING:
    from policylang.api.planned_graphs import GraphLike, PathName
    from policylang.planning.plan import Plan


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
        said = (found.found_in(file) for file, each in zip(files, alone, strict=True) for found in _found(each, path))
        return CheckResult(files, tuple(_once(said)))
    from policylang.api.planned_graphs import (  # planning, which a check of the text can do without
        on_graph,
        read_graphs,
    )

    graphs, problems = read_graphs(given)
    operators = operators_at_hand(met=dict.fromkeys(name for facts in graphs.values() for name in operators_in(facts)))
    found = list(problems)  # a graph says itself what it holds
    plans: list[Plan] = []
    for file, loaded in ((_name(each), _loaded(each, operators)) for each in sources):
        of_file = [said for said in loaded.diagnostics if not (graphs and said.code == SELDOM_IN_GRAPHS)]
        if loaded.policy is not None and graphs:
            made, more = on_graph(loaded.policy, graphs, path, one_model=one_model, device=profile)
            plans.extend(made)
            of_file.extend(more)
        found.extend(each.found_in(file) for each in of_file)
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


def _found(each: Loaded, path: PathName | None) -> Sequence[Diagnostic]:
    if path is None or each.policy is None:
        return each.diagnostics
    from policylang.api.planned_graphs import refused_of_any_graph  # planning, which a text alone can do without

    return (*each.diagnostics, *refused_of_any_graph(each.policy, path))


def _once(diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
    """Drop repetitions: two files that include the same faulty one, or are planned on one graph, report it once."""
    found: dict[Diagnostic, Diagnostic] = {}
    for each in diagnostics:
        found.setdefault(evolve(each, about=""), each)
    return found.values()
