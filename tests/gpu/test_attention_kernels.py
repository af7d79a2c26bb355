"""The attention kernel that is told without a GPU is the one that the GPU chooses."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from policylang.tracing.target_device import chosen_kernel
from tests.tracing.test_for_a_device import CALLS, attention_call


@pytest.mark.parametrize("call", [call for _gpu, call, _expected in CALLS])
def test_a_call(call):
    if call.get("keys") == 0 or call.get("groups") == 3:
        pytest.skip("attention over nothing, or over heads that do not divide")
    made = attention_call(device="cuda", **call)
    number = torch._fused_sdp_choice(
        *made.tensors, made.mask, made.dropout, made.is_causal, scale=made.scale, enable_gqa=made.grouped
    )
    assert chosen_kernel(made, torch.cuda.get_device_capability()) == SDPBackend(number)
