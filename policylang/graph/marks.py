"""The metadata that policylang leaves on a graph's nodes, and how it is told from that of the user's ``checkpoint``.

The stages that write (``backends``) and the one that reads (``graph.collect``) share these names, nothing else.
Provenance lives in ``node.meta["custom"]``, which torch carries into copies of a node and into a second compilation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policylang.language.wording import one_line

PROVENANCE = "policylang"
"""``custom`` key: the line that decided, ``llama3_sac.apl:9``. A tag beside it is ours, any other is the user's."""

SAVED = "policylang_saved"
"""``custom`` key: a partition saved this value (``where recorded saved``).

On the nodes of a partition itself True, or :data:`PARTLY`. On those of a graph that is to be traced again, an
annotation of :class:`policylang.graph.reading.saved_markers.SavedMarker`, which outlives decompositions.
"""

PARTLY = "partly"
"""Of an operator that returns a tuple, or of what autograd keeps of one: the rest of it was recomputed."""

USER_TAG = "policylang_user_tag"
"""``custom`` key: the user's tag that an ``override`` rule replaced, as ``[member name or None, region or None]``."""

REWRITTEN = "policylang_rewritten"
"""``custom`` key of a node that a ``fuse`` or ``collapse`` line put into the graph: that line, ``mesh.apl:3``."""

RECOMPUTED = "policylang_recomputed"
"""``custom`` key of a copy that a flat graph runs again in its backward: the name of the forward node it repeats."""

MOVED = "policylang_moved"
"""``custom`` key of what copies a value to the host and back: the name of the value's node."""

RANDOM_STATE = "policylang_random_state"
"""``custom`` key of the nodes that keep and hand on a generator's state: the name of the operator that draws."""

PHASE = "policylang_phase"
"""``custom`` key of what a flat graph's tracer knows of a node: :data:`FORWARD`, :data:`BACKWARD`, :data:`EPILOGUE`."""

FORWARD = "forward"

BACKWARD = "backward"
"""Made by an outermost call of the autograd engine, or the accumulation of what such calls made."""

EPILOGUE = "epilogue"
"""What follows every gradient: the write-back of buffers, the optimizer's step."""

SESSION = "__policylang_session__"
"""The attribute of a checkpoint's ``context_fn`` that is ours, or of what it is a partial of: its session, whose
``policy`` it follows."""

COMPILER = "__policylang_compiler__"
"""The attribute of a backend for ``torch.compile`` that follows a policy."""

ALL = (PROVENANCE, SAVED, USER_TAG, REWRITTEN)
"""Every ``custom`` key of a partition's; what does not belong to a second compilation is taken off by these names."""

AC_GRAPH_ID = 2**30
"""The ``ac_graph_id`` of every node that policylang tags.

torch saves a recomputed node that a node of a *later* region recomputes too (``cleanup_recompute_tags``), and numbers
regions upwards from 0. One number for all our nodes, above every region's, keeps that rule from undoing our tags.
"""


def custom(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The annotations of a node; empty where it has none. Not to be written to: nodes share them."""
    found = meta.get("custom")
    return found if isinstance(found, dict) else {}


def annotated(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what others have set on a node, in order; one that is set to False or None is not set."""
    found = custom(meta)
    if not found:
        return ()
    return tuple(
        sorted(
            one_line(name)
            for name, value in found.items()
            if isinstance(name, str) and not name.startswith(PROVENANCE) and value is not None and value is not False
        )
    )


def is_ours(meta: Mapping[str, Any]) -> bool:
    """Whether the ``recompute`` tag of a node, if any, was written by policylang."""
    return PROVENANCE in custom(meta)


def user_tag(meta: Mapping[str, Any]) -> tuple[str | None, int | None]:
    """The ``CheckpointPolicy`` member name and region that the user's own ``checkpoint`` gave a node."""
    annotations = custom(meta)
    if PROVENANCE in annotations:
        tag, region = annotations.get(USER_TAG, (None, None))
        return tag, region
    tag, region = meta.get("recompute"), meta.get("ac_graph_id")
    return getattr(tag, "name", None), region if isinstance(region, int) else None


def session_of(context_fn: object) -> Any:
    """The session of a checkpoint's ``context_fn``; None if it is not ours."""
    return getattr(getattr(context_fn, "func", context_fn), SESSION, None)


def recorded_saved(meta: Mapping[str, Any]) -> bool:
    """Whether a partition saved the value of this very node."""
    return custom(meta).get(SAVED) in (True, PARTLY)
