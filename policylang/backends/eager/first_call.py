"""Watches the first call of a block: every operator, with FSDP's own doing and what is thrown away left out."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.fx import traceback
from torch.nn.modules.lazy import LazyModuleMixin

from policylang.backends.eager import problems
from policylang.backends.eager.origins import (
    GeneratorState,
    HeldResult,
    NotedTensor,
    OperatorStream,
    Origins,
    TensorOrigin,
    addresses,
    described,
    draws,
    gives_number,
    is_ignored,
    is_kept_unread,
    is_no_step,
    leaves_in,
    mapped,
    numbers_among,
    tensors_in,
    traces_again,
    without_history,
    writes,
    written_by,
)
from policylang.backends.eager.surroundings import Before
from policylang.graph.marks import annotated
from policylang.graph.phases import MODULE_ANNOTATION
from policylang.torch_compat import eager
from policylang.torch_compat.distributed import is_of_fsdp, mesh_groups
from policylang.torch_compat.graphs import hint, outside_of_modes
from policylang.torch_compat.tracing import take_apart

moments = count()
"""Returns what began first."""


_written: dict[int, int] = {}
"""When a block wrote last to memory, by address. An entry is valid only while its memory is: whoever asks holds the
tensor."""


def note_write(operator: Any, tensors: Sequence[Tensor]) -> None:
    """A block has written to these, in an operator whose kernel may write by other operators, which a mode hides from
    autograd's counters (``_foreach_mul_``, a custom operator of a ``torch.library.Library``): count its writes here."""
    _written.update(dict.fromkeys(addresses(tensors), next(moments)))
    if writes(operator) and not eager.counts_writes(operator):
        torch.autograd.graph.increment_version([each for each in tensors if not each.is_inference()])


def written_since(address: int | None, moment: int) -> bool:
    """A block has written to memory since a moment."""
    return address is not None and _written.get(address, -1) > moment


class BlockMode(eager.DispatchMode):
    """Sees every operator of one run of a block."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.began = next(moments)
        self.suspended = 0
        self.reading: frozenset[int] = frozenset()
        """By ``id``, the tensors whose readers are seen even while this is suspended."""

    def aside(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator that runs while this is suspended."""
        if not self.reading or not any(id(each) in self.reading for each in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        suspended, self.suspended = self.suspended, 0
        try:
            return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.suspended = suspended


def unseen_since(moment: int) -> AbstractContextManager[None]:
    """Operators that run meanwhile are hidden from blocks whose run began after a moment."""
    return _suspended(lambda mode: mode.began >= moment)


@contextmanager
def _suspended(which: Callable[[BlockMode], bool], reading: frozenset[int] = frozenset()) -> Iterator[None]:
    """Operators that run meanwhile are hidden from some blocks, but for those that read the tensors with these ids."""
    modes = [mode for mode in eager.active_modes() if isinstance(mode, BlockMode) and which(mode)]
    before = [mode.reading for mode in modes]
    for mode in modes:
        mode.reading = reading
        mode.suspended += 1
    try:
        yield
    finally:
        for mode, earlier in zip(modes, before, strict=True):
            mode.suspended -= 1
            mode.reading = earlier


@define(eq=False)
class _Aside:
    """Replaces a hook of FSDP's while watched blocks run."""

    hook: Any
    runs: int = 0
    """The number of running blocks that installed it."""

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        with _suspended(lambda mode: not mode.suspended, frozenset(map(id, tensors_in(given)))):
            return self.hook(module, *given)


def gathers(module: nn.Module) -> bool:
    """FSDP gathers weights before the module runs."""
    return any(_is_either(hook) for hook in module._forward_pre_hooks.values())


def is_first_fsdp(module: nn.Module) -> bool:
    """The module is a ``FullyShardedDataParallel`` (FSDP1)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


@contextmanager
def gathers_aside(block: nn.Module) -> Iterator[None]:
    """Under it, what FSDP does around the modules of a block does not count as an operator of the block."""
    put: list[tuple[dict[int, Any], int, _Aside]] = []
    if "torch.distributed.fsdp" in sys.modules:
        for module in block.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in [(key, hook) for key, hook in hooks.items() if _is_either(hook)]:
                    aside = hooks[key] = hook if isinstance(hook, _Aside) else _Aside(hook)
                    aside.runs += 1
                    put.append((hooks, key, aside))
    try:
        yield
    finally:
        for hooks, key, aside in put:
            aside.runs -= 1
            if not aside.runs and hooks.get(key) is aside:
                hooks[key] = aside.hook


def _is_either(hook: Any) -> bool:
    return isinstance(hook, _Aside) or is_of_fsdp(hook)


def thrown_away(
    entries: Mapping[int, HeldResult],
    spans: Sequence[tuple[int, int]],
    reads: Sequence[Any],
    needed: Iterable[int],
) -> list[int]:
    """The operators, of those with ``entries``, that nobody can read any more. Linear in operations and what they read.

    ``spans``: by operator, its operations, as in :class:`Observation`; ``reads``: by operation its arguments, tensors
    as their origins; ``needed``: operations that are needed in any case.
    """
    parts = {at: take_apart(list(tensors_in(each.value)))[0] for at, each in entries.items()}
    places = {at: [(part, eager.storage_address(part)) for part in own] for at, own in parts.items()}
    ours = Counter(place for own in places.values() for _, place in own)
    live = set(needed)
    for at, own in places.items():
        if any(place is None or eager.storage_users(part) > ours[place] for part, place in own):  # held elsewhere
            live.update(range(*spans[at]))
    for call in range(len(reads) - 1, -1, -1):
        if call in live:
            live.update(origin.call for origin in leaves_in(reads[call], TensorOrigin))
    return [at for at, own in parts.items() if own and live.isdisjoint(range(*spans[at]))]


_LOOKS_FROM = 32 << 20
"""Bytes of results below which nobody asks whether the block has thrown them away."""


@frozen
class TensorFacts:
    """The properties of a tensor that a plan needs."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> TensorFacts:
        stride = tuple(map(hint, tensor.stride())) if tensor.layout is torch.strided else None
        return cls(tuple(map(hint, tensor.shape)), stride, tensor.dtype, tensor.device)


@frozen(eq=False)
class Operation:
    """One call of an operator on plain tensors. Tensors among its arguments are an :class:`TensorOrigin`."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Any
    """The results, each tensor as :class:`TensorFacts`."""
    path: str
    """The path of its module, below the block."""
    kind: type[nn.Module]
    annotations: tuple[str, ...] = ()
    """The names that ``torch.fx.traceback.annotate`` gave it."""


@define(eq=False)
class _KeptPart:
    """A part of a value that autograd keeps for the backward, in memory that the block has made."""

    tensor: Tensor
    number: int
    """That of the value, in autograd's order."""
    version: int
    written_by: int = -1
    """The last operator that has written to it since."""


@define(eq=False)
class Observation:
    """A block's first call while it runs."""

    name: str
    """The block's name in a sentence."""
    module: nn.Module
    origins: Origins
    before: Before
    gathered_over: Mapping[str, tuple[int, ...]]
    """The groups that FSDP gathers weights over inside the block, as far as their parts are in place."""
    stream: OperatorStream = field(factory=OperatorStream)
    spans: list[tuple[int, int]] = field(factory=list)
    """By operator, its operations: the first, and the first of the next."""
    operations: list[Operation] = field(factory=list)
    returns: list[list[TensorOrigin | None]] = field(factory=list)
    """By operator, the origins of what it returns, part by part."""
    read_by_backward: dict[TensorOrigin, None] = field(factory=dict)
    """Values that autograd has saved, in order."""
    saved_so_far: int = 0
    kept_parts: dict[int | None, list[_KeptPart]] = field(factory=dict)
    """By address."""
    noted: dict[int, dict[int, NotedTensor]] = field(factory=dict)
    """By operator and position among its tensor arguments: those in memory from outside the block."""
    origins_noted: dict[int, dict[int, list[TensorOrigin | None]]] = field(factory=dict)
    """The origins of their parts at that time."""
    numbers: dict[int, list[Any]] = field(factory=dict)
    """By operator, its plain number arguments."""
    entries: dict[int, HeldResult] = field(factory=dict)
    writes: dict[int, list[Tensor]] = field(factory=dict)
    """By operator, the tensors in memory from outside that it declares to write."""
    states: dict[int, GeneratorState] = field(factory=dict)
    made: dict[int, list[int]] = field(factory=dict)
    """By address, the operators with ``entries`` that have returned this memory."""
    unlooked_at: int = 0
    """Bytes that are held since it was last asked which of them the block has thrown away."""
    looked_at: int = 0
    """Bytes that were held then."""
    hooks: Any = None
    """Autograd's hooks for saved tensors, unless the block sets its own."""
    hooked: bool = False
    """The block has set hooks of its own (``save_on_cpu``) for some operators."""
    free: bool = False
    """The block has left the hooks in place for some operators."""
    own_checkpoint: bool = False
    """The block's own hooks were those of a checkpoint."""
    path: list[tuple[str, type[nn.Module]]] = field(factory=list)
    """The modules that are being called, the block first."""

    @classmethod
    def of(cls, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Observation:
        before = Before.of(list(module.modules()), (args, kwargs))
        origins = Origins(described(module, tensors_in((args, kwargs))))
        inside = (inner for inner in module.modules() if gathers(inner))
        meshes = (getattr(weight, "device_mesh", None) for inner in inside for weight in inner.parameters())
        over = {name: ranks for mesh in meshes if mesh is not None for name, ranks in mesh_groups(mesh).items()}
        return cls(name, module, origins, before, over, path=[("", type(module))])

    def operation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator on plain tensors and note it."""
        if is_ignored(func):  # autograd asks for it as often as it likes: it gives its argument
            out = func(*args, **kwargs)
            before = next(tensors_in(args), None)
            if isinstance(out, Tensor) and before is not None:
                for old, new in zip(take_apart([before])[0], take_apart([out])[0], strict=False):
                    if (known := self.origins.known(old)) is not None:
                        self.origins.put(new, known)
            return out
        call = len(self.operations)
        read = mapped(lambda leaf: self.origins.of(leaf) if isinstance(leaf, Tensor) else leaf, (tuple(args), kwargs))
        out = func(*args, **kwargs)
        for number, tensor in enumerate(tensors_in(out)):
            if tensor.is_nested:
                raise problems.NESTED_MADE.error(name=self.name, operator=func)
            self.origins.put(tensor, TensorOrigin(call, number))
        annotations = tuple(each for each in annotated(traceback.get_current_meta()) if each != MODULE_ANNOTATION)
        self.operations.append(Operation(func, read[0], read[1], _described(out), *self.path[-1], annotations))
        return out

    def operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Run what the block calls, note it, and hold what it gives."""
        if traces_again(func):
            raise problems.TRACES_AGAIN.error(name=self.name, operator=func)
        stream, at, first = self.stream, len(self.stream.operators), len(self.operations)
        read = list(enumerate(tensors_in((args, kwargs))))
        if torch.is_grad_enabled() and any(each.requires_grad for _, each in read):
            stream.differentiable.add(at)
            pair = eager.saved_tensor_hooks()
            if pair == self.hooks:
                self.free = True
            else:
                self.hooked = True
                ours = pair[0].__module__.startswith(f"{__package__.partition('.')[0]}.")
                self.own_checkpoint |= ours or eager.are_of_checkpoint(pair)
        if draws(func):
            out, self.states[at] = GeneratorState.around(run, args, kwargs)
        else:
            out = run()
        offsets = [each.offsets() for each in tensors_in(out) if each.is_nested]
        if any(origin is not None and origin.call >= 0 for origin in self.origins_of(offsets)):
            raise problems.NESTED_MADE.error(name=self.name, operator=func)
        written = list(tensors_in(written_by(func, args, kwargs)))
        if written:
            self.origins.wrote(written)
            self._write(at, func, written)
            if writes(func) and any(map(self.origins.is_state, written)):
                self.writes[at] = written
        stream.operators.append(func)
        self.spans.append((first, len(self.operations)))
        self.returns.append(self.origins_of(tensors_in(out)))
        outside = {number: NotedTensor.of(each) for number, each in read if self.origins.lies_outside(each)}
        if outside:
            self.noted[at] = outside
            parts = {number: take_apart([each.tensor])[0] for number, each in outside.items()}
            self.origins_noted[at] = {number: [*map(self.origins.known, own)] for number, own in parts.items()}
        if numbers := numbers_among(args, kwargs):
            self.numbers[at] = numbers
            stream.numbered.add(at)
        with outside_of_modes():
            held = HeldResult.of(without_history(out))
        if gives_number(out):
            stream.numbers.add(at)
        if held.memory or at in stream.numbers:
            self.entries[at] = held
            for address in addresses(tensors_in(held.value)):
                self.made.setdefault(address, []).append(at)
            self.unlooked_at += sum(size for _, size in held.memory)
            if self.unlooked_at > max(_LOOKS_FROM, self.looked_at):
                self._drop_thrown_away()
        return out

    def _write(self, at: int, func: Any, written: Sequence[Tensor]) -> None:
        """An operator has written; what is counted of it here, autograd itself does not count."""
        found = addresses(written)
        self.stream.within[at] = (*(made for address in found for made in self.made.get(address, ())), at)
        kept = [part for address in found for part in self.kept_parts.get(address, ())]
        before = [eager.version(part.tensor) for part in kept]
        note_write(func, written)
        for part, earlier in zip(kept, before, strict=True):
            part.version += eager.version(part.tensor) - earlier
            part.written_by = at

    def origins_of(self, tensors: Iterable[Tensor]) -> list[TensorOrigin | None]:
        """Part by part, the origins that are known."""
        return [*map(self.origins.known, take_apart(list(tensors))[0])]

    def _drop_thrown_away(self) -> None:
        """Drop results that the block has thrown away, whenever the held memory has doubled."""
        calls = enumerate(self.operations)
        needed = [call for call, each in calls if writes(each.operator) or is_kept_unread(each.operator)]
        needed += [origin.call for origin in self.read_by_backward if origin.call >= 0]
        reads = [(each.args, each.kwargs) for each in self.operations]
        gone = [self.entries.pop(at) for at in thrown_away(self.entries, self.spans, reads, needed)]
        freed = self.origins.forget(leaf for each in gone for leaf in tensors_in(each.value))
        self.made = {address: at for address, at in self.made.items() if address not in freed}
        self.looked_at = sum(size for each in self.entries.values() for _, size in each.memory)
        self.unlooked_at = 0

    def finish(self) -> None:
        """Called when the block has returned: only then is it known what it writes, and what autograd keeps."""
        origins, stream = self.origins, self.stream
        origins.finish()
        for at, outside in self.noted.items():
            parts = self.origins_noted[at]
            state = [number for number, each in outside.items() if origins.is_state(each.tensor)]
            other = [each for each in outside if each not in state and origins.is_from_outside(parts[each])]
            kept: list[int] = []
            if not writes(stream.operators[at]):  # one that writes keeps what was there before
                kept = [each for each in (*other, *state) if not self.read_by_backward.keys().isdisjoint(parts[each])]
            stream.from_outside[at], stream.kept[at] = tuple(other), tuple(kept)
            stream.state[at] = tuple(each for each in state if each in kept)
        for part in (part for own in self.kept_parts.values() for part in own if part.written_by >= 0):
            if eager.version(part.tensor) != part.version:
                stream.overwritten[part.number] = part.written_by
            else:
                stream.reach, stream.to_the_end = max(stream.reach, part.written_by + 1), True

    def saved(self, value: Any) -> None:
        """Autograd keeps a value for the backward."""
        if isinstance(value, Tensor):
            self.stream.reach = len(self.stream.operators)
            for part in take_apart([value])[0]:
                self.read_by_backward[self.origins.of(part)] = None
                if not self.origins.lies_outside(part):
                    found = _KeptPart(eager.detached(part), self.saved_so_far, eager.version(part))
                    self.kept_parts.setdefault(eager.storage_address(part), []).append(found)
        self.saved_so_far += 1


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorFacts.of(value)
    return [_described(part) for part in value] if isinstance(value, tuple | list) else None


class Observer(BlockMode):
    """Sees every operator of a block."""

    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self.observation = observation

    def suspend(self, by: int, *_given: Any) -> None:
        self.suspended += by

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        seen = self.observation
        if self.suspended:
            return self.aside(func, types, args, kwargs)

        def run() -> Any:
            if is_ignored(func) or not any(eager.is_wrapper_class(each) for each in types):
                return seen.operation(func, args, kwargs)
            with _Inside(seen):
                return func(*args, **kwargs)

        return run() if is_no_step(func, args) else seen.operator(func, args, kwargs, run)


class _Inside(eager.DispatchMode):
    """Sees what a tensor made of tensors runs for one operator on it."""

    supports_higher_order_operators = True

    def __init__(self, observation: Observation) -> None:
        super().__init__()
        self._observation = observation

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(eager.is_wrapper_class(each) for each in types):
            return NotImplemented  # its own kind knows what to run
        return self._observation.operation(func, args, kwargs or {})


@contextmanager
def watched(observation: Observation) -> Iterator[Observer]:
    """Under it, the observation knows in which module an operator runs, and what autograd saves."""
    save, give = eager.saved_tensor_hooks() or (lambda value: value, lambda value: value)
    watching = [observation]  # autograd keeps the hooks for as long as the graph lives, and is not to keep this
    own = threading.get_ident()  # another thread may run the same modules
    observer = Observer(observation)

    def gathered(_module: nn.Module, *_given: Any) -> None:
        given = observation.origins.given
        given.update(described(observation.module, ()) | given)

    def enter(path: str, module: nn.Module, *_given: Any) -> None:
        if threading.get_ident() == own:
            observation.path.append((path, type(module)))

    def leave(*_given: Any) -> None:
        if threading.get_ident() == own:
            observation.path.pop()

    def pack(value: Any) -> Any:
        for each in watching:
            each.saved(value)
        return save(value)

    handles = []
    for path, module in observation.module.named_modules():
        if path:  # first in and last out: what other hooks compute (FSDP gathers weights there) is the module's too
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                # its hooks give its parameters their first values: that happens once, and does not run again
                handles.append(module.register_forward_pre_hook(partial(observer.suspend, 1), prepend=True))
                handles.append(module.register_forward_pre_hook(partial(observer.suspend, -1)))
            handles.append(module.register_forward_pre_hook(partial(enter, path), prepend=True))
            handles.append(module.register_forward_hook(leave, always_call=True))
            if gathers(module):  # last: by then whole weights are in the place of the parts that were there
                handles.append(module.register_forward_pre_hook(gathered))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, give), observer:
            observation.hooks = eager.saved_tensor_hooks()
            yield observer
    finally:
        watching.clear()
        for handle in handles:
            handle.remove()
