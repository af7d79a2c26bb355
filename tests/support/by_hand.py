"""Narrow copies as a person would write them: torch's own checkpoint, whose recomputation gets rounded values back."""

from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from policylang.language.syntax import NarrowForm
from tests.support.eager import blocks_of

BF16, ROWS8 = NarrowForm("bfloat16"), NarrowForm("float8_e4m3fn", per_row=True)
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")}


def rounded(value: Tensor, form: NarrowForm) -> Tensor:
    """Narrowed and widened; of a sharded value each rank's part by itself."""
    if isinstance(value, DTensor):
        part, kind = rounded(value.to_local(), form), {"shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(part, value.device_mesh, value.placements, run_check=False, **kind)
    dtype = getattr(torch, form.dtype)
    if not form.per_row:
        return value.to(dtype).to(value.dtype)
    scale = value.abs().amax(-1, keepdim=True).float() / torch.finfo(dtype).max
    scale = torch.where(scale.isfinite() & (scale >= torch.finfo(torch.float32).tiny), scale, 1.0)
    return ((value / scale).to(dtype).to(torch.promote_types(value.dtype, torch.float32)) * scale).to(value.dtype)


class _Forward(TorchDispatchMode):
    """Keeps the products, rounded but for those of so many columns as a router has."""

    def __init__(self, form: NarrowForm, whole: int) -> None:
        super().__init__()
        self.form, self.whole, self.kept = form, whole, list[Tensor]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self.kept.append(out.detach() if out.shape[-1] == self.whole else rounded(out, self.form))
        return out


class _Again(TorchDispatchMode):
    """Gives them back."""

    def __init__(self, forward: _Forward) -> None:
        super().__init__()
        self.forward, self.at = forward, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        self.at += 1
        return self.forward.kept[self.at - 1]


def narrowed_by_hand(
    model: nn.Module,
    form: NarrowForm,
    *,
    blocks: Collection[nn.Module] = (),
    experts: int = 0,
    products: bool = True,
    crossing: bool = False,
) -> nn.Module:
    """Each block under a checkpoint. ``experts``: how many columns the router's product has, which stays as it is.
    ``crossing``: the recomputation of a block behind the first begins with what it was called with, rounded."""

    def contexts() -> tuple[Any, Any]:
        forward = _Forward(form, experts)
        return (forward, _Again(forward)) if products else (nullcontext(), nullcontext())

    def called(run: Callable[..., Any], is_first: bool, given: Tensor, *more: Any, **named: Any) -> Any:
        again = iter((False, crossing and not is_first))

        def once(given: Tensor, *more: Any, **named: Any) -> Any:
            return run(rounded(given.detach(), form).requires_grad_() if next(again) else given, *more, **named)

        return checkpoint(once, given, *more, use_reentrant=False, context_fn=contexts, **named)

    for number, block in enumerate(blocks or blocks_of(model)):
        block.forward = partial(called, block.forward, number == 0)
    return model
