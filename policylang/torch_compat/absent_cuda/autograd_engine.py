"""A backward through fake CUDA tensors that the autograd engine runs as it runs one of ``meta``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from policylang.torch_compat.absent_cuda.kernels import ON_CUDA
from policylang.torch_compat.subclasses import put_together, take_apart
from policylang.torch_compat.tracing import autograd_engine_replaced, functionalized, replaced

CUDA = torch.device("cuda", 0)
_META = torch.device("meta")


class EngineTensors:
    """Wrappers of functional tensors that say ``meta`` to the autograd engine and ``cuda`` below it.

    The engine adds gradients up on the streams of an accelerator that is there, and on the calling thread for any other
    device. So what is made while it runs is a CUDA tensor whose outer wrapper is one of ``meta``; views of what the
    forward made share its memory and remain what they are.
    """

    def __init__(self) -> None:
        self.mode = functionalized()
        self.inside = False
        self.for_engine = False

    @contextmanager
    def active(self) -> Iterator[None]:
        from torch._subclasses.functional_tensor import FunctionalTensor

        original: Any = torch.Tensor._make_wrapper_subclass

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            if self.for_engine and cls is FunctionalTensor:
                args = tuple(_META if isinstance(each, torch.device) else each for each in args)
            return original(cls, *args, **kwargs)

        def to_cuda(value: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
            return value.to(CUDA if device is None or isinstance(device, int) else device, *args, **kwargs)

        wrappers = replaced(
            (torch.Tensor, "_make_wrapper_subclass", staticmethod(make)),
            (FunctionalTensor, "cuda", to_cuda),
            *self._dispatching(),
        )
        with wrappers, autograd_engine_replaced(self._engine):
            yield

    def _engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        from torch._subclasses.fake_tensor import FakeTensor

        def run(outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            if self.inside or any(isinstance(each, FakeTensor) for each in outputs):
                # of a higher-order operator, which differentiates its body without functionalization
                with self._fakes_on_meta(outputs):
                    return original(outputs, gradients, *args, **kwargs)
            self.inside = self.for_engine = True
            try:
                given = tuple(self._wrapped_again(each) for each in gradients)
                found = original(outputs, given, *args, **kwargs)
            finally:
                self.inside = self.for_engine = False
            return tuple(self._wrapped_again(each) for each in found) if isinstance(found, tuple) else found

        return run

    @contextmanager
    def _fakes_on_meta(self, outputs: Sequence[Any]) -> Iterator[None]:
        """Under it fake tensors without a wrapper say ``meta`` to C++, which asks them for their device."""
        import torch._subclasses.fake_tensor as library

        handlers, asked = library._DISPATCH_META_HANDLERS, torch.ops.prim.device.default
        before = handlers[asked]
        if any(isinstance(each, library.FakeTensor) for each in outputs):
            handlers[asked] = lambda _args: _META
        try:
            yield
        finally:
            handlers[asked] = before

    def _wrapped_again(self, value: Any) -> Any:
        """A gradient with an outer wrapper for the side that it is handed to."""
        from torch._subclasses.functional_tensor import FunctionalTensor

        if not isinstance(value, torch.Tensor):
            return value
        parts, layouts = take_apart([value])
        again = [
            FunctionalTensor(part.elem, self.mode) if isinstance(part, FunctionalTensor) else part for part in parts
        ]
        return put_together(again, layouts)[0]

    def _dispatching(self) -> Iterator[tuple[Any, str, Any]]:
        """What the mode that functionalizes does otherwise. Its class is changed rather than derived from: higher-order
        operators look their rules up by the mode's class."""
        import torch._subclasses.functional_tensor as library
        from torch._subclasses.functional_tensor import autograd_would_have_decomposed

        kind: Any = type(self.mode)
        dispatch_before: Any = kind.__torch_dispatch__
        kept = {getattr(torch.ops.aten, name).default for name in ON_CUDA}

        def dispatch(
            mode: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            given = dict(kwargs or {})
            if given.get("device") == _META:  # what C++ makes for a gradient
                given["device"] = CUDA
            if self.inside and func is torch.ops.aten._to_copy.default and given == {"device": CUDA}:
                (value,) = args
                if value.device == _META:  # the engine moves a gradient of one element to where its value was
                    return value
            with self._making(func, args):
                return dispatch_before(mode, func, types, args, given)

        def decomposes(func: Any, arguments: Any) -> bool:
            return func not in kept and bool(autograd_would_have_decomposed(func, arguments))

        yield kind, "__torch_dispatch__", dispatch
        yield library, "autograd_would_have_decomposed", decomposes

    @contextmanager
    def _making(self, func: Any, args: Sequence[Any]) -> Iterator[None]:
        """Around one operator: what is a view of the forward's memory keeps its device."""
        if not self.inside:
            yield
            return
        base = next((each for each in args if isinstance(each, torch.Tensor)), None)
        schema = getattr(func, "_schema", None)
        aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
        before, self.for_engine = self.for_engine, not (aliases and base is not None and base.device.type == "cuda")
        try:
            yield
        finally:
            self.for_engine = before
