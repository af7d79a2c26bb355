"""The blocks of one model under one policy, and the two contexts that a checkpoint enters around each call of one.

A checkpoint asks for its contexts without saying what it is about to run. Which block that is, and with what inputs,
the block's stand-in for its forward says, or hooks on the blocks do (:mod:`policylang.backends.eager.checkpoint`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn

from policylang.backends.applied_plans import CompiledGraph
from policylang.backends.copies import pool
from policylang.backends.eager import problems
from policylang.backends.eager.first_call import Observation, Observer, gathers_aside, moments, unseen_since, watched
from policylang.backends.eager.followed_call import FollowedCall
from policylang.backends.eager.moved_values import MovedTensor, Offloading, back, moved_in
from policylang.backends.eager.origins import tensors_in
from policylang.backends.eager.plan_modes import ForwardMode, RecomputeMode, SavedTensors, handing_over, noting_saved
from policylang.backends.eager.region import (
    CheckpointRegion,
    RunningBlock,
    Traces,
    carries_policies,
    is_alike,
    traced_for_others,
)
from policylang.backends.fsdp_weights import NamedBlock
from policylang.backends.refusals import refuse_another, refuse_captured_copies
from policylang.errors import PolicyGraphError, PolicyMatchError
from policylang.graph import marks
from policylang.language.diagnostics import Diagnostic
from policylang.language.shown import counted, folded_names, format_quantity
from policylang.language.syntax import Bucket, Policy
from policylang.torch_compat import eager
from policylang.torch_compat.compilers import is_compiled, is_wrapped_by_compiler, was_left_uncompiled

Pair = tuple["CheckpointContext", "CheckpointContext"]


class Contexts(partial[Pair]):
    """The ``context_fn`` of a checkpoint. Each call serves one forward. ``torch.compile`` takes partials of functions,
    which are pickled: the arguments of a trainer are stored with everything in them. A loaded one has the policy, and
    the blocks of the model that was stored along with it. A copy is the same object."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Contexts:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Session.context_fn, (session_behind(self),)


@define(eq=False)
class Session:
    """``regions``: by module, each block that a checkpoint may run."""

    policy: Policy
    strict: bool
    names: tuple[str, ...] = ()
    """The model's blocks, in order; empty where only one module is known."""
    regions: WeakKeyDictionary[nn.Module, CheckpointRegion] = field(factory=WeakKeyDictionary)
    unmatched_compared: bool = False
    ran_without: set[int] = field(factory=set)
    """Numbers of blocks that were trained without a checkpoint."""
    waits: bool = False
    """A rule has matched nothing so far, and blocks may come that have what it names."""
    compiled: bool = False
    """A compiler under the same policy has applied it in one of the checkpoints."""
    graphs: WeakSet[CompiledGraph] = field(factory=WeakSet)
    """Graphs that our compiler made of its blocks."""
    agreed: list[Policy] = field(factory=list)
    """Policies of compilers that are equal to this one."""
    traces: Traces = field(factory=dict)
    """Shared by blocks that do the same."""
    offloading: Offloading = field(init=False)
    without_layers: str = ""
    """For a model without blocks, the empty list of its layers."""
    told: dict[str, Diagnostic] = field(factory=dict)
    """By code, warnings that are given once for all blocks."""
    _context_fn: Contexts | None = None

    @offloading.default
    def _of_policy(self) -> Offloading:
        said = self.policy.prefetch_offloaded
        found = Offloading() if said is None else Offloading(said.blocks)
        finalize(found, pool.give_back).atexit = False
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """A loaded model is observed anew."""
        return Session, (self.policy, self.strict, self.names)

    def named(self, block: nn.Module) -> str:
        """A block as a sentence names it."""
        return problems.block(block, self.regions[block].root)

    def around(self) -> CheckpointContext | None:
        """The innermost context that is entered, if it is one of ours and nothing is being traced."""
        found = innermost()
        return found if found is not None and found.session is self and eager.graph_being_traced() is None else None

    def add(self, module: nn.Module, root: str, number: int | None = None) -> CheckpointRegion:
        """``number``: which of the model's blocks it is, where that is known."""
        region = self.regions.get(module)
        if region is None:
            names = self.names if number is not None else ()
            region = CheckpointRegion(self.of_values, root, self.strict, names, number, self.traces, self.offloading)
            self.regions[module] = region
        return region

    @property
    def of_values(self) -> Policy:
        """The policy as a block plans it: the order of gathers is FSDP's, for the model as a whole."""
        rewrites = tuple(each for each in self.policy.rewrites if not isinstance(each, Bucket))
        return evolve(self.policy, rewrites=rewrites, scheduling=()) if self.policy.orders else self.policy

    def context_fn(self) -> Contexts:
        """Returns one object at every call: ``torch.compile`` identifies the checkpoint by its function."""
        if self._context_fn is None:

            def contexts() -> Pair:
                # ours takes checkpoints out of what it compiles: torch_compile.inner_checkpoints
                if eager.being_compiled() and not eager.checkpoints_are_tagged() and not traced_for_others():
                    raise problems.COMPILED.error(name=problems.AROUND_IT)
                first = CheckpointContext(self, None)
                return first, CheckpointContext(self, first)

            setattr(contexts, marks.SESSION, self)
            self._context_fn = Contexts(contexts)
        return self._context_fn

    def follow(self, policy: Policy) -> None:
        """A compiler applies a policy in one of the checkpoints. Raises ``PolicyMatchError`` unless it is ours."""
        self.compiled = True
        if policy is self.policy or any(policy is each for each in self.agreed):
            return
        refuse_another(self.policy, policy, "the compiler")
        self.agreed.append(policy)

    def block_names(self) -> tuple[str, ...]:
        """Names of the blocks that a checkpoint may run; an unknown name is empty."""
        return self.names or tuple(region.root for region in self.regions.values())

    def numbered_blocks(self) -> tuple[list[NamedBlock], tuple[str, ...]]:
        """The blocks that a checkpoint may run, and their names; of a block without a name, the class."""
        regions = self._numbered() if self.names else self.regions
        names = tuple(region.root or type(module).__name__ for module, region in regions.items())
        return [NamedBlock(each, region.root, at) for at, (each, region) in enumerate(regions.items())], names

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
        if not self.regions:
            return problems.WITHOUT_MODEL.error()
        names = [region.root or "the module itself" for region in self.regions.values()]
        return problems.NOT_RUN.error([f"made for: {name}" for name in names[:8]])

    def warn_once(self, found: Diagnostic) -> Diagnostic:
        """The warning, which names the first block that it was found for."""
        if found.code not in self.told:
            self.told[found.code] = found
            problems.warn(found)
        return self.told[found.code]

    def without_work(self) -> str:
        """Why its checkpoints have nothing to do; empty where they have."""
        if self.without_layers:
            return f"{self.without_layers} holds no layers, and a checkpoint has nothing to do"
        if self.regions and all(each.idle and not each.kept for each in self.regions.values()):
            names = folded_names([each.root or "the block" for each in self.regions.values()])
            return f"the backward reads nothing of {names}: nothing is planned, and no rule is checked"
        return ""

    def skipped(self) -> Diagnostic | None:
        """The warning if all blocks have run with gradients, and no checkpoint of ours ran one."""
        began = any(region.kept or region.idle for region in self.regions.values())
        if began or not self.names or len(self.ran_without) < len(self.names):
            return None
        return problems.IN_PLACE_OF_OURS.diagnostic(name=f"`{self.names[0]}`")

    def check_unmatched(self, *, in_backward: bool = False) -> None:
        """Raise ``PolicyMatchError`` for each rule that matched nothing in any block, once all have been called, or a
        backward begins. A block that has not been called by then counts as one that is made alike; one unlike all
        others is waited for, with a warning. Blocks without a checkpoint, or whose backward reads nothing, do not
        count."""
        if self.unmatched_compared or len(self.names) < 2:
            return
        numbered, missing = self._numbered(), self._not_called()
        ways = [found for region in numbered.values() for found in region.nothing.values()]
        if not ways or (missing and not in_backward) or any(map(is_compiled, missing)):
            return
        unlike = []
        for module, region in missing.items():
            if region.number in self.ran_without:
                continue
            alike = next((other for made, other in numbered.items() if other.seen and is_alike(module, made)), None)
            if alike is None:
                unlike.append(region.root)
            else:
                ways += [region.unmatched_in(trace, module) for trace in alike.seen.values()]
        shared = set.intersection(*({(each.message, each.span) for each in found} for found in ways))
        wrong = [each for each in ways[0] if (each.message, each.span) in shared]
        self.unmatched_compared = not unlike or not wrong
        if wrong and unlike and not self.waits:
            self.waits = True
            problems.warn(problems.NOTHING_YET.diagnostic(found=wrong[0].message, names=folded_names(unlike)))
        elif wrong and not unlike:
            raise PolicyMatchError([evolve(each, details=(*each.details, *self.outside())) for each in wrong])

    def _numbered(self) -> dict[nn.Module, CheckpointRegion]:
        return {module: region for module, region in self.regions.items() if region.number is not None}

    def _not_called(self) -> dict[nn.Module, CheckpointRegion]:
        """The model's blocks that no checkpoint has run, nor a copy of them."""
        numbered = self._numbered()
        called = {region.number for region in numbered.values() if region.nothing or region.idle}
        return {module: region for module, region in numbered.items() if region.number not in called}

    def outside(self) -> list[str]:
        """Sentences that name the blocks which are not under the policy, those without a checkpoint first."""
        missing = [each for module, each in self._not_called().items() if not (self.compiled or is_compiled(module))]
        found = []
        for without, words in ((True, "run without a checkpoint, and not under the policy"), (False, "not run so far")):
            names = [each.root for each in missing if (each.number in self.ran_without) is without]
            if names:
                count = f"{len(names)} of {counted(len(self.names), 'block')}"
                found.append(f"{count} {'has' if len(names) == 1 else 'have'} {words}: {folded_names(names)}")
        return found

    def loads(self) -> list[str]:
        """A sentence on what the figures of the first calls leave out, where sizes come from data."""
        kept = [each for region in self.regions.values() for each in region.kept.values()]
        sized = [each.saved for each in kept if each.instructions.plan.facts.data_sizes]
        least, most = (format_quantity(sum(column), "bytes") for column in zip((0, 0), *sized, strict=True))
        said = "sizes that come from data are those of the first call"
        found = (
            [f"{said}: of {counted(len(sized), 'block')}, the calls so far saved {least} to {most}"] if sized else []
        )
        self.offloading.returned((), {})
        if count := self.offloading.stayed:
            found.append(
                f"{counted(count, 'value')} that blocks returned stayed on the device: the next checkpoint was not "
                "called with them, or hooks around it keep what it is called with"
            )
        return found


def innermost() -> CheckpointContext | None:
    """The innermost context that is entered in this thread."""
    return this_thread.around[-1] if this_thread.around else None


def session_behind(context_fn: object) -> Session | None:
    session = marks.session_of(context_fn)
    return session if isinstance(session, Session) else None


class _Running(threading.local):
    """Per thread: a backward has threads of its own."""

    def __init__(self) -> None:
        self.around: list[CheckpointContext] = []
        self.called: list[BlockCall] = []
        self.begun = 0
        self.latest: WeakKeyDictionary[Session, ref[FollowedCall]] = WeakKeyDictionary()


this_thread = _Running()
"""The contexts that are entered, the blocks that are called outside of any, and how many have begun in a context."""


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
    begun: int = field(factory=lambda: this_thread.begun)


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
        self.saved: SavedTensors = []
        self.lies_within = False
        """The checkpoint lies in the block's own call, around its forward."""
        self.block: nn.Module | None = None
        self._plainly = False
        """No recorded call is followed: a transformation, a tracer, or nothing for the block's backward to read."""
        self._contexts = ExitStack()
        self._depth = 0
        self._hooks: Any = None
        """The hooks of the checkpoint itself."""
        self._to_the_end: Callable[[], None] = lambda: None
        """Has the recomputation not stop with the last saved tensor."""
        self._around: Any = None
        self._gave_way = False
        self._aside = False
        self._inputs: list[MovedTensor] = []
        """Replacements that the checkpoint holds for its arguments."""

    def __enter__(self) -> CheckpointContext:
        if self.first is None and eager.runs_in_graph(self):  # Dynamo's graph as it is: no block in it has hooks
            raise problems.COMPILED.error(name=problems.AROUND_IT)
        this_thread.around.append(self)
        self.block, self._depth, self._plainly = None, 0, False
        self._gave_way, self._hooks = False, eager.saved_tensor_hooks()
        with ExitStack() as undone:  # an error on the way in is none of the next checkpoint's
            undone.push(self)
            if eager.transformed() or traced_for_others():
                self._plainly = True
            elif eager.graph_being_traced() is None:
                self._around = eager.hooks_around(self._hooks) if self._hooks is not None else None
                self._begin_within()
            undone.pop_all()
        return self

    def give_way(self, policy: Policy) -> None:
        """Code that our compiler made under a policy is about to run: it knows what to save, so autograd is to keep it.
        Raises ``PolicyMatchError`` where the checkpoint has another policy."""
        if self.mode is not None or eager.graph_being_traced() is not None:
            return
        self.session.follow(policy)
        self._gave_way = True
        if not self._aside and self._hooks is not None and eager.saved_tensor_hooks() == self._hooks:
            eager.remove_saved_tensor_hooks()
            self._aside = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_trace: object) -> None:
        this_thread.around.remove(self)
        if self._aside:
            self._aside = False
            eager.restore_saved_tensor_hooks(self._hooks)
        self._hooks = self._around = None  # they hold the checkpoint, and the checkpoint holds this context
        self._leave(finished=kind is None)
        if error is not None:
            self.explain(error)
        elif self.block is None and not (self._gave_way or self._plainly) and eager.graph_being_traced() is None:
            raise self.session.nothing_ran()

    def explain(self, error: BaseException) -> None:
        """Raise ``PolicyGraphError`` where what a block calls has failed because an eager checkpoint watches it."""
        running, self.running = self.running, None
        if running is not None:
            running.failed(error)
        if self.block is not None and was_left_uncompiled(error):
            raise problems.NEEDS_A_COMPILER.error(name=self.session.named(self.block)) from error
        if self.block is not None and eager.allows_no_hooks(error):
            raise problems.DIFFERENTIATES.error(name=self.session.named(self.block)) from error
        if running is not None and self.block is not None and (operator := eager.failed_in(error)):
            raise problems.TRACES_AGAIN.error(name=self.session.named(self.block), operator=operator) from error

    def _begin_within(self) -> None:
        if self.first is not None:
            if self.first.lies_within:
                self._begin_recomputation(self.first)
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
            self._begin_recomputation(self.first)

    def _begin_first(self, block: BlockCall) -> None:
        this_thread.begun += 1
        if eager.are_of_checkpoint(self._hooks):
            self._to_the_end = eager.runs_to_the_end(self._hooks)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            refuse_captured_copies(self.session.policy)
        self.running = block.region.begin(block.module, block.args, block.kwargs)
        if isinstance(self.running.run, Observation):
            self._look_around(block)
        if isinstance(self.running.run, Observation) or self.running.run.reach:
            self._move_inputs(self.session.named(block.module))
        eager.clear_cast_weights()

        def check_given(value: Tensor, written: int, number: int) -> None:
            if self.call is not None:
                self.call.check_given(value, written, number)

        self._contexts.enter_context(noting_saved(self.saved, self.session.named(block.module), check_given))
        self._contexts.enter_context(gathers_aside(block.module))
        run = self.running.run
        mode = ForwardMode(run) if isinstance(run, FollowedCall) else watched(run)
        self.mode = self._contexts.enter_context(mode)

    def _move_inputs(self, name: str) -> None:
        """Moves outputs of other blocks to the host where a rule says so, except those that hooks around keep."""
        offloading = self.session.offloading

        def moved(value: Any) -> Any:
            found = offloading.moved(value)
            self._inputs += moved_in(found)
            return found

        def given_back(value: Any) -> Any:
            if self.call is not None:
                self.call.fetch()
            return back(value, name)

        if offloading.crossing and self._around is None and eager.are_of_checkpoint(self._hooks):
            eager.move_inputs(self._hooks, moved, given_back)

    def _look_around(self, block: BlockCall) -> None:
        """Warn of another checkpoint that runs the block as well."""
        problem, in_backward = None, eager.running_backward() >= 0
        if not eager.are_of_checkpoint(self._around):
            problem = problems.IN_BACKWARD if in_backward else None
        elif not in_backward and all(self._around != each._hooks for each in this_thread.around):
            problem = problems.AROUND_OURS
        if problem is not None:
            found = problem.diagnostic(name=self.session.named(block.module))
            block.region.around = (self.session.warn_once(found),)

    def _begin_recomputation(self, first: CheckpointContext) -> None:
        """Recompute the block; or a part of it, while it is still running and differentiates that part."""
        self.block = first.block
        eager.clear_cast_weights()
        within = first.mode is not None and first.running is not None
        if not within:
            self.session.check_unmatched(in_backward=True)
        call = first.running.so_far() if within and first.running is not None else first.call
        # Operators of a nested block's recomputation are not counted for the enclosing block: their number changes once
        # the nested block has a plan.
        self._contexts.enter_context(unseen_since(0 if within else first.began))
        if call is None:
            self._plainly = True
            return
        if not within:
            call.fetch()
        if first.block is not None:
            self._contexts.enter_context(gathers_aside(first.block))
        self._contexts.enter_context(call.surroundings.restored())
        if not within and not eager.keeps_graph():
            self._contexts.enter_context(handing_over(first.saved))
        self.mode = self._contexts.enter_context(RecomputeMode(call, within=within))

    def end(self, module: nn.Module, output: Any) -> None:
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
        found = list(tensors_in(output))
        self.call = running.region.end(running, found)
        if self.call is not None:
            if self.call.to_the_end:
                self._to_the_end()
            self.call.finish(self._inputs)
            latest = this_thread.latest
            if self.call.on_host or (self.session in latest and self.call.reach):
                self.call.before = latest.get(self.session, self.call.before)
                latest[self.session] = ref(self.call)
        self.session.check_unmatched()

    def _leave(self, finished: bool) -> None:
        mode, self.mode = self.mode, None
        self._contexts.close()
        if isinstance(mode, ForwardMode | RecomputeMode) and finished:
            mode.end()
