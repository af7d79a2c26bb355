"""Operators of which nobody knows whether they communicate, or have another effect that their schema does not say.

Nothing that communicates is moved across a call of one: two ranks that start their collectives on either side of it in
another order may wait for each other for ever. An operator of somebody else's that names no process group, writes to
nothing and has no word for communication in its name is taken by its schema: it computes.
"""

from __future__ import annotations

import re
from functools import cache

from policylang.language.devices.profile import CollectiveKind, collective_kind
from policylang.operators.matrix_work import HARMLESS, KNOWN
from policylang.operators.names import WAITS, Category

_FUNCTIONS = frozenset(("torch", "math", "builtin"))
"""Of these a graph calls functions, by their path: they have no overloads."""
_ON_RANKS = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"))
_BY_ONE_RANK = frozenset((CollectiveKind.POINT_TO_POINT, CollectiveKind.BARRIER))
"""What each rank does by itself, or what is there to hold others up."""
_BESIDE_THE_STEP = frozenset(("streams",))
"""Other streams and events: where such an operator stands is what it does."""
_PLAIN_HIGHER_ORDER = frozenset(
    (
        *("flex_attention", "flex_attention_backward", "triton_kernel_wrapper_mutation"),
        *("triton_kernel_wrapper_functional", "run_and_save_rng_state", "run_with_rng_state"),
        *("graphsafe_run_with_rng_state", "inline_asm_elementwise", "out_dtype", "print"),
    )
)
"""Higher-order operators that run no graph of their own, or one in which nothing can communicate."""
_COMMUNICATES = re.compile(
    r"all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|nccl|nvshmem|p2p"
    r"|(?<![a-z])(?:a2a|send|recv|isend|irecv|put|barrier|broadcast|dispatch|combine|exchange|rendezvous)(?![a-z])"
)


@cache
def is_unknown(target: str, flags: int) -> bool:
    """Whether nobody knows what a call of an operator does beside what it returns and writes.

    ``target``: in full, as in ``Facts.targets``; ``flags``: the :class:`Category` bits that hold of the call.
    """
    namespace, _, name = target.partition(".")
    if not namespace or target in WAITS:
        return False
    if namespace == "higher_order":
        return name not in _PLAIN_HIGHER_ORDER
    if namespace in _BESIDE_THE_STEP:
        return True
    name = name.partition(".")[0]
    if namespace in _ON_RANKS:
        known = flags & Category.COLLECTIVE and collective_kind(name) not in (None, *_BY_ONE_RANK)
        return not known and (namespace == "symm_mem" or "p2p" in name or collective_kind(name) in _BY_ONE_RANK)
    if namespace in KNOWN or f"{namespace}.{name}" in HARMLESS:
        return False
    if namespace in _FUNCTIONS or target.count(".") != 2:  # a function of Python's has no schema to go by
        return namespace not in _FUNCTIONS
    return bool(flags & (Category.COLLECTIVE | Category.EFFECTFUL)) or bool(_COMMUNICATES.search(name.lower()))
