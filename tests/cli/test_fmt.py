"""`policylang fmt`, `test`, `agree` and `import-torchtitan`: what they write or print, and what they exit with."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from policylang.language import files

MESSY = "save   mm;save bmm # both\n"
CLEAN = "save mm\nsave bmm  # both\n"
BINARY = bytes(range(256)).decode("latin")


@pytest.fixture
def messy(tmp_path: Path) -> Path:
    path = tmp_path / "messy.apl"
    path.write_text(MESSY)
    return path


@pytest.mark.parametrize(
    ("before", "asked", "code", "out", "err", "after"),
    [
        (MESSY, "messy.apl", 0, "reformatted messy.apl\n1 file: 1 formatted\n", "", CLEAN),
        (CLEAN, "messy.apl", 0, "1 file: 1 already formatted\n", "", CLEAN),
        (MESSY, "--check messy.apl", 1, "would reformat messy.apl\n1 file: 1 to format\n", "", MESSY),
        (MESSY, "--diff messy.apl", 1, None, "1 file: 1 to format\n", MESSY),
        *((text, "messy.apl", 1, None, "APL001", text) for text in (BINARY, "save mm\0", "\xff")),
        (MESSY, "nowhere.apl", 2, None, "APL103", MESSY),
    ],
)  # fmt: skip
def test_what_becomes_of_a_file(policylang, messy, monkeypatch, before, asked, code, out, err, after):
    monkeypatch.chdir(messy.parent)
    messy.write_bytes(before.encode("latin"))
    outcome = policylang("fmt", *asked.split())
    assert outcome.code == code
    assert out is None or (outcome.out, outcome.err) == (out, err)
    assert outcome.err.endswith(err) if err.endswith("\n") else err in outcome.err
    assert messy.read_bytes() == after.encode("latin")
    assert ("-save   mm;save bmm # both\n+save mm\n+save bmm  # both\n" in outcome.out) is asked.startswith("--diff")


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


def test_a_file_that_cannot_be_written_stays_as_it_was(policylang, messy, monkeypatch):
    monkeypatch.setattr(files.os, "replace", Mock(side_effect=OSError(28, "No space left on device")))
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
    command = [sys.executable, "-m", "policylang", "fmt", "-"]
    done = subprocess.run(command, input=MESSY.encode() + "# größe\n".encode(), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, CLEAN.encode() + "# größe\n".encode(), b"")


def test_standard_input_stands_alone_and_may_be_no_policy(policylang, messy, standard_input):
    assert policylang("fmt", "-", str(messy)).code == 2
    standard_input("save   mm or\n")
    outcome = policylang("fmt", "-", "--check")
    assert outcome.code == 1
    assert "<stdin>:1" in outcome.err


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


def test_all_is_as_it_is_claimed_or_something_is_not(policylang, page):
    assert policylang("test", page("a")) == (0, "tested 1 policy in 1 file: 1 claim, all hold\n", "")
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


AGREE_PAGE = Path(__file__).resolve().parents[2] / "docs" / "agree.md"
MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def small():
    return Net(), lambda model, x: model(x).square().mean(), (torch.ones(4, 8),)

def broken():
    return Net(), lambda model, x: model(x, x), (torch.ones(4, 8),)
"""
POLICY = "policy mine\nblocks layers.*\nrecompute everything in block\nsave addmm in block\n"


@pytest.fixture
def agree(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("models_for_agree.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "models_for_agree", raising=False)

    def run(policy: str, *more: str, model: str = "models_for_agree:small"):
        Path("mine.apl").write_text(policy)
        return policylang("agree", "mine.apl", "--model", model, *more)

    return run


def test_paths_that_agree(agree):
    outcome = agree(POLICY)
    assert outcome.code == 0, outcome.out
    assert outcome.out.startswith("policy mine, one step, compared with the plain model: loss ")
    assert [line.split()[0] for line in outcome.out.splitlines()[2:6]] == ["path", "eager", "joint", "flat"]
    assert outcome.out.endswith("eager, joint and flat agree\n")
    assert "policylang agree: the joint path …\n" in outcome.err


def test_a_path_that_refuses(agree):
    outcome = agree("recompute everything\nsave every 2nd addmm per graph\n", "--path", "eager")
    assert outcome.code == 1
    assert "eager cannot apply it: APL306: mine.apl:2: " in outcome.out
    assert "Traceback" not in outcome.out + outcome.err


def test_json_of_the_paths_that_were_named(agree):
    outcome = agree(POLICY, "--path", "flat", "--output-format", "json")
    assert outcome.code == 0, outcome.err
    plain = json.loads(outcome.out)
    assert [path["path"] for path in plain["paths"]] == ["flat"]
    assert plain["agrees"] is True


NAME_ONE = "help: name a function as `package.module:function`"


@pytest.mark.parametrize(
    ("policy", "model", "code", "said"),
    [
        ("save attenton\n", "models_for_agree:small", 1, ["`attenton`"]),
        *((POLICY, model, 2, [NAME_ONE]) for model in ("models_for_agree:large", "no_such_module:small", "small")),
        (POLICY, "models_for_agree:broken", 1, ["agree: `models_for_agree:broken` does not run", "TypeError"]),
    ],
)
def test_a_policy_or_a_model_that_cannot_be_compared(agree, policy, model, code, said):
    outcome = agree(policy, model=model)
    assert (outcome.code, outcome.out) == (code, "")
    assert all(each in outcome.err for each in said)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows the figures of torch 2.13")
def test_the_page_shows_what_the_command_prints(policylang):
    """All but the loss and what it says of bits, which may be another machine's."""
    outcome = policylang("agree", "llama3_sac")
    assert outcome.code == 0, outcome.out
    page = AGREE_PAGE.read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(policy .*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert _figures(outcome.out) == _figures(shown)
    assert outcome.out.partition("decisions   ")[1:] == shown.partition("decisions   ")[1:]


def _figures(table: str) -> list[str]:
    """The rows of the paths, up to what is recomputed."""
    rows = re.findall(r"^(?:eager|joint|flat)  .*?FLOP", table, flags=re.MULTILINE)
    assert len(rows) == 3
    return rows


GRAPH = """
%x = input
%wo = aten.mm.default(%x) layers.0.attention.wo
%out = aten.sin.default(%wo) layers.0
%next = aten.sin.default(%out) layers.1
---
%g = aten.cos.default(%wo, %out, %next)
"""


@pytest.fixture
def graph(tmp_path: Path) -> str:
    (tmp_path / "small.graph").write_text(GRAPH)
    return str(tmp_path / "small.graph")


def test_the_policy_is_printed_or_written(policylang, tmp_path):
    printed = policylang("import-torchtitan", "layers.*.attention.wo::aten.mm.default")
    assert (printed.code, printed.err) == (0, "")
    assert "save aten.mm.default where module == layers.*.attention.wo\n" in printed.out
    file = tmp_path / "mine.apl"
    written = policylang("import-torchtitan", "layers.*.attention.wo::aten.mm.default", "-o", str(file))
    assert written == (0, "", f"wrote {file}\n")
    assert file.read_text() == printed.out
    assert policylang("check", str(file)).code == 0


def test_a_typo_that_torchtitan_would_say_nothing_of(policylang, graph, tmp_path):
    file = tmp_path / "mine.apl"
    selectors = "layers.*.atention.wo::aten.mm.default"
    outcome = policylang("import-torchtitan", selectors, "--graph", graph, "-o", str(file))
    assert outcome.code == 1
    assert "error[APL301]" in outcome.err
    assert "layers.0.attention.wo" in outcome.err
    assert not file.exists()


def test_a_wrong_string_is_underlined(policylang):
    outcome = policylang("import-torchtitan", "layers.*.wo::aten.mn.default")
    assert outcome.code == 1
    assert outcome.out == ""
    assert "--> full_recompute_save_ops:1:14" in outcome.err
    assert "did you mean" in outcome.err


def test_usage_and_files(policylang, tmp_path):
    good = "layers.*.wo::aten.mm.default"
    assert policylang("import-torchtitan", good, "--name", "two words").code == 2
    assert policylang("import-torchtitan", good, "--graph", str(tmp_path / "no.graph")).code == 2
    assert policylang("import-torchtitan", good, "-o", str(tmp_path / "no" / "mine.apl")).code == 2
