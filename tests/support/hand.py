"""Flat graphs by hand, and what tests of their rematerialisation ask of them."""

import ast
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import policylang
from tests.support.flat_graphs import Flat, assert_bitwise_equal

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Hand:
    """A flat graph by hand: ``f`` makes forward nodes, ``b`` backward ones; every value is 4 × 4 unless it is given."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        with self.mode:
            self.value = torch.empty(4, 4)

    def input(self, name: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.value
        return node

    def f(self, target: Any, *args: Any, val: Any = None, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.value if val is None else val
        return node

    def b(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.f(target, *args, **kwargs)
        node.meta["custom"] = {"phase": "backward"}
        return node

    def done(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(nn.Module(), self.graph)


def by_hand(text: str) -> fx.GraphModule:
    """The graph of ``x; a = sin(x); b := mul(a, x); -> a, b``: ``:=`` makes a backward node. Of an operator's
    overloads it is the one for tensors, where there is one."""
    hand, known = Hand(), dict[str, Any]()
    for each in text.split("; "):
        name, made, call = each.partition(" := " if ":=" in each else " = ")
        if not made and not each.startswith("-> "):
            known[name] = hand.input(name)
            continue
        tree = ast.parse(call or each.removeprefix("-> ") + ",", mode="eval").body
        if not made:
            return hand.done(*(known[each.id] for each in tree.elts))  # type: ignore[attr-defined]
        packet = getattr(aten, tree.func.id, None) or getattr(c10d, tree.func.id)  # type: ignore[attr-defined]
        target = packet.Tensor if "Tensor" in packet.overloads() else packet.default
        arguments = [known[arg.id] if isinstance(arg, ast.Name) else ast.literal_eval(arg) for arg in tree.args]  # type: ignore[attr-defined]
        known[name] = (hand.b if made == " := " else hand.f)(target, *arguments)
    raise AssertionError("it returns nothing")


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def calls(gm: fx.GraphModule, name: str) -> list[fx.Node]:
    """The nodes that call an operator, or run it inside a wrapper that replays random numbers."""
    found = []
    for node in gm.graph.nodes:
        targets = [node.target, *(each for each in node.args if isinstance(each, torch._ops.OpOverload))]
        if node.op == "call_function" and any(str(target).startswith(f"{name}.") for target in targets):
            found.append(node)
    return found


def apply(gm: fx.GraphModule, text: str) -> Any:
    policylang.apply(gm, policylang.parse(text))
    gm.graph.lint()
    return policylang.report(gm)


def same_bits(flat: Flat, text: str) -> tuple[fx.GraphModule, Any]:
    """Apply a policy to a copy, compare loss, gradients and buffers over two runs; the graph and its report."""
    before, after = flat.fresh(), flat.fresh()
    report = apply(after.gm, text)
    for seed in (1, 2):
        assert_bitwise_equal(before.run(seed), after.run(seed))
    assert_bitwise_equal(before.inputs, after.inputs)
    return after.gm, report
