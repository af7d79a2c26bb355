"""Architectures of Transformers, each a step or two with random weights, under ``checkpoint_model`` and drawn policies.

To the bit against the same model without checkpoints, dropout and routing included. Two policies are the same for all,
the others differ from one architecture to the next.
"""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import policylang
from tests.support.frameworks import Trained, differences

pytest.importorskip("transformers")

from tests.support.architectures import ARCHITECTURES, batch, built, loss_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::policylang.errors.PolicyWarning")]

DRAWN = 3
OPERATORS = """
matmul mm addmm bmm attention softmax add mul gelu silu convolution layer_norm dropout transpose view clone embedding
topk cat split mean rsqrt
"""
FORMS = (
    "{verb} {operator} in block",
    "{verb} every 2nd {operator} per block",
    "{verb} first {operator} per block",
    "{verb} last {operator} per block",
    "{verb} {operator} where crosses block",
    "{verb} {operator} where feeds backward",
)


def _drawn(seed: str) -> str:
    chance = random.Random(seed)
    rules = [f"{chance.choice(['save', 'recompute'])} everything in block"]
    for _ in range(chance.randint(1, 6)):
        form, verb = chance.choice(FORMS), chance.choice(["save", "recompute"])
        rule = form.format(verb=verb, operator=chance.choice(OPERATORS.split()))
        rules.append(f"optional {rule}")
    return "; ".join(rules)


def _policies(name: str) -> list[str]:
    fixed = ["recompute everything in block", "save everything in block"]
    return fixed + [_drawn(f"{name} {number}") for number in range(DRAWN)]


def _loop(name: str) -> Callable[[nn.Module], list[Tensor]]:
    def loop(model: nn.Module) -> list[Tensor]:
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = loss_of(name)(model, *batch(step))
            loss.backward()
            optimizer.step()
            losses += [loss.detach(), torch.rand(())]
        return losses

    return loop


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_architecture(name: str) -> None:
    torch.manual_seed(0)
    plain = built(name)
    expected = Trained.by(_loop(name), copy.deepcopy(plain))
    for text in _policies(name):
        model = policylang.checkpoint_model(copy.deepcopy(plain), policylang.parse(text), strict=True)
        assert differences(expected, Trained.by(_loop(name), model)) == [], text
        audit = policylang.report(model).audit
        assert audit.differences == (), text
