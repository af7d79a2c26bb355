"""Applies a policy: to a traced FX graph (``apply``, ``partition``), and by checkpoints in eager."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx, nn

from policylang.api.load import DeviceLike, PolicyLike, policy_of
from policylang.backends import records, refusals
from policylang.backends.eager.checkpoint import contexts_for, put_on, take_off
from policylang.backends.eager.session import Contexts
from policylang.backends.finalize import gradients_of
from policylang.backends.joint import JointPartitioner
from policylang.backends.path import apply_policy, checked_module
from policylang.backends.rewriting import first_difference
from policylang.graph.phases import has_backward
from policylang.language.syntax import Policy
from policylang.ranks.comparison import comparing


def apply(
    gm: fx.GraphModule, policy: PolicyLike, mesh: Any = None, *, agree: bool = True, device: DeviceLike | None = None
) -> fx.GraphModule:
    """Apply a policy to a graph, and return the graph.

    A joint graph is rewritten and tagged: every decided forward node gets its ``recompute`` tag and
    ``node.meta["custom"]["policylang"]``, the line that decided; ``policylang.partition`` then splits and orders it. A
    flat graph, forward, loss and backward in one, is rematerialised, tagged, audited and ordered. On the forward or
    backward graph of a partition, only collectives are rewritten and ordered; the report says so.

    ``policy`` is a policy or the path of one; ``mesh`` names the dimensions of collectives; ``device`` is as in
    ``policylang.load``. With ``agree``, and a process group, the ranks that share the graph (those of the mesh, and all
    connected by its groups) compare their plans before anything is changed.

    Raises, and leaves the graph unchanged: ``PolicyMatchError`` if policy and graph, or the policy of the model's
    checkpoints, do not fit; ``PolicyGraphError`` for a kind of graph that policies cannot be applied to, and for a flat
    one that has a policy; ``PolicyDivergenceError`` if ranks have different plans, or one is missing.
    ``PolicyAuditError`` if the changed graph does not follow the plan.
    """
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

    The arguments are AOTAutograd's own: ``gm`` was traced with ``joint_inputs``, a pair of the inputs of the forward
    and the tangents; the first ``num_fwd_outputs`` of its outputs are the forward's, the others gradients;
    ``static_lifetime_input_indices`` are inputs that live on whatever is saved, parameters above all. Other ``options``
    of partitioners are accepted. Returned are the forward, whose further outputs are the values saved, and the
    backward.

    Follows the plan that ``policylang.apply`` made for this graph, or ``policy``, with ``device`` and ``agree`` as
    there.

    Raises as ``policylang.apply``, and ``PolicyGraphError`` for a graph that is no joint graph or has no policy.
    """
    checked_module(gm, "a partition is of a graph module")
    applied = records.plan_of(gm)
    given = policy if policy is not None or applied is None else applied.policy
    if given is None:
        raise refusals.NO_POLICY.error()
    with comparing("partition", agree):
        is_current = applied is not None and first_difference(gm.graph.nodes, applied.facts) is None
        prepared = (
            applied if policy is device is None and is_current else None
        )  # another pass may have changed the graph since
        wanted = policy_of(given, device)
        if prepared is None and gradients_of(gm.graph, num_fwd_outputs) and not has_backward(gm.graph):
            raise refusals.NOT_A_JOINT_GRAPH.error()
        made = JointPartitioner(wanted).partition(
            gm,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
            prepared=prepared,
        )
    return made.forward, made.backward


def context_fn(policy: PolicyLike, module: nn.Module, *, root: str = "", strict: bool = False) -> Contexts:
    """A policy for ``checkpoint(block, x, use_reentrant=False, context_fn=policylang.context_fn(policy, block))``.

    The block is recorded once for every kind of call (shapes, dtypes, train mode, autocast …), planned, and the plan
    replayed operator by operator. The same arguments return the same object.

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
    second call replaces the policy of the first, and one with None removes it: the model is then as it was.
    Checkpoints with a function of :func:`context_fn` stay, with a warning.
    ``policylang.report(model)`` has the decisions once the model has run forward with gradients.

    ``strict`` is as in :func:`context_fn`, ``preserve_rng_state`` as in ``torch.utils.checkpoint``, ``device`` as in
    :func:`policylang.load`.

    Raises ``PolicyError`` for a policy that cannot be read or has errors, ``PolicyGraphError`` if the model has no such
    blocks (with None, if the forward of a block was replaced since), and ``PolicyMatchError`` for an order that eager
    or ``fully_shard`` cannot keep. A block's first call raises as :func:`context_fn` says.
    """
    if policy is None:
        take_off(model)
        return model
    put_on(model, policy_of(policy, device), strict=strict, preserve_rng_state=preserve_rng_state)
    return model


def _identity(policy: PolicyLike) -> tuple[Any, ...]:
    """A file that has changed is another policy. A loaded policy is itself, as long as its session lives."""
    if isinstance(policy, Policy):
        return (id(policy),)
    path = Path(policy)
    return (str(path), path.stat().st_mtime_ns if path.is_file() else 0)
