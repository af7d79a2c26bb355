"""The options of ``torch.compile(backend="policylang", options=...)``, checked before anything compiles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from attrs import frozen

from policylang.errors import PolicyMeaningError
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.torch_compat import compilers

Inner = Literal["inductor", "aot_eager"]
_INNER: tuple[str, ...] = get_args(Inner)
_OWN = ("policy", "inner", "root", "agree")
_EXAMPLE = 'options={"policy": "llama3_sac.apl"}'
BAD_OPTION = "APL250"


@frozen
class Options:
    policy: Path | Policy
    inner: Inner
    root: str
    agree: bool
    settings: dict[str, Any]
    """Inductor's own settings, passed on."""


def parse(options: Mapping[str, Any] | None, mode: str | None, known: Policy | None = None) -> Options:
    """``known``: the policy where none is named, from a checkpoint that has one.

    Raises ``PolicyMeaningError`` with everything that is wrong with the options.
    """
    given = dict(options or {})
    problems: list[Diagnostic] = []
    path = given.pop("policy", known)
    if path is None:
        # torch.compile takes a mode or options, not both
        with_mode = f'torch.compile(model, backend=policylang.backend("llama3_sac.apl"), mode="{mode}")'
        help = with_mode if mode else f'torch.compile(model, backend="policylang", {_EXAMPLE})'
        problems.append(_bad('the backend "policylang" needs a policy', help))
    elif not isinstance(path, (str, os.PathLike)) and path is not known:
        problems.append(_bad(f"the option `policy` is a path, not a {type(path).__name__}", f"for example {_EXAMPLE}"))
    inner = given.pop("inner", "inductor")
    root = given.pop("root", "")
    agree = given.pop("agree", True)
    problems += check_own(inner, root, agree)
    if not problems:
        problems += _check_settings(given, inner)
    if problems:
        raise PolicyMeaningError(problems)
    policy = path if isinstance(path, Policy) else Path(path)
    return Options(policy, inner, root, agree, settings(inner, mode, given))


def check_own(inner: object, root: object, agree: object) -> list[Diagnostic]:
    """What is wrong with the options that are policylang's own."""
    problems: list[Diagnostic] = []
    if inner not in _INNER:
        problems.append(_bad(f"unknown inner compiler `{inner}`", f"one of {', '.join(_INNER)}"))
    if not isinstance(root, str):
        problems.append(
            _bad(f"the option `root` is a module path, not a {type(root).__name__}", 'for example root="layers.0"')
        )
    if not isinstance(agree, bool):
        problems.append(_bad(f"the option `agree` is True or False, not a {type(agree).__name__}", None))
    return problems


def settings(inner: Inner, mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor's settings for ``torch.compile``'s ``mode`` and options. Raises ``PolicyMeaningError``."""
    given = dict(options or {})
    problems = _check_settings(given, inner)
    named: dict[str, Any] = {}
    if mode not in (None, "default") and inner == "inductor":
        try:
            named = compilers.inductor_mode(str(mode))
        except RuntimeError as error:
            problems.append(_bad(str(error), None))
    if problems:
        raise PolicyMeaningError(problems)
    return {**named, **{name.replace("-", "_"): value for name, value in given.items()}}


def _check_settings(given: Mapping[str, Any], inner: str) -> list[Diagnostic]:
    """Names that are neither ours nor, under Inductor, one of Inductor's settings."""
    if not given:
        return []
    known = compilers.inductor_settings() if inner == "inductor" else {}
    return [_unknown(name, known) for name in given if name.replace("-", "_") not in known]


def _unknown(name: str, known: Mapping[str, Any]) -> Diagnostic:
    near = get_close_matches(name, [*_OWN, *known], n=1)
    options = f"the options are {', '.join(_OWN)}" + (" and the settings of Inductor" if known else "")
    return _bad(f"unknown option `{name}`", f"did you mean `{near[0]}`?" if near else options)


def _bad(message: str, help: str | None) -> Diagnostic:
    return Diagnostic(BAD_OPTION, message, help=help)
