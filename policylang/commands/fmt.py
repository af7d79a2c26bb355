"""Write policy files in canonical form: layout only, never what a policy means, and no comment is lost.

A folder means every .apl file below it; `-` reads standard input and writes standard output. A file with a syntax error
is reported and left alone. The written text is proved to be the same policy.

examples:

  policylang fmt policies/
  policylang fmt mine.apl --check --diff
  policylang fmt - < mine.apl

exit codes: 0 done, 1 an error, or with --check or --diff a file that is not formatted, 2 a file that cannot be read
"""

from __future__ import annotations

import argparse
import sys

from policylang.api.load import format_files, format_text
from policylang.commands.output import Exit, UsageError, say, tell
from policylang.language.shown import counted
from policylang.report.diagnostics import render_text

_STDIN = "-"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="policy files, folders of them, or - for standard input"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not formatted")
    parser.add_argument("--diff", action="store_true", help="write nothing; print what would change, and fail then")


def run(options: argparse.Namespace) -> Exit:
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
