"""A graph for which a profile lacks a figure: an error where times are asked for, a note where they are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

import policylang
from policylang.errors import PolicyError
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import capabilities_for
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.report.layout import plan_times_text
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input bytes=8
    %w = parameter bytes=8 shape=2x2 dtype=int8
    %g = _c10d_functional.all_gather_into_tensor.default(%x) collective group=dp:4 bytes=32
    %gw = _c10d_functional.wait_tensor.default(%g) bytes=32
    %a = aten.mm.default(%w, %gw) layers.0 bytes=32 flops=100
    %b = aten.sin.default(%a) layers.0 bytes=32
    %loss = aten.sum.default(%b) bytes=4
    ---
    %t = tangent bytes=4
    %db = aten.mul.Tensor(%t, %b) bytes=32
    %da = aten.mul.Tensor(%db, %a) bytes=32
    output(%loss, %da)
"""
POOR = DeviceProfile("poor", {"float32": Rate.constant(1.0)}, Rate.constant(1.0))


@pytest.fixture(scope="module")
def facts() -> Facts:
    return facts_of(GRAPH)


def planned(text: str, facts: Facts) -> Plan:
    policy = parse_policy(text).policy
    assert policy is not None
    return plan(policy, facts, capabilities_for(facts.kind), device=POOR)


@pytest.mark.parametrize(
    ("text", "underlined"),
    [
        ("save everything where time > 4 s", "time > 4 s"),
        ("save everything\nexpect recomputed time <= 8%", "expect recomputed time <= 8%"),
    ],
)
def test_a_policy_that_speaks_of_time_is_refused(text: str, underlined: str, facts: Facts) -> None:
    (found,) = [each for each in planned(text, facts).diagnostics if each.code == "APL159"]
    assert found.message == "the profile of `poor` has no figure for matrix work in int8 (1 call)"
    assert found.details == ("nor for all-gather among 4 ranks (1 call)",)
    assert found.span.text == underlined


def test_whoever_names_the_device_wants_its_times(facts: Facts) -> None:
    (found,) = [each for each in planned("save everything", facts).diagnostics if each.code == "APL159"]
    assert found.span is None


def test_times_that_are_only_shown_are_not_shown_and_it_is_said_why(facts: Facts) -> None:
    why = "no times: the profile of `poor` has no figure for matrix work in int8 (1 call)"
    assert plan_times_text(planned("save everything", facts)) == why


def test_nothing_is_tuned_by_times_that_are_not_known(facts: Facts) -> None:
    pytest.importorskip("highspy")
    with pytest.raises(PolicyError) as raised:
        policylang.tune(facts, peak="1 KiB", device=POOR)
    assert [each.code for each in raised.value.diagnostics] == ["APL159"]


def test_a_path_is_a_path_in_python_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").write_text("[compute]\nfloat32 = 1e9\n[memory]\nbandwidth = 7e9\n")
    monkeypatch.chdir(tmp_path)
    assert policylang.load_device(Path("cpu")).bandwidth == Rate.constant(7e9)
    assert policylang.load_device("cpu").bandwidth != Rate.constant(7e9)
    with pytest.raises(PolicyError):
        policylang.load_device(3)  # type: ignore[arg-type]
