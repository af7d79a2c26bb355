"""Every form of `expect`, held, failed with the figure found, and deferred."""

from __future__ import annotations

import pytest

import policylang
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, one_cause
from policylang.planning.plan import ExpectationOutcome, Plan
from policylang.planning.planner import plan
from tests.planning.sentences import JOINT, actions, only
from tests.support.textgraph import facts_of

MIB = 1 << 20
FACTS = facts_of(f"""
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


def planned(rules: str, facts: Facts = FACTS) -> Plan:
    return plan(policylang.parse(rules), facts, JOINT)


def found(text: str, rules: str = SAVE, facts: Facts = FACTS) -> tuple[ExpectationOutcome, tuple[Diagnostic, ...]]:
    made = planned(f"{rules}\n{text}", facts)
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
    made = planned(rules, blocks_of_sines(blocks))
    again = {name for name, action in actions(made).items() if action == "recompute"}
    assert again == {f"sin_{block}" for block in first + last}
    assert [each.code for each in made.diagnostics] == ([] if first else ["APL369"] * 2)


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_share_of_no_block_is_one_error_unless_it_is_optional(blocks: int) -> None:
    facts, half = blocks_of_sines(blocks), "sin in first 50% of blocks"
    made = planned(f"{SAVE}\nrecompute {half}", facts)
    if blocks:
        told = only(made.diagnostics, "APL369").message
        assert told.endswith("is no block: this graph has 1 block, and a share is rounded down")
    else:
        (note,) = only(one_cause(made.diagnostics), "APL302").related
        assert note.message.endswith("is no block: this graph has no blocks")
    assert planned(f"{SAVE}\noptional recompute {half}", facts).diagnostics == ()
    assert only(planned(f"save ({half}) or sin", facts).diagnostics, "APL369")
    assert only(planned(f"{SAVE}\nexpect every ({half}) saved", facts).diagnostics, "APL369")
