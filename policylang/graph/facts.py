"""The facts of a graph: one row per node, in graph order, as plain columns that need no torch to read.

Filled in one linear pass over an FX graph by :mod:`policylang.graph.collect`, or from a snapshot file. Rows are
numbered from 0 in graph order, and every column is indexed by that number. Columns rather than one object per node: a
graph of a million nodes has to fit beside the graph itself. A set of nodes is a sorted list of rows, which shares the
``int`` objects of the facts, or a mask of one byte per node, which tests membership.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from functools import cached_property
from itertools import chain
from math import prod
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

from attrs import evolve, field, frozen

from policylang.language.syntax import NarrowForm
from policylang.operators.names import (
    GETITEM,
    HOST_COPY_WAIT,
    NARROW,
    OFFLOAD,
    RELOAD,
    SCALES,
    VIEWS_UNSAID,
    WIDEN,
    Category,
)


class StepKind(IntEnum):
    FIRST_RUN = 0
    """A node runs. The run of a collective is its start; its wait is the run of the ``wait_tensor`` that reads it."""
    SECOND_RUN = 1
    """A forward node is recomputed for a backward region."""
    COPY_TO_HOST = 2
    WAIT_TO_HOST = 3
    """The copy is awaited; from here on the device does not hold the value."""
    COPY_FROM_HOST = 4
    """A copy back starts, for a backward region; from here on the device has memory for it."""
    WAIT_FROM_HOST = 5
    """The copy back is awaited; what follows in the region reads it."""
    SCALE = 6
    """The scales are worked out by which a value is narrowed."""
    NARROW = 7
    """A value is narrowed; from here on only its narrow form is held, and the scales."""
    WIDEN = 8
    """It is widened for a backward region; what follows in the region reads that."""


STARTS = {OFFLOAD: StepKind.COPY_TO_HOST, RELOAD: StepKind.COPY_FROM_HOST}
"""The operators that move a value away, or bring it back, and their steps."""
NARROWING = {SCALES: StepKind.SCALE, NARROW: StepKind.NARROW, WIDEN: StepKind.WIDEN}
"""The operators that narrow or widen a value, and their steps."""
MOVING = (*STARTS, HOST_COPY_WAIT, *NARROWING)
"""The operators that put something in the place of a value, or the value in its place."""
LEAVES = (StepKind.COPY_TO_HOST, StepKind.NARROW)
"""The steps that replace a value by something else."""
MovedRows = Mapping[int, NarrowForm | None]
"""Nodes whose value is replaced until the backward: by a narrower one of this form, or by a copy on the host."""

ScheduleStep = tuple[int, int, int]
"""Kind, node and region."""


@frozen
class Schedule:
    """One entry a step, in the order of execution. Only operators are steps: inputs, constants and the output are not.
    A *region* is a run of backward steps that no forward step interrupts. Numbered from 1; 0 is the forward."""

    kinds: bytes = field(repr=False)
    rows: array[int] = field(repr=False)
    regions: array[int] = field(repr=False)
    held: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """Nodes whose values a checkpoint holds, and the step up to which it does."""
    forms: Mapping[int, NarrowForm] = field(factory=dict, repr=False)
    """By narrowed node, its form."""

    @classmethod
    def of(
        cls,
        steps: Iterable[ScheduleStep],
        held: Iterable[tuple[int, int]] = (),
        moved: MovedRows = MappingProxyType({}),
    ) -> Schedule:
        kinds, rows, regions = tuple(zip(*steps, strict=True)) or ((), (), ())
        narrowed = [row for row, kind in zip(rows, kinds, strict=True) if kind == StepKind.NARROW] if moved else ()
        forms = {row: form for row in narrowed if (form := moved[row]) is not None}
        return cls(bytes(kinds), array("i", rows), array("i", regions), tuple(held), forms)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ScheduleStep]:
        return zip(self.kinds, self.rows, self.regions, strict=True)

    def rows_of(self, kind: StepKind) -> list[int]:
        """The nodes of the steps of one kind, in order; a node recomputed for two regions is there twice."""
        return [row for found, row in zip(self.kinds, self.rows, strict=True) if found == kind]

    @property
    def moved(self) -> dict[int, NarrowForm | None]:
        """The nodes whose value is replaced until the backward, in order, and by what."""
        return {row: self.forms.get(row) for kind, row, _ in self if kind in LEAVES}

    def step_bytes(self, facts: Facts, kind: int, row: int) -> int:
        """The bytes that a step makes: all of the value, or its narrow form, or the scales of that."""
        if kind not in (StepKind.SCALE, StepKind.NARROW):
            return facts.bytes[row]
        of, form = (facts.shapes[row] or (), facts.numel[row]), self.forms[row]
        return form.scale_bytes(*of) if kind == StepKind.SCALE else form.bytes(*of) - form.scale_bytes(*of)

    def next_first_runs(self) -> list[int]:
        """For each step the node of the first run that comes next, itself included: a recomputation is before that
        run and for it. -1 where none comes."""
        found, coming = [-1] * len(self), -1
        for step in range(len(self) - 1, -1, -1):
            if self.kinds[step] == StepKind.FIRST_RUN:
                coming = self.rows[step]
            found[step] = coming
        return found

    def names(self, facts: Facts) -> list[tuple[StepKind, str, int]]:
        """The steps in the words of a graph: kind, node, region."""
        return [(StepKind(kind), facts.names[row], region) for kind, row, region in self]


def mask_of(rows: Iterable[int], length: int) -> bytearray:
    """One byte per node of the graph, 1 for the members."""
    mask = bytearray(length)
    for row in rows:
        mask[row] = 1
    return mask


def members(mask: bytearray, universe: Sequence[int]) -> list[int]:
    """The nodes of ``universe`` that the mask holds, in its order."""
    return [row for row in universe if mask[row]]


def union(parts: Sequence[list[int]], universe: Sequence[int], length: int) -> list[int]:
    nonempty = [part for part in parts if part]
    if len(nonempty) <= 1:
        return nonempty[0] if nonempty else []
    return members(mask_of(chain.from_iterable(nonempty), length), universe)


def intersection(left: list[int], right: list[int], length: int) -> list[int]:
    mask = mask_of(right, length)
    return [row for row in left if mask[row]]


def difference(left: list[int], right: list[int], length: int) -> list[int]:
    mask = mask_of(right, length)
    return [row for row in left if not mask[row]]


class GraphKind(Enum):
    JOINT = "joint"
    """Forward and backward in one, from AOTAutograd, not yet partitioned."""
    FLAT = "flat"
    """Forward, loss and backward of a whole step in one."""
    FORWARD = "forward"
    """The forward graph of a partition, or a graph without any backward."""
    BACKWARD = "backward"
    """The backward graph of a partition."""


class Phase(IntEnum):
    INPUT = 0
    FORWARD = 1
    BACKWARD = 2
    OUTPUT = 3


class InputKind(IntEnum):
    NOT_AN_INPUT = 0
    PARAMETER = 1
    BUFFER = 2
    USER = 3
    TANGENT = 4
    OTHER = 5
    """Seeds and offsets, effect tokens, opaque objects."""


class Flag(Category):
    """The bits of ``Facts.flags``: the categories of a node's operator, and more."""

    SYMBOLIC = 32
    """Its value is a symbolic size, bool or float, not a tensor."""
    READS_MUTATED = 64
    """It reads memory that the graph writes: recomputed, it would not see what it saw first."""
    FEEDS_BACKWARD = 128
    """A backward node reads it (or, for an operator with followers, reads one of its followers)."""
    RECORDED_SAVED = 512
    """An earlier partition saved it, or offloaded it (see ``policies/replay.apl``)."""
    RECORDED_OFFLOADED = 131072
    FORWARD_OUTPUT = 2048
    """The forward returns it to the caller: it stays alive whatever the policy decides."""
    DATA_DEPENDENT = 8192
    """A collective whose sizes come from data: ranks agree on them only if their data does."""
    REPEATABLE = 4096
    """Its writes, in a flat graph, do not prevent recomputation: they go to memory of the forward's own that is
    recomputed with it, or to running statistics that a recomputation leaves out."""
    OWN_RESULT = 262144
    """Its writes are :attr:`REPEATABLE`, and it returns memory of its own, not what it writes to."""
    BACKWARD_HOOK = 16384
    """The user's code waits for its gradient (``has_backward_hook``)."""
    GRADIENT = 32768
    """The backward returns it, a forward value or an input of a joint graph, as a gradient or as part of one."""


FLAGS: dict[str, int] = {
    name.lower(): bit for kind in (Category, Flag) for name, bit in vars(kind).items() if name.isupper()
}
"""The bits by their names, as the text form of a graph writes them."""
_ALL_FLAGS = sum(FLAGS.values())


@frozen
class Group:
    """A process group that a collective of the graph names."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks in group order; empty where they are not known."""
    size: int
    dim: str | None = None
    """The mesh dimension it belongs to, where one is known."""


@frozen
class Mesh:
    """A mesh of ranks, as ``DeviceMesh`` has it."""

    dims: tuple[str, ...]
    """The names of its dimensions, slow to fast; empty where they have none."""
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Global ranks in row-major order."""


@frozen
class Ref:
    """An argument that is a node, by its node in the facts."""

    row: int


_Leaf = TypeVar("_Leaf")


def found_in(arguments: Any, kind: type[_Leaf]) -> Iterator[_Leaf]:
    """The values of a type among a call's arguments and in the tuples there, as often as they are there."""
    if isinstance(arguments, kind):
        yield arguments
    elif isinstance(arguments, tuple):
        for part in arguments:
            yield from found_in(part, kind)


def replaced_in(arguments: Any, kind: type[_Leaf], put: Callable[[_Leaf], Any]) -> Any:
    """A call's arguments with other values in the places of those of a type."""
    if isinstance(arguments, kind):
        return put(arguments)
    return tuple([replaced_in(part, kind, put) for part in arguments]) if isinstance(arguments, tuple) else arguments


@frozen
class LostMarker:
    """A value that an earlier partition saved, and that is not to be found for certain in this graph."""

    name: str
    """The name of its node in the earlier graph, or ``value 7 of 36``."""
    reason: str
    """A phrase for people."""


class Derivation(Enum):
    """The kind of relation between a node of a rewritten graph and a node of the earlier graph."""

    SAME = "same"
    NEW = "new"
    """A new node that has the other's metadata."""
    RECOMPUTED = "recomputed"
    PART = "part"
    """A piece of what the other returns: the generator's state, or the value that was drawn from it."""


class Stored(Enum):
    """The form in which a snapshot holds a column (:mod:`policylang.graph.snapshot`)."""

    VALUES = "values"
    NAMES = "names"
    ROW = "row"
    READS = "reads"
    ARGUMENTS = "arguments"
    NOT = "not"
    """It follows from the other columns."""


Check = Callable[[Any], bool]


@frozen
class Column:
    """A column describes itself to rewriting, snapshots, graphs made by hand and tests of edited graphs."""

    check: Check
    """True for valid values: planning relies on facts, and a file may hold anything."""
    blank: Any = None
    """The value of a node for which none is given."""
    blank_for: frozenset[Derivation] = field(default=frozenset(), converter=frozenset)
    """The nodes of a rewritten graph that are blank; the others copy the value of their source node."""
    stored: Stored = Stored.VALUES
    later: bool = False
    """A snapshot may lack it: the column is then empty, and a test that needs it is refused by name."""


@frozen
class OfGraph:
    """A fact of the whole graph."""

    check: Check


_NEW, _RECOMPUTED, _PART = Derivation.NEW, Derivation.RECOMPUTED, Derivation.PART
_OPS = ("placeholder", "get_attr", "call_function", "output")


def _is(kind: type, holds: Check = lambda _: True) -> Check:
    """Exactly of this type: ``True`` is no number."""
    return lambda value: type(value) is kind and holds(value)


def _one_of(kind: type, known: Iterable[Any]) -> Check:
    return _is(kind, frozenset(known).__contains__)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _tuple_of(check: Check, most: int | None = None) -> Check:
    return _is(tuple, lambda value: (most is None or len(value) <= most) and all(map(check, value)))


def _record(kind: type, holds: Check = lambda _: True, **checks: Check) -> Check:
    return _is(kind, lambda value: all(check(getattr(value, name)) for name, check in checks.items()) and holds(value))


_is_text = _is(str, str.isprintable)
_is_whole = _is(int)
_is_amount = _is(int, lambda value: 0 <= value < 1 << 63)
_is_flags = _is(int, lambda value: 0 <= value <= _ALL_FLAGS)
_is_sizes = _tuple_of(_is_whole, most=256)
_is_ranks = _tuple_of(_is_amount, most=1 << 20)
_is_data_sizes = _is(
    tuple, lambda value: len(value) in (0, 3) and all(_is_whole(each) and each >= -1 for each in value)
)
_is_parts = _tuple_of(_is(tuple, lambda part: len(part) == 2 and _is_text(part[0]) and _is_whole(part[1])))
_is_data_terms = _is(
    tuple,
    lambda value: (
        not value or (len(value) == 3 and all(map(_is_whole, value[:2])) and value[0] >= -1 and _is_parts(value[2]))
    ),
)
_is_group = _record(Group, name=_is_text, ranks=_is_ranks, size=_is_whole, dim=_or_none(_is_text))
_is_groups = _is(dict, lambda groups: all(_is_text(name) and _is_group(group) for name, group in groups.items()))
_is_mesh = _record(
    Mesh,
    lambda mesh: (not mesh.dims or len(mesh.dims) == len(mesh.shape)) and prod(mesh.shape) == len(mesh.ranks),
    dims=_tuple_of(_is_text),
    shape=_tuple_of(_is_amount),
    ranks=_is_ranks,
)
_is_lost_marker = _record(LostMarker, name=_is_text, reason=_is_text)


@frozen(eq=False, slots=False)
class Facts:
    """Facts of a graph for planning: one row per node, in graph order, as columns indexed by row number. Sizes are
    those of one rank: bytes and elements of the tensors that a node returns, FLOPs of one run of its operator."""

    def __repr__(self) -> str:
        return f"<policylang.Facts: {self.kind.value} graph of {len(self.names):,} nodes, torch {self.torch_version}>"

    kind: Annotated[GraphKind, OfGraph(_one_of(GraphKind, GraphKind))]
    """Joint, flat, or the forward or backward graph of a partition."""
    names: Annotated[Sequence[str], Column(_is_text, stored=Stored.NAMES)]
    """The nodes' names in the graph."""
    ops: Annotated[Sequence[str], Column(_one_of(str, _OPS), blank="call_function", blank_for={_NEW})]
    """``placeholder``, ``get_attr``, ``call_function`` or ``output``."""
    targets: Annotated[Sequence[str], Column(_is_text, blank="")]
    """The operator in full, ``aten.mm.default``; ``higher_order.flex_attention`` and ``builtin.getitem`` have no
    overload. Empty unless ``ops`` is ``call_function``."""
    phases: Annotated[Sequence[int], Column(_one_of(int, map(int, Phase)))]
    """A :class:`Phase` each: input, forward, backward or output."""
    modules: Annotated[Sequence[str], Column(_is_text, blank="")]
    """The normalised module path, ``model.layers.0.self_attn.q_proj``; empty where there is none."""
    ac_regions: Annotated[Sequence[int | None], Column(_or_none(_is_whole), blank_for={_RECOMPUTED})]
    """The user's activation-checkpoint region."""
    user_tags: Annotated[Sequence[str | None], Column(_or_none(_is_text), blank_for={_RECOMPUTED})]
    """The ``CheckpointPolicy`` member that the user's own ``checkpoint`` wrote; policylang's are not the user's."""
    flags: Annotated[Sequence[int], Column(_is_flags, blank=0)]
    """The bits of :class:`Flag` that hold of a node."""
    bytes: Annotated[Sequence[int], Column(_is_amount, blank=0)]
    """The size of all the tensors a node returns; symbolic sizes count with their hint, those that come from data with
    theirs or with the most that they can be, where that is less. Under a stated load see ``graph/expert_load.py``."""
    numel: Annotated[Sequence[int], Column(_is_amount, blank=0)]
    """The number of elements of all the tensors a node returns."""
    shapes: Annotated[Sequence[tuple[int, ...] | None], Column(_or_none(_is_sizes))]
    """The shape of a single tensor; None for tuples and symbolic values."""
    strides: Annotated[Sequence[tuple[int, ...] | None], Column(_or_none(_is_sizes))]
    """The strides of a single tensor, in elements; None where there is none, where its layout has no strides, or where
    sizes or strides are symbolic and so not the same in every run."""
    dtypes: Annotated[Sequence[str], Column(_is_text, blank="")]
    """``bfloat16``; empty where there is no single tensor."""
    devices: Annotated[Sequence[str], Column(_is_text, blank="")]
    """``cuda:0``; empty where there is no single tensor."""
    flops: Annotated[Sequence[int], Column(_is_amount, blank=0, blank_for={_NEW, _PART})]
    """The FLOPs of one run; 0 where nothing is multiplied, and where no formula is known."""
    inputs: Annotated[Sequence[tuple[int, ...]], Column(_tuple_of(_is_whole), blank=(), stored=Stored.READS)]
    """The distinct nodes a node reads, in argument order."""
    users: Annotated[Sequence[tuple[int, ...]], Column(_tuple_of(_is_whole), stored=Stored.NOT)]
    """The distinct nodes that read it, in graph order."""
    owners: Annotated[Sequence[int], Column(_is_whole, stored=Stored.ROW)]
    """The producer whose decision a node shares: of a ``getitem`` the multi-output operator, of a ``wait_tensor`` the
    collective, of every other node itself. Transitively closed: a producer's producer is itself."""
    input_kinds: Annotated[Sequence[int], Column(_one_of(int, map(int, InputKind)), blank=0, blank_for={_NEW})]
    """An :class:`InputKind` each: parameter, buffer, the user's, tangent."""
    input_names: Annotated[Sequence[str], Column(_is_text, blank="", blank_for={_NEW})]
    """The dotted name of a parameter or buffer among the graph inputs, where it is known; else empty."""
    arguments: Annotated[Sequence[tuple[Any, ...]], Column(_is(tuple), blank=(), stored=Stored.ARGUMENTS)]
    """All arguments of layout operators and collectives in the order of the schema, defaults filled in, as plain
    values; a node is a :class:`Ref`, a dtype its name. Empty for other operators: rewriting asks for these alone."""
    group_names: Annotated[Sequence[str], Column(_is_text, blank="", blank_for={_NEW})]
    """The process group of a collective; empty otherwise."""
    groups: Annotated[dict[str, Group], OfGraph(_is_groups)] = field(factory=dict)
    meshes: Annotated[tuple[Mesh, ...], OfGraph(_tuple_of(_is_mesh))] = ()
    """The meshes that the graph's groups belong to, if known."""
    rank: Annotated[int | None, OfGraph(_or_none(_is_amount))] = None
    """The global rank whose graph it is, where torch.distributed knows one: slices of gathered values go by it."""
    torch_version: Annotated[str, OfGraph(_is_text)] = ""
    lost_records: Annotated[tuple[LostMarker, ...], OfGraph(_tuple_of(_is_lost_marker))] = ()
    annotations: Annotated[Sequence[tuple[str, ...]], Column(_tuple_of(_is_text), blank=(), later=True)] = ()
    """Names that somebody has set on a node (``node.meta["custom"]``) to anything but False, ours left out."""
    uncounted: Annotated[Sequence[str], Column(_is_text, blank="", blank_for={_NEW, _PART}, later=True)] = ()
    """The operators of a call whose work is not in :attr:`flops`: those that could do matrix work and have no FLOP
    formula (``could_do_matrix_work``). Empty where there are none, mostly the one that is called."""
    data_sizes: Annotated[Sequence[tuple[int, ...]], Column(_is_data_sizes, blank=(), later=True)] = ()
    """For a node some of whose sizes come from data (``nonzero``, ``item``): the number that the largest of them counts
    as, and the least and the most bytes that it can have, -1 where there is no limit. Empty where no node has any."""
    data_terms: Annotated[Sequence[tuple[Any, ...]], Column(_is_data_terms, blank=(), later=True)] = ()
    """The bytes of such a node as a sum: the dimension that comes from data (-1 of none or several), the bytes that do
    not, and pairs of a symbol (``u0``) and the bytes for each one of it; no pairs where it is no such sum. For a
    symbolic size that is one symbol, that symbol: the first node with it is the one that makes it. Empty where a load
    has been stated that tells the size."""
    stages: Annotated[Sequence[int], Column(_is(int, lambda value: -1 <= value < 1 << 15), blank=-1, later=True)] = ()
    """The stage of a pipeline that a node is of, where the graph was joined from the graphs of stages: -1 for inputs
    and the output, and in every other graph."""

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def index(self) -> dict[str, int]:
        """Node by node name."""
        return {name: row for row, name in enumerate(self.names)}

    @cached_property
    def stage_count(self) -> int:
        """The number of stages that the graph was joined from; 0 for any other."""
        return max(self.stages, default=-1) + 1

    @cached_property
    def forward(self) -> list[int]:
        """The nodes that rules range over: every forward ``call_function`` node, in graph order."""
        phases, ops = self.phases, self.ops
        return [row for row in range(len(self)) if phases[row] == Phase.FORWARD and ops[row] == "call_function"]

    @cached_property
    def forward_mask(self) -> bytearray:
        """One byte per node, 1 for those of :attr:`forward`: membership without hashing."""
        return mask_of(self.forward, len(self))

    @cached_property
    def writing(self) -> list[int]:
        """The nodes that write memory which they are given."""
        writes = int(Flag.WRITES)
        return [row for row, flags in enumerate(self.flags) if flags & writes]

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators that the graph calls, in full and in the order of their first calls."""
        return tuple(name for name in dict.fromkeys(self.targets) if "." in name)

    @cached_property
    def by_target(self) -> dict[str, list[int]]:
        """Operator in full to the forward nodes that call it: operators are looked up, never searched."""
        index: dict[str, list[int]] = {}
        targets = self.targets
        for row in self.forward:
            index.setdefault(targets[row], []).append(row)
        return index

    @cached_property
    def by_functional_form(self) -> dict[str, list[int]]:
        """What a functional graph has (``aten.relu.default``) to the forward nodes that compute it in place (``relu_``)
        within memory of the forward's own: not a counter, which a functional graph writes at its end."""
        index: dict[str, list[int]] = {}
        own = Flag.WRITES | Flag.REPEATABLE
        for target, rows in self.by_target.items():
            namespace, _, rest = target.partition(".")
            name, _, overload = rest.partition(".")
            if name.endswith("_") and not name.endswith("__"):
                written = [row for row in rows if self.flags[row] & own == own]
                index |= {f"{namespace}.{name[:-1]}.{overload}": written} if written else {}
        return index

    @cached_property
    def followers(self) -> dict[int, list[int]]:
        """Producer to the nodes that share its decision, itself left out."""
        result: dict[int, list[int]] = {}
        for row, owner in enumerate(self.owners):
            if owner != row:
                result.setdefault(owner, []).append(row)
        return result

    @cached_property
    def storage_roots(self) -> Sequence[int]:
        """By node, the node whose memory it lives in: itself unless it is a view, a piece of one, or a ``wait_tensor``.

        Each output of a multi-output operator has separate memory, unless the operator returns views, as ``split``
        does. What a flat graph writes in place shares a decision with all that is recomputed with it, and memory with
        what it writes to alone.
        """
        roots = array("i", range(len(self)))
        flags, inputs, owners, targets = self.flags, self.inputs, self.owners, self.targets
        own_result = int(Flag.OWN_RESULT)
        for row, owner in enumerate(owners):
            first = inputs[row][0] if inputs[row] else row
            if owner == row:
                is_part = returns_memory_of_input(self, row)
            elif targets[row] == GETITEM:
                first = inputs[row][0] if inputs[row] else owner
                is_part = returns_memory_of_input(self, first)
            elif flags[row] & Flag.WRITES:  # to what the owner makes, a piece of it, or a result of what fills it
                known = (roots[each] for each in inputs[row] if owners[roots[each]] == owner)
                own = (root for root in known if root == owner or targets[root] == GETITEM or flags[root] & own_result)
                first, is_part = next(own, owner), not flags[row] & own_result
            elif flags[row] & Flag.REPEATABLE:
                is_part = returns_memory_of_input(self, row)
            else:
                first, is_part = owner, True
            if is_part:
                roots[row] = roots[first]
        return roots

    def has(self, row: int, flag: int) -> bool:
        """True if the node has the flag."""
        return bool(self.flags[row] & flag)


_HINTS = get_type_hints(Facts, include_extras=True).items()
_SAID = {name: said for name, hint in _HINTS for said in getattr(hint, "__metadata__", ())}
COLUMNS: Mapping[str, Column] = {name: said for name, said in _SAID.items() if isinstance(said, Column)}
LATER_COLUMNS = tuple(name for name, said in COLUMNS.items() if said.later)
OF_GRAPH: Mapping[str, OfGraph] = {name: said for name, said in _SAID.items() if isinstance(said, OfGraph)}


def rewritten(facts: Facts, rows: Iterable[tuple[int, Derivation]], **given: Any) -> Facts:
    """The facts of a graph whose nodes come from those of ``facts``. ``rows``: the source row of each node, and how it
    derives from it. ``given``: the columns that do not follow, among them phases, inputs, producers and flags."""
    derived = list(rows)
    sources = [row for row, _ in derived]
    for name, said in COLUMNS.items():
        old = getattr(facts, name)
        if name in given or said.stored is Stored.NOT:
            continue
        if said.blank_for and old:
            given[name] = [said.blank if how in said.blank_for else old[row] for row, how in derived]
        else:
            given[name] = list(map(old.__getitem__, sources)) if old else ()
    kept = ~Flag.FEEDS_BACKWARD
    flags = array("i", [each & kept for each in given["flags"]])
    for row in read_by_backward(given["phases"], given["inputs"], given["owners"]):
        flags[row] |= Flag.FEEDS_BACKWARD
    return evolve(facts, **given | {"flags": flags, "users": users_of(given["inputs"])})


def is_gradient(facts: Facts, row: int) -> bool:
    """The backward returns this forward value or input: a gradient, or part of one, such as a DTensor's device mesh. An
    output of the forward is one only if it is flagged as both."""
    if facts.phases[row] == Phase.INPUT:
        return bool(facts.flags[row] & Flag.GRADIENT) and facts.input_kinds[row] != InputKind.TANGENT
    is_both = facts.flags[row] & (Flag.GRADIENT | Flag.FORWARD_OUTPUT) != Flag.FORWARD_OUTPUT
    return facts.phases[row] == Phase.FORWARD and is_both


def read_by_backward(phases: Sequence[int], inputs: Sequence[tuple[int, ...]], owners: Sequence[int]) -> Iterator[int]:
    """The nodes that are :attr:`Flag.FEEDS_BACKWARD`, some of them twice."""
    for row, reads in enumerate(inputs):
        if phases[row] == Phase.BACKWARD:
            for read in reads:
                if phases[read] != Phase.BACKWARD:
                    yield read
                    yield owners[read]


def uncounted_operators(facts: Facts, rows: Iterable[int]) -> dict[str, int] | None:
    """The operators among some nodes that :attr:`Facts.flops` does not count, and their calls; None if unknown."""
    column = facts.uncounted
    if not column and len(facts):
        return None
    return dict(sorted(Counter(column[row] for row in rows if column[row]).items()))


def forward_users(facts: Facts, row: int) -> list[int]:
    """The forward calls that read a node; a backward node or the graph's output is not one."""
    mask = facts.forward_mask
    return [user for user in facts.users[row] if mask[user]]


def users_of(inputs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    users: list[list[int]] = [[] for _ in inputs]
    for row, reads in enumerate(inputs):
        for read in reads:
            users[read].append(row)
    return [tuple(rows) for rows in users]


def returns_memory_of_input(facts: Facts, row: int) -> bool:
    """An operator returns views, one or several, of its first argument."""
    return bool(facts.flags[row] & Flag.VIEW) or facts.targets[row] in VIEWS_UNSAID
