"""A block recorded once: its forward and backward as a flat graph, and which of its operators is which node.

Nothing is computed: the block runs on tensors without data, and on copies of its data only where an operator cannot
do without.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx

from policylang._torch_eager import clear_cast_weights
from policylang._torch_graph import schema_of
from policylang._torch_tracing import (
    data_dependence_errors,
    fake_mode_of,
    fake_tensor_mode,
    fake_tensors,
    tracing_context,
    tree_flatten,
    tree_unflatten,
)
from policylang.backends.eager.problems import unrecordable
from policylang.backends.eager.stream import Step, Stream, StreamMode
from policylang.errors import PolicyError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, InputKind
from policylang.graph.operators import GETITEM
from policylang.tracing.backward_regions import REGION
from policylang.tracing.checkpoint_regions import checkpoint_regions
from policylang.tracing.current_meta import without_leaks
from policylang.tracing.finish import GraphInput, finish
from policylang.tracing.model_state import ModelState, read_state, substituted
from policylang.tracing.module_paths import module_paths
from policylang.tracing.subclasses import Layout, put_together, take_apart

Forward = Callable[..., Any]


@frozen(eq=False)
class Recording:
    """What is known of one block called in one way."""

    facts: Facts
    operators: tuple[Any, ...]
    """The stream."""
    rows: tuple[int, ...]
    """By operator of the stream: its row in the facts, -1 where nobody reads what it gives."""
    read: dict[int, frozenset[int]]
    """Of operators with several results, by position in the stream: which results anyone reads."""
    reach: int
    """The first row that a second run does not come to."""


def record(
    module: nn.Module, forward: Forward, root: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Recording:
    """Raises PolicyGraphError where the block cannot be run without data."""
    state = read_state(module)
    leaves, spec = tree_flatten((args, dict(kwargs)))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain, layouts = take_apart([*state.tensors, *given])
    run = _Run(module, forward, state, leaves, spec, layouts)
    try:
        gm = _trace(run, plain)
    except PolicyError:
        raise
    except Exception as error:
        if isinstance(error, data_dependence_errors()):
            raise unrecordable(module, root, error) from error
        run = _Run(module, forward, state, leaves, spec, layouts)
        gm = _trace_on_data(run, plain, error, module, root)
    _clean(gm.graph)
    finish(gm, _inputs(state, len(given), layouts))
    facts = collect(gm, kind=GraphKind.FLAT, root=root)
    steps = run.stream.steps
    rows = tuple(_row(facts, [node.name for node in step.nodes]) for step in steps)
    read = {at: found for at, step in enumerate(steps) if (found := _read_results(facts, step)) is not None}
    beyond = (row for row in rows[run.stream.reach :] if row >= 0)
    return Recording(facts, tuple(step.operator for step in steps), rows, read, min(beyond, default=len(facts)))


def _trace(run: _Run, plain: Sequence[Tensor]) -> fx.GraphModule:
    mode = fake_mode_of(plain) or fake_tensor_mode()
    with mode, tracing_context(mode):
        return _traced(run, fake_tensors(mode, plain))


def _trace_on_data(
    run: _Run, plain: Sequence[Tensor], error: Exception, module: nn.Module, root: str
) -> fx.GraphModule:
    """On copies of the data: some operators compute what they refuse to describe. Random numbers are given back."""
    devices = {value.device.index for value in plain if value.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=[index for index in sorted(devices, key=str) if index is not None]):
            return _traced(run, [value.detach().clone() for value in plain])
    except Exception:
        raise unrecordable(module, root, error) from error


def _traced(run: _Run, plain: Sequence[Tensor]) -> fx.GraphModule:
    with ExitStack() as stack:
        for context in (
            traceback.preserve_node_meta(),
            without_leaks(),
            torch.enable_grad(),
            torch.autograd.set_multithreading_enabled(False),
            torch.compiler.set_stance("force_eager"),
            checkpoint_regions(),
        ):
            stack.enter_context(context)
        clear_cast_weights()
        try:
            return make_fx(run)(*plain)
        finally:
            clear_cast_weights()


@define(eq=False)
class _Run:
    """The function that is traced: the block and the gradients of all that it returns."""

    module: nn.Module
    forward: Forward
    state: ModelState
    leaves: list[Any]
    spec: Any
    layouts: list[Layout]
    stream: Stream = field(factory=Stream)

    def __call__(self, *plain: Tensor) -> list[Tensor]:
        tensors = put_together(plain, self.layouts)
        given = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        originals = [*self.state.tensors, *given]
        for tensor, original in zip(tensors, originals, strict=True):
            if original.requires_grad:
                tensor.requires_grad_()
        own, inputs = tensors[: len(self.state.names)], iter(tensors[len(self.state.names) :])
        filled = [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(filled, self.spec)
        hooks = torch.autograd.graph.saved_tensors_hooks(self.stream.left_for_backward, lambda value: value)
        with module_paths(self.module), substituted(self.module, self.state.tensors, own), hooks:
            with StreamMode(self.stream):
                returned = self.forward(*args, **kwargs)
            outputs = [leaf for leaf in tree_flatten(returned)[0] if isinstance(leaf, Tensor)]
            gradients = _gradients(outputs, [tensor for tensor in tensors if tensor.requires_grad])
        values, _ = take_apart([*outputs, *gradients])
        return values


def _gradients(outputs: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not wanted:
        return []
    with traceback.annotate({REGION: 0}):
        # made of sizes alone: a gradient that read the output would count as a use of it
        seeds = [torch.ones(output.shape, dtype=output.dtype, device=output.device) for output in differentiable]
        found = torch.autograd.grad(differentiable, wanted, seeds, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _clean(graph: fx.Graph) -> None:
    """Autograd detaches what it keeps, as often as it likes: such nodes are no operators of the block. Checkpoints in
    and around the block carry themselves out, and decide nothing here."""
    for node in graph.nodes:
        node.meta.pop("recompute", None)
        node.meta.pop("ac_graph_id", None)
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _inputs(state: ModelState, given: int, layouts: Sequence[Layout]) -> list[GraphInput]:
    whole = [
        *(GraphInput(InputKind.PARAMETER, name) for name in state.parameters),
        *(GraphInput(InputKind.BUFFER, name) for name in (*state.buffers, *state.attributes)),
        *(GraphInput(InputKind.USER, f"input {number}") for number in range(given)),
    ]
    return [item for item, layout in zip(whole, layouts, strict=True) for _ in range(layout.size_in_parts)]


def _row(facts: Facts, names: Sequence[str]) -> int:
    """The row of an operator itself; the last, where a tensor made of tensors turned it into several."""
    rows = [row for name in names if (row := facts.index.get(name)) is not None]
    return next((row for row in reversed(rows) if facts.targets[row] != GETITEM), -1)


def _read_results(facts: Facts, step: Step) -> frozenset[int] | None:
    """None for an operator with one result, or with a list among its results."""
    returns = getattr(schema_of(step.operator), "returns", ())
    if len(returns) < 2 or any(str(each.type) != "Tensor" for each in returns):
        return None
    taken = (node for node in step.nodes if node.target is python_operator.getitem and node.name in facts.index)
    return frozenset(int(str(node.args[1])) for node in taken)
