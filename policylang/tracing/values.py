"""What a trace for eager knows of the values of tensors, beside their shapes.

In eager, Python may ask a tensor for its value: Transformers makes no causal mask where no position says that a batch
is packed. A trace has shapes alone. Here small tensors that follow from integers and booleans of the batch and of
buffers, or from nothing (``torch.arange``), are computed beside the trace, so that it takes the branch of eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policylang.torch_compat import tracing
from policylang.torch_compat.eager import DispatchMode, WeakTensorKeyDictionary
from policylang.torch_compat.graphs import OpOverload, schema_of

_MOST_ELEMENTS = 2**22


class KnownValues(DispatchMode):
    """Under it, ``item()`` of a tensor whose value is known gives it."""

    supports_higher_order_operators = True

    def __init__(self, originals: Sequence[Tensor]) -> None:
        super().__init__()
        self.originals = originals
        self.known: Any = WeakTensorKeyDictionary()
        self.written: set[int] = set()
        """Memory that was written with what is not known."""

    def learn(self, traced: Sequence[Tensor]) -> None:
        """The tensors that stand for the originals in the trace."""
        for tensor, original in zip(traced, self.originals, strict=True):
            if (value := _constant(original)) is not None:
                self.known[tensor] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tracing.tree_leaves((args, kwargs))
        values = {id(each): self._value(each) for each in leaves if isinstance(each, Tensor)}
        is_known = isinstance(func, OpOverload) and None not in values.values()
        is_known = is_known and not any(isinstance(each, torch.SymInt) for each in leaves)
        if is_known and func is torch.ops.aten._local_scalar_dense.default:
            return values[id(args[0])].item()  # type: ignore[union-attr]
        found = func(*args, **kwargs)
        results = tracing.tree_leaves(found)
        if is_known and results and torch.Tag.nondeterministic_seeded not in func.tags and all(map(_is_small, results)):
            real = tracing.computed(func, args, kwargs, values)
            for result, value in zip(results, tracing.tree_leaves(real), strict=True):
                self.known[result] = value
        elif isinstance(func, OpOverload) and schema_of(func).is_mutable:
            self.written.update(_memory(value) for value in values.values() if value is not None)
        return found

    def _value(self, tensor: Tensor) -> Tensor | None:
        value = self.known.get(tensor)
        if value is None and type(tensor) is Tensor:
            value = _constant(tensor)  # that the trace runs into
        return None if value is None or _memory(value) in self.written else value


def _constant(value: Tensor) -> Tensor | None:
    is_exact = not (value.is_floating_point() or value.is_complex())
    return tracing.copied(value) if is_exact and _is_small(value) else None


def _is_small(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() <= _MOST_ELEMENTS


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)
