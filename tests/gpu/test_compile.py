"""``torch.compile`` under a policy on a GPU: the same bits, and random numbers replayed from the device's generator."""

from __future__ import annotations

import pytest
import torch

import policylang

POLICIES = ["recompute everything", "recompute everything; save matmul", "save everything"]


def train(module: torch.nn.Module, inputs, loss_fn, backend) -> list[torch.Tensor]:
    """The losses of two steps and the gradients of the second."""
    torch._dynamo.reset()
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    compiled = torch.compile(module, backend=backend)
    losses = []
    for step in range(2):
        module.zero_grad()
        torch.manual_seed(step)
        loss = loss_fn(compiled(*inputs))
        loss.backward()
        losses.append(loss.detach().clone())
    gradients = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.load_state_dict(start)
    return [*losses, *gradients]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "dropout", "resnet"])
def test_a_policy_changes_no_bit(on_cuda, name: str, text: str):
    module, inputs, loss_fn = on_cuda(name)
    policy = policylang.parse(text.replace("recompute", "optional recompute"))
    plain = train(module, inputs, loss_fn, "aot_eager_default_partitioner")
    under = train(module, inputs, loss_fn, policylang.backend(policy, inner="aot_eager"))
    assert len(plain) == len(under)
    for left, right in zip(plain, under, strict=True):
        assert torch.equal(left, right)


def test_dropout_recomputed_under_inductor_draws_the_same_mask(on_cuda):
    """The gradient of a recomputed dropout is zero exactly where its output is."""
    torch.manual_seed(0)
    x = torch.ones(4096, device="cuda", requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.sin(), 0.5).cos()

    compiled = torch.compile(forward, backend=policylang.backend(policylang.parse("recompute everything")))
    output = compiled(x)
    output.sum().backward()
    assert torch.equal(output.detach() == 1.0, x.grad == 0.0)
