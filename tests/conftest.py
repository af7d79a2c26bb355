"""What every test starts from."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import settings

import tests.support.unwatched  # noqa: F401
from tests.support.heap import RARELY, settle

# Some kernels add up in another order with several threads, run by run; bitwise comparisons need one order.
torch.set_num_threads(1)

# Inductor compiles a probe for the vector instructions of this machine in every new cache folder, which costs more than
# the few small kernels of a test. Set before Inductor is imported, and for the processes that tests start.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

gc.set_threshold(*RARELY)

# A suite that decides whether a change goes in gives the same verdict twice: the examples follow from the test itself.
# HYPOTHESIS_PROFILE=search draws new ones each time.
settings.register_profile("same", derandomize=True, print_blob=True)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Of the modules before; what their fixtures held has gone."""
    settle()
