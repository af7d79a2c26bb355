"""What does recomputation on a flat graph cost, in time to plan and in memory at the peak, beside the peers' passes?

The same flat graphs (forward, loss and backward of a Hugging Face Llama, traced once by ``policylang.trace_step``) go
through PyTorch's ``remat_using_tags_for_fwd_loss_bwd_graph``, through TorchTitan's ``tag_sac_policy`` and
``selective_activation_remat_pass`` where torchtitan is installed, and through policylang. All carry out the same
decisions, and each gets a fresh copy. The peak is that of the graph run on fake tensors, at the true sizes of an 8B
model, beside eager selective checkpointing with the same decisions: TorchTitan's, which recompute every second product.

    python -m benchmarks.flat_graph --layers 2 4 8 16 32 --peak-layers 32 --json results.json
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import logging
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from attrs import frozen
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import policylang
from benchmarks.common import growth_exponent, table, write_results
from policylang.backends.flat import FlatPath
from policylang.graph.collect import collect
from policylang.graph.facts import Phase
from policylang.language.syntax import Policy

LAYERS = (2, 4, 8, 16, 32, 64, 128)
POLICY = """
policy flat_graph
blocks layers.*
recompute everything in block
save attention in block
save matmul in block
recompute every 2nd mm per block
save everything in block where crosses block
"""
NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
EIGHT_B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@frozen(eq=False)
class FlatGraph:
    """A traced step with what each contender looks for on its nodes."""

    gm: fx.GraphModule
    decisions: dict[str, CheckpointPolicy]

    def fresh(self) -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.gm.graph, {}))
        for old, new in zip(self.gm.graph.nodes, graph.nodes, strict=True):
            new.meta = copy.copy(old.meta)
        return fx.GraphModule(self.gm, graph)

    def tagged(self) -> fx.GraphModule:
        """A copy whose nodes carry the decisions as tags, the input of PyTorch's pass."""
        gm = self.fresh()
        for node in gm.graph.nodes:
            if node.name in self.decisions:
                node.meta["recompute"] = self.decisions[node.name]
                node.meta["ac_graph_id"] = 0
        return gm

    def __len__(self) -> int:
        return len(self.gm.graph.nodes)


def llama(layers: int, **sizes: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"vocab_size": 64, **NARROW, **sizes}
    config = LlamaConfig(num_hidden_layers=layers, use_cache=False, attn_implementation="sdpa", **settings)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def flat_llama(layers: int, length: int = 16, batch: int = 2, device: str = "cpu", **sizes: int) -> FlatGraph:
    """Traced on fake tensors, so that an 8B model needs no memory."""
    with FakeTensorMode(), torch.device(device):
        model = llama(layers, **sizes)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
    gm = policylang.trace_step(model, language_loss, tokens).gm
    facts = collect(gm)
    for node, phase, path in zip(gm.graph.nodes, facts.phases, facts.modules, strict=True):
        node.meta["custom"] = {**node.meta.get("custom", {}), "module_fqn": path.removeprefix("model.")}
        if phase == Phase.BACKWARD:
            node.meta["autograd_backward"] = True
            node.meta["custom"]["remat_pass_tag"] = "is_backward"  # torch 2.11 looks for this alone
    decisions = {}
    for row, decision in enumerate(FlatPath().plan(facts, policylang.parse(POLICY)).decisions):
        if decision is not None and decision.action is not None:
            again = decision.action.recomputes
            decisions[facts.names[row]] = CheckpointPolicy.MUST_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
    return FlatGraph(gm, decisions)


# --- contenders ------------------------------------------------------------------------------------------------------


def with_policylang(gm: fx.GraphModule, graph: FlatGraph, policy: Policy) -> fx.GraphModule:
    FlatPath().apply(gm, policy)
    return gm


def with_pytorch(gm: fx.GraphModule, graph: FlatGraph, policy: Policy) -> fx.GraphModule:
    from torch._functorch._activation_checkpointing import remat_using_tags_for_fwd_loss_bwd_graph_pass as remat

    return remat.remat_using_tags_for_fwd_loss_bwd_graph(gm)


def with_torchtitan(gm: fx.GraphModule, graph: FlatGraph, policy: Policy) -> fx.GraphModule:
    from torchtitan.experiments.graph_trainer.memory_policy import tag_sac_policy
    from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

    decisions = graph.decisions
    gm = tag_sac_policy(gm, policy_fn=lambda node: decisions.get(node.name, CheckpointPolicy.MUST_SAVE))
    return selective_activation_remat_pass(gm)


def with_policylang_and_code(gm: fx.GraphModule, graph: FlatGraph, policy: Policy) -> fx.GraphModule:
    """policylang leaves code generation to the first call, the peers' passes generate code two or three times."""
    assert with_policylang(gm, graph, policy).code
    return gm


Contender = Callable[[fx.GraphModule, FlatGraph, Policy], fx.GraphModule]


@cache
def contenders() -> dict[str, Contender]:
    found: dict[str, Contender] = {
        "policylang": with_policylang,
        "policylang + code": with_policylang_and_code,
        "pytorch": with_pytorch,
    }
    if _import_torchtitan():
        logging.getLogger().setLevel(logging.ERROR)  # it logs a line a layer
        found["torchtitan"] = with_torchtitan
    else:
        print("torchtitan is not installed: its passes are left out", flush=True)
    return found


def _import_torchtitan() -> bool:
    """Its passes need no triton, but a module that they import does; it gets a stand-in where there is no GPU."""
    import torch._inductor.compile_fx  # noqa: F401  # before there is a stand-in that it would take for the real one

    names = [name for name in ("triton", "triton.language") if importlib.util.find_spec("triton") is None]
    sys.modules.update({name: MagicMock() for name in names})
    try:
        import torchtitan.experiments.graph_trainer.memory_policy
        import torchtitan.experiments.graph_trainer.selective_activation_remat  # noqa: F401
    except ImportError:
        return False
    finally:
        for name in names:
            del sys.modules[name]
    return True


# --- time ------------------------------------------------------------------------------------------------------------


def measure_time(graph: FlatGraph, run: Contender, policy: Policy, tagged: bool, repeats: int) -> float:
    """Seconds of processor time, the median: other processes of a shared machine do not count."""
    times = []
    for _ in range(repeats):
        gm = graph.tagged() if tagged else graph.fresh()
        gc.collect()
        start = time.process_time()
        run(gm, graph, policy)
        times.append(time.process_time() - start)
    return statistics.median(times)


def measure_layers(layers: int, repeats: int) -> dict[str, Any]:
    graph, policy = flat_llama(layers), policylang.parse(POLICY)
    row: dict[str, Any] = {"layers": layers, "nodes": len(graph)}
    for name, run in contenders().items():
        row[f"{name} s"] = measure_time(graph, run, policy, name == "pytorch", repeats)
    for name in list(contenders())[2:]:
        row[f"of {name}"] = row["policylang s"] / row[f"{name} s"]
    row["us/node"] = row["policylang s"] / len(graph) * 1e6
    return row


# --- memory ----------------------------------------------------------------------------------------------------------


def peak_of_graph(gm: fx.GraphModule) -> int:
    """Bytes at the worst moment of a run on fake tensors, its inputs left out."""
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in inputs if isinstance(value, Tensor))
    gc.collect()
    with torch.no_grad(), mode, MemTracker() as tracker:
        gm(*inputs)
    return _peak(tracker)


def peak_of_eager(layers: int, length: int, batch: int, device: str = "cpu", **sizes: int) -> int:
    """The same step eagerly, each layer under PyTorch's selective checkpointing with the same operators saved."""
    with FakeTensorMode() as mode, torch.device(device):
        model = llama(layers, **sizes)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        for layer in model.model.layers:
            _checkpoint(layer)
        gc.collect()
        with mode, MemTracker() as tracker:
            loss = language_loss(model, tokens)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            del gradients
    return _peak(tracker)


def _checkpoint(layer: nn.Module) -> None:
    layer.forward = partial(  # type: ignore[method-assign]
        checkpoint, layer.forward, use_reentrant=False, context_fn=_selective_contexts
    )


def _selective_contexts() -> Any:
    """The decisions of ``POLICY`` by hand; the count starts anew in the recomputation, as TorchTitan's does."""
    products = {False: 0, True: 0}

    def decide(context: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(target).removeprefix("aten.").partition(".")[0]
        if name == "mm":
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        else:
            saved = name in ("addmm", "bmm") or name.startswith("_scaled_dot_product")
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _peak(tracker: MemTracker) -> int:
    return max(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())


def measure_peaks(layers: int, length: int, batch: int, device: str, sizes: dict[str, int]) -> list[dict[str, Any]]:
    graph, policy = flat_llama(layers, length, batch, device, **sizes), policylang.parse(POLICY)
    peaks = {"as traced": peak_of_graph(graph.fresh())}
    for name, run in contenders().items():
        gm = graph.tagged() if name == "pytorch" else graph.fresh()
        peaks[name] = peak_of_graph(run(gm, graph, policy))
    peaks["eager SAC"] = peak_of_eager(layers, length, batch, device, **sizes)
    ours = peaks["policylang"]
    return [{"contender": n, "peak GiB": p / 2**30, "policylang is": ours / p} for n, p in peaks.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=list(LAYERS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of the peaks; cuda traces a GPU's attention, and needs one")
    parser.add_argument("--peak-layers", type=int, default=32, help="of the 8B model; 0 leaves the peaks out")
    parser.add_argument("--length", type=int, default=8192, help="tokens a sequence, for the peaks")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"benchmark": "flat_graph", "policy": POLICY.strip()}
    if options.peak_layers:
        print(f"simulating: {options.peak_layers} layers of an 8B model", flush=True)
        results["peaks"] = measure_peaks(options.peak_layers, options.length, options.batch, options.device, EIGHT_B)
        print(table(results["peaks"]))
    rows = []
    for layers in options.layers:
        print(f"measuring: {layers} layers", flush=True)
        rows.append(measure_layers(layers, options.repeats))
    results["rows"] = rows
    print(table(rows))
    if len(rows) > 2:
        sizes = [row["nodes"] for row in rows]
        results["exponent"] = {n: growth_exponent(sizes, [row[f"{n} s"] for row in rows]) for n in contenders()}
        print(table([results["exponent"]]))
    write_results(options.json, results)


if __name__ == "__main__":
    main()
