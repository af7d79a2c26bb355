"""`policylang fit`: from a configuration and a cluster to a policy, its snapshot and its test."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from policylang import backend
from policylang.api.fit import Subject, _Traced, of_configuration
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts, InputKind
from policylang.graph.snapshot import load
from policylang.torch_compat.distributed import pretended_ranks
from policylang.tracing.configured import Parts, StepSizes
from policylang.tracing.repeated_layers import difference
from policylang.tracing.target_device import TargetDevice
from policylang.tuning.variants import weights_there
from tests.support.drawn import slow
from tests.support.versions import VERSION

CONFIGURATIONS = Path(__file__).parents[1] / "data" / "configurations"
SMALL: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128},
    "vit": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    "llama": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 128},
    "gemma2": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "layer_types": None},
    "mixtral": {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                "num_key_value_heads": 2, "vocab_size": 128, "num_local_experts": 4},
}  # fmt: skip
FULL = {
    "llama": "--seq 8192 --mesh fsdp=4,tp=2",
    "qwen3": "--seq 4096 --gpus 4",
    "gemma2": "--seq 4096 --mesh fsdp=4,tp=2",
    "gpt2": "--seq 1024 --batch 8 --gpus 8 --path joint --peak 3GiB",
    "mixtral": "--seq 4096 --mesh fsdp=32,tp=2",
    "qwen3_moe": "--seq 4096 --gpus 64",
    "vit": "--batch 64",
    "swin": "--batch 64 --path joint",
    "t5": "--seq 512 --batch 8",
    "bart": "--seq 1024 --batch 4",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with small configurations in it."""
    monkeypatch.chdir(tmp_path)
    for name, other in SMALL.items():
        settings = json.loads((CONFIGURATIONS / f"{name}.json").read_text())
        Path(f"{name}.json").write_text(json.dumps({**settings, **other}))
    return tmp_path


def _holds(policylang, path: str) -> None:
    checked = policylang("check", "recipe.apl", "--graph", "recipe.graph", "--path", path, "--deny", "warnings")
    assert checked.code == 0, checked.out
    tested = policylang("test", "recipe.test.md")
    assert tested.code == 0, tested.out
    assert ": 2 claims, all hold" in tested.out


@pytest.mark.parametrize(
    "asked", ["gpt2.json --seq 256 --gpus 4 --peak 40MiB", slow("vit.json --batch 8 --peak 14MiB --path joint")]
)
def test_a_small_model_fits_with_a_recipe_that_holds(policylang, asked):
    words = asked.split()
    found = policylang("fit", *words, "--device", "h100-sxm", "--alone", "-o", "recipe.apl", "--output-format", "json")
    assert found.code == 0, found.err
    data = json.loads(found.out)
    chosen = data["answer"]["chosen"]
    assert data["answer"]["fits"]
    assert chosen["peak_bytes"] <= data["answer"]["budget_bytes"]
    assert chosen["recomputed_seconds"] > 0  # else the budget says nothing
    assert data["files"] == ["recipe.apl", "recipe.graph", "recipe.test.md"]
    eager = "--path" not in words
    assert ("include <fsdp>" in data["policy"]) == eager
    lines = ["model.config.use_cache = False", 'policylang.checkpoint_model(model, "recipe.apl")']
    assert data["python"][:2] == lines if eager else data["python"][0].startswith("step = torch.compile(")
    _holds(policylang, "eager" if eager else "joint")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="TorchTitan shards the model")
def test_the_printed_lines_compile_the_step_that_was_planned(policylang):
    """Its `expect peak` holds on the graph that torch.compile brings, to the byte of its margin."""
    from torchtitan.experiments.graph_trainer.simple_fsdp import MixedPrecisionPolicy, data_parallel

    words = "llama.json --seq 256 --batch 2 --gpus 4 --device h100-sxm --peak 9MiB --path joint --alone -o recipe.apl"
    found = policylang("fit", *words.split(), "--output-format", "json")
    assert found.code == 0, found.err
    assert "expect peak" in json.loads(found.out)["policy"]
    names: dict[str, Any] = {
        "torch": torch, "data_parallel": data_parallel, "MixedPrecisionPolicy": MixedPrecisionPolicy,
        "policylang": SimpleNamespace(backend=partial(backend, inner="aot_eager")),
    }  # fmt: skip
    torch._dynamo.reset()
    with pretended_ranks(4):
        names["mesh"] = init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
        settings = json.loads(Path("llama.json").read_text())
        names["model"] = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        exec("\n".join(json.loads(found.out)["python"]), names)
        ids = torch.zeros(2, 256, dtype=torch.int64)
        names["step"](input_ids=ids, labels=ids).backward()
    assert all(each.grad is not None for each in names["model"].parameters())


@pytest.mark.slow
def test_the_table_says_what_other_sizes_would_bring(policylang):
    asked = ("gpt2.json", "--seq", "256", "--gpus", "2", "--device", "h100-sxm", "--peak", "3 MiB")
    data = json.loads(policylang("fit", *asked, "--output-format", "json").out)
    beside = {each["label"]: each for each in data["beside"]}
    assert set(beside) == {"peak 2.7 MiB", "peak 3.3 MiB", "seq 128", "seq 512", "batch 2", "1 GPU", "4 GPUs"}
    assert data["answer"]["fits"]
    assert beside["seq 128"]["fits"]
    assert beside["seq 128"]["chosen"]["peak_bytes"] <= 3 << 20
    assert not beside["seq 512"]["fits"]
    assert beside["seq 512"]["smallest"]["peak_bytes"] > 3 << 20
    assert beside["1 GPU"]["fits_on_ranks"] == 2


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        ("none.json --seq 8", "APL650", "there is no file `none.json`"),
        ("broken.json --seq 8", "APL650", "no configuration of Transformers"),
        ("unknown.json --seq 8", "APL650", "has no model type `gpt9`"),
        ("sam.json --seq 8", "APL651", "no loss is known of a model of type `sam`"),
        ("gpt2.json", "APL652", "no sequence length is given"),
        ("gpt2.json --seq 4096", "APL652", "longer than the 1,024 positions"),
        ("gpt2.json --seq 8 --batch 0", "APL652", "at least one sample"),
        ("vit.json --seq 8", "APL652", "a sequence length is given"),
        ("gpt2.json --seq 8 --mesh fsdp:2", "APL652", "`fsdp:2` is no mesh"),
        ("gpt2.json --seq 8 --mesh dp_replicate=2,fsdp=4", "APL652", "of replicas"),
        ("gpt2.json --seq 8 --mesh fsdp=2,tp=2 --gpus 8", "APL652", "has 4 ranks, and 8 GPUs are given"),
        ("gpt2.json --seq 8 --gpus 0", "APL652", "one GPU at least"),
        ("gpt2.json --seq 8 --gpus 1000000", "APL652", "at most 16,384 can"),
        ("llama.json --seq 8 --mesh tp=3", "APL652", "of tensor parallelism do not divide `num_attention_heads`, 4"),
        ("vit.json --mesh tp=2", "APL652", "no plan for tensor parallelism"),
        ("gpt2.json --seq 8 --device h1000", "APL152", "h1000"),
        ("gpt2.json --seq 8 --peak 75", "APL624", "75"),
    ],
)
def test_a_mistake_is_told(policylang, asked, code, message):
    Path("broken.json").write_text("{")
    Path("unknown.json").write_text('{"model_type": "gpt9"}')
    Path("sam.json").write_text('{"model_type": "sam"}')
    device = [] if "--device" in asked else ["--device", "h100-sxm"]
    found = policylang("fit", *asked.split(), *device)
    assert found.code in (1, 2)
    assert message in found.err, found.err
    assert found.err.startswith(f"error[{code}]: "), found.err


def test_without_transformers_a_configuration_is_refused(policylang, monkeypatch):
    monkeypatch.setattr("policylang.tracing.configured.find_spec", lambda _: None)
    found = policylang("fit", "gpt2.json", "--seq", "8", "--device", "h100-sxm")
    assert (found.code, found.err.partition(": ")[0]) == (1, "error[APL653]")


MINE = """
import torch, policylang
from torch import nn

def make_step(seq, batch):
    with torch.device("meta"):
        model, x = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), torch.zeros(batch, seq, 64)
    def loss(model, x):
        for layer in model:
            x = torch.tanh(layer(x))
        return x.square().mean()
    return model, loss, x

def asking(seq, batch):
    model, loss, x = make_step(seq, batch)
    def asks(model, x):
        assert torch.compiler.is_compiling() or model[0].weight.sum() < 9
        return loss(model, x)
    return model, asks, x

def traced():
    return policylang.trace_step(*make_step(64, 1), device="cuda")

def nothing():
    return 3

def broken():
    raise RuntimeError("mine")
"""


@pytest.fixture
def mine(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine_to_fit.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(here))


@pytest.mark.usefixtures("mine")
def test_what_cannot_fit_has_the_smallest_peak_and_its_node(policylang):
    asked = ("mine_to_fit:make_step", "--seq", "256", "--gpus", "2", "--device", "h100-sxm", "--peak", "100 KiB")
    found = policylang("fit", *asked, "--alone", "-o", "recipe.apl")
    assert found.code == 1
    assert found.err.startswith("error[APL625]: no policy keeps the peak within 100 KiB: the smallest is ")
    assert "at `" in found.err.splitlines()[0]
    assert not Path("recipe.apl").exists()


@pytest.mark.usefixtures("mine")
def test_a_function_makes_the_step(policylang):
    on = ("--device", "h100-sxm", "--peak", "1MiB", "--alone")
    found = policylang("fit", "mine_to_fit:make_step", "--mesh", "fsdp=4", "--seq", "256", *on, "-o", "recipe.apl")
    assert found.code == 0, found.err
    assert "mine_to_fit:make_step, seq 256, batch 1 a GPU, on 4 × h100-sxm, in eager: fits: " in found.out
    assert "recomputed" in found.out, "what it costs is said where no other size is"
    assert "under a compiler" not in found.out
    found = policylang("fit", "mine_to_fit:asking", "--seq", "256", *on)
    assert "traced as under a compiler, which may run other operators than eager: the step branches on the" in found.out
    assert policylang("fit", "mine_to_fit:traced", *on).code == 0
    for function, ranks, message in (
        ("traced", "2", "error[APL652]: `mine_to_fit:traced` returns a step that is traced already"),
        ("nothing", "1", "error[APL652]: `mine_to_fit:nothing` returns neither"),
        ("broken", "1", "RuntimeError: mine"),
    ):
        found = policylang("fit", f"mine_to_fit:{function}", "--gpus", ranks, *on)
        assert found.code == 1
        assert message in found.err


@pytest.mark.slow
def test_experts_are_fitted_for_a_stated_load(policylang):
    def peak(*load: str) -> int:
        on = ("--device", "h100-sxm", "--peak", "1MiB", "--alone", "--output-format", "json")
        found = policylang("fit", "tests.support.routed:routed_step", *on, *load)
        assert found.code == 0, found.err
        data = json.loads(found.out)
        assert [line for line in data["policy"].splitlines() if line.startswith("balance")] == [
            f"balance {each}" for each in load[1:]
        ]
        return data["answer"]["chosen"]["peak_bytes"]

    assert peak("--balance", "1.0") < peak("--balance", "up to 2.0")
    found = policylang("fit", "tests.support.routed:routed_step", "--device", "h100-sxm", "--balance", "much")
    assert (found.code, found.err.partition(":")[0]) == (2, "error[APL010]"), found.err


def _traced(name: str, device: TargetDevice | None = None) -> _Traced:
    subject: Subject = of_configuration(name, StepSizes(2, 128), "eager")
    return _Traced(subject, device or TargetDevice("cuda", (9, 0)), "eager", print)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deep", "batch", "layers"), [(6, 2, [3, 4, 3]), (6, 1, [3, 4, 3, 4]), (24, 2, [6, 3, 3]), (24, 1, [6, 3, 3, 6])]
)
def test_facts_are_those_of_a_full_trace(monkeypatch, deep, batch, layers):
    """Six layers are made of three; so are those of other sizes, unless these have other nodes: labels of several
    sequences are copied."""
    monkeypatch.setattr("policylang.api.fit._DEEP", deep)
    settings = json.loads(Path("llama.json").read_text())
    Path("llama.json").write_text(json.dumps({**settings, "num_hidden_layers": 6}))
    traced, taken = _traced("llama.json"), list[int]()
    trace = traced._traced

    def counted(parts: Parts, sizes: StepSizes) -> Facts:
        taken.append(len(parts.model.model.layers))
        return trace(parts, sizes)

    monkeypatch.setattr(traced, "_traced", counted)
    sizes, other = StepSizes(2, 128, {"fsdp": 2}), StepSizes(batch, 64, {"fsdp": 8})
    assert difference(traced.at(sizes), trace(traced.subject.make(sizes), sizes)) is None
    assert difference(traced.near(other), trace(traced.subject.make(other), other)) is None
    assert taken == layers


@pytest.mark.parametrize(
    ("name", "mesh", "device"),
    [
        slow("llama", {"fsdp": 4}, None),
        slow("llama", {"fsdp": 2, "tp": 2}, None),
        slow("llama", {"fsdp": 2, "tp": 2}, TargetDevice("cpu")),
        slow("gemma2", {"fsdp": 2, "tp": 2}, None),  # the embedding and the head are one weight
        slow("mixtral", {"fsdp": 8, "tp": 2}, None),  # 4 experts, which compute with plain tensors and add up in place
    ],
)
def test_each_rank_has_its_share_of_the_weights(name, mesh, device):
    if name == "mixtral" and VERSION < (2, 12):
        with pytest.raises(PolicyGraphError, match=r"APL652.*cannot cut `gate_up_proj` over both dimensions"):
            _traced(f"{name}.json", device).at(StepSizes(2, 128, mesh))
        return
    traced, sizes = _traced(f"{name}.json", device), StepSizes(2, 128, mesh)
    facts = traced.at(sizes)
    assert not traced.as_compiled
    whole = sum(each.nbytes for each in traced.subject.make(sizes).model.parameters())
    share = sum(size for size, kind in zip(facts.bytes, facts.input_kinds, strict=True) if kind == InputKind.PARAMETER)
    most = 1.3 if "tp" in mesh else 1  # norms and routers are cut by fsdp alone
    assert whole <= sizes.ranks * share <= most * whole
    assert weights_there(facts) is not None
    kinds = {target.split(".")[1] for target in facts.targets if target.startswith("_c10d_functional")}
    gathers = {"all_gather_into_tensor", "wait_tensor", "reduce_scatter_tensor"}
    assert kinds == gathers | ({"all_reduce"} if "tp" in mesh else set())


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_a_model_of_each_family_fits(policylang, name):
    config = str(CONFIGURATIONS / f"{name}.json")
    words = FULL[name].split()
    found = policylang("fit", config, *words, "--device", "h100-sxm", "--alone", "-o", "recipe.apl")
    assert found.code == 0, found.err
    assert f"{name}.json, " in found.out
    assert len(load("recipe.graph")) > 300
    _holds(policylang, "joint" if "joint" in words else "eager")
