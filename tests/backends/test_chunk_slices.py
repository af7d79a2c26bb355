"""The slices of ``chunk`` under Inductor: one subgraph for all that are alike, to the bits of the slices in a row."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import policylang
from benchmarks.allocations import peak_allocated
from policylang.backends.joint import JointPartitioner
from policylang.backends.torch_compile.slices import share_slices
from policylang.graph import marks
from policylang.torch_compat import compilers
from tests.backends import test_chunks as chunks

SwiGlu, batch, model = chunks.SwiGlu, chunks.batch, chunks.model


def calls_in(gm: fx.GraphModule) -> list[str]:
    """The subgraph of each call."""
    return [str(node.args[1]) for node in gm.graph.nodes if "invoke_subgraph" in str(node.target)]


def compiled_by_hand(loss: chunks.Loss, text: str, halves: list[fx.GraphModule], *, share: bool) -> Any:
    """Partitioned under a policy and run node by node, with slices in a row or as calls."""
    partitioner = JointPartitioner(policylang.parse(text))

    def partition(gm: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves.extend(partitioner(gm, inputs, **options))
        if share:
            for half in halves:
                share_slices(half)
        return halves[-2], halves[-1]

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compilers.compile_with_aot_eager(gm, inputs, partition, lambda gm, run, is_backward: run)

    torch._dynamo.reset()
    return torch.compile(loss, backend=backend)


@pytest.mark.parametrize(
    "loss",
    [
        chunks.per_token,
        chunks.weighed,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (chunks.cross_entropy, chunks.preference, chunks.shifted, chunks.z_loss)
        ),
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize(
    ("text", "slices"),
    [
        ("chunk loss into 5", 5),
        ("chunk module mlp into 4", 4),
        ("chunk module mlp into 4; save everything", 4),
        ("chunk loss into 2; chunk module mlp into 3", 5),
    ],
)
def test_calls_of_subgraphs_keep_every_bit(loss: chunks.Loss, text: str, slices: int) -> None:
    whole, data = model(mlp=SwiGlu(), bias=True), batch()
    cut = copy.deepcopy(whole)
    unrolled: list[fx.GraphModule] = []
    shared: list[fx.GraphModule] = []
    want = chunks.gradients(whole, compiled_by_hand(loss, text, unrolled, share=False), data, 3.0)
    found = chunks.gradients(cut, compiled_by_hand(loss, text, shared, share=True), data, 3.0)
    assert torch.equal(found[0], want[0])
    assert all(torch.equal(found[1][name], want[1][name]) for name in want[1])
    calls = [calls_in(half) for half in shared]
    assert len(calls[0]) == slices
    assert all(len(set(each)) <= 4 for each in calls)
    products = [sum("mm" in str(node.target) for node in half.graph.nodes) for half in unrolled]
    assert sum("mm" in str(node.target) for node in shared[0].graph.nodes) < products[0]
    assert sum(calls_in(half) != [] for half in unrolled) == 0


def test_slices_that_are_alike_share_a_subgraph() -> None:
    halves: list[fx.GraphModule] = []
    chunks.gradients(
        model(), compiled_by_hand(chunks.cross_entropy, "chunk loss into 5", halves, share=True), batch(), 1.0
    )
    first, *others = calls_in(halves[0])  # 12 rows: 3, 3, 2, 2 and 2; the first slice adds to no sum
    assert [len({*others[at:]}) for at in (0, 1)] == [2, 1]
    assert first not in others


def test_a_row_that_starts_off_the_alignment_of_kernels_has_a_subgraph_of_its_own() -> None:
    """Labels are eight bytes each: of slices of three rows every second one starts off a multiple of sixteen."""
    halves: list[fx.GraphModule] = []
    chunks.gradients(
        model(), compiled_by_hand(chunks.cross_entropy, "chunk loss into 4", halves, share=True), batch(), 1.0
    )
    first, second, third, fourth = calls_in(halves[0])
    assert second == fourth != third
    assert first not in (second, third)


def test_views_and_pieces_that_others_read_are_made_outside() -> None:
    def pieces(x: Tensor) -> list[Tensor]:
        found = []
        for rows in (x[:2], x[2:]):
            doubled = rows * 2.0
            found += [doubled.max(1).values, doubled.view(12), doubled.view(3, 4) + 1.0, doubled, rows.view(12)]
        return found

    x, at = torch.randn(4, 6), -1
    gm = make_fx(pieces, tracing_mode="fake")(x)
    want = gm(x)
    for node in gm.graph.nodes:
        at += node.target is torch.ops.aten.mul.Tensor
        if node.op == "call_function" and node.target is not torch.ops.aten.slice.Tensor:
            node.meta["custom"] = {marks.SLICE: f"mul:{at}"}
    assert share_slices(gm) == 1
    assert all(torch.equal(one, other) for one, other in zip(gm(x), want, strict=True))
    assert len(calls_in(gm)) == 2
    (results,) = {node.args[0] for node in gm.chunk_slice_0.graph.nodes if node.op == "output"}  # type: ignore[union-attr]
    assert [node.name for node in results] == ["mul", "getitem", "add"]


def test_a_slice_that_something_outside_reads_and_goes_on_from_is_two_calls() -> None:
    def normed(x: Tensor) -> Tensor:
        one, two = x[:2].sin().cos(), x[2:].sin().cos()
        whole = one.sum() + two.sum()
        return torch.cat([(one / whole).exp(), (two / whole).exp()])

    x = torch.randn(4, 6)
    gm = make_fx(normed, tracing_mode="fake")(x)
    want = gm(x)
    first = True
    for node in gm.graph.nodes:
        name = str(node.target).split(".")[1] if node.op == "call_function" else ""
        if name in ("sin", "cos", "div", "exp"):
            node.meta["custom"] = {marks.SLICE: f"sin:{int(not first)}"}
            first = first if name in ("sin", "div") else not first
    assert share_slices(gm) == 2
    assert torch.equal(gm(x), want)
    assert len(calls_in(gm)) == 4


def inductor(text: str, width: int = 16, rows: int = 96) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2048, bias=False))
    data = torch.randn(rows, width), torch.randint(2048, (rows,))
    torch._dynamo.reset()
    return head, torch.compile(loss_of, backend=policylang.backend(policylang.parse(text))), data


def loss_of(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m(x), labels)


@pytest.mark.slow
def test_inductor_compiles_as_many_kernels_for_twelve_slices_as_for_four() -> None:
    kernels = []
    for count in (4, 12):
        head, compiled, data = inductor(f"chunk loss into {count}")
        (loss, gradients), codes = run_and_get_code(lambda c=compiled, h=head, d=data: chunks.gradients(h, c, d, 1.0))
        chunks.compare(chunks.gradients(copy.deepcopy(head), loss_of, data, 1.0), (loss, gradients), 1e-5)
        kernels.append(sum(code.count("async_compile.cpp_pybinding(") for code in codes))
        assert codes[0].count("def chunk_slice_") == 2
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize("slices", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_inductor_has_the_wide_values_of_one_slice_at_a_time(slices: int) -> None:
    """Logits and their gradient: two wide values a slice."""
    head, compiled, data = inductor(f"chunk loss into {slices}", rows=2048)

    def step() -> object:
        return chunks.gradients(head, compiled, data, 1.0)

    step()
    logits = 2048 * 2048 * 4
    assert peak_allocated(step) <= 2 * logits / slices + 5 * 2**20
