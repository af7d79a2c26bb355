"""CUDA tensors without data on a machine without a GPU, and a backward through them: fills in what PyTorch lacks.

``FakeTensorMode`` makes tensors that say ``cuda`` on any machine. Three obstacles keep torch from tracing a step on
them there: autograd asks a device's guard for its stream, which ends the process in a build without CUDA and asks for
the driver in one with it; the engine adds up gradients of an accelerator on its streams; and an operator without a CUDA
kernel in this build is decomposed where a CUDA build calls its kernel. Everything is undone when the trace ends.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import fake_tensor, functional_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

from policylang.torch_compat.tracing import autograd_engine_replaced, functionalized, put_together, replaced, take_apart

CUDNN = 92_000
"""The version of cuDNN that is assumed: 9.20, which torch 2.13 for CUDA 13 brings along."""
ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")
"""Operators that a CUDA build has a kernel for and that any other build decomposes."""


@contextmanager
def kernels_of_cuda(composite: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Registers the selectors of kernels on CUDA, and kernels there for the operators of :data:`ON_CUDA`.
    ``composite``: composite operators, by name and overload, and functions that call their parts."""
    added = [("AutogradCUDA", name, function) for name, function in composite.items()]
    for name in ON_CUDA:
        operator = getattr(torch.ops.aten, name).default
        if not _has_kernel(name, "CUDA"):
            added.append(("CUDA", name, operator.decompose))
        if name.endswith("_backward") and not _has_kernel(name, "Meta"):
            # autograd, which takes a gradient for one of meta, would decompose it
            added.append(("AutogradMeta", name, partial(_below_autograd, operator)))
    if not torch.cuda.is_available():
        # a small constant of Python's keeps its value while it is traced: moved to CUDA, it is one on the CPU
        added += [("CUDA", "empty.memory_format", _constant), ("CUDA", "empty_strided", _strided_constant)]
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*[Oo]verriding a previously registered kernel")
            for key, name, function in added:
                library.impl(name, function, key)
        yield
    finally:
        library._destroy()


def _below_autograd(operator: Any, *args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def _constant(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)


def _strided_constant(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_kwargs: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def sdpa_priority() -> tuple[int, ...]:
    """The order in which attention kernels are tried, as numbers of ``torch.nn.attention.SDPBackend``."""
    return tuple(torch._C._get_sdp_priority_order())


@contextmanager
def device_guard() -> Iterator[None]:
    """Gives CUDA the guard of ``meta``, which does nothing; one of a build with CUDA asks the driver. Without any the
    first operator that autograd records aborts the process, so what cannot be lent has to be refused."""
    registry = _exported("libc10", "_ZN3c104impl26device_guard_impl_registryE", ctypes.c_void_p * 20)
    cuda, meta = 1, 14  # c10::DeviceType, whose numbers are part of torch's file formats
    if not registry[meta]:
        raise ImportError(f"torch {torch.__version__} has no device guard for meta tensors")
    before, registry[cuda] = registry[cuda], registry[meta]
    try:
        yield
    finally:
        registry[cuda] = before


@contextmanager
def hooks_of_a_build_without_cuda() -> Iterator[None]:
    """Gives the CUDA hooks of a build with CUDA the methods that those of a build without it have. The autograd engine
    asks them whether CUDA is this build's accelerator, and if so for the streams of its GPUs."""
    hooks, without_cuda = cuda_hooks() if torch.backends.cuda.is_built() else (ctypes.c_void_p(), 0)
    before, hooks.value = hooks.value, without_cuda
    try:
        yield
    finally:
        hooks.value = before


def cuda_hooks() -> tuple[ctypes.c_void_p, int]:
    """The addresses of the methods of this build's CUDA hooks, and of those of a build without CUDA. An object of C++
    begins with the address of its methods; before them are two words about their class. libtorch_cpu holds the class of
    a build without CUDA in every build."""
    name = "_ZN2at6detail12getCUDAHooksEv"
    _exported("libtorch_cpu", name, ctypes.c_char)
    methods = _exported("libtorch_cpu", "_ZTVN2at18CUDAHooksInterfaceE", ctypes.c_void_p * 3)
    find = ctypes.CDLL(str(_library("libtorch_cpu")))[name]
    find.restype = ctypes.c_void_p
    return ctypes.c_void_p.from_address(find()), ctypes.addressof(methods) + 2 * ctypes.sizeof(ctypes.c_void_p)


def _library(name: str) -> Path:
    folder = Path(str(torch.__file__)).parent / "lib"
    found = next((path for end in (".so", ".dylib") if (path := folder / f"{name}{end}").is_file()), None)
    if found is None:
        raise ImportError(f"torch {torch.__version__} has no library {name} in {folder}")
    return found


def _exported(library: str, name: str, kind: Any) -> Any:
    """The object of a library of torch under a name of C++."""
    try:
        return kind.in_dll(ctypes.CDLL(str(_library(library))), name)
    except (OSError, ValueError) as error:
        raise ImportError(f"torch {torch.__version__} does not show `{name}` of {library}") from error


CUDA = torch.device("cuda", 0)
_META = torch.device("meta")


class EngineTensors:
    """Wrappers of functional tensors that say ``meta`` to the autograd engine and ``cuda`` below it.

    The engine adds gradients on the streams of an available accelerator, and on the calling thread for any other
    device. So tensors made while it runs are CUDA tensors with an outer wrapper on ``meta``; views of forward tensors
    share their memory and stay unchanged.
    """

    def __init__(self) -> None:
        self.mode = functionalized()
        self.inside = False
        self.for_engine = False

    @contextmanager
    def active(self) -> Iterator[None]:
        original: Any = torch.Tensor._make_wrapper_subclass

        def make(cls: type, *args: Any, **kwargs: Any) -> Any:
            if self.for_engine and cls is FunctionalTensor:
                args = tuple(_META if isinstance(each, torch.device) else each for each in args)
            return original(cls, *args, **kwargs)

        def to_cuda(value: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
            return value.to(CUDA if device is None or isinstance(device, int) else device, *args, **kwargs)

        wrapping = (torch.Tensor, "_make_wrapper_subclass", staticmethod(make))
        wrappers = replaced(wrapping, (FunctionalTensor, "cuda", to_cuda), *self._dispatching())
        with wrappers, autograd_engine_replaced(self._engine):
            yield

    def _engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
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
        handlers, asked = fake_tensor._DISPATCH_META_HANDLERS, torch.ops.prim.device.default
        before = handlers[asked]
        if any(isinstance(each, FakeTensor) for each in outputs):
            handlers[asked] = lambda _args: _META
        try:
            yield
        finally:
            handlers[asked] = before

    def _wrapped_again(self, value: Any) -> Any:
        """A gradient with an outer wrapper for the side that it is handed to."""
        if not isinstance(value, torch.Tensor):
            return value
        parts, layouts = take_apart([value])
        again = [
            FunctionalTensor(each.elem, self.mode) if isinstance(each, FunctionalTensor) else each for each in parts
        ]
        return put_together(again, layouts)[0]

    def _dispatching(self) -> Iterator[tuple[Any, str, Any]]:
        """The replaced methods of the functionalizing mode. Its class is changed rather than derived from: higher-order
        operators look their rules up by the mode's class."""
        autograd_would_have_decomposed = functional_tensor.autograd_would_have_decomposed
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
            return func not in kept and autograd_would_have_decomposed(func, arguments)

        yield kind, "__torch_dispatch__", dispatch
        yield functional_tensor, "autograd_would_have_decomposed", decomposes

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


def autocast_to(capability: tuple[int, int]) -> AbstractContextManager[None]:
    """Under it ``torch.autocast("cuda")`` is one for this GPU, where torch finds none and would switch it off."""
    import torch.cuda.amp.common as library

    return replaced(
        (library, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_args, **_kwargs: capability >= (8, 0)),
    )


def _no_gpu() -> None:
    raise RuntimeError("it asks torch.cuda for what only a GPU has")


def _pretended(capability: tuple[int, int]) -> AbstractContextManager[None]:
    """Replaces the answers of ``torch.cuda`` to a model and to ``torch.autocast``."""
    major, minor = capability
    properties = SimpleNamespace(name=f"CUDA device {major}.{minor}", major=major, minor=minor)
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda *_args, **_kwargs: major >= 8,
        "get_device_capability": lambda *_args, **_kwargs: capability,
        "get_device_name": lambda *_args, **_kwargs: properties.name,
        "get_device_properties": lambda *_args, **_kwargs: properties,
        "synchronize": lambda *_args, **_kwargs: None,
    }
    # a fake tensor starts its device where there is one
    others: list[tuple[Any, str, Any]] = [(FakeTensorMode, "avoid_device_init", property(lambda _mode: True))]
    if not torch.cuda.is_available():
        state = torch.zeros(16, dtype=torch.uint8, device="cpu")  # as many bytes as a GPU's generator has
        others += [
            (fake_tensor, "init_gpu_context", lambda _device: None),
            (torch.backends.cudnn, "is_available", lambda: True),
            (torch.backends.cudnn, "version", lambda: CUDNN),
            (torch.backends.cudnn, "is_acceptable", lambda _tensor: False),  # recurrent layers are traced without it
            *((torch.cuda, name, lambda *_args: 0) for name in ("_exchange_device", "_maybe_exchange_device")),
            (torch.cuda, "set_device", lambda _device: None),
            (torch.cuda, "get_rng_state", lambda *_args, **_kwargs: state),
            (torch.cuda, "set_rng_state", lambda *_args, **_kwargs: None),
            *((owner, "_lazy_init", _no_gpu) for owner in (torch.cuda, torch.cuda.memory, torch.cuda.random)),
        ]
    if torch.distributed.is_available():
        from torch.distributed.device_mesh import DeviceMesh

        # a DTensor moves what it is made of to the device of its mesh, which was made where the processes are
        others.append((DeviceMesh, "device_type", property(lambda _mesh: "cuda")))
    return replaced(*others, *((torch.cuda, name, answer) for name, answer in answers.items()))


@contextmanager
def absent_cuda(
    capability: tuple[int, int], composite: Mapping[str, Callable[..., Any]]
) -> Iterator[AbstractContextManager[None]]:
    """Under it a step can be traced on fake CUDA tensors of a GPU that is not there; gives its functionalization.

    ``capability``: the GPU's compute capability. ``composite``: as for attention, whose kernel C++ chooses.

    Raises ``ImportError`` where a torch lacks what this needs.
    """
    tensors = EngineTensors()
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(device_guard())
            stack.enter_context(hooks_of_a_build_without_cuda())
        for context in (tensors.active(), kernels_of_cuda(composite), _pretended(capability)):
            stack.enter_context(context)
        yield tensors.mode
