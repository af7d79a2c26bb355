"""Graphs of blocks as text, for the tuner: each block a norm, attention by hand and a gated product, with a backward
that reads what autograd would save."""

from functools import cache

from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.planning.capabilities import JOINT
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.tuning.tuner import Tuner
from tests.support.textgraph import facts_of

DEVICE = DeviceProfile("small", {"bfloat16": Rate.constant(1e6)}, Rate.constant(1e6), host_bandwidth=1e6)

_BLOCK = """
%norm{i} = aten.mul.Tensor(%h{i}, %g{i}) layers.{i}.norm bytes=100
%q{i} = aten.mm.default(%norm{i}, %wq{i}) layers.{i}.attention.q bytes=100 flops=4000
%k{i} = aten.mm.default(%norm{i}, %wk{i}) layers.{i}.attention.k bytes=50 flops=2000
%sdpa{i} = aten._scaled_dot_product_flash_attention.default(%q{i}, %k{i}) layers.{i}.attention bytes=100 flops=9000
%mid{i} = aten.add.Tensor(%h{i}, %sdpa{i}) layers.{i} bytes=100
%up{i} = aten.mm.default(%mid{i}, %wu{i}) layers.{i}.mlp.up bytes=400 flops=16000
%gate{i} = aten.silu.default(%up{i}) layers.{i}.mlp bytes=400
%down{i} = aten.mm.default(%gate{i}, %wd{i}) layers.{i}.mlp.down bytes=100 flops=16000
%h{next} = aten.add.Tensor(%mid{i}, %down{i}) layers.{i} bytes=100
"""
_BACKWARD = """
%dgate{i} = aten.mm.default(%d{next}, %wd{i}) bytes=400
%gwd{i} = aten.mm.default(%d{next}, %gate{i}) bytes=20
%dup{i} = aten.silu_backward.default(%dgate{i}, %up{i}) bytes=400
%gwu{i} = aten.mm.default(%dup{i}, %mid{i}) bytes=20
%dmid{i} = aten.mm.default(%dup{i}, %wu{i}, %d{next}) bytes=100
%dqk{i} = aten.sub.Tensor(%dmid{i}, %q{i}, %k{i}, %sdpa{i}) bytes=150
%gwq{i} = aten.mm.default(%dqk{i}, %norm{i}) bytes=20
%d{i} = aten.mul.Tensor(%dqk{i}, %h{i}, %g{i}, %dmid{i}) bytes=100
"""


def stacked_text(blocks: int) -> str:
    numbers = range(blocks)
    weights = [f"%{name}{i} = parameter bytes=20" for i in numbers for name in ("g", "wq", "wk", "wu", "wd")]
    forward = [_BLOCK.format(i=i, next=i + 1) for i in numbers]
    backward = [_BACKWARD.format(i=i, next=i + 1) for i in reversed(numbers)]
    returned = ", ".join(f"%gwd{i}, %gwu{i}, %gwq{i}" for i in numbers)
    return "\n".join(
        [
            "%tokens = input bytes=10", "%table = parameter bytes=50", *weights,
            "%h0 = aten.embedding.default(%table, %tokens) embed bytes=100", *forward,
            f"%logits = aten.mm.default(%h{blocks}, %table) head bytes=300 flops=20000",
            "%loss = aten.sum.default(%logits) head bytes=1", "---", "%t = tangent bytes=1",
            "%dlogits = aten.mul.Tensor(%t, %logits) bytes=300",
            f"%d{blocks} = aten.mm.default(%dlogits, %table, %h{blocks}) bytes=100", *backward,
            f"output(%loss, %d0, {returned})",
        ]
    )  # fmt: skip


@cache
def stacked(blocks: int = 6) -> Facts:
    """A joint graph of so many blocks."""
    text = stacked_text(blocks)
    products = " dtype=bf16 shape=10x10"
    lines = (line + products * ("bytes=" in line and "input" not in line) for line in text.splitlines())
    return facts_of("\n".join(lines))


@cache
def times_of(blocks: int = 6) -> NodeTimes:
    return node_times(stacked(blocks), DEVICE)


@cache
def tuner_of(blocks: int = 6) -> Tuner:
    """Shared: what one test had planned another does not plan again."""
    return Tuner(stacked(blocks), times_of(blocks), JOINT)
