"""Compares what runs in a graph with its plan, one comparison for all paths, and makes reports of plans and audits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import fsum
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, fields, frozen

from policylang.audit.report import (
    AuditReport,
    DecisionReport,
    Report,
    RewriteReport,
    RuleReport,
    ValuesReport,
    order_account,
)
from policylang.graph.facts import Facts, GraphKind, uncounted_operators
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.shown import did_you_mean, listed, nearest
from policylang.language.syntax import NarrowForm, Policy, Rule
from policylang.planning import value_outcome as outcomes
from policylang.planning.graph_edit import Edit, Edits
from policylang.planning.liveness import SavedForBackward, counted_by_data, with_cost
from policylang.planning.plan import Plan

if TYPE_CHECKING:
    from policylang.planning.plan import OrderPlan


@frozen
class HostCopy:
    """A value that is copied to the host, or narrowed. ``started`` and ``awaited`` are positions."""

    row: int
    """The row of the value; -1 if the plan lacks it."""
    value: str
    host: str
    """The node that returns the copy once it is awaited."""
    started: int
    awaited: int
    fetched: bool
    """Something reads it on the device afterwards."""
    form: NarrowForm | None = None
    """The form that it is narrowed to."""
    widened: frozenset[str] = frozenset()
    """The types that it is widened to."""


@define
class Found:
    """The nodes that run, read off the actual graph. Values are nodes of the planned facts; ``order`` has positions."""

    order: list[str] = field(factory=list)
    begins: int = 0
    """The position of the first backward node."""
    crossing: dict[int, int] = field(factory=dict)
    """Forward values and inputs that the backward reads, recomputation included, by the last position that does."""
    saved: list[int] = field(factory=list)
    """The tensors among these that the forward computes, in graph order."""
    held: dict[int, int] = field(factory=dict)
    """By allocating node, the last position at which the forward, or an output, reads its memory."""
    written: dict[int, int] = field(factory=dict)
    """By allocating node, the last position at which the forward writes its memory in place."""
    recomputed: list[int] = field(factory=list)
    """Recomputed nodes, in execution order, with repetitions."""
    twice: list[int] = field(factory=list)
    """Recomputations beyond the first in one backward region, which is a stretch between two forward operators."""
    redrawn: list[int] = field(factory=list)
    """Recomputations that do not start from the random state of the first run."""
    rewritten: list[int] = field(factory=list)
    """Recomputed operators that write to memory that was not recomputed."""
    random_states: int = 0
    early: list[tuple[str, str]] = field(factory=list)
    """Nodes that run before a node they read, and that node."""
    swapped: dict[str, str] = field(factory=dict)
    """First runs with an effect, to one that runs before them and follows them in the plan."""
    unknown: list[str] = field(factory=list)
    """Nodes that the plan does not have; of a partition, those with an effect."""
    kept_unknown: list[str] = field(factory=list)
    """Forward outputs for the backward that the plan does not have or the backward does not take."""
    places: dict[int, tuple[int, int]] = field(factory=dict)
    """By node that crosses between the two graphs, its output number in one and its input number in the other."""
    copies: list[HostCopy] = field(factory=list)
    unsent: list[str] = field(factory=list)
    """Nodes that copy back a value that is not passed as a copy on the host."""
    unscaled: list[str] = field(factory=list)
    """Nodes that widen something else than a narrow value with its scales."""
    races: list[str] = field(factory=list)
    """Nodes that start, take or read a copy without the wait that makes it safe."""


@frozen
class Audit:
    """The saved and recomputed values of a partition, by node name in graph order, and differences from the plan."""

    saved: tuple[str, ...]
    """Values of the forward kept for the backward; no graph inputs, no symbolic sizes."""
    saved_bytes: int
    """Bytes of distinct storages."""
    recomputed: tuple[str, ...]
    """Forward operators that the backward recomputes."""
    recomputed_bytes: int
    recomputed_flops: int
    forward_flops: int
    random_states: int
    """Generator states kept so that recomputed random operators draw the same numbers."""
    differences: tuple[Diagnostic, ...] = field(default=())
    offloaded: tuple[str, ...] = ()
    """Values that are on the host between their last forward and their first backward use; none of ``saved``."""
    offloaded_bytes: int = 0

    @property
    def agrees(self) -> bool:
        return not self.differences


SAVED_UNPLANNED = "APL401"
NOT_SAVED = "APL402"
RECOMPUTED_UNPLANNED = "APL403"
NOT_RECOMPUTED = "APL404"
NOT_CONNECTED = "APL405"
EFFECT_REPEATED = "APL406"
RANDOM_AGAIN = "APL407"
OUT_OF_ORDER = "APL410"
OFFLOADED_UNPLANNED = "APL411"
NOT_FREED = "APL412"
RACE = "APL413"
OTHER_FORM = "APL420"

_TWICE = "was recomputed more than once for the same part of the backward"
_ALL_PATHS = {
    NOT_CONNECTED: "the graph has a node {node}, which the graph that was planned does not have",
    OUT_OF_ORDER: "{node} runs {found}, which is not the order of the plan",
    RACE: "{node} is part of a copy to the host or back that is not awaited as it has to be",
}


@frozen
class Expected:
    """Nodes of the plan: what may happen, and what has to."""

    may_save: Collection[int]
    must_save: Collection[int]
    may_recompute: Collection[int] = ()
    must_recompute: Collection[int] = ()


@frozen
class Wording:
    """A path's sentences. ``{node}`` differs, ``{found}`` and ``{expected}`` are its actual and planned treatment."""

    sentence: str
    help: str
    """For differences in nodes of the plan."""
    codes: Mapping[str, str] = field(factory=dict)
    """By code, a specific sentence."""
    is_brief: bool = False
    """Leaves out module and line."""

    def of_node(self, code: str, name: str, found: str = "") -> Diagnostic:
        """A difference in a node that the plan may not have."""
        return Diagnostic(code, self._text(code).format(node=f"`{name}`", found=found, expected=""))

    def of_row(self, code: str, plan: Plan, row: int, found: str) -> Diagnostic:
        """A difference in a node of the plan."""
        facts, rule, module = plan.facts, plan.rule_of(row), "" if self.is_brief else plan.facts.modules[row]
        node = f"`{facts.names[row]}` ({facts.targets[row]}){module and f' in {module}'}"
        message = self._text(code).format(node=node, found=found, expected=_planned(plan.decisions[row], rule))
        return Diagnostic(code, message, None if rule is None or self.is_brief else rule.span, self.help)

    def _text(self, code: str) -> str:
        return self.codes.get(code) or _ALL_PATHS.get(code) or self.sentence


def runs_otherwise(
    say: Wording, plan: Plan, expected: Expected, saved: Iterable[int], found: Found
) -> Iterator[Diagnostic]:
    """Values saved, recomputed or placed otherwise than planned. ``saved``: for the backward, host copies included."""
    now, again = frozenset(saved), frozenset(found.recomputed)
    for code, rows, happened in (
        (SAVED_UNPLANNED, now.difference(expected.may_save), "was saved"),
        (NOT_SAVED, frozenset(expected.must_save) - now - found.crossing.keys(), "was not saved"),
        (RECOMPUTED_UNPLANNED, again.difference(expected.may_recompute), "was recomputed"),
        (RECOMPUTED_UNPLANNED, frozenset(found.twice), _TWICE),
        (NOT_RECOMPUTED, frozenset(expected.must_recompute) - again, "was not recomputed"),
        (RANDOM_AGAIN, frozenset(found.redrawn), "draws new random numbers"),
        (EFFECT_REPEATED, frozenset(found.rewritten), "writes a second time"),
    ):
        yield from (say.of_row(code, plan, row, happened) for row in sorted(rows))
    yield from (say.of_node(NOT_CONNECTED, name) for name in found.unknown)
    yield from (say.of_node(OUT_OF_ORDER, name, f"after `{other}`") for name, other in found.swapped.items())


def reads_otherwise(say: Wording, found: Found) -> Iterator[Diagnostic]:
    """Nodes that run before something they read."""
    return (say.of_node(OUT_OF_ORDER, name, f"before `{read}`, which it reads") for name, read in found.early)


def moves_otherwise(
    say: Wording, plan: Plan, found: Found, moved: Mapping[int, HostCopy | None], unplanned: Iterable[str]
) -> Iterator[Diagnostic]:
    """Copies that are not as planned. ``moved``: the nodes that are to wait on the host, with their copies;
    ``unplanned``: the names of nodes that take part in any other copy."""
    yield from (say.of_node(RACE, name) for name in found.races)
    yield from (
        Diagnostic(OTHER_FORM, f"`{name}` widens by other scales than a value was narrowed by")
        for name in found.unscaled
    )
    yield from (say.of_node(OFFLOADED_UNPLANNED, name) for name in unplanned)
    roots = plan.facts.storage_roots
    alive = {roots[row] for row in found.saved}
    for row, copy in moved.items():
        root = roots[row]
        if copy is None:
            yield say.of_row(NOT_FREED, plan, row, f"was not {_outcome(plan, row).moves}")
        else:
            yield from _other_forms(say, plan, row, copy)
            if copy.awaited > found.begins:
                alive.add(root)
        if root in alive or found.held.get(root, -1) > found.begins:
            said = f"was {_outcome(plan, row).word} and is held on the device all the same"
            yield say.of_row(NOT_FREED, plan, row, said)
    for copy in found.copies:
        written = found.written.get(roots[copy.row], -1) if copy.row >= 0 else -1
        if written > copy.started:
            late = f"before `{found.order[written]}`, which writes to what it copies"
            yield say.of_node(OUT_OF_ORDER, found.order[copy.started], late)


def _other_forms(say: Wording, plan: Plan, row: int, copy: HostCopy) -> Iterator[Diagnostic]:
    """Values that are kept in another form than was planned, with that form."""
    decision, dtype = plan.decisions[row], plan.facts.dtypes[row]
    if decision is None or copy.form != decision.form:
        found = "was copied to the host" if copy.form is None else f"was narrowed to {copy.form.text}"
        yield say.of_row(OTHER_FORM, plan, row, found)
    for other in sorted(copy.widened - {dtype}):
        yield say.of_row(OTHER_FORM, plan, row, f"was {dtype} and is widened to {other}")


def _outcome(plan: Plan, row: int) -> outcomes.Outcome:
    decision = plan.decisions[row]
    return outcomes.KEPT if decision is None else decision.outcome


def _planned(decision: outcomes.Decision | None, rule: Rule | None) -> str:
    if decision is None:
        return "nothing of it: it is no forward value"
    verb = decision.outcome.phrase if decision.action is None else decision.word.replace("_", " ", 1)
    if rule is not None:
        return f"{verb} (`{rule.text}`, {rule.source})"
    return f"{verb} ({decision.reason or decision.why.value})"


def summary(
    plan: Plan,
    found: Found,
    differences: tuple[Diagnostic, ...],
    *,
    saved: Sequence[int],
    offloaded: Sequence[int] = (),
) -> Audit:
    facts, again = plan.facts, sorted(found.recomputed)
    kept = {outcome: tuple(rows) for outcome, rows in outcomes.saved_as(saved, plan.decisions).items()}
    needs = SavedForBackward({**SavedForBackward.of((), again, offloaded).rows, **kept})
    cost = with_cost(needs, facts, plan.block_of, len(plan.block_names))
    return Audit(
        saved=names(facts, saved),
        saved_bytes=cost.saved_bytes,
        recomputed=names(facts, dict.fromkeys(again)),
        recomputed_bytes=cost.recomputed_bytes,
        recomputed_flops=cost.recomputed_flops,
        forward_flops=cost.forward("flops")[0],
        random_states=found.random_states,
        offloaded=names(facts, offloaded),
        offloaded_bytes=cost.offloaded_bytes,
        differences=differences,
    )


def names(facts: Facts, rows: Iterable[int]) -> tuple[str, ...]:
    return tuple(facts.names[row] for row in rows)


_MOST_NAMES = 4


class DecidedValues(dict[str, "DecisionReport"]):
    """With several graphs: ``layers.3/mm_3``, or by the number of its graph, ``3/mm_3``, if that has no name.

    ``[…]``, ``in`` and ``get`` also take the name alone, ``mm_3``, or with the end of a block's path, where one graph
    alone has such a value or where all that have it decide alike; for a name that is decided differently, ``in`` is
    False. Otherwise it is a dictionary of the full names.
    """

    def __missing__(self, name: str) -> DecisionReport:
        """Raises ``KeyError`` that names the values it may be, or those that are spelled nearly so."""
        by_graph = self._of_short_name(name)
        if not by_graph:
            known = self if "/" in str(name) else (full.rpartition("/")[2] for full in self)
            help_ = did_you_mean(nearest(str(name), known)) or f"the report has {len(self):,} values"
            raise KeyError(f"no forward value is called `{name}`; {help_}")
        if len(set(by_graph.values())) > 1:
            said: dict[DecisionReport, list[str]] = {}
            for full, decision in by_graph.items():
                said.setdefault(decision, []).append(full)
            ways = (f"{decision.action} {listed(names, _MOST_NAMES)}" for decision, names in said.items())
            raise KeyError(f"`{name}` is decided differently in {len(by_graph)} graphs: {'; '.join(ways)}")
        return next(iter(by_graph.values()))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or len(set(self._of_short_name(name).values())) == 1

    def get(self, name: str, default: Any = None, /) -> Any:
        if name not in self:
            return default
        return self[name]

    def _of_short_name(self, name: object) -> dict[str, DecisionReport]:
        """The values that it may be, by their full names."""
        if not isinstance(name, str):
            return {}
        graph, _, value = name.rpartition("/")
        graphs = dict.fromkeys(full.rpartition("/")[0] for full in self)
        near = (each for each in graphs if not graph or f".{each}".endswith(f".{graph}"))
        own = super().__contains__
        return {full: self[full] for each in near if own(full := f"{each}/{value}")}


_SUMMED = tuple(each.name for each in fields(RuleReport) if each.name not in ("source", "text"))


def combined(reports: Iterable[Report]) -> Report:
    """The graphs of one model as one report. A rule's account is the sum of its accounts."""
    seen = Counter[str]()
    found: list[Report] = []
    for report in reports:  # a block that has several variants has a number from the second on
        seen[report.label] += 1
        again = report.label and seen[report.label] > 1
        found.append(evolve(report, label=f"{report.label}#{seen[report.label]}") if again else report)
    graphs = tuple(found)
    if len(graphs) == 1:
        return graphs[0]
    names = [graph.label or str(number) for number, graph in enumerate(graphs)]

    def each(name: str) -> list[Any]:
        return [getattr(graph, name) for graph in graphs]

    together: dict[str, Any] = {
        **{name: sum(each(name)) for name in ("forward_nodes", "blocks", "undecided", "forward_flops")},
        **{name: _summed_values(each(name), names) for name in ("saved", "recomputed", "offloaded")},
        **{name: _counts(each(name)) for name in ("uncounted", "uncounted_recomputed")},
        **{name: tuple(chain.from_iterable(each(name))) for name in ("rewrites", "orders", "expectations", "code")},
        **{name: tuple(dict.fromkeys(chain.from_iterable(each(name)))) for name in ("warnings", "notes")},
    }
    return Report(
        policy=", ".join(dict.fromkeys(each("policy"))),
        decisions=DecidedValues(
            {
                f"{graph_name}/{name}": decision
                for graph_name, graph in zip(names, graphs, strict=True)
                for name, decision in graph.decisions.items()
            }
        ),
        rules=_summed_rules(graphs),
        undecided_fate=graphs[0].undecided_fate,
        undecided_saved_bytes=_sum(each("undecided_saved_bytes")),
        audit=_joined(each("audit"), names),
        device=", ".join(dict.fromkeys(filter(None, each("device")))) or None,
        forward_seconds=_sum(each("forward_seconds")),
        from_cache=all(each("from_cache")),
        graphs=graphs,
        **together,
    )


def _joined(audits: Sequence[AuditReport | None], names: Sequence[str]) -> AuditReport | None:
    places = [name if not name.isdecimal() else f"graph {name}" for name in names]
    there = [(place, audit) for place, audit in zip(places, audits, strict=True) if audit is not None]
    if not there:
        return None
    differences = tuple(f"{place}: {difference}" for place, audit in there for difference in audit.differences)
    return AuditReport(all(audit.agrees for _, audit in there), differences)


def _summed_values(parts: Sequence[ValuesReport | None], names: Sequence[str]) -> ValuesReport | None:
    there = [(graph, values) for graph, values in zip(names, parts, strict=True) if values is not None]
    if not there:
        return None
    return ValuesReport(
        tuple(f"{graph}/{name}" for graph, values in there for name in values.names),
        sum(values.bytes for _, values in there),
        sum(values.flops for _, values in there),
        _sum(values.seconds for _, values in there),
    )


def _summed_rules(graphs: Sequence[Report]) -> tuple[RuleReport, ...]:
    """Graphs of one policy have the same rules in the same order; parts of a model may follow different policies."""
    by_rule: dict[tuple[str, int, str, str], list[RuleReport]] = {}
    for graph in graphs:
        for number, account in enumerate(graph.rules):
            by_rule.setdefault((graph.policy, number, account.source, account.text), []).append(account)
    return tuple(
        RuleReport(source, text, **{name: _sum(getattr(each, name) for each in accounts) for name in _SUMMED})
        for (_, _, source, text), accounts in by_rule.items()
    )


def _counts(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in parts:
        total.update(each)
    return dict(sorted(total.items()))


def _sum(figures: Iterable[float | None]) -> Any:
    """The sum of the figures there are; None where there is none."""
    there = [figure for figure in figures if figure is not None]
    return sum(there) if there else None


_ROUNDING = "sums are taken in another order: equal up to rounding, not bitwise"
_HALVES = (GraphKind.FORWARD, GraphKind.BACKWARD)


def plan_report(plan: Plan) -> Report:
    """The report on a graph that is planned and not partitioned: decisions and rules; of half a step its rewrites."""
    # buckets of a joint graph are made on its forward and backward graph
    report = _report(plan, None, plan.order if plan.facts.kind is not GraphKind.JOINT else None)
    if plan.facts.kind not in _HALVES:
        return report
    operators = sum(op == "call_function" and plan.facts.owners[row] == row for row, op in enumerate(plan.facts.ops))
    return evolve(
        report, half=plan.facts.kind.value, operators=operators, forward_nodes=0, blocks=0, decisions={}, undecided=0
    )


def partition_report(
    plan: Plan, audit: Audit, halves: Mapping[str, Edits] | None = None, orders: Mapping[str, Plan] | None = None
) -> Report:
    """The report on a graph that was split, or rematerialised, with the findings of the audit. ``halves``: later
    rewrites of the ``forward`` and the ``backward``; ``orders``: the plans of reordered graphs."""
    report = _report(plan, audit, plan.order if plan.facts.kind is GraphKind.FLAT else None)
    later = (rewrite_reports(plan.policy, edits, half) for half, edits in (halves or {}).items())
    ordered = (order_account(made, half) for half, made in (orders or {}).items())
    rewrites = report.rewrites + tuple(each for half in later for each in half)
    return evolve(report, rewrites=rewrites, orders=report.orders + tuple(each for each in ordered if each is not None))


def _report(plan: Plan, audit: Audit | None, order: OrderPlan | None = None) -> Report:
    """``order``: its result on the graph itself."""
    facts = plan.facts
    owned = [row for row in facts.forward if facts.owners[row] == row]
    again = [facts.index[name] for name in audit.recomputed] if audit else []
    times = plan.shown_times
    seconds = None if times is None else times.seconds
    notes = [_sentence(each) for each in plan.diagnostics if each.severity is Severity.NOTE]
    if plan.untold is not None:  # why a policy that names a device has no times
        notes.append(f"no times: {_sentence(plan.untold)}")
    amounts: dict[str, list[Any]] = {}
    recomputed = None
    if audit is not None:
        saved, offloaded = ([facts.index[name] for name in names] for names in (audit.saved, audit.offloaded))
        # memory of several rules' values counts for the first in graph order
        amounts = {
            "saved_bytes": _by_rule(plan, zip(saved, outcomes.saved_bytes(facts, saved, plan.decisions), strict=True)),
            "recomputed_flops": _by_rule(plan, ((row, facts.flops[row]) for row in again)),
            "offloaded_bytes": _by_rule(
                plan, zip(offloaded, outcomes.ON_HOST.kept_bytes(facts, offloaded), strict=True)
            ),
            "narrowed_bytes": _by_rule(
                plan, ((row, outcomes.narrowed_by(facts, row, plan.decisions[row])) for row in saved)
            ),
        }
        if seconds is not None:
            amounts["recomputed_seconds"] = _by_rule(plan, ((row, seconds[row]) for row in again), 0.0)
        took = None if seconds is None else fsum(seconds[row] for row in again)
        recomputed = ValuesReport(audit.recomputed, audit.recomputed_bytes, audit.recomputed_flops, took)
        # an eager block reports what its calls held
        hinted = counted_by_data(facts, saved) if plan.checkpoints is None else ""
        notes += [f"saved counts {hinted}"] if hinted else []
    return Report(
        policy=plan.policy.name,
        forward_nodes=len(owned),
        blocks=len(plan.block_names),
        decisions=_decisions(plan),
        rules=tuple(
            RuleReport(
                source=outcome.rule.source,
                text=outcome.rule.text,
                matched=len(outcome.matched),
                decided=len(outcome.decided),
                overridden=sum(outcome.overridden_by.values()),
                kept_by_user=outcome.kept_by_user,
                **{name: by_rule[index] for name, by_rule in amounts.items()},
            )
            for index, outcome in enumerate(plan.rules)
        ),
        undecided=sum((by := plan.decisions[row]) is not None and by.why is outcomes.Why.UNDECIDED for row in owned),
        undecided_fate=plan.undecided,
        saved=ValuesReport(audit.saved, audit.saved_bytes) if audit else None,
        recomputed=recomputed,
        offloaded=ValuesReport(audit.offloaded, audit.offloaded_bytes) if audit else None,
        forward_flops=audit.forward_flops if audit else sum(facts.flops[row] for row in facts.forward),
        undecided_saved_bytes=audit.saved_bytes - sum(amounts["saved_bytes"]) if audit else None,
        rewrites=rewrite_reports(plan.policy, plan.edits if order is None else plan.edits.followed_by(order.edits)),
        orders=tuple(filter(None, (order_account(plan),))),
        expectations=plan.expectations,
        warnings=tuple(_sentence(d) for d in plan.diagnostics if d.severity is Severity.WARNING),
        notes=tuple(notes),
        audit=AuditReport(audit.agrees, tuple(map(_sentence, audit.differences))) if audit else None,
        digest=plan.digest,
        uncounted=uncounted_operators(facts, facts.forward) or {},
        uncounted_recomputed=uncounted_operators(facts, again) or {},
        device=None if times is None else times.device.name,
        forward_seconds=None if seconds is None else fsum(seconds[row] for row in facts.forward),
    )


def _decisions(plan: Plan) -> dict[str, DecisionReport]:
    """One object a distinct decision, as the plan has it: a graph may have a million nodes."""
    known: dict[outcomes.Decision, DecisionReport] = {}
    found: dict[str, DecisionReport] = {}
    for row in plan.facts.forward:
        planned = plan.decisions[row]
        if planned is None:
            continue
        if planned not in known:
            rule = plan.rule_of(row)
            known[planned] = DecisionReport(planned.word, rule.source if rule else None, planned.reason)
        found[plan.facts.names[row]] = known[planned]
    return found


def _by_rule(plan: Plan, costs: Iterable[tuple[int, Any]], zero: float = 0) -> list[Any]:
    """The sums of the costs of nodes, by the rule that decided them."""
    amounts: list[Any] = [zero] * len(plan.rules)
    for row, amount in costs:
        planned = plan.decisions[row]
        if planned is not None and planned.rule is not None:
            amounts[planned.rule] += amount
    return amounts


def _sentence(diagnostic: Diagnostic) -> str:
    where = f"{diagnostic.span.location}: " if diagnostic.span else ""
    return f"{where}{diagnostic.message} ({diagnostic.code})"


def rewrite_reports(policy: Policy, edits: Edits, half: str = "") -> tuple[RewriteReport, ...]:
    """One account per line. ``half``: the graph of a partition; there, lines without an effect are left out."""
    found = []
    for index, statement in enumerate(policy.rewrites):
        mine = edits.of(index)
        if half and not mine.done:
            continue
        left = () if half else mine.refused
        found.append(
            RewriteReport(
                source=statement.span.location,
                text=" ".join(statement.span.text.split()),
                half=half,
                done=mine.count,
                gone=sum(edit.fewer_collectives for edit in mine.done),
                ranks=max((edit.proof.ranks for edit in mine.done), default=0),
                proven=not any(edit.proof.assumed for edit in mine.done),
                notes=_notes(mine.done),
                left=left,
            )
        )
    return tuple(found)


def _notes(done: Sequence[Edit]) -> tuple[str, ...]:
    """Each once, in the order of their first appearance."""
    said: list[str] = []
    for edit in done:
        assumed = edit.proof.assumed and f"assumed: {edit.proof.assumed}"
        said += (edit.note, assumed, "" if edit.proof.exact else _ROUNDING)
    return tuple(dict.fromkeys(filter(None, said)))
