"""``policylang check``, ``fmt`` and ``test``: commands on files of policies."""

from __future__ import annotations

import argparse
import sys

from attrs import evolve

from policylang.api.load import device_of, format_files, format_text
from policylang.commands import inputs
from policylang.commands.output import Exit, UsageError, add_form, say, tell
from policylang.language.shown import counted, joined
from policylang.report.diagnostics import RENDERERS, render_text


def check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="policy files, folders of them, or - for standard input"
    )
    help = (
        "check the policies on a graph as well: a snapshot that `policylang snapshot` wrote, a recorded graph in "
        "JSON or a graph as text; may be given several times"
    )
    parser.add_argument("--graph", action="append", default=[], metavar="GRAPH", help=help)
    inputs.add_options(parser, "--path", "--device")
    help = "the graphs are those of one model: a rule has to match in one of them, not in each"
    parser.add_argument("--one-model", action="store_true", help=help)
    inputs.add_options(parser, "--no-project", "--import")
    add_form(parser, *RENDERERS)
    help = "fail on warnings too, or on a line that narrows values or splits sums; may be repeated"
    parser.add_argument("--deny", choices=("warnings", "lossy"), action="append", default=[], help=help)
    help = "look operators up in the installed torch as well, custom operators included (slower: imports it)"
    parser.add_argument("--torch", action="store_true", help=help)


def check(options: argparse.Namespace) -> Exit:
    """Check policy files: syntax, names and meaning. Needs no model, and no torch unless --torch or --import is given.

    A folder means every .apl file below it, a bare name such as llama3_sac a bundled policy, and `-` the standard
    input. With --graph every policy is planned on a graph as well: rules that match nothing or decide nothing,
    expectations, values that cannot be recomputed. The operators that the graph calls are known, custom ones included;
    --import MODULE adds those that a module of yours registers. Without --graph, [tool.policylang] in the project's
    pyproject.toml may name one.

    examples:

      policylang check policies/
      policylang check mine.apl --graph llama3_8b.graph --deny warnings
      policylang check mine.apl --graph llama3_8b.graph --path eager
      policylang check mine.apl --graph moe.graph --import my_package.kernels
      git show main:mine.apl | policylang check -

    exit codes: 0 clean, 1 errors (or warnings, with --deny warnings), 2 a file that cannot be read
    """
    if options.torch:
        try:  # the resolver asks the registry of a torch that is loaded
            import torch  # noqa: F401
        except Exception as error:  # not there, or broken in whatever way: libraries, extensions that it loads
            raise UsageError(f"`--torch` needs a torch that can be imported: {error}") from None
    inputs.once_at_most(*options.files)
    taken = inputs.take_settings(options, "graph", "path", "device")
    if options.device is not None and not options.graph:
        raise UsageError("times are those of a graph, and `--device` is given without one", "add `--graph GRAPH`")
    device = device_of(options.device)
    how = {"graph": options.graph, "path": options.path, "one_model": options.one_model, "device": device}
    how["lossless"] = "lossy" in options.deny
    result = inputs.check_policies(options.files, **how)
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
        inputs.tell_settings(options)
    found = f"{counted(result.errors, 'error')}, {counted(result.warnings, 'warning')}"
    summary += f": {found if result.errors or result.warnings else 'clean'}"
    failed = result.errors or ("warnings" in options.deny and result.warnings)
    return inputs.print_findings(result, options.output_format, summary, failed=bool(failed))


_STDIN = "-"


def fmt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="policy files, folders of them, or - for standard input"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not formatted")
    parser.add_argument("--diff", action="store_true", help="write nothing; print what would change, and fail then")


def fmt(options: argparse.Namespace) -> Exit:
    """Write policy files in canonical form: layout only, never what a policy means, and no comment is lost.

    A folder means every .apl file below it; `-` reads standard input and writes standard output. A file with a syntax
    error is reported and left alone. The written text is proved to be the same policy.

    examples:

      policylang fmt policies/
      policylang fmt mine.apl --check --diff
      policylang fmt - < mine.apl

    exit codes: 0 done, 1 an error, or with --check or --diff a file that is not formatted, 2 a file that cannot be read
    """
    if _STDIN in options.files and len(options.files) > 1:
        raise UsageError("`-` stands alone")
    from_stdin = options.files == [_STDIN]
    look_only = options.check or options.diff
    done = [format_text(sys.stdin.buffer.read())] if from_stdin else format_files(options.files)
    if not (look_only or from_stdin):
        done = [each.save() for each in done]
    if diagnostics := [diagnostic for each in done for diagnostic in each.diagnostics]:
        tell(render_text(diagnostics))
    if options.diff:
        say("".join(each.diff() for each in done), "diff", end="")
    elif from_stdin and not look_only:  # as bytes: printing would change line ends, or fail in another encoding
        sys.stdout.flush()
        sys.stdout.buffer.write(done[0].content if done[0].written is None else done[0].written)
        sys.stdout.buffer.flush()
    changed = [each for each in done if each.changes]
    failed = sum(each.failed for each in done)
    if not from_stdin:
        lines = [f"{'would reformat' if look_only else 'reformatted'} {each.name}" for each in changed]
        counts = [
            (len(changed), "to format" if look_only else "formatted"),
            (len(done) - len(changed) - failed, "already formatted"),
            (failed, "left alone"),
        ]
        said = ", ".join(f"{count} {what}" for count, what in counts if count)
        (tell if options.diff else say)("\n".join([*lines, f"{counted(len(done), 'file')}: {said}"]))
    if any(each.unreadable for each in done):
        return Exit.USAGE
    return Exit.DIAGNOSTICS if failed or (look_only and changed) else Exit.CLEAN


def test_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="PATH", default=["."], help="Markdown files, or folders of them")
    help = "fail on a rule of this policy, or of a folder of policies, that no test exercises; may be repeated"
    parser.add_argument("--cover", action="append", default=[], metavar="POLICY", help=help)
    add_form(parser, *RENDERERS)


def test(options: argparse.Namespace) -> Exit:
    """Run policy tests: the policies in Markdown files, against the claims in their comments.

    A folder means every .md file below it that holds a policy; the default PATH is the current folder. The form of
    policy tests is described in docs/policy-tests.md. Needs no model, no GPU and no torch.

    examples:

      policylang test tests
      policylang test tests --cover policies

    exit codes: 0 all claims hold, 1 some do not, 2 a file that cannot be read
    """
    from policylang.testing.suites import run_files

    result = run_files(options.paths, options.cover)
    summary = f"tested {counted(result.policies, 'policy', 'policies')} in {counted(result.files, 'file')}"
    if options.cover:
        summary += f", {counted(result.rules, 'rule')} to cover"
    wrong = len(result.found.diagnostics)
    summary += f": {wrong} not as claimed" if wrong else f": {counted(result.claims, 'claim')}, all hold"
    return inputs.print_findings(result.found, options.output_format, summary, failed=bool(wrong))
