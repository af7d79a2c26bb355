"""The report on a graph or a model, as plain data: the plan, the actual graphs, the order of collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import fsum
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from policylang.language.plain_data import to_plain
from policylang.language.shown import as_text, counted, format_quantity
from policylang.planning.graph_edit import Refusal
from policylang.planning.plan import ExpectationOutcome

if TYPE_CHECKING:
    from policylang.planning.inspection.communication import StepInOrder
    from policylang.planning.plan import Plan


@frozen
class ReportedLine:
    """A line of the policy that a report accounts for."""

    source: str
    """``file:line``."""
    text: str


@frozen
class ScheduledLine(ReportedLine):
    """The account of one ``bucket``, ``prefetch``, ``delay``, ``overlap`` or ``keep order of`` line."""

    matched: int
    """The number of collectives that it picks."""
    moved: int
    """The collectives that a ``bucket`` line joined; for another line, those that start earlier or are awaited
    later."""
    buckets: int = 0
    """The number of buckets that a ``bucket`` line made."""
    left: dict[str, tuple[str, ...]] = field(factory=dict)
    """Why collectives were left where they are, and which."""


@frozen
class CollectiveAccount:
    """One collective of the graph as it is planned."""

    name: str
    operator: str
    """``all_gather_into_tensor``."""
    group: str
    """Its mesh dimension where one is known, else the name of its process group."""
    block: str
    """Empty outside every block."""
    bytes: int
    """The more of what it is given and what it gives."""
    members: int = 1
    """The number of collectives of the traced graph that it replaces."""
    seconds: float | None = None
    """From start to completion; None without a device."""
    exposed: float | None = None
    """Seconds for which computation waits for it."""
    exposed_by: str | None = None
    """The limiting factor: ``data``, ``limit``, ``group`` or ``order``; None where it is hidden."""


@frozen
class StepTotals:
    """The totals of a graph in one order."""

    collectives: int
    peak: int
    """Bytes alive at most."""
    in_flight: int
    """Bytes of the collectives that are started and not awaited, where they are most."""
    step: float | None = None
    """Seconds; None without a device."""
    exposed: float | None = None
    """The part in which compute waits for a collective or a copy."""


@frozen
class OrderAccount:
    """The order of one graph: the whole planned step, or the order of its forward or backward graph."""

    traced: StepTotals
    """Without scheduling lines."""
    planned: StepTotals
    half: str = ""
    """``forward`` or ``backward`` for what was planned once the graph was split."""
    lines: tuple[ScheduledLine, ...] = ()
    """In the order of planning: buckets, then the others."""
    collectives: tuple[CollectiveAccount, ...] = ()
    bound: float | None = None
    """Seconds that no order can hide."""
    barriers: dict[str, int] = field(factory=dict)
    """Operators that nothing was moved across because nobody knows what they do, and how many calls."""


def order_account(plan: Plan, half: str = "") -> OrderAccount | None:
    """The account of a plan's order; None without scheduling lines, a path that orders, or anything to order."""
    from policylang.planning.inspection.communication import communication  # few policies ask for what it imports

    found = communication(plan)
    if found is None or not found.traced.collectives:
        return None
    return OrderAccount(
        traced=_totals(found.traced),
        planned=_totals(found.planned),
        half=half,
        lines=tuple(
            ScheduledLine(
                source=line.source,
                text=line.text,
                matched=len(line.matched),
                moved=len(line.moved),
                buckets=sum(len(bucket.names) for bucket in line.buckets),
                left=dict(line.left),
            )
            for line in found.lines
        ),
        collectives=tuple(
            CollectiveAccount(
                name=each.name,
                operator=each.operator,
                group=each.group,
                block=each.block,
                bytes=each.bytes,
                members=each.members,
                seconds=None if each.run is None else each.run.end - each.run.start,
                exposed=None if each.run is None else each.run.exposed,
                exposed_by=None if each.run is None or each.run.exposed_by is None else each.run.exposed_by.value,
            )
            for each in found.collectives
        ),
        bound=found.bound,
        barriers=dict(found.barriers),
    )


def _totals(step: StepInOrder) -> StepTotals:
    lanes = step.lanes
    return StepTotals(
        collectives=len(step.collectives),
        peak=step.peak.bytes,
        in_flight=step.in_flight,
        step=None if lanes is None else lanes.step,
        exposed=None if lanes is None else lanes.exposed,
    )


def order_figures(orders: Sequence[OrderAccount]) -> dict[str, int | float]:
    """Sums over whole planned graphs, and the most memory alive and in flight. Without scheduling lines empty."""
    whole = [account for account in orders if not account.half]
    if not whole:
        return {}
    lines = [line for account in whole for line in account.lines]
    return {
        "buckets": sum(line.buckets for line in lines),
        "collectives_joined": sum(line.moved for line in lines if line.buckets),
        "collectives_moved": sum(line.moved for line in lines if not line.buckets),
        **_of_steps([account.planned for account in whole], ""),
        **_of_steps([account.traced for account in whole], "_as_traced"),
    }


def _of_steps(steps: Sequence[StepTotals], ending: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {
        f"collectives{ending}": sum(step.collectives for step in steps),
        f"peak_bytes{ending}": max(step.peak for step in steps),
        f"in_flight_bytes{ending}": max(step.in_flight for step in steps),
    }
    times = [(step.exposed, step.step) for step in steps if step.exposed is not None and step.step is not None]
    if len(times) == len(steps):
        found[f"exposed_seconds{ending}"] = fsum(exposed for exposed, _ in times)
        found[f"step_seconds{ending}"] = fsum(step for _, step in times)
    return found


NO_GRADIENTS = "inference"


@frozen
class DecisionReport:
    """The outcome of one forward value."""

    action: str
    """``save``, ``recompute``, …, as the language writes it; ``auto`` where PyTorch's partitioner decided."""
    rule: str | None
    """``file:line`` of the rule that decided, None where none did."""
    reason: str = ""
    """Set where no rule decided."""


@frozen
class RuleReport(ReportedLine):
    """The account of one rule. Counts are of decisions: an operator and the ``getitem`` nodes that read it are one."""

    matched: int
    """The number of forward values that its selector matches."""
    decided: int
    """The number of matched values that no later rule decides."""
    overridden: int
    """The number of matched values that a later rule decides."""
    kept_by_user: int = 0
    """The number of matched values that kept the tag of the user's ``checkpoint``."""
    saved_bytes: int | None = None
    """Memory kept alive by values that this rule saves; None before a partition."""
    recomputed_flops: int | None = None
    """Cost of recomputing what this rule recomputes; None before a partition."""
    offloaded_bytes: int | None = None
    """Memory that this rule moves to the host; None before a partition."""
    recomputed_seconds: float | None = None
    """Time of that recomputation on the policy's device; None without one and before a partition."""
    narrowed_bytes: int | None = None
    """The bytes by which what this rule narrows is smaller than it was made; None before a partition."""


@frozen
class ValuesReport:
    """The values that a partition saved, or that it recomputes."""

    names: tuple[str, ...] = field(default=(), repr=False)
    bytes: int = 0
    """Bytes of distinct memory: views of one value count once."""
    flops: int = 0
    """Cost of recomputing them; 0 for saved values."""
    seconds: float | None = None
    """Their recomputation time on the policy's device; None without one, and for values that are not recomputed."""

    def __len__(self) -> int:
        return len(self.names)


@frozen
class AuditReport:
    """The comparison of the actual graphs with the plan."""

    agrees: bool
    differences: tuple[str, ...] = ()
    """A sentence each; empty where both agree."""


@frozen
class CodeOrderReport:
    """The order of communication in Inductor's code for the forward or backward graph."""

    half: str
    """``forward`` or ``backward``."""
    status: str
    """``as planned``, ``differs``, ``not compiled`` before the first backward, ``not read`` where it is not Python."""
    starts: int = 0
    """The number of collectives that it starts."""
    waits: int = 0
    """The number of waits for them."""
    kernels: dict[str, int] = field(factory=dict)
    """By collective beside which the plan computes products, the number of kernels before its wait."""


@frozen
class RewriteReport(ReportedLine):
    """The account of one ``fuse``, ``collapse`` or ``bucket`` line."""

    half: str = ""
    """``forward`` or ``backward`` for edits after the split, on that graph."""
    done: int = 0
    """Rewritten chains or round trips."""
    gone: int = 0
    """By how many collectives the graph has shrunk."""
    ranks: int = 0
    """The number of ranks that each proof covers."""
    proven: bool = True
    """False if a proof makes an assumption; :attr:`notes` then names it."""
    notes: tuple[str, ...] = ()
    left: tuple[Refusal, ...] = ()
    """Candidates that were not rewritten."""

    def __str__(self) -> str:
        return as_text(self)


@frozen
class LineByFsdpReport(ReportedLine):
    """The account of one scheduling line in eager."""

    said: str
    """The result, as a phrase."""


@frozen
class FsdpOrderReport:
    """The account of one model's scheduling lines in eager."""

    policy: str
    lines: tuple[LineByFsdpReport, ...] = ()
    differences: tuple[str, ...] = ()
    """FSDP's settings that have changed since."""


@frozen
class HostReport:
    """The copies between device and host of this process so far."""

    out: int
    """Bytes copied to the host."""
    back: int
    pool: int
    """The most bytes of host memory that were in use at once, in the rounded sizes that are taken."""
    slower: str = ""
    """Why copies take longer than they have to: memory that cannot be pinned, or a device without streams."""

    def __str__(self) -> str:
        out, back, pool = (format_quantity(each, "bytes") for each in (self.out, self.back, self.pool))
        slower = f"; copies hold up the step: {self.slower}" if self.slower else ""
        return f"{out} copied out and {back} back so far, through a pool of {pool}{slower}"


@frozen
class Report:
    """One graph under a policy, or, with ``graphs``, all the graphs of a compiled model and their sum.

    Bytes are of one rank and FLOPs of one step, both whole numbers.

    ``saved``, ``recomputed``, ``offloaded`` and ``audit`` are what the backend really did; they are None until the
    graph is partitioned. In a sum, a node's name starts with its block, ``layers.3/mm_3``, or with the number of its
    graph, ``1/mm_3``.
    """

    policy: str
    forward_nodes: int = 0
    """Decisions that the policy could take: forward operators, counted like those of :class:`RuleReport`."""
    blocks: int = 0
    """The number of blocks in the graph."""
    decisions: dict[str, DecisionReport] = field(factory=dict, repr=False)
    """In a sum, ``decisions["mm_3"]`` serves as well where all that have such a value decide alike."""
    rules: tuple[RuleReport, ...] = ()
    """In the order of the policy: the last that matches decides."""
    undecided: int = 0
    """Decisions that no rule took."""
    undecided_fate: str = "auto"
    """The outcome by ``undecided -> …``; ``auto`` leaves the values to the partitioner."""
    saved: ValuesReport | None = None
    """Bytes on the device: what is offloaded is not among them."""
    recomputed: ValuesReport | None = None
    offloaded: ValuesReport | None = None
    """On the host between their last forward and their first backward use."""
    host: HostReport | None = None
    """None unless values are offloaded and steps have run."""
    forward_flops: int = 0
    """The denominator of the recomputed share of FLOPs."""
    undecided_saved_bytes: int | None = None
    """The part of ``saved`` that no rule asked for: kept by PyTorch's partitioner or because it always is."""
    rewrites: tuple[RewriteReport, ...] = ()
    """An entry for each ``fuse``, ``collapse`` and ``bucket`` line."""
    orders: tuple[OrderAccount, ...] = ()
    """With scheduling lines: the whole planned step, then the orders applied to the forward and the backward graph."""
    by_fsdp: tuple[FsdpOrderReport, ...] = ()
    """In eager under FSDP2, the results of `prefetch` lines."""
    expectations: tuple[ExpectationOutcome, ...] = ()
    """An entry for each ``expect`` line."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Deliberate deviations from the letter of a rule, with reasons."""
    audit: AuditReport | None = None
    code: tuple[CodeOrderReport, ...] = ()
    """The order in Inductor's generated code, where a policy has scheduling lines."""
    digest: str = ""
    """Equal for equal plans, in every process and on every rank."""
    from_cache: bool = False
    """Served from a compile cache: the report was made when the graph was compiled, under the same policy."""
    graphs: tuple[Report, ...] = ()
    """The reports that this one is the sum of; empty where it is of one graph."""
    label: str = ""
    """The block, of a graph that is one block of a model; ``layers.3#2`` for its second variant."""
    half: str = ""
    """``forward`` or ``backward``: one graph of a partition, to which only a policy's rewrites are applied.
    ``inference``: a compiled graph without a backward, in the same way."""
    uncounted: dict[str, int] = field(factory=dict)
    """The forward's operators that could do matrix work and that no FLOP formula counts, and how many calls."""
    uncounted_recomputed: dict[str, int] = field(factory=dict)
    """Recomputed ones; empty before a partition."""
    operators: int = 0
    """The operators of a forward or backward graph, or of a graph without a backward, counted like decisions."""
    device: str | None = None
    """The profile that seconds are worked out from, by its name; None where the policy has none."""
    forward_seconds: float | None = None
    """The denominator of the recomputed share of time, on that device."""

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        amounts = [(self.saved, "saved"), (self.recomputed, "recomputed"), (self.offloaded, "offloaded")]
        found = [f"{format_quantity(each.bytes, 'bytes')} {word}" for each, word in amounts if each]
        agrees = "no audit" if self.audit is None else "audit agrees" if self.audit.agrees else "audit DIFFERS"
        counts = [counted(len(self.graphs), "graph")] if self.graphs else []
        counts += [counted(self.forward_nodes, "forward value"), *found, agrees]
        return f"<policylang.Report {self.policy}: {', '.join(counts)}>"

    def scalars(self, prefix: str = "policylang/") -> dict[str, int | float]:
        """Numbers by name, for a metrics logger: bytes, FLOPs and counts as whole numbers, shares from 0 to 1, seconds.
        Several graphs are summed; figures unknown before a partition, or without a device, are left out."""
        amounts = {"saved": self.saved, "recomputed": self.recomputed, "offloaded": self.offloaded}
        found: dict[str, int | float] = {
            "forward_flops": self.forward_flops,
            "forward_values": self.forward_nodes,
            "undecided_values": self.undecided,
            "blocks": self.blocks,
            "graphs": max(len(self.graphs), 1),
            "uncounted_calls": sum(self.uncounted.values()),
            "uncounted_recomputed_calls": sum(self.uncounted_recomputed.values()),
            "collectives_removed": sum(rewrite.gone for rewrite in self.rewrites),
            "warnings": len(self.warnings),
        }
        for name, values in amounts.items():
            if values is not None:
                found |= {f"{name}_bytes": values.bytes, f"{name}_values": len(values)}
        if self.recomputed is not None:
            found["recomputed_flops"] = self.recomputed.flops
            found["recomputed_share"] = self.recomputed.flops / self.forward_flops if self.forward_flops else 0.0
        if self.forward_seconds is not None:
            found["forward_seconds"] = self.forward_seconds
            if self.recomputed is not None and self.recomputed.seconds is not None:
                share = self.recomputed.seconds / self.forward_seconds if self.forward_seconds else 0.0
                found |= {"recomputed_seconds": self.recomputed.seconds, "recomputed_time_share": share}
        found |= order_figures(self.orders)
        if self.host is not None:
            found |= {"copied_out_bytes": self.host.out, "copied_back_bytes": self.host.back}
            found["host_pool_bytes"] = self.host.pool
        if self.audit is not None:
            found["audit_differences"] = len(self.audit.differences)
        return {f"{prefix}{name}": value for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return to_plain(self)

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as text; ``indent`` as in ``json.dumps``."""
        return json.dumps(self.to_dict(), indent=indent)
