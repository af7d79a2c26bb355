"""``policylang.report``: the report on a graph, a model, a backend or a partitioner."""

from __future__ import annotations

from typing import Any

from torch import fx

from policylang.audit.summary.combine import combined
from policylang.audit.summary.report import Report
from policylang.backends import refusals
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.path import findings_on
from policylang.backends.torch_compile.backend import PolicyBackend
from policylang.errors import PolicyGraphError
from policylang.torch_compat.dynamo import backend_of


def report_on(subject: Any) -> Report:
    """See :func:`policylang.report`."""
    found = findings_on(subject)
    if found is None:
        no_policy = isinstance(subject, fx.GraphModule)
        raise PolicyGraphError([refusals.no_policy() if no_policy else refusals.nothing_to_report(subject)])
    if not found:
        compiled = isinstance(subject, PolicyBackend) or isinstance(backend_of(subject), PolicyBackend)
        raise PolicyGraphError([refusals.nothing_decided(checkpointed=bool(sessions_of(subject)), compiled=compiled)])
    return combined([each.report for each in found])
