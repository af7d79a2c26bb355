"""Runs code of the user's: an error in it is shown as Python shows it, from the user's first frame on."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import policylang
from policylang.commands.shared.exit import Exit, UsageError
from policylang.commands.shared.output import tell
from policylang.errors import PolicyError

_OURS = os.path.dirname(os.path.abspath(policylang.__file__)) + os.sep
_IMPORTS = ("<frozen importlib", import_module.__code__.co_filename)
_MEND = "name a function as `package.module:function`"


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
        raise UsageError(f"`{text}` names no function", _MEND)
    sys.path.insert(0, "")
    with users_code():
        try:
            found: Any = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # it is there, and needs something that is not
            raise UsageError(f"there is no module `{error.name}`", _MEND) from None
        for part in name.split("."):
            found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"`{module_name}` has no function `{name}`", _MEND)
    return found  # type: ignore[no-any-return]


def show(failed: UsersCodeError, command: str, function: str, help: str) -> Exit:
    """Print what the user's code raised: the diagnostics of a policy, or the traceback from its own first frame on."""
    from policylang.commands.shared.inputs import refuse

    error = failed.error
    if isinstance(error, PolicyError):
        if error.__cause__ is not None:
            _print(error.__cause__)
        refuse(error.diagnostics)
        return Exit.DIAGNOSTICS
    _print(error)
    tell(f"policylang {command}: `{function}` does not run\nhelp: {_mend(error, help)}")
    return Exit.DIAGNOSTICS


def _mend(error: BaseException, otherwise: str) -> str:
    if isinstance(error, SystemExit):
        return 'it ends the process; what a module does as a script stands under `if __name__ == "__main__":`'
    frames = traceback.extract_tb(error.__traceback__)
    if _from_first_frame(error.__traceback__) is not None and frames[-1].filename.startswith(_OURS):
        return "the error comes out of policylang; if you called it as documented, please report it"
    return otherwise


def _print(error: BaseException) -> None:
    traceback.print_exception(type(error), error, _from_first_frame(error.__traceback__))


def _from_first_frame(frames: TracebackType | None) -> TracebackType | None:
    """Without the frames that lead to the user's code: ours, the import system's, and torch's where it calls back."""
    while frames is not None and _leads_there(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames


def _leads_there(file: str) -> bool:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = (_OURS, *_IMPORTS) if torch is None else (_OURS, *_IMPORTS, os.path.dirname(torch) + os.sep)
    return file.startswith(folders)


def need_torch() -> None:
    """Raise ``UsageError`` where there is no torch."""
    if find_spec("torch") is None:
        raise UsageError("`torch` is not installed here", "pip install torch")
