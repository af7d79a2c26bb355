"""Inputs of commands: policies, graphs, the project's settings, output formats and files, and code of the user's."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from attrs import evolve, field, frozen

import policylang
from policylang.api.load import KEYS, as_typed, device_of, operators_at_hand, project_settings
from policylang.api.load import PROBLEMS as WRONG_SETTINGS
from policylang.commands.output import Exit, UsageError, say, tell
from policylang.errors import PolicyError, PolicyGraphError, PolicyMeaningError
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, Related, Source, Span, diagnose
from policylang.language.files import MAX_FILE, reason_of, source_of
from policylang.language.loader import load_policy, load_source
from policylang.language.shown import joined
from policylang.language.statements import SCHEDULES
from policylang.language.syntax import Pipeline, Policy
from policylang.planning.capabilities import PATHS, PLANNED, capabilities_for
from policylang.planning.plan import Plan
from policylang.report.diagnostics import RENDERERS, CheckResult, render_json, render_text

NO_RUN = "APL654"
STDIN = "-"
STDIN_NAME = "<stdin>"

PLANNING = ("--graph", "--path", "--device", "--no-project", "--import")
"""The options of a command that plans policies on one graph."""
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--graph": {
        "metavar": "GRAPH",
        "help": "a snapshot that `policylang snapshot` wrote, a recorded graph in JSON, or a graph as text",
    },
    "--path": {
        "choices": PLANNED,
        "help": "plan for this path, and refuse what it refuses: "
        f"{', '.join(f'{path.capabilities.name} ({path.name})' for path in PATHS)}; by default what the graph is",
    },
    "--device": {
        "metavar": "NAME|FILE",
        "help": "also print times on this device: a bundled profile such as h100-sxm, or a file with one; by default "
        "the one that the policy's `device` line or the project names",
    },
    "--import": {
        "action": "append",
        "default": [],
        "dest": "imports",
        "metavar": "MODULE",
        "help": "import this Python module first, for the operators that it registers; the current folder is searched "
        "for it; may be given several times",
    },
    "--no-project": {
        "action": "store_false",
        "dest": "project",
        "help": "take nothing from `[tool.policylang]` of the pyproject.toml in the current folder or above it",
    },
}


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """The options that say in which pipeline the model runs, in place of the policy's `schedule` line."""
    help = "plan the model as a pipeline with this schedule of torch's"
    parser.add_argument("--schedule", choices=SCHEDULES, help=help)
    help = "its number of stages, or the first block of each: 0,6,14,22"
    parser.add_argument("--stages", metavar="N|FIRST,…", help=help)
    parser.add_argument("--microbatches", metavar="M", type=int, help="the microbatches of a step")


def pipeline_of(options: argparse.Namespace) -> Pipeline | None:
    """The pipeline that the options name; None without any. Raises ``UsageError`` where they are not whole."""
    from policylang.api.planned_graphs import read_pipeline

    made = read_pipeline(options.schedule, options.stages, options.microbatches)
    if isinstance(made, Diagnostic):
        raise UsageError(made.message, made.help or "")
    return made


def add_options(parser: argparse.ArgumentParser, *flags: str) -> None:
    for flag in flags:
        parser.add_argument(flag, **_OPTIONS[flag])


def add_snapshot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the snapshot, such as llama3_8b.graph")


def read_policy(name: str, facts: Facts | None = None) -> Policy:
    """The policy of a file, of the library, or, for ``-``, of the standard input; ``facts`` are of the graph that it is
    for. Raises ``PolicyError`` with every diagnostic of the file."""
    operators = operators_at_hand(met=() if facts is None else facts.operators)
    if name == STDIN:
        source = read_stdin()
        if isinstance(source, Diagnostic):
            raise PolicyMeaningError((source,))
        loaded = load_source(source, None, operators=operators)
    else:
        loaded = load_policy(name, operators=operators)
    if loaded.policy is None:
        raise PolicyMeaningError(loaded.diagnostics)
    return loaded.policy


def read_stdin() -> Source | Diagnostic:
    """The policy in the standard input, or why there is none. Its includes are looked for from the current folder."""
    return source_of(sys.stdin.buffer.read(MAX_FILE + 1), STDIN_NAME)


def check_policies(names: Sequence[str], **how: Any) -> CheckResult:
    """``policylang.check`` of policies one of which may be the standard input."""
    from policylang.api.load import check

    given = [read_stdin() if name == STDIN else name for name in names]
    result = check(*(each for each in given if not isinstance(each, Diagnostic)), **how)
    problems = [each.found_in(STDIN_NAME) for each in given if isinstance(each, Diagnostic)]
    if not problems:
        return result
    return evolve(result, files=(*result.files, STDIN_NAME), diagnostics=(*problems, *result.diagnostics))


def once_at_most(*names: str) -> None:
    """Raise ``UsageError`` where the standard input is named twice: it can be read once."""
    if names.count(STDIN) > 1:
        raise UsageError("`-`, the standard input, can be read once")


def read_graph(name: str) -> Facts:
    """Raises ``PolicyError`` for a file that holds no graph."""
    from policylang.api.planned_graphs import read_any

    return read_any(name)


def read_run(name: str) -> dict[str, Any]:
    """Reads a file of ``policylang.watch``. Raises ``PolicyGraphError`` for any other file."""
    from policylang.report.plan_comparison import RUN_VERSION, run_text

    try:
        run = json.loads(Path(name).read_text(encoding="utf-8"))
        written = run["version"] == RUN_VERSION and isinstance(run["measured"], dict)
        run_text(run)  # it reads every key
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        written, reason = False, reason_of(error) if isinstance(error, OSError) else "it has another form"
    else:
        reason = "it has another version"
    if not written:
        message = f"`{name}` is no run that `policylang.watch` recorded: {reason}"
        raise PolicyGraphError([diagnose(NO_RUN, message, help='record one: `policylang.watch(…, to="run.json")`')])
    return run  # type: ignore[no-any-return]


def planned(policy: Policy, facts: Facts, path: str | None, device: DeviceProfile | None = None) -> Plan:
    from policylang.api.planned_graphs import scheduled
    from policylang.planning.planner import plan

    policy_or_error = scheduled(policy)
    if isinstance(policy_or_error, Diagnostic):
        raise PolicyGraphError([policy_or_error])
    return plan(policy_or_error, facts, capabilities_for(facts.kind, path), device=device)


def warn_of_devices(facts: Facts, *plans: Plan) -> None:
    """Warn on the standard error of kernels of another device in the graph, and of figures that a profile lacks."""
    from policylang.graph.traced_device import kernel_findings

    untold = (made.untold for made in plans if made.untold is not None)
    if found := tuple(dict.fromkeys((*kernel_findings(facts), *untold))):
        tell(render_text(found))


def refuse(diagnostics: Iterable[Diagnostic], form: str = "text") -> Exit:
    """Print what is wrong, as JSON on the standard output where a program reads that, else on the standard error; the
    exit code that goes with it."""
    found = tuple(diagnostics)
    if form == "json":
        say(render_json(found), form)
    else:
        tell(render_text(found))
    unreadable = CheckResult((), found).unreadable or any(each.code in WRONG_SETTINGS for each in found)
    return Exit.USAGE if unreadable else Exit.DIAGNOSTICS


def print_findings(found: CheckResult, form: str, summary: str = "", *, failed: bool) -> Exit:
    """Print what was found in a format, for people with a last line that sums it up; returns the exit code."""
    printed = RENDERERS[form](found).rstrip("\n")
    if form == "text":
        printed = "\n\n".join(filter(None, (printed, summary)))
    if printed:
        say(printed, form)
    return Exit.USAGE if found.unreadable else Exit.DIAGNOSTICS if failed else Exit.CLEAN


def print_snapshot(path: Path, facts: Facts) -> None:
    say(f"{path}: {facts.kind.value} graph of {len(facts):,} nodes, {path.stat().st_size:,} bytes")


# --- the project's settings ------------------------------------------------------------------------------------------


@frozen
class Taken:
    """The values taken from the project's settings."""

    values: Mapping[str, str] = field(factory=dict)
    file: str = ""
    """The path relative to the current folder."""
    places: Mapping[str, Span] = field(factory=dict)

    def __str__(self) -> str:
        """``graph llama3_8b.graph and path joint from pyproject.toml``; empty where nothing was taken."""
        named = joined([f"{key} {value}" for key, value in self.values.items()])
        return f"{named} from {self.file}" if named else ""

    def placed(self, diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
        """Adds where the project names a graph or profile that cannot be read."""
        return tuple(map(self._placed, diagnostics))

    def _placed(self, found: Diagnostic) -> Diagnostic:
        for key, value in self.values.items():
            if found.span is None and key in self.places and f"`{value}`" in found.message:
                return evolve(found, related=(*found.related, Related("named here", self.places[key])))
        return found


def take_settings(options: argparse.Namespace, *keys: str) -> Taken:
    """Fill in those of a command's options that were not given; what was taken, also as ``options.taken``.

    A path and a device are those of a graph: where there is none, they are not taken. Raises ``PolicyError`` where the
    settings are wrong: a command that went on without them would do something else.
    """
    wanted = [key for key in keys if not getattr(options, key)]
    options.taken = taken = _taken(options, wanted) if options.project and wanted else Taken()
    return taken


def tell_settings(options: argparse.Namespace) -> None:
    """Print on the standard error the settings taken, if any."""
    if options.taken.values:
        tell(f"policylang {options.command}: {options.taken}")


def _taken(options: argparse.Namespace, wanted: Sequence[str]) -> Taken:
    settings, problems = project_settings(Path())
    if problems:
        fix = "`--no-project` leaves the project's settings out"
        raise PolicyMeaningError([evolve(each, details=(*each.details, fix)) for each in problems])
    if not (options.graph or settings.graph):
        return Taken()
    values = {key: as_typed(value) for key in wanted if (value := getattr(settings, key)) is not None}
    for key, value in values.items():
        setattr(options, key, [value] if isinstance(getattr(options, key), list) else value)
    return Taken(values, "" if settings.file is None else as_typed(str(settings.file)), settings.places)


def take_graph(options: argparse.Namespace, how: str = "--graph GRAPH") -> DeviceProfile | None:
    """Take and print the settings of a command on one graph; returns the profile of its device.

    Raises ``UsageError`` if nobody names a graph, ``PolicyError`` if there is no such device.
    """
    take_settings(options, *(key for key in KEYS if hasattr(options, key)))
    if options.graph is None:
        fix = f'name one with `{how}`, or in pyproject.toml below `[tool.policylang]`: `graph = "model.graph"`'
        raise UsageError("no graph is given", fix)
    tell_settings(options)
    return device_of(options.device)


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
