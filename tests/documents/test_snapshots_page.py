"""The page on snapshots: an 8B policy is checked on a machine without a GPU, with the files that the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.documents.test_adopting import PIECES, run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "snapshots.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page speaks of a machine without a GPU")
def test_the_commands_of_the_page_print_what_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    ran = 0
    for piece in PIECES.finditer(PAGE):
        if piece["file"]:
            (tmp_path / piece["file"]).write_text(FILES[piece["file"]])
            continue
        for part in re.split(r"^\$ ", piece["console"], flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            code, said = run(command), capsys.readouterr()
            assert code == (1 if "# exits with 1" in command else 0), (command, said.out, said.err)
            assert without_bytes(said.out) == without_bytes(printed), command
            ran += 1
    assert ran == 2
    run("policylang plan sac.apl --graph qwen3_8b.graph")
    (shown,) = re.findall(r"begins with\n\n```\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert shown in capsys.readouterr().out


def without_bytes(text: str) -> str:
    """The length of a file depends on the release of xz."""
    return re.sub(r"[\d,]+ bytes", "bytes", text)


def test_the_files_of_the_page_are_those_of_the_walk():
    assert set(FILES) == {"qwen3_8b.py", "sac.apl"}
