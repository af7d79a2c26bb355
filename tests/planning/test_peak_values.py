"""What is alive at the peak: by hand, against a slow account, the simulator and what ``MemTracker`` sees."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from policylang.api.load import parse
from policylang.backends.flat import FlatPath
from policylang.graph.collect import collect
from policylang.graph.facts import (
    Facts,
    Flag,
    GraphKind,
    InputKind,
    Phase,
    Schedule,
    StepKind,
    is_gradient,
    uncounted_operators,
)
from policylang.language.shown import folded_names
from policylang.operators.names import GETITEM
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.planning.inspection.breakdown import Breakdown, PeakValues, breakdown, values_at_peak
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.planning.schedule import build_schedule
from policylang.planning.value_outcome import KEPT
from policylang.simulation.memory import Lifetimes, Origin, Peak, estimate_peak, simulate
from tests.graph.captured import facts_of_model, flat_of, joint_of
from tests.planning.strategies import graphs
from tests.planning.test_outcome import decided, fates, numbers
from tests.support.drawn import examples, slow
from tests.support.flat_graphs import copy_graph
from tests.support.joint import Joint, capture_joint
from tests.support.lines import ABLE, Line, mesh_of
from tests.support.measured import measured, measured_flat
from tests.support.models import ZOO, Function
from tests.support.random_flat import random_flat
from tests.support.shared_graphs import JOINT as RECORDED
from tests.support.shared_graphs import ONE_DEVICE, shared_facts
from tests.support.textgraph import CHAIN, facts_of
from tests.support.versions import needs_groups_in_any_order

Copy = tuple[int, int]
"""A row, and the region for which it was computed again or fetched; 0 for its first run."""
Piece = tuple[str, int, int, int]
"""Why it is there, its row, its copy and its bytes."""


def slow_lifetimes(facts: Facts, schedule: Schedule) -> Iterator[tuple[Piece, int, int]]:
    """Each piece of memory in no order, the step that makes it, -1 for what is there before the first, and the last
    step in which it is there, the number of steps for what stays."""
    steps = list(schedule)
    end = len(steps)
    touched = _touched(facts, schedule)
    in_backward = [at for at, (_, _, region) in enumerate(steps) if region]
    for row, op in enumerate(facts.ops):
        if facts.input_kinds[row] == InputKind.TANGENT:
            if in_backward:
                yield ("input", row, 0, facts.bytes[row]), in_backward[0], max(touched.get((row, 0), [end]))
        elif op in ("placeholder", "get_attr"):
            yield ("input", row, 0, facts.bytes[row]), -1, end
    yield from _computed(facts, steps, touched)
    for row in range(len(facts)):
        runs = [at for at, (kind, ran, _) in enumerate(steps) if ran == row and kind in _RUNS]
        if facts.flags[row] & Flag.RANDOM and facts.owners[row] == row and len(runs) > 1:
            near = [row, *(each for each in range(len(facts)) if facts.owners[each] == row), *facts.inputs[row]]
            known = [facts.devices[each] for each in near if facts.devices[each]]
            on_cpu = known and known[0].startswith("cpu")
            yield ("state", row, 0, 5056 if on_cpu else 16), runs[0], runs[-1]


_RUNS = (StepKind.FIRST_RUN, StepKind.SECOND_RUN)


def _computed(facts: Facts, steps: list[tuple[int, int, int]], touched: dict[Copy, list[int]]) -> Iterator:
    roots = facts.storage_roots
    for at, (kind, row, region) in enumerate(steps):
        copy = 0 if kind == StepKind.FIRST_RUN else region
        if kind == StepKind.COPY_FROM_HOST:
            yield ("fetched", row, copy, facts.bytes[row]), at, max(touched[row, copy])
        if kind not in _RUNS or roots[row] != row:
            continue
        tuple_of = _tuple_of(facts, row)
        ran = {(r, 0 if k == StepKind.FIRST_RUN else g) for k, r, g in steps if k in _RUNS}
        if tuple_of is not None and (tuple_of, copy) in ran:
            continue  # its memory came with the tuple
        pieces = [
            each
            for each in range(len(facts))
            if roots[each] == each and _tuple_of(facts, each) == row and (each, copy) in touched
        ]
        for each in pieces:
            yield ("run", each, copy, facts.bytes[each]), at, max(touched[each, copy] + touched[row, copy])
        rest = facts.bytes[row] - sum(facts.bytes[each] for each in pieces)
        yield ("run", row, copy, rest), at, max(touched[row, copy])


def _tuple_of(facts: Facts, row: int) -> int | None:
    """Of a piece with memory of its own: the operator that it is a result of, through tuples of tuples."""
    found = None
    while facts.targets[row] == GETITEM and facts.storage_roots[row] == row and facts.inputs[row]:
        source = facts.inputs[row][0]
        if facts.ops[source] != "call_function":
            break
        found = row = source
    return found


def _touched(facts: Facts, schedule: Schedule) -> dict[Copy, list[int]]:
    """Memory → every step that makes it, reads it, still holds it or awaits its copy to the host; past the end what is
    returned."""
    steps, roots = list(schedule), facts.storage_roots
    lies_in: dict[Copy, Copy] = {}
    touched: dict[Copy, list[int]] = {}

    def seen(row: int, region: int) -> Copy:
        return lies_in.get((row, region), lies_in.get((row, 0), (row, 0)))

    for at, (kind, row, region) in enumerate(steps):
        for memory in [seen(each, region) for each, until in schedule.held if until == at]:
            touched.setdefault(memory, []).append(at)
        copy = 0 if kind == StepKind.FIRST_RUN else region
        if kind in (StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST):
            lies_in[row, region] = (row, region)
            touched.setdefault((row, region), []).append(at)
        elif kind == StepKind.WAIT_TO_HOST:
            touched.setdefault(seen(row, 0), []).append(at)
        elif kind in _RUNS:
            lies_in[row, copy] = (row, copy) if roots[row] == row else seen(facts.inputs[row][0], region)
            for memory in (lies_in[row, copy], *(seen(source, region) for source in facts.inputs[row])):
                touched.setdefault(memory, []).append(at)
    last_region = max((region for _, _, region in steps), default=0)
    for row in range(len(facts)):
        if facts.phases[row] == Phase.OUTPUT:
            for source in facts.inputs[row]:
                late = facts.kind is GraphKind.JOINT and facts.ops[row] == "output" and is_gradient(facts, source)
                touched.setdefault(seen(source, last_region if late else 0), []).append(len(steps))
    return touched


few = settings(max_examples=examples(15, 40))
_WORDS = {
    Origin.FIRST_RUN: "run", Origin.SECOND_RUN: "run", Origin.COPY_FROM_HOST: "fetched", Origin.INPUT: "input",
    Origin.TANGENT: "input", Origin.GENERATOR_STATE: "state",
}  # fmt: skip


def fast_lifetimes(found: Lifetimes) -> Counter[tuple[Piece, int, int]]:
    again = (Origin.SECOND_RUN, Origin.COPY_FROM_HOST)
    return Counter(
        ((_WORDS[Origin(origin)], row, region if origin in again else 0, size), made, last)
        for origin, row, region, size, made, last in found
        if size
    )


def held_against_the_reference(facts: Facts, drawn: list[str]) -> None:
    again, moved = decided(facts, drawn)
    assert_memory_is_that_of_the_slow_account(facts, build_schedule(facts, again, moved))


def assert_memory_is_that_of_the_slow_account(facts: Facts, schedule: Schedule) -> None:
    timeline = simulate(facts, schedule)
    expected = (each for each in slow_lifetimes(facts, schedule) if each[0][-1])
    assert fast_lifetimes(timeline.lifetimes) == Counter(expected)
    for live, step in zip(timeline.live, timeline.steps, strict=True):
        assert live == sum(timeline.lifetimes.bytes[at] for at in timeline.lifetimes.alive_at(step))


@given(graphs(), fates)
@few
def test_lifetimes_of_a_partition_are_those_of_the_slow_account(facts: Facts, drawn: list[str]) -> None:
    held_against_the_reference(facts, drawn)


@given(numbers, fates, st.integers(2, 4))
@settings(few, max_examples=examples(8, 15))
def test_lifetimes_of_a_flat_graph_are_those_of_the_slow_account(drawn, chosen, segments) -> None:
    held_against_the_reference(collect(random_flat(drawn, segments).gm), chosen)


def found_on(facts: Facts, policy: str, path: Capabilities = JOINT, most: int = 20) -> tuple[Breakdown, PeakValues]:
    found = breakdown(plan(parse(policy), facts, path))
    values = values_at_peak(found, most)
    assert sum(value.bytes for value in values.values) + values.rest_bytes == values.bytes
    assert sum(share.bytes for share in values.shares) == values.bytes
    assert sum(share.count for share in values.shares) == len(values.values) + values.rest
    assert values.bytes == found.under.peak.bytes == max(found.under.timeline.live, default=values.bytes)
    assert (values.at.node if values.at else "") == found.under.peak.at
    sizes = [value.bytes for value in values.values]
    assert sizes == sorted(sizes, reverse=True)
    return found, values


def test_by_hand() -> None:
    _, values = found_on(facts_of(CHAIN), "recompute aten.sin.default\nsave aten.cos.default")
    # dc runs beside the tangent, what is saved, and the input and the loss; the others come again after it
    assert values.at is not None
    lines = {value.name: (value.bytes, value.what, value.source) for value in values.values}
    assert lines["x"] == (10, "input", None)
    recomputed = [value for value in values.values if value.what == "recomputed"]
    assert all(value.source == "<policy>:1" and value.made and value.made.again for value in recomputed)
    assert values.rest == 0


def test_memory_that_is_kept_for_a_view_stands_under_the_line_that_saves_the_view() -> None:
    text = """
        %x = input bytes=10
        %a = aten.sin.default(%x) bytes=100
        %v = aten.view.default(%a) view bytes=100
        %b = aten.mm.default(%v) bytes=30
        ---
        %t = tangent bytes=1
        %g = aten.mul.Tensor(%t, %v) bytes=5
        output(%b, %g)
    """
    _, values = found_on(facts_of(text), "recompute everything\nsave aten.view.default")
    (held,) = [value for value in values.values if value.name == "a"]
    assert (held.what, held.source, held.rule, held.saved_as) == ("saved", "<policy>:2", "save aten.view.default", "v")
    assert (held.made.step, held.made.half) == (1, "forward")
    assert (held.last.node, held.last.half) == ("g", "backward")
    (output,) = [value for value in values.values if value.name == "b"]
    assert (output.what, output.last) == ("returned", None)


def test_only_the_largest_are_named_and_the_rest_is_counted() -> None:
    _, values = found_on(facts_of(CHAIN), "save everything", most=2)
    assert len(values.values) == 2
    assert values.rest > 0
    assert values.rest_bytes > 0


@pytest.mark.parametrize("text", ["output()", "%x = input bytes=10\noutput(%x)", "%x = parameter\noutput(%x)"])
def test_a_graph_in_which_nothing_runs(text: str) -> None:
    _, values = found_on(facts_of(text), "undecided -> save")
    assert (values.at, values.steps) == (None, 0)
    assert values.bytes == sum(value.bytes for value in values.values)


@pytest.mark.parametrize("policy", ["include <llama3_sac>", "undecided -> save", "undecided -> recompute"])
@pytest.mark.parametrize("model", ["llama", slow("mixtral")])
def test_real_models(model: str, policy: str) -> None:
    found, values = found_on(facts_of_model(model), policy)
    step = -1 if values.at is None else values.at.step - 1
    lifetimes = slow_lifetimes(found.plan.facts, found.under.schedule)
    assert sum(size for (_, _, _, size), first, last in lifetimes if first <= step <= last) == values.bytes
    kinds = Counter(value.what for value in found_on(facts_of_model(model), policy, most=10**6)[1].values)
    parameters = sum(kind == 1 for kind in found.plan.facts.input_kinds)
    assert kinds["parameter"] == parameters


def test_what_is_offloaded_is_there_until_it_is_copied_and_from_when_it_comes_back() -> None:
    text = """
        %x = input bytes=10
        %a = aten.mm.default(%x) bytes=100 shape=5x5 dtype=float32 device=cuda:0
        %b = aten.sin.default(%a) bytes=400
        %c = aten.sin.default(%b) bytes=20
        %d = aten.sin.default(%c) bytes=20
        %e = aten.sin.default(%d) bytes=20
        %loss = aten.sum.default(%e) bytes=1
        ---
        %t = tangent bytes=1
        %g = aten.mul.Tensor(%t) bytes=20
        %h = aten.mul.Tensor(%g) bytes=20
        %i = aten.mul.Tensor(%h, %a) bytes=500
        output(%loss, %i)
    """
    flat = facts_of(text.replace("%t = tangent bytes=1", "%t = aten.ones.default() bytes=1"), GraphKind.FLAT)
    for facts, path in ((facts_of(text), JOINT), (flat, FLAT)):
        _, values = found_on(facts, "undecided -> recompute\noffload mm" if path is JOINT else "offload mm", path)
        (moved,) = [value for value in values.values if value.name == "a"]
        assert (moved.what, moved.source) == ("copied back", values.values[1].source)
        assert moved.made.again
    _, values = found_on(facts_of(text.replace("bytes=500", "bytes=5")), "undecided -> recompute\noffload mm")
    (moved,) = [value for value in values.values if value.name == "a"]
    assert moved.what == "offloaded"  # while `b`, which reads it, runs in the forward


@needs_groups_in_any_order
def test_what_an_edit_made_is_among_them_and_what_it_took_is_not() -> None:
    facts = Line(mesh_of(4, 2), (2, 3)).gather("dp").gather("tp").facts()
    _, as_is = found_on(facts, "undecided -> save", ABLE)
    found, values = found_on(facts, "undecided -> save; fuse all_gather chains", ABLE)
    assert found.plan.edits
    (fused,) = {value.name for value in values.values} - {value.name for value in as_is.values}
    assert fused.startswith("fused_all_gather")


@pytest.mark.slow
def test_a_recorded_graph() -> None:
    _, values = found_on(shared_facts(RECORDED), "include <llama3_sac>")
    assert len(values.values) == 20
    assert values.rest > 0


def peak_of(facts: Facts, recomputed: tuple[int, ...]) -> Peak:
    return estimate_peak(facts, build_schedule(facts, recomputed))


def rows(facts, *names: str) -> tuple[int, ...]:
    return tuple(facts.index[name] for name in names)


def test_saved_values_live_until_the_backward_has_read_them():
    peak = peak_of(facts_of(CHAIN), ())
    # the input (10), a, b, c and the loss; then a, b and c beside dc, and the tangent that dc still reads
    assert peak.forward == 10 + 300 + 1
    assert peak.backward == 10 + 1 + 300 + 100 + 1
    assert (peak.bytes, peak.at) == (412, "dc")


def test_recomputed_values_are_there_only_when_they_are_needed():
    facts = facts_of(CHAIN)
    peak = peak_of(facts, rows(facts, "a", "b"))
    # forward: c with b before it is freed; backward: dc, then a and b again, and db; the tangent is gone
    assert peak.forward == 10 + 200
    assert peak.backward == 10 + 1 + 100 + 200 + 100
    assert peak.at == "db"


TOLERANCE = 0.05
POLICIES = {
    "save": "undecided -> save",
    "recompute": "undecided -> recompute",
    "blocks": "optional recompute everything in block; save everything in block where crosses block; undecided -> save",
    "matmuls": "optional save matmul; optional save attention; undecided -> recompute",
}
WRITES_A_BUFFER = {"counter"}
"""Its forward reads what it writes: it may not be recomputed."""
NO_BLOCKS = {"counter", "aliased_output"}


def pairs() -> list[Any]:
    """Every policy on Llama; of the other quick models one policy each."""
    variants = {"qwen3", "mixtral", "bart", "gpt2", "flex"}
    found: list[Any] = []
    for number, model in enumerate(ZOO):
        for at, policy in enumerate(POLICIES):
            quick = model not in variants and number % len(POLICIES) == at
            found.append((model, policy) if quick else slow(model, policy))
    return found


@pytest.mark.parametrize(("model", "policy"), pairs())
def test_models_of_the_suite(model: str, policy: str) -> None:
    if model in WRITES_A_BUFFER and "-> recompute" in POLICIES[policy]:
        return
    text = "undecided -> save" if policy == "blocks" and model in NO_BLOCKS else POLICIES[policy]
    assert_close(joint_of(model), text)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *(
            ("llama", "recompute"),
            ("resnet", "save"),
            ("mlp", "blocks"),
            slow("llama", "save"),
            slow("llama", "blocks"),
        ),
        *(slow("bart", policy) for policy in ("save", "recompute", "blocks")),
        *(slow("resnet", "recompute"), slow("resnet", "blocks"), slow("mlp", "save"), slow("mlp", "recompute")),
    ],
)
def test_flat_graphs(model: str, policy: str) -> None:
    gm = copy_graph(flat_of(model).gm)
    made = FlatPath().apply(gm, parse(POLICIES[policy])).plan
    peak = estimate_peak(made.facts, made.schedule)
    assert peak.bytes == pytest.approx(measured_flat(gm), rel=TOLERANCE)


def test_what_nobody_takes_of_a_recomputed_tuple_is_let_go() -> None:
    """BatchNorm gives its result and two statistics: taken one by one as the backward comes to them, the tuple would
    hold the result until the last."""
    gm = copy_graph(flat_of("resnet").gm)
    made = FlatPath().apply(gm, parse(POLICIES["recompute"])).plan
    measured_bytes = measured_flat(gm)
    peak = estimate_peak(made.facts, made.schedule)
    assert peak.bytes == measured_bytes
    pieces = [node for node in gm.graph.nodes if node.target is getitem and node.name.endswith("_recomputed")]
    assert len(pieces) > 8
    for node in reversed(pieces):
        min(node.users, key=list(gm.graph.nodes).index).prepend(node)
    gm.recompile()
    assert measured_flat(gm) > 1.2 * measured_bytes


def test_the_forward_keeps_the_order_that_it_was_traced_in() -> None:
    before = [node.name for node in flat_of("resnet").gm.graph.nodes]
    gm = copy_graph(flat_of("resnet").gm)
    FlatPath().apply(gm, parse(POLICIES["recompute"]))
    after = [node.name for node in gm.graph.nodes if not node.name.endswith("_recomputed")]
    stays = set(after)
    assert after == [name for name in before if name in stays]
    assert len(stays) > len(before) / 2


@pytest.mark.parametrize(
    "policy",
    [slow("undecided -> save"), slow("undecided -> recompute"), slow("include <llama3_sac>\nundecided -> save")],
)
def test_two_layers_of_true_8b_shapes(policy: str) -> None:
    assert_close(llama_8b(2), policy, exactly="llama3_sac" in policy)


@pytest.mark.slow
def test_all_layers_of_true_8b_shapes() -> None:
    assert_close(llama_8b(32), "include <llama3_sac>\nundecided -> save", exactly=True)


def assert_close(joint: Joint, policy: str, *, exactly: bool = False) -> None:
    """``exactly``: the plan alone foretells the saved bytes. Elsewhere equal nodes are merged after it was made."""
    partition = joint.partition(policy)
    seen = measured(partition, joint.num_fwd_outputs)
    outcome = saved_and_recomputed(partition.plan)
    peak = estimate_peak(partition.plan.facts, partition.plan.schedule)
    assert partition.audit.saved_bytes == seen.saved
    if exactly:
        assert outcome.saved_bytes == seen.saved
    assert peak.forward == pytest.approx(seen.forward, rel=TOLERANCE)
    assert peak.backward == pytest.approx(seen.backward, rel=TOLERANCE)


@cache
def llama_8b(layers: int) -> Joint:
    """A sequence of 8192 tokens through layers of Llama-3 8B, on fake tensors: nothing of it needs memory."""
    with FakeTensorMode():
        return capture_joint(_llama(layers), (torch.zeros(1, 8192, dtype=torch.int64),))


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    how = {"use_cache": False, "attn_implementation": "sdpa", "dtype": torch.bfloat16}

    def forward(module: Any, tokens: Tensor) -> Tensor:
        logits = module.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    return Function(forward, model=LlamaForCausalLM._from_config(LlamaConfig(**sizes, **heads, **how)).train())


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["layers.3"], "layers.3"),
        ([f"layers.{n}" for n in range(32)], "layers.0–31"),
        (["layers.0", "layers.2", "layers.3", "layers.7"], "layers.0, 2–3, 7"),
        ([f"h.{n}.x" for n in range(0, 32, 2)], "h.0, 2, …, 30.x"),
        (["encoder.0", "decoder.0"], "encoder.0, decoder.0"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0, a.1.b.1"),
    ],
)
def test_names_that_differ_in_a_number_are_written_once(names, folded):
    assert folded_names(names) == folded


@pytest.mark.parametrize("model", ["llama", slow("mixtral"), slow("gpt2"), slow("bart")])
def test_the_groups_add_up_to_the_totals(model):
    made = plan(parse("include <llama3_sac>\nundecided -> save"), facts_of_model(model), JOINT)
    found, outcome = breakdown(made), saved_and_recomputed(made)
    amounts = found.under.amounts
    assert amounts.saved_bytes == outcome.saved_bytes
    assert amounts.recomputed_flops == outcome.recomputed_flops
    for name in ("saved", "saved_bytes", "recomputed", "recomputed_bytes", "recomputed_flops"):
        assert sum(getattr(group.amounts, name) * group.times for group in found.groups) == getattr(amounts, name)
    for group in found.groups:
        assert sum(entry.bytes for entry in group.entries if entry.outcome is KEPT) == group.amounts.saved_bytes
        for block in group.blocks:
            assert group.amounts.saved_bytes == outcome.saved_bytes_by_block[block]
    assert amounts.saved_bytes < found.without.amounts.saved_bytes
    assert found.without.amounts.recomputed == 0


def test_blocks_that_differ_in_the_deciding_line_stand_apart():
    text = "recompute everything in block\nsave mm in first 1 block\nsave mm in last block\nundecided -> save"
    made = plan(parse(text.replace("first 1 block", "blocks 0..0")), facts_of_model("llama"), JOINT)
    assert [group.times for group in breakdown(made).groups] == [1, 1, 1]


TOKENS, LENGTH, HIDDEN, LAYERS = 32 * 8192, 8192, 4096, 32
KEYS, FEED_FORWARD, VOCABULARY = 1024, 14336, 128256


def test_a_forward_is_its_products_and_its_attention() -> None:
    facts = shared_facts(ONE_DEVICE)
    flops = {name: sum(facts.flops[row] for row in rows) for name, rows in facts.by_target.items()}
    weights = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * FEED_FORWARD) + HIDDEN * VOCABULARY
    products = 2 * TOKENS * weights
    attention = LAYERS * 2 * 2 * TOKENS * LENGTH * HIDDEN  # queries by keys, scores by values; whatever the mask
    assert {name: found for name, found in flops.items() if found} == {
        "aten.einsum.default": products,
        "aten._scaled_dot_product_flash_attention.default": attention,
    }
    assert products > 3 * attention
    assert uncounted_operators(facts, range(len(facts))) == {}  # its casts are a custom operator, and do no work
