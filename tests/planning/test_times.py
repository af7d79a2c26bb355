"""Rules and expectations about time: what decides, what is found, and what has to be said where no time is known."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

import policylang
from policylang.backends.caching import policy_key
from policylang.graph.facts import Facts, StepKind
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Diagnostic
from policylang.language.statements import format_policy
from policylang.planning.capabilities import EAGER, FLAT, JOINT
from policylang.planning.inspection.worth import rules_on, time_of_step
from policylang.planning.plan import ExpectationOutcome, Plan, policy_text
from policylang.planning.planner import plan
from policylang.simulation.streams import step_time
from tests.support.textgraph import facts_of

MIB = 1 << 20
FACTS = facts_of(f"""
    %x = input bytes={MIB} shape=512x512 dtype=f32
    %w = parameter bytes={MIB} shape=512x512 dtype=f32
    %mm = aten.mm.default(%x, %w) layers.0 compute bytes={MIB} shape=512x512 dtype=f32 flops=2_000_000_000
    %t = aten.t.default(%mm) layers.0 view bytes={MIB} shape=512x512 dtype=f32
    %sin = aten.sin.default(%t) layers.0 bytes={MIB} shape=512x512 dtype=f32
    %topk = aten.topk.default(%sin) layers.1 multi_output bytes={4 * MIB} flops=4_000_000_000
    %values = builtin.getitem(%topk, 0) layers.1 bytes={2 * MIB} shape=512x512 dtype=f32
    %mm_1 = aten.mm.default(%values, %w) layers.1 compute bytes={MIB} shape=512x512 dtype=f32 flops=6_000_000_000
    %cos = aten.cos.default(%mm_1) layers.1 bytes={MIB} shape=512x512 dtype=f32
    ---
    %d = tangent bytes={MIB}
    %b = aten.mul.Tensor(%d, %mm, %sin) bytes={MIB}
    %b_1 = aten.mul.Tensor(%b, %values, %mm_1) bytes={MIB}
    output(%cos, %b_1)
""")
SLOW = DeviceProfile(
    name="slow",
    compute={"float32": Rate.constant(1e12)},
    bandwidth=Rate.constant(1e12),
    host_bandwidth=1e9,
    networks=(Network(bandwidth=1e9),),
)
"""Products of 2, 4 and 6 GFLOP take 2, 4 and 6 ms here, and a MiB about a microsecond."""
RULES = "undecided -> recompute\n"


def planned(text: str, facts: Facts = FACTS, device: DeviceProfile | None = SLOW) -> Plan:
    return plan(policylang.parse(RULES + text), facts, JOINT, device=device)


def matched(selector: str) -> str:
    """The operators: pieces of a tuple share the decision on theirs."""
    (rule,) = planned(f"optional save {selector}").rules
    return " ".join(FACTS.names[row] for row in rule.matched)


def expected(text: str, rules: str = "") -> ExpectationOutcome:
    return planned(rules + text).expectations[0]


def only(found: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    (one,) = (each for each in found if each.code == code)
    return one


# --- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "nodes"),
    [
        ("everything where time > 1 ms", "mm topk mm_1"),
        ("everything where time >= 4 ms", "topk mm_1"),
        ("everything where time > 4 ms", "mm_1"),
        ("everything where time < 1 us", "t"),
        ("everything where time == 0", "t"),
        ("everything where time > 1 us and time < 1 ms", "sin cos"),
        ("everything where not time > 1 us", "t"),
        ("everything where time > 1 ms and bytes <= 2 MiB", "mm topk mm_1"),  # a piece of it is small enough
        ("everything where time_per_gib > 2 s", "mm mm_1"),  # 2 ms a MiB, 4 ms for 4 MiB, 6 ms a MiB
        ("everything where time_per_gib <= 1024 ms", "sin topk cos"),
        ("everything where not time_per_gib > 0", "t"),
        ("first everything where time > 3 ms per graph", "topk"),
    ],
)
def test_what_a_time_denotes(selector: str, nodes: str) -> None:
    assert matched(selector) == nodes


def test_a_slow_operator_is_not_decided_by_a_piece_that_takes_no_time_of_its_own() -> None:
    made = planned("save everything\nrecompute everything where time < 10 us")
    topk, values = (made.decisions[FACTS.index[name]] for name in ("topk", "values"))
    assert topk is values
    assert topk.rule == 0


def test_without_a_match_the_largest_time_is_named() -> None:
    found = only(planned("save everything where time > 1 s").diagnostics, "APL301")
    assert found.details[-1] == "where time > 1 s: 0 of them; the largest time there is 6 ms (mm_1)"
    found = only(planned("save (sin, cos) where time < 1 us").diagnostics, "APL301")
    assert found.details[-1].endswith("the least time there is 2.1 us (sin)")
    found = only(planned("save aten.t where time_per_gib > 1 us").diagnostics, "APL301")
    assert found.details[-1].endswith("0 of them; none of them has a time_per_gib")


def test_it_is_said_what_time_a_node_has_that_a_rule_leaves_out() -> None:
    made = planned("optional save everything where time > 3 ms and time_per_gib > 1 us")
    assert rules_on(made, FACTS.index["mm"])[0].why == (
        "`where time > 3 ms and time_per_gib > 1 us` does not hold: its time is 2 ms and its time_per_gib is 2 s"
    )
    assert rules_on(made, FACTS.index["t"])[0].why.endswith("its time is 0 s and it has no time_per_gib")


# --- expectations ---------------------------------------------------------------------------------------------------


def test_recomputed_time_is_that_of_what_runs_again() -> None:
    made = planned("save sin, cos, topk\nexpect recomputed time <= 8 ms\nexpect recomputed time <= 80%")
    assert made.times is not None
    seconds = {name: made.times.seconds[row] for row, name in enumerate(FACTS.names)}
    again, forward = seconds["mm"] + seconds["mm_1"], sum(seconds[FACTS.names[row]] for row in FACTS.forward)
    assert again == pytest.approx(0.008)
    amount, share = made.expectations
    assert (amount.status, amount.found) == ("held", "8 ms")
    assert amount.margin == pytest.approx(0.008 - again)
    assert share.margin == pytest.approx(0.8 - again / forward)
    assert share.status == "held"


def test_recomputed_time_of_each_block() -> None:
    rules = "save sin, cos, topk\n"
    worst = expected("expect recomputed time per block <= 5 ms", rules)
    assert (worst.status, worst.found) == ("failed", "6 ms in block 1")
    share = expected("expect recomputed time per block <= 70%", rules)  # 2 of 2 ms, and 6 of 10
    assert (share.status, share.found) == ("failed", "99.9% in block 0")


def test_the_times_of_the_step_are_those_of_its_schedule() -> None:
    made = planned("save everything\nexpect step time <= 13 ms\nexpect exposed <= 5%\nexpect exposed < 0 s")
    assert made.times is not None
    found = step_time(made.facts, made.schedule, made.times)
    step, share, exposed = made.expectations
    assert step.margin == pytest.approx(0.013 - found.step)
    assert step.status == "held"
    assert share.margin == pytest.approx(0.05)
    assert (exposed.status, exposed.found) == ("failed", "0 s")


def test_copies_that_compute_waits_for_are_exposed() -> None:
    made = planned("offload mm\nexpect exposed <= 1 us\nexpect exposed <= 1%")
    assert made.times is not None
    found = step_time(made.facts, made.schedule, made.times)
    assert found.exposed > 1e-4  # a MiB at 1 GB/s, each way
    amount, share = made.expectations
    assert amount.margin == pytest.approx(1e-6 - found.exposed)
    assert share.margin == pytest.approx(0.01 - found.exposed / found.step)


def test_of_a_flat_graph_it_is_what_the_schedule_repeats() -> None:
    facts = facts_of(f"""
        %x = input bytes={MIB}
        %a = aten.mm.default(%x, %x) compute bytes={MIB} shape=512x512 dtype=f32 flops=2_000_000_000
        ---
        %b = aten.mul.Tensor(%a, %a) bytes={MIB} backward
        output(%b)
    """)
    made = plan(policylang.parse("recompute everything\nexpect recomputed time <= 1 us"), facts, FLAT, device=SLOW)
    assert made.times is not None
    again = [row for kind, row, _ in made.schedule if kind == StepKind.SECOND_RUN]
    assert made.expectations[0].margin == pytest.approx(1e-6 - sum(made.times.seconds[row] for row in again))


def test_what_is_left_to_the_partitioner_is_deferred_or_fails_already() -> None:
    text = "save cos\nrecompute mm\nundecided -> auto\n"
    made = plan(
        policylang.parse(
            f"{text}expect step time <= 1 s\nexpect recomputed time <= 1 s\nexpect recomputed time <= 1 us"
        ),
        *(FACTS, JOINT),
        device=SLOW,
    )
    assert [each.status for each in made.expectations] == ["deferred", "deferred", "failed"]
    assert made.expectations[2].found.startswith("at least 8 ms")


def test_of_a_whole_model_in_eager_blocks_run_again_as_they_are() -> None:
    text = (
        "save sin\nexpect recomputed time per block <= 1 us\nexpect recomputed time <= 1 us\nexpect step time <= 1 us"
    )
    made = plan(policylang.parse(RULES + text), FACTS, EAGER, device=SLOW)
    worst, again, step = made.expectations
    assert worst.found == "10 ms in block 1"
    found = time_of_step(made, made.schedule)
    assert again.margin == pytest.approx(1e-6 - found.recomputed)
    assert step.margin == pytest.approx(1e-6 - found.step)
    assert found.recomputed < found.step


# --- where no time is known -----------------------------------------------------------------------------------------

TIMED = "save everything where time > 1 ms\nexpect step time <= 1 s\nexpect recomputed time per block <= 8%\n"


def test_a_time_without_a_device_is_one_error_that_says_how_to_name_one() -> None:
    found = only(planned(TIMED, device=None).diagnostics, "APL370")
    assert found.message == ("`time > 1 ms` is about time, as 2 other phrases are, and no device is given")
    assert found.span.text == "time > 1 ms"
    assert found.help is not None
    for way in ("`device h100-sxm`", "`--device h100-sxm`", "`device=`", "mi300x", 'device "cluster.toml"'):
        assert way in found.help
    (path,) = policylang.check(policylang.parse(RULES + TIMED), graph=FACTS).diagnostics
    assert path.code == "APL370", "what follows from it is a note, and nothing is said of waiting"
    assert [each.message for each in path.related] == [
        "from it follows: `save everything where time > 1 ms` matches nothing in this graph"
    ]


def test_an_expectation_alone_needs_a_device_too() -> None:
    (found,) = (each for each in planned("save mm\nexpect exposed <= 5%", device=None).diagnostics)
    assert found.message == "`expect exposed <= 5%` is about time, and no device is given"


@pytest.mark.parametrize(
    "text",
    [
        "let slow = everything where time > 1 ms\nsave slow",
        "save mm\nexpect no (everything where time_per_gib > 1 ms) saved",
        "save mm\nexpect exactly 3 everything where time > 1 ms",
    ],
)
def test_wherever_a_time_stands(text: str) -> None:
    assert any(each.code == "APL370" for each in planned(text, device=None).diagnostics)
    assert all(each.code != "APL370" for each in planned(text).diagnostics)


def test_a_device_that_lacks_a_figure_is_an_error_where_times_are_asked_for() -> None:
    odd = facts_of(
        "%x = input dtype=complex64 shape=8x8\n%mm = aten.mm.default(%x, %x) dtype=complex64 shape=8x8 flops=1024"
    )
    bare = DeviceProfile("bare", {"bfloat16": Rate.constant(1e12)}, Rate.constant(1e12))
    named = "device h100-sxm\n"
    assert [each for each in planned(named + TIMED, odd, None).diagnostics if each.code == "APL159"]
    assert any(each.code == "APL159" for each in planned("save mm", device=bare).diagnostics), "it was named for this"
    assert any(each.code == "APL159" for each in planned(TIMED, device=bare).diagnostics)
    assert not [each for each in planned(f"{named}save mm", odd, None).diagnostics if each.code == "APL159"]


def test_copies_to_the_host_take_a_figure() -> None:
    bare = DeviceProfile("bare", {"float32": Rate.constant(1e12)}, Rate.constant(1e12))
    assert not [each for each in planned("save mm", device=bare).diagnostics if each.code == "APL159"]
    assert [each for each in planned("offload mm", device=bare).diagnostics if each.code == "APL159"]


def test_work_that_no_formula_counts_is_priced_by_bytes_with_a_warning() -> None:
    known = facts_of("""
        %x = input bytes=64
        %a = mylib.fused.default(%x) bytes=64
        ---
        %b = aten.mul.Tensor(%a) bytes=64
        output(%a, %b)
    """)
    facts = evolve(known, uncounted=[target if target.startswith("mylib") else "" for target in known.targets])
    made = planned("recompute everything\nexpect recomputed time <= 1 s\nexpect step time <= 1 s", facts)
    found = [each for each in made.diagnostics if each.code == "APL333"]
    assert [each.message for each in found] == [
        "`expect recomputed time <= 1 s` prices 1 call of `mylib.fused.default` that are recomputed by their bytes "
        "alone: no FLOP formula is known",
        "`expect step time <= 1 s` prices 1 call of `mylib.fused.default` by their bytes alone: "
        "no FLOP formula is known",
    ]


# --- what decides is in the digest ----------------------------------------------------------------------------------


def device_of(name: str) -> DeviceProfile:
    found = read_device(name)
    assert isinstance(found, DeviceProfile)
    return found


def test_the_device_of_whoever_plans_goes_before_that_of_the_policy() -> None:
    made = planned("device h100-sxm\nsave everything where time > 1 ms")
    assert made.times.device is SLOW
    unnamed = planned("device h100-sxm\noptional save everything where time > 1 ms", device=None)
    assert unnamed.times.device.name == "h100-sxm"
    assert unnamed.rules[0].matched != made.rules[0].matched


def test_digests_differ_where_times_decide() -> None:
    rule, other = "optional save everything where time > 1 s\n", "save mm\n"
    fast = device_of("b200")

    def digest(text: str, device: DeviceProfile | None) -> str:
        return planned(text, device=device).digest

    assert len({digest(rule, SLOW), digest(rule, fast), digest(rule, None)}) == 3
    assert len({digest(other, SLOW), digest(other, fast), digest(other, None)}) == 1, "no rule goes by them"
    step = f"{other}expect step time <= 1 s\n"
    assert digest(step, SLOW) == digest(step, fast), "an expectation decides nothing"
    named = "device b200\n"
    assert digest(named + other, None) != digest(other, None), "what the policy says is part of it"
    assert digest(named + rule, None) == digest(named + rule, fast), "and is not told twice"
    assert digest(named + rule, SLOW) != digest(named + rule, None)


def test_the_key_of_compiled_graphs_goes_by_the_figures(tmp_path: Path) -> None:
    keys = []
    for bandwidth in ("1e12", "1_000_000_000_000", "2e12"):
        text = f'name = "ours"\n[compute]\nfloat32 = 1e12\n[memory]\nbandwidth = {bandwidth}\n'
        (tmp_path / "ours.toml").write_text(text.replace("_", ""), encoding="utf-8")
        (tmp_path / "a.apl").write_text('device "ours.toml"\nsave everything where time > 1 ms', encoding="utf-8")
        keys.append(policy_key(policylang.load(tmp_path / "a.apl"), root=""))
    assert keys[0] != keys[2]


def test_a_tree_built_by_hand_has_the_figures_in_its_text() -> None:
    found = policylang.parse("device h100-sxm\nsave mm")
    bare = evolve(found, canonical="")
    assert policy_text(bare) != policy_text(evolve(bare, device=device_of("b200")))
    assert format_policy(found) == found.canonical
