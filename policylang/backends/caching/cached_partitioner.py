"""A partitioner that Inductor's caches accept: its ``uuid`` stands for it, and it pickles alike in every process."""

from __future__ import annotations

from typing import Any

from torch import fx

from policylang.audit.code import CodeAudit
from policylang.backends.caching.keyed import KeyedForCaches
from policylang.backends.joint.path import JointPartitioner
from policylang.torch_compat import inductor

_Base: Any = inductor.partitioner_base()


class CachedPartitioner(KeyedForCaches, _Base):  # type: ignore[misc]
    """A partitioner under a key that stands for it in Inductor's caches and has to cover all that it depends on.

    ``code``: is told the order of the halves.
    """

    def __init__(self, partitioner: JointPartitioner, key: str, code: CodeAudit | None = None) -> None:
        self._partitioner = partitioner
        self._key = key
        self._code = code

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = self._partitioner(gm, joint_inputs, **options)
        if self._code is not None:
            self._code.note(forward.graph, backward.graph)
        return forward, backward
