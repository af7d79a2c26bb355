"""What the backward needs: the values saved and recomputed, their bytes and FLOPs."""

from __future__ import annotations

from policylang.language.syntax import Action
from policylang.planning.liveness import saved_and_recomputed
from tests.planning.sentences import everything, in_module, names, op, planned, recompute, rule, save
from tests.support.textgraph import facts_of

CHAIN = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) layers.0 bytes=128 flops=300
    %view = aten.view.default(%mm) layers.0 view bytes=128
    %sin = aten.sin.default(%view) layers.0 bytes=128
    %mm_1 = aten.mm.default(%sin, %w) layers.1 bytes=256 flops=100
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t, %sin)
    %b_1 = aten.mm.default(%b, %w)
    output(%mm_1, %b_1)
"""


def outcome_of(text: str, *rules, **more):
    facts = facts_of(text)
    return facts, saved_and_recomputed(planned(facts, *rules, **more))


def test_a_recomputed_value_needs_its_inputs_and_a_saved_one_ends_the_walk():
    facts, outcome = outcome_of(CHAIN, recompute(everything), save(op("mm")))
    assert names(facts, outcome.saved) == ["mm"]
    assert names(facts, outcome.recomputed) == ["view", "sin"]
    assert names(facts, outcome.inputs) == ["w"]
    assert outcome.final


def test_recomputation_goes_back_to_the_graph_inputs():
    facts, outcome = outcome_of(CHAIN, recompute(everything))
    assert names(facts, outcome.saved) == []
    assert names(facts, outcome.recomputed) == ["mm", "view", "sin"]
    assert names(facts, outcome.inputs) == ["x", "w"]
    assert (outcome.saved_bytes, outcome.recomputed_flops, outcome.forward.flops) == (0, 300, 400)
    assert outcome.recomputed_flops_by_block == (300, 0)


def test_a_value_decided_save_that_nothing_reads_is_not_saved():
    facts, outcome = outcome_of(CHAIN, save(everything))
    assert names(facts, outcome.saved) == ["sin"]
    assert outcome.saved_bytes == 128


def test_a_saved_view_keeps_the_memory_it_looks_into_once():
    text = """
        %x = input bytes=32
        %w = parameter bytes=64
        %mm = aten.mm.default(%x, %w) layers.0 bytes=300
        %view = aten.view.default(%mm) layers.0 view bytes=100
        %view_1 = aten.view.default(%mm) layers.1 view bytes=200
        %t_w = aten.t.default(%w) layers.1 view bytes=64
        ---
        %b = aten.mul.Tensor(%view, %view_1, %t_w)
        output(%mm, %b)
    """
    facts, outcome = outcome_of(text, save(everything))
    assert names(facts, outcome.saved) == ["view", "view_1", "t_w"]
    assert outcome.saved_bytes == 300
    assert outcome.saved_bytes_by_block == (300, 0)


def test_of_a_multi_output_operator_the_pieces_that_are_read_are_saved():
    text = """
        %x = input
        %sdpa = aten._scaled_dot_product_flash_attention.default(%x) multi_output bytes=999
        %out = builtin.getitem(%sdpa) bytes=100
        %lse = builtin.getitem(%sdpa) bytes=10
        %seed = builtin.getitem(%sdpa) bytes=1
        ---
        %b = aten.mul.Tensor(%out, %lse)
        output(%out, %b)
    """
    facts, outcome = outcome_of(text, save(everything))
    assert names(facts, outcome.saved) == ["out", "lse"]
    assert outcome.saved_bytes == 110
    facts, outcome = outcome_of(text, recompute(everything))
    assert names(facts, outcome.recomputed) == ["sdpa", "out", "lse"]
    assert outcome.recomputed_bytes == 999


def test_of_a_collective_the_wait_is_saved_when_that_is_what_is_read():
    text = """
        %w = parameter bytes=10
        %gather = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:4 bytes=40
        %wait = _c10d_functional.wait_tensor.default(%gather) bytes=40
        ---
        %b = aten.mul.Tensor(%wait)
        output(%wait, %b)
    """
    facts, outcome = outcome_of(text, save(op("all_gather_into_tensor")))
    assert names(facts, outcome.saved) == ["wait"]
    assert outcome.saved_bytes == 40
    facts, outcome = outcome_of(text, recompute(op("all_gather_into_tensor")))
    assert names(facts, outcome.recomputed) == ["gather", "wait"]
    assert names(facts, outcome.inputs) == ["w"]


def test_sizes_are_kept_apart():
    text = """
        %x = input
        %s0 = input symbolic
        %size = aten.sym_size.int(%x) symbolic
        %view = aten.view.default(%x, %size) view
        ---
        %b = aten.mul.Tensor(%view, %s0)
        output(%view, %b)
    """
    facts, outcome = outcome_of(text, recompute(everything))
    assert names(facts, outcome.symbolic) == ["s0", "size"]
    assert names(facts, outcome.inputs) == ["x"]
    assert names(facts, outcome.recomputed) == ["view"]


def test_what_the_partitioner_is_left_with_is_marked_and_so_is_what_hangs_on_it():
    facts, outcome = outcome_of(CHAIN, save(op("mm")))
    assert names(facts, outcome.undecided) == ["view", "sin"]
    assert names(facts, outcome.contingent) == ["mm"]
    assert outcome.saved == ()
    assert not outcome.final


def test_a_forward_value_that_is_itself_a_gradient_is_needed():
    text = """
        %x = input
        %sin = aten.sin.default(%x) bytes=8 gradient
        ---
        %t = tangent
        %b = aten.mul.Tensor(%t)
        output(%sin, %b)
    """
    facts, outcome = outcome_of(text, save(everything))
    assert names(facts, outcome.saved) == ["sin"]
    facts, outcome = outcome_of(text.replace("gradient", "feeds_backward"), save(everything))  # a reader moved away
    assert not outcome.saved


def test_backward_nodes_among_the_forward_ones_are_read_as_backward():
    text = """
        %x = input
        %a = aten.sin.default(%x) bytes=8
        %g = aten.mul.Tensor(%a) backward
        %b = aten.cos.default(%a) bytes=8
        %h = aten.mul.Tensor(%g, %b) backward
        output(%b, %h)
    """
    facts = facts_of(text + "---\n" + "%i = aten.mul.Tensor(%h)")
    outcome = saved_and_recomputed(planned(facts, recompute(everything), save(op("sin"))))
    assert names(facts, outcome.saved) == ["a"]
    assert names(facts, outcome.recomputed) == ["b"]


def test_offloaded_values_are_neither_saved_nor_recomputed():
    facts, outcome = outcome_of(CHAIN, recompute(everything), rule(Action.OFFLOAD, in_module(op("sin"), "layers.0")))
    assert names(facts, outcome.offloaded) == ["sin"]
    assert (outcome.saved, outcome.recomputed, outcome.saved_bytes) == ((), (), 0)


def test_a_graph_without_backward_needs_nothing():
    _, outcome = outcome_of("%x = input\n%sin = aten.sin.default(%x) bytes=8\noutput(%sin)", save(everything))
    assert (outcome.saved, outcome.recomputed, outcome.undecided) == ((), (), ())
