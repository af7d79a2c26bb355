"""``policylang.trace_step``, a whole training step as one FX graph that runs, and the report on whatever has one."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from policylang.api.apply import apply
from policylang.api.load import DeviceLike
from policylang.audit.outcome import combined
from policylang.audit.report import AuditReport, FsdpOrderReport, HostReport, Report, ValuesReport
from policylang.backends import records, refusals, runtime
from policylang.backends.copies import pool
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.eager.fsdp_prefetch import order_reports
from policylang.backends.path import findings_on
from policylang.backends.torch_compile.backend import frames_left_of
from policylang.errors import PolicyGraphError, PolicyWarning
from policylang.graph import marks
from policylang.language.shown import listed
from policylang.torch_compat.compilers import backend_of
from policylang.torch_compat.tracing import put_together, take_apart
from policylang.tracing.capture import Captured, LossFn, capture
from policylang.tracing.step import (
    BatchSignature,
    ModelSignature,
    OptimizerSignature,
    OptimizerState,
    check_gathers,
    check_hooks,
    problem,
    read_state,
)
from policylang.tracing.target_device import (
    Capability,
    Device,
    TargetDevice,
    ambient_device,
    target_device,
    why_it_failed,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from policylang.audit.report import Report
    from policylang.language.syntax import Policy


def report_on(subject: Any) -> Report:
    """See :func:`policylang.report`."""
    found = findings_on(subject)
    orders = tuple(order_reports(subject))
    sessions = sessions_of(subject)
    empty = [each for each in sessions if each.without_layers]
    notes = tuple(f"{each.without_layers} holds no layers, and a checkpoint has nothing to do" for each in empty)
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
        raise PolicyGraphError(
            [refusals.nothing_decided(checkpointed=bool(sessions), compiled=compiled, left=left, skipped=skipped)]
        )
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
    device: Device | None = None,
    compute_capability: Capability | None = None,
) -> TracedStep:
    """Traces ``loss_fn(model, *batch)`` and its gradients into one flat graph.

    Nothing is computed and the model is left as it was. ``loss_fn`` returns a tensor of one element; ``batch`` is any
    tree of tensors. The graph is specialised to shapes, non-tensors in the batch, the mode of every module, and
    attributes other than tensors. An autocast around the call or inside ``loss_fn`` is part of it.
    ``torch.utils.checkpoint`` regions are tagged, for a policy to keep or override; those that follow a policy are left
    out: apply that policy to the graph.

    With ``optimizer``, which must have taken a step before, its step is part of the graph: each call updates the
    parameters and the optimizer's state with the current learning rates, as with ``capturable=True``.

    ``device="cuda"`` traces the step as a GPU runs it, at true sizes, wherever the model and the batch are (on ``meta``
    too) and without memory for the weights; it then can be planned and written to a snapshot, and called where the
    model is on that device. ``compute_capability`` selects the GPU, as ``"8.0"`` or ``(8, 0)``; by default the
    machine's, else 9.0. ``device="cpu"`` traces a model on ``meta`` as the CPU runs it.

    Raises ``PolicyGraphError`` if the loss is not a scalar, nothing requires a gradient, the step cannot be traced on
    this device, or the optimizer has no state or other parameters.
    """
    target = target_device(device, compute_capability) or ambient_device()
    state = read_state(model)
    check_hooks(state)
    check_gathers(model)
    updates = OptimizerState.of(optimizer, state)
    captured = capture(model, loss_fn, batch, state, optimizer, updates, target)
    records.remember_checkpoints(captured.gm, captured.followed)
    signatures = BatchSignature.of(batch), ModelSignature.of(model, state), OptimizerSignature.of(updates)
    return TracedStep(model, optimizer, *signatures, captured, target)


class TracedStep:
    """``loss, gradients = step(*batch)``: the traced forward, loss and backward on the model as it is now.

    ``gradients`` maps the first names of ``named_parameters()`` to gradients, where there are any. Parameters and
    buffers are read from the model at each call, buffers that the forward updates are updated once. A step that
    contains its optimizer updates the parameters and returns no gradients, so that each can die early.
    """

    gm: fx.GraphModule
    """The graph: parameters, buffers and the batch's tensors in, the loss and the gradients out."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: BatchSignature,
        state: ModelSignature,
        updates: OptimizerSignature,
        captured: Captured,
        device: TargetDevice | None = None,
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
        self._traced_nodes = len(captured.gm.graph.nodes)
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
            raise problem(ELSEWHERE, message, help=help)
        if not self._looked_at:
            self._looked_at = True
            self._warn_of_checkpoints()
        inputs = self._batch.tensors(batch)
        state = read_state(self.model, self._state.attributes)
        self._state.check(self.model, state)
        updates = OptimizerState.of(self.optimizer, state)
        self._updates.check(updates)
        plain, _ = take_apart([*state.tensors, *inputs, *updates.tensors.values()])
        # the graph has its backward and its casts inside
        with torch.no_grad(), ExitStack() as stack:
            for kind in filter(torch.is_autocast_enabled, self._device_types):
                stack.enter_context(torch.autocast(kind, enabled=False))
            try:
                outputs = runtime.run(self.gm, plain)
            except RuntimeError as error:
                found = why_it_failed(self.gm, plain)
                if found is None:
                    raise
                raise found from error
        loss, *gradients = put_together(outputs, self._captured.outputs)
        return loss, dict(zip(self._captured.gradients, gradients, strict=True))

    def _warn_of_checkpoints(self) -> None:
        if records.last_audited(self.gm) is not None:
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
