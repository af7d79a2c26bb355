"""Run policy tests: the policies in Markdown files, against the claims in their comments.

A folder means every .md file below it that holds a policy; the default PATH is the current folder. The form of policy
tests is described in docs/policy-tests.md. Needs no model, no GPU and no torch.

examples:

  policylang test tests
  policylang test tests --cover policies

exit codes: 0 all claims hold, 1 some do not, 2 a file that cannot be read
"""

from __future__ import annotations

import argparse

from policylang.commands.inputs import add_form, print_findings
from policylang.commands.output import Exit
from policylang.language.shown import counted
from policylang.report.diagnostics import RENDERERS


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="PATH", default=["."], help="Markdown files, or folders of them")
    parser.add_argument(
        "--cover",
        action="append",
        default=[],
        metavar="POLICY",
        help="fail on a rule of this policy, or of a folder of policies, that no test exercises; may be repeated",
    )
    add_form(parser, *RENDERERS)


def run(options: argparse.Namespace) -> Exit:
    from policylang.testing.suites import run_files

    result = run_files(options.paths, options.cover)
    summary = f"tested {counted(result.policies, 'policy', 'policies')} in {counted(result.files, 'file')}"
    if options.cover:
        summary += f", {counted(result.rules, 'rule')} to cover"
    wrong = len(result.found.diagnostics)
    summary += f": {wrong} not as claimed" if wrong else f": {counted(result.claims, 'claim')}, all hold"
    return print_findings(result.found, options.output_format, summary, failed=bool(wrong))
