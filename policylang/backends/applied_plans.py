"""Records of applied plans, and the graphs that the compile backends have compiled.

A plan is kept by graph module, as findings for reports and the cache sidecar, and in PyTorch's structured trace.
Modules that share their code share the compiled graph: the blocks of a model are mostly one graph, called once per
block. The parameters of a call identify the module.
"""

from __future__ import annotations

import logging
import weakref
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field, frozen
from torch import fx

from policylang.audit.order import CodeAudit
from policylang.audit.outcome import Audit, partition_report, plan_report
from policylang.audit.report import NO_GRADIENTS, AuditReport, Report, order_figures
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts
from policylang.graph.phases import ModulePaths, raw_path
from policylang.graph.snapshot import dump
from policylang.language.plain_data import OWN
from policylang.language.shown import as_page, counted, format_quantity
from policylang.language.syntax import Bucket, Policy
from policylang.planning import statement_errors
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import Plan
from policylang.planning.statement_errors import Complaint
from policylang.torch_compat.compilers import is_tracing, trace_artifact
from policylang.torch_compat.distributed import gathered_parameters


@frozen(eq=False)
class AppliedPlan:
    path: str
    plan: Plan
    audit: Audit | None = None
    """None where the graph is only prepared, so that what it saves cannot be read off it yet."""
    seconds: Mapping[str, float] = field(factory=dict)
    """By stage, in the order they ran."""
    halves: Mapping[str, Edits] = field(factory=dict)
    """The edits made in the ``forward`` and in the ``backward`` of a partition."""
    orders: Mapping[str, Plan] = field(factory=dict)
    """The plans of the forward and the backward graph, where scheduling lines were applied to them."""
    without_backward: bool = False
    """True if it is a graph that no gradient is computed through."""


_applied: WeakKeyDictionary[fx.GraphModule, AppliedPlan] = WeakKeyDictionary()
_audited: WeakKeyDictionary[fx.GraphModule, AppliedPlan] = WeakKeyDictionary()
_checkpoints: WeakKeyDictionary[fx.GraphModule, Sequence[Policy]] = WeakKeyDictionary()


def remember(done: AppliedPlan, *modules: fx.GraphModule) -> None:
    """Keep what was done, to be asked for by the graph, or by the forward or backward graph of its partition."""
    kept = _applied if done.audit is None else _audited
    for module in modules:
        kept[module] = done


def applied_plan(gm: fx.GraphModule) -> AppliedPlan | None:
    """The plan that was last applied to a graph: audited, or else prepared."""
    return last_audited(gm) or _applied.get(gm)


def last_audited(gm: fx.GraphModule) -> AppliedPlan | None:
    """The audited plan of a graph, or of the joint graph that it was split from."""
    return _audited.get(gm)


def plan_of(gm: fx.GraphModule) -> Plan | None:
    """The plan that a graph was last prepared for."""
    found = _applied.get(gm)
    return None if found is None else found.plan


def remember_checkpoints(gm: fx.GraphModule, policies: Sequence[Policy]) -> None:
    """Keep what our checkpoints follow in the model that a graph was traced from."""
    _checkpoints[gm] = tuple(policies)


def checkpoints_of(gm: fx.GraphModule) -> Sequence[Policy]:
    """The policies that our checkpoints follow in the model that a graph was traced from."""
    return _checkpoints.get(gm, ())


@frozen
class Findings:
    complaints: tuple[Complaint, ...]
    """Errors of this graph that another graph of the model may answer."""
    report: Report
    facts: Facts | None = field(default=None, repr=False, metadata={OWN: True})
    """The facts of the graph as given, for snapshots; None where an earlier process planned it."""
    rewritten: Facts | None = field(default=None, repr=False, metadata={OWN: True})
    """The facts of the graph that the report is about, with all that ``fuse`` and ``collapse`` made."""


def without_gradients(policy: Policy) -> Policy:
    """The lines that hold on a graph without gradients: rewrites of collectives in place. None must find something."""
    rewrites = tuple(evolve(each, optional=True) for each in policy.rewrites if not isinstance(each, Bucket))
    nothing: dict[str, Any] = {"rules": (), "undecided": None, "expectations": (), "scheduling": ()}
    return evolve(policy, **nothing, rewrites=rewrites, prefetch_offloaded=None)


def findings_of(done: AppliedPlan) -> Findings:
    """The findings that are kept of an applied plan."""
    plan, audit = done.plan, done.audit
    report = plan_report(plan) if audit is None else partition_report(plan, audit, done.halves, done.orders)
    if done.without_backward:
        report = evolve(report, half=NO_GRADIENTS, audit=AuditReport(True))  # edits that come out otherwise are errors
    # a copy: what planning has worked out on the facts meanwhile is not kept with them
    given = evolve(plan.before)
    complaints = statement_errors.complaints(plan.policy, plan.diagnostics)
    return Findings(complaints, report, given, given if plan.facts is plan.before else evolve(plan.facts))


def respelled(findings: Findings, policy: Policy) -> Findings:
    """Findings of an earlier process, with the spans and the spelling of the rules of ``policy``, whose layout may have
    changed. Raises ``ValueError`` where they are of another policy."""
    report = findings.report
    if report.half:
        policy = without_gradients(policy)
    pairs = list(zip(report.rules, policy.rules, strict=True))
    moved = {account.source: rule.source for account, rule in pairs}
    decisions = {
        name: evolve(decision, rule=moved.get(decision.rule, decision.rule) if decision.rule else None)
        for name, decision in report.decisions.items()
    }
    first = [account for account in report.rewrites if not account.half]  # one a line, in their order
    now = {account.source: line.span.location for account, line in zip(first, policy.rewrites, strict=True)}
    orders = []
    for order in report.orders:
        lines = zip(order.lines, (*policy.buckets, *policy.scheduling), strict=True)
        orders.append(evolve(order, lines=tuple(evolve(each, source=line.span.location) for each, line in lines)))
    rewrites = tuple(evolve(each, source=now.get(each.source, each.source)) for each in report.rewrites)
    rules = tuple(evolve(account, source=rule.source, text=rule.text) for account, rule in pairs)
    report = evolve(report, rewrites=rewrites, orders=tuple(orders), rules=rules, decisions=decisions, from_cache=True)
    return evolve(findings, report=report)


log = logging.getLogger("policylang")


def announce(done: AppliedPlan) -> None:
    """Log what was done to a graph: INFO has one line a graph, DEBUG the report and how long each stage took; with
    ``TORCH_TRACE`` set, artifacts go into torch's trace. A joint graph is announced when it is split, not when it is
    only prepared. Nothing is worked out where nobody listens."""
    prepared = done.path == "joint" and done.audit is None
    level = logging.DEBUG if prepared else logging.INFO
    traces = is_tracing() and not prepared
    if not traces and not log.isEnabledFor(level):
        return
    report = findings_of(done).report
    nodes, names = counted(len(done.plan.facts), "node"), done.plan.block_names
    is_block = done.path == "eager" and names
    _log(report, level, f"{names[0]} of {nodes}" if is_block else f"a {done.plan.facts.kind.value} graph of {nodes}")
    if log.isEnabledFor(logging.DEBUG):
        took = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in done.seconds.items())
        log.debug("%s%s", report, f"\nseconds     {took}" if took else "")
    if traces:
        trace_artifact("policylang_report", "json", report.to_json)
        trace_artifact("policylang_report_text", "string", lambda: str(report))
        trace_artifact("policylang_plan_page", "string", lambda: as_page(done.plan))
        trace_artifact("policylang_snapshot", "string", lambda: _snapshot(done))


def announce_cached(report: Report) -> None:
    """Log a graph that a compile cache had: its plan was made by an earlier process."""
    _log(report, logging.INFO, "a graph from the compile cache")
    log.debug("%s", report)
    if is_tracing():
        trace_artifact("policylang_report", "json", report.to_json)
        trace_artifact("policylang_report_text", "string", lambda: str(report))


def _log(report: Report, level: int, graph: str) -> None:
    if not log.isEnabledFor(level):
        return
    found = [counted(report.operators, "operator") if report.half else counted(report.forward_nodes, "forward value")]
    amounts = ((report.saved, "saved"), (report.recomputed, "recomputed"), (report.offloaded, "offloaded"))
    found += [
        f"{format_quantity(each.bytes, 'bytes')} in {counted(len(each), 'value')} {word}"
        for each, word in amounts
        if each
    ]
    if report.recomputed:
        seconds = report.recomputed.seconds
        time = f" in {format_quantity(seconds, 'seconds')} on {report.device}" if seconds else ""
        found.append(f"{format_quantity(report.recomputed.flops, 'flops')} again{time}")
    gone = sum(rewrite.gone for rewrite in report.rewrites)
    found += [f"{counted(gone, 'collective')} fewer"] if gone else []
    figures = order_figures(report.orders)
    found += [counted(int(buckets), "bucket")] if (buckets := figures.get("buckets")) else []
    if "exposed_seconds" in figures and "exposed_seconds_as_traced" in figures:
        before, after = (format_quantity(figures[f"exposed_seconds{end}"], "seconds") for end in ("_as_traced", ""))
        found.append(f"exposed {before} -> {after}")
    found += [counted(len(report.warnings), "warning")] if report.warnings else []
    if report.audit is not None:
        found.append("audit agrees" if report.audit.agrees else "audit differs")
    log.log(level, "%s on %s: %s", report.policy, graph, ", ".join(found))


def _snapshot(done: AppliedPlan) -> str:
    """The snapshot as base64, or the reason why it is too large for a file."""
    try:
        return b64encode(dump(done.plan.before)).decode("ascii")
    except PolicyGraphError as error:
        return str(error)


_MOST_PLACES = 3

_Instance = tuple["weakref.ref[torch.Tensor]", ...]
"""The parameters that a graph was called with at once: those of one module."""


@define(eq=False)
class CompiledGraph:
    """One graph of Dynamo's and what the policy decided on it."""

    number: int
    """In order of compilation, from 0."""
    operators: int
    """The number of operators of Dynamo's graph."""
    places: tuple[str, ...] = ()
    """The first few modules that its operators belong to."""
    findings: tuple[Findings, ...] = ()
    """One for each partition, several where torch partitions regions; of a graph without gradients, its rewrites."""
    from_cache: bool = False
    """Inductor had it in its caches; what is known of it is in the sidecar."""
    sharded_aside: bool = False
    """True if ``fully_shard`` gathers its weights around it."""
    code: CodeAudit | None = field(default=None, repr=False)
    """The audit of its generated code, if the policy orders and Inductor compiles."""
    _instances: dict[tuple[int, ...], _Instance] = field(factory=dict, repr=False)
    """By the ``id`` of each of its parameters, the modules that it was called for; some may have died since."""
    _positions: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def kind(self) -> Literal["training", "inference"]:
        """``inference``: no gradient is computed through it, so there was nothing to decide about values."""
        return "training" if any(not found.report.half for found in self.findings) else "inference"

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(found.report for found in self.findings)

    @property
    def label(self) -> str:
        """The name of the graph in errors: ``graph 1 (34 operators, in layers.0, norm)``."""
        place = f", in {', '.join(self.places)}" if self.places else ""
        return f"graph {self.number} ({self.operators} operators{place})"

    def note_call(self, arguments: Sequence[Any]) -> None:
        """Remember which parameters it is called with: that is what ties a graph to the modules it runs for."""
        if self._positions is None:
            found = enumerate(arguments)
            self._positions = tuple(at for at, each in found if isinstance(each, torch.nn.Parameter))
        if not self._positions:
            return
        own = [arguments[at] for at in self._positions]
        key = tuple([id(each) for each in own])
        known = self._instances.get(key)
        if known is None or known[0]() is not own[0]:  # an `id` is reused once its object has died
            self._instances = {one: refs for one, refs in self._instances.items() if _is_alive(refs)}
            self._instances[key] = tuple(weakref.ref(each) for each in own)

    def instances(self, parameters: Mapping[int, torch.Tensor] | None = None) -> list[frozenset[int]]:
        """The ``id`` of every parameter of each living module that it was called for; with ``parameters``, by ``id``,
        of those that were called with one of these."""
        return [
            frozenset(key)
            for key, refs in self._instances.items()
            if _is_alive(refs) and (parameters is None or any(parameters.get(id(ref())) is ref() for ref in refs))
        ]


def _is_alive(refs: _Instance) -> bool:
    return all(ref() is not None for ref in refs)


@frozen(eq=False)
class GraphUse:
    """A graph of a model's, and how many modules of the model run it in a step."""

    graph: CompiledGraph
    modules: int = 1


def described(gm: fx.GraphModule, *, number: int, root: str) -> CompiledGraph:
    """A graph as it comes from Dynamo. To be called before it is compiled, which may change it."""
    nodes = [node for node in gm.graph.nodes if node.op.startswith("call_")]
    return CompiledGraph(number, len(nodes), _places(nodes, root))


def of_backend(graphs: Sequence[CompiledGraph]) -> tuple[GraphUse, ...]:
    """All graphs of a backend. One without parameters, or that has not run yet, counts once."""
    return tuple(GraphUse(graph, max(1, len(graph.instances()))) for graph in graphs)


def of_model(backends: Iterable[Sequence[CompiledGraph]], model: torch.nn.Module) -> tuple[GraphUse, ...]:
    """The graphs of each backend, earliest first, that were called with a parameter of ``model`` or what FSDP gathers
    for one; without the modules that later backends compiled anew."""
    parameters = {id(each): each for each in (*model.parameters(), *gathered_parameters(model))}
    kept: list[GraphUse] = []
    later: frozenset[int] = frozenset()
    for graphs in reversed(list(backends)):
        found = [(graph, graph.instances(parameters)) for graph in graphs]
        current = [(graph, [each for each in instances if not each <= later]) for graph, instances in found]
        kept[:0] = [GraphUse(graph, len(instances)) for graph, instances in current if instances]
        later = later.union(*(each for _, instances in found for each in instances))
    return tuple(kept)


def _places(nodes: Iterable[fx.Node], root: str) -> tuple[str, ...]:
    paths = ModulePaths(root)
    raw = dict.fromkeys(paths.add(raw_path(node.meta)) for node in nodes)
    table = paths.table()
    found = list(dict.fromkeys(_place(table[path]) for path in raw if table[path]))
    return (*found[:_MOST_PLACES], "…") if len(found) > _MOST_PLACES else tuple(found)


def _place(path: str) -> str:
    """Down to the first number: ``model.layers.0.self_attn.q_proj`` is in ``model.layers.0``."""
    parts = path.split(".")
    number = next((position for position, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1]) if number is not None else path
