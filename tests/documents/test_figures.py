"""Every figure of the documentation is settled: a test repeats it, or the page says when and how it was taken.

A figure is a number with a unit of memory, work or time, a percentage or a ratio, in running text or in a table. It is
settled where it is also in the output of a run on the same page; or where its section says how, in a comment that no
reader sees:

    <!-- figures: tests/…::test_name, … -->    a test that compares the figure
    <!-- figures: FILE -->                     a results file of benchmarks, which has the machine
    <!-- figures: source: … -->                somebody else's, with the place where it stands
    <!-- figures: given: … -->                 no measurement: a limit, a default, a figure of speech

Times, and what follows from them, also need their date in the text of the page: ``2026-11-22``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents.outputs import PAGES, ROOT, blocks

FIGURE = re.compile(
    r"(?<![\w.#/-])[+−-]?\d[\d,.]*"
    r"(?:%|×| ?(?:[KMGT]i?B|bytes|[KMGTP]?FLOPs?|µs|ms|seconds?|minutes?|hours?|s)\b)"
)
TIME = re.compile(r"\d (?:µs|ms|seconds?|minutes?|hours?|s)$")
SETTLED = re.compile(r"<!-- figures: (.*?) -->", re.DOTALL)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_FENCES = re.compile(r"^(```+|~~~+).*?^\1$", re.MULTILINE | re.DOTALL)


def sections(page: Path) -> list[tuple[str, str]]:
    """Each heading with its text, outputs of runs and code left out."""
    text = page.read_text(encoding="utf-8")
    for shown in reversed(blocks(page)):
        text = text[: shown.start] + text[shown.end :]
    text = _FENCES.sub("", text)
    parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def figures(text: str) -> list[str]:
    return FIGURE.findall(re.sub(r"`[^`\n]+`|<!--.*?-->", " ", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_figure_is_settled(page: Path):
    shown = " ".join(block.text for block in blocks(page))
    open_ones = []
    for heading, text in sections(page):
        left = [each for each in figures(text) if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", shown)]
        if left and not SETTLED.search(text):
            open_ones.append((heading, left))
    assert open_ones == [], "say where they are from, as tests/documents/test_figures.py explains"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_settles_a_figure_is_there(page: Path):
    text = page.read_text(encoding="utf-8")
    for entry in SETTLED.findall(text):
        if entry.startswith(("source: ", "given: ")):
            continue
        for each in entry.split(", "):
            file, _, test = each.partition("::")
            assert (ROOT / file).is_file(), each
            assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), each


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_times_have_their_date(page: Path):
    """In the section, or above the first of them."""
    text = page.read_text(encoding="utf-8")
    timed = [
        each for heading, part in sections(page) if "given: " not in part for each in figures(part) if TIME.search(each)
    ]
    assert not timed or DATE.search(text), timed
