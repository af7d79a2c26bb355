"""Text as a terminal shows it: as wide as the terminal, and as wide as it comes in a pipe or a file."""

from __future__ import annotations

import argparse
import shutil
import sys
from textwrap import TextWrapper


def text_width(asked: int | None) -> int | None:
    """The columns that text may have: those that were asked for, 0 for any number, else the terminal's; None where
    there is no terminal."""
    if asked is not None:
        return asked
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say(text: object) -> None:
    """Print text that people read."""
    from policylang.report.width import fit

    print(fit(str(text)))


def tell(text: object) -> None:
    """Print text that people read on the standard error."""
    from policylang.report.width import fit

    print(fit(str(text)), file=sys.stderr)


class HelpText(argparse.RawDescriptionHelpFormatter):
    """Paragraphs of a description are filled to the width of the terminal; what is indented, as examples are, stays."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrapper = TextWrapper(width, break_long_words=False, break_on_hyphens=False)
        paragraphs = (
            part if part.startswith(" ") else wrapper.fill(" ".join(part.split()))
            for part in text.strip("\n").split("\n\n")
        )
        return "\n\n".join(paragraphs)
