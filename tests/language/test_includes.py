"""Files that include files, and files that cannot be read."""

import os
from pathlib import Path

import pytest

from policylang.language.diagnostics import Diagnostic
from policylang.language.loader import load_policy, parse_policy
from policylang.language.syntax import Action
from policylang.report.diagnostics import render_text


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    for name, text in files.items():
        path = Path(f"{name.replace('__', '/')}.apl")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def only(path: str) -> Diagnostic:
    (found,) = load_policy(path).diagnostics
    return found


def test_the_statements_of_another_file_stand_in_place() -> None:
    write(main='policy main\nsave mm\ninclude "parts/other.apl"\nsave add', parts__other="policy other\nrecompute bmm")
    loaded = load_policy("main.apl")
    assert loaded.diagnostics == ()
    assert loaded.policy.name == "main"
    assert [(rule.action, rule.source) for rule in loaded.policy.rules] == [
        (Action.SAVE, "main.apl:2"),
        (Action.RECOMPUTE, "parts/other.apl:2"),
        (Action.SAVE, "main.apl:4"),
    ]


def test_paths_are_relative_to_the_file_that_includes() -> None:
    write(
        main='include "a/one.apl"',
        a__one='include "two.apl"\ninclude "../three.apl"',
        a__two="save mm",
        three="save bmm",
    )
    loaded = load_policy("main.apl")
    assert [rule.source for rule in loaded.policy.rules] == ["a/two.apl:1", "three.apl:1"]


def test_what_is_included_without_a_word(in_folder: Path) -> None:
    write(main='include "names.apl"\ninclude "names.apl"\nsave big', names="let big = mm")
    assert load_policy("main.apl").diagnostics == (), "names are shared, and a file may come twice"
    (in_folder / "bom.apl").write_bytes(b"\xef\xbb\xbfpolicy bom\nsave mm")
    assert load_policy("bom.apl").diagnostics == ()
    assert parse_policy("include <prelude>\nsave matmul").diagnostics == ()
    loaded = parse_policy("recompute everything\ninclude <fsdp>")
    assert loaded.diagnostics == ()
    assert loaded.policy.rules[-1].source.startswith("<fsdp_reshard_always>:")


def test_a_bare_name_is_a_bundled_policy_unless_there_is_such_a_file() -> None:
    for name in ("llama3_sac", "llama3_sac.apl"):
        loaded = load_policy(name)
        assert loaded.policy.rules[0].source.startswith("<llama3_sac>:")
    write(llama3_sac="policy mine\nsave mm")
    loaded = load_policy("llama3_sac.apl")
    assert loaded.policy.name == "mine"
    write(plain="save mm")
    assert load_policy("plain.apl").policy.name == "plain", "without a name it is called like its file"


def test_a_cycle_shows_its_chain() -> None:
    write(a='include "b.apl"', b='save mm\ninclude "c.apl"', c='include "a.apl"')
    found = only("a.apl")
    write(itself='include "itself.apl"\nsave mm')
    assert only("itself.apl").message == "`itself.apl` includes itself: `itself.apl` → `itself.apl`"
    assert (found.code, found.message) == ("APL105", "`a.apl` includes itself: `a.apl` → `b.apl` → `c.apl` → `a.apl`")
    assert found.span.location == "c.apl:1"
    assert [each.span and each.span.location for each in found.related] == ["b.apl:2", "a.apl:1"]


def test_a_missing_include_shows_its_chain_and_the_nearest_file() -> None:
    write(main='include "part.apl"', part='include "partz.apl"', parts="save mm")
    found = only("main.apl")
    assert (found.code, found.message) == ("APL103", "there is no policy file `partz.apl`")
    assert "`parts.apl`" in found.help
    assert (found.span.location, found.span.text) == ("part.apl:1", 'include "partz.apl"')
    assert [(each.message, each.span and each.span.location) for each in found.related] == [
        ("included from here", "main.apl:1")
    ]


def test_a_name_that_no_file_has_or_can_have() -> None:
    (found,) = parse_policy("include <fdsp>\nsave mm").diagnostics
    assert (found.code, found.help) == ("APL103", "did you mean `fsdp`?")
    (found,) = parse_policy(f'include "{"a" * 5000}"').diagnostics
    assert found.code == "APL103"


def test_an_error_in_an_included_file_is_shown_there() -> None:
    write(main='include "other.apl"\nsave mn', other="save mm\nsave bm per block")
    found = load_policy("main.apl").diagnostics
    assert [(each.code, each.span and each.span.location) for each in found] == [
        ("APL014", "other.apl:2"),
        ("APL101", "main.apl:2"),
    ]


@pytest.mark.parametrize(
    ("levels", "text"), [(20, 'include "{}.apl"\ninclude "{}.apl"\nsave mm'), (40, 'include "{}.apl"')]
)
def test_includes_that_multiply_or_go_deep_are_bounded(levels: int, text: str) -> None:
    write(**{f"m{level}": text.replace("{}", f"m{level + 1}") for level in range(levels)}, **{f"m{levels}": "save mm"})
    assert only("m0.apl").code == "APL106"


def test_files_that_cannot_be_read(in_folder: Path) -> None:
    (in_folder / "folder").mkdir()
    (in_folder / "binary.apl").write_bytes(b"save mm\n\xff\xfe\x00")
    (in_folder / "huge.apl").write_bytes(b"save mm\n" * 600_000)
    write(llama="save mm")
    expected = {
        "folder": ("APL104", "`folder` is a folder"),
        "no_such.apl": ("APL103", "there is no policy file `no_such.apl`"),
        "binary.apl": ("APL001", "the file is not text: byte 0xff in line 2 is not UTF-8"),
        "huge.apl": ("APL002", "the file holds 4.6 MiB, more than the 4 MiB a policy may have"),
        "nul\0.apl": ("APL103", "there is no policy file `nul�.apl`"),
    }
    for name, told in expected.items():
        found = only(name)
        assert (found.code, found.message) == told
        assert render_text([found])
    assert only("lama.apl").help == "did you mean `llama.apl`?"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_not_waited_for(in_folder: Path) -> None:
    os.mkfifo(in_folder / "pipe.apl")
    assert only("pipe.apl").message == "`pipe.apl` is not a regular file"


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a user who may be refused")
def test_a_file_without_permission(in_folder: Path) -> None:
    write(secret="save mm")
    (in_folder / "secret.apl").chmod(0)
    assert only("secret.apl").message == "`secret.apl` cannot be read: permission denied"


def test_blocks_and_undecided_of_a_file_override_those_that_it_includes() -> None:
    write(base="blocks layers.*\nundecided -> save\nsave mm in block\n", other="blocks stages.*\n")
    own = 'blocks h.*\ninclude "base.apl"\nundecided -> auto\n'
    for text in (own, 'undecided -> auto\ninclude "base.apl"\ninclude "other.apl"\nblocks h.*\n'):
        write(mine=text)
        loaded = load_policy("mine.apl")
        assert loaded.diagnostics == ()
        assert (loaded.policy.blocks.glob, loaded.policy.undecided.fate) == ("h.*", "auto")
    write(mine='include "base.apl"\ninclude "other.apl"\n')
    assert only("mine.apl").code == "APL203"
