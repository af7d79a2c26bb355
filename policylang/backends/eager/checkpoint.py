"""``policylang.context_fn`` and ``policylang.checkpoint_model``: a policy for ``torch.utils.checkpoint`` in eager."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, field
from torch import nn
from torch.utils.checkpoint import checkpoint

from policylang.api.load import PolicyLike, policy_of
from policylang.backends.eager import problems
from policylang.backends.eager.blocks import blocks_in
from policylang.backends.eager.session import BlockCall, CheckpointContext, Session, session_behind
from policylang.backends.eager.standing_aside import stands_aside
from policylang.backends.eager.watch import Watch
from policylang.graph import marks
from policylang.graph.reading.modules import normalise
from policylang.language.syntax import Policy

Contexts = Callable[[], tuple[CheckpointContext, CheckpointContext]]
"""What ``torch.utils.checkpoint.checkpoint`` takes as its ``context_fn``. Each call serves one forward."""


def _contexts_of(session: Session) -> Contexts:
    """A plain function, the only thing that ``torch.compile`` takes: it knows then whose checkpoint it has."""

    def contexts() -> tuple[CheckpointContext, CheckpointContext]:
        return session.contexts()

    setattr(contexts, marks.SESSION, session)
    return contexts


@define(eq=False)
class _Known:
    """The sessions of one module, so that ``context_fn`` may be written inside a training loop."""

    made: dict[Any, Contexts] = field(factory=dict)


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


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
    known = _known.setdefault(module, _Known())
    key = (*_key(policy), root, strict)
    if key not in known.made:
        loaded = policy_of(policy)
        root = normalise(root)[1]
        blocks = blocks_in(module, loaded, root)
        session = Session(loaded, strict, tuple(blocks.values()))
        session.add(module, root)
        for number, (block, name) in enumerate(blocks.items()):
            session.add(block, name, number)
        for watched, region in list(session.regions.items()):
            Watch(session, region.root, region.number).put_on(watched)
        known.made[key] = _contexts_of(session)
    return known.made[key]


def checkpoint_model(
    model: nn.Module, policy: PolicyLike, *, strict: bool = False, preserve_rng_state: bool = True
) -> nn.Module:
    """Put a checkpoint that follows a policy around each block of a model, in place, and return the model.

    The blocks are those that ``blocks`` names, else the numbered children of the largest ``ModuleList``. Names of
    modules and parameters stay what they are. ``policylang.report(model)`` has the decisions once the model has run
    forward with gradients. Call it before ``fully_shard`` or ``DistributedDataParallel``. A second call replaces the
    policy of the first. ``strict`` as in :func:`context_fn`.

    Raises ``PolicyGraphError`` where the model has no such blocks.
    """
    loaded = policy_of(policy)
    blocks = blocks_in(model, loaded, "")
    if not blocks:
        raise problems.no_blocks(model, loaded)
    session = Session(loaded, strict, tuple(blocks.values()))
    contexts = _contexts_of(session)
    for number, (block, name) in enumerate(blocks.items()):
        session.add(block, name, number)
        own = block.__dict__.get("forward")
        inner = own.forward if isinstance(own, Checkpointed) else block.forward
        block.forward = Checkpointed(block, inner, session, name, number, preserve_rng_state, contexts)
        if not isinstance(own, Checkpointed):
            block.register_forward_pre_hook(_note_replica)
    return model


@define(eq=False)
class Checkpointed:
    """Stands in for the ``forward`` of a block."""

    module: nn.Module
    forward: Callable[..., Any]
    session: Session
    root: str
    number: int | None
    preserve_rng_state: bool
    contexts: Contexts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            replica = _take_replica(self)
            if replica is not None:
                return self._for(replica)(*args, **kwargs)
            if stands_aside(self.module, self.root, args, kwargs):
                return self.forward(*args, **kwargs)
        return checkpoint(
            self._run,
            *args,
            use_reentrant=False,
            preserve_rng_state=self.preserve_rng_state,
            context_fn=self.contexts,
            **kwargs,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpointed:
        """A copied model has blocks of its own under the same policy."""
        session = memo.get(id(self.session))
        if session is None:
            session = memo[id(self.session)] = self.session.again()
        module = copy.deepcopy(self.module, memo)
        session.add(module, self.root, self.number)
        forward = copy.deepcopy(self.forward, memo)
        return self._with(module, forward, session)

    def __reduce__(self) -> tuple[Any, ...]:
        """For ``torch.save(model)``: what is loaded follows the policy as it was."""
        parts = (self.module, self.forward, self.session, self.root, self.number, self.preserve_rng_state)
        return _restored, parts

    def _with(self, module: nn.Module, forward: Callable[..., Any], session: Session) -> Checkpointed:
        contexts = self.contexts if session is self.session else _contexts_of(session)
        return Checkpointed(module, forward, session, self.root, self.number, self.preserve_rng_state, contexts)

    def _for(self, replica: nn.Module) -> Checkpointed:
        """For a copy of the block that has the same ``forward``, as ``nn.DataParallel`` makes them.

        Raises ``PolicyGraphError`` where the forward is not that of the class, and only knows the block itself.
        """
        function = getattr(self.forward, "__func__", None)
        if function is None or getattr(self.forward, "__self__", None) is not self.module:
            raise problems.only_one_block(problems.block(self.module, self.root))
        return self._with(replica, MethodType(function, replica), self.session)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # our compiler takes the checkpoint out, others ask for its contexts
            return self.forward(*args, **kwargs)
        around = self.session.around()
        if around is not None:
            region = self.session.add(self.module, self.root, self.number)
            around.begin(BlockCall(self.session, self.module, region, args, kwargs))
        output = self.forward(*args, **kwargs)
        if around is not None:
            around.end(self.module, output)
        return output


_called = threading.local()


def _restored(
    module: nn.Module,
    forward: Callable[..., Any],
    session: Session,
    root: str,
    number: int | None,
    preserve_rng_state: bool,
) -> Checkpointed:
    session.add(module, root, number)
    return Checkpointed(module, forward, session, root, number, preserve_rng_state, _contexts_of(session))


def _note_replica(module: nn.Module, _args: Any) -> None:
    """A shallow copy of a block has the very ``forward`` of the block, which does not see what it is called for."""
    if torch.compiler.is_compiling():
        return
    own = module.__dict__.get("forward")
    if isinstance(own, Checkpointed) and own.module is not module:
        _called.replica = module


def _take_replica(own: Checkpointed) -> nn.Module | None:
    replica: nn.Module | None = getattr(_called, "replica", None)
    if replica is None or replica.__dict__.get("forward") is not own:
        return None
    _called.replica = None
    return replica


def sessions_of(subject: object) -> list[Session]:
    """The sessions that a model, a block or a context function stands for."""
    own = session_behind(subject)
    if own is not None:
        return [own]
    if not isinstance(subject, nn.Module):
        return []
    forwards = (module.__dict__.get("forward") for module in subject.modules())
    wrapped = list(dict.fromkeys(each.session for each in forwards if isinstance(each, Checkpointed)))
    if wrapped:
        return wrapped
    known = [found for module in subject.modules() if (found := _known.get(module)) is not None]
    return [getattr(made, marks.SESSION) for each in known for made in each.made.values()]


def _key(policy: PolicyLike) -> tuple[Any, ...]:
    """A file that has changed is another policy. A loaded policy is itself, as long as its session lives."""
    if isinstance(policy, Policy):
        return (id(policy),)
    path = Path(policy)
    return (str(path), path.stat().st_mtime_ns if path.is_file() else 0)
