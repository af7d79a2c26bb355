"""The rows of ``docs/setups.md``: each script trains to the losses of the same training without a policy."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import policylang
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, STEPS = 2, 2


def example(name: str) -> Any:
    """A script as a module; it imports its neighbours as a script does."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def refused(train: Callable[[], object]) -> list[dict[str, Any]]:
    """What a training is refused with."""
    try:
        train()
    except policylang.PolicyError as error:
        return [
            {
                "code": each.code,
                "message": each.message,
                "help": each.help or "",
                "details": list(each.details),
                "notes": [other.message for other in each.related],
            }
            for each in error.diagnostics
        ]
    raise AssertionError("nothing was refused")


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,))


def in_eager(rank: int) -> dict[str, Any]:
    """The script with its policy and without, and what it refuses."""
    script, mesh = example("fsdp2_eager"), mesh_of_all()
    with_policy, model = script.train(mesh, steps=STEPS)
    without, _ = script.train(mesh, None, steps=STEPS)
    report = policylang.report(model)
    otherwise = refused(partial(script.train, mesh, steps=1, reshard=False))
    tokens = script.batch_of(0, mesh)
    traced = refused(lambda: policylang.trace_step(model, lambda given, batch: given(batch).logits.sum(), tokens))
    return {
        "losses": (with_policy, without),
        "notes": report.notes,
        "blocks": report.blocks,
        "agrees": report.audit.agrees,
        "refused": otherwise,
        "traced": traced,
    }


@pytest.mark.slow
def test_fsdp2_in_eager() -> None:
    first, second = run_ranks(in_eager, RANKS)
    for rank in (first, second):
        with_policy, without = rank["losses"]
        assert with_policy == without, "to the last bit"
        assert len(with_policy) == STEPS
        assert (rank["blocks"], rank["agrees"]) == (4, True)
        (note,) = (each for each in rank["notes"] if "APL415" in each)
        assert "`reshard_after_forward=True`" in note
        (error,) = rank["refused"]
        assert error["code"] == "APL414"
        assert "the weights of `model.layers.0` gathered again" in error["message"]
        assert "docs/setups.md#what-fsdp-means" in error["help"]
        (error,) = rank["traced"]
        assert error["code"] == "APL363"
        assert "docs/setups.md#a-traced-step" in error["help"]
    assert first["losses"] != second["losses"], "each rank has batches of its own"


def with_compiled_blocks(rank: int) -> dict[str, Any]:
    script, eager, mesh = example("fsdp2_compiled_blocks"), example("fsdp2_eager"), mesh_of_all()
    found: dict[str, Any] = {"losses": []}
    for policy in (script.POLICY, None):
        torch._dynamo.reset()
        losses, model = script.train(mesh, policy, steps=STEPS)
        found["losses"].append(losses)
        if policy is not None:
            report = policylang.report(model)
            found |= {"notes": report.notes, "graphs": len(report.graphs), "saved": report.saved.bytes}
            (found["a block saves"],) = {graph.saved.bytes for graph in report.graphs}

    def whole() -> None:
        """As a user tries it first: the sharded model handed to `torch.compile`."""
        torch._dynamo.reset()
        model = eager.make_model()
        eager.shard(model, mesh)
        compiled = torch.compile(model, backend=policylang.backend(script.POLICY, inner="aot_eager"))
        tokens = eager.batch_of(0, mesh)
        compiled(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    def after_checkpoints() -> list[float]:
        torch._dynamo.reset()
        model = eager.make_model()
        policylang.checkpoint_model(model, script.POLICY)
        eager.shard(model, mesh)
        compiled = torch.compile(model, backend=policylang.backend(script.POLICY, inner="aot_eager"))
        tokens = eager.batch_of(0, mesh)
        loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return [loss.item()]

    return {**found, "refused": refused(whole), "whole": after_checkpoints()}


@pytest.mark.slow
def test_fsdp2_with_compiled_blocks_and_what_is_said_of_a_model_compiled_whole() -> None:
    for rank in run_ranks(with_compiled_blocks, RANKS):
        with_policy, without = rank["losses"]
        assert with_policy == without
        assert rank["graphs"] == 4, "one compiled graph, that four blocks run"
        assert rank["saved"] == 4 * rank["a block saves"]
        assert any("APL415" in note for note in rank["notes"])
        (error,) = rank["refused"]
        assert error["code"] == "APL302"
        assert any("`fully_shard` gathers weights in hooks" in line for line in error["details"])
        assert len(error["notes"]) >= 5, "the rules that need blocks"
        assert "docs/setups.md#fsdp2-with-compiled-blocks" in error["help"]
        assert "policylang.checkpoint_model" in error["help"]
        assert "optional" not in error["help"]
        assert rank["whole"] == with_policy[:1]


def by_autoparallel(rank: int) -> dict[str, Any]:
    script, mesh = example("autoparallel_llama"), mesh_of_all()
    script.as_if_on_h100()
    with_policy, report = script.train(mesh, steps=STEPS)
    without, _ = script.train(mesh, None, steps=STEPS)
    gathered = next(each for each in report.rules if "fsdp_line" in each.text)
    return {"losses": (with_policy, without), "agrees": report.audit.agrees, "decided": gathered.decided}


@pytest.mark.slow
def test_autoparallel() -> None:
    pytest.importorskip("autoparallel")
    for rank in run_ranks(by_autoparallel, RANKS):
        with_policy, without = rank["losses"]
        assert with_policy == without
        assert rank["agrees"]
        assert rank["decided"] > 10, "the gathers are operators, about which the policy decides"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["fsdp2_eager.py", "fsdp2_compiled_blocks.py"])
def test_a_script_as_its_first_lines_say(script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    done = subprocess.run(
        [*command, f"examples/{script}"],
        cwd=EXAMPLES.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("loss ") == 5
    assert "policy sac_fsdp: " in done.stdout
    assert "the changed graphs do what was planned" in done.stdout
