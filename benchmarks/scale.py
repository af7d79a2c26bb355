"""How long do a thousand ranks' worth of a model take to trace, plan, order and tune, and what grows?

Llama-3 405B (126 layers; dp 16 × tp 8 × pp 8) and DeepSeek-V3 (61 layers; dp 128, of it ep 64, × pp 8) as one of 1,024
ranks computes them: a fake process group, no memory for any tensor, kernels of an H100. The graph is one microbatch
through the whole model, whose stages share it out. It is made from traces of three and four layers of each kind, and
with ``--whole`` traced as well: then both have to be equal, column by column. Each size has a process of its own, so
that peak memory is its own; times are processor time, the least of ``--times`` processes.

    python -m benchmarks.scale --whole 8 16 32 64 --json benchmarks/results/scale.json   # about an hour
    python -m benchmarks.scale --models deepseek_v3 --layers 8 12 --whole 8                        # two minutes
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor, nn

import policylang
from benchmarks.common import growth_exponent, table, write_results
from benchmarks.deepseek_v3 import DeepSeek, DeepSeekConfig, Ranks
from benchmarks.llama3_8b_128_ranks import fake_ranks
from examples.sharded_llama import LLAMA3_8B, Llama, make_mesh, shard
from policylang.api.load import load_device
from policylang.api.planned_graphs import on_graph
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.syntax import Pipeline
from policylang.planning.plan import Plan
from policylang.planning.schedule import build_schedule
from policylang.simulation.memory import estimate_peak
from policylang.simulation.streams import step_time
from policylang.tracing.repeated_layers import (
    Calls,
    Repeated,
    Repetition,
    Unlike,
    alike,
    calls_of,
    difference,
    repeated,
    shortened,
)

WORLD, DEVICE, STAGES, MICROBATCHES = 1024, "h100-sxm", 8, 32
LLAMA3_405B = evolve(LLAMA3_8B, width=16_384, hidden=53_248, layers=126, heads=128)
POLICY = """
blocks layers.*
recompute everything in block
save attention in block
save everything in block where crosses block
optional save all_to_all in block
include <fsdp_reshard_always>
"""
ORDER = "overlap collective within 1 GiB of peak\n"
STEPS = ("trace", "plan", "stages", "order", "tune")
TIMES = (*(f"{step} s" for step in STEPS), "whole trace s")


@frozen
class Model:
    layers: int
    mesh: str
    make: Callable[[int], nn.Module]
    """The whole model, unsharded, on ``meta``."""
    shard: Callable[[nn.Module], nn.Module]
    sequence: int


def _llama(layers: int) -> nn.Module:
    return Llama(evolve(LLAMA3_405B, layers=layers))


def _llama_shard(model: nn.Module) -> nn.Module:
    assert isinstance(model, Llama)
    return shard(model, make_mesh("meta", 16, 8), dtype=torch.bfloat16)


def _deepseek(layers: int) -> nn.Module:
    return DeepSeek(DeepSeekConfig(layers=layers), Ranks("meta", 128, 64))


MODELS: Mapping[str, Model] = {
    "llama3_405b": Model(126, "dp 16 × tp 8 × pp 8", _llama, _llama_shard, LLAMA3_405B.sequence // 8),
    "deepseek_v3": Model(61, "dp 128 (ep 64) × pp 8", _deepseek, lambda model: model, DeepSeekConfig().sequence),
}


# --- graphs ----------------------------------------------------------------------------------------------------------


def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())


def traced(
    name: str, layers: int, lists: Mapping[Repeated, int], units: Mapping[str, int], counts: bool = True
) -> tuple[Facts, Calls]:
    """The step of a rank, of the whole model or of what ``units`` leave of it, and the calls of its forward."""
    about = MODELS[name]
    with fake_ranks(WORLD):  # anew for each trace: then process groups have the same names in all
        with torch.device("meta"):
            model = about.make(layers)
            tokens = torch.zeros(1, about.sequence, dtype=torch.long)
        shortened(model, lists, units)
        calls = calls_of(lambda: loss(model, tokens, tokens)) if counts else Calls()
        model = about.shard(model)
        return collect(policylang.trace_step(model, loss, tokens, tokens, device="cuda").gm), calls


def from_few(name: str, layers: int) -> Facts | Unlike:
    about = MODELS[name]
    with fake_ranks(WORLD), torch.device("meta"):
        model = about.make(layers)
        tokens = torch.zeros(1, about.sequence, dtype=torch.long)
        lists, whole = alike(model), calls_of(lambda: loss(model, tokens, tokens))
    found = repeated(lambda units: traced(name, layers, lists, units), lists, whole)
    return found.whole() if isinstance(found, Repetition) else found


# --- one size --------------------------------------------------------------------------------------------------------


@contextmanager
def taken(row: dict[str, Any], step: str) -> Iterator[None]:
    """Notes seconds of processor time, and the most memory that the process has had by then."""
    start = time.process_time()
    yield
    row[f"{step} s"] = time.process_time() - start
    row[f"{step} MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def planned(facts: Facts, text: str, pipeline: Pipeline | None = None) -> Plan:
    how: dict[str, Any] = {"one_model": True, "device": load_device(DEVICE), "pipeline": pipeline}
    plans, said = on_graph(policylang.parse(text), {"": facts}, "flat", **how)
    if any(each.severity.value == "error" for each in said):
        raise SystemExit("\n".join(each.message for each in said))
    return plans[0]


def measure(name: str, layers: int, steps: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "layers": layers}
    with taken(row, "trace"):
        facts = from_few(name, layers)
    if isinstance(facts, Unlike):
        raise SystemExit(f"{name}: {facts.reason}")
    row["nodes"] = len(facts)
    row["parameters GiB"] = (
        sum(size for op, size in zip(facts.ops, facts.bytes, strict=True) if op == "placeholder") / 2**30
    )
    traced_peak = estimate_peak(facts, build_schedule(facts, ())).bytes
    for step in steps:
        with taken(row, step):
            match step:
                case "plan":
                    planned(facts, POLICY)
                case "stages":
                    figures = planned(facts, POLICY, Pipeline("1f1b", STAGES, MICROBATCHES)).pipeline
                case "order":
                    ordered = planned(facts, POLICY + ORDER).order
                case "tune":
                    tuned = policylang.tune(facts, peak=0.6 * traced_peak, device=DEVICE)
    if "order" in steps:
        assert ordered is not None
        assert ordered.times is not None
        found = step_time(ordered.facts, ordered.schedule, ordered.times)
        row |= {"step ms a layer": 1e3 * found.step / layers, "exposed ms a layer": 1e3 * found.exposed / layers}
    if "stages" in steps and figures is not None:
        row["stage peaks GiB"] = [each.peak / 2**30 for each in figures.stages]
    if "tune" in steps:
        row["tuned rules"] = len(tuned.text.splitlines())
    return row


def measure_whole(name: str, layers: int) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "layers": layers}
    with taken(row, "whole trace"):
        facts, _ = traced(name, layers, {}, {}, counts=False)
    few = from_few(name, layers)
    found = few if isinstance(few, Unlike) else difference(few, facts)
    return {**row, "equal": "yes" if found is None else found.reason}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--layers", nargs="+", type=int, default=[8, 16, 32, 64, 126], help="at most a model's own")
    parser.add_argument("--whole", nargs="*", type=int, default=[], help="sizes that are traced whole as well")
    parser.add_argument("--steps", nargs="*", choices=STEPS[1:], default=STEPS[1:])
    parser.add_argument("--times", type=int, default=1, help="processes a size, of which the least times count")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # a size in a process of its own
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.one:
        name, layers, whole = options.one
        row = measure_whole(name, int(layers)) if whole == "whole" else measure(name, int(layers), options.steps)
        print(json.dumps(row))
        return
    rows, exponents = list[dict[str, Any]](), dict[str, dict[str, float]]()
    for name in options.models:
        own = MODELS[name].layers
        whole = {min(each, own) for each in options.whole}
        for layers in sorted({min(each, own) for each in options.layers}):
            row = _least([_in_a_process(name, layers, "few", options.steps) for _ in range(options.times)])
            rows.append(row | (_in_a_process(name, layers, "whole", ()) if layers in whole else {}))
            found = [each for each in rows if each["model"] == name]
            exponents[name] = _exponents(found)
            write_results(options.json, {"world": WORLD, "device": DEVICE, "rows": rows, "exponents": exponents})
        print(table([{key: each.get(key) for key in ("layers", "nodes", *TIMES, "equal")} for each in found]))
        print(name, {key: round(value, 3) for key, value in exponents[name].items()}, flush=True)


def _least(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of processes that did the same."""
    return {key: min(row[key] for row in rows) if key in TIMES else value for key, value in rows[0].items()}


def _exponents(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key in TIMES:
        having = [row for row in rows if key in row]
        if len(having) > 1:
            found[key] = growth_exponent([row["nodes"] for row in having], [row[key] for row in having])
    return found


def _in_a_process(name: str, layers: int, which: str, steps: Sequence[str]) -> dict[str, Any]:
    chosen = ["--steps", *steps] if steps else []
    command = [sys.executable, "-m", "benchmarks.scale", "--one", name, str(layers), which, *chosen]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{name} of {layers} layers failed")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
