"""How many bytes one training step holds on a CPU, read off the allocator itself, whoever compiled the step.

``policylang.commands.small_llama`` counts what operators return. Inductor's kernels are no operators: what
they fill is seen by the allocator alone, which reports to PyTorch's profiler.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from policylang.api.watch import live_bytes
from policylang.commands.small_llama import StepMemory

_BACKWARD = "the backward of a measured step"


def step_allocations(forward: Callable[[], Tensor]) -> StepMemory:
    """Run one forward and its backward. ``forward`` returns the loss, which does not count as saved."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = forward()
        with record_function(_BACKWARD):
            loss.backward()
    before, live = live_bytes(profiled, _BACKWARD)
    return StepMemory(before[-1] - loss.untyped_storage().nbytes(), max(live))


def peak_allocated(run: Callable[[], object]) -> int:
    """The most bytes that were alive at once while this ran, beyond those that were there before."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    return max(live_bytes(profiled, _BACKWARD)[1])
