"""The matrix work of every call of a graph, and what of it is not counted.

FLOP formulas are torch's own (``torch.utils.flop_counter``), those a program has registered there, and some it lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from attrs import define, field, frozen
from torch import fx
from torch.utils.flop_counter import flop_registry, shape_wrapper

from policylang.operators.calls import StandIn, describe
from policylang.operators.names import KNOWN, RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE, Category, could_do_matrix_work
from policylang.torch_compat import graphs
from policylang.torch_compat.eager import DispatchMode

Formula = Callable[..., Any]
Shape = Sequence[int]


def formula_for(target: Any) -> Formula | None:
    """The function that counts the operations of an operator or a Triton kernel; None where there is none. Looked up at
    each call: a program may register a formula at any time (``register_flop_formula``)."""
    registered = _registered(getattr(target, "overloadpacket", target))
    if registered is not None:
        return registered
    own, like = _own(target)
    return own or (None if like is None else _registered(like))


def _registered(operator: Any) -> Formula | None:
    found: Formula | None = flop_registry.get(operator)
    return None if found is None else _ON_GROUPS.get(found, found)


@cache
def _own(target: Any) -> tuple[Formula | None, Any]:
    """Our formula, and the operator of torch whose formula it is otherwise."""
    if not isinstance(target, graphs.OpOverload | StandIn | graphs.HigherOrderOperator):
        return None, None
    name = getattr(getattr(target, "overloadpacket", target), "__name__", "").removesuffix("_")
    namespace = "aten" if isinstance(target, graphs.HigherOrderOperator) else target.namespace
    if namespace != "aten":
        return _OF_LIBRARIES.get(f"{namespace}.{name}"), None
    return _OF_ATEN.get(name), getattr(torch.ops.aten, _LIKE.get(name, name), None)


def registered_formulas() -> list[str]:
    """The formulas that are not torch's, each with what it does: what a decision by FLOPs depends on."""
    found = []
    for target, formula in flop_registry.items():
        if (getattr(formula, "__module__", None) or "").partition(".")[0] != "torch":
            code = getattr(inspect.unwrap(formula), "__code__", None)
            constants = [each for each in getattr(code, "co_consts", ()) if isinstance(each, int | float | str)]
            body = (code.co_code.hex(), code.co_names, constants) if code is not None else ()
            found.append(f"{target} {getattr(formula, '__qualname__', '')} {body!r}")
    return sorted(found)


# --- products ------------------------------------------------------------------------------------------------------


def _into_result(left: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """A product over the last dimension of the first argument: a linear layer, a matrix and a vector."""
    return 2 * int(prod(out_shape)) * left[-1]


def _added(_own: Shape, left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """A product that is added to something: ``addmv``, ``addbmm``, ``_addmm_activation``."""
    return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)


def _pairs(left: Sequence[Shape], right: Sequence[Shape], *_: Any, **__: Any) -> int:
    return sum(2 * prod(one) * other[-1] for one, other in zip(left, right, strict=True))


def _gathered_product(_left: Shape, right: Sequence[Shape], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """``symm_mem``: rows of all ranks are gathered and multiplied with each of some matrices."""
    return sum(2 * prod(out) * matrix[0] for out, matrix in zip(out_shape[1], right, strict=True))


def _scattered_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(left) * right[-1]


def _grouped_product(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Groups are cut from rows, columns or the inner dimension, or are separate matrices in both."""
    if len(left) > len(right):  # each column of `right` meets one matrix of `left`
        left = left[1:]
    return 2 * prod(left) * right[-1]


def _trilinear(one: Shape, two: Shape, three: Shape, *dims: Any, **__: Any) -> int:
    """``bilinear``: the first two are multiplied, and what is left of them and the third."""
    *expanded, summed = dims[:4]
    whole = len(one) + len(expanded[0])
    first, second, third = (_sizes(*each, whole) for each in zip((one, two, three), expanded, strict=True))
    product = first | second
    left = {dim: size for dim, size in product.items() if dim not in summed or dim in third}
    return 2 * prod(product.values()) + 2 * prod((left | third).values())


def _sizes(shape: Shape, expanded: Shape, whole: int) -> dict[int, int]:
    own = [dim for dim in range(whole) if dim not in expanded]
    return dict(zip(own, shape, strict=True))


# --- convolutions and recurrent layers -------------------------------------------------------------------------------


def _convolution(_input: Shape, weight: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """The weight of a convolution is (out, in / groups, ...): each element of the result is a sum of the rest."""
    return 2 * int(prod(out_shape)) * prod(weight[1:])


def _transposed_convolution(input: Shape, weight: Shape, *_: Any, **__: Any) -> int:
    return 2 * prod(input) * prod(weight[1:])


def _convolution_tbc(_input: Shape, weight: Shape, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """The weight is (width, in, out)."""
    return 2 * int(prod(out_shape)) * weight[0] * weight[1]


def _recurrent(input: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """Every matrix of every layer meets every token once; biases and gates are pointwise. Packed or not."""
    return 2 * prod(input[:-1]) * sum(prod(each) for each in weights if len(each) == 2)


def _recurrent_layer(input: Shape, *weights: Any, **__: Any) -> int:
    return _recurrent(input, weights[:4])


def _backward_of(forward: Formula) -> Formula:
    """A product for the gradient of each factor."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


_INTO_RESULT = (
    *("linear", "mkldnn_linear", "matmul", "mv", "dot", "vdot", "inner", "_int_mm", "_scaled_mm_v2"),
    *("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int4pack_mm_with_scales_and_zeros"),
    *("_weight_int8pack_mm", "_mixed_dtypes_linear", "_dyn_quant_matmul_4bit"),
)
_CONVOLUTIONS = (
    *("cudnn_convolution_relu", "cudnn_convolution_add_relu", "miopen_convolution", "miopen_convolution_relu"),
    *("miopen_convolution_add_relu", "miopen_depthwise_convolution", "mkldnn_convolution", "_conv_depthwise2d"),
    *("conv_depthwise3d", "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv3d_forward"),
    "_nnpack_spatial_convolution",
)
_TRANSPOSED = (
    *("cudnn_convolution_transpose", "miopen_convolution_transpose", "slow_conv_transpose2d", "slow_conv_transpose3d"),
)
_QUANTIZED_LINEARS = (
    *("quantized.linear", "quantized.linear_relu", "quantized.linear_leaky_relu", "quantized.linear_tanh"),
    *("quantized.linear_dynamic", "quantized.linear_relu_dynamic", "quantized.linear_dynamic_fp16"),
    *("onednn.qlinear_pointwise", "onednn.linear_dynamic_fp16", "onednn.linear_relu_dynamic_fp16"),
    *("mkldnn._linear_pointwise", "mkl._mkl_linear"),
)


def _on_shapes(formulas: Mapping[str, Formula]) -> dict[str, Formula]:
    return {name: shape_wrapper(formula) for name, formula in formulas.items()}


_OF_ATEN = _on_shapes(
    {
        **dict.fromkeys(_INTO_RESULT, _into_result),
        **dict.fromkeys(("addmv", "addbmm", "_addmm_activation"), _added),
        **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped_product),
        **dict.fromkeys(_CONVOLUTIONS, _convolution),
        **dict.fromkeys(_TRANSPOSED, _transposed_convolution),
        "conv_tbc": _convolution_tbc,
        "_foreach_mm": _pairs,
        "_trilinear": _trilinear,
        **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _recurrent),
        **dict.fromkeys(("_cudnn_rnn_backward", "miopen_rnn_backward"), _backward_of(_recurrent)),
        "mkldnn_rnn_layer": _recurrent_layer,
        "mkldnn_rnn_layer_backward": _backward_of(_recurrent_layer),
    }
)
_OF_LIBRARIES = _on_shapes(
    {
        **dict.fromkeys(_QUANTIZED_LINEARS, _into_result),
        **dict.fromkeys(
            ("symm_mem.fused_all_gather_matmul", "symm_mem.fused_all_gather_scaled_matmul"), _gathered_product
        ),
        "symm_mem.fused_matmul_reduce_scatter": _scattered_product,
        "symm_mem.fused_scaled_matmul_reduce_scatter": _scattered_product,
        "symm_mem._async_input_mm": _scattered_product,
        "transformers.grouped_mm_fallback": _grouped_product,
        "transformers.grouped_mm_fallback_backward": _backward_of(_grouped_product),
    }
)
_SDPA = "_scaled_dot_product_flash_attention"
_LIKE = {
    f"{_SDPA}_for_cpu": _SDPA,  # torch counts it from 2.15
    f"{_SDPA}_for_cpu_backward": f"{_SDPA}_backward",
    "_scaled_dot_product_fused_attention_overrideable": _SDPA,
    "_scaled_dot_product_fused_attention_overrideable_backward": f"{_SDPA}_backward",
    "_scaled_dot_product_attention_math_for_mps": _SDPA,
    "_triton_scaled_dot_attention": _SDPA,
    "flex_attention": _SDPA,  # torch counts it from 2.12
}
"""Attention that does the work of another operator, with query, key and value in the same places."""


def _on_groups(formula: Any, first: int) -> Formula:
    """A formula of attention where each head of keys and values serves several of queries; torch's own take that from
    2.13. ``first``: the place of the query."""

    def count(*shapes: Any, **kwargs: Any) -> Any:
        heads = shapes[first][1]
        several = range(first + 1, first + 3)
        same = [
            (shape[0], heads, *shape[2:]) if at in several and heads % shape[1] == 0 else shape
            for at, shape in enumerate(shapes)
        ]
        return formula.__wrapped__(*same, **kwargs)

    return shape_wrapper(count)  # type: ignore[no-any-return]


_ON_GROUPS: dict[Any, Formula] = {
    flop_registry[operator]: _on_groups(flop_registry[operator], first)
    for operator, first in ((getattr(torch.ops.aten, _SDPA), 0), (getattr(torch.ops.aten, f"{_SDPA}_backward"), 1))
}

_WRAPPER = shape_wrapper(_convolution).__code__


def count_call(formula: Formula, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> int | None:
    """The operations of a call that returns ``value``; symbolic sizes count with their hint, nodes among the arguments
    have their values. None where the formula cannot deal with it.

    Most formulas work on shapes, behind a wrapper that looks through every argument for tensors; handed the shapes, the
    wrapped function itself is many times faster and cannot add guards on symbolic sizes. The others take tensors.
    """
    on_shapes = formula.__wrapped__ if getattr(formula, "__code__", None) is _WRAPPER else None  # type: ignore[attr-defined]
    read, made = (_empty, "out_val") if on_shapes is None else (_shape, "out_shape")
    try:
        named = {name: mapped(each, read) for name, each in kwargs.items()} | {made: mapped(value, read)}
        return graphs.hint((on_shapes or formula)(*[mapped(each, read) for each in args], **named))
    except Exception:  # a formula that cannot deal with a call, such as one whose work depends on the data
        return None


def mapped(argument: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
    """An argument of a call with something in place of each tensor, nodes looked through and sizes as numbers."""
    if isinstance(argument, fx.Node):
        return mapped(graphs.value_of(argument.meta), tensor)
    if isinstance(argument, torch.Tensor):
        return tensor(argument)
    if isinstance(argument, (tuple, list)):
        return [mapped(part, tensor) for part in argument]
    if isinstance(argument, dict):
        return {name: mapped(part, tensor) for name, part in argument.items()}
    return graphs.hint(argument) if isinstance(argument, torch.SymInt) else argument


def _shape(tensor: torch.Tensor) -> torch.Size:
    return graphs.hinted_shape(tensor.shape)


_TAKES_FIRST = frozenset((SAVES_RANDOM_STATE, "with_effects"))
"""Higher-order operators that run one operator and return something before its result."""
_CARRIERS = _TAKES_FIRST | {*RUNS_WITH_RANDOM_STATE, "out_dtype", "run_dtensor_rng_op"}
"""Higher-order operators that run the operator among their arguments, on those after it."""
_FUNCTIONALIZED = frozenset(("auto_functionalized", "auto_functionalized_v2"))
"""Higher-order operators that run an operator on keyword arguments; they return its results, then what it wrote."""
_TRITON = frozenset(("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"))
_ONCE = frozenset(
    (
        *("invoke_subgraph", "wrap", "wrap_with_autocast", "wrap_with_set_grad_enabled", "tag_activation_checkpoint"),
        *("wrap_activation_checkpoint", "strict_mode", "hints_wrapper", "local_map_hop", "dynamo_bypassing_wrapper"),
        *("invoke_quant", "invoke_quant_packed", "autograd_function_apply", "run_const_graph"),
    )
)
"""Higher-order operators that run their first graph once."""
_EACH = frozenset(("map_impl", "scan"))  # those that run it for each element of the first dimension
_POINTWISE = frozenset(("print", "inline_asm_elementwise", "foreach_map"))


@frozen
class Work:
    flops: int = 0
    uncounted: str = ""
    """The operators whose work is not in :attr:`flops`; empty where none is."""


NONE = Work()


@define(eq=False)
class WorkCounter:
    """Counts the work of calls, graph after graph; what many calls have in common is counted once."""

    _bodies: dict[fx.GraphModule, Work] = field(factory=dict)
    _composites: dict[str, Work] = field(factory=dict)

    def of(self, node: fx.Node) -> Work:
        if node.op != "call_function":
            return NONE
        if isinstance(node.target, graphs.HigherOrderOperator):
            return self._of_higher_order(node)
        return self._of_call(node.target, node.args, node.kwargs, graphs.value_of(node.meta))

    def of_graph(self, body: fx.GraphModule) -> Work:
        """All that a graph runs, once."""
        if body not in self._bodies:
            self._bodies[body] = NONE  # a graph that calls itself ends here
            self._bodies[body] = _sum([self.of(node) for node in body.graph.nodes])
        return self._bodies[body]

    def _of_call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> Work:
        formula = formula_for(target)
        if formula is not None:
            flops = count_call(formula, args, kwargs, value)
            if flops is not None:
                return Work(flops)
        elif not _could_do_matrix_work(target):
            return NONE
        if isinstance(target, graphs.OpOverload):
            return self._decomposed(target, args, kwargs)
        return Work(0, describe(target).name)

    def _decomposed(self, target: graphs.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Work:
        """The work of the operators that torch composes an operator of, found without data, once for the same sizes."""
        unknown = Work(0, describe(target).name)
        if describe(target).name.partition(".")[0] not in KNOWN:
            return unknown
        key = repr((target, *(mapped(each, _summary) for each in (list(args), dict(kwargs)))))
        if key not in self._composites:
            self._composites[key] = _of_parts(target, args, kwargs) or unknown
        return self._composites[key]

    def _of_higher_order(self, node: fx.Node) -> Work:
        name, value = describe(node.target).name.removeprefix("higher_order."), graphs.value_of(node.meta)
        formula = formula_for(node.target)
        if formula is not None and (flops := count_call(formula, node.args, node.kwargs, value)) is not None:
            return Work(flops)
        if name in _POINTWISE:
            return NONE
        unknown = Work(0, describe(node.target).name)
        if name in _CARRIERS or name in _FUNCTIONALIZED:
            return self._carried(node, name, value) or unknown
        if name in _TRITON:
            return _of_kernel(node, unknown)
        bodies = _bodies(node)
        if not bodies:
            return unknown if _has_tensor(value) else NONE
        works = [self.of_graph(body) for body in bodies]
        if name in _ONCE:
            return works[0]
        if name == "cond":  # one of its branches runs: the larger, as torch counts it
            return max(works, key=lambda work: (bool(work.uncounted), work.flops))
        if name in _EACH and (length := _length(node)) is not None:
            return Work(works[0].flops * length, works[0].uncounted)
        return NONE if all(work == NONE for work in works) else unknown

    def _carried(self, node: fx.Node, name: str, value: Any) -> Work | None:
        at = next((at for at, each in enumerate(node.args) if isinstance(each, graphs.OpOverload)), None)
        if at is None:
            return None
        target, args, kwargs = node.args[at], node.args[at + 1 :], dict(node.kwargs)
        assert isinstance(target, graphs.OpOverload)
        if name in _FUNCTIONALIZED:
            names = [each.name for each in graphs.schema_of(target).arguments]
            args, kwargs = tuple(kwargs[each] for each in names if each in kwargs), {}
        elif name in RUNS_WITH_RANDOM_STATE:
            kwargs.pop("rng_state", None)
        elif name == "out_dtype":
            args = args[1:]
        if isinstance(value, (tuple, list)) and name in _TAKES_FIRST:
            value = value[1] if len(value) == 2 else value[1:]
        elif isinstance(value, (tuple, list)) and name in _FUNCTIONALIZED and value:
            value = value[0]
        return self._of_call(target, args, kwargs, value)


def _sum(works: Sequence[Work]) -> Work:
    missing = dict.fromkeys(work.uncounted for work in works if work.uncounted)
    return Work(sum(work.flops for work in works), ", ".join(missing))


@cache
def _could_do_matrix_work(target: Any) -> bool:
    """By its name and, of an operator of another library, by its schema: a view, a collective, an operator tagged as
    pointwise or as a reduction, and one that neither returns nor writes a tensor does none."""
    operator = describe(target)
    if not could_do_matrix_work(operator.name):
        return False
    if isinstance(target, StandIn):
        return not operator.flags & Category.COLLECTIVE
    if not isinstance(target, graphs.OpOverload) or target.namespace in KNOWN:
        return True
    tags = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}
    makes = bool(operator.written) or any("Tensor" in str(each.type) for each in graphs.schema_of(target).returns)
    return makes and not operator.flags & (Category.VIEW | Category.COLLECTIVE) and tags.isdisjoint(target.tags)


class _Parts(DispatchMode):
    """Counts what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = formula_for(func)
        if formula is None:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        value = func(*args, **kwargs)
        flops = None if formula is None else count_call(formula, args, kwargs, value)
        if flops is not None:
            self.works.append(Work(flops))
        elif formula is not None or _could_do_matrix_work(func):
            self.works.append(Work(0, describe(func).name))
        return value


def _of_parts(target: graphs.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Work | None:
    """None where the operator is not composed of others, or cannot be run without data."""
    parts = _Parts()
    try:
        with graphs.outside_of_modes():
            given, named = mapped(list(args), _empty), mapped(dict(kwargs), _empty)
            with parts:
                found = target.decompose(*given, **named)
    except Exception:  # whatever an operator raises that needs data, or another device
        return None
    return None if found is NotImplemented else _sum(parts.works)


def _of_kernel(node: fx.Node, unknown: Work) -> Work:
    """The work of a Triton kernel, by the formula that is registered for it."""
    kernel = graphs.triton_kernel(node.kwargs.get("kernel_idx"))
    if kernel is None:
        return unknown
    formula = formula_for(kernel)
    flops = None if formula is None else count_call(formula, node.args, node.kwargs, None)
    return Work(0, f"triton.{getattr(kernel, '__name__', 'kernel')}") if flops is None else Work(flops)


def _bodies(node: fx.Node) -> list[fx.GraphModule]:
    """The graphs among the arguments of a call."""
    owner = node.graph.owning_module
    found = []
    for read in node.all_input_nodes:
        if read.op == "get_attr" and owner is not None:
            body = getattr(owner, str(read.target), None)
            if isinstance(body, fx.GraphModule):
                found.append(body)
    return found


def _length(node: fx.Node) -> int | None:
    """The elements that a map or a scan iterates over: the first dimension of its input."""
    place = 2 if describe(node.target).name.endswith(".scan") else 1
    sizes: list[int] = []
    value = node.args[place] if len(node.args) > place else None
    mapped(value, lambda each: sizes.append(graphs.hinted_shape(each.shape)[0]))
    return sizes[0] if sizes else None


def _has_tensor(value: Any) -> bool:
    found: list[bool] = []
    mapped(value, lambda each: found.append(True))
    return bool(found)


def _summary(tensor: torch.Tensor) -> Any:
    return tuple(graphs.hinted_shape(tensor.shape)), tensor.dtype


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(graphs.hinted_shape(tensor.shape), dtype=tensor.dtype, device="meta")


_WAITS = ("wait_tensor", "wait_tensors")


def plain_name(operator: str) -> str:
    """An operator without its overload and without the mark of in-place writes."""
    namespace, _, rest = operator.partition(".")
    return f"{namespace}.{rest.partition('.')[0].removesuffix('_').removesuffix('_out')}"


def is_wait(operator: str) -> bool:
    """``operator``: with its namespace and, it may be, its overload."""
    return plain_name(operator).endswith(_WAITS)


def is_product(node: fx.Node) -> bool:
    """A node runs as a separate kernel: matrix products, attention, convolutions. A product with a dimension of 1 may
    become part of any kernel."""
    if node.op != "call_function" or is_communication(node):
        return False
    if not describe(node.target).flags & Category.COMPUTE and formula_for(node.target) is None:
        return False
    shapes = [tuple(getattr(each.meta.get("val"), "shape", ())) for each in node.all_input_nodes]
    return not any(isinstance(length, int) and length == 1 for shape in shapes for length in shape[-2:])


def is_communication(node: fx.Node) -> bool:
    """A node starts a collective or awaits one."""
    if node.op != "call_function":
        return False
    operator = describe(node.target)
    return bool(operator.flags & Category.COLLECTIVE) or is_wait(operator.name)
