"""`llama3_sac` with FSDP's line on a recorded step of Llama-3 8B on 128 ranks: 19,655 nodes, not written for a test.

Every figure was worked out by hand from the shapes on one rank (2 × 8192 tokens, hidden 4096, 8 tensor-parallel
ranks: 4 of 32 heads, 1 of 8 key-value heads, 1792 of 14336 hidden units of the feed-forward, bfloat16).
"""

from __future__ import annotations

from functools import cache

from attrs import evolve

from policylang.api.load import parse
from policylang.graph.facts import Facts, InputKind
from policylang.planning.capabilities import JOINT as CAPABILITIES
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.shared_graphs import JOINT, shared_facts

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


def test_saved_bytes_to_the_byte() -> None:
    outcome = saved_and_recomputed(planned())
    assert outcome.final
    assert SAVED_PER_BLOCK == 147_062_808
    assert outcome.saved_bytes_by_block == (SAVED_PER_BLOCK,) * LAYERS
    assert outcome.saved_bytes == LAYERS * SAVED_PER_BLOCK


def test_flops_once_more() -> None:
    outcome = saved_and_recomputed(planned())
    assert outcome.recomputed_flops_by_block == (AGAIN_PER_BLOCK,) * LAYERS
    assert outcome.recomputed_flops == LAYERS * AGAIN_PER_BLOCK


def test_no_gathered_weight_is_saved() -> None:
    made = planned()
    saved = {made.facts.names[row] for row in saved_and_recomputed(made).saved}
    assert saved.isdisjoint(gather_lines())
    lines = (row for row, name in enumerate(made.facts.names) if name in gather_lines())
    followers = {made.facts.names[user] for row in lines for user in made.facts.users[row]}
    assert not {name for name in saved & followers if name.startswith(("permute", "view", "getitem", "wait"))}


def test_the_models_own_checkpoint_keeps_its_tags_and_is_counted() -> None:
    made = planned(tagged=True)
    outcome = made.rules[-1]
    assert (len(outcome.matched), len(outcome.decided), outcome.kept_by_user) == (1_933, 10, 1_923)
    assert all(rule.decided == () for rule in made.rules[:-1])
    warned = [found.message for found in made.diagnostics]
    assert f"`recompute everything in block` decides nothing: {own_checkpoint(5_859)}" in warned


def own_checkpoint(nodes: int) -> str:
    return f"the model's own checkpoint has tagged all {nodes:,} nodes it matches"


def test_override_takes_the_gathers_from_the_models_own_checkpoint() -> None:
    made = planned(f"include <llama3_sac>\noverride {FSDP}", tagged=True)
    assert len(made.rules[-1].decided) == 1_933


def test_an_expectation_holds_at_the_figure_and_fails_a_byte_below() -> None:
    held = planned(f"{POLICY}\nexpect saved per block <= {SAVED_PER_BLOCK} B")
    assert held.diagnostics == ()
    failed = planned(f"{POLICY}\nexpect saved per block <= {SAVED_PER_BLOCK - 1} B")
    assert [found.severity.name for found in failed.diagnostics] == ["ERROR"]
