"""The rows of ``docs/setups.md`` and the example for a mesh: the losses of the same training without a policy."""

import importlib
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import policylang
from policylang.language.diagnostics import Diagnostic
from tests.support.process import TORCHRUN, python
from tests.support.ranks import run_ranks
from tests.support.versions import needs_traced_meshes

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, STEPS = 2, 2


def example(name: str) -> Any:
    """A script as a module; it imports its neighbours as a script does."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def refused(train: Callable[[], object]) -> tuple[Diagnostic, ...]:
    """What a training is refused with."""
    with pytest.raises(policylang.PolicyError) as raised:
        train()
    return raised.value.diagnostics


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
        "losses": (with_policy, without), "notes": report.notes, "blocks": report.blocks, "agrees": report.audit.agrees,
        "refused": otherwise, "traced": traced,
    }  # fmt: skip


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
        assert error.code == "APL414"
        assert "the weights of `model.layers.0` gathered again" in error.message
        assert "docs/setups.md#what-fsdp-means" in error.help
        (error,) = rank["traced"]
        assert error.code == "APL363"
        assert "docs/setups.md#a-traced-step" in error.help
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
        assert error.code == "APL302"
        assert any("`fully_shard` gathers weights in hooks" in line for line in error.details)
        rules = policylang.load(example("fsdp2_eager").POLICY).rules
        needed = [rule.text for rule in rules if "in block" in rule.text and not rule.text.startswith("optional")]
        follows = [note for note in error.related if note.message.startswith("from it follows")]
        assert len(follows) == len(needed) > 0
        assert "docs/setups.md#fsdp2-with-compiled-blocks" in error.help
        assert "policylang.checkpoint_model" in error.help
        assert "optional" not in error.help
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
    done = python(*TORCHRUN, RANKS, f"examples/{script}", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    assert done.stdout.count("loss ") == 5
    assert "policy sac_fsdp: " in done.stdout
    assert "the changed graphs do what was planned" in done.stdout


MESH_RANKS, TP = 4, 2
MESH_STEPS = 3


imported = partial(example, "train_fsdp_tp")


def runs() -> dict[str, Any]:
    mesh_example = imported()
    two = mesh_example.Run(steps=MESH_STEPS, config=mesh_example.LlamaConfig(layers=2))
    one = evolve(two, config=mesh_example.LlamaConfig(layers=1))
    return {
        "tensor parallel": two,
        "cut over all": evolve(one, layout="fsdp"),
        "bfloat16": evolve(one, dtype=torch.bfloat16),
        "compiled": evolve(one, how="compile"),
    }


def trained(rank: int, names: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """The loss curves of these runs with their policy, and of traced runs without."""
    mesh_example = imported()
    mesh = mesh_example.make_mesh("cpu", MESH_RANKS // TP, TP)
    curves: dict[str, dict[str, list[float]]] = {}
    for name in names:
        run = runs()[name]
        losses, report = mesh_example.train(run, mesh)
        assert report.audit.agrees
        curves[name] = {"with": losses}
        if run.how == "trace":
            curves[name]["without"], _ = mesh_example.train(evolve(run, policy=None), mesh)
    return curves


@needs_traced_meshes
@pytest.mark.slow
@pytest.mark.parametrize("names", [("cut over all",), ("compiled", "tensor parallel", "bfloat16")])
def test_the_policy_changes_no_bit_of_the_loss_and_the_curve_is_that_of_one_process(names) -> None:
    """Both of one run on all ranks. The curve is that of one process up to the order in which sums are taken."""
    first, *others = run_ranks(trained, MESH_RANKS, names)
    assert all(other == first for other in others), "every rank knows the loss of all"
    for name in set(names) - {"compiled"}:
        assert first[name]["with"] == first[name]["without"], name
    for name in set(names) - {"bfloat16"}:
        alone = imported().train_alone(runs()[name])
        assert alone[-1] < alone[0]
        assert first[name]["with"] == pytest.approx(alone, rel=1e-5), name


ORDERED = {
    "traced": {"order": "fsdp_overlap"},
    "traced, by times": {"order": "fsdp_tp_overlap", "device": "h100-sxm"},
    "cut over all": {"order": "fsdp_overlap", "layout": "fsdp"},
    "compiled": {"order": "fsdp_overlap", "how": "compile"},
}


def stepped(run: Any, mesh: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """The loss of one step, this rank's gradients, and the report."""
    mesh_example = imported()
    model = mesh_example.shard(mesh_example.new_model(run), mesh, tensor_parallel=run.layout == "tp", dtype=run.dtype)
    inputs, labels = (mesh_example.share_of(each, mesh, run.layout) for each in mesh_example.batch_of(run, 0))
    traced = (run, model, mesh, inputs, labels)
    step, report = mesh_example.traced_step(*traced) if run.how == "trace" else mesh_example.compiled_step(run, model)
    loss = step(inputs, labels)
    return loss, {name: each.grad.to_local() for name, each in model.named_parameters()}, report()


def in_order(rank: int) -> dict[str, tuple[list[str], list[int], bool]]:
    """Of each run: the gradients that are not the same to the bit without the order, how many collectives there are as
    traced and as planned, and whether the audit agrees."""
    mesh_example = imported()
    mesh = mesh_example.make_mesh("cpu", MESH_RANKS // TP, TP)
    found = {}
    for name, options in ORDERED.items():
        run = mesh_example.Run(config=mesh_example.LlamaConfig(layers=3), **options)
        loss, gradients, _ = stepped(evolve(run, order=None, device=None), mesh)
        ordered, others, report = stepped(run, mesh)
        wrong = [each for each in gradients if not torch.equal(gradients[each], others[each])]
        wrong += [] if torch.equal(loss, ordered) else ["the loss"]
        step = report.orders[0]
        found[name] = (wrong, [step.traced.collectives, step.planned.collectives], report.audit.agrees)
    return found


@needs_traced_meshes
@pytest.mark.slow
def test_the_bundled_orders_change_no_bit_of_the_loss_and_of_the_gradients() -> None:
    """Of two ranks in a group a sum is the same in either order, so that bucketed scatters are bitwise too."""
    for found in run_ranks(in_order, MESH_RANKS, timeout=500):
        for name, (wrong, (before, after), agrees) in found.items():
            assert wrong == [], name
            assert after < before / 2, name
            assert agrees, name


def said_by_main(rank: int) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        imported().main(["--steps", "2", "--layers", "1", "--check"])
    return output.getvalue()


@pytest.mark.slow
@needs_traced_meshes
def test_the_script_as_torchrun_starts_it() -> None:
    """On four ranks and on one, as `--check` compares them."""
    first, *others = run_ranks(said_by_main, MESH_RANKS, group=False)
    assert not any(others)
    assert "policy fsdp_tp: " in first
    assert "every (all_gather where from parameter) recomputed: held" in first
    assert "the changed graphs do what was planned" in first
    assert first.endswith("the curves agree within 0.0001\n")
