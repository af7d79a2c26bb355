"""The blocks of one model under one policy, and the two contexts that a checkpoint enters around each call of one.

A checkpoint asks for its contexts without saying what it is about to run. Which block that is, and with what inputs,
the block's stand-in for its forward says, or hooks on the blocks do (:mod:`policylang.backends.eager.checkpoint`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from attrs import define, evolve, field, frozen
from torch import nn

from policylang.backends.compiled_graphs import CompiledGraph
from policylang.backends.eager import problems
from policylang.backends.eager.eligibility import carries_policies, traced_for_others
from policylang.backends.eager.execution.followed_call import FollowedCall
from policylang.backends.eager.execution.plan_modes import ForwardMode, RecomputeMode
from policylang.backends.eager.observation.block_mode import moments, unseen_since
from policylang.backends.eager.observation.first_call import Observer, watched
from policylang.backends.eager.observation.fsdp_hooks import gathers_aside
from policylang.backends.eager.observation.origins import tensors_in
from policylang.backends.eager.region import CheckpointRegion, RunningBlock, Traces
from policylang.backends.fsdp_weights import NamedBlock
from policylang.errors import PolicyGraphError, PolicyMatchError
from policylang.graph import marks
from policylang.language.syntax import Bucket, Policy
from policylang.torch_compat.dynamo import is_compiled, is_wrapped_by_compiler
from policylang.torch_compat.eager import (
    being_compiled,
    checkpoints_are_tagged,
    clear_cast_weights,
    graph_being_traced,
    remove_saved_tensor_hooks,
    restore_saved_tensor_hooks,
    runs_in_graph,
    saved_tensor_hooks,
    transformed,
)

Contexts = Callable[[], tuple["CheckpointContext", "CheckpointContext"]]
"""What ``torch.utils.checkpoint.checkpoint`` takes as its ``context_fn``. Each call serves one forward."""


@define(eq=False)
class Session:
    """``regions``: by module, each block that a checkpoint may run."""

    policy: Policy
    strict: bool
    names: tuple[str, ...] = ()
    """Of the model's blocks, in order; empty where only one module is known."""
    regions: WeakKeyDictionary[nn.Module, CheckpointRegion] = field(factory=WeakKeyDictionary)
    unmatched_compared: bool = False
    compiled: bool = False
    """Whether a compiler under the same policy has carried it out in one of the checkpoints."""
    graphs: WeakSet[CompiledGraph] = field(factory=WeakSet)
    """What our compiler made of its blocks."""
    agreed: list[Policy] = field(factory=list)
    """Policies of compilers, found to say what ours says."""
    traces: Traces = field(factory=dict)
    """What is known of blocks, shared by those that do the same."""
    _context_fn: Contexts | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what it has seen: a model that is loaded is observed anew."""
        return Session, (self.policy, self.strict, self.names)

    def add(self, module: nn.Module, root: str, number: int | None = None) -> CheckpointRegion:
        """``number``: which of the model's blocks it is, where that is known."""
        region = self.regions.get(module)
        if region is None:
            names = self.names if number is not None else ()
            region = CheckpointRegion(self.of_values, root, self.strict, names, number, self.traces)
            self.regions[module] = region
        return region

    @property
    def of_values(self) -> Policy:
        """The policy as a block plans it: the order of gathers is FSDP's, for the model as a whole."""
        rewrites = tuple(each for each in self.policy.rewrites if not isinstance(each, Bucket))
        return evolve(self.policy, rewrites=rewrites, scheduling=()) if self.policy.orders else self.policy

    def again(self) -> Session:
        """Of a copy of the model, still without its blocks."""
        return Session(self.policy, self.strict, self.names)

    def named(self, block: nn.Module) -> str:
        """A block as a sentence names it."""
        return problems.block(block, self.regions[block].root)

    def context_fn(self) -> Contexts:
        """A plain function, the only thing that ``torch.compile`` takes: it knows then whose checkpoint it has."""
        if self._context_fn is None:

            def contexts() -> tuple[CheckpointContext, CheckpointContext]:
                # ours takes checkpoints out of what it compiles: torch_compile.inner_checkpoints
                if being_compiled() and not checkpoints_are_tagged() and not traced_for_others():
                    raise problems.COMPILED.error(name=problems.AROUND_IT)
                first = CheckpointContext(self, None)
                return first, CheckpointContext(self, first)

            setattr(contexts, marks.SESSION, self)
            self._context_fn = contexts
        return self._context_fn

    def follow(self, policy: Policy) -> None:
        """A compiler carries out a policy in one of the checkpoints. Raises ``PolicyMatchError`` unless it is ours."""
        self.compiled = True
        if policy is self.policy or any(policy is each for each in self.agreed):
            return
        problems.refuse_another(self.policy, policy, "the compiler")
        self.agreed.append(policy)

    def block_names(self) -> tuple[str, ...]:
        """Of the blocks that a checkpoint may run; empty names are not known."""
        return self.names or tuple(region.root for region in self.regions.values())

    def numbered_blocks(self) -> tuple[list[NamedBlock], tuple[str, ...]]:
        """The blocks that a checkpoint may run, and their names; of a block without a name, the class."""
        regions = [
            (module, region) for module, region in self.regions.items() if region.number is not None or not self.names
        ]
        names = tuple(region.root or type(module).__name__ for module, region in regions)
        return [NamedBlock(each, region.root, at) for at, (each, region) in enumerate(regions)], names

    def name_of_a_block(self) -> str:
        """Where no name is known: what kind of module it is."""
        return next((type(module).__name__ for module in self.regions), "block")

    def nothing_ran(self) -> PolicyGraphError:
        """A checkpoint ran none of the blocks, or one whose hooks the compiler has taken away."""
        compiled = [module for module in self.regions if is_compiled(module)]
        others = [module for module in compiled if not carries_policies(module)]
        if others:
            return problems.COMPILED.error(name=self.named(others[0]))
        if compiled:  # which of them is not known: its hooks were left to the compiler
            first, last = self.named(compiled[0]), self.named(compiled[-1])
            several = f"one of {len(compiled)} blocks, {first} to {last},"
            return problems.LEFT_ALONE.error(names=first if len(compiled) == 1 else several)
        names = [region.root or "the module itself" for region in self.regions.values()]
        return problems.NOT_RUN.error([f"made for: {name}" for name in names[:8]])

    def check_unmatched(self) -> None:
        """Raise ``PolicyMatchError`` for each rule that matched nothing in any block, once all have been called.

        Blocks without anything for their backward to read say nothing. A copied model has its own of each block.
        """
        regions = [region for region in self.regions.values() if region.number is not None]
        called = {region.number for region in regions if region.nothing or region.idle}
        ways = [found for region in regions for found in region.nothing.values()]
        if self.unmatched_compared or len(self.names) < 2 or len(called) < len(self.names) or not ways:
            return
        self.unmatched_compared = True
        shared = set.intersection(*({(each.message, each.span) for each in found} for found in ways))
        wrong = [each for each in ways[0] if (each.message, each.span) in shared]
        if wrong:
            raise PolicyMatchError(wrong)

    def around(self) -> CheckpointContext | None:
        """The innermost context that is entered, if it is one of ours and nothing is being traced."""
        found = innermost()
        return found if found is not None and found.session is self and graph_being_traced() is None else None


def innermost() -> CheckpointContext | None:
    """The innermost context that is entered in this thread."""
    return this_thread.around[-1] if this_thread.around else None


def session_behind(context_fn: object) -> Session | None:
    """The session that a ``context_fn`` is of, if it is one of ours."""
    session = getattr(context_fn, marks.SESSION, None)
    return session if isinstance(session, Session) else None


class _Running(threading.local):
    """Of this thread: a backward has threads of its own."""

    def __init__(self) -> None:
        self.around: list[CheckpointContext] = []
        self.called: list[BlockCall] = []
        self.replica: nn.Module | None = None


this_thread = _Running()
"""The contexts that are entered, the blocks that are called outside of any, and a shallow copy that is called next."""


@frozen(eq=False)
class BlockCall:
    """A block that is called, and has not returned."""

    session: Session
    module: nn.Module
    region: CheckpointRegion
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    checkpoints: list[CheckpointContext] = field(factory=list)
    """The contexts of those that lie in this call: they have yet to learn what the block returns."""


class CheckpointContext:
    """The context of a forward, or (with ``first``, that of its forward) of a recomputation."""

    def __init__(self, session: Session, first: CheckpointContext | None) -> None:
        self.session = session
        self.first = first
        self.began = next(moments)
        self.call: FollowedCall | None = None
        """Once the block has returned, what its recomputation is to follow; None where nothing asks for one."""
        self.running: RunningBlock | None = None
        """Until the block has returned."""
        self.mode: Observer | ForwardMode | RecomputeMode | None = None
        self.lies_within = False
        """Whether the checkpoint lies in the block's own call, around its forward."""
        self.block: nn.Module | None = None
        self._plainly = False
        """Whether a block without anything for its backward to read is asked for all the same."""
        self._contexts = ExitStack()
        self._depth = 0
        self._hooks: Any = None
        """Those of the checkpoint itself, which decide what it holds and what it recomputes."""
        self._gave_way = False
        self._aside = False

    def __enter__(self) -> CheckpointContext:
        if self.first is None and runs_in_graph(self):  # Dynamo's graph as it is: no block in it has hooks
            raise problems.COMPILED.error(name=problems.AROUND_IT)
        this_thread.around.append(self)
        self.block, self._depth, self._plainly = None, 0, False
        self._gave_way, self._hooks = False, saved_tensor_hooks()
        if transformed() or traced_for_others():
            self._plainly = True
        elif graph_being_traced() is None:
            self._begin_within()
        return self

    def give_way(self, policy: Policy) -> None:
        """Code that our compiler made under a policy is about to run: it knows what to save, so autograd is to keep it.

        Raises ``PolicyMatchError`` where it is another policy than that of the checkpoint.
        """
        if self.mode is not None or graph_being_traced() is not None:
            return
        self.session.follow(policy)
        self._gave_way = True
        if not self._aside and self._hooks is not None and saved_tensor_hooks() == self._hooks:
            remove_saved_tensor_hooks()
            self._aside = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_traceback: object) -> None:
        this_thread.around.remove(self)
        if self._aside:
            self._aside = False
            restore_saved_tensor_hooks(self._hooks)
        self._hooks = None  # they hold the checkpoint, and the checkpoint holds this context
        self._leave(finished=kind is None)
        if error is not None:
            if self.running is not None:
                self.running.failed(error)
            self.running = None
        elif self.block is None and not (self._gave_way or self._plainly) and graph_being_traced() is None:
            raise self.session.nothing_ran()

    def _begin_within(self) -> None:
        if self.first is not None:
            if self.first.lies_within:
                self._begin_again(self.first)
            return
        call = this_thread.called[-1] if this_thread.called else None
        if call is None or call.session is not self.session:
            return
        if call.region.number is not None or not self.session.names:  # not the model around the blocks
            self.lies_within = True
            self.begin(call)
            call.checkpoints.append(self)

    def begin(self, block: BlockCall) -> None:
        """A block is about to run: follow its plan from here on. One inside another is part of it."""
        if self.mode is not None or self._plainly:
            self._depth += block.module is self.block
            return
        if is_wrapped_by_compiler(block.module):  # its code says by itself whose it is
            if not carries_policies(block.module):
                raise problems.COMPILED.error(name=self.session.named(block.module))
            return
        if self.block is not None:
            raise problems.RUN_TWICE.error(name=self.session.named(self.block))
        self.block = block.module
        if self.first is None:
            self._begin_first(block)
        else:
            self._begin_again(self.first)

    def _begin_first(self, block: BlockCall) -> None:
        self.running = block.region.begin(block.module, block.args, block.kwargs)
        clear_cast_weights()
        self._contexts.enter_context(gathers_aside(block.module))
        run = self.running.run
        if isinstance(run, FollowedCall):
            self.mode = self._contexts.enter_context(ForwardMode(run))
        else:
            self.mode = self._contexts.enter_context(watched(run))

    def _begin_again(self, first: CheckpointContext) -> None:
        """The block runs a second time; or while it is still running, where it differentiates a part of itself."""
        self.block = first.block
        clear_cast_weights()
        within = first.mode is not None and first.running is not None
        call = first.running.so_far() if within and first.running is not None else first.call
        # A block that runs within it asks for this run, and has not made it. While the block itself is running, nor
        # has one around it: how much then runs again is another matter once there is a plan.
        self._contexts.enter_context(unseen_since(0 if within else first.began))
        if call is None:
            self._plainly = True
            return
        if first.block is not None:
            self._contexts.enter_context(gathers_aside(first.block))
        self._contexts.enter_context(call.surroundings.again())
        self.mode = self._contexts.enter_context(RecomputeMode(call, within=within))

    def end(self, module: nn.Module, output: Any) -> None:
        """A block has run."""
        if module is not self.block or self.mode is None:
            return
        if self._depth:
            self._depth -= 1
            return
        self._leave(finished=True)
        if self.first is None:
            self.returned(output)

    def returned(self, output: Any) -> None:
        """The forward is over, and this is what it has returned: whatever is to be planned is planned now."""
        running, self.running = self.running, None
        if running is None:
            return
        self.call = running.region.end(running, tensors_in(output))
        self.session.check_unmatched()

    def _leave(self, finished: bool) -> None:
        mode, self.mode = self.mode, None
        self._contexts.close()
        if isinstance(mode, ForwardMode) and finished:
            mode.end()
