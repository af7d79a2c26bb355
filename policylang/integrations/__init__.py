"""Policies inside other trainers, through the hooks that these offer; what their callbacks share is here."""

import warnings
from typing import Any

import policylang
from policylang.errors import PolicyError, PolicyWarning


class ChangedScalars:
    """The numbers of a model's report, when they change. A report that cannot be made never stops a training."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._last, self._missing = prefix, dict[str, int | float](), ""

    def of(self, model: Any) -> dict[str, int | float]:
        """``report(model).scalars()`` where it differs from the last one; nothing before a policy has acted."""
        try:
            found = policylang.report(model).scalars(self._prefix)
        except PolicyError as missing:
            self._missing = str(missing)
            return {}
        last, self._last = self._last, found
        return {} if found == last else dict(found)

    def warn_if_none(self) -> None:
        """At the end of a training that had no report: give the reason."""
        if not self._last:
            warnings.warn(f"no report was logged: {self._missing}", PolicyWarning, stacklevel=3)
