"""Applies a policy: to a traced FX graph, in eager by checkpoints, and to a training step traced as one graph."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from attrs import evolve
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from policylang.api.load import DeviceLike, PolicyLike, policy_of
from policylang.audit.outcome import combined
from policylang.audit.report import AuditReport, FsdpOrderReport, HostReport, Report, ValuesReport
from policylang.backends import applied_plans, refusals, runtime
from policylang.backends.copies import pool
from policylang.backends.eager.checkpoint import contexts_for, order_reports, put_on, sessions_of, take_off
from policylang.backends.eager.session import Contexts
from policylang.backends.finalize import gradients_of
from policylang.backends.joint import JointPartitioner
from policylang.backends.path import apply_policy, checked_module, findings_on
from policylang.backends.rewriting import first_difference
from policylang.backends.torch_compile.backend import frames_left_of
from policylang.errors import PolicyGraphError, PolicyWarning, check_argument, check_flags, is_count
from policylang.graph import marks
from policylang.graph.phases import has_backward
from policylang.language.shown import listed
from policylang.language.syntax import Policy
from policylang.ranks.comparison import comparing
from policylang.torch_compat.compilers import backend_of
from policylang.torch_compat.tracing import put_together, take_apart
from policylang.tracing import step, target_device
from policylang.tracing.capture import Captured, LossFn, capture

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from policylang.audit.report import Report
    from policylang.language.syntax import Policy


def apply(
    gm: fx.GraphModule, policy: PolicyLike, mesh: Any = None, *, agree: bool = True, device: DeviceLike | None = None
) -> fx.GraphModule:
    """Apply a policy to a graph, and return the graph.

    On a joint graph it rewrites collectives and tags every decided forward node: ``recompute``, and
    ``node.meta["custom"]["policylang"]`` for the line that decided; ``policylang.partition`` then splits and orders the
    graph. On a flat graph (forward, loss and backward in one) it also rematerialises, audits and orders. On the forward
    or backward graph of a partition it only rewrites and orders collectives, and the report says so.

    ``policy`` is a policy or the path of one; ``mesh`` names the dimensions of collectives; ``device`` is as in
    ``policylang.load``. With ``agree``, if there is a process group, the ranks that share the graph (those of the mesh,
    and all that its groups connect) compare their plans before anything changes.

    Raises, and leaves the graph unchanged: ``PolicyMatchError`` if policy and graph, or the policy of the model's
    checkpoints, do not fit; ``PolicyGraphError`` for a kind of graph that policies cannot be applied to, and for a flat
    one that has a policy; ``PolicyDivergenceError`` if ranks have different plans, or one is missing.
    ``PolicyAuditError`` if the changed graph does not follow the plan.
    """
    check_flags(agree=agree)
    return apply_policy(gm, policy_of(policy, device), mesh, agree=agree)


def partition(
    gm: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    policy: PolicyLike | None = None,
    agree: bool = True,
    device: DeviceLike | None = None,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward: a ``partition_fn`` for AOTAutograd.

    The arguments are AOTAutograd's: ``gm`` was traced with ``joint_inputs``, a pair of the forward's inputs and the
    tangents; its first ``num_fwd_outputs`` outputs are the forward's, the others gradients;
    ``static_lifetime_input_indices`` are inputs that stay alive anyway, such as parameters. Other ``options`` of
    partitioners are accepted. Returns the forward graph, whose further outputs are the saved values, and the backward
    graph.

    It follows the plan that ``policylang.apply`` made for this graph, or ``policy``. ``device`` and ``agree`` are as
    there.

    Raises what ``policylang.apply`` raises, and ``PolicyGraphError`` for a graph that is not joint or has no policy.
    """
    checked_module(gm, "a partition is of a graph module")
    check_flags(agree=agree)
    check_argument("num_fwd_outputs", num_fwd_outputs, is_count(num_fwd_outputs), "a whole number from 0 on")
    applied = applied_plans.plan_of(gm)
    given = policy if policy is not None or applied is None else applied.policy
    if given is None:
        raise refusals.NO_POLICY.error()
    with comparing("partition", agree):
        is_current = applied is not None and first_difference(gm.graph.nodes, applied.facts) is None
        # another pass may have changed the graph since
        prepared = applied if policy is device is None and is_current else None
        wanted = policy_of(given, device)
        if prepared is None and gradients_of(gm.graph, num_fwd_outputs) and not has_backward(gm.graph):
            raise refusals.NOT_A_JOINT_GRAPH.error()
        split, static = JointPartitioner(wanted).partition, static_lifetime_input_indices
        made = split(gm, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static, prepared=prepared)
    return made.forward, made.backward


def context_fn(policy: PolicyLike, module: nn.Module, *, root: str = "", strict: bool = False) -> Contexts:
    """A policy for ``checkpoint(block, x, use_reentrant=False, context_fn=policylang.context_fn(policy, block))``.

    policylang records the block once for every kind of call (shapes, dtypes, train mode, autocast …), plans it, and
    follows the plan operator by operator. The same arguments return the same object.

    Args:
        policy: a policy or the path of one.
        module: what the checkpoint runs: one block; or the model, where one function serves all of its blocks, as
            in Hugging Face's ``gradient_checkpointing_kwargs``.
        root: the dotted name of ``module`` in its model, for rules that say where (``in layers.*.mlp``).
        strict: whether a block that runs other operators than were recorded is an error. Otherwise it is a warning,
            what follows is recomputed, and the block is recorded again for the next call.

    The block's first call raises ``PolicyMatchError`` where policy and block do not fit, ``PolicyGraphError`` where
    the block cannot be recorded, and ``PolicyAuditError`` where it holds other memory than planned.
    """
    refusals.checked_model(module, "a checkpoint runs a block of a model, or a model")
    check_argument("root", root, isinstance(root, str), "the dotted name of a module")
    check_flags(strict=strict)
    return contexts_for(module, partial(policy_of, policy), _identity(policy), root, strict)


def checkpoint_model(
    model: nn.Module,
    policy: PolicyLike | None,
    *,
    strict: bool = False,
    preserve_rng_state: bool = True,
    device: DeviceLike | None = None,
) -> nn.Module:
    """Put a checkpoint that follows a policy around each block of a model, in place, and return the model.

    The blocks are those that ``blocks`` names, else the numbered children of the largest ``ModuleList``. Names of
    modules and parameters stay. Call it before ``DistributedDataParallel``; before or after ``fully_shard``, which gets
    the ``prefetch`` and ``bucket … per block`` lines about weights: a policy of such lines alone adds no checkpoint. A
    second call replaces the policy; None removes it and leaves the model as it was before. Checkpoints with a function
    of :func:`context_fn` stay, with a warning. ``policylang.report(model)`` has the decisions once the model has run
    forward with gradients.

    ``strict`` is as in :func:`context_fn`, ``preserve_rng_state`` as in ``torch.utils.checkpoint``, ``device`` as in
    :func:`policylang.load`.

    Raises ``PolicyError`` for a policy that cannot be read or has errors, ``PolicyGraphError`` if the model has no such
    blocks (with None, if something has replaced a block's forward since), and ``PolicyMatchError`` for scheduling lines
    that eager or ``fully_shard`` cannot follow. The first call of a block raises what :func:`context_fn` lists.
    """
    refusals.checked_model(model, "checkpoints go around the blocks of a model")
    check_flags(strict=strict, preserve_rng_state=preserve_rng_state)
    if policy is None:
        take_off(model)
        return model
    put_on(model, policy_of(policy, device), strict=strict, preserve_rng_state=preserve_rng_state)
    return model


def _identity(policy: PolicyLike) -> tuple[Any, ...]:
    """A file that has changed is another policy. A loaded policy is itself, as long as its session lives."""
    if not isinstance(policy, str | os.PathLike):
        return (id(policy),)
    path = Path(policy)
    return (str(path), path.stat().st_mtime_ns if path.is_file() else 0)


def report_on(subject: Any) -> Report:
    """See :func:`policylang.report`."""
    found = findings_on(subject)
    orders = tuple(order_reports(subject))
    sessions = sessions_of(subject)
    empty = {session: note for session in sessions if (note := session.without_work())}
    notes = tuple(empty.values())
    if not found and (orders or empty):
        names = dict.fromkeys([*(each.policy for each in orders), *(each.policy.name for each in empty)])
        report = Report(policy=", ".join(names), notes=notes)
        if empty:
            report = evolve(report, saved=ValuesReport(), recomputed=ValuesReport(), audit=AuditReport(True))
        return _with_orders(report, orders)
    if found is None:
        wanted = refusals.NO_POLICY if isinstance(subject, fx.GraphModule) else refusals.NOTHING_TO_REPORT
        raise wanted.error(kind=type(subject).__name__)
    left = () if sessions else frames_left_of(subject, others=not found)
    if not found:
        compiled = bool(getattr(subject, marks.COMPILER, False) or getattr(backend_of(subject), marks.COMPILER, False))
        skipped = next(filter(None, (session.skipped() for session in sessions)), None)
        checkpointed = bool(sessions)
        nothing = refusals.nothing_decided(checkpointed=checkpointed, compiled=compiled, left=left, skipped=skipped)
        raise PolicyGraphError([nothing])
    report = combined([each.report for each in found])
    if report.offloaded and pool.most:
        report = evolve(report, host=HostReport(pool.out, pool.back, pool.most, pool.slower))
    said = [sentence for session in sessions for sentence in (*session.outside(), *session.loads())]
    uncompiled = tuple(f"{each.message} ({each.code})" for each in map(refusals.runs_as_it_is, left))
    warnings = (*report.warnings, *uncompiled)
    return _with_orders(evolve(report, warnings=warnings, notes=(*report.notes, *notes, *said)), orders)


def _with_orders(report: Report, orders: tuple[FsdpOrderReport, ...]) -> Report:
    """Add the order that FSDP was given, and to the audit where FSDP has another one by now."""
    if not orders:
        return report
    audit = report.audit or AuditReport(True)
    wrong = tuple(each for order in orders for each in order.differences)
    audit = AuditReport(audit.agrees and not wrong, (*audit.differences, *wrong))
    return evolve(report, by_fsdp=orders, audit=audit)


ELSEWHERE = "APL615"


def trace_step(
    model: nn.Module,
    loss_fn: LossFn,
    *batch: Any,
    optimizer: Optimizer | None = None,
    device: target_device.Device | None = None,
    compute_capability: target_device.Capability | None = None,
    path: Literal["eager"] | None = None,
) -> TracedStep:
    """Trace ``loss_fn(model, *batch)`` and its gradients into one flat graph.

    Tracing computes nothing and leaves the model as it was. ``loss_fn`` returns a tensor of one element; ``batch`` is
    any tree of tensors. The graph is specialised to shapes, non-tensors in the batch, the mode of every module, and
    attributes other than tensors. An autocast around the call or inside ``loss_fn`` is part of it.
    ``torch.utils.checkpoint`` regions become tags that a policy keeps or overrides. Checkpoints that follow a policy
    are left out: apply that policy to the graph.

    With ``optimizer``, the graph contains the optimizer's step: each call updates the parameters and the optimizer's
    state with the current learning rates, as with ``capturable=True``. The optimizer must have taken a step before.

    ``device="cuda"`` traces the step as a GPU runs it, at true sizes, wherever the model and the batch are (on ``meta``
    too) and without memory for the weights; you can plan such a step and write it to a snapshot, and call it if the
    model is on that device. ``compute_capability`` selects the GPU, as ``"8.0"`` or ``(8, 0)``; by default the
    machine's, else 9.0. ``device="cpu"`` traces a model on ``meta`` as the CPU runs it.

    ``path="eager"`` traces what the model runs in eager on this batch, to plan checkpoints: elsewhere a model is told
    that it is compiled (``torch.compiler.is_compiling()``), and may do something else, and may not ask tensors for
    values. Here it may ask for what follows from integers and booleans of the batch and of buffers, and what it writes
    in place the graph does. Such a step is not run: another batch may take another branch.

    Raises ``PolicyGraphError`` if the loss is not a scalar, nothing requires a gradient, the step cannot be traced on
    this device, or the optimizer has no state or other parameters.
    """
    refusals.checked_model(model, "a step is traced of a model")
    check_argument("optimizer", optimizer, isinstance(optimizer, Optimizer | None), "a `torch.optim.Optimizer`")
    check_argument("path", path, path in (None, "eager"), '`"eager"` or None')
    target = target_device.target_device(device, compute_capability) or target_device.ambient_device()
    state = step.read_state(model)
    step.check_hooks(state)
    step.check_gathers(model)
    updates = step.OptimizerState.of(optimizer, state)
    captured = capture(model, loss_fn, batch, state, optimizer, updates, target, as_eager=path == "eager")
    applied_plans.remember_checkpoints(captured.gm, captured.followed)
    of_model, of_optimizer = step.ModelSignature.of(model, state), step.OptimizerSignature.of(updates)
    signatures = (step.BatchSignature.of(batch), of_model, of_optimizer)
    return TracedStep(model, optimizer, *signatures, captured, target, path)


class TracedStep:
    """``loss, gradients = step(*batch)`` runs the traced forward, loss and backward on the model as it is now.

    ``gradients`` maps the first names of ``named_parameters()`` to gradients, where there are any. Each call reads
    parameters and buffers from the model, and updates once the buffers that the forward updates. A step that contains
    its optimizer updates the parameters and returns no gradients, so that each can die early.
    """

    gm: fx.GraphModule
    """The graph: parameters, buffers and the batch's tensors in, the loss and the gradients out."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: step.BatchSignature,
        state: step.ModelSignature,
        updates: step.OptimizerSignature,
        captured: Captured,
        device: target_device.TargetDevice | None = None,
        path: Literal["eager"] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.gm = captured.gm
        self._batch = batch
        self._state = state
        self._updates = updates
        self._captured = captured
        self.device = device
        """The device that the step was traced for, where one was named."""
        self.path = path
        """The path whose operators the step has, where one was named."""
        self._traced_nodes = len(captured.gm.graph.nodes)
        # makes what its backward reads only where gradients are enabled
        recurrent = torch.ops.aten.mkldnn_rnn_layer.default
        self._recurrent = any(node.target is recurrent for node in captured.gm.graph.nodes)
        self._looked_at = False
        self._device_types = sorted({kind.device.type for kind in state.kinds.values()})

    def __call__(self, *batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Runs the step. Raises PolicyGraphError if the batch or the model is not what was traced.

        Warns, once, if the model has checkpoints and nothing has applied them to the graph.
        """
        here = [kind for kind in self._device_types if self.device is not None and kind != self.device.kind]
        if here:
            message = f"the step was traced as on `{self.device}`, and the model is on `{here[0]}`"
            help = "plan on it, or write it to a snapshot; to run a step, trace it where the model is"
            raise step.problem(ELSEWHERE, message, help=help)
        if self.path is not None:
            message = f'the step was traced with `path="{self.path}"`, for one batch, and is planned alone'
            help = "give its policy to `policylang.checkpoint_model`; to run a traced step, leave `path` out"
            raise step.problem(ELSEWHERE, message, help=help)
        if not self._looked_at:
            self._looked_at = True
            self._warn_of_checkpoints()
        inputs = self._batch.tensors(batch)
        state = step.read_state(self.model, self._state.attributes)
        self._state.check(self.model, state)
        updates = step.OptimizerState.of(self.optimizer, state)
        self._updates.check(updates)
        plain, _ = take_apart([*state.tensors, *inputs, *updates.tensors.values()])
        plain = [each.detach() if isinstance(each, Tensor) else each for each in plain]
        # the graph has its backward and its casts inside
        with torch.set_grad_enabled(self._recurrent), ExitStack() as stack:
            for kind in filter(torch.is_autocast_enabled, self._device_types):
                stack.enter_context(torch.autocast(kind, enabled=False))
            try:
                outputs = runtime.run(self.gm, plain)
            except RuntimeError as error:
                found = target_device.why_it_failed(self.gm, plain)
                if found is None:
                    raise
                raise found from error
        loss, *gradients = put_together(outputs, self._captured.outputs)
        return loss, dict(zip(self._captured.gradients, gradients, strict=True))

    def _warn_of_checkpoints(self) -> None:
        if applied_plans.last_audited(self.gm) is not None:
            return
        followed, nodes = self._captured.followed, self.gm.graph.nodes
        if followed:
            message = f"the model's checkpoints follow `{followed[0].name}`, and its traced step applies nothing"
            warnings.warn(f"{message}: `step.apply(...)` gives it the policy", PolicyWarning, stacklevel=3)
        elif len(nodes) == self._traced_nodes and any(marks.user_tag(node.meta)[0] for node in nodes):
            message = "the model's own checkpoints are tags in its traced step, and nothing applies them"
            warnings.warn(f"{message}: `step.apply(...)` does, with any policy", PolicyWarning, stacklevel=3)

    def apply(
        self,
        policy: Policy | str,
        mesh: DeviceMesh | None = None,
        *,
        agree: bool = True,
        device: DeviceLike | None = None,
    ) -> TracedStep:
        """Applies a policy, or the file of one, to the graph; ``report`` has the result. Returns itself.

        ``mesh`` names the dimensions of collectives, with ``agree`` the ranks that share the graph compare their plans
        first, and ``device`` is the profile for times, as in ``policylang.apply``, whose errors it raises.
        """
        self.gm = apply(self.gm, policy, mesh, agree=agree, device=device)
        return self

    @property
    def report(self) -> Report:
        """The decisions, the lines that made them, and the audit."""
        return report_on(self.gm)

    def __repr__(self) -> str:
        return f"<policylang.TracedStep: {str(self).partition(chr(10))[0]}>"

    def __str__(self) -> str:
        nodes = len(self.gm.graph.nodes)
        captured = self._captured
        lines = [f"traced step of {type(self.model).__name__}: {nodes} nodes, {len(captured.gradients)} gradients"]
        lines += [f"  as on {self.device}"] if self.device is not None else []
        lines += [f"  {path}: {kind}" for path, kind in self._batch.described()]
        if captured.mutated:
            lines.append(f"  writes {listed([f'`{name}`' for name in captured.mutated], 3)}")
        if captured.unrepeated:
            lines.append(f"  does not repeat the change of {listed([f'`{name}`' for name in captured.unrepeated], 3)}")
        return "\n".join(lines)
