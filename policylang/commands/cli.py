"""The command line: ``policylang COMMAND …``.

Exit codes: 0 clean, 1 diagnostics at or above the level that fails, an error of the user's own code, or memory that ran
out, 2 usage or input/output, 101 a bug in policylang.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

from policylang.commands import (
    agree,
    check,
    demo,
    diff,
    explain,
    fmt,
    import_recorded,
    import_torchtitan,
    list_,
    lsp,
    plan,
    profile,
    show,
    snapshot,
    test,
    tune,
)
from policylang.commands.inputs import check_outputs, refuse
from policylang.commands.output import Exit, HelpText, UsageError, tell, text_width
from policylang.commands.users_code import refused_imports
from policylang.errors import PolicyError
from policylang.language.files import reason_of
from policylang.report.layout import fitted

COMMANDS = (
    ("check", check, "check policy files"),
    ("plan", plan, "show what a policy saves and recomputes on a graph"),
    ("explain", explain, "explain a diagnostic code, a word, a node or a rule"),
    ("diff", diff, "compare two policies on a graph"),
    ("show", show, "show what is in a graph: operators, modules, blocks, nodes"),
    ("list", list_, "list the bundled policies"),
    ("fmt", fmt, "format policy files"),
    ("test", test, "run policy tests"),
    ("tune", tune, "write a policy from a budget of memory or time"),
    ("profile", profile, "measure this machine, and write its device profile"),
    ("snapshot", snapshot, "write the facts of a graph to a file"),
    ("import", import_recorded, "make a snapshot of a graph recorded as JSON"),
    ("import-torchtitan", import_torchtitan, "convert TorchTitan's full_recompute_save_ops into a policy"),
    ("demo", demo, "train a small Llama without and with a policy, and compare"),
    ("agree", agree, "run a model under a policy on every path, and compare"),
    ("lsp", lsp, "serve an editor: diagnostics, figures, completion"),
)
"""In the order in which ``--help`` lists them. A module's docstring is its command's help."""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="policylang", description="Describe in a file what a training step saves and recomputes."
    )
    top.add_argument("--version", action=_Version, help="print the version and exit")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for name, command, summary in COMMANDS:
        sub = subparsers.add_parser(name, help=summary, description=command.__doc__)
        sub.formatter_class = HelpText
        command.arguments(sub)
        sub.set_defaults(run=command.run, command=name)
    return top


def _overview() -> str:
    longest = max(len(name) for name, _, _ in COMMANDS)
    lines = (f"  {name.ljust(longest)}  {summary}" for name, _, summary in COMMANDS)
    return "\n".join(("usage: policylang COMMAND …", "", *lines, "", "policylang COMMAND --help has examples of each"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``arguments`` default to those of the process."""
    if not _have_streams():
        return Exit.USAGE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a policy may hold characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            if not (sys.argv[1:] if arguments is None else arguments):
                tell(_overview())
                return Exit.USAGE
            options = parser().parse_args(arguments)
        except SystemExit as stop:  # argparse has printed: usage errors are 2 already, --help and --version are 0
            code = int(stop.code or 0)
        else:
            with fitted(text_width(getattr(options, "width", None))):
                code = _ended(options)
        sys.stdout.flush()
        sys.stderr.flush()
        return code
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else the reader has gone: `policylang check … | head`
            with suppress(OSError):
                tell(f"policylang: the output cannot be written: {reason_of(error)}")
                sys.stderr.flush()
        for stream in (sys.stdout, sys.stderr):  # Python would write the rest when it closes them, and complain twice
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return Exit.USAGE


def _ended(options: argparse.Namespace) -> int:
    """Run a command, and report what ends it early."""
    try:
        check_outputs(options)
        modules, form = getattr(options, "imports", ()), getattr(options, "output_format", "text")
        findings = options.run in (check.run, plan.run)
        refused = refused_imports(modules, form, findings=findings) if modules else None
        return int(options.run(options) if refused is None else refused)
    except UsageError as error:
        tell(f"policylang {options.command}: {error}")
        return Exit.USAGE
    except PolicyError as error:
        taken = getattr(options, "taken", None)
        return refuse(error.diagnostics if taken is None else taken.placed(error.diagnostics))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Python's, a device's, or that of torch's allocator on the CPU, which has no class of its own
        lacks = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if lacks or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)):
            print("policylang: memory ran out\nhelp: free some, or use a smaller graph or model", file=sys.stderr)
            return Exit.DIAGNOSTICS
        if isinstance(error, OSError) and error.errno in _OF_A_STREAM and error.filename is None:
            raise
        traceback.print_exc()
        print(_BUG, file=sys.stderr)
        return Exit.BUG


def _have_streams() -> bool:
    """Python has None for a closed stream (`>&-`): nothing can be read or printed there."""
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY), encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stdout is None:
        print("policylang: the standard output is closed", file=sys.stderr)
    return sys.stdout is not None


_OF_A_STREAM = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT)
"""Errors of a stream: an error of a file has its name."""
_BUG = (
    "policylang: this is a bug in policylang, not in what you gave it\n"
    "help: please report it with the traceback above and, if you can, the file that caused it"
)


class _Version(argparse.Action):
    """Looks the version up when it is asked for: that takes longer than checking a policy."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from policylang.language.resources import installed_version

        print(f"policylang {installed_version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
