"""Check policy files: syntax, names and meaning. Needs no model, and no torch unless --torch or --import is given.

A folder means every .apl file below it, a bare name such as llama3_sac a bundled policy, and `-` the standard input.
With --graph every policy is planned on a graph as well: rules that match nothing or decide nothing, expectations,
values that cannot be recomputed. The operators that the graph calls are known, custom ones included; --import MODULE
adds those that a module of yours registers. Without --graph, [tool.policylang] in the project's pyproject.toml may name
one.

examples:

  policylang check policies/
  policylang check mine.apl --graph llama3_8b.graph --deny warnings
  policylang check mine.apl --graph llama3_8b.graph --path eager
  policylang check mine.apl --graph moe.graph --import my_package.kernels
  git show main:mine.apl | policylang check -

exit codes: 0 clean, 1 errors (or warnings, with --deny warnings), 2 a file that cannot be read
"""

from __future__ import annotations

import argparse

from attrs import evolve

from policylang.api.load import device_of
from policylang.commands.inputs import (
    add_form,
    add_options,
    check_policies,
    once_at_most,
    print_findings,
    take_settings,
    tell_settings,
)
from policylang.commands.output import Exit, UsageError
from policylang.language.shown import counted, joined
from policylang.report.diagnostics import RENDERERS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="policy files, folders of them, or - for standard input"
    )
    parser.add_argument(
        "--graph",
        action="append",
        default=[],
        metavar="GRAPH",
        help="check the policies on a graph as well: a snapshot that `policylang snapshot` wrote, a recorded graph in "
        "JSON or a graph as text; may be given several times",
    )
    add_options(parser, "--path", "--device")
    parser.add_argument(
        "--one-model",
        action="store_true",
        help="the graphs are those of one model: a rule has to match in one of them, not in each",
    )
    add_options(parser, "--no-project", "--import")
    add_form(parser, *RENDERERS)
    parser.add_argument("--deny", choices=("warnings",), help="fail on warnings too")
    parser.add_argument(
        "--torch",
        action="store_true",
        help="look operators up in the installed torch as well, custom operators included (slower: imports it)",
    )


def run(options: argparse.Namespace) -> Exit:
    if options.torch:
        try:  # the resolver asks the registry of a torch that is loaded
            import torch  # noqa: F401
        except Exception as error:  # not there, or broken in whatever way: libraries, extensions that it loads
            raise UsageError(f"`--torch` needs a torch that can be imported: {error}") from None
    once_at_most(*options.files)
    taken = take_settings(options, "graph", "path", "device")
    if options.device is not None and not options.graph:
        raise UsageError("times are those of a graph, and `--device` is given without one", "add `--graph GRAPH`")
    device = device_of(options.device)
    how = {"graph": options.graph, "path": options.path, "one_model": options.one_model, "device": device}
    result = check_policies(options.files, **how)
    result = evolve(result, diagnostics=taken.placed(result.diagnostics))
    summary = f"checked {counted(len(result.files), 'file')}"
    if result.graphs:
        summary += f" on {counted(len(result.graphs), 'graph')}"
    elif options.path:
        summary += f" for the path {options.path}, without a graph"
    if result.devices:
        summary += f", with times of {joined(result.devices)}"
    if taken.values:
        summary += f" ({taken})"
    if options.output_format != "text":
        tell_settings(options)
    found = f"{counted(result.errors, 'error')}, {counted(result.warnings, 'warning')}"
    summary += f": {found if result.errors or result.warnings else 'clean'}"
    failed = result.errors or (options.deny == "warnings" and result.warnings)
    return print_findings(result, options.output_format, summary, failed=bool(failed))
