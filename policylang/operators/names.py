"""Operators that are asked for by name, in full as in ``aten.mm.default``, and the categories of an operator."""

from __future__ import annotations

GETITEM = "builtin.getitem"
GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
ALL_REDUCE = "_c10d_functional.all_reduce.default"
WAIT = "_c10d_functional.wait_tensor.default"
WAITS = frozenset({WAIT, "c10d_functional.wait_tensor.default"})
FOLLOWERS = WAITS | {GETITEM}
"""Operators that share the decision of what they read."""
VIEW, PERMUTE = "aten.view.default", "aten.permute.default"
CLONE, SLICE, CAT = "aten.clone.default", "aten.slice.Tensor", "aten.cat.default"

DETACHES = frozenset({"aten.detach.default", "aten.alias.default"})
"""What a trace has where autograd detaches what it saves: ``alias`` from torch 2.14 on."""
AUTOGRAD_COPIES = DETACHES | {CLONE}
"""What autograd keeps instead of a value: a ``detach`` of a result, a ``clone`` of what is then written to."""
VIEWS_UNSAID = frozenset(
    {"aten._unsafe_view.default", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"}
)
"""Operators that return memory of their first argument, and whose schemas do not say so."""
OFFLOAD, RELOAD, HOST_COPY_WAIT = "policylang.offload.default", "policylang.reload.default", "policylang.wait.default"
HOST_COPIES = (OFFLOAD, RELOAD, HOST_COPY_WAIT)
"""The operators that start a copy to the host, start one back, and wait for either."""
SAVES_RANDOM_STATE = "run_and_save_rng_state"
RUNS_WITH_RANDOM_STATE = ("run_with_rng_state", "graphsafe_run_with_rng_state")
"""Higher-order operators that run a random operator, by their own names."""
MATRIX_PRODUCTS = {"aten.mm.default": 2, "aten.bmm.default": 2, "aten.addmm.default": 3, "aten.baddbmm.default": 3}
"""Products of the last two of so many tensors."""
PRODUCTS = frozenset({*MATRIX_PRODUCTS, "aten.mv.default", "aten.addmv.default", "aten.dot.default"})
"""Products that read any strides and return fresh memory."""
CHOICES = frozenset(
    f"aten.{name}" for name in ("topk", "argmax", "argmin", "argsort", "sort", "multinomial", "kthvalue", "max", "min")
)
"""Discrete choices, without their overloads."""
ORDERINGS = frozenset(("aten.sort", "aten.argsort"))
"""Choices that are none where what they order is whole numbers that are known: the tokens of an expert, by expert."""
STEERED = (
    *("aten.index", "aten.gather", "aten.scatter", "aten.embedding", "aten.take", "aten.masked_", "aten.where"),
    *("aten.bincount", "aten.histc", "aten.nonzero", "aten._local_scalar_dense", "aten._grouped_mm"),
    *("aten._embedding_bag", "transformers.grouped_mm_fallback"),
)
"""Beginnings of the names of operators that go by whole numbers or truth values computed elsewhere."""
STAND_INS = {"transformers.grouped_mm_fallback.default": "aten._grouped_mm.default"}
"""What Transformers calls under a compiler that does not take an operator (the grouped product of other types than
bfloat16), and what it calls in eager."""


class Category:
    """What holds of every call of an operator, as bits: plain integers, since those of an enumeration cost ten times as
    much."""

    VIEW = 1
    """Every tensor it returns aliases an input."""
    RANDOM = 2
    """It draws random numbers (SDPA with dropout 0 does not, though its operator is tagged so)."""
    WRITES = 4
    """It mutates one of its arguments."""
    MULTI_OUTPUT = 8
    """It returns a tuple; its ``getitem`` users follow it."""
    EFFECTFUL = 16
    """It has an effect beyond its result: an effect token, a print, an assertion, a non-functional collective."""
    COLLECTIVE = 256
    COMPUTE = 1024
    """Its operator is on PyTorch's list of compute-intensive operators."""
    SEED = 65536
    """It draws the seeds from which Inductor's random operators make all their numbers."""


def is_all_gather(target: str) -> bool:
    """Of any namespace, coalesced or not."""
    return "all_gather_into_tensor" in target
