"""What tests of checkpoints need on older versions of torch."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_checkpoint_left_open() -> Iterator[None]:
    """Before torch 2.13, a checkpoint whose block raises keeps its hooks in place for as long as the error is held."""
    yield
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        gc.collect()
