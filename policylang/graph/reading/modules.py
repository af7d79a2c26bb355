"""Normalises module paths to what the model's owner would write.

Dynamo names a module by the Python expression that reaches it, ``L['self']._modules['layers']._modules['0'].attn``;
wrappers add components that nobody wrote. What is left after normalisation is ``layers.0.attn``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from policylang.language.wording import one_line

_UNWRITTEN = frozenset(
    {
        "_modules",
        "_parameters",
        "_buffers",
        "__dict__",
        "_orig_mod",
        "_checkpoint_wrapped_module",
        "_fsdp_wrapped_module",
        "_export_root",
    }
)
_ROOT = re.compile(r"^[LG]\[(['\"])(?P<name>.*?)\1\]")
_GETATTR = re.compile(r"getattr\((?P<of>[^()]+?), ?(['\"])(?P<name>[^'\"]*)\2\)")
_COMPONENT = re.compile(r"\[\s*(?:'([^']*)'|\"([^\"]*)\"|(-?\d+))\s*\]|([^.\[\]]+)")
_INDIRECTION = ("cell_contents", "__self__")
MODULE_ANNOTATION = "module_fqn"
"""The key of ``node.meta["custom"]`` under which TorchTitan's graph trainer annotates the full name of a module."""


@lru_cache(maxsize=65536)
def normalise(raw: str) -> tuple[str, str]:
    """The local that a raw module path starts from (empty where it names none) and the normalised path."""
    text = raw
    while (flat := _GETATTR.sub(r"\g<of>.\g<name>", text)) != text:
        text = flat
    root = ""
    if match := _ROOT.match(text):
        root, text = match["name"], text[match.end() :]
    parts: list[str] = []
    for single, double, index, plain in _COMPONENT.findall(text):
        parts.extend((single or double or index or plain).split("."))
    for name in _INDIRECTION:  # what leads to a module through a closure or a bound method is not part of its name
        if name in parts:
            del parts[: len(parts) - parts[::-1].index(name)]
    return root, ".".join(part for part in parts if part and part not in _UNWRITTEN)


def raw_path(meta: Mapping[str, Any]) -> str:
    """The innermost module of a node as torch left it; a backward node has that of its forward node."""
    custom = meta.get("custom")
    if custom:
        annotated = custom.get(MODULE_ANNOTATION)
        if annotated:
            return str(annotated)
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    entry = next(reversed(stack.values()))
    return str(entry[0] if isinstance(entry, tuple) else entry)


class ModulePaths:
    """Interned paths of one graph, of modules and of what they hold, reached from one local variable or several."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._known: dict[str, tuple[str, str]] = {}
        """By raw path the local that it starts from, and the normalised path."""

    def add(self, raw: str) -> str:
        """Take note of a raw path; returns the key to give to :meth:`path`."""
        if raw not in self._known:
            self._known[raw] = normalise(raw)
        return raw

    def table(self) -> dict[str, str]:
        """Raw path to path, for every path that was added.

        Where a graph holds modules of several locals, as a step over a generator and a discriminator does, each path
        but those of ``self`` starts with its local's name: two models' ``layers.0`` are not one block.
        """
        several = len({root for root, _ in self._known.values() if root}) > 1
        shared: dict[str, str] = {"": ""}
        table: dict[str, str] = {"": ""}
        for raw, (root, path) in self._known.items():
            lead = root if several and root != "self" else ""
            full = one_line(".".join(part for part in (self._prefix, lead, path) if part))
            table[raw] = shared.setdefault(full, full)
        return table
