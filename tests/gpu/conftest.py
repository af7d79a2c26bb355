"""Everything in this folder needs a CUDA device."""

import pytest
import torch

from tests.support import models


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def on_cuda():
    """``on_cuda(name)`` is a model of the zoo, its inputs and its loss, on the device."""

    def build(name: str) -> models.Example:
        module, inputs, loss_fn = models.ZOO[name]()
        return models.Example(module.cuda(), tuple(tensor.cuda() for tensor in inputs), loss_fn)

    return build
