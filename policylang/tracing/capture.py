"""Traces forward, loss and gradients of a step into one flat graph without mutations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from policylang.errors import PolicyError
from policylang.graph.facts import InputKind
from policylang.torch_compat.subclasses import SubclassLayout, take_apart
from policylang.torch_compat.tracing import (
    compiling,
    fake_mode_of,
    fake_tensor_mode,
    fake_tensors,
    functionalized,
    tracing_context,
    tree_flatten,
)
from policylang.tracing.backward_marks import BackwardRegions
from policylang.tracing.checks import check_writes, trace_failure
from policylang.tracing.finish import GraphInput, finish
from policylang.tracing.forward_marks import checkpoint_regions, without_leaks
from policylang.tracing.model_state import ModelState
from policylang.tracing.optimizer_state import OptimizerState
from policylang.tracing.whole_step import WholeStep

LossFn = Callable[..., Tensor]


@frozen(eq=False)
class Captured:
    """A flat graph: parameters, buffers, the batch's and the optimizer's tensors in, the loss and the gradients out."""

    gm: fx.GraphModule
    outputs: tuple[SubclassLayout, ...]
    gradients: tuple[str, ...]
    """The parameter of each output after the first."""
    mutated: tuple[str, ...]
    """What the graph writes, once, at its end."""
    unrepeated: tuple[str, ...]
    """Attributes of modules that the forward changed while it was traced, and that the graph does not change."""
    followed: tuple[Any, ...]
    """What the model's policylang checkpoints follow, which the graph does not carry out."""


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: tuple[Any, ...],
    state: ModelState,
    optimizer: Optimizer | None,
    optimizer_state: OptimizerState,
) -> Captured:
    """Raises PolicyGraphError where the step is not one that a graph can hold."""
    leaves, spec = tree_flatten(batch)
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain, layouts = take_apart([*state.tensors, *given, *optimizer_state.tensors.values()])
    regions = BackwardRegions()
    followed: list[Any] = []
    step = WholeStep(model, loss_fn, leaves, spec, state, optimizer, optimizer_state, layouts, regions)
    try:
        gm = _trace(step.run, plain, regions, followed)
    except PolicyError:
        raise
    except Exception as error:
        raise trace_failure(error) from error
    inputs = _inputs(state, len(given), optimizer_state, layouts)
    finish(gm, inputs)
    check_writes(gm.graph, plain, step.mutated, step.outgrown, state.buffers)
    mutated = dict.fromkeys(inputs[position].name for position in step.mutated)
    unrepeated = (*step.substitution.changed, *(name for _, name in step.outgrown))
    outputs, gradients = tuple(step.outputs), tuple(step.gradients)
    return Captured(gm, outputs, gradients, tuple(mutated), unrepeated, tuple(followed))


def _trace(
    run: Callable[..., list[Tensor]], plain: Sequence[Tensor], regions: BackwardRegions, followed: list[Any]
) -> fx.GraphModule:
    mode = fake_mode_of(plain) or fake_tensor_mode()
    with ExitStack() as stack:
        for context in (
            traceback.preserve_node_meta(),
            without_leaks(),
            mode,
            tracing_context(mode),
            torch.enable_grad(),
            # the engine's threads for other devices would not see what is set for this one
            torch.autograd.set_multithreading_enabled(False),
            torch.compiler.set_stance("force_eager"),
            regions.marked(),
            checkpoint_regions(followed),
            compiling(),
            functionalized(),
        ):
            stack.enter_context(context)
        return make_fx(run)(*fake_tensors(mode, plain))


def _inputs(
    state: ModelState, given: int, optimizer_state: OptimizerState, layouts: Sequence[SubclassLayout]
) -> list[GraphInput]:
    """One for every plain tensor; the parts of a tensor share its name."""
    whole = [
        *(GraphInput(InputKind.PARAMETER, name) for name in state.parameters),
        *(GraphInput(InputKind.BUFFER, name) for name in (*state.buffers, *state.attributes)),
        *(GraphInput(InputKind.USER, f"input {number}") for number in range(given)),
        *(GraphInput(InputKind.BUFFER, f"optimizer.{name}") for name in optimizer_state.tensors),
    ]
    return [item for item, layout in zip(whole, layouts, strict=True) for _ in range(layout.size_in_parts)]
