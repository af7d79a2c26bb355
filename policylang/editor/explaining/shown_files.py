"""Shows what a command answers, for clients that do nothing with the answer: as a file that the client is asked to
open. The files lie in a folder that nobody else reads and that goes with the server."""

from __future__ import annotations

import re
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

_UNSAFE = re.compile(r"[^\w.-]+")


_MARKS = re.compile(r"^(?:```.*\n|#+ )|\\(?=[^\w\s])", re.MULTILINE)
"""What Markdown has and a message shows as it is: fences, signs of headings, and what keeps a sign from being one."""


def plain(markdown: str) -> str:
    """A text that was made here as a message has it."""
    return _MARKS.sub("", markdown).strip()


class ShownFiles:
    """What was shown, a file each; shown again under one name it is written anew."""

    @cached_property
    def _folder(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix="policylang-", ignore_cleanup_errors=True)  # 0700, and gone at exit

    def write(self, name: str, uri: str, text: str) -> str:
        """The address of a file with this text. ``name``: with its ending; ``uri``: of what it is about."""
        stem, dot, ending = _UNSAFE.sub("-", name).rpartition(".")
        own = sha256(uri.encode(errors="surrogatepass")).hexdigest()[:8]
        file = Path(self._folder.name) / f"{stem[-60:]}-{own}{dot}{ending}"
        file.write_text(text, encoding="utf-8", errors="replace")
        return file.as_uri()
