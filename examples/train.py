"""Train a model under a policy: a start for your own script.

    python examples/train.py                        # with examples/mine.apl
    python examples/train.py llama3_sac             # with a bundled policy

The model is any that torch.compile takes; here a small Llama of Hugging Face with random weights.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import policylang

VOCABULARY = 1024
POLICY = sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).with_name("mine.apl"))

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=8
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

# The one line. `inner` is what compiles the two graphs afterwards: "inductor" (the default) or "aot_eager".
compiled = torch.compile(model, backend=policylang.backend(POLICY, inner="aot_eager"))

tokens = torch.randint(VOCABULARY, (4, 256))
for step in range(5):
    loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

print()
print(policylang.report(compiled))
