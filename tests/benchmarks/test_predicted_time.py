"""The benchmark of predicted times, one model on one path."""

from __future__ import annotations

import pytest
import torch

from benchmarks.predicted_time import FLAT, NOTHING, compare
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device


@pytest.mark.slow
@pytest.mark.parametrize("model", ["GPT-2", "ResNet-50"])
def test_predictions_stand_beside_steps(model: str) -> None:
    device = read_device("cpu")
    assert isinstance(device, DeviceProfile)
    torch.set_num_threads(1)
    rows = {row["policy"]: row for row in compare(model, FLAT, device, turns=1)}
    told = {policy: row["predicted ratio"] for policy, row in rows.items()}
    assert told[NOTHING] == 1
    assert 1 < told["all but products"] < told["every 2nd block"] < told["whole blocks"] < 4 / 3 + 0.1
    assert all(row["step s"] > 0 for row in rows.values())
