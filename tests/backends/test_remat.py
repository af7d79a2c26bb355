"""Rematerialisation on flat graphs: where copies go, what could go wrong, and random graphs under random decisions."""

import operator
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from policylang.audit.graphs import audit_flat
from policylang.backends.flat import rematerialise
from policylang.errors import PolicyError, PolicyGraphError, PolicyMatchError
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Phase
from tests.graph.captured import flat_of
from tests.support import models
from tests.support.decided import decided
from tests.support.drawn import examples
from tests.support.flat_graphs import Flat, assert_bitwise_equal, flat_graph, gradients, trace_flat
from tests.support.hand import Hand, apply, aten, by_hand, c10d, calls, names, same_bits
from tests.support.random_flat import random_flat


def test_a_copy_stands_right_before_the_first_node_that_needs_it() -> None:
    gm = by_hand(
        "x; a = sin(x); c = cos(a); loss = exp(c); first := ones_like(loss); second := mul(first, c); "
        "third := mul(second, a); -> loss, third"
    )
    apply(gm, "recompute sin or cos")
    assert names(gm) == [
        "x", "sin_default", "cos_default", "exp_default", "ones_like_default", "sin_default_recomputed",
        "cos_default_recomputed", "mul_tensor", "mul_tensor_1", "output",
    ]  # fmt: skip
    index = {node.name: node for node in gm.graph.nodes}
    assert index["cos_default_recomputed"].args == (index["sin_default_recomputed"],)
    assert index["mul_tensor_1"].args[1] is index["sin_default_recomputed"], "the second reader shares the copy"


def test_each_region_gets_its_own_copies_with_names_of_their_own() -> None:
    gm = by_hand(
        "x; a = sin(x); loss = exp(a); one := mul(loss, a); more = cos(x); two := mul(more, a); -> loss, one, more, two"
    )
    report = apply(gm, "recompute sin")
    copies = [name for name in names(gm) if "recomputed" in name]
    assert copies == ["sin_default_recomputed", "sin_default_recomputed_1"]
    assert report.recomputed.names == ("sin_default",)


def test_regions_that_need_nothing_get_nothing() -> None:
    gm = by_hand(
        "x; a = sin(x); loss = exp(a); one := ones_like(loss); more = cos(x); two := mul(more, a); "
        "-> loss, one, more, two"
    )
    rematerialise(gm, decided(collect(gm), lambda row: row == 1))
    assert names(gm).index("sin_default_recomputed") == names(gm).index("mul_tensor") - 1
    assert "sin_default_recomputed_1" not in names(gm)


def test_a_value_that_lives_on_in_the_forward_is_read_as_it_is() -> None:
    """Running it again would save nothing: the forward after the region needs it."""
    gm = by_hand(
        "x; a = sin(x); loss = exp(a); one := mul(loss, a); more = cos(a); two := mul(more, a); -> loss, one, more, two"
    )
    plan = decided(collect(gm), lambda row: row == 1)
    rematerialise(gm, plan)
    assert [name for name in names(gm) if "recomputed" in name] == ["sin_default_recomputed"]
    index = {node.name: node for node in gm.graph.nodes}
    assert index["mul_tensor"].args[1] is index["sin_default"]
    assert marks.SAVED not in marks.custom(index["sin_default"].meta)
    assert audit_flat(plan, gm.graph).agrees


def test_forward_nodes_that_nothing_reads_any_more_go() -> None:
    gm = by_hand(
        "x; kept = sin(x); gone = cos(kept); also = tanh(gone); loss = exp(kept); back := mul(loss, also); "
        "-> loss, back"
    )
    rematerialise(gm, decided(collect(gm), lambda row: row in (2, 3)))
    assert {"cos_default", "tanh_default"}.isdisjoint(names(gm))
    saved = [node.name for node in gm.graph.nodes if marks.SAVED in marks.custom(node.meta)]
    assert saved == ["sin_default", "exp_default"]


def test_a_multi_output_operator_runs_again_once_with_the_pieces_that_are_needed() -> None:
    hand = Hand()
    x = hand.input("x")
    both = hand.f(aten.frexp.Tensor, x, val=(hand.value, hand.value))
    left = hand.f(operator.getitem, both, 0)
    right = hand.f(operator.getitem, both, 1)
    loss = hand.f(aten.mul.Tensor, left, right)
    back = hand.b(aten.mul.Tensor, loss, left)
    gm = hand.done(loss, back)
    apply(gm, "recompute frexp")
    copies = [name for name in names(gm) if "recomputed" in name]
    assert copies == ["frexp_tensor_recomputed", "getitem_recomputed"]


def test_the_gather_and_its_wait_run_again_together() -> None:
    gm = by_hand(
        'w; x; gather = all_gather_into_tensor(w, 1, "0"); wait = wait_tensor(gather); out = mm(x, wait); '
        "loss = exp(out); back := mm(loss, wait); -> loss, back"
    )
    apply(gm, "must_recompute all_gather")
    *_, gather, wait = names(gm)[: names(gm).index("mm_default_1")]
    assert (gather, wait) == ("all_gather_into_tensor_default_recomputed", "wait_tensor_default_recomputed")


def test_what_is_saved_is_marked_with_its_operator() -> None:
    gm = flat_graph(models.llama(layers=1)).gm
    report = apply(gm, "recompute everything; save attention")
    marked = {node.name for node in gm.graph.nodes if marks.custom(node.meta).get(marks.SAVED)}
    attention = {name for name in names(gm) if re.match(r"_?scaled_dot_product(?!.*(backward|recomputed))", name)}
    assert marked == {*report.saved.names, *attention}


# --- random numbers, in-place writes, buffers ------------------------------------------------------------------------
def test_dropout_draws_the_same_mask_again() -> None:
    """pytorch#190758, OLMo-core#828: a recomputation with fresh random numbers trains on wrong gradients in silence."""
    gm, report = same_bits(flat_of("dropout"), "recompute everything")
    assert len(calls(gm, "aten.bernoulli_")) == 4, "two in the forward, the same two again"
    kinds = [node.target.name() for node in calls(gm, "aten.bernoulli_")]
    assert sorted(set(kinds)) == ["run_and_save_rng_state", "run_with_rng_state"]
    assert len(report.saved) == 0


def test_an_operator_without_tensor_inputs_draws_again_too() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    noise = models.Function(lambda model, x: ((x * model.weight).sin() * torch.rand(4, 4)).cos(), weight=weight)
    flat = flat_graph(models.Example(noise, (torch.ones(4, 4),), models.square_loss))
    gm, _ = same_bits(flat, "recompute everything")
    assert len(calls(gm, "aten.rand")) == 2


def test_a_random_operator_whose_result_only_the_backward_reads_still_draws_in_the_forward() -> None:
    """Or every later draw of the step would shift."""
    gm = by_hand(
        "x; noise = rand_like(x); scaled = mul(noise, x); later = rand_like(x); loss = add(later, x); "
        "back := mul(loss, scaled); -> loss, back"
    )
    flat = Flat(gm, [torch.rand(4, 4)])
    same_bits(flat, "recompute rand_like or mul")


def test_a_saved_random_value_is_not_wrapped() -> None:
    gm, _ = same_bits(flat_graph(models.gpt2(layers=1)), "recompute everything; save random")
    assert {str(node.target) for node in calls(gm, "aten.bernoulli_")} == {"aten.bernoulli_.float"}


def test_attention_without_dropout_is_not_random() -> None:
    """pytorch#187985: SDPA carries the random tag whatever its dropout."""
    _, report = same_bits(flat_graph(models.llama(layers=1)), "recompute everything")
    assert any("scaled_dot_product" in name for name in report.recomputed.names)


def test_a_generator_of_its_own_is_refused_by_name() -> None:
    hand = Hand()
    x = hand.input("x")
    noise = hand.f(aten.bernoulli.default, x, generator=hand.graph.placeholder("generator"))
    loss = hand.f(aten.mul.Tensor, noise, x)
    back = hand.b(aten.mul.Tensor, loss, noise)
    gm = hand.done(loss, back)
    before = names(gm)
    with pytest.raises(PolicyMatchError, match="`bernoulli_default`: it draws from an explicit generator"):
        apply(gm, "recompute bernoulli")
    assert names(gm) == before


def test_what_is_written_in_place_runs_again_with_its_writers_and_who_reads_in_between() -> None:
    """A router's ``scores /= scores.sum()`` as plain make_fx traces it."""

    def normalised(model: Any, x: Tensor) -> Tensor:
        scores = x @ model.weight
        scores /= scores.sum(-1, keepdim=True)
        return (scores * x).sin()

    model = models.Function(normalised, weight=nn.Parameter(torch.rand(4, 4)))
    flat = flat_graph(models.Example(model, (torch.rand(4, 4),), models.square_loss))
    gm, report = same_bits(flat, "recompute everything")
    assert len(calls(gm, "aten.div_")) == 2
    assert len(report.saved) == 0


def test_memory_that_the_backward_writes_is_saved_or_refused() -> None:
    gm = by_hand("x; a = sin(x); loss = exp(a); written := mul_(a, 2.0); back := mul(loss, written); -> loss, back")
    with pytest.raises(PolicyMatchError, match="`sin_default`: it reads memory that the graph changes"):
        apply(gm, "recompute sin")
    report = apply(gm, "optional recompute sin")
    assert report.decisions["sin_default"].action == "save"


def test_a_read_of_a_buffer_that_changes_later_is_refused_or_saved() -> None:
    """pytorch#197039, torchtitan#4708: the recomputation read the buffer after its update."""
    flat = flat_of("counter")
    with pytest.raises(PolicyMatchError) as caught:
        apply(flat.fresh().gm, "recompute everything")
    (found,) = caught.value.diagnostics
    assert found.code == "APL304"
    assert "reads memory that the graph changes" in found.message
    assert found.span.text == "recompute everything"
    assert "optional" in (found.help or "")
    assert any("sin" in line for line in found.details)
    gm, report = same_bits(flat, "optional recompute everything")
    assert report.decisions["sin"].action == "save"
    assert len(calls(gm, "aten.add_")) == 1


def test_counters_and_running_statistics_move_once() -> None:
    """torchtitan#1593: a counter's update was recomputed. ``same_bits`` compares the buffers too."""
    gm, _ = same_bits(flat_of("resnet"), "recompute everything")
    assert len(calls(gm, "aten.add_")) == 4
    again = [node for node in calls(gm, "aten.native_batch_norm") if marks.RECOMPUTED in node.meta["custom"]]
    assert len(again) == 4
    assert all(node.args[3] is None and node.args[4] is None for node in again)


def test_a_copy_that_writes_outside_is_found_by_the_audit() -> None:
    gm = by_hand("x; counter; _ = add_(counter, 1); a = sin(x); back := mul(a, x); -> a, back")
    counter, back = (next(node for node in gm.graph.nodes if node.name == name) for name in ("counter", "mul_tensor"))
    plan = decided(collect(gm), lambda _row: False)
    with gm.graph.inserting_before(back):
        again = gm.graph.call_function(aten.add_.Tensor, (counter, 1))
    again.meta = {"val": back.meta["val"], "custom": {marks.RECOMPUTED: "add__tensor"}}
    codes = [found.code for found in audit_flat(plan, gm.graph).differences]
    assert codes == ["APL403", "APL406"]


def test_a_backward_that_reads_what_was_to_be_recomputed_is_found_by_the_audit() -> None:
    gm = by_hand("x; a = sin(x); loss = exp(a); back := mul(loss, a); -> loss, back")
    plan = decided(collect(gm), lambda row: row == 1)
    (found,) = audit_flat(plan, gm.graph).differences
    assert found.code == "APL401"
    assert "`sin_default` (aten.sin.default) was saved" in found.message


# --- routing and collectives -----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def routed() -> Flat:
    example = models.mixtral(layers=1)
    example.module.model.set_experts_implementation("batched_mm")
    return flat_graph(example)


def test_routing_is_saved_with_a_note(routed: Flat) -> None:
    """torchtitan#1117, pytorch#186572: topk flips between forward and recomputation."""
    gm, report = same_bits(routed, "recompute everything")
    assert report.decisions["topk"].action == "save"
    assert "discrete choice" in report.decisions["topk"].reason
    assert len(calls(gm, "aten.topk")) == 1
    (note,) = report.notes
    assert "`recompute everything` leaves 1 forward value saved" in note
    assert "note " in str(report)


def test_a_rule_that_names_the_operator_has_the_last_word(routed: Flat) -> None:
    gm, report = same_bits(routed, "recompute everything; recompute topk")
    assert len(calls(gm, "aten.topk")) == 2
    assert report.notes == ()
    _, report = same_bits(routed, "let steering = topk\nrecompute everything; recompute aten.top*; recompute steering")
    assert report.decisions["topk"].action == "save", "a wildcard or a group does not name it"


def test_a_topk_that_steers_nothing_is_an_ordinary_value() -> None:
    # its own backward scatters by the indices, but nothing in the forward goes by them
    weight = nn.Parameter(torch.rand(4, 4))
    largest = models.Function(lambda model, x: (x @ model.weight).sin().sort().values.cos(), weight=weight)
    flat = flat_graph(models.Example(largest, (torch.rand(4, 4),), models.square_loss))
    _, report = same_bits(flat, "recompute everything")
    assert report.notes == ()


def data_dependent_exchange() -> fx.GraphModule:
    hand = Hand()
    x, counts = hand.input("x"), hand.input("counts")
    size = hand.f(aten._local_scalar_dense.default, counts, val=hand.mode.shape_env.create_unbacked_symint())
    sent = hand.f(c10d.all_to_all_single.default, x, [size], [size], "0")
    waited = hand.f(c10d.wait_tensor.default, sent)
    loss = hand.f(aten.sin.default, waited)
    back = hand.b(aten.mul.Tensor, loss, waited)
    return hand.done(loss, back)


def test_a_collective_whose_sizes_come_from_data_is_never_repeated() -> None:
    """VeOmni#979: ranks that route differently in the recomputation wait for each other for ever."""
    gm = data_dependent_exchange()
    with pytest.raises(PolicyMatchError, match="`all_to_all_single_default`: it is a collective whose sizes come"):
        apply(gm, "must_recompute all_to_all")
    report = apply(gm, "optional recompute everything")
    assert report.decisions["all_to_all_single_default"].action == "save"
    assert len(calls(gm, "_c10d_functional.all_to_all_single")) == 1


# --- silent failures of others ---------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mlp() -> Flat:
    return flat_of("mlp")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("save addmm in layers.*.upp", "nearest module paths"),
        ("save _scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention: 0"),
    ],
)
def test_a_rule_about_nothing_is_an_error(text: str, said: str, mlp: Flat) -> None:
    """TorchTitan's ``full_recompute_save_ops`` with a typo in the module, or an operator that is not there."""
    gm = mlp.fresh().gm
    before = [(node.name, node.args) for node in gm.graph.nodes]
    with pytest.raises(PolicyError) as refused:
        apply(gm, text)
    assert [(node.name, node.args) for node in gm.graph.nodes] == before, "a refusal leaves the graph as it was"
    assert refused.value.diagnostics[0].code == "APL301"
    assert said in " ".join(refused.value.diagnostics[0].details)


def test_gradient_accumulation_that_is_not_marked_hides_no_backward() -> None:
    """Additions of gradients labelled otherwise emptied the backward region of TorchTitan's pass: it did nothing."""
    flat = flat_graph(models.shared_parameters())
    backward = [node for node in flat.gm.graph.nodes if node.meta.get("custom", {}).get("phase") == "backward"]
    sums = [node for node in backward if node.target is aten.add.Tensor]
    assert sums, "a shared weight's gradients are summed"
    for node in sums:
        node.meta["custom"] = {"module_fqn": "loss"}
    _, report = same_bits(flat, "recompute everything")
    assert len(report.recomputed) > 20


def test_tags_of_the_users_checkpoint_are_carried_out() -> None:
    """Tags without a partitioner have no consumer; here they have one, and the report counts them."""
    flat = flat_graph(models.mlp())
    for node in flat.gm.graph.nodes:
        if node.target is aten.gelu.default:
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0
    gm, report = same_bits(flat, "save addmm; save gelu")
    assert len(calls(gm, "aten.gelu")) == 6
    assert report.rules[1].kept_by_user == 3
    gm, _ = same_bits(flat, "save addmm; override save gelu")
    assert len(calls(gm, "aten.gelu")) == 3


def test_a_graph_that_changed_since_it_was_planned_is_refused(mlp: Flat) -> None:
    flat = mlp.fresh()
    plan = decided(collect(flat.gm), lambda _row: True)
    first = next(node for node in flat.gm.graph.nodes if node.op == "call_function")
    with flat.gm.graph.inserting_before(first):
        flat.gm.graph.call_function(aten.sin.default, (first.all_input_nodes[0],))
    with pytest.raises(PolicyGraphError, match="the graph changed after it was planned") as caught:
        rematerialise(flat.gm, plan)
    assert caught.value.diagnostics[0].code == "APL381"


def test_nested_autograd_in_a_forward_is_forward() -> None:
    """A gradient penalty: the marks of nested autograd are not the step's backward."""

    def step(call: Callable[..., Tensor], parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        x = batch[0].detach().requires_grad_()
        energy = call(x).square().sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = energy + slope.square().sum()
        return [loss, *gradients(loss, parameters)]

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    flat = trace_flat(module, [torch.randn(3, 4)], step)
    _, report = same_bits(flat, "recompute everything")
    assert any("tanh_backward" in name for name in report.recomputed.names)


numbers = st.lists(st.integers(0, 63), min_size=12, max_size=150)
choices = st.lists(st.booleans(), min_size=1, max_size=60)


@given(numbers, choices, st.integers(2, 6))
@settings(max_examples=examples(50, 150), suppress_health_check=[HealthCheck.data_too_large])
def test_same_bits_and_the_planned_live_set(drawn: list[int], recompute: list[bool], segments: int) -> None:
    before = random_flat(drawn, segments)
    after = before.fresh()
    facts = collect(after.gm)
    plan = decided(facts, lambda owner: recompute[owner % len(recompute)])
    rematerialise(after.gm, plan)
    after.gm.graph.lint()
    expected_inputs = before.fresh()
    expected = expected_inputs.run()
    assert_bitwise_equal(expected, after.run())
    assert_bitwise_equal(expected_inputs.inputs, after.inputs)

    found = audit_flat(plan, after.gm.graph)
    assert found.differences == ()
    assert set(found.saved) <= marked(after.gm.graph, marks.SAVED).keys()
    again = set(marked(after.gm.graph, marks.RECOMPUTED).values())
    assert found.recomputed == tuple(sorted(again, key=facts.index.__getitem__))
    check_places(after.gm.graph, facts)


def marked(graph: fx.Graph, mark: str) -> dict[str, Any]:
    """By the name of each node that carries a mark, what it says."""
    found = {node.name: marks.custom(node.meta).get(mark) for node in graph.nodes}
    return {name: said for name, said in found.items() if said is not None}


def check_places(graph: fx.Graph, facts: Facts) -> None:
    """A region copies a node once, and each copy stands in the run right before the first node that needs it."""
    in_region: Counter[str] = Counter()
    run: list[fx.Node] = []
    for node in graph.nodes:
        origin = marks.custom(node.meta).get(marks.RECOMPUTED)
        if origin is not None:
            in_region[origin] += 1
            run.append(node)
            continue
        if run:
            needed = set(node.all_input_nodes)
            for copy in reversed(run):
                written = any(marks.custom(user.meta).get(marks.RECOMPUTED) for user in copy.users)
                assert copy in needed or writes_for(copy, needed) or written, f"{copy} stands before it is needed"
                needed.update(copy.all_input_nodes)
            run = []
        row = facts.index.get(node.name)
        if row is not None and facts.phases[row] == Phase.FORWARD:
            assert all(count == 1 for count in in_region.values()), in_region
            in_region.clear()


def writes_for(copy: fx.Node, needed: set[fx.Node]) -> bool:
    """An operator in place is needed by who reads what it writes."""
    return str(copy.target).partition(".")[2].partition(".")[0].endswith("_") and bool(copy.all_input_nodes)


def test_nothing_to_recompute_leaves_the_graph_alone() -> None:
    flat = random_flat(list(range(60)))
    before = [(node.name, node.target, node.args) for node in flat.gm.graph.nodes]
    rematerialise(flat.gm, decided(collect(flat.gm), lambda _owner: False))
    assert [(node.name, node.target, node.args) for node in flat.gm.graph.nodes] == before


@pytest.mark.parametrize("layers", [50, 200])
def test_copies_grow_with_the_graph_not_with_its_square(layers: int) -> None:
    """Operations are counted, not time: every forward node is copied once, whatever the depth."""
    flat = random_flat([0, 1, 0] * 4 * layers, segments=2)
    facts = collect(flat.gm)
    rematerialise(flat.gm, decided(facts, lambda _owner: True))
    assert 0 < len(marked(flat.gm.graph, marks.RECOMPUTED)) <= len(facts.forward)
