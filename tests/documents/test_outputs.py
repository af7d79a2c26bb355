"""What the pages show as the output of a run is the output of that run.

`scripts/update_docs_figures.py` writes what these tests compare.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

import policylang
from tests.documents.outputs import PAGES, ROOT, SLOW, Shown, blocks, masked, produce
from tests.documents.outputs.graphs import PICTURE, picture
from tests.documents.outputs.programs import example

FOUND = [shown for page in PAGES for shown in blocks(page)]


def _cases() -> list[object]:
    return [
        pytest.param(shown, id=str(shown), marks=[pytest.mark.slow] if shown.words[0] in SLOW else [])
        for shown in FOUND
    ]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages show the figures of torch 2.13")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shown", _cases())
def test_a_page_shows_what_the_run_prints(shown: Shown):
    assert masked(shown, shown.text) == masked(shown, produce(shown)), "run scripts/update_docs_figures.py"


def test_the_picture_of_the_readme_has_the_figures_below_it():
    (shown,) = [block for block in FOUND if block.words[0] == "picture"]
    assert PICTURE.read_text(encoding="utf-8") == picture(shown), "run scripts/update_docs_figures.py"


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages show the figures of torch 2.13")
def test_the_example_prints_what_the_tutorial_shows():
    (shown,) = [block for block in FOUND if block.name == "tutorial-report"]
    assert example() == shown.text


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the snapshots are those of torch 2.13")
def test_the_snapshots_are_those_of_the_models(tmp_path: Path):
    """In a process of its own, in which one rank of a fake process group is played."""
    folder = f"Path({str(tmp_path)!r})"
    program = f"from pathlib import Path; from scripts.update_docs_figures import trace_graphs; trace_graphs({folder})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=580)
    kept = ROOT / "docs" / "graphs"
    names = sorted(path.name for path in tmp_path.glob("*.graph"))
    assert names == sorted(path.name for path in kept.glob("*.graph"))
    others = [name for name in names if _columns(tmp_path / name) != _columns(kept / name)]
    assert others == [], "run scripts/update_docs_figures.py --graphs"


def _columns(path: Path) -> dict[str, object]:
    """What a snapshot holds: its bytes also depend on the release of zlib."""
    facts = policylang.load_snapshot(path)
    return {each.name: getattr(facts, each.name) for each in attrs.fields(type(facts))}


def test_pages_have_outputs():
    assert len(FOUND) > 40
