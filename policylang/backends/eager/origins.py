"""The stream of a running block: where its tensors come from, and what its operators read, write, draw and give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from threading import RLock
from typing import Any, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from policylang.graph.facts import InputKind
from policylang.operators.calls import updated_statistics
from policylang.torch_compat import eager
from policylang.torch_compat.graphs import HigherOrderOperator, outside_of_modes, schema_of, side_effect_functions
from policylang.torch_compat.tracing import take_apart
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
    """The origins of the plain tensors of one call of a block; tensor subclasses are looked up part by part. A tensor
    is known by identity while it lives. Where autograd returns another object for the same value, as for saved tensors,
    it is known by its place in memory: the origin is the last call that returned that place."""

    given: dict[int, tuple[InputKind, str]]
    """Tensors from outside, by ``id``; they live as long as the call."""
    externals: list[External] = field(factory=list)
    state: set[int] = field(factory=set)
    """The memory from outside, by address, that the block has written to: its next call writes there again."""
    _outside: set[int | None] = field(factory=set)
    _by_tensor: Any = field(factory=eager.WeakTensorKeyDictionary)
    _by_place: dict[Geometry, TensorOrigin] = field(factory=dict)

    def of(self, tensor: Tensor) -> TensorOrigin:
        """A tensor that nobody has seen is from outside."""
        found = self.known(tensor)
        if found is None:
            kind, name = self.given.get(id(tensor), (InputKind.OTHER, ""))
            found = TensorOrigin(OUTSIDE, len(self.externals))
            self.externals.append(External(tensor, kind, name))
            self._outside.add(eager.storage_address(tensor))
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
        """Called when the block has returned: memory that it has filled and freed is filled in each of its runs."""
        self.state -= addresses(each.tensor for each in self.externals if eager.storage_is_freed(each.tensor))

    def forget(self, gone: Iterable[Tensor]) -> set[int]:
        """Memory is about to be given back: what lies there later is another value. Returns its addresses."""
        freed = addresses(gone)
        self._by_place = {place: origin for place, origin in self._by_place.items() if place[0] not in freed}
        return freed

    def is_from_outside(self, parts: Iterable[TensorOrigin | None]) -> bool:
        """A parameter, a buffer or a constant, not an argument of the call."""
        return all(
            each is not None and each.call == OUTSIDE and self.externals[each.result].kind is not InputKind.USER
            for each in parts
        )

    def lies_outside(self, tensor: Tensor) -> bool:
        """The block has not made its memory; without an address it may be a part of anything."""
        found = addresses([tensor])
        return not found or not self._outside.isdisjoint(found)

    def is_state(self, tensor: Tensor) -> bool:
        """It lies in memory from outside that the block has written to."""
        return bool(self.state) and not self.state.isdisjoint(addresses([tensor]))

    def same_memory(self) -> dict[int, int]:
        """By the number of a tensor from outside, the first one in the same memory, where the block writes there: one
        is a view of the other (``buffer.data``), which no operator says."""
        first: dict[int, int] = {}
        found: dict[int, int] = {}
        for number, external in enumerate(self.externals):
            at = eager.storage_address(external.tensor)
            if at in self.state and first.setdefault(at, number) != number:
                found[number] = first[at]
        return found


def addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the tensors' storages."""
    return {at for part in take_apart(list(tensors))[0] if (at := eager.storage_address(part)) is not None}


def described(module: nn.Module, inputs: Iterable[Tensor]) -> dict[int, tuple[InputKind, str]]:
    """The kind and name of a block's inputs and state, by ``id``. A tensor that is both is an input."""
    state = read_state(module)
    named = [
        *((tensor, InputKind.PARAMETER, name) for name, tensor in state.parameters.items()),
        *((tensor, InputKind.BUFFER, name) for name, tensor in (state.buffers | state.attributes).items()),
        *((tensor, InputKind.USER, f"input {number}") for number, tensor in enumerate(inputs)),
    ]
    return {id(part): (kind, name) for tensor, kind, name in named for part in take_apart([tensor])[0]}


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """The version of a tensor's memory, and its size."""
    return eager.version(tensor), eager.storage_bytes(tensor)


WRITTEN_TO = "that was written to in place"


@frozen(eq=False)
class HeldResult:
    """An operator's result, as tensors without a history, and the memory of each."""

    value: Any
    memory: list[tuple[int, int]]

    @classmethod
    def of(cls, value: Any) -> HeldResult:
        return cls(value, [memory_of(each) for each in tensors_in(value)])

    def changed(self) -> str:
        """The change of its memory since, as a phrase; empty where there is none."""
        found = [memory_of(each) for each in tensors_in(self.value)]
        if found == self.memory:
            return ""
        resized = [size for _, size in found] != [size for _, size in self.memory]
        return "its memory was freed or resized" if resized else WRITTEN_TO


@frozen(eq=False)
class NotedTensor:
    """A tensor that an operator has read, and its memory at that time: its address, and how often it was written to."""

    tensor: Tensor
    memory: tuple[int | None, int]

    @classmethod
    def of(cls, tensor: Tensor) -> NotedTensor:
        return cls(tensor, (eager.storage_address(tensor), eager.version(tensor)))


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """An operator's arguments or results with each leaf changed."""
    if isinstance(value, tuple | list):
        return type(value)([mapped(change, part) for part in value])
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return change(value)


def without_history(value: Any) -> Any:
    """A result as detached tensors of the same memory."""
    return mapped(eager.detached, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results, in order."""
    return leaves_in(value, Tensor)


def leaves_in(value: Any, kind: type[_T] | tuple[type[_T], ...]) -> Iterator[_T]:
    """The leaves of one type, or some, among the arguments or results of an operator or a block, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from leaves_in(part, kind)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves_in(part, kind)
    elif is_dataclass(value) and not isinstance(value, type):  # blocks hand each other such states
        for each in fields(value):
            part = getattr(value, each.name, None)
            if not is_dataclass(part):  # it may lead back to this one
                yield from leaves_in(part, kind)


def _place(tensor: Tensor) -> Geometry | None:
    address = eager.storage_address(tensor)
    if address is None:
        return None
    return address, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype


_IGNORED = eager.ignored_operators()
VIEW = torch.ops.aten.view.default


@define(eq=False)
class OperatorStream:
    """The operators of one call of a block; the other fields count them from 0."""

    operators: list[Any] = field(factory=list)
    """The calls of the block: on tensor subclasses (DTensor), one of these is several operations, or none."""
    reach: int = 0
    """The number that had run when the last value was saved: a checkpoint recomputes so many."""
    within: dict[int, tuple[int, ...]] = field(factory=dict)
    """By operator that writes, the operators that have returned this memory, itself among them."""
    to_the_end: bool = False
    """An operator writes to what autograd has kept by then, which autograd does not count: a checkpoint that stops with
    the last saved value would come before it."""
    overwritten: dict[int, int] = field(factory=dict)
    """By number, in autograd's order, the saved values that the block writes to later, and the last operator that does:
    autograd counts these writes, and refuses the value in a backward."""
    differentiable: set[int] = field(factory=set)
    """Operators that a gradient flows through."""
    numbers: set[int] = field(factory=set)
    """Operators that returned data of a tensor to Python (``item``, ``equal``): a graph has no nodes for them, and the
    block's next operators may depend on them."""
    numbered: set[int] = field(factory=set)
    """Operators that are called with plain numbers."""
    from_outside: dict[int, tuple[int, ...]] = field(factory=dict)
    """By operator, the parameters, buffers and constants that it reads and the block does not write to."""
    kept: dict[int, tuple[int, ...]] = field(factory=dict)
    """By operator, the arguments that autograd keeps and that lie in memory from outside: the recomputation keeps their
    current content, whatever the operator returns."""
    state: dict[int, tuple[int, ...]] = field(factory=dict)
    """By operator, the tensors from outside that the block writes to."""


@cache
def is_ignored(operator: Any) -> bool:
    """No operator of the block: autograd calls it as often as it likes, or it only marks a place in a profile."""
    return operator in _IGNORED or getattr(operator, "namespace", "") == "profiler"


def is_same_view(args: Sequence[Any]) -> bool:
    """A ``view`` that returns its argument. Module trackers call it (``view_as``) to hang a hook on a tensor, in a
    forward and not in its recomputation."""
    return len(args) == 2 and tuple(args[1]) == tuple(args[0].shape)


def is_no_step(operator: Any, args: Sequence[Any]) -> bool:
    """A call that is not counted among the operators of a block."""
    return is_ignored(operator) or (operator is VIEW and is_same_view(args))


@cache
def is_kept_unread(operator: Any) -> bool:
    """A graph keeps the operator although nobody reads its result."""
    return schema_of(operator) is None or draws(operator) or operator in side_effect_functions()


_NUMBERS = frozenset((int, float, bool, complex))


def numbers_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The plain numbers that an operator is called with: a counter of Python's may be among them, or a draw."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if type(value) in _NUMBERS:
            found.append(value)
        elif isinstance(value, tuple | list):
            found.extend([part for part in value if type(part) in _NUMBERS])
    return found


def draws(operator: Any) -> bool:
    """torch tags the operator as drawing random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def gives_data(operator: Any, masked: bool) -> bool:
    """torch tags the operator as returning a size that depends on data. ``masked``: it reads truth values, without
    which an ``index`` does not."""
    by_data = torch.Tag.dynamic_output_shape in getattr(operator, "tags", ())
    return by_data and (masked or operator is not torch.ops.aten.index.Tensor)


@cache
def traces_again(operator: Any) -> bool:
    """The operator takes functions that its backward traces, which fails unless torch has compiled them first
    (:func:`policylang.torch_compat.eager.failed_in`)."""
    return isinstance(operator, HigherOrderOperator) and operator.name() in ("cond", "map_impl", "scan")


def gives_number(out: Any) -> bool:
    """The result gives Python the data of a tensor."""
    return isinstance(out, bool | int | float | complex)


@cache
def writes(operator: Any) -> bool:
    """The operator's schema declares a write to an argument."""
    schema = schema_of(operator)
    return bool(schema is not None and schema.is_mutable)


@cache
def gives_what_it_writes(operator: Any) -> bool:
    """An operator that writes returns nothing but the arguments that it has written to."""
    return all(each.alias_info is not None and each.alias_info.is_write for each in schema_of(operator).returns)


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, by its schema, or running statistics."""
    if not writes(operator):
        return [args[at] for at in updated_statistics(operator, args)]
    return [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(schema_of(operator).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


_drawing = RLock()
"""Held while an operator draws: threads share the generators of devices."""


@frozen(eq=False)
class GeneratorState:
    """The generator that a call draws from, and its states before and behind the call; None where its device has no
    generator."""

    generator: torch.Generator | None
    before: Tensor | None
    behind: Tensor | None

    @classmethod
    def around(
        cls, run: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, GeneratorState]:
        """Run an operator, and note the states. The generator is the one that it is given, else that of its device."""
        generator: torch.Generator | None = kwargs.get("generator")
        if generator is None:
            device = kwargs.get("device")
            if device is None:
                device = next((value.device for value in args if isinstance(value, torch.Tensor)), "cpu")
            generator = eager.default_generator(torch.device(device))
        if generator is None:
            return run(), cls(None, None, None)
        with _drawing:
            before, out = generator.get_state(), run()
            return out, cls(generator, before, generator.get_state())

    def again(self, run: Callable[[], Any], given: torch.Generator | None) -> tuple[Any, bool]:
        """Run the operator with the numbers that it drew, and say whether it has: not if something else drew from the
        generator meanwhile, in the forward or now. Afterwards the generator goes on as if nothing had. ``given``: what
        the operator is given this time, another object where the block makes one."""
        generator = given or self.generator
        if generator is None or self.before is None or self.behind is None:
            return run(), True
        with _drawing:
            now = generator.get_state()
            generator.set_state(self.before)
            try:
                out, behind = run(), generator.get_state()
            finally:
                generator.set_state(now)
        with outside_of_modes():
            return out, torch.equal(behind, self.behind)
