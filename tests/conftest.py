"""What every test starts from."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from tests.support.heap import settle

# Some kernels add up in another order with several threads, run by run; bitwise comparisons need one order.
torch.set_num_threads(1)

# A suite that decides whether a change goes in gives the same verdict twice: the examples follow from the test itself.
# HYPOTHESIS_PROFILE=search draws new ones each time.
settings.register_profile("same", derandomize=True, print_blob=True)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Of the modules before; what their fixtures held has gone."""
    settle()
