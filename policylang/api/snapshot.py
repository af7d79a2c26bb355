"""``policylang.snapshot`` and its inverse: the facts of a graph, written to a file and read back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.files.snapshot import load, write
from policylang.language.codes import diagnose

NOTHING = "APL356"


def snapshot(subject: Any, path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the facts of a graph to a file, from which a policy is planned as on the graph; returns what was written.

    ``subject`` is a graph module (joint, flat, or a half of a partition), what ``policylang.trace_step`` returned, or
    a model compiled under a policy, its backend or its partitioner, once the model has run forward with gradients.
    Where a policy has acted on a graph, it is the graph as it was before. ``path`` holds no weights and no code. A
    model of several graphs becomes several files: of ``model.graph``, ``model.0.graph`` and so on, in order of
    compilation.

    Raises ``PolicyGraphError`` for anything else, where nothing was planned yet, where the graph came from a compile
    cache, and where the file cannot be written.
    """
    found = facts_of(subject)
    target = Path(path)
    several = (target.with_name(f"{target.stem}.{number}{target.suffix}") for number in range(len(found)))
    paths = (target,) if len(found) == 1 else tuple(several)
    for facts, each in zip(found, paths, strict=True):
        write(facts, each)
    return paths


def load_snapshot(path: str | os.PathLike[str]) -> Facts:
    """The facts that a snapshot holds. Needs no torch. Raises ``PolicyGraphError`` for a file that is none."""
    return load(path)


def facts_of(subject: Any) -> tuple[Facts, ...]:
    """The facts of each graph that a thing stands for, in order of compilation; raises as :func:`snapshot` does."""
    from torch import fx

    from policylang.api.traced_step import TracedStep
    from policylang.backends.path import path_named

    if isinstance(subject, TracedStep):
        subject = subject.gm
    if isinstance(subject, fx.GraphModule):
        return (_of_module(subject),)
    findings = path_named("joint").report(subject)
    if findings is None:
        raise _nothing(
            f"a `{type(subject).__name__}` has no graph to take a snapshot of",
            "hand over a graph module, a traced step, a model compiled under a policy, or its backend",
        )
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
    """As it was planned on, if it was; a half of a partition as it is."""
    from policylang.backends.graph_registry import carried_out
    from policylang.graph.reading.collect import collect

    done = carried_out(gm)
    if done is not None and done.plan.before.kind is GraphKind.FLAT:
        return done.plan.before
    facts = collect(gm)
    return done.plan.before if done is not None and facts.kind is done.plan.before.kind else facts


def _nothing(message: str, help: str) -> PolicyGraphError:
    return PolicyGraphError([diagnose(NOTHING, message, help=help)])
