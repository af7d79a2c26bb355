"""Reads a graph from a file in whichever form it has: a snapshot, a recorded graph in JSON, or a graph as text."""

from __future__ import annotations

import os
import re

from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.facts import Facts
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Source

_GZIP = b"\x1f\x8b"
_RECORDED = re.compile(rb"\s*\{")
_WRITTEN = re.compile(r"^[ \t]*%\w+[ \t]*=", re.MULTILINE)
_MOST_TEXT = 1 << 24
_NO_TORCH = "a recorded graph is read with torch; `policylang import` makes a snapshot of it where there is one"


def read_any(path: str | os.PathLike[str]) -> Facts:
    """The facts of a graph file. Torch is imported only for a recorded graph, which names operators and shapes; torch
    knows their costs. Raises ``PolicyGraphError`` for a file that cannot be read or that is none of the three."""
    if not os.path.isfile(path):  # a pipe is read once
        return snapshot.load(path)
    try:
        with open(path, "rb") as file:
            head = file.read(_MOST_TEXT + 1)
    except (OSError, ValueError):  # the snapshot's reader says why
        return snapshot.load(path)
    if head.startswith(_GZIP) or _RECORDED.match(head):
        return _recorded(path)
    source = None if head.startswith(snapshot.MAGIC) or len(head) > _MOST_TEXT else _text(path, head)
    if source is None:
        return snapshot.load(path)
    facts, problems = read_graph(source)
    if facts is None:
        raise PolicyGraphError(problems)
    return facts


def _text(path: str | os.PathLike[str], data: bytes) -> Source | None:
    """The text of a file that holds a line of a graph (``%x = …``); None of any other."""
    try:
        text = data.decode("utf-8-sig")
    except ValueError:
        return None
    return Source(os.fsdecode(path), text.replace("\r\n", "\n")) if _WRITTEN.search(text) else None


def _recorded(path: str | os.PathLike[str]) -> Facts:
    try:
        import torch  # noqa: F401
    except Exception as error:  # not there, or broken in whatever way
        message = f"`{os.fsdecode(path)}` is not a snapshot of a graph, and torch cannot be imported: {error}"
        raise snapshot.graph_error(snapshot.FOREIGN, message, _NO_TORCH) from None
    from policylang.graph.recorded import recorded_facts

    return recorded_facts(path)
