"""Which calls of a block a checkpoint can follow: none that something else traces, transforms, compiles or shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from policylang.backends.eager import problems
from policylang.backends.eager.observation.fsdp_hooks import is_first_fsdp
from policylang.graph import marks
from policylang.torch_compat.compilers import compiler_of, is_compiled
from policylang.torch_compat.eager import differentiated_by_transform, graph_being_traced, transformed


def traced_for_others() -> bool:
    """Whether the model is being traced by torch's exporters: what they write down has no backward of its own."""
    return bool(torch.jit.is_tracing() or torch.compiler.is_exporting())


def runs_for_backward(module: nn.Module) -> bool:
    """Whether a block runs as it does in training, and nothing traces or transforms it."""
    if not (module.training and torch.is_grad_enabled()) or transformed() or traced_for_others():
        return False
    return graph_being_traced() is None and any(each.requires_grad for each in module.parameters())


def stands_aside(module: nn.Module, root: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the block is to run as it is. Warns where a backward could follow.

    Raises ``PolicyGraphError`` under a transformation that differentiates by itself: nothing it keeps can be saved or
    recomputed from here.
    """
    if traced_for_others() or any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values())):
        return True
    if not transformed():
        return False
    name = problems.block(module, root)
    if differentiated_by_transform():
        raise problems.DIFFERENTIATED.error(name=name)
    if torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters()):
        problems.warn(problems.RUNS_TRANSFORMED.diagnostic(name=name))
    return True


def carries_policies(module: nn.Module) -> bool:
    """Whether a compiled module was compiled with a backend of policylang's, which carries out policies by itself."""
    return bool(getattr(compiler_of(module), marks.COMPILER, False))


def check_parts(module: nn.Module, root: str) -> None:
    """Raises ``PolicyGraphError`` where a block or a part of it does not run as operators that repeat.

    A block that policylang's compiler left to eager is followed there; any other compiled code has no operators.
    """
    name = problems.block(module, root)
    parts = {inner: ".".join(filter(None, (root, path))) for path, inner in module.named_modules()}
    for inner, path in parts.items():
        if is_compiled(inner):
            if inner is not module:
                raise problems.COMPILED_PART.error(name=name, part=problems.block(inner, path))
            if not carries_policies(module):
                raise problems.COMPILED.error(name=name)
            problems.warn(problems.RUNS_UNCOMPILED.diagnostic(name=name))
    for inner, path in parts.items():
        if is_first_fsdp(inner):
            raise problems.FIRST_FSDP.error(name=name, part=problems.block(inner, path))
