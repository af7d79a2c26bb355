"""The pages that describe the language are policy tests, so that they cannot say what is not so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policylang.language.diagnostics import CODES, is_error
from policylang.language.loader import parse_policy
from policylang.report.diagnostics import render_text
from policylang.testing.suites import run_files

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if "```apl" in page.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_policies_of_a_page_are_what_it_says(page: Path) -> None:
    """Each is read, planned where it names a graph, and held to what its comments claim."""
    result = run_files([str(page)])
    assert result.found.diagnostics == (), render_text(result.found.diagnostics)


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "codes"], ids=lambda page: page.stem)
def test_a_policy_that_is_only_shown_says_why(page: Path) -> None:
    """``apl ignore`` is a file that the commands of its page read, or has its reason in a line above it."""
    above = re.findall(r"(.*)\n```apl ignore$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [line for line in above if not re.fullmatch(r"<!-- (file|not tested): .+ -->", line)] == []


@pytest.mark.parametrize("code", [code for code in sorted(CODES) if CODES[code].wrong])
def test_what_the_page_of_a_code_calls_wrong_is_wrong(code: str) -> None:
    """Of a mistake in the text, the code itself; of one on a graph, a text in which nothing else is wrong."""
    found = parse_policy(CODES[code].wrong, name=code).diagnostics
    if code[3] in "012":
        assert code in {diagnostic.code for diagnostic in found}
    else:
        assert [diagnostic for diagnostic in found if is_error(diagnostic)] == []


def test_the_language_reference_claims_what_it_shows() -> None:
    result = run_files([str(ROOT / "docs" / "language.md")])
    assert result.policies >= 30
    assert result.claims >= 80


def test_the_page_on_policy_tests_prints_what_is_printed() -> None:
    page = ROOT / "docs" / "policy-tests.md"
    result = run_files([str(page)])
    said = f"tested {result.policies} policies in 1 file: {result.claims} claims, all hold"
    assert said in page.read_text(encoding="utf-8")


def test_the_reference_shows_the_words_of_the_language() -> None:
    from policylang.language.lexer import keywords
    from policylang.language.operators import group_names
    from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES
    from policylang.language.shown import UNITS
    from policylang.language.statements import ACTIONS

    words = {word for word in keywords() if word.isidentifier()}
    for word in sorted(words | {*FLAGS, *MEASURES, *PROPERTIES, *group_names(), *ACTIONS, *UNITS}):
        assert re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", LANGUAGE), f"`{word}` is not in docs/language.md"
