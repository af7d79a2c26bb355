"""A partitioner that Inductor's caches accept: its ``uuid`` stands for it, and it pickles alike in every process."""

from __future__ import annotations

from typing import Any

from torch import fx

from policylang.backends.joint.path import JointPartitioner
from policylang.torch_compat import inductor

_Base: Any = inductor.partitioner_base()


class CachedPartitioner(_Base):  # type: ignore[misc]
    """A partitioner under a key that stands for it in Inductor's caches and has to cover all that it depends on."""

    def __init__(self, partitioner: JointPartitioner, key: str) -> None:
        self._partitioner = partitioner
        self._key = key

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self._partitioner(gm, joint_inputs, **options)

    def uuid(self) -> str:
        return self._key

    def __getstate__(self) -> dict[str, str]:
        # Inductor hashes the pickle beside the uuid, and a policy's tree holds its comments and line numbers. Such a
        # pickle is only ever made for a key: partitioning happens in the process that traced the graph.
        return {"_key": self._key}
