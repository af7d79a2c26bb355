"""`policylang plan`, `explain` and `diff`: what they print, exit with and write."""

import json
import re
from pathlib import Path

import pytest

from policylang.graph.snapshot import write
from policylang.language.diagnostics import CODES
from policylang.language.operators import group_names
from policylang.report.diagnostics import RENDERERS
from tests.support.orders import sharded
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input bytes=100
    %w = parameter bytes=1073741824
    %a0 = aten.mm.default(%x, %w) layers.0 bytes=1073741824 flops=4000 shape=8x8 dtype=float32
    %b0 = aten.sin.default(%a0) layers.0 bytes=1073741824 shape=8x8 dtype=float32
    %a1 = aten.mm.default(%b0, %w) layers.1 bytes=1073741824 flops=4000 shape=8x8 dtype=float32
    %b1 = aten.sin.default(%a1) layers.1 bytes=1073741824 shape=8x8 dtype=float32
    ---
    %t = tangent bytes=8
    %g1 = aten.mul.Tensor(%t, %b1, %a1) bytes=8
    %g0 = aten.mul.Tensor(%g1, %b0, %a0) bytes=8
    output(%b1, %g0)
"""
POLICY = "blocks layers.*\nrecompute everything in block\nsave mm in block\n"


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "small.graph"
    write(facts_of(GRAPH), path)
    return str(path)


@pytest.fixture
def policy(tmp_path):
    def make(text: str = POLICY) -> str:
        path = tmp_path / "mine.apl"
        path.write_text(text)
        return str(path)

    return make


def test_what_is_saved_and_recomputed_and_alive_at_the_peak_by_which_line(policylang, graph, policy):
    outcome = policylang("plan", policy(), "--graph", graph, "--values")
    assert (outcome.code, outcome.err) == (0, "")
    assert "policy mine: 4 forward values, 2 blocks" in outcome.out
    assert re.search(r"saved +2 GiB +4 GiB", outcome.out)
    assert "layers.0–1 ×2: 1 GiB saved, 1 GiB and 0 FLOP recomputed, each" in outcome.out
    assert re.search(r"saved +aten.mm.default +8×8 float32 +1 GiB +mine.apl:3", outcome.out)
    assert re.search(r"recomputed +aten.sin.default +8×8 float32 +1 GiB +mine.apl:2", outcome.out)
    assert "alive at the peak, 5 GiB: at g1, step 6 of 8, in the backward" in outcome.out
    assert re.search(r"1 GiB +20% +a1 +aten.mm.default +layers.1 +saved +mine.apl:3 +3–6", outcome.out)
    assert re.search(r"1 GiB +20% +w +parameter +start–end", outcome.out)
    assert re.search(r"2 GiB +40% +2 +saved +mine.apl:3 +save mm in block", outcome.out)

    document = json.loads(policylang("plan", policy(), "--graph", graph, "--output-format", "json").out)
    found = document["at_peak"]
    assert found["bytes"] == max(document["with"]["peak"][half] for half in ("forward", "backward"))
    assert found["bytes"] == sum(each["bytes"] for each in found["values"]) + found["rest_bytes"]
    assert found["bytes"] == sum(each["bytes"] for each in found["shares"])
    assert [value["name"] for value in found["values"][:4]] == ["w", "a0", "a1", "b1"]
    assert found["values"][1]["made"] == {"step": 1, "node": "a0", "half": "forward", "again": False}
    assert found["values"][1]["source"].endswith("mine.apl:3")


def test_json_is_one_document_with_what_each_rule_is_worth(policylang, graph, policy):
    """Without `save mm` both products run twice; without the ground rule the two sines are kept."""
    outcome = policylang("plan", policy(), "--graph", graph, "--output-format", "json")
    found = json.loads(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert found["with"]["saved_bytes"] == 2 << 30
    assert found["without"]["saved_bytes"] == 4 << 30
    (group,) = found["groups"]
    assert group["blocks"] == ["layers.0", "layers.1"]
    assert [value["fate"] for value in group["values"]] == ["saved", "recomputed"]
    assert found["diagnostics"] == []
    ground, save = found["rules"]
    assert (save["worth"]["saved_bytes"], save["worth"]["recomputed_flops"]) == (2 << 30, -8000)
    assert (save["worth"]["verdict"], save["worth"]["flops_per_gib"]) == ("buys FLOPs", 4000)
    assert (ground["worth"]["saved_bytes"], ground["worth"]["recomputed_flops"]) == (-(2 << 30), 0)
    assert (ground["worth"]["verdict"], ground["worth"]["flops_per_gib"]) == ("frees memory", None)


def test_what_is_left_to_pytorch_counts_as_saved_and_is_told(policylang, graph, policy):
    outcome = policylang("plan", policy("save mm\n"), "--graph", graph)
    assert outcome.code == 0
    assert "2 GiB of what is saved is left to PyTorch's partitioner" in outcome.out


def test_a_plan_without_options_fits_a_screen(policylang):
    graph = str(Path(__file__).parents[2] / "docs" / "graphs" / "llama3_8b.graph")
    out = policylang("plan", "llama3_sac", "--graph", graph, "--width", "80").out
    assert len(out.splitlines()) <= 45
    assert "\nmodel.layers.0–30 ×31: 497 MiB saved, " in out
    assert "aten." not in out
    assert out.endswith("\nevery value: --values; as a page: --html plan.html\n")


EXPECTING = POLICY + "expect saved <= 3 GiB\nexpect recomputed flops <= 1%\nexpect every mm recomputed\n"


def test_expectations_with_what_was_found(policylang, graph, policy):
    out = policylang("plan", policy(EXPECTING), "--graph", graph).out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    at = lines.index("line expectation found")
    assert lines[at + 1 : at + 4] == [
        "mine.apl:4 saved <= 3 GiB holds 2 GiB",
        "mine.apl:5 recomputed flops <= 1% holds 0%",
        "mine.apl:6 every mm recomputed does not hold 2 of 2 nodes not recomputed",
    ]


def test_a_summary(policylang, graph, policy):
    whole = policylang("plan", policy(EXPECTING), "--graph", graph)
    short = policylang("plan", policy(EXPECTING), "--graph", graph, "--summary")
    assert short.code == whole.code == 1
    assert whole.out.startswith(short.out.rstrip("\n"))
    assert "worst moment" in short.out
    assert "layers.0" not in short.out
    found, all_of_it = (
        json.loads(policylang("plan", policy(EXPECTING), "--graph", graph, "--output-format", "json", *more).out)
        for more in (["--summary"], [])
    )
    assert "groups" not in found
    assert [each["worth"] for each in found["rules"]] == [None, None]
    for same in ("with", "without", "expectations", "diagnostics", "digest"):
        assert found[same] == all_of_it[same]


def test_a_plan_of_the_standard_input(policylang, graph, standard_input):
    standard_input(POLICY)
    outcome = policylang("plan", "-", "--graph", graph, "--values")
    assert outcome.code == 0
    assert re.search(r"saved +aten.mm.default +8×8 float32 +1 GiB +<stdin>:3", outcome.out)


def test_errors_between_policy_and_graph_are_printed_with_the_plan(policylang, graph, policy):
    outcome = policylang("plan", policy(POLICY + "save bmm\n"), "--graph", graph)
    assert outcome.code == 1
    assert outcome.out.startswith("error[APL301]")
    assert "layers.0–1 ×2" in outcome.out


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize(("case", "code"), [("syntax", 1), ("no policy", 2), ("no graph", 2), ("foreign graph", 1)])
def test_what_cannot_be_read(policylang, graph, policy, tmp_path, format, case, code):
    (tmp_path / "foreign.graph").write_text("a graph, it says")
    name = policy("save mm or\n" if case == "syntax" else POLICY)
    name = str(tmp_path / "nowhere.apl") if case == "no policy" else name
    where = {"no graph": "nowhere.graph", "foreign graph": "foreign.graph"}.get(case, "small.graph")
    outcome = policylang("plan", name, "--graph", str(tmp_path / where), "--output-format", format)
    assert "APL" in outcome.out
    assert outcome.err == ""
    assert outcome.code == code
    if format == "json":
        assert json.loads(outcome.out)["diagnostics"]


def test_the_page_is_written(policylang, graph, policy, tmp_path):
    out = tmp_path / "plan.html"
    outcome = policylang("plan", policy(), "--graph", graph, "--html", str(out))
    assert (outcome.code, outcome.err) == (0, f"wrote {out}\n")
    assert "<title>mine on small.graph</title>" in out.read_text()


def test_the_trace_is_written_where_there_is_a_device(policylang, graph, policy, tmp_path):
    out = str(tmp_path / "step.json")
    asked = ("plan", policy(), "--graph", graph, "--trace", out)
    for more, said in (
        ((), "a trace has times, and no device is given\nhelp: name one with `--device`"),
        (("--device", "h100-sxm", "--path", "eager"), "does not run in the order of its graph"),
    ):
        outcome = policylang(*asked, *more)
        assert outcome.code == 2
        assert said in outcome.err
    outcome = policylang(*asked, "--device", "h100-sxm")
    assert (outcome.code, outcome.err) == (0, f"wrote {out}\n")
    events = json.loads(Path(out).read_text(encoding="utf-8"))["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X", "C"}


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_code_has_a_long_form(policylang, code):
    outcome = policylang("explain", code.lower())
    assert outcome.code == 0
    assert outcome.out.startswith(f"{code}: {CODES[code].title} (")
    assert " ".join(CODES[code].text.split()) in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("APL10", "no diagnostic has the code `APL10`\nhelp: did you mean `APL"),
        ("recompte", "\nhelp: did you mean `recompute`"),
        ("atention", "\nhelp: did you mean `attention`"),
    ],
)
def test_a_misspelt_word(policylang, word, said):
    outcome = policylang("explain", word)
    assert outcome.code == 2
    assert said in outcome.err


def test_a_word(policylang):
    outcome = policylang("explain", "crosses  block")
    assert outcome.code == 0
    assert outcome.out == (
        "crosses block (predicate): A node of another block, or outside all blocks, reads it in the forward.\n\n"
        "    save everything in block where crosses block\n\nMore in docs/language.md, Properties.\n"
    )
    assert policylang("explain", "users").out.count("More in") == 2  # `users of mm`, and `where users > 1`
    found = json.loads(policylang("explain", "recompute", "--output-format", "json").out)
    assert found["word"] == "recompute"
    (meaning,) = found["meanings"]
    assert meaning == {
        "sense": "action",
        "text": "Free what the nodes compute after the forward, and recompute it in the backward where needed.",
        "example": "recompute everything in block",
        "section": "Rules",
    }


@pytest.mark.parametrize("word", group_names())
def test_a_group(policylang, word):
    outcome = policylang("explain", word)
    assert outcome.code == 0
    assert f"{word} (group): A group of operators that every policy knows." in outcome.out
    assert f"\n    let {word} = " in outcome.out


EXPLAIN_GRAPH = """
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
EXPLAIN_POLICY = """\
blocks layers.*
recompute everything
save mm, sin
recompute every 2nd mm per graph
save mm in encoder.*
"""


@pytest.fixture
def explain(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.apl").write_text(EXPLAIN_POLICY)
    write(facts_of(EXPLAIN_GRAPH), "g.graph")
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


def test_the_list_of_codes(policylang):
    lines = policylang("explain").out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(CODES)
    listed = json.loads(policylang("explain", "--output-format", "json").out)["codes"]
    assert [each["code"] for each in listed] == sorted(CODES)
    found = json.loads(policylang("explain", "APL301", "--output-format", "json").out)
    assert (found["title"], found["text"]) == (CODES["APL301"].title, CODES["APL301"].text)


def test_a_policy_with_errors(explain, tmp_path):
    (tmp_path / "p.apl").write_text("save mmm\n")
    outcome = explain("--node", "mm")
    assert outcome.code == 1
    assert "error[APL101]" in outcome.err


PROFILE = """\
name = "slow"
[compute]
float16 = 1e6
[memory]
bandwidth = 1e9
[[network]]
bandwidth = 1e5
latency = 1e-3
"""
ORDER_POLICY = """\
blocks layers.*
undecided -> save
bucket all_gather per block
prefetch all_gather 1 block ahead
"""
"""Four layers of two products of 10 ms and two gathers of 8.5 ms each. As traced all gathers are waited for; of the
buckets, which take 16 ms, the first alone."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(sharded(4), "a.graph")
    (tmp_path / "slow.toml").write_text(PROFILE)
    (tmp_path / "mine.apl").write_text(ORDER_POLICY)
    (tmp_path / "plain.apl").write_text("blocks layers.*\nundecided -> save\n")
    return tmp_path


ON = ("--graph", "a.graph", "--device", "./slow.toml")


def test_a_plan_says_what_the_order_comes_to(policylang, folder):
    outcome = policylang("plan", "mine.apl", *ON)
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"order +as traced +as planned\nall-gather +8 +4\nexposed +68 ms \(45.9%\) +16 ms", outcome.out)
    assert re.search(r"mine.apl:3 +bucket all_gather per block +8 +8 +4 +\S+ ms\n", outcome.out)
    assert "mine.apl:3: each bucket checked on 4 ranks\n" in outcome.out
    assert re.search(r"mine.apl:4 +prefetch all_gather 1 block ahead +\d +3 ", outcome.out)
    assert re.search(r"\n +16 ms +16 ms +\S+ +\S+ of 2 .* layers.0 +data +mine.apl:3", outcome.out)


def test_what_is_expected_is_said_of_the_order_that_is_planned(policylang, folder):
    (folder / "expecting.apl").write_text(ORDER_POLICY + "expect exposed <= 20%\nexpect step time <= 100 ms\n")
    outcome = policylang("plan", "expecting.apl", *ON, "--summary")
    assert outcome.code == 0
    assert re.search(r"expecting.apl:5 +exposed <= 20% +holds +16.7%", outcome.out)
    assert re.search(r"expecting.apl:6 +step time <= 100 ms +holds +96 ms", outcome.out)


def test_a_collective_and_a_line_are_explained(policylang, folder):
    found = json.loads(policylang("explain", "mine.apl", *ON, "--node", "gather_v1", "--output-format", "json").out)
    assert (found["name"], found["collective"]["traced"]["step"]) == ("gather_v1", 10)
    out = policylang("explain", "mine.apl", *ON, "--rule", "4").out
    assert out.startswith("mine.apl:4: prefetch all_gather 1 block ahead\n")
    assert "exposed: 16 ms with it, 64 ms without" in out
    missed = policylang("explain", "mine.apl", *ON, "--rule", "9")
    assert (missed.code, "its rules begin in 3, 4" in missed.err) == (2, True)


def test_a_difference_in_order_is_one(policylang, folder):
    outcome = policylang("diff", "plain.apl", "mine.apl", *ON)
    assert outcome.code == 1
    assert "8 collectives joined into buckets: gather_w0, gather_v0" in outcome.out
    assert re.search(r"exposed +68 ms +16 ms +-52 ms", outcome.out)
    assert policylang("diff", "mine.apl", "mine.apl", *ON).code == 0


def test_what_is_exposed_before_there_is_a_policy(policylang, folder):
    assert "as traced: a step of 148 ms, exposed 68 ms (45.9%)" in policylang("show", "a.graph", *ON[2:]).out
    assert "as traced" not in policylang("show", "a.graph").out
    found = json.loads(policylang("show", "a.graph", *ON[2:], "--output-format", "json").out)
    assert found["exposed_seconds"] == pytest.approx(0.068)


@pytest.mark.parametrize("form", [*RENDERERS])
def test_what_is_wrong_with_an_order_fails_a_check(policylang, folder, form):
    """`overlap` without a device; a delay of scatters that there are none of; a path that keeps no order."""
    wrong = "blocks layers.*\nundecided -> save\noverlap all_gather\ndelay reduce_scatter 1 block\n"
    (folder / "wrong.apl").write_text(wrong)
    outcome = policylang("check", "wrong.apl", "--graph", "a.graph", "--output-format", form)
    assert outcome.code == 1
    assert "APL370" in outcome.out
    assert len(set(re.findall(r"APL\d+", outcome.out))) == 2
    if form in ("json", "sarif"):
        json.loads(outcome.out)
    outcome = policylang("check", "mine.apl", *ON, "--path", "hook", "--output-format", form)
    assert outcome.code == 1
    assert "asks for an order of collectives" in outcome.out


BLOCKS = 4
DIFF_GRAPH = "\n".join(
    [
        "%w = parameter",
        "%y = input",
        *(
            f"%mm_{n} = aten.mm.default(%{'y' if not n else f'sin_{n - 1}'}, %w) layers.{n} bytes=1024 flops=100\n"
            f"%sin_{n} = aten.sin.default(%mm_{n}) layers.{n} bytes=512 flops=7"
            for n in range(BLOCKS)
        ),
        "---",
        f"%b = aten.mul.Tensor(%sin_{BLOCKS - 1}, %mm_0)",
        *(f"%b_{n} = aten.mul.Tensor(%b, %mm_{n}, %sin_{n})" for n in range(BLOCKS)),
        f"output(%sin_{BLOCKS - 1}, %b)",
    ]
)
OLD = "blocks layers.*\nrecompute everything\nsave mm\n"


@pytest.fixture
def diff(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(facts_of(DIFF_GRAPH), "g.graph")

    def run(old: str, new: str, *more: str):
        Path("old.apl").write_text(old)
        Path("new.apl").write_text(new)
        return policylang("diff", "old.apl", "new.apl", "--graph", "g.graph", *more)

    return run


def test_a_refactor_that_changes_nothing(diff):
    outcome = diff(OLD, "blocks layers.*\nlet products = mm\nsave products\nrecompute everything except mm\n")
    assert outcome.code == 0
    assert outcome.out.startswith("no decision changes: 8 decisions are the same\n")


def test_what_changes_by_rule_and_block(diff):
    outcome = diff(OLD, OLD + "recompute mm in every 2nd block\n")
    assert outcome.code == 1
    assert outcome.out.startswith("2 of 8 decisions change\n\n2: ")
    assert "save -> recompute, 1 each in layers.1 and 1 more block" in outcome.out
    assert "  before  old.apl:3: save mm\n  after   new.apl:4: recompute mm in every 2nd block\n" in outcome.out
    assert "  nodes   mm_1, mm_3\n" in outcome.out
    found = json.loads(diff(OLD, OLD + "recompute mm in every 2nd block\n", "--output-format", "json").out)
    assert (found["same"], found["changed"], found["decisions"]) == (False, 2, 8)
    assert (found["old"]["saved_bytes"], found["new"]["saved_bytes"]) == (4 * 1024, 2 * 1024)
    assert found["new"]["recomputed_flops"] - found["old"]["recomputed_flops"] == 200
    assert found["old"]["peak_bytes"] > 0
    (change,) = found["changes"]
    assert change["names"] == ["mm_1", "mm_3"]
    assert change["blocks"] == {"layers.1": 1, "layers.3": 1}


def test_expectations_before_and_after(diff):
    old, new = OLD + "expect saved <= 4 KiB\n", OLD + "recompute mm in layers.0\nexpect saved <= 4 KiB\n"
    new += "expect peak <= 1 B\n"
    lines = [" ".join(line.split()) for line in diff(old, new).out.splitlines()]
    at = lines.index("expectation before after")
    assert lines[at + 1] == "saved <= 4 KiB holds: 4 KiB holds: 3 KiB"
    assert lines[at + 2].startswith("peak <= 1 B does not hold: ")
    assert "| `saved <= 4 KiB` | holds: 4 KiB | holds: 3 KiB |" in diff(old, new, "--output-format", "markdown").out
    found = json.loads(diff(old, new, "--output-format", "json").out)
    assert [each["status"] for each in found["new"]["expectations"]] == ["held", "failed"]
    assert "expectation" not in diff(OLD, OLD).out


def test_the_standard_input_is_one_of_the_two(policylang, diff, standard_input):
    diff(OLD, OLD)
    standard_input(OLD + "recompute mm in every 2nd block\n")
    outcome = policylang("diff", "old.apl", "-", "--graph", "g.graph")
    assert outcome.code == 1
    assert "  after   <stdin>:4: recompute mm in every 2nd block\n" in outcome.out
    twice = policylang("diff", "-", "-", "--graph", "g.graph")
    assert (twice.code, twice.out) == (2, "")
    assert "can be read once" in twice.err


def test_as_a_path_decides(diff):
    """What a block hands on is kept by eager checkpoints whatever a rule says."""
    changes = "recompute sin\nsave sin\n", "recompute sin\n"
    assert diff(*changes).out.startswith("4 of 8 decisions change")
    assert diff(*changes, "--path", "eager").out.startswith("1 of 8 decisions change")


def test_markdown_for_a_review(diff):
    outcome = diff(OLD, OLD + "save sin\n", "--output-format", "markdown")
    assert outcome.code == 1
    lines = outcome.out.splitlines()
    assert lines[0] == "**4 of 8 decisions change**"
    assert lines[-1] == (
        "| 4 | **recompute** old.apl:2 `recompute everything` | **save** new.apl:4 `save sin` "
        "| 1 each in layers.0 and 3 more blocks |"
    )
    assert "| saved | 4 KiB | 6 KiB | +2 KiB |" in lines


def test_what_is_left_to_the_partitioner_is_said(diff):
    outcome = diff("save mm\n", "save sin\n")
    assert "before and after: without what is left to PyTorch's partitioner" in outcome.out
    assert "after   undecided -> auto" in outcome.out


def test_what_does_not_fit_the_graph_is_compared_with_a_warning_and_what_cannot_be_read_is_not(diff):
    outcome = diff(OLD, OLD + "save bmm\n")
    assert outcome.code == 0
    assert outcome.err == "warning: `new.apl` has an error on this graph; `policylang check` lists them\n"
    outcome = diff(OLD, "save mmm\n")
    assert outcome.code == 1
    assert "error[APL101]" in outcome.err
