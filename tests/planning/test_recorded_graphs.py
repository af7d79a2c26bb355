"""Plans of recorded and real models: every figure by hand from the shapes, FSDP with its contracts, and records."""

from collections.abc import Sequence
from functools import cache

import pytest
from attrs import evolve

import policylang
from policylang.api.load import parse
from policylang.errors import PolicyMatchError
from policylang.graph.facts import Facts, InputKind, LostMarker
from policylang.language.diagnostics import Diagnostic, Severity, is_error
from policylang.language.loader import load_policy, parse_policy
from policylang.planning.capabilities import JOINT as CAPABILITIES
from policylang.planning.capabilities import JOINT as ON_JOINT
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.rule_warnings import FsdpParameter, FsdpParameters
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.graph.captured import facts_of_model
from tests.planning.reference import Reference
from tests.planning.strategies import JOINT as LIKE_JOINT
from tests.planning.strategies import names
from tests.support.drawn import slow
from tests.support.shared_graphs import JOINT, shared_facts
from tests.support.textgraph import facts_of

# Every figure was worked out by hand from the shapes on one rank (2 × 8192 tokens, hidden 4096, 8 tensor-parallel
# ranks: 4 of 32 heads, 1 of 8 key-value heads, 1792 of 14336 hidden units of the feed-forward, bfloat16).
LAYERS = 32
FSDP = "must_recompute chain through all_gather where from parameter"
POLICY = f"include <llama3_sac>\nundecided -> recompute\n{FSDP}"

TOKENS = 2 * 8192
BF16 = 2
HIDDEN_STATE = TOKENS // 8 * 4096 * BF16  # the residual stream is sharded along the sequence
ATTENTION = 2 * 4 * 8192 * (128 * BF16 + 4) + 2 * 8 + 8  # output, logsumexp in float32, seed and offset of no dropout
PROJECTIONS = TOKENS * (512 + 128 + 1792) * BF16  # q, v and gate: the 1st, 3rd and 5th; nothing reads the 7th again
SAVED_PER_BLOCK = ATTENTION + PROJECTIONS + 3 * HIDDEN_STATE  # both residual sums, and what attention sends on
AGAIN_PER_BLOCK = 2 * TOKENS * 4096 * (128 + 1792)  # k and up; the output projection lies before a saved sum


@cache
def facts(tagged: bool) -> Facts:
    """Of the recording, with or without the tags that its model's own checkpoint wrote."""
    found = shared_facts(JOINT)
    return found if tagged else evolve(found, user_tags=[None] * len(found))


@cache
def planned(text: str = POLICY, tagged: bool = False) -> Plan:
    return plan(parse(text), facts(tagged), CAPABILITIES)


def test_what_each_rule_matches_and_decides() -> None:
    made = planned()
    assert made.diagnostics == ()
    found = {outcome.rule.text: (len(outcome.matched), len(outcome.decided)) for outcome in made.rules}
    gathered = found.pop(FSDP)
    ground = found.pop("recompute everything in block")
    assert found == {
        "optional save attention in block": (LAYERS, LAYERS),
        "save matmul in block": (7 * LAYERS, 4 * LAYERS),
        "optional recompute every 2nd projection per block": (3 * LAYERS, 3 * LAYERS),
        "optional save first residual per block": (LAYERS, LAYERS),
        "save everything in block where crosses block": (LAYERS, LAYERS),
        "optional save topk in block": (0, 0),
        "optional save (reduce_scatter or all_to_all) in block": (2 * LAYERS, 2 * LAYERS),
        "optional save everything in block where is mutated": (0, 0),
    }
    assert gathered[0] == gathered[1] == len(gather_lines())
    names, owners = made.facts.names, made.facts.owners
    in_block = [row for row in made.facts.forward if made.block_of[row] >= 0 and owners[row] == row]
    assert ground[0] == len(in_block)
    others = sum(decided for _, decided in found.values())
    lines = gather_lines()
    gathered_in_block = sum(names[row] in lines for row in in_block)
    assert ground[1] == ground[0] - others - gathered_in_block


@cache
def gather_lines() -> frozenset[str]:
    """Owners on the lines through the gathers of parameters, found by walking the graph, not by the selectors."""
    names, targets = facts(False).names, facts(False).targets
    lines: set[str] = set()
    gathers = 0
    for row, kind in enumerate(facts(False).input_kinds):
        line: list[int] = []
        while kind == InputKind.PARAMETER and (following := _next(row)):
            line += following
            row = following[-1]
        if any("all_gather_into_tensor" in targets[each] for each in line):
            gathers += 1
            lines |= {names[each] for each in line if "getitem" not in names[each] and "wait" not in names[each]}
    assert gathers == 290
    return frozenset(lines)


def _next(row: int) -> list[int]:
    """The row that follows on a straight line, or a split with its pieces and the concatenation of them."""
    found = facts(False)

    def users(each: int) -> list[int]:
        return [user for user in found.users[each] if found.forward_mask[user]]

    if len(users(row)) == 1 and len(set(found.inputs[users(row)[0]])) == 1:
        return users(row)
    joined = {user for piece in users(row) for user in users(piece)}
    pieces = users(row) and all("getitem" in found.names[piece] for piece in users(row))
    if pieces and len(joined) == 1 and set(found.inputs[next(iter(joined))]) == set(users(row)):
        return [*users(row), *joined]
    return []


def test_saved_bytes_and_flops_once_more_to_the_last() -> None:
    outcome = saved_and_recomputed(planned())
    assert outcome.final
    assert SAVED_PER_BLOCK == 147_062_808
    assert outcome.saved_bytes_by_block == (SAVED_PER_BLOCK,) * LAYERS
    assert outcome.saved_bytes == LAYERS * SAVED_PER_BLOCK
    assert outcome.recomputed_flops_by_block == (AGAIN_PER_BLOCK,) * LAYERS
    assert outcome.recomputed_flops == LAYERS * AGAIN_PER_BLOCK


def test_no_gathered_weight_is_saved() -> None:
    made = planned()
    saved = {made.facts.names[row] for row in saved_and_recomputed(made).saved}
    assert saved.isdisjoint(gather_lines())
    lines = (row for row, name in enumerate(made.facts.names) if name in gather_lines())
    followers = {made.facts.names[user] for row in lines for user in made.facts.users[row]}
    assert not {name for name in saved & followers if name.startswith(("permute", "view", "getitem", "wait"))}


def test_the_models_own_checkpoint_keeps_its_tags_unless_overridden_and_is_counted() -> None:
    made = planned(tagged=True)
    outcome = made.rules[-1]
    assert (len(outcome.matched), len(outcome.decided), outcome.kept_by_user) == (1_933, 10, 1_923)
    assert all(rule.decided == () for rule in made.rules[:-1])
    warned = [found.message for found in made.diagnostics]
    tagged = "the model's own checkpoint has tagged all 5,859 nodes it matches"
    assert f"`recompute everything in block` decides nothing: {tagged}" in warned
    made = planned(f"include <llama3_sac>\noverride {FSDP}", tagged=True)
    assert len(made.rules[-1].decided) == 1_933


def test_an_expectation_holds_at_the_figure_and_fails_a_byte_below() -> None:
    held = planned(f"{POLICY}\nexpect saved per block <= {SAVED_PER_BLOCK} B")
    assert held.diagnostics == ()
    failed = planned(f"{POLICY}\nexpect saved per block <= {SAVED_PER_BLOCK - 1} B")
    assert [found.severity.name for found in failed.diagnostics] == ["ERROR"]


@pytest.mark.parametrize("policy_name", ["llama3_sac", "torchtitan_full", "every_2nd_layer"])
@pytest.mark.parametrize("model", ["llama", *map(slow, ("mixtral", "gpt2"))])
def test_a_bundled_policy_is_planned_as_the_reference_plans_it(model: str, policy_name: str):
    facts = facts_of_model(model)
    loaded = load_policy(policy_name)
    assert loaded.policy is not None, loaded.diagnostics
    made = plan(loaded.policy, facts, LIKE_JOINT)
    routed = model == "mixtral" and policy_name != "llama3_sac"  # which saves `topk` itself
    assert [found.code for found in made.diagnostics] == ["APL308"] * routed
    expected = Reference(loaded.policy, facts).decisions(replays_random=True)
    assert {row: (d.action, d.rule, d.why.value) for row, d in enumerate(made.decisions) if d is not None} == expected


def test_the_three_sentences_on_a_llama():
    """Seven projections a layer: every 2nd is the 2nd, 4th and 6th; what is left of them is saved where it is read."""
    facts = facts_of_model("llama")
    text = "recompute everything in block; save mm; recompute every 2nd mm; save first add per block; undecided -> save"
    policy = parse_policy(text).policy
    made = plan(policy, facts, LIKE_JOINT)
    assert made.block_names == ("model.model.layers.0", "model.model.layers.1")
    everything, save_mm, every_second, first_add = made.rules
    by_block = [[row for row in every_second.decided if made.block_of[row] == block] for block in (0, 1)]
    modules = [[facts.modules[row].rpartition(".")[2] for row in rows] for rows in by_block]
    assert modules == [["k_proj", "o_proj", "up_proj"]] * 2
    assert save_mm.overridden_by == {2: 6}
    assert len(first_add.matched) == 2
    assert everything.overridden_by[3] == 2
    outcome = saved_and_recomputed(made)
    assert outcome.final
    assert not set(names(facts, every_second.decided)) & set(names(facts, outcome.saved))
    # bytes of the distinct values that stay: nothing of them is a view of another
    assert outcome.saved_bytes <= sum(facts.bytes[row] for row in outcome.saved)
    assert sum(outcome.saved_bytes_by_block) <= outcome.saved_bytes
    again = [row for row in outcome.recomputed if facts.targets[row] == "aten.mm.default"]
    assert set(again) <= set(every_second.decided)


def graph(*inputs: str, needed: bool = True) -> Facts:
    """A gather of each input, and what is made of all of them and read by the backward."""
    lines = []
    for number, kind in enumerate(inputs):
        lines += [
            f"%i{number} = {kind}",
            f"%g{number} = _c10d_functional.all_gather_into_tensor.default(%i{number}, 4, 0) collective group=dp:4"
            " bytes=1MiB",
            f"%w{number} = _c10d_functional.wait_tensor.default(%g{number}) bytes=1MiB",
            f"%v{number} = aten.permute.default(%w{number}) view bytes=1MiB",
        ]
    read = [f"%v{number}" for number, kind in enumerate(inputs) if needed or kind.startswith("parameter")]
    lines += [f"%cat = aten.cat.default({', '.join(f'%v{number}' for number in range(len(inputs)))}) bytes=4MiB"]
    lines += ["---", "%t = tangent", f"%b = aten.mul.Tensor(%t, {', '.join(read)})", "output(%cat, %b)"]
    return facts_of("\n".join(lines))


def with_contract(text: str, facts: Facts) -> Plan:
    return plan(policylang.parse(text), facts, ON_JOINT)


def notes(text: str, facts: Facts) -> list[Diagnostic]:
    return [found for found in with_contract(text, facts).diagnostics if found.code == "APL318"]


PARAMETER, BUFFER, INPUT = "parameter name=head.weight", "buffer name=rope.table", "input"


@pytest.mark.parametrize("name", ["fsdp_reshard_always", "fsdp_reshard_never"])
def test_gathers_of_a_buffer_and_of_an_input_are_named(name: str) -> None:
    (note,) = notes(f"include <{name}>", graph(BUFFER, PARAMETER, INPUT))
    assert note.severity is Severity.NOTE
    assert "is about parameters, and leaves 2 all-gathers of other inputs" in note.message
    assert note.details == ("g0: of the buffer `rope.table`, 1 MiB", "g2: of the input `i2`, 1 MiB")
    assert note.help == (
        "to decide about them too, write rules for `chain through (all_gather where from buffer)` and "
        "`chain through (all_gather where from input)`"
    )


def test_a_rule_about_all_others_is_no_contract_about_parameters() -> None:
    facts = graph(BUFFER, PARAMETER, INPUT)
    assert not notes("override save all_gather where not from parameter and from buffer", facts)
    assert notes("override save all_gather where from parameter", facts)


def test_a_rule_about_them_covers_them() -> None:
    facts = graph(BUFFER, PARAMETER, INPUT)
    text = "include <fsdp_reshard_always>\noverride must_recompute chain through (all_gather where from buffer)"
    (note,) = notes(text, facts)
    assert note.details == ("g2: of the input `i2`, 1 MiB",)
    made = with_contract(f"{text}\nmust_recompute everything where gathered input", facts)
    assert not [found for found in made.diagnostics if found.code == "APL318"]
    for name in ("g0", "v0", "g1", "v1", "g2", "v2"):
        decision = made.decisions[facts.index[name]]
        assert decision.action.recomputes


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("include <fsdp_reshard_always>", graph(PARAMETER, PARAMETER)),
        ("include <fsdp_reshard_always>", graph(PARAMETER, BUFFER, needed=False)),
        ("recompute everything", graph(PARAMETER, BUFFER)),
        ("must_recompute chain through all_gather where from parameter", graph(PARAMETER, BUFFER)),
        ("recompute everything where from buffer", graph(PARAMETER, BUFFER)),
    ],
)
def test_nothing_is_said_where_nothing_is_left_or_nothing_is_promised(text: str, facts: Facts) -> None:
    assert notes(text, facts) == []


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


def gathered_by_fsdp(text: str, *again: bool) -> Plan:
    policy = parse_policy(f"recompute everything\n{text}").policy
    return plan(policy, facts_of(GRAPH), ON_JOINT, aside=weights(again) if again else None)


def found(text: str, *again: bool) -> list[Diagnostic]:
    return [each for each in gathered_by_fsdp(text, *again).diagnostics if each.code in ("APL301", "APL414", "APL415")]


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
    made = gathered_by_fsdp(text, again)
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


REPLAYED = """
    %x = input bytes=32
    %mm = aten.mm.default(%x, %x) bytes=32
    ---
    %t = tangent
    %mul = aten.mul.Tensor(%t, %mm)
    output(%mm, %mul)
"""


def lost(text: str, count: int = 1) -> list[Diagnostic]:
    records = tuple(
        LostMarker(f"silu_{number}", "no forward node of this graph was traced from it") for number in range(count)
    )
    facts = evolve(facts_of(REPLAYED), lost_records=records)
    found = plan(policylang.parse(text), facts, Capabilities(name="a test", undecided="auto")).diagnostics
    return [diagnostic for diagnostic in found if diagnostic.code == "APL310"]


@pytest.mark.parametrize(
    "text",
    [
        "optional save everything where recorded saved",
        "optional save mm where is view or not recorded saved",
        "let earlier = everything where recorded saved\nlet them = earlier and mm\noptional save them",
        "expect no mm where recorded saved saved",
    ],
)
def test_a_policy_that_reads_records_is_told(text: str) -> None:
    (diagnostic,) = lost(text, count=3)
    assert "`silu_0` and 2 more are lost" in diagnostic.message
    assert diagnostic.span is not None
    assert len(diagnostic.details) == 3


@pytest.mark.parametrize("text", ["save mm", "let earlier = everything where recorded saved\nsave mm"])
def test_any_other_policy_is_not(text: str) -> None:
    assert lost(text) == []
