"""`policylang test`: what it prints, in which format, and what it exits with."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = """# A test

```graph
%x = input
%a = aten.mm.default(%x)
---
%b = aten.cos.default(%a)
```

```apl
save mm  # matches: NAME
```
"""


@pytest.fixture
def page(tmp_path: Path):
    def write(name: str, file: str = "test.md") -> str:
        (tmp_path / file).write_text(PAGE.replace("NAME", name))
        return str(tmp_path / file)

    return write


def test_all_is_as_it_is_claimed(policylang, page):
    assert policylang("test", page("a")) == (0, "tested 1 policy in 1 file: 1 claim, all hold\n", "")


def test_something_is_not(policylang, page):
    path = page("z")
    outcome = policylang("test", path)
    assert outcome == (
        1,
        f"""error[APL510]: it matches `a`
  --> {path}:11:12
   |
11 | save mm  # matches: z
   |            ^^^^^^^^^^
   = not among them: `z`
   = not expected: `a`
   = the graph has no node `z`

tested 1 policy in 1 file: 1 not as claimed
""",
        "",
    )


def test_a_folder_stands_for_the_pages_with_policies_below_it(policylang, page, tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    page("a", "deeper/other.md")
    (tmp_path / ".hidden").mkdir()
    page("z", ".hidden/not_this.md")
    (tmp_path / "notes.md").write_text("# Notes without a policy\n")
    page("a")
    assert policylang("test", str(tmp_path)).out == "tested 2 policies in 2 files: 2 claims, all hold\n"
    monkeypatch.chdir(tmp_path)
    assert policylang("test").code == 0


def test_coverage(policylang, page, tmp_path):
    (tmp_path / "mine.apl").write_text("save mm\n")
    outcome = policylang("test", page("a"), "--cover", str(tmp_path / "mine.apl"))
    assert outcome.code == 1
    assert "error[APL514]: no test exercises `save mm`" in outcome.out
    assert outcome.out.endswith("tested 1 policy in 1 file, 1 rule to cover: 1 not as claimed\n")


def test_what_cannot_be_read(policylang, tmp_path):
    assert policylang("test", str(tmp_path / "nowhere.md")).code == 2
    empty = policylang("test", str(tmp_path))
    assert empty.code == 2
    assert "APL" in empty.out


@pytest.mark.parametrize(
    ("files", "asked", "said"),
    [
        (("a.apl",), ".", "the folder `.` holds no policy tests\n = help: `policylang check .` checks its policies"),
        (("notes.md",), ".", "the folder `.` holds no policy tests\n = help: a policy test is a Markdown file"),
        (("a.apl",), "a.apl", "`a.apl` holds no policy to test\n = help: this is a policy: `policylang check a.apl`"),
        (("notes.md",), "notes.md", "`notes.md` holds no policy to test\n = help: write a policy in a fenced block"),
    ],
)
def test_nothing_to_test(policylang, tmp_path, monkeypatch, files, asked, said):
    monkeypatch.chdir(tmp_path)
    for file in files:
        (tmp_path / file).write_text("save mm\n")
    outcome = policylang("test", asked)
    assert (outcome.code, outcome.err) == (2, "")
    assert outcome.out.startswith(f"error[APL515]: {said}")
