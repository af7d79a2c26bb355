"""Snapshots of whatever has a graph, from Python and from the command line."""

import sys
from pathlib import Path

import pytest
import torch

import policylang
from policylang.errors import PolicyGraphError
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from tests.support.compiled import backend_for
from tests.support.joint import capture_joint
from tests.support.models import llama, mlp

POLICY = "torchtitan_full"


def digest(path: Path, policy: str = POLICY) -> str:
    facts = policylang.load_snapshot(path)
    return plan(policylang.load(policy), facts, capabilities_for(facts.kind)).digest


def trained(backend):
    example = llama()
    model = torch.compile(example.module, backend=backend)
    example.loss_fn(model(*example.inputs)).backward()
    return model


@pytest.mark.slow
def test_a_compiled_model_and_its_backend(tmp_path):
    backend = policylang.backend(POLICY, inner="aot_eager")
    model = trained(backend)
    for subject, name in ((model, "model.graph"), (backend, "backend.graph")):
        path = tmp_path / name
        assert policylang.snapshot(subject, path) == (path,)
        assert digest(path) == policylang.report(model).digest


def test_a_model_of_several_graphs_becomes_several_files(tmp_path):
    torch._dynamo.reset()
    backend = backend_for("save mm or addmm")
    for example in (mlp(width=16), mlp(width=24)):
        model = torch.compile(example.module, backend=backend, dynamic=False)
        example.loss_fn(model(*example.inputs)).backward()
    paths = policylang.snapshot(backend, tmp_path / "m.graph")
    assert paths == (tmp_path / "m.0.graph", tmp_path / "m.1.graph")
    assert all(policylang.load_snapshot(path).kind is GraphKind.JOINT for path in paths)


def test_a_step_before_and_after_a_policy_is_the_same_graph(tmp_path):
    example = llama()
    step = policylang.trace_step(example.module, lambda model, *batch: example.loss_fn(model(*batch)), *example.inputs)
    before, after = tmp_path / "before.graph", tmp_path / "after.graph"
    policylang.snapshot(step, before)
    step.apply(POLICY)
    policylang.snapshot(step, after)
    assert before.read_bytes() == after.read_bytes()
    assert digest(before) == policylang.report(step.gm).digest


def test_joint_graphs_and_their_halves(tmp_path):
    example = mlp()
    joint = capture_joint(example.module, example.inputs, example.loss_fn)
    whole = tmp_path / "joint.graph"
    facts = collect(joint.gm)
    policylang.snapshot(joint.gm, whole)
    assert policylang.load_snapshot(whole).names == facts.names
    policylang.apply(joint.gm, policylang.parse("save mm or addmm"))
    halves = policylang.partition(joint.gm, (), num_fwd_outputs=joint.num_fwd_outputs)
    for half, kind in zip(halves, (GraphKind.FORWARD, GraphKind.BACKWARD), strict=True):
        path = tmp_path / f"{kind.value}.graph"
        policylang.snapshot(half, path)
        read = policylang.load_snapshot(path)
        assert read.kind is kind
        assert read.names == [node.name for node in half.graph.nodes]


def test_what_has_no_graph(tmp_path):
    torch._dynamo.reset()
    path = tmp_path / "x.graph"
    backend = policylang.backend(POLICY, inner="aot_eager")
    for subject, said in ((5, "a `int` has no graph to take a snapshot of"), (backend, "no graph was planned yet")):
        with pytest.raises(PolicyGraphError) as raised:
            policylang.snapshot(subject, path)
        (found,) = raised.value.diagnostics
        assert (found.code, found.message) == ("APL356", said)
    assert not path.exists()


@pytest.mark.slow
def test_a_graph_from_the_cache_says_why_it_has_no_facts(tmp_path):
    from attrs import evolve

    backend = policylang.backend(POLICY, inner="aot_eager")
    trained(backend)
    (graph,) = backend.graphs
    graph.findings = tuple(evolve(found, facts=None) for found in graph.findings)  # as a record of it has them
    with pytest.raises(PolicyGraphError, match="1 of 1 graphs came from torch's compile cache"):
        policylang.snapshot(backend, tmp_path / "x.graph")


@pytest.fixture
def command(capsys, tmp_path, monkeypatch):
    from policylang.commands.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return int(code), captured.out, captured.err

    return run


def test_the_command_takes_what_a_function_returns(command, tmp_path):
    (tmp_path / "my_models.py").write_text(
        "from torch.fx.experimental.proxy_tensor import make_fx\nimport torch\n"
        "def half():\n    return make_fx(lambda x: x.sin().cos())(torch.ones(4))\n"
        "def five():\n    return 5\n"
    )
    code, out, err = command("snapshot", "my_models:half", "-o", "half.graph")
    assert (code, err) == (0, "")
    size = (tmp_path / "half.graph").stat().st_size
    assert out == f"half.graph: forward graph of 4 nodes, {size:,} bytes\n"
    code, out, err = command("snapshot", "my_models:five", "-o", "five.graph")
    assert (code, out) == (1, "")
    assert "error[APL356]: a `int` has no graph" in err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:f", "there is no module `no_such_module`"),
        ("json:no_such", "`json` has no function `no_such`"),
        ("json", "`json` names no function"),
    ],
)
def test_a_function_that_is_not_there(command, name, said):
    code, out, err = command("snapshot", name, "-o", "x.graph")
    assert (code, out) == (2, "")
    assert err == f"policylang snapshot: {said}\nhelp: name a function as `package.module:function`\n"


def test_a_recorded_graph_is_imported(command, tmp_path):
    from tests.support.shared_graphs import FOLDER, ONE_DEVICE

    code, out, _ = command("import", str(FOLDER / f"{ONE_DEVICE}.json.gz"), "-o", "one.graph")
    assert code == 0
    assert out.startswith("one.graph: joint graph of 8,799 nodes, ")
    (tmp_path / "bad.json").write_text("{}")
    code, _, err = command("import", "bad.json", "-o", "bad.graph")
    assert code == 1
    assert "error[APL357]: `bad.json` is not a recorded graph: it has no `fields` and `nodes`" in err
