"""Which compiled modules carry out policies by themselves."""

from __future__ import annotations

from torch import nn

from policylang.torch_compat.dynamo import compiler_of

MARK = "__policylang_compiler__"
"""The attribute of a backend for ``torch.compile`` that follows a policy."""


def carries_policies(module: nn.Module) -> bool:
    """Whether a compiled module was compiled with a backend of ours."""
    return bool(getattr(compiler_of(module), MARK, False))
