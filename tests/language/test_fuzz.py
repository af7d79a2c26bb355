"""Whatever a file holds, a policy or diagnostics come back: never a traceback, in bounded time."""

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from policylang.language.lexer import MAX_DEPTH, keywords
from policylang.language.loader import Loaded, load_policy, parse_policy
from policylang.language.resources import policies_folder
from policylang.report.diagnostics import render_concise, render_github, render_json, render_text
from tests.language.test_forms import BINDING, LLAMA3, ORDERING, SELECTORS
from tests.support.drawn import drawn

LIBRARY = [file.read_text(encoding="utf-8") for file in sorted(policies_folder().glob("*.apl"))]
TEXTS = [LLAMA3, *LIBRARY, *(text for text, _ in ORDERING), *(f"save {text}" for text, _ in (*SELECTORS, *BINDING))]
WORDS = [
    *(*sorted(keywords()), "mm", "aten.*", "2nd", "1st", "0..3", "64", "64 MiB", "20%"),
    *("bucket", "prefetch", "delay", "overlap", "keep order of", "up to", "in flight", "within", "of peak", "ahead"),
    *("prefetch offloaded", "host memory", "per host"),
    *('"a"', "<fsdp>", ";", "#", "\n", "\0"),
]


def accept(loaded: Loaded) -> None:
    """A policy or an error, and every diagnostic can be printed in every form."""
    assert (loaded.policy is None) == bool(loaded.errors)
    for render in (render_text, render_concise, render_json, render_github):
        printed = render(loaded.diagnostics)
        assert bool(loaded.diagnostics) <= bool(printed)
    for diagnostic in loaded.diagnostics:
        span = diagnostic.span
        assert diagnostic.message
        assert span is None or 0 <= span.start <= span.end <= len(span.source.text) + 1


@drawn(25, 200, st.binary(max_size=400))
def test_random_bytes(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzz.apl"
        path.write_bytes(content)
        accept(load_policy(path))


@drawn(40, 300, st.text(max_size=300))
def test_random_text(text: str) -> None:
    accept(parse_policy(text))


@drawn(60, 500, st.lists(st.sampled_from(WORDS), max_size=25))
def test_random_words_of_the_language(words: list[str]) -> None:
    accept(parse_policy(" ".join(words)))


@drawn(40, 400, st.sampled_from(TEXTS), st.randoms(use_true_random=False))
def test_policies_with_mistakes(text: str, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randint(0, len(text)) for _ in range(2))
        piece = chance.choice([*WORDS, text[at : at + 7], ""])
        text = text[:at] + piece + text[chance.choice([at, min(to, at + 9)]) :]
    accept(parse_policy(text))


DEEP = {
    "parentheses": "save " + "(" * 5000 + "mm" + ")" * 5000, "open parentheses": "save " + "(" * 100_000,
    "closing parentheses": ")" * 100_000, "prefixes": "save " + "first " * 5000 + "mm",
    "filters": "save mm" + " in block" * 5000, "chains": "save mm" + " chain" * 5000,
    "negations": "save mm where " + "not " * 5000 + "is view", "differences": "save mm" + " except bmm" * 5000,
    "predicate parentheses": "save mm where " + "(" * 5000 + "is view" + ")" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("name", DEEP)
def test_deep_nesting(name: str) -> None:
    loaded = parse_policy(DEEP[name])
    accept(loaded)
    assert {each.code for each in loaded.errors} <= {"APL003", "APL004", "APL007"}
    assert loaded.errors


def test_nesting_up_to_the_bound_is_read() -> None:
    for text in (
        "(" * MAX_DEPTH + "mm" + ")" * MAX_DEPTH,
        "first " * (MAX_DEPTH - 1) + "mm",
        "mm where " + "not " * (MAX_DEPTH - 2) + "is view",
    ):
        assert parse_policy(f"save {text}").policy is not None


def test_wide_statements_are_read() -> None:
    wide = parse_policy("save " + " or ".join(["mm"] * 10_000))
    assert len(wide.policy.rules[0].selector.parts) == 10_000  # type: ignore[union-attr]


def quick(units: list[str], *few: str) -> list[Any]:
    """Of many units that are read alike, ``few`` in every run."""
    return [pytest.param(unit, marks=() if unit in few else pytest.mark.slow) for unit in units]


@pytest.mark.parametrize(
    "unit", quick(["a", "save mm ", "(", "é", '"', "{", "[", "# ", ";", "<a", "1"], "save mm ", "(", "é")
)
def test_ten_megabytes_on_one_line(unit: str) -> None:
    loaded = parse_policy(unit * (10 * 1024 * 1024 // len(unit)))
    accept(loaded)
    assert [each.code for each in loaded.errors] == ["APL002"]


@pytest.mark.parametrize(
    "unit", quick(["a ", "save mm\n", "((", "()", '"', "{", "[a", "#\n", ";", "sav ;", "mn;"], "save mm\n", "[a")
)
def test_as_much_as_a_file_may_hold(unit: str) -> None:
    size = 4 * 1024 * 1024 if len(unit.strip()) < 3 else 64 * 1024
    accept(parse_policy(unit * (size // len(unit))))


def test_the_number_of_statements_is_bounded() -> None:
    loaded = parse_policy("mn;" * 200_000)
    accept(loaded)
    assert [each.code for each in loaded.errors] == ["APL002"]
