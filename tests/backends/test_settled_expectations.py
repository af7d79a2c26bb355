"""An expectation that depends on PyTorch's min-cut is checked once min-cut has decided, and never forgotten."""

from __future__ import annotations

import copy

import pytest

import policylang
from policylang.errors import PolicyMatchError
from tests.graph.captured import joint_of

RULES = "recompute everything in block\nsave matmul in block\nsave everything in block where crosses block\n"


@pytest.fixture(scope="module")
def joint():
    return joint_of("llama")


def partitioned(joint, expectation: str) -> policylang.report:
    gm = copy.deepcopy(joint.gm)
    policylang.partition(
        gm, joint.joint_inputs, num_fwd_outputs=joint.num_fwd_outputs, policy=policylang.parse(RULES + expectation)
    )
    return policylang.report(gm)


@pytest.fixture(scope="module")
def saved(joint):
    """What min-cut and the rules save together; both have a part in it."""
    report = partitioned(joint, "")
    assert 0 < report.undecided_saved_bytes < report.saved.bytes
    return report.saved.bytes


def test_a_limit_that_is_met_exactly_holds(joint, saved):
    (expectation,) = partitioned(joint, f"expect saved <= {saved} B").expectations
    assert expectation.status == "held"


def test_one_byte_less_fails_with_the_figure(joint, saved):
    with pytest.raises(PolicyMatchError, match=rf"`expect saved <= {saved - 1} B` does not hold.*{saved:,} bytes"):
        partitioned(joint, f"expect saved <= {saved - 1} B")


def test_a_fate_that_min_cut_decided(joint):
    """Min-cut keeps something for the backward of the loss, and not the product that made the logits."""
    assert partitioned(joint, "expect no (mm outside block) saved").expectations[0].status == "held"
    with pytest.raises(PolicyMatchError, match=r"`expect no \(everything outside block\) saved` does not hold"):
        partitioned(joint, "expect no (everything outside block) saved")


def test_shares_of_the_forward_are_settled_too(joint, saved):
    held = "expect saved <= 99% of forward\nexpect recomputed operators <= 99%\nexpect recomputed <= 99% of forward\n"
    assert [each.status for each in partitioned(joint, held).expectations] == ["held"] * 3
    with pytest.raises(PolicyMatchError, match="`expect saved <= 1% of forward` does not hold"):
        partitioned(joint, "expect saved <= 1% of forward")


def test_times_are_settled_too(joint):
    """They are not known while min-cut has a say, and after it they are those of what it left."""
    held = "device cpu\nexpect recomputed time <= 99%\nexpect exposed <= 0 s\nexpect step time <= 1 s\n"
    assert [each.status for each in partitioned(joint, held).expectations] == ["held"] * 3
    with pytest.raises(PolicyMatchError, match=r"`expect step time <= 1 us` does not hold: \d[\d.]* [mu]s"):
        partitioned(joint, "device cpu\nexpect step time <= 1 us")
