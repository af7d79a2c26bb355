"""What `policylang tune` prints on the page about tuning and in the README, on a snapshot of docs/graphs."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import tempfile
from functools import cache

from policylang.commands.cli import main
from tests.documents.outputs.pages import ROOT, Shown

GRAPH = "llama3_8b.graph"
_FIRST, _LAST = 16, 6


@cache
def _run(words: tuple[str, ...]) -> str:
    """The command in a folder that has the graph, with both of its outputs."""
    out, told = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.symlink(ROOT / "docs" / "graphs" / GRAPH, GRAPH)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            main(["tune", "--graph", GRAPH, *words])
    printed = out.getvalue()
    return printed if printed.startswith("#") else "\n".join(filter(None, (printed.rstrip(), told.getvalue().rstrip())))


def tune(shown: Shown) -> str:
    """The command and its outputs: of a policy without ``-o`` the text alone."""
    _, given = shown.name.split(maxsplit=1)
    return f"$ policylang tune --graph {GRAPH} {given}\n{_run(tuple(shlex.split(given)))}"


def rows(shown: Shown) -> str:
    """The same with the middle of a long table left out."""
    lines = tune(shown).splitlines()
    left = lines[_FIRST:-_LAST]
    return "\n".join([*lines[:_FIRST], f"… {len(left)} more …", *lines[-_LAST:]])


PRODUCERS = {"tune": tune, "tune-rows": rows}
SLOW = ("tune", "tune-rows")
