"""The command line: ``policylang COMMAND …``.

Exit codes: 0 clean, 1 diagnostics at or above the level that fails, an error of the user's own code, or memory that ran
out, 2 usage or input/output, 101 a bug in policylang.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import import_module
from inspect import cleandoc
from io import TextIOWrapper

from policylang.commands.output import Exit, HelpText, UsageError, add_form, check_outputs, say, tell, text_width
from policylang.errors import PolicyError
from policylang.language.files import bundled_policies, reason_of
from policylang.report.rendering import fitted, table

COMMANDS = {
    "check": ("policylang.commands.check:check", "check policy files"),
    "plan": ("policylang.commands.plan:plan", "show what a policy saves and recomputes on a graph"),
    "explain": ("policylang.commands.plan:explain", "explain a diagnostic code, a word, a node or a rule"),
    "diff": ("policylang.commands.plan:diff", "compare two policies on a graph"),
    "show": ("policylang.commands.plan:show", "show what is in a graph: operators, modules, blocks, nodes"),
    "list": ("policylang.commands.cli:list_policies", "list the bundled policies"),
    "fmt": ("policylang.commands.check:fmt", "format policy files"),
    "test": ("policylang.commands.check:test", "run policy tests"),
    "tune": ("policylang.commands.tune:tune", "write a policy from a budget of memory or time"),
    "fit": ("policylang.commands.fit:fit", "say whether a model fits, and write the policy it fits with"),
    "compare": ("policylang.commands.plan:compare", "compare a recorded run with its plan"),
    "profile": ("policylang.commands.tune:profile", "measure this machine, and write its device profile"),
    "snapshot": ("policylang.commands.snapshot:snapshot", "write the facts of a graph to a file"),
    "import": ("policylang.commands.snapshot:import_recorded", "make a snapshot of a graph recorded as JSON"),
    "import-torchtitan": (
        "policylang.commands.snapshot:import_torchtitan",
        "convert TorchTitan's full_recompute_save_ops into a policy",
    ),
    "demo": ("policylang.commands.agree:demo", "train a small Llama without and with a policy, and compare"),
    "agree": ("policylang.commands.agree:agree", "run a model under a policy on every path, and compare"),
    "lsp": ("policylang.commands.cli:lsp", "serve an editor: diagnostics, figures, completion"),
}
"""In the order of ``--help``. ``module:function`` returns the exit code, its docstring is the command's help, and
``function_arguments`` declares what it takes. None imports torch before it needs it."""


def parser(words: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of a command line; only the commands among its words are imported and complete."""
    top = argparse.ArgumentParser(
        prog="policylang", description="Describe in a file what a training step saves and recomputes."
    )
    top.add_argument("--version", action=_Version, help="print the version and exit")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for name, (place, summary) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary, formatter_class=HelpText)
        if name in words:
            module, _, function = place.partition(":")
            run = getattr(import_module(module), function)
            sub.description = cleandoc(run.__doc__)
            getattr(import_module(module), f"{function}_arguments")(sub)
            sub.set_defaults(run=run, command=name)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``arguments`` default to those of the process."""
    if not _have_streams():
        return Exit.USAGE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a policy may hold characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            words = sys.argv[1:] if arguments is None else arguments
            if not words:
                longest = max(map(len, COMMANDS))
                lines = (f"  {name.ljust(longest)}  {summary}" for name, (_, summary) in COMMANDS.items())
                last = "policylang COMMAND --help has examples of each"
                tell("\n".join(("usage: policylang COMMAND …", "", *lines, "", last)))
                return Exit.USAGE
            options = parser(words).parse_args(words)
        except SystemExit as stop:  # argparse has printed: usage errors are 2 already, --help and --version are 0
            code = int(stop.code or 0)
        else:
            with fitted(text_width(getattr(options, "width", None))):
                code = _ended(options)
        sys.stdout.flush()
        sys.stderr.flush()
        return code
    except KeyboardInterrupt:
        return 130
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
        if modules := getattr(options, "imports", ()):
            from policylang.commands.inputs import refused_imports

            form, findings = getattr(options, "output_format", "text"), options.command in ("check", "plan")
            if (refused := refused_imports(modules, form, findings=findings)) is not None:
                return refused
        return int(options.run(options))
    except UsageError as error:
        tell(f"policylang {options.command}: {error}")
        return Exit.USAGE
    except PolicyError as error:
        from policylang.commands.inputs import refuse

        taken = getattr(options, "taken", None)
        found = error.diagnostics if taken is None else taken.placed(error.diagnostics)
        return refuse(found, getattr(options, "output_format", "text"))
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


# --- the two commands that need next to nothing -----------------------------------------------------------------------


def list_policies_arguments(parser: argparse.ArgumentParser) -> None:
    add_form(parser, "json")


def list_policies(options: argparse.Namespace) -> Exit:
    """List the policies that come with policylang, one line each.

    Any command takes them by their bare names, and so do `policylang.load` and `policylang.backend`; your policy
    includes one with `include <NAME>`.

    examples:

      policylang list
      policylang list --output-format json
      policylang check llama3_sac --graph my.graph

    exit codes: 0 listed
    """
    found = bundled_policies()
    if options.output_format == "json":
        policies = [{"name": each.name, "description": each.description, "file": str(each.file)} for each in found]
        say(json.dumps({"version": 1, "policies": policies}, indent=2), "json")
    else:
        rows = [("policy", "what it does"), *((each.name, each.description) for each in found)]
        say(table(rows, right=range(0), wraps=True))
    return Exit.CLEAN


def lsp_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stdio", action="store_true", help="what it does anyway; some clients say so")


def lsp(options: argparse.Namespace) -> Exit:
    """Serve an editor: a language server over standard input and output.

    An editor starts it, once set up (docs/editor.md has the settings of VS Code, Neovim, Helix and Emacs). It needs the
    extra lsp: pip install pygls.

    exit codes: 0 the editor ended it as it should, 1 the connection ended before, 2 the extra is not installed
    """
    try:
        import pygls  # noqa: F401
    except ImportError:
        message = "the language server needs pygls, which is not installed"
        raise UsageError(message, "pip install pygls") from None
    from policylang.editor.server import serve

    return Exit(serve())


if __name__ == "__main__":
    sys.exit(main())
