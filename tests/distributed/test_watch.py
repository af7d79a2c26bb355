"""`policylang.watch`: what the first steps of a training take, beside what was planned."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import policylang
from policylang.commands.cli import main
from policylang.commands.small_llama import step_memory
from tests.support.models import Function, Layers
from tests.support.ranks import run_ranks

RECIPE = "recompute everything in block\nsave matmul in block\n\nexpect peak <= {}\n"


def model_of(width: int = 64, layers: int = 4) -> Layers:
    def block() -> Function:
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return Function(lambda block, x: x + block.down(torch.tanh(block.up(x))), up=up, down=down)

    torch.manual_seed(0)
    return Layers(*(block() for _ in range(layers)), end=lambda x: x.square().mean())


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Layers, torch.Tensor]:
    """A model under `recipe.apl`, whose snapshot lies beside it, and its batch."""
    monkeypatch.chdir(tmp_path)
    model, x = model_of(), torch.randn(512, 64)
    Path("recipe.apl").write_text(RECIPE.format("64 MiB"))
    policylang.snapshot(policylang.trace_step(model, lambda model, x: model(x), x), "recipe.graph")
    policylang.checkpoint_model(model, "recipe.apl")(x).backward()
    model.zero_grad()
    return model, x


def _hooks(model: nn.Module) -> list[int]:
    return [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]


def test_a_run_is_measured_as_the_allocator_has_it_and_compared(trained, capsys):
    model, x = trained
    optimizer = torch.optim.AdamW(model.parameters())
    before = _hooks(model), dist.all_reduce
    with policylang.watch(model, "recipe.apl", to="run.json", device="cpu", optimizer=optimizer) as run:
        for _ in range(4):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            left = _hooks(model)
    assert (left, dist.all_reduce) == before
    found = json.loads(Path("run.json").read_text())
    assert found == run.data
    planned, measured = found["planned"], found["measured"]
    own = [*model.parameters(), x]
    alive = sum(each.untyped_storage().nbytes() for each in own)
    real = step_memory(lambda: model(x), own, x.device).peak + alive
    assert measured["graph_bytes"] == pytest.approx(real, rel=0.02)
    assert measured["graph_bytes"] == pytest.approx(planned["peak_bytes"], rel=0.05)
    assert measured["state_bytes"] > 2 * (alive - x.nbytes) * 0.99
    assert measured["peak_bytes"] >= measured["graph_bytes"] + measured["state_bytes"]
    assert [each["name"] for each in measured["blocks"]] == [f"layers.{number}" for number in range(4)]
    (line,) = [each for each in planned["lines"] if each["saved_bytes"]]
    assert line["text"] == "save matmul in block"
    assert measured["saved_bytes_by_line"][line["source"]] == line["saved_bytes"]
    capsys.readouterr()
    assert main(["compare", "recipe.apl", "--run", "run.json"]) == 0
    assert capsys.readouterr().out == f"{run}\n"
    assert main(["compare", "recipe.apl", "--run", "run.json", "--output-format", "markdown"]) == 0
    assert "| `recipe.apl:2  save matmul in block` |" in capsys.readouterr().out
    measured["graph_bytes"], planned["step_seconds"] = 2 * planned["peak_bytes"], measured["step_seconds"] / 8
    Path("run.json").write_text(json.dumps(found))
    tune = ("tune", "--graph", "recipe.graph", "--peak", "40 MiB", "--device", "cpu", "--path", "eager")
    assert main([*tune, "--measured", "run.json"]) == 0
    said = capsys.readouterr()
    assert "computing takes 8.00× as long as planned" in said.err
    assert " in reserve\n" in said.out


def test_a_broken_budget_is_told_with_its_node_and_line(trained):
    model, x = trained
    Path("recipe.apl").write_text(RECIPE.format("5 MiB"))
    told = r"warning\[APL655\]: the first step took .*`expect peak <= 5 MiB`"
    with pytest.warns(policylang.PolicyWarning, match=told) as said:  # noqa: SIM117
        with policylang.watch(model, "recipe.apl"):
            model(torch.cat([x, x])).backward()  # twice the batch that was planned
    assert "recipe.apl:4" in str(said[0].message)
    assert "planned: " in str(said[0].message)
    assert "at `" in str(said[0].message)


def test_an_error_within_a_step_leaves_nothing(trained):
    model, x = trained
    before = _hooks(model), dist.all_reduce

    def fails() -> None:
        with policylang.watch(model, "recipe.apl", to="run.json"):
            model(x)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fails()
    assert (_hooks(model), dist.all_reduce) == before
    assert not Path("run.json").exists()


def test_a_model_that_is_compiled_while_it_is_watched_stays_one_graph(trained):
    model, x = trained
    backend = policylang.backend("recipe.apl", inner="aot_eager")
    compiled = torch.compile(policylang.checkpoint_model(model, None), backend=backend)
    with policylang.watch(compiled, "recipe.apl") as run:
        compiled(x).backward()
    planned = {each["source"]: each["saved_bytes"] for each in run.data["planned"]["lines"]}
    assert run.data["measured"]["saved_bytes_by_line"] == planned  # as a compiler keeps it, not a checkpoint
    assert planned["recipe.apl:2"] > 4 * 512 * 256 * 4
    assert not policylang.report(compiled).graphs  # as of several
    assert run.data["measured"]["graph_bytes"] == pytest.approx(run.data["planned"]["peak_bytes"], rel=0.05)
    assert run.data["measured"]["blocks"] == []


def test_one_training_is_watched_at_a_time(trained):
    model, x = trained
    with policylang.watch(model, "recipe.apl") as first:
        with pytest.raises(policylang.PolicyError, match=r"APL661.*watched already"):
            policylang.watch(model, "recipe.apl").__enter__()
        model(x).backward()
    assert first.data["steps"] == 1
    with torch.profiler.profile(), pytest.raises(policylang.PolicyError, match=r"APL661.*profiled already"):
        policylang.watch(model, "recipe.apl").__enter__()
    with policylang.watch(model, "recipe.apl"):
        model(x).backward()


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', '{"version": 9, "measured": {}}'])
def test_what_is_no_run_is_told(trained, capsys, text):
    Path("run.json").write_text(text)
    assert main(["compare", "recipe.apl", "--run", "run.json"]) == 1
    assert capsys.readouterr().err.startswith("error[APL654]: `run.json` is no run")


def _sharded(rank: int, folder: str) -> dict[str, Any]:
    """The last rank comes late to each gather of the backward's: the others wait for it."""
    model = model_of(width=256, layers=3)
    policylang.checkpoint_model(model, policylang.parse("recompute everything in block\n"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if rank == dist.get_world_size() - 1:
        model.layers[1].register_forward_pre_hook(lambda *_: time.sleep(0.2))
    x = torch.randn(64, 256)
    policy = policylang.parse("recompute everything in block\n")
    with policylang.watch(model, policy, to=f"{folder}/{rank}.json", steps=2) as run:
        for _ in range(3):
            model(x).backward()
            run.step()
    return run.data["measured"]


@pytest.mark.slow
def test_four_ranks_wait_for_the_one_that_is_late(tmp_path):
    *others, late = run_ranks(_sharded, 4, str(tmp_path))
    for each in others:
        assert any("gather" in wait["name"] for wait in each["waits"])
        assert each["exposed_seconds"] - late["exposed_seconds"] > 0.15
        assert each["exposed_seconds"] <= each["step_seconds"]
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{rank}.json" for rank in range(4)]
