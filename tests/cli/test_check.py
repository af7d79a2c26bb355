"""`policylang check`: what it prints, in which format, and what it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from policylang.language.resources import policies_folder

GOOD = "save mm\n"
WARNING = "let unused = mm\nsave bmm\n"
BAD = "save mmm\nrecompute every 2nd mm per blok\n"


def write(folder: Path, name: str, text: str | bytes) -> str:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_clean_file(policylang, tmp_path):
    outcome = policylang("check", write(tmp_path, "good.apl", GOOD))
    assert outcome == (0, "checked 1 file: clean\n", "")


def test_all_errors_of_a_file_in_one_run(policylang, tmp_path):
    outcome = policylang("check", write(tmp_path, "bad.apl", BAD))
    assert outcome.code == 1
    assert "bad.apl:1:6" in outcome.out
    assert "bad.apl:2:" in outcome.out
    assert "`mmm`" in outcome.out
    assert outcome.out.endswith("checked 1 file: 2 errors, 0 warnings\n")


def test_a_warning_fails_only_when_warnings_are_denied(policylang, tmp_path):
    path = write(tmp_path, "warning.apl", WARNING)
    allowed, denied = policylang("check", path), policylang("check", path, "--deny", "warnings")
    assert (allowed.code, denied.code) == (0, 1)
    assert allowed.out == denied.out
    assert "`unused`" in allowed.out
    assert "checked 1 file: 0 errors, 1 warning" in allowed.out


def test_a_folder_stands_for_every_policy_below_it(policylang, tmp_path):
    (tmp_path / "deeper").mkdir()
    write(tmp_path, "b.apl", GOOD)
    write(tmp_path / "deeper", "a.apl", BAD)
    write(tmp_path, "notes.txt", "not a policy")
    outcome = policylang("check", str(tmp_path))
    assert outcome.code == 1
    assert "checked 2 files: 2 errors" in outcome.out


def test_a_bundled_policy_by_its_bare_name(policylang):
    assert policylang("check", "llama3_sac").out == "checked 1 file: clean\n"


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
@pytest.mark.parametrize("case", ["missing", "empty folder", "syntax", "binary"])
def test_what_cannot_be_read_comes_out_in_every_format(policylang, tmp_path, format, case):
    empty = tmp_path / "empty"
    empty.mkdir()
    path, code = {
        "missing": (str(tmp_path / "nowhere.apl"), 2),
        "empty folder": (str(empty), 2),
        "syntax": (write(tmp_path, "syntax.apl", "save mm or\n"), 1),
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


def test_a_missing_include_is_an_error_of_the_file(policylang, tmp_path):
    outcome = policylang("check", write(tmp_path, "includes.apl", 'include "other.apl"\nsave mm\n'))
    assert outcome.code == 1
    assert "other.apl" in outcome.out


def test_an_unreadable_file_among_good_ones(policylang, tmp_path):
    outcome = policylang("check", write(tmp_path, "good.apl", GOOD), str(tmp_path / "nowhere.apl"))
    assert outcome.code == 2
    assert "nowhere.apl" in outcome.out
    assert "checked 2 files: 1 error" in outcome.out


@pytest.mark.parametrize("format", ["concise", "json", "github"])
def test_a_clean_file_in_the_formats_for_machines(policylang, tmp_path, format):
    outcome = policylang("check", write(tmp_path, "good.apl", GOOD), "--output-format", format)
    assert outcome.code == 0
    if format == "json":
        assert json.loads(outcome.out)["diagnostics"] == []
    else:
        assert outcome.out == ""


def test_torch_knows_operators_that_the_manifest_does_not(process, policylang, tmp_path):
    path = write(tmp_path, "custom.apl", "save quantized.linear\n")
    without = process("-m", "policylang", "check", path)
    assert without.code == 0
    assert "`quantized`" in without.out
    assert policylang("check", path, "--torch") == (0, "checked 1 file: clean\n", "")


def test_the_bundled_policies_are_clean(policylang):
    outcome = policylang("check", str(policies_folder()), "--deny", "warnings")
    assert outcome.code == 0, outcome.out


def test_a_reader_that_goes_away_is_not_an_error_message(tmp_path):
    path = write(tmp_path, "bad.apl", "save mmm\n" * 5000)
    check = subprocess.Popen(
        [sys.executable, "-m", "policylang", "check", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    check.stdout.close()
    assert check.stderr.read() == b""
    check.stderr.close()
    assert check.wait(timeout=120) != 101


def test_a_bundled_policy_that_is_misspelt_is_asked_for_by_its_name(policylang):
    assert "did you mean `llama3_sac`?" in policylang("check", "llama3sac").out
    assert "did you mean `llama3_sac.apl`?" in policylang("check", "llama3sac.apl").out


def test_a_bundled_policy_in_quotes(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.apl").write_text('include "fsdp"\nsave mm\n')
    assert "= help: the bundled policy of that name is written `<fsdp>`" in policylang("check", "p.apl").out


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
