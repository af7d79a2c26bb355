"""Random flat graphs: forward and backward in turns, with random operators, in-place writes, views and buffers.

A graph is drawn from a list of small numbers, so that hypothesis can shrink it. All values are 3 × 3.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from tests.support.flat_graphs import Flat

aten = torch.ops.aten
SHAPE = (3, 3)
CHOICES = 16


def random_flat(numbers: Sequence[int], segments: int = 4) -> Flat:
    """``numbers`` choose the operators and what they read; even segments are forward, odd ones backward."""
    return _Builder(iter(numbers), len(numbers), segments).build()


class _Builder:
    def __init__(self, numbers: Iterator[int], count: int, segments: int) -> None:
        self.numbers = numbers
        self.per_segment = max(1, count // (3 * segments))
        self.segments = segments
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        with self.mode:
            self.value = torch.empty(SHAPE)
        self.backward = False
        self.forward_values: list[fx.Node] = []
        self.backward_values: list[fx.Node] = []

    def build(self) -> Flat:
        weight, buffer, batch = (self._mark(self.graph.placeholder(name)) for name in ("weight", "buffer", "batch"))
        self.buffer = buffer
        self.forward_values += [weight, batch]
        for segment in range(self.segments):
            self.backward = segment % 2 == 1
            for _ in range(self.per_segment):
                if self.backward:
                    self._backward_node()
                else:
                    self._forward_node()
            if self.backward and not self.backward_values:
                self._backward_node()
        loss = self.forward_values[-1]
        self.graph.output((loss, *self.backward_values[-3:]))
        generator = torch.Generator().manual_seed(3)
        inputs = [torch.rand(SHAPE, generator=generator) for _ in range(3)]
        return Flat(fx.GraphModule(torch.nn.Module(), self.graph), inputs)

    def _number(self) -> int:
        return next(self.numbers, 0)

    def _pick(self, values: list[fx.Node]) -> fx.Node:
        """Recent values more often: long chains are what recomputation is about."""
        number = self._number()
        return values[-1 - number % len(values)] if number % 3 else values[number % len(values)]

    def _mark(self, node: fx.Node, value: Any = None) -> fx.Node:
        node.meta["val"] = self.value if value is None else value
        if self.backward:
            node.meta["custom"] = {"phase": "backward"}
        return node

    def _call(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> fx.Node:
        return self._mark(self.graph.call_function(target, args, kwargs), value)

    def _forward_node(self) -> None:
        a, b = self._pick(self.forward_values), self._pick(self.forward_values)
        self.forward_values.append(self._operator(self._number() % CHOICES, a, b))

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

    def _two_results(self, target: Any, *args: Any) -> fx.Node:
        both = self._call(target, *args, value=(self.value, self.value))
        first = self._call(operator.getitem, both, 0)
        second = self._call(operator.getitem, both, 1)
        return self._call(aten.mul.Tensor, first, second)

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


def equal(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.nan_to_num(), right.nan_to_num())
