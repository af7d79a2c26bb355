"""A budget given to PyTorch, and the same peak given to ``policylang tune``: what is asked, predicted and taken?

The Hugging Face models of ``benchmarks/tuned_steps.py`` train for a step on the CPU, with random weights, float32:

- ``torch.distributed._tools.sac_ilp.sac_milp``, asked for shares of the plain step's peak. Each module that it chooses
  gets a ``torch.utils.checkpoint`` with the decisions of ``get_optimal_checkpointing_policy_per_module`` as selective
  checkpoint contexts. Operators take the times of the profile that we tune with, since its roofline wants a GPU;
- ``torch._functorch.config.activation_memory_budget``, on the whole model under ``torch.compile``;
- ``torch.autograd.graph.region_activation_memory_budget``, on each block compiled alone.

Beside each is the policy tuned for the peak that ``sac_milp`` was asked for, or that PyTorch's budget, a share of what
is saved, came to: in eager, for the whole model under ``torch.compile``, or beside regions both. All is counted, not
timed, and the same in every run: the allocator's peak with parameters and batch, what is saved, FLOPs of products and
attention, and the largest difference of any gradient, of the largest, from the plain step; for PyTorch's budgets from a
budget of 1, since their backend decomposes dropout.

    python -m pip install pulp pwlf            # what sac_milp wants; without them it is left out
    python -m benchmarks.budgets --json benchmarks/results/budgets.json
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import policylang
from benchmarks.allocations import step_allocations
from benchmarks.common import table, write_results
from benchmarks.compared import COMPILED, EAGER, Step, budget, largest_difference, operator_flops, step_flops
from benchmarks.tuned_steps import DEVICE, MIB, MODELS, SIZE, Size, Training, facts_of, made
from policylang.api.load import load_device
from policylang.graph.collect import collect
from policylang.planning.capabilities import capabilities_for
from policylang.simulation.node_times import node_times
from policylang.tuning.evaluation import Budget, Infeasible
from policylang.tuning.tuner import Tuner

SAC_MILP, WHOLE, REGIONS = "sac_milp", "activation_memory_budget", "region_activation_memory_budget"
PATHS = {SAC_MILP: (EAGER,), WHOLE: (COMPILED,), REGIONS: (COMPILED, EAGER)}
"""Those on which a policy is tuned beside it."""
NEEDS = ("pulp", "pwlf")
ASKED = (0.8, 0.65, 0.5)
"""Of the plain step's peak."""
SHARES = (1.0, 0.5, 0.25)

Prepare = Callable[[Training], Step]


class SacMilp:
    """PyTorch's integer program on the statistics of one model."""

    def __init__(self, name: str, size: Size) -> None:
        """Left out is what would end the statistics in an error: modules without a backward (Llama's rotary embedding),
        modules called twice (dropout in ViT's blocks), the trade-off of modules that keep nothing (ViT's patches)."""
        from torch.distributed._tools import ilp_utils
        from torch.distributed._tools.mem_tracker import MemTracker, _ModState
        from torch.distributed._tools.runtime_estimator import RuntimeEstimator
        from torch.distributed._tools.sac_estimator import SACEstimator
        from transformers import initialization, masking_utils

        memory, times, estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
        with (
            FakeTensorMode(),
            patch.object(RuntimeEstimator, "_roofline_estimate", priced),
            # the one asks tensors for values, the other makes a mask of fake tensors that eager does without
            patch.object(initialization, "trunc_normal_", lambda tensor, **_: tensor),
            patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None),
        ):
            training, batch = made(name, size)
            memory.track_external(training, batch)
            for mode in (memory, times("operator-level-cost-model"), estimator("operator-level-cost-model")):
                with mode:
                    training(batch).backward()
                training.zero_grad(set_to_none=True)
            for module, found in list(memory.memory_tracking.items()):
                if times.mod_fw_pre_order.count(found.mod_fqn) > 1 or _ModState.PRE_BW not in found.snapshots:
                    del memory.memory_tracking[module]
                    for order in (times.mod_fw_pre_order, times.mod_fw_post_order):
                        order[:] = [path for path in order if path != found.mod_fqn]
            self.operators = {path: each for path, each in estimator.sac_mod_stats.items() if sum(each.memory)}
            estimator.sac_mod_stats = self.operators
            numpy.random.seed(0)  # trade-off curves are fitted by chance
            statistics = ilp_utils.aggregate_stats(training, memory, times, estimator, torch.device("cpu"))
        self.graph = ilp_utils.parse_module_info(statistics)

    def choose(self, peak: float) -> tuple[float | None, Prepare | None]:
        """For a peak in MiB the one that is predicted, and what checkpoints a model; None if none fits."""
        from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp

        discarded, _, predicted = sac_milp(self.graph, peak * MIB / 2**30)
        if predicted < 0:
            return None, None

        def prepare(training: Training) -> Step:
            for path, share in discarded.items():
                module, operators = training.get_submodule(path.partition(".")[2]), self.operators[path]
                decisions = get_optimal_checkpointing_policy_per_module(operators, 1 - share)
                context_fn = partial(contexts, operators.func_names, decisions)
                module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=context_fn)
            return training

        return predicted / MIB, prepare


def priced(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """A result, and the milliseconds that our simulator counts for the operator on this device."""
    from torch.utils._runtime_estimation import _IGNORE_OPS, get_num_bytes

    out, device, flops = func(*args, **kwargs or {}), load_device(DEVICE), operator_flops(func, args)
    if func._overloadpacket in _IGNORE_OPS:
        return out, 0.0
    moved = sum(get_num_bytes(each) for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor))
    computing = flops / device.compute["float32"].at(flops) if flops else 0.0
    return out, 1e3 * (device.overhead + max(computing, moved / device.bandwidth.at(moved) if moved else 0.0))


def contexts(names: Sequence[str], decisions: Sequence[int]) -> Any:
    """Selective checkpoint contexts for one run of a module: a decision for each of its operators, in order."""
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    left = iter(zip(names, decisions, strict=True))

    def policy(_: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in OPS_TO_ALWAYS_SKIP:
            return CheckpointPolicy.PREFER_RECOMPUTE
        name, keep = next(left)
        assert name == func._overloadpacket.__name__, f"the statistics have {name} where {func} runs"
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def region_budget(share: float, training: Training) -> Step:
    def within(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.region_activation_memory_budget(share):
                return forward(*args, **kwargs)

        return torch.compile(run, backend="aot_eager_decomp_partition", fullgraph=True)

    for block in max((each for each in training.modules() if isinstance(each, nn.ModuleList)), key=len):
        block.forward = within(block.forward)
    return training


def policy(rules: str, how: str, training: Training) -> Step:
    if how == EAGER:
        return policylang.checkpoint_model(training, policylang.parse(rules))
    return torch.compile(training, backend=policylang.backend(policylang.parse(rules), inner="aot_eager"))


def tuner_for(name: str, size: Size, how: str) -> Tuner:
    if how == COMPILED:
        facts, path = facts_of(name, size, joint=True), None
    else:
        training, batch = made(name, size)
        step, path = policylang.trace_step(training, lambda model, each: model(each), batch, path="eager"), "eager"
        facts = collect(step.gm)
    return Tuner(facts, node_times(facts, load_device(DEVICE)), capabilities_for(facts.kind, path))


def taken(name: str, size: Size, how: str, prepare: Prepare) -> tuple[dict[str, float], dict[str, Tensor]]:
    """What a step takes, and its gradients."""
    torch._dynamo.reset()
    training, batch = made(name, size)
    before = sum(each.nbytes for each in (*training.parameters(), *training.buffers(), batch))
    step = prepare(training)
    step(batch).backward()  # the first step compiles, and plans
    training.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    memory = step_allocations(lambda: step(batch))
    gradients = {name: each.grad for name, each in training.named_parameters()}
    training.zero_grad(set_to_none=True)
    flops = step_flops(how, lambda: step(batch).backward())
    return {"peak MiB": (memory.peak + before) / MIB, "saved MiB": memory.saved / MIB, "GFLOP": flops / 1e9}, gradients


def measure(
    name: str, size: Size = SIZE, asked: Sequence[float] = ASKED, shares: Sequence[float] = SHARES
) -> Iterator[dict[str, Any]]:
    """A row for each contender and budget, with the policy that is tuned for it."""
    plain, reference = taken(name, size, EAGER, lambda training: training)
    references = dict.fromkeys((SAC_MILP, "policylang"), reference)
    tuners = {how: tuner_for(name, size, how) for how in (EAGER, COMPILED)}

    def figures(contender: str, how: str, prepare: Prepare | None) -> dict[str, Any]:
        if prepare is None:
            return {}
        found, gradients = taken(name, size, how, prepare)
        without = references.setdefault(contender, gradients)
        difference = largest_difference(gradients, without) / max(each.abs().max().item() for each in without.values())
        return {**found, "FLOPs / plain": found["GFLOP"] / plain["GFLOP"], "gradients": difference}

    contenders: list[tuple[str, float, tuple[float | None, Prepare | None]]] = []
    if all(map(importlib.util.find_spec, NEEDS)):
        program = SacMilp(name, size)
        peaks = [share * plain["peak MiB"] for share in asked]
        contenders = [(SAC_MILP, peak, program.choose(peak)) for peak in peaks]
    else:
        print(f"{' and '.join(NEEDS)} are not installed: {SAC_MILP} is left out", flush=True)
    for contender, apply in ((WHOLE, budget), (REGIONS, region_budget)):
        contenders += [(contender, share, (None, partial(apply, share))) for share in shares]
    for contender, wanted, (predicted, prepare) in contenders:
        # what runs in a compiled block is seen by a profile alone
        theirs = figures(contender, EAGER if contender == SAC_MILP else COMPILED, prepare)
        limit = wanted if contender == SAC_MILP else theirs["peak MiB"]
        for how in PATHS[contender]:
            found = tuners[how].tuned(Budget("peak", int(limit * MIB)))
            chosen = None if isinstance(found, Infeasible) else found.chosen
            least = tuners[how].smallest(Budget("peak", inf)).peak / MIB
            ours: dict[str, Any] = {"path": how, "asked MiB": limit, "least MiB": least}
            if chosen is not None:
                ours["simulated MiB"] = chosen.peak / MIB
                try:
                    ours |= figures("policylang", how, partial(policy, chosen.rules, how))
                except policylang.PolicyMatchError as error:
                    ours["error"] = str(error).splitlines()[0]
            row = {"model": name, "plain peak MiB": plain["peak MiB"], "contender": contender, "asked": wanted}
            yield {**row, "predicted MiB": predicted, **theirs, **{f"policylang's {key}": ours[key] for key in ours}}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    packages = {each: version(each) for each in (*NEEDS, "transformers") if importlib.util.find_spec(each)}
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name)
        print(table(rows), flush=True)
        write_results(options.json, {"benchmark": "budgets", "packages": packages, "rows": rows})


if __name__ == "__main__":
    main()
