"""The peak of a graph as PyTorch's ``MemTracker`` sees it, run on fake tensors of its true sizes."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from policylang.audit.graphs import is_random_state
from policylang.backends.joint import Partition
from policylang.torch_compat.graphs import hint
from tests.support.run_partition import output_args


class _Tracker(MemTracker):
    """Looks at what a higher-order operator returns as at any other result."""

    supports_higher_order_operators = True


class Measured(NamedTuple):
    """Bytes, parameters and inputs included."""

    forward: int
    backward: int
    saved: int
    """What the forward keeps for the backward beyond its inputs: distinct memory, generator states left out."""


def measured(partition: Partition, num_fwd_outputs: int, device: str = "cpu") -> Measured:
    """Run both halves as AOTAutograd does: each input of the backward is let go of after its last reader.

    What is on another device than ``device`` is not counted.
    """
    forward, backward = partition.forward, partition.backward
    with _mode_of(forward), torch.no_grad():
        primals = [_fresh(node.meta["val"]) for node in forward.graph.find_nodes(op="placeholder")]
        peak_forward, returned = _tracked(forward, list(primals), primals, device)
        names = [value.name if isinstance(value, fx.Node) else "" for value in output_args(forward)]
        outputs = returned[:num_fwd_outputs]
        kept = dict(zip(names, returned, strict=True))
        states = [value for node, value in zip(output_args(forward), returned, strict=True) if is_random_state(node)]
        saved = _bytes_beyond([*primals, *states], returned[num_fwd_outputs:], device)
        arguments = []
        for node in backward.graph.find_nodes(op="placeholder"):
            arguments.append(kept[node.name] if node.name in kept else _fresh(node.meta["val"]))
        del returned, kept
        peak_backward, gradients = _tracked(backward, arguments, [*primals, *outputs], device)
        del gradients
    return Measured(peak_forward, peak_backward, saved)


def measured_flat(gm: fx.GraphModule, device: str = "cpu") -> int:
    """The worst moment of a whole step as a user calls it, its inputs included."""
    with _mode_of(gm), torch.no_grad():
        inputs = [_fresh(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")]
        tracker = _Tracker()
        tracker.track_external(*(value for value in inputs if isinstance(value, Tensor)))
        with tracker:
            returned = gm(*inputs)
        del returned
    return _peak(tracker, device)


def _peak(tracker: MemTracker, device: str) -> int:
    return tracker.get_tracker_snapshot("peak")[torch.device(device)]["Total"]


def _tracked(gm: fx.GraphModule, arguments: list[Any], held: Sequence[Any], device: str) -> tuple[int, list[Any]]:
    gc.collect()
    tracker = _Tracker()
    tracker.track_external(*(value for value in (*arguments, *held) if isinstance(value, Tensor)))
    with tracker:
        returned = fx.Interpreter(gm).boxed_run(arguments)
    return _peak(tracker, device), list(returned)


def _bytes_beyond(known: Sequence[Any], values: Sequence[Any], device: str) -> int:
    there = [value for value in values if isinstance(value, Tensor) and value.device == torch.device(device)]
    storages = {id(value.untyped_storage()): value.untyped_storage() for value in there}
    for value in known:
        if isinstance(value, Tensor):
            storages.pop(id(value.untyped_storage()), None)
    return sum(storage.nbytes() for storage in storages.values())


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    shape, strides = [*map(hint, value.shape)], [*map(hint, value.stride())]
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _mode_of(gm: fx.GraphModule) -> FakeTensorMode:
    vals = [node.meta.get("val") for node in gm.graph.nodes]
    return next(value.fake_mode for value in vals if hasattr(value, "fake_mode"))
