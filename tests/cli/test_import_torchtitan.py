"""`policylang import-torchtitan`: the known failure of the string, a typo that saves nothing, is an error here."""

from __future__ import annotations

from pathlib import Path

import pytest

from policylang.graph import snapshot
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Source

GRAPH = """
%x = input
%wo = aten.mm.default(%x) layers.0.attention.wo
%out = aten.sin.default(%wo) layers.0
%next = aten.sin.default(%out) layers.1
---
%g = aten.cos.default(%wo, %out, %next)
"""


@pytest.fixture
def graph(tmp_path: Path) -> str:
    facts, _ = read_graph(Source("graph", GRAPH))
    snapshot.write(facts, tmp_path / "small.graph")
    return str(tmp_path / "small.graph")


def test_the_policy_is_printed_or_written(policylang, tmp_path):
    printed = policylang("import-torchtitan", "layers.*.attention.wo::aten.mm.default")
    assert (printed.code, printed.err) == (0, "")
    assert "save aten.mm.default where module == layers.*.attention.wo\n" in printed.out
    file = tmp_path / "mine.apl"
    written = policylang("import-torchtitan", "layers.*.attention.wo::aten.mm.default", "-o", str(file))
    assert written == (0, "", f"wrote {file}\n")
    assert file.read_text() == printed.out
    assert policylang("check", str(file)).code == 0


def test_a_typo_that_torchtitan_would_say_nothing_of(policylang, graph, tmp_path):
    file = tmp_path / "mine.apl"
    selectors = "layers.*.atention.wo::aten.mm.default"
    outcome = policylang("import-torchtitan", selectors, "--graph", graph, "-o", str(file))
    assert outcome.code == 1
    assert "error[APL301]" in outcome.err
    assert "layers.0.attention.wo" in outcome.err
    assert not file.exists()


def test_a_wrong_string_is_underlined(policylang):
    outcome = policylang("import-torchtitan", "layers.*.wo::aten.mn.default")
    assert outcome.code == 1
    assert outcome.out == ""
    assert "--> full_recompute_save_ops:1:14" in outcome.err
    assert "did you mean" in outcome.err


def test_usage_and_files(policylang, tmp_path):
    good = "layers.*.wo::aten.mm.default"
    assert policylang("import-torchtitan", good, "--name", "two words").code == 2
    assert policylang("import-torchtitan", good, "--graph", str(tmp_path / "no.graph")).code == 2
    assert policylang("import-torchtitan", good, "-o", str(tmp_path / "no" / "mine.apl")).code == 2
