"""Reads graphs in whichever form they have, plans policies on them, says what does not fit, and writes snapshots."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from attrs import evolve

from policylang.errors import PolicyGraphError, PolicyMeaningError, PolicyWarning, check_argument, file_of
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import FOREIGN, MAGIC, graph_error, load, write
from policylang.graph.stages import NO_CHAIN, joined_stages
from policylang.graph.textual import GraphBuilder, read_graph
from policylang.graph.traced_device import ATTENTION_IN_MATMULS, kernel_findings, traced_on
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, Source, bounded, diagnose, heeded, is_error, one_cause
from policylang.language.shown import counted, did_you_mean, nearest
from policylang.language.statements import SCHEDULES, format_policy
from policylang.language.syntax import ExpectTotal, Pipeline, Policy
from policylang.planning import statement_errors
from policylang.planning.capabilities import PLANNED, PathName, capabilities_for, path_entry
from policylang.planning.decisions.rule_warnings import conflicts
from policylang.planning.inspection.costly import costly_lines
from policylang.planning.pipelines import NO_PIPELINE
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.refusals import PATH_CANNOT

if TYPE_CHECKING:
    from policylang.tracing.target_device import Capability, Device, TargetDevice

OTHER_DEVICE = "APL614"
_GZIP = b"\x1f\x8b"
_RECORDED = re.compile(rb"\s*\{")
_WRITTEN = re.compile(r"^[ \t]*%\w+[ \t]*=", re.MULTILINE)
_MOST_TEXT = 1 << 24
_NO_TORCH = "a recorded graph is read with torch; `policylang import` makes a snapshot of it where there is one"


def read_any(graph: Any) -> Facts:
    """The facts of a graph, or of a file. Raises ``PolicyGraphError`` for anything else, and for a model with several
    graphs."""
    found = facts_of(graph)
    if len(found) > 1:
        message = f"the model has {len(found)} graphs, and one is asked for"
        help = "write them with `policylang.snapshot`, and name the file of the one that decides"
        raise PolicyGraphError([diagnose(SEVERAL, message, help=help)])
    return found[0]


def facts_of(subject: Any) -> tuple[Facts, ...]:
    """The facts of each graph of a file or an object, in order of compilation; raises as :func:`policylang.snapshot`
    does."""
    if isinstance(subject, Facts):
        return (subject,)
    if isinstance(subject, str | bytes | os.PathLike):
        return (_of_file(subject),)
    if isinstance(subject, list | tuple):
        if not subject:
            raise nothing("a list of no stages has no graph", "pass the graph of each stage of the pipeline, in order")
        stages = [facts_of(each) for each in subject]
        if (odd := next((number for number, found in enumerate(stages) if len(found) != 1), None)) is not None:
            message = f"stage {odd} has {counted(len(stages[odd]), 'graph')}, and a stage of a pipeline has one"
            raise graph_error(NO_CHAIN, message, "compile each stage whole, with `fullgraph=True`")
        return (joined_stages([facts for (facts,) in stages]),)
    from torch import fx, nn

    from policylang.backends.path import path_named

    gm = subject if isinstance(subject, nn.Module) else getattr(subject, "gm", subject)  # a traced step has one
    if isinstance(gm, fx.GraphModule):
        return (_of_module(gm),)
    findings = path_named("joint").report(subject)
    if findings is None:
        raise nothing(
            f"a `{type(subject).__name__}` has no graph to take a snapshot of",
            "pass a graph module, a traced step, a model compiled under a policy, or its backend",
        )
    findings = [found for found in findings if not found.report.half]  # no policy is planned on the others
    if not findings:
        help = "run the compiled model forward with gradients first, then take the snapshot"
        raise nothing("no graph was planned yet", help)
    findings = list({id(found): found for found in findings}.values())  # blocks that share a graph are one file
    known = [found.facts for found in findings if found.facts is not None]
    if len(known) < len(findings):
        raise nothing(
            f"{len(findings) - len(known)} of {len(findings)} graphs came from torch's compile cache, where they were "
            "planned by an earlier process",
            "set `torch._inductor.config.force_disable_caches = True`, compile once, and take the snapshot then",
        )
    return tuple(known)


def _of_module(gm: Any) -> Facts:
    """The graph before planning where a policy acted on it; a forward or backward graph of a partition as it is."""
    from policylang.backends.applied_plans import applied_plan
    from policylang.graph.collect import collect

    done = applied_plan(gm)
    if done is not None and done.plan.before.kind is GraphKind.FLAT:
        return done.plan.before
    facts = collect(gm)
    return done.plan.before if done is not None and facts.kind is done.plan.before.kind else facts


def nothing(message: str, help: str) -> PolicyGraphError:
    return PolicyGraphError([diagnose(NOTHING, message, help=help)])


def checked_path(path: str | None) -> None:
    """Raises ``PolicyMeaningError`` for the name of a path that there is not."""
    if path is not None and path not in PLANNED:
        help = f"the paths are {', '.join(PLANNED)}"
        raise PolicyMeaningError([diagnose(NO_PATH, f"there is no path `{path}`", help=help)])


def _of_file(path: str | bytes | os.PathLike[str]) -> Facts:
    """The facts of a graph file. Torch is imported only for a recorded graph, which names operators and shapes; torch
    knows their costs. Raises ``PolicyGraphError`` for a file that cannot be read or that is none of the three."""
    path = os.fsdecode(path)
    if not os.path.isfile(path):  # a pipe is read once
        return load(path)
    try:
        with open(path, "rb") as file:
            head = file.read(_MOST_TEXT + 1)
    except (OSError, ValueError):  # the snapshot's reader says why
        return load(path)
    if head.startswith(_GZIP) or _RECORDED.match(head):
        return _recorded(path)
    source = None if head.startswith(MAGIC) or len(head) > _MOST_TEXT else _text(path, head)
    if source is None:
        return load(path)
    facts, problems = read_graph(source)
    if facts is None:
        raise PolicyGraphError(problems)
    return facts


def _text(path: str | os.PathLike[str], data: bytes) -> Source | None:
    """The text of a file that holds a line of a graph (``%x = …``); None of any other."""
    try:
        text = data.decode("utf-8-sig")
    except ValueError:
        return None
    return Source(os.fsdecode(path), text.replace("\r\n", "\n")) if _WRITTEN.search(text) else None


def _recorded(path: str | os.PathLike[str]) -> Facts:
    try:
        import torch  # noqa: F401
    except Exception as error:  # not there, or broken in whatever way
        message = f"`{os.fsdecode(path)}` is not a snapshot of a graph, and torch cannot be imported: {error}"
        raise graph_error(FOREIGN, message, _NO_TORCH) from None
    from policylang.graph.recorded import recorded_facts

    return recorded_facts(path)


DEFERRED, NOTHING, SEVERAL, NO_PATH = "APL315", "APL356", "APL630", "APL633"


def read_graphs(graphs: Sequence[Any]) -> tuple[dict[str, Facts], tuple[Diagnostic, ...]]:
    """The graphs by name, in order, and the diagnostics of those that cannot be read."""
    found: dict[str, Facts] = {}
    problems: list[Diagnostic] = []
    for number, graph in enumerate(graphs):
        name = os.fsdecode(graph) if isinstance(graph, str | bytes | os.PathLike) else f"graph {number}"
        try:
            several = facts_of(graph)
        except PolicyGraphError as error:
            problems.extend(each.found_in(name) for each in error.diagnostics)
            continue
        names = [name] if len(several) == 1 else [f"{name}.{part}" for part in range(len(several))]
        found.update(zip(names, several, strict=True))
    return found, tuple(problems)


def on_graph(
    policy: Policy,
    graphs: Mapping[str, Facts],
    path: PathName | None,
    *,
    one_model: bool,
    device: DeviceProfile | None = None,
    pipeline: Pipeline | None = None,
) -> tuple[tuple[Plan, ...], tuple[Diagnostic, ...]]:
    made = scheduled(policy, pipeline)
    if isinstance(made, Diagnostic):
        return (), (made,)
    policy = made
    able = [capabilities_for(facts.kind, path) for facts in graphs.values()]
    plans = tuple(plan(policy, facts, each, device=device) for facts, each in zip(graphs.values(), able, strict=True))
    weighed = [one_cause(heeded(costly_lines(*each))) for each in zip(plans, able, strict=True)]
    return plans, bounded(tuple(_diagnostics(policy, list(graphs), plans, weighed, one_model)))


def scheduled(policy: Policy, pipeline: Pipeline | None = None) -> Policy | Diagnostic:
    """The policy with the order of its pipeline's steps, as torch has it, to be planned on a whole model; the error
    where the schedule does not take these numbers. ``pipeline`` takes the place of the policy's."""
    pipeline = pipeline or policy.pipeline
    if pipeline is None or (pipeline.known and pipeline is policy.pipeline):
        return policy
    made = pipeline if pipeline.known else with_order(pipeline)
    if isinstance(made, Diagnostic):
        return made
    policy = evolve(policy, pipeline=made)
    return evolve(policy, canonical=format_policy(policy))


def read_pipeline(
    schedule: str | None, stages: int | str | None, microbatches: int | None
) -> Pipeline | Diagnostic | None:
    """The pipeline that is asked for, as ``--schedule``, ``--stages`` and ``--microbatches`` do; None where nothing is
    given. ``stages``: how many, or the first block of each: ``"0,6,14,22"``."""
    if (schedule, stages, microbatches) == (None, None, None):
        return None
    if schedule is None or stages is None or microbatches is None:
        message = "a pipeline needs `--schedule`, `--stages` and `--microbatches`"
        return diagnose(NO_PIPELINE, message, help="such as `--schedule 1f1b --stages 4 --microbatches 16`")
    if schedule not in SCHEDULES:
        near = did_you_mean(nearest(schedule, SCHEDULES)) or f"the schedules are {', '.join(SCHEDULES)}"
        return diagnose(NO_PIPELINE, f"there is no schedule `{schedule}`", help=near)
    check_argument("microbatches", microbatches, isinstance(microbatches, int), "a whole number")
    parts = str(stages).split(",")
    numbers = [int(each) for each in parts if each.strip().isdecimal()]
    firsts = tuple(numbers) if len(parts) > 1 else ()
    count = len(firsts) or (numbers[0] if numbers else 0)
    help = "write `--stages 4`, or `--stages 0,6,14,22`"
    if len(numbers) < len(parts) or not count:
        return diagnose(NO_PIPELINE, f"`--stages {stages}` names no stages", help=help)
    if [*firsts] != sorted({*firsts}):
        return diagnose(NO_PIPELINE, f"the blocks of `--stages {stages}` do not come one behind the other", help=help)
    if microbatches < 1:
        message = f"a pipeline has at least one microbatch, not {microbatches}"
        return diagnose(NO_PIPELINE, message, help="write `--microbatches 16`")
    if firsts and firsts[0]:
        message = f"the first stage begins with block 0, not with block {firsts[0]}"
        return diagnose(NO_PIPELINE, message, help=f"write `0,{stages}`")
    return Pipeline(schedule, count, microbatches, firsts)


def with_order(pipeline: Pipeline) -> Pipeline | Diagnostic:
    """The pipeline with the order of its steps, as torch has it; the error where the schedule does not take these
    numbers."""
    span = pipeline.span if pipeline.span.source.text else None
    try:
        from policylang.torch_compat.distributed import pipeline_order

        order = pipeline_order(pipeline.schedule, pipeline.stages, pipeline.microbatches)
    except (ImportError, AttributeError) as error:
        message = f"the order of `{pipeline.schedule}` is torch's, and this torch does not tell it: {error}"
        return diagnose(NO_PIPELINE, message, span, help="install torch 2.13 or newer")
    except (ValueError, AssertionError) as error:
        numbers = (
            f"{counted(pipeline.stages, 'stage')} of {counted(pipeline.microbatches, 'microbatch', 'microbatches')}"
        )
        said = " ".join(str(error).split())
        message = f"`{pipeline.schedule}` does not take {numbers}: {said[:1].lower()}{said[1:].rstrip('.')}"
        return diagnose(NO_PIPELINE, message, span, help="choose other numbers of stages and microbatches")
    return evolve(pipeline, order=order)


def refused_of_any_graph(policy: Policy, path: PathName) -> tuple[Diagnostic, ...]:
    """The errors of a policy on a path whatever the graph. Raises ``ValueError`` for a path that there is not."""
    made = plan(policy, GraphBuilder().facts(GraphKind.JOINT), path_entry(path).capabilities)
    return tuple(each for each in made.diagnostics if each.code == PATH_CANNOT)


def _diagnostics(
    policy: Policy,
    names: Sequence[str],
    plans: Sequence[Plan],
    weighed: Sequence[tuple[Diagnostic, ...]],
    one_model: bool,
) -> Iterable[Diagnostic]:
    waiting = statement_errors.DEFERRED_CODES if one_model and len(plans) > 1 else ()
    for name, made, costly in zip(names, plans, weighed, strict=True):
        for diagnostic in (*findings(made), *costly):
            if diagnostic.code in waiting and is_error(diagnostic):
                continue
            yield diagnostic if len(plans) == 1 else evolve(diagnostic, details=(f"on `{name}`", *diagnostic.details))
    if waiting:
        complaints = [
            (name, statement_errors.complaints(policy, made.diagnostics))
            for name, made in zip(names, plans, strict=True)
        ]
        yield from statement_errors.shared_by_all(policy, complaints, root="layers.0")


def findings(made: Plan) -> tuple[Diagnostic, ...]:
    """All findings of a check of a policy on a graph."""
    deferred = []
    for expectation, planned in zip(made.policy.expectations, made.expectations, strict=True):
        untimed = made.times is None and isinstance(expectation, ExpectTotal) and expectation.of_time
        if planned.status == "deferred" and not untimed:  # that there is no device is an error already
            message = f"`{planned.text}` cannot be checked on a snapshot: {planned.found}"
            deferred.append(diagnose(DEFERRED, message, expectation.span))
    return one_cause(heeded((*kernel_findings(made.facts), *made.diagnostics, *conflicts(made), *deferred)))


# --- snapshots ------------------------------------------------------------------------------------------------------


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
