"""Which dimensions follow the batch: by hand, and against what torch finds for two batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.planning.batch.sizes import REACH, BatchSizes
from tests.support.joint import capture_joint
from tests.support.textgraph import facts_of


def changing(facts: Facts, name: str) -> list[int]:
    """The places of the dimensions that may change."""
    sizes, row = BatchSizes(facts), facts.index[name]
    shape = facts.shapes[row]
    assert shape is not None
    ranges = [sizes.of_dimension(row, place, size) for place, size in enumerate(shape)]
    return [place for place, (least, most) in enumerate(ranges) if least < most]


@pytest.mark.parametrize(
    ("call", "shape", "expected"),
    [
        ("aten.sin.default(%x)", "6x4x64", [0, 1, 2]),
        ("aten.mul.Tensor(%w)", "64x16", []),
        ("aten.view.default(%h)", "24x16", [0]),
        ("aten.view.default(%h)", "6x4x2x8", [0, 1]),
        ("aten.view.default(%h)", "1x24x16", [1]),
        ("aten.view.default(%h)", "6x4x16x1", [0, 1]),
        ("aten.view.default(%h)", "384", [0]),
        ("aten.permute.default(%h)", "16x6x4", [1, 2]),
        ("aten.slice.Tensor(%h)", "6x4x8", [0, 1]),
        ("aten.slice.Tensor(%h)", "3x4x16", [0, 1]),
        ("aten.cat.default(%h, %h)", "6x4x32", [0, 1]),
        ("aten.sum.dim_IntList(%h)", "16", []),
        ("aten.sum.dim_IntList(%h)", "6x4x1", [0, 1]),
        ("aten.sum.default(%h)", "scalar", []),
        ("aten.mm.default(%w, %square)", "64x64", []),
        ("aten.mm.default(%square, %w)", "64x16", [0]),
        ("aten.addmm.default(%b, %square, %w)", "64x16", [0]),
        ("aten.bmm.default(%heads, %keys)", "12x4x4", [0, 1, 2]),
        ("aten.bmm.default(%keys, %heads)", "12x8x8", [0]),
        ("aten.mul.Tensor(%w, %scalar)", "64x16", []),
        ("aten.embedding.default(%w, %ids)", "6x4x16", [0, 1]),
    ],
)
def test_dimensions(call: str, shape: str, expected: list[int]) -> None:
    facts = facts_of(f"""
        %x = input shape=6x4x64
        %ids = input shape=6x4
        %w = parameter shape=64x16
        %b = parameter shape=16
        %flat = aten.view.default(%x) shape=24x64
        %product = aten.mm.default(%flat, %w) shape=24x16
        %h = aten.view.default(%product) shape=6x4x16
        %parts = aten.view.default(%h) shape=6x4x2x8
        %moved = aten.permute.default(%parts) shape=6x2x4x8
        %heads = aten.view.default(%moved) shape=12x4x8
        %keys = aten.permute.default(%heads) shape=12x8x4
        %scalar = aten.sum.default(%x) shape=scalar
        %wide = parameter shape=64x64
        %long = input shape=64x64
        %square = aten.mm.default(%long, %wide) shape=64x64
        %y = {call} shape={shape}
    """)
    assert changing(facts, "y") == expected


def test_how_far_a_size_may_change() -> None:
    facts = facts_of("""
        %x = input shape=24x64 dtype=f32
        %w = parameter shape=64x16 dtype=f32
        %mm = aten.mm.default(%x, %w) shape=24x16 dtype=f32 flops=49152
        %halves = aten.split.Tensor(%mm) multi_output bytes=1536
        %left = builtin.getitem(%halves) follows=%halves shape=24x8 dtype=f32
        %right = builtin.getitem(%halves) follows=%halves shape=24x8 dtype=f32
        %over = aten.mm.default(%mm, %x) shape=16x64 dtype=f32 flops=49152
        %unknown = aten.sin.default(%x) bytes=1000
    """)
    sizes, index = BatchSizes(facts), facts.index
    assert sizes.of_value(index["mm"], facts.bytes) == (64, 1536 * REACH)
    assert sizes.of_value(index["mm"], facts.numel) == (16, 384 * REACH)
    assert sizes.of_call(index["mm"], facts.flops) == (2048, 49152 * REACH)
    assert sizes.of_dimension(index["mm"], 0, 24) == (2, 24 * REACH)
    assert sizes.of_value(index["halves"], facts.bytes) == (64, 1536 * REACH)
    assert sizes.of_value(index["unknown"], facts.bytes) == (0, 1000 * REACH)
    assert sizes.of_value(index["w"], facts.bytes) == (4096, 4096)


class Attention(nn.Module):
    """Written out, so that heads are merged and split; a table by position, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind()
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, 32))


def facts_for(batch: int, length: int) -> Facts:
    torch.manual_seed(0)
    joint = capture_joint(Attention(), [torch.zeros(batch, length, dtype=torch.int64)])
    return collect(joint.gm, kind=GraphKind.JOINT, static_inputs=joint.static_lifetime_input_indices)


def test_what_changes_in_torch_may_change_here() -> None:
    """Nothing that another batch makes larger is taken for fixed, and what it leaves alone mostly is."""
    here, there = facts_for(5, 7), facts_for(10, 13)
    assert here.names == there.names
    sizes = BatchSizes(here)
    fixed = same = 0
    for row in here.forward:
        shape, other = here.shapes[row], there.shapes[row]
        if shape is None or other is None:
            continue
        for place, (size, grown) in enumerate(zip(shape, other, strict=True)):
            least, most = sizes.of_dimension(row, place, size)
            if size != grown:
                assert least < most, f"{here.names[row]} {shape} {place}"
            else:
                same += 1
                fixed += least == most
    assert fixed > same * 0.8
