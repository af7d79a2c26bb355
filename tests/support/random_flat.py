"""Random flat graphs, with forward and backward in turns, in-place writes, views and buffers; and random joint graphs.

A graph is drawn from a list of small numbers, so that hypothesis can shrink it. All values are 3 × 3.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch._subclasses import FakeTensorMode

from tests.support.flat_graphs import Flat

aten = torch.ops.aten
SHAPE = (3, 3)
CHOICES = 16


def random_flat(numbers: Sequence[int], segments: int = 4) -> Flat:
    """``numbers`` choose the operators and what they read; even segments are forward, odd ones backward."""
    return _FlatBuilder(numbers).build(segments)


def random_joint(numbers: Sequence[int]) -> fx.GraphModule:
    """A forward, then a backward that reads gradients and forward values, some of it neither. ``numbers`` choose the
    operators and what they read. It returns one forward output and three gradients."""
    return _JointBuilder(numbers).build()


class _Builder:
    missing = 0
    """The number that stands for those that are not given."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers, self.count = iter(numbers), len(numbers)
        self.graph = fx.Graph()
        self.backward = False
        with FakeTensorMode():
            self.value = torch.empty(SHAPE)

    def _number(self) -> int:
        return next(self.numbers, self.missing)

    def _pick(self, values: list[fx.Node]) -> fx.Node:
        """Recent values more often: long chains are what recomputation is about."""
        number = self._number()
        return values[-1 - number % len(values)] if number % 3 else values[number % len(values)]

    def _mark(self, node: fx.Node, value: Any = None) -> fx.Node:
        node.meta["val"] = self.value if value is None else value
        return node

    def _call(self, target: Any, *args: Any, value: Any = None) -> fx.Node:
        return self._mark(self.graph.call_function(target, args), value)

    def _two_results(self, target: Any, *args: Any, between: Any = None) -> fx.Node:
        """Taken one by one, with something in between where it is given."""
        both = self._call(target, *args, value=(self.value, self.value))
        first = self._call(operator.getitem, both, 0)
        if between is not None:
            first = self._call(between, first)
        return self._call(aten.mul.Tensor, first, self._call(operator.getitem, both, 1))


class _JointBuilder(_Builder):
    missing = 1

    def build(self) -> fx.GraphModule:
        each = max(2, self.count // 6)
        forward = [self._mark(self.graph.placeholder(f"primals_{number}")) for number in (1, 2, 3)]
        gradients = [self._mark(self.graph.placeholder("tangents_1"))]
        for _ in range(each):
            forward.append(self._operator(forward, forward))
        self.backward = True
        apart = list(forward)  # of the backward, and depends on no gradient
        for _ in range(each):
            if self._number() % 4 == 0:
                apart.append(self._operator(apart, apart))
            else:
                gradients.append(self._operator(gradients, apart))
        while len(gradients) < 4:
            gradients.append(self._call(aten.mul.Tensor, gradients[-1], forward[-1]))
        self.graph.output((forward[-1], *gradients[-2:], self._pick(apart)))
        given = [descriptors.PlainAOTInput(number) for number in range(3)]
        loss = descriptors.PlainAOTOutput(0)
        described = [*given, descriptors.TangentAOTInput(loss)]
        for node, desc in zip(self.graph.find_nodes(op="placeholder"), described, strict=True):
            node.meta["desc"] = desc
        self.graph.output_node().meta["desc"] = (loss, *map(descriptors.GradAOTOutput, given))
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _mark(self, node: fx.Node, value: Any = None) -> fx.Node:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward" if self.backward else "is_forward"
        return super()._mark(node, value)

    def _operator(self, first: list[fx.Node], second: list[fx.Node]) -> fx.Node:
        a, b = self._pick(first), self._pick(second)
        match self._number() % 8:
            case 0 | 1:
                return self._call(aten.sin.default, a)
            case 2:
                return self._call(aten.mm.default, a, b)
            case 3:
                return self._call(aten.t.default, a)
            case 4:
                return self._two_results(aten.frexp.Tensor, a, between=aten.cos.default)
            case 5 if not self.backward:
                return self._two_results(aten.native_dropout.default, a, 0.5, True, between=aten.cos.default)
            case 6 if not self.backward:
                return self._call(aten.mul.Tensor, self._call(aten.rand_like.default, a), b)
            case _:
                return self._call(aten.mul.Tensor, a, b)


class _FlatBuilder(_Builder):
    def build(self, segments: int) -> Flat:
        weight, self.buffer, batch = (
            self._mark(self.graph.placeholder(name)) for name in ("weight", "buffer", "batch")
        )
        self.forward_values, self.backward_values = [weight, batch], list[fx.Node]()
        for segment in range(segments):
            self.backward = segment % 2 == 1
            for _ in range(max(1, self.count // (3 * segments))):
                if self.backward:
                    self._backward_node()
                else:
                    a, b = self._pick(self.forward_values), self._pick(self.forward_values)
                    self.forward_values.append(self._operator(self._number() % CHOICES, a, b))
            if self.backward and not self.backward_values:
                self._backward_node()
        self.graph.output((self.forward_values[-1], *self.backward_values[-3:]))
        generator = torch.Generator().manual_seed(3)
        inputs = [torch.rand(SHAPE, generator=generator) for _ in range(3)]
        return Flat(fx.GraphModule(torch.nn.Module(), self.graph), inputs)

    def _mark(self, node: fx.Node, value: Any = None) -> fx.Node:
        if self.backward:
            node.meta["custom"] = {"phase": "backward"}
        return super()._mark(node, value)

    def _operator(self, choice: int, a: fx.Node, b: fx.Node) -> fx.Node:
        call = self._call
        match choice:
            case 0 | 1:
                return call(aten.sin.default, a)
            case 2 | 3:
                return call(aten.mul.Tensor, a, b)
            case 4:
                return call(aten.mm.default, a, b)
            case 5:
                return call(aten.t.default, a)
            case 6:
                return self._dropout_in_place(a)
            case 7:
                return self._two_results(aten.native_dropout.default, a, 0.5, True)
            case 8:
                return call(aten.mul.Tensor, call(aten.rand_like.default, a), b)
            case 9:
                return self._written_with_reader_between(a, b)
            case 10:
                call(aten.add_.Tensor, self.buffer, a)
                return call(aten.cos.default, b)
            case 11:
                return call(aten.mul.Tensor, a, self.buffer)
            case 12:
                return self._two_results(aten.frexp.Tensor, a)
            case 13:
                return self._written_through_a_view(a, b)
            case 14:
                return call(aten.mul.Tensor, a, call(aten.rand.default, list(SHAPE)))
            case _:
                return call(aten.add.Tensor, a, b)

    def _dropout_in_place(self, a: fx.Node) -> fx.Node:
        mask = self._call(aten.empty_like.default, a)
        mask = self._call(aten.bernoulli_.float, mask, 0.5)
        mask = self._call(aten.div_.Scalar, mask, 0.5)
        return self._call(aten.mul.Tensor, a, mask)

    def _written_with_reader_between(self, a: fx.Node, b: fx.Node) -> fx.Node:
        fresh = self._call(aten.add.Tensor, a, b)
        between = self._call(aten.sin.default, fresh)
        self._call(aten.mul_.Tensor, fresh, a)
        return self._call(aten.add.Tensor, fresh, between)

    def _written_through_a_view(self, a: fx.Node, b: fx.Node) -> fx.Node:
        fresh = self._call(aten.clone.default, a)
        view = self._call(aten.t.default, fresh)
        self._call(aten.copy_.default, view, b)
        return fresh

    def _backward_node(self) -> None:
        a = self._pick(self.forward_values)
        if not self.backward_values:
            self.backward_values.append(self._call(aten.cos.default, a))
            return
        gradient = self._pick(self.backward_values)
        choice = self._number() % 4
        if choice == 0:
            found = self._call(aten.mm.default, a, gradient)
        elif choice == 1:
            found = self._call(aten.mul.Tensor, self._call(aten.t.default, a), gradient)
        elif choice == 2:
            found = self._call(aten.add_.Tensor, self._call(aten.clone.default, gradient), a)
        else:
            found = self._call(aten.addcmul.default, gradient, a, self._pick(self.forward_values))
        self.backward_values.append(found)
