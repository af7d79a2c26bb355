"""One cause is one error: what follows from it is a note, and what has a cause of its own stays an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policylang.errors import PolicyMatchError
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.language.loader import load_policy, parse_policy
from policylang.language.syntax import Policy
from policylang.planning import statement_errors
from policylang.planning.capabilities import JOINT
from policylang.planning.planner import plan
from policylang.report.diagnostics import render_json, render_sarif, render_text
from tests.support.textgraph import facts_of

BLOCK = """
    %x = input
    %mm = aten.mm.default(%x) mlp.up
    %sin = aten.sin.default(%mm) mlp
    %add = aten.add.Tensor(%sin, %mm)
    %tangent = tangent
    %back = aten.mul.Tensor(%mm, %sin, %add, %tangent) backward
    %out = output(%sin, %add, %back)
"""
"""A block that was compiled by itself: its paths begin inside it."""
HEAD = """
    %x = input
    %exp = aten.exp.default(%x) head
    %tangent = tangent
    %back = aten.mul.Tensor(%exp, %tangent) backward
"""
NAMED = "blocks layers.*\n"
DEPENDENT = """recompute everything in block
save first mm per block
save everything in block where crosses block
save sin where module == layers.*.mlp and crosses block
"""


def policy_of(text: str) -> Policy:
    policy = parse_policy(text).policy
    assert policy is not None
    return policy


def errors(text: str, graph: str = BLOCK) -> tuple[Diagnostic, ...]:
    made = plan(policy_of(text), facts_of(graph), JOINT)
    return PolicyMatchError([each for each in made.diagnostics if is_error(each)]).diagnostics


@pytest.mark.parametrize("blocks", [NAMED, ""])
def test_without_blocks_all_that_needs_them_is_one_error(blocks: str) -> None:
    (error,) = errors(blocks + DEPENDENT)
    assert error.code == "APL302"
    notes = [each.message for each in error.related]
    rules = DEPENDENT.splitlines()
    assert notes == [f"from it follows: `{rule}` matches nothing in this graph" for rule in rules]
    assert [each.span.text for each in error.related if each.span is not None][1] == "first mm per block"


def test_a_rule_that_would_match_nothing_in_a_block_either_keeps_its_error() -> None:
    cause, own = errors(f"{NAMED}recompute everything in block\nsave bmm in block")
    assert (cause.code, len(cause.related)) == ("APL302", 1)
    assert (own.code, own.details[0]) == ("APL301", "bmm: 0 nodes")


def test_blocks_that_nothing_needs_are_still_an_error_where_they_are_named() -> None:
    (error,) = errors(f"{NAMED}recompute everything")
    assert (error.code, error.related) == ("APL302", ())


def test_without_a_rule_that_they_would_help_no_blocks_are_no_error() -> None:
    (error,) = errors("recompute everything\nsave bmm in block")
    assert error.code == "APL301"


@pytest.mark.parametrize("text", ["expect exactly 1 mm per block", "expect saved per block <= 1 MiB"])
def test_an_expectation_per_block_follows_as_well(text: str) -> None:
    (error,) = errors(f"{NAMED}recompute everything\n{text}")
    assert error.code == "APL302"
    assert [each.message for each in error.related] == [
        f"from it follows: `{text}` does not hold: the graph has no blocks"
    ]


def test_over_several_graphs_the_cause_is_that_of_any() -> None:
    """The head lacks what the rules name; in the block they would match."""
    policy = policy_of(NAMED + DEPENDENT)
    found = []
    for name, graph in (("block", BLOCK), ("head", HEAD)):
        made = plan(policy, facts_of(graph), JOINT)
        kept = statement_errors.to_json(statement_errors.complaints(policy, made.diagnostics))
        found.append((name, statement_errors.from_json(json.loads(json.dumps(kept)))))
    (error,) = statement_errors.shared_by_all(policy, found, root="")
    assert error.code == "APL302"
    assert len(error.related) == len(DEPENDENT.splitlines())
    assert "any of the 2 graphs" in error.message
    assert "policylang.checkpoint_model" in str(error.help)
    (sharded,) = statement_errors.shared_by_all(policy, found, root="", sharded=True)
    assert "`fully_shard`" in sharded.details[0]
    assert "docs/setups.md#fsdp2-with-compiled-blocks" in str(sharded.help)


def gathered(blocks: int) -> str:
    gather = "_c10d_functional.all_gather_into_tensor.default"
    lines = ["%x0 = input", *(f"%w{n} = parameter" for n in range(blocks))]
    for n in range(blocks):
        lines += [
            f"%gather{n} = {gather}(%w{n}) layers.{n} collective group=dp:4 bytes=8",
            f"%wait{n} = _c10d_functional.wait_tensor.default(%gather{n}) layers.{n} bytes=8",
            f"%x{n + 1} = aten.mm.default(%x{n}, %wait{n}) layers.{n} bytes=8",
        ]
    last = f"%x{blocks}"
    lines += [
        "%tangent = tangent",
        f"%back = aten.mul.Tensor({last}, %tangent) backward",
        f"%out = output({last}, %back)",
    ]
    return "\n".join(lines)


def test_a_scheduling_line_has_to_find_something_in_one_of_the_graphs() -> None:
    """Whatever each of them lacks: one has no collective, another two blocks in which nothing can start earlier."""
    policy = policy_of("blocks layers.*\nprefetch all_gather 1 block ahead")

    def codes(*graphs: str) -> list[tuple[str, str]]:
        found = []
        for graph in graphs:
            made = plan(policy, facts_of(graph), JOINT)
            errors = [each for each in made.diagnostics if is_error(each)]
            assert {each.code for each in errors} <= {*statement_errors.DEFERRED_CODES, "APL302"}
            found.append((graph[:8], statement_errors.complaints(policy, errors)))
        shared = statement_errors.shared_by_all(policy, found, root="layers.0")
        return [(each.code, each.span.text if each.span else "") for each in shared]

    line = "prefetch all_gather 1 block ahead"
    assert codes(gathered(2)) == codes(gathered(2), gathered(0)) == []
    assert codes(gathered(0)) == codes(gathered(0), gathered(0)) == [("APL302", "blocks layers.*"), ("APL379", line)]
    assert [code for code, _ in codes(gathered(1), gathered(0))] == ["APL373"]


def test_lines_of_an_included_file_that_lack_one_thing_are_one_error_at_the_include(tmp_path: Path) -> None:
    (tmp_path / "inner.apl").write_text("recompute mm in decoder.*\nsave sin in decoder.*\nsave bmm\nsave conv2d\n")
    (tmp_path / "outer.apl").write_text('save add\ninclude "inner.apl"\n')
    policy = load_policy(tmp_path / "outer.apl").policy
    assert policy is not None
    made = plan(policy, facts_of(BLOCK), JOINT)
    found = PolicyMatchError([each for each in made.diagnostics if is_error(each)]).diagnostics
    both, *own = found
    assert both.message == '`include "inner.apl"` matches nothing in this graph: 0 nodes are `in decoder.*`'
    assert both.span.source.name.endswith("outer.apl")
    assert [each.span.line for each in both.related if each.span is not None] == [1, 2]
    assert [each.message for each in own] == [
        "`save bmm` matches nothing in this graph",
        "`save conv2d` matches nothing in this graph",
    ]
    assert [each.related[-1].message for each in own] == ["included from here"] * 2


def test_every_form_shows_the_notes() -> None:
    found = errors(NAMED + DEPENDENT)
    text = render_text(found)
    assert text.count("error[") == 1
    assert "= note: from it follows: `save first mm per block` matches nothing in this graph (<policy>:3)" in text
    (as_json,) = json.loads(render_json(found))["diagnostics"]
    assert [each["location"]["start"]["line"] for each in as_json["related"]] == [2, 3, 4, 5]
    (result,) = json.loads(render_sarif(found))["runs"][0]["results"]
    assert result["ruleId"] == "APL302"
    assert result["message"]["text"].count("from it follows") == len(DEPENDENT.splitlines())
