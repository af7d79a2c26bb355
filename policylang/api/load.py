"""``policylang.load`` and ``policylang.parse``: policies from files and texts, with exceptions for diagnostics."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING

from policylang.api.devices import DeviceLike, on_device
from policylang.errors import PolicyMeaningError, PolicySyntaxError, PolicyWarning
from policylang.language.diagnostics import is_syntax
from policylang.language.loader import Loaded, load_policy, parse_policy
from policylang.language.operators import OperatorTable
from policylang.language.syntax import Policy
from policylang.report.diagnostics import render_text

if TYPE_CHECKING:
    from policylang.api.planned_graphs import GraphLike
    from policylang.graph.facts import Facts

PolicyLike = Policy | str | os.PathLike[str]
"""A policy, or the path of one."""


def load(path: str | os.PathLike[str], *, graph: GraphLike | None = None, device: DeviceLike | None = None) -> Policy:
    """Load a policy file, or a bundled policy by its bare name.

    ``graph`` is a graph that the policy is for, as :func:`policylang.check` takes it: the operators that it calls are
    known, those of libraries that are not here among them. ``device`` is what times are worked out for, as
    :func:`policylang.load_device` takes it, or what that returned, in place of what the policy's ``device`` line names.

    Raises :class:`PolicySyntaxError` if part of the text cannot be read, :class:`PolicyMeaningError` if a name, a
    file or a figure in it is wrong; either carries every diagnostic. Warns with :class:`PolicyWarning`.
    """
    return on_device(_policy(load_policy(path, operators=operators_at_hand(met=_operators_of(graph)))), device)


def policy_of(given: PolicyLike, device: DeviceLike | None = None) -> Policy:
    """The policy that is given, loaded if need be, on a device; raises and warns as :func:`load` does."""
    return on_device(given if isinstance(given, Policy) else load(given), device)


def parse(
    text: str, *, name: str = "<policy>", graph: GraphLike | None = None, device: DeviceLike | None = None
) -> Policy:
    """The policy that a text makes; raises and warns as :func:`load` does. ``name`` is what reports call the text."""
    made = _policy(parse_policy(text, name=name, operators=operators_at_hand(met=_operators_of(graph))))
    return on_device(made, device)


def operators_at_hand(met: Collection[str] = ()) -> OperatorTable:
    """The bundled manifest, the operators that were met in a graph, and with them the registry of torch, custom
    operators included, if torch is loaded.

    Importing torch takes seconds, so a check of a policy does not: it asks a torch that is there already.
    """
    if "torch" not in sys.modules:
        return OperatorTable.bundled(met=met)
    from policylang.torch_compat.graphs import operator_names

    return OperatorTable.bundled(more=operator_names, met=met)


def _operators_of(graph: GraphLike | None) -> Collection[str]:
    if graph is None:
        return ()
    from policylang.api.planned_graphs import facts_of  # planning, which a policy by itself can do without

    return operators_in(facts_of(graph))


def operators_in(facts: Facts) -> tuple[str, ...]:
    """The operators that a graph calls, in full and in the order of their first calls."""
    return tuple(name for name in dict.fromkeys(facts.targets) if "." in name)


def _policy(loaded: Loaded) -> Policy:
    if loaded.policy is None:
        kind = PolicySyntaxError if any(map(is_syntax, loaded.errors)) else PolicyMeaningError
        raise kind(loaded.diagnostics)
    if loaded.diagnostics:
        warnings.warn(render_text(loaded.diagnostics), PolicyWarning, stacklevel=3)
    return loaded.policy
