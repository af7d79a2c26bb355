"""Which kernel ``scaled_dot_product_attention`` runs on a GPU, decided as PyTorch decides it, without the GPU.

The priorities and the conditions are those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, what is done to
the arguments that of ``transformers/attention.cpp``, as of PyTorch 2.13. ``torch.nn.attention.sdpa_kernel``, the
switches of ``torch.backends.cuda`` and ``TORCH_CUDNN_SDPA_DEPRIORITIZED`` count as they do there.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor
from torch.nn.attention import SDPBackend

from policylang.torch_compat.absent_cuda import CUDNN, sdpa_priority

_HALF = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)
_CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
_DEFAULT_ORDER = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


@frozen(eq=False)
class AttentionCall:
    """The arguments of one call: queries, keys and values of ``batch × heads × length × head dimension``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    grouped: bool
    """Whether there may be fewer heads of keys and values than of queries (``enable_gqa``)."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(value.requires_grad for value in self.tensors)

    @property
    def softmax_scale(self) -> float:
        return 1.0 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale


def attention_on(capability: tuple[int, int]) -> Callable[..., Tensor]:
    """``scaled_dot_product_attention`` as a GPU of this compute capability runs it."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _RUN[chosen_kernel(call, capability)](call)

    return scaled_dot_product_attention


def chosen_kernel(call: AttentionCall, capability: tuple[int, int]) -> SDPBackend:
    """Raises RuntimeError, as PyTorch does, where the kernels that are switched on cannot run the call."""
    cuda = torch.backends.cuda
    usable: dict[SDPBackend, Callable[[], bool]] = {
        SDPBackend.CUDNN_ATTENTION: lambda: cuda.cudnn_sdp_enabled() and _cudnn_runs(call, capability),
        SDPBackend.FLASH_ATTENTION: lambda: cuda.flash_sdp_enabled() and _flash_runs(call, capability),
        SDPBackend.EFFICIENT_ATTENTION: lambda: cuda.mem_efficient_sdp_enabled() and _efficient_runs(call, capability),
        SDPBackend.MATH: cuda.math_sdp_enabled,
    }
    for kernel in _priority(capability):
        if kernel in usable and usable[kernel]():
            return kernel
    raise RuntimeError("none of the attention kernels that are switched on can run this call")


def _priority(capability: tuple[int, int]) -> tuple[SDPBackend, ...]:
    """An order that the user set is not the one that torch begins with, and stays."""
    numbers = {int(kernel.value): kernel for kernel in SDPBackend.__members__.values()}
    order = tuple(numbers[number] for number in sdpa_priority() if number in numbers)
    prefers_cudnn = capability in ((9, 0), (9, 3), (10, 0), (10, 3)) and CUDNN > 91_500
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "").lower() in ("1", "on", "true", "y", "yes"):
        prefers_cudnn = False
    return _CUDNN_FIRST if prefers_cudnn and order[:3] == _DEFAULT_ORDER else order


# --- what each kernel takes -----------------------------------------------------------------------------------------


def _flash_runs(call: AttentionCall, capability: tuple[int, int]) -> bool:
    head = call.query.shape[-1]
    consumer = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= _NEWEST
    return (
        _is_dense(call)
        and call.mask is None
        and head == call.key.shape[-1] == call.value.shape[-1]
        and head <= 256
        and (8, 0) <= capability <= _NEWEST
        and not (consumer and call.trains and (192 < head <= 224 or (head > 224 and call.dropout > 0)))
        and not (call.is_causal and call.query.shape[-2] != call.key.shape[-2])
        and _are_half(call, capability)
        and _batches_and_heads_fit(call, grouped=call.grouped)
        and _rows_are_dense(call, single=True)
    )


def _efficient_runs(call: AttentionCall, capability: tuple[int, int]) -> bool:
    head, of_values = call.query.shape[-1], call.value.shape[-1]
    half = call.query.dtype in _HALF
    alignment = 4 if capability >= (8, 0) else 1
    if capability >= (8, 0) or (capability >= (7, 0) and half):
        alignment = max(alignment, 8 if half else 4)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    if capability >= (8, 0):
        dtypes += (torch.bfloat16,)
    takes_groups = _torch_version() >= (2, 14)
    return (
        _is_dense(call)
        and (5, 0) <= capability <= _NEWEST
        and head == call.key.shape[-1]
        and head % alignment == of_values % alignment == 0
        and head > 0
        and of_values > 0
        and _batches_and_heads_fit(call, grouped=call.grouped and takes_groups)
        and _rows_are_dense(call, single=False)
        and all(value.dtype == call.query.dtype for value in call.tensors)
        and call.query.dtype in dtypes
    )


def _cudnn_runs(call: AttentionCall, capability: tuple[int, int]) -> bool:
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not (_is_dense(call) and (8, 0) <= capability <= _NEWEST and _are_half(call, capability)):
        return False
    head, of_values = call.query.shape[-1], call.value.shape[-1]
    widest = 256 if capability == (9, 0) else 128
    if capability[0] == 10 and (head, of_values) == (192, 128):
        widest = 192
    return (
        _mask_fits_cudnn(call)
        and _batches_and_heads_fit(call, grouped=True)
        and _rows_are_dense(call, single=True)
        and max(head, of_values) <= widest
        and head % 8 == of_values % 8 == 0
        and call.key.shape[-2] != 1
        and not (call.query.shape[-2] == 1 and call.dropout > 0)
    )


def _is_dense(call: AttentionCall) -> bool:
    shaped = all(value.dim() == 4 and not value.is_nested for value in call.tensors)
    return shaped and call.query.shape[-2] > 0 and call.key.shape[-2] > 0


def _are_half(call: AttentionCall, capability: tuple[int, int]) -> bool:
    dtypes = _HALF if capability >= (8, 0) else (torch.float16,)
    return call.query.dtype in dtypes and all(value.dtype == call.query.dtype for value in call.tensors)


def _batches_and_heads_fit(call: AttentionCall, *, grouped: bool) -> bool:
    if len({value.shape[0] for value in call.tensors}) != 1:
        return False
    queries, keys, values = (value.shape[1] for value in call.tensors)
    if grouped:
        return bool(keys == values and keys > 0 and queries % keys == 0)
    return bool(queries == keys == values)


def _rows_are_dense(call: AttentionCall, *, single: bool) -> bool:
    """Whether the elements of a row lie side by side; rows of one element do."""
    strided = any(value.stride(-1) != 1 for value in call.tensors)
    if strided and not (single and call.query.shape[-1] == 1):
        return False
    return call.mask is None or call.mask.stride(-1) == 1


def _mask_fits_cudnn(call: AttentionCall) -> bool:
    if call.mask is None:
        return True
    batch, heads, queries, _ = call.query.shape
    allowed = ((1, batch), (1, heads), (1, queries), (1, call.key.shape[-2]))
    shape = tuple(call.mask.shape)
    fits = len(shape) in (2, 4) and all(
        size in sizes for size, sizes in zip(shape, allowed[-len(shape) :], strict=True)
    )
    return fits and not call.mask.requires_grad


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


# --- what is done for each kernel -----------------------------------------------------------------------------------


def _flash(call: AttentionCall) -> Tensor:
    """On heads padded to a multiple of 8."""
    head = call.query.shape[-1]
    query, key, value = (F.pad(each, (0, -head % 8)) if head % 8 else each for each in call.tensors)
    found: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_flash_attention.default(
        query, key, value, call.dropout, call.is_causal, scale=call.softmax_scale
    )
    output: Tensor = found[0]
    return output[..., :head] if head % 8 else output


def _efficient(call: AttentionCall) -> Tensor:
    bias = None if call.mask is None else _aligned(_additive(call.mask, call.query.dtype, -math.inf), call)
    arguments = (*call.tensors, bias, call.trains, call.dropout, call.is_causal)
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        *arguments, scale=call.scale
    )
    return found[0]


def _cudnn(call: AttentionCall) -> Tensor:
    bias = None if call.mask is None else _additive(call.mask, call.query.dtype, -65504.0)
    arguments = (*call.tensors, bias, call.trains, call.dropout, call.is_causal, False)
    found: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention.default(*arguments, scale=call.scale)
    output: Tensor = found[0]
    return output


def _math(call: AttentionCall) -> Tensor:
    mask = None if call.mask is None else _additive(call.mask, call.query.dtype, -math.inf)
    arguments = (*call.tensors, mask, call.dropout, call.is_causal, None)
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_attention_math.default(
        *arguments, scale=call.scale, enable_gqa=call.grouped
    )
    return found[0]


_RUN: dict[SDPBackend, Callable[[AttentionCall], Tensor]] = {
    SDPBackend.CUDNN_ATTENTION: _cudnn,
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.MATH: _math,
}


def _additive(mask: Tensor, dtype: torch.dtype, left_out: float) -> Tensor:
    """A mask of booleans as what is added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    kept, masked = (torch.scalar_tensor(value, dtype=dtype, device=mask.device) for value in (0.0, left_out))
    return torch.where(mask, kept, masked)


def _aligned(bias: Tensor, call: AttentionCall) -> Tensor:
    """Its rows begin at multiples of 8 elements, as the memory-efficient kernel reads them."""
    aligned = bias.stride(-1) == 1 and all(stride % 8 == 0 for stride in bias.stride()[:-1])
    if not aligned:
        length = bias.shape[-1]
        bias = F.pad(bias, (0, 8 - length % 8))[..., :length]
    batch, heads, queries, _ = call.query.shape
    return bias.expand(batch, heads, queries, call.key.shape[2])
