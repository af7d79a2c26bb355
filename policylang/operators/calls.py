"""Facts of a call from its operator's schema: categories, special arguments, memory it returns, writes and reads."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from attrs import frozen
from torch import fx

from policylang.operators import names
from policylang.torch_compat import graphs

_GROUP_ARGUMENTS = ("group_name", "process_group", "group")
_EFFECTS = (
    *("c10d.", "aten._assert", "aten._functional_assert", "aten.sym_constrain_range", "aten._print"),
    "aten._async_error",
)
_EFFECTFUL_HIGHER_ORDER = frozenset({"with_effects", "print", "call_torchbind", "inductor_compiled_code"})
_WRITING_HIGHER_ORDER = frozenset({"triton_kernel_wrapper_mutation"})
_RANDOM_HIGHER_ORDER = frozenset({names.SAVES_RANDOM_STATE, "graphsafe_run_with_rng_state"})
_SEEDS = ("prims.inductor_seed.", "prims.inductor_seeds.", "prims.inductor_rand_eager_offset")

Place = tuple[int, str]
"""The place of an argument in a call: its position and its keyword; the position is -1 for keyword-only arguments."""

ALL_KEYWORDS: tuple[Place, ...] = ((-1, "**kwargs"),)
"""The arguments of an operator that may write any of them, and takes them all by keyword."""


@frozen
class OperatorInfo:
    name: str
    """``aten.mm.default``, as in ``Facts.targets``."""
    flags: int
    """The :class:`Category` bits that hold of every call."""
    aliased: tuple[Place, ...] = ()
    """The arguments whose memory it returns."""
    written: tuple[Place, ...] = ()
    """The arguments whose memory it writes."""
    chance: tuple[Place, ...] = ()
    """The arguments that turn randomness off when 0 or False: dropout probability, train mode."""
    group: tuple[Place, ...] = ()
    """The argument that names the process group."""


@frozen
class StandIn:
    """An operator that this torch does not have, by one call: it reads its arguments and returns new tensors. Torch's
    registry is the whole process's: what one file calls would decide what is read of the next."""

    namespace: str
    name: str
    overload: str
    positional: int
    """The number of positional arguments of the call."""
    keywords: tuple[str, ...]
    returns_several: bool

    def __str__(self) -> str:
        return f"{self.namespace}.{self.name}.{self.overload}"

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"`{self}` is an operator that this torch does not have")


@cache
def describe(target: Any) -> OperatorInfo:
    if isinstance(target, graphs.OpOverload):
        return _describe_overload(target)
    if isinstance(target, StandIn):
        return _describe_stand_in(target)
    if isinstance(target, graphs.HigherOrderOperator):
        return _describe_higher_order(target)
    module, name = getattr(target, "__module__", None) or "", getattr(target, "__name__", None) or type(target).__name__
    if isinstance(target, graphs.OpOverloadPacket):
        name = str(target)
    elif module in ("_operator", "operator", "builtins", ""):
        name = f"builtin.{name}"
    else:
        name = f"{module}.{name}"
    return OperatorInfo(name, names.Category.EFFECTFUL if target in graphs.side_effect_functions() else 0)


def argument(node: fx.Node, places: Sequence[Place], *, skip: int = 0) -> list[Any]:
    """The arguments of a call at the given places; omitted defaults are left out. ``skip``: the number of arguments
    before those of an operator that runs inside another."""
    args, kwargs = node.args[skip:], node.kwargs
    if places is ALL_KEYWORDS:
        return list(kwargs.values())
    found = []
    for position, name in places:
        if 0 <= position < len(args):
            found.append(args[position])
        elif name in kwargs:
            found.append(kwargs[name])
    return found


@cache
def parameters(target: Any) -> tuple[tuple[str, Any], ...] | None:
    """Every argument's name and default value, of an operator or ``getitem``; None of others."""
    if describe(target).name == names.GETITEM:
        return (("a", None), ("b", None))
    if isinstance(target, StandIn):
        return tuple((name, None) for name in (*map(str, range(target.positional)), *target.keywords))
    if not isinstance(target, graphs.OpOverload):
        return None
    return tuple((given.name, given.default_value) for given in graphs.schema_of(target).arguments)


def draws_random(operator: OperatorInfo, node: fx.Node) -> bool:
    """A call of a random operator draws: SDPA with dropout 0 does not, nor does dropout outside training."""
    if not operator.chance:
        return True
    values = argument(node, operator.chance)
    off = any(value is False or (not isinstance(value, fx.Node) and value == 0) for value in values)
    # An SDPA that leaves its dropout out means 0.
    return not off and (bool(values) or operator.chance[0][1] != "dropout_p")


def group_name(operator: OperatorInfo, node: fx.Node) -> str:
    """The process group of a collective; empty if the call does not name it."""
    values = argument(node, operator.group)
    found = (value if isinstance(value, str) else graphs.name_of_group(value) for value in values)
    return next(filter(None, found), "")


def nodes_in(values: Any) -> list[fx.Node]:
    """The nodes of an argument, however nested."""
    if isinstance(values, fx.Node):
        return [values]
    if isinstance(values, (tuple, list)):
        return [node for value in values for node in nodes_in(value)]
    if isinstance(values, Mapping):
        return nodes_in(list(values.values()))
    return []


def _describe_overload(target: graphs.OpOverload) -> OperatorInfo:
    name = str(target)
    namespace = target.namespace
    schema = graphs.schema_of(target)
    returned: set[str] = set()
    for value in schema.returns:
        if value.alias_info is not None:
            returned |= value.alias_info.before_set | value.alias_info.after_set
    aliased, written, chance, group = [], [], [], []
    for position, given in enumerate(schema.arguments):
        place = (-1 if given.kwarg_only else position, given.name)
        if given.alias_info is not None:
            if given.alias_info.is_write:
                written.append(place)
            # The elements of a list that is returned have no alias set of their own; their source's goes to `*`.
            if returned & given.alias_info.before_set or given.alias_info.after_set & (returned | {"*"}):
                aliased.append(place)
        if given.name == "dropout_p" or (namespace == "aten" and given.name == "train" and "dropout" in name):
            chance.append(place)
        if given.name in _GROUP_ARGUMENTS:
            group.append(place)
    if namespace == "c10d" and schema.name.endswith("_"):
        written.append((0, schema.arguments[0].name))  # their schemas do not declare it
    writes, returns = schema.is_mutable or bool(written), schema.returns
    spared = target in graphs.side_effect_functions() and not namespace.endswith("c10d_functional")
    holds = {
        names.Category.WRITES: writes,
        names.Category.VIEW: not writes and bool(returns) and all(value.alias_info is not None for value in returns),
        names.Category.RANDOM: torch.Tag.nondeterministic_seeded in target.tags,
        names.Category.MULTI_OUTPUT: len(returns) > 1 or any(str(value.type).startswith("List[") for value in returns),
        names.Category.COLLECTIVE: bool(group) and name not in names.WAITS,
        names.Category.EFFECTFUL: spared,
    }
    flags = _bits(holds) | _by_name(name)
    return OperatorInfo(name, flags, tuple(aliased), tuple(written), tuple(chance), tuple(group))


def _describe_stand_in(target: StandIn) -> OperatorInfo:
    group = tuple((-1, name) for name in target.keywords if name in _GROUP_ARGUMENTS)
    written = ((0, ""),) if target.namespace == "c10d" and target.name.endswith("_") else ()
    holds = {
        names.Category.WRITES: bool(written),
        names.Category.MULTI_OUTPUT: target.returns_several,
        names.Category.COLLECTIVE: bool(group),
    }
    return OperatorInfo(str(target), _bits(holds) | _by_name(str(target)), written=written, group=group)


def _by_name(name: str) -> int:
    """The categories that an operator's full name implies."""
    is_compute = name.rpartition(".")[0] in graphs.compute_operators()
    seeds, effects = name.startswith(_SEEDS), name.startswith(_EFFECTS)
    kinds = names.Category
    return _bits({kinds.SEED: seeds, kinds.COMPUTE: is_compute, kinds.EFFECTFUL: effects})


def _describe_higher_order(target: graphs.HigherOrderOperator) -> OperatorInfo:
    name = target.name()
    holds = {
        names.Category.EFFECTFUL: name in _EFFECTFUL_HIGHER_ORDER,
        names.Category.WRITES: name in _WRITING_HIGHER_ORDER,
        names.Category.RANDOM: name in _RANDOM_HIGHER_ORDER,
        names.Category.COMPUTE: name in graphs.compute_operators(),
    }
    written = ALL_KEYWORDS if holds[names.Category.WRITES] else ()
    return OperatorInfo(f"higher_order.{name}", _bits(holds), written=written)


def _bits(holds: Mapping[int, bool]) -> int:
    return sum(bit for bit, is_so in holds.items() if is_so)


@frozen
class Statistics:
    """The running statistics that an operator is given and updates while it trains, without reading them."""

    places: tuple[int, ...]
    writes: bool = True
    """In place, without declaring it in its schema; otherwise it returns new ones."""
    may_not_train: bool = True
    """Its argument ``training`` decides whether it trains."""
    needed: bool = False
    """It cannot be called without them."""


RUNNING_STATISTICS = {
    "aten.native_batch_norm.default": Statistics((3, 4)),
    "aten.cudnn_batch_norm.default": Statistics((3, 4)),
    "aten.miopen_batch_norm.default": Statistics((3, 4)),
    "aten.batch_norm_gather_stats.default": Statistics((3, 4), may_not_train=False),
    "aten.batch_norm_gather_stats_with_counts.default": Statistics((3, 4), may_not_train=False),
    "aten.batch_norm_update_stats.default": Statistics((1, 2), may_not_train=False, needed=True),
    "aten._native_batch_norm_legit_functional.default": Statistics((3, 4), writes=False),
    "aten._batch_norm_with_update_functional.default": Statistics((3, 4), writes=False, may_not_train=False),
}
_TRAINING = ((5, "training"),)
_RANDOM_STATE = frozenset(f"higher_order.{name}" for name in (names.SAVES_RANDOM_STATE, *names.RUNS_WITH_RANDOM_STATE))
_RETURNS_FIRST = names.FOLLOWERS | names.VIEWS_UNSAID
_SIZES_ONLY = ("new_", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset")
"""Operators of ``aten`` that look at the sizes of their input and not at its bytes, by how their names begin."""


def may_write(node: fx.Node) -> bool:
    """A call may write to memory, by its operator."""
    if node.op != "call_function":
        return False
    operator = describe(node.target)
    return bool(operator.written) or operator.name in RUNNING_STATISTICS or operator.name in _RANDOM_STATE


def effects(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The nodes whose memory a call returns and those whose memory it writes, running statistics left out."""
    operator, skip = describe(node.target), 0
    if operator.name in _RANDOM_STATE:
        skip, operator = _inside(node)
    if operator.name in _RETURNS_FIRST:
        return nodes_in(node.args[skip]), []
    if not operator.aliased and not operator.written:
        return [], []
    return nodes_in(argument(node, operator.aliased, skip=skip)), nodes_in(argument(node, operator.written, skip=skip))


def writes_inside(node: fx.Node) -> int:
    """:attr:`Category.WRITES` of a call that runs an operator from a state of the generator, where that one writes."""
    if node.op != "call_function" or describe(node.target).name not in _RANDOM_STATE:
        return 0
    return _inside(node)[1].flags & names.Category.WRITES


def _inside(node: fx.Node) -> tuple[int, OperatorInfo]:
    """The operator that a call runs from a generator's state, and the number of arguments before the operator's."""
    found = ((at + 1, describe(each)) for at, each in enumerate(node.args) if isinstance(each, graphs.OpOverload))
    return next(found, (0, describe(node.target)))


def written_statistics(node: fx.Node) -> tuple[int, ...]:
    """The positions of running statistics that a call updates in place."""
    return _statistics(node, writes=True)


def unread(node: fx.Node) -> list[Any]:
    """The running statistics that a call is given and of which it returns new ones."""
    return [node.args[at] for at in _statistics(node, writes=False)]


def statistics_positions(target: Any) -> tuple[int, ...]:
    """The arguments of an operator that a recomputation can leave out: running statistics its results do not read."""
    found = RUNNING_STATISTICS.get(describe(target).name)
    return found.places if found and found.writes and not found.needed else ()


def updated_statistics(target: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """The running statistics that a call with these arguments updates, and that a recomputation can leave out."""
    found = RUNNING_STATISTICS.get(describe(target).name)
    return () if found and found.may_not_train and not args[_TRAINING[0][0]] else statistics_positions(target)


def _statistics(node: fx.Node, *, writes: bool) -> tuple[int, ...]:
    found = RUNNING_STATISTICS.get(describe(node.target).name)
    if found is None or found.writes != writes or (found.may_not_train and argument(node, _TRAINING) != [True]):
        return ()
    return tuple(at for at in found.places if at < len(node.args) and isinstance(node.args[at], fx.Node))


def asks_for_sizes(node: fx.Node) -> bool:
    namespace, _, rest = describe(node.target).name.partition(".")
    name = rest.partition(".")[0]
    return namespace == "aten" and (name.startswith(_SIZES_ONLY) or name.endswith("_like"))


def function(node: fx.Node) -> str:
    """The name of what a node calls."""
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def piece_of_draw(node: Any) -> int | None:
    """The piece of a random operator that keeps its state: 0 for the state it started from, 1 for what it drew."""
    if not isinstance(node, fx.Node) or node.target is not python_operator.getitem:
        return None
    keeper, piece = node.args
    return int(piece) if isinstance(keeper, fx.Node) and function(keeper) == names.SAVES_RANDOM_STATE else None
