"""Check policy files: syntax, names and meaning. Needs no model, and no torch unless --torch is given.

A folder stands for every .apl file below it; a bare name such as llama3_sac for a policy of the bundled library. With
--graph every policy is planned on a snapshot of a graph: rules that match nothing or decide nothing, expectations,
values that cannot be recomputed.

exit codes: 0 clean, 1 errors (or warnings, with --deny warnings), 2 a file that cannot be read
"""

from __future__ import annotations

import argparse

from policylang.commands.shared.exit import Exit
from policylang.commands.shared.inputs import add_path

NAME = "check"
SUMMARY = "check policy files"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="policy files, or folders of them")
    parser.add_argument(
        "--graph",
        action="append",
        default=[],
        metavar="SNAPSHOT",
        help="check the policies on a graph as well; what `policylang snapshot` wrote, may be given several times",
    )
    add_path(parser)
    parser.add_argument(
        "--one-model",
        action="store_true",
        help="the snapshots are the graphs of one model: a rule has to match in one of them, not in each",
    )
    parser.add_argument(
        "--output-format",
        choices=("text", "concise", "json", "github", "sarif"),
        default="text",
        help="how to print what was found (default: text)",
    )
    parser.add_argument("--deny", choices=("warnings",), help="fail on warnings too")
    parser.add_argument(
        "--torch",
        action="store_true",
        help="look operators up in the installed torch as well, custom operators included (slower: imports it)",
    )


def run(options: argparse.Namespace) -> Exit:
    from policylang.api.check import check
    from policylang.report.diagnostics import RENDERERS

    if options.torch and not _torch_is_there():
        return Exit.USAGE
    result = check(*options.files, graph=options.graph, path=options.path, one_model=options.one_model)
    printed = RENDERERS[options.output_format](result.diagnostics)
    if printed:
        print(printed.rstrip("\n"))
    if options.output_format == "text":
        print("\n" if printed else "", end="")
        print(_summary(len(result.files), len(result.graphs), result.errors, result.warnings))
    if result.unreadable:
        return Exit.USAGE
    failed = result.errors or (options.deny == "warnings" and result.warnings)
    return Exit.DIAGNOSTICS if failed else Exit.CLEAN


def _summary(files: int, graphs: int, errors: int, warnings: int) -> str:
    checked = f"checked {_count(files, 'file')}"
    if graphs:
        checked += f" on {_count(graphs, 'graph')}"
    if not errors and not warnings:
        return f"{checked}: clean"
    return f"{checked}: {_count(errors, 'error')}, {_count(warnings, 'warning')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _torch_is_there() -> bool:
    """Import torch: the resolver asks the registry of a torch that is loaded."""
    import sys

    try:
        import torch  # noqa: F401
    except Exception as error:  # not there, or broken in whatever way: libraries, extensions that it loads
        print(f"policylang check: `--torch` needs a torch that can be imported: {error}", file=sys.stderr)
        return False
    return True
