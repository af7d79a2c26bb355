"""Rules and expectations: about time, and every form of `expect`."""

from pathlib import Path

import pytest
from attrs import evolve

import policylang
from policylang.backends.caching import policy_key
from policylang.graph.facts import Facts, StepKind
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Diagnostic, one_cause
from policylang.language.statements import format_policy
from policylang.planning.capabilities import EAGER, FLAT, JOINT
from policylang.planning.inspection.worth import rules_on, time_of_step
from policylang.planning.plan import ExpectationOutcome, Plan, policy_text
from policylang.planning.planner import plan
from policylang.simulation.streams import step_time
from tests.planning.strategies import JOINT as LIKE_JOINT
from tests.planning.strategies import actions, only
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
    said = "`where time > 3 ms and time_per_gib > 1 us` does not hold: its time is 2 ms and its time_per_gib is 2 s"
    assert rules_on(made, FACTS.index["mm"])[0].why == said
    assert rules_on(made, FACTS.index["t"])[0].why.endswith("its time is 0 s and it has no time_per_gib")


# --- expectations ---------------------------------------------------------------------------------------------------
def test_recomputed_time_is_that_of_what_runs_again() -> None:
    made = planned("save sin, cos, topk\nexpect recomputed time <= 8 ms\nexpect recomputed time <= 80%")
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
    found = step_time(made.facts, made.schedule, made.times)
    step, share, exposed = made.expectations
    assert step.margin == pytest.approx(0.013 - found.step)
    assert step.status == "held"
    assert share.margin == pytest.approx(0.05)
    assert (exposed.status, exposed.found) == ("failed", "0 s")


def test_copies_that_compute_waits_for_are_exposed() -> None:
    made = planned("offload mm\nexpect exposed <= 1 us\nexpect exposed <= 1%")
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
    (found,) = (each for each in planned(TIMED, device=None).diagnostics if each.code == "APL370")
    assert found.message == ("`time > 1 ms` is about time, as 2 other phrases are, and no device is given")
    assert found.span.text == "time > 1 ms"
    for way in ("`device h100-sxm`", "`--device h100-sxm`", "`device=`", "mi300x", 'device "cluster.toml"'):
        assert way in found.help
    (path,) = policylang.check(policylang.parse(RULES + TIMED), graph=FACTS).diagnostics
    assert path.code == "APL370", "what follows from it is a note, and nothing is said of waiting"
    (follows,) = path.related
    assert follows.message == "from it follows: `save everything where time > 1 ms` matches nothing in this graph"


def test_an_expectation_alone_needs_a_device_too() -> None:
    (found,) = planned("save mm\nexpect exposed <= 5%", device=None).diagnostics
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
    named = "device h100-sxm\n"
    assert [each for each in planned(named + TIMED, odd, None).diagnostics if each.code == "APL159"]
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
def test_the_device_of_whoever_plans_goes_before_that_of_the_policy() -> None:
    made = planned("device h100-sxm\nsave everything where time > 1 ms")
    assert made.times.device is SLOW
    unnamed = planned("device h100-sxm\noptional save everything where time > 1 ms", device=None)
    assert unnamed.times.device.name == "h100-sxm"
    assert unnamed.rules[0].matched != made.rules[0].matched


def test_digests_differ_where_times_decide() -> None:
    rule, other = "optional save everything where time > 1 s\n", "save mm\n"
    fast = read_device("b200")

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
    assert policy_text(bare) != policy_text(evolve(bare, device=read_device("b200")))
    assert format_policy(found) == found.canonical


EXPECTED_FACTS = facts_of(f"""
    %x = input bytes={MIB}
    %w = parameter bytes={MIB}
    %mm = aten.mm.default(%x, %w) layers.0.attn bytes={100 * MIB} flops=1000000
    %sin = aten.sin.default(%mm) layers.0.attn bytes={20 * MIB}
    %mm_1 = aten.mm.default(%sin, %w) layers.1.attn bytes={200 * MIB} flops=1000000
    %mm_2 = aten.mm.default(%mm_1, %w) layers.1.attn bytes={20 * MIB - MIB // 2} flops=2000000
    %cos = aten.cos.default(%mm_2) layers.1.attn bytes={MIB}
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t, %mm, %sin)
    %b_1 = aten.mul.Tensor(%b, %mm_1, %mm_2)
    output(%cos, %b_1)
""")
"""The forward makes 120 MiB in block 0 and 220.5 MiB in block 1; nothing reads the cosine."""
BARE = facts_of("%x = input\n%sin = aten.sin.default(%x)\n---\n%b = aten.mul.Tensor(%sin)\noutput(%sin, %b)")
EMPTY = facts_of("%x = input\n---\n%b = aten.mul.Tensor(%x)\noutput(%b)")
PIECES = facts_of("""
    %x = input bytes=8
    %view = aten.view.default(%x) view
    %norm = aten.native_layer_norm.default(%view) multi_output bytes=24
    %piece = builtin.getitem(%norm, 0) bytes=8
    %sin = aten.sin.default(%piece) bytes=8
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t, %view, %piece, %sin)
    output(%sin, %b)
""")
SAVE = "save everything"
FIRST_AGAIN = "save everything\nrecompute mm in layers.0"
ALL_AGAIN = "save everything\nrecompute mm"


def expecting(rules: str, facts: Facts = EXPECTED_FACTS) -> Plan:
    return plan(policylang.parse(rules), facts, LIKE_JOINT)


def found(
    text: str, rules: str = SAVE, facts: Facts = EXPECTED_FACTS
) -> tuple[ExpectationOutcome, tuple[Diagnostic, ...]]:
    made = expecting(f"{rules}\n{text}", facts)
    return made.expectations[0], made.diagnostics


@pytest.mark.parametrize(
    ("rules", "text", "status", "figure"),
    [
        (SAVE, "saved per block <= 210 MiB", "failed", "219.5 MiB in block 1"),
        (SAVE, "saved per block <= 220 MiB", "held", "219.5 MiB in block 1"),
        (SAVE, "saved per block >= 200 MiB", "failed", "120 MiB in block 0"),
        (SAVE, "saved <= 6.4 GiB", "held", "339.5 MiB"),
        (SAVE, "saved == 1 GiB", "failed", "339.5 MiB"),
        (SAVE, f"saved <= {339 * MIB + MIB // 2 - 1} B", "failed", "339.5 MiB (355,991,552 bytes)"),
        (FIRST_AGAIN, "recomputed flops <= 20%", "failed", "25%"),
        (FIRST_AGAIN, "recomputed flops <= 1 MFLOP", "held", "1 MFLOP"),
        (FIRST_AGAIN, "recomputed <= 99 MiB", "failed", "100 MiB"),
        (SAVE, "saved <= 90% of forward", "failed", "99.7%"),
        (SAVE, "saved per block <= 99% of forward", "failed", "100% in block 0"),
        (FIRST_AGAIN, "recomputed <= 30% of forward", "held", "29.4%"),
        (ALL_AGAIN, "recomputed operators <= 50%", "failed", "60%"),
        (ALL_AGAIN, "recomputed operators <= 3", "held", "3"),
        (ALL_AGAIN, "recomputed operators per block <= 50%", "failed", "66.7% in block 1"),
        (SAVE, "peak <= 1 GiB", "held", "342.5 MiB"),
        (SAVE, "peak <= 1 MiB", "failed", "342.5 MiB"),
        (SAVE, "exactly 3 mm", "held", "3"),
        (SAVE, "at least 4 mm", "failed", "3"),
        (SAVE, "at most 3 mm", "held", "3"),
        (SAVE, "exactly 2 mm per block", "failed", "1 in block 0"),
        (SAVE, "at least 1 mm per block", "held", "1 to 2 in each block"),
        (SAVE, "at most 1 mm per module", "failed", "2 in layers.1.attn"),
        (FIRST_AGAIN, "every sin saved", "held", "1 of 1 node saved"),
        (FIRST_AGAIN, "every mm saved", "failed", "1 of 3 nodes not saved"),
        (FIRST_AGAIN, "no mm recomputed", "failed", "1 of 3 nodes recomputed"),
        (FIRST_AGAIN, "no sin recomputed", "held", "none of 1 node recomputed"),
        # the backward does not need the cosine: it is what was decided, and never really saved
        (SAVE, "every cos saved", "held", "1 of 1 node saved"),
        (SAVE, "every cos recomputed", "failed", "1 of 1 node not recomputed"),
        (SAVE, "no cos saved", "held", "none of 1 node saved"),
        (SAVE, "every bmm saved", "failed", "no node matches"),
        (SAVE, "no bmm saved", "held", "none of 0 nodes saved"),
        # what depends on the partitioner
        ("save sin", "every sin saved", "held", "1 of 1 node saved"),
        ("save sin", "saved <= 1 MiB", "failed", "at least 20 MiB"),
        *(
            ("save sin", text, "deferred", "it depends on values that are left to PyTorch's partitioner")
            for text in ("saved <= 1 GiB", "peak <= 1 GiB", "saved >= 1 B", "every mm saved", "no mm saved")
        ),
    ],
)
def test_what_is_found(rules: str, text: str, status: str, figure: str) -> None:
    outcome, diagnostics = found(f"expect {text}", rules)
    assert (outcome.status, outcome.found, outcome.text) == (status, figure, f"expect {text}")
    assert outcome.source == f"<policy>:{rules.count(chr(10)) + 2}"
    assert bool(diagnostics) is (status == "failed")


@pytest.mark.parametrize(
    ("facts", "rules", "text", "figure"),
    [
        (BARE, SAVE, "expect saved per block <= 1 B", "the graph has no blocks"),
        (EMPTY, "undecided -> auto", "expect saved <= 1% of forward", "0%"),
        (PIECES, "recompute everything", "expect recomputed operators <= 2", "2"),  # no views, and no pieces
    ],
)
def test_of_other_graphs(facts: Facts, rules: str, text: str, figure: str) -> None:
    assert found(text, rules, facts)[0].found == figure


@pytest.mark.parametrize(
    ("rules", "text", "code", "message", "details"),
    [
        (SAVE, "expect saved per block <= 210 MiB", "APL305", "219.5 MiB in block 1", "block 1 is layers.1"),
        (SAVE, "expect exactly 2 mm per block", "APL305", "1 in block 0", "block 0, layers.0: 1"),
        (FIRST_AGAIN, "expect every mm saved", "APL305", "1 of 3 nodes not saved", "mm is recomputed"),
        (SAVE, "expect every bmm saved", "APL301", "is about nothing: `bmm` matches nothing", "bmm: 0 nodes"),
    ],
)
def test_the_error_of_one_that_fails(rules: str, text: str, code: str, message: str, details: str) -> None:
    error = only(found(text, rules)[1], code)
    assert error.message.startswith(f"`{text}` {'does not hold: ' if code == 'APL305' else ''}{message}")
    assert error.details == (details,)


# --- shares of the blocks ---------------------------------------------------------------------------------------------
def blocks_of_sines(blocks: int) -> Facts:
    """One sine a block, and one outside."""
    lines = ["%x = input", "%head = aten.sin.default(%x)"]
    lines += [f"%sin_{block} = aten.sin.default(%head) layers.{block}" for block in range(blocks)]
    read = ", ".join(["%head", *(f"%sin_{block}" for block in range(blocks))])
    return facts_of("\n".join([*lines, "---", f"%b = aten.mul.Tensor({read})", "output(%head, %b)"]))


@pytest.mark.parametrize(("blocks", "first", "last"), [(1, "", ""), (4, "01", "3"), (5, "01", "4")])
def test_shares_of_the_blocks_are_rounded_down(blocks: int, first: str, last: str) -> None:
    rules = f"{SAVE}\nrecompute everything in first 50% of blocks\nrecompute everything in last 25% of blocks"
    made = expecting(rules, blocks_of_sines(blocks))
    again = {name for name, action in actions(made).items() if action == "recompute"}
    assert again == {f"sin_{block}" for block in first + last}
    assert [each.code for each in made.diagnostics] == ([] if first else ["APL369"] * 2)


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_share_of_no_block_is_one_error_unless_it_is_optional(blocks: int) -> None:
    facts, half = blocks_of_sines(blocks), "sin in first 50% of blocks"
    made = expecting(f"{SAVE}\nrecompute {half}", facts)
    if blocks:
        told = only(made.diagnostics, "APL369").message
        assert told.endswith("is no block: this graph has 1 block, and a share is rounded down")
    else:
        (note,) = only(one_cause(made.diagnostics), "APL302").related
        assert note.message.endswith("is no block: this graph has no blocks")
    assert expecting(f"{SAVE}\noptional recompute {half}", facts).diagnostics == ()
    assert only(expecting(f"save ({half}) or sin", facts).diagnostics, "APL369")
    assert only(expecting(f"{SAVE}\nexpect every ({half}) saved", facts).diagnostics, "APL369")
