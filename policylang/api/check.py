"""Checks policy files, by themselves or on snapshots of graphs: what ``policylang check`` prints, as data.

Needs no torch, no model and no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from policylang.api.load import DeviceLike, PolicyLike, device_of, operators_at_hand, operators_in
from policylang.language.diagnostics import Diagnostic, Source, diagnose, left_out
from policylang.language.files import policy_files
from policylang.language.loader import Loaded, load_policy, load_source
from policylang.language.names import SELDOM_IN_GRAPHS
from policylang.language.syntax import Policy
from policylang.report.diagnostics import CheckResult

if TYPE_CHECKING:
    from policylang.api.planned_graphs import GraphLike
    from policylang.planning.capabilities import PathName
    from policylang.planning.plan import Plan


def check(
    *paths: PolicyLike | Source,
    graph: GraphLike | Sequence[GraphLike] = (),
    path: PathName | None = None,
    one_model: bool = False,
    device: DeviceLike | None = None,
    lossless: bool = False,
) -> CheckResult:
    """Check policy files, or bundled policies by their bare names. A folder means every ``.apl`` file below it.

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

    Operators are looked up in the bundled manifest, in the graphs and, if torch is loaded, in torch's registry. A
    ``Source`` is a text in memory. A ``Policy`` was checked when it was loaded: only errors on the graphs are reported.

        lossless: a line after which the backward computes with other bits than the forward made is an error.

    A mistake in a policy or a graph, or a missing file, is a diagnostic: it never raises for them.
    """
    given = [each for path in paths for each in _loaders(path)]
    files = tuple(name for name, _ in given)
    profile = device_of(device)
    on = [graph] if not isinstance(graph, Sequence) or isinstance(graph, str) else graph
    found: list[Diagnostic] = []
    if not on:
        operators = operators_at_hand()
        for name, load in given:
            loaded = load(operators=operators)
            of_file = [*loaded.diagnostics, *_lossy(loaded.policy if lossless else None)]
            if path is not None and loaded.policy is not None:
                from policylang.api.planned_graphs import refused_of_any_graph  # a text alone can do without planning

                of_file += refused_of_any_graph(loaded.policy, path)
            found += (each.found_in(name) for each in of_file)
        return CheckResult(files, tuple(_once(found)))
    from policylang.api.planned_graphs import on_graph, read_graphs

    graphs, problems = read_graphs(on)
    operators = operators_at_hand(met=dict.fromkeys(name for facts in graphs.values() for name in operators_in(facts)))
    found += problems  # a graph file shows its kind itself
    plans: list[Plan] = []
    for name, load in given:
        loaded = load(operators=operators)
        of_file = [said for said in loaded.diagnostics if not (graphs and said.code == SELDOM_IN_GRAPHS)]
        of_file += _lossy(loaded.policy if lossless else None)
        if loaded.policy is not None and graphs:
            made, more = on_graph(loaded.policy, graphs, path, one_model=one_model, device=profile)
            plans += made
            of_file += more
        found += (each.found_in(name) for each in of_file)
    return CheckResult(files, tuple(_once(found)), tuple(graphs), tuple(plans))


def _lossy(policy: Policy | None) -> Iterator[Diagnostic]:
    for rule in () if policy is None else policy.lossy:
        message = f"`{rule.text}` is lossy: the backward computes with other bits than the forward made"
        fixes = [] if rule.tail is None else [left_out(rule.tail)]
        yield diagnose("APL216", message, rule.span, help="save these values as they are", fixes=fixes)


def _loaders(given: PolicyLike | Source) -> list[tuple[str, Callable[..., Loaded]]]:
    """The files that are given by path, and the loader of each."""
    match given:
        case Policy():
            return [(given.name, lambda operators: Loaded(given, ()))]
        case Source():
            return [(given.name, partial(load_source, given, None))]
        case str() | os.PathLike():
            return [(file, partial(load_policy, file)) for file in policy_files(os.fsdecode(given))]
    return [(f"<{type(given).__name__}>", partial(load_policy, given))]  # no policy, which is a diagnostic


def _once(diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
    """Drop repetitions: two files that include the same faulty one, or are planned on one graph, report it once."""
    found: dict[Diagnostic, Diagnostic] = {}
    for each in diagnostics:
        found.setdefault(evolve(each, about=""), each)
    return found.values()
