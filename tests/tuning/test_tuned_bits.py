"""Training under a tuned policy: losses and gradients have the bits that they have without it."""

from __future__ import annotations

import pytest
import torch

import policylang
from policylang.graph.facts import Facts
from policylang.graph.reading.collect import collect
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.simulation.node_times import node_times
from policylang.tuning.evaluation import Budget, Tuned
from policylang.tuning.tuner import Tuner
from tests.support.compiled import assert_bitwise_equal, train
from tests.support.flat_graphs import flat_graph
from tests.support.hand import same_bits
from tests.support.joint import capture_joints
from tests.support.models import ZOO

DEVICE = DeviceProfile("small", {"float32": Rate.constant(1e9)}, Rate.constant(1e9))


def _halfway(facts: Facts, capabilities: Capabilities) -> str:
    """What is chosen where half as much may be kept as there is to keep."""
    tuner = Tuner(facts, node_times(facts, DEVICE), capabilities)
    assert tuner.save_all is not None
    found = tuner.tuned(Budget("saved", tuner.save_all.saved / 2))
    assert isinstance(found, Tuned)
    assert found.chosen.recompute > 0
    return found.chosen.rules


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_flat_graph_has_the_bits_that_it_had(name: str) -> None:
    flat = flat_graph(ZOO[name]())
    same_bits(flat, _halfway(collect(flat.gm), FLAT))


@pytest.mark.parametrize("name", ["mlp", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_compiled_step_has_the_bits_that_it_had(name: str) -> None:
    module, inputs, _ = ZOO[name]()
    text = _halfway(collect(capture_joints(module, inputs)[0].gm), JOINT)
    tuned = policylang.backend(policylang.parse(text), inner="aot_eager")
    without = train(ZOO[name](), lambda model: torch.compile(model, backend="aot_eager"))
    assert_bitwise_equal(without, train(ZOO[name](), lambda model: torch.compile(model, backend=tuned)))
