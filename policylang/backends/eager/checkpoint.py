"""Adds checkpoints (``torch.utils.checkpoint``) that follow a policy to the blocks of a model.

Either each block's forward is replaced by one in a checkpoint, or hooks on the blocks say which of them a checkpoint of
the user's runs. ``prefetch`` lines tell ``fully_shard`` to gather the weights of further blocks ahead. FSDP gathers in
hooks around the blocks. A model may be sharded before it is given a policy or after, so what FSDP is told waits, where
it has to, for the first forward; by then FSDP also knows which module lies within which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from policylang.audit.report import FsdpOrderReport, LineByFsdpReport
from policylang.backends.eager import problems
from policylang.backends.eager.first_call import is_first_fsdp
from policylang.backends.eager.region import runs_for_backward, stands_aside
from policylang.backends.eager.session import BlockCall, Contexts, Session, innermost, session_behind, this_thread
from policylang.backends.fsdp_weights import NamedBlock, sharded_in
from policylang.backends.path import raise_errors
from policylang.graph import marks
from policylang.graph.facts import GraphKind
from policylang.graph.phases import normalise
from policylang.graph.textual import GraphBuilder
from policylang.language.diagnostics import Diagnostic, prefixed, removed
from policylang.language.globs import PathGlob
from policylang.language.selectors import tests_of
from policylang.language.shown import counted, listed
from policylang.language.syntax import TIMES, Bucket, Compare, Policy, Prefetch, Scheduling
from policylang.planning.capabilities import EAGER
from policylang.planning.decisions.rule_warnings import FsdpParameter, FsdpParameters, gathers_matching
from policylang.planning.order.statements import cannot_order
from policylang.ranks.comparison import comparing
from policylang.torch_compat.distributed import gathered_ahead, is_sharded, lies_within_another, own_class, ran_forward

_NOT_YET = "`fully_shard` is not set up: no forward of the model has run in eager"
_LEFT = "left: an eager checkpoint has no order of collectives"
Lists = Mapping[nn.Module, tuple[Sequence[nn.Module], Sequence[nn.Module]]]
"""By sharded module, the modules it gathers ahead in the forward and in the backward."""
BlocksOf = Callable[[nn.Module], Mapping[nn.Module, str]]
"""From a model to its blocks and their paths."""


@define(eq=False)
class _GatheredModule:
    """The weights that one call of ``fully_shard`` gathers at once."""

    module: nn.Module
    """The argument of that call."""
    path: str
    in_one_block: bool
    weights: list[FsdpParameter] = field(factory=list)
    reach: int = 0
    """Blocks by which its gather runs ahead."""


@frozen(eq=False)
class _Sharding:
    """The weights that ``fully_shard`` gathers for the blocks of a model."""

    blocks: Mapping[nn.Module, str]
    units: Sequence[_GatheredModule]
    units_of: Sequence[Sequence[_GatheredModule]]
    """By block, in module order."""
    groups: Mapping[str, tuple[int, ...]]
    """The process groups over which they are gathered."""

    @classmethod
    def of(cls, blocks: Mapping[nn.Module, str]) -> _Sharding:
        units: dict[int, _GatheredModule] = {}
        units_of: list[dict[int, _GatheredModule]] = [{} for _ in blocks]
        groups: dict[str, tuple[int, ...]] = {}
        modules = [set(block.modules()) for block in blocks]
        for aside, weight in sharded_in(NamedBlock(each, path, at) for at, (each, path) in enumerate(blocks.items())):
            unit = units.get(weight.together)
            if unit is None:
                inside = modules[aside.block].issuperset(weight.group)
                unit = units[weight.together] = _GatheredModule(weight.group[0], aside.unit, inside)
                groups[weight.over] = weight.ranks
            unit.weights.append(aside)
            units_of[aside.block][weight.together] = unit
        return cls(blocks, [*units.values()], [[*each.values()] for each in units_of], groups)

    def prefetched(self, statement: Prefetch, policy: Policy) -> str | Diagnostic:
        """Notes how far ahead each unit is gathered, and returns the number of blocks that have one."""
        line, span = statement.span.one_line, statement.span
        if any(isinstance(test, Compare) and test.quantity in TIMES for test in tests_of(policy, statement)):
            return problems.PREFETCH_BY_TIMES.diagnostic(span=span, line=line)
        if not self.units:
            return problems.NONE_SHARDED.diagnostic(span=span, line=line)
        every = FsdpParameters(tuple(each for unit in self.units for each in unit.weights), tuple(self.blocks.values()))
        picked = frozenset(gathers_matching(policy, statement.selector, every))
        chosen = [unit for unit in self.units if not picked.isdisjoint(unit.weights)]
        if not chosen:
            return problems.PREFETCHES_NOTHING.diagnostic(span=span, line=line)
        for problem, wrong in (
            (problems.GATHERED_TOGETHER, [unit for unit in chosen if not unit.in_one_block]),
            (problems.PREFETCHES_A_PART, [unit for unit in chosen if not picked.issuperset(unit.weights)]),
        ):
            if wrong:
                units = listed([f"`{unit.path}`" for unit in wrong], 3)
                return problem.diagnostic(span=span, line=line, units=units)
        if len(self.blocks) < 2:
            fixes = removed(span), prefixed(span, "optional")
            return evolve(problems.PREFETCHES_ONE_BLOCK.diagnostic(span=span, line=line), fixes=fixes)
        for unit in chosen:
            unit.reach = statement.blocks  # of two lines that pick a weight, the later one says how far
        blocks = counted(len({each.block for unit in chosen for each in unit.weights}), "block")
        return f"`fully_shard` gathers the weights of {blocks} {counted(statement.blocks, 'block')} ahead"

    def lists(self, running: Sequence[int]) -> Lists:
        """The settings of all blocks. ``running``: the blocks in execution order. Where ``fully_shard`` was called with
        parts of a block alone, the first of them gets the setting."""
        running = [block for block in running if self.units_of[block]]
        farthest = max((unit.reach for unit in self.units), default=0)
        modules = list(self.blocks)

        def ahead(blocks: Iterable[Sequence[_GatheredModule]]) -> tuple[nn.Module, ...]:
            """The modules to gather in these blocks, given by their units, the nearest block first."""
            wanted = (unit.module for far, units in enumerate(blocks, 1) for unit in units if unit.reach >= far)
            return tuple(dict.fromkeys(wanted))

        told = {}
        for at, block in enumerate(running):
            module = modules[block] if is_sharded(modules[block]) else self.units_of[block][0].module
            before = reversed(running[max(0, at - farthest) : at])
            told[module] = (
                ahead(self.units_of[each] for each in running[at + 1 : at + 1 + farthest]),
                ahead(self.units_of[each][::-1] for each in before),
            )
        return told


@define(eq=False)
class FsdpOrder:
    """The prefetch settings of one model, as far as they are known."""

    policy: Policy
    told: Lists = field(factory=dict)
    before: Lists | None = None
    """The settings before the policy."""
    lines: Sequence[tuple[Bucket | Scheduling, str]] = ()
    """The result of each line, as a phrase."""
    names: Mapping[nn.Module, str] = field(factory=dict)

    def settle(self, sharding: _Sharding, running: Sequence[int] | None = None) -> None:
        """Tell FSDP. Raises ``PolicyMatchError`` where it cannot do what the policy says."""
        lines: list[tuple[Bucket | Scheduling, str]] = []
        wrong: list[Diagnostic] = []
        for statement in _statements(self.policy):
            said: str | Diagnostic = _LEFT
            if isinstance(statement, Prefetch):
                said = sharding.prefetched(statement, self.policy)
            if isinstance(said, Diagnostic):
                wrong += [] if statement.optional else [said]
                said = f"left: {said.message}"
            lines.append((statement, said))
        raise_errors(wrong)
        self.lines, self.names = lines, {**{unit.module: unit.path for unit in sharding.units}, **sharding.blocks}
        self.told = sharding.lists(running or range(len(sharding.blocks)))
        if self.before is None:
            self.before = {module: gathered_ahead(module) for module in self.told}
        _tell(self.told)

    def undo(self) -> None:
        if self.before is not None:
            _tell(self.before)

    def words(self) -> list[str]:
        """The settings as text, which has to be equal on every rank."""
        return [
            f"{half} of {self._named([module])}: {self._named(ahead)}"
            for module, lists in self.told.items()
            for half, ahead in zip(("forward", "backward"), lists, strict=True)
            if ahead
        ]

    def differences(self) -> list[str]:
        """Modules whose settings were changed since."""
        found = []
        for module, lists in self.told.items():
            for half, planned, now in zip(("forward", "backward"), lists, gathered_ahead(module), strict=True):
                if [*planned] != [*now]:
                    wanted, is_so, name = map(self._named, (planned, now, [module]))
                    problem = problems.TOLD_OTHERWISE.diagnostic(name=name, half=half, wanted=wanted, is_so=is_so)
                    found.append(f"{problem.message} ({problem.code})")
        return found

    def report(self) -> FsdpOrderReport:
        lines = self.lines or [(each, _NOT_YET) for each in _statements(self.policy)]
        said = tuple(LineByFsdpReport(line.span.location, line.span.one_line, phrase) for line, phrase in lines)
        return FsdpOrderReport(self.policy.name, said, tuple(self.differences()))

    def _named(self, modules: Sequence[nn.Module]) -> str:
        return ", ".join(f"`{self.names.get(each) or own_class(each)}`" for each in modules) or "nothing"


def _tell(lists: Lists) -> None:
    for module, (forward, backward) in lists.items():
        sharded: Any = module
        sharded.set_modules_to_forward_prefetch([*forward])
        sharded.set_modules_to_backward_prefetch([*backward])


_orders: WeakKeyDictionary[nn.Module, FsdpOrder] = WeakKeyDictionary()


@frozen(eq=False)
class _Settle:
    """The hook before a model's first forward. It finds the order by the model that it is called with: a copy has an
    order of its own. Raises ``PolicyDivergenceError`` where another rank gathers otherwise."""

    policy: Policy
    blocks: BlocksOf

    def __call__(self, model: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        found = _orders.setdefault(model, FsdpOrder(self.policy))
        sharding = _Sharding.of(self.blocks(model))
        if self.policy.orders:
            found.settle(sharding)
        # FSDP gathers ahead on streams that all sharded modules inside one share; apart, torch fails on the first
        alone = [module for module in found.told if not lies_within_another(module)]
        if alone and len(found.told) > 1 and any(map(any, found.told.values())):
            found.undo()
            name = found.names.get(alone[0]) or own_class(alone[0])
            raise problems.WITHOUT_ROOT.refused(_first_line(self.policy).span, name=name)
        if any(len(ranks) > 1 for ranks in sharding.groups.values()):  # all ranks have to gather alike
            topic = "order of the weights' gathers"
            with comparing(topic, settings=found.words, around=sharding.groups) as comparison:
                graph = GraphBuilder()
                graph.add("weights", "input", ())
                comparison.begin(graph.facts(GraphKind.FORWARD), self.policy)
        _unhook(model, _Settle)
        if found.told:
            model.register_forward_hook(_Compare(self.blocks))


@frozen(eq=False)
class _Compare:
    """The hook after it: blocks may have run in another order than the model lists them."""

    blocks: BlocksOf

    def __call__(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        _unhook(model, _Compare)
        found = _orders.get(model)
        if found is None or not found.told:
            return
        sharding = _Sharding.of(self.blocks(model))
        block_of = {module: number for number, block in enumerate(sharding.blocks) for module in block.modules()}
        ran = [block_of[each] for each in ran_forward(next(iter(found.told))) if each in block_of]
        running = list(dict.fromkeys([*ran, *range(len(sharding.blocks))]))
        if running != sorted(running):
            found.settle(sharding, running)


def put_order_on(model: nn.Module, policy: Policy, blocks: BlocksOf) -> None:
    """Have FSDP gather as the policy's `prefetch` lines say, from the first forward on; units that are sharded already
    are set now. A policy without such lines is compared with those of other ranks all the same. Raises
    ``PolicyMatchError`` for what eager cannot do, and where ``fully_shard`` was called otherwise."""
    take_order_off(model)
    raise_errors(cannot_order(policy, EAGER))
    _orders[model] = found = FsdpOrder(policy)
    model.register_forward_pre_hook(_Settle(policy, blocks))
    if not policy.orders:  # FSDP is told nothing
        return
    others = [each for each in model.modules() if is_first_fsdp(each) or isinstance(each, DistributedDataParallel)]
    if others and not _is_optional(policy):
        raise problems.NOT_FULLY_SHARDED.refused(_first_line(policy).span, name=type(others[0]).__name__)
    sharding = _Sharding.of(blocks(model))
    if sharding.blocks and all(sharding.units_of):
        found.settle(sharding)


def take_order_off(model: nn.Module) -> None:
    """Restore FSDP's earlier prefetch settings."""
    earlier = _orders.pop(model, None)
    if earlier is not None:
        earlier.undo()
    _unhook(model, _Settle, _Compare)


def refuse_for_one_block(policy: Policy, name: str) -> None:
    """Raises ``PolicyMatchError`` where a policy orders what a single block does not know."""
    raise_errors(cannot_order(policy, EAGER))
    if not _is_optional(policy):
        raise problems.ONE_OF_THE_BLOCKS.refused(_first_line(policy).span, name=name)


def order_reports(subject: object) -> list[FsdpOrderReport]:
    """The settings made for a model and its submodules, compared with FSDP's current ones."""
    if not isinstance(subject, nn.Module):
        return []
    found = [_orders[module] for module in subject.modules() if module in _orders]
    return [each.report() for each in found if each.policy.orders]


def _statements(policy: Policy) -> tuple[Bucket | Scheduling, ...]:
    return (*policy.buckets, *policy.scheduling)


def _first_line(policy: Policy) -> Bucket | Scheduling:
    lines = _statements(policy)
    return next((each for each in lines if not each.optional), lines[0])


def _is_optional(policy: Policy) -> bool:
    return all(each.optional for each in _statements(policy))


def _unhook(model: nn.Module, *kinds: type) -> None:
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[key]


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
    """Replaces the ``forward`` of a block."""

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
