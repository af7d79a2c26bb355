"""Operators that other modules look up by full name, as ``aten.mm.default``, and the categories of an operator."""

from __future__ import annotations

import re
from functools import cache

from policylang.language.devices.profile import CollectiveKind, collective_kind

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
SUM, ONES_LIKE = "aten.add.Tensor", "aten.ones_like.default"

DETACHES = frozenset({"aten.detach.default", "aten.alias.default"})
"""Traces of what autograd detaches when it saves: ``alias`` from torch 2.14 on."""
AUTOGRAD_COPIES = DETACHES | {CLONE}
"""The copies that autograd keeps of a value: a ``detach`` of a result, a ``clone`` of what is then written to."""
VIEWS_UNSAID = frozenset(
    {"aten._unsafe_view.default", "aten.unsafe_split.Tensor", "aten.unsafe_split_with_sizes.default"}
)
"""Operators that return memory of their first argument without declaring it in their schemas."""
OFFLOAD, RELOAD, HOST_COPY_WAIT = "policylang.offload.default", "policylang.reload.default", "policylang.wait.default"
HOST_COPIES = (OFFLOAD, RELOAD, HOST_COPY_WAIT)
"""The operators that start a copy to the host, start one back, and wait for either."""
SCALES, NARROW, WIDEN = "policylang.scales.default", "policylang.narrow.default", "policylang.widen.default"
"""The operators that give the scales of rows, and take a value to a narrower type and back."""
SAVES_RANDOM_STATE = "run_and_save_rng_state"
RUNS_WITH_RANDOM_STATE = ("run_with_rng_state", "graphsafe_run_with_rng_state")
"""Higher-order operators that run a random operator."""
ZEROS = "aten._efficientzerotensor.default"
"""The zeros of forward derivatives, which take no memory."""
MATRIX_PRODUCTS = {"aten.mm.default": 2, "aten.bmm.default": 2, "aten.addmm.default": 3, "aten.baddbmm.default": 3}
"""Products of the last two of so many tensors."""
PRODUCTS = frozenset({*MATRIX_PRODUCTS, "aten.mv.default", "aten.addmv.default", "aten.dot.default"})
"""Products that read any strides and return fresh memory."""
_CHOOSING = ("topk", "argmax", "argmin", "argsort", "sort", "multinomial", "kthvalue", "max", "min")
CHOICES = frozenset(f"aten.{name}" for name in _CHOOSING)
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
"""Operators that Transformers calls under a compiler that does not take those that it calls in eager: the grouped
product of other types than bfloat16."""


class Category:
    """Properties of every call of an operator, as bits in plain integers: enumerations are ten times slower."""

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


def bytes_of(dtype: str) -> int:
    """The bytes of an element, by the name of its dtype; 0 where that is none."""
    bits = re.search(r"\d+", dtype)
    return 1 if dtype in ("bool", "float4_e2m1fn_x2") else int(bits.group()) // 8 if bits else 0


def is_all_gather(target: str) -> bool:
    """In any namespace, coalesced or not."""
    return "all_gather_into_tensor" in target


KNOWN = frozenset(
    (
        *("aten", "prims", "prim", "builtin", "torch", "math", "profiler", "debugprims", "export", "streams"),
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem", "fsdp"),
        *("inductor", "inductor_prims", "rngprims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn", "sparse"),
        *("quantized", "quantized_decomposed", "quantization", "_quantized"),
        "policylang",
    )
)
"""The namespaces whose operators are torch's or our own."""
_FUNCTIONS = frozenset(("torch", "math", "builtin"))
"""A graph calls functions of these by their path: they have no overloads."""
HARMLESS = frozenset(("autoparallel.dtype_cast",))
"""Operators of other libraries that do none: a cast."""

_WORDS = (
    *("mm", "addmm", "bmm", "baddbmm", "addbmm", "spmm", "hspmm", "sspaddmm", "smm", "gemm", "int8mm", "int4mm"),
    *("mv", "addmv", "dot", "vdot", "matmul", "tensordot", "vecdot", "einsum", "kron", "cov", "corrcoef"),
    *("linear", "qlinear", "bilinear", "trilinear", "attn", "attention", "transformer"),
    *("lstm", "gru", "rnn", r"q?conv(?:olution)?(?:[123]d)?", "cdist", "pdist", "euclidean"),
    *("cholesky", "svd", "svdvals", "qr", "orgqr", "ormqr", "geqrf", "lobpcg", "lstsq", "lu", "ldl"),
    *("solve", "spsolve", "det", "logdet", "slogdet", "householder", r"matrix_(?:exp|power|rank)", "nuclear"),
    r"linalg_(?:eig\w*|inv|pinv|cond|matrix_norm|tensorinv|tensorsolve|multi)",
)
_WHOLE = ("inner", "inverse", "pinverse")
_WORK = re.compile(rf"(?:^|_)(?:{'|'.join(_WORDS)})(?=_|\d|$)|^(?:{'|'.join(_WHOLE)})$")
_NONE = re.compile(
    r"^_*(?:upsample|thnn)_|_(?:prepack|unpack|flatten_weight|search)|^lu_unpack|reorder_|_pack_|sdp_choice"
)
"""Interpolations, the pointwise part of a recurrent cell, packed weights, choices of a kernel."""


@cache
def could_do_matrix_work(target: str) -> bool:
    """An operator, by its full name, could do matrix work: one without a FLOP formula is then named as uncounted.

    Matrix work is what FLOPs count: products of matrices and vectors, convolutions, attention, recurrent layers, matrix
    decompositions and solves. Pointwise operators, reductions, normalisations, sorts, scans, gathers, scatters, Fourier
    transforms, random draws, copies, views and collectives are none, as in ``torch.utils.flop_counter``. In the
    namespaces of :data:`KNOWN` words of the name distinguish them; an operator of another one could do anything.
    """
    namespace, _, rest = target.partition(".")
    name = rest.rpartition(".")[2] if namespace in _FUNCTIONS else rest.partition(".")[0]
    if namespace not in KNOWN:
        return f"{namespace}.{name}" not in HARMLESS
    return bool(_WORK.search(name)) and not _NONE.search(name)


_ON_RANKS = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"))
_BY_ONE_RANK = frozenset((CollectiveKind.POINT_TO_POINT, CollectiveKind.BARRIER))
"""Collectives that a rank does by itself, or that only make others wait."""
_BESIDE_THE_STEP = frozenset(("streams",))
"""Other streams and events: the effect of such an operator is its place in the graph."""
_PLAIN_HIGHER_ORDER = frozenset(
    (
        *("flex_attention", "flex_attention_backward", "triton_kernel_wrapper_mutation"),
        *("triton_kernel_wrapper_functional", "run_and_save_rng_state", "run_with_rng_state"),
        *("graphsafe_run_with_rng_state", "inline_asm_elementwise", "out_dtype", "print"),
    )
)
"""Higher-order operators that run no graph, or one in which nothing can communicate."""
_COMMUNICATES = re.compile(
    r"all_?gather|all_?reduce|reduce_?scatter|all_?to_?all|nccl|nvshmem|p2p"
    r"|(?<![a-z])(?:a2a|send|recv|isend|irecv|put|barrier|broadcast|dispatch|combine|exchange|rendezvous)(?![a-z])"
)


@cache
def is_unknown(target: str, flags: int) -> bool:
    """A call of an operator may communicate, or have another effect that its schema does not declare.

    Nothing that communicates is moved across it: two ranks that start their collectives on either side of it in another
    order may wait for each other for ever. An operator of another library that names no process group, writes to
    nothing and has no word for communication in its name is taken by its schema: it computes.

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
