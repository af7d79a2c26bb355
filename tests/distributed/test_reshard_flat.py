"""Reshard after forward on a flat graph: one decision for a gather's whole line, on 128 pretended ranks and on two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn

import policylang
from policylang import TracedStep, trace_step
from policylang.graph import marks
from tests.support.ranks import run_ranks
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER, fake_ranks, sharded_stack

LAYERS = 3
WEIGHTS = 2 * LAYERS
AGAIN = WEIGHTS - 1  # nobody asks for the gradient of the batch, so the first weight is not needed twice
RESHARD = "must_recompute chain through all_gather where from parameter\n"
KEEP = "recompute everything in block\nsave chain through all_gather where from parameter\n"
RANKS = 2


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def gathers(gm: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """Those of the forward, and those that run again."""
    found = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    again = [node for node in found if marks.RECOMPUTED in marks.custom(node.meta)]
    return [node for node in found if node not in again], again


@pytest.fixture(scope="module")
def many() -> Iterator[None]:
    with fake_ranks(128):
        yield


def traced(dtype: torch.dtype = torch.float32) -> TracedStep:
    return trace_step(sharded_stack(128, LAYERS, dtype=dtype), loss, torch.ones(4, 128, dtype=dtype))


def apply(step: TracedStep, text: str) -> TracedStep:
    step.apply(policylang.parse(text))
    step.gm.graph.lint()
    return step


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_gathers_again_just_before_its_first_use(dtype: torch.dtype) -> None:
    step = apply(traced(dtype), RESHARD)
    forward, again = gathers(step.gm)
    assert (len(forward), len(again)) == (WEIGHTS, AGAIN)
    position = {node: at for at, node in enumerate(step.gm.graph.nodes)}
    for node in again:
        reader = node
        while marks.RECOMPUTED in marks.custom(reader.meta):
            reader = min(reader.users, key=position.__getitem__)
        between = list(step.gm.graph.nodes)[position[node] : position[reader]]
        assert all(marks.RECOMPUTED in marks.custom(each.meta) for each in between), "copies stand before their reader"
    assert len(step.gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)) == WEIGHTS


@pytest.mark.usefixtures("many")
def test_the_gathered_weight_of_the_forward_dies_there() -> None:
    """Its last reader is of the forward: no view, no wait, no cast of it is kept instead (2.62 GiB on LLaMA-3 8B)."""
    step = apply(traced(torch.bfloat16), RESHARD)
    position = {node: at for at, node in enumerate(step.gm.graph.nodes)}
    backward = min(position[node] for node in position if marks.custom(node.meta).get(marks.PHASE) == marks.BACKWARD)
    forward, _ = gathers(step.gm)
    for gather in forward:
        reached = [gather]
        while reached:
            node = reached.pop()
            value = node.meta.get("val")
            whole = isinstance(value, Tensor) and value.numel() == 128 * 256
            if node is gather or whole:
                assert all(position[user] < backward for user in node.users), f"{node} lives into the backward"
                reached.extend(user for user in node.users if position[user] < backward)
    report = step.report
    assert not [name for name in report.saved.names if "wait" in name or "gather" in name]


@pytest.mark.usefixtures("many")
def test_reshard_never_keeps_the_gathered_weight() -> None:
    """TorchTitan's full recomputation ignores that setting; here the later line decides."""
    step = apply(traced(), KEEP)
    forward, again = gathers(step.gm)
    assert (len(forward), len(again)) == (WEIGHTS, 0)
    assert len(step.report.recomputed) > 0


@pytest.mark.usefixtures("many")
def test_a_model_that_is_not_sharded_says_so() -> None:
    step = trace_step(nn.Linear(4, 4), loss, torch.ones(2, 4))
    with pytest.raises(policylang.PolicyMatchError, match="matches nothing in this graph"):
        apply(step, RESHARD)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("name", ["fsdp", "fsdp_reshard_always", "fsdp_reshard_never"])
@pytest.mark.parametrize(
    ("before", "needed"), [("", AGAIN), ("recompute everything in block\n", WEIGHTS), ("undecided -> save\n", AGAIN)]
)
def test_the_bundled_contracts_stand_whatever_is_recomputed(name: str, before: str, needed: int) -> None:
    step = apply(traced(torch.bfloat16), f"{before}include <{name}>\n")
    kept = [name for name in step.report.saved.names if "wait" in name]
    never = name == "fsdp_reshard_never"
    assert [len(part) for part in gathers(step.gm)] == [WEIGHTS, 0 if never else needed]
    assert len(kept) == (needed if never else 0)


def check(rank: int, policy: str, again: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    plain = trace_step(sharded_stack(RANKS, LAYERS, width=8), loss, x)
    changed = apply(trace_step(sharded_stack(RANKS, LAYERS, width=8), loss, x), policy)
    assert len(gathers(changed.gm)[1]) == again
    for _ in range(2):
        (left, expected), (right, found) = plain(x), changed(x)
        assert torch.equal(left, right)
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            assert torch.equal(gradient.to_local(), found[name].to_local()), name  # type: ignore[attr-defined]
            assert gradient.to_local().abs().sum() > 0  # type: ignore[attr-defined]
        for model in (plain.model, changed.model):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter -= 0.1 * found[name]


def check_all(rank: int) -> None:
    check(rank, RESHARD, AGAIN)
    check(rank, KEEP, 0)
    check(rank, "recompute everything\n" + RESHARD, WEIGHTS)


def test_real_ranks_get_the_same_gradients_bit_for_bit() -> None:
    run_ranks(check_all, RANKS)
