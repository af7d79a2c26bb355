"""Marks forward nodes while a step is traced, where no Dynamo does: module paths, and the user's checkpoints as tags.

Traced as it stands, a ``torch.utils.checkpoint`` region would be recomputed in the trace itself, where no policy could
reach it, or (with a policy of its own, ``context_fn``) leave its tag on every node that follows, backward included.
Here the region runs once, its nodes carry ``recompute`` and ``ac_graph_id``, as under ``torch.compile``, and nothing
else does. A checkpoint of policylang's own is left out: the policy that the graph is given decides there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from policylang.graph import marks
from policylang.torch_compat.tracing import checkpoint_replaced, replaced

STACK = "nn_module_stack"
"""The key Dynamo uses on forward nodes: path to ``(path, class)``, outermost first."""

FORWARD_STACK = "fwd_nn_module_stack"
"""The same on backward nodes: the modules of the forward operator they are the derivative of."""

TAGS = ("recompute", "ac_graph_id")
_OF_A_NODE = (*TAGS, STACK, FORWARD_STACK, "autograd_backward", "in_grad_fn", "grad_fn_seq_nr", "partitioner_tag")


@contextmanager
def without_leaks() -> Iterator[None]:
    """Begins with nothing that belongs to a node of another trace: torch hands what stands here to every node.

    A checkpoint with a policy that was traced without Dynamo leaves its tag here for good. The user's ``annotate``
    around a trace is meant, and stays. Call under ``preserve_node_meta``, which puts back what was there.
    """
    meta = traceback.get_current_meta()
    for key in (*_OF_A_NODE, "stack_trace"):
        meta.pop(key, None)
    yield


def module_paths(model: nn.Module) -> AbstractContextManager[None]:
    """Under it, every node traced inside a submodule's call carries the modules it lies in.

    ``nn.Module.__call__`` is replaced rather than hooks registered: what a module's own hooks compute (FSDP's gathers)
    belongs to the module too, and a module whose forward raises is left all the same.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    original = nn.Module.__call__

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        outer = traceback.get_current_meta().get(STACK)
        with _carrying({STACK: {**(outer or {}), path: (path, type(module))}}):
            return original(module, *args, **kwargs)

    return replaced((nn.Module, "__call__", call))


def checkpoint_regions(followed: list[Any]) -> AbstractContextManager[None]:
    """Under it, checkpoint regions are tagged and not carried out. Regions are numbered from 0.

    ``followed`` takes what policylang's own checkpoints follow, each policy once; these are not tagged.
    """
    regions = _Regions(followed)
    return checkpoint_replaced(regions.non_reentrant, regions.reentrant)


class _Regions:
    def __init__(self, followed: list[Any]) -> None:
        self.count = 0
        self.followed = followed

    def non_reentrant(
        self,
        _function: Callable[..., Any],
        _preserve_rng_state: bool = True,
        context_fn: Callable[[], tuple[Any, Any]] = lambda: (nullcontext(), nullcontext()),
        *_args: Any,
        **_kwargs: Any,
    ) -> Iterator[None]:
        session = marks.session_of(context_fn)
        if session is not None:
            if session.policy not in self.followed:
                self.followed.append(session.policy)
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
        with _carrying(dict(zip(TAGS, (CheckpointPolicy.PREFER_RECOMPUTE, number), strict=True))):
            yield number


@contextmanager
def _carrying(marked: dict[str, Any]) -> Iterator[None]:
    """Within, traced nodes carry the given metadata; afterwards what they carried before.

    Looks the dictionary up anew each time: torch replaces it by a copy now and then.
    """
    meta = traceback.get_current_meta()
    outer = {key: meta[key] for key in marked if key in meta}
    meta.update(marked)
    try:
        yield
    finally:
        meta = traceback.get_current_meta()
        for key in marked:
            meta.pop(key, None)
        meta.update(outer)
