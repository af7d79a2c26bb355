"""Globs over module paths and names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policylang.language.globs import NameGlob, PathGlob, name_glob_problem, path_glob_problem


@pytest.mark.parametrize(
    ("glob", "path", "outermost"),
    [
        ("layers.*", "layers.0", "layers.0"),
        ("layers.*", "model.layers.0.self_attn.q_proj", "model.layers.0"),
        ("layers.*", "layers", None),
        ("layers.*", "my_layers.0", None),
        ("/layers.*", "layers.3.wo", "layers.3"),
        ("/layers.*", "model.layers.3.wo", None),
        ("layers.*.attention", "layers.0.attention.wo", "layers.0.attention"),
        ("layers.*.attention", "layers.0.inner.attention.wo", None),
        ("layers.**.attention", "layers.0.inner.attention.wo", "layers.0.inner.attention"),
        ("layers.**.wo", "layers.wo", "layers.wo"),
        ("layers.**", "layers", None),
        ("layers.**", "layers.0.wo", "layers.0"),
        ("**", "a.b", "a"),
        ("**.wo", "a.b.wo.c", "a.b.wo"),
        ("/**.wo", "a.b.wo.c", "a.b.wo"),
        ("a.**.**.b", "a.x.b", "a.x.b"),
        ("layers.{0,1,31}", "layers.31.wo", "layers.31"),
        ("layers.{0, 1}", "layers.1", "layers.1"),
        ("layers.{0,1,31}", "layers.3", None),
        ("layers.[0-3]", "layers.2", "layers.2"),
        ("layers.[0-3]", "layers.4", None),
        ("layers.[0-3]", "layers.12", None),
        ("layers.[!0-3]", "layers.4", "layers.4"),
        ("layers.?", "layers.12", None),
        ("layers.1?", "layers.12", "layers.12"),
        ("h.*", "transformer.h.0.h.1", "transformer.h.0"),
        ("Layers.*", "layers.0", None),
        ("layers.*", "", None),
        ("*_proj", "layers.0.q_proj", "layers.0.q_proj"),
        ("*_proj", "layers.0.proj", None),
        ("a*b*c", "aXbYc", "aXbYc"),
        ("a*b*c", "acb", None),
        ("0", "0.1", "0"),
    ],
)
def test_outermost(glob: str, path: str, outermost: str | None) -> None:
    matcher = PathGlob(glob)
    assert matcher.outermost(path) == outermost
    assert matcher.covers(path) is (outermost is not None)


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("layers.*", "layers.0", True),
        ("layers.*", "model.layers.0", True),
        ("layers.*", "layers.0.wo", False),
        ("layers.**", "layers.0.wo", True),
        ("/layers.*", "model.layers.0", False),
        ("h.*", "h.0.h.1", True),
    ],
)
def test_matches_to_the_end(glob: str, path: str, matches: bool) -> None:
    assert PathGlob(glob).matches(path) is matches


@pytest.mark.parametrize(
    ("glob", "name", "matches"),
    [
        ("*attention*", "_scaled_dot_product_flash_attention", True),
        ("*attention*", "Attention", False),
        ("mm", "mm", True),
        ("mm", "bmm", False),
        ("*mm", "addmm", True),
        ("{mm,bmm}", "bmm", True),
        ("{mm,bmm}", "addmm", False),
        ("a*a*a", "aa", False),
        ("a*a*a", "aXa1a", True),
        ("*", "", True),
    ],
)
def test_names(glob: str, name: str, matches: bool) -> None:
    assert NameGlob(glob).matches(name) is matches


_component = st.text("ab*?", min_size=1, max_size=5).filter(lambda text: "**" not in text)


@given(_component, st.text("ab", max_size=6))
def test_a_name_glob_means_what_the_obvious_regular_expression_means(glob: str, name: str) -> None:
    obvious = re.compile("".join({"*": ".*", "?": "."}.get(each, each) for each in glob))
    assert NameGlob(glob).matches(name) is (obvious.fullmatch(name) is not None)


@given(
    st.lists(_component | st.just("**"), min_size=1, max_size=4),
    st.lists(st.text("ab", min_size=1, max_size=2), max_size=5),
)
def test_a_path_glob_means_what_trying_every_way_means(parts: list[str], components: list[str]) -> None:
    def fits(pattern: list[str], rest: list[str]) -> bool:
        if not pattern:
            return not rest
        if pattern[0] == "**":
            least = 1 if len(pattern) == 1 else 0
            return any(fits(pattern[1:], rest[taken:]) for taken in range(least, len(rest) + 1))
        return bool(rest) and NameGlob(pattern[0]).matches(rest[0]) and fits(pattern[1:], rest[1:])

    prefixes = [end for end in range(1, len(components) + 1) if any(fits(parts, components[s:end]) for s in range(end))]
    expected = ".".join(components[: prefixes[0]]) if prefixes else None
    assert PathGlob(".".join(parts)).outermost(".".join(components)) == expected


def test_no_glob_makes_matching_slow() -> None:
    assert not NameGlob("*a" * 30 + "b").matches("a" * 5000)
    assert PathGlob("**.a." * 20 + "b").outermost(".".join(["a"] * 500)) is None


@pytest.mark.parametrize("glob", ["", "/", "a..b", ".a", "a.", "a**", "a.***", "a.{}", "a.{x,}", "a.]", "a/b", "{a.b}"])
def test_malformed_paths(glob: str) -> None:
    assert path_glob_problem(glob) is not None


def test_alternatives_are_bounded() -> None:
    assert name_glob_problem("{a,b}" * 9) == "stands for more than 256 alternatives"
    assert name_glob_problem("{a,b}" * 8) is None
