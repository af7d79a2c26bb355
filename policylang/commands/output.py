"""Output of a command: its options, exit codes, text as wide as the terminal is, and the files that it writes."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from textwrap import TextWrapper
from threading import Event, Thread
from time import monotonic

from policylang.language.files import MAX_FILE, find_policy, policy_files, reason_of, write_whole
from policylang.language.shown import logged
from policylang.report.rendering import fit

_TICK = 1.0  # seconds between updates of the line that shows what a command does


class Exit(IntEnum):
    CLEAN = 0
    DIAGNOSTICS = 1
    """At or above the level that fails, or a demo whose results differ."""
    USAGE = 2
    """The command line, a file that cannot be read, a package that is not installed."""
    BUG = 101
    """Something went wrong in policylang itself."""


class UsageError(Exception):
    """A command cannot do what it was asked. ``fix``: what to ask instead, if anything."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason}\nhelp: {fix}" if fix else reason)


def add_form(parser: argparse.ArgumentParser, *more: str, help: str = "how to print it (default: text)") -> None:
    parser.add_argument("--output-format", choices=tuple(dict.fromkeys(("text", *more))), default="text", help=help)
    add_width(parser)


def add_width(parser: argparse.ArgumentParser) -> None:
    help = "fit text to so many columns; 0 for as many as it takes (default: the terminal's, all in a pipe or file)"
    parser.add_argument("--width", type=_width, metavar="COLUMNS", help=help)


def _width(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"`{text}` is no number of columns")
    return int(text)


def text_width(asked: int | None) -> int | None:
    """The columns that text may have: as asked for, 0 for any number, else the terminal's; None without a terminal."""
    if asked is not None:
        return asked
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: object, form: str = "text", end: str = "\n") -> None:
    """Print what a command found: all text from a policy or a graph is printed here.

    ``form``: as ``--output-format`` names it. Text for people is as wide as it may be. JSON escapes its strings, except
    for the marks of commands to a runner, which are escaped here; those of ``github`` are intended.
    """
    said = str(text)
    if form in ("json", "sarif"):
        print(said.replace("##", "#\\u0023"), end=end)  # there is no `#` in JSON but in its texts
    elif form == "github":
        print(said, end=end)
    else:
        print(logged(fit(said) if form == "text" else said), end=end)


def tell(text: object) -> None:
    """Print text that people read on the standard error."""
    print(logged(fit(str(text))), file=sys.stderr)


@contextmanager
def status_line(shown: bool = True) -> Iterator[Callable[[str], None]]:
    """One line on the standard error, where that is a terminal, that each call writes over; gone at the end."""
    shown = shown and sys.stderr.isatty()

    def line(text: str) -> None:
        if shown:
            fits = logged(text)[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{fits}", end="", file=sys.stderr, flush=True)

    try:
        yield line
    finally:
        line("")


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Show on a terminal what a command does, and for how many seconds so far."""
    over, start = Event(), monotonic()

    def tick() -> None:
        while not over.wait(_TICK):
            line(f"{what}: {monotonic() - start:.0f} s")

    with status_line() as line:
        if not sys.stderr.isatty():
            yield
            return
        ticking = Thread(target=tick, daemon=True)
        ticking.start()
        try:
            yield
        finally:
            over.set()
            ticking.join()


class HelpText(argparse.RawDescriptionHelpFormatter):
    """Paragraphs of a description are filled to the width of the terminal; what is indented, as examples are, stays."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapper = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        parts = text.strip("\n").split("\n\n")
        paragraphs = (part if part.startswith(" ") else wrapper.fill(" ".join(part.split())) for part in parts)
        return "\n\n".join(paragraphs)


# --- files that are written ------------------------------------------------------------------------------------------


_OUTPUTS = {"output": "-o", "html": "--html", "trace": "--trace"}
_FILES = ("policy", "old", "new", "subject", "graph", "file", "files", "paths", "cover", "device")
_MODULES = ("imports", "function", "model")
_NAMED = re.compile(r'"([^"\n]+)"')
_NAMES_FILES = (".apl", ".toml", ".md")
_FIX = "name another file"


def check_outputs(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` for an output that is an input too, by whatever name, or that is another output.

    Inputs are the files that the command line names, those that they name in turn (what is included, the profile of a
    device and its tables, the project's graph), and the modules that it imports.
    """
    outputs = {flag: out for name, flag in _OUTPUTS.items() if (out := getattr(options, name, None))}
    for out in outputs.values():
        if os.path.isdir(out):
            raise UsageError(f"`{out}` is a folder", "name a file in it")
        if not os.path.isdir(parent := os.path.dirname(out) or os.curdir):
            raise UsageError(f"cannot write `{out}`: there is no folder `{parent}`")
    if len(outputs) > 1 and len({*map(_identity, outputs.values())}) < len(outputs):
        flags = " and by ".join(f"`{flag}`" for flag in outputs)
        raise UsageError(f"`{next(iter(outputs.values()))}` is written by {flags}", _FIX)
    there = {flag: out for flag, out in outputs.items() if os.path.isfile(out)}
    for read in _inputs(options) if there else ():
        for flag, out in there.items():
            if os.path.exists(read) and os.path.samefile(read, out):
                raise UsageError(f"`{flag} {out}` would replace a file that the command reads", _FIX)


def _identity(path: str) -> object:
    """Equal for two names of one file, hard links among them."""
    if not os.path.exists(path):
        return os.path.realpath(path)
    found = os.stat(path)
    return found.st_dev, found.st_ino


def write_output(text: str, out: str) -> None:
    """Write a whole file and report it. Raises ``UsageError`` if it cannot be written."""
    try:
        write_whole(Path(out), text.encode())
    except OSError as error:
        raise UsageError(f"cannot write `{out}`: {reason_of(error)}") from None
    tell(f"wrote {out}")


def _inputs(options: argparse.Namespace) -> Iterator[str]:
    waiting = [find_policy(file)[0] for word in _words(options, _FILES) for file in policy_files(word)]
    if getattr(options, "project", False):
        from policylang.api.load import project_settings

        settings = project_settings(Path())[0]
        waiting += [Path(file) for file in (settings.file, settings.graph, settings.device) if file is not None]
    known = set[str]()
    while waiting:
        file = waiting.pop()
        if str(file) not in known:
            known.add(str(file))
            yield str(file)
            waiting.extend(file.parent / name for name in _named_in(file))
    for module in _words(options, _MODULES):
        path = os.path.join(*module.partition(":")[0].split("."))
        yield from (f"{path}.py", os.path.join(path, "__init__.py"))


def _words(options: argparse.Namespace, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = getattr(options, name, None)
        yield from value if isinstance(value, list) else [value] if value else []


def _named_in(file: Path) -> list[str]:
    """The quoted strings of a file: any of them may name another file."""
    try:
        if file.suffix in _NAMES_FILES and file.is_file() and file.stat().st_size <= MAX_FILE:
            return _NAMED.findall(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        pass
    return []
