"""Rules about gathered weights where FSDP gathers them itself: held against what it was told, or refused by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from policylang.errors import PolicyMatchError
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import JOINT
from policylang.planning.decisions.rule_warnings import FsdpParameter, FsdpParameters
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input
    %mm = aten.mm.default(%x) layers.0.mlp
    %sin = aten.sin.default(%mm) layers.0.mlp
    %tangent = tangent
    %back = aten.mul.Tensor(%mm, %sin, %tangent) backward
"""
ALWAYS, NEVER = "include <fsdp>", "include <fsdp_reshard_never>"


def weights(again: Sequence[bool]) -> FsdpParameters:
    """Two weights a block; of each block, whether FSDP gathers them again."""
    blocks = [f"layers.{number}" for number in range(len(again))]
    found = [
        FsdpParameter(f"{block}.mlp", name, block, again[number], number, (4, 4), 64)
        for number, block in enumerate(blocks)
        for name in ("up", "down")
    ]
    return FsdpParameters(tuple(found), tuple(blocks))


def planned(text: str, *again: bool) -> Plan:
    policy = parse_policy(f"recompute everything\n{text}").policy
    assert policy is not None
    return plan(policy, facts_of(GRAPH), JOINT, aside=weights(again) if again else None)


def found(text: str, *again: bool) -> list[Diagnostic]:
    return [each for each in planned(text, *again).diagnostics if each.code in ("APL301", "APL414", "APL415")]


@pytest.mark.parametrize(("text", "again"), [(ALWAYS, True), (NEVER, False)])
def test_what_fsdp_does_as_the_policy_says_is_a_note(text: str, again: bool) -> None:
    (note,) = found(text, again, again)
    assert (note.code, is_error(note)) == ("APL415", False)
    assert f"`reshard_after_forward={again}`" in note.message


@pytest.mark.parametrize(("text", "again", "other"), [(ALWAYS, False, "never"), (NEVER, True, "always")])
def test_what_fsdp_does_otherwise_is_an_error(text: str, again: bool, other: str) -> None:
    (error,) = found(text, again, again)
    assert (error.code, is_error(error)) == ("APL414", True)
    assert "the weights of `layers.0`, `layers.1`" in error.message
    assert f"`reshard_after_forward={again}`" in error.message
    assert f"reshard_after_forward={not again}" in error.help
    assert f"include <fsdp_reshard_{other}>" in error.help
    assert "docs/setups.md#what-fsdp-means" in error.help
    assert error.details == ("`layers.0`: 2 weights", "`layers.1`: 2 weights")


def test_the_blocks_that_differ_are_named_alone() -> None:
    (error,) = found(ALWAYS, True, False, True)
    assert "the weights of `layers.1` gathered again" in error.message


@pytest.mark.parametrize(
    "rest", ["override save fsdp_gather in layers.1", "override save fsdp_gather in last 1 blocks"]
)
def test_weights_of_some_blocks_may_be_kept(rest: str) -> None:
    text = f"{ALWAYS}\n{rest}"
    assert [each.code for each in found(text, True, False)] == ["APL415"]
    wrong = found(text, True, True)
    assert [each.code for each in wrong] == ["APL414"]
    assert wrong[0].message.startswith(f"`{rest}` wants the weights of `layers.1` kept gathered")


def test_a_rule_about_any_gather_is_none_about_weights() -> None:
    assert [each.code for each in found("save all_gather", True)] == ["APL301"]
    assert found("optional save all_gather", True) == []
    assert found("save everything", True) == []


def test_an_optional_rule_is_held_against_fsdp_as_well() -> None:
    text = "optional override must_recompute all_gather where from parameter"
    assert [each.code for each in found(text, False)] == ["APL414"]
    assert found(text) == []


@pytest.mark.parametrize(
    ("text", "again", "held"),
    [
        ("expect every (all_gather where from parameter) recomputed", True, True),
        ("expect every (all_gather where from parameter) recomputed", False, False),
        ("expect no (all_gather where from parameter) saved", True, True),
        ("expect no (all_gather where from parameter) saved", False, False),
        ("expect every (all_gather where from parameter) offloaded", True, False),
    ],
)
def test_expectations_about_gathers_are_answered_by_fsdp(text: str, again: bool, held: bool) -> None:
    made = planned(text, again)
    (outcome,) = made.expectations
    assert outcome.status == ("held" if held else "failed")
    assert "by `fully_shard`" in outcome.found
    assert [each.code for each in made.diagnostics if is_error(each)] == ([] if held else ["APL414"])


def test_without_sharded_weights_the_include_is_the_error() -> None:
    """In one piece: not the insides of the file that it brings."""
    (error,) = PolicyMatchError([each for each in found(ALWAYS) if is_error(each)]).diagnostics
    assert error.code == "APL301"
    assert error.span.text == "include <fsdp>"
    assert error.message == "`include <fsdp>` matches nothing in this graph: it gathers no weights"
    assert error.details == ()
    (note,) = error.related
    assert note.span.source.name == "<fsdp_reshard_always>"
    assert "docs/setups.md#what-fsdp-means" in str(error.help)
