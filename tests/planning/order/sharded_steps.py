"""Steps of sharded models as small graphs: blocks that gather a weight, multiply, and scatter its gradient."""

from __future__ import annotations

from attrs import frozen

from policylang.graph.facts import Facts, Flag, GraphKind
from tests.support.textgraph import GraphBuilder

GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
WAIT = "_c10d_functional.wait_tensor.default"
CAST = "prims.convert_element_type.default"
SHARD = {"shape": (16, 32), "bytes": 1 << 10, "dtype": "bfloat16", "device": "cuda:0", "numel": 1 << 9}
FULL = {"shape": (32, 64), "bytes": 1 << 12, "dtype": "bfloat16", "device": "cuda:0", "numel": 1 << 11}


@frozen
class Options:
    blocks: int = 3
    casts: bool = True
    """Whether each shard is cast before it is gathered."""
    regathers: bool = False
    """Whether the backward gathers weights again, as a traced step does where nothing is kept."""
    head: bool = False
    """Whether something multiplies behind the last block."""
    embedding: bool = False
    activations: bool = False
    """Whether each block gathers what it is given, as tensor parallelism does."""
    unknown: int = -1
    """The block, if any, that calls an operator that nobody knows."""
    labelled: bool = False
    """Whether backward nodes have module paths."""


class _Step:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.builder = GraphBuilder()
        self.weights: dict[str, int] = {}
        self.params: dict[str, int] = {}

    def add(self, name: str, target: str, *inputs: int, module: str = "", backward: bool = False, **more) -> int:
        path = module if not backward or self.options.labelled else ""
        return self.builder.add(name, target, inputs, module=path, backward=backward, **more)

    def gathered(self, name: str, module: str, backward: bool = False) -> int:
        """A weight: of its shard, cast or not, gathered and awaited."""
        tag = f"{name}_again" if backward else name
        where = {"module": module, "backward": backward}
        source = self.params[name]
        if self.options.casts:
            source = self.add(f"cast_{tag}", CAST, source, **where, **SHARD)
        gather = self.add(f"gather_{tag}", GATHER, source, **where, flags=Flag.COLLECTIVE, group="dp:4", **FULL)
        return self.add(f"wait_{tag}", WAIT, gather, **where, **FULL)

    def product(self, name: str, *inputs: int, **more) -> int:
        return self.add(name, "aten.mm.default", *inputs, flops=1 << 20, flags=Flag.COMPUTE, **more, **FULL)

    def facts(self) -> Facts:
        options, builder = self.options, self.builder
        places = [("embed", "embed")] * options.embedding
        places += [(str(number), f"layers.{number}") for number in range(options.blocks)]
        places += [("head", "head")] * options.head
        for name, _ in places:
            self.params[name] = builder.add(f"param_{name}", "parameter", (), input_name=f"{name}.weight", **SHARD)
        x = builder.add("x", "input", (), **FULL)
        tangent = builder.add("tangent", "tangent", (), **FULL)
        made: list[tuple[str, str, int, int, int]] = []
        for name, module in places:
            weight = self.gathered(name, module)
            given = x
            if options.activations and name.isdigit():
                gather = self.add(f"tp_{name}", GATHER, x, module=module, flags=Flag.COLLECTIVE, group="tp:2", **FULL)
                given = self.add(f"tp_wait_{name}", WAIT, gather, module=module, **FULL)
            normed = self.add(f"norm_{name}", "aten.mul.Tensor", given, x, module=module, **FULL)
            product = self.product(f"mm_{name}", normed, weight, module=module)
            if name == str(options.unknown):
                product = self.add(f"unknown_{name}", "mylib.dispatch.default", product, module=module, **FULL)
            x = self.add(f"add_{name}", "aten.add.Tensor", product, x, module=module, **FULL)
            made.append((name, module, normed, weight, x))
        loss = self.add("loss", "aten.sum.default", x, **SHARD)
        gradient, returned = tangent, []
        for name, module, normed, weight, _ in reversed(made):
            if options.regathers:
                weight = self.gathered(name, module, backward=True)
            where = {"module": module, "backward": True}
            given = self.product(f"dx_{name}", gradient, weight, **where)
            dw = self.product(f"dw_{name}", normed, gradient, **where)
            scatter = self.add(f"scatter_{name}", SCATTER, dw, **where, flags=Flag.COLLECTIVE, group="dp:4", **SHARD)
            wait = self.add(f"reduced_{name}", WAIT, scatter, **where, **SHARD)
            returned.append(self.add(f"mean_{name}", "aten.div.Tensor", wait, **where, **SHARD))
            gradient = self.add(f"dadd_{name}", "aten.add.Tensor", gradient, given, **where, **FULL)
        builder.add("output", "output", (loss, *returned, gradient))
        return builder.facts(GraphKind.JOINT)


def sharded_step(**options) -> Facts:
    return _Step(Options(**options)).facts()
