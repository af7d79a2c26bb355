"""What a partition offloaded is offloaded by the next one: of the same forward under ``replay.apl``, of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config

import policylang
from policylang import PolicyMeaningError
from policylang.backends.joint import partitions
from policylang.backends.recompilable import recompilable
from tests.backends.test_replay import first_step, one_layer, replay, second_step
from tests.support.compiled import fresh_dynamo
from tests.support.late import Late, copied_over
from tests.support.models import ZOO

OFFLOADS = "recompute everything\nsave addmm\noffload gelu"
INNER = ["aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def _fresh() -> object:
    with fresh_dynamo(), inductor_config.patch(force_disable_caches=True):
        yield


def moved(partition: Any) -> list[tuple[str, Any, int]]:
    facts = partition.plan.facts
    rows = [facts.index[name] for name in partition.audit.offloaded]
    return sorted((facts.modules[row], facts.shapes[row], facts.bytes[row]) for row in rows)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (ZOO["mlp"], OFFLOADS),
        (ZOO["mlp"], "save everything\noffload gelu"),
        pytest.param(one_layer, "recompute everything\nsave mm\noffload attention", marks=pytest.mark.slow),
        pytest.param(one_layer, "undecided -> save\noffload mm, aten.silu", marks=pytest.mark.slow),
    ],
)
def test_the_second_partition_offloads_what_the_first_did(model: Any, text: str, inner: str) -> None:
    """Inductor decomposes GELU, SiLU and softmax: what is moved is what these became."""
    first = first_step(model, text)
    assert first.partition.audit.offloaded
    link = Late(1)
    with partitions() as done, copied_over(link):
        loss, gradients = second_step(first, policylang.backend(replay(), inner=inner))
    (second,) = done
    assert moved(second) == moved(first.partition)
    assert second.audit.saved_bytes == first.partition.audit.saved_bytes
    assert link.out == link.back == len(second.audit.offloaded)
    assert link.pending == []
    if inner == "aot_eager":
        assert torch.equal(loss, first.loss)
        assert all(torch.equal(again, before) for again, before in zip(gradients, first.gradients, strict=True))
    torch.testing.assert_close((loss, gradients), (first.loss, first.gradients))


def test_another_policy_may_keep_it_on_the_device() -> None:
    first = first_step(ZOO["mlp"], OFFLOADS)
    text = "override recompute everything\noverride save everything where recorded saved"
    with partitions() as done:
        second_step(first, policylang.backend(policylang.parse(text), inner="aot_eager"))
    (second,) = done
    assert not second.audit.offloaded
    moved_bytes = sum(size for *_, size in moved(first.partition))
    assert second.audit.saved_bytes == first.partition.audit.saved_bytes + moved_bytes


def test_cuda_graphs_are_refused_only_where_something_was_offloaded() -> None:
    with inductor_config.patch({"triton.cudagraphs": True}):
        second_step(first_step(ZOO["mlp"], "recompute everything\nsave addmm"), policylang.backend(replay()))
        with pytest.raises(PolicyMeaningError, match="copies values to the host") as caught:
            second_step(first_step(ZOO["mlp"], OFFLOADS), policylang.backend(replay()))
    assert [each.code for each in caught.value.diagnostics] == ["APL338"]


def test_nothing_is_taken_from_a_forward_whose_record_says_otherwise() -> None:
    """The digest of a partition knows what was moved: a second compilation is cached by it."""
    records = []
    for text in (OFFLOADS, OFFLOADS.replace("offload", "save")):
        first = first_step(ZOO["mlp"], text)
        module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
        found = [node.meta["custom"]["policylang_saved"] for node in module.graph.nodes if node.name == "gelu"]
        records += [(each["partition"], each["offloaded"]) for each in found]
    assert [offloaded for _, offloaded in records] == [True, False]
    assert len({partition for partition, _ in records}) == 2


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x


@pytest.mark.parametrize("inner", INNER)
def test_a_graph_of_other_sizes_offloads_as_the_first(inner: str) -> None:
    """Dynamo compiles a second time, with symbolic sizes, and not a third."""
    torch.manual_seed(0)
    model, link = Deep(), Late(1)
    policy = "undecided -> recompute\noffload sin"
    compiled = torch.compile(model, backend=policylang.backend(policylang.parse(policy), inner=inner))
    with partitions() as done, copied_over(link):
        for rows in (4, 6, 9):
            x = torch.randn(rows, 8)
            found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
            wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
    assert [len(each.audit.offloaded) for each in done] == [2, 2]
    assert link.out == link.back == 6


@pytest.mark.parametrize("inner", INNER)
def test_a_second_backward_fetches_again(inner: str) -> None:
    torch.manual_seed(0)
    model, link = Deep(), Late(1)
    compiled = torch.compile(
        model, backend=policylang.backend(policylang.parse("undecided -> recompute\noffload sin"), inner=inner)
    )
    with copied_over(link):
        loss = compiled(torch.randn(4, 8)).square().sum()
        once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    assert (link.out, link.back) == (2, 4)
    assert link.pending == []
