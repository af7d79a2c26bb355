"""All that is lent while a step is traced, and what ``torch.cuda`` answers meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from policylang.torch_compat.absent_cuda.autograd_engine import EngineTensors
from policylang.torch_compat.absent_cuda.cpp_objects import device_guard, hooks_of_a_build_without_cuda
from policylang.torch_compat.absent_cuda.kernels import CUDNN, kernels_of_cuda
from policylang.torch_compat.tracing import replaced


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
    """What ``torch.cuda`` answers a model, and ``torch.autocast``, that ask it."""
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
    import torch._subclasses.fake_tensor as library

    # a fake tensor starts its device where there is one
    others: list[tuple[Any, str, Any]] = [(library.FakeTensorMode, "avoid_device_init", property(lambda _mode: True))]
    if not torch.cuda.is_available():
        state = torch.zeros(16, dtype=torch.uint8, device="cpu")  # as many bytes as a GPU's generator has
        others += [
            (library, "init_gpu_context", lambda _device: None),
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

    ``capability``: the GPU's compute capability. ``composite``: as for attention, whose kernel C++ chooses among those
    of its build.

    Raises ``ImportError`` where a torch has not what this stands on.
    """
    tensors = EngineTensors()
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(device_guard())
            stack.enter_context(hooks_of_a_build_without_cuda())
        for context in (tensors.active(), kernels_of_cuda(composite), _pretended(capability)):
            stack.enter_context(context)
        yield tensors.mode
