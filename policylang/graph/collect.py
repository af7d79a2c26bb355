"""Reads an FX graph into facts, in passes that each look at every node once."""

from __future__ import annotations

import operator as python_operator
from array import array
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from attrs import define, evolve, field
from torch import fx

from policylang.graph import marks, phases
from policylang.graph.facts import (
    Facts,
    Flag,
    GraphKind,
    Group,
    LostMarker,
    Mesh,
    Phase,
    Ref,
    read_by_backward,
    users_of,
)
from policylang.graph.memory import memory_of, mutated_reads
from policylang.operators import calls
from policylang.operators.layouts import MOVERS
from policylang.operators.names import GETITEM, WAITS, ZEROS
from policylang.operators.rows import is_known
from policylang.operators.work import WorkCounter
from policylang.torch_compat import distributed, graphs


class Value(NamedTuple):
    bytes: int = 0
    numel: int = 0
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    dtype: str = ""
    device: str = ""
    symbolic: bool = False
    by_data: tuple[int, ...] = ()
    """:attr:`Facts.data_sizes`."""
    terms: tuple[Any, ...] = ()
    """:attr:`Facts.data_terms`."""


NOTHING, SYMBOL = Value(), Value(symbolic=True)
NO_LIMIT = -1


class _Measurements:
    """Measures values; equal shapes, types and whole measurements are one object, however many nodes have them."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.Size, tuple[int, ...] | None, torch.dtype, torch.device], Value] = {}
        self._measured: dict[Value, Value] = {}
        self._symbolics: dict[Hashable, Value] = {}

    def measure(self, value: Any) -> Value:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _symbol(value)
        if isinstance(value, (tuple, list)):
            parts = [self.measure(part) for part in value]
            size, numel = sum(part.bytes for part in parts), sum(part.numel for part in parts)
            total = NOTHING._replace(bytes=size, numel=numel, by_data=_of_all(parts), terms=_terms_of_all(parts))
            return self._measured.setdefault(total, total)
        return NOTHING

    def _tensor(self, tensor: torch.Tensor) -> Value:
        size, dtype, device = tensor.shape, tensor.dtype, tensor.device
        stride = tensor.stride() if tensor.layout is torch.strided else None
        try:
            known = self._tensors.get((size, stride, dtype, device))
        except TypeError:  # symbolic sizes have no hash
            return self._symbolic(tensor)
        if known is None:
            known = self._describe(tuple(size), stride, dtype, device)
            self._tensors[size, stride, dtype, device] = known
        return known

    def _symbolic(self, tensor: torch.Tensor) -> Value:
        size, dtype, device = tensor.shape, tensor.dtype, tensor.device
        key = graphs.expressions(size), dtype, device
        if key not in self._symbolics:
            found = self._describe(tuple(graphs.hint(length) for length in size), None, dtype, device)
            if graphs.has_data_symbol(tensor):
                found = found._replace(by_data=_by_data(size, dtype.itemsize), terms=_terms(size, dtype.itemsize))
            self._symbolics[key] = found
        return self._symbolics[key]

    def _describe(
        self, shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
    ) -> Value:
        numel = prod(shape)
        name = str(dtype).removeprefix("torch.")
        value = Value(numel * dtype.itemsize, numel, shape, stride, name, str(device))
        return self._measured.setdefault(value, value)


def _by_data(size: torch.Size, itemsize: int) -> tuple[int, int, int]:
    """:attr:`Facts.data_sizes` of a tensor."""
    ranges = [graphs.size_range(length) for length in size]
    counted = max(graphs.hint(length) for length in size if graphs.has_data_symbol(length))
    highest = [most for _, most in ranges if most is not None]
    most = itemsize * prod(highest) if len(highest) == len(ranges) else NO_LIMIT
    return counted, itemsize * prod(least for least, _ in ranges), most


def _symbol(value: Any) -> Value:
    found = graphs.data_terms(value) if graphs.has_data_symbol(value) else None
    if found is None or found[0] or [*found[1].values()] != [1]:
        return SYMBOL
    return SYMBOL._replace(terms=(-1, 0, tuple(found[1].items())))


_NO_SUM: tuple[Any, ...] = (-1, 0, ())


def _terms(size: torch.Size, itemsize: int) -> tuple[Any, ...]:
    """:attr:`Facts.data_terms` of a tensor."""
    dims = [dim for dim, length in enumerate(size) if graphs.has_data_symbol(length)]
    found = graphs.data_terms(size[dims[0]]) if len(dims) == 1 else None
    if found is None:
        return _NO_SUM
    each = itemsize * prod(graphs.hint(length) for dim, length in enumerate(size) if dim != dims[0])
    return dims[0], each * found[0], tuple((symbol, each * times) for symbol, times in found[1].items())


def _terms_of_all(parts: Sequence[Value]) -> tuple[Any, ...]:
    if not any(part.by_data for part in parts):
        return ()
    if any(part.by_data and not part.terms[2] for part in parts):
        return _NO_SUM
    constant, total = 0, dict[str, int]()
    for part in parts:
        _, more, terms = part.terms if part.by_data else (-1, part.bytes, ())
        constant += more
        for symbol, times in terms:
            total[symbol] = total.get(symbol, 0) + times
    return -1, constant, tuple(total.items())


def _of_all(parts: Sequence[Value]) -> tuple[int, ...]:
    if not any(part.by_data for part in parts):
        return ()
    found = [part.by_data or (0, part.bytes, part.bytes) for part in parts]
    most = NO_LIMIT if any(each[2] == NO_LIMIT for each in found) else sum(each[2] for each in found)
    return max(each[0] for each in found), sum(each[1] for each in found), most


_KEPT = WAITS | MOVERS.keys()
_NOTHING: tuple[Any, ...] = ()


def _argument_column(
    nodes: Sequence[fx.Node], operators: Sequence[calls.OperatorInfo], row_of: Mapping[fx.Node, int]
) -> list[tuple[Any, ...]]:
    column = [_NOTHING] * len(nodes)
    for row, (node, operator) in enumerate(zip(nodes, operators, strict=True)):
        kept = operator.name in _KEPT or operator.flags & Flag.COLLECTIVE or is_known(operator.name)
        if kept and (schema := calls.parameters(node.target)) is not None:
            args, kwargs = node.args, node.kwargs
            named = [kwargs.get(name, default) for name, default in schema[len(args) :]]
            column[row] = _plain_tuple([*args, *named], row_of)
    return column


def _plain_tuple(values: Sequence[Any], row_of: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    return tuple([value if type(value) is int else _plain(value, row_of) for value in values])


def _plain(value: Any, row_of: Mapping[fx.Node, int]) -> Any:
    """A value that needs no torch to read; what has no plain form becomes its text."""
    if isinstance(value, fx.Node):
        return Ref(row_of[value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return _plain_tuple(value, row_of)
    return graphs.name_of_group(value) or str(value).removeprefix("torch.")


def _group_columns(
    nodes: Sequence[fx.Node], operators: Sequence[calls.OperatorInfo], known: Mapping[str, Group]
) -> tuple[list[str], dict[str, Group]]:
    """``Facts.group_names`` and ``Facts.groups``; a group that is not known is asked of torch.distributed."""
    names = [""] * len(nodes)
    groups: dict[str, Group] = {}
    for row, operator in enumerate(operators):
        if operator.flags & Flag.COLLECTIVE and (name := calls.group_name(operator, nodes[row])):
            if name not in groups:
                groups[name] = known.get(name) or Group(name, ranks := graphs.group_ranks(name), len(ranks))
            names[row] = groups[name].name
    return names, groups


def _meshes_of(groups: Mapping[str, Group], given: Any) -> tuple[Mesh, ...]:
    """The mesh that was given, or else those along one dimension of which the graph has a group, in a fixed order. A
    rank's graph names only this rank's groups; the groups of other ranks follow from the mesh, which no graph holds."""
    if not groups:
        return ()
    layouts = map(distributed.mesh_layout, distributed.known_meshes() if given is None else [given])
    known = {Mesh(*layout) for layout in layouts if layout is not None}
    if given is not None:
        return tuple(known)
    along = {frozenset(group.ranks) for group in groups.values()}
    fitting = [mesh for mesh in known if not along.isdisjoint(map(frozenset, _rows(mesh)))]
    return tuple(sorted(fitting, key=lambda mesh: (-len(mesh.shape), mesh.shape, mesh.ranks, mesh.dims)))


def _rows(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """The ranks along each dimension, for every place in the others."""
    strides = [prod(mesh.shape[dim + 1 :]) for dim in range(len(mesh.shape))]
    for dim, size in enumerate(mesh.shape):
        others = [range(1) if each == dim else range(length) for each, length in enumerate(mesh.shape)]
        for at in product(*others):
            first = sum(place * stride for place, stride in zip(at, strides, strict=True))
            yield tuple(mesh.ranks[first + place * strides[dim]] for place in range(size))


_NO_OPERATOR = calls.OperatorInfo("", 0)
_OFFLOADED = Flag.RECORDED_SAVED | Flag.RECORDED_OFFLOADED


def collect(
    gm: fx.GraphModule | fx.Graph,
    *,
    kind: GraphKind | None = None,
    static_inputs: Sequence[int] | None = None,
    root: str = "",
    groups: Mapping[str, Group] | None = None,
    mesh: Any = None,
    state: Collection[fx.Node] = (),
) -> Facts:
    """Reads the facts of a graph. The graph is not changed, and no guard is added to symbolic sizes.

    Args:
        gm: a joint graph before partitioning, the flat graph of a whole step, or one graph of a partition.
        kind: which of these, where the caller knows; worked out from the graph otherwise.
        static_inputs: positions of the inputs whose memory is the same in every step, as AOTAutograd hands them to
            partitioners (``static_lifetime_input_indices``).
        root: put before every module path: the name of the block where each block is compiled on its own.
        groups: process groups by name, where the caller knows them; the others are asked of torch.distributed.
        mesh: the ``DeviceMesh`` that they belong to; without it, those that the program has made are looked at.
        state: of a flat graph whose forward may run several times before its first backward, the inputs to whose memory
            each of these runs writes.

    Raises:
        PolicyGraphError: APL340 if nothing marks the backward nodes, APL341 where the graph calls modules or
            methods.
    """
    nodes = list((gm.graph if isinstance(gm, fx.GraphModule) else gm).nodes)
    phases.check_operators(nodes)
    module = gm if isinstance(gm, fx.GraphModule) else gm.owning_module
    if nodes and nodes[0].meta.get(phases.STAGE_ACTION) == phases.UNSHARD:
        static_inputs = range(len(nodes))
    static = None if static_inputs is None else frozenset(static_inputs)
    return _Collector(module, nodes, static, phases.ModulePaths(root), groups or {}, mesh, state).facts(kind)


@define(eq=False)
class _Collector:
    """The columns of one graph while they are being filled."""

    module: fx.GraphModule | None
    nodes: list[fx.Node]
    static: frozenset[int] | None
    paths: phases.ModulePaths
    groups: Mapping[str, Group]
    mesh: Any
    state: Collection[fx.Node]
    row_of: dict[fx.Node, int] = field(factory=dict)
    operators: list[calls.OperatorInfo] = field(factory=list)

    def facts(self, kind: GraphKind | None) -> Facts:
        nodes = self.nodes
        row_of = self.row_of = {node: row for row, node in enumerate(nodes)}
        inputs = [tuple([row_of[read] for read in node.all_input_nodes]) for node in nodes]
        ops = [node.op for node in nodes]
        self.operators = [calls.describe(node.target) if node.op == "call_function" else _NO_OPERATOR for node in nodes]
        targets = [operator.name for operator in self.operators]
        output_rows, output_descs = self._outputs()
        said = self._marks(output_descs)
        if kind is None:
            kind = phases.kind_of(said, targets)
        else:
            phases.check_kind(kind, said)
        phase_column = phases.phases_of(kind, said, ops, inputs, output_rows)
        users = users_of(inputs)
        owners, roots = self._owners(inputs)
        measure = _Measurements().measure
        found = (measure(graphs.value_of(node.meta)) for node in nodes)
        values = [
            value._replace(bytes=0) if name == ZEROS else value for value, name in zip(found, targets, strict=True)
        ]
        flags = array("i", [Flag.SYMBOLIC if value.symbolic else 0 for value in values])
        self._flag_calls(flags, owners)
        names = [node.name for node in nodes]
        for row in read_by_backward(phase_column, inputs, owners):
            flags[row] |= Flag.FEEDS_BACKWARD
        self._flag_outputs(flags, phase_column, output_rows, output_descs)
        if kind is GraphKind.FLAT:
            self._flag_memory(flags, phase_column, owners)
        else:
            for row in mutated_reads(nodes, self.operators, roots, row_of, output_descs):
                flags[row] |= Flag.READS_MUTATED
        tags = [marks.user_tag(node.meta) for node in nodes]
        modules = [self.paths.add(phases.raw_path(node.meta)) if node.op != "placeholder" else "" for node in nodes]
        kinds, input_names = phases.input_columns(self.module, nodes, self.static, output_descs, self.paths)
        path_of = self.paths.table()
        counter = WorkCounter()
        works = [counter.of(node) for node in nodes]
        group_names, groups = _group_columns(nodes, self.operators, self.groups)
        facts = Facts(
            kind=kind,
            names=names,
            ops=ops,
            targets=targets,
            phases=phase_column,
            modules=[path_of[raw] for raw in modules],
            ac_regions=[region for _, region in tags],
            user_tags=[tag for tag, _ in tags],
            flags=flags,
            bytes=array("q", [value.bytes for value in values]),
            numel=array("q", [value.numel for value in values]),
            shapes=[value.shape for value in values],
            strides=[value.stride for value in values],
            dtypes=[value.dtype for value in values],
            devices=[value.device for value in values],
            flops=array("q", [work.flops for work in works]),
            inputs=inputs,
            users=users,
            owners=owners,
            input_kinds=kinds,
            input_names=[path_of[raw] for raw in input_names],
            arguments=_argument_column(nodes, self.operators, row_of),
            group_names=group_names,
            groups=groups,
            meshes=_meshes_of(groups, self.mesh),
            rank=distributed.own_rank(),
            torch_version=str(torch.__version__),
            annotations=[marks.annotated(node.meta) for node in nodes],
            uncounted=[work.uncounted for work in works],
            data_sizes=[value.by_data for value in values] if any(value.by_data for value in values) else (),
            data_terms=[value.terms for value in values] if any(value.terms for value in values) else (),
        )
        lost = self._flag_saved(flags, facts)
        return evolve(facts, lost_records=lost) if lost else facts

    def _outputs(self) -> tuple[list[int | None], list[Any]]:
        """The node and the descriptor of each value that the graph returns."""
        if not self.nodes or (last := self.nodes[-1]).op != "output":
            return [], []
        rows = [self.row_of[leaf] if isinstance(leaf, fx.Node) else None for leaf in _leaves(last.args[0])]
        descs = _leaves(last.meta.get("desc"))
        return rows, descs if len(descs) == len(rows) else [None] * len(rows)

    def _marks(self, output_descs: Sequence[Any]) -> phases.PhaseMarks:
        metas = [node.meta for node in self.nodes]
        rows = [row for row, node in enumerate(self.nodes) if node.op == "placeholder"]
        descs = [metas[row].get("desc") for row in rows]
        return phases.PhaseMarks(
            tags=[meta.get("partitioner_tag") for meta in metas],
            said=bytearray(map(phases.said_phase, metas)),
            hooked=bytearray(bool(meta.get("autograd_backward")) for meta in metas),
            recorded=bytearray(marks.SAVED in marks.custom(meta) for meta in metas),
            seeds=[row for row, node in enumerate(self.nodes) if phases.is_seed(node)],
            tangents=[row for row in rows if phases.is_tangent(self.nodes[row])],
            output_descs=output_descs,
            action=metas[0].get(phases.STAGE_ACTION, "") if metas else "",
            some_undescribed=len({desc is None for desc in descs}) == 2,
        )

    def _owners(self, inputs: Sequence[tuple[int, ...]]) -> tuple[array[int], array[int]]:
        """The producer of each node, and the node whose memory its value uses."""
        owners = array("i", range(len(inputs)))
        roots = array("i", range(len(inputs)))
        nodes, operators, row_of = self.nodes, self.operators, self.row_of
        for row, reads in enumerate(inputs):
            if not reads:
                continue
            operator = operators[row]
            if nodes[row].target is python_operator.getitem:
                source = reads[0]
                roots[row] = roots[source]
                if nodes[source].op == "call_function":
                    owners[row] = owners[source]
            elif operator.name in WAITS:
                roots[row] = roots[reads[0]]
                if operators[owners[reads[0]]].flags & Flag.COLLECTIVE:
                    owners[row] = owners[reads[0]]
            elif operator.aliased:
                aliased = calls.nodes_in(calls.argument(nodes[row], operator.aliased))
                if aliased:
                    roots[row] = roots[row_of[aliased[0]]]
        return owners, roots

    def _flag_calls(self, flags: array[int], owners: array[int]) -> None:
        for row, node in enumerate(self.nodes):
            operator = self.operators[row]
            of_operator = operator.flags
            if of_operator & Flag.RANDOM and not calls.draws_random(operator, node):
                of_operator &= ~Flag.RANDOM
            flags[row] |= of_operator | calls.writes_inside(node)
            if operator.name == GETITEM and owners[row] != row:
                flags[owners[row]] |= Flag.MULTI_OUTPUT
            if node.meta.get("has_backward_hook"):
                flags[row] |= Flag.BACKWARD_HOOK
            values = (each.meta.get("val") for each in node.all_input_nodes)
            if flags[row] & Flag.COLLECTIVE and any(map(graphs.has_data_symbol, values)):
                flags[row] |= Flag.DATA_DEPENDENT

    def _flag_saved(self, flags: array[int], facts: Facts) -> tuple[LostMarker, ...]:
        """Flags what an earlier partition saved: marked on the very node, or found by its marker."""
        markers: dict[int, marks.SavedMarker] = {}
        for row, node in enumerate(self.nodes):
            if mark := marks.recorded(node.meta):
                flags[row] |= _OFFLOADED if mark == marks.OFFLOADED else Flag.RECORDED_SAVED
            elif (marker := marks.from_annotation(marks.custom(node.meta).get(marks.SAVED))) is not None:
                markers[row] = marker
        found = marks.find(markers, facts)
        for row, offloaded in found.saved:
            flags[row] |= _OFFLOADED if offloaded else Flag.RECORDED_SAVED
        return tuple(found.lost)

    def _flag_outputs(self, flags: array[int], column: bytearray, rows: Sequence[int | None], descs: list[Any]) -> None:
        for row, desc in zip(rows, descs, strict=True):
            if row is None or column[row] not in (Phase.FORWARD, Phase.INPUT):
                continue
            if desc is not None and graphs.is_backward_output(desc):
                flags[row] |= Flag.GRADIENT
            elif column[row] == Phase.FORWARD and (desc is None or not graphs.is_saved_output(desc)):
                flags[row] |= Flag.FORWARD_OUTPUT

    def _flag_memory(self, flags: array[int], column: bytearray, owners: array[int]) -> None:
        """Flags what a flat graph recomputes together, and what it must not recompute: it writes in place, anywhere."""
        memory = memory_of(self.nodes, column, self.state)
        if not memory.writes:
            return
        for row, unit in enumerate(memory.units):
            if unit >= 0:
                flags[row] |= Flag.REPEATABLE | (
                    Flag.OWN_RESULT if memory.roots[row] != unit and flags[row] & Flag.WRITES else 0
                )
                owners[row] = unit
            if row in memory.statistics:
                flags[row] |= Flag.WRITES if row in memory.written else Flag.WRITES | Flag.REPEATABLE
            if row in memory.unstable:
                flags[row] |= Flag.READS_MUTATED
        for root in memory.loose:  # what was written is saved with its memory, and with all that writes to it
            for row in memory.writes[root]:
                if memory.roots[row] == root and column[row] == column[root]:
                    owners[row] = root
        for row, owner in enumerate(owners):  # a producer comes before its followers
            owners[row] = owners[owner]


def _leaves(value: Any) -> list[Any]:
    """The leaves of nested tuples and lists, in order, None included. A file may nest them to any depth."""
    leaves, pending = [], [value]
    while pending:
        if isinstance(part := pending.pop(), (tuple, list)):
            pending.extend(reversed(part))
        else:
            leaves.append(part)
    return leaves
