"""Scheduling lines in eager: ``fully_shard`` is told to gather ahead what `prefetch` says, and held against `bucket`.

FSDP's hooks around the blocks gather weights. A model may be sharded before it is given a policy or after, so what it
is told waits, where it has to, for the first forward; by then FSDP also knows what lies within what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import define, frozen
from torch import nn
from torch.nn.parallel import DistributedDataParallel as _DDP
from torch.nn.parameter import is_lazy

from policylang.audit.summary.fsdp_lines import FsdpOrderReport, LineByFsdpReport
from policylang.backends.eager import problems
from policylang.backends.eager.observation.fsdp_hooks import is_first_fsdp
from policylang.backends.path import raise_errors
from policylang.graph.facts import GraphKind
from policylang.graph.textual import GraphBuilder
from policylang.language.syntax import Bucket, Policy, Scheduling
from policylang.planning.decisions.weights_aside import WeightAside
from policylang.planning.order.by_fsdp import (
    BlockWeight,
    LineByFsdp,
    OrderByFsdp,
    Unit,
    plan_by_fsdp,
    refused_in_eager,
    unchecked,
)
from policylang.ranks.comparison import comparing
from policylang.torch_compat.fsdp import (
    ShardedWeight,
    gathered_ahead,
    is_sharded,
    lies_within_another,
    own_class,
    ran_forward,
    sharded_weights,
)

_NOT_YET = "`fully_shard` is not told: no forward of the model has run in eager"
Lists = Mapping[nn.Module, tuple[Sequence[nn.Module], Sequence[nn.Module]]]
"""By sharded module, what it gathers ahead in the forward and in the backward."""


@frozen(eq=False)
class _Sharding:
    """What ``fully_shard`` gathers for the blocks of a model."""

    blocks: Mapping[nn.Module, str]
    units: tuple[Unit, ...]
    modules: tuple[nn.Module, ...]
    """Of each unit, what ``fully_shard`` was called with."""
    weights: tuple[BlockWeight, ...]
    groups: Mapping[str, tuple[int, ...]]
    """Over which they are gathered, by name."""

    @classmethod
    def of(cls, blocks: Mapping[nn.Module, str]) -> _Sharding:
        units: list[Unit] = []
        modules: list[nn.Module] = []
        numbers: dict[int, int] = {}
        weights: list[BlockWeight] = []
        groups: dict[str, tuple[int, ...]] = {}
        for number, (block, name) in enumerate(blocks.items()):
            paths = {module: ".".join(filter(None, (name, path))) for path, module in block.named_modules()}
            known = {(each.module, each.name): each for each in sharded_weights(block.modules())}
            for module, path in paths.items():
                for own, value in module._parameters.items():
                    if value is None:
                        continue
                    found = known.get((module, own))
                    if found is not None and found.together not in numbers:
                        numbers[found.together] = len(units)
                        groups[found.over] = found.ranks
                        units.append(_unit(found, paths))
                        modules.append(found.group[0])
                    lazy = is_lazy(value)  # its shape is known once it has been used
                    size = 0 if lazy else value.numel() * value.element_size()
                    weight = WeightAside(path, own, "", False, number, () if lazy else tuple(value.shape), size)
                    weights.append(BlockWeight(weight, None if found is None else numbers[found.together]))
        return cls(blocks, tuple(units), tuple(modules), tuple(weights), groups)

    def plan(self, policy: Policy, running: Sequence[int]) -> OrderByFsdp:
        return plan_by_fsdp(policy, tuple(self.blocks.values()), self.units, self.weights, running)

    def lists(self, order: OrderByFsdp) -> Lists:
        """What the modules of the blocks are to be told. Where ``fully_shard`` was called with parts of a block alone,
        the first of them is told."""
        first: dict[int, nn.Module] = {}
        for each in self.weights:
            if each.unit is not None:
                first.setdefault(each.weight.block, self.modules[each.unit])
        told = {}
        for number, block in enumerate(self.blocks):
            module = block if is_sharded(block) else first.get(number)
            if module is not None:
                told[module] = self._of(order.forward, number), self._of(order.backward, number)
        return told

    def _of(self, ahead: Mapping[int, Sequence[int]], block: int) -> tuple[nn.Module, ...]:
        return tuple(dict.fromkeys(self.modules[unit] for unit in ahead.get(block, ())))


def _unit(weight: ShardedWeight, paths: Mapping[nn.Module, str]) -> Unit:
    """``paths``: of the modules of one block."""
    path = next((paths[each] for each in weight.group if each in paths), own_class(weight.group[0]))
    return Unit(path, weight.ranks, all(each in paths for each in weight.group))


@define(eq=False)
class FsdpOrder:
    """The order of one model, as far as it is settled."""

    policy: Policy
    order: OrderByFsdp | None = None
    told: Lists | None = None
    before: Lists | None = None
    """What the modules had been told before."""
    names: Mapping[nn.Module, str] | None = None

    def settle(self, sharding: _Sharding, running: Sequence[int] | None = None) -> None:
        """Tell FSDP. Raises ``PolicyMatchError`` where it cannot do what the policy says."""
        order = sharding.plan(self.policy, running or range(len(sharding.blocks)))
        raise_errors(order.diagnostics)
        self.order, self.told = order, sharding.lists(order)
        self.names = {module: unit.path for module, unit in zip(sharding.modules, sharding.units, strict=True)}
        self.names = {**self.names, **sharding.blocks}
        if self.before is None:
            self.before = {module: gathered_ahead(module) for module in self.told}
        _tell(self.told)

    def undo(self) -> None:
        if self.before is not None:
            _tell(self.before)

    def differences(self) -> list[str]:
        """Where FSDP is told otherwise by now."""
        found = []
        for module, (forward, backward) in (self.told or {}).items():
            now = gathered_ahead(module)
            for half, planned, there in (("forward", forward, now[0]), ("backward", backward, now[1])):
                if [*planned] != [*there]:
                    wanted, is_so, name = map(self._named, (planned, there, [module]))
                    problem = problems.TOLD_OTHERWISE.diagnostic(name=name, half=half, wanted=wanted, is_so=is_so)
                    found.append(f"{problem.message} ({problem.code})")
        return found

    def _named(self, modules: Sequence[nn.Module]) -> str:
        names = self.names or {}
        return ", ".join(f"`{names.get(each) or own_class(each)}`" for each in modules) or "nothing"


def _tell(lists: Lists) -> None:
    for module, (forward, backward) in lists.items():
        sharded: Any = module
        sharded.set_modules_to_forward_prefetch([*forward])
        sharded.set_modules_to_backward_prefetch([*backward])


_orders: WeakKeyDictionary[nn.Module, FsdpOrder] = WeakKeyDictionary()


@frozen(eq=False)
class _Settle:
    """The hook before a model's first forward. It knows the model by being called with it: a copy has an order of its
    own."""

    policy: Policy
    blocks: Any
    """From a model to its blocks."""

    def __call__(self, model: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        found = _orders.get(model)
        if found is None:
            found = _orders[model] = FsdpOrder(self.policy)
        sharding = _Sharding.of(self.blocks(model))
        if self.policy.orders:
            found.settle(sharding)
        if found.told and any(any(lists) for lists in found.told.values()):
            _refuse_without_root(found, sharding)
        _agree(found, sharding)
        _take_off(model, _Settle)
        if found.told:
            model.register_forward_hook(_Compare(self.blocks))


@frozen(eq=False)
class _Compare:
    """The hook after it: blocks may have run in another order than they stand in the model."""

    blocks: Any

    def __call__(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        _take_off(model, _Compare)
        found = _orders.get(model)
        if found is None or not found.told:
            return
        sharding = _Sharding.of(self.blocks(model))
        running = _running(sharding, ran_forward(next(iter(found.told))))
        if running != sorted(running):
            found.settle(sharding, running)


def _running(sharding: _Sharding, ran: Sequence[nn.Module]) -> list[int]:
    """The blocks in the order in which they ran; those that did not stand behind."""
    of_module = {module: number for number, block in enumerate(sharding.blocks) for module in block.modules()}
    ran_blocks = [of_module[each] for each in ran if each in of_module]
    return list(dict.fromkeys([*ran_blocks, *range(len(sharding.blocks))]))


def put_order_on(model: nn.Module, policy: Policy, blocks: Any) -> None:
    """Have FSDP gather as the policy's scheduling lines say, from the first forward on; what is sharded already is told
    now. ``blocks``: from a model to its blocks. Takes what an earlier policy said back. A policy without such lines is
    compared with those of other ranks all the same: one of them may have lines.

    Raises ``PolicyMatchError`` for what eager cannot do, and where ``fully_shard`` was called otherwise.
    """
    take_order_off(model)
    raise_errors(refused_in_eager(policy))
    _orders[model] = found = FsdpOrder(policy)
    model.register_forward_pre_hook(_Settle(policy, blocks))
    if not policy.orders:  # which is compared with the order of other ranks, and tells FSDP nothing
        return
    others = [module for module in model.modules() if is_first_fsdp(module) or isinstance(module, _DDP)]
    if others and not _is_optional(policy):
        raise problems.NOT_FULLY_SHARDED.refused(_first_line(policy).span, name=type(others[0]).__name__)
    sharding = _Sharding.of(blocks(model))
    if sharding.units and {each.weight.block for each in sharding.weights if each.unit is not None} == set(
        range(len(sharding.blocks))
    ):
        found.settle(sharding)


def take_order_off(model: nn.Module) -> None:
    """Tell FSDP what it had been told before."""
    earlier = _orders.pop(model, None)
    if earlier is not None:
        earlier.undo()
    _take_off(model, _Settle, _Compare)


def refuse_for_one_block(policy: Policy, name: str) -> None:
    """Raises ``PolicyMatchError`` where a policy orders what a single block does not know."""
    raise_errors(refused_in_eager(policy))
    if not _is_optional(policy):
        raise problems.ONE_OF_THE_BLOCKS.refused(_first_line(policy).span, name=name)


def warn_of_unchecked(policy: Policy) -> None:
    """Of a policy that says nothing of values."""
    for each in unchecked(policy):
        problems.warn(each)


def order_reports(subject: object) -> list[FsdpOrderReport]:
    """What FSDP was told for a model and for those inside it, held against what it is told now."""
    if not isinstance(subject, nn.Module):
        return []
    found = [_orders[module] for module in subject.modules() if module in _orders]
    return [_report(each) for each in found if each.policy.orders]


def _report(found: FsdpOrder) -> FsdpOrderReport:
    statements = (*found.policy.buckets, *found.policy.scheduling)
    lines = found.order.lines if found.order is not None else [LineByFsdp(each, _NOT_YET) for each in statements]
    accounts = tuple(
        LineByFsdpReport(each.statement.span.location, each.statement.span.one_line, each.said) for each in lines
    )
    return FsdpOrderReport(found.policy.name, accounts, tuple(found.differences()))


def _refuse_without_root(found: FsdpOrder, sharding: _Sharding) -> None:
    """FSDP gathers ahead on streams that all sharded modules inside one share; apart, torch fails on the first."""
    told = found.told or {}
    alone = [module for module in told if not lies_within_another(module)]
    if alone and len(told) > 1:
        found.undo()
        names = {module: unit.path for module, unit in zip(sharding.modules, sharding.units, strict=True)}
        raise problems.WITHOUT_ROOT.refused(
            _first_line(found.policy).span, name=names.get(alone[0], own_class(alone[0]))
        )


def _agree(found: FsdpOrder, sharding: _Sharding) -> None:
    """Raises ``PolicyDivergenceError`` unless all ranks gather alike: a backward that gathers farther ahead on one rank
    has another order of collectives."""
    if all(len(ranks) < 2 for ranks in sharding.groups.values()):
        return
    words = [] if found.order is None else found.order.words(sharding.units)
    with comparing("order of the weights' gathers", settings=lambda: words, around=sharding.groups) as comparison:
        graph = GraphBuilder()
        graph.add("weights", "input", ())
        comparison.begin(graph.facts(GraphKind.FORWARD), found.policy)


def _first_line(policy: Policy) -> Bucket | Scheduling:
    lines = (*policy.buckets, *policy.scheduling)
    return next((each for each in lines if not each.optional), lines[0])


def _is_optional(policy: Policy) -> bool:
    return all(each.optional for each in (*policy.buckets, *policy.scheduling))


def _take_off(model: nn.Module, *kinds: type) -> None:
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, hook in hooks.items() if isinstance(hook, kinds)]:
            del hooks[key]
