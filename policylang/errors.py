"""The exceptions of the public surface. Each carries the diagnostics it was raised for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policylang.language.diagnostics import Diagnostic, diagnose, one_cause
from policylang.language.shown import as_text, shortened


class PolicyError(Exception):
    """The base of everything policylang raises for a mistake in a policy, a graph or their meeting. ``diagnostics`` are
    those it was raised for; ``str()`` prints them with the text they point at."""

    def __init__(self, diagnostics: Sequence[Diagnostic]) -> None:
        self.diagnostics = one_cause(diagnostics)
        super().__init__(as_text(self))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.diagnostics,)


class PolicySyntaxError(PolicyError):
    """The text of a policy cannot be read."""


class PolicyMeaningError(PolicyError):
    """The text can be read and means nothing: an unknown name, a unit that does not fit, a missing file."""


class PolicyMatchError(PolicyError):
    """Policy and graph do not fit: a rule matched nothing, an expectation failed, a value cannot be recomputed."""


class PolicyGraphError(PolicyError):
    """The graph is not one that policylang can act on."""


class PolicyAuditError(PolicyError):
    """The changed graph does not follow the plan."""


class PolicyDivergenceError(PolicyError):
    """Ranks that share a graph decided differently."""


class PolicyWarning(UserWarning):
    """Something in a policy that is allowed and is probably not meant."""


WRONG_ARGUMENT = "APL251"
_LONGEST = 60


def check_argument(name: str, given: Any, fits: bool, wanted: str) -> None:
    """Raises ``PolicyMeaningError`` for an argument of a public function that does not fit; ``wanted`` is what does."""
    if not fits:
        plain = isinstance(given, str | bytes | int | float | None)
        shown = shortened(repr(given), _LONGEST) if plain else f"a `{type(given).__name__}`"
        message = f"`{name}` is {wanted}, and not {f'`{shown}`' if plain else shown}"
        raise PolicyMeaningError([diagnose(WRONG_ARGUMENT, message)])


def check_progress(given: Any) -> None:
    """A function that is called with one text."""
    fits = callable(given)
    try:
        inspect.signature(given).bind("")
    except TypeError:  # of no function, or of one that takes something else
        fits = False
    except ValueError:  # a builtin may tell nobody what it takes
        pass
    check_argument("progress", given, fits, "a function of one text")


def check_flags(**flags: Any) -> None:
    for name, given in flags.items():
        check_argument(name, given, isinstance(given, bool), "True or False")


def is_count(given: Any, least: int = 0) -> bool:
    """A whole number from ``least`` on."""
    return isinstance(given, int) and not isinstance(given, bool) and given >= least


def file_of(name: str, given: Any) -> Path:
    """The file that an argument names. Raises as :func:`check_argument` does for what names none."""
    path = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    named = isinstance(path, str) and "\0" not in path and bool(Path(path).name)
    check_argument(name, given, named, "the path of a file")
    return Path(given)
