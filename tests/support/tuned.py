"""A small graph to tune for, and what makes it one of another kind."""

from pathlib import Path

from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import write
from tests.support.textgraph import facts_of

_HIDDEN = "bytes=16777216 shape=8192x1024 dtype=bfloat16"
_WIDE = "bytes=67108864 shape=8192x4096 dtype=bfloat16"
_LAYER = """
    %norm{n} = aten.rms_norm.default(%x{n}) {at}{n}.norm {hidden}
    %up{n} = aten.mm.default(%norm{n}, %w{n}) {at}{n}.up {wide} flops=64000000000
    %act{n} = aten.silu.default(%up{n}) {at}{n} {wide}
    %down{n} = aten.mm.default(%act{n}, %v{n}) {at}{n}.down {hidden} flops=64000000000
    %x{after} = aten.add.Tensor(%x{n}, %down{n}) {at}{n} {hidden}
"""
_BACKWARD = """
    %gv{n} = aten.mm.default(%g{after}, %act{n}) bytes=8388608 flops=64000000000 shape=4096x1024 dtype=bfloat16
    %gw{n} = aten.mm.default(%g{after}, %norm{n}) bytes=8388608 flops=64000000000 shape=1024x4096 dtype=bfloat16
    %g{n} = aten.mul.Tensor(%g{after}, %up{n}, %act{n}, %x{n}) {hidden}
"""


def tuned_graph(layers: int = 4, *, at: str = "layers.", frozen: int = 0) -> str:
    """A model of so many layers, each with two parameters of 8 MiB; the first ``frozen`` of them get no gradient."""
    lines = ["%x0 = input bytes=16777216 shape=8192x1024 dtype=bfloat16"]
    for n in range(layers):
        lines.append(f"%w{n} = parameter bytes=8388608 shape=1024x4096 dtype=bfloat16")
        lines.append(f"%v{n} = parameter bytes=8388608 shape=4096x1024 dtype=bfloat16")
    lines += [_LAYER.format(n=n, after=n + 1, at=at, hidden=_HIDDEN, wide=_WIDE) for n in range(layers)]
    lines += ["---", f"%g{layers} = tangent bytes=16777216 shape=8192x1024 dtype=bfloat16"]
    lines += [_BACKWARD.format(n=n, after=n + 1, hidden=_HIDDEN) for n in reversed(range(layers))]
    gradients = [f"%g{each}{n}" for n in range(frozen, layers) for each in "wv"]
    return "\n".join([*lines, f"output(%x{layers}, {', '.join([*gradients, '%g0'])})"])


def tuned_facts(layers: int = 4, **how: object) -> Facts:
    return facts_of(tuned_graph(layers, **how), GraphKind.JOINT)  # type: ignore[arg-type]


def written(folder: Path, name: str = "small.graph", layers: int = 4, **how: object) -> str:
    """The name of a snapshot of it."""
    write(tuned_facts(layers, **how), folder / name)
    return name
