"""What autograd saves while a block runs, recomputed once and freed node by node.

A checkpoint recomputes for each backward anew. A backward that does not retain its graph is the last one that reads the
nodes it runs, but need not run all: a pipeline schedule that splits it takes one for each group of weights. So what the
first of them recomputes belongs to the nodes that have saved it, as it would without a checkpoint: each frees its own,
and the next backward reads what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from attrs import define
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from policylang.backends.eager import problems
from policylang.backends.eager.observation.origins import HeldResult
from policylang.torch_compat.eager import running_backward, saved_tensor_hooks, version


@define(eq=False)
class SavedTensor:
    """What a node has in place of a tensor; it dies when autograd frees what the node saved."""

    packed: Any
    """What the checkpoint has given for it."""
    written: int
    """How often its memory had been written to."""
    recomputed: HeldResult | None = None
    by: int = -1
    """The backward that has recomputed it. In that one the checkpoint gives it, and lets it go."""


SavedTensors = list[ref[SavedTensor]]
"""Of one run of a block, in the order in which autograd saves; its recomputation saves in the same order."""


@contextmanager
def noting_saved(tensors: SavedTensors, name: str, check: Callable[[Tensor, int], None]) -> Iterator[None]:
    """Around a forward in a checkpoint: adds what autograd saves. ``name``: the block's, as a sentence names it;
    ``check`` is told what a backward is given, and how often its memory had been written to."""
    save, give = saved_tensor_hooks()

    def pack(value: Tensor) -> SavedTensor:
        saved = SavedTensor(save(value), version(value))
        tensors.append(ref(saved))
        return saved

    def unpack(saved: SavedTensor) -> Tensor:
        held = saved.recomputed
        if held is None or saved.by == running_backward():
            value: Tensor = give(saved.packed)
            saved.recomputed = None
        else:
            value = held.value
            happened = held.changed()
            if happened:
                raise problems.CHANGED_BETWEEN.error(name=name, shape=list(value.shape), happened=happened)
        check(value, saved.written)
        return value

    with saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def handing_over(tensors: Sequence[ref[SavedTensor]]) -> Iterator[None]:
    """Around a recomputation: what it makes is given to those nodes of the forward that are still there."""
    save, give = saved_tensor_hooks()
    each, running = iter(tensors), running_backward()
    made: list[tuple[SavedTensor, Tensor]] = []

    def pack(value: Tensor) -> Any:
        made_for = next(each, None)
        saved = None if made_for is None else made_for()
        if saved is not None:
            made.append((saved, value.detach()))
        return save(value)

    try:
        with saved_tensors_hooks(pack, give):
            yield
    finally:  # by now a write that was not done again is not counted any more
        for saved, value in made:
            saved.recomputed, saved.by = HeldResult.of(value), running
        made.clear()
