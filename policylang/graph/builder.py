"""Builds facts node by node, without an FX graph, and fills in what follows from what is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policylang.graph.facts import COLUMNS, Facts, Flag, GraphKind, Group, InputKind, Phase, users_of
from policylang.operators.names import FOLLOWERS

INPUTS = {
    "input": InputKind.USER,
    "parameter": InputKind.PARAMETER,
    "buffer": InputKind.BUFFER,
    "tangent": InputKind.TANGENT,
    "seed": InputKind.OTHER,
}
"""The words for what a graph is given."""
_BLANK = {name: said.blank for name, said in COLUMNS.items() if name != "users"}


class GraphBuilder:
    """``FEEDS_BACKWARD``, ``FORWARD_OUTPUT``, users and owners are filled in; everything else is as it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        """By column of :class:`Facts`."""
        self.index: dict[str, int] = {}
        self.groups: dict[str, Group] = {}

    def add(
        self,
        name: str,
        target: str,
        inputs: tuple[int, ...],
        *,
        module: str = "",
        backward: bool = False,
        flags: int = 0,
        owner: int | None = None,
        bytes: int = 0,
        numel: int = 0,
        flops: int = 0,
        shape: tuple[int, ...] | None = None,
        dtype: str = "",
        device: str = "",
        region: int | None = None,
        tag: str | None = None,
        input_name: str = "",
        group: str = "",
        **later: Any,
    ) -> int:
        """Add a node, and return its row. ``target`` is an operator in full, a word of :data:`INPUTS`, ``get_attr`` or
        ``output``; ``group`` ends in the number of its ranks, ``dp:4``; ``later`` are values of later columns."""
        row = len(self.rows)
        op, phase, input_kind = "call_function", Phase.BACKWARD if backward else Phase.FORWARD, InputKind.NOT_AN_INPUT
        if target in INPUTS:
            op, phase, input_kind = "placeholder", Phase.INPUT, INPUTS[target]
        elif target == "get_attr":
            op = "get_attr"
        elif target == "output":
            op, phase = "output", Phase.OUTPUT
        if owner is None and inputs and target in FOLLOWERS:
            owner = self.rows[inputs[0]]["owners"]
        if group and group not in self.groups:
            size = int(group.rpartition(":")[2])
            self.groups[group] = Group(group, tuple(range(size)), size)
        self.rows.append(
            {
                **_BLANK,
                "names": name,
                "ops": op,
                "targets": target if op == "call_function" else "",
                "phases": int(phase),
                "modules": module,
                "ac_regions": region,
                "user_tags": tag,
                "flags": flags,
                "bytes": bytes,
                "numel": numel,
                "shapes": shape,
                "dtypes": dtype,
                "devices": device,
                "flops": flops,
                "inputs": inputs,
                "owners": row if owner is None else owner,
                "input_kinds": int(input_kind),
                "input_names": input_name,
                "group_names": group,
                **later,
            }
        )
        self.index[name] = row
        return row

    def facts(self, kind: GraphKind) -> Facts:
        users = users_of([row["inputs"] for row in self.rows])
        self._flag_readers(users)
        columns: dict[str, Any] = {name: [row[name] for row in self.rows] for name in _BLANK}
        return Facts(kind=kind, users=users, groups=self.groups, **columns)

    def _flag_readers(self, users: Sequence[Sequence[int]]) -> None:
        for row, node in enumerate(self.rows):
            if node["phases"] != Phase.FORWARD:
                continue
            readers = [self.rows[user] for user in users[row]]
            if any(reader["phases"] == Phase.BACKWARD for reader in readers):
                node["flags"] |= Flag.FEEDS_BACKWARD
                self.rows[node["owners"]]["flags"] |= Flag.FEEDS_BACKWARD
            if any(reader["ops"] == "output" for reader in readers):
                node["flags"] |= Flag.FORWARD_OUTPUT
