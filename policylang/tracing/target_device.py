"""The device that a step is traced for: the one it runs on, or another one that need not be there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, fx
from torch.nn.attention import SDPBackend

from policylang.errors import PolicyGraphError
from policylang.operators.calls import describe
from policylang.operators.names import Category
from policylang.torch_compat.absent_cuda import CUDNN, autocast_to, sdpa_priority
from policylang.torch_compat.graphs import value_of
from policylang.torch_compat.tracing import tree_leaves
from policylang.tracing.step import problem

OTHER_STRIDES = "APL337"


class _Found(Exception):
    def __init__(self, node: fx.Node, real: Tensor, traced: Tensor) -> None:
        self.node, self.real, self.traced = node, real, traced


class _Compared(fx.Interpreter):  # type: ignore[misc]  # torch does not type it
    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        pairs = zip(tree_leaves(out), tree_leaves(value_of(n.meta)), strict=False) if n.op == "call_function" else ()
        for real, traced in pairs:
            plain = all(isinstance(each, Tensor) and each.layout is torch.strided for each in (real, traced))
            if plain and real.numel() > 1 and real.stride() != traced.stride():
                raise _Found(n, real, traced)
        return out


def why_it_failed(gm: fx.GraphModule, inputs: Sequence[Any]) -> PolicyGraphError | None:
    """Names the operator of a traced step whose real kernel gives other strides than torch's meta kernel: a view that
    was traced after it may be impossible. Runs a graph that has failed once more, on copies, up to the first operator
    with other strides. None where there is none, and where the graph communicates: other ranks may not have failed."""
    if any(describe(node.target).flags & Category.COLLECTIVE for node in gm.graph.nodes if node.op == "call_function"):
        return None
    try:
        _Compared(gm).run(*(each.clone() if isinstance(each, Tensor) else each for each in inputs))
    except _Found as found:
        real, traced = tuple(found.real.stride()), tuple(found.traced.stride())
        return problem(
            OTHER_STRIDES,
            f"`{found.node.target}` gives a tensor of shape {tuple(found.real.shape)} with strides {real}, and was "
            f"traced with {traced}",
            help=f"make what the model does with it independent of that: `reshape` in place of `view`, or "
            f"`contiguous()` behind it; its meta kernel differs from the kernel for `{found.real.device.type}`",
            details=[f"node {found.node.name}"],
        )
    except Exception:  # the same failure, and strides are not its reason
        return None
    return None


_Takes: TypeAlias = "Callable[[AttentionCall, tuple[int, int]], bool]"
_HALF = (torch.float16, torch.bfloat16)
_NEWEST = (12, 1)
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
    """There may be fewer heads of keys and values than of queries (``enable_gqa``)."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        return torch.is_grad_enabled() and any(value.requires_grad for value in self.tensors)


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
        _, _, run = _KERNELS[chosen_kernel(call, capability)]
        return run(call)

    return scaled_dot_product_attention


def chosen_kernel(call: AttentionCall, capability: tuple[int, int]) -> SDPBackend:
    """The kernel that ``scaled_dot_product_attention`` runs on a GPU, chosen as PyTorch chooses it, without the GPU.

    Priorities and conditions are those of ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``, what is done to the
    arguments that of ``transformers/attention.cpp``, as of PyTorch 2.13. ``torch.nn.attention.sdpa_kernel``, the
    switches of ``torch.backends.cuda`` and ``TORCH_CUDNN_SDPA_DEPRIORITIZED`` count as they do there. Raises
    RuntimeError, as PyTorch does, where the kernels that are switched on cannot run the call.
    """
    for kernel in _priority(capability):
        if kernel in _KERNELS:
            is_enabled, takes, _ = _KERNELS[kernel]
            if is_enabled() and takes(call, capability):
                return kernel
    raise RuntimeError("none of the attention kernels that are switched on can run this call")


def _priority(capability: tuple[int, int]) -> tuple[SDPBackend, ...]:
    """An order that the user set is not the one that torch begins with, and stays."""
    numbers = {int(kernel.value): kernel for kernel in SDPBackend.__members__.values()}
    order = tuple(numbers[number] for number in sdpa_priority() if number in numbers)
    prefers_cudnn = capability in ((9, 0), (9, 3), (10, 0), (10, 3)) and CUDNN > 91_500
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "").lower() in ("1", "on", "true", "y", "yes"):
        prefers_cudnn = False
    return (SDPBackend.CUDNN_ATTENTION, *_DEFAULT_ORDER) if prefers_cudnn and order[:3] == _DEFAULT_ORDER else order


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
    takes_groups = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
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
    """The elements of a row lie side by side; rows of one element do."""
    strided = any(value.stride(-1) != 1 for value in call.tensors)
    is_single = single and call.query.shape[-1] == 1
    return (is_single or not strided) and (call.mask is None or call.mask.stride(-1) == 1)


def _mask_fits_cudnn(call: AttentionCall) -> bool:
    if call.mask is None:
        return True
    batch, heads, queries, _ = call.query.shape
    allowed = ((1, batch), (1, heads), (1, queries), (1, call.key.shape[-2]))
    shape = tuple(call.mask.shape)
    fits = all(size in sizes for size, sizes in zip(shape, allowed[-len(shape) :], strict=False))
    return len(shape) in (2, 4) and fits and not call.mask.requires_grad


# --- what is done for each kernel -----------------------------------------------------------------------------------


def _flash(call: AttentionCall) -> Tensor:
    """On heads padded to a multiple of 8."""
    head = call.query.shape[-1]
    scale = 1.0 / math.sqrt(head) if call.scale is None else call.scale
    query, key, value = (F.pad(each, (0, -head % 8)) if head % 8 else each for each in call.tensors)
    found: tuple[Any, ...] = torch.ops.aten._scaled_dot_product_flash_attention.default(
        query, key, value, call.dropout, call.is_causal, scale=scale
    )
    output: Tensor = found[0]
    return output[..., :head] if head % 8 else output


def _efficient(call: AttentionCall) -> Tensor:
    bias = None if call.mask is None else _aligned(_additive(call.mask, call.query.dtype, -math.inf), call)
    arguments = (*call.tensors, bias, call.trains, call.dropout, call.is_causal)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    found: tuple[Tensor, ...] = efficient(*arguments, scale=call.scale)
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


_KERNELS: dict[SDPBackend, tuple[Callable[[], bool], _Takes, Callable[[AttentionCall], Tensor]]] = {
    SDPBackend.CUDNN_ATTENTION: (torch.backends.cuda.cudnn_sdp_enabled, _cudnn_runs, _cudnn),
    SDPBackend.FLASH_ATTENTION: (torch.backends.cuda.flash_sdp_enabled, _flash_runs, _flash),
    SDPBackend.EFFICIENT_ATTENTION: (torch.backends.cuda.mem_efficient_sdp_enabled, _efficient_runs, _efficient),
    SDPBackend.MATH: (torch.backends.cuda.math_sdp_enabled, lambda call, capability: True, _math),
}
"""For each, whether it is enabled, whether it accepts a call, and how it runs one."""


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


UNKNOWN_DEVICE = "APL613"
DEFAULT_CAPABILITY = (9, 0)
"""The compute capability of a GPU if none is given: Hopper's."""


Device: TypeAlias = str | torch.device
Capability: TypeAlias = str | tuple[int, int]
"""``"8.0"`` or ``(8, 0)``."""


@frozen
class TargetDevice:
    """The device and mode of a step."""

    kind: str
    capability: tuple[int, int] | None = None
    """The compute capability of a GPU whose kernels are to be chosen without asking one; None to ask the GPU."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device(self.kind)

    def __str__(self) -> str:
        if self.capability is None:
            return self.kind
        return f"{self.kind}, compute capability {self.capability[0]}.{self.capability[1]}"


def target_device(device: Device | None, capability: Capability | None = None) -> TargetDevice | None:
    """The device that a user names; a compute capability alone is a GPU's. Raises PolicyGraphError for any other."""
    if device is None and capability is None:
        return None
    try:
        kind = torch.device("cuda" if device is None else device).type
    except (RuntimeError, TypeError, ValueError):
        kind = ""
    if kind not in ("cuda", "cpu"):
        help = "`cuda` or `cpu`; without a device a step is traced where its model is"
        raise problem(UNKNOWN_DEVICE, f"no step can be traced as on `{device}`", help=help)
    if kind == "cpu":
        if capability is not None:
            message = "a compute capability belongs to a GPU"
            raise problem(UNKNOWN_DEVICE, message, help="leave it out, or trace for `cuda`")
        return TargetDevice(kind)
    if torch.version.hip is not None:
        message = "this torch is built for ROCm, whose kernels are not those of CUDA"
        raise problem(UNKNOWN_DEVICE, message, help="trace on the GPU itself, or with a CPU build of torch")
    if capability is not None:
        return TargetDevice(kind, _capability(capability))
    return TargetDevice(kind, None if torch.cuda.is_available() else DEFAULT_CAPABILITY)


def _capability(given: Capability) -> tuple[int, int]:
    text = ".".join(map(str, given)) if isinstance(given, tuple | list) else str(given)
    major, dot, minor = text.partition(".")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        help = "two numbers: 8.0 (A100), 8.9 (L40S, RTX 40), 9.0 (H100, H200), 10.0 (B200), 12.0 (RTX 50)"
        raise problem(UNKNOWN_DEVICE, f"`{text}` is no compute capability", help=help)
    return int(major), int(minor)


_ambient: ContextVar[TargetDevice | None] = ContextVar("_ambient", default=None)


def ambient_device() -> TargetDevice | None:
    """The device that steps are traced for by default."""
    return _ambient.get()


@contextmanager
def tracing_for(device: TargetDevice | None) -> Iterator[None]:
    """Under it every step that names no device is traced for this one, if it is one, in an autocast for it too."""
    capability = None if device is None else device.capability
    token = _ambient.set(device)
    try:
        with nullcontext() if capability is None else autocast_to(capability):
            yield
    finally:
        _ambient.reset(token)
