"""Turns the observed first call of a block into a graph, and that into the facts that a plan is made from.

A graph is written down from the operations: inputs as they were met, operators in the order in which they ran, and
for each value that autograd saved a node that stands for its reader. The backward itself has not run yet, and nothing
but what it reads is asked of it.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import fx

from policylang.backends.eager.first_call import Observation, Operation, TensorFacts
from policylang.backends.eager.origins import OUTSIDE, External, OperatorStream, TensorOrigin, gives_data, mapped
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.marks import BACKWARD, FORWARD, PHASE
from policylang.operators.names import GETITEM
from policylang.torch_compat.graphs import outside_of_modes, schema_of
from policylang.torch_compat.tracing import fake_tensor_mode
from policylang.tracing.capture import name_input

_READER = torch.ops.aten.alias.default
"""Stands for whatever of the backward reads a saved value."""


@frozen(eq=False)
class BlockTrace:
    """The facts of one block, for one kind of call."""

    facts: Facts
    stream: OperatorStream
    rows: tuple[int, ...]
    """By operator of the stream, its row; -1 where nobody reads its result."""
    read: dict[int, frozenset[int]]
    """By operator with several results, the results that anyone reads."""
    reach_row: int
    """The first row beyond the recomputation."""
    unchanged: frozenset[int]
    """Rows without an operator in the stream: views that return their argument."""
    results: tuple[tuple[int, ...], ...]
    """By operator, the rows of what it returns, part by part; -1 where nobody reads one."""
    returned: tuple[int, ...]
    """The rows of what the block returns, part by part."""
    inner: dict[int, int]
    """By row of an operation inside an operator on tensor subclasses, the row of that operator."""

    def under(self, root: str) -> BlockTrace:
        facts = self.facts
        if not root:
            return self
        calls = [op != "placeholder" for op in facts.ops]
        paths = zip(facts.modules, calls, strict=True)
        modules = [".".join(filter(None, (root, path))) if call else path for path, call in paths]
        names = [f"{root}.{name}" if name else "" for name in facts.input_names]
        return evolve(self, facts=evolve(facts, modules=modules, input_names=names))


def trace_of(observation: Observation, returned: Sequence[torch.Tensor]) -> BlockTrace:
    """Trace a call that has returned these tensors. Module paths start at the block."""
    gives = observation.origins_of(returned)
    outputs = [found for found in gives if found is not None]
    with outside_of_modes():
        graph = _Graph(observation)
        graph.write(outputs)
        kind = GraphKind.FLAT if observation.read_by_backward else GraphKind.FORWARD
        facts = collect(graph.graph, kind=kind, state=graph.state())
        facts = evolve(facts, data_sizes=_data_sizes(facts, graph))
    nodes = [[node for call in range(*span) for node in graph.nodes[call]] for span in observation.spans]
    rows = tuple(_row(facts, [node.name for node in own]) for own in nodes)
    stream = observation.stream
    results = (_read_results(facts, operator, own) for operator, own in zip(stream.operators, nodes, strict=True))
    read = {at: taken for at, taken in enumerate(results) if taken is not None}
    beyond = (facts.index[node.name] for own in nodes[stream.reach :] for node in own if node.name in facts.index)
    reach_row = min(beyond, default=len(facts))
    inner = {
        facts.index[node.name]: row
        for row, own in zip(rows, nodes, strict=True)
        for node in own
        if facts.index.get(node.name, row) < row
    }
    in_stream = {call for span in observation.spans for call in range(*span)}
    others = [[node] for node in graph.other_names]
    others += [own for call, own in enumerate(graph.nodes) if call not in in_stream]
    unchanged = frozenset(row for own in others if (row := _row(facts, [node.name for node in own])) >= 0)

    def row_of(origin: TensorOrigin | None) -> int:
        node = None if origin is None else graph.results.get(origin)
        return -1 if node is None else facts.index.get(node.name, -1)

    given = tuple(tuple(map(row_of, own)) for own in observation.returns)
    return BlockTrace(facts, stream, rows, read, reach_row, unchanged, given, tuple(map(row_of, gives)), inner)


def _data_sizes(facts: Facts, graph: _Graph) -> Sequence[tuple[int, ...]]:
    """Sizes counted as in the first call that may differ in the next: the results of operators whose shape depends on
    data (``nonzero``), and everything derived that keeps such a size. They have no known bound."""
    sizes: dict[int, set[int]] = {}
    for call, operation in enumerate(graph.observation.operations):
        for row in (facts.index.get(node.name) for node in graph.nodes[call]):
            shape = None if row is None else facts.shapes[row]
            if row is None or not shape:
                continue
            reads = facts.inputs[row]
            fresh = gives_data(operation.operator, any(facts.dtypes[each] in ("bool", "uint8") for each in reads))
            read = {size for each in reads for size in sizes.get(each, ())}
            if found := {shape[0]} if fresh else read.intersection(shape):
                sizes[row] = found
    return [(max(sizes[row]), 0, -1) if row in sizes else () for row in range(len(facts))] if sizes else ()


def fingerprint(observation: Observation, returned: Sequence[torch.Tensor]) -> Hashable:
    """Equal for calls with equal :func:`trace_of`, and as a rule for no others."""
    stream = observation.stream
    return (
        tuple((each.kind, each.name, TensorFacts.of(each.tensor)) for each in observation.origins.externals),
        tuple(
            (each.operator, _plain(each.args), _plain(each.kwargs), _plain(each.results), each.path, each.annotations)
            for each in observation.operations
        ),
        tuple(stream.operators),
        tuple(observation.spans),
        tuple(observation.read_by_backward),
        (stream.reach, stream.to_the_end, tuple(stream.overwritten.items())),
        frozenset(stream.differentiable),
        frozenset(stream.numbers),
        *(tuple(sorted(each.items())) for each in (stream.from_outside, stream.kept, stream.state)),
        tuple(observation.origins.same_memory().items()),
        tuple(observation.origins_of(returned)),
    )


def _plain(value: Any) -> Hashable:
    """Hashable; 1 and True stay different arguments."""
    if isinstance(value, tuple | list):
        return type(value), tuple([_plain(part) for part in value])
    if isinstance(value, dict):
        return tuple([(key, _plain(part)) for key, part in value.items()])
    try:
        hash(value)
    except TypeError:
        return type(value), object()  # the same as nothing else
    return type(value), value


@define(eq=False)
class _Graph:
    observation: Observation
    graph: fx.Graph = field(factory=fx.Graph)
    nodes: list[list[fx.Node]] = field(factory=list)
    """By operation, its node and those of its results."""
    results: dict[TensorOrigin, fx.Node] = field(factory=dict)
    other_names: list[fx.Node] = field(factory=list)
    mode: Any = field(factory=fake_tensor_mode)
    fakes: dict[TensorFacts, Any] = field(factory=dict)

    def write(self, outputs: Sequence[TensorOrigin]) -> None:
        origins = self.observation.origins
        for number, external in enumerate(origins.externals):
            self.results[TensorOrigin(OUTSIDE, number)] = self._input(external, number)
        for number, first in origins.same_memory().items():  # what writes to one writes to the other
            origin = TensorOrigin(OUTSIDE, number)
            node = self.graph.call_function(_READER, (self.results[TensorOrigin(OUTSIDE, first)],))
            node.meta |= {"custom": {PHASE: FORWARD}, "val": self.results[origin].meta["val"]}
            self.results[origin] = node
            self.other_names.append(node)
        for number, operation in enumerate(self.observation.operations):
            self.nodes.append(self._operation(number, operation))
        readers = [self._reader(origin) for origin in reversed(self.observation.read_by_backward)]
        self.graph.output((*(self.results[origin] for origin in outputs), *readers))
        self.graph.eliminate_dead_code()

    def _input(self, external: External, position: int) -> fx.Node:
        node = self.graph.placeholder("input")
        name_input(node, external.kind, external.name or f"constant_{position}", position)
        node.meta["val"] = self._fake(TensorFacts.of(external.tensor))
        return node

    def state(self) -> list[fx.Node]:
        """The inputs to whose memory the block writes."""
        origins = self.observation.origins
        outside = [number for number, each in enumerate(origins.externals) if origins.is_state(each.tensor)]
        return [self.results[TensorOrigin(OUTSIDE, number)] for number in outside]

    def _operation(self, number: int, operation: Operation) -> list[fx.Node]:
        def filled(leaf: Any) -> Any:
            return self.results[leaf] if isinstance(leaf, TensorOrigin) else leaf

        args, kwargs = mapped(filled, operation.args), mapped(filled, operation.kwargs)
        node = self._call(operation.operator, args, kwargs, operation)
        written = [node]
        for count, result in enumerate(self._results(node, operation.results, operation, written)):
            self.results[TensorOrigin(number, count)] = result
        return written

    def _results(self, node: fx.Node, results: Any, operation: Operation, written: list[fx.Node]) -> Iterator[fx.Node]:
        """The results of an operator in order: itself, or a ``getitem`` for each of several."""
        node.meta["val"] = self._value(results)
        if isinstance(results, TensorFacts):
            yield node
        for index, part in enumerate(results if isinstance(results, list) else ()):
            if part is not None:
                piece = self._call(python_operator.getitem, (node, index), {}, operation)
                written.append(piece)
                yield from self._results(piece, part, operation, written)

    def _call(self, target: Any, args: Any, kwargs: Any, operation: Operation) -> fx.Node:
        name = getattr(getattr(target, "overloadpacket", target), "__name__", None) or type(target).__name__
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        node.meta["custom"] = {**dict.fromkeys(operation.annotations, True), PHASE: FORWARD}
        node.meta["nn_module_stack"] = {operation.path: (operation.path, operation.kind)}
        return node

    def _reader(self, origin: TensorOrigin) -> fx.Node:
        read = self.results[origin]
        node = self.graph.call_function(_READER, (read,))
        node.meta["custom"] = {PHASE: BACKWARD}
        node.meta["autograd_backward"] = True
        node.meta["val"] = read.meta["val"]
        return node

    def _value(self, described: Any) -> Any:
        if isinstance(described, list):
            return [self._value(part) for part in described]
        return None if described is None else self._fake(described)

    def _fake(self, facts: TensorFacts) -> Any:
        """Without data, since a plan only asks for sizes; shared, since nobody writes to it."""
        found = self.fakes.get(facts)
        if found is None:
            with self.mode:
                if facts.stride is None:
                    found = torch.empty(facts.shape, dtype=facts.dtype, device=facts.device)
                else:
                    found = torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device=facts.device)
            self.fakes[facts] = found
        return found


def _row(facts: Facts, names: Sequence[str]) -> int:
    """The row of an operator itself; the last, where a tensor made of tensors turned it into several."""
    rows = [row for name in names if (row := facts.index.get(name)) is not None]
    return next((row for row in reversed(rows) if facts.targets[row] != GETITEM), -1)


def _read_results(facts: Facts, operator: Any, nodes: Sequence[fx.Node]) -> frozenset[int] | None:
    """None for an operator with one result, or with a list among its results."""
    returns = getattr(schema_of(operator), "returns", ())
    if len(returns) < 2 or any(str(each.type) != "Tensor" for each in returns):
        return None
    taken = (node for node in nodes if node.target is python_operator.getitem and node.name in facts.index)
    return frozenset(int(str(node.args[1])) for node in taken)
