"""Runs code of the user's: functions that are named, and modules for the operators that they register."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import policylang
from policylang.commands.inputs import print_findings, refuse
from policylang.commands.output import Exit, UsageError, tell
from policylang.errors import PolicyError
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.report.diagnostics import RENDERERS, CheckResult

_OURS = os.path.dirname(os.path.abspath(policylang.__file__)) + os.sep
_IMPORTS = ("<frozen importlib", import_module.__code__.co_filename)
_FIX = "name a function as `package.module:function`"


class UsersCodeError(Exception):
    """Around whatever code of the user's raised, the end of the process included."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def users_code() -> Iterator[None]:
    """Around calls of the user's code. Raises :class:`UsersCodeError` for what it raises, but for an interruption.

    ``SystemExit`` is an error too: a module that ends the process while it is imported has made nothing.
    """
    try:
        yield
    except (KeyboardInterrupt, UsersCodeError, UsageError):
        raise
    except BaseException as error:
        raise UsersCodeError(error) from error


def named_function(text: str) -> Callable[[], Any]:
    """The function that a text names.

    Raises ``UsageError`` where it names none, :class:`UsersCodeError` for what its module raises when it is imported.
    """
    module_name, mark, name = text.partition(":")
    if not mark or not module_name or not name or module_name.startswith("."):
        raise UsageError(f"`{text}` names no function", _FIX)
    sys.path.insert(0, "")
    with users_code():
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if (absent := _absent(module_name, error)) is None:
                raise  # it is there, and needs something that is not
            raise UsageError(f"there is no module `{absent}`", _FIX) from None
        for part in name.split("."):
            found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"`{module_name}` has no function `{name}`", _FIX)
    return found  # type: ignore[no-any-return]


def show(failed: UsersCodeError, command: str, function: str, help: str) -> Exit:
    """Print what the user's code raised: the diagnostics of a policy, or the traceback from its first frame on."""
    error = failed.error
    if isinstance(error, PolicyError):
        if error.__cause__ is not None:
            _print(error.__cause__)
        refuse(error.diagnostics)
        return Exit.DIAGNOSTICS
    theirs = _print(error)
    if isinstance(error, SystemExit):
        help = 'it ends the process; put what a module does as a script under `if __name__ == "__main__":`'
    elif theirs is not None and traceback.extract_tb(theirs)[-1].filename.startswith(_OURS):
        help = "the error was raised in policylang; if you called it as documented, please report it"
    tell(f"policylang {command}: `{function}` does not run\nhelp: {help}")
    return Exit.DIAGNOSTICS


def _print(error: BaseException) -> TracebackType | None:
    """Without the frames that lead to the user's code: ours, the import system's, and torch's where it calls back."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = (_OURS, *_IMPORTS) if torch is None else (_OURS, *_IMPORTS, os.path.dirname(torch) + os.sep)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(folders):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)
    return frames


def need_torch() -> None:
    """Raise ``UsageError`` where there is no torch."""
    if find_spec("torch") is None:
        raise UsageError("`torch` is not installed here", "pip install torch")


CANNOT_IMPORT = "APL372"
_MOST = 200
_FORM = "the name of a module, as Python imports it: `package.module`"
_NOT_HERE = "the current folder is searched for it first, then the environment of this Python"


def refused_imports(names: Sequence[str], form: str, *, findings: bool) -> Exit | None:
    """Import modules in order; failures are reported in the form of the command's output, and end the command. What the
    modules print goes to the standard error. ``findings``: the command prints diagnostics, on its standard output."""
    if names and "" not in sys.path:
        sys.path.insert(0, "")
    with redirect_stdout(sys.stderr):
        problems = tuple(filter(None, map(_problem, dict.fromkeys(names))))
    if not problems:
        return None
    if form in RENDERERS and (findings or form != "text"):
        return print_findings(CheckResult((), problems), form, failed=True)
    return refuse(problems)


def _problem(name: str) -> Diagnostic | None:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        stem = os.path.normpath(name.removesuffix(".py"))
        fix = ".".join(stem.split(os.sep)) if name.endswith(".py") else ""
        help = f"did you mean `{fix}`?" if fix and all(map(str.isidentifier, fix.split("."))) else _FORM
        return diagnose(CANNOT_IMPORT, f"`{name}` is no module", help=help)
    try:
        import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a module that ends the process has registered nothing
        if (absent := _absent(name, error)) is not None:
            return diagnose(CANNOT_IMPORT, f"there is no module `{absent}`", help=_NOT_HERE)
        said = " ".join(str(error).split())
        what = type(error).__name__ + (f": {said[:_MOST]}" if said else "")
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not _is_import_system(each.filename)]
        places = [f"in {each.filename}:{each.lineno}{f': {each.line}' if each.line else ''}" for each in frames[:1]]
        if len(frames) > 1:
            places.append(f"raised in {frames[-1].filename}:{frames[-1].lineno}")
        help = f'run `python -c "import {name}"` to see all of it'
        return diagnose(CANNOT_IMPORT, f"`{name}` cannot be imported: {what}", help=help, details=tuple(places))
    return None


def _absent(module: str, error: BaseException) -> str | None:
    """The part of a module's name that there is not; None where the module is there, and something else is wrong."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return error.name
    return None


def _is_import_system(file: str) -> bool:
    return file.startswith("<frozen ") or file in (__file__, import_module.__code__.co_filename)
