"""Every form of `expect`, held, failed with the figure found, and deferred."""

from __future__ import annotations

from fractions import Fraction

import pytest

from policylang.graph.facts import Facts
from policylang.language import syntax as s
from policylang.language.diagnostics import one_cause
from policylang.language.syntax import Scope
from tests.planning.sentences import actions, everything, in_module, only, op, planned, recompute, save
from tests.support.textgraph import facts_of
from tests.support.trees import span

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


def total(text: str, op_: str, value: float, dimension: str, figure: str = "saved", per_block: bool = False):
    limit = s.Quantity(value, dimension, span(text))
    return s.ExpectTotal(figure, op_, limit, per_block, span(text))


def found(expectation: s.Expectation, *rules: s.Rule, **more):
    made = planned(FACTS, *(rules or (save(everything),)), expectations=(expectation,), **more)
    return made.expectations[0], made.diagnostics


def fate(text: str, quantifier: str, selector: s.Selector, what: str) -> s.ExpectFate:
    return s.ExpectFate(quantifier, selector, what, span(text))


def count(text: str, bound: str, n: int, selector: s.Selector, scope: Scope | None = None) -> s.ExpectCount:
    return s.ExpectCount(bound, n, selector, scope, span(text))


def test_saved_bytes_per_block_name_the_worst_block():
    text = "expect saved per block <= 210 MiB"
    outcome, diagnostics = found(total(text, "<=", 210 * MIB, "bytes", per_block=True))
    assert (outcome.status, outcome.found, outcome.text) == ("failed", "219.5 MiB in block 1", text)
    assert outcome.source == "test.apl:1"
    error = only(diagnostics, "APL305")
    assert error.message == f"`{text}` does not hold: 219.5 MiB in block 1"
    assert error.details == ("block 1 is layers.1",)
    outcome, diagnostics = found(total(text, "<=", 220 * MIB, "bytes", per_block=True))
    assert (outcome.status, outcome.found, diagnostics) == ("held", "219.5 MiB in block 1", ())


def test_a_lower_limit_names_the_smallest_block():
    outcome, _ = found(total("expect saved per block >= 200 MiB", ">=", 200 * MIB, "bytes", per_block=True))
    assert (outcome.status, outcome.found) == ("failed", "120 MiB in block 0")


def test_per_block_without_blocks_fails():
    bare = facts_of("%x = input\n%sin = aten.sin.default(%x)\n---\n%b = aten.mul.Tensor(%sin)\noutput(%sin, %b)")
    expectation = total("expect saved per block <= 1 B", "<=", 1, "bytes", per_block=True)
    made = planned(bare, save(everything), expectations=(expectation,))
    assert made.expectations[0].found == "the graph has no blocks"


def test_saved_bytes_in_all():
    assert found(total("expect saved <= 6.4 GiB", "<=", 6.4 * 1024 * MIB, "bytes"))[0].found == "339.5 MiB"
    outcome, _ = found(total("expect saved == 1 GiB", "==", 1024 * MIB, "bytes"))
    assert outcome.status == "failed"


def test_a_figure_that_rounds_to_its_limit_is_given_in_full():
    outcome, _ = found(total("expect saved < 339.5 MiB", "<=", 339.5 * MIB - 1, "bytes"))
    assert (outcome.status, outcome.found) == ("failed", "339.5 MiB (355,991,552 bytes)")


def test_recomputed_flops_as_a_share_and_as_a_number():
    rules = (save(everything), recompute(in_module(op("mm"), "layers.0")))
    outcome, _ = found(total("expect recomputed flops <= 20%", "<=", 0.2, "fraction", "recomputed flops"), *rules)
    assert (outcome.status, outcome.found) == ("failed", "25%")
    outcome, _ = found(total("expect recomputed flops <= 1 MFLOP", "<=", 1e6, "flops", "recomputed flops"), *rules)
    assert (outcome.status, outcome.found) == ("held", "1 MFLOP")
    outcome, _ = found(total("expect recomputed <= 99 MiB", "<=", 99 * MIB, "bytes", "recomputed"), *rules)
    assert (outcome.status, outcome.found) == ("failed", "100 MiB")


def test_shares_of_what_the_forward_makes():
    """The forward makes 120 MiB in block 0 and 220.5 MiB in block 1."""
    outcome, _ = found(total("expect saved <= 90% of forward", "<=", 0.9, "fraction"))
    assert (outcome.status, outcome.found) == ("failed", "99.7%")  # all but the cosine
    outcome, _ = found(total("expect saved per block <= 99% of forward", "<=", 0.99, "fraction", per_block=True))
    assert (outcome.status, outcome.found) == ("failed", "100% in block 0")
    rules = (save(everything), recompute(in_module(op("mm"), "layers.0")))
    outcome, _ = found(total("expect recomputed <= 30% of forward", "<=", 0.3, "fraction", "recomputed"), *rules)
    assert (outcome.status, outcome.found) == ("held", "29.4%")


def test_shares_of_the_operators():
    rules = (save(everything), recompute(op("mm")))
    outcome, _ = found(total("expect …", "<=", 0.5, "fraction", "recomputed operators"), *rules)
    assert (outcome.status, outcome.found) == ("failed", "60%")
    outcome, _ = found(total("expect …", "<=", 3, "number", "recomputed operators"), *rules)
    assert (outcome.status, outcome.found) == ("held", "3")
    outcome, _ = found(total("expect …", "<=", 0.5, "fraction", "recomputed operators", per_block=True), *rules)
    assert (outcome.status, outcome.found) == ("failed", "66.7% in block 1")


def test_shares_of_an_empty_forward_are_none():
    bare = facts_of("%x = input\n---\n%b = aten.mul.Tensor(%x)\noutput(%b)")
    expectation = total("expect saved <= 1% of forward", "<=", 0.01, "fraction")
    assert planned(bare, expectations=(expectation,)).expectations[0].found == "0%"


def test_views_and_pieces_are_no_operators():
    facts = facts_of("""
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
    expectation = total("expect …", "<=", 2, "number", "recomputed operators")
    made = planned(facts, recompute(everything), expectations=(expectation,))
    assert made.expectations[0].found == "2"


@pytest.mark.parametrize(("blocks", "first", "last"), [(1, "", ""), (4, "01", "3"), (5, "01", "4")])
def test_shares_of_the_blocks_are_rounded_down(blocks: int, first: str, last: str):
    facts = blocks_of_sines(blocks)
    half, quarter = (
        s.InBlock(everything, s.BlockSet(kind, share=share), False, span("everything"))
        for kind, share in (("first", Fraction(1, 2)), ("last", Fraction(1, 4)))
    )
    made = planned(facts, save(everything), recompute(half), recompute(quarter))
    again = {name for name, action in actions(made).items() if action == "recompute"}
    assert again == {f"sin_{block}" for block in first + last}
    assert [each.code for each in made.diagnostics] == ([] if first else ["APL369"] * 2)


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_share_of_no_block_is_one_error_unless_it_is_optional(blocks: int):
    half = s.InBlock(op("sin"), s.BlockSet("first", share=Fraction(1, 2)), False, span("sin in first half of blocks"))
    made = planned(blocks_of_sines(blocks), save(everything), recompute(half))
    if blocks:
        told = only(made.diagnostics, "APL369").message
        assert told.endswith("is no block: this graph has 1 block, and a share is rounded down")
    else:
        (note,) = only(one_cause(made.diagnostics), "APL302").related
        assert note.message.endswith("is no block: this graph has no blocks")
    assert planned(blocks_of_sines(blocks), save(everything), recompute(half, optional=True)).diagnostics == ()
    also = s.Union((half, op("sin")), span("half, or all"))
    assert only(planned(blocks_of_sines(blocks), save(also)).diagnostics, "APL369")
    asked = fate("expect every …", "every", half, "saved")
    assert only(planned(blocks_of_sines(blocks), save(everything), expectations=(asked,)).diagnostics, "APL369")


def blocks_of_sines(blocks: int) -> Facts:
    """One sine a block, and one outside."""
    lines = ["%x = input", "%head = aten.sin.default(%x)"]
    lines += [f"%sin_{block} = aten.sin.default(%head) layers.{block}" for block in range(blocks)]
    read = ", ".join(["%head", *(f"%sin_{block}" for block in range(blocks))])
    return facts_of("\n".join([*lines, "---", f"%b = aten.mul.Tensor({read})", "output(%head, %b)"]))


def test_the_peak_is_estimated():
    outcome, _ = found(total("expect peak <= 1 GiB", "<=", 1024 * MIB, "bytes", "peak"))
    assert (outcome.status, outcome.found) == ("held", "342.5 MiB")
    assert found(total("expect peak <= 1 MiB", "<=", MIB, "bytes", "peak"))[0].status == "failed"


@pytest.mark.parametrize(
    ("bound", "n", "status"), [("exactly", 3, "held"), ("at least", 4, "failed"), ("at most", 3, "held")]
)
def test_counts_in_the_graph(bound, n, status):
    outcome, _ = found(count(f"expect {bound} {n} mm", bound, n, op("mm")))
    assert (outcome.status, outcome.found) == (status, "3")


def test_counts_per_block_name_the_block_that_is_off():
    outcome, diagnostics = found(count("expect exactly 2 mm per block", "exactly", 2, op("mm"), Scope.BLOCK))
    assert (outcome.status, outcome.found) == ("failed", "1 in block 0")
    assert only(diagnostics, "APL305").details == ("block 0, layers.0: 1",)
    outcome, _ = found(count("expect at least 1 mm per block", "at least", 1, op("mm"), Scope.BLOCK))
    assert (outcome.status, outcome.found) == ("held", "1 to 2 in each block")


def test_counts_per_module():
    outcome, _ = found(count("expect at most 1 mm per module", "at most", 1, op("mm"), Scope.MODULE))
    assert (outcome.status, outcome.found) == ("failed", "2 in layers.1.attn")


def test_every_and_no():
    rules = (save(everything), recompute(in_module(op("mm"), "layers.0")))
    assert found(fate("expect every sin saved", "every", op("sin"), "saved"), *rules)[0].found == "all 1 node saved"
    outcome, diagnostics = found(fate("expect every mm saved", "every", op("mm"), "saved"), *rules)
    assert (outcome.status, outcome.found) == ("failed", "1 of 3 nodes not saved")
    error = only(diagnostics, "APL305")
    assert error.message == "`expect every mm saved` does not hold: 1 of 3 nodes not saved"
    assert error.details == ("mm is recomputed",)
    outcome, _ = found(fate("expect no mm recomputed", "no", op("mm"), "recomputed"), *rules)
    assert (outcome.status, outcome.found) == ("failed", "1 of 3 nodes recomputed")
    assert found(fate("expect no sin recomputed", "no", op("sin"), "recomputed"), *rules)[0].status == "held"


def test_a_value_the_backward_does_not_need_is_what_was_decided_and_never_really_saved():
    assert found(fate("expect every cos saved", "every", op("cos"), "saved"))[0].status == "held"
    assert found(fate("expect every cos recomputed", "every", op("cos"), "recomputed"))[0].status == "failed"
    assert found(fate("expect no cos saved", "no", op("cos"), "saved"))[0].status == "held"


def test_an_expectation_about_nothing_is_an_error():
    outcome, diagnostics = found(fate("expect every bmm saved", "every", op("bmm"), "saved"))
    assert (outcome.status, outcome.found) == ("failed", "no node matches")
    error = only(diagnostics, "APL301")
    assert error.message == "`expect every bmm saved` is about nothing: `bmm` matches nothing in this graph"
    assert error.details == ("bmm: 0 nodes",)
    assert found(fate("expect no bmm saved", "no", op("bmm"), "saved"))[0].status == "held"


def test_what_depends_on_the_partitioner_is_deferred():
    rules = (save(op("sin")),)
    deferred = [
        total("expect saved <= 1 GiB", "<=", 1024 * MIB, "bytes"),
        total("expect peak <= 1 GiB", "<=", 1024 * MIB, "bytes", "peak"),
        total("expect saved >= 1 B", ">=", 1, "bytes"),
        fate("expect every mm saved", "every", op("mm"), "saved"),
        fate("expect no mm saved", "no", op("mm"), "saved"),
    ]
    for expectation in deferred:
        outcome, diagnostics = found(expectation, *rules)
        assert (outcome.status, diagnostics) == ("deferred", ())
    assert found(fate("expect every sin saved", "every", op("sin"), "saved"), *rules)[0].status == "held"
    outcome, _ = found(total("expect saved <= 1 MiB", "<=", MIB, "bytes"), *rules)
    assert (outcome.status, outcome.found) == ("failed", "at least 20 MiB")
