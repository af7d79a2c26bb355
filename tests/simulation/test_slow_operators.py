"""Operators that compute more than they move, and convolutions: from the file of a profile to the time of a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from policylang.graph.facts import GraphKind
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Diagnostic
from policylang.simulation.node_times import node_times
from tests.support.textgraph import GraphBuilder

PROFILE = """
[compute]
float32 = 10
{compute}
[memory]
bandwidth = 10
pointwise = 0.5
{operators}
"""


def profile(folder: Path, operators: str = "", compute: str = "") -> DeviceProfile | Diagnostic:
    path = folder / "slow.toml"
    path.write_text(PROFILE.format(operators=operators, compute=compute), encoding="utf-8")
    return read_device(path)


def seconds(device: DeviceProfile | Diagnostic, target: str, flops: int = 0) -> float:
    """Of an operator that reads and writes 20 bytes each."""
    assert isinstance(device, DeviceProfile), device
    built = GraphBuilder()
    like = {"shape": (5,), "numel": 5, "bytes": 20, "strides": (1,), "dtype": "float32", "device": "cpu"}
    x = built.add("x", "input", (), **like)
    built.add("y", target, (x,), flops=flops, **like)
    return node_times(built.facts(GraphKind.FLAT), device).seconds[-1]


def test_an_operator_is_no_faster_than_its_own_rate(tmp_path: Path) -> None:
    assert seconds(profile(tmp_path), "aten.tanh.default") == 2  # half of 40 bytes
    slow = profile(tmp_path, "[operators]\ntanh = 4\n'my_kernels.norm' = 2\n'aten.exp' = 1000")
    assert seconds(slow, "aten.tanh.default") == 10
    assert seconds(slow, "aten.exp.default") == 2
    assert seconds(slow, "my_kernels.norm.default") == 20
    assert seconds(slow, "aten.tanh_backward.default") == seconds(profile(tmp_path), "aten.tanh_backward.default")


def test_convolutions_reach_a_share_of_products_and_may_exceed_it(tmp_path: Path) -> None:
    target = "aten.convolution_backward.default"
    assert seconds(profile(tmp_path), target, 1000) == 100
    assert seconds(profile(tmp_path, compute="convolution = 2"), target, 1000) == 50
    assert seconds(profile(tmp_path, compute="convolution = 2"), "aten.mm.default", 1000) == 100


def test_both_are_part_of_what_plans_are_compared_by(tmp_path: Path) -> None:
    texts = ("", "[operators]\ntanh = 4", "[operators]\ntanh = 5", "[operators]\n'aten.tanh' = 5.0")
    found = [profile(tmp_path, each) for each in texts] + [profile(tmp_path, compute="convolution = 2")]
    keys = [each.canonical for each in found if isinstance(each, DeviceProfile)]
    assert len(keys) == 5
    assert len(set(keys)) == 4
    assert keys[2] == keys[3]


@pytest.mark.parametrize(
    ("operators", "compute", "message", "help"),
    [
        ("[operators]\ntahn = 4", "", "`tahn` is no operator", "did you mean `tanh`"),
        ("[operators]\n'aten.tanh.default' = 4", "", "`aten.tanh.default` is no operator", "tanh"),
        ("[operators]\n'' = 4", "", "`` is no operator", "my_kernels.fused_norm"),
        ("[operators]\n'größe.x' = 4", "", "`größe.x` is no operator", "tanh"),
        ("[operators]\ntanh = 'fast'", "", "`tanh` is a text, and should be a number of bytes per second", ""),
        ("[operators]\ntanh = 0", "", "`tanh = 0` cannot be", ""),
        ("", "convolution = 11", "`convolution = 11` cannot be: it is a share, above 0 and at most 10", ""),
        ("", "convolution = 0", "`convolution = 0` cannot be", ""),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, operators: str, compute: str, message: str, help: str) -> None:
    found = profile(tmp_path, operators, compute)
    assert message in found.message
    assert help in (found.help or "")


def test_operators_that_are_no_table(tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text("operators = 3\n[compute]\nfloat32 = 10\n[memory]\nbandwidth = 10\n", encoding="utf-8")
    found = read_device(path)
    assert found.message == "`operators` is a number, and should be a table"
