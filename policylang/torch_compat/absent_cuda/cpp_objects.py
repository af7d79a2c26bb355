"""Two objects of torch's C++ that ask the driver for its GPUs, and what stands in for them where there is none."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


@contextmanager
def device_guard() -> Iterator[None]:
    """Gives CUDA the guard of ``meta``, which does nothing; one of a build with CUDA asks the driver.

    Without any the first operator that autograd records aborts the process, so what cannot be lent has to be refused.
    """
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
    """Gives the CUDA hooks of a build with CUDA the methods that those of a build without it have.

    The autograd engine asks them whether CUDA is this build's accelerator, and if so for the streams of its GPUs.
    """
    if not torch.backends.cuda.is_built():
        yield
        return
    hooks, without_cuda = cuda_hooks()
    before, hooks.value = hooks.value, without_cuda
    try:
        yield
    finally:
        hooks.value = before


def cuda_hooks() -> tuple[ctypes.c_void_p, int]:
    """Where the methods of this build's CUDA hooks are, and where those are that a build without CUDA has.

    The hooks are one object, of a class derived from that of a build without CUDA, which libtorch_cpu holds in every
    build. An object of C++ begins with the address of its methods; before them stand two words about their class.
    """
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
    """What a library of torch holds under a name of C++."""
    try:
        return kind.in_dll(ctypes.CDLL(str(_library(library))), name)
    except (OSError, ValueError) as error:
        raise ImportError(f"torch {torch.__version__} does not show `{name}` of {library}") from error
