"""Every bundled policy of one model fits every architecture, or the error names the line to add."""

import pytest

import policylang
from policylang.planning.capabilities import FLAT
from policylang.planning.planner import plan as make_plan

pytest.importorskip("transformers")

from tests.support.architectures import EVERY, POLICIES, facts_of, outcome

SMALL = ("Bert", "ConvNext")
OWN_NAME = "Albert"
"""Its blocks are ``albert_layer_groups``, which no bundled policy knows."""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SMALL else pytest.mark.slow) for name in EVERY if name != OWN_NAME]
)
def test_a_bundled_policy_fits(name: str, policy: str) -> None:
    assert outcome(name, policy).endswith("%")


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in ("memory_staged", "save_all")])
def test_where_blocks_have_another_name_the_error_says_which(policy: str) -> None:
    found = make_plan(policylang.load(policy), facts_of(OWN_NAME), FLAT).diagnostics
    (error,) = [each for each in found if each.code == "APL302"]
    assert "albert.encoder.albert_layer_groups.*" in (error.help or "")
