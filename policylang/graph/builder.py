"""Facts by hand: rows one after the other, a million of them if need be, with what follows from them filled in."""

from __future__ import annotations

from typing import TypedDict

from policylang.graph.facts import Facts, Flag, GraphKind, Group, InputKind, Phase
from policylang.operators.names import FOLLOWERS

INPUTS = {
    "input": InputKind.USER,
    "parameter": InputKind.PARAMETER,
    "buffer": InputKind.BUFFER,
    "tangent": InputKind.TANGENT,
    "seed": InputKind.OTHER,
}
"""The words for what a graph is given."""
NO_FLAG = Flag(0)


class Row(TypedDict):
    name: str
    op: str
    target: str
    phase: int
    module: str
    region: int | None
    tag: str | None
    flags: int
    bytes: int
    numel: int
    shape: tuple[int, ...] | None
    dtype: str
    device: str
    flops: int
    inputs: tuple[int, ...]
    owner: int
    input_kind: int
    input_name: str
    group: str
    annotations: tuple[str, ...]


class GraphBuilder:
    """``FEEDS_BACKWARD``, ``FORWARD_OUTPUT``, users and owners are filled in; everything else is as it is given."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
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
        flags: Flag = NO_FLAG,
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
        annotations: tuple[str, ...] = (),
    ) -> int:
        """Add a node, and return its row. ``target`` is an operator in full, a word of :data:`INPUTS`, ``get_attr`` or
        ``output``; ``group`` ends in the number of its ranks, ``dp:4``."""
        row = len(self.rows)
        op, phase, input_kind = "call_function", Phase.BACKWARD if backward else Phase.FORWARD, InputKind.NOT_AN_INPUT
        if target in INPUTS:
            op, phase, input_kind = "placeholder", Phase.INPUT, INPUTS[target]
        elif target == "get_attr":
            op = "get_attr"
        elif target == "output":
            op, phase = "output", Phase.OUTPUT
        if owner is None and inputs and target in FOLLOWERS:
            owner = self.rows[inputs[0]]["owner"]
        if group and group not in self.groups:
            size = int(group.rpartition(":")[2])
            self.groups[group] = Group(group, tuple(range(size)), size)
        self.rows.append(
            Row(
                name=name,
                op=op,
                target=target if op == "call_function" else "",
                phase=int(phase),
                module=module,
                region=region,
                tag=tag,
                flags=int(flags),
                bytes=bytes,
                numel=numel,
                shape=shape,
                dtype=dtype,
                device=device,
                flops=flops,
                inputs=inputs,
                owner=row if owner is None else owner,
                input_kind=int(input_kind),
                input_name=input_name,
                group=group,
                annotations=annotations,
            )
        )
        self.index[name] = row
        return row

    def facts(self, kind: GraphKind) -> Facts:
        users: list[list[int]] = [[] for _ in self.rows]
        for row, node in enumerate(self.rows):
            for source in node["inputs"]:
                users[source].append(row)
        self._flag_readers(users)
        rows = self.rows
        return Facts(
            kind=kind,
            names=[node["name"] for node in rows],
            ops=[node["op"] for node in rows],
            targets=[node["target"] for node in rows],
            phases=[node["phase"] for node in rows],
            modules=[node["module"] for node in rows],
            ac_regions=[node["region"] for node in rows],
            user_tags=[node["tag"] for node in rows],
            flags=[node["flags"] for node in rows],
            bytes=[node["bytes"] for node in rows],
            numel=[node["numel"] for node in rows],
            shapes=[node["shape"] for node in rows],
            strides=[None for _ in rows],
            dtypes=[node["dtype"] for node in rows],
            devices=[node["device"] for node in rows],
            flops=[node["flops"] for node in rows],
            inputs=[node["inputs"] for node in rows],
            users=[tuple(readers) for readers in users],
            owners=[node["owner"] for node in rows],
            input_kinds=[node["input_kind"] for node in rows],
            input_names=[node["input_name"] for node in rows],
            arguments=[() for _ in rows],
            group_names=[node["group"] for node in rows],
            groups=self.groups,
            annotations=[node["annotations"] for node in rows],
        )

    def _flag_readers(self, users: list[list[int]]) -> None:
        rows = self.rows
        for row, node in enumerate(rows):
            if node["phase"] != Phase.FORWARD:
                continue
            readers = [rows[user] for user in users[row]]
            if any(reader["phase"] == Phase.BACKWARD for reader in readers):
                node["flags"] |= int(Flag.FEEDS_BACKWARD)
                rows[node["owner"]]["flags"] |= int(Flag.FEEDS_BACKWARD)
            if any(reader["op"] == "output" for reader in readers):
                node["flags"] |= int(Flag.FORWARD_OUTPUT)
