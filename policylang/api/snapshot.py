"""``policylang.snapshot`` and its inverse: the facts of a graph, written to a file and read back."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from policylang.api.planned_graphs import read_any
from policylang.errors import PolicyGraphError, PolicyWarning
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import graph_error, load, write
from policylang.graph.stages import NO_CHAIN, joined_stages
from policylang.graph.traced_device import ATTENTION_IN_MATMULS, kernel_findings, traced_on
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.shown import counted

if TYPE_CHECKING:
    from policylang.tracing.target_device import Capability, Device, TargetDevice

NOTHING = "APL356"
OTHER_DEVICE = "APL614"


def snapshot(
    subject: Any,
    path: str | os.PathLike[str],
    *,
    device: Device | None = None,
    compute_capability: Capability | None = None,
) -> tuple[Path, ...]:
    """Write the facts of a graph to the file ``path``, and return the files. A plan on it equals one on the graph.

    ``subject`` is a graph module (joint, flat, or the forward or backward graph of a partition), what
    ``policylang.trace_step`` returned, or a model compiled under a policy, its backend or its partitioner, once the
    model has run forward with gradients. If a policy changed the graph, the snapshot is of the graph before. The file
    holds no weights and no code. A model with several graphs becomes several files, in the order of compilation: for
    ``model.graph``, ``model.0.graph`` and so on.

    A list of such objects, or of snapshots, is the stages of a pipeline in their order: their graphs become one, in one
    file.

    With ``device="cuda"``, ``subject`` may also be a function without arguments that calls ``policylang.trace_step``
    and returns the step. The step is traced as a GPU of ``compute_capability`` runs it.

    Warns with ``PolicyWarning`` if the graph holds other kernels than the device that the step trains on. Raises
    ``PolicyGraphError`` for any other ``subject``, if nothing was planned yet, for a graph from a compile cache or of
    another ``device``, and if the file cannot be written.
    """
    target: TargetDevice | None = None
    if device is not None or compute_capability is not None:
        from policylang.tracing.target_device import target_device, tracing_for

        target = target_device(device, compute_capability)
        if isinstance(subject, FunctionType | MethodType):
            with tracing_for(target):
                subject = subject()
    paths, found = write_snapshots(subject, path, target)
    for diagnostic in found:
        message = f"{diagnostic.message} ({diagnostic.code})"
        text = f"{message}: {diagnostic.help}" if diagnostic.help else message
        warnings.warn(text, PolicyWarning, stacklevel=2)
    return paths


def write_snapshots(
    subject: Any, path: str | os.PathLike[str], device: TargetDevice | None
) -> tuple[tuple[Path, ...], tuple[Diagnostic, ...]]:
    """The files, and the warnings about the graphs' kernels. Raises as :func:`snapshot` does."""
    found = facts_of(subject)
    if device is not None:
        others = sorted({each for facts in found for each in traced_on(facts)} - {device.kind})
        if others:
            message = f"the graph was traced on `{others[0]}`, and a snapshot for `{device.kind}` was asked for"
            help = "pass the function that calls `policylang.trace_step`, or trace with "
            help += f'`policylang.trace_step(…, device="{device.kind}")`'
            raise PolicyGraphError([diagnose(OTHER_DEVICE, message, help=help)])
    target = Path(path)
    several = (target.with_name(f"{target.stem}.{number}{target.suffix}") for number in range(len(found)))
    paths = (target,) if len(found) == 1 else tuple(several)
    for facts, each in zip(found, paths, strict=True):
        write(facts, each)
    said = (diagnostic for facts in found for diagnostic in kernel_findings(facts))
    meant = device is not None and device.kind == "cpu"
    return paths, tuple(dict.fromkeys(each for each in said if not (meant and each.code == ATTENTION_IN_MATMULS)))


def load_snapshot(path: str | os.PathLike[str]) -> Facts:
    """Read the facts of a snapshot. Needs no torch. Raises ``PolicyGraphError`` for anything else."""
    if not isinstance(path, str | bytes | os.PathLike):
        message = f"a snapshot is read from its file, and this is a `{type(path).__name__}`"
        raise _nothing(message, "pass the path that `policylang.snapshot` wrote to")
    return load(path)


def facts_of(subject: Any) -> tuple[Facts, ...]:
    """The facts of each graph of an object, in order of compilation; raises as :func:`snapshot` does."""
    from torch import fx

    from policylang.api.apply import TracedStep
    from policylang.backends.path import path_named

    if isinstance(subject, Facts):
        return (subject,)
    if isinstance(subject, str | os.PathLike):
        return (read_any(subject),)
    if isinstance(subject, list | tuple):
        stages = [facts_of(each) for each in subject]
        if (odd := next((number for number, found in enumerate(stages) if len(found) != 1), None)) is not None:
            message = f"stage {odd} has {counted(len(stages[odd]), 'graph')}, and a stage of a pipeline has one"
            raise graph_error(NO_CHAIN, message, "compile each stage whole, with `fullgraph=True`")
        return (joined_stages([facts for (facts,) in stages]),)
    if isinstance(subject, TracedStep):
        subject = subject.gm
    if isinstance(subject, fx.GraphModule):
        return (_of_module(subject),)
    findings = path_named("joint").report(subject)
    if findings is None:
        raise _nothing(
            f"a `{type(subject).__name__}` has no graph to take a snapshot of",
            "pass a graph module, a traced step, a model compiled under a policy, or its backend",
        )
    findings = [found for found in findings if not found.report.half]  # no policy is planned on the others
    if not findings:
        raise _nothing(
            "no graph was planned yet", "run the compiled model forward with gradients first, then take the snapshot"
        )
    findings = list({id(found): found for found in findings}.values())  # blocks that share a graph are one file
    known = [found.facts for found in findings if found.facts is not None]
    if len(known) < len(findings):
        raise _nothing(
            f"{len(findings) - len(known)} of {len(findings)} graphs came from torch's compile cache, where they were "
            "planned by an earlier process",
            "set `torch._inductor.config.force_disable_caches = True`, compile once, and take the snapshot then",
        )
    return tuple(known)


def _of_module(gm: Any) -> Facts:
    """The graph before planning where a policy acted on it; a forward or backward graph of a partition as it is."""
    from policylang.backends.records import applied_plan
    from policylang.graph.collect import collect

    done = applied_plan(gm)
    if done is not None and done.plan.before.kind is GraphKind.FLAT:
        return done.plan.before
    facts = collect(gm)
    return done.plan.before if done is not None and facts.kind is done.plan.before.kind else facts


def _nothing(message: str, help: str) -> PolicyGraphError:
    return PolicyGraphError([diagnose(NOTHING, message, help=help)])
