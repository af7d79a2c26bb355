"""Which operator of a traced step gives its elements in another order than it was traced with.

A step is traced without data, with what torch's meta kernels say of shapes and strides. Where a real kernel lays its
result out in another way, a view that was traced further on may be impossible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from policylang.errors import PolicyGraphError
from policylang.operators.categories import describe
from policylang.operators.names import Category
from policylang.torch_compat.graphs import value_of
from policylang.torch_compat.tracing import tree_leaves
from policylang.tracing.preconditions import problem

OTHER_STRIDES = "APL337"


class _Found(Exception):
    def __init__(self, node: fx.Node, real: Tensor, traced: Tensor) -> None:
        self.node, self.real, self.traced = node, real, traced


class _Compared(fx.Interpreter):  # type: ignore[misc]  # torch does not say what it is
    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        pairs = zip(tree_leaves(out), tree_leaves(value_of(n.meta)), strict=False) if n.op == "call_function" else ()
        for real, traced in pairs:
            plain = all(isinstance(each, Tensor) and each.layout is torch.strided for each in (real, traced))
            if plain and real.numel() > 1 and real.stride() != traced.stride():
                raise _Found(n, real, traced)
        return out


def why_it_failed(gm: fx.GraphModule, inputs: Sequence[Any]) -> PolicyGraphError | None:
    """Run a graph that has failed once more, on copies, up to the first operator with other strides. None where there
    is none, and where the graph communicates: other ranks may not have failed."""
    if any(describe(node.target).flags & Category.COLLECTIVE for node in gm.graph.nodes if node.op == "call_function"):
        return None
    try:
        _Compared(gm).run(*(each.clone() if isinstance(each, Tensor) else each for each in inputs))
    except _Found as found:
        real, traced = tuple(found.real.stride()), tuple(found.traced.stride())
        return problem(
            OTHER_STRIDES,
            f"`{found.node.target}` gives a tensor of shape {tuple(found.real.shape)} with strides {real}, and was "
            f"traced with {traced}",
            help=f"make what the model does with it independent of that: `reshape` in place of `view`, or "
            f"`contiguous()` behind it; its meta kernel says otherwise than the kernel for `{found.real.device.type}`",
            details=[f"node {found.node.name}"],
        )
    except Exception:  # the same failure, and strides are not its reason
        return None
    return None
