"""Training under a tuned policy: losses and gradients have the bits that they have without it."""

from __future__ import annotations

import pytest
import torch

import policylang
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.planning.capabilities import FLAT, JOINT
from policylang.simulation.node_times import node_times
from policylang.tuning.trade_off import Budget, Tuned
from policylang.tuning.tuner import Tuner
from tests.support.compiled import assert_bitwise_equal, train
from tests.support.flat_graphs import flat_graph
from tests.support.hand import same_bits
from tests.support.joint import capture_joints
from tests.support.models import ZOO
from policylang.graph.reading.collect import collect

DEVICE = DeviceProfile("small", {"float32": Rate.constant(1e9)}, Rate.constant(1e9))


def _halfway(tuner: Tuner) -> str:
    """What is chosen between the least and the most memory."""
    least, most = tuner.smallest(Budget("peak", 0)), tuner.save_all
    assert most is not None
    found = tuner.tuned(Budget("peak", (least.peak + most.peak) / 2))
    assert isinstance(found, Tuned)
    assert found.chosen.recompute > 0
    return found.chosen.rules


def test_a_flat_graph_has_the_bits_that_it_had() -> None:
    flat = flat_graph(ZOO["mlp"]())
    facts = collect(flat.gm)
    text = _halfway(Tuner(facts, node_times(facts, DEVICE), FLAT))
    same_bits(flat, text)


def test_a_compiled_step_has_the_bits_that_it_had() -> None:
    example = ZOO["mlp"]()
    joint = capture_joints(example.module, example.inputs, example.loss_fn)
    facts = collect(joint[0].gm)
    text = _halfway(Tuner(facts, node_times(facts, DEVICE), JOINT))
    eager = train(ZOO["mlp"](), lambda model: torch.compile(model, backend="aot_eager"))
    under = train(ZOO["mlp"](), lambda model: torch.compile(model, backend=policylang.backend(policylang.parse(text))))
    assert_bitwise_equal(eager, under)
