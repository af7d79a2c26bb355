"""The tree of a policy: plain data with spans, which every later stage reads.

The parser builds it from text, the resolver replaces each :class:`Word` by a :class:`Reference` or an
:class:`Operator` and expands includes; planning sees resolved trees only. Spans take no part in equality, so two
policies that differ in layout alone are equal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any, ClassVar, Literal

from attrs import field, frozen

from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Source, Span
from policylang.language.shown import Dimension


class Action(Enum):
    """The action of a rule. The value is the name of the torch ``CheckpointPolicy`` member it is lowered to."""

    SAVE = "MUST_SAVE"
    PREFER_SAVE = "PREFER_SAVE"
    RECOMPUTE = "PREFER_RECOMPUTE"
    MUST_RECOMPUTE = "MUST_RECOMPUTE"
    OFFLOAD = "MUST_CPU_OFFLOAD"
    PREFER_OFFLOAD = "PREFER_CPU_OFFLOAD"
    LEAVE = "LEAVE"

    @property
    def tag(self) -> str:
        """The name of the member of ``CheckpointPolicy``."""
        return self.value

    @property
    def word(self) -> str:
        """Its keyword."""
        return self.name.lower()

    @property
    def saves(self) -> bool:
        return self in (Action.SAVE, Action.PREFER_SAVE)

    @property
    def recomputes(self) -> bool:
        return self in (Action.RECOMPUTE, Action.MUST_RECOMPUTE)

    @property
    def offloads(self) -> bool:
        return self in (Action.OFFLOAD, Action.PREFER_OFFLOAD)

    @property
    def leaves(self) -> bool:
        """True if the decision is left to PyTorch's partitioner: no tag is written."""
        return self is Action.LEAVE


class Scope(Enum):
    """Over what an ordinal counts afresh."""

    BLOCK = "block"
    MODULE = "module"
    CHAIN = "chain"
    """A straight line of data flow."""
    GRAPH = "graph"


NOWHERE = Span(Source("<policy>", ""), 0, 0)
"""The span of a tree without text."""


@frozen
class _Spanned:
    """A part of the tree, and where it is written."""

    span: Span = field(default=NOWHERE, eq=False, repr=False, kw_only=True)


# --- selectors -------------------------------------------------------------------------------------------------


@frozen
class Everything(_Spanned):
    """``everything``: all nodes."""


@frozen
class Word(_Spanned):
    """A word the resolver has not looked up yet: a ``let`` name, a group or an operator."""

    text: str


@frozen
class Operator(_Spanned):
    """Operators by name. Each part is a glob over names; ``None`` means "any"."""

    namespace: str | None
    name: str
    overload: str | None

    @property
    def text(self) -> str:
        return ".".join(part for part in (self.namespace, self.name, self.overload) if part is not None)


@frozen
class Reference(_Spanned):
    """The nodes of a ``let``; ``Policy.lets`` holds its definition."""

    name: str


@frozen
class InModule(_Spanned):
    """``S in GLOB`` and, with ``outside``, ``S outside GLOB``."""

    selector: Selector
    glob: str
    outside: bool


@frozen
class BlockSet:
    """A set of blocks: ``every`` nth from ``start`` (1-based), the ``first`` or ``last`` n, or a ``range`` low..high.
    The numbers of ``range`` are 0-based and inclusive, as in ``blocks 0..3``. With a ``share``, the first or last are
    that part of the model's blocks, rounded down. ``of``: whether blocks or stages of a pipeline are counted."""

    kind: Literal["any", "every", "first", "last", "range"]
    n: int = 0
    start: int = 0
    low: int = 0
    high: int = 0
    share: Fraction | None = None
    of: Literal["block", "stage"] = "block"


@frozen
class InBlock(_Spanned):
    """``S in block``, ``S in every 2nd block``, ``S in blocks 0..3``, ``S outside block``, ``S in stage 0``."""

    selector: Selector
    which: BlockSet
    outside: bool


@frozen
class Ordinal(_Spanned):
    """A choice by position, 1-based and in graph order. ``first n`` and ``last n`` take n, ``nth`` the nth alone,
    ``every`` the nodes ``start``, ``start + n``, … where ``start`` is ``n`` unless ``from`` was written. ``scope`` is
    None where no ``per`` was written."""

    kind: Literal["first", "last", "nth", "every"]
    n: int
    selector: Selector
    start: int | None = None
    scope: Scope | None = None


@frozen
class Where(_Spanned):
    selector: Selector
    predicate: Predicate


@frozen
class Union(_Spanned):
    """``S or T`` and ``S, T``."""

    parts: tuple[Selector, ...]


@frozen
class Intersection(_Spanned):
    left: Selector
    right: Selector


@frozen
class Difference(_Spanned):
    left: Selector
    right: Selector


@frozen
class Feeding(_Spanned):
    """``S feeding T``: the nodes of S that a node of T reads. ``S fed by T``: those that read a node of T."""

    left: Selector
    right: Selector
    reverse: bool = False


@frozen
class Step(_Spanned):
    """``users of S`` and ``inputs of S``."""

    direction: Literal["users", "inputs"]
    selector: Selector


@frozen
class Chain(_Spanned):
    """``chain after S``, ``chain before S`` (without S), ``chain through S`` (with S)."""

    direction: Literal["after", "before", "through"]
    selector: Selector


@frozen
class ChainOf(_Spanned):
    """``S chain``: S and the chain after it; with ``cut``, the part after (before) the first ``marker`` of the line."""

    selector: Selector
    cut: Literal["after", "before"] | None = None
    marker: Selector | None = None


Leaf = Everything | Word | Operator | Reference
Filter = InModule | InBlock | Where | ChainOf
Prefix = Ordinal | Step | Chain
Junction = Intersection | Difference | Feeding
Selector = Leaf | Filter | Prefix | Junction | Union

# --- predicates ------------------------------------------------------------------------------------------------

Comparison = Literal["==", "!=", "<", "<=", ">", ">="]
COMPARISONS: Mapping[Comparison, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@frozen
class Quantity(_Spanned):
    """A number with its unit applied: bytes for ``MiB``, FLOPs for ``GFLOP``, seconds for ``ms``, a share for ``%``."""

    value: float
    dimension: Dimension


TIMES = ("time", "time_per_gib")
"""Measures that need a device profile."""


@frozen
class Compare(_Spanned):
    """``bytes >= 64 MiB``; ``index`` is set for ``shape[i]`` alone."""

    quantity: Literal[
        "bytes", "numel", "ndim", "shape", "flops", "time", "time_per_gib", "users", "inputs", "group_size"
    ]
    op: Comparison
    value: Quantity
    index: int | None = None


@frozen
class Match(_Spanned):
    """``dtype == bf16``, ``module != layers.0.*``: a property compared with a name or glob."""

    property: Literal["dtype", "device", "module", "overload"]
    op: Literal["==", "!="]
    pattern: str


@frozen
class Is(_Spanned):
    """A predicate without arguments, named as it is written."""

    name: Literal[
        "from parameter", "gathered parameter", "crosses block", "feeds backward", "is view", "is random",
        "is multi_output", "is mutated", "user tagged", "recorded saved", "recorded offloaded", "from buffer",
        "from input", "gathered buffer", "gathered input",
    ]  # fmt: skip


@frozen
class CrossesCut(_Spanned):
    """``crosses cut per 2 GiB``: alive where the forward is cut into stages that make about ``size`` bytes each."""

    size: Quantity | None
    """None for ``auto``."""

    @property
    def bytes(self) -> float | None:
        return None if self.size is None else self.size.value


@frozen
class Annotated(_Spanned):
    """``annotated ap_must_save``: somebody has set a note of this name on the node, to anything but False."""

    name: str


@frozen
class Not(_Spanned):
    predicate: Predicate


@frozen
class And(_Spanned):
    parts: tuple[Predicate, ...]


@frozen
class Or(_Spanned):
    parts: tuple[Predicate, ...]


Test = Compare | Match | Is | CrossesCut | Annotated
Predicate = Test | Not | And | Or

# --- statements ------------------------------------------------------------------------------------------------


@frozen
class PolicyName(_Spanned):
    name: str


@frozen
class Requires(_Spanned):
    op: Comparison
    version: str


@frozen
class Include(_Spanned):
    """``include "other.apl"``, or ``include <name>`` with ``bundled`` set."""

    target: str
    bundled: bool


@frozen
class Device(_Spanned):
    """``device h100-sxm``, or ``device "cluster.toml"``: the profile that times are worked out from."""

    target: str


@frozen
class Let(_Spanned):
    name: str
    selector: Selector


@frozen
class Blocks(_Spanned):
    glob: str


@frozen
class Pipeline(_Spanned):
    """``schedule 1f1b into 4 stages of 16 microbatches``: the pipeline that the model runs in."""

    schedule: str
    stages: int
    microbatches: int
    firsts: tuple[int, ...] = ()
    """The first block of each stage, where the blocks are not shared out evenly."""
    stage: int | None = None
    """The stage that the graph is, where it is not the whole model."""
    order: tuple[tuple[tuple[str, int, int], ...], ...] = field(default=(), eq=False, repr=False)
    """By rank its steps: F, B, I or W (forward, backward, its part for inputs, for weights), stage, microbatch. Filled
    in where a policy is planned on a graph of the whole model."""

    @property
    def known(self) -> bool:
        """True if it is known which stages a graph is, or has."""
        return bool(self.order) or self.stage is not None


@frozen
class Balance(_Spanned):
    """``balance 1.0``, ``balance up to 2.0``: how many of the tokens of each rank an expert, or a rank with experts,
    receives, as a multiple of its even share."""

    factor: float
    is_limit: bool = False
    """True if each receives at most so many; otherwise the rank that is planned receives exactly so many."""


NARROW_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""The types that values can be narrowed to, and the bytes of an element. Those of one byte need a scale a row."""


@frozen
class NarrowForm(_Spanned):
    """``as bfloat16``, ``as float8_e4m3fn per row``: how a saved value waits for the backward."""

    dtype: str
    per_row: bool = False
    """Each row, along the last dimension, is divided by a float32 scale of its own, which is saved beside it."""

    @property
    def text(self) -> str:
        return f"{self.dtype} per row" if self.per_row else self.dtype

    def scale_bytes(self, shape: tuple[int, ...], numel: int) -> int:
        """The bytes of the scales of a value of this shape."""
        return 4 * (numel // max(shape[-1], 1) if shape else numel) if self.per_row else 0

    def bytes(self, shape: tuple[int, ...], numel: int) -> int:
        """The bytes of a value of this shape, scales included."""
        return numel * NARROW_BYTES[self.dtype] + self.scale_bytes(shape, numel)


@frozen
class Rule(_Spanned):
    """One sentence: an action on what a selector denotes."""

    action: Action
    selector: Selector
    optional: bool = False
    override: bool = False
    budget: Quantity | None = None
    """The most that an ``offload`` may move on one rank."""
    form: NarrowForm | None = None
    """The form in which a ``save`` keeps values, if not as they were made."""

    @property
    def tail(self) -> Span | None:
        """The words after the selector, which other actions lack."""
        last = self.budget or self.form
        return None if last is None else last.span

    @property
    def source(self) -> str:
        """``file:line``."""
        return self.span.location

    @property
    def text(self) -> str:
        """The sentence in the file, on one line."""
        return self.span.one_line


@frozen
class Undecided(_Spanned):
    fate: Literal["auto", "save", "recompute"]


@frozen
class Fuse(_Spanned):
    collective: Literal["all_gather", "reduce_scatter"]
    dims: tuple[str, ...] = ()
    optional: bool = False

    @property
    def kind(self) -> str:
        """The kind of edits it asks for."""
        return self.collective


@frozen
class Collapse(_Spanned):
    """``collapse round_trips``: what was gathered and cut back to this rank's own part is the part itself."""

    optional: bool = False
    kind: ClassVar[str] = "round_trip"


@frozen
class Chunk(_Spanned):
    """``chunk loss into 8``: a part of the step runs slice by slice over the rows of its input."""

    module: str = ""
    """The glob of the modules; empty for the last product before the loss."""
    to_loss: bool = True
    """From the module to the loss and back; else the module alone."""
    in_block: bool = False
    """Only the modules in blocks."""
    slices: int | None = None
    size: Quantity | None = None
    """The most bytes of a slice's transients, where no number is given."""
    tokens: bool = False
    """``over tokens``, written out."""
    optional: bool = False
    kind: ClassVar[str] = "chunk"


@frozen
class Bucket(_Spanned):
    """``bucket (all_gather where from parameter) per 2 blocks up to 512 MiB``: collectives of one group, dtype and kind
    become one. Planned once values are decided, on the graph as it then runs."""

    selector: Selector
    blocks: int | None = None
    """The number of successive blocks in a bucket; None if neighbours are joined across blocks."""
    size: Quantity | None = None
    """The most bytes of a bucket: the larger of its collective's input and output."""
    optional: bool = False
    kind: ClassVar[str] = "bucket"


Restructuring = Fuse | Collapse | Chunk
"""A statement that asks for edits of a graph's structure, planned before values are decided. It picks no nodes."""
Rewriting = Restructuring | Bucket
"""A statement that asks for edits of a graph's structure."""


@frozen
class SchedulingLine(_Spanned):
    """Sets when collectives start and where they are awaited; one subclass for each kind of line."""

    is_alone: ClassVar[bool] = False
    """True if of several lines of its kind that pick a collective the last one moves it, and the others do not."""


@frozen
class Prefetch(SchedulingLine):
    """``prefetch (all_gather where from parameter) 1 block ahead``: started before the block before it computes."""

    is_alone = True
    selector: Selector
    blocks: int
    optional: bool = False


@frozen
class PrefetchOffloaded(_Spanned):
    """``prefetch offloaded 2 blocks ahead``: copies back to the device start so many blocks before they are read."""

    blocks: int
    optional: bool = False


@frozen
class Delay(SchedulingLine):
    """``delay reduce_scatter 1 block``: awaited a block later."""

    is_alone = True
    selector: Selector
    blocks: int
    optional: bool = False


@frozen
class Overlap(SchedulingLine):
    """``overlap collective up to 2 GiB in flight within 1 GiB of peak``: the list scheduler, by the time model."""

    selector: Selector
    in_flight: Quantity | None = None
    """Bytes of the collectives that are started and not awaited, at any step."""
    peak: Quantity | None = None
    """The most that the peak may rise above that of the traced order: bytes, or a share of it."""
    optional: bool = False


@frozen
class KeepOrder(SchedulingLine):
    """``keep order of all_to_all``: no scheduler moves anything across them."""

    selector: Selector
    optional: bool = False


Scheduling = Prefetch | Delay | Overlap | KeepOrder
"""A statement that sets when collectives start and where they are awaited."""


@frozen
class ExpectTotal(_Spanned):
    """``expect saved per block <= 220 MiB``, ``expect recomputed flops <= 20%``, ``expect step time <= 900 ms``."""

    figure: Literal[
        "saved", "recomputed", "recomputed flops", "recomputed operators", "recomputed time", "peak", "host memory",
        "host memory per host", "exposed", "step time", "peak per stage",
    ]  # fmt: skip
    op: Comparison
    limit: Quantity
    """A fraction is one of what the forward makes, computes, runs or takes; of ``exposed``, one of the step."""
    per_block: bool = False

    @property
    def of_forward(self) -> bool:
        """True if the limit is a share of the bytes that the forward makes."""
        return self.limit.dimension == "fraction" and self.figure in ("saved", "recomputed")

    @property
    def of_time(self) -> bool:
        """True if it needs a device profile."""
        return self.figure in ("recomputed time", "exposed", "step time")


@frozen
class ExpectCount(_Spanned):
    """``expect exactly 7 mm per block``, ``expect at least 1 attention``."""

    bound: Literal["exactly", "at least", "at most"]
    n: int
    selector: Selector
    scope: Scope | None = None


@frozen
class ExpectFate(_Spanned):
    """``expect every S recomputed``, ``expect no S saved``."""

    quantifier: Literal["every", "no"]
    selector: Selector
    fate: Literal["saved", "recomputed", "offloaded"]


@frozen
class ExpectLossless(_Spanned):
    """``expect lossless``: every value comes to the backward with the bits that the forward gave it."""


Expectation = ExpectTotal | ExpectCount | ExpectFate | ExpectLossless
Selecting = Let | Rule | Bucket | Scheduling | ExpectCount | ExpectFate
"""A statement that has a selector."""
Statement = (
    PolicyName | Requires | Include | Device | Let | Blocks | Rule | Undecided | Rewriting | Scheduling
    | PrefetchOffloaded | Pipeline | Balance | Expectation
)  # fmt: skip


@frozen
class File(_Spanned):
    """A parsed file: its statements in order, names not looked up."""

    statements: tuple[Statement, ...]


@frozen
class Policy:
    """A resolved policy: includes are expanded and every name is looked up, so it can be planned on any graph. ``lets``
    has every name that a selector may use (the user's and the prelude's), in order of definition; each uses only
    earlier ones. ``rules`` are in order of precedence, lowest first."""

    name: str
    lets: dict[str, Let]
    blocks: Blocks | None
    rules: tuple[Rule, ...]
    undecided: Undecided | None
    rewrites: tuple[Rewriting, ...]
    expectations: tuple[Expectation, ...]
    device: DeviceProfile | None = field(default=None, eq=lambda device: device and device.canonical)
    """The device profile that times are worked out from."""
    scheduling: tuple[Scheduling, ...] = ()
    prefetch_offloaded: PrefetchOffloaded | None = None
    """When copies back from the host start, where the policy says it."""
    pipeline: Pipeline | None = None
    """The pipeline that the model runs in, where the policy says it."""
    balance: Balance | None = None
    """How evenly tokens are routed to experts, where the policy says it."""
    canonical: str = field(default="", repr=False)
    """The resolved text in canonical form: what the digest and the caches are keyed by."""
    includes: Mapping[str, Span] = field(factory=dict, eq=False, repr=False)
    """The include in the loaded file that leads to each included file, by its name."""

    def included_by(self, span: Span | None) -> Span | None:
        """The include that brings a line; None for a line of the loaded file."""
        return None if span is None else self.includes.get(span.source.name)

    @property
    def stage(self) -> int | None:
        """The stage of a pipeline that the policy is for; None where it is for a whole model."""
        return None if self.pipeline is None else self.pipeline.stage

    @property
    def deciding(self) -> tuple[Rule | Rewriting | Scheduling, ...]:
        """The statements that change what becomes of a graph."""
        return (*self.rules, *self.rewrites, *self.scheduling)

    @property
    def statements(self) -> tuple[Rule | Rewriting | Scheduling | Expectation, ...]:
        """Every statement that is planned on a graph."""
        return (*self.deciding, *self.expectations)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The rewrites that are planned after values are decided."""
        return tuple(each for each in self.rewrites if isinstance(each, Bucket))

    @property
    def orders(self) -> bool:
        """True if it buckets or schedules collectives."""
        return bool(self.scheduling or self.buckets)

    @property
    def narrowing(self) -> tuple[Rule, ...]:
        """The rules that save values in a narrower type."""
        return tuple(rule for rule in self.rules if rule.form is not None)

    @property
    def offloads(self) -> bool:
        """True if a rule offloads."""
        return any(rule.action.offloads for rule in self.rules)
