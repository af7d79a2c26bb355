"""Policies on flat graphs of real models, whoever traced them, by time too: equal to the last bit."""

import copy
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang import TracedStep
from policylang.audit.report import Report
from policylang.errors import PolicyMatchError
from policylang.language.syntax import Policy
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from tests.graph.captured import flat_of
from tests.support import eager, models
from tests.support.compiled import assert_same_as_without
from tests.support.drawn import slow
from tests.support.flat_graphs import Flat, assert_bitwise_equal, flat_graph, gradients, trace_flat
from tests.support.models import ZOO, Example
from tests.tracing.test_against_eager import trace

TRANSFORMERS = ("llama", "qwen3", "mixtral", "gpt2", "flex")
MODELS = ["llama", "gpt2", "resnet", "dropout"]
MODELS += [slow(name) for name in ("qwen3", "mixtral", "flex", "bart")]
OWN = {
    "everything": "recompute everything",
    "all but matmul": "recompute everything\noptional save matmul",
    "every other": "recompute everything\nsave every 2nd everything per graph",
    "nothing": "save everything",
    "undecided": "undecided -> recompute",
}


def example(name: str) -> Example:
    built = ZOO[name]()
    if name == "mixtral":  # the grouped matmul takes bfloat16 alone where nothing is really computed
        built.module.model.set_experts_implementation("batched_mm")
    return built


@cache
def traced(name: str) -> Flat:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flat_graph(example(name)) if name == "mixtral" else flat_of(name)


def check(flat: Flat, policy: Any) -> Report:
    """Apply to a copy, run both twice from the same numbers, and compare everything, buffers included."""
    before, after = flat.fresh(), flat.fresh()
    policylang.apply(after.gm, policy)
    after.gm.graph.lint()
    for seed in (3, 4):
        assert_bitwise_equal(before.run(seed), after.run(seed))
        assert_bitwise_equal(before.inputs, after.inputs)
    report = policylang.report(after.gm)
    assert report.audit.agrees
    return report


@pytest.mark.parametrize("policy", OWN)
@pytest.mark.parametrize("name", [*MODELS, "mlp", "shared_parameters", "aliased_output"])
def test_own_policies_on_plain_make_fx(name: str, policy: str) -> None:
    report = check(traced(name), policylang.parse(OWN[policy]))
    if policy in ("everything", "undecided"):
        assert len(report.recomputed) > len(report.saved)
    if policy == "nothing":
        assert len(report.recomputed) == 0


def train(step: TracedStep, built: Example, policy: str | None) -> tuple[list[object], nn.Module]:
    """Two steps of SGD with momentum; what came out, and the model after them."""
    optimizer = torch.optim.SGD(built.module.parameters(), lr=0.1, momentum=0.9)
    if policy is not None:
        step.apply(policy)
    seen: list[object] = []
    for number in range(2):
        torch.manual_seed(number)
        loss, found = step(*built.inputs)
        seen += [loss, *found.values()]
        for key, parameter in built.module.named_parameters():
            parameter.grad = found.get(key)
        optimizer.step()
    return seen, built.module


@pytest.mark.parametrize("name", ["resnet", "dropout", *map(slow, TRANSFORMERS)])
def test_two_traced_steps_with_an_optimizer(name: str, tmp_path: Path) -> None:
    file = tmp_path / "everything.apl"
    file.write_text("recompute everything\noptional save every 3rd matmul per graph\n")
    plain, other = example(name), example(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, left = train(trace(plain), plain, None)
        found, right = train(trace(other), other, str(file))
    assert_bitwise_equal(expected, found)
    assert_bitwise_equal(left.state_dict().values(), right.state_dict().values())


def chunked_step(call: Callable[..., Tensor], parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
    """The head's loss and backward chunk by chunk, then the body's backward: a backward in several pieces."""
    *body, head_weight, head_bias = parameters
    hidden = call(*batch)
    leaf = hidden.detach().requires_grad_()
    total, summed = [], None
    for chunk in leaf.chunk(3, dim=0):
        loss = torch.nn.functional.linear(chunk.sin(), head_weight[: chunk.shape[-1], :], head_bias).square().mean()
        found = gradients(loss, [leaf, head_weight, head_bias])
        total.append(loss)
        summed = found if summed is None else [left + right for left, right in zip(summed, found, strict=True)]
    with torch.fx.traceback.annotate({"phase": "backward"}):
        body_gradients = torch.autograd.grad(hidden, body, grad_outputs=summed[0], allow_unused=True)
    return [sum(total), *summed[1:], *(found for found in body_gradients if found is not None)]


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head_weight = nn.Parameter(torch.randn(12, 12))
        self.head_bias = nn.Parameter(torch.randn(12))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.dropout(layer(x).tanh(), 0.3) + x
        return x


@pytest.fixture(scope="module")
def chunked() -> Flat:
    torch.manual_seed(0)
    module = Body()
    names = [name for name, _ in module.named_parameters()]
    order = sorted(range(len(names)), key=lambda at: names[at].startswith("head"))

    def step(call: Callable[..., Tensor], parameters: list[Tensor], batch: list[Tensor]) -> list[Tensor]:
        return chunked_step(call, [parameters[at] for at in order], batch)

    return trace_flat(module, [torch.randn(6, 12)], step)


@pytest.mark.parametrize("policy", OWN)
def test_a_loss_in_chunks_splits_the_backward(policy: str, chunked: Flat) -> None:
    """pytorch#182416, torchtitan#3247: two passes of others refuse a second region, or leave it out."""
    check(chunked, policylang.parse(OWN[policy]))


def test_metadata_of_other_passes_stays() -> None:
    flat = traced("llama").fresh()
    for node in flat.gm.graph.nodes:
        node.meta["custom"] = {**node.meta.get("custom", {}), "mine": node.name}
    before = {node.name: node for node in flat.gm.graph.nodes}
    policylang.apply(flat.gm, policylang.parse("recompute everything in block\nsave mm", name="mine.apl"))
    copies = 0
    for node in flat.gm.graph.nodes:
        custom = node.meta["custom"]
        origin = custom.get("policylang_recomputed")
        if origin is None:
            assert before[node.name] is node
            assert custom["mine"] == node.name
            continue
        copies += 1
        assert custom["mine"] == origin
        assert custom["phase"] == "backward"
        assert custom["policylang"] == "mine.apl:1"
        assert node.meta["val"] is before[origin].meta["val"]
        assert node.meta["seq_nr"] == before[origin].meta["seq_nr"]
        assert custom["module_fqn"] == before[origin].meta["custom"]["module_fqn"]
        assert "recompute" not in node.meta
        assert node.name.startswith(f"{origin}_recomputed")
    assert copies > 50


def test_copies_share_no_annotations_and_the_code_that_is_shown_is_that_of_the_changed_graph() -> None:
    flat = traced("mlp").fresh()
    assert "_recomputed" not in flat.gm.code
    policylang.apply(flat.gm, policylang.parse("recompute everything"))
    customs = [node.meta["custom"] for node in flat.gm.graph.nodes if "custom" in node.meta]
    written = [custom for custom in customs if "policylang_recomputed" in custom]
    assert len({id(custom) for custom in written}) == len(written)
    assert "_recomputed" in flat.gm.code
    assert "_recomputed" in str(flat.gm)


def test_a_second_policy_is_refused() -> None:
    flat = traced("mlp").fresh()
    policylang.apply(flat.gm, policylang.parse("recompute everything"))
    nodes = [node.name for node in flat.gm.graph.nodes]
    with pytest.raises(policylang.PolicyGraphError, match="was applied to this graph before") as caught:
        policylang.apply(flat.gm, policylang.parse("save everything"))
    assert caught.value.diagnostics[0].code == "APL382"
    assert [node.name for node in flat.gm.graph.nodes] == nodes


def test_what_no_rule_decides_stays_as_traced_and_the_report_says_so() -> None:
    flat = traced("mlp").fresh()
    policylang.apply(flat.gm, policylang.parse("recompute gelu"))
    report = policylang.report(flat.gm)
    assert report.undecided_fate == "as traced"
    assert set(report.recomputed.names) == {name for name in report.decisions if name.startswith("gelu")}
    assert "undecided -> as traced" in str(report)
    assert {decision.action for decision in report.decisions.values()} == {"save", "recompute"}


def test_the_model_itself_is_not_needed_for_a_copy() -> None:
    """A rematerialised graph can be copied and run like any other."""
    flat = traced("gpt2").fresh()
    policylang.apply(flat.gm, policylang.parse("recompute everything"))
    again = copy.deepcopy(flat.gm)
    torch.manual_seed(1)
    left = flat.gm(*flat.fresh().inputs)
    torch.manual_seed(1)
    assert_bitwise_equal(left, again(*flat.fresh().inputs))


def test_hooks_run_once_on_the_first_call() -> None:
    """Code is generated when the graph is first called; that call is an ordinary one."""
    flat = traced("mlp").fresh()
    policylang.apply(flat.gm, policylang.parse("recompute everything"))
    seen: list[str] = []
    flat.gm.register_forward_pre_hook(lambda _module, _inputs: seen.append("before"))
    flat.gm.register_forward_hook(lambda _module, _inputs, _outputs: seen.append("after"))
    flat.run()
    flat.run()
    assert seen == ["before", "after"] * 2


DEVICE = """\
name = "a quiet machine"
[compute]
float32 = 1e9
[memory]
bandwidth = 1e9
"""
RULES = """\
device "quiet.toml"
blocks layers.*
recompute everything in block
save everything in block where time > 40 us
"""
"""The larger products of a tiny Llama take 65 us there, all others 33 us at most."""
EXPECTATIONS = """\
expect recomputed time <= 60%
expect recomputed time >= 10 us
expect recomputed time per block <= 1 ms
expect exposed <= 0 s
expect step time <= 1 s
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    (folder / "quiet.toml").write_text(DEVICE, encoding="utf-8")
    (folder / "timed.apl").write_text(RULES + EXPECTATIONS, encoding="utf-8")
    return folder / "timed.apl"


def text_of(file: Path, text: str) -> Policy:
    other = file.with_name("other.apl")
    other.write_text(text, encoding="utf-8")
    return policylang.load(other)


def compiled_alike(example: Callable[[], models.Example], policy: Policy, folder: Path) -> policylang.Report:
    """With and without the policy; its report, whose plan is that of a snapshot."""
    backend = policylang.backend(policy, inner="aot_eager")
    assert_same_as_without(example, backend)
    report = policylang.report(backend)
    (snapshot,) = policylang.snapshot(backend, folder / "model.graph")
    facts = policylang.load_snapshot(snapshot)
    assert plan(policy, facts, capabilities_for(facts.kind)).digest == report.digest
    return report


def test_a_compiled_model(file: Path, tmp_path: Path) -> None:
    """What is left to the partitioner is settled before the expectations are."""
    text = 'device "quiet.toml"\nsave everything where time > 1 us\n'
    text += "expect recomputed time <= 1 s\nexpect step time <= 1 s"
    report = compiled_alike(models.mlp, text_of(file, text), tmp_path)
    assert [each.status for each in report.expectations] == ["held", "held"]
    assert report.rules[0].decided > 0


@pytest.mark.slow
def test_a_compiled_llama(file: Path, tmp_path: Path) -> None:
    report = compiled_alike(models.llama, policylang.load(file), tmp_path)
    assert [each.status for each in report.expectations] == ["held"] * 5
    assert report.rules[1].matched == report.rules[1].decided == 6


def test_blocks_in_eager(file: Path) -> None:
    """Of the whole step one block knows nothing: that is said, and what is said per block is checked."""
    example = models.llama()
    run = eager.backward_of(eager.loss_of(example))
    expected = eager.train(eager.twin(example.module), run)
    model = policylang.checkpoint_model(eager.twin(example.module), policylang.load(file))
    assert eager.differences(expected, eager.train(model, run)) == []
    report = policylang.report(model)
    for each in report.expectations:
        assert each.status == ("held" if "per block" in each.text else "deferred")
    assert sum("APL391" in each for each in report.warnings) >= 4
    assert report.rules[1].decided == 6
    failing = text_of(file, RULES + "expect recomputed time per block <= 1 us")
    failing = policylang.checkpoint_model(eager.twin(example.module), failing)
    with pytest.raises(PolicyMatchError, match=r"us in block 0"):
        run(failing, 0)


def test_a_traced_step(file: Path) -> None:
    example = models.llama()
    step = trace(example)
    value, gradients = step(*example.inputs)
    report = step.apply(policylang.load(file)).report
    assert [each.status for each in report.expectations] == ["held"] * 5
    assert report.recomputed.names
    again, others = step(*example.inputs)
    assert torch.equal(value, again)
    assert [name for name, gradient in gradients.items() if not torch.equal(gradient, others[name])] == []
