"""The process groups that a graph's collectives name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from policylang.graph.facts import Flag, Group
from policylang.operators.categories import OperatorInfo, group_name
from policylang.torch_compat.reading import group_ranks

_COLLECTIVE = int(Flag.COLLECTIVE)


def group_columns(
    nodes: Sequence[fx.Node], operators: Sequence[OperatorInfo], known: Mapping[str, Group]
) -> tuple[list[str], dict[str, Group]]:
    """``Facts.group_names`` and ``Facts.groups``; a group that is not known is asked of torch.distributed."""
    names = [""] * len(nodes)
    groups: dict[str, Group] = {}
    for row, operator in enumerate(operators):
        if operator.flags & _COLLECTIVE:
            name = group_name(operator, nodes[row])
            if not name:
                continue
            if name not in groups:
                groups[name] = known.get(name) or _ask(name)
            names[row] = groups[name].name
    return names, groups


def _ask(name: str) -> Group:
    ranks = group_ranks(name)
    return Group(name, ranks, len(ranks))
