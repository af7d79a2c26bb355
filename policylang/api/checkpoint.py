"""``policylang.context_fn`` and ``policylang.checkpoint_model``: a policy for ``torch.utils.checkpoint`` in eager."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from policylang.api.load import DeviceLike, PolicyLike, policy_of
from policylang.backends.eager.checkpoint import contexts_for, put_on, take_off
from policylang.backends.eager.session import Contexts
from policylang.language.syntax import Policy


def context_fn(policy: PolicyLike, module: nn.Module, *, root: str = "", strict: bool = False) -> Contexts:
    """A policy for ``checkpoint(block, x, use_reentrant=False, context_fn=policylang.context_fn(policy, block))``.

    The block is recorded once for every way in which it is called (shapes, dtypes, train mode, autocast …), planned,
    and the plan replayed operator by operator. The same arguments give the same object again.

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
    modules and parameters stay what they are. ``policylang.report(model)`` has the decisions once the model has run
    forward with gradients. Call it before ``DistributedDataParallel``; before ``fully_shard`` or after it. What
    ``prefetch`` and ``bucket … per block`` lines say of weights, ``fully_shard`` is told, and a policy of such lines
    alone puts no checkpoint anywhere. A second call replaces the policy of the first, and one with None takes it off:
    the model is then as it was, and ``fully_shard`` is told what it had been told before. ``strict`` as in
    :func:`context_fn`; ``preserve_rng_state`` as in ``torch.utils.checkpoint``: whether random operators that run a
    second time draw what they drew at first. ``device`` is the profile that times are worked out from, as in
    :func:`policylang.load`.

    Raises ``PolicyError`` for a policy that cannot be read or means nothing, ``PolicyGraphError`` where the model has
    no such blocks, and ``PolicyMatchError`` for an order that eager or ``fully_shard`` cannot keep. A block's first
    call raises as :func:`context_fn` says. With None, ``PolicyGraphError`` where the forward of a block was replaced
    since.
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
