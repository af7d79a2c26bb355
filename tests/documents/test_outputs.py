"""What the pages show as the output of a run is the output of that run.

`scripts/update_docs_figures.py` writes what these tests compare.
"""

from __future__ import annotations

import pytest
import torch

from tests.documents.outputs import PAGES, SLOW, Shown, blocks, masked, produce

FOUND = [shown for page in PAGES for shown in blocks(page)]


def _cases() -> list[object]:
    return [
        pytest.param(shown, id=str(shown), marks=[pytest.mark.slow] if shown.words[0] in SLOW else []) for shown in FOUND
    ]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages show the figures of torch 2.13")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shown", _cases())
def test_a_page_shows_what_the_run_prints(shown: Shown):
    assert masked(shown, shown.text) == masked(shown, produce(shown)), "run scripts/update_docs_figures.py"


def test_pages_have_outputs():
    assert len(FOUND) > 40
