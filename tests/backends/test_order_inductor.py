"""Under Inductor, either half runs in the order that it was handed over in, and the generated code is held to it."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import policylang
from policylang.audit.order import CommunicationStep, steps_of
from policylang.backends.torch_compile import inductor
from policylang.backends.torch_compile.backend import PolicyBackend
from policylang.operators.work import is_communication, is_wait
from policylang.torch_compat import compilers
from tests.support.compiled import backend_for, fresh_dynamo
from tests.support.orders import at_random, in_hand_order
from tests.support.process import python
from tests.support.sharded import WIDTH, Meshed, fake_ranks
from tests.support.versions import needs_cached_collectives, needs_several_last_passes

POLICY = "undecided -> save\nkeep order of all_gather\n"
OVERLAP = "aten_distributed_optimizations.enable_overlap_scheduling"
MOVING: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
    "bucket_all_gathers_fx": "all",
    "bucket_reduce_scatters_fx": "all",
    OVERLAP: True,
}
FORWARD = {"all_gather_into_tensor_1": 1, "all_gather_into_tensor_2": 2}
"""Kernels beside the gathers of three layers, each started two products before the one that reads it."""


@pytest.fixture(autouse=True)
def nothing_compiled(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with fresh_dynamo():
        yield


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(2):
        yield init_device_mesh("cpu", (2,))


def ordered(policy: str = POLICY) -> PolicyBackend:
    return in_hand_order(backend_for(policy, "inductor"))


def trained(mesh: DeviceMesh, backend: PolicyBackend, **options: Any) -> Callable[..., Any]:
    model = torch.compile(Meshed(mesh, (0,), layers=3, linear=True), backend=backend, **options)
    model(torch.ones(4, WIDTH)).sum().backward()
    return model


def found(subject: Any) -> dict[str, tuple[str, int, int]]:
    return {each.half: (each.status, each.starts, each.waits) for each in policylang.report(subject).code}


IN_ORDER = {"forward": ("as planned", 3, 3), "backward": ("as planned", 3, 3)}


def test_both_halves_run_in_the_order_that_they_were_handed_over_in(mesh: DeviceMesh) -> None:
    backend = ordered()
    model = torch.compile(Meshed(mesh, (0,), layers=3, linear=True), backend=backend)
    loss = model(torch.ones(4, WIDTH)).sum()
    report = policylang.report(model)
    statuses = [(each.half, each.status) for each in report.code]
    assert statuses == [("forward", "as planned"), ("backward", "not compiled")]
    assert "code        of the backward: compiled when the first backward starts, and read then" in str(report)
    loss.backward()
    assert found(model) == IN_ORDER
    forward, backward = policylang.report(model).code
    assert forward.kernels == FORWARD
    assert min(backward.kernels.values(), default=0) >= 1
    assert "in order as planned, 2 collectives with computation beside" in str(policylang.report(model))


def test_what_is_read_off_the_code_is_what_runs(mesh: DeviceMesh) -> None:
    backend = ordered()
    model = trained(mesh, backend)
    code = backend.graphs[0].code
    losses: list[Tensor] = []
    halves = {
        "forward": lambda: losses.append(model(torch.ones(4, WIDTH)).sum()),
        "backward": lambda: losses[0].backward(),
    }
    for half, run in halves.items():
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            run()
        events = sorted(profiled.events(), key=lambda event: event.time_range.start)
        ran = [event.name for event in events if event.name.startswith(("_c10d_functional::", "aten::mm"))]
        planned = [name for step in code.planned[half][0] for name in (*["aten::mm"] * step.kernels, operator(step))]
        assert ran[: len(planned)] == planned
        assert set(ran[len(planned) :]) <= {"aten::mm"}


def operator(step: CommunicationStep) -> str:
    return step.operator.replace(".", "::") if step.starts else "_c10d_functional::wait_tensor"


def test_without_what_keeps_it_the_order_is_lost_and_that_is_an_error(mesh, monkeypatch) -> None:
    monkeypatch.setattr(inductor, "settings_to_keep", lambda policy, given: given)
    monkeypatch.setattr(inductor, "last_passes", lambda policy, given, key: {})
    with pytest.raises(policylang.PolicyAuditError, match=r"APL34[56].*in the code of the (forward|backward)"):
        trained(mesh, ordered())


def test_settings_of_the_program_hold_for_neither_half_and_it_is_told(mesh: DeviceMesh) -> None:
    backend = ordered()
    with inductor_config.patch(MOVING), pytest.warns(policylang.PolicyWarning) as told:
        trained(mesh, backend)
    assert found(backend) == IN_ORDER
    message = str(told[0].message)
    for name in ("reorder_for_compute_comm_overlap", OVERLAP, "bucket_all_gathers_fx"):
        assert f"`torch._inductor.config.{name}` is set, and off for what is compiled under this policy" in message
    assert "APL343" in message
    assert "keep order of all_gather" in message


def test_settings_that_change_before_the_first_backward_do_not_reach_it(mesh: DeviceMesh) -> None:
    backend = ordered()
    model = torch.compile(Meshed(mesh, (0,), layers=3, linear=True), backend=backend)
    loss = model(torch.ones(4, WIDTH)).sum()
    with inductor_config.patch(MOVING):
        loss.backward()
    assert found(model) == IN_ORDER


@needs_several_last_passes
def test_nothing_is_left_set_for_others(mesh: DeviceMesh) -> None:
    def settings() -> tuple[bool, bool]:
        return inductor_config.reorder_for_peak_memory, inductor_config.reorder_for_compute_comm_overlap

    before, seen = settings(), list[tuple[bool, bool]]()
    ours, other = ordered(), backend_for("undecided -> save\n", "inductor")
    with inductor_config.patch(post_grad_custom_post_pass=Noting(lambda graph: seen.append(settings()))):
        trained(mesh, ours)
        assert settings() == before == (True, False)
        torch._dynamo.reset()
        trained(mesh, other)
    assert seen == [(False, False)] * 2 + [before] * 2
    assert policylang.report(other).code == ()


class Noting(CustomGraphPass):
    """A pass of the user's own."""

    def __init__(self, does: Callable[[fx.Graph], Any]) -> None:
        self.does = does

    def __call__(self, graph: fx.Graph) -> None:
        self.does(graph)

    def uuid(self) -> Any:
        return None


@needs_several_last_passes
@pytest.mark.parametrize("way", ["setting", pytest.param("option", marks=pytest.mark.slow)])
def test_a_users_own_last_pass_runs_too(mesh: DeviceMesh, way: str) -> None:
    seen: list[int] = []
    own, backend = Noting(lambda graph: seen.append(len(steps_of(graph)))), ordered()
    if way == "setting":
        with inductor_config.patch(post_grad_custom_post_pass=own):
            trained(mesh, backend)
    else:
        trained(mesh, backend, options={"post_grad_custom_post_pass": own})
    assert seen == [6, 6]
    assert found(backend) == IN_ORDER


def awaited_at_once(graph: fx.Graph) -> None:
    for node in [each for each in graph.nodes if is_communication(each) and is_wait(str(each.target))]:
        node.all_input_nodes[0].append(node)


@needs_several_last_passes
def test_a_users_own_pass_that_reorders_is_an_error_of_each_half(mesh: DeviceMesh) -> None:
    own = inductor_config.patch(post_grad_custom_post_pass=Noting(awaited_at_once))
    with own, pytest.raises(policylang.PolicyAuditError) as raised:
        trained(mesh, ordered())
    (difference,) = raised.value.diagnostics
    assert difference.code == "APL345"
    assert difference.message == (
        "in the code of the forward, step 1 of its communication is the wait for all_gather_into_tensor 0; "
        "the plan has the start of all_gather_into_tensor 1 (`all_gather_into_tensor_1`) there"
    )
    torch._dynamo.reset()
    backend = ordered()
    model = torch.compile(Meshed(mesh, (0,), layers=3, linear=True), backend=backend)
    loss = model(torch.ones(4, WIDTH)).sum()
    graph = backend.graphs[0].code
    graph.planned["backward"] = [graph.planned["backward"][0][::-1]]
    with pytest.raises(policylang.PolicyAuditError, match="in the code of the backward"):
        loss.backward()


@pytest.mark.parametrize("name", ["reorder_for_compute_comm_overlap", OVERLAP])
def test_an_option_that_orders_otherwise_is_refused(mesh: DeviceMesh, name: str) -> None:
    with pytest.raises(policylang.PolicyMeaningError) as raised:
        trained(mesh, ordered(), options={name: True})
    (refused,) = raised.value.diagnostics
    assert refused.code == "APL342"
    assert f"the option `{name}` of torch.compile and this line" in refused.message
    assert refused.span.one_line == "keep order of all_gather"


def test_compiled_autograd_would_lose_the_order_and_is_refused(mesh: DeviceMesh) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True), pytest.raises(policylang.PolicyMeaningError) as raised:
        trained(mesh, ordered())
    assert [each.code for each in raised.value.diagnostics] == ["APL348"]


def test_a_torch_that_takes_one_last_pass_refuses_a_second(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "takes_lists_of_passes", lambda: False)
    own = inductor_config.patch(post_grad_custom_post_pass=Noting(awaited_at_once))
    with own, pytest.raises(policylang.PolicyMeaningError, match=r"APL342.*takes one `post_grad_custom_post_pass`"):
        trained(mesh, ordered())


@pytest.mark.slow
def test_what_moves_within_the_order_may_be_asked_for(mesh: DeviceMesh) -> None:
    backend = ordered()
    with warnings.catch_warnings():
        warnings.simplefilter("error", policylang.PolicyWarning)
        trained(mesh, backend, options={"reorder_for_peak_memory": True})
    assert found(backend) == IN_ORDER


@needs_cached_collectives
def test_the_order_holds_and_is_read_where_the_code_comes_from_a_cache(mesh: DeviceMesh, tmp_path: Path) -> None:
    first = ordered()
    trained(mesh, first)
    read = policylang.report(first).code
    torch._dynamo.reset()
    second = ordered()
    trained(mesh, second)
    assert [graph.from_cache for graph in second.graphs] == [True]
    assert found(second) == IN_ORDER
    assert policylang.report(second).code == read
    (folder,) = (path for path in tmp_path.iterdir() if path.name == "policylang")
    (record,) = folder.rglob("*.json")
    torch._dynamo.reset()
    record.write_text(record.read_text().replace('"number":1', '"number":0'))
    with pytest.raises(policylang.PolicyAuditError, match="in the code of the forward, step 1"):
        trained(mesh, ordered())


@pytest.mark.slow
def test_a_graph_break_and_other_shapes_keep_their_order(mesh: DeviceMesh) -> None:
    layers = Meshed(mesh, (0,), layers=3, linear=True)

    def broken(x: Tensor) -> Tensor:
        x = layers(x)
        torch._dynamo.graph_break()
        return layers(x)

    backend = ordered()
    run = torch.compile(broken, backend=backend, dynamic=None)
    for batch in (4, 6, 8):
        run(torch.ones(batch, WIDTH)).sum().backward()
    orders = [graph.code.reports() for graph in backend.graphs if graph.code is not None]
    assert len(orders) == len(backend.graphs) >= 3
    assert {each.status for order in orders for each in order} == {"as planned"}


def test_without_gradients_nothing_is_ordered(mesh: DeviceMesh) -> None:
    backend = ordered()
    model = torch.compile(Meshed(mesh, (0,), layers=3, linear=True), backend=backend)
    with torch.inference_mode():
        model(torch.ones(4, WIDTH))
    assert [(graph.kind, graph.code) for graph in backend.graphs] == [("inference", None)]


@pytest.mark.slow
@pytest.mark.parametrize("linear", [True, False], ids=["products", "fused kernels"])
@pytest.mark.parametrize("rules", ["undecided -> save", "recompute everything"])
def test_any_order_holds(mesh: DeviceMesh, linear: bool, rules: str) -> None:
    """Orders that nobody would plan: whatever fuses and whatever is sorted anew, both halves keep theirs."""
    for seed in range(12):
        torch._dynamo.reset()
        backend = backend_for(f"{rules}\nkeep order of all_gather\n", "inductor")
        model = Meshed(mesh, (0,), layers=4, linear=linear)
        run = torch.compile(model, backend=in_hand_order(backend, at_random(seed)), options={"fx_graph_cache": False})
        run(torch.ones(4, WIDTH)).sum().backward()
        assert {each.status for each in policylang.report(backend).code} == {"as planned"}, seed


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_every_mode_keeps_the_order(mesh: DeviceMesh, mode: str) -> None:
    backend = ordered()
    model = torch.compile(Meshed(mesh, (0,), layers=3), backend=backend, mode=mode)
    model(torch.ones(4, WIDTH)).sum().backward()
    assert found(backend) == IN_ORDER


def one_step_in_a_process(text: str) -> None:
    """What another process is run for; prints what it found."""
    with fake_ranks(2):
        backend = ordered(text)
        trained(init_device_mesh("cpu", (2,)), backend)
        hits = torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]
        print(json.dumps({"hits": hits, "cached": backend.graphs[0].from_cache, "found": found(backend)}))


@pytest.mark.slow
def test_another_process_has_the_order_from_the_caches_and_reads_it_there(tmp_path: Path) -> None:
    told = []
    for number, text in enumerate((POLICY, POLICY, f"{POLICY}keep order of reduce_scatter\n")):
        code = f"from {__name__} import one_step_in_a_process as step; step({text!r})"
        done = python("-c", code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), PYTHONHASHSEED=str(number))
        told.append(json.loads(done.stdout.splitlines()[-1]))
    in_order = {half: list(each) for half, each in IN_ORDER.items()}
    assert [each["found"] for each in told] == [in_order] * 3
    assert [(each["hits"], each["cached"]) for each in told] == [(0, False), (1, True), (0, False)]


def test_a_partitioner_cannot_have_inductor_keep_an_order(mesh: DeviceMesh) -> None:
    split = policylang.partitioner(policylang.parse(POLICY))
    model = torch.compile(Meshed(mesh, (0,), linear=True), options={"custom_partitioner_fn": split})
    with pytest.raises(policylang.PolicyMatchError) as raised:
        model(torch.ones(4, WIDTH))
    (refused,) = raised.value.diagnostics
    assert refused.code == "APL344"
    assert refused.span.one_line == "keep order of all_gather"


def test_what_a_policy_schedules_runs_beside_computation_in_both_halves(mesh: DeviceMesh) -> None:
    text = "undecided -> save\nprefetch all_gather 1 block ahead\ndelay reduce_scatter 1 block\n"
    backend = backend_for(text, "inductor")
    trained(mesh, backend)
    assert found(backend) == IN_ORDER
    forward, backward = policylang.report(backend).code
    assert list(forward.kernels) == ["all_gather_into_tensor_1", "all_gather_into_tensor_2"]
    assert list(backward.kernels) == ["reduce_scatter_tensor", "reduce_scatter_tensor_1"]
    assert min(*forward.kernels.values(), *backward.kernels.values()) >= 1


@pytest.mark.slow
def test_a_tensor_parallel_llama_of_hugging_face_keeps_its_order(mesh: DeviceMesh) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, hidden_size=32, intermediate_size=64, **heads))
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {**dict.fromkeys(columns, ColwiseParallel()), "self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, {**plan, "mlp.down_proj": RowwiseParallel()})
    backend = in_hand_order(backend_for("undecided -> save\nkeep order of all_reduce\n", "inductor"))
    torch.compile(model, backend=backend)(torch.ones(2, 16, dtype=torch.int64), use_cache=False).logits.sum().backward()
    forward, backward = policylang.report(backend).code
    assert (forward.status, forward.starts) == ("as planned", 4)
    assert (backward.status, backward.starts) == ("as planned", 10)
    assert backward.kernels
