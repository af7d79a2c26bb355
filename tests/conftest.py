"""What every test starts from."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.support.unwatched  # noqa: F401
from tests.support.compiled import fresh_dynamo
from tests.support.heap import RARELY, settle

# Some kernels add up in another order with several threads, run by run; bitwise comparisons need one order.
torch.set_num_threads(1)

gc.set_threshold(*RARELY)

# A suite that decides whether a change goes in gives the same verdict twice: the examples follow from the test itself.
# HYPOTHESIS_PROFILE=search draws new ones each time, and more.
# No test asserts a time: neither does hypothesis, of an example or of drawing it.
settings.register_profile("search", print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True, max_examples=25)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="module")
def _settled() -> None:
    """Of the modules before; what their fixtures held has gone."""
    settle()


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """Before a test, nor left by it."""
    with fresh_dynamo():
        yield
