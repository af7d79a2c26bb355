"""`policylang check`: what it prints, in which format, on which graphs, and what it exits with.

``python -m tests.cli.test_check`` writes the mistakes that are printed whole."""

import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

import policylang
import policylang as package
from policylang.commands.cli import main
from policylang.graph.facts import GraphKind
from policylang.graph.snapshot import write as write_graph
from policylang.language.operators import OperatorTable
from policylang.report.diagnostics import RENDERERS
from tests.support.flat_graphs import flat_graph
from tests.support.models import llama
from tests.support.textgraph import facts_of

GOOD = "save mm\n"
WARNING = "let unused = mm\nsave bmm\n"
BAD = "save mmm\nrecompute every 2nd mm per blok\n"


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


CLEAN = "checked 1 file: clean\n"
TREE = {"good.apl": GOOD, "bad.apl": BAD, "include.apl": 'include "other.apl"\nsave mm\n',
        "quoted.apl": 'include "fsdp"\n', "in/b.apl": GOOD, "in/deeper/a.apl": BAD, "in/n.txt": "text"}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        ("good.apl", 0, CLEAN), ("llama3_sac", 0, CLEAN), ("good.apl --output-format concise", 0, ""),
        ("good.apl --output-format github", 0, ""), ("good.apl --output-format json", 0, ['"diagnostics": []']),
        ("good.apl --output-format sarif", 0, ['"results": []']),
        ("bad.apl", 1, ["bad.apl:1:6", "bad.apl:2:", "`mmm`", "checked 1 file: 2 errors, 0 warnings\n"]),
        ("in", 1, ["checked 2 files: 2 errors"]), ("include.apl", 1, ["other.apl"]),
        ("good.apl nowhere.apl", 2, ["nowhere.apl", "checked 2 files: 1 error"]),
        ("llama3sac", 2, ["did you mean `llama3_sac`?"]), ("llama3sac.apl", 2, ["did you mean `llama3_sac.apl`?"]),
        ("quoted.apl", 1, ["= help: the bundled policy of that name is written `<fsdp>`"]),
    ],
)  # fmt: skip
def test_what_a_check_says(policylang, tmp_path, monkeypatch, asked: str, code: int, said: str | list[str]):
    """All errors of a file in one run; of a folder every policy below it; bundled ones by their names."""
    monkeypatch.chdir(tmp_path)
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path, name, text)
    outcome = policylang("check", *asked.split())
    assert (outcome.code, outcome.err) == (code, "")
    assert outcome.out == said if isinstance(said, str) else all(each in outcome.out for each in said)


def test_a_warning_fails_only_when_warnings_are_denied(policylang, tmp_path):
    path = write(tmp_path, "warning.apl", WARNING)
    allowed, denied = policylang("check", path), policylang("check", path, "--deny", "warnings")
    assert (allowed.code, denied.code) == (0, 1)
    assert allowed.out == denied.out
    assert "`unused`" in allowed.out
    assert "checked 1 file: 0 errors, 1 warning" in allowed.out


def test_the_standard_input(policylang, tmp_path, standard_input):
    standard_input(GOOD)
    assert policylang("check", "-") == (0, "checked 1 file: clean\n", "")
    standard_input(BAD)
    outcome = policylang("check", write(tmp_path, "good.apl", GOOD), "-")
    assert outcome.code == 1
    assert "--> <stdin>:1:6" in outcome.out
    assert "checked 2 files: 2 errors" in outcome.out
    standard_input(BAD)
    found = json.loads(policylang("check", "-", "--output-format", "json").out)["diagnostics"]
    assert {each["location"]["file"] for each in found} == {"<stdin>"}


@pytest.mark.parametrize(
    ("content", "code"), [(b"\xff\xfe", "APL001"), (b"# " + b"x" * (4 << 20), "APL002"), (b"", "APL207")]
)
def test_a_standard_input_that_is_no_policy(policylang, standard_input, content, code):
    standard_input(content)
    outcome = policylang("check", "-", "--output-format", "concise")
    assert f"[{code}]" in outcome.out
    assert "checked" not in outcome.out


def test_what_the_standard_input_includes_lies_in_the_current_folder(policylang, tmp_path, monkeypatch, standard_input):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "names.apl", "let big = mm\n")
    standard_input('include "names.apl"\nsave big\n')
    assert policylang("check", "-").out == "checked 1 file: clean\n"


@pytest.mark.parametrize("format", ["text", "concise", "json", "github"])
@pytest.mark.parametrize("case", ["missing", "empty folder", "binary"])
def test_what_cannot_be_read_comes_out_in_every_format(policylang, tmp_path, format, case):
    empty = tmp_path / "empty"
    empty.mkdir()
    path, code = {
        "missing": (str(tmp_path / "nowhere.apl"), 2),
        "empty folder": (str(empty), 2),
        "binary": (write(tmp_path, "binary.apl", bytes(range(256))), 1),
    }[case]
    outcome = policylang("check", path, "--output-format", format)
    assert outcome.code == code
    assert outcome.err == ""
    assert Path(path).name in outcome.out
    assert "APL" in outcome.out
    if format == "json":
        assert len(json.loads(outcome.out)["diagnostics"]) == 1
    if format == "github":
        assert all(line.startswith("::error") for line in outcome.out.splitlines())


def test_torch_knows_operators_that_the_manifest_does_not(process, policylang, tmp_path):
    path = write(tmp_path, "custom.apl", "save quantized.linear\n")
    without = process("-m", "policylang", "check", path)
    assert without.code == 0
    assert "`quantized`" in without.out
    assert policylang("check", path, "--torch") == (0, "checked 1 file: clean\n", "")


def test_a_reader_that_goes_away_is_not_an_error_message(tmp_path):
    path = write(tmp_path, "bad.apl", "save mmm\n" * 5000)
    command = [sys.executable, "-m", "policylang", "check", path]
    check = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    check.stdout.close()
    assert check.stderr.read() == b""
    check.stderr.close()
    assert check.wait(timeout=120) != 101


LINES = """offload mm
recompute every 2nd mm per graph
fuse all_gather chains
overlap all_gather
prefetch all_gather 1 block ahead
"""


@pytest.mark.parametrize(
    ("path", "lines"), [("eager", [2, 3, 4]), ("hook", [1, 3, 4, 5]), ("half", [1]), ("joint", []), ("flat", [])]
)
def test_a_path_without_a_graph_is_compared_with_what_it_can_do(policylang, tmp_path, path, lines):
    file = write(tmp_path, "asks.apl", LINES)
    outcome = policylang("check", file, "--path", path, "--output-format", "concise")
    found = [line for line in outcome.out.splitlines() if "APL306" in line]
    assert sorted(int(line.split(":")[1]) for line in found) == lines
    assert outcome.code == bool(lines)
    assert f"checked 1 file for the path {path}, without a graph" in policylang("check", file, "--path", path).out


GRAPH = """
    %x = input
    %w = parameter
    %mm = aten.mm.default(%x, %w) layers.0 bytes=256
    %sin = aten.sin.default(%mm) layers.0 bytes=256
    %mm_1 = aten.mm.default(%sin, %w) layers.1 bytes=256
    ---
    %b = aten.mul.Tensor(%mm_1, %sin)
    %c = aten.mul.Tensor(%b, %mm)
    output(%mm_1, %c)
"""
OTHER = GRAPH.replace("aten.sin", "aten.cos")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_graph(facts_of(GRAPH), "sin.graph")
    write_graph(facts_of(OTHER), "cos.graph")
    return tmp_path


def policy(folder: Path, text: str) -> str:
    (folder / "p.apl").write_text(text)
    return "p.apl"


def test_a_policy_that_fits_and_one_that_does_if_warnings_are_allowed(policylang, folder):
    path = policy(folder, "blocks layers.*\nrecompute everything\nsave mm\nexpect saved <= 512 B\n")
    held = "line     expectation            found\np.apl:4  saved <= 512 B  holds  512 B\n\n"
    assert policylang("check", path, "--graph", "sin.graph") == (0, f"{held}checked 1 file on 1 graph: clean\n", "")
    exception = policy(folder, "recompute everything\nsave mm\nrecompute mm in layers.0\n")
    assert "clean" in policylang("check", exception, "--graph", "sin.graph").out, "an exception is no conflict"
    path = policy(folder, "save mm\nrecompute everything\n")
    assert policylang("check", path, "--graph", "sin.graph", "--deny", "warnings").code == 1


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("save mm\nsave bmm\n", 1, "error[APL301]: `save bmm` matches nothing in this graph"),
        ("save mm\nrecompute everything\n", 0, "warning[APL303]: `save mm` decides nothing"),
        ("save mm\nexpect saved < 512 B\n", 1, "error[APL305]: `expect saved < 512 B` does not hold"),
        ("save everything\nexpect peak <= 10 B\n", 1, "error[APL305]: `expect peak <= 10 B` does not hold"),
        ("blocks encoder.*\nsave mm\n", 1, "error[APL302]: `encoder.*` matches no module path"),
        ("must_save mm\nrecompute mm in layers.1\n", 0, "warning[APL314]: `must_save mm` loses 1 of its 2 nodes"),
        ("save mm in first 40% of blocks\n", 1, "error[APL369]: `first 40% of blocks` of `save mm in first 40%"),
        ("save mm\nexpect saved <= 60% of forward\n", 1, "does not hold: at least 66.7%"),
        ("recompute sin\nexpect recomputed operators < 33%\n", 1, "does not hold: at least 33.3%"),
        ("save mm\nexpect saved > 600 B\n", 0, "note[APL315]: `expect saved > 600 B` cannot be checked on a snapshot"),
    ],
)
def test_what_only_a_graph_can_tell(policylang, folder, text, code, said):
    path = policy(folder, text)
    assert "clean" in policylang("check", path).out
    outcome = policylang("check", path, "--graph", "sin.graph")
    assert outcome.code == code, outcome.out
    assert said in outcome.out


def test_a_name_that_people_use_is_told_once(policylang, folder):
    path = policy(folder, "save linear\n")
    told = "note[APL150]: graphs of a step seldom hold `linear`: it is traced as `mm` or `addmm`"
    assert told in policylang("check", path).out
    outcome = policylang("check", path, "--graph", "sin.graph")
    assert "APL150" not in outcome.out
    assert "linear: 0 nodes; it is traced as `mm` (2 nodes) here" in outcome.out


def test_several_graphs_each_say_which_they_are(policylang, folder):
    path = policy(folder, "save mm\nsave sin\n")
    outcome = policylang("check", path, "--graph", "sin.graph", "--graph", "cos.graph")
    assert outcome.code == 1
    assert outcome.out.count("error[APL301]") == 1
    assert "= on `cos.graph`" in outcome.out
    assert "checked 1 file on 2 graphs: 1 error" in outcome.out


def test_of_the_graphs_of_one_model_a_rule_has_to_match_in_one(policylang, folder):
    graphs = ["--graph", "sin.graph", "--graph", "cos.graph", "--one-model"]
    assert policylang("check", policy(folder, "save mm\nsave sin\n"), *graphs).code == 0
    outcome = policylang("check", policy(folder, "save mm\nsave bmm\n"), *graphs)
    assert outcome.code == 1
    assert "matches nothing in any of the 2 graphs of this model" in outcome.out


@pytest.mark.parametrize(("content", "code"), [(b"nonsense", 1), (None, 2)])
def test_a_file_that_is_no_snapshot(policylang, folder, content, code):
    if content is not None:
        (folder / "bad.graph").write_bytes(content)
    outcome = policylang("check", policy(folder, "save mm\n"), "--graph", "bad.graph")
    assert outcome.code == code
    assert "`bad.graph`" in outcome.out


def test_the_path_is_what_the_graph_is_unless_it_is_said(policylang, folder):
    flat = facts_of(GRAPH, kind=GraphKind.FLAT)
    write_graph(flat, "flat.graph")
    path = policy(folder, "save mm\nleave sin\nexpect every sin saved\n")
    assert policylang("check", path, "--graph", "flat.graph").code == 0
    outcome = policylang("check", path, "--graph", "flat.graph", "--path", "joint")
    assert "APL315" in outcome.out, "there PyTorch's partitioner decides"


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("offload mm", "eager", []), ("offload mm", "hook", ["APL306"]), ("offload mm", "joint", []),
        ("optional fuse all_gather chains\nsave mm", "eager", ["APL306"]),
        ("recompute every 2nd mm per graph", "eager", ["APL306"]), ("recompute every 2nd mm per graph", "joint", []),
        ("undecided -> auto\nsave mm", "eager", []), ("save mm\nsave cos", "eager", ["APL301"]),
        ("save mm\nsave cos", "joint", []), ("override save sin in block\nsave mm", "eager", []),
        ("save mm\nexpect saved <= 700 B", "eager", []), ("save mm\nexpect saved <= 600 B", "eager", ["APL305"]),
        ("save sin\nexpect every sin saved", "eager", []),
    ],
)  # fmt: skip
def test_what_a_path_would_refuse(policylang, folder, text, path, said):
    """Eager checkpoints see one block each: what lies outside them, here the `cos`, is nobody's, and what they hand on,
    here the `sin`, is kept."""
    graph = GRAPH.replace("    ---", "    %cos = aten.cos.default(%mm_1) norm bytes=100\n    ---")
    write_graph(facts_of(graph.replace("%mm_1, %sin)", "%cos, %sin)")), "norm.graph")
    outcome = policylang("check", policy(folder, f"blocks layers.*\n{text}\n"), "--graph", "norm.graph", "--path", path,
                         "--output-format", "json")  # fmt: skip
    found = json.loads(outcome.out)["diagnostics"]
    assert [each["code"] for each in found if each["severity"] == "error"] == said, found
    outside = "all of it lies outside the blocks, where an eager checkpoint decides nothing"
    assert all(outside in each["details"] for each in found if each["code"] == "APL301")
    assert package.check("p.apl", graph="norm.graph", path=path).errors == len(said)


def test_the_models_own_checkpoint_gives_way_to_eager_ones(policylang, folder):
    write_graph(facts_of(GRAPH.replace("layers.0 bytes", "layers.0 tag=MUST_SAVE bytes")), "tagged.graph")
    path = policy(folder, "blocks layers.*\nrecompute mm in layers.0\n")
    assert "APL307" in policylang("check", path, "--graph", "tagged.graph").out
    assert "clean" in policylang("check", path, "--graph", "tagged.graph", "--path", "eager").out


def test_expectations_that_hold_are_shown(policylang, folder):
    expected = "expect saved <= 512 B\nexpect every mm saved\nexpect saved > 1 TiB\n"
    path = policy(folder, "recompute everything\nsave mm\n" + expected)
    graphs = ("--graph", "sin.graph", "--graph", "cos.graph")
    lines = [" ".join(line.split()) for line in policylang("check", path, *graphs).out.splitlines()]
    at = lines.index("line expectation found on")
    assert lines[at + 1 : at + 6] == [
        "p.apl:3 saved <= 512 B holds 512 B sin.graph",
        "p.apl:4 every mm saved holds all 2 nodes saved sin.graph",
        "p.apl:3 saved <= 512 B holds 512 B cos.graph",
        "p.apl:4 every mm saved holds all 2 nodes saved cos.graph",
        "",
    ]
    found = json.loads(policylang("check", path, *graphs, "--output-format", "json").out)["expectations"]
    assert [(each["graph"], each["status"]) for each in found] == [
        (graph, status) for graph in ("sin.graph", "cos.graph") for status in ("held", "held", "failed")
    ]
    assert found[0]["found"] == "512 B"


def test_in_python(folder):
    path = policy(folder, "save mm\nsave bmm\n")
    for graph in ("sin.graph", ["sin.graph"], Path("sin.graph"), package.load_snapshot("sin.graph")):
        result = package.check(path, graph=graph)
        assert [found.code for found in result.diagnostics] == ["APL301"]
        (made,) = result.plans
        assert len(made.rules[0].matched) == 2


def test_a_real_step(folder):
    step = flat_graph(llama()).gm
    assert package.snapshot(step, "step.graph") == (Path("step.graph"),)
    result = package.check("torchtitan_full", graph="step.graph")
    assert result.errors == 0
    assert result.plans[0].facts.kind is GraphKind.FLAT


def test_a_policy_of_thousands_of_rules_ends_with_its_verdict(folder: Path, policylang) -> None:
    rules = [f"optional save mm in layers.{number}" for number in range(2_999)]
    code, out, _ = policylang("check", policy(folder, "\n".join([*rules, "save sin"])), "--graph", "sin.graph")
    assert (code, out) == (0, "checked 1 file on 1 graph: clean\n")


GOLDEN = Path(__file__).parent / "golden"
ENDING = {"json": "json", "sarif": "json", "junit": "xml"}
CASES = {
    "syntax": "policy p\nsave mm or\nrecompute every 2nd mm per blok\n",
    "name": "let big = mm\nlet big = bmm\nsave big, atention in block\n",
    "graph": "blocks layers.*\nrecompute everything\nmust_recompute mm\nsave mm in layers.0\nsave bmm in encoder.*\n"
    "expect saved <= 1 B\n",
    "include": 'include <fsdp>\ninclude "other.apl"\nsave mm\n',
}
TAGGED = """
    %x = input
    %w = parameter
    %mm = aten.mm.default(%x, %w) layers.0 shape=8x8 bytes=256
    %sin = aten.sin.default(%mm) layers.0 shape=8x8 bytes=256
    %mm_1 = aten.mm.default(%sin, %w) layers.1 shape=8x8 bytes=256
    %cos = aten.cos.default(%mm_1) layers.1 shape=8x8 bytes=256
    ---
    %b = aten.mul.Tensor(%cos, %mm_1)
    %c = aten.mul.Tensor(%b, %sin)
    %d = aten.mul.Tensor(%c, %mm)
    output(%cos, %d)
"""


def printed(case: str, form: str, folder: Path) -> str:
    """What the command prints in a folder that holds the case."""
    (folder / f"{case} error.apl").write_text(CASES[case], encoding="utf-8")
    write_graph(facts_of(TAGGED), folder / "small.graph")
    graph = ["--graph", "small.graph"] if case == "graph" else []
    out = StringIO()
    version = mock.patch("policylang.report.diagnostics.installed_version", return_value="1.2.3")
    # a torch that is loaded has more names to suggest
    operators = mock.patch("policylang.api.load.operators_at_hand", OperatorTable.bundled)
    with chdir(folder), redirect_stdout(out), version, operators:
        assert main(["check", f"{case} error.apl", "--output-format", form, *graph]) == 1
    return out.getvalue()


def golden(case: str, form: str) -> Path:
    return GOLDEN / f"{case}.{form}.{ENDING.get(form, 'txt')}"


@pytest.mark.parametrize("form", RENDERERS)
@pytest.mark.parametrize("case", CASES)
def test_every_format(case: str, form: str, tmp_path: Path) -> None:
    assert printed(case, form, tmp_path) == golden(case, form).read_text(encoding="utf-8")


@pytest.mark.parametrize("case", CASES)
def test_the_places_and_rules_of_sarif_are_those_of_the_text(case: str) -> None:
    (run,) = json.loads(golden(case, "sarif").read_text(encoding="utf-8"))["runs"]
    rules = run["tool"]["driver"]["rules"]
    text = CASES[case]
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        for place in result.get("locations", ()):
            region = place["physicalLocation"]["region"]
            start = sum(map(len, text.splitlines(keepends=True)[: region["startLine"] - 1])) + region["startColumn"] - 1
            assert start == region["charOffset"]


@pytest.mark.parametrize("case", CASES)
def test_the_mends_of_both_forms_for_machines_are_the_same_edits(case: str) -> None:
    found = json.loads(golden(case, "json").read_text(encoding="utf-8"))["diagnostics"]
    results = json.loads(golden(case, "sarif").read_text(encoding="utf-8"))["runs"][0]["results"]
    assert any(each["mends"] for each in found) or case == "include"
    for each, result in zip(found, results, strict=True):
        said = [
            [(c["location"]["start"]["offset"], c["location"]["end"]["offset"], c["text"]) for c in fix["changes"]]
            for fix in each["mends"]
        ]
        fixes = [[r for c in fix["artifactChanges"] for r in c["replacements"]] for fix in result.get("fixes", [])]
        places = [[(r["deletedRegion"], r["insertedContent"]["text"]) for r in fix] for fix in fixes]
        assert said == [
            [(at["charOffset"], at["charOffset"] + at["charLength"], text) for at, text in fix] for fix in places
        ]


def test_junit_has_a_case_for_each_file_and_passes_where_nothing_is_found(tmp_path: Path) -> None:
    files = {"good.apl": "save mm\n", "bad.apl": "save (mm\n", "part.apl": "save <&mm\n"}
    files["with.apl"] = 'include "part.apl"\nsave mm\n'
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    asked = ["good.apl", "bad.apl", "gone.apl", "with.apl", "llama3_sac"]
    out = StringIO()
    with chdir(tmp_path), redirect_stdout(out):
        assert main(["check", *asked, "--output-format", "junit"]) == 2
    suites = ElementTree.fromstring(out.getvalue())
    cases = {each.get("name"): each for each in suites.iter("testcase")}
    assert list(cases) == [*asked, "part.apl"]
    failed = {name for name, each in cases.items() if each.find("failure") is not None}
    assert failed == {"bad.apl", "gone.apl", "part.apl"}
    assert (suites.get("tests"), suites.get("failures")) == ("6", "3")
    found = cases["gone.apl"].find("failure")
    assert (found.get("type"), found.get("message")) == ("APL103", "there is no policy file `gone.apl`")
    assert "error[APL103]" in (found.text or "")


def test_every_finding_of_a_check_says_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.apl").write_text("save bmm\n")
    (tmp_path / "broken.graph").write_bytes(b"no graph")
    with chdir(tmp_path):
        write_graph(facts_of(TAGGED), "small.graph")
        on_graph = policylang.check("mine.apl", "gone.apl", graph=["broken.graph", "small.graph"])
        alone = policylang.check("mine.apl", "gone.apl", ".", path="eager")
    assert {each.file for each in on_graph.diagnostics} == {"broken.graph", "mine.apl", "gone.apl"}
    assert [each.file for each in alone.diagnostics] == ["gone.apl"]


if __name__ == "__main__":
    import tempfile

    for each in CASES:
        for name in RENDERERS:
            with tempfile.TemporaryDirectory() as folder:
                os.makedirs(GOLDEN, exist_ok=True)
                golden(each, name).write_text(printed(each, name, Path(folder)), encoding="utf-8")
