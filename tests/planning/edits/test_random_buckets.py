"""Random programs are run on all ranks before and after, element by element: every value is what it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from tests.support.bucketed import CAST, carried_out, shard_of
from tests.support.every_rank import ATEN, Builder, EveryRank

# --- random programs ------------------------------------------------------------------------------------------------


@frozen
class Step:
    what: str
    numbers: tuple[int, ...]
    block: int


SHAPES = ((4,), (2, 2), (6,), (1, 3), (3, 1, 2), (1,), (6, 2))
STEPS = st.builds(
    Step,
    st.sampled_from(
        ("shard", "shard", "shard", "gather", "gather", "gather", "scatter", "scatter", "reduce", "reduce", "gathered",
         "neg", "add", "view", "turn", "clone", "square", "write", "cast")
    ),
    st.tuples(*[st.integers(0, 40)] * 3),
    st.integers(-1, 2),
)  # fmt: skip


def random_program(steps: Sequence[Step], returned: Sequence[int], blocks: dict[str, int]) -> Any:
    def program(builder: Builder) -> Sequence[fx.Node]:
        values = [shard_of(builder, 0, 6)]
        for step in steps:
            seen = set(builder.graph.nodes)
            if (made := _taken(builder, step, values)) is not None:
                values.append(made)
            blocks.update({node.name: step.block for node in builder.graph.nodes if node not in seen})
        return [values[place % len(values)] for place in returned]

    return program


def _taken(builder: Builder, step: Step, values: Sequence[fx.Node]) -> fx.Node | None:
    one, two, three = step.numbers
    source = values[-1 - one % min(len(values), 6)]
    value = source.meta["val"]
    axis = two % len(builder.place.shape)
    size = builder.place.shape[axis]
    fits = value.is_contiguous() and value.numel() <= 60
    match step.what:
        case "shard":
            return shard_of(builder, three % 5, *SHAPES[one % len(SHAPES)])
        case "gathered":
            dtype = torch.float64 if three % 4 == 0 else None
            return builder.gather(shard_of(builder, three % 5, *SHAPES[one % len(SHAPES)], dtype=dtype), axis)
        case "gather" if fits and value.ndim:
            return builder.gather(source, axis)
        case "scatter" if value.is_contiguous() and value.ndim and value.shape[0] % size == 0:
            return builder.scatter(source, axis)
        case "reduce" if value.is_contiguous():
            return builder.reduce(source, axis)
        case "neg":
            return builder.call(ATEN.neg.default, source)
        case "add":
            return builder.call(ATEN.add.Tensor, source, source)
        case "view" if value.is_contiguous():
            return builder.call(ATEN.view.default, source, [value.numel()])
        case "turn":
            return builder.call(ATEN.permute.default, source, list(reversed(range(value.ndim))))
        case "clone":
            return builder.call(ATEN.clone.default, source, memory_format=torch.contiguous_format)
        case "square" if value.ndim == 2 and value.numel() <= 60:
            turned = builder.call(ATEN.t.default, source)
            # whole numbers that stay whole
            return builder.call(ATEN.remainder.Scalar, builder.call(ATEN.mm.default, source, turned), 64)
        case "cast":
            return builder.call(CAST, source, torch.float64)
        case "write" if three % 3 == 0:
            builder.call(ATEN.add_.Tensor, source, 1)
    return None


LINES = (
    "bucket collective up to 1 MiB",
    "bucket all_gather per block",
    "bucket collective per block",
    "bucket collective per 2 blocks up to 300 B",
    "bucket all_gather up to 200 B\nbucket (reduce_scatter or all_reduce) up to 1 MiB",
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(((3,), (2, 2), (2, 3))),
    st.lists(STEPS, min_size=4, max_size=18),
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True),
    st.sampled_from(LINES),
)
def test_every_value_of_a_random_program_is_what_it_was(
    shape: tuple[int, ...], steps: list[Step], returned: list[int], text: str
) -> None:
    blocks: dict[str, int] = {}
    carried_out(EveryRank(shape, random_program(steps, returned, blocks)), text, blocks)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(((3,), (2, 2), (2, 3))),
    st.lists(STEPS, min_size=8, max_size=26),
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True),
    st.sampled_from(LINES),
)
def test_every_value_of_many_longer_programs_is_what_it_was(
    shape: tuple[int, ...], steps: list[Step], returned: list[int], text: str
) -> None:
    blocks: dict[str, int] = {}
    carried_out(EveryRank(shape, random_program(steps, returned, blocks)), text, blocks)
