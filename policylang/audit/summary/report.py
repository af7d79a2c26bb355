"""The report on a graph, as data: what was decided, by which line, and what the transformed graph does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from attrs import asdict, field, frozen, has

from policylang.audit.summary.fsdp_lines import FsdpOrderReport
from policylang.audit.summary.order_account import OrderAccount
from policylang.audit.summary.order_figures import order_figures
from policylang.language.wording import as_html, as_text, counted, figure

NO_GRADIENTS = "inference"


@frozen
class DecisionReport:
    """What became of one forward value."""

    action: str
    """``save``, ``recompute``, …, as the language writes it; ``auto`` where PyTorch's partitioner decided."""
    rule: str | None
    """``file:line`` of the rule that decided, None where none did."""
    reason: str = ""
    """Where something other than a rule decided: why."""


@frozen
class RuleReport:
    """The account of one rule. Counts are of decisions: an operator and the ``getitem`` nodes that read it are one."""

    source: str
    """``file:line``."""
    text: str
    """The rule as it is written."""
    matched: int
    """How many forward values its selector denotes."""
    decided: int
    """Of the matched, those that no later rule took over."""
    overridden: int
    """Of the matched, those that a later rule took over."""
    kept_by_user: int = 0
    """Of the matched, those that kept the tag of the user's own ``checkpoint``."""
    saved_bytes: int | None = None
    """What the values saved by this rule keep alive; None before a partition."""
    recomputed_flops: int | None = None
    """What it costs to recompute what this rule recomputes; None before a partition."""
    offloaded_bytes: int | None = None
    """What this rule moves to the host; None before a partition."""
    recomputed_seconds: float | None = None
    """What it takes to recompute that once more on the policy's device; None without one and before a partition."""


@frozen
class ValuesReport:
    """The values that a partition saved, or that it recomputes."""

    names: tuple[str, ...] = field(default=(), repr=False)
    bytes: int = 0
    """Of distinct memory: views of one value count once."""
    flops: int = 0
    """What it takes to compute them a second time; 0 of values that are saved."""
    seconds: float | None = None
    """The time of that on the policy's device; None without one, and of values that are not computed again."""

    def __len__(self) -> int:
        return len(self.names)


@frozen
class AuditReport:
    """Whether the graphs that came out do what the plan said."""

    agrees: bool
    differences: tuple[str, ...] = ()
    """A sentence each; empty where both agree."""


@frozen
class ExpectationReport:
    """What an ``expect`` line came to."""

    source: str
    """``file:line``."""
    text: str
    """The line as it is written."""
    status: str
    """``held``, ``failed``, or ``deferred`` where it depends on what PyTorch's partitioner will decide."""
    found: str
    """The figure that was found, in words."""
    margin: float | None = None
    """How far what was found is from the limit, in bytes, FLOPs, a fraction or nodes: negative where it fails; None
    where there is no figure to compare."""


@frozen
class CodeOrderReport:
    """In which order the code communicates that Inductor generated for one half."""

    half: str
    """``forward`` or ``backward``."""
    status: str
    """``as planned``, ``differs``, ``not compiled`` before the first backward, ``not read`` where it is not Python."""
    starts: int = 0
    """How many collectives it starts."""
    waits: int = 0
    """How many waits it has for them."""
    kernels: dict[str, int] = field(factory=dict)
    """By the node of each collective beside which the plan computes products, how many kernels run before its wait."""


@frozen
class LeftAlone:
    """A chain that looked like one to rewrite."""

    collectives: tuple[str, ...]
    """Their nodes, in the order in which they run."""
    reason: str
    """``other consumer: view_12``."""
    detail: str = ""
    """Further words on the reason, where there are any."""


@frozen
class RewriteReport:
    """The account of one ``fuse``, ``collapse`` or ``bucket`` line."""

    source: str
    """``file:line``."""
    text: str
    """The line as it is written."""
    half: str = ""
    """``forward`` or ``backward`` for what was done after the graph was split, on that half."""
    done: int = 0
    """How many chains, or round trips, were rewritten."""
    gone: int = 0
    """How many collectives fewer that makes."""
    ranks: int = 0
    """How many ranks the proof of each covers."""
    proven: bool = True
    """False where a proof takes something for granted; :attr:`notes` then says what."""
    notes: tuple[str, ...] = ()
    left: tuple[LeftAlone, ...] = ()
    """What looked alike and was not rewritten."""

    def __str__(self) -> str:
        return as_text(self)


@frozen
class Report:
    """One graph under a policy, or, with ``graphs``, all the graphs of a compiled model and their sum.

    Bytes are of one rank and FLOPs of one step, both whole numbers.

    ``saved``, ``recomputed``, ``offloaded`` and ``audit`` are what the backend really did; they are None on a graph
    that is not partitioned yet. In a sum, node names carry the block that their graph is, ``layers.3/mm_3``, or else
    its number, ``1/mm_3``.
    """

    policy: str
    """Its name."""
    forward_nodes: int = 0
    """Decisions that the policy could take: forward operators, counted like those of :class:`RuleReport`."""
    blocks: int = 0
    """How many the graph has."""
    decisions: dict[str, DecisionReport] = field(factory=dict, repr=False)
    """In a sum, ``decisions["mm_3"]`` serves as well where all that have such a value decide alike."""
    rules: tuple[RuleReport, ...] = ()
    """In the order of the policy: the last that matches decides."""
    undecided: int = 0
    """Decisions that no rule took."""
    undecided_fate: str = "auto"
    """What ``undecided -> …`` says of them; ``auto`` leaves them to the partitioner."""
    saved: ValuesReport | None = None
    """Bytes on the device: what is offloaded is not among them."""
    recomputed: ValuesReport | None = None
    """Values that the backward computes a second time."""
    offloaded: ValuesReport | None = None
    """On the host between their last forward and their first backward use."""
    forward_flops: int = 0
    """Of the forward: what a share of recomputed FLOPs is a share of."""
    undecided_saved_bytes: int | None = None
    """Of ``saved``, what no rule asked for: kept by PyTorch's partitioner or because it always is."""
    rewrites: tuple[RewriteReport, ...] = ()
    """An entry for each ``fuse``, ``collapse`` and ``bucket`` line."""
    orders: tuple[OrderAccount, ...] = ()
    """Of a policy with scheduling lines: the whole step as planned, then what was carried out on each half of it."""
    by_fsdp: tuple[FsdpOrderReport, ...] = ()
    """In eager, what `prefetch` and `bucket` lines came to where `fully_shard` gathers."""
    expectations: tuple[ExpectationReport, ...] = ()
    """An entry for each ``expect`` line."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What was done otherwise than a rule says on its face, and why that is meant."""
    audit: AuditReport | None = None
    code: tuple[CodeOrderReport, ...] = ()
    """What the code of each half was read to do, where a policy orders and Inductor compiles."""
    digest: str = ""
    """Equal for equal plans, in every process and on every rank."""
    from_cache: bool = False
    """Served from a compile cache: what is said here was found when the graph was compiled, under the same policy."""
    graphs: tuple[Report, ...] = ()
    """The reports that this one is the sum of; empty where it is of one graph."""
    label: str = ""
    """Of a graph that is one block of a model: the block. ``layers.3#2`` for the second way in which it is called."""
    half: str = ""
    """``forward`` or ``backward``: of one half of a partition, of which a policy's rewrites are carried out and where
    nothing is decided about values. ``inference``: of a compiled graph that has no backward, in the same way."""
    uncounted: dict[str, int] = field(factory=dict)
    """The forward's operators that could do matrix work and that no FLOP formula counts, and how many calls."""
    uncounted_recomputed: dict[str, int] = field(factory=dict)
    """The same of what runs again; empty before a partition."""
    operators: int = 0
    """Of a half, or a graph without a backward: how many it runs, counted like decisions."""
    device: str | None = None
    """The profile that seconds are worked out from, by its name; None where the policy has none."""
    forward_seconds: float | None = None
    """Of the forward's operators on that device: what a share of recomputed time is a share of."""

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        amounts = [(self.saved, "saved"), (self.recomputed, "recomputed"), (self.offloaded, "offloaded")]
        found = [f"{figure(each.bytes, 'bytes')} {word}" for each, word in amounts if each]
        agrees = "no audit" if self.audit is None else "audit agrees" if self.audit.agrees else "audit DIFFERS"
        counts = [counted(len(self.graphs), "graph")] if self.graphs else []
        counts += [counted(self.forward_nodes, "forward value"), *found, agrees]
        return f"<policylang.Report {self.policy}: {', '.join(counts)}>"

    def _repr_html_(self) -> str:
        return as_html(self)

    def scalars(self, prefix: str = "policylang/") -> dict[str, int | float]:
        """Numbers by name, for a metrics logger: bytes, FLOPs and counts as whole numbers, shares from 0 to 1, seconds.

        Of several graphs their sums; what is not known before a partition, or without a device, is left out.
        """
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
        if self.audit is not None:
            found["audit_differences"] = len(self.audit.differences)
        return {f"{prefix}{name}": value for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The same as text; ``indent`` as in ``json.dumps``."""
        return json.dumps(self.to_dict(), indent=indent)


def report_from_dict(data: Mapping[str, Any]) -> Report:
    """The inverse of :meth:`Report.to_dict`, for data that has been through JSON.

    Raises ``KeyError``, ``TypeError`` or ``ValueError`` for anything else.
    """
    report: Report = _of_type(Report, data)
    return report


def _of_type(kind: Any, data: Any) -> Any:
    """A value from plain data, by the types of fields: what of cattrs a report needs, without depending on it."""
    if get_origin(kind) is tuple:
        return tuple(_of_type(get_args(kind)[0], each) for each in data)
    if get_origin(kind) is dict:
        return {name: _of_type(get_args(kind)[1], each) for name, each in data.items()}
    if get_origin(kind) is UnionType:
        return None if data is None else _of_type(get_args(kind)[0], data)
    if not has(kind):
        return data
    return kind(**{**data, **{name: _of_type(type_, data[name]) for name, type_ in _compound(kind).items()}})


@cache
def _compound(kind: Any) -> dict[str, Any]:
    """The fields of a class that JSON has no values for."""
    return {name: type_ for name, type_ in get_type_hints(kind).items() if get_origin(type_) or has(type_)}
