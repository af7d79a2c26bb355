"""Output of a command, as wide as the terminal is, and its exit codes."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from textwrap import TextWrapper
from threading import Event, Thread
from time import monotonic

from policylang.language.shown import logged
from policylang.report.layout import fit

_TICK = 1.0
"""Seconds between updates of the line that shows what a command does."""


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


def text_width(asked: int | None) -> int | None:
    """The columns that text may have: those that were asked for, 0 for any number, else the terminal's; None where
    there is no terminal."""
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
        paragraphs = (
            part if part.startswith(" ") else wrapper.fill(" ".join(part.split()))
            for part in text.strip("\n").split("\n\n")
        )
        return "\n\n".join(paragraphs)
