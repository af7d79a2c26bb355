"""The subcommands of ``policylang``, one file each; :mod:`policylang.commands.cli` lists them.

A subcommand has ``NAME`` and ``SUMMARY``, ``arguments(parser)`` declares what it takes, and ``run(options)`` returns
its exit code. None of them imports torch before ``run`` needs it.
"""

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
