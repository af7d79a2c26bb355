"""How many bytes one training step holds on a CPU, read off the allocator itself, whoever compiled the step.

``policylang.commands.small_llama`` counts what operators return. Inductor's kernels are no operators: what
they fill is seen by the allocator alone, which reports to PyTorch's profiler.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from policylang.commands.small_llama import StepMemory

_BACKWARD = "the backward of a measured step"


def step_allocations(forward: Callable[[], Tensor]) -> StepMemory:
    """Run one forward and its backward. ``forward`` returns the loss, which does not count as saved."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = forward()
        with record_function(_BACKWARD):
            loss.backward()
    events = _events(profiled)
    begin = next(event["ts"] for event in events if event.get("name") == _BACKWARD)
    changes = sorted(_changes(events), key=lambda change: change[0])
    live = list(accumulate(size for _, size in changes))
    saved = sum(size for when, size in changes if when < begin) - loss.untyped_storage().nbytes()
    return StepMemory(saved, max(live, default=0))


def peak_allocated(run: Callable[[], object]) -> int:
    """The most bytes that were alive at once while this ran, beyond those that were there before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    changes = sorted(_changes(_events(profiled)), key=lambda change: change[0])
    return max(accumulate(size for _, size in changes), default=0)


def _changes(events: list[dict[str, Any]]) -> Iterator[tuple[float, int]]:
    """When memory was taken, or given back, and how many bytes."""
    for event in events:
        if event.get("name") == "[memory]":
            yield event["ts"], event["args"]["Bytes"]


def _events(profiled: profile) -> list[dict[str, Any]]:
    """The exported trace is the one public form of a profile that has every allocation, in its order."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        return found
