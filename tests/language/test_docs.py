"""The pages that describe the language are policy tests, so that they cannot say what is not so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policylang.report.diagnostics import render_text
from policylang.testing.suites import run_files

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```apl" in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_policies_of_a_page_are_what_it_says(page: Path) -> None:
    """Each is read, planned where it names a graph, and held to what its comments claim."""
    result = run_files([str(page)])
    assert result.found.diagnostics == (), render_text(result.found.diagnostics)


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
    from policylang.language.parsing.parser import keywords
    from policylang.language.parsing.predicate_tree import FLAGS, MEASURES, PROPERTIES
    from policylang.language.parsing.statement_tree import ACTIONS
    from policylang.language.resolution.prelude import group_names
    from policylang.language.units import UNITS

    words = {word for word in keywords() if word.isidentifier()}
    for word in sorted(words | {*FLAGS, *MEASURES, *PROPERTIES, *group_names(), *ACTIONS, *UNITS}):
        assert re.search(rf"(?<![\w]){re.escape(word)}(?![\w])", LANGUAGE), f"`{word}` is not in docs/language.md"
