"""`policylang profile` on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

import policylang
from policylang.language.devices.reading import read_device


def test_a_gpu_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    found = policylang.profile_device(path, device="cuda", compiled=True, seconds=30)
    device = read_device(path)
    assert device.canonical == found.canonical
    assert torch.cuda.get_device_name() in path.read_text(encoding="utf-8")
    assert {"float32", "bfloat16", "float16"} <= set(device.compute)
    fastest = {dtype: max(reached for _, reached in rate.points) for dtype, rate in device.compute.items()}
    assert fastest["bfloat16"] > fastest["float32"]
    assert 0 < device.pointwise < 1
    assert 0 < device.attention <= 1
    assert 1e-7 < device.overhead < 1e-3
    assert device.capacity <= torch.cuda.get_device_properties(0).total_memory
    assert 1e9 < device.host_bandwidth < max(reached for _, reached in device.bandwidth.points)
