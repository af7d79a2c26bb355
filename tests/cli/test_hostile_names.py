"""What stands in a graph reaches nobody as anything but text: every command in every form, on a snapshot that was made
to do harm."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.snapshot import load
from policylang.report.diagnostics import RENDERERS
from tests.cli.conftest import Outcome
from tests.cli.test_check_formats import GRAPH as SMALL
from tests.support.hostile import hostile_graph, raw_in
from tests.support.textgraph import facts_of

ROOT = Path(__file__).resolve().parents[2]
POLICY = """blocks layers.*
undecided -> auto
recompute everything in block
save mm where ndim == 7
save everything in "nosuch.*"
save add in layers.*.norm
expect saved <= 1 B
"""
GRAPH = ("--graph", "hostile.graph")
TUNE = ("tune", *GRAPH, "--device", "h100-sxm")
RUNS = {
    **{f"check {form}": ("check", "mine.apl", *GRAPH, "--output-format", form) for form in RENDERERS},
    **{f"test {form}": ("test", "a.md", "--output-format", form) for form in RENDERERS},
    "show text": ("show", "hostile.graph"),
    "show json": ("show", "hostile.graph", "--output-format", "json"),
    "show nodes": ("show", "hostile.graph", "--operator", "*", "--module", "*", "--device", "h100-sxm"),
    "show nothing": ("show", "hostile.graph", "--operator", "madd", "--module", "layers.9.atention"),
    "plan text": ("plan", "llama3_sac", *GRAPH, "--html", "out.html"),
    "plan trace": ("plan", "llama3_sac", *GRAPH, "--trace", "out.json", "--device", "h100-sxm"),
    "plan json": ("plan", "llama3_sac", *GRAPH, "--output-format", "json", "--device", "h100-sxm"),
    "plan mine": ("plan", "mine.apl", *GRAPH),
    "explain node": ("explain", "llama3_sac", *GRAPH, "--node", "*mm*"),
    "explain none": ("explain", "llama3_sac", *GRAPH, "--node", "nm"),
    "explain rule": ("explain", "mine.apl", *GRAPH, "--rule", "3"),
    "explain json": ("explain", "mine.apl", *GRAPH, "--rule", "3", "--output-format", "json"),
    "diff text": ("diff", "llama3_sac", "other.apl", *GRAPH, "--device", "h100-sxm"),
    "diff markdown": ("diff", "llama3_sac", "other.apl", *GRAPH, "--output-format", "markdown"),
    "diff json": ("diff", "llama3_sac", "other.apl", *GRAPH, "--output-format", "json"),
    "tune text": (*TUNE, "--peak", "1 TiB", "-o", "out.apl"),
    "tune policy": (*TUNE, "--saved", "1 TiB"),
    "tune table": (*TUNE, "--table"),
    "tune json": (*TUNE, "--table", "--output-format", "json"),
}


GRAPHS = {"fsdp": load(ROOT / "docs" / "graphs" / "fsdp.graph"), "small": facts_of(SMALL)}


@pytest.fixture(scope="module", params=GRAPHS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hostile")
    hostile_graph(GRAPHS[request.param], made, dtypes=request.param == "fsdp")
    (made / "mine.apl").write_text(POLICY, encoding="utf-8")
    (made / "other.apl").write_text("undecided -> recompute\n", encoding="utf-8")
    (made / "a.md").write_text(f"```apl graph=hostile.graph\n{POLICY}```\n", encoding="utf-8")
    return made


@pytest.mark.parametrize("run", RUNS)
def test_nothing_of_a_graph_is_acted_on(run: str, folder: Path, policylang: Callable[..., Outcome]) -> None:
    arguments = RUNS[run]
    with chdir(folder):
        outcome = policylang(*arguments)
    assert outcome.code in (0, 1, 2)
    assert outcome.out or outcome.err
    form = arguments[-1] if "--output-format" in arguments else "text"
    assert raw_in(outcome.out, form) == ""
    assert raw_in(outcome.err) == ""
    for written in (each for each in folder.glob("out.*") if each.name in arguments):
        assert raw_in(written.read_text(encoding="utf-8"), written.suffix[1:]) == ""
        written.unlink()


def test_a_snapshot_that_was_not_written_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "one_line", str)
    path = hostile_graph(GRAPHS["small"], tmp_path)
    with pytest.raises(PolicyGraphError, match="is damaged: its column `names` holds what cannot be there"):
        load(path)
