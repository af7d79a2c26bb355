"""Marks nodes while a step is traced: backward regions, module paths, the user's checkpoints as tags.

Traced plainly, a ``torch.utils.checkpoint`` region would be recomputed in the trace itself, where no policy could reach
it, or (with a ``context_fn``) leave its tag on every later node, backward included. Here the region runs once, its
nodes carry ``recompute`` and ``ac_graph_id``, as under ``torch.compile``, and nothing else does. A checkpoint of
policylang is left out: the policy of the graph decides there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from policylang.graph import marks
from policylang.graph.facts import InputKind
from policylang.graph.marks import BACKWARD, EPILOGUE, FORWARD, PHASE, custom
from policylang.graph.phases import is_seed
from policylang.torch_compat.tracing import (
    autograd_engine_replaced,
    checkpoint_replaced,
    input_descriptor,
    rename_node,
    replaced,
    sequence_number,
)

REGION = "policylang_region"
"""``custom`` key while tracing: the number of the engine call, from 0, that a node was made in."""

UNKNOWN = -1
"""The ``seq_nr`` of a backward node that is no operator's derivative: the accumulation of two gradients. torch gives
it to forward nodes as well, those that a thread makes before its first backward function."""


class BackwardRegions:
    """Numbers the calls of the autograd engine."""

    def __init__(self) -> None:
        self.inside = False
        self.count = 0

    def marked(self) -> AbstractContextManager[None]:
        """Under it, each outermost call of the autograd engine is a separate region.

        A call with ``create_graph`` is none: its results are differentiated in turn, as a Jacobian in a forward is, so
        they are part of the forward. Nor is a call inside a call.
        """
        return autograd_engine_replaced(self._wrap)

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Under it, sums of what several calls made are part of the last one."""
        with traceback.annotate({REGION: self.count - 1}), _sequence_numbers(()):
            yield

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            # _engine_run_backward(outputs, grads, keep_graph, create_graph, inputs, ...)
            if self.inside or kwargs.get("create_graph", len(args) > 2 and args[2]):
                return original(outputs, *args, **kwargs)
            self.inside = True
            try:
                with traceback.annotate({REGION: self.count}), _sequence_numbers(outputs):
                    return original(outputs, *args, **kwargs)
            finally:
                self.inside = False
                self.count += 1

        return run


@contextmanager
def _sequence_numbers(outputs: Sequence[Any]) -> Iterator[None]:
    """Under it, a node carries the ``seq_nr`` of the backward function that made it, or :data:`UNKNOWN`."""
    handles = []
    for function in _backward_functions(outputs):
        number = sequence_number(function)
        handles.append(function.register_prehook(lambda _gradients, at=number: traceback.set_grad_fn_seq_nr(at)))
        handles.append(function.register_hook(lambda _inputs, _outputs: traceback.reset_grad_fn_seq_nr()))
    traceback.set_grad_fn_seq_nr(UNKNOWN)
    try:
        yield
    finally:
        traceback.reset_grad_fn_seq_nr()
        for handle in handles:
            handle.remove()


def _backward_functions(outputs: Sequence[Any]) -> list[Any]:
    """Every function of the autograd graph below the outputs, once."""
    roots = [value.grad_fn for value in outputs if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    seen = dict.fromkeys(roots)
    queue = deque(seen)
    while queue:
        for function, _index in queue.popleft().next_functions:
            if function is not None and function not in seen:
                seen[function] = None
                queue.append(function)
    return list(seen)


STACK = "nn_module_stack"
"""The key Dynamo uses on forward nodes: path to ``(path, class)``, outermost first."""

FORWARD_STACK = "fwd_nn_module_stack"
"""The key on backward nodes: the modules of the forward operator they are the derivative of."""

TAGS = ("recompute", "ac_graph_id")
_OF_A_NODE = (*TAGS, STACK, FORWARD_STACK, "autograd_backward", "in_grad_fn", "grad_fn_seq_nr", "partitioner_tag")


@contextmanager
def without_leaks() -> Iterator[None]:
    """Begins without metadata of another trace's nodes: torch copies existing metadata to every node.

    A checkpoint with a policy that was traced without Dynamo leaves its tag there for good. The user's ``annotate``
    around a trace is intended, and stays. Call under ``preserve_node_meta``, which restores the metadata.
    """
    meta = traceback.get_current_meta()
    for key in (*_OF_A_NODE, "stack_trace"):
        meta.pop(key, None)
    yield


def module_paths(model: nn.Module) -> AbstractContextManager[None]:
    """Under it, every node traced inside a submodule's call carries the path of its modules.

    ``nn.Module.__call__`` is replaced rather than hooks registered: what a module's hooks compute (FSDP's gathers)
    belongs to the module too, and a module whose forward raises is left too.
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
    """Under it, checkpoint regions are tagged, not recomputed. Regions are numbered from 0.

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


_LEAKS = (*TAGS, STACK, FORWARD_STACK)
"""Metadata that a backward node may have of the call that surrounds it."""
_WORDS: dict[InputKind, Literal["parameter", "buffer"]] = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
GraphInput = tuple[InputKind, str]
"""The kind and the name of what a graph input is, or is part of."""


def finish(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Drops unread nodes, marks every node forward or backward, and names the inputs."""
    gm.graph.eliminate_dead_code()
    for position, (node, (kind, name)) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        name_input(node, kind, name, position)
    stacks: dict[int, Any] = {}
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        annotations = custom(node.meta)
        # the gradient of the loss with respect to itself is made just before the engine is called
        begins_region = is_seed(node) and any(REGION in custom(user.meta) for user in node.users)
        if REGION in annotations or begins_region:
            _forget(node)
            kept = {key: value for key, value in annotations.items() if key != REGION}
            node.meta["custom"] = {**kept, PHASE: BACKWARD}
            node.meta["autograd_backward"] = True
            stack = stacks.get(node.meta.get("seq_nr", UNKNOWN))
            if stack:
                node.meta[FORWARD_STACK] = stack
        elif annotations.get(PHASE) == EPILOGUE:
            _forget(node)
        else:
            node.meta.pop("autograd_backward", None)
            node.meta["custom"] = {**annotations, PHASE: FORWARD}
            number = node.meta.get("seq_nr", UNKNOWN)
            # Nodes that a thread runs before its first backward function have no number either: no backward node made
            # them.
            if number != UNKNOWN:  # the first with a number is the operator that autograd numbered
                stacks.setdefault(number, node.meta.get(STACK))
    gm.recompile()


def _forget(node: fx.Node) -> None:
    for key in _LEAKS:
        node.meta.pop(key, None)


def name_input(node: fx.Node, kind: InputKind, name: str, position: int) -> None:
    """Name a placeholder, and describe it as torch's own tracer does."""
    word = _WORDS.get(kind)
    rename_node(node, f"{word}_{name}" if word else name)
    node.meta["desc"] = input_descriptor(word or "user", name, position)
