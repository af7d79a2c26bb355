"""The subcommands of ``policylang``, one file each, in the order in which ``--help`` lists them.

A subcommand has ``NAME`` and ``SUMMARY``, ``arguments(parser)`` declares what it takes, and ``run(options)`` returns
its exit code. None of them imports torch before ``run`` needs it.
"""

from __future__ import annotations

from enum import IntEnum
from types import ModuleType


class Exit(IntEnum):
    CLEAN = 0
    DIAGNOSTICS = 1
    """At or above the level that fails, or a demo whose results differ."""
    USAGE = 2
    """The command line, a file that cannot be read, a package that is not installed."""
    BUG = 101
    """Something went wrong in policylang itself."""


def commands() -> tuple[ModuleType, ...]:
    from policylang.commands import (
        agree,
        check,
        demo,
        diff,
        explain,
        fmt,
        import_,
        import_torchtitan,
        plan,
        snapshot,
        test,
    )

    return check, plan, explain, diff, fmt, test, snapshot, import_, import_torchtitan, demo, agree
