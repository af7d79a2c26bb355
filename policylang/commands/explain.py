"""Print the long form of a diagnostic code: what it means, an example that is wrong, and its mend."""

from __future__ import annotations

import argparse
import sys
from difflib import get_close_matches

from policylang.commands import Exit

NAME = "explain"
SUMMARY = "explain a diagnostic code"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", metavar="CODE", help="such as APL101; without it, all codes are listed")


def run(options: argparse.Namespace) -> Exit:
    from policylang.language.codes import CODES

    if options.code is None:
        print("\n".join(f"{code}  {entry.title}" for code, entry in sorted(CODES.items())))
        return Exit.CLEAN
    entry = CODES.get(options.code.upper())
    if entry is None:
        near = get_close_matches(options.code.upper(), CODES, n=1)
        print(f"policylang explain: no diagnostic has the code `{options.code}`", file=sys.stderr)
        print(
            f"help: did you mean `{near[0]}`?" if near else "help: `policylang explain` lists all codes",
            file=sys.stderr,
        )
        return Exit.USAGE
    print(_page(entry.code, entry.severity.value, entry.title, entry.text, entry.wrong, entry.mended))
    return Exit.CLEAN


def _page(code: str, severity: str, title: str, text: str, wrong: str, mended: str) -> str:
    from textwrap import fill, indent

    parts = [f"{code}: {title} ({severity})", fill(text, width=100)]
    if wrong:
        parts.append("Wrong:\n\n" + indent(wrong, "    "))
    if mended:
        parts.append("Right:\n\n" + indent(mended, "    "))
    return "\n\n".join(parts)
