"""`policylang.report` on everything a user may hold, on a real Llama."""

from __future__ import annotations

import json
import operator
import re
import subprocess
import sys

import pytest
import torch

import policylang
from policylang.audit.report import DecisionReport
from policylang.graph.collect import collect
from policylang.language.shown import format_quantity
from policylang.simulation.node_times import node_times
from tests.graph.captured import joint_of
from tests.support.models import aliased_output, llama

TEXT = """\
recompute everything in block
save matmul in block
recompute every 2nd mm per block
save everything in block where crosses block
"""


@pytest.fixture(scope="module")
def joint():
    return joint_of("llama")


@pytest.fixture
def policy():
    return policylang.parse(TEXT)


def copy_of(gm):
    import copy

    return copy.deepcopy(gm)


def test_a_planned_graph(joint, policy):
    gm = policylang.apply(copy_of(joint.gm), policy)
    report = policylang.report(gm)
    assert [rule.source for rule in report.rules] == [f"<policy>:{line}" for line in (1, 2, 3, 4)]
    assert [rule.text for rule in report.rules] == TEXT.splitlines()
    assert report.blocks == 2
    assert report.decisions["mm"] == DecisionReport("save", "<policy>:2")
    assert report.decisions["mm_1"] == DecisionReport("recompute", "<policy>:3")
    assert report.decisions["mm_2"] == DecisionReport("save", "<policy>:2")
    assert (report.saved, report.recomputed, report.audit) == (None, None, None)
    for rule in report.rules:
        assert rule.matched >= rule.decided + rule.overridden
        assert rule.saved_bytes is None
    ground = report.rules[0]
    assert ground.overridden == report.rules[1].matched + 2, "the matmuls, and what crosses"
    assert report.forward_nodes >= sum(rule.decided for rule in report.rules) + report.undecided


PROFILE = """
name = "slow"
compute.float32 = 1e9
memory.bandwidth = 1e9
"""


@pytest.fixture
def device(tmp_path):
    (tmp_path / "slow.toml").write_text(PROFILE)
    return policylang.load_device(tmp_path / "slow.toml")


def test_a_report_on_a_device_says_the_time_of_what_runs_again(joint, policy, device, tmp_path):
    """Given where the policy is carried out, or by its own line; what is decided is the same."""
    more = {"num_fwd_outputs": joint.num_fwd_outputs}
    plain, *timed = (
        policylang.report(policylang.partition(copy_of(joint.gm), joint.joint_inputs, policy=given, **more, **on)[0])
        for given, on in (
            (policy, {}),
            (policy, {"device": device}),
            (policylang.parse(f'device "{tmp_path / "slow.toml"}"\n{TEXT}'), {}),
        )
    )
    facts = collect(joint.gm)
    seconds = dict(zip(facts.names, node_times(facts, device).seconds, strict=True))
    for report in timed:
        assert report.device == "slow"
        assert report.forward_seconds == pytest.approx(sum(seconds[facts.names[row]] for row in facts.forward))
        assert report.recomputed.seconds == pytest.approx(sum(seconds[name] for name in report.recomputed.names))
        by_rule = [rule.recomputed_seconds for rule in report.rules]
        of_rules = [seconds[name] for name in report.recomputed.names if report.decisions[name].rule is not None]
        assert sum(by_rule) == pytest.approx(sum(of_rules))
        assert by_rule[1] == 0.0 < by_rule[2]
        scalars = report.scalars(prefix="")
        assert scalars["recomputed_seconds"] == report.recomputed.seconds
        assert scalars["recomputed_time_share"] == report.recomputed.seconds / report.forward_seconds
        said = format_quantity(report.recomputed.seconds, "seconds")
        assert re.search(rf"\nrecomputed .* of the forward, {said} on slow, \d+% of its time\n", str(report))
        assert report.decisions.keys() == plain.decisions.keys()
        assert [each.action for each in report.decisions.values()] == [e.action for e in plain.decisions.values()]
        assert json.loads(report.to_json())["recomputed"]["seconds"] == report.recomputed.seconds
    assert (plain.device, plain.forward_seconds, plain.recomputed.seconds) == (None, None, None)
    assert "recomputed_seconds" not in plain.scalars(prefix="")
    assert not re.search(r"\btime\b", str(plain))


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_half_is_called_a_half_and_nothing_is_decided_on_it(joint, policy, kind):
    halves = policylang.partition(
        copy_of(joint.gm), joint.joint_inputs, num_fwd_outputs=joint.num_fwd_outputs, policy=policy
    )
    half = copy_of(halves[kind == "backward"])
    report = policylang.report(policylang.apply(half, policylang.parse("save mm; optional fuse all_gather chains")))
    calls = [node for node in half.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert str(report).startswith(f"policy policy: {kind} graph of a partition, {len(calls)} operators\n")
    assert "forward value" not in str(report)
    assert "undecided" not in str(report)
    assert not report.decisions


def test_a_partitioned_graph_and_either_half_of_it(joint, policy):
    gm = copy_of(joint.gm)
    forward, backward = policylang.partition(
        gm, joint.joint_inputs, num_fwd_outputs=joint.num_fwd_outputs, policy=policy
    )
    report = policylang.report(forward)
    assert policylang.report(backward) == report
    assert policylang.report(gm) == report
    assert report.audit.agrees

    # The figures, against the graph itself: what the forward hands over beyond its own outputs.
    output = next(iter(forward.graph.find_nodes(op="output"))).args[0][joint.num_fwd_outputs :]
    kept = {node.name for node in output if node.op == "call_function"}
    assert set(report.saved.names) == kept
    by_rule = sum(rule.saved_bytes for rule in report.rules)
    assert report.saved.bytes == by_rule + report.undecided_saved_bytes
    recomputed = {node.name for node in backward.graph.nodes if node.name in report.decisions}
    assert set(report.recomputed.names) == {name for name in recomputed if name not in kept}

    assert json.loads(report.to_json())["decisions"]["mm_1"] == {
        "action": "recompute",
        "rule": "<policy>:3",
        "reason": "",
    }
    assert all(rule in str(report) for rule in TEXT.splitlines())
    assert "audit       the changed graphs do what was planned" in str(report)

    # Every 2nd of seven products a layer, and attention: q times k, and that times v, for 2 texts and 4 heads of 8.
    attention = 2 * 2 * (2 * 2 * 4 * 8 * 8 * 8)
    assert report.rules[0].recomputed_flops == attention
    assert report.rules[2].recomputed_flops == report.recomputed.flops - attention > 0


def test_a_compiled_model_its_backend_and_the_model_itself(policy):
    module, inputs, loss_fn = llama()
    backend = policylang.backend(policy, inner="aot_eager")
    compiled = torch.compile(module, backend=backend)
    loss_fn(compiled(*inputs)).backward()
    report = policylang.report(compiled)
    assert report.audit.agrees
    assert report.rules[1].matched == 14
    assert policylang.report(module) == report
    assert policylang.report(backend) == report


def test_a_model_with_a_graph_break_has_a_report_of_all_its_graphs():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(2))

        def forward(self, x):
            x = self.layers[0](x).sin()
            torch._dynamo.graph_break()
            return self.layers[1](x).cos()

    backend = policylang.backend(policylang.parse("save mm\nrecompute sin"), inner="aot_eager")
    model = torch.compile(Broken(), backend=backend)
    model(torch.ones(4, 8)).sum().backward()
    report = policylang.report(model)
    assert len(report.graphs) == 2
    assert report.rules[0].matched == 2
    assert [graph.rules[1].matched for graph in report.graphs] == [1, 0]
    assert report.saved.bytes == sum(graph.saved.bytes for graph in report.graphs)
    assert "0/mm" in report.decisions
    assert "1/mm" in report.decisions
    assert "2 graphs" in str(report)


def test_what_has_no_report_is_refused_by_name(joint):
    module, inputs, _ = aliased_output()
    never_trained = policylang.backend("save_all", inner="aot_eager")
    for subject, code, said in (
        ("a string", "APL328", "this is a `str`"),
        (None, "APL328", "this is a `NoneType`"),
        ([module], "APL328", "this is a `list`"),
        (torch.compile(module.forward, backend="eager"), "APL328", "this is a `function`"),
        (torch.compile(module.forward, backend=never_trained), "APL327", "run the model once, with gradients"),
        (copy_of(joint.gm), "APL325", r"`policylang\.apply\(gm, policy\)`"),
        (module, "APL327", "run the model once, with gradients"),
        (never_trained, "APL327", "run the model once, with gradients"),
        (torch.compile(module, backend="eager"), "APL327", "run the model once, with gradients"),
    ):
        with pytest.raises(policylang.PolicyGraphError, match=said) as caught:
            policylang.report(subject)
        assert [found.code for found in caught.value.diagnostics] == [code]
    with torch.no_grad():
        torch.compile(module, backend=never_trained)(*inputs)
    with pytest.raises(policylang.PolicyGraphError, match="with gradients"):
        policylang.report(never_trained)


def test_a_compiled_function_has_the_report_of_its_backend():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    backend = policylang.backend(policylang.parse("save mm, addmm\nrecompute relu"), inner="aot_eager")

    @torch.compile(backend=backend)
    def loss(x):
        return model(x).square().mean()

    loss(torch.ones(2, 4)).backward()
    found = policylang.report(loss)
    assert found.rules[1].matched == 1
    assert str(found) == str(policylang.report(backend))


def test_a_model_whose_checkpoints_have_not_run_is_told_of_its_checkpoints():
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    holder = torch.nn.Module()
    holder.layers = model
    policylang.checkpoint_model(holder, policylang.parse("recompute everything in block"))
    for subject in (holder, model[0]):
        with pytest.raises(policylang.PolicyGraphError) as caught:
            policylang.report(subject)
        (found,) = caught.value.diagnostics
        assert found.code == "APL327"
        assert "when its checkpoint first runs it" in found.help
        assert "compile" not in found.help


def test_the_name_stays_a_function_whatever_is_imported_first():
    script = (
        "import policylang.report.report_text, policylang.audit.outcome, policylang; "
        "import policylang.errors; assert callable(policylang.report), policylang.report"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
