"""How a command ends: the exit codes of ``policylang``, and the error that ends one early."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    CLEAN = 0
    DIAGNOSTICS = 1
    """At or above the level that fails, or a demo whose results differ."""
    USAGE = 2
    """The command line, a file that cannot be read, a package that is not installed."""
    BUG = 101
    """Something went wrong in policylang itself."""


class UsageError(Exception):
    """A command cannot do what it was asked. ``mend`` says what can be asked instead, where there is such a thing."""

    def __init__(self, reason: str, mend: str = "") -> None:
        super().__init__(f"{reason}\nhelp: {mend}" if mend else reason)
