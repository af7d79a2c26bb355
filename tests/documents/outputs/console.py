"""Commands of a page, run in a folder with the files that the page shows above them."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from pathlib import Path

from tests.documents.outputs.pages import ROOT, Shown

_FILE = re.compile(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (?P<words>[^\n]*)$", flags=re.MULTILINE)


def console(shown: Shown) -> str:
    """Each command of the block with what it prints; ``console 12`` shows the first 12 lines of each.

    The folder has the files of the page's ``<!-- file: NAME -->`` blocks above, and the snapshots, in ``docs/graphs``.
    """
    most = int(shown.words[1]) if len(shown.words) > 1 else None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "docs").mkdir()
        (folder / "docs" / "graphs").symlink_to(ROOT / "docs" / "graphs")
        for file, text in _FILE.findall(shown.above):
            (folder / file).write_text(text, encoding="utf-8")
        with contextlib.chdir(folder):
            return "\n".join(_shown(match["words"], most) for match in _COMMAND.finditer(shown.text))


def _shown(command: str, most: int | None) -> str:
    from policylang.commands.cli import main

    words = shlex.split(command, comments=True)
    assert words[0] == "policylang"
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        main(words[1:])
    lines = out.getvalue().rstrip("\n").split("\n")
    kept = lines if most is None or len(lines) <= most else [*lines[:most], "…"]
    return "\n".join([f"$ {command}", *kept])


PRODUCERS = {"console": console}
