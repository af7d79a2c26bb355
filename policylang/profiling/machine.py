"""What machine it is: its name, its memory, and what a figure depends on besides."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def described(device: torch.device) -> str:
    """One line: the processor or the GPU, the threads, and the version of torch. Nothing that names the host."""
    if device.type == "cuda":
        fast = torch.backends.cuda.matmul.allow_tf32
        parts = (torch.cuda.get_device_name(device), f"float32 products {'' if fast else 'not '}in TF32")
    else:
        threads = torch.get_num_threads()
        parts = (_processor(), f"{threads} thread{'s' * (threads != 1)}")
    return ", ".join((*parts, f"torch {torch.__version__}"))


def capacity(device: torch.device) -> int | None:
    """Bytes of memory: of the GPU, or of what this process may have of the machine's; down to a tenth of a GiB."""
    if device.type == "cuda":
        return _in_tenths(int(torch.cuda.get_device_properties(device).total_memory))
    limits = [_of_machine(), _of_cgroup()]
    least = min((each for each in limits if each), default=None)
    return None if least is None else _in_tenths(least)


def _in_tenths(size: int) -> int:
    tenths = size * 10 // 2**30
    return round(tenths / 10 * 2**30) if tenths >= 10 else size


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "processor"


def _of_machine() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # no such question on this system
        return None


def _of_cgroup() -> int | None:
    try:
        text = _CGROUP.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None  # `max` where there is none
