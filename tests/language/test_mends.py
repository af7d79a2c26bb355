"""The mends of diagnostics are edits that mend: what is written in place of what, and what is wrong then."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.language.diagnostics import CODES, Diagnostic, Fix, Severity, Source, Span, is_error, is_syntax
from policylang.language.lexer import split
from policylang.language.loader import load_policy, parse_policy
from policylang.language.parser import parse_file
from tests.language.test_fuzz import TEXTS, WORDS
from tests.language.test_mistakes import TEXTS as MISTAKES
from tests.support.drawn import examples


def errors(text: str) -> list[Diagnostic]:
    return [found for found in parse_policy(text).diagnostics if is_error(found)]


def told(text: str) -> list[tuple[str, str]]:
    """Each mend of the first diagnostic of a text, and the text with it."""
    found = parse_policy(text).diagnostics[0]
    assert found.span is not None
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
    assert (told(text) if parse_policy(text).diagnostics else []) == expected


def test_an_included_file_is_found_by_a_name_like_it(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "shared.apl").write_text("save mm\n")
    file = tmp_path / "mine.apl"
    file.write_text('include "others/share.apl"\n')
    (found,) = load_policy(file).diagnostics
    assert found.fixes[0].applied(found.span.source) == 'include "others/shared.apl"\n'


def test_a_name_that_is_written_twice_is_mended_in_both_places() -> None:
    found = parse_policy("save flsh_attn\nrecompute bmmm, add\nsave (bmmm)").diagnostics
    assert found[1].span is not None
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
    for text in MISTAKES:
        now = text
        for _ in range(4):
            left = errors(now)
            if not left or not left[0].fixes or left[0].fixes[0].is_choice:
                break
            assert left[0].span is not None
            now = left[0].fixes[0].applied(left[0].span.source)
        wrong.extend([text] if now != text and any(map(is_syntax, errors(now))) else [])
    assert wrong == ["expect peak memory 40 GiB"]


def test_most_plausible_mistakes_have_a_mend() -> None:
    have = [text for text in MISTAKES if any(each.fixes for each in parse_policy(text).diagnostics)]
    assert len(have) > 0.65 * len(MISTAKES)


def mutated(text: str, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randint(0, len(text)) for _ in range(2))
        piece = chance.choice([*WORDS, text[at : at + 7], "", "mn", "=", "per blok", "-", "attn", "optional optional"])
        text = text[:at] + piece + text[chance.choice([at, min(to, at + 9)]) :]
    return text


@given(st.sampled_from([*TEXTS, *MISTAKES]), st.randoms(use_true_random=False))
@settings(max_examples=examples(40, 300))
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
