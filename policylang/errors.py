"""The exceptions of the public surface. Each carries the diagnostics it was raised for."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.language.diagnostics import Diagnostic, one_cause
from policylang.language.shown import as_text


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
