"""Graphs without FX: built node by node, or parsed from the text of policy tests.

``docs/policy-tests.md`` describes the text: one node per line, the forward above a line ``---``, the backward below it.
Facts that a line does not state are false for its node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from attrs import define, field, frozen

from policylang.graph import facts
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.operators import OperatorTable
from policylang.language.shown import ALIASES, DTYPES, UNITS, did_you_mean, nearest
from policylang.operators.names import FOLLOWERS, bytes_of

INPUTS = {
    "input": facts.InputKind.USER,
    "parameter": facts.InputKind.PARAMETER,
    "buffer": facts.InputKind.BUFFER,
    "tangent": facts.InputKind.TANGENT,
    "seed": facts.InputKind.OTHER,
}
"""The words for graph inputs."""
_BLANK = {name: said.blank for name, said in facts.COLUMNS.items() if name != "users"}
_COLUMN_OF = {"region": "ac_regions", "tag": "user_tags", "group": "group_names"} | {
    name: f"{name}s" for name in ("module", "shape", "dtype", "device", "owner", "input_name")
}


class GraphBuilder:
    """Fills in ``FEEDS_BACKWARD``, ``FORWARD_OUTPUT``, users and producers; everything else is as given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        """By column of :class:`Facts`."""
        self.index: dict[str, int] = {}
        self.groups: dict[str, facts.Group] = {}

    def add(
        self, name: str, target: str, inputs: tuple[int, ...], *, backward: bool = False, group: str = "", **said: Any
    ) -> int:
        """Add a node, and return its row. ``target`` is an operator in full, a word of :data:`INPUTS`, ``get_attr`` or
        ``output``; ``group`` ends in the number of its ranks, ``dp:4``. ``said``: its values in the columns of
        :class:`Facts`, by the column or as ``module``, ``shape``, ``dtype``, ``region``, ``tag``, ``owner``, …"""
        row = len(self.rows)
        op, input_kind = "call_function", facts.InputKind.NOT_AN_INPUT
        phase = facts.Phase.BACKWARD if backward else facts.Phase.FORWARD
        if target in INPUTS:
            op, phase, input_kind = "placeholder", facts.Phase.INPUT, INPUTS[target]
        elif target == "get_attr":
            op = "get_attr"
        elif target == "output":
            op, phase = "output", facts.Phase.OUTPUT
        if group and group not in self.groups:
            size = int(group.rpartition(":")[2])
            self.groups[group] = facts.Group(group, tuple(range(size)), size)
        columns = {
            **_BLANK,
            "names": name,
            "ops": op,
            "targets": target if op == "call_function" else "",
            "phases": int(phase),
            "inputs": inputs,
            "owners": self.rows[inputs[0]]["owners"] if inputs and target in FOLLOWERS else row,
            "input_kinds": int(input_kind),
            "group_names": group,
        }
        for word, value in said.items():
            columns[_COLUMN_OF.get(word, word)] = value
        self.rows.append(columns)
        self.index[name] = row
        return row

    def facts(self, kind: facts.GraphKind) -> Facts:
        columns: dict[str, Any] = {name: [row[name] for row in self.rows] for name in _BLANK}
        phases, inputs, flags = columns["phases"], columns["inputs"], columns["flags"]
        for row in facts.read_by_backward(phases, inputs, columns["owners"]):
            if phases[row] == facts.Phase.FORWARD:
                flags[row] |= facts.Flag.FEEDS_BACKWARD
        for op, reads in zip(columns["ops"], inputs, strict=True):
            for row in reads if op == "output" else ():
                flags[row] |= facts.Flag.FORWARD_OUTPUT if phases[row] == facts.Phase.FORWARD else 0
        return Facts(kind=kind, users=facts.users_of(inputs), groups=self.groups, **columns)


CANNOT_BE_READ, NO_SUCH_NODE, NO_SUCH_WORD = "APL501", "APL502", "APL503"

TAGS = ("MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD")
_LINE = re.compile(r"(?:%(?P<name>\w+)\s*=\s*)?(?P<target>[\w.]+)(?:\((?P<reads>[^()]*)\))?(?P<rest>(?:\s.*)?)")
_READ = re.compile(r"\s*(?:%(\w+)|-?\d[\w.]*)\s*")
_AMOUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)([A-Za-z]*)")
_SHAPE = re.compile(r"\d+(?:x\d+)*|scalar")
_GROUP = re.compile(r"\w+:[1-9]\d{0,5}")
_WHOLE = re.compile(r"\d{1,9}")
_PATH = re.compile(r"[\w.]+")
_HELP = "for example `%y = aten.mm.default(%x, %w) layers.0.attention shape=8x8 dtype=bf16`"


def read_graph(
    source: Source, kind: facts.GraphKind | None = None, operators: OperatorTable | None = None
) -> tuple[Facts | None, tuple[Diagnostic, ...]]:
    """The facts of a graph that is written as text, or everything that keeps it from being read. Without ``kind`` it is
    a joint graph if it has a backward, else a forward graph. Linear in the text."""
    reader = _GraphParser(source, operators or OperatorTable.bundled())
    reader.read()
    if reader.problems:
        return None, tuple(reader.problems)
    return reader.builder.facts(kind or (facts.GraphKind.JOINT if reader.backward else facts.GraphKind.FORWARD)), ()


@frozen
class _SourceText:
    """A piece of the source, and where it starts."""

    text: str
    start: int


@define(eq=False)
class _GraphParser:
    source: Source
    operators: OperatorTable
    builder: GraphBuilder = field(factory=GraphBuilder)
    backward: bool = False
    problems: list[Diagnostic] = field(factory=list)

    def read(self) -> None:
        start = 0
        for line in self.source.text.split("\n"):
            said = line.partition("#")[0].rstrip()
            indent = len(said) - len(said.lstrip())
            if said.strip() == "---":
                self.backward = True
            elif said.strip():
                self._line(_SourceText(said.strip(), start + indent))
            start += len(line) + 1

    def report(self, code: str, message: str, at: _SourceText, help: str | None = None) -> None:
        span = Span(self.source, at.start, at.start + len(at.text))
        self.problems.append(diagnose(code, message, span, help=help))

    def _line(self, line: _SourceText) -> None:
        found = _LINE.fullmatch(line.text)
        if found is None:
            self.report(CANNOT_BE_READ, "this is not a line of a graph", line, _HELP)
            return
        name, target = found["name"], _SourceText(found["target"], line.start + found.start("target"))
        if name is None and target.text != "output":
            self.report(CANNOT_BE_READ, "this node has no name", line, _HELP)
            return
        if (name or "output") in self.builder.index:
            at = _SourceText(f"%{name}" if name else "output", line.start)
            self.report(NO_SUCH_NODE, f"there are two nodes `{name or 'output'}`", at, "names are given once")
            return
        self._target(target)
        reads = self._reads(_SourceText(found["reads"] or "", line.start + max(found.start("reads"), 0)))
        said: dict[str, Any] = {"backward": self.backward, "flags": 0, "annotations": ()}
        for word in re.finditer(r"\S+", found["rest"]):
            self._word(_SourceText(word.group(), line.start + found.start("rest") + word.start()), said)
        if "shape" in said:  # a tensor of a shape has as many elements, and as many bytes
            numel = prod(said["shape"])
            said = {"numel": numel, "bytes": numel * bytes_of(said.get("dtype", "")), **said}
        self.builder.add(name or "output", target.text, reads, **said)

    def _target(self, target: _SourceText) -> None:
        """An operator has to be one, in full; that of an unknown namespace is taken as it is."""
        if target.text in INPUTS or target.text in ("get_attr", "output"):
            return
        parts = target.text.split(".")
        if len(parts) == 1:
            near = nearest(target.text, (*INPUTS, "get_attr", "output"))
            help = did_you_mean(near) or "an operator is written in full: `aten.mm.default`"
            self.report(NO_SUCH_WORD, f"`{target.text}` is neither an operator nor a kind of input", target, help)
            return
        if not self.operators.has_namespace(parts[0]):
            return
        known = self.operators.matches(parts[0], parts[1], parts[2] if len(parts) > 2 else None)
        if target.text not in known:
            near = known[:3] or self.operators.nearest(target.text)
            self.report(NO_SUCH_WORD, f"there is no operator `{target.text}`", target, did_you_mean(near))

    def _reads(self, reads: _SourceText) -> tuple[int, ...]:
        """The nodes that a node reads, each once, in the order of its arguments; numbers are for the reader."""
        rows: dict[int, None] = {}
        position = 0
        for piece in reads.text.split(",") if reads.text.strip() else ():
            at = _SourceText(piece.strip(), reads.start + position + len(piece) - len(piece.lstrip()))
            position += len(piece) + 1
            found = _READ.fullmatch(piece)
            if found is None:
                self.report(CANNOT_BE_READ, f"`{at.text}` is no argument", at, "arguments are nodes, `%x`, or numbers")
            elif found[1] in self.builder.index:
                rows[self.builder.index[found[1]]] = None
            elif found[1] is not None:
                help = did_you_mean(f"%{near}" for near in nearest(found[1], self.builder.index))
                self.report(NO_SUCH_NODE, f"no line above names a node `%{found[1]}`", at, help)
        return tuple(rows)

    def _word(self, word: _SourceText, said: dict[str, Any]) -> None:
        """One of the words after the call, as an argument of :meth:`GraphBuilder.add`."""
        key, sign, value = word.text.partition("=")
        if sign:
            self._value(key, _SourceText(value, word.start + len(key) + 1), word, said)
        elif word.text in facts.FLAGS:
            said["flags"] |= facts.FLAGS[word.text]
        elif word.text == "backward":
            said["backward"] = True
        else:
            near = () if "." in word.text else nearest(word.text, (*facts.FLAGS, "backward"))
            if near or "module" in said or not _PATH.fullmatch(word.text):
                help = did_you_mean(near) or "a line holds one module path, flags, and words such as `bytes=64`"
                self.report(NO_SUCH_WORD, f"`{word.text}` is no flag of a node", word, help)
            else:
                said["module"] = word.text

    def _value(self, key: str, value: _SourceText, word: _SourceText, said: dict[str, Any]) -> None:
        if key not in _KEYS:
            help = did_you_mean(nearest(key, _KEYS)) or f"a node has {', '.join(f'`{known}`' for known in _KEYS)}"
            self.report(NO_SUCH_WORD, f"a node has no `{key}`", word, help)
            return
        read, example = _KEYS[key]
        found: Any = self.builder.index.get(value.text.removeprefix("%")) if read is None else read(value.text)
        if found is None:
            self.report(CANNOT_BE_READ, f"`{value.text}` is no `{key}`", value, example)
        elif key == "note":
            said["annotations"] = tuple(sorted({*said["annotations"], found}))
        else:
            said[_ARGUMENT.get(key, key)] = found


def _amount(text: str, dimension: str) -> int | None:
    found = _AMOUNT.fullmatch(text)
    if found is None:
        return None
    scale, of = UNITS.get(found[2], (1, "number" if not found[2] else "unknown"))
    if found[2] and of != dimension:
        return None
    amount = int(float(found[1]) * scale) if found[2] or "." in found[1] else int(found[1])
    return amount if amount < 1 << 62 else None


def _shape(text: str) -> tuple[int, ...] | None:
    shape = tuple(int(extent) for extent in re.findall(r"\d+", text))
    return shape if _SHAPE.fullmatch(text) and prod(shape) < 1 << 62 else None


def _dtype(text: str) -> str | None:
    return name if (name := ALIASES.get(text, text)) in DTYPES else None


def _any_text(text: str) -> str | None:
    return text or None


_KEYS: Mapping[str, tuple[Callable[[str], Any] | None, str]] = {
    "bytes": (lambda text: _amount(text, "bytes"), "for example `bytes=64`, `bytes=2MiB`"),
    "numel": (lambda text: _amount(text, "number"), "for example `numel=1024`"),
    "flops": (lambda text: _amount(text, "flops"), "for example `flops=2GFLOP`"),
    "shape": (_shape, "for example `shape=8x128`, `shape=scalar`"),
    "dtype": (_dtype, "for example `dtype=bf16`"),
    "device": (_any_text, "for example `device=cuda:0`"),
    "module": (_any_text, "for example `module=layers.0`"),
    "region": (lambda text: int(text) if _WHOLE.fullmatch(text) else None, "for example `region=0`"),
    "tag": (lambda text: text if text in TAGS else None, f"one of {', '.join(f'`{tag}`' for tag in TAGS)}"),
    "group": (lambda text: text if _GROUP.fullmatch(text) else None, "its name and its size: `group=dp:16`"),
    "follows": (None, "a node of a line above: `follows=%sdpa`"),
    "name": (_any_text, "for example `name=layers.0.attention.wq.weight`"),
    "note": (_any_text, "the name of an annotation: `note=ap_must_save`"),
}
"""The keys of a line: the parser of the value (None: a node), and an example."""
_ARGUMENT = {"follows": "owner", "name": "input_name"}  # the builder's argument, where it has another name than the key
