"""Which memory a call returns, writes and reads: what its operator's schema says, and what it does not."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Sequence
from typing import Any

from attrs import frozen
from torch import fx

from policylang.operators.categories import OperatorInfo, argument, describe, nodes_in
from policylang.operators.names import FOLLOWERS, RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE, VIEWS_UNSAID, Category
from policylang.torch_compat.graphs import OpOverload


@frozen
class Statistics:
    """The running statistics that an operator is given and, while it trains, neither reads nor leaves alone."""

    places: tuple[int, ...]
    writes: bool = True
    """In place, without saying so in its schema; otherwise it returns new ones."""
    may_not_train: bool = True
    """Whether it is told to train or not, by its argument ``training``."""
    needed: bool = False
    """Whether a call without them is none."""


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
_RANDOM_STATE = frozenset(f"higher_order.{name}" for name in (SAVES_RANDOM_STATE, *RUNS_WITH_RANDOM_STATE))
_RETURNS_FIRST = FOLLOWERS | VIEWS_UNSAID
_SIZES_ONLY = ("new_", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset")
"""Operators of ``aten`` that look at the sizes of their input and not at its bytes, by how their names begin."""


def may_write(node: fx.Node) -> bool:
    """Whether a call may write to memory, going by its operator."""
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
    return _inside(node)[1].flags & Category.WRITES


def _inside(node: fx.Node) -> tuple[int, OperatorInfo]:
    """The operator that a call runs from a state of the generator, and how many arguments stand before its own."""
    found = ((at + 1, describe(each)) for at, each in enumerate(node.args) if isinstance(each, OpOverload))
    return next(found, (0, describe(node.target)))


def written_statistics(node: fx.Node) -> tuple[int, ...]:
    """The positions of running statistics that a call updates in place."""
    found = _statistics(node, writes=True)
    return tuple(at for at in found if at < len(node.args) and isinstance(node.args[at], fx.Node))


def unread(node: fx.Node, operator: OperatorInfo) -> list[fx.Node]:
    """The running statistics that a call is given and of which it returns new ones."""
    if operator.name not in RUNNING_STATISTICS:
        return []
    return nodes_in([node.args[at] for at in _statistics(node, writes=False) if at < len(node.args)])


def statistics_positions(target: Any) -> tuple[int, ...]:
    """The arguments of an operator that a second run can leave out: running statistics its results do not read."""
    found = RUNNING_STATISTICS.get(describe(target).name)
    return () if found is None or not found.writes or found.needed else found.places


def updated_statistics(target: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """The running statistics that a call with these arguments updates, and that a second run can leave out."""
    at = _TRAINING[0][0]
    found = RUNNING_STATISTICS.get(describe(target).name)
    return () if found and found.may_not_train and not args[at] else statistics_positions(target)


def _statistics(node: fx.Node, *, writes: bool) -> tuple[int, ...]:
    found = RUNNING_STATISTICS.get(describe(node.target).name)
    if found is None or found.writes != writes or (found.may_not_train and argument(node, _TRAINING) != [True]):
        return ()
    return found.places


def asks_for_sizes(node: fx.Node) -> bool:
    namespace, _, rest = describe(node.target).name.partition(".")
    name = rest.partition(".")[0]
    return namespace == "aten" and (name.startswith(_SIZES_ONLY) or name.endswith("_like"))


def function(node: fx.Node) -> str:
    """The name of what a node calls."""
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def piece_of_draw(node: Any) -> int | None:
    """Of what a random operator that keeps its state returns: 0 for the state it started from, 1 for what it drew."""
    if not isinstance(node, fx.Node) or node.target is not python_operator.getitem:
        return None
    keeper, piece = node.args
    return int(piece) if isinstance(keeper, fx.Node) and function(keeper) == SAVES_RANDOM_STATE else None
