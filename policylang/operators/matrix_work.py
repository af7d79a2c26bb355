"""Which operators could do matrix work, by name: what has no FLOP formula counts as 0, and of these that is said.

Matrix work is what FLOPs count here: products of matrices and vectors, convolutions, attention, recurrent layers,
matrix decompositions and solves. Pointwise operators, reductions, normalisations, sorts, scans, gathers, scatters,
Fourier transforms, random draws, copies, views and collectives are none, as in ``torch.utils.flop_counter``.

Of the namespaces of :data:`KNOWN` the words of a name tell the two apart. What an operator of another namespace does,
nobody knows: it could do matrix work.
"""

from __future__ import annotations

import re
from functools import cache

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
"""Of these a graph calls functions, by their path: they have no overloads."""
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
"""Interpolations, the pointwise part of a recurrent cell, weights that are laid out otherwise, choices of a kernel."""


@cache
def could_do_matrix_work(target: str) -> bool:
    """Of the full name of an operator, ``aten.mm.default``; of what its call gives and takes nothing is known here."""
    namespace, _, rest = target.partition(".")
    name = rest.rpartition(".")[2] if namespace in _FUNCTIONS else rest.partition(".")[0]
    if namespace not in KNOWN:
        return f"{namespace}.{name}" not in HARMLESS
    return bool(_WORK.search(name)) and not _NONE.search(name)
