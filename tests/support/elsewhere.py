"""Graphs traced on a CPU as they would have been on an accelerator that is not there: the values are fake."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from policylang.backends import copies
from tests.support.flat_graphs import copy_graph

CPU = torch.device("cpu")
AWAY = torch.device("cuda", 0)


def on_accelerator(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph without symbolic sizes, on another device: inputs, constants and all that is made of them."""
    moved = copy_graph(gm)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def away(value: Any) -> Any:
        if isinstance(value, Tensor):
            with mode:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=AWAY)
        return value

    inputs = []
    for node in moved.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key != "tensor_meta"}
        node.args, node.kwargs = _mapped(node.args), _mapped(node.kwargs)
        if node.op == "placeholder":
            inputs.append(away(node.meta["val"]))
    with mode:
        _Noting(moved, away).run(*inputs)
    return moved


class _Noting(fx.Interpreter):
    def __init__(self, gm: fx.GraphModule, away: Any) -> None:
        super().__init__(gm)
        self.away = away

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op == "get_attr":
            result = self.away(result)
        if node.op != "output":
            node.meta["val"] = result
        return result


class _Ticket(NamedTuple):
    target: Tensor


def with_memory(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with copies that take their memory where they start, as the operators do; on fake values they take it
    where they are awaited. In place."""

    def start(source: Tensor, device: torch.device = CPU) -> _Ticket:
        return _Ticket(torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=device))

    def wait(ticket: _Ticket, source: Tensor, device: torch.device) -> Tensor:
        assert ticket.target.device == device
        return ticket.target

    for node in gm.graph.nodes:
        if node.target in (copies.OFFLOAD_OP, copies.RELOAD_OP):
            node.target = start
        elif node.target is copies.WAIT_OP:
            node.target = wait
    gm.recompile()
    return gm


def _mapped(arguments: Any) -> Any:
    return fx.node.map_aggregate(
        arguments, lambda each: AWAY if isinstance(each, torch.device) and each == CPU else each
    )
