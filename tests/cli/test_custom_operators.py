"""Operators of a user's own: known from the graph, or from a module that the command line names."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import policylang as package
from policylang.graph.snapshot import write
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input
    %w = parameter
    %a = mylab.fused_mlp.default(%x, %w) layers.0 bytes=256 flops=10
    %s = aten.sin.default(%a) layers.0 bytes=256
    %a_1 = mylab.fused_mlp.default(%s, %w) layers.1 bytes=256 flops=10
    %s_1 = aten.sin.default(%a_1) layers.1 bytes=256
    ---
    %b = aten.mul.Tensor(%s_1, %a_1) bytes=256
    %c = mylab.fused_mlp_backward.default(%b, %s, %a) bytes=256
    output(%s_1, %c)
"""
POLICY = "recompute everything\nsave mylab.fused_mlp in layers.0\nsave fused_mlp in layers.1\nexpect saved <= 1 KiB\n"
KERNELS = """
import torch
print("the kernels say hello")
library = torch.library.Library("mylab_kernels", "DEF")
library.define("fused_moe(Tensor x) -> Tensor")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    write(facts_of(GRAPH), "my.graph")
    (tmp_path / "my.apl").write_text(POLICY)
    (tmp_path / "mylab_kernels_module.py").write_text(KERNELS)
    (tmp_path / "mylab_fails.py").write_text("def need():\n    raise OSError('no GPU of\\ngeneration 9')\nneed()\n")
    (tmp_path / "mylab_ends.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "mylab_needs.py").write_text("import mylab_other_kernels\n")
    (tmp_path / "mylab_broken.py").write_text("def (:\n")
    return tmp_path


@pytest.fixture
def without_kernels():
    """A later test imports the module anew."""
    yield
    kernels = sys.modules.pop("mylab_kernels_module", None)
    if kernels is not None:
        kernels.library._destroy()


@pytest.mark.parametrize("more", [(), ("--torch",)])
def test_the_graph_knows_its_operators(policylang, folder, more):
    outcome = policylang("check", "my.apl", "--graph", "my.graph", "--deny", "warnings", *more)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("checked 1 file on 1 graph: clean\n")


def test_without_the_graph_they_are_unknown(policylang, folder):
    found = json.loads(policylang("check", "my.apl", "--output-format", "json").out)["diagnostics"]
    assert [each["code"] for each in found][-1] == "APL101"
    assert "`--import`" in found[0]["help"]


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "my.apl", "--summary"),
        ("diff", "my.apl", "my.apl"),
        ("explain", "my.apl", "--node", "a"),
        ("explain", "my.apl", "--rule", "3"),
    ],
)
def test_in_every_command_that_plans(policylang, folder, command):
    outcome = policylang(*command, "--graph", "my.graph")
    assert (outcome.code, outcome.err) == (0, "")


def test_in_python(folder):
    facts = package.load_snapshot("my.graph")
    for graph in ("my.graph", Path("my.graph"), facts):
        assert package.check("my.apl", graph=graph).diagnostics == ()
        assert len(package.load("my.apl", graph=graph).rules) == 3
    assert package.parse("save fused_mlp_backward", graph=facts).rules[0].text == "save fused_mlp_backward"
    with pytest.raises(package.PolicyMeaningError, match="fused_mlp"):
        package.load("my.apl")
    with pytest.raises(package.PolicyGraphError, match="nowhere"):
        package.load("my.apl", graph="nowhere.graph")


def test_a_namespace_that_the_graph_calls_may_hold_more(policylang, folder):
    """Nobody has seen its library, so that another of its names is a warning, with the near one that the graph has."""
    (folder / "my.apl").write_text("optional save mylab.fused_mpl, mylab.route\nsave fused_mpl\n")
    outcome = policylang("check", "my.apl", "--graph", "my.graph", "--torch", "--output-format", "json")
    found = json.loads(outcome.out)["diagnostics"]
    assert [(each["code"], each["message"].split("`")[1]) for each in found] == [
        ("APL102", "mylab.fused_mpl"),
        ("APL102", "mylab.route"),
        ("APL101", "fused_mpl"),
    ]
    assert [each["help"] for each in found if "did you mean" in each["help"]] == [
        "did you mean `mylab.fused_mlp`?",
        "did you mean `fused_mlp`?",
    ]


def test_a_module_that_is_named_registers_more(policylang, folder, without_kernels):
    (folder / "my.apl").write_text("save mylab_kernels.fused_moe, fused_moe\n")
    assert policylang("check", "my.apl").code == 1
    outcome = policylang("check", "my.apl", "--import", "mylab_kernels_module", "--output-format", "json")
    assert (outcome.code, json.loads(outcome.out)["diagnostics"]) == (0, [])
    assert outcome.err == "the kernels say hello\n", "what a module prints does not stand in the output"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("mylab_nowhere.kernels", "there is no module `mylab_nowhere`"),
        ("json.kernels", "there is no module `json.kernels`"),
        ("mylab_fails", "`mylab_fails` cannot be imported: OSError: no GPU of generation 9"),
        ("mylab_ends", "`mylab_ends` cannot be imported: SystemExit: 3"),
        ("mylab_needs", "`mylab_needs` cannot be imported: ModuleNotFoundError: No module named 'mylab_other_kernels'"),
        ("mylab_broken", "`mylab_broken` cannot be imported: SyntaxError:"),
        ("./mylab_fails.py", "`./mylab_fails.py` is no module\n = help: did you mean `mylab_fails`?"),
        ("a b", "`a b` is no module\n = help: the name of a module, as Python imports it"),
        ("", "`` is no module"),
    ],
)
def test_a_module_that_cannot_be_imported(policylang, folder, module, said):
    outcome = policylang("check", "my.apl", "--import", module)
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.out.startswith(f"error[APL372]: {said}")
    assert "Traceback" not in outcome.out
    found = json.loads(
        policylang("plan", "my.apl", "--graph", "my.graph", "--import", module, "--output-format", "json").out
    )
    assert [each["code"] for each in found["diagnostics"]] == ["APL372"]


def test_where_it_failed(policylang, folder):
    outcome = policylang("diff", "my.apl", "my.apl", "--graph", "my.graph", "--import", "mylab_fails")
    assert (outcome.code, outcome.out) == (1, "")
    assert "mylab_fails.py:3: need()" in outcome.err
    assert "raised in" in outcome.err
    assert "mylab_fails.py:2" in outcome.err


def test_nothing_is_imported_unasked(policylang, folder):
    """Neither for the name of an operator nor for what a graph calls."""
    (folder / "mylab.py").write_text("raise RuntimeError('imported unasked')\n")
    assert policylang("check", "my.apl", "--graph", "my.graph").code == 0
    assert policylang("show", "my.graph").code == 0
    assert "mylab" not in sys.modules


@pytest.mark.parametrize(
    "command", ["check", "plan", "explain", "diff", "agree", "snapshot", "import", "import-torchtitan"]
)
def test_who_takes_it(policylang, command):
    assert "--import MODULE" in policylang(command, "--help").out


def test_a_policy_test_knows_the_operators_of_its_graph(policylang, folder):
    page = f"```graph\n{GRAPH}\n```\n\n```apl\nsave fused_mlp, mylab.fused_mlp in layers.0  # matches: a, a_1\n```\n"
    (folder / "test.md").write_text(page)
    assert policylang("test", "test.md").out == "tested 1 policy in 1 file: 1 claim, all hold\n"


def test_torchtitans_selectors_too(policylang, folder):
    selector = "layers.*::mylab.fused_mlp.default"
    assert "APL102" in policylang("import-torchtitan", selector).err
    outcome = policylang("import-torchtitan", selector, "--graph", "my.graph")
    assert "APL102" not in outcome.err
