"""Random joint graphs: forward, then a backward that reads gradients and forward values, some of it neither.

A graph is drawn from a list of small numbers, so that hypothesis can shrink it. All values are 3 × 3.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch._subclasses import FakeTensorMode

aten = torch.ops.aten
SHAPE = (3, 3)


def random_joint(numbers: Sequence[int]) -> fx.GraphModule:
    """``numbers`` choose the operators and what they read. It returns one forward output and three gradients."""
    return _Builder(iter(numbers), max(2, len(numbers) // 6)).build()


class _Builder:
    def __init__(self, numbers: Iterator[int], each: int) -> None:
        self.numbers = numbers
        self.each = each
        self.graph = fx.Graph()
        with FakeTensorMode():
            self.value = torch.empty(SHAPE)
        self.tag = "is_forward"

    def build(self) -> fx.GraphModule:
        forward = [self._mark(self.graph.placeholder(f"primals_{number}")) for number in (1, 2, 3)]
        gradients = [self._mark(self.graph.placeholder("tangents_1"))]
        for _ in range(self.each):
            forward.append(self._operator(forward, forward))
        self.tag = "is_backward"
        apart = list(forward)  # of the backward, and depends on no gradient
        for _ in range(self.each):
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

    def _number(self) -> int:
        return next(self.numbers, 1)

    def _pick(self, values: list[fx.Node]) -> fx.Node:
        number = self._number()
        return values[-1 - number % len(values)] if number % 3 else values[number % len(values)]

    def _mark(self, node: fx.Node, value: Any = None) -> fx.Node:
        node.meta["val"] = self.value if value is None else value
        if node.op == "call_function":
            node.meta["partitioner_tag"] = self.tag
        return node

    def _call(self, target: Any, *args: Any, value: Any = None) -> fx.Node:
        return self._mark(self.graph.call_function(target, args), value)

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
                return self._two_results(aten.frexp.Tensor, a)
            case 5 if self.tag == "is_forward":
                return self._two_results(aten.native_dropout.default, a, 0.5, True)
            case 6 if self.tag == "is_forward":
                return self._call(aten.mul.Tensor, self._call(aten.rand_like.default, a), b)
            case _:
                return self._call(aten.mul.Tensor, a, b)

    def _two_results(self, target: Any, *args: Any) -> fx.Node:
        """Taken one by one, with something in between."""
        both = self._call(target, *args, value=(self.value, self.value))
        first = self._call(operator.getitem, both, 0)
        between = self._call(aten.cos.default, first)
        return self._call(aten.mul.Tensor, between, self._call(operator.getitem, both, 1))
