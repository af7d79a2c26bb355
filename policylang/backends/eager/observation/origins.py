"""Where the tensors that a running block reads come from: which call made each, or what it is outside of the block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from attrs import define, field, frozen
from torch import Tensor, nn

from policylang.graph.facts import InputKind
from policylang.torch_compat.eager import (
    WeakTensorKeyDictionary,
    detached,
    storage_address,
    storage_bytes,
    storage_is_freed,
    version,
)
from policylang.torch_compat.subclasses import take_apart
from policylang.tracing.step import read_state

_T = TypeVar("_T")

OUTSIDE = -1


@frozen
class TensorOrigin:
    """The number of a call and of its result; :data:`OUTSIDE` and the number of a tensor from outside."""

    call: int
    result: int


@frozen(eq=False)
class External:
    """A tensor that the block reads and did not make."""

    tensor: Tensor
    kind: InputKind
    name: str


Geometry = tuple[int, int, tuple[int, ...], tuple[int, ...], Any]


@define(eq=False)
class Origins:
    """Of the plain tensors of one call of a block. Tensors made of tensors are looked up part by part.

    A tensor is known by itself, and for as long as it lives. Where autograd hands on another object for the same value,
    as it does with what it saves, it is known by its place in memory: the call that gave that place last made it.
    """

    given: dict[int, tuple[InputKind, str]]
    """By ``id``, what is known of tensors from outside; they live as long as the call."""
    externals: list[External] = field(factory=list)
    state: set[int] = field(factory=set)
    """The memory from outside, by address, that the block has written to: its next call writes there again."""
    _outside: set[int | None] = field(factory=set)
    _by_tensor: Any = field(factory=WeakTensorKeyDictionary)
    _by_place: dict[Geometry, TensorOrigin] = field(factory=dict)

    def of(self, tensor: Tensor) -> TensorOrigin:
        """A tensor that nobody has seen is from outside."""
        found = self.known(tensor)
        if found is None:
            kind, name = self.given.get(id(tensor), (InputKind.OTHER, ""))
            found = TensorOrigin(OUTSIDE, len(self.externals))
            self.externals.append(External(tensor, kind, name))
            self._outside.add(storage_address(tensor))
            self.put(tensor, found)
        return found

    def wrote(self, tensors: Iterable[Tensor]) -> None:
        """An operator has written to these."""
        self.state |= {at for at in addresses(tensors) if at in self._outside}

    def known(self, tensor: Tensor) -> TensorOrigin | None:
        found: TensorOrigin | None = self._by_tensor.get(tensor)
        if found is None and id(tensor) not in self.given:
            place = _place(tensor)
            found = None if place is None else self._by_place.get(place)
        return found

    def put(self, tensor: Tensor, origin: TensorOrigin) -> None:
        self._by_tensor[tensor] = origin
        place = _place(tensor)
        if place is not None:
            self._by_place[place] = origin

    def finish(self) -> None:
        """To be called when the block has returned: what it has filled and let go of, it fills each time it runs."""
        self.state -= addresses(each.tensor for each in self.externals if storage_is_freed(each.tensor))

    def forget(self, gone: Iterable[Tensor]) -> None:
        """Memory is about to be given back: what lies there later is another value."""
        freed = addresses(gone)
        self._by_place = {place: origin for place, origin in self._by_place.items() if place[0] not in freed}

    def of_parts(self, tensor: Tensor) -> list[TensorOrigin | None]:
        return [self.known(part) for part in take_apart([tensor])[0]]

    def is_from_outside(self, parts: Iterable[TensorOrigin | None]) -> bool:
        """Whether these are a parameter's, a buffer's or a constant's; what the block was called with is not meant."""
        return all(
            each is not None and each.call == OUTSIDE and self.externals[each.result].kind is not InputKind.USER
            for each in parts
        )

    def lies_outside(self, tensor: Tensor) -> bool:
        """Whether it lies in memory that the block has not made; what has none may be a part of anything."""
        found = addresses([tensor])
        return not found or not self._outside.isdisjoint(found)

    def is_state(self, tensor: Tensor) -> bool:
        """Whether it lies in memory from outside that the block has written to."""
        return bool(self.state) and not self.state.isdisjoint(addresses([tensor]))

    def same_memory(self) -> dict[int, int]:
        """By the number of a tensor from outside, the first one in the same memory, where the block writes there: one
        is a view of the other (``buffer.data``), which no operator says."""
        first: dict[int, int] = {}
        found: dict[int, int] = {}
        for number, external in enumerate(self.externals):
            at = storage_address(external.tensor)
            if at in self.state and first.setdefault(at, number) != number:
                found[number] = first[at]
        return found


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Which memory tensors lie in."""
    return {at for part in take_apart(list(tensors))[0] if (at := storage_address(part)) is not None}


def described(module: nn.Module, inputs: Iterable[Tensor]) -> dict[int, tuple[InputKind, str]]:
    """What is known of the tensors that a block is called with and has. A tensor that is both is an input."""
    state = read_state(module)
    found: dict[int, tuple[InputKind, str]] = {}
    named = [
        *((tensor, InputKind.PARAMETER, name) for name, tensor in state.parameters.items()),
        *((tensor, InputKind.BUFFER, name) for name, tensor in (state.buffers | state.attributes).items()),
        *((tensor, InputKind.USER, f"input {number}") for number, tensor in enumerate(inputs)),
    ]
    for tensor, kind, name in named:
        for part in take_apart([tensor])[0]:
            found[id(part)] = kind, name
    return found


Memory = tuple[int, int]
"""How often the memory of a tensor has been written to, and how large it is."""


def memory_of(tensor: Tensor) -> Memory:
    return version(tensor), storage_bytes(tensor)


@frozen(eq=False)
class HeldResult:
    """What an operator gave, as tensors without a history, and the memory of each."""

    value: Any
    memory: list[Memory]

    @classmethod
    def of(cls, value: Any) -> HeldResult:
        return cls(value, [memory_of(each) for each in tensors_in(value)])

    def changed(self) -> str:
        """What has happened to its memory since, as a sentence says it; empty where nothing has."""
        found = [memory_of(each) for each in tensors_in(self.value)]
        if found == self.memory:
            return ""
        resized = [size for _, size in found] != [size for _, size in self.memory]
        return "its memory was let go or resized" if resized else "that was written to in place"


@frozen(eq=False)
class NotedTensor:
    """A tensor that an operator has read, and its memory at that time: its address, and how often it was written to."""

    tensor: Tensor
    memory: tuple[int | None, int]

    @classmethod
    def of(cls, tensor: Tensor) -> NotedTensor:
        return cls(tensor, (storage_address(tensor), version(tensor)))


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An operator's arguments or results with each leaf changed."""
    if isinstance(value, tuple | list):
        return type(value)([mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return change(value)


def without_history(value: Any) -> Any:
    """What an operator gave, as tensors of the same memory."""
    return mapped(detached, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Of an operator's arguments or results, in order."""
    return leaves_in(value, Tensor)


def leaves_in(value: Any, kind: type[_T]) -> Iterator[_T]:
    """Those of a kind in an operator's arguments or results, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves_in(part, kind)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves_in(part, kind)


def _place(tensor: Tensor) -> Geometry | None:
    address = storage_address(tensor)
    if address is None:
        return None
    return address, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype
