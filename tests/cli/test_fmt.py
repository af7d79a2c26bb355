"""`policylang fmt`: what it writes, what it leaves alone, and what it exits with."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from policylang.language import files

MESSY = "save   mm;save bmm # both\n"
CLEAN = "save mm\nsave bmm  # both\n"


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    path = tmp_path / "messy.apl"
    path.write_text(MESSY)
    return path


def test_a_file_is_written_and_then_left_alone(policylang, messy):
    outcome = policylang("fmt", str(messy))
    assert outcome == (0, f"reformatted {messy}\n1 file: 1 formatted\n", "")
    assert messy.read_text() == CLEAN
    assert policylang("fmt", str(messy)) == (0, "1 file: 1 already formatted\n", "")


def test_check_and_diff_write_nothing(policylang, messy):
    checked = policylang("fmt", "--check", str(messy))
    assert checked == (1, f"would reformat {messy}\n1 file: 1 to format\n", "")
    diffed = policylang("fmt", "--diff", str(messy))
    assert diffed.code == 1
    assert "-save   mm;save bmm # both\n+save mm\n+save bmm  # both\n" in diffed.out
    assert diffed.err.endswith("1 file: 1 to format\n")
    assert messy.read_text() == MESSY


def test_a_folder_stands_for_every_policy_below_it(policylang, messy, tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "other.apl").write_text("save   mm")
    (tmp_path / "notes.txt").write_text("save   mm")
    assert policylang("fmt", str(tmp_path)).out.endswith("2 files: 2 formatted\n")
    assert (tmp_path / "notes.txt").read_text() == "save   mm"


def test_a_syntax_error_is_reported_and_the_file_untouched(policylang, messy, tmp_path):
    bad = tmp_path / "bad.apl"
    bad.write_text("save   mm or\n")
    outcome = policylang("fmt", str(bad), str(messy))
    assert outcome.code == 1
    assert "APL011" in outcome.err
    assert "bad.apl:1:" in outcome.err
    assert outcome.out.endswith("2 files: 1 formatted, 1 left alone\n")
    assert bad.read_text() == "save   mm or\n"
    assert messy.read_text() == CLEAN


@pytest.mark.parametrize("content", [bytes(range(256)), b"save mm\0", b"\xff"])
def test_a_file_that_is_not_text_is_untouched(policylang, messy, content):
    messy.write_bytes(content)
    outcome = policylang("fmt", str(messy))
    assert outcome.code == 1
    assert "APL001" in outcome.err
    assert messy.read_bytes() == content


def test_a_file_that_is_not_there(policylang, tmp_path):
    outcome = policylang("fmt", str(tmp_path / "nowhere.apl"))
    assert outcome.code == 2
    assert "APL103" in outcome.err


def test_a_file_that_cannot_be_written_stays_as_it_was(policylang, messy, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    outcome = policylang("fmt", str(messy))
    assert outcome.code == 2
    assert "cannot be written: no space left on device" in outcome.err
    assert messy.read_text() == MESSY
    assert os.listdir(messy.parent) == [messy.name]


def test_line_ends_permissions_and_links_stay(policylang, messy, tmp_path):
    messy.write_bytes(MESSY.replace("\n", "\r\n").encode())
    messy.chmod(0o640)
    link = tmp_path / "link.apl"
    link.symlink_to(messy)
    assert policylang("fmt", str(link)).code == 0
    assert messy.read_bytes() == CLEAN.replace("\n", "\r\n").encode()
    assert stat.S_IMODE(messy.stat().st_mode) == 0o640
    assert link.is_symlink()


def test_standard_input_to_standard_output(process, messy):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "policylang", "fmt", "-"],
        input=MESSY.encode() + "# größe\n".encode(),
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, CLEAN.encode() + "# größe\n".encode(), b"")


def test_standard_input_that_cannot_be_read(policylang, monkeypatch):
    class Stdin:
        buffer = io.BytesIO(b"save   mm or\n")

    monkeypatch.setattr("sys.stdin", Stdin)
    outcome = policylang("fmt", "-", "--check")
    assert outcome.code == 1
    assert "<stdin>:1" in outcome.err


def test_standard_input_stands_alone(policylang, messy):
    assert policylang("fmt", "-", str(messy)).code == 2
