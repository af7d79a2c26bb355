"""The pages in docs/codes are what diagnostics are made of: each can be read, is raised, and stands in the index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from policylang.language import diagnostics
from policylang.language.diagnostics import CODES
from policylang.language.loader import parse_policy

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "codes"


@pytest.mark.parametrize("code", sorted(CODES))
def test_the_page_of_a_code_can_be_read(code: str) -> None:
    declared = CODES[code]
    assert declared.code == code
    assert declared.title[0].islower() or declared.title.startswith(("`", "TorchTitan"))
    assert declared.text[0] == "`" or declared.text[0].isupper()
    assert declared.text.endswith(".")


def test_every_code_in_the_sources_has_a_page_and_every_page_is_raised_or_says_that_it_no_longer_is() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "policylang").rglob("*.py"))
    raised = {code for source in sources for code in re.findall(r"""["'](APL\d{3})["']""", source)}
    assert raised - set(CODES) == set(), "write docs/codes/APLnnn.md"
    retired = {code for code in CODES if CODES[code].title.endswith(" (no longer raised)")}
    assert set(CODES) - raised == retired


def test_the_folder_holds_the_pages_and_an_index_of_them_all() -> None:
    from scripts.make_code_index import index

    assert {file.name for file in PAGES.iterdir()} == {"README.md", *(f"{code}.md" for code in CODES)}
    assert (PAGES / "README.md").read_text(encoding="utf-8") == index(), "run scripts/make_code_index.py"
    assert re.findall(r"^- \[(APL\d{3})\]", index(), re.M) == sorted(CODES)


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ("# APL999: a title\n\nText.\n", "no severity"),
        ("# APL999: a title\n\n*fatal*\n\nText.\n", "no such severity"),
        ("# APL998: a title\n\n*error*\n\nText.\n", "another code"),
        ("# APL999: a title\n\n*error*\n\nText.\n\nMore.\n", "two paragraphs"),
        ("# APL999: a title\n\n*error*\n\nText.\n\nWrong:\n\n```apl ignore\nsave mm\n", "an open fence"),
        ("# APL999: a title\n\n*error*\n\nText.\n\nWrong:\n\n```apl\nsave mmm\n```\n", "would be tested"),
    ],
    ids=lambda value: value if value[0] != "#" else "",
)
def test_a_page_in_another_form_is_named(page: str, wrong: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(diagnostics, "codes_folder", lambda: tmp_path)
    (tmp_path / "APL999.md").write_text(page, encoding="utf-8")
    with pytest.raises(ValueError, match=r"APL999\.md is not in the form"):
        CODES["APL999"]


def test_no_page_is_read_before_something_is_diagnosed() -> None:
    program = f"""
import sys
read = []
sys.addaudithook(lambda event, found: event == "open" and read.append(str(found[0])))
import policylang
from policylang.commands.cli import main
from policylang.language.diagnostics import CODES, diagnose
assert main(["check", "llama3_sac"]) == 0
pages = lambda: [name for name in read if name.startswith({f"{PAGES}{os.sep}"!r})]
assert not pages()
for _ in range(2):
    diagnose("APL301", "twice")
assert len(pages()) == 1
"""
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_what_is_no_code_has_no_page() -> None:
    for word in ("APL999", "README", "../codes/APL301", "apl301", "APL301.md", ""):
        assert word not in CODES


@pytest.mark.parametrize("code", [code for code in sorted(CODES) if code[3] in "012"])
def test_the_example_of_a_code_shows_it_and_its_mend_mends_it(code: str) -> None:
    declared = CODES[code]
    if declared.wrong:
        assert [each.code for each in parse_policy(declared.wrong).diagnostics] == [code]
    if declared.mended:
        assert parse_policy(declared.mended).diagnostics == ()
