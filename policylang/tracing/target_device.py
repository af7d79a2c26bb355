"""The device that a step is traced for: the one it runs on, or another one that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeAlias

import torch
from attrs import frozen

from policylang.torch_compat.absent_cuda import autocast_to
from policylang.tracing.preconditions import problem

UNKNOWN_DEVICE = "APL613"
DEFAULT_CAPABILITY = (9, 0)
"""Of a GPU of which nothing is said: Hopper's."""


Device: TypeAlias = str | torch.device
Capability: TypeAlias = str | tuple[int, int]
"""``"8.0"`` or ``(8, 0)``."""


@frozen
class TargetDevice:
    """Where a step is to run."""

    kind: str
    """``cuda`` or ``cpu``."""
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
    """The device that a user names; a compute capability alone is a GPU's. Raises PolicyGraphError for one that no step
    can be traced for."""
    if device is None and capability is None:
        return None
    try:
        kind = torch.device("cuda" if device is None else device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cuda", "cpu"):
        raise problem(
            UNKNOWN_DEVICE,
            f"no step can be traced as on `{device}`",
            help="`cuda` or `cpu`; without a device a step is traced where its model is",
        )
    if kind == "cpu":
        if capability is not None:
            raise problem(
                UNKNOWN_DEVICE, "a compute capability belongs to a GPU", help="leave it out, or trace for `cuda`"
            )
        return TargetDevice(kind)
    if torch.version.hip is not None:
        raise problem(
            UNKNOWN_DEVICE,
            "this torch is built for ROCm, whose kernels are not those of CUDA",
            help="trace on the GPU itself, or with a CPU build of torch",
        )
    if capability is not None:
        return TargetDevice(kind, _capability(capability))
    return TargetDevice(kind, None if torch.cuda.is_available() else DEFAULT_CAPABILITY)


def _capability(given: Capability) -> tuple[int, int]:
    text = given if isinstance(given, str) else ".".join(map(str, given))
    major, dot, minor = text.partition(".")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        raise problem(
            UNKNOWN_DEVICE,
            f"`{text}` is no compute capability",
            help="two numbers: 8.0 (A100), 8.9 (L40S, RTX 40), 9.0 (H100, H200), 10.0 (B200), 12.0 (RTX 50)",
        )
    return int(major), int(minor)


_ambient: ContextVar[TargetDevice | None] = ContextVar("_ambient", default=None)


def ambient_device() -> TargetDevice | None:
    """The device that steps are traced for where nobody says one."""
    return _ambient.get()


def tracing_for(device: TargetDevice | None) -> AbstractContextManager[None]:
    """Under it every step that names no device is traced for this one, if it is one, in an autocast for it too."""

    @contextmanager
    def active() -> Iterator[None]:
        capability = None if device is None else device.capability
        token = _ambient.set(device)
        try:
            with nullcontext() if capability is None else autocast_to(capability):
                yield
        finally:
            _ambient.reset(token)

    return active()
