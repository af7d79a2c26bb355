"""What is said of each operator's dimensions holds in torch: slices of the inputs give slices of the result, or parts
of a sum."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims
from torch import Tensor
from torch.utils import _pytree as pytree

from policylang.operators.calls import describe, parameters
from policylang.operators.rows import RowDim, dims_of, is_known, is_linear, viewed

aten = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(3)


def _floats(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR, dtype=torch.float64) + 0.25


def _whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=GENERATOR)


X, Y, ROW, COLUMN = _floats(6, 5), _floats(6, 5), _floats(6, 1), _floats(5)
CUBE = _floats(4, 6, 5)
LABELS = _whole(5, 6)
UNARY = (
    *("abs", "acos", "alias", "asin", "atan", "ceil", "celu", "clone", "cos", "cosh", "detach", "elu", "erf", "erfc"),
    *("exp", "exp2", "expm1", "floor", "frac", "gelu", "hardsigmoid", "hardswish", "hardtanh", "isinf", "isnan"),
    *("leaky_relu", "lift_fresh", "log", "log10", "log1p", "log2", "logical_not", "logit", "mish", "nan_to_num"),
    *("neg", "ones_like", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "sign", "silu", "sin", "sinh", "softplus"),
    *("sqrt", "square", "tan", "tanh", "trunc", "zeros_like"),
)
BINARY = ("atan2", "maximum", "minimum", "logaddexp", "logical_and", "logical_or", "logical_xor")
TENSORS = (
    "add",
    "sub",
    "mul",
    "div",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "copysign",
    "fmod",
    "remainder",
    "xlogy",
    "rsub",
)
FMA = [torch.ops.prims.fma.default] if hasattr(torch.ops.prims, "fma") else []
"""Of torch 2.13, once Inductor is imported."""
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    *((getattr(aten, name).default, (X,)) for name in UNARY),
    *((getattr(aten, name).default, (X, Y)) for name in (*BINARY, "floor_divide", "sigmoid_backward", "tanh_backward")),
    *((getattr(aten, name).Tensor, (X, other)) for name in TENSORS for other in (Y, ROW, COLUMN)),
    (aten.pow.Tensor_Scalar, (X, 2.0)),
    (aten.pow.Tensor_Tensor, (X, Y)),
    (aten.clamp.default, (X, 0.5, 1.0)),
    (aten.full_like.default, (X, 3.0)),
    (aten.masked_fill.Scalar, (X, X > 0.5, 0.0)),
    (aten.where.self, (X > 0.5, X, COLUMN)),
    (aten.gelu_backward.default, (X, Y)),
    (aten.silu_backward.default, (X, Y)),
    (aten.threshold_backward.default, (X, Y, 0.5)),
    (aten._to_copy.default, (X,)),
    (torch.ops.prims.convert_element_type.default, (X, torch.float32)),
    (aten.full.default, ([6, 5], 1.0)),
    *((getattr(aten, name).default, (CUBE, [2], True)) for name in ("amax", "amin", "logsumexp")),
    *((getattr(aten, name).default, (CUBE, [2], False)) for name in ("amax", "amin", "logsumexp")),
    *((aten.sum.dim_IntList, (CUBE, dims, keep)) for dims in ([0], [1], [-1], [0, 1]) for keep in (False, True)),
    *((aten.mean.dim, (CUBE, dims, False)) for dims in ([1], [2], [0, 2])),
    (aten.sum.default, (CUBE,)),
    (aten.mean.default, (CUBE,)),
    (aten.any.dim, (CUBE > 1, 2, False)),
    (aten.argmax.default, (CUBE, 2, False)),
    (aten.var.correction, (CUBE, [2])),
    (aten.var_mean.correction, (CUBE, [2])),
    (aten.linalg_vector_norm.default, (CUBE, 2, [2])),
    (aten.max.dim, (CUBE, 2)),
    (aten._log_softmax.default, (CUBE, 2, False)),
    (aten._softmax.default, (CUBE, -1, False)),
    (aten._log_softmax_backward_data.default, (X, Y, 1, torch.float64)),
    (aten._softmax_backward_data.default, (X, Y, 1, torch.float64)),
    (aten.cumsum.default, (CUBE, 2)),
    (aten.flip.default, (CUBE, [2])),
    (aten.mm.default, (X, _floats(5, 7))),
    (aten.mm.default, (_floats(5, 6), X)),
    (aten.mv.default, (X, COLUMN)),
    (aten.bmm.default, (CUBE, _floats(4, 5, 3))),
    (aten.addmm.default, (_floats(7), X, _floats(5, 7))),
    (aten.baddbmm.default, (_floats(4, 6, 3), CUBE, _floats(4, 5, 3))),
    (aten.t.default, (X,)),
    (aten.permute.default, (CUBE, [2, 0, 1])),
    (aten.transpose.int, (CUBE, 0, -1)),
    (aten.unsqueeze.default, (CUBE, -1)),
    (aten.squeeze.dim, (ROW, 1)),
    (aten.squeeze.default, (ROW,)),
    (aten.expand.default, (ROW, [6, 5])),
    (aten.expand.default, (COLUMN, [6, -1])),
    (aten.select.int, (CUBE, 2, 1)),
    (aten.slice.Tensor, (CUBE, 2, 1, 4)),
    (aten.slice_scatter.default, (CUBE, CUBE[..., :3], 2, 1, 4)),
    *((each, (X, Y, X + 1)) for each in FMA),
    (aten.slice_backward.default, (CUBE, [4, 6, 9], 2, 2, 7, 1)),
    (aten.select_backward.default, (X, [6, 5, 3], 2, 1)),
    (aten.constant_pad_nd.default, (CUBE, [0, 1], 0.0)),
    (aten.cat.default, ([X, Y], 1)),
    (aten.split.Tensor, (CUBE, 2, 2)),
    (aten.gather.default, (X, 1, _whole(5, 6, 2))),
    (aten.scatter.value, (X, 1, _whole(5, 6, 2), 1.0)),
    (aten.scatter.src, (X, 1, _whole(5, 6, 2), Y)),
    (aten.scatter_add.default, (X, 1, _whole(5, 6, 2), _floats(6, 2))),
    (aten.index_select.default, (X, 1, _whole(5, 3))),
    (aten.embedding.default, (X, LABELS)),
    (aten.topk.default, (CUBE, 2, 2)),
    (aten.nll_loss_forward.default, (X, LABELS, None, 0, -100)),
    (aten.nll_loss_forward.default, (X, LABELS, None, 2, -100)),
    (aten.nll_loss_backward.default, (_floats(), X, LABELS, None, 1, -100, _floats())),
    (aten.mse_loss.default, (X, Y, 0)),
    (aten.mse_loss.default, (X, Y, 1)),
    (aten.mse_loss.default, (X, Y, 2)),
    (aten.mse_loss_backward.default, (_floats(), X, Y, 2)),
    (aten.binary_cross_entropy_with_logits.default, (X, Y / 2, None, None, 2)),
    (aten.native_layer_norm.default, (CUBE, [5], COLUMN, COLUMN, 1e-5)),
]  # fmt: skip


def _filled(target: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    schema = parameters(target) or ()
    return (*given, *(default for _, default in schema[len(given) :]))


@pytest.mark.parametrize(
    "call", CALLS, ids=lambda call: f"{call[0]} {[tuple(getattr(each, 'shape', ())) for each in call[1]]}"
)
def test_slices_of_the_inputs_give_slices_of_the_result_or_parts_of_a_sum(call: tuple[Any, tuple[Any, ...]]) -> None:
    target, given = call
    name, whole = describe(target).name, target(*given)
    results = [whole] if isinstance(whole, Tensor) else list(whole)
    leaves, tree = pytree.tree_flatten(_filled(target, given))
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    plain = tuple(tuple(each) if isinstance(each, list) else each for each in _filled(target, given))
    shape = tuple(whole.shape) if isinstance(whole, Tensor) else None
    dims = dims_of(name, plain, shape, [tuple(leaves[at].shape) for at in places])
    assert dims is not None, name
    labels = {each for read in (*dims.reads, *dims.makes) for each in read if each >= 0}
    tried = 0
    for label in sorted(labels.difference(dims.mixed)):
        reading = [(at, read.index(label)) for at, read in zip(places, dims.reads, strict=True) if label in read]
        made = [each.index(label) if label in each else None for each in dims.makes]
        if label in dims.summed and len(dims.reads) > 2:
            continue  # refused: a bias would be added once a slice
        length = leaves[reading[0][0]].shape[reading[0][1]] if reading else results[0].shape[made[0] or 0]
        if length < 2:
            continue
        parts = []
        for start, stop in ((0, length // 2), (length // 2, length)):
            cut = list(leaves)
            for at, dim in reading:
                cut[at] = leaves[at].narrow(dim, start, stop - start)
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
    for target, given in CALLS:
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
    assert not seen & {"aten.exp.default", "aten.relu.default", "aten.rsub.Tensor", "aten.clamp.default"}


def test_a_view_keeps_rows_that_it_does_not_cut() -> None:
    batch = RowDim(1, 1, 12, 1)  # the tokens of [2, 12, 5]
    flat = viewed(batch, (2, 12, 5), (24, 5))
    assert flat == RowDim(0, 2, 12, 1)
    assert viewed(flat, (24, 5), (2, 12, 5)) == batch
    assert viewed(RowDim(0, 1, 24, 1), (24, 5), (2, 12, 5)) is None
    assert viewed(RowDim(0, 1, 2, 12), (24, 5), (2, 12, 5)) == RowDim(0, 1, 2, 1)


@pytest.mark.parametrize(
    "target", ["aten.bernoulli.default", "aten.convolution.default", "aten.index.Tensor", "mine.op.default"]
)
def test_an_operator_that_is_not_listed_is_not_known(target: str) -> None:
    assert not is_known(target)
    assert dims_of(target, (), (2, 3), []) is None
