"""Do predicted times hold? What recomputation adds to a step, predicted with a profile of this machine, and measured.

Three Hugging Face models with random weights, each with nothing recomputed and under three policies, on three paths: a
traced step run operator by operator, and torch.compile with its graphs run in eager (aot_eager) and through Inductor.
The machine is measured first, as `policylang profile` does it, in eager or compiled as the path wants it. The steps of
one model are then taken in turn, and of each the least counts, since whatever else a machine does only adds. What the
results file holds of other models and paths stays there.

    python -m benchmarks.predicted_time --json benchmarks/results/predicted_time.json

One thread, and processor time, so that others on the machine disturb less. The memory of one step is kept for the next
(glibc's MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_, which this sets and starts again): otherwise each step first
asks the system for its pages, and one that keeps much pays more of that than one that recomputes.
``--system-allocator`` leaves that as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

import policylang
from benchmarks.common import table, write_results
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import StepTime, step_time

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "34359738368", "MALLOC_MMAP_THRESHOLD_": "33554432"}
FLAT, EAGER, INDUCTOR = "traced step", "aot_eager", "inductor"
PATHS = (FLAT, EAGER, INDUCTOR)


@frozen(eq=False)
class Example:
    """A model with its loss and batch."""

    model: nn.Module
    loss: Callable[..., Tensor]
    batch: tuple[Tensor, ...]
    blocks: str
    products: str
    """What its products are called in a policy."""

    def policy(self, name: str) -> policylang.Policy:
        text = POLICIES[name].replace("$products", self.products)
        return policylang.parse(f"policy {name.replace(' ', '_')}\nblocks {self.blocks}\n{text}\nundecided -> save\n")


NOTHING = "nothing recomputed"
POLICIES = {
    NOTHING: "save everything in block",
    "whole blocks": "recompute everything in block\nsave everything in block where crosses block",
    "all but products": ("recompute everything in block\nsave everything in block where crosses block\n$products"),
    "every 2nd block": (
        "save everything in block\n"
        "recompute everything in every 2nd block\n"
        "save everything in block where crosses block"
    ),
}


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(pixel_values=images).logits, labels)


def llama() -> Example:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        attn_implementation="sdpa",
    )
    tokens = torch.randint(4096, (2, 256))
    saved = "save matmul in block\nsave attention in block"
    return Example(LlamaForCausalLM(config), language_loss, (tokens,), "model.layers.*", saved)


def gpt2() -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=4096,
        n_embd=512,
        n_layer=6,
        n_head=8,
        n_positions=512,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    tokens = torch.randint(4096, (2, 256))
    saved = "save matmul in block\nsave attention in block"
    return Example(GPT2LMHeadModel(config), language_loss, (tokens,), "transformer.h.*", saved)


def resnet() -> Example:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=100))
    batch = torch.randn(4, 3, 160, 160), torch.randint(100, (4,))
    return Example(model, image_loss, batch, "resnet.encoder.stages.*.layers.*", "save convolution in block")


MODELS: dict[str, Callable[[], Example]] = {"Llama": llama, "GPT-2": gpt2, "ResNet-50": resnet}

Step = Callable[[], object]


def example_of(name: str) -> Example:
    torch.manual_seed(0)
    example = MODELS[name]()
    example.model.train()
    return example


def steps_of(example: Example, path: str) -> tuple[dict[str, Step], Facts]:
    """A step for each policy, and the facts of the graph that all of them were planned on."""
    if path == FLAT:
        traced = {name: policylang.trace_step(example.model, example.loss, *example.batch) for name in POLICIES}
        facts = collect(traced[NOTHING].gm)
        for name, each in traced.items():
            each.apply(example.policy(name))
        return {name: partial(each, *example.batch) for name, each in traced.items()}, facts
    compiled = {
        name: torch.compile(example.model, backend=policylang.backend(example.policy(name), inner=path), dynamic=False)
        for name in POLICIES
    }
    steps: dict[str, Step] = {name: partial(_trained, example, each) for name, each in compiled.items()}
    steps[NOTHING]()
    with tempfile.TemporaryDirectory() as folder:
        (written,) = policylang.snapshot(compiled[NOTHING], Path(folder) / "step.graph")
        return steps, policylang.load_snapshot(written)


def _trained(example: Example, compiled: Any) -> None:
    example.model.zero_grad(set_to_none=True)
    example.loss(compiled, *example.batch).backward()


def predicted(example: Example, facts: Facts, path: str, device: DeviceProfile) -> dict[str, StepTime]:
    """The times of each policy's step."""
    times = node_times(facts, device)
    capabilities = capabilities_for(facts.kind, "flat" if path == FLAT else "joint")
    plans = {name: plan(example.policy(name), facts, capabilities) for name in POLICIES}
    return {name: step_time(each.facts, each.schedule, times) for name, each in plans.items()}


def measured(steps: dict[str, Step], turns: int) -> dict[str, list[float]]:
    """Processor seconds of each step, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(2):
            step()
    for _ in range(turns):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    return seconds


def compare(name: str, path: str, device: DeviceProfile, turns: int) -> list[dict[str, Any]]:
    """A row for each policy."""
    torch._dynamo.reset()
    example = example_of(name)
    steps, facts = steps_of(example, path)
    told = predicted(example, facts, path, device)
    seconds = measured(steps, turns)
    plain, plain_told = min(seconds[NOTHING]), told[NOTHING].step
    rows = []
    for policy in POLICIES:
        extras = [one - other for one, other in zip(seconds[policy], seconds[NOTHING], strict=True)]
        extra, extra_told = min(seconds[policy]) - plain, told[policy].step - plain_told
        rows.append(
            {
                "model": name,
                "path": path,
                "policy": policy,
                "step s": min(seconds[policy]),
                "predicted s": told[policy].step,
                "extra s": extra,
                "median extra s": statistics.median(extras),
                "predicted extra s": extra_told,
                "ratio": 1 + extra / plain,
                "predicted ratio": told[policy].step / plain_told,
                "predicted / extra": extra_told / extra if policy != NOTHING and extra > 0 else None,
            }
        )
    return rows


def profiles(seconds: float, paths: Sequence[str]) -> dict[str, tuple[DeviceProfile, str]]:
    """In eager and compiled, as the paths want it, each with the text of its file."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for compiled in sorted({path == INDUCTOR for path in paths}):
            path = Path(folder) / f"{'compiled' if compiled else 'eager'}.toml"
            profile = policylang.profile_device(path, device="cpu", compiled=compiled, seconds=seconds)
            found[path.stem] = profile, path.read_text(encoding="utf-8")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--paths", nargs="*", choices=PATHS, default=list(PATHS))
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--system-allocator", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not options.system_allocator and not os.environ.keys() & KEEPS_MEMORY.keys():
        given = sys.argv[1:] if arguments is None else list(arguments)
        os.environ.update(KEEPS_MEMORY)  # glibc reads them when a process starts
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.predicted_time", *given])
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # one compilation a policy
    devices = profiles(options.profile_seconds, options.paths)
    rows: list[dict[str, Any]] = []
    before = _held(options.json)
    for name in options.models:
        for path in options.paths:
            device, _ = devices["compiled" if path == INDUCTOR else "eager"]
            rows += compare(name, path, device, options.turns)
            print(table(rows[-len(POLICIES) :]), flush=True)
            results = {
                "benchmark": "predicted_time",
                "allocator": "the system's" if options.system_allocator else "keeps its memory",
                "rows": _in_order([*rows, *before.get("rows", ())]),
                "profiles": {
                    **before.get("profiles", {}),
                    **{each: text.splitlines() for each, (_, text) in devices.items()},
                },
            }
            write_results(options.json, results)


def _held(path: Path | None) -> dict[str, Any]:
    """What the results file has of earlier runs."""
    if path is None or not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each model, path and policy, the first of several."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for row in rows:
        key = (list(MODELS).index(row["model"]), PATHS.index(row["path"]), list(POLICIES).index(row["policy"]))
        found.setdefault(key, row)
    return [found[key] for key in sorted(found)]


if __name__ == "__main__":
    main()
