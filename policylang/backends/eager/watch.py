"""Hooks that say which block a checkpoint runs, and with what inputs.

Either the block is called inside the checkpoint, or the checkpoint lies in the block's own call, around its forward.
The hooks come after what other hooks do before a forward (FSDP gathers weights there) and before what they do after it:
that is none of the block's.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import nn

from policylang.backends.eager.session import BlockCall, Session, stack


@frozen(eq=False)
class Watch:
    """The hooks of one block. A copied model has watches of its own, which know its blocks by what they are called."""

    session: Session
    root: str
    number: int | None

    def put_on(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.done, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        return Watch(self.session, self.root, self.number)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():  # our compiler takes the checkpoint out, others ask for its contexts
            return
        called = BlockCall(self.session, module, self.session.add(module, self.root, self.number), args, kwargs)
        around = self.session.around()
        if around is not None:
            around.begin(called)
        else:
            stack("called").append(called)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        around = self.session.around()
        if around is not None:
            around.end(module, output)
            return
        called: list[BlockCall] = stack("called")
        if called and called[-1].module is module and called[-1].session is self.session:
            for each in called[-1].checkpoints:
                each.returned(output)

    def done(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Also where the block raised."""
        if torch.compiler.is_compiling():
            return
        called: list[BlockCall] = stack("called")
        if called and called[-1].module is module and called[-1].session is self.session:
            called.pop()
