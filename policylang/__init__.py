"""policylang: what a training step keeps, recomputes, offloads and re-gathers, in a file."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from policylang.audit.report import Report

_PUBLIC = {
    "apply": "policylang.api.apply",
    "backend": "policylang.api.compile",
    "check": "policylang.api.load",
    "checkpoint_model": "policylang.api.apply",
    "context_fn": "policylang.api.apply",
    "load": "policylang.api.load",
    "load_device": "policylang.api.load",
    "parse": "policylang.api.load",
    "partition": "policylang.api.apply",
    "partitioner": "policylang.api.compile",
    "pass_": "policylang.api.compile",
    "profile_device": "policylang.api.profile_device",
    "recompilable": "policylang.backends.recompilable",
    "CheckResult": "policylang.report.diagnostics",
    "DeviceProfile": "policylang.language.devices.profile",
    "Diagnostic": "policylang.language.diagnostics",
    "Facts": "policylang.graph.facts",
    "Policy": "policylang.language.syntax",
    "Report": "policylang.audit.report",
    "PolicyAuditError": "policylang.errors",
    "PolicyDivergenceError": "policylang.errors",
    "PolicyError": "policylang.errors",
    "PolicyGraphError": "policylang.errors",
    "PolicyMatchError": "policylang.errors",
    "PolicyMeaningError": "policylang.errors",
    "PolicySyntaxError": "policylang.errors",
    "PolicyWarning": "policylang.errors",
    "load_snapshot": "policylang.api.planned_graphs",
    "snapshot": "policylang.api.planned_graphs",
    "TracedStep": "policylang.api.apply",
    "trace_step": "policylang.api.apply",
    "tune": "policylang.api.tune",
    "TunedPolicy": "policylang.tuning.tuned_policy",
    "watch": "policylang.api.watch",
}
"""Public name to the module that has it. Looked up on first use: importing policylang imports nothing else."""

__all__ = sorted([*_PUBLIC, "report"])


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        """Importing the package ``policylang.report`` binds its name in this one: the function keeps the name."""
        if name != "report" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def report(subject: Any) -> Report:
    """Report what a policy decided on a graph or a model, by which line, and what the graphs really save and recompute.

    ``subject`` is a graph that a policy was applied to or that a policy partitioned (its forward or backward graph
    too), a traced step, a model that is compiled or checkpointed under a policy, what ``torch.compile`` returned for a
    model or a function, or what ``policylang.backend`` or ``policylang.partitioner`` returned. A model or function has
    a report once it has run.

    Raises ``PolicyGraphError`` for anything else, and before a policy has decided anything.
    """
    from policylang.api.apply import TracedStep, report_on

    return report_on(subject.gm if isinstance(subject, TracedStep) else subject)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from policylang.language.resources import installed_version

        return installed_version()
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("policylang.report")  # the texts of what is raised and returned
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC, "__version__"})
