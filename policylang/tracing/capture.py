"""Traces forward, loss and gradients of a step into one flat graph, and marks its nodes meanwhile: backward regions,
module paths, the user's checkpoints as tags. It is functional; one for eager writes in place what the model does.

Traced as it is, a ``torch.utils.checkpoint`` region would be recomputed in the trace itself, where no policy could
reach it, or (with a policy of its own, ``context_fn``) leave its tag on every node that follows, backward included.
Here the region runs once, its nodes carry ``recompute`` and ``ac_graph_id``, as under ``torch.compile``, and nothing
else does. A checkpoint of policylang's own is left out: the policy that the graph is given decides there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from attrs import define, field, frozen
from torch import Tensor, fx, nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy

from policylang.errors import PolicyError
from policylang.graph import marks
from policylang.graph.facts import InputKind
from policylang.graph.marks import BACKWARD, EPILOGUE, FORWARD, PHASE, custom
from policylang.graph.phases import is_seed
from policylang.torch_compat import tracing
from policylang.torch_compat.absent_cuda import absent_cuda
from policylang.torch_compat.distributed import traced_collectives
from policylang.torch_compat.eager import DispatchMode, WeakTensorKeyDictionary
from policylang.torch_compat.graphs import OpOverload, schema_of
from policylang.tracing import step
from policylang.tracing.target_device import UNKNOWN_DEVICE, TargetDevice, attention_on

REGION = "policylang_region"
"""``custom`` key while tracing: the number of the engine call, from 0, that a node was made in."""

WRITTEN_BY = "policylang_written_by"
"""``custom`` key while tracing: the operator, of those that write in place, for which a node was made."""

_MOST_ELEMENTS = 2**22
"""The largest tensor whose value is computed beside a trace."""

UNKNOWN = -1
"""The ``seq_nr`` of a backward node that is no operator's derivative: the accumulation of two gradients. torch gives
it to forward nodes as well, those that a thread makes before its first backward function."""


class BackwardRegions:
    """Numbers the calls of the autograd engine."""

    def __init__(self) -> None:
        self.inside = False
        self.count = 0

    def marked(self) -> AbstractContextManager[None]:
        """Under it, each outermost call of the autograd engine is a separate region. A call with ``create_graph`` is
        none: its results are differentiated in turn, as a Jacobian in a forward is, so they are part of the forward.
        Nor is a call inside a call."""
        return tracing.autograd_engine_replaced(self._wrap)

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Under it, sums of what several calls made are part of the last one."""
        with traceback.annotate({REGION: self.count - 1}), _sequence_numbers(()):
            yield

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            # _engine_run_backward(outputs, grads, keep_graph, create_graph, inputs, ...)
            if self.inside or kwargs.get("create_graph", len(args) > 2 and args[2]):
                return original(outputs, *args, **kwargs)
            self.inside = True
            try:
                with traceback.annotate({REGION: self.count}), _sequence_numbers(outputs):
                    return original(outputs, *args, **kwargs)
            finally:
                self.inside = False
                self.count += 1

        return run


@contextmanager
def _sequence_numbers(outputs: Sequence[Any]) -> Iterator[None]:
    """Under it, a node carries the ``seq_nr`` of the backward function that made it, or :data:`UNKNOWN`."""
    handles = []
    for function in _backward_functions(outputs):
        number = tracing.sequence_number(function)
        handles.append(function.register_prehook(lambda _gradients, at=number: traceback.set_grad_fn_seq_nr(at)))
        handles.append(function.register_hook(lambda _inputs, _outputs: traceback.reset_grad_fn_seq_nr()))
    traceback.set_grad_fn_seq_nr(UNKNOWN)
    try:
        yield
    finally:
        traceback.reset_grad_fn_seq_nr()
        for handle in handles:
            handle.remove()


def _backward_functions(outputs: Sequence[Any]) -> list[Any]:
    """Every function of the autograd graph below the outputs, once."""
    roots = [value.grad_fn for value in outputs if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    seen = dict.fromkeys(roots)
    queue = deque(seen)
    while queue:
        for function, _index in queue.popleft().next_functions:
            if function is not None and function not in seen:
                seen[function] = None
                queue.append(function)
    return list(seen)


STACK = "nn_module_stack"
"""The key Dynamo uses on forward nodes: path to ``(path, class)``, outermost first."""

FORWARD_STACK = "fwd_nn_module_stack"
"""The key on backward nodes: the modules of the forward operator they are the derivative of."""

TAGS = ("recompute", "ac_graph_id")
_OF_A_NODE = (*TAGS, STACK, FORWARD_STACK, "autograd_backward", "in_grad_fn", "grad_fn_seq_nr", "partitioner_tag")


@contextmanager
def without_leaks() -> Iterator[None]:
    """Begins without metadata of another trace's nodes: torch copies existing metadata to every node. A checkpoint with
    a policy that was traced without Dynamo leaves its tag there for good. The user's ``annotate`` around a trace is
    intended, and stays. Call under ``preserve_node_meta``, which restores the metadata."""
    meta = traceback.get_current_meta()
    for key in (*_OF_A_NODE, "stack_trace"):
        meta.pop(key, None)
    yield


def module_paths(model: nn.Module) -> AbstractContextManager[None]:
    """Under it, every node traced inside a submodule's call carries the path of its modules. ``nn.Module.__call__`` is
    replaced rather than hooks registered: what a module's hooks compute (FSDP's gathers) belongs to the module too, and
    a module whose forward raises is left too."""
    paths = {id(module): path for path, module in model.named_modules()}
    original = nn.Module.__call__

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        outer = traceback.get_current_meta().get(STACK)
        with _carrying({STACK: {**(outer or {}), path: (path, type(module))}}):
            return original(module, *args, **kwargs)

    return tracing.replaced((nn.Module, "__call__", call))


def checkpoint_regions(followed: list[Any]) -> AbstractContextManager[None]:
    """Under it, checkpoint regions are tagged, not recomputed. Regions are numbered from 0. ``followed`` takes what
    policylang's own checkpoints follow, each policy once; these are not tagged."""
    regions = _Regions(followed)
    return tracing.checkpoint_replaced(regions.non_reentrant, regions.reentrant)


class _Regions:
    def __init__(self, followed: list[Any]) -> None:
        self.count = 0
        self.followed = followed

    def non_reentrant(
        self,
        _function: Callable[..., Any],
        _preserve_rng_state: bool = True,
        context_fn: Callable[[], tuple[Any, Any]] = lambda: (nullcontext(), nullcontext()),
        *_args: Any,
        **_kwargs: Any,
    ) -> Iterator[None]:
        session = marks.session_of(context_fn)
        if session is not None:
            if session.policy not in self.followed:
                self.followed.append(session.policy)
            yield
            return
        forward_context, _recompute_context = context_fn()
        with self._tagged() as number:
            if hasattr(forward_context, "ac_graph_id"):
                forward_context.ac_graph_id = number
            with forward_context:
                yield

    def reentrant(self, function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        with self._tagged():
            return function(*args)

    @contextmanager
    def _tagged(self) -> Iterator[int]:
        """Nested regions: a node belongs to the innermost, as with ``torch.compile``."""
        number = self.count
        self.count += 1
        with _carrying(dict(zip(TAGS, (CheckpointPolicy.PREFER_RECOMPUTE, number), strict=True))):
            yield number


@contextmanager
def _carrying(marked: dict[str, Any]) -> Iterator[None]:
    """Within, traced nodes carry the given metadata; afterwards what they carried before. Looks the dictionary up anew
    each time: torch replaces it by a copy now and then."""
    meta = traceback.get_current_meta()
    outer = {key: meta[key] for key in marked if key in meta}
    meta.update(marked)
    try:
        yield
    finally:
        meta = traceback.get_current_meta()
        for key in marked:
            meta.pop(key, None)
        meta.update(outer)


_LEAKS = (*TAGS, STACK, FORWARD_STACK)  # metadata that a backward node may have of the call that surrounds it
_WORDS: dict[InputKind, Literal["parameter", "buffer"]] = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}
GraphInput = tuple[InputKind, str]
"""The kind and the name of what a graph input is, or is part of."""


def finish(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Drops unread nodes, marks every node forward or backward, and names the inputs."""
    gm.graph.eliminate_dead_code()
    for position, (node, (kind, name)) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True)):
        name_input(node, kind, name, position)
    stacks: dict[int, Any] = {}
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        annotations = custom(node.meta)
        # the gradient of the loss with respect to itself is made just before the engine is called
        begins_region = is_seed(node) and any(REGION in custom(user.meta) for user in node.users)
        if REGION in annotations or begins_region:
            _forget(node)
            kept = {key: value for key, value in annotations.items() if key != REGION}
            node.meta["custom"] = {**kept, PHASE: BACKWARD}
            node.meta["autograd_backward"] = True
            stack = stacks.get(node.meta.get("seq_nr", UNKNOWN))
            if stack:
                node.meta[FORWARD_STACK] = stack
        elif annotations.get(PHASE) == EPILOGUE:
            _forget(node)
        else:
            node.meta.pop("autograd_backward", None)
            node.meta["custom"] = {**annotations, PHASE: FORWARD}
            number = node.meta.get("seq_nr", UNKNOWN)
            # Nodes that a thread runs before its first backward function have no number either: no backward node made
            # them.
            if number != UNKNOWN:  # the first with a number is the operator that autograd numbered
                stacks.setdefault(number, node.meta.get(STACK))


def _forget(node: fx.Node) -> None:
    for key in _LEAKS:
        node.meta.pop(key, None)


def name_input(node: fx.Node, kind: InputKind, name: str, position: int) -> None:
    """Name a placeholder, and describe it as torch's own tracer does."""
    word = _WORDS.get(kind)
    tracing.rename_node(node, f"{word}_{name}" if word else name)
    node.meta["desc"] = tracing.input_descriptor(word or "user", name, position)


LossFn = Callable[..., Tensor]


@frozen(eq=False)
class Captured:
    """A flat graph: parameters, buffers, the batch's and the optimizer's tensors in, the loss and the gradients out."""

    gm: fx.GraphModule
    outputs: tuple[tracing.SubclassLayout, ...]
    gradients: tuple[str, ...]
    """The parameter of each output after the first."""
    mutated: tuple[str, ...]
    """The inputs that the graph writes, once, at its end."""
    unrepeated: tuple[str, ...]
    """Attributes of modules that the forward changed while it was traced, and that the graph does not change."""
    followed: tuple[Any, ...]
    """The policies of the model's policylang checkpoints, which the graph does not apply."""


def capture(
    model: nn.Module,
    loss_fn: LossFn,
    batch: tuple[Any, ...],
    state: step.ModelState,
    optimizer: Optimizer | None,
    optimizer_state: step.OptimizerState,
    device: TargetDevice | None = None,
    *,
    as_eager: bool = False,
) -> Captured:
    """``device``: where the step runs; by default its tensors'. ``as_eager``: for this batch alone, what eager runs.
    Raises PolicyGraphError if no graph can hold it."""
    leaves, spec = tracing.tree_flatten(batch)
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain, layouts = tracing.take_apart([*state.tensors, *given, *optimizer_state.tensors.values()])
    regions = BackwardRegions()
    followed: list[Any] = []
    values = _KnownValues(plain) if as_eager else None
    traced = WholeStep(model, loss_fn, leaves, spec, state, optimizer, optimizer_state, layouts, regions, values)
    try:
        gm = _trace(traced.run, plain, regions, followed, device, tracing.compiling() if values is None else values)
    except PolicyError:
        raise
    except Exception as error:
        raise step.trace_failure(error) from error
    inputs = _inputs(state, len(given), optimizer_state, layouts)
    finish(gm, inputs)
    step.check_writes(gm.graph, plain, traced.mutated, traced.outgrown, state.buffers)
    if as_eager:
        _in_place(gm)
        _saved_for_sizes(gm)
    gm.recompile()
    mutated = dict.fromkeys(inputs[position][1] for position in traced.mutated)
    unrepeated = (*traced.substitution.changed, *(name for _, name in traced.outgrown))
    outputs, gradients = tuple(traced.outputs), tuple(traced.gradients)
    return Captured(gm, outputs, gradients, tuple(mutated), unrepeated, tuple(followed))


def _trace(
    run: Callable[..., list[Tensor]],
    plain: Sequence[Tensor],
    regions: BackwardRegions,
    followed: list[Any],
    device: TargetDevice | None,
    road: AbstractContextManager[Any],
) -> fx.GraphModule:
    """``road``: decides where a model does something else under a compiler, or asks for values."""
    with ExitStack() as stack:
        functional = stack.enter_context(_kernels_of(device))
        ours = None if device is not None else tracing.fake_mode_of(plain) or tracing.fake_tensor_mode()
        mode = tracing.deviceless_fake_mode() if ours is None else ours
        for context in (
            traceback.preserve_node_meta(),
            without_leaks(),
            mode,
            tracing.tracing_context(mode),
            torch.enable_grad(),
            # the engine's threads for other devices would not see what is set for this one
            torch.autograd.set_multithreading_enabled(False),
            torch.compiler.set_stance("force_eager"),
            regions.marked(),
            checkpoint_regions(followed),
            road,
            tracing.into_compiled_functions(),
            traced_collectives(),
            functional,
            _DrawnInMemoryOrder(),
        ):
            stack.enter_context(context)
        fakes = tracing.fake_tensors(mode, plain) if device is None else tracing.fakes_on(mode, plain, device.device)
        return make_fx(run)(*fakes)


def _in_place(gm: fx.GraphModule) -> None:
    """Calls what eager calls: operators that write in place where the model does, in memory that is written as a whole,
    ``native_batch_norm``, and ``lift_fresh`` of constants. What they write to an input, the graph does not write again
    at its end."""
    aten = torch.ops.aten
    for node in gm.graph.nodes:
        written_by = custom(node.meta).get(WRITTEN_BY)
        if written_by is not None:
            node.meta["custom"] = {key: value for key, value in node.meta["custom"].items() if key != WRITTEN_BY}
        if node.target is aten.lift_fresh_copy.default:
            node.target = aten.lift_fresh.default
        elif node.target is aten._native_batch_norm_legit_functional.default:
            node.target = aten.native_batch_norm.default
            statistics = {3: node.args[3], 4: node.args[4]}
            for user in [user for user in node.users if user.args[1] in statistics]:
                user.replace_all_uses_with(statistics[user.args[1]])
                gm.graph.erase_node(user)
        elif isinstance(node.target, OpOverload) and written_by is not None:
            is_form = f"{schema_of(node.target).name}_" == schema_of(written_by).name
            is_part = any(str(user.target).endswith("_scatter.default") for user in node.users)
            if is_form and not is_part and custom(node.meta).get(PHASE) != EPILOGUE:  # optimizers have other kernels
                node.target = written_by
    for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default):
        given, value = node.args[:2]
        while isinstance(value.target, OpOverload) and schema_of(value.target).is_mutable:
            value = value.args[0]
        if value is given:
            node.replace_all_uses_with(given)
            gm.graph.erase_node(node)


def _saved_for_sizes(gm: fx.GraphModule) -> None:
    """Autograd saves what a ``gather`` reads, though its backward asks for the sizes alone: the zeros are like that.
    Outside a trace it adds to them in place."""
    aten, numbered = torch.ops.aten, dict[int, fx.Node]()
    for node in gm.graph.nodes:
        number, phase = node.meta.get("seq_nr", UNKNOWN), custom(node.meta).get(PHASE)
        if number != UNKNOWN and phase == FORWARD:
            numbered.setdefault(number, node)
        elif phase == BACKWARD and node.target is aten.new_zeros.default:
            gather = numbered.get(number)
            if gather is not None and gather.target is aten.gather.default:
                node.update_arg(0, gather.args[0])
                for user in node.users:
                    if user.target is aten.scatter_add.default:
                        user.target = aten.scatter_add_.default


class _KnownValues(DispatchMode):
    """Under it, ``item()`` of a tensor whose value is known gives it, so that a trace takes the branch of eager:
    Transformers makes no causal mask where no position says that a batch is packed. Small tensors are known that follow
    from integers and booleans of the batch and of buffers, or from nothing (``torch.arange``): they are computed beside
    the trace."""

    supports_higher_order_operators = True

    def __init__(self, originals: Sequence[Tensor]) -> None:
        super().__init__()
        self.originals = originals
        self.known: Any = WeakTensorKeyDictionary()
        self.written: set[int] = set()
        """Memory that was written with what is not known."""

    def learn(self, traced: Sequence[Tensor]) -> None:
        """The tensors that stand for the originals in the trace."""
        for tensor, original in zip(traced, self.originals, strict=True):
            if (value := _constant(original)) is not None:
                self.known[tensor] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tracing.tree_leaves((args, kwargs))
        values = {id(each): self._value(each) for each in leaves if isinstance(each, Tensor)}
        is_known = isinstance(func, OpOverload) and None not in values.values()
        is_known = is_known and not any(isinstance(each, torch.SymInt) for each in leaves)
        if is_known and func is torch.ops.aten._local_scalar_dense.default:
            return values[id(args[0])].item()  # type: ignore[union-attr]
        writes = isinstance(func, OpOverload) and schema_of(func).is_mutable
        with traceback.annotate({WRITTEN_BY: func}) if writes else nullcontext():
            found = func(*args, **kwargs)
        results = tracing.tree_leaves(found)
        if is_known and results and torch.Tag.nondeterministic_seeded not in func.tags and all(map(_is_small, results)):
            real = tracing.computed(func, args, kwargs, values)
            for result, value in zip(results, tracing.tree_leaves(real), strict=True):
                self.known[result] = value
        elif writes:
            self.written.update(_memory(value) for value in values.values() if value is not None)
        return found

    def _value(self, tensor: Tensor) -> Tensor | None:
        value = self.known.get(tensor)
        if value is None and type(tensor) is Tensor:
            value = _constant(tensor)  # that the trace runs into
        return None if value is None or _memory(value) in self.written else value


def _constant(value: Tensor) -> Tensor | None:
    is_exact = not (value.is_floating_point() or value.is_complex())
    return tracing.copied(value) if is_exact and _is_small(value) else None


def _is_small(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() <= _MOST_ELEMENTS


def _memory(value: Tensor) -> int:
    return int(value.untyped_storage()._cdata)


class _DrawnInMemoryOrder(DispatchMode):
    """Under it, dropout of a tensor that is not contiguous draws as in eager, one element of memory after the other.
    Alone of what draws in place, ``bernoulli_`` becomes an operator that draws for a contiguous tensor."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bernoulli_.float and not args[0].is_contiguous():
            value, *probability = args
            order = sorted(range(value.dim()), key=lambda at: -value.stride(at))
            func(value.permute(order), *probability, **(kwargs or {}))
            return value
        return func(*args, **(kwargs or {}))


@contextmanager
def _kernels_of(device: TargetDevice | None) -> Iterator[AbstractContextManager[None]]:
    """Under it operators run the kernels of a device; gives the functionalization to trace with."""
    if device is None or device.capability is None:
        yield tracing.functionalized()
        return
    attention = {"scaled_dot_product_attention": attention_on(device.capability)}
    with ExitStack() as stack:
        try:
            functional = stack.enter_context(absent_cuda(device.capability, attention))
        except ImportError as error:
            message = f"no step can be traced as on `{device.kind}` here: {error}"
            raise step.problem(UNKNOWN_DEVICE, message, help="trace it on a machine with a GPU") from error
        yield functional


def _inputs(
    state: step.ModelState, given: int, optimizer_state: step.OptimizerState, layouts: Sequence[tracing.SubclassLayout]
) -> list[GraphInput]:
    """One for every plain tensor; the parts of a tensor share its name."""
    whole: list[GraphInput] = [
        *((InputKind.PARAMETER, name) for name in state.parameters),
        *((InputKind.BUFFER, name) for name in (*state.buffers, *state.attributes)),
        *((InputKind.USER, f"input {number}") for number in range(given)),
        *((InputKind.BUFFER, f"optimizer.{name}") for name in optimizer_state.tensors),
    ]
    return [item for item, layout in zip(whole, layouts, strict=True) for _ in range(layout.size_in_parts)]


@define(eq=False)
class WholeStep:
    """The function that is traced: a step on plain tensors, without mutations, its writes at the end. ``run`` is
    traced; what it learns is in the fields from ``substitution`` on."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    leaves: list[Any]
    spec: Any
    state: step.ModelState
    optimizer: Optimizer | None
    optimizer_state: step.OptimizerState
    layouts: list[tracing.SubclassLayout]
    """The layouts of parameters, buffers, the batch's tensors and the optimizer's."""
    regions: BackwardRegions
    values: _KnownValues | None

    substitution: step.Substitution = field(init=False)
    outputs: list[tracing.SubclassLayout] = field(factory=list)
    gradients: list[str] = field(factory=list)
    mutated: list[int] = field(factory=list)
    """Positions of the plain inputs that are written."""
    outgrown: list[tuple[int, str]] = field(factory=list)
    """Positions and names of those that the forward replaces by something of another kind."""

    def run(self, *plain: Tensor) -> list[Tensor]:
        with tracing.below_functionalization():
            functional = [tracing.to_functional(value) for value in plain]
            if self.values is not None:
                self.values.learn(functional)
            tensors = tracing.put_together(functional, self.layouts)
            loss, gradients = self._loss_and_gradients(tensors)
            if self.optimizer is not None:
                with traceback.annotate({PHASE: EPILOGUE}):
                    self._update(self.optimizer, tensors, gradients)
                gradients = {}
            self.gradients = list(gradients)
            values, self.outputs = tracing.take_apart([loss, *gradients.values()])
            outputs = [tracing.from_functional(value) for value in values]
            with traceback.annotate({PHASE: EPILOGUE}):
                self._write_back(plain, functional)
        return outputs

    def _loss_and_gradients(self, tensors: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        given = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]
        count, end = len(self.state.names), len(self.state.names) + len(given)
        own, inputs = tensors[:count], tensors[count:end]
        for tensor, original in zip(tensors[:end], [*self.state.tensors, *given], strict=True):
            if original.requires_grad:
                tensor.requires_grad_()
                for hook in tracing.gradient_hooks(original):
                    tensor.register_hook(hook)
        left = iter(inputs)
        leaves = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        batch = tracing.tree_unflatten(leaves, self.spec)
        with module_paths(self.model), step.substituted(self.model, self.state.tensors, own) as self.substitution:
            loss = self.loss_fn(self.model, *batch)
        parameters = dict(zip(self.state.parameters, own, strict=False))
        wanted = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        step.check_loss(loss, wanted)
        gradients = self._gradients(loss, wanted)
        if not gradients:
            raise step.no_gradient(wanted)
        return loss, gradients

    def _gradients(self, loss: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients by name of the parameters that have one. A parameter that a ``backward()`` inside ``loss_fn``
        gave a gradient already (a loss in chunks) gets the sum, as it would outside."""
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        gradients = {}
        with self.regions.accumulation():
            for (name, parameter), gradient in zip(wanted.items(), found, strict=True):
                earlier = parameter.grad
                total = gradient if earlier is None else earlier if gradient is None else earlier + gradient
                if total is not None:
                    gradients[name] = total
        return gradients

    def _update(self, optimizer: Optimizer, tensors: list[Tensor], gradients: dict[str, Tensor]) -> None:
        originals = self.state.parameters
        parameters = {id(original): new for original, new in zip(originals.values(), tensors, strict=False)}
        own = tensors[len(tensors) - len(self.optimizer_state.tensors) :]
        with step.substituted_optimizer(optimizer, parameters, own), torch.no_grad(), tracing.compiling():
            for name, original in originals.items():
                parameters[id(original)].grad = gradients.get(name)
            # the class's step: a scheduler wraps the instance's to count real ones
            type(optimizer).step(optimizer)

    def _write_back(self, plain: Sequence[Tensor], functional: Sequence[Tensor]) -> None:
        """Each input that was written to gets its last value, after everything that reads the first one."""
        rebound = self._rebound(functional)
        for position, (before, wrapper) in enumerate(zip(plain, functional, strict=True)):
            after = tracing.from_functional(rebound.get(position, wrapper))
            if after is not before:
                self.mutated.append(position)
                before.copy_(after)

    def _rebound(self, functional: Sequence[Tensor]) -> dict[int, Tensor]:
        """By position, the parts of the tensors that the model assigned to its buffers and attributes."""
        result: dict[int, Tensor] = {}
        position = 0
        for name, original, layout in zip(self.state.names, self.state.tensors, self.layouts, strict=False):
            end = position + layout.size_in_parts
            new = self.substitution.rebound.get(id(original))
            if new is not None:
                parts, _ = tracing.take_apart([new])
                alike = [(part.shape, part.dtype) for part in parts]
                if alike == [(part.shape, part.dtype) for part in functional[position:end]]:
                    result.update(enumerate(parts, position))
                else:
                    self.outgrown.append((position, name))
            position = end
        return result
