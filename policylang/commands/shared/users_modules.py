"""Imports the modules that a user names with ``--import``, for the operators that they register.

Nothing is imported that was not named on the command line: no policy and no graph file can ask for it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module

from policylang.commands.shared.exit import Exit
from policylang.language.diagnostics import Diagnostic, diagnose

CANNOT_IMPORT = "APL372"
_MOST = 200
_FORM = "the name of a module, as Python imports it: `package.module`"
_NOT_HERE = "the current folder is searched for it first, then the environment of this Python"
_FAILS = 'run `python -c "import {}"` to see all of it'


def import_modules(names: Sequence[str]) -> tuple[Diagnostic, ...]:
    """Import modules in order; why each of the others cannot be. What they print goes to the standard error, so that
    the standard output stays the command's."""
    if names and "" not in sys.path:
        sys.path.insert(0, "")
    found = []
    for name in dict.fromkeys(names):
        with redirect_stdout(sys.stderr):
            problem = _problem(name)
        if problem is not None:
            found.append(problem)
    return tuple(found)


def refused_imports(names: Sequence[str], form: str, *, findings: bool) -> Exit | None:
    """Import modules; where one cannot be, say so in the form of the command's output, and how the command ends.
    ``findings`` says that diagnostics are what the command prints, on its standard output."""
    problems = import_modules(names)
    if not problems:
        return None
    from policylang.commands.shared.inputs import print_findings, refuse
    from policylang.report.diagnostics import RENDERERS, CheckResult

    if form in RENDERERS and (findings or form != "text"):
        return print_findings(CheckResult((), problems), form, failed=True)
    return refuse(problems)


def _problem(name: str) -> Diagnostic | None:
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        stem = os.path.normpath(name.removesuffix(".py"))
        mend = ".".join(stem.split(os.sep)) if name.endswith(".py") else ""
        help = f"did you mean `{mend}`?" if mend and all(map(str.isidentifier, mend.split("."))) else _FORM
        return diagnose(CANNOT_IMPORT, f"`{name}` is no module", help=help)
    try:
        import_module(name)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return diagnose(CANNOT_IMPORT, f"there is no module `{error.name}`", help=_NOT_HERE)
        return _failed(name, error)
    except BaseException as error:  # SystemExit too: a module that ends the process has registered nothing
        return _failed(name, error)
    return None


def _failed(name: str, error: BaseException) -> Diagnostic:
    said = " ".join(str(error).split())
    what = type(error).__name__ + (f": {said[:_MOST]}" if said else "")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not _is_import_system(each.filename)]
    here = [f"in {each.filename}:{each.lineno}{f': {each.line}' if each.line else ''}" for each in frames[:1]]
    deepest = [f"raised in {frames[-1].filename}:{frames[-1].lineno}"] if len(frames) > 1 else []
    return diagnose(
        CANNOT_IMPORT, f"`{name}` cannot be imported: {what}", help=_FAILS.format(name), details=(*here, *deepest)
    )


def _is_import_system(file: str) -> bool:
    return file.startswith("<frozen ") or file in (__file__, import_module.__code__.co_filename)
