"""Operators that are asked for by name, in full as in ``aten.mm.default``, and the categories of an operator."""

from __future__ import annotations

GETITEM = "builtin.getitem"
GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
WAIT = "_c10d_functional.wait_tensor.default"
WAITS = frozenset({WAIT, "c10d_functional.wait_tensor.default"})
FOLLOWERS = WAITS | {GETITEM}
"""Operators that share the decision of what they read."""
VIEW, PERMUTE = "aten.view.default", "aten.permute.default"
CLONE, SLICE, CAT = "aten.clone.default", "aten.slice.Tensor", "aten.cat.default"

AUTOGRAD_COPIES = frozenset({"aten.detach.default", "aten.alias.default", CLONE})
"""What autograd keeps instead of a value: a ``detach`` of a result, a ``clone`` of what is then written to."""
VIEWS_UNSAID = frozenset(
    {"aten._unsafe_view.default", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"}
)
"""Operators that return memory of their first argument, and whose schemas do not say so."""
SAVES_RANDOM_STATE = "run_and_save_rng_state"
RUNS_WITH_RANDOM_STATE = ("run_with_rng_state", "graphsafe_run_with_rng_state")
"""Higher-order operators that run a random operator, by their own names."""
PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
)  # fmt: skip
"""Products that read any strides and return fresh memory."""


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
