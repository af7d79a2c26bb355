"""What `policylang tune` prints and draws on the page about tuning and in the README, on a snapshot of docs/graphs."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import tempfile
from functools import cache

import policylang
from policylang.commands.cli import main
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Diagnostic
from policylang.planning.capabilities import capabilities_for
from policylang.report.tuning.scatter import trade_off_svg
from policylang.tuning.tuned_policy import bundled_candidates
from tests.documents.outputs.pages import ROOT, Shown

GRAPH = "llama3_8b.graph"
_FIRST, _LAST = 16, 6
PICTURE = ROOT / "docs" / "tuning.svg"


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


def picture() -> str:
    """The trade-off of the page's first command, as a file."""
    graph, name = ROOT / "docs" / "graphs" / GRAPH, "h100-sxm"
    device = read_device(name)
    assert not isinstance(device, Diagnostic)
    found = policylang.tune(graph, peak="75 GiB", device=device, optimizer="adamw", reserve="5%", table=True)
    facts = policylang.load_snapshot(graph)
    known = bundled_candidates(facts, device, capabilities_for(facts.kind))
    return trade_off_svg(found.tuned, known) + "\n"


PRODUCERS = {"tune": tune, "tune-rows": rows}
SLOW = ("tune", "tune-rows")
