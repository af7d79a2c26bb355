"""Graphs written as text, for tests of what happens after the facts have been gathered.

One node a line::

    %x = input bytes=32
    %w = parameter bytes=64 name=layers.0.attn.weight
    %mm = aten.mm.default(%x, %w) layers.0.attn bytes=128 flops=1024 dtype=bfloat16 shape=8x8
    %sin = aten.sin.default(%mm) layers.0.attn view random region=0 tag=PREFER_RECOMPUTE
    ---
    %t = tangent
    %bw = aten.cos.default(%t, %sin)
    output(%sin, %bw)

What stands above ``---`` is forward, below it backward. ``aten.mul.Tensor(…) backward`` is a backward node wherever it
stands. Words without ``=`` are a module path (the first one that is no flag) and flags. ``follows=%mm`` makes a node
share the decision of another; ``getitem`` and ``wait_tensor`` do so unasked.
"""

from __future__ import annotations

import re
from typing import Any

from policylang.graph.facts import Facts, Flag, GraphKind, Group, InputKind, Phase

_INPUTS = {
    "input": InputKind.USER,
    "parameter": InputKind.PARAMETER,
    "buffer": InputKind.BUFFER,
    "tangent": InputKind.TANGENT,
    "seed": InputKind.OTHER,
}
_FLAGS = {flag.name.lower(): flag for flag in Flag if flag.name is not None}
NO_FLAG = Flag(0)
_LINE = re.compile(r"^(?:%(\w+)\s*=\s*)?([\w.]+)(?:\(([^)]*)\))?(.*)$")


def facts_of(text: str, kind: GraphKind | None = None) -> Facts:
    """The facts of a graph written as text. ``FEEDS_BACKWARD`` and ``FORWARD_OUTPUT`` are filled in."""
    builder = GraphBuilder()
    backward = False
    for line in text.strip().splitlines():
        line = line.partition("#")[0].strip()
        if line == "---":
            backward = True
        elif line:
            builder.add_line(line, backward)
    return builder.facts(kind or (GraphKind.JOINT if backward else GraphKind.FORWARD))


class GraphBuilder:
    """Rows one after the other; a million of them if need be."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.index: dict[str, int] = {}
        self.groups: dict[str, Group] = {}

    def add_line(self, line: str, backward: bool) -> None:
        found = _LINE.match(line)
        assert found is not None, f"not a line of a graph: {line!r}"
        name, target, arguments, rest = found.groups()
        inputs = tuple(dict.fromkeys(self.index[word] for word in re.findall(r"%(\w+)", arguments or "")))
        words = rest.split()
        values = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        flags = NO_FLAG
        for word in plain:
            flags |= _FLAGS.get(word, NO_FLAG)
        modules = [word for word in plain if word not in _FLAGS and word not in ("backward", "root")]
        self.add(
            name or "output",
            target,
            inputs,
            module=modules[0] if modules else "",
            backward=backward or "backward" in plain,
            flags=flags,
            owner=self.index[values["follows"].lstrip("%")] if "follows" in values else None,
            **{key: value for key, value in values.items() if key != "follows"},
        )

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
        bytes: int | str = 0,
        numel: int | str = 0,
        flops: int | str = 0,
        shape: str = "",
        dtype: str = "",
        device: str = "",
        region: str | None = None,
        tag: str | None = None,
        group: str = "",
    ) -> int:
        row = len(self.rows)
        op, phase, input_kind = "call_function", Phase.BACKWARD if backward else Phase.FORWARD, InputKind.NOT_AN_INPUT
        if target in _INPUTS:
            op, phase, input_kind = "placeholder", Phase.INPUT, _INPUTS[target]
        elif target == "get_attr":
            op = "get_attr"
        elif target == "output":
            op, phase = "output", Phase.OUTPUT
        if owner is None and inputs and (target == "builtin.getitem" or "wait_tensor" in target):
            owner = self.rows[inputs[0]]["owner"]
        if group and group not in self.groups:
            size = int(group.rpartition(":")[2])
            self.groups[group] = Group(group, tuple(range(size)), size)
        self.rows.append(
            {
                "name": name,
                "op": op,
                "target": target if op == "call_function" else "",
                "phase": int(phase),
                "module": module,
                "region": None if region is None else int(region),
                "tag": tag,
                "flags": int(flags),
                "bytes": int(bytes),
                "numel": int(numel),
                "shape": tuple(int(extent) for extent in shape.split("x")) if shape else None,
                "dtype": dtype,
                "device": device,
                "flops": int(flops),
                "inputs": inputs,
                "owner": row if owner is None else owner,
                "input_kind": int(input_kind),
                "group": group,
            }
        )
        self.index[name] = row
        return row

    def facts(self, kind: GraphKind) -> Facts:
        users: list[list[int]] = [[] for _ in self.rows]
        for row, node in enumerate(self.rows):
            for source in node["inputs"]:
                users[source].append(row)
        for row, node in enumerate(self.rows):
            readers = [self.rows[user] for user in users[row]]
            if node["phase"] == Phase.FORWARD and any(reader["phase"] == Phase.BACKWARD for reader in readers):
                node["flags"] |= Flag.FEEDS_BACKWARD
                self.rows[node["owner"]]["flags"] |= Flag.FEEDS_BACKWARD
            if node["phase"] == Phase.FORWARD and any(reader["op"] == "output" for reader in readers):
                node["flags"] |= Flag.FORWARD_OUTPUT
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
            dtypes=[node["dtype"] for node in rows],
            devices=[node["device"] for node in rows],
            flops=[node["flops"] for node in rows],
            inputs=[node["inputs"] for node in rows],
            users=[tuple(readers) for readers in users],
            owners=[node["owner"] for node in rows],
            input_kinds=[node["input_kind"] for node in rows],
            input_names=["" for _ in rows],
            group_names=[node["group"] for node in rows],
            groups=self.groups,
        )
