"""``policylang.load`` and ``policylang.parse``: policies from files and texts, with exceptions for diagnostics."""

from __future__ import annotations

import os
import sys
import warnings

from policylang.errors import PolicyMeaningError, PolicySyntaxError, PolicyWarning
from policylang.language.codes import is_syntax
from policylang.language.resolution.loader import Loaded, load_policy, parse_policy
from policylang.language.resolution.operator_names import OperatorTable
from policylang.language.syntax import Policy
from policylang.report.diagnostics import render_text

PolicyLike = Policy | str | os.PathLike[str]
"""A policy, or the path of one."""


def load(path: str | os.PathLike[str]) -> Policy:
    """Load a policy file, or a bundled policy by its bare name.

    Raises :class:`PolicySyntaxError` if part of the text cannot be read, :class:`PolicyMeaningError` if a name, a
    file or a figure in it is wrong; either carries every diagnostic. Warns with :class:`PolicyWarning`.
    """
    return _policy(load_policy(path, operators=operators_at_hand()))


def policy_of(given: PolicyLike) -> Policy:
    """The policy that is given, loaded if need be; raises and warns as :func:`load` does."""
    return given if isinstance(given, Policy) else load(given)


def parse(text: str, *, name: str = "<policy>") -> Policy:
    """The policy that a text makes; raises and warns as :func:`load` does. ``name`` is what reports call the text."""
    return _policy(parse_policy(text, name=name, operators=operators_at_hand()))


def operators_at_hand() -> OperatorTable:
    """The bundled manifest, and with it the registry of torch, custom operators included, if torch is loaded.

    Importing torch takes seconds, so a check of a policy does not: it asks a torch that is there already.
    """
    if "torch" not in sys.modules:
        return OperatorTable.bundled()
    from policylang.torch_compat.operator_registry import operator_names

    return OperatorTable.bundled(more=operator_names)


def _policy(loaded: Loaded) -> Policy:
    if loaded.policy is None:
        kind = PolicySyntaxError if any(map(is_syntax, loaded.errors)) else PolicyMeaningError
        raise kind(loaded.diagnostics)
    if loaded.diagnostics:
        warnings.warn(render_text(loaded.diagnostics), PolicyWarning, stacklevel=3)
    return loaded.policy
