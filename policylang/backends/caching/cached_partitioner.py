"""A partitioner that Inductor's caches accept: its ``uuid`` stands for it, and it pickles alike in every process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import fx

from policylang.backends.joint.partitioner import JointPartitioner, Partition
from policylang.torch_compat import inductor

_partitioned: ContextVar[list[Partition] | None] = ContextVar("policylang_partitioned", default=None)
_Base: Any = inductor.partitioner_base()


@contextmanager
def partitions() -> Iterator[list[Partition]]:
    """Collects what the partitioners of this module do meanwhile.

    They are called from deep inside torch, and a list on the partitioner would be part of the caches' key. What an
    inner collection gets, the outer one gets too.
    """
    outer = _partitioned.get()
    collected: list[Partition] = []
    token = _partitioned.set(collected)
    try:
        yield collected
    finally:
        _partitioned.reset(token)
        if outer is not None:
            outer.extend(collected)


def split(
    partitioner: JointPartitioner, gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A ``partition_fn``, given its partitioner. Leaves what was done with whoever waits in :func:`partitions`."""
    static = options.get("static_lifetime_input_indices")
    done = partitioner.partition(gm, num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static)
    collected = _partitioned.get()
    if collected is not None:
        collected.append(done)
    return done.forward, done.backward


class CachedPartitioner(_Base):  # type: ignore[misc]
    """:func:`split` under a key that stands for it in Inductor's caches and has to cover all that it depends on."""

    def __init__(self, partitioner: JointPartitioner, key: str) -> None:
        self._partitioner = partitioner
        self._key = key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return split(self._partitioner, gm, joint_inputs, **options)

    def uuid(self) -> str:
        return self._key

    def __getstate__(self) -> dict[str, str]:
        # Inductor hashes the pickle beside the uuid, and a policy's tree holds its comments and line numbers. Such a
        # pickle is only ever made for a key: partitioning happens in the process that traced the graph.
        return {"_key": self._key}
