"""``prefetch`` lines in eager: ``fully_shard`` is told to gather the weights of further blocks ahead.

FSDP gathers weights in hooks around the blocks. A model may be sharded before it is given a policy or after, so what
FSDP is told waits, where it has to, for the first forward; by then FSDP also knows which module lies within which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field, frozen
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from policylang.audit.report import FsdpOrderReport, LineByFsdpReport
from policylang.backends.eager import problems
from policylang.backends.eager.first_call import is_first_fsdp
from policylang.backends.fsdp_weights import NamedBlock, sharded_in
from policylang.backends.path import raise_errors
from policylang.graph.facts import GraphKind
from policylang.graph.textual import GraphBuilder
from policylang.language.diagnostics import Diagnostic, prefixed, removed
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
    """How many blocks ahead it is gathered."""


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
        """Notes how far ahead each unit is gathered, and says how many blocks have one."""
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
            """Those to gather of some blocks, given by their units, the nearest block first."""
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
        _take_off(model, _Settle)
        if found.told:
            model.register_forward_hook(_Compare(self.blocks))


@frozen(eq=False)
class _Compare:
    """The hook after it: blocks may have run in another order than the model lists them."""

    blocks: BlocksOf

    def __call__(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        _take_off(model, _Compare)
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
    """Have FSDP gather as the policy's `prefetch` lines say, from the first forward on; what is sharded already is told
    now. A policy without such lines is compared with those of other ranks all the same. Raises ``PolicyMatchError`` for
    what eager cannot do, and where ``fully_shard`` was called otherwise."""
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
    """Tell FSDP what it had been told before."""
    earlier = _orders.pop(model, None)
    if earlier is not None:
        earlier.undo()
    _take_off(model, _Settle, _Compare)


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


def _take_off(model: nn.Module, *kinds: type) -> None:
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[key]
