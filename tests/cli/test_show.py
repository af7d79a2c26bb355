"""`policylang show` and `policylang list`: what is in a graph, and what comes along."""

import json
import re

import pytest
from attrs import evolve

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import GraphKind
from policylang.graph.snapshot import write
from policylang.language.files import bundled_policies, description_of
from policylang.planning.inspection.compare import overview
from policylang.report.plan_comparison import overview_json
from tests.graph.test_recorded import SMALL
from tests.support.textgraph import GraphBuilder, facts_of

GRAPH = """
    %x = input
    %w = parameter name=layers.0.wq.weight
    %e = aten.embedding.default(%x, %w) embed bytes=100
    %q = aten.mm.default(%e, %w) model.layers.0.wq bytes=1KiB flops=1000 shape=16x16 dtype=f32
    %t = aten.t.default(%q) model.layers.0 bytes=1KiB view
    %s = aten.split.Tensor(%t) model.layers.0 bytes=2KiB multi_output
    %p = builtin.getitem(%s) bytes=1KiB follows=s
    %q_1 = aten.mm.default(%p, %w) model.layers.1.wq bytes=1KiB flops=1000 shape=16x16 dtype=f32
    %f = mylab.fused.default(%q_1) model.norm bytes=64
    ---
    %g = tangent bytes=8
    %b = aten.mm.default(%g, %q_1, %q) model.layers.1.wq bytes=256
    output(%f, %b)
"""


@pytest.fixture
def graph(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(facts_of(GRAPH), "my.graph")
    return "my.graph"


def test_modules_by_operators(policylang, graph):
    outcome = policylang("show", graph)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == (
        "my.graph: joint graph of 12 nodes, 2 blocks\n"
        "3 input, 7 forward, 1 backward, 1 output\n\n"
        "block               forward  backward  bytes    FLOPs\n"
        "model.layers.0            4            3 KiB  1 KFLOP\n"
        "model.layers.1            1         1  1 KiB  1 KFLOP\n"
        "outside the blocks        2            164 B\n\n"
        "operator                forward  backward  bytes    FLOPs\n"
        "aten.mm.default               2         1  2 KiB  2 KFLOP\n"
        "aten.split.Tensor             1            2 KiB\n"
        "aten.embedding.default        1            100 B\n"
        "mylab.fused.default           1             64 B\n"
        "aten.t.default                1\n"
        "builtin.getitem               1\n\n"
        "module             operator                forward  bytes    FLOPs\n"
        "embed              aten.embedding.default        1  100 B\n"
        "model.layers.*.wq  aten.mm.default               2  2 KiB  2 KFLOP\n"
        "model.layers.0     aten.t.default                1\n"
        "                   aten.split.Tensor             1  2 KiB\n"
        "                   builtin.getitem               1\n"
        "model.norm         mylab.fused.default           1   64 B\n\n"
        "bytes and FLOPs are those of the forward; a view has no bytes of its own\n"
    )


def test_json_has_an_entry_a_node(policylang, graph):
    found = json.loads(policylang("show", graph, "--output-format", "json").out)
    nodes = {each["name"]: each for each in found["nodes"]}
    assert list(nodes) == ["x", "w", "e", "q", "t", "s", "p", "q_1", "f", "g", "b", "output"]
    assert nodes["q"] == {
        "name": "q", "operator": "aten.mm.default", "module": "model.layers.0.wq", "block": "model.layers.0",
        "phase": "forward", "bytes": 1024, "flops": 1000, "seconds": None,
    }  # fmt: skip
    assert (nodes["p"]["module"], nodes["p"]["block"]) == ("model.layers.0", "model.layers.0"), "its operator's"
    assert (nodes["x"]["operator"], nodes["x"]["block"], nodes["x"]["phase"]) == ("placeholder", None, "input")
    assert (nodes["b"]["phase"], nodes["output"]["phase"]) == ("backward", "output")
    assert found["phases"] == {"input": 3, "forward": 7, "backward": 1, "output": 1}
    blocks = [("model.layers.0", 4), ("model.layers.1", 1), (None, 2)]
    assert [(each["name"], each["forward"]) for each in found["blocks"]] == blocks


def with_uncounted(tmp_path, named):
    facts = facts_of(GRAPH)
    column = [named.get(name, "") for name in facts.names] if named is not None else ()
    write(evolve(facts, uncounted=column), tmp_path / "work.graph")
    return str(tmp_path / "work.graph")


def test_what_no_flop_formula_counts_is_named(policylang, tmp_path):
    """In the totals, in the tables and of each node; what the backward runs is in no figure of FLOPs."""
    fused = "mylab.fused.default"
    uncounted = {"q": "triton.scan", "f": fused, "b": "mylab.back.default"}
    graph = with_uncounted(tmp_path, uncounted)
    text = policylang("show", graph).out
    assert f"\n\nuncounted in the forward: {fused}, triton.scan (no FLOP formula, so counted as 0)\n\n" in text
    by_block = text.split("\n\n")[1].splitlines()[1:]
    assert [line.split("B  ")[1].strip() for line in by_block] == ["≥ 1 KFLOP", "1 KFLOP", "not counted"]
    (norm,) = (line for line in text.splitlines() if line.startswith("model.norm"))
    assert norm.endswith("64 B  not counted")
    found = json.loads(policylang("show", graph, "--output-format", "json").out)
    assert found["uncounted_operators"] == {fused: 1, "triton.scan": 1}
    assert found["total"]["uncounted_calls"] == 2
    assert {each["name"]: each["uncounted"] for each in found["nodes"] if "uncounted" in each} == uncounted
    assert [each["uncounted_calls"] for each in found["blocks"]] == [1, 0, 1]
    asked = policylang("show", graph, "--operator", "fused").out
    assert asked.endswith(f"uncounted in the forward: {fused} (no FLOP formula, so counted as 0)\n")
    assert "64 B  not counted\n" in asked
    assert "\n1 forward operator of 64 B and FLOPs not counted, 0 in the backward" in asked
    assert "uncounted" not in policylang("show", graph, "--operator", "t").out


def test_an_older_snapshot_does_not_say_what_is_counted(policylang, tmp_path):
    graph = with_uncounted(tmp_path, None)
    for asked in ((), ("--operator", "mm")):
        said = "\n\nwhich operators have no FLOP formula is not in this snapshot: an older policylang wrote it\n"
        assert said in policylang("show", graph, *asked).out
    found = json.loads(policylang("show", graph, "--output-format", "json").out)
    assert found["uncounted_operators"] is found["total"]["uncounted_calls"] is None


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        (("--module", "layers.0"), "q t s p"), (("--module", "layers.*"), "q t s p q_1 b"),
        (("--module", "/model.norm"), "f"), (("--module", "layers.*.wq", "--operator", "mm"), "q q_1 b"),
        (("--module", "norm", "--module", "embed"), "e f"), (("--operator", "mylab.*"), "f"),
        (("--operator", "aten.mm"), "q q_1 b"), (("--operator", "*.default"), "e q t q_1 f b"),
    ],
)  # fmt: skip
def test_names_of_nodes(policylang, graph, asked, names):
    outcome = policylang("show", graph, *asked)
    assert outcome.code == 0
    lines = outcome.out.split("\n\n")[1].splitlines()[1:]
    assert [line.split()[0] for line in lines] == names.split()
    found = json.loads(policylang("show", graph, *asked, "--output-format", "json").out)
    assert [each["name"] for each in found["nodes"]] == names.split()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--module", "layrs.0"), "no node is in a module `layrs.0`\nhelp: nearest module paths: "),
        (("--module", "layers..0"), "the module path `layers..0` has an empty component"),
        (("--operator", "fusd"), "no node calls an operator `fusd`\nhelp: did you mean `fused`?"),
        (("--operator", "{mm"), "the operator `{mm` has a `{` without its other half"),
        (("--module", "norm", "--operator", "mm"), "no node in these modules calls one of these operators"),
        (("--blocks", "encoder.*"), "`encoder.*` matches no module path of the graph"),
    ],
)
def test_what_is_not_there(policylang, graph, asked, said):
    outcome = policylang("show", graph, *asked)
    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err


@pytest.mark.parametrize("command", ["show", "plan", "check", "explain", "diff"])
def test_a_graph_in_every_form(policylang, tmp_path, command):
    """A snapshot, a recorded graph and a graph as text: what one command reads, all do."""
    (tmp_path / "p.apl").write_text("save mm\n")
    (tmp_path / "text.graph").write_bytes(GRAPH.replace("\n", "\r\n").encode("utf-8-sig"))
    (tmp_path / "recorded.json").write_text(json.dumps(SMALL))
    write(facts_of(GRAPH), tmp_path / "my.graph")
    policy = str(tmp_path / "p.apl")
    before = {"show": (), "explain": (policy, "--rule", "1", "--graph"), "diff": (policy, policy, "--graph")}.get(
        command, (policy, "--graph")
    )
    for name in ("my.graph", "text.graph", "recorded.json"):
        outcome = policylang(command, *before, str(tmp_path / name))
        assert (outcome.code, outcome.err) == (0, ""), name
    (tmp_path / "text.graph").write_text("%x = input\n%y = aten.mmm.default(%x)\n")
    outcome = policylang(command, *before, str(tmp_path / "text.graph"))
    assert outcome.code == 1
    assert "error[APL503]: there is no operator `aten.mmm.default`" in outcome.out + outcome.err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"save mm\n", b"{}", b"\x1f\x8b\x08", b"[1]"])
def test_what_is_no_graph(policylang, tmp_path, content):
    (tmp_path / "what.graph").write_bytes(content)
    outcome = policylang("show", str(tmp_path / "what.graph"))
    assert (outcome.code, outcome.out) == (1, "")
    assert re.match(r"error\[APL35\d\]: `.*what.graph`", outcome.err)


def test_an_empty_graph(policylang, tmp_path):
    (tmp_path / "e.graph").write_text("%x = input\n")
    assert policylang("show", str(tmp_path / "e.graph")).out.endswith("1 input\n")
    write(GraphBuilder().facts(GraphKind.FORWARD), tmp_path / "none.graph")
    found = json.loads(policylang("show", str(tmp_path / "none.graph"), "--output-format", "json").out)
    assert found["nodes"] == []


def test_blocks_as_a_policy_says_them_and_a_region_is_no_layer(policylang, tmp_path, graph):
    found = json.loads(policylang("show", graph, "--blocks", "model.*", "--output-format", "json").out)
    assert [each["name"] for each in found["blocks"]] == ["model.layers", "model.norm", None]
    write(facts_of(GRAPH.replace("shape=16x16", "region=3 shape=16x16")), tmp_path / "r.graph")
    out = policylang("show", str(tmp_path / "r.graph")).out
    assert "1 block (the model's own checkpoint regions)" in out
    assert "model.layers.0–1" not in out
    assert "model.layers.0" in policylang("show", str(tmp_path / "r.graph"), "--blocks", "layers.*").out


def test_a_large_graph_is_counted_in_one_pass():
    """The work is that of the nodes: every column is read a bounded number of times a row."""
    builder = GraphBuilder()
    before = (builder.add("x", "input", (), bytes=8),)
    for number in range(5_000):
        row = builder.add(f"n{number}", "aten.sin.default", before, bytes=8, module=f"layers.{number % 50}.act")
        before = (row,)
    facts = builder.facts(GraphKind.FORWARD)
    reads = 0

    class Counted(list):
        def __getitem__(self, index):
            nonlocal reads
            reads += 1
            return super().__getitem__(index)

    for column in ("phases", "targets", "modules", "bytes", "flops", "ops", "flags", "owners"):
        object.__setattr__(facts, column, Counted(getattr(facts, column)))
    blocks = blocks_of(facts)
    reads = 0
    found = overview(facts, blocks, range(len(facts)))
    text = "".join(overview_json("g", facts, blocks, found))
    assert reads < 30 * len(facts)
    assert len(json.loads(text)["nodes"]) == len(facts) == 5_001
    assert [sums.forward for _, sums in found.blocks] == [100] * 50


def test_the_bundled_policies(policylang):
    lines = policylang("list").out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [each.name for each in bundled_policies()]
    said = "llama3_sac             Selective checkpointing for decoder-only transformers: the policy to try first"
    assert said in lines
    assert all(len(line.split(None, 1)[1]) > 20 for line in lines)
    found = json.loads(policylang("list", "--output-format", "json").out)["policies"]
    assert [each["name"] for each in found] == [line.split()[0] for line in lines]
    for each in found:
        assert policylang("check", each["name"], "--deny", "warnings").code == 0


def test_what_a_policy_says_of_itself():
    assert description_of("# Keeps all.\n#\n# More.\nsave everything\n") == "Keeps all"
    assert description_of("# Keeps all of\n# it, twice.\nsave everything\n") == "Keeps all of it, twice"
    assert description_of("save everything\n# late\n") == ""
