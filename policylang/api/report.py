"""``policylang.report``: the report on a graph, a model, a backend or a partitioner."""

from __future__ import annotations

from typing import Any

from torch import fx

from policylang.audit.summary.combine import combined
from policylang.audit.summary.report import Report
from policylang.backends import refusals
from policylang.backends.path import findings_on
from policylang.errors import PolicyGraphError


def report_on(subject: Any) -> Report:
    """See :func:`policylang.report`."""
    found = findings_on(subject)
    if found is None:
        no_policy = isinstance(subject, fx.GraphModule)
        raise PolicyGraphError([refusals.no_policy() if no_policy else refusals.nothing_to_report(subject)])
    if not found:
        raise PolicyGraphError([refusals.nothing_decided()])
    return combined([each.report for each in found])
