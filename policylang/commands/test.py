"""Run policy tests: the policies in Markdown files, against what their comments say is to come of them.

A folder stands for every .md file below it that holds a policy; without a PATH, the current folder does. The form of
policy tests is described in docs/policy-tests.md. Needs no model, no GPU and no torch.

exit codes: 0 all is as the policies say, 1 it is not, 2 a file that cannot be read
"""

from __future__ import annotations

import argparse

from policylang.commands.shared.exit import Exit

NAME = "test"
SUMMARY = "run policy tests"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="*", metavar="PATH", default=["."], help="Markdown files, or folders of them")
    parser.add_argument(
        "--cover",
        action="append",
        default=[],
        metavar="POLICY",
        help="fail on a rule of this policy, or of a folder of policies, that no test exercises; may be repeated",
    )
    parser.add_argument(
        "--output-format",
        choices=("text", "concise", "json", "github", "sarif"),
        default="text",
        help="how to print what was found (default: text)",
    )


def run(options: argparse.Namespace) -> Exit:
    from policylang.report.diagnostics import RENDERERS
    from policylang.testing.files import run_files

    result = run_files(options.paths, options.cover)
    found = result.found
    printed = RENDERERS[options.output_format](found.diagnostics)
    if printed:
        print(printed.rstrip("\n"))
    if options.output_format == "text":
        print("\n" if printed else "", end="")
        tested = f"tested {_count(result.policies, 'policy')} in {_count(result.files, 'file')}"
        if options.cover:
            tested += f", {_count(result.rules, 'rule')} to cover"
        wrong = len(found.diagnostics)
        print(f"{tested}: {wrong} not as claimed" if wrong else f"{tested}: {_count(result.claims, 'claim')}, all hold")
    if found.unreadable:
        return Exit.USAGE
    return Exit.DIAGNOSTICS if found.diagnostics else Exit.CLEAN


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun.removesuffix('y')}ies" if noun.endswith("y") else f"{number} {noun}s"
