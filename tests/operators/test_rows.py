"""What is said of each operator's dimensions holds in torch: slices of the inputs give slices of the result, or parts
of a sum."""

from itertools import product
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from policylang.operators import rows
from policylang.operators.calls import describe, parameters
from policylang.operators.names import GATHER, PRODUCTS, SCATTER
from policylang.operators.rows import RowDim, dims_of, is_known, is_linear, parted, repeated, viewed

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(3)


def _floats(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR, dtype=torch.float64) + 0.25


def _whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=GENERATOR)


UNARY = (
    *("abs", "acos", "alias", "asin", "atan", "ceil", "celu", "clone", "cos", "cosh", "detach", "elu", "erf", "erfc"),
    *("exp", "exp2", "expm1", "floor", "frac", "gelu", "hardsigmoid", "hardswish", "hardtanh", "isinf", "isnan"),
    *("leaky_relu", "lift_fresh", "log", "log10", "log1p", "log2", "logical_not", "logit", "mish", "nan_to_num"),
    *("neg", "ones_like", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "silu", "sin", "sinh", "softplus"),
    *("sqrt", "square", "tan", "tanh", "trunc", "zeros_like"),
)
BINARY = ("atan2", "maximum", "minimum", "logaddexp", "logical_and", "logical_or", "logical_xor")
TENSORS = (
    "add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge", "copysign", "fmod", "remainder", "xlogy", "rsub",
)  # fmt: skip
BACKWARD = ("gelu", "mish", "sigmoid", "silu", "tanh")
LOSSES = ("mse_loss", "smooth_l1_loss", "huber_loss")
FMA = [torch.ops.prims.fma.default] if hasattr(torch.ops.prims, "fma") else []
"""Of torch 2.13, once Inductor is imported."""


def calls(r: int, w: int, n: int) -> list[tuple[Any, tuple[Any, ...]]]:
    """Of every operator that is known, on tensors of these sizes."""
    x, y, row, column, cube = _floats(r, w), _floats(r, w), _floats(r, 1), _floats(w), _floats(n, r, w)
    labels, stats = _whole(w, r), aten.native_layer_norm.default(cube, [w], None, None, 1e-5)[1:]
    return [
        *((getattr(aten, name).default, (x,)) for name in UNARY),
        *((getattr(aten, name).default, (x, y)) for name in (*BINARY, "floor_divide")),
        *((getattr(aten, f"{name}_backward").default, (x, y)) for name in BACKWARD),
        *((getattr(aten, f"hard{name}_backward").default, (x, y)) for name in ("sigmoid", "swish")),
        (aten.hardtanh_backward.default, (x, y, -1.0, 1.0)), (aten.leaky_relu_backward.default, (x, y, 0.1, False)),
        (aten.elu_backward.default, (x, 1.0, 1.0, 1.0, False, y - 0.5)),
        (aten.softplus_backward.default, (x, y, 1.0, 20.0)),
        *((getattr(aten, f"bitwise_{name}").Tensor, (x > 0.5, y > 0.5)) for name in ("and", "or", "xor")),
        (aten.bitwise_not.default, (x > 0.5,)), (aten.clamp_max.default, (x, 0.5)), (aten.clamp_min.default, (x, 0.5)),
        (aten.addcmul.default, (x, y, column)), (aten.addcdiv.default, (x, y, column)),
        (aten.lerp.Tensor, (x, y, column)), *((getattr(aten, name).default, ([r, w],)) for name in ("ones", "zeros")),
        *((getattr(aten, f"new_{name}").default, (x, [r, w])) for name in ("ones", "zeros")),
        (aten.new_full.default, (x, [r, w], 2.0)), (aten.all.dim, (cube > 1, 2, False)),
        (aten.prod.dim_int, (cube, 2, False)), (aten.argmin.default, (cube, 2, False)), (aten.min.dim, (cube, 2)),
        (aten.std.correction, (cube, [2])), (aten.norm.ScalarOpt_dim, (cube, 2, [2])),
        (aten.logcumsumexp.default, (cube, 2)), (aten.sort.default, (cube, 2)),
        (aten.split_with_sizes.default, (cube, [2, w - 2], 2)),
        *((getattr(aten, name).default, (x, y, how)) for name in LOSSES for how in (0, 1, 2)),
        *((getattr(aten, f"{name}_backward").default, (x, x, y, how, 1.0)) for name in LOSSES[1:] for how in (0, 2)),
        (aten.native_layer_norm_backward.default, (cube, cube, [w], *stats, column, column, [True, True, True])),
        *((getattr(aten, name).Tensor, (x, other)) for name in TENSORS for other in (y, row, column)),
        (aten.pow.Tensor_Scalar, (x, 2.0)), (aten.pow.Tensor_Tensor, (x, y)), (aten.clamp.default, (x, 0.5, 1.0)),
        (aten.copy.default, (x, row)), (aten.lift_fresh_copy.default, (x,)), (aten.full_like.default, (x, 3.0)),
        (aten.masked_fill.Scalar, (x, x > 0.5, 0.0)), (aten.where.self, (x > 0.5, x, column)),
        (aten.gelu_backward.default, (x, y)), (aten.silu_backward.default, (x, y)),
        (aten.threshold_backward.default, (x, y, 0.5)), (aten._to_copy.default, (x,)),
        (torch.ops.prims.convert_element_type.default, (x, torch.float32)), (aten.full.default, ([r, w], 1.0)),
        *((getattr(aten, name).default, (cube, [2], True)) for name in ("amax", "amin", "logsumexp")),
        *((getattr(aten, name).default, (cube, [2], False)) for name in ("amax", "amin", "logsumexp")),
        *((aten.sum.dim_IntList, (cube, dims, keep)) for dims in ([0], [1], [-1], [0, 1]) for keep in (False, True)),
        *((aten.mean.dim, (cube, dims, False)) for dims in ([1], [2], [0, 2])), (aten.sum.default, (cube,)),
        (aten.mean.default, (cube,)), (aten.any.dim, (cube > 1, 2, False)), (aten.argmax.default, (cube, 2, False)),
        (aten.var.correction, (cube, [2])), (aten.var_mean.correction, (cube, [2])),
        (aten.linalg_vector_norm.default, (cube, 2, [2])), (aten.max.dim, (cube, 2)),
        (aten._log_softmax.default, (cube, 2, False)), (aten._softmax.default, (cube, -1, False)),
        (aten._log_softmax_backward_data.default, (x, y, 1, torch.float64)),
        (aten._softmax_backward_data.default, (x, y, 1, torch.float64)), (aten.cumsum.default, (cube, 2)),
        (aten.flip.default, (cube, [2])), (aten.mm.default, (x, _floats(w, 7))), (aten.mm.default, (_floats(w, r), x)),
        (aten.mv.default, (x, column)), (aten.bmm.default, (cube, _floats(n, w, 3))),
        (aten.addmm.default, (_floats(7), x, _floats(w, 7))),
        (aten.baddbmm.default, (_floats(n, r, 3), cube, _floats(n, w, 3))), (aten.t.default, (x,)),
        (aten.permute.default, (cube, [2, 0, 1])), (aten.transpose.int, (cube, 0, -1)),
        (aten.unsqueeze.default, (cube, -1)), (aten.squeeze.dim, (row, 1)), (aten.squeeze.default, (row,)),
        (aten.expand.default, (row, [r, w])), (aten.expand.default, (column, [r, -1])), (aten.select.int, (cube, 2, 1)),
        (aten.slice.Tensor, (cube, 2, 1, 4)), (aten.slice_scatter.default, (cube, cube[..., :3], 2, 1, 4)),
        *((each, (x, y, x + 1)) for each in FMA), (aten.slice_backward.default, (cube, [n, r, w + 4], 2, 2, 2 + w, 1)),
        (aten.select_backward.default, (x, [r, w, 3], 2, 1)), (aten.constant_pad_nd.default, (cube, [0, 1], 0.0)),
        (aten.cat.default, ([x, y], 1)), (aten.split.Tensor, (cube, 2, 2)),
        (aten.gather.default, (x, 1, _whole(w, r, 2))), (aten.scatter.value, (x, 1, _whole(w, r, 2), 1.0)),
        (aten.scatter.src, (x, 1, _whole(w, r, 2), y)),
        (aten.scatter_add.default, (x, 1, _whole(w, r, 2), _floats(r, 2))),
        (aten.index_select.default, (x, 1, _whole(w, 3))), (aten.embedding.default, (_floats(w, 3), labels)),
        (aten.topk.default, (cube, 2, 2)), (aten.nll_loss_forward.default, (x, labels, None, 0, -100)),
        (aten.nll_loss_forward.default, (x, labels, None, 2, -100)),
        (aten.nll_loss_backward.default, (_floats(), x, labels, None, 1, -100, _floats())),
        (aten.mse_loss.default, (x, y, 0)), (aten.mse_loss.default, (x, y, 1)), (aten.mse_loss.default, (x, y, 2)),
        (aten.mse_loss_backward.default, (_floats(), x, y, 2)),
        (aten.binary_cross_entropy_with_logits.default, (x, y / 2, None, None, 2)),
        (aten.native_layer_norm.default, (cube, [w], column, column, 1e-5)),
    ]  # fmt: skip


CALLS = calls(6, 5, 4)


def _compared(target: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a call, its inputs as a tree, at which places of it tensors are, and what is said of them."""
    name, whole = describe(target).name, target(*given)
    results = [whole] if isinstance(whole, Tensor) else list(whole)
    leaves, tree = pytree.tree_flatten(_filled(target, given))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    plain = tuple(tuple(each) if isinstance(each, list) else each for each in _filled(target, given))
    shape = tuple(whole.shape) if isinstance(whole, Tensor) else None
    dims = dims_of(name, plain, shape, [tuple(leaves[at].shape) for at in places])
    assert dims is not None, name
    return name, results, leaves, tree, places, dims


@drawn(r=st.integers(2, 9), w=st.sampled_from([16, 32]), n=st.integers(2, 5), seed=st.integers(0, 99))
@settings(max_examples=4, deadline=None)
def test_rows_in_another_order_give_the_same_rows_bit_by_bit(r: int, w: int, n: int, seed: int) -> None:
    """Of every operator that is known. Rows are of 16 numbers, two vectors of the CPU: torch computes those that are
    left at the end by other code, whose last bit may differ."""
    for target, given in calls(r, w, n):
        name, results, leaves, tree, places, dims = _compared(target, given)
        for label in {each for made in dims.makes for each in made if each >= 0} - dims.mixed - dims.summed:
            cut = list(leaves)
            found = [(each, made.index(label)) for each, made in zip(results, dims.makes, strict=True) if label in made]
            order = torch.randperm(found[0][0].shape[found[0][1]], generator=torch.Generator().manual_seed(seed))
            for at, read in zip(places, dims.reads, strict=True):
                if label in read:
                    cut[at] = leaves[at].index_select(read.index(label), order)
            again = target(*pytree.tree_unflatten(cut, tree)[: len(given)])
            again = [again] if isinstance(again, Tensor) else list(again)
            others = [each for each, made in zip(again, dims.makes, strict=True) if label in made]
            for (want, dim), one in zip(found, others, strict=True):
                within = 1e-14 if name in PRODUCTS else 0.0  # columns of a product are computed by blocks
                moved = want.index_select(dim, order)
                torch.testing.assert_close(one, moved, rtol=within, atol=within, equal_nan=True, msg=name)


def test_every_operator_that_is_known_is_compared() -> None:
    """Views are followed by their sizes, and tested by themselves, as indexing is; an empty tensor has no content;
    collectives are compared where there are ranks."""
    compared = {describe(target).name.rpartition(".")[0] for target, _ in CALLS}
    rest = {each for each in rows._KNOWN - rows._VIEWS - compared if not each.startswith("_c10d_functional.")}
    constant = {"prims.iota", "aten.arange", "aten.scalar_tensor", "prims.fma", "aten.empty_like"}
    assert rest <= constant | set(rows.INDEXED)


def _filled(target: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    schema = parameters(target) or ()
    return (*given, *(default for _, default in schema[len(given) :]))


@pytest.mark.parametrize(
    "call", CALLS, ids=lambda call: f"{call[0]} {[tuple(getattr(each, 'shape', ())) for each in call[1]]}"
)
def test_slices_of_the_inputs_give_slices_of_the_result_or_parts_of_a_sum(call: tuple[Any, tuple[Any, ...]]) -> None:
    target, given = call
    name, results, leaves, tree, places, dims = _compared(target, given)
    labels = {each for read in (*dims.reads, *dims.makes) for each in read if each >= 0}
    tried = 0
    for label in sorted(labels.difference(dims.mixed)):
        reading = [(at, read.index(label)) for at, read in zip(places, dims.reads, strict=True) if label in read]
        made = [each.index(label) if label in each else None for each in dims.makes]
        if label in dims.summed and name in ("aten.addmm.default", "aten.baddbmm.default"):
            continue  # refused: a bias would be added once a slice
        length = leaves[reading[0][0]].shape[reading[0][1]] if reading else results[0].shape[made[0] or 0]
        if length < 2:
            continue
        parts = []
        for start, stop in ((0, length // 2), (length // 2, length)):
            cut = list(leaves)
            for at, dim in reading:
                cut[at] = leaves[at].narrow(dim, start, stop - start).contiguous()
            arguments = pytree.tree_unflatten(cut, tree)
            if dims.sizes >= 0 and made[0] is not None:
                sizes = [*results[0].shape]
                sizes[made[0]] = stop - start
                arguments = (*arguments[: dims.sizes], sizes, *arguments[dims.sizes + 1 :])
            found = target(*arguments[: len(given)])
            share = (stop - start) / length if dims.is_mean else 1
            parts.append(
                [found * share if dims.is_mean and label in dims.summed else found]
                if isinstance(found, Tensor)
                else list(found)
            )
        tried += 1
        for index, (want, dim) in enumerate(zip(results, made, strict=True)):
            pieces = [part[index] for part in parts]
            if dim is not None:
                found = torch.cat(pieces, dim)  # the last bit may differ: torch computes the end of a row by other code
                assert found.dtype == want.dtype
                torch.testing.assert_close(found.double(), want.double(), rtol=1e-14, atol=1e-14, equal_nan=True)
            elif label in dims.summed and not name.startswith("aten.nll"):
                torch.testing.assert_close(pieces[0] + pieces[1], want, rtol=1e-12, atol=1e-12)
    assert tried, name


def _scaled(target: Any, given: tuple[Any, ...], how: tuple[str, ...], factor: float) -> list[Tensor]:
    """The call with a factor on some of its tensors, and zeros in the place of others."""
    leaves, tree = pytree.tree_flatten(_filled(target, given))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for at, each in zip(places, how, strict=True):
        if each != "other":
            leaves[at] = leaves[at] * factor if each == "scaled" else torch.zeros_like(leaves[at])
    found = target(*pytree.tree_unflatten(leaves, tree)[: len(given)])
    return [found] if isinstance(found, Tensor) else list(found)


def test_what_counts_as_linear_scales_its_result_bit_by_bit() -> None:
    seen = set()
    for target, given in (*CALLS, *INDEXING):
        name, filled = describe(target).name, _filled(target, given)
        plain = tuple(tuple(each) if isinstance(each, list) else each for each in filled)
        count = sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(filled))
        for how in product(("scaled", "zero", "other"), repeat=count):
            scaled = [each == "scaled" for each in how]
            if any(scaled) and is_linear(name, plain, scaled, [each == "zero" for each in how]):
                seen.add(name)
                for one, other in zip(_scaled(target, given, how, 1.0), _scaled(target, given, how, -4.0), strict=True):
                    assert torch.equal(one * -4.0, other), (name, how)
    assert len(seen) > 40
    assert {"aten.copy.default", "aten.index.Tensor", "aten.index_put.default"} <= seen
    assert not seen & {"aten.exp.default", "aten.relu.default", "aten.rsub.Tensor", "aten.clamp.default"}


def test_a_view_keeps_rows_that_it_does_not_cut() -> None:
    batch = RowDim(1, 1, 12, 1)  # the tokens of [2, 12, 5]
    flat = viewed(batch, (2, 12, 5), (24, 5))
    assert flat == RowDim(0, 2, 12, 1)
    assert viewed(flat, (24, 5), (2, 12, 5)) == batch
    assert viewed(RowDim(0, 1, 24, 1), (24, 5), (2, 12, 5)) is None
    assert viewed(RowDim(0, 1, 2, 12), (24, 5), (2, 12, 5)) == RowDim(0, 1, 2, 1)


COUNT, PLACES, MASK = torch.arange(6), _whole(5, 6), _whole(2, 6, 5).bool()
INDEXING: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.index.Tensor, (_floats(6, 5), [COUNT, PLACES])),
    (aten.index.Tensor, (_floats(6, 5, 2), [COUNT, PLACES])),
    (aten.index_put.default, (_floats(6, 5), [COUNT, PLACES], _floats(6))),
    (aten.index_put.default, (_floats(6, 5, 2), [COUNT, PLACES], _floats(6, 2), True)),
    (aten.index_put.default, (_floats(6, 5), [COUNT, PLACES], _floats())),
    (aten.index_put.default, (_floats(6, 5), [MASK], _floats())),
    (aten.index_put.default, (_floats(6, 5), [MASK[:, 0]], _floats())),
]


@pytest.mark.parametrize(("target", "given"), INDEXING)
def test_what_is_indexed_row_by_row_is_cut_where_the_count_begins_anew(target: Any, given: tuple[Any, ...]) -> None:
    whole, leaves = target(*given), pytree.tree_leaves(given)
    dims = _dims_of_indexing(target, given)
    assert dims.makes[0][0] == 0
    found = []
    for start, stop in ((0, 2), (2, 6)):
        cut = [
            each[: stop - start] if each is COUNT else each[start:stop] if 0 in read else each
            for each, read in zip([each for each in leaves if isinstance(each, Tensor)], dims.reads, strict=True)
        ]
        index = cut[1 : 1 + len(given[1])]
        found.append(target(cut[0], index, *cut[1 + len(index) :], *given[3:]))
    assert torch.equal(torch.cat(found), whole)


def _dims_of_indexing(target: Any, given: tuple[Any, ...]) -> rows.Dims | None:
    tensors = [each for each in pytree.tree_leaves(given) if isinstance(each, Tensor)]
    kinds = [
        rows.COUNTING if each.ndim == 1 and torch.equal(each, torch.arange(len(each))) else str(each.dtype)[6:]
        for each in tensors
    ]
    plain = tuple(tuple(each) if isinstance(each, list) else each for each in given)
    shape = tuple(target(*given).shape)
    return dims_of(describe(target).name, plain, shape, [tuple(each.shape) for each in tensors], kinds)


@pytest.mark.parametrize(
    ("target", "given"),
    [
        (aten.index.Tensor, (_floats(6, 5), [PLACES, PLACES])),
        (aten.index.Tensor, (_floats(7, 5), [COUNT, PLACES])),
        (aten.index.Tensor, (_floats(6, 5), [PLACES])),
        (aten.index_put.default, (_floats(6, 5), [PLACES], _floats())),
        (aten.index_put.default, (_floats(6, 5), [MASK], _floats(int(MASK.sum())))),
        (aten.index_put.default, (_floats(6, 5), [COUNT, PLACES], _floats(1))),
    ],
)
def test_an_index_that_may_pick_other_rows_is_not_known(target: Any, given: tuple[Any, ...]) -> None:
    assert _dims_of_indexing(target, given) is None


@pytest.mark.parametrize(
    ("target", "given", "is_count"),
    [
        ("aten.arange.default", (6, None, None), True), ("aten.arange.start", (0, 6, None), True),
        ("aten.arange.start", (1, 6, None), False), ("aten.arange.start_step", (0, 6, 1, None), True),
        ("aten.arange.start_step", (0, 6, 2, None), False), ("prims.iota.default", (6, 0, 1), True),
        ("prims.iota.default", (6, 3, 1), False), ("aten.full.default", ((6,), 0), False),
    ],
)  # fmt: skip
def test_what_counts_from_zero_is_known(target: str, given: tuple[Any, ...], is_count: bool) -> None:
    assert rows.counts(target, given) is is_count


def test_rows_of_several_ranks_and_pieces_are_the_same_rows_several_times() -> None:
    mine, both = RowDim(0, 1, 6, 1), RowDim(0, 2, 6, 1)
    assert repeated(GATHER, ("x", 2, "0"), mine, [(6, 5)]) == both
    assert repeated(SCATTER, ("x", "sum", 2, "0"), both, [(12, 5)]) == mine
    assert repeated("aten.cat.default", (("x", "y"), 0), mine, [(6, 5), (6, 5)]) == both
    assert repeated("aten.split.Tensor", ("x", 6, 0), both, [(12, 5)]) == mine
    assert repeated("aten.slice.Tensor", ("x", 0, 6, 12, 1), both, [(12, 5)]) == mine
    assert parted("aten.slice.Tensor", ("x", 0, 6, 12, 1), 12, 2) == ("x", 0, 2, 4, 1)
    assert parted("aten.split.Tensor", ("x", 6, 0), 12, 2) == ("x", 2, 0)
    # what cuts rows apart, or joins others to them
    assert repeated(SCATTER, ("x", "sum", 2, "0"), mine, [(6, 5)]) is None
    assert repeated("aten.cat.default", (("x", "y"), 0), mine, [(6, 5), (5, 5)]) is None
    assert repeated("aten.split.Tensor", ("x", 4, 0), both, [(12, 5)]) is None
    assert repeated("aten.slice.Tensor", ("x", 0, 3, 9, 1), both, [(12, 5)]) is None
    assert repeated(GATHER, ("x", 2, "0"), RowDim(1, 1, 6, 1), [(3, 6)]) is None


@pytest.mark.parametrize(
    "target",
    [
        "aten.bernoulli.default",
        "aten.convolution.default",
        "_c10d_functional.all_to_all_single.default",
        "mine.op.default",
    ],
)
def test_an_operator_that_is_not_listed_is_not_known(target: str) -> None:
    assert not is_known(target)
    assert dims_of(target, (), (2, 3), []) is None
