"""Flat graphs as another tracer makes them: plain ``make_fx``, in-place operators and all, and how to run them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.models import Example


class Flat(NamedTuple):
    gm: fx.GraphModule
    inputs: list[Tensor]
    """Parameters, buffers, then the batch: what the graph takes, and may write to."""

    def fresh(self) -> Flat:
        """A copy that may be changed and run on its own: the graph and the tensors."""
        inputs = [value.detach().clone().requires_grad_(value.requires_grad) for value in self.inputs]
        return Flat(copy_graph(self.gm), inputs)

    def run(self, seed: int = 7) -> list[Tensor]:
        """Loss and gradients, from the same random numbers each time."""
        torch.manual_seed(seed)
        with torch.no_grad():
            return list(self.gm(*self.inputs))


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph copied node by node; submodules, and the fake values in the metadata, are shared."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    result = fx.GraphModule(gm, graph)
    for old, new in zip(gm.graph.nodes, graph.nodes, strict=True):
        new.meta = copy.copy(old.meta)
    return result


def flat_graph(example: Example, tracing_mode: str = "fake") -> Flat:
    """Forward, loss and gradients of an example as one graph, the backward annotated ``phase: backward``."""
    module, inputs, loss_fn = example

    def step(call: Callable[..., Any], parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        loss = loss_fn(call(*batch))
        return [loss, *gradients(loss, parameters)]

    return trace_flat(module, list(inputs), step, tracing_mode)


def gradients(loss: Tensor, parameters: Iterable[Tensor], **options: Any) -> list[Tensor]:
    """What ``torch.autograd.grad`` gives, traced as backward."""
    with traceback.annotate({"phase": "backward"}):
        found = torch.autograd.grad(loss, list(parameters), allow_unused=True, **options)
    return [gradient for gradient in found if gradient is not None]


def trace_flat(
    module: nn.Module,
    batch: list[Tensor],
    step: Callable[[Callable[..., Any], list[Tensor], list[Tensor]], list[Tensor]],
    tracing_mode: str = "fake",
) -> Flat:
    """``step(call, parameters, batch)`` as one graph; ``call`` runs the module on the traced parameters and buffers."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())

    def run(parameter_values: list[Tensor], buffer_values: list[Tensor], batch_values: list[Tensor]) -> list[Tensor]:
        state = dict(zip([*parameters, *buffers], [*parameter_values, *buffer_values], strict=True))

        def call(*args: Tensor) -> Any:
            return torch.func.functional_call(module, state, args)

        return step(call, parameter_values, batch_values)

    values = [list(parameters.values()), list(buffers.values()), batch]
    with ExitStack() as stack:
        stack.enter_context(traceback.preserve_node_meta())
        for handle in annotate_modules(module):
            stack.callback(handle)
        gm = make_fx(run, tracing_mode=tracing_mode)(*values)
    _name_inputs(gm, [*parameters], [*buffers])
    return Flat(gm, [value for part in values for value in part])


def annotate_modules(module: nn.Module) -> list[Callable[[], None]]:
    """Let every forward annotate its nodes with the module's path; returns what takes the annotations off again."""
    undo: list[Callable[[], None]] = []
    for path, child in module.named_modules(remove_duplicate=True):
        original = child.forward

        def forward(*args: Any, _path: str = path, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            with traceback.annotate({"module_fqn": _path}):
                return _original(*args, **kwargs)

        child.forward = forward  # type: ignore[method-assign]
        undo.append(lambda child=child: child.__dict__.pop("forward"))  # type: ignore[misc]
    return undo


def _name_inputs(gm: fx.GraphModule, parameters: list[str], buffers: list[str]) -> None:
    """Leave the dotted names where a tracer that knows them does."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, [*parameters, *buffers], strict=False):
        node.meta["custom"] = {"input": name}


def assert_bitwise_equal(left: Iterable[Any], right: Iterable[Any]) -> None:
    """Equal to the last bit, not-a-number included."""
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for position, (one, other) in enumerate(zip(left, right, strict=True)):
        if isinstance(one, Tensor):
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)), f"value {position} differs"
        else:
            assert one == other
