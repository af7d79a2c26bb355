"""The pages that describe the language: every policy in them is read, every error on purpose is that error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policylang.language.codes import CODES
from policylang.language.loader import parse_policy

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```apl\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"# error: (APL\d{3})")
BLOCKS = FENCED.findall(LANGUAGE)


def expected_errors(text: str) -> list[tuple[int, str]]:
    return [(number, code) for number, line in enumerate(text.splitlines(), 1) for code in MARK.findall(line)]


@pytest.mark.parametrize("text", BLOCKS, ids=[f"{at}:{block.splitlines()[0]}" for at, block in enumerate(BLOCKS)])
def test_a_policy_in_the_language_reference(text: str) -> None:
    found = parse_policy(text).diagnostics
    # A page shows one thing at a time: names that only the next example uses are fine.
    said = [
        (each.span.line if each.span else 0, each.code) for each in found if each.code != "APL110" or "APL110" in text
    ]
    assert said == expected_errors(text)


def test_the_reference_shows_the_words_of_the_language() -> None:
    from policylang.language.parser import keywords
    from policylang.language.predicate_tree import FLAGS, MEASURES, PROPERTIES
    from policylang.language.prelude import group_names
    from policylang.language.statement_tree import ACTIONS
    from policylang.language.units import UNITS

    words = {word for word in keywords() if word.isidentifier()}
    for word in sorted(words | {*FLAGS, *MEASURES, *PROPERTIES, *group_names(), *ACTIONS, *UNITS}):
        assert re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", LANGUAGE), f"`{word}` is not in docs/language.md"


def test_the_policies_of_the_other_pages() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for text in FENCED.findall(page.read_text(encoding="utf-8")):
            codes = {each.code for each in parse_policy(text).diagnostics} - {"APL110"}
            assert codes <= {code for _, code in expected_errors(text)}, f"{page.name}: {text}"


@pytest.mark.parametrize("code", sorted(CODES))
def test_the_page_of_a_code_is_up_to_date(code: str) -> None:
    from scripts.make_code_pages import FOLDER, page

    assert (FOLDER / f"{code}.md").read_text(encoding="utf-8") == page(CODES[code])


def test_there_is_no_page_too_many_and_the_index_is_up_to_date() -> None:
    from scripts.make_code_pages import FOLDER, files

    assert {file.name for file in FOLDER.iterdir()} == set(files())
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == files()["README.md"]


@pytest.mark.parametrize("code", [code for code in sorted(CODES) if code[3] in "012"])
def test_the_example_of_a_code_shows_it_and_its_mend_mends_it(code: str) -> None:
    declared = CODES[code]
    assert re.fullmatch(r"APL\d{3}", code)
    assert declared.title
    assert declared.title[0] in "`" or declared.title[0].islower()
    assert declared.text.endswith(".")
    if declared.wrong:
        assert [each.code for each in parse_policy(declared.wrong).diagnostics] == [code]
    if declared.mended:
        assert parse_policy(declared.mended).diagnostics == ()
