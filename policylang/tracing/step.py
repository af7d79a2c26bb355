"""The parts of a step: the tensors of a model and of an optimizer, what a graph is specialised to, and its refusals.

An optimizer's step is part of the graph: its state and its learning rates are inputs, its code is traced.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from policylang.errors import PolicyGraphError
from policylang.language.diagnostics import Diagnostic
from policylang.language.shown import counted, listed
from policylang.torch_compat import tracing
from policylang.torch_compat.distributed import own_class, sharded_weights
from policylang.torch_compat.eager import storage_address
from policylang.torch_compat.graphs import OpOverload, schema_of

LOSS = "APL360"
NO_GRADIENT = "APL361"
DATA_DEPENDENT = "APL362"
UNTRACEABLE = "APL363"
BATCH_CHANGED = "APL364"
MODEL_CHANGED = "APL365"
ALIASED_MUTATION = "APL366"
OPTIMIZER = "APL367"
OUTSIDE_WRITE = "APL368"

_TORCH, _OURS = Path(str(torch.__file__)).parent, Path(__file__).parents[1]  # as tracebacks name them
_NOT_THE_USERS = (f"{_TORCH}{os.sep}", f"{_OURS}{os.sep}", "<")


def problem(code: str, message: str, help: str | None = None, details: Sequence[str] = ()) -> PolicyGraphError:
    return PolicyGraphError([Diagnostic(code, message, help=help, details=tuple(details))])


def trace_failure(error: Exception) -> PolicyGraphError:
    """The error that explains a failed trace to the user, with the place in their code; the caller chains the cause."""
    code, text = UNTRACEABLE, str(error).strip()
    first = text.partition("\n")[0]
    why = f"{type(error).__name__}: {first}" if text else type(error).__name__
    help = "call `loss_fn(model, *batch)` once without tracing to see whether it runs at all"
    message = None
    if isinstance(error, tracing.data_dependence_errors()) or "get value out of a tracing tensor" in text:
        code = DATA_DEPENDENT
        message = "the step branches on the values of a tensor, which a graph cannot"
        help = (
            "replace `.item()`, `if tensor` and loops over data by tensor operators such as `torch.where`, "
            "or leave that part out of the traced step"
        )
    elif tracing.is_device_mismatch(error):
        why = first
        help = (
            "a tensor that is no parameter, buffer, attribute or input stays where it was made: make it a buffer, "
            "or make it on the device of an input (`torch.arange(n, device=ids.device)`)"
        )
        if "meta" in text:
            help = 'trace a model on `meta` for the device that it trains on: `device="cuda"`'
    elif "mutating a non-functional tensor" in text:
        why = "it writes to a tensor that is made of one that is no input of the step"
        help = "pass what `loss_fn` takes from around it as part of the batch: `trace_step(model, loss_fn, *batch)`"
    elif isinstance(error, tracing.unknown_size_errors()):
        why = f"torch does not know the sizes of what `{text}` returns"
        help = "trace the step where it runs, or register a kernel for shapes (`torch.library.register_fake`)"
    own = (each for each in reversed(extract_tb(error.__traceback__)) if not each.filename.startswith(_NOT_THE_USERS))
    details = [f"at {each.filename}:{each.lineno}: `{(each.line or '').strip()}`" for each in own][:1]
    return problem(code, message or f"the step cannot be traced: {why}", help, details)


# --- the loss -------------------------------------------------------------------------------------------------------


def check_loss(loss: object, parameters: Mapping[str, Tensor]) -> None:
    """Raises PolicyGraphError unless it is a scalar that can be differentiated with respect to the parameters."""
    if not isinstance(loss, Tensor):
        raise problem(
            LOSS,
            f"`loss_fn` returns {'an' if type(loss).__name__[0] in 'AEIOUaeiou' else 'a'} `{type(loss).__name__}`, "
            "not a scalar tensor",
            help="return `output.loss`" if hasattr(loss, "loss") else "return the loss alone, as a tensor",
        )
    if loss.numel() != 1:
        message = f"`loss_fn` returns a tensor of shape {list(loss.shape)}, not a scalar"
        raise problem(LOSS, message, help="reduce it, for example with `.mean()`")
    if not parameters:
        help = "call `requires_grad_()` on the parameters to train"
        raise problem(NO_GRADIENT, "no parameter of the model requires a gradient", help=help)
    if not loss.requires_grad:
        raise no_gradient(parameters)


def no_gradient(parameters: Mapping[str, Tensor]) -> PolicyGraphError:
    some = ", ".join(f"`{name}`" for name in list(parameters)[:3])
    message = "the loss does not depend on any parameter that requires a gradient"
    help = "look for a `detach()`, a `no_grad()` or an integer cast between the parameters and the loss"
    details = [f"parameters that require one: {some}{', …' if len(parameters) > 3 else ''}"]
    return problem(NO_GRADIENT, message, help=help, details=details)


# --- what the step writes -------------------------------------------------------------------------------------------


def check_writes(
    graph: fx.Graph,
    plain: Sequence[Tensor],
    mutated: Sequence[int],
    outgrown: Sequence[tuple[int, str]],
    buffers: Collection[str],
) -> None:
    """Raises PolicyGraphError where the graph, run twice, would not see what a second eager step sees.

    Args:
        mutated: positions of the inputs that the graph writes.
        outgrown: positions and names of the inputs that the forward replaces by something of another kind.
    """
    for node in graph.nodes:
        # a functional trace writes to its inputs, at its end; any other write is to a tensor that the trace ran into
        writes = isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable
        at_its_end = node.target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder"
        if writes and not at_its_end:
            message = f"the step writes (`{node.target}`) to a tensor that is no parameter, buffer, attribute or input"
            help = "register it as a buffer of the model, or pass it as an input; tracing may have changed it once"
            raise problem(OUTSIDE_WRITE, message, help=help)
    inputs = graph.find_nodes(op="placeholder")
    for position, name in outgrown:
        # a plain attribute that the loss does not depend on is a note to the reader, of any shape
        if name in buffers or inputs[position].users:
            help = "write to it in place (`self.buffer.copy_(...)`), or keep it outside the traced step"
            raise problem(UNTRACEABLE, f"the forward replaces `{name}` by a tensor of another shape or type", help=help)
    # a write to one of two inputs that share memory is not seen by a read of the other in the graph
    owners = Counter(_memory(value) for value in plain if mutated)
    if any(owners[_memory(plain[position])] > 1 and _memory(plain[position]) for position in mutated):
        message = "the step writes to a buffer or input that shares its memory with another one"
        help = "give each its own memory (`.clone()`), or share one buffer under two names"
        raise problem(ALIASED_MUTATION, message, help=help)


def _memory(value: Tensor) -> int:
    """The address of its data, or of the storage where there is none: a fake tensor's, or one's on ``meta``."""
    try:
        storage = value.untyped_storage()
        return storage_address(value) or 0 if storage.device.type == "meta" else int(storage.data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


_MOST_DIFFERENCES = 8


@frozen
class TensorKind:
    """All that a graph is specialised to in one of its inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: torch.Tensor) -> TensorKind:
        return cls(tuple(value.shape), value.dtype, value.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


@frozen(eq=False)
class BatchSignature:
    """The structure of a batch; of each tensor its kind, of every other leaf its value, which the graph holds."""

    spec: Any
    paths: tuple[str, ...]
    kinds: tuple[Any, ...]

    @classmethod
    def of(cls, batch: tuple[Any, ...]) -> BatchSignature:
        leaves, spec = tracing.tree_flatten(batch)
        return cls(spec, tuple(tracing.tree_paths(batch)), tuple(_kind(leaf) for leaf in leaves))

    def described(self) -> list[tuple[str, str]]:
        """The place of each leaf and its kind, for messages."""
        return [(f"input{path}", _text(kind)) for path, kind in zip(self.paths, self.kinds, strict=True)]

    def tensors(self, batch: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors of a batch, in order. Raises PolicyGraphError if it is not what was traced."""
        leaves, spec = tracing.tree_flatten(batch)
        if spec != self.spec:
            came = tracing.tree_paths(batch)
            raise problem(
                BATCH_CHANGED,
                "the batch has another structure than the one this step was traced for: "
                f"{counted(len(self.paths), 'leaf', 'leaves')} then, {counted(len(came), 'leaf', 'leaves')} now",
                help="pass what `trace_step` was given after `loss_fn`, in the same order and with the same keys",
                details=[
                    f"{when}: {listed([f'input{path}' for path in paths], _MOST_DIFFERENCES) or 'nothing'}"
                    for when, paths in (("traced", self.paths), ("called", came))
                ],
            )
        found = zip(self.paths, self.kinds, leaves, strict=True)
        others = [(path, kind, _kind(leaf)) for path, kind, leaf in found if not _same(kind, leaf)]
        if others:
            texts = [(path, _text(kind), _text(came)) for path, kind, came in others]
            shapes = any(isinstance(kind, TensorKind) for _, kind, _ in others)
            raise problem(
                BATCH_CHANGED,
                "the batch is not the one this step was traced for",
                help="trace one step for each shape, or pad the batch to the traced shape"
                if shapes
                else "trace one step for each, or pass what it was traced with: an object may be written to in place",
                details=_first(
                    [
                        f"input{path}: traced with {then}, called with {'another' if now == then else now}"
                        for path, then, now in texts
                    ]
                ),
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@frozen
class ModelSignature:
    """The parameters and buffers of a model, which of them need a gradient, and which modules are in train mode."""

    kinds: dict[str, TensorKind]
    requires_grad: dict[str, bool]
    modes: dict[str, bool]
    attributes: tuple[str, ...]
    """The plain attributes among ``kinds``."""

    @classmethod
    def of(cls, model: torch.nn.Module, state: ModelState) -> ModelSignature:
        named = dict(zip(state.names, state.tensors, strict=True))
        needs = {name: value.requires_grad for name, value in named.items()}
        modes = {path: module.training for path, module in model.named_modules()}
        return cls(_kinds(named), needs, modes, tuple(state.attributes))

    def check(self, model: torch.nn.Module, state: ModelState) -> None:
        """Raises PolicyGraphError if the graph no longer is the model's."""
        now = ModelSignature.of(model, state)
        if now == self:
            return
        found = [f"`{name}`: gone" for name in self.kinds if name not in now.kinds]
        for name, kind in now.kinds.items():
            before = self.kinds.get(name)
            if before != kind:
                found.append(f"`{name}`: new" if before is None else f"`{name}`: traced with {before}, now {kind}")
        if not found:
            found += _turned(self.requires_grad, now.requires_grad, ("without one", "with a gradient"))
        found += _turned(self.modes, now.modes, ("in eval mode", "in train mode"))
        message = "the model has changed since this step was traced, and the graph has not"
        details = _first(found or ["its modules are others"])
        raise problem(MODEL_CHANGED, message, help="trace the step again, or undo the change", details=details)


@frozen(eq=False)
class OptimizerSignature:
    """The part of an optimizer that the graph holds."""

    kinds: dict[str, TensorKind]
    settings: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, state: OptimizerState) -> OptimizerSignature:
        return cls(_kinds(state.tensors), state.settings)

    def check(self, state: OptimizerState) -> None:
        """Raises PolicyGraphError if the graph no longer is the optimizer's."""
        now = OptimizerSignature.of(state)
        if list(self.kinds.items()) == list(now.kinds.items()) and self.settings == now.settings:
            return
        found = [
            f"group {number}: `{key}` was {then[key]!r}, now {group.get(key)!r}"
            for number, (then, group) in enumerate(zip(self.settings, now.settings, strict=False))
            for key in then
            if then[key] != group.get(key)
        ]
        changed = [name for name in self.kinds | now.kinds if self.kinds.get(name) != now.kinds.get(name)]
        found += [f"`{name}`: traced with {self.kinds.get(name)}, now {now.kinds.get(name)}" for name in changed[:8]]
        message = "the optimizer has changed since this step was traced, and the graph has not"
        help = "learning rates and the values of its state may change; trace the step again for anything else"
        raise problem(MODEL_CHANGED, message, help=help, details=found)


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorKind]:
    return {name: TensorKind.of(value) for name, value in tensors.items()}


def _turned(before: Mapping[str, bool], now: Mapping[str, bool], words: tuple[str, str]) -> Iterator[str]:
    for name, value in before.items():
        if now.get(name, value) != value:
            yield f"`{name or 'the model'}`: traced {words[value]}, now {words[not value]}"


def _kind(leaf: Any) -> Any:
    return TensorKind.of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _same(kind: Any, leaf: Any) -> bool:
    if isinstance(kind, TensorKind):
        return isinstance(leaf, torch.Tensor) and kind == TensorKind.of(leaf)
    return leaf is kind or (type(leaf) is type(kind) and bool(leaf == kind))


def _text(kind: Any) -> str:
    text = str(kind) if isinstance(kind, TensorKind) else f"the {type(kind).__name__} `{kind!r}`"
    return text if "\n" not in text else f"the {type(kind).__name__}"


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_DIFFERENCES
    return lines if more <= 0 else [*lines[:_MOST_DIFFERENCES], f"and {more} more"]


_FOR_TRACING = {"capturable": True, "foreach": False, "fused": None, "differentiable": False}
"""Settings under which an optimizer's step asks no tensor for its value, and updates one parameter after the other."""


@frozen(eq=False)
class ModelState:
    """Parameters, buffers, each once by the first name of ``named_parameters``; then modules' plain attributes."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    attributes: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.parameters, *self.buffers, *self.attributes)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.parameters.values(), *self.buffers.values(), *self.attributes.values()]


def read_state(model: nn.Module, attributes: Iterable[str] | None = None) -> ModelState:
    """Reads the current state; an optimizer's update and ``load_state_dict`` are seen by the next call. ``attributes``
    names the plain attributes to read; without it they are looked for."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    found: dict[str, Tensor] = {}
    if attributes is not None:
        modules = dict(model.named_modules())
        for path in attributes:
            module, _, name = path.rpartition(".")
            value = getattr(modules.get(module), name, None)
            if isinstance(value, Tensor):
                found[path] = value
        return ModelState(parameters, buffers, found)
    seen = {id(value) for value in (*parameters.values(), *buffers.values())}
    for path, each in model.named_modules():
        for name, value in each.__dict__.items():
            if isinstance(value, Tensor) and _is_leaf(value) and id(value) not in seen:
                seen.add(id(value))
                found[f"{path}.{name}".lstrip(".")] = value
    return ModelState(parameters, buffers, found)


def check_hooks(state: ModelState) -> None:
    """Raises PolicyGraphError where a hook awaits a parameter's ``.grad``, which a traced step leaves alone."""
    for name, parameter in state.parameters.items():
        if tracing.accumulation_hooks(parameter):
            message = f"the parameter `{name}` has a hook for its complete `.grad`, which a traced step does not set"
            help = "do what the hook does with the gradients that the step returns, or use `register_hook`"
            raise problem(UNTRACEABLE, message, help=help)


def check_gathers(model: nn.Module) -> None:
    """Raises PolicyGraphError where ``fully_shard`` gathers the weights of a model: its hooks cannot be traced."""
    found = next(iter(sharded_weights(model.modules())), None)
    if found is not None:
        raise problem(
            UNTRACEABLE,
            f"`fully_shard` gathers `{own_class(found.module)}.{found.name}` in a hook, where no trace sees it",
            help="shard it with DTensors that the forward gathers, as examples/sharded_llama.py does, or train it in "
            "eager or with compiled blocks: see docs/setups.md#a-traced-step",
        )


def _is_leaf(value: Tensor) -> bool:
    """A tensor with a history was assigned by a forward, and is no state."""
    try:
        return value.grad_fn is None
    except RuntimeError:  # a view from before its base was written to: FSDP leaves such ones in the place of weights
        return False


@frozen(eq=False)
class Substitution:
    rebound: dict[int, Tensor] = field(factory=dict)
    """By the ``id`` of a buffer or attribute the tensor that the model assigned to it (``self.mean = new``)."""
    changed: list[str] = field(factory=list)
    """Attributes that are no tensor and that the model gave another value (``layers.0.calls``)."""


@contextmanager
def substituted(model: nn.Module, originals: list[Tensor], replacements: Sequence[Tensor]) -> Iterator[Substitution]:
    """Under it, the model has ``replacements`` where it had ``originals``, under every name and in every submodule. On
    leaving, the model is as it was: attributes that its forward set are kept in the :class:`Substitution`."""
    by_id = {id(old): new for old, new in zip(originals, replacements, strict=True)}
    modules = list(model.named_modules())
    before = [_Contents(module) for _, module in modules]
    result = Substitution()
    for contents in before:
        contents.substitute(by_id)
    try:
        yield result
    finally:
        for (path, _), contents in zip(modules, before, strict=True):
            contents.collect_changes(path, by_id, result)
            contents.restore()


class _Contents:
    """Everything a module's ``__dict__`` held, its tables of parameters, buffers and submodules included."""

    def __init__(self, module: nn.Module) -> None:
        own = module.__dict__
        tables: list[dict[str, Any]] = [own, own["_parameters"], own["_buffers"], own["_modules"]]
        self.tables = [(table, dict(table)) for table in tables]

    def substitute(self, by_id: dict[int, Tensor]) -> None:
        for table, _ in self.tables:
            for name, value in table.items():
                if id(value) in by_id:
                    table[name] = by_id[id(value)]

    def collect_changes(self, path: str, by_id: dict[int, Tensor], result: Substitution) -> None:
        for table, before in self.tables:
            for name, old in before.items():
                new = table.get(name)
                if id(old) in by_id and isinstance(new, Tensor) and new is not by_id[id(old)]:
                    result.rebound[id(old)] = new
        now, attributes = self.tables[0]
        for name, value in now.items():
            if isinstance(value, bool | int | float) and name in attributes and attributes[name] is not value:
                result.changed.append(f"{path}.{name}".lstrip("."))

    def restore(self) -> None:
        for table, saved in self.tables:
            table.clear()
            table.update(saved)


# --- the optimizer --------------------------------------------------------------------------------------------------


@frozen(eq=False)
class OptimizerState:
    """The tensors of an optimizer by name: the learning rate of each group, then each parameter's state. A learning
    rate that is a number becomes a tensor of 64 bits, so that a scheduler's changes are seen."""

    tensors: dict[str, Tensor]
    settings: tuple[dict[str, Any], ...]
    """The settings of each group that are fixed in the graph: momentum, weight decay and the like."""

    @classmethod
    def of(cls, optimizer: Optimizer | None, state: ModelState) -> OptimizerState:
        """Raises PolicyGraphError if the optimizer updates what is no parameter of the model."""
        if optimizer is None:
            return cls({}, ())
        names = {id(parameter): name for name, parameter in state.parameters.items()}
        tensors = {f"learning_rate_{number}": _rate(group) for number, group in enumerate(optimizer.param_groups)}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise problem(
                        OPTIMIZER,
                        f"the optimizer updates a tensor of shape {list(parameter.shape)} that is no parameter of the "
                        "model",
                        help="make the optimizer from `model.parameters()` of the model that is traced, after the last "
                        "`model.to(...)`",
                    )
                for key, value in _state_tensors(optimizer, parameter):
                    tensors[f"{names[id(parameter)]}.{key}"] = value
        settings = ({k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups)
        return cls(tensors, tuple(settings))


@contextmanager
def substituted_optimizer(optimizer: Optimizer, parameters: dict[int, Tensor], tensors: list[Tensor]) -> Iterator[None]:
    """Under it, the optimizer holds other tensors: ``parameters`` by the ``id`` of the original, and ``tensors``, in
    the order of :class:`OptimizerState`, in the place of learning rates and state. Raises PolicyGraphError if the step
    makes new state: it would be made anew at each call."""
    groups, state = [dict(group) for group in optimizer.param_groups], optimizer.state
    left = iter(tensors)
    rates = [next(left) for _ in groups]
    replaced: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        new = [parameters[id(parameter)] for parameter in group["params"]]
        for parameter, replacement in zip(group["params"], new, strict=True):
            own = dict(state.get(parameter, {}))
            own.update((key, next(left)) for key, _ in _state_tensors(optimizer, parameter))
            replaced[replacement] = own
        group.update({key: value for key, value in _FOR_TRACING.items() if key in group}, params=new, lr=rate)
    optimizer.state = replaced
    before = {parameter: set(own) for parameter, own in replaced.items()}
    try:
        yield
        for parameter, own in replaced.items():
            if any(isinstance(own[key], Tensor) for key in set(own) - before.get(parameter, set())):
                message = f"the {type(optimizer).__name__} has no state yet, and would start from none at each call"
                help = "take one step with it before tracing: `loss.backward(); optimizer.step()`"
                raise problem(OPTIMIZER, message, help=help)
    finally:
        optimizer.state = state
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(saved)


def _rate(group: dict[str, Any]) -> Tensor:
    rate = group["lr"]
    return rate if isinstance(rate, Tensor) else torch.tensor(float(rate), dtype=torch.float64)


def _state_tensors(optimizer: Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(key, state[key]) for key in sorted(state, key=str) if isinstance(state[key], Tensor)]
