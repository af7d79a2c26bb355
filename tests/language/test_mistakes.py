"""What is said of a statement that is wrong, the codes of it and their pages, and what mends it."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import strategies as st

from policylang.language import diagnostics
from policylang.language.diagnostics import CODES, Diagnostic, Fix, Severity, Source, Span, is_error, is_syntax
from policylang.language.lexer import split
from policylang.language.loader import load_policy, parse_policy
from policylang.language.mistakes import mistakes
from policylang.language.parser import parse_file
from policylang.report.diagnostics import render_text
from tests.language.test_fuzz import TEXTS as ANY_TEXTS
from tests.language.test_fuzz import WORDS
from tests.support.drawn import drawn

LINES = Path(__file__).with_name("mistakes.txt").read_text("utf-8").splitlines()
"""Each a statement with its underlined part in ⟦⟧, what is said, and the help where there is one."""

TEXTS = [re.sub("[⟦⟧]", "", line.split("  =>  ")[0]) for line in LINES]


def test_told() -> None:
    """One test of them all: a case costs a millisecond, and a test of its own several."""
    now = []
    for text in TEXTS:
        (found,) = parse_policy(text).diagnostics
        assert found.span is not None, text
        start, end = found.span.start, found.span.end
        marked = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
        said = (marked, f"{found.severity.value}[{found.code}]: {found.message}", found.help)
        now.append("  =>  ".join(filter(None, said)))
        printed = render_text([found]).replace(text, "")
        assert not re.search(r"__ANON|\$END|Token\(|EVERY_NTH|LPAR|\bNAME\b(?!`)|STRING", printed), text
    assert now == LINES


def test_every_row_is_told_of_some_statement() -> None:
    told = [line.split("  =>  ")[1] for line in LINES]
    for each in mistakes():
        message = re.sub(r"\\\{\w+\\\}", ".+", re.escape(each.message))
        assert any(re.fullmatch(rf"error\[APL\d+\]: {message}", said) for said in told), each.message


FILE = """sav mm
save mn
save (mm
save bmm per block
save add in layers..0; save add where bytes > 3 mib
x ->"""
COMMENTS = 'save mm // why; "because (\n-- and\nsave (\n  bmm,  // the second\n  add\n)\nsave adt'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("save mn\nsave mn in block\nrecompute mn, mn", [(1, "APL101"), (2, "APL101"), (3, "APL101"), (3, "APL101")]),
        ("save mylib.fused\nsave mylib.fused", [(1, "APL102"), (2, "APL102")]),
        (FILE, [(1, "APL012"), (2, "APL101"), (3, "APL007"), (4, "APL014"), (5, "APL112"), (5, "APL113"),
                (6, "APL011")]),
        ("save (mm in block\nrecompute (bmm)\nsave adt", [(1, "APL007"), (3, "APL101")]),
        ('save mm # ( " ; save bm\nsave bmm', []),
        (COMMENTS, [(1, "APL005"), (2, "APL005"), (4, "APL005"), (7, "APL101")]),
        ("save mm in /layers.*\nmm -> save", []),
        ("save (\n  mm, # the products\n  bmm\n) in layers 3..1", [(4, "APL010")]),
        ("save " + "mm, " * 3_000 + "where", [(1, "APL010")]),
    ],
    ids=[
        *("one mistake on each line", "one namespace on each line", "all errors in one run", "a parenthesis costs one"),
        *("a comment with marks", "comments of other languages", "a path and an arrow", "one of several lines", "long"),
    ],
)  # fmt: skip
def test_each_mistake_of_a_file_is_one_diagnostic_on_its_line(text: str, expected: list[tuple[int, str]]) -> None:
    found = parse_policy(text).diagnostics
    assert [(each.span and each.span.line, each.code) for each in found] == expected
    assert text != COMMENTS or found[0].help == 'write `# why; "because (`'


def test_a_byte_order_mark_tabs_and_line_ends_of_windows(tmp_path: Path) -> None:
    text = "\ufeffsave\tmm\r\nsave bmm # why\r\n"
    assert parse_policy(text).diagnostics == ()
    file = tmp_path / "windows.apl"
    file.write_bytes(text.encode("utf-8"))
    assert load_policy(file).diagnostics == ()


def test_control_characters_are_named_not_printed() -> None:
    (found,) = parse_policy("save \x1b[2Jmm").diagnostics
    assert (found.code, found.message) == ("APL005", "unexpected character U+001B")
    assert "\x1b" not in render_text([found])


@pytest.mark.parametrize("character", ["\x00", "\ud800"])
def test_text_that_is_not_text(character: str) -> None:
    (found,) = parse_policy(f"save mm\nsave {character}").diagnostics
    assert found.code == "APL001"
    assert found.span.line == 2


def errors(text: str) -> list[Diagnostic]:
    return [found for found in parse_policy(text).diagnostics if is_error(found)]


def mend_of(text: str) -> list[tuple[str, str]]:
    """Each mend of the first diagnostic of a text, and the text with it."""
    found = parse_policy(text).diagnostics[0]
    return [(fix.title, fix.applied(found.span.source)) for fix in found.fixes]


H100 = "did you mean `h100-sxm`?"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("save mm where bytes = 3", [("write `==`", "save mm where bytes == 3")]),
        ("save matmuls", [("did you mean `matmul`?", "save matmul"), ("did you mean `imatmul`?", "save imatmul")]),
        ("recompute every 2nd mm per blok", [("did you mean `block`?", "recompute every 2nd mm per block")]),
        ("save linear in block", [("write `(mm, addmm)`", "save (mm, addmm) in block")]),
        ("save linear  # why", [("write `mm, addmm`", "save mm, addmm  # why")]),
        ("save everything except nn.Linear", [("write `(mm, addmm)`", "save everything except (mm, addmm)")]),
        ("save (mm and bmm) in block", [("write `(mm, bmm)`", "save ((mm, bmm)) in block")]),
        ("save mm where bytes ≤ 3", [("write `<=`", "save mm where bytes <= 3")]),
        ("save mm // products", [("write `# products`", "save mm # products")]),
        ("undecided save", [("write `->` behind it", "undecided -> save")]),
        ("save the mm", [("leave `the` out", "save mm")]),
        ("save mm where is not viw", [("did you mean `is not view`?", "save mm where is not view")]),
        (
            "save mm up to 1 B per rank",
            [("leave `up to 1 B per rank` out", "save mm"), ("write `offload`", "offload mm up to 1 B per rank")],
        ),
        ("let a = mm\nsave bmm", [("remove the line", "save bmm")]),
        ("let a = mm; save bmm", [("remove the line", "save bmm")]),
        ("save bmm; let a = mm # why", [("remove the line", "save bmm # why")]),
        ("save bmm\r\nlet a = mm  # why\r\n", [("remove the line", "save bmm\r\n")]),
        ("save bmm\r\nlet a = mm", [("remove the line", "save bmm")]),
        ("save bmm\n  let a = (\n    mm)\nsave add", [("remove the line", "save bmm\nsave add")]),
        (
            "# on top\nsave mm\npolicy p",
            [("move it to the top", "# on top\npolicy p\nsave mm"), ("remove the line", "# on top\nsave mm")],
        ),
        ("save mm where bytes > 3 or bmm", [("write `(… where …) or bmm`", "save (mm where bytes > 3) or bmm")]),
        ("save aten.where", []),
        ("save where", [("write `aten.where`", "save aten.where")]),
        ("include <fsdq>", [("did you mean `<fsdp>`?", "include <fsdp>")]),
        ("device h10; expect step time < 1 s", [(H100, "device h100-sxm; expect step time < 1 s")]),
    ],
)  # fmt: skip
def test_what_is_written(text: str, expected: list[tuple[str, str]]) -> None:
    assert (mend_of(text) if parse_policy(text).diagnostics else []) == expected


def test_an_included_file_is_found_by_a_name_like_it(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "shared.apl").write_text("save mm\n")
    file = tmp_path / "mine.apl"
    file.write_text('include "others/share.apl"\n')
    (found,) = load_policy(file).diagnostics
    assert found.fixes[0].applied(found.span.source) == 'include "others/shared.apl"\n'


def test_a_name_that_is_written_twice_is_mended_in_both_places() -> None:
    found = parse_policy("save flsh_attn\nrecompute bmmm, add\nsave (bmmm)").diagnostics
    texts = [each.fixes[0].applied(found[1].span.source).splitlines() for each in found[1:]]
    assert [lines[1] for lines in texts] == ["recompute bmm, add", "recompute bmmm, add"]
    assert [lines[2] for lines in texts] == ["save (bmmm)", "save (bmm)"]


def test_nothing_is_written_into_a_policy_that_comes_along() -> None:
    from policylang.language.diagnostics import diagnose, prefixed

    def of(name: str, text: str = "save mm") -> tuple[Fix, ...]:
        span = Span(Source(name, text), 0, 0)
        return diagnose("APL301", "m", span, fixes=[prefixed(span, "optional")]).fixes

    assert not of("<fsdp>")
    assert not of("<policy>", "")  # of a tree that no text says
    assert of("<policy>")
    assert of("mine.apl")


@pytest.mark.parametrize("code", [code for code in sorted(CODES) if code[3] in "012" and CODES[code].wrong])
def test_every_mend_of_the_example_of_a_code_mends_it(code: str) -> None:
    text = CODES[code].wrong
    for found in parse_policy(text).diagnostics:
        for fix in found.fixes:
            left = [(each.code, each.message) for each in parse_policy(fix.applied(found.span.source)).diagnostics]
            assert (code, found.message) not in left, fix


def test_the_mends_of_plausible_mistakes_can_be_read() -> None:
    """One after the other, but for one statement with a second mistake."""
    wrong: list[str] = []
    for text in TEXTS:
        now = text
        for _ in range(4):
            left = errors(now)
            if not left or not left[0].fixes or left[0].fixes[0].is_choice:
                break
            now = left[0].fixes[0].applied(left[0].span.source)
        wrong.extend([text] if now != text and any(map(is_syntax, errors(now))) else [])
    assert wrong == ["expect peak memory 40 GiB"]


def test_most_plausible_mistakes_have_a_mend() -> None:
    have = [text for text in TEXTS if any(each.fixes for each in parse_policy(text).diagnostics)]
    assert len(have) > 0.65 * len(TEXTS)


def mutated(text: str, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randint(0, len(text)) for _ in range(2))
        piece = chance.choice([*WORDS, text[at : at + 7], "", "mn", "=", "per blok", "-", "attn", "optional optional"])
        text = text[:at] + piece + text[chance.choice([at, min(to, at + 9)]) :]
    return text


@drawn(40, 300, st.sampled_from([*ANY_TEXTS, *TEXTS]), st.randoms(use_true_random=False))
def test_no_mend_of_a_text_with_mistakes_makes_it_worse(text: str, chance: random.Random) -> None:
    text = mutated(text, chance)
    found = parse_policy(text).diagnostics
    spoken = [each for each in found if each.fixes and each.span is not None]
    for each in spoken if len(spoken) < 5 else chance.sample(spoken, 5):
        for fix in each.fixes:
            hold(text, found, each, fix)


def hold(text: str, found: tuple[Diagnostic, ...], each: Diagnostic, fix: Fix) -> None:
    source = each.span.source
    assert source.text == text
    ends = 0
    for change in fix.changes:  # in the order of the text, none over another
        assert change.span.source == source
        assert ends <= change.span.start <= change.span.end <= len(text)
        ends = change.span.end
        if not fix.is_choice:
            assert within_its_statement(source, each.span, change.span), (text, fix)
    better = fix.applied(source)
    assert better != text
    after = parse_policy(better).diagnostics
    wrong = [sum(map(is_error, which)) for which in (found, after)]
    if each in parse_file(source)[1]:  # what can be read now has names that could not be looked up before
        wrong = [len(parse_file(Source("<policy>", which))[1]) for which in (text, better)]
    # a quote that is closed hides no statement behind it any more, a bracket that goes no names
    hidden = each.code == "APL006" or each.message.startswith("`[")
    assert wrong[1] <= wrong[0] or hidden, (text, fix, [left.message for left in after])
    if each.severity is not Severity.ERROR:
        assert sum(map(is_error, after)) <= sum(map(is_error, found)), (text, fix)


def within_its_statement(source: Source, about: Span, changed: Span) -> bool:
    own = [(low, high) for low, high in split(source).ranges if low <= about.start <= high]
    return any(low <= changed.start and changed.end <= high for low, high in [*own, (about.start, about.end)])


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
    for word in ("APL999", "README", "../codes/APL301", "apl301", "APL301.md", ""):
        assert word not in CODES


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


@pytest.mark.parametrize("code", [code for code in sorted(CODES) if code[3] in "012"])
def test_the_example_of_a_code_shows_it_and_its_mend_mends_it(code: str) -> None:
    declared = CODES[code]
    if declared.wrong:
        assert [each.code for each in parse_policy(declared.wrong).diagnostics] == [code]
    if declared.mended:
        assert parse_policy(declared.mended).diagnostics == ()
