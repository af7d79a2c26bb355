"""Small graphs written as text, for policy tests. The form is described in ``docs/policy-tests.md``.

One node a line; what stands above a line ``---`` is forward, below it backward. What a line does not say does not hold
of its node: nothing is looked up but whether there is such an operator.
"""

from __future__ import annotations

import re

from attrs import define, field, frozen

from policylang.graph.builder import INPUTS, NO_FLAG, GraphBuilder
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.dtypes import ALIASES, DTYPES
from policylang.language.nearest import did_you_mean, nearest
from policylang.language.resolution.operator_names import OperatorTable
from policylang.language.source import Source, Span
from policylang.language.units import UNITS

CANNOT_BE_READ, NO_SUCH_NODE, NO_SUCH_WORD = "APL501", "APL502", "APL503"

FLAGS = {flag.name.lower(): flag for flag in Flag if flag.name is not None}
KEYS = (
    *("bytes", "numel", "flops", "shape", "dtype", "device", "module"),
    *("region", "tag", "group", "follows", "name", "note"),
)
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
    source: Source, kind: GraphKind | None = None, operators: OperatorTable | None = None
) -> tuple[Facts | None, tuple[Diagnostic, ...]]:
    """The facts of a graph that is written as text, or everything that keeps it from being read.

    Without ``kind`` it is a joint graph if it has a backward, else the forward half of one. Linear in the text.
    """
    reader = _Reader(source, operators or OperatorTable.bundled())
    reader.read()
    if reader.problems:
        return None, tuple(reader.problems)
    return reader.builder.facts(kind or (GraphKind.JOINT if reader.backward else GraphKind.FORWARD)), ()


@frozen
class _Text:
    """A piece of the source, and where it starts."""

    text: str
    start: int


@define(eq=False)
class _Reader:
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
                self._line(_Text(said.strip(), start + indent))
            start += len(line) + 1

    def report(self, code: str, message: str, at: _Text, help: str | None = None) -> None:
        span = Span(self.source, at.start, at.start + len(at.text))
        self.problems.append(diagnose(code, message, span, help=help))

    def _line(self, line: _Text) -> None:
        found = _LINE.fullmatch(line.text)
        if found is None:
            self.report(CANNOT_BE_READ, "this is not a line of a graph", line, _HELP)
            return
        name, target = found["name"], _Text(found["target"], line.start + found.start("target"))
        if name is None and target.text != "output":
            self.report(CANNOT_BE_READ, "this node has no name", line, _HELP)
            return
        if (name or "output") in self.builder.index:
            at = _Text(f"%{name}" if name else "output", line.start)
            self.report(NO_SUCH_NODE, f"there are two nodes `{name or 'output'}`", at, "names are given once")
            return
        self._target(target)
        reads = self._reads(_Text(found["reads"] or "", line.start + max(found.start("reads"), 0)))
        words = _Words(self)
        for word in re.finditer(r"\S+", found["rest"]):
            words.take(_Text(word.group(), line.start + found.start("rest") + word.start()))
        self._add(name or "output", target.text, reads, words)

    def _add(self, name: str, target: str, reads: tuple[int, ...], words: _Words) -> None:
        self.builder.add(
            name,
            target,
            reads,
            module=words.module or "",
            backward=self.backward or words.backward,
            flags=words.flags,
            owner=words.follows,
            bytes=words.bytes if words.bytes is not None else words.numel_of_shape * _item_size(words.dtype),
            numel=words.numel if words.numel is not None else words.numel_of_shape,
            flops=words.flops,
            shape=words.shape,
            dtype=words.dtype,
            device=words.device,
            region=words.region,
            tag=words.tag,
            input_name=words.name,
            group=words.group,
            annotations=tuple(sorted(words.notes)),
        )

    def _target(self, target: _Text) -> None:
        """An operator has to be one, in full; that of a namespace nobody knows here is taken as it is."""
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

    def _reads(self, reads: _Text) -> tuple[int, ...]:
        """The rows that a node reads, each once, in the order of its arguments; numbers are for the reader."""
        rows: dict[int, None] = {}
        position = 0
        for piece in reads.text.split(",") if reads.text.strip() else ():
            at = _Text(piece.strip(), reads.start + position + len(piece) - len(piece.lstrip()))
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


@define(eq=False)
class _Words:
    """What stands behind the call on a line."""

    reader: _Reader
    module: str | None = None
    backward: bool = False
    flags: Flag = NO_FLAG
    follows: int | None = None
    bytes: int | None = None
    numel: int | None = None
    flops: int = 0
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    device: str = ""
    region: int | None = None
    tag: str | None = None
    name: str = ""
    group: str = ""
    notes: set[str] = field(factory=set)

    @property
    def numel_of_shape(self) -> int:
        if self.shape is None:
            return 0
        product = 1
        for extent in self.shape:
            product *= extent
        return product

    def take(self, word: _Text) -> None:
        key, sign, value = word.text.partition("=")
        if sign:
            self._value(key, _Text(value, word.start + len(key) + 1), word)
        elif word.text in FLAGS:
            self.flags |= FLAGS[word.text]
        elif word.text == "backward":
            self.backward = True
        else:
            self._module(word)

    def _module(self, word: _Text) -> None:
        near = () if "." in word.text else nearest(word.text, (*FLAGS, "backward"))
        if near or self.module is not None or not _PATH.fullmatch(word.text):
            help = did_you_mean(near) or "a line holds one module path, flags, and words such as `bytes=64`"
            self.reader.report(NO_SUCH_WORD, f"`{word.text}` is no flag of a node", word, help)
            return
        self.module = word.text

    def _value(self, key: str, value: _Text, word: _Text) -> None:
        if key not in KEYS:
            help = did_you_mean(nearest(key, KEYS)) or f"a node has {', '.join(f'`{known}`' for known in KEYS)}"
            self.reader.report(NO_SUCH_WORD, f"a node has no `{key}`", word, help)
        elif not self._set(key, value.text):
            self.reader.report(CANNOT_BE_READ, f"`{value.text}` is no `{key}`", value, _EXAMPLES[key])

    def _set(self, key: str, text: str) -> bool:
        """Whether the text is such a value; it is kept then."""
        if key in ("bytes", "numel", "flops"):
            amount = _amount(text, "number" if key == "numel" else key)
            if amount is not None:
                setattr(self, key, amount)
            return amount is not None
        if key == "shape":
            self.shape = () if text == "scalar" else tuple(int(extent) for extent in re.findall(r"\d+", text))
            return _SHAPE.fullmatch(text) is not None and self.numel_of_shape < 1 << 62
        if key == "dtype":
            self.dtype = ALIASES.get(text, text)
            return self.dtype in DTYPES
        if key == "region":
            self.region = int(text) if _WHOLE.fullmatch(text) else None
            return self.region is not None
        if key == "tag":
            self.tag = text
            return text in TAGS
        if key == "group":
            self.group = text if _GROUP.fullmatch(text) else ""
            return bool(self.group)
        if key == "note":
            self.notes.add(text)
            return bool(text)
        if key == "follows":
            self.follows = self.reader.builder.index.get(text.removeprefix("%"))
            return self.follows is not None
        setattr(self, key, text)
        return bool(text)


_EXAMPLES = {
    "bytes": "for example `bytes=64`, `bytes=2MiB`",
    "numel": "for example `numel=1024`",
    "flops": "for example `flops=2GFLOP`",
    "shape": "for example `shape=8x128`, `shape=scalar`",
    "dtype": "for example `dtype=bf16`",
    "device": "for example `device=cuda:0`",
    "module": "for example `module=layers.0`",
    "region": "for example `region=0`",
    "tag": f"one of {', '.join(f'`{tag}`' for tag in TAGS)}",
    "group": "its name and its size: `group=dp:16`",
    "follows": "a node of a line above: `follows=%sdpa`",
    "note": "the name of an annotation: `note=ap_must_save`",
    "name": "for example `name=layers.0.attention.wq.weight`",
}


def _amount(text: str, dimension: str) -> int | None:
    found = _AMOUNT.fullmatch(text)
    if found is None:
        return None
    scale, of = UNITS.get(found[2], (1, "number" if not found[2] else "unknown"))
    if found[2] and of != dimension:
        return None
    amount = int(float(found[1]) * scale) if found[2] or "." in found[1] else int(found[1])
    return amount if amount < 1 << 62 else None


def _item_size(dtype: str) -> int:
    """Bytes of one element; of an unknown type none."""
    bits = re.search(r"\d+", dtype)
    if dtype == "bool" or dtype == "float4_e2m1fn_x2":
        return 1
    return int(bits.group()) // 8 if bits else 0
