"""Policies that cost more than they need to: each is a warning with its figures, and gone with the first fix."""

from __future__ import annotations

import pytest

from policylang.api.planned_graphs import facts_of, on_graph
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.files import bundled_names
from policylang.language.loader import parse_policy

COSTLY = ("APL701", "APL702", "APL703", "APL704")
FULL = "blocks model.layers.*\nundecided -> save\nrecompute everything in block"
ATTENTION = "blocks model.layers.*\nundecided -> save\nrecompute attention in block"
STAGED = "recompute everything\nsave everything where crosses cut per 2 GiB"
CROSSING = "save everything in block where crosses block"
CASES = {
    "APL701": ("llama3_8b", FULL),
    "APL702": ("llama3_8b", "blocks model.layers\nrecompute everything in block"),
    "APL703": ("llama3_8b", ATTENTION),
    "APL704": ("long_context", STAGED),
}


@pytest.fixture(scope="module")
def graphs() -> dict[str, Facts]:
    return {}


def found(text: str, name: str, graphs: dict[str, Facts]) -> list[Diagnostic]:
    if name not in graphs:
        graphs[name] = facts_of(f"docs/graphs/{name}.graph")
    policy = parse_policy(text).policy
    assert policy is not None
    _, diagnostics = on_graph(policy, {name: graphs[name]}, None, one_model=False)
    return [each for each in diagnostics if each.code in COSTLY]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "APL701",
            "`recompute everything in block` recomputes what crosses blocks too, so the backward holds several blocks "
            "at once: the peak is 72.4 GiB, and 30.7 GiB with what crosses blocks saved",
        ),
        (
            "APL702",
            "`blocks model.layers` makes 1 block of 32 numbered modules: `model.layers` is the list that holds them",
        ),
        (
            "APL703",
            "`recompute attention in block` recomputes 35.2 TFLOP and frees 32 MiB: saved views keep its 2 GiB",
        ),
        (
            "APL704",
            "`save everything where crosses cut per 2 GiB` saves what the backward never reads: the policy saves "
            "2.1 TiB, and a step that recomputes nothing 1.9 TiB",
        ),
    ],
)
def test_it_is_a_warning_with_its_figures(code: str, message: str, graphs: dict[str, Facts]) -> None:
    name, text = CASES[code]
    (costly,) = found(text, name, graphs)
    assert (costly.code, costly.severity, costly.message) == (code, Severity.WARNING, message)


@pytest.mark.parametrize("code", CASES)
def test_its_first_fix_makes_it_go_away(code: str, graphs: dict[str, Facts]) -> None:
    name, text = CASES[code]
    (costly,) = found(text, name, graphs)
    assert costly.span is not None
    mended = costly.fixes[0].applied(costly.span.source)
    assert code not in [each.code for each in found(mended, name, graphs)]


@pytest.mark.parametrize("code", CASES)
def test_it_can_be_allowed_on_its_line(code: str, graphs: dict[str, Facts]) -> None:
    name, text = CASES[code]
    (costly,) = found(text, name, graphs)
    assert costly.span is not None
    lines = text.splitlines()
    at = costly.span.line - 1
    for comment, count in ((f"# allow: {code} on purpose", 0), ("#allow: APL999, " + code, 0), ("# allow: APL303", 1)):
        allowed = [*lines[:at], f"{lines[at]}  {comment}", *lines[at + 1 :]]
        assert len(found("\n".join(allowed), name, graphs)) == count


def test_the_fixes_are_lines_of_the_policy(graphs: dict[str, Facts]) -> None:
    fixes = {code: [fix.title for fix in found(text, name, graphs)[0].fixes] for code, (name, text) in CASES.items()}
    assert fixes == {
        "APL701": [f"write `{CROSSING}` below it"],
        "APL702": ["write `blocks model.layers.*`"],
        "APL703": ["write `recompute everything where is view` below it", "remove the line"],
        "APL704": ["write `recompute everything where not feeds backward` below it", "remove the line"],
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_8b", f"{FULL}\n{CROSSING}"),
        ("llama3_8b", "recompute everything in last block"),  # what one block hands on is all that it recomputes
        ("llama3_8b", f"{ATTENTION}\nrecompute everything where is view"),
        ("llama3_8b", "blocks model.layers.0\nrecompute silu in block"),
        ("resnet50", "blocks stages.*\nrecompute relu"),  # a stage holds a list of layers, and is one of a list
        ("long_context", "recompute everything\nsave everything where crosses block"),
        ("llama3_8b", STAGED),
    ],
)
def test_nothing_is_said_of_policies_that_cost_what_they_need_to(
    name: str, text: str, graphs: dict[str, Facts]
) -> None:
    assert found(text, name, graphs) == []


def test_without_a_rule_the_undecided_line_is_named(graphs: dict[str, Facts]) -> None:
    (costly,) = found("blocks model.layers.*\nundecided -> recompute", "llama3_8b", graphs)
    assert costly.code == "APL701"
    assert costly.span is not None
    assert costly.span.text == "undecided -> recompute"


@pytest.mark.parametrize("policy", bundled_names())
@pytest.mark.parametrize("name", ["llama3_8b", "tutorial"])
def test_bundled_policies_are_clean(policy: str, name: str, graphs: dict[str, Facts]) -> None:
    """`memory_staged` allows APL701 on its line; where single values are larger than its stages, as on the graph of a
    long context, it does save more than no policy, and that is said."""
    assert found(f"include <{policy}>", name, graphs) == []


def test_a_comment_allows_warnings_of_texts_alone() -> None:
    text = "let unused = mm{}\nsave bmm"
    assert [each.code for each in parse_policy(text.format("")).diagnostics] == ["APL110"]
    assert parse_policy(text.format("  # allow: APL110")).diagnostics == ()
    assert parse_policy("save bmmm  # allow: APL101").diagnostics[0].code == "APL101", "an error stays"
