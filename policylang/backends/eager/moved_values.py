"""Values that the blocks of a model move to the host or narrow: held results of a call, and block outputs that the
next block takes.

A value is moved as the memory that it lies in, once for all the tensors in it: they come back with the same strides, in
memory that they share as before. Its metadata takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from policylang.backends.copies import HostValue, narrowed, widened
from policylang.backends.eager import problems
from policylang.graph.facts import MovedRows
from policylang.language.syntax import NarrowForm
from policylang.torch_compat import tracing
from policylang.torch_compat.eager import is_zero_tensor, storage_address, storage_bytes, version
from policylang.torch_compat.graphs import outside_of_modes


@frozen(eq=False)
class _MovedPart:
    memory: HostValue
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, part: Tensor, memory: HostValue) -> _MovedPart:
        memory.tensors += 1
        return cls(memory, part.dtype, tuple(part.size()), part.stride(), int(part.storage_offset()))

    def back(self) -> Tensor:
        return self.memory.tensor(self.dtype, self.size, self.stride, self.offset)


@frozen(eq=False)
class NarrowedPart:
    """A plain part in a narrower form."""

    form: NarrowForm
    tensors: tuple[Tensor, ...]
    dtype: torch.dtype
    address: int
    version: int

    def back(self) -> Tensor:
        return widened(self.tensors, self.dtype)


@frozen(eq=False)
class MovedTensor:
    """Stands for a tensor, some of whose plain parts are on the host or narrowed."""

    layout: tracing.SubclassLayout
    parts: list[Any]
    requires_grad: bool
    is_leaf: bool

    @property
    def moved(self) -> Iterator[_MovedPart]:
        return (part for part in self.parts if isinstance(part, _MovedPart))

    @property
    def addresses(self) -> Iterator[int | None]:
        """Addresses of the memory that it replaces."""
        yield from (part.memory.address for part in self.moved)
        yield from (part.address for part in self.parts if isinstance(part, NarrowedPart))

    def back(self) -> Tensor:
        """The tensor on its device, without its history."""
        with outside_of_modes():
            plain = [part.back() if isinstance(part, _MovedPart | NarrowedPart) else part for part in self.parts]
            found: Tensor = tracing.put_together(plain, [self.layout])[0]
            found.requires_grad_(self.requires_grad)
            if self.is_leaf:
                return found
            with torch.enable_grad():  # autocast casts a leaf once, and what has a history each time
                return _WithHistory.apply(found)


class _WithHistory(torch.autograd.Function):  # type: ignore[misc]  # torch does not type it
    @staticmethod
    def forward(_context: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient


def moved_in(value: Any) -> list[MovedTensor]:
    """The moved tensors in a structure."""
    return [leaf for leaf in tracing.tree_leaves(value) if isinstance(leaf, MovedTensor)]


def back(value: Any, name: str) -> Any:
    """A structure with its tensors on their devices: all copies back are started before any is awaited. ``name``: the
    block's, as a sentence names it. Raises ``PolicyGraphError`` where memory was written to while it was copied."""
    found = moved_in(value)
    if not found:
        return value
    for each in found:
        for part in each.moved:
            if part.memory.written:
                raise problems.MOVED_WRITTEN.error(name=name, shape=list(part.size))
            part.memory.fetch()
    leaves, spec = tracing.tree_flatten(value)
    return tracing.tree_unflatten([leaf.back() if isinstance(leaf, MovedTensor) else leaf for leaf in leaves], spec)


@define(eq=False)
class Offloading:
    """Shared by the blocks of a model."""

    ahead: int = 1
    """Blocks before its recomputation at which a block's values are copied back."""
    spent: dict[int, Counter[int]] = field(factory=dict)
    """By number of a block and rule, the bytes that the rule offloads in it."""
    crossing: dict[int, tuple[StorageWeakRef, NarrowForm | None]] = field(factory=dict)
    """By address, memory that blocks have returned, and that the checkpoint which takes it moves, or narrows."""
    taken: set[int] = field(factory=set)
    """The addresses in ``crossing`` that a checkpoint has taken."""
    stayed: int = 0
    """Counts values that no checkpoint took: not its argument, or kept by hooks around it."""
    _values: dict[int, tuple[StorageWeakRef, object, ref[Any]]] = field(factory=dict)
    """By address, memory that is moved or narrowed already, and what makes a narrow form the same."""

    def returned(self, plain: Sequence[Tensor], parts: MovedRows) -> None:
        """A block has returned these plain parts; some of them are to be moved, or narrowed to a form."""
        for at in [at for at, (memory, _) in self.crossing.items() if memory.expired()]:
            del self.crossing[at]
            self.stayed += at not in self.taken
            self.taken.discard(at)
        self._values = {at: pair for at, pair in self._values.items() if not pair[0].expired()}
        for number, form in parts.items():
            if number < len(plain) and (address := storage_address(plain[number])) is not None:
                self.crossing[address] = StorageWeakRef(plain[number].untyped_storage()), form

    def held_of(self, part: Tensor) -> list[Tensor]:
        """The tensors that the next checkpoint holds on the device for a part of a block's output."""
        _, form = self.crossing.get(storage_address(part) or 0, (None, None))
        with outside_of_modes():
            return [part] if form is None else [*self._instead(part, form).tensors]

    def moved(self, value: Any, parts: MovedRows | None = None) -> Any:
        """A structure with what stands for its tensors; the same object where there is nothing to move. ``parts`` are
        the numbers of the plain parts to be moved, with the form to which one is narrowed; without it, those that cross
        blocks are moved."""
        leaves, spec = tracing.tree_flatten(value)
        number, found = 0, list(leaves)
        with outside_of_modes():
            for at, leaf in enumerate(leaves):
                if not isinstance(leaf, Tensor):
                    continue
                plain, (layout,) = tracing.take_apart([leaf])
                now = list[Any](plain)
                wanted = self._taken(plain, number) if parts is None else parts
                for each, part in enumerate(plain):
                    if number + each in wanted and _can_move(part):
                        value = self._instead(part, wanted[number + each])
                        now[each] = _MovedPart.of(part, value) if isinstance(value, HostValue) else value
                        found[at] = MovedTensor(layout, now, leaf.requires_grad, leaf.is_leaf)
                number += len(plain)
        return tracing.tree_unflatten(found, spec) if moved_in(found) else value

    def _taken(self, plain: Iterable[Any], first: int) -> MovedRows:
        """The plain parts that cross blocks, by number."""
        found: dict[int, NarrowForm | None] = {}
        for number, part in enumerate(plain, first):
            address = storage_address(part)
            memory, form = self.crossing.get(address or 0, (None, None))
            if address is not None and memory is not None and not memory.expired():
                self.taken.add(address)
                found[number] = form
        return found

    def _instead(self, part: Tensor, form: NarrowForm | None) -> Any:
        address, now = storage_address(part), version(part)
        assert address is not None
        kind = None if form is None else (form, part.dtype, part.size(), part.stride())
        memory, before, known = self._values.get(address, (None, None, lambda: None))
        value = None if memory is None or memory.expired() or before != kind else known()
        if value is None or value.version != now:
            parts = () if form is None else narrowed(part.detach(), form)
            value = HostValue(part) if form is None else NarrowedPart(form, parts, part.dtype, address, now)
            self._values[address] = StorageWeakRef(part.untyped_storage()), kind, ref(value)
        return value


def _can_move(part: Tensor) -> bool:
    return storage_bytes(part) > 0 and not (part.is_conj() or part.is_neg() or is_zero_tensor(part))
