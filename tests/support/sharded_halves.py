"""Halves of transformers under FSDP and tensor parallelism as autograd traces them, of any size, for order and times.

Weights are gathered right before they are used and gradients scattered right after they are made, as
``simple_fsdp`` and AutoParallel trace them.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from policylang.graph.facts import Facts, Flag, GraphKind, Ref
from tests.support.textgraph import GraphBuilder

GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
REDUCE = "_c10d_functional.all_reduce.default"
TO_ALL = "_c10d_functional.all_to_all_single.default"
WAIT = "_c10d_functional.wait_tensor.default"
CAST = "prims.convert_element_type.default"


@frozen
class Model:
    layers: int = 4
    width: int = 4096
    hidden: int = 14336
    tokens: int = 16384
    vocabulary: int = 128256
    shards: int = 64
    """Ranks of ``fsdp``."""
    parallel: int = 1
    """Ranks of ``tp``; 1 for none."""
    replicas: int = 1
    """Ranks of ``dp``, which reduce gradients once more; 1 for none."""
    experts: bool = False
    """Whether tokens go to experts on the ranks of ``ep`` and back."""
    unpacked: bool = False
    """Whether gathered weights are copied before they are used, as pieces are cut out of a bucket."""
    twice: bool = False
    """Whether the weight of the head is gathered over ``fsdp``, then over ``tp``."""


class _Half:
    def __init__(self, model: Model, kind: GraphKind) -> None:
        self.model, self.kind = model, kind
        self.builder = GraphBuilder()
        self.count = 0

    def add(self, target: str, reads: tuple[int, ...], size: int, *, full: bool = False, **more: Any) -> int:
        self.count += 1
        dtype, numel = ("float32", size // 4) if full else ("bfloat16", size // 2)
        return self.builder.add(
            f"n{self.count}",
            target,
            reads,
            bytes=size,
            numel=numel,
            shape=str(numel),
            dtype=dtype,
            backward=self.kind is GraphKind.BACKWARD,
            **more,
        )

    def view(self, read: int, size: int) -> int:
        return self.add("aten.view.default", (read,), size, flags=Flag.VIEW)

    def sent(self, target: str, read: int, size: int, group: str, **more: Any) -> int:
        row = self.add(target, (read,), size, flags=Flag.COLLECTIVE, group=group, arguments=(Ref(read),), **more)
        return self.add(WAIT, (row,), size, **more)

    def weight(self, numel: int) -> int:
        """A shard of a weight, to be gathered."""
        numel //= self.model.parallel
        return self.builder.add(f"w{len(self.builder.rows)}", "parameter", (), bytes=4 * numel // self.model.shards)

    def gathered(self, shard: int, numel: int) -> int:
        numel //= self.model.parallel
        cast = self.add(CAST, (shard,), 2 * numel // self.model.shards)
        sent = self.sent(GATHER, cast, 2 * numel, f"fsdp:{self.model.shards}")
        return self.add("aten.clone.default", (sent,), 2 * numel) if self.model.unpacked else self.view(sent, 2 * numel)

    def reduced(self, gradient: int, numel: int) -> int:
        numel //= self.model.parallel
        cast = self.add(CAST, (gradient,), 4 * numel, full=True)
        size = 4 * numel // self.model.shards
        found = self.sent(SCATTER, cast, size, f"fsdp:{self.model.shards}", full=True)
        if self.model.replicas > 1:
            found = self.sent(REDUCE, found, size, f"dp:{self.model.replicas}", full=True)
        return found

    def product(self, reads: tuple[int, ...], rows: int, inner: int, columns: int) -> int:
        work = 2 * rows * inner * columns // self.model.parallel
        return self.add("aten.mm.default", reads, 2 * rows * columns, flops=work)


def forward_half(model: Model) -> Facts:
    half = _Half(model, GraphKind.FORWARD)
    width, hidden, tokens = model.width, model.hidden, model.tokens
    table = half.weight(model.vocabulary * width)
    shapes = [(width, 3 * width), (width, width), (width, hidden), (hidden, width)]
    shards = [[half.weight(rows * columns) for rows, columns in shapes] for _ in range(model.layers)]
    head = half.weight(model.vocabulary * width)
    size = 2 * tokens * width
    ids = half.builder.add("ids", "input", (), bytes=8 * tokens)
    x = half.add("aten.embedding.default", (half.gathered(table, model.vocabulary * width), ids), size)
    kept: list[int] = []
    for weights in shards:
        kept.append(x)
        for at, (rows, columns) in enumerate(shapes):
            inner = half.add("aten.mul.Tensor", (x,), 2 * tokens * rows)
            if model.parallel > 1 and at in (0, 2):
                inner = half.sent(GATHER, inner, 2 * tokens * rows, f"tp:{model.parallel}")
            if model.experts and at == 2:
                inner = half.sent(TO_ALL, inner, 2 * tokens * rows, "ep:8")
            x = half.product((inner, half.gathered(weights[at], rows * columns)), tokens, rows, columns)
            if model.experts and at == 3:
                x = half.sent(TO_ALL, x, 2 * tokens * columns, "ep:8")
            if model.parallel > 1 and at in (1, 3):
                x = half.sent(SCATTER, x, 2 * tokens * columns // model.parallel, f"tp:{model.parallel}")
            kept.append(x)
    weight = half.gathered(head, model.vocabulary * width)
    if model.twice:
        weight = half.sent(GATHER, weight, 2 * model.vocabulary * width, f"tp:{model.parallel}")
    out = half.product((x, weight), tokens, width, model.vocabulary)
    half.builder.add("output", "output", (half.add("aten.sum.default", (out,), 4), *kept[:: len(shapes)]))
    return half.builder.facts(GraphKind.FORWARD)


def backward_half(model: Model) -> Facts:
    half = _Half(model, GraphKind.BACKWARD)
    width, hidden, tokens = model.width, model.hidden, model.tokens
    shapes = [(width, 3 * width), (width, width), (width, hidden), (hidden, width)]
    table = model.vocabulary * width
    head = half.weight(table)
    shards = [[half.weight(rows * columns) for rows, columns in shapes] for _ in range(model.layers)]
    saved = [half.builder.add(f"x{at}", "input", (), bytes=2 * tokens * width) for at in range(model.layers + 1)]
    loss = half.builder.add("loss", "tangent", (), bytes=2 * tokens * model.vocabulary)
    grads: list[int] = []

    def product_backward(gradient: int, value: int, shard: int, rows: int, columns: int) -> int:
        weight = half.gathered(shard, rows * columns)
        grads.append(half.reduced(half.product((gradient, value), rows, tokens, columns), rows * columns))
        return half.product((gradient, weight), tokens, columns, rows)

    gradient = product_backward(loss, saved[-1], head, width, model.vocabulary)
    for at in range(model.layers - 1, -1, -1):
        values = [saved[at]]
        for number, (rows, columns) in enumerate(shapes[:-1]):  # computed again
            inner = half.add("aten.mul.Tensor", (values[-1],), 2 * tokens * rows)
            if model.parallel > 1 and number in (0, 2):
                inner = half.sent(GATHER, inner, 2 * tokens * rows, f"tp:{model.parallel}")
            again = half.gathered(shards[at][number], rows * columns)
            values.append(half.product((inner, again), tokens, rows, columns))
        for number in reversed(range(len(shapes))):
            rows, columns = shapes[number]
            if model.parallel > 1 and number in (1, 3):
                gradient = half.sent(GATHER, gradient, 2 * tokens * columns, f"tp:{model.parallel}")
            if model.experts and number == 3:
                gradient = half.sent(TO_ALL, gradient, 2 * tokens * columns, "ep:8")
            gradient = product_backward(gradient, values[number], shards[at][number], rows, columns)
            if model.parallel > 1 and number in (0, 2):
                gradient = half.sent(SCATTER, gradient, 2 * tokens * rows // model.parallel, f"tp:{model.parallel}")
            gradient = half.add("aten.mul.Tensor", (gradient, values[number]), 2 * tokens * rows)
    table_gradient = half.add("aten.embedding_dense_backward.default", (gradient,), 2 * table // model.parallel)
    grads.append(half.reduced(table_gradient, table))
    half.builder.add("output", "output", tuple(grads))
    return half.builder.facts(GraphKind.BACKWARD)
