from __future__ import annotations

import json

import pytest

from policylang.graph.snapshot import write
from policylang.language.diagnostics import CODES
from policylang.language.operators import group_names
from tests.support.textgraph import facts_of


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_has_a_long_form(policylang, code):
    outcome = policylang("explain", code.lower())
    assert outcome.code == 0
    assert outcome.out.startswith(f"{code}: {CODES[code].title} (")
    assert " ".join(CODES[code].text.split()) in " ".join(outcome.out.split())


def test_the_list_of_codes(policylang):
    lines = policylang("explain").out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(CODES)


def test_an_unknown_code(policylang):
    outcome = policylang("explain", "APL10")
    assert outcome.code == 2
    assert "no diagnostic has the code `APL10`" in outcome.err
    assert "help: did you mean `APL" in outcome.err


def test_a_word(policylang):
    outcome = policylang("explain", "crosses  block")
    assert outcome.code == 0
    assert outcome.out == (
        "crosses block (predicate): A node of another block, or outside all blocks, reads it in the forward.\n\n"
        "    save everything in block where crosses block\n\nMore in docs/language.md, Properties.\n"
    )
    assert policylang("explain", "users").out.count("More in") == 2  # `users of mm`, and `where users > 1`


@pytest.mark.parametrize("word", group_names())
def test_a_group(policylang, word):
    outcome = policylang("explain", word)
    assert outcome.code == 0
    assert f"{word} (group): A group of operators that every policy knows." in outcome.out
    assert f"\n    let {word} = " in outcome.out
    assert "help: did you mean `attention`" in policylang("explain", "atention").err


def test_a_word_for_machines(policylang):
    found = json.loads(policylang("explain", "recompute", "--output-format", "json").out)
    assert found["word"] == "recompute"
    (meaning,) = found["meanings"]
    assert meaning == {
        "sense": "action",
        "text": "Free what the nodes compute after the forward, and recompute it in the backward where needed.",
        "example": "recompute everything in block",
        "section": "Rules",
    }


def test_a_misspelt_word(policylang):
    outcome = policylang("explain", "recompte")
    assert outcome.code == 2
    assert "help: did you mean `recompute`" in outcome.err


GRAPH = """
    %x = input
    %w = parameter
    %mm = aten.mm.default(%x, %w) layers.0 shape=8x8 bytes=256
    %sin = aten.sin.default(%mm) layers.0 shape=8x8 bytes=256
    %mm_1 = aten.mm.default(%sin, %w) layers.1 shape=8x8 bytes=256
    %split = aten.split.Tensor(%mm_1) layers.1 multi_output
    %piece = builtin.getitem(%split) layers.1 follows=split
    ---
    %b = aten.mul.Tensor(%piece, %sin)
    output(%mm_1, %b)
"""
POLICY = """\
blocks layers.*
recompute everything
save mm, sin
recompute every 2nd mm per graph
save mm in encoder.*
"""


@pytest.fixture
def explain(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.apl").write_text(POLICY)
    write(facts_of(GRAPH), "g.graph")
    return lambda *more: policylang("explain", "p.apl", "--graph", "g.graph", *more)


def test_a_node_and_every_rule_in_turn(explain):
    outcome = explain("--node", "mm")
    assert outcome.code == 0
    assert outcome.out == (
        "mm: aten.mm.default in layers.0\n"
        "  in block layers.0, 8×8, 256 B, 0 FLOP\n"
        "  save: p.apl:3 decided; the backward does not need it\n\n"
        "line     rule\n"
        "p.apl:2  recompute everything              overridden by p.apl:3: save mm, sin\n"
        "p.apl:3  save mm, sin                      decided\n"
        "p.apl:4  recompute every 2nd mm per graph  no match: `every 2nd per graph`: it is the 1st of 2 in the graph\n"
        "p.apl:5  save mm in encoder.*              no match: `in encoder.*`: it is in layers.0\n"
    )


def test_a_node_that_shares_a_decision(explain):
    found = json.loads(explain("--node", "piece", "--output-format", "json").out)
    assert (found["shares"], found["action"], found["operator"]) == ("split", "recompute", "builtin.getitem")
    assert [rule["standing"] for rule in found["rules"]] == ["decided", "no match", "no match", "no match"]
    assert found["rules"][2]["why"] == "`mm`: it is aten.split.Tensor"


def test_a_rule_and_its_parts(explain):
    outcome = explain("--rule", "3")
    assert outcome.code == 0
    assert outcome.out == (
        "p.apl:3: save mm, sin\n"
        "  matches 3, decides 2\n"
        "  1 overridden by p.apl:4: recompute every 2nd mm per graph\n\n"
        "what each part of it matches\n"
        "  mm: 2 nodes\n"
        "  sin: 1 node\n"
        "  or: 3 nodes\n\n"
        "what it decides\n"
        "  mm, sin\n"
    )
    parts = json.loads(explain("--rule", "p.apl:5", "--output-format", "json").out)["parts"]
    assert parts == ["mm: 2 nodes", "in encoder.*: 0 of them; nearest module paths: layers.0, layers"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--node", "mm_11"), "the graph has no node `mm_11`\nhelp: did you mean `mm_1`"),
        (("--node", "layers.O"), "the graph has no node `layers.O`\nhelp: did you mean `layers.0` or `layers`?"),
        (("--node", "{mm"), "the graph has no node `{mm`"),
        (("--node", "[xw]"), "no rule decides about any node that `[xw]` names: x, w\nhelp: rules decide about"),
        (("--node", "x"), "no rule decides about `x`, which is a graph input"),
        (("--node", "b"), "no rule decides about `b`, which is a backward node"),
        (("--rule", "1"), "no rule of the policy begins in line `1`\nhelp: its rules begin in 2, 3, 4, 5"),
        ((), "name what to explain of `p.apl`? a node, or a rule"),
    ],
)
def test_what_cannot_be_explained(explain, asked, said):
    outcome = explain(*asked)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("mm*", ["mm", "mm_1"]),
        ("layers.0", ["mm", "sin"]),
        ("layers.*", ["mm", "sin", "mm_1", "split", "piece"]),
        ("/layers.1", ["mm_1", "split", "piece"]),
        ("{sin,piece}", ["sin", "piece"]),
    ],
)
def test_several_nodes_by_a_glob_or_a_module(explain, asked, names):
    outcome = explain("--node", asked)
    assert (outcome.code, outcome.err) == (0, "")
    head, _, table = outcome.out.partition("\n\n")
    assert head == f"{asked}: {len(names)} nodes"
    assert [line.split()[0] for line in table.splitlines()[1:]] == names
    found = json.loads(explain("--node", asked, "--output-format", "json").out)
    assert [each["name"] for each in found["nodes"]] == names
    alone = json.loads(explain("--node", names[0], "--output-format", "json").out)
    for rule in alone["rules"]:
        rule["why"] *= rule["standing"] != "no match"
    assert found["nodes"][0] == alone, "each is explained as it is alone, but for why a rule does not match"


def test_what_becomes_of_several_nodes(explain):
    lines = [line.split() for line in explain("--node", "layers.*").out.splitlines()[2:5]]
    assert lines == [
        ["node", "operator", "module", "by"],
        ["mm", "aten.mm.default", "layers.0", "save,", "not", "needed", "p.apl:3", "decided"],
        ["sin", "aten.sin.default", "layers.0", "saved", "p.apl:3", "decided"],
    ]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("p.apl",), "`p.apl` is a policy, and what a policy decides is explained on a graph\n"
                     "help: policylang explain p.apl --graph GRAPH --node NAME (or --rule LINE)"),
        (("llama3_sac",), "`llama3_sac` is a policy"),
        (("nowhere.apl",), "`nowhere.apl` is a policy"),
        (("-",), "`-` is a policy"),
        (("lama",), "`lama` is neither a diagnostic code nor a word of the language nor a policy that is here"),
        (("p.apl", "--graph", "g.graph"), "name what to explain of `p.apl`? a node, or a rule\n"
                                          "help: policylang explain p.apl --graph GRAPH --node NAME (or --rule LINE)"),
        (("p.apl", "--node", "mm"), "a node or a rule is explained of a policy on a graph"),
    ],
)  # fmt: skip
def test_a_policy_without_what_it_takes(explain, policylang, asked, said):
    outcome = policylang("explain", *asked)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


def test_codes_for_machines(policylang):
    listed = json.loads(policylang("explain", "--output-format", "json").out)["codes"]
    assert [each["code"] for each in listed] == sorted(CODES)
    found = json.loads(policylang("explain", "APL301", "--output-format", "json").out)
    assert (found["title"], found["text"]) == (CODES["APL301"].title, CODES["APL301"].text)


def test_a_policy_with_errors(explain, tmp_path):
    (tmp_path / "p.apl").write_text("save mmm\n")
    outcome = explain("--node", "mm")
    assert outcome.code == 1
    assert "error[APL101]" in outcome.err
