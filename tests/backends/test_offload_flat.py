"""`offload` on flat graphs: the same bits, whatever the copies take, and the device free of what is on the host."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

import policylang
from policylang.api.load import parse
from policylang.audit.report import Report
from policylang.backends import copies as copy_operators
from policylang.backends.applied_plans import AppliedPlan
from policylang.backends.flat import FlatPath
from policylang.language.plain_data import from_plain
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.schedule import IN_FLIGHT
from policylang.simulation.memory import estimate_peak, simulate
from tests.graph.captured import flat_of
from tests.support import models
from tests.support.drawn import examples
from tests.support.elsewhere import AWAY, on_accelerator, with_memory
from tests.support.flat_graphs import Flat, assert_bitwise_equal, copy_graph, flat_graph
from tests.support.hand import by_hand
from tests.support.joint import Joint, capture_joint
from tests.support.late import Late, copied_over
from tests.support.measured import measured, measured_flat
from tests.support.models import Example
from tests.support.random_flat import random_flat
from tests.tracing.test_against_eager import loss_of


@pytest.fixture(scope="module")
def mlp() -> Flat:
    return flat_of("mlp")


def applied(flat: Flat, text: str) -> tuple[Flat, AppliedPlan]:
    after = flat.fresh()
    outcome = FlatPath().apply(after.gm, policylang.parse(text))
    after.gm.graph.lint()
    return after, outcome


def copies(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mlp", "undecided -> save; offload gelu, addmm"),
        pytest.param("llama", "recompute everything; offload mm", marks=pytest.mark.slow),
        pytest.param("gpt2", "undecided -> save; offload everything", marks=pytest.mark.slow),
        ("resnet", "recompute everything; offload convolution"),
    ],
)
def test_the_same_bits_however_late_the_copies_come(name: str, text: str) -> None:
    flat = flat_of(name)
    expected = flat.fresh().run()
    after, outcome = applied(flat, text)
    assert outcome.audit.offloaded
    for seed in (None, 1, 2):
        link = Late(seed)
        with copied_over(link):
            assert_bitwise_equal(expected, after.fresh().run())
        assert link.out == link.back == len(outcome.audit.offloaded)
        assert not any(link.held), "the device copy is still there when the value comes back"


@pytest.mark.parametrize("kept", ["ticket", "source"])
def test_without_a_wait_the_values_are_wrong(mlp: Flat, kept: str) -> None:
    """What the tests above rest on: a copy that nobody awaits, or whose source goes too early, shows."""
    tickets: list[Tensor] = []

    def not_awaited(ticket: Tensor, source: Tensor, device: torch.device) -> Tensor:
        tickets.append(ticket)
        return copy_operators._copies[int(ticket)][0]

    def on_a_clone(value: Tensor) -> Tensor:
        return torch.ops.policylang.offload.default(value.clone())  # the clone is gone when the copy is made

    after, _ = applied(mlp, "undecided -> save; offload gelu")
    old, new = (copy_operators.WAIT_OP, not_awaited) if kept == "ticket" else (copy_operators.OFFLOAD_OP, on_a_clone)
    for node in copies(after.gm, old):
        node.target = new
    after.gm.recompile()
    with copied_over(Late()):
        found = after.run()
    assert any(value.isnan().any() for value in found)


def test_a_copy_that_an_error_cuts_off_is_awaited_before_its_memory_is_free() -> None:
    late, x = Late(), torch.arange(8.0)
    with copied_over(late):
        ticket = copy_operators.OFFLOAD_OP(x)
        host = copy_operators.WAIT_OP(ticket, x, copy_operators.HOST)
        assert torch.equal(host, x)
        ticket = copy_operators.RELOAD_OP(host, copy_operators.HOST)
        assert late.pending
        del ticket
    assert late.pending == []
    assert late.back == 1


def test_threads_may_wait_for_one_copy_at_once() -> None:
    late, x, both = Late(), torch.arange(8.0), threading.Barrier(2)

    def met(target: Tensor, source: Tensor) -> Callable[[], None]:
        wait = late(target, source)

        def wait_for_both() -> None:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            wait()

        return wait_for_both

    with copied_over(met), ThreadPoolExecutor(2) as threads:
        ticket = copy_operators.OFFLOAD_OP(x)
        found = list(threads.map(lambda _: copy_operators.WAIT_OP(ticket, x, copy_operators.HOST), range(2)))
    assert all(torch.equal(each, x) for each in found)


numbers = st.lists(st.integers(0, 63), min_size=12, max_size=120)
rules = st.sampled_from(
    [
        "undecided -> save\noffload everything",
        "optional recompute everything where not is random\noptional offload mm, sin, t",
        "undecided -> save\noptional offload mul, cos up to 300 B per rank",
        "undecided -> save\noptional recompute sin\noptional offload t, native_dropout, frexp, add",
    ]
)


@given(numbers, rules, st.integers(2, 6), st.integers(0, 9))
@settings(max_examples=examples(25, 60), suppress_health_check=[HealthCheck.data_too_large])
def test_random_graphs_give_the_same_bits(drawn: list[int], text: str, segments: int, seed: int) -> None:
    flat = random_flat(drawn, segments)
    expected = flat.fresh()
    values = expected.run()
    after, outcome = applied(flat, text)
    link = Late(seed)
    with copied_over(link):
        assert_bitwise_equal(values, after.run())
    assert_bitwise_equal(expected.inputs, after.inputs)
    assert link.out == len(outcome.audit.offloaded)
    assert not any(link.held)


def test_views_are_rebuilt_and_the_memory_is_moved_once() -> None:
    gm = by_hand(
        "x; value = sin(x); view = t(value); again = t(view); loss = mul(view, x); first := mm(loss, view); "
        "second := mul(first, again); third := mul(second, value); -> loss, third"
    )
    flat = Flat(gm, [torch.rand(4, 4)])
    after, outcome = applied(flat, "undecided -> save; offload t")
    assert outcome.audit.offloaded == ("sin_default",)
    assert len(copies(after.gm, copy_operators.OFFLOAD_OP)) == len(copies(after.gm, copy_operators.RELOAD_OP)) == 1
    assert_bitwise_equal(flat.fresh().run(), after.run())


def test_each_region_fetches_its_own() -> None:
    gm = by_hand(
        "x; value = sin(x); loss = mul(value, x); first := mm(loss, value); more = cos(loss); "
        "second := mm(more, value); -> more, first, second"
    )
    flat = Flat(gm, [torch.rand(4, 4)])
    after, outcome = applied(flat, "undecided -> save; offload sin")
    assert outcome.audit.offloaded == ("sin_default",)
    assert len(copies(after.gm, copy_operators.OFFLOAD_OP)) == 1
    assert len(copies(after.gm, copy_operators.RELOAD_OP)) == 2
    with copied_over(Late()):
        assert_bitwise_equal(flat.fresh().run(), after.run())


def test_what_would_free_nothing_or_come_back_changed_stays_with_a_reason() -> None:
    gm = by_hand(
        "x; given_ = t(x); returned = sin(x); written = cos(returned); late = tan(written); "
        "loss = mul(late, given_); first := mm(loss, given_); second := addcmul(first, returned, late); "
        "third := add_(written, second); after = add(late, loss); -> after, returned, third"
    )
    flat = Flat(gm, [torch.rand(4, 4)])
    policy = policylang.parse("undecided -> save; offload t, sin, cos, tan")
    fresh = flat.fresh()
    report = policylang.report(policylang.apply(fresh.gm, policy))
    assert len(report.offloaded) == 0
    (warning,) = report.warnings
    assert "offloads nothing: it leaves 4 forward values on the device" in warning
    plan = FlatPath().apply(flat.fresh().gm, policy).plan
    details = next(found.details for found in plan.diagnostics if found.code == "APL316")
    for reason in ("an input of the graph", "the caller holds it", "may write to it", "of the forward, reads it"):
        assert any(reason in line for line in details), details
    assert_bitwise_equal(flat.fresh().run(), fresh.run())


def test_a_budget_is_spent_in_graph_order_and_the_rest_is_saved(mlp: Flat) -> None:
    _, without = applied(mlp, "undecided -> save; offload gelu")
    gelus = without.audit.offloaded
    one = without.audit.offloaded_bytes // len(gelus)
    _, outcome = applied(mlp, f"undecided -> save; offload gelu up to {2 * one} B per rank")
    assert outcome.audit.offloaded == gelus[:2]
    assert outcome.audit.offloaded_bytes == 2 * one
    assert gelus[2] in outcome.audit.saved
    (note,) = [found for found in outcome.plan.diagnostics if found.code == "APL313"]
    assert note.message.endswith(f"leaves 1 forward value on the device, `{gelus[2]}`: the budget is full")
    assert outcome.plan.digest != without.plan.digest


def test_saved_bytes_are_those_on_the_device(mlp: Flat) -> None:
    _, saving = applied(mlp, "undecided -> save; save gelu")
    flat, moving = applied(mlp, "undecided -> save; offload gelu; expect every gelu offloaded")
    assert moving.audit.saved_bytes == saving.audit.saved_bytes - moving.audit.offloaded_bytes
    report = policylang.report(policylang.apply(mlp.fresh().gm, policylang.parse("undecided -> save; offload gelu")))
    assert report.offloaded.bytes == report.rules[0].offloaded_bytes == moving.audit.offloaded_bytes
    assert "offloaded   1.5 KiB in 3 values" in str(report)
    assert from_plain(Report, report.to_dict()) == report
    with pytest.raises(policylang.PolicyMatchError, match="does not hold"):
        applied(mlp, f"undecided -> save; offload gelu; expect saved > {moving.audit.saved_bytes} B")
    del flat


def test_the_device_does_not_hold_what_is_on_the_host() -> None:
    """By the timeline, where the backward begins: all that is offloaded is gone but for what is on its way back."""
    flat = flat_of("mlp")
    live = {}
    for verb in ("save", "offload"):
        plan = applied(flat, f"undecided -> save; {verb} gelu")[1].plan
        timeline = simulate(plan.facts, plan.schedule)
        first = timeline.backward.index(1)
        live[verb] = timeline.live[first - 1], max(timeline.live)
    moved = saved_and_recomputed(applied(flat, "undecided -> save; offload gelu")[1].plan).offloaded_bytes
    assert moved == 3 * 512
    in_flight = 2 * 512  # the last two copies are awaited where the forward ends
    assert live["save"][0] - live["offload"][0] == moved - in_flight
    assert live["offload"][1] <= live["save"][1]


def test_a_graph_takes_one_policy(mlp: Flat) -> None:
    after, _ = applied(mlp, "undecided -> save; offload gelu")
    with pytest.raises(policylang.PolicyGraphError, match="moves `gelu"):
        FlatPath().apply(after.gm, policylang.parse("undecided -> save; offload addmm"))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_traced_step_and_its_graph_compiled(inner: str) -> None:
    example = models.mlp()
    plain = policylang.trace_step(example.module, loss_of(example), *example.inputs)
    loss, gradients = plain(*example.inputs)
    step = policylang.trace_step(example.module, loss_of(example), *example.inputs)
    step.apply(policylang.parse("undecided -> save; offload gelu, addmm"))
    assert step.report.offloaded
    found, again = step(*example.inputs)
    assert torch.equal(found, loss)
    assert_bitwise_equal(gradients.values(), again.values())
    step.gm.forward = torch.compile(step.gm.forward, backend=inner)
    link = Late(3)
    with copied_over(link):
        found, again = step(*example.inputs)
    assert link.back == len(step.report.offloaded)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(again, gradients)


# --- the device's memory as `MemTracker` sees it, beside the plan's figures ---
LAYERS, ROWS, WIDTH = 6, 256, 16
GELU = ROWS * 2 * WIDTH * 4
"""Bytes of what one layer's activation function returns."""
POLICY = "undecided -> save\n{} gelu"


class Seen(NamedTuple):
    peak: int
    saved: int
    offloaded: int
    plan: Plan

    @property
    def foretold(self) -> int:
        return estimate_peak(self.plan.facts, self.plan.schedule).bytes


wide = partial(models.mlp, LAYERS, WIDTH, ROWS)
"""What its layers keep is many times its parameters."""


@cache
def joint(make: Callable[[], Example]) -> Joint:
    captured = capture_joint(*make())
    return captured._replace(gm=on_accelerator(captured.gm))


@cache
def flat() -> fx.GraphModule:
    return on_accelerator(flat_graph(wide()).gm)


def partitioned(text: str, make: Callable[[], Example] = wide) -> Seen:
    graph = joint(make)
    partition = graph.partition(text)
    for half in (partition.forward, partition.backward):
        with_memory(half)
    seen = measured(partition, graph.num_fwd_outputs, str(AWAY))
    audit = partition.audit
    assert seen.saved == audit.saved_bytes
    return Seen(max(seen.forward, seen.backward), seen.saved, audit.offloaded_bytes, partition.plan)


def in_place(text: str) -> Seen:
    gm = copy_graph(flat())
    outcome = FlatPath().apply(gm, parse(text))
    audit = outcome.audit
    return Seen(measured_flat(with_memory(gm), str(AWAY)), audit.saved_bytes, audit.offloaded_bytes, outcome.plan)


@pytest.mark.parametrize("road", [partitioned, in_place])
def test_the_peak_falls_by_what_is_offloaded(road: Callable[[str], Seen]) -> None:
    """But for what is in use and on its way when the memory is highest, where the backward begins."""
    saving, moving = road(POLICY.format("save")), road(POLICY.format("offload"))
    assert moving.offloaded == LAYERS * GELU
    assert saving.saved - moving.saved == moving.offloaded
    assert moving.offloaded - (1 + IN_FLIGHT) * GELU <= saving.peak - moving.peak <= moving.offloaded
    assert saving.peak - moving.peak == saving.foretold - moving.foretold
    assert moving.peak == pytest.approx(moving.foretold, rel=0.03)


@pytest.mark.parametrize("road", [partitioned, in_place])
def test_a_budget_frees_what_it_allows(road: Callable[[str], Seen]) -> None:
    saving = road(POLICY.format("save"))
    moving = road(POLICY.format("offload") + f" up to {5 * GELU} B per rank")
    assert moving.offloaded == saving.saved - moving.saved == 5 * GELU
    assert saving.peak - moving.peak >= 2 * GELU


@pytest.mark.slow
def test_what_is_kept_of_a_llama_falls_by_what_is_offloaded() -> None:
    one_layer = partial(models.llama, layers=1)
    saving, moving = (partitioned(f"undecided -> save\n{verb} mm", one_layer) for verb in ("save", "offload"))
    assert saving.saved - moving.saved == moving.offloaded > 0
    assert moving.peak <= saving.peak


def test_both_roads_need_the_same() -> None:
    for verb in ("save", "offload"):
        assert partitioned(POLICY.format(verb)).peak == pytest.approx(in_place(POLICY.format(verb)).peak, rel=0.03)
