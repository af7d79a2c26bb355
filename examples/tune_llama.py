"""From a budget to a policy, and a training under it: snapshot, tune, train.

    python examples/tune_llama.py                     # a budget half way between all saved and all recomputed
    python examples/tune_llama.py "120 MiB"           # a budget of your own, for the peak of the step
    python examples/tune_llama.py "120 MiB" h100      # times of another device profile

Needs `transformers` and `highspy`. Nothing is downloaded: a small Llama with random weights. The step is
traced and trained as one flat graph; `torch.compile(model, backend=policylang.backend("tuned.apl"))` takes the same
file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import policylang

VOCABULARY = 512


class Outcome(NamedTuple):
    tuned: policylang.TunedPolicy
    losses: list[float]
    measured: int
    """Bytes of the step's highest moment, as the allocator reports them: parameters and batch included, and the
    optimizer's state left out, as in ``tuned.graph_peak``."""


def make_model(layers: int = 6) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=8,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def tune(graph: Path, peak: str | None, device: str) -> policylang.TunedPolicy:
    """The policy for a budget; without one, for what lies half way between the least and the most memory."""
    if peak is not None:
        return policylang.tune(graph, peak=peak, device=device)
    table = policylang.tune(graph, peak="1 TiB", device=device, table=True).table
    return policylang.tune(graph, peak=(table[0].peak + table[-1].peak) // 2, device=device)


def train(step: policylang.TracedStep, model: torch.nn.Module, tokens: torch.Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss, gradients = step(tokens)
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def measured_peak(step: policylang.TracedStep, model: torch.nn.Module, tokens: torch.Tensor) -> int:
    """Bytes of one step at its highest moment, as PyTorch's allocator reports them to its profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(tokens)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each.get("name") == "[memory]")
    there = [*model.parameters(), *model.buffers(), tokens]
    return sum(each.nbytes for each in there) + max(accumulate(size for _, size in changes))


def main(peak: str | None = None, device: str = "cpu", *, folder: str | Path = ".", steps: int = 5) -> Outcome:
    model = make_model()
    tokens = torch.randint(VOCABULARY, (4, 256))

    step = policylang.trace_step(model, loss_of, tokens)  # nothing is computed
    graph, policy = Path(folder) / "tune_llama.graph", Path(folder) / "tuned.apl"
    policylang.snapshot(step, graph)

    tuned = tune(graph, peak, device)  # needs neither torch nor the model: it may be done on another machine
    tuned.save(policy)
    print(tuned)

    step.apply(str(policy))
    losses = train(step, model, tokens, steps)
    found = measured_peak(step, model, tokens)
    for number, loss in enumerate(losses):
        print(f"step {number}: loss {loss:.4f}")
    print(f"peak: {tuned.graph_peak / 2**20:.1f} MiB simulated, {found / 2**20:.1f} MiB measured")
    return Outcome(tuned, losses, found)


if __name__ == "__main__":
    main(*sys.argv[1:3])
