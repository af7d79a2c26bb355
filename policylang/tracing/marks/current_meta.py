"""What torch hands to every node that is traced, whoever left it there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import traceback

_OF_A_NODE = (
    "recompute",
    "ac_graph_id",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "autograd_backward",
    "in_grad_fn",
    "grad_fn_seq_nr",
    "partitioner_tag",
    "stack_trace",
)


@contextmanager
def without_leaks() -> Iterator[None]:
    """Begins with nothing that belongs to a node of another trace.

    A checkpoint with a policy that was traced without Dynamo leaves its tag here for good, and every node traced after
    it would carry the tag. The user's ``annotate`` around a trace is meant, and stays. Call under
    ``preserve_node_meta``, which puts back what was there.
    """
    meta = traceback.get_current_meta()
    for key in _OF_A_NODE:
        meta.pop(key, None)
    yield
