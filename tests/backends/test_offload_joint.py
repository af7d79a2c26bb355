"""`offload` under ``torch.compile``: the same bits however late the copies come, and nothing held that was moved."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

import policylang
from policylang.backends import copies as copy_operators
from policylang.graph import marks
from policylang.planning.value_outcome import Why
from tests.support import models
from tests.support.compiled import (
    WITHOUT,
    Trained,
    assert_bitwise_equal,
    assert_same_as_without,
    backend_for,
    fresh_dynamo,
    train,
)
from tests.support.drawn import drawn, slow
from tests.support.late import Late, copied_over
from tests.support.lines import NAMES, Layers, placements_of
from tests.support.models import ZOO, Example, Function, square_loss
from tests.support.run_partition import Result, Traced, assert_same_result, trace
from tests.support.run_partition import traced as zoo_traced
from tests.support.sharded import fake_ranks

SAVE = "undecided -> save\n"


def trained(example: Example, backend: Any, link: Late | None = None, **options: Any) -> Trained:
    with copied_over(link or Late(1)):
        return train(example, lambda model: torch.compile(model, backend=backend, **options))


def traced(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> Traced:
    return trace(Function(function), tuple(v.clone().requires_grad_() for v in inputs), square_loss, dynamic=dynamic)


@cache
def without_policy(graph: Traced) -> Result:
    return graph.run(SAVE)


def mlp() -> Traced:
    return zoo_traced("mlp")


def copies(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


# --- values -------------------------------------------------------------------------------------------------------
QUICK = [
    slow("mlp", SAVE + "offload gelu, addmm"),
    slow("resnet", "recompute everything\noffload convolution"),
    ("shared_parameters", SAVE + "offload addmm up to 4 KiB per rank"),
]
TEXTS = ("offload everything", *(f"optional offload {each}" for each in ("matmul", "pointwise", "mm")))
REST = [pytest.param(name, text, marks=pytest.mark.slow) for name in ZOO for text in TEXTS]


@pytest.mark.parametrize(("name", "text"), [*QUICK, *REST])
def test_the_same_bits_however_late_the_copies_come(name: str, text: str) -> None:
    without = train(ZOO[name](), lambda model: torch.compile(model, backend=WITHOUT))
    for seed in (None, 1) if name == "mlp" else (1,):
        backend, link = backend_for(text), Late(seed)
        assert_bitwise_equal(trained(ZOO[name](), backend, link), without)
        report = policylang.report(backend)
        assert report.offloaded or (name, text) not in QUICK
        assert link.out == link.back == 2 * len(report.offloaded), "two steps"
        assert not any(link.held), "the device copy is still there when the value comes back"


@pytest.mark.slow
@pytest.mark.parametrize("text", [SAVE + "offload mm", "offload mm"])
def test_a_llama_through_inductor(text: str) -> None:
    saving = backend_for(text.replace("offload", "save"), "inductor")  # Inductor fuses, and rounds, by what is saved
    without = train(models.llama(layers=1), lambda model: torch.compile(model, backend=saving))
    backend, link = backend_for(text, "inductor"), Late(3)
    assert_bitwise_equal(trained(models.llama(layers=1), backend, link), without)
    report = policylang.report(backend)
    assert report.offloaded
    assert link.out == link.back == 2 * len(report.offloaded)


@pytest.mark.slow
def test_min_cut_decides_the_rest_around_what_is_offloaded() -> None:
    partition = zoo_traced("llama").partition("offload mm")
    audit = partition.audit
    assert audit.offloaded
    plan = partition.plan
    assert any(plan.rule_of(plan.facts.index[name]) is None for name in audit.saved)
    index, mm = plan.facts.index, {plan.facts.names[row] for row in plan.rules[0].decided}
    assert {plan.facts.names[plan.facts.owners[index[name]]] for name in audit.offloaded} <= mm
    assert not {*audit.saved} & mm


def test_what_the_caller_holds_or_gave_stays() -> None:
    def returned(x: Tensor) -> tuple[Tensor, ...]:
        held = x.sin()
        return held.t(), held.cos()

    x = torch.randn(4, 4, requires_grad=True)
    graph = trace(Function(returned), (x,), lambda outputs: sum(square_loss(each * each) for each in outputs))
    partition = graph.partition(SAVE + "offload everything")
    assert not partition.audit.offloaded
    assert [found.code for found in partition.plan.diagnostics if found.code in ("APL313", "APL316")]
    assert_same_result(graph.run(SAVE + "offload everything"), graph.run(SAVE))


def test_a_view_is_rebuilt_and_its_memory_moved_once() -> None:
    graph = traced(lambda x: (x.sin().t() @ x).cos(), torch.randn(4, 4))
    for text in ("offload t, permute", "offload sin"):
        split = graph.partition(SAVE + f"optional {text}")
        assert split.audit.offloaded == ("sin",)
        assert not set(split.audit.saved) & {"permute", "t"}
        out, back = copies(split.forward, copy_operators.OFFLOAD_OP), copies(split.backward, copy_operators.RELOAD_OP)
        assert len(out) == len(back) == 1
    with copied_over(Late()):
        assert_same_result(graph.run(SAVE + "offload sin"), graph.run(SAVE))


def test_what_the_backward_does_not_read_is_decided_as_if_it_did() -> None:
    """As in eager, whose checkpoint holds it: nothing is moved for it here, and no budget is spent."""
    graph = traced(lambda x: ((x @ x).t() + 1).sin() + (x @ x.t()).view(2, 8).reshape(4, 4), torch.randn(4, 4))
    for text, of_products, of_views in (
        ("save everything\noffload mm", Why.RULE, Why.REBUILT),
        ("undecided -> save\noffload mm", Why.RULE, Why.REBUILT),
        ("save everything\noffload mm up to 1 MiB per rank", Why.STAYS, Why.RULE),
    ):
        split = graph.partition(text)
        plan, index = split.plan, split.plan.facts.index
        assert split.audit.offloaded == ()
        assert {plan.decisions[index[name]].why for name in ("mm", "mm_1")} == {of_products}
        assert {plan.decisions[index[name]].why for name in ("t", "view", "view_1")} == {of_views}
        assert_same_result(graph.run(text), graph.run(SAVE))


@pytest.mark.slow
def test_zeros_of_forward_derivatives_stay() -> None:
    """They take no memory: the tangent of a weight that nothing is derived for."""

    def derived(model: nn.Module, x: Tensor) -> Tensor:
        for layer in (model.first, model.second):
            value, tangent = torch.func.jvp(lambda y, layer=layer: torch.tanh(layer(y)), (x,), (torch.ones_like(x),))
            x = value + tangent.sin()
        return x

    def make() -> Example:
        torch.manual_seed(0)
        model = Function(derived, first=nn.Linear(8, 8), second=nn.Linear(8, 8))
        return Example(model, (torch.randn(4, 8),), square_loss)

    assert_same_as_without(make, backend := backend_for("offload everything"))
    assert policylang.report(backend).offloaded


def test_one_output_of_an_operator_with_several() -> None:
    def attention(x: Tensor) -> Tensor:
        x = x.sin().view(2, 2, 8, 4)
        return nn.functional.scaled_dot_product_attention(x, x, x).view(2, 64).cos()

    graph = traced(attention, torch.randn(2, 64))
    partition = graph.partition(SAVE + "offload attention")
    assert len(partition.audit.offloaded) == 2  # the result and the sums of its softmax
    with copied_over(Late()):
        assert_same_result(graph.run(SAVE + "offload attention"), graph.run(SAVE))


def test_equal_nodes_are_one_and_saved_if_either_is() -> None:
    """Merging makes one of two values of which one is saved: its memory stays, so nothing of it is moved."""
    graph = traced(lambda x: (x.sin() * x.sin().t()) @ x, torch.randn(4, 4))
    for text in ("offload first sin", "offload last sin", "offload sin", "offload last sin\nsave t, permute"):
        text = SAVE + "\n".join(f"optional {line}" for line in text.splitlines())
        result = graph.run(text)
        assert result.audit.agrees
        assert not {"sin", "sin_1"} & {*result.audit.saved} & {*result.audit.offloaded}
        assert_same_result(result, graph.run(SAVE))


# --- sizes, blocks, caches -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sizes_that_change_from_step_to_step(inner: str) -> None:
    def steps(backend: Any) -> list[Tensor]:
        module = models.mlp().module
        with fresh_dynamo():
            compiled = torch.compile(module, backend=backend)
            found = []
            for size in (4, 6, 9):
                batch = torch.randn(size, 16, generator=torch.Generator().manual_seed(size))
                torch._dynamo.mark_dynamic(batch, 0)
                loss = square_loss(compiled(batch))
                loss.backward()
                found.append(loss.detach())
            assert len(backend.graphs) == 1
            assert link.out == link.back == 3 * len(policylang.report(backend).offloaded)
            return [*found, *(value.grad for value in module.parameters())]

    link = Late(2)
    with copied_over(link):
        found = steps(backend_for(SAVE + "offload addmm, gelu", inner=inner))
    link = Late(2)
    expected = steps(backend_for(SAVE, inner=inner))
    assert all(map(torch.equal, found, expected))


def test_halves_whose_collectives_are_fused() -> None:
    """What is moved goes by its place once the halves are rewritten."""
    link = Late(6)
    with fake_ranks(8), copied_over(link):
        mesh = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=NAMES[:2])
        model = Layers(mesh, placements_of(2, "one"))
        backend = backend_for(SAVE + "offload everything\nfuse all_gather chains")
        with fresh_dynamo():
            torch.compile(model, backend=backend)(torch.ones(2, 16)).sum().backward()
            report = policylang.report(backend)
    assert "rewritten" in str(report.rewrites[0])
    assert link.out == link.back == len(report.offloaded) > 0


def test_a_model_compiled_block_by_block() -> None:
    def by_block(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            layer.compile(backend=backend)
        return model

    link = Late(4)
    backend = backend_for(SAVE)
    without = train(models.mlp(), by_block)
    backend = backend_for(SAVE + "offload gelu")
    with copied_over(link):
        assert_bitwise_equal(train(models.mlp(), by_block), without)
    assert link.out == link.back == 2 * 3


def test_a_graph_from_the_caches_moves_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for _ in range(2):
        backend, link = backend_for(SAVE + "offload mm", "inductor"), Late(5)
        found.append(trained(models.products(), backend, link))
        report = policylang.report(backend)
        assert link.out == link.back == 2 * len(report.offloaded) > 0
    assert report.from_cache
    assert_bitwise_equal(*found)


def test_a_forward_that_is_compiled_again_saves_what_was_offloaded() -> None:
    partition = mlp().partition(SAVE + "offload gelu")
    module = policylang.recompilable(partition.forward, num_fwd_outputs=mlp().num_fwd_outputs)
    nodes = {node.name: node for node in module.graph.nodes}
    assert not any("policylang" in str(node.target) for node in nodes.values())
    assert all(marks.SAVED in marks.custom(nodes[name].meta) for name in partition.audit.offloaded)


# --- order ---------------------------------------------------------------------------------------------------------
class Noted:
    """A link that notes what happens, and keeps every copy on the host: nobody may write to one while it is read."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        host = self.kept.get(source.data_ptr())
        name = f"out {len(self.kept)}" if host is None else f"back {len(self.events)}"
        self.events.append(f"start {name}")
        target.copy_(source)
        if host is None:
            self.kept[target.data_ptr()] = target, target.clone()
        return lambda: self.events.append(f"await {name}")


def four_linears() -> Example:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return Example(nn.Sequential(*layers), (torch.randn(4, 8),), square_loss)


def test_inductor_leaves_the_copies_where_they_stand_and_the_host_alone() -> None:
    """It would await each copy where it starts and fetch them all at once, for memory that it takes for the device's;
    and it may overwrite a saved value after its last use, which a copy that is under way does not show."""
    seen = {}
    for inner in ("aot_eager", "inductor"):
        link = Noted()
        backend = backend_for(SAVE + "offload addmm or tanh", inner=inner)
        with copied_over(link):
            train(four_linears(), lambda model, backend=backend: torch.compile(model, backend=backend), steps=1)
        assert all(torch.equal(*pair) for pair in link.kept.values())
        seen[inner] = link.events
    assert seen["inductor"] == seen["aot_eager"]
    assert seen["inductor"][:3] == ["start out 0", "start out 1", "await out 0"]


DRAWN = ("mm", "addmm", "mul", "add", "permute, t, view", "bernoulli", "gelu or silu or tanh", "attention", "getitem")


@drawn(12, 40, st.data())
def test_random_policies_give_the_same_bits(data: st.DataObject) -> None:
    graph = zoo_traced(data.draw(st.sampled_from(["dropout", "resnet", "mlp", "shared_parameters"])))
    fate = data.draw(st.sampled_from(["save", "recompute", "auto"]))
    lines = [f"undecided -> {fate}"]
    for what in data.draw(st.lists(st.sampled_from(DRAWN), min_size=1, max_size=5, unique=True)):
        verb = data.draw(st.sampled_from(["save", "offload", "offload", "recompute"]))
        budget = data.draw(st.sampled_from(["", " up to 2 KiB per rank"])) if verb == "offload" else ""
        lines.append(f"optional {verb} {what}{budget}")
    link = Late(data.draw(st.integers(0, 9)))
    with copied_over(link):
        result = graph.run("\n".join(lines))
    assert link.out == link.back == len(result.audit.offloaded)
    assert_same_result(result, without_policy(graph))


# --- figures, and what stays refused -------------------------------------------------------------------------------
@pytest.mark.slow
def test_an_expectation_is_settled_when_min_cut_has_decided() -> None:
    text = "offload mm in q_proj\nexpect every mm in q_proj offloaded\nexpect peak <= 1 GiB"
    plan = zoo_traced("llama").partition(text).plan
    assert [each.status for each in plan.expectations] == ["held", "held"]
