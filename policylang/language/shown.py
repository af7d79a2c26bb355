"""What people are shown: text with nothing in it that a terminal, a log or a page would act on, and what ``str()`` of
an error or a report says.

A name in a graph or a line of a policy may hold anything: escape sequences, marks that turn the direction of text, line
ends that make one line two. Data knows no renderer, renderers enter themselves here: ``policylang.report`` enters its
own when it is imported, which importing any module of policylang does.
"""

from __future__ import annotations

import re
from functools import singledispatch

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_COMMAND = re.compile(r"(^\s*:(?=:))|(##)(?=\[|vso\[)", re.MULTILINE)
"""What runners take for a command of theirs: GitHub's `::error …` at the start of a line, and `##[…` anywhere."""


@singledispatch
def as_text(value: object) -> str:
    """A value as a person reads it in a terminal, without a line end. Raises ``TypeError`` where nothing renders it."""
    raise TypeError(f"nothing renders a {type(value).__qualname__} as text")


@singledispatch
def as_page(value: object) -> str:
    """A value as an HTML page of its own. Raises ``TypeError`` where nothing renders it."""
    raise TypeError(f"nothing renders a {type(value).__qualname__} as a page")


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with a mark in place of every character that is neither printable nor one of ``kept``."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in kept else _UNKNOWN for each in text)


def one_line(text: str) -> str:
    """The same without line ends: of them and of tabs, a space stands for each run of blanks."""
    return text if text.isprintable() else printable(" ".join(text.split()), "")


def logged(text: str) -> str:
    """Text for people, line by line: printable, and no line that the log of a build takes for a command."""
    return _COMMAND.sub(r"\1\2 ", printable(text))
