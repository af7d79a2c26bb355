"""How many bytes an operator moves between the device's memory and itself, by its facts alone.

What it reads and what it returns, once each. Of a tensor that is expanded, the memory behind it; of a table that is
looked up in, as much as is found; of what is overwritten, nothing; of what is written in place at some places, these.
"""

from __future__ import annotations

from policylang.graph.facts import Facts, Flag, returns_memory_of_input
from policylang.operators.names import GETITEM, WAITS

LOOK_UPS = frozenset(
    f"aten.{name}"
    for name in (
        *("embedding", "index", "_unsafe_index", "index_select", "gather", "take", "take_along_dim"),
        *("select_copy", "slice_copy", "masked_select"),
    )
)
"""Operators that find something in their first argument."""
BAGS = frozenset(f"aten.{name}" for name in ("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"))
"""Look-ups that return the sum of what they find."""
_OVERWRITES = frozenset(
    f"aten.{name}"
    for name in ("copy", "copy_", "fill", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")
)
"""Operators that do not read their first argument."""
_AT_PLACES = frozenset(
    f"aten.{name}"
    for name in (
        *("index_put_", "_index_put_impl_", "_unsafe_index_put_", "index_add_", "index_copy_", "index_fill_"),
        *("scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_"),
    )
)
"""Operators that write a part of their first argument in place."""
_ALLOCATIONS = frozenset(
    f"aten.{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_")
)
_ALL_GIVEN = ("higher_order.triton_kernel_wrapper_", "fsdp.")
"""Operators whose results are among their arguments."""
_WITHOUT_KERNEL = ("builtin.", "torch.", "math.", "prim.", "aten.sym_", "aten._assert", "aten._functional_assert")


def runs_kernel(facts: Facts, row: int) -> bool:
    """Whether a node does anything on the device: views, pieces of tuples, waits, sizes and allocations do not."""
    target = facts.targets[row]
    if facts.ops[row] != "call_function" or target == GETITEM or target in WAITS or facts.flags[row] & Flag.SYMBOLIC:
        return False
    if returns_memory_of_input(facts, row) or target.startswith(_WITHOUT_KERNEL):
        return False
    return packet(target) not in _ALLOCATIONS


def packet(target: str) -> str:
    """An operator without its overload, ``aten.mm``; a higher-order operator has none."""
    return target if target.count(".") < 2 else target.rpartition(".")[0]


def bytes_moved(facts: Facts, row: int) -> int:
    """Of one run of an operator that :func:`runs_kernel`."""
    target, inputs, made = facts.targets[row], facts.inputs[row], facts.bytes[row]
    operator = packet(target)
    read = [memory_read(facts, each) for each in inputs]
    if operator in LOOK_UPS and read:
        read[0] = min(read[0], made)
    elif operator in BAGS and len(read) > 1:
        read[0] = min(read[0], _found_in_bags(facts, inputs))
    elif operator in _OVERWRITES and read:
        read[0] = 0
    elif operator in _AT_PLACES and read:
        piece = min(read[0], max(read[1:], default=0))
        return sum(read[1:]) + 2 * piece
    elif target.startswith(_ALL_GIVEN):
        return max(sum(read), made)
    elif facts.flags[row] & Flag.WRITES and not made:  # optimizers' kernels: all is read and written
        return 2 * sum(read)
    elif target.endswith("out"):  # the result is handed in
        return max(sum(read), made)
    return made + sum(read)


def memory_read(facts: Facts, row: int) -> int:
    """The bytes of memory behind a value: fewer than it has where elements lie in one place, as of an expanded one."""
    size, shape, strides = facts.bytes[row], facts.shapes[row], facts.strides[row]
    if not facts.numel[row] or shape is None or strides is None or len(shape) != len(strides):
        return size
    extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    numel = facts.numel[row]
    return size if extent >= numel else max(extent, 1) * (size // numel)


def _found_in_bags(facts: Facts, inputs: tuple[int, ...]) -> int:
    """A row of the table for each index."""
    table, indices = inputs[0], inputs[1]
    shape = facts.shapes[table]
    return facts.bytes[table] if not shape else facts.bytes[table] // max(shape[0], 1) * facts.numel[indices]
