"""Formats policy files: what ``policylang fmt`` does, as data. Needs no torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from attrs import evolve, frozen

from policylang.language.diagnostics import Diagnostic, Source, diagnose
from policylang.language.files import policy_files, read_source, write_whole
from policylang.language.layout import format_source, line_end_of

_CANNOT = "APL104"


@frozen
class Formatting:
    """What formatting one file came to. Nothing has been written yet."""

    name: str
    content: bytes
    written: bytes | None
    """The file in canonical form; None where the diagnostics say why there is none."""
    diagnostics: tuple[Diagnostic, ...] = ()
    unreadable: bool = False

    @property
    def failed(self) -> bool:
        return self.written is None

    @property
    def changes(self) -> bool:
        return self.written is not None and self.written != self.content

    def diff(self) -> str:
        """What changes, as a unified diff; empty where nothing does."""
        if not self.changes or self.written is None:
            return ""
        old, new = (_decoded(text).splitlines(keepends=True) for text in (self.content, self.written))
        return "".join(difflib.unified_diff(old, new, self.name, f"{self.name} (formatted)"))

    def save(self) -> Formatting:
        """Write the file if it changes; the result says so where that cannot be done."""
        if not self.changes or self.written is None:
            return self
        try:
            write_whole(Path(self.name), self.written)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            problem = diagnose(_CANNOT, f"`{self.name}` cannot be written: {reason}")
            return evolve(self, written=None, diagnostics=(*self.diagnostics, problem), unreadable=True)
        return self


def format_files(paths: Sequence[str]) -> list[Formatting]:
    """Format policy files; a folder stands for every ``.apl`` file below it. Nothing is written."""
    return [_format_file(file) for path in paths for file in policy_files(path)]


def format_text(content: bytes, name: str = "<stdin>") -> Formatting:
    """Format the content of a file."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        help = "a policy is a UTF-8 text file"
        problem = diagnose("APL001", f"the text is not UTF-8: byte 0x{content[error.start]:02x}", help=help)
        return Formatting(name, content, None, (problem,))
    return _format(Source(name, text), content)


def _format_file(name: str) -> Formatting:
    source = read_source(Path(name), name)
    if isinstance(source, Diagnostic):
        return Formatting(name, b"", None, (source,), unreadable=source.code in ("APL103", _CANNOT))
    return _format(source, Path(name).read_bytes())


def _format(source: Source, content: bytes) -> Formatting:
    formatted = format_source(source)
    if formatted.text is None:
        return Formatting(source.name, content, None, formatted.diagnostics)
    written = formatted.text.replace("\n", line_end_of(source.text)).encode()
    return Formatting(source.name, content, written, formatted.diagnostics)


def _decoded(content: bytes) -> str:
    return content.decode("utf-8-sig", errors="replace")
