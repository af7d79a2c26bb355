"""``policylang.snapshot`` and its inverse: the facts of a graph, written to a file and read back."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from policylang.api.planned_graphs import facts_of, nothing
from policylang.errors import PolicyGraphError, PolicyWarning, file_of
from policylang.graph.facts import Facts
from policylang.graph.snapshot import load, write
from policylang.graph.traced_device import ATTENTION_IN_MATMULS, kernel_findings, traced_on
from policylang.language.diagnostics import Diagnostic, diagnose

if TYPE_CHECKING:
    from policylang.tracing.target_device import Capability, Device, TargetDevice

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
    target = file_of("path", path)
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
        raise nothing(message, "pass the path that `policylang.snapshot` wrote to")
    return load(path)
