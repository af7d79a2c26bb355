"""A model whose parameters are DTensors, under ``torch.compile``: shards and mesh are inputs of the graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import policylang
from policylang.audit.report import Report
from tests.support.compiled import fresh_dynamo
from tests.support.sharded import fake_ranks, sharded_stack

LAYERS = 2
WEIGHTS = 2 * LAYERS


@pytest.fixture(scope="module")
def many() -> Iterator[None]:
    with fake_ranks(4):
        yield


def trained(text: str) -> tuple[nn.Module, Report]:
    model = sharded_stack(4, LAYERS, width=8)
    with fresh_dynamo():
        compiled = torch.compile(model, backend=policylang.backend(policylang.parse(text), inner="aot_eager"))
        compiled(torch.ones(4, 8)).sum().backward()
        return model, policylang.report(compiled)


@pytest.mark.usefixtures("many")
def test_a_gradient_is_a_dtensor_on_the_mesh_of_its_parameter() -> None:
    """The backward returns the mesh, an input of the forward, with every gradient."""
    model, report = trained("save everything")
    assert report.audit.agrees
    for parameter in model.parameters():
        assert parameter.grad.device_mesh == parameter.device_mesh  # type: ignore[attr-defined]
        assert parameter.grad.placements == parameter.placements  # type: ignore[attr-defined]


@pytest.mark.usefixtures("many")
def test_the_shard_that_a_gather_starts_from_is_known_as_the_parameter() -> None:
    _, report = trained(
        "save everything; must_recompute chain through all_gather where from parameter\n"
        f"expect exactly {WEIGHTS} (all_gather where from parameter) per graph\n"
    )
    assert len([name for name in report.recomputed.names if name.startswith("all_gather")]) == WEIGHTS - 1
    assert not [name for name in report.saved.names if "gather" in name or "wait" in name]
