"""The private names of torch that tracing a step needs; tensors made of tensors, flattened and rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from attrs import frozen
from torch import _guards, fx
from torch._subclasses import fake_tensor, functional_tensor
from torch.utils import _python_dispatch, _pytree, checkpoint

from policylang.torch_compat.graphs import require

tree_flatten: Callable[[object], tuple[list[Any], Any]] = _pytree.tree_flatten
"""Leaves and structure. The public ``torch.utils.pytree`` has no readable text for a structure."""
tree_leaves: Callable[..., list[Any]] = _pytree.tree_leaves
"""The leaves alone, None among them: the public ``torch.utils.pytree`` may treat None as an empty container."""
tree_unflatten: Callable[[list[Any], Any], Any] = _pytree.tree_unflatten
is_wrapper_subclass: Callable[[object], bool] = _python_dispatch.is_traceable_wrapper_subclass
"""True if it is a tensor made of tensors that lists them (``__tensor_flatten__``): a DTensor, say."""


def tree_paths(tree: object) -> list[str]:
    """The path of each leaf, ``[0]['ids']``."""
    return [_pytree.keystr(path) for path, _leaf in _pytree.tree_flatten_with_path(tree)[0]]


def fake_tensor_mode() -> Any:
    """Tensors with shapes and no data. Sizes that depend on data become symbols; real constants are let in."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return fake_tensor.FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


fixed_size_fake_mode: type[Any] = fake_tensor.FakeTensorMode
"""A fake mode without symbols: every size is a number, and an operator whose size depends on data is refused."""


def in_one_fake_mode(values: Any) -> Any:
    """Values that torch can compute with together: ``make_fx`` on real tensors records each under a separate mode."""
    fakes = [each for each in tree_leaves(values) if isinstance(each, fake_tensor.FakeTensor)]
    if len({id(each.fake_mode) for each in fakes}) < 2:
        return values

    def moved(value: Any) -> Any:
        if not isinstance(value, fake_tensor.FakeTensor):
            return value
        with fakes[0].fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    return _pytree.tree_map(moved, values)


def tracing_context(fake_mode: Any) -> AbstractContextManager[Any]:
    """Announces a trace: higher-order operators look the fake mode up there."""
    return _guards.tracing(_guards.TracingContext(fake_mode))


functionalized: type[Any] = functional_tensor.FunctionalTensorMode
"""Under it, operators on tensors made by :func:`to_functional` are traced as functional ones, as AOTAutograd traces a
joint graph. ``torch.func.functionalize`` is a functorch level, and ``torch.autograd.grad`` does not see through it."""
to_functional: Callable[[torch.Tensor], torch.Tensor] = functional_tensor.FunctionalTensor.to_functional
"""Call under :data:`functionalized`."""


def below_functionalization() -> AbstractContextManager[Any]:
    """Disables the dispatcher's functionalization key, except where the mode sets it."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))


def from_functional(value: torch.Tensor) -> torch.Tensor:
    """The traced value; of a functional tensor that was never written to, the very one it was made from."""
    return value.from_functional() if isinstance(value, functional_tensor.FunctionalTensor) else value


_INHERITED = object()


@contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Within, each ``(object, name, value)`` replaces the attribute that the object, module or class had."""
    before = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in attributes]
    for owner, name, value in attributes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def autograd_engine_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> AbstractContextManager[None]:
    """Replaces the one entry point of the autograd engine, behind ``torch.autograd.grad`` and ``backward``."""
    doors = (torch.autograd, torch.autograd.graph)
    for door in doors:
        require(door, ["_engine_run_backward"], "traces backward passes with torch 2.11 and later")
    engine: Any = torch.autograd.graph._engine_run_backward
    replacement = wraps(engine)(wrap(engine))
    return replaced(*((door, "_engine_run_backward", replacement) for door in doors))


def sequence_number(grad_fn: Any) -> int:
    """The number that a backward function shares with the forward operator that made it: ``node.meta["seq_nr"]``."""
    return grad_fn._sequence_nr()


def gradient_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks given to ``register_hook``, in order; no public function lists them."""
    return list((parameter._backward_hooks or {}).values())


def accumulation_hooks(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks given to ``register_post_accumulate_grad_hook``, in order."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def checkpoint_generator() -> str:
    """The name in ``torch.utils.checkpoint`` of the generator around the function of a non-reentrant checkpoint."""
    name = "_checkpoint_without_reentrant_generator"
    require(checkpoint, (name, "CheckpointFunction"), "reads checkpoint regions with torch 2.11 and later")
    return f"{name}_impl" if hasattr(checkpoint, f"{name}_impl") else name  # from 2.15 the other one only calls it


def checkpoint_replaced(
    non_reentrant: Callable[..., Iterator[None]], reentrant: Callable[..., object]
) -> AbstractContextManager[None]:
    """Replaces what ``torch.utils.checkpoint.checkpoint`` does around its function.

    ``non_reentrant(function, preserve_rng_state, context_fn, ...)`` is a generator that yields where the function
    runs; ``reentrant(function, preserve_rng_state, *args)`` runs it. Replacing these two rather than ``checkpoint``
    reaches the callers that imported it by name.
    """

    def with_arguments(function: Any, args: Any, kwargs: Any, *, preserve_rng_state: bool = True, **rest: Any) -> Any:
        return non_reentrant(function, preserve_rng_state, **rest)

    name = checkpoint_generator()
    generator = with_arguments if name.endswith("_impl") else non_reentrant
    function = type("CheckpointFunction", (), {"apply": staticmethod(reentrant)})
    return replaced((checkpoint, name, generator), (checkpoint, "CheckpointFunction", function))


def rename_node(node: fx.Node, name: str) -> None:
    """Names a node as nearly so as its graph's other names allow; setting ``Node.name`` does not look at them."""
    node._rename(name)
    if node.op == "placeholder":
        node.target = node.name


def input_descriptor(kind: Literal["user", "parameter", "buffer"], name: str, position: int) -> object:
    """The descriptor that AOTAutograd writes under ``node.meta["desc"]`` of a graph input."""
    from torch._functorch._aot_autograd import descriptors

    if kind == "user":
        return descriptors.PlainAOTInput(position)
    return (descriptors.ParamAOTInput if kind == "parameter" else descriptors.BufferAOTInput)(name)


def fake_mode_of(values: Sequence[Any]) -> Any | None:
    """The mode of the fake tensors among the values: a model without data is traced in the mode it was made in."""
    return next((value.fake_mode for value in values if isinstance(value, fake_tensor.FakeTensor)), None)


def fake_tensors(mode: Any, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Placeholders of the same shapes, without gradients. Memory that is shared stays shared. Call under the mode."""
    detached = [value.detach() for value in values]
    return [v if isinstance(v, fake_tensor.FakeTensor) else mode.from_tensor(v, static_shapes=True) for v in detached]


def fakes_on(mode: Any, values: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors without data on a device, like tensors wherever they are. Memory that is shared stays shared."""
    from torch.utils._mode_utils import no_dispatch

    storages: dict[int, torch.UntypedStorage] = {}
    with no_dispatch(), torch.no_grad():
        made = [_without_data(value, storages) for value in values]
    return [fake_tensor.FakeTensor(mode, each, device) for each in made]


def copied(value: torch.Tensor) -> torch.Tensor | None:
    """A copy on the CPU of a tensor that has data, beside a trace."""
    from torch.utils._mode_utils import no_dispatch

    if value.device.type == "meta" or isinstance(value, fake_tensor.FakeTensor):
        return None
    with no_dispatch(), torch.no_grad():
        return value.detach().to("cpu", copy=True)


def computed(func: Any, args: Any, kwargs: Any, values: Mapping[int, torch.Tensor]) -> Any:
    """What an operator gives for real tensors on the CPU, by the ``id`` of those that are traced, beside a trace."""
    from torch.utils._mode_utils import no_dispatch

    def real(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else values.get(id(value), value)

    args, kwargs = _pytree.tree_map(real, (args, kwargs))
    with no_dispatch(), torch.no_grad():
        return func(*args, **kwargs)


def _without_data(value: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    original = value.untyped_storage()
    key = int(original._cdata)
    if key not in storages:
        storages[key] = torch.empty(int(original.nbytes()), dtype=torch.uint8, device="meta").untyped_storage()
    empty = torch.empty(0, dtype=value.dtype, device="meta")
    return empty.set_(storages[key], value.storage_offset(), value.shape, value.stride())


def deviceless_fake_mode() -> Any:
    """A :func:`fake_tensor_mode` without devices; an operator that has no kernel for shapes alone is refused, and not
    run on the device."""
    mode = fake_tensor_mode()
    mode.allow_fallback_kernels = False
    return mode


def data_dependence_errors() -> tuple[type[Exception], ...]:
    """The errors of a trace without data where Python asks for a value, or for a size that depends on one."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    of_fakes = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException
    return *of_fakes, GuardOnDataDependentSymNode


def is_device_mismatch(error: Exception) -> bool:
    """True if fake tensors raised it for tensors of several devices: a RuntimeError before torch 2.13."""
    if (kind := getattr(fake_tensor, "FakeTensorDeviceMismatchError", None)) is not None:
        return isinstance(error, kind)
    return isinstance(error, RuntimeError) and "found two different devices" in str(error)


def unknown_size_errors() -> tuple[type[Exception], ...]:
    """The errors of a trace without data for an operator that has no kernel for shapes alone."""
    return (fake_tensor.UnsupportedOperatorException,)


def compiling() -> AbstractContextManager[None]:
    """Under it ``torch.compiler.is_compiling()`` is true: models take the path without data-dependent shortcuts."""
    require(torch.compiler, ["_is_compiling_flag"], "traces with it set")
    return replaced((torch.compiler, "_is_compiling_flag", True))


def into_compiled_functions() -> AbstractContextManager[None]:
    """Under it a trace sees what a compiled function calls, as it does where :func:`compiling`."""
    from torch._dynamo import config

    require(config, ["error_on_nested_fx_trace"], "traces with it off")
    patched: AbstractContextManager[None] = config.patch(error_on_nested_fx_trace=False)
    return patched


@frozen(eq=False)
class SubclassLayout:
    """The layout of a tensor that is made of plain ones; ``parts`` is None for a plain one."""

    kind: type | None = None
    context: Any = None
    parts: tuple[tuple[str, SubclassLayout], ...] | None = None
    fixed: tuple[tuple[str, Any], ...] = ()
    """Its parts that are no tensors: a DTensor's device mesh. They are no inputs of a graph."""
    size: Any = None
    stride: Any = None

    @property
    def size_in_parts(self) -> int:
        return 1 if self.parts is None else sum(part.size_in_parts for _, part in self.parts)


PLAIN = SubclassLayout()


def take_apart(values: Sequence[Any]) -> tuple[list[Any], list[SubclassLayout]]:
    """The plain values, in order, and one layout a value."""
    plain: list[Any] = []
    return plain, [_take_apart(value, plain) for value in values]


def _take_apart(value: Any, plain: list[Any]) -> SubclassLayout:
    if type(value) in (torch.Tensor, torch.nn.Parameter) or not is_wrapper_subclass(value):
        plain.append(value)
        return PLAIN
    names, context = value.__tensor_flatten__()
    inner = [(name, getattr(value, name)) for name in names]
    parts = tuple((name, _take_apart(part, plain)) for name, part in inner if isinstance(part, torch.Tensor))
    fixed = tuple((name, part) for name, part in inner if not isinstance(part, torch.Tensor))
    return SubclassLayout(type(value), context, parts, fixed, value.size(), value.stride())


def put_together(plain: Sequence[Any], layouts: Sequence[SubclassLayout]) -> list[Any]:
    """The inverse of :func:`take_apart`."""
    left = iter(plain)
    return [_put_together(left, layout) for layout in layouts]


def _put_together(plain: Iterator[Any], layout: SubclassLayout) -> Any:
    if layout.parts is None:
        return next(plain)
    inner = dict(layout.fixed)
    inner.update((name, _put_together(plain, part)) for name, part in layout.parts)
    return layout.kind.__tensor_unflatten__(inner, layout.context, layout.size, layout.stride)  # type: ignore[union-attr]
