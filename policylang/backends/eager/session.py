"""The blocks of one model under one policy, and the two contexts that a checkpoint enters around each call of one.

A checkpoint asks for its contexts without saying what it is about to run. Which block that is, and with what inputs,
is known once the block is called inside the first context: hooks on the blocks say so. They come after what other
hooks do before a forward (FSDP gathers weights there) and before what they do after it: that is none of the block's.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from attrs import define, field
from torch import nn

from policylang._torch_eager import clear_cast_weights, graph_being_traced
from policylang.backends.eager import problems
from policylang.backends.eager.recording import Forward as ForwardFunction
from policylang.backends.eager.region import Region
from policylang.backends.eager.replay import Again, Call, Forward
from policylang.errors import PolicyMatchError
from policylang.language.syntax import Policy

_running = threading.local()


@define(eq=False)
class Session:
    """``regions``: by module, each block that a checkpoint may run."""

    policy: Policy
    strict: bool
    names: tuple[str, ...] = ()
    """Of the model's blocks, in order; empty where only one module is known."""
    regions: WeakKeyDictionary[nn.Module, Region] = field(factory=WeakKeyDictionary)
    settled: bool = False

    def add(self, module: nn.Module, root: str, number: int | None = None) -> None:
        """``number``: which of the model's blocks it is, where that is known."""
        names = self.names if number is not None else ()
        self.regions[module] = Region(self.policy, root, self.strict, names, number)

    def watch(self) -> None:
        """Put the hooks on the blocks."""
        for module in list(self.regions):
            module.register_forward_pre_hook(self._before, with_kwargs=True)
            module.register_forward_hook(self._after, prepend=True, with_kwargs=True)

    def contexts(self) -> tuple[Around, Around]:
        """What a checkpoint enters around the forward and around the recomputation of one call."""
        first = Around(self, None)
        return first, Around(self, first)

    def settle(self) -> None:
        """Raise ``PolicyMatchError`` for each rule that matched nothing in any block, once all have been planned."""
        regions = [region for region in self.regions.values() if region.number is not None]
        if self.settled or len(regions) < 2 or any(not region.nothing for region in regions):
            return
        self.settled = True
        ways = [found for region in regions for found in region.nothing.values()]
        shared = set.intersection(*({(each.message, each.span) for each in found} for found in ways))
        wrong = [each for each in ways[0] if (each.message, each.span) in shared]
        if wrong:
            raise PolicyMatchError(wrong)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        around = self.around()
        if around is not None:
            around.begin(module, module.forward, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        around = self.around()
        if around is not None:
            around.end(module, args, kwargs)

    def around(self) -> Around | None:
        """The innermost context that is entered, if it is one of ours and nothing is being traced."""
        stack: list[Around] = getattr(_running, "stack", [])
        return stack[-1] if stack and stack[-1].session is self and graph_being_traced() is None else None


class Around:
    """The context of a forward, or (with ``first``, that of its forward) of a recomputation."""

    def __init__(self, session: Session, first: Around | None) -> None:
        self.session = session
        self.first = first
        self.call: Call | None = None
        self._module: nn.Module | None = None
        self._mode: Forward | Again | None = None
        self._depth = 0

    def __enter__(self) -> Around:
        if not hasattr(_running, "stack"):
            _running.stack = []
        _running.stack.append(self)
        self._module, self._depth = None, 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _running.stack.remove(self)
        self._leave()
        if kind is None and self._module is None and graph_being_traced() is None:
            raise problems.not_run([region.root for region in self.session.regions.values()])

    def begin(
        self, module: nn.Module, forward: ForwardFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A block is about to run: follow its plan from here on. One inside another is part of it."""
        if self._mode is not None:
            self._depth += module is self._module
            return
        region = self.session.regions[module]
        if self._module is not None:
            raise problems.run_twice(problems.block(self._module, self.session.regions[self._module].root))
        if self.first is None:
            self.call = region.begin(module, forward, args, kwargs)
            self.session.settle()
            self._mode = Forward(self.call)
        else:
            assert self.first.call is not None
            self._mode = Again(self.first.call)
        self._module = module
        clear_cast_weights()
        self._mode.__enter__()

    def end(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A block has run."""
        if module is not self._module or self._mode is None:
            return
        if self._depth:
            self._depth -= 1
            return
        mode = self._mode
        self._leave()
        if isinstance(mode, Forward):
            mode.end()
            assert self.call is not None
            self.session.regions[module].end(self.call, module, args, kwargs)

    def _leave(self) -> None:
        if self._mode is not None:
            mode, self._mode = self._mode, None
            mode.__exit__(None, None, None)
