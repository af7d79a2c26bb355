"""Reads the text of a file, or says why there is none."""

from __future__ import annotations

import os
from pathlib import Path

from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.wording import shortened

_MOST = 1 << 20
_LONGEST = 200


def read_text(path: Path, name: str, noun: str) -> Source | Diagnostic:
    """The text of a file under the name that reports will give it. ``noun``: what the file should be."""
    shown = shortened(name, _LONGEST)
    try:
        if os.path.isdir(path):
            return diagnose("APL153", f"`{shown}` is a folder", help=f"name the file of {noun}")
        if os.path.exists(path) and not path.is_file():
            return diagnose("APL153", f"`{shown}` is not a regular file", help=f"name the file of {noun}")
        with path.open("rb") as stream:
            content = stream.read(_MOST + 1)
    except (OSError, ValueError) as error:
        reason = ((isinstance(error, OSError) and error.strerror) or str(error)).lower()
        return diagnose("APL153", f"`{shown}` cannot be read: {reason}")
    start = Span(Source(shown, ""), 0, 0)
    if len(content) > _MOST:
        return diagnose("APL153", f"the file is larger than the 1 MiB that {noun} may have", start)
    try:
        return Source(shown, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"the file is not text: byte 0x{content[error.start]:02x} in line {line} is not UTF-8"
        return diagnose("APL153", message, start, help=f"{noun} is a UTF-8 text file")
