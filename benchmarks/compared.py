"""What do PyTorch's ways of recomputing hold at the peak and compute, beside the same decisions as a policy?

One Llama (8 layers, hidden 256, 2 × 256 tokens, float32), one batch. Every contender trains it for one step. What a row
says is counted, not timed, so a second run gives the same: bytes that the allocator reported to PyTorch's profiler,
beyond parameters, gradients and the batch; FLOPs of products and attention by PyTorch's formulas; and the largest
difference of any gradient from the same step without checkpoints. Contenders with the same words under *keeps* keep the
same values.

A second model with dropout asks whether the gradients are still those of the model.

torchtitan and torch-remat are measured where they are installed (``pip install torch-remat``).

    python -m benchmarks.compared --json benchmarks/results/compared.json
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import addmm_flop, bmm_flop, mm_flop, sdpa_backward_flop_count, sdpa_flop_count

import policylang
from benchmarks.allocations import step_allocations
from benchmarks.common import table, write_results
from benchmarks.training_step import MIB, SHAPES, StepModel, checkpoint_layers, example

SHAPE = SHAPES["small"]
EAGER, COMPILED = "eager", "compiled"
SAC, FULL, ATTENTION = "attention, every second matmul", "block outputs", "the attention module"

POLICIES = {
    SAC: "include <llama3_sac>\n",
    FULL: "include <torchtitan_full>\n",
    ATTENTION: (
        "recompute everything in block\n"
        "save everything in layers.*.self_attn where feeds backward and not is view\n"
        "save mm in layers.*.self_attn.{v_proj,o_proj}\n"
    ),
}

Step = Callable[[Tensor], Tensor]


@frozen
class Contender:
    name: str
    how: str
    keeps: str
    prepare: Callable[[StepModel], Step]
    needs: str = ""
    """The package it comes from."""


def layers_of(model: StepModel) -> nn.ModuleList:
    layers: nn.ModuleList = model.model.model.layers
    return layers


# --- contenders ------------------------------------------------------------------------------------------------------


def whole_blocks(model: StepModel) -> Step:
    for layer in layers_of(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def torchtitan_selective(model: StepModel) -> Step:
    """Its operator-selective checkpointing, with its own list of operators, on a model that it does not know."""
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    SelectiveAC.Config().build().apply(model.model.model)
    return model


def remat_attention(model: StepModel) -> Step:
    import torch_remat as remat

    for number, layer in enumerate(layers_of(model)):
        attention = layer.self_attn
        attention.forward = _kept(remat, attention.forward)
        layer.forward = remat.checkpoint(region_name=f"layers.{number}")(layer.forward)  # type: ignore[method-assign]
    return model


def _kept(remat: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        out = remat.region(forward, "attention", recompute=False)(*args, **kwargs)
        remat.recompute_needs_tensor(out[0])
        return out

    return run


def eager_policy(keeps: str, model: StepModel) -> Step:
    policylang.checkpoint_model(model, policylang.parse(POLICIES[keeps]))
    return model


def compiled_policy(keeps: str, model: StepModel) -> Step:
    backend = policylang.backend(policylang.parse(POLICIES[keeps]), inner="aot_eager")
    return torch.compile(model, backend=backend)  # type: ignore[return-value]


def min_cut(model: StepModel) -> Step:
    return torch.compile(model, backend="aot_eager_decomp_partition")  # type: ignore[return-value]


def budget(share: float, model: StepModel) -> Step:
    import torch._functorch.config as functorch_config

    compiled = torch.compile(model, backend="aot_eager_decomp_partition")

    def call(tokens: Tensor) -> Tensor:
        with functorch_config.patch(activation_memory_budget=share):
            loss: Tensor = compiled(tokens)
            return loss

    return call


def contenders() -> list[Contender]:
    return [
        Contender("no checkpoint", EAGER, "everything", lambda model: model),
        Contender("`torch.utils.checkpoint`", EAGER, FULL, whole_blocks),
        Contender("policylang", EAGER, FULL, partial(eager_policy, FULL)),
        Contender("selective checkpoint contexts", EAGER, SAC, checkpoint_layers),
        Contender("policylang", EAGER, SAC, partial(eager_policy, SAC)),
        Contender("TorchTitan's `SelectiveAC`", EAGER, "its own list", torchtitan_selective, "torchtitan"),
        Contender("torch_remat", EAGER, ATTENTION, remat_attention, "torch_remat"),
        Contender("policylang", EAGER, ATTENTION, partial(eager_policy, ATTENTION)),
        Contender("min-cut, no budget", COMPILED, "its choice", min_cut),
        *(
            Contender(f"`activation_memory_budget` {share}", COMPILED, "its choice", partial(budget, share))
            for share in (0.5, 0.3, 0.1)
        ),
        Contender("selective checkpoint contexts", COMPILED, SAC, lambda model: min_cut(checkpoint_layers(model))),  # type: ignore[arg-type]
        Contender("policylang", COMPILED, SAC, partial(compiled_policy, SAC)),
        Contender("policylang", COMPILED, FULL, partial(compiled_policy, FULL)),
    ]


# --- one step --------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, step: Step, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    step(tokens).backward()
    return {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}


def step_flops(how: str, run: Callable[[], None]) -> int:
    """Of matrix products and attention, by PyTorch's formulas.

    Of compiled code they are read off a profile, since Dynamo runs a step without its code where a dispatch mode looks
    on; of eager code a mode counts them, since a profile has each operator twice that passes a checkpoint's own mode.
    """
    if how == EAGER:
        with _Counter() as counter:
            run()
        return counter.flops
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        run()
    return sum(_flops(event.name, event.input_shapes) for event in profiled.events())


class _Counter(TorchDispatchMode):
    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.flops += operator_flops(func, args)
        return func(*args, **kwargs or {})


def operator_flops(func: Any, args: Sequence[Any]) -> int:
    shapes = [each.shape if isinstance(each, Tensor) else () for each in args]
    return _flops(func.name().partition(".")[0], shapes)


def _flops(name: str, shapes: Sequence[Sequence[int]]) -> int:
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    if name == "aten::mm":
        return mm_flop(*shapes[:2])
    if name == "aten::addmm":
        return addmm_flop(*shapes[:3])
    if name == "aten::bmm":
        return bmm_flop(*shapes[:2])
    if name == attention:
        return sdpa_flop_count(*shapes[:3])
    if name == f"{attention}_backward":
        return sdpa_backward_flop_count(*shapes[:4])
    return 0


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


def measure(contender: Contender, plain: dict[str, Tensor]) -> dict[str, Any]:
    model, tokens = example(SHAPE, torch.device("cpu"))
    step = contender.prepare(model)
    found = gradients(model, step, tokens)
    gradients(model, step, tokens)
    memory = step_allocations(lambda: step(tokens))
    return {
        "contender": contender.name,
        "how": contender.how,
        "keeps": contender.keeps,
        "saved MiB": memory.saved / MIB,
        "peak MiB": memory.peak / MIB,
        "GFLOP": step_flops(contender.how, lambda: step(tokens).backward()) / 1e9,
        "gradients": largest_difference(found, plain),
    }


def measure_all() -> list[dict[str, Any]]:
    model, tokens = example(SHAPE, torch.device("cpu"))
    plain = gradients(model, model, tokens)
    rows = []
    for contender in contenders():
        if contender.needs and importlib.util.find_spec(contender.needs) is None:
            print(f"{contender.needs} is not installed: left out", flush=True)
            continue
        print(f"measuring: {contender.name}, {contender.how}", flush=True)
        rows.append(measure(contender, plain))
    sac = next(row for row in rows if row["keeps"] == SAC)
    for row in rows:
        row["peak / contexts"] = row["peak MiB"] / sac["peak MiB"]
        row["FLOPs / no checkpoint"] = row["GFLOP"] / rows[0]["GFLOP"]
    return rows


# --- dropout ---------------------------------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Two products with a mask of dropout behind each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(self.up(x)) * _mask(x)
        return x + torch.sin(self.down(y)) * _mask(x)


def _mask(x: Tensor) -> Tensor:
    """As dropout draws it, in an operator of its own that writes nothing in place."""
    return torch.bernoulli(torch.full_like(x, 0.5)) * 2


class NoisyStack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


SAVED_MASK = "recompute everything in block\nsave first bernoulli per block\n"


def _saves_a_mask() -> Any:
    """The first mask of a block is saved, the second is drawn again."""
    drawn = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op == torch.ops.aten.bernoulli.default:
            drawn[context.is_recompute] += 1
            if drawn[context.is_recompute] == 1:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def noisy_contenders() -> dict[str, tuple[str, Callable[[NoisyStack], None]]]:
    def each(wrap: Callable[[int, Any], Any]) -> Callable[[NoisyStack], None]:
        def prepare(model: NoisyStack) -> None:
            for number, layer in enumerate(model.layers):
                layer.forward = wrap(number, layer.forward)  # type: ignore[method-assign]

        return prepare

    def remat(number: int, forward: Any) -> Any:
        import torch_remat

        return torch_remat.checkpoint(region_name=f"layers.{number}")(forward)

    def policy(text: str) -> Callable[[NoisyStack], None]:
        return lambda model: policylang.checkpoint_model(model, policylang.parse(text)) and None

    return {
        "`torch.utils.checkpoint`": ("", each(lambda _, forward: partial(checkpoint, forward, use_reentrant=False))),
        "`torch.utils.checkpoint`, `preserve_rng_state=False`": (
            "",
            each(lambda _, forward: partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)),
        ),
        "selective checkpoint contexts that save a mask": (
            "",
            each(lambda _, f: partial(checkpoint, f, use_reentrant=False, context_fn=_saves_a_mask)),
        ),
        "torch_remat without a hook for the generator": ("torch_remat", each(remat)),
        "policylang": ("", policy("recompute everything in block\n")),
        "policylang, a mask saved": ("", policy(SAVED_MASK)),
    }


def measure_dropout() -> list[dict[str, Any]]:
    def run(prepare: Callable[[NoisyStack], None]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model, x = NoisyStack(), torch.randn(32, 64)
        prepare(model)
        torch.manual_seed(1)
        return gradients(model, model, x)

    plain = run(lambda model: None)
    scale = max(gradient.abs().max().item() for gradient in plain.values())
    rows = []
    for name, (needs, prepare) in noisy_contenders().items():
        if needs and importlib.util.find_spec(needs) is None:
            continue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                difference: float | None = largest_difference(run(prepare), plain) / scale
                says = f"{len(said)} warnings" if said else ""
            except Exception as error:
                difference, says = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
        rows.append({"contender": name, "gradients differ by": difference, "says": says})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure_all()
    print(table(rows))
    noisy = measure_dropout()
    print(table(noisy))
    packages = {name: version(name) for name in ("torchtitan", "torch-remat") if _installed(name)}
    write_results(options.json, {"benchmark": "compared", "packages": packages, "rows": rows, "dropout": noisy})


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


if __name__ == "__main__":
    main()
