"""``policylang.backend``, ``policylang.partitioner`` and ``policylang.pass_``: a policy for ``torch.compile``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from policylang.api.load import DeviceLike, PolicyLike, policy_of
from policylang.backends.torch_compile import inductor
from policylang.backends.torch_compile.backend import (
    PolicyBackend,
    PolicyPartitioner,
    PolicyPass,
    policy_around,
    warn_of_recompile_limit,
)
from policylang.backends.torch_compile.inductor import Inner
from policylang.errors import PolicyError, PolicyMeaningError, check_flags
from policylang.graph import marks
from policylang.language.syntax import Policy
from policylang.planning.plan import policy_text
from policylang.torch_compat import compilers


def backend(
    policy: PolicyLike,
    inner: Inner = "inductor",
    root: str = "",
    agree: bool = True,
    *,
    device: DeviceLike | None = None,
) -> PolicyBackend:
    """A backend for ``torch.compile`` that follows a policy. Make one for each model.

    ``policy`` is a path, or what ``policylang.load`` or ``policylang.parse`` returns. ``inner`` compiles the forward
    and the backward graph: ``"inductor"``, or ``"aot_eager"``, which runs them operator by operator. ``root`` is the
    module's path in its model, if you compile it separately: with ``root="layers.0"`` the policy sees the paths of the
    whole model. With ``agree``, ranks that share a graph compare their plans before they compile it. ``device`` is as
    in :func:`policylang.load`.

    Raises ``PolicyError`` for a policy that cannot be read or has errors, and for options that do not exist.
    """
    problems = inductor.check_own(inner, root, agree)
    if problems:
        raise PolicyMeaningError(problems)
    made = PolicyBackend(policy_of(policy, device), inner=inner, root=root, agree=agree)
    warn_of_recompile_limit(made)
    return made


def partitioner(policy: PolicyLike, root: str = "", agree: bool = True) -> PolicyPartitioner:
    """A partitioner that follows a policy.

    It is a ``CustomPartitionerFn`` for Inductor's ``custom_partitioner_fn``, and a ``partition_fn`` for AOTAutograd.
    ``root`` and ``agree`` as in :func:`policylang.backend`. Each graph has to fit the whole policy: a rule that matches
    nothing in one of several graphs is an error there, unless it is ``optional``.

    Raises ``PolicyError`` for a policy that cannot be read or has errors, and for options that do not exist.
    """
    problems = inductor.check_own("inductor", root, agree)
    if problems:
        raise PolicyMeaningError(problems)
    return PolicyPartitioner(policy_of(policy), root, agree)


def pass_(policy: PolicyLike, *, mesh: Any = None, agree: bool = True) -> PolicyPass:
    """A policy as a graph pass: given a graph module it returns the module, given a graph it changes it and returns
    None.

    Inductor takes it as a ``CustomGraphPass``: its ``uuid`` covers the policy's text, the version of the language and
    the code that applies it. ``mesh`` and ``agree`` are as in ``policylang.apply``; in a hook, ranks do not compare.

    Raises ``PolicyError`` for a policy that cannot be read or has errors.
    """
    check_flags(agree=agree)
    return PolicyPass(policy_of(policy), mesh, agree)


def policylang_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """``torch.compile(model, backend="policylang", options={"policy": path})``.

    Further options: ``inner``, ``root`` and ``agree``, as in :func:`backend`, and any setting of Inductor. Graphs
    compiled with the same policy file and options count as one model. Blocks in checkpoints under a policy need no
    options: then it is that of the checkpoint.
    """
    try:
        chosen = inductor.parse_options(options, mode, policy_around(gm))
        policy = policy_of(chosen.policy)
    except PolicyError as error:
        raise compilers.through_dynamo(error, sys._getframe()) from None
    place = policy_text(policy) if isinstance(chosen.policy, Policy) else str(chosen.policy.absolute())
    key = (place, chosen.inner, chosen.root, chosen.agree)
    serving = _by_options.get(key)
    lines = [rule.span for rule in policy.rules]  # which reports name
    if serving is None or serving.policy != policy or [rule.span for rule in serving.policy.rules] != lines:
        serving = PolicyBackend(policy, inner=chosen.inner, root=chosen.root, agree=chosen.agree)
        _by_options[key] = serving
    return serving(gm, example_inputs, mode=mode, options=chosen.settings)


def _reset() -> None:
    _by_options.clear()


_by_options: dict[tuple[str, Inner, str, bool], PolicyBackend] = {}
setattr(policylang_backend, marks.COMPILER, True)
policylang_backend.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() looks for it
