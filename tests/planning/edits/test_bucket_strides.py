"""What readers of a bucket find has the strides that torch's own operators give it, lengths of 1 among the rest."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from tests.support.bucketed import bucketed, shard_of
from tests.support.every_rank import ATEN, Builder, EveryRank, Program

lengths = st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=1, max_size=3).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from(("view", "flat", "unsqueeze", "squeeze", "turn", "slice", "select", "expand", "split")),
        st.integers(0, 7),
    ),
    max_size=3,
)
members = st.lists(st.tuples(lengths, steps), min_size=2, max_size=3)


def read(builder: Builder, value: fx.Node, chain: Sequence[tuple[str, int]]) -> fx.Node:
    """A member's value behind some layout operators, as a product reads it: it is not returned, and may be a view."""
    for what, number in chain:
        shape = tuple(value.meta["val"].shape)
        dim = number % max(len(shape), 1)
        match what:
            case "view" if value.meta["val"].is_contiguous():
                half = [2, prod(shape) // 2] if prod(shape) % 2 == 0 else [1, prod(shape)]
                value = builder.call(ATEN.view.default, value, [half, [1, *shape], [*shape, 1]][number % 3])
            case "flat" if value.meta["val"].is_contiguous():
                value = builder.call(ATEN.view.default, value, [prod(shape)])
            case "unsqueeze":
                value = builder.call(ATEN.unsqueeze.default, value, dim)
            case "squeeze" if 1 in shape:
                value = builder.call(ATEN.squeeze.dim, value, shape.index(1))
            case "turn":
                value = builder.call(ATEN.permute.default, value, list(reversed(range(len(shape)))))
            case "slice" if shape:
                value = builder.call(ATEN.slice.Tensor, value, dim, 0, max(1, shape[dim] - number % 2))
            case "select" if shape:
                value = builder.call(ATEN.select.int, value, dim, 0)
            case "expand" if 1 in shape:
                value = builder.call(ATEN.expand.default, value, [2 if length == 1 else length for length in shape])
            case "split" if shape:
                value = builder.cut(value, dim, 0, 1, piece=True)
    while (rank := value.meta["val"].ndim) != 2:
        value = (
            builder.call(ATEN.select.int, value, 0, 0) if rank > 2 else builder.call(ATEN.unsqueeze.default, value, 0)
        )
    return builder.call(ATEN.mm.default, builder.call(ATEN.t.default, value), value)


def program(kind: str, drawn: Sequence[tuple[tuple[int, ...], Sequence[tuple[str, int]]]], ranks: int) -> Program:
    def built(builder: Builder) -> list[fx.Node]:
        given = [
            shard_of(builder, 0, *((shape[0] * ranks, *shape[1:]) if kind == "scatter" else shape))
            for shape, _ in drawn
        ]
        brought = [getattr(builder, kind)(each, 0) for each in given]
        return [read(builder, each, chain) for each, (_, chain) in zip(brought, drawn, strict=True)]

    return built


def check(kind: str, drawn: Sequence[tuple[tuple[int, ...], Sequence[tuple[str, int]]]], ranks: int) -> None:
    found = EveryRank((ranks,), program(kind, drawn, ranks), shard=(16, 16))
    plans = bucketed(found, "bucket collective up to 1 MiB")
    assert plans[0].edits.done
    found.carry_out(plans)  # which holds every stride against that of the operator on fake tensors


def test_a_length_of_one_in_front_of_a_part_of_a_bucket() -> None:
    """ATen gives a leading length of 1 another stride than fake tensors do, where it lies in memory with gaps."""
    check("scatter", [((1, 4, 4), []), ((1, 4, 2), [])], ranks=2)


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@settings(max_examples=15, deadline=None)
@given(members, st.sampled_from((1, 2, 3)))
def test_strides_are_those_of_torchs_operators(
    kind: str, drawn: list[tuple[tuple[int, ...], list[tuple[str, int]]]], ranks: int
) -> None:
    check(kind, drawn, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@settings(max_examples=300, deadline=None)
@given(members, st.sampled_from((1, 2, 3)))
def test_strides_of_many_are_those_of_torchs_operators(
    kind: str, drawn: list[tuple[tuple[int, ...], list[tuple[str, int]]]], ranks: int
) -> None:
    check(kind, drawn, ranks)
