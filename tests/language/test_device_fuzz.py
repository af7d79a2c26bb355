"""Whatever a device profile holds, a profile or diagnostics come back: never a traceback."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import parse_device, read_device, table_rows
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.shown import DTYPES
from policylang.report.diagnostics import render_json, render_text
from tests.support.drawn import examples

KEYS = ("name", "compute", "memory", "host", "network", "bandwidth", "latency", "ranks", "times", "group", "pointwise")
MORE = ("capacity", "overhead", "attention", "float32", "bf16", "tf32", "other", "a b", '"', "é", "")
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, 2, 8, 10**400, 1e12, 2.6e12, 0.35, float("inf"), float("nan"), -0.0, 5e-324]),
    st.floats(),
)
LEAVES = st.one_of(NUMBERS, st.booleans(), st.text(max_size=5), st.sampled_from(["80 GiB", "1 TB/s", "x.table", "."]))
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS + MORE), inner, max_size=4)
    ),
    max_leaves=12,
)
RATE = st.one_of(LEAVES, st.lists(st.lists(NUMBERS, max_size=3), max_size=3))
NETWORK = st.dictionaries(st.sampled_from(("ranks", "bandwidth", "latency", "times", "group")), LEAVES)
PROFILES = st.fixed_dictionaries(
    {"compute": st.dictionaries(st.sampled_from((*DTYPES[:4], "bf16", "overhead", "attention")), RATE)},
    optional={
        "name": LEAVES,
        "memory": st.dictionaries(st.sampled_from(("bandwidth", "pointwise", "capacity")), RATE),
        "host": st.dictionaries(st.just("bandwidth"), RATE),
        "network": st.lists(NETWORK, max_size=3),
    },
)
"""Nearly profiles."""


def toml(tree: Any) -> str:
    """A value in TOML; tables in one line."""
    if isinstance(tree, bool):
        return str(tree).lower()
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{quoted(key)} = {toml(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(toml, tree)) + "]"
    return quoted(tree) if isinstance(tree, str) else str(tree)


def quoted(text: str) -> str:
    return '"' + "".join(f"\\U{ord(each):08x}" if not 0xD800 <= ord(each) < 0xE000 else "?" for each in text) + '"'


def accept(found: DeviceProfile | Diagnostic) -> None:
    if isinstance(found, DeviceProfile):
        assert found.canonical
        return
    assert "APL152" <= found.code <= "APL158"
    assert render_text((found,))
    assert render_json((found,))
    for span in (found.span, *(note.span for note in found.related)):
        assert span is None or 0 <= span.start <= span.end <= len(span.source.text)


@given(st.binary(max_size=200))
@settings(max_examples=examples(25, 1000))
def test_random_bytes(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "d.toml").write_bytes(content)
        accept(read_device("d.toml", Path(folder)))


@given(st.dictionaries(st.sampled_from(KEYS + MORE), TREES, max_size=5), PROFILES, st.booleans())
@settings(max_examples=examples(25, 1000))
def test_random_trees(tree: dict[str, Any], profile: dict[str, Any], near: bool) -> None:
    text = "\n".join(f"{quoted(key)} = {toml(value)}" for key, value in (profile if near else tree).items())
    accept(parse_device(Source("d.toml", text), Path("/nowhere")))


WORDS = st.sampled_from(
    ["[", "]", "[[", "]]", "=", ".", ",", "{", "}", '"', "'", '"""', "'''", "#", "\n", "\r\n", " ", "\\", "a", "1", "é"]
)


@given(st.lists(WORDS, max_size=25).map("".join))
@settings(max_examples=examples(25, 1000))
def test_places_are_looked_for_in_any_text(text: str) -> None:
    accept(parse_device(Source("d.toml", text), Path("/nowhere")))


CELLS = st.sampled_from(
    [
        "Group",
        "1MB (ms)",
        "2MB (ms)",
        "1GB (s)",
        "0",
        "64",
        "all_reduce",
        "0.5",
        "nan",
        "1e999",
        "-",
        "---",
        "\n",
        "\n",
        "é",
    ]
)


@given(st.lists(CELLS, max_size=25).map(" ".join))
@settings(max_examples=examples(25, 1000))
def test_any_table(text: str) -> None:
    found = table_rows(Source("t.table", text))
    if isinstance(found, Diagnostic):
        accept(found)
    else:
        assert found
