"""Which nodes communicate between ranks, which compute beside that, and what operators are called in every form."""

from __future__ import annotations

from torch import fx

from policylang.operators.categories import describe
from policylang.operators.flops import formula_for
from policylang.operators.names import Category

_WAITS = ("wait_tensor", "wait_tensors")


def plain_name(operator: str) -> str:
    """An operator without its overload, and without what says that it writes into an argument."""
    namespace, _, rest = operator.partition(".")
    return f"{namespace}.{rest.partition('.')[0].removesuffix('_').removesuffix('_out')}"


def is_wait(operator: str) -> bool:
    """``operator``: with its namespace and, it may be, its overload."""
    return plain_name(operator).endswith(_WAITS)


def is_product(node: fx.Node) -> bool:
    """Whether a node runs as a kernel of its own: matrix products, attention, convolutions. A product with a dimension
    of 1 may become part of any kernel."""
    if node.op != "call_function" or is_communication(node):
        return False
    if not describe(node.target).flags & Category.COMPUTE and formula_for(node.target) is None:
        return False
    shapes = [tuple(getattr(each.meta.get("val"), "shape", ())) for each in node.all_input_nodes]
    return not any(isinstance(length, int) and length == 1 for shape in shapes for length in shape[-2:])


def is_communication(node: fx.Node) -> bool:
    """Whether a node starts a collective or awaits one."""
    if node.op != "call_function":
        return False
    operator = describe(node.target)
    return bool(operator.flags & Category.COLLECTIVE) or is_wait(operator.name)
