"""The operations of every call of a graph, and what of its work is not counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from attrs import define, field, frozen
from torch import fx

from policylang.operators.categories import StandIn, describe
from policylang.operators.flops import count_call, formula_for, mapped
from policylang.operators.matrix_work import KNOWN, could_do_matrix_work
from policylang.operators.names import RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE, Category
from policylang.torch_compat.eager import DispatchMode
from policylang.torch_compat.graphs import (
    HigherOrderOperator,
    OpOverload,
    hinted_shape,
    outside_of_modes,
    schema_of,
    triton_kernel,
    value_of,
)

_TAKES_FIRST = frozenset((SAVES_RANDOM_STATE, "with_effects"))
"""Higher-order operators that run one operator and return something before its result."""
_CARRIERS = _TAKES_FIRST | {*RUNS_WITH_RANDOM_STATE, "out_dtype", "run_dtensor_rng_op"}
"""Higher-order operators that run the operator among their arguments, on those after it."""
_FUNCTIONALIZED = frozenset(("auto_functionalized", "auto_functionalized_v2"))
"""The same, with its arguments by name; what they return are its results and then what it wrote."""
_TRITON = frozenset(("triton_kernel_wrapper_mutation", "triton_kernel_wrapper_functional"))
_ONCE = frozenset(
    (
        *("invoke_subgraph", "wrap", "wrap_with_autocast", "wrap_with_set_grad_enabled", "tag_activation_checkpoint"),
        *("wrap_activation_checkpoint", "strict_mode", "hints_wrapper", "local_map_hop", "dynamo_bypassing_wrapper"),
        *("invoke_quant", "invoke_quant_packed", "autograd_function_apply", "run_const_graph"),
    )
)
"""Higher-order operators that run their first graph once."""
_EACH = frozenset(("map_impl", "scan"))
"""Those that run it for each element of the first dimension."""
_POINTWISE = frozenset(("print", "inline_asm_elementwise", "foreach_map"))


@frozen
class Work:
    flops: int = 0
    uncounted: str = ""
    """The operators whose work is not in :attr:`flops`; empty where none is."""


NONE = Work()


@define(eq=False)
class WorkCounter:
    """Of one graph after the other; what many calls have in common is worked out once."""

    _bodies: dict[fx.GraphModule, Work] = field(factory=dict)
    _composites: dict[str, Work] = field(factory=dict)

    def of(self, node: fx.Node) -> Work:
        if node.op != "call_function":
            return NONE
        if isinstance(node.target, HigherOrderOperator):
            return self._of_higher_order(node)
        return self._of_call(node.target, node.args, node.kwargs, value_of(node.meta))

    def of_graph(self, body: fx.GraphModule) -> Work:
        """Of all that a graph runs, once."""
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
        if isinstance(target, OpOverload):
            return self._decomposed(target, args, kwargs)
        return Work(0, describe(target).name)

    def _decomposed(self, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Work:
        """Of an operator that torch composes of others: theirs. Found out without data, once for the same sizes."""
        unknown = Work(0, describe(target).name)
        if describe(target).name.partition(".")[0] not in KNOWN:
            return unknown
        key = repr((target, *(mapped(each, _summary) for each in (list(args), dict(kwargs)))))
        if key not in self._composites:
            self._composites[key] = _of_parts(target, args, kwargs) or unknown
        return self._composites[key]

    def _of_higher_order(self, node: fx.Node) -> Work:
        name, value = describe(node.target).name.removeprefix("higher_order."), value_of(node.meta)
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
        at = next((at for at, each in enumerate(node.args) if isinstance(each, OpOverload)), None)
        if at is None:
            return None
        target, args, kwargs = node.args[at], node.args[at + 1 :], dict(node.kwargs)
        assert isinstance(target, OpOverload)
        if name in _FUNCTIONALIZED:
            names = [each.name for each in schema_of(target).arguments]
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
    if not isinstance(target, OpOverload) or target.namespace in KNOWN:
        return True
    tags = {torch.Tag.pointwise, getattr(torch.Tag, "reduction", torch.Tag.pointwise)}
    makes = bool(operator.written) or any("Tensor" in str(each.type) for each in schema_of(target).returns)
    return makes and not operator.flags & (Category.VIEW | Category.COLLECTIVE) and tags.isdisjoint(target.tags)


class _Parts(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
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


def _of_parts(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Work | None:
    """None where the operator is not composed of others, or cannot be run without data."""
    parts = _Parts()
    try:
        with outside_of_modes():
            given, named = mapped(list(args), _empty), mapped(dict(kwargs), _empty)
            with parts:
                found = target.decompose(*given, **named)
    except Exception:  # whatever an operator raises that needs data, or another device
        return None
    return None if found is NotImplemented else _sum(parts.works)


def _of_kernel(node: fx.Node, unknown: Work) -> Work:
    """Of a Triton kernel: by the formula that is registered for it."""
    kernel = triton_kernel(node.kwargs.get("kernel_idx"))
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
    """How many elements a map or a scan goes through: the first dimension of what it is given to go through."""
    place = 2 if describe(node.target).name.endswith(".scan") else 1
    sizes: list[int] = []
    mapped(node.args[place] if len(node.args) > place else None, lambda each: sizes.append(hinted_shape(each.shape)[0]))
    return sizes[0] if sizes else None


def _has_tensor(value: Any) -> bool:
    found: list[bool] = []
    mapped(value, lambda each: found.append(True))
    return bool(found)


def _summary(tensor: torch.Tensor) -> Any:
    return tuple(hinted_shape(tensor.shape)), tensor.dtype


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(hinted_shape(tensor.shape), dtype=tensor.dtype, device="meta")
