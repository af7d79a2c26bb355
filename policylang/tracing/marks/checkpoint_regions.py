"""The user's own ``torch.utils.checkpoint`` regions in a trace: tags on nodes, as under ``torch.compile``.

Traced as it stands, a region would be recomputed in the trace itself, where no policy could reach it, or (with a
policy of its own, ``context_fn``) leave its tag on every node that follows, backward included. Here the region runs
once, its nodes carry ``recompute`` and ``ac_graph_id``, and nothing else does.

A checkpoint that follows a policy of ours may be left out altogether: the policy that the graph is given decides there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from policylang.graph import marks
from policylang.torch_compat.tracing import checkpoint_replaced

_TAGS = ("recompute", "ac_graph_id")


def checkpoint_regions(sessions: list[Any] | None = None) -> AbstractContextManager[None]:
    """Under it, checkpoint regions are tagged and not carried out. Regions are numbered from 0.

    With a list of ``sessions``, those that say themselves what they keep, by their session, are not tagged either:
    it goes into the list, once.
    """
    regions = _Regions(sessions)
    return checkpoint_replaced(regions.non_reentrant, regions.reentrant)


class _Regions:
    def __init__(self, sessions: list[Any] | None) -> None:
        self.count = 0
        self.sessions = sessions

    def non_reentrant(
        self,
        _function: Callable[..., Any],
        _preserve_rng_state: bool = True,
        context_fn: Callable[[], tuple[Any, Any]] = lambda: (nullcontext(), nullcontext()),
        *_args: Any,
        **_kwargs: Any,
    ) -> Iterator[None]:
        session = getattr(context_fn, marks.SESSION, None)
        if session is not None and self.sessions is not None:
            if session not in self.sessions:
                self.sessions.append(session)
            yield
            return
        forward_context, _recompute_context = context_fn()
        with self._tagged() as number:
            if hasattr(forward_context, "ac_graph_id"):
                forward_context.ac_graph_id = number
            with forward_context:
                yield

    def reentrant(self, function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        with self._tagged():
            return function(*args)

    @contextmanager
    def _tagged(self) -> Iterator[int]:
        """Nested regions: a node belongs to the innermost, as with ``torch.compile``."""
        number = self.count
        self.count += 1
        meta = traceback.get_current_meta()
        outer = {key: meta[key] for key in _TAGS if key in meta}
        meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=number)
        try:
            yield number
        finally:
            meta = traceback.get_current_meta()
            for key in _TAGS:
                meta.pop(key, None)
            meta.update(outer)
