"""Puts checkpoints (``torch.utils.checkpoint``) that follow a policy around the blocks of a model.

Either each block's forward is replaced by one in a checkpoint, or hooks on the blocks say which of them a checkpoint of
the user's runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from torch.utils.checkpoint import checkpoint

from policylang.backends.eager import problems
from policylang.backends.eager.fsdp_prefetch import put_order_on, refuse_for_one_block, take_order_off
from policylang.backends.eager.region import runs_for_backward, stands_aside
from policylang.backends.eager.session import BlockCall, Contexts, Session, innermost, session_behind, this_thread
from policylang.graph import marks
from policylang.graph.phases import normalise
from policylang.language.globs import PathGlob
from policylang.language.syntax import Policy


def blocks_in(model: nn.Module, policy: Policy, root: str) -> dict[nn.Module, str]:
    """Each block below a model and its path, in module order: those that the policy's ``blocks`` names; without it, the
    numbered children of the ``ModuleList`` with the most parameters, preferably of two or more. A model that is itself
    a block has none below it."""
    if policy.blocks is None:
        lists = [(path, each) for path, each in model.named_modules() if isinstance(each, nn.ModuleList)]
        if root or not lists:
            return {}
        path, largest = max(lists, key=lambda each: (len(each[1]) > 1, sum(map(torch.numel, each[1].parameters()))))
        return {child: normalise(f"{path}.{name}")[1] for name, child in largest.named_children()}
    glob = PathGlob(policy.blocks.glob)
    if root and glob.outermost(root) is not None:
        return {}
    found: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        full = ".".join(part for part in (root, normalise(path)[1]) if part)
        if path and glob.outermost(full) == full:
            found.setdefault(module, full)
    return found


_known: WeakKeyDictionary[nn.Module, dict[Any, Contexts]] = WeakKeyDictionary()
"""By module and policy, so that ``context_fn`` may be written inside a training loop."""


def contexts_for(module: nn.Module, policy: Callable[[], Policy], identity: Any, root: str, strict: bool) -> Contexts:
    """The contexts of a module's checkpoints; the same object for the same ``identity`` of a policy, which ``policy``
    gives where it is not known by that yet. ``root`` and ``strict`` as in ``policylang.context_fn``."""
    known = _known.setdefault(module, {})
    key = (identity, root, strict)
    if key not in known:
        loaded = policy()
        root = normalise(root)[1]
        blocks = blocks_in(module, loaded, root)
        if blocks:
            put_order_on(module, loaded, partial(blocks_in, policy=loaded, root=root))
        elif not _without_layers(module, loaded):
            refuse_for_one_block(loaded, problems.block(module, root))
        session = Session(loaded, strict, tuple(blocks.values()))
        session.add(module, root)
        for number, (block, name) in enumerate(blocks.items()):
            session.add(block, name, number)
        for watched, region in list(session.regions.items()):
            Watch(session, region.root, region.number).put_on(watched)
        known[key] = session.context_fn()
    return known[key]


def _without_layers(model: nn.Module, policy: Policy) -> str:
    """The name of an empty list of layers, as in a pipeline stage of a norm and a head; empty where there is none."""
    glob = None if policy.blocks is None else PathGlob(policy.blocks.glob)
    for path, module in model.named_modules():
        child = f"{normalise(path)[1]}.0".lstrip(".")
        is_list = isinstance(module, nn.ModuleList if glob is None else nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if is_list and not len(module) and (glob is None or glob.outermost(child) == child):
            return problems.block(module, path)
    return ""


def put_on(model: nn.Module, policy: Policy, *, strict: bool, preserve_rng_state: bool) -> None:
    """Put a checkpoint around each block of a model, in place. Raises ``PolicyGraphError`` where it has no blocks, and
    nothing without layers that could have held them; and as :func:`take_off` does."""
    _known.get(model, {}).pop(None, None)
    blocks = blocks_in(model, policy, "")
    if not blocks:
        empty = _without_layers(model, policy)
        if empty:
            _known.setdefault(model, {})[None] = Session(policy, strict, without_layers=empty).context_fn()
            return
        kind = type(model).__name__
        if policy.blocks is None:
            raise problems.NO_LIST.error(kind=kind)
        raise problems.NO_BLOCKS.error(span=policy.blocks.span, glob=policy.blocks.glob, kind=kind)
    _refuse_replaced(blocks)
    put_order_on(model, policy, partial(blocks_in, policy=policy, root=""))
    if policy.orders and not (policy.rules or policy.undecided):  # scheduling lines alone need no checkpoint
        for expectation in policy.expectations:  # no block is planned
            problems.warn(problems.UNCHECKED.diagnostic(span=expectation.span, line=expectation.span.one_line))
        for block in blocks:
            _take_off(block)
        return
    session = Session(policy, strict, tuple(blocks.values()))
    for number, (block, name) in enumerate(blocks.items()):
        own = block.__dict__.get("forward")
        inner = own.forward if isinstance(own, Checkpointed) else block.forward
        block.forward = Checkpointed(block, inner, session, name, number, preserve_rng_state)
        if not isinstance(own, Checkpointed):
            block.register_forward_pre_hook(_refuse_shallow_copy)


def take_off(model: nn.Module) -> None:
    """Have a model and its blocks run as they did before they were given a policy. Raises ``PolicyGraphError`` where
    the forward of a block was replaced since: what replaced it calls the checkpoint."""
    _refuse_replaced({module: normalise(path)[1] for path, module in model.named_modules()})
    modules = list(model.modules())
    had_checkpoints = any(None in _known.get(module, {}) for module in modules)
    for module in modules:
        _known.get(module, {}).pop(None, None)
        take_order_off(module)
        _take_off(module)
    if not had_checkpoints and any(_known.get(module) for module in modules):
        problems.warn(problems.NOT_TAKEN_OFF.diagnostic(name=problems.block(model, "")))


def _refuse_replaced(modules: Mapping[nn.Module, str]) -> None:
    for module, name in modules.items():
        if _hooks_of_ours(module) and not isinstance(module.__dict__.get("forward"), Checkpointed):
            raise problems.REPLACED.error(name=problems.block(module, name))


def _take_off(block: nn.Module) -> None:
    own = block.__dict__.get("forward")
    if isinstance(own, Checkpointed):
        del block.forward
        if own.forward != MethodType(type(block).forward, block):
            block.forward = own.forward
        for key in _hooks_of_ours(block):
            del block._forward_pre_hooks[key]


def _hooks_of_ours(block: nn.Module) -> list[int]:
    return [key for key, hook in block._forward_pre_hooks.items() if hook is _refuse_shallow_copy]


def _refuse_shallow_copy(module: nn.Module, _args: Any) -> None:
    """A shallow copy, as ``nn.DataParallel`` makes them, has the ``forward`` of the block, on the block's weights."""
    if torch.compiler.is_compiling():  # first of all: Dynamo names modules by what it has looked at
        return
    own = module.__dict__.get("forward")
    if isinstance(own, Checkpointed) and own.module is not module:
        raise problems.ONLY_ONE_BLOCK.error(name=problems.block(own.module, own.root))


@define(eq=False)
class Checkpointed:
    """Stands in for the ``forward`` of a block."""

    module: nn.Module
    forward: Callable[..., Any]
    session: Session
    root: str
    number: int | None
    preserve_rng_state: bool
    contexts: Contexts = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.session.add(self.module, self.root, self.number)
        self.contexts = self.session.context_fn()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and stands_aside(self.module, self.root, args, kwargs):
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
            session = memo[id(self.session)] = Session(self.session.policy, self.session.strict, self.session.names)
        module = copy.deepcopy(self.module, memo)
        return evolve(self, module=module, forward=copy.deepcopy(self.forward, memo), session=session)

    def __reduce__(self) -> tuple[Any, ...]:
        """For ``torch.save(model)``: what is loaded follows the policy as it was."""
        parts = (self.module, self.forward, self.session, self.root, self.number, self.preserve_rng_state)
        return Checkpointed, parts

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # our compiler takes the checkpoint out, others ask for its contexts
            return self.forward(*args, **kwargs)
        around = self.session.around()
        if around is not None:
            region = self.session.add(self.module, self.root, self.number)
            around.begin(BlockCall(self.session, self.module, region, args, kwargs))
        try:
            output = self.forward(*args, **kwargs)
        except Exception as error:  # before torch 2.12, a checkpoint does not show its contexts what is raised in it
            if around is not None and around.block is self.module:
                around.explain(error)
            raise
        if around is not None:
            around.end(self.module, output)
        return output


@frozen(eq=False)
class Watch:
    """The hooks of one block that say that a checkpoint runs it, and with what inputs.

    Either the block is called inside the checkpoint, or the checkpoint lies in the block's own call, around its
    forward. The hooks lie inside those of others (FSDP gathers weights in them), which are none of the block's. A
    copied model has watches of its own, which know its blocks by their names.
    """

    session: Session
    root: str
    number: int | None

    def put_on(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, prepend=True)
        module.register_forward_hook(self.done, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch(self.session, self.root, self.number)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # our compiler takes the checkpoint out, others ask for its contexts
            return
        called = BlockCall(self.session, module, self.session.add(module, self.root, self.number), args, kwargs)
        around = self.session.around()
        if around is not None:
            around.begin(called)
        else:
            this_thread.called.append(called)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        around = self.session.around()
        if around is not None:
            around.end(module, output)
        elif self._is_last(module):
            for each in this_thread.called[-1].checkpoints:
                each.returned(output)

    def done(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Also where the block raised."""
        if torch.compiler.is_compiling() or not self._is_last(module):
            return
        call = this_thread.called.pop()
        other = call.begun < this_thread.begun or innermost() is not None  # of ours, under another policy
        if self.number is not None and output is not None and not other and runs_for_backward(module):
            self.session.ran_without.add(self.number)
            found = self.session.skipped()
            if found is not None:
                self.session.warn_once(found)

    def _is_last(self, module: nn.Module) -> bool:
        last = this_thread.called[-1] if this_thread.called else None
        return last is not None and last.module is module and last.session is self.session


def sessions_of(subject: object) -> list[Session]:
    """The sessions of a model, a block or a context function."""
    own = session_behind(subject)
    if own is not None:
        return [own]
    if not isinstance(subject, nn.Module):
        return []
    forwards = (module.__dict__.get("forward") for module in subject.modules())
    wrapped = list(dict.fromkeys(each.session for each in forwards if isinstance(each, Checkpointed)))
    known = [marks.session_of(each) for module in subject.modules() for each in _known.get(module, {}).values()]
    return [*wrapped, *(each for each in known if not wrapped or each.without_layers)]
