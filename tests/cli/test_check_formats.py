"""A mistake of each kind in every output format, whole. ``python -m tests.cli.test_check_formats`` writes the files."""

from __future__ import annotations

import json
import os
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest

import policylang
from policylang.commands.cli import main
from policylang.graph.snapshot import write
from policylang.language.operators import OperatorTable
from policylang.report.diagnostics import RENDERERS
from tests.support.textgraph import facts_of

GOLDEN = Path(__file__).parent / "golden"
ENDING = {"json": "json", "sarif": "json", "junit": "xml"}
CASES = {
    "syntax": "policy p\nsave mm or\nrecompute every 2nd mm per blok\n",
    "name": "let big = mm\nlet big = bmm\nsave big, atention in block\n",
    "graph": "blocks layers.*\nrecompute everything\nmust_recompute mm\nsave mm in layers.0\nsave bmm in encoder.*\n"
    "expect saved <= 1 B\n",
    "include": 'include <fsdp>\ninclude "other.apl"\nsave mm\n',
}
GRAPH = """
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
    write(facts_of(GRAPH), folder / "small.graph")
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
        fixes = [
            [
                (r["deletedRegion"]["charOffset"], r["deletedRegion"]["charLength"], r["insertedContent"]["text"])
                for change in fix["artifactChanges"]
                for r in change["replacements"]
            ]
            for fix in result.get("fixes", [])
        ]
        assert [[(start, end - start, text) for start, end, text in fix] for fix in said] == fixes


def test_a_clean_policy_is_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "good.apl").write_text("save mm\n")
    out = StringIO()
    with chdir(tmp_path), redirect_stdout(out):
        assert main(["check", "good.apl", "--output-format", "sarif"]) == 0
    log = json.loads(out.getvalue())
    assert log["runs"][0]["results"] == []


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
        write(facts_of(GRAPH), "small.graph")
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
