"""A policy in eager: the bits of plain training, the memory that the plan says, the decisions of the joint graph."""

import copy
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import policylang
from policylang.errors import PolicyGraphError, PolicyMatchError, PolicyWarning
from tests.support import models
from tests.support.drawn import slow
from tests.support.models import Function

SAC = """
recompute everything in block
save matmul in block
recompute every 2nd mm per block
save last add per block
optional save attention in block
"""
LOOKING_AHEAD = """
recompute everything in block
save last 2 mm per block
save everything in block where crosses block
save chain after (first mm per block)
save view where feeds backward
"""
BLOCKS = {"gpt2": "h.*"}
PRODUCT = {"gpt2": "addmm", "bart": "addmm"}


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def step(example: models.Example, model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(5)
    loss = example.loss_fn(model(*example.inputs))
    return loss.detach(), gradients(model, loss)


def same(left: tuple[Tensor, dict[str, Tensor]], right: tuple[Tensor, dict[str, Tensor]]) -> bool:
    return torch.equal(left[0], right[0]) and all(torch.equal(left[1][name], right[1][name]) for name in left[1])


@pytest.mark.parametrize("name", ["llama", "gpt2", *map(slow, ("qwen3", "mixtral", "bart"))])
@pytest.mark.parametrize("text", [SAC, LOOKING_AHEAD], ids=["sac", "looking ahead"])
def test_real_models_train_on_the_same_bits(name: str, text: str) -> None:
    example = models.ZOO[name]()
    text = text.replace(" mm ", f" {PRODUCT.get(name, 'mm')} ").replace(" mm)", f" {PRODUCT.get(name, 'mm')})")
    text = f"blocks {BLOCKS.get(name, 'layers.*')}\n{text}"
    plain = step(example, twin(example.module))
    model = policylang.checkpoint_model(twin(example.module), policylang.parse(text), strict=True)
    assert same(plain, step(example, model))
    assert same(plain, step(example, model)), "the recording does not fit the second call"
    report = policylang.report(model)
    assert report.audit.agrees
    assert report.saved.bytes > 0


class Chosen(TorchDispatchMode):
    """Counts the choices of experts that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.topk.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("text", "runs"), [("", 2), ("recompute topk", 4), ("leave topk", 2)])
def test_experts_are_chosen_once(text: str, runs: int) -> None:
    """pytorch#186572, torchtitan#1117: a second choice, by floats that another kernel summed, may be another."""
    example = models.mixtral()
    model = policylang.checkpoint_model(example.module, policylang.parse(f"recompute everything in block\n{text}"))
    step(example, model)  # records the blocks
    with Chosen() as chosen:
        step(example, model)
    assert chosen.count == runs
    notes = policylang.report(model).notes
    assert len(notes) == (text != "recompute topk")
    assert all("saved that steer later operators, `topk` first" in note for note in notes)


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width, bias=False)
        self.second = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0, *, extra: Tensor | None = None) -> Tensor:
        hidden = self.first(x).sin() * scale
        out = self.second(hidden).cos()
        return out if extra is None else out * extra


def block_and_input() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block(), torch.randn(4, 8, requires_grad=True)


def run(block: nn.Module, policy: Any, *args: Any, **kwargs: Any) -> Tensor:
    function = policylang.context_fn(policy, block, strict=True)
    return checkpoint(block, *args, use_reentrant=False, context_fn=function, **kwargs)


def test_what_is_saved_is_what_a_written_out_policy_function_saves_but_for_what_nobody_reads() -> None:
    """The last product leads to nothing that runs again: a function that saves every product keeps it for nothing."""
    block, x = block_and_input()

    def save_products(_context: object, operator: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        saves = operator is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    held: list[Tensor] = []

    def contexts() -> tuple[Any, Any]:
        forward, again = create_selective_checkpoint_contexts(save_products)
        held.append(forward.storage)
        return forward, again

    expected = gradients(block, checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum())
    found = gradients(block, run(block, policylang.parse("save mm"), x).sum())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(held) == 1
    report = policylang.report(block)
    # cos reads the last product again, so here both are kept
    assert report.saved.bytes == 4 * 16 * 4 + 4 * 8 * 4


def test_a_value_behind_the_last_that_the_backward_reads_is_not_kept() -> None:
    block = Function(lambda block, x: x + block.linear(x.sin()), linear=nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8, requires_grad=True)
    run(block, policylang.parse("save sin; optional save mm"), x).sum().backward()
    report = policylang.report(block)
    assert report.saved.names == ("sin",)
    assert report.saved.bytes == 4 * 8 * 4


def counted(function: Any) -> dict[str, int]:
    """How often each operator runs."""
    counts: dict[str, int] = {}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[func._schema.name] = counts.get(func._schema.name, 0) + 1
            return func(*args, **(kwargs or {}))

    with Count():
        function()
    return counts


def test_a_saved_operator_runs_once_and_a_recomputed_one_twice() -> None:
    block, x = block_and_input()
    policy = policylang.parse("recompute everything; save first mm; save cos")
    run(block, policy, x)  # recorded
    counts = counted(lambda: run(block, policy, x).sum().backward())
    plain = counted(lambda: block(x).sum().backward())
    assert counts["aten::mm"] == plain["aten::mm"] + 1, "the second product alone runs again"
    assert counts["aten::sin"] == plain["aten::sin"] + 1


def last_stage(layers: nn.Module) -> nn.Module:
    """The last of a pipeline: a norm, a head, and the list of layers that other stages fill."""
    return Function(lambda stage, x: stage.head(x), layers=layers, head=nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [(nn.ModuleDict, "blocks layers.*; "), (nn.ModuleList, "blocks {h,layers}.*; "), (nn.ModuleList, "")],
)
def test_a_stage_without_layers_has_nothing_to_checkpoint(layers: type[nn.Module], blocks: str) -> None:
    policy = policylang.parse(f"{blocks}recompute everything in block; save mm in block")
    stage = policylang.checkpoint_model(last_stage(layers()), policy)
    stage(torch.ones(2, 4)).sum().backward()
    note = f"`layers` ({layers.__name__}) holds no layers, and a checkpoint has nothing to do"
    report = policylang.report(stage)
    assert (report.notes, report.saved.bytes, len(report.recomputed)) == ((note,), 0, 0)
    full = policylang.checkpoint_model(last_stage(nn.ModuleList([nn.Linear(4, 4, bias=False)])), policy)
    full.layers[0](torch.ones(2, 4)).sum().backward()
    assert policylang.report(nn.ModuleList([full, stage])).notes == (*policylang.report(full).notes, note)
    with pytest.raises(PolicyGraphError, match=r"APL302.*`layrs\.\*` matches no module"):
        policylang.checkpoint_model(last_stage(layers()), policylang.parse("blocks layrs.*; recompute everything"))


def test_a_stage_of_frozen_layers_has_nothing_to_checkpoint() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).requires_grad_(False)
    model = Function(
        lambda stage, x: stage.head(stage.layers[1](stage.layers[0](x))), layers=layers, head=nn.Linear(4, 4)
    )
    stage = policylang.checkpoint_model(model, policylang.parse("recompute everything in block; save matmul in block"))
    with torch.no_grad():
        stage(torch.ones(2, 4))
    with pytest.raises(PolicyGraphError, match="APL327"):
        policylang.report(stage)
    stage(torch.ones(2, 4)).sum().backward()
    report = policylang.report(stage)
    note = "the backward reads nothing of layers.0–1: nothing is planned, and no rule is checked"
    assert (report.notes, report.saved.bytes, len(report.recomputed)) == ((note,), 0, 0)
    stage(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert note not in policylang.report(stage).notes


def test_each_way_of_calling_a_block_has_its_own_recording() -> None:
    block, x = block_and_input()
    policy = policylang.parse("recompute everything; save mm")
    for args, kwargs in (((x,), {}), ((x, 2.0), {}), ((x,), {"extra": torch.ones(8)}), ((x[:2],), {}), ((x,), {})):
        found = gradients(block, run(block, policy, *args, **kwargs).sum())
        expected = gradients(block, block(*args, **kwargs).sum())
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(policylang.report(block).graphs) == 4


def test_without_gradients_and_in_eval_mode_the_block_simply_runs() -> None:
    block, x = block_and_input()
    policy = policylang.parse("recompute everything; save mm")
    with torch.no_grad():
        assert torch.equal(run(block, policy, x), block(x))
    with pytest.raises(PolicyGraphError, match="no policy has decided"):
        policylang.report(block)
    block.eval()
    assert torch.equal(run(block, policy, x), block(x))


def drops(block: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = nn.functional.dropout(block.linear(x), 0.5).sin()
    return x


@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize(
    "text", ["recompute everything", "recompute everything; save (first bernoulli_)", "save everything"]
)
def test_dropout_between_saved_and_recomputed_masks(text: str, preserve: bool) -> None:
    """A mask that is saved is not drawn again, so the next one has to start where it started then."""
    torch.manual_seed(0)
    block, x = Function(drops, linear=nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(1)
    expected = gradients(block, block(x).sum())
    after = torch.rand(1)
    torch.manual_seed(1)
    found = gradients(block, run(block, policylang.parse(text), x, preserve_rng_state=preserve).sum())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(after, torch.rand(1)), "the generator goes on as if nothing had run twice"


@pytest.mark.parametrize("text", ["recompute everything", "save everything", "save native_batch_norm"])
def test_running_statistics_are_updated_once(text: str) -> None:
    torch.manual_seed(0)
    plain = Function(lambda block, x: block.norm(block.linear(x)).sin(), norm=nn.BatchNorm1d(8), linear=nn.Linear(8, 8))
    block, x = twin(plain), torch.randn(4, 8, requires_grad=True)
    expected = gradients(plain, plain(x).sum())
    found = gradients(block, run(block, policylang.parse(text), x).sum())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(one, other) for one, other in zip(plain.buffers(), block.buffers(), strict=True))


class Moody(Block):
    extra = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(x.tanh() if self.extra else x, *args, **kwargs)


def test_a_block_that_changes_its_mind_is_recorded_again_or_refused() -> None:
    torch.manual_seed(0)
    block, x = Moody(), torch.randn(4, 8, requires_grad=True)
    policy = policylang.parse("recompute everything; save first mm")
    lenient = policylang.context_fn(policy, block)
    strict = policylang.context_fn(policy, block, strict=True)
    for function in (lenient, strict):
        checkpoint(block, x, use_reentrant=False, context_fn=function)
    block.extra = True
    expected = gradients(block, block(x).sum())
    with pytest.warns(PolicyWarning, match="`aten.tanh.default` as operator 1, where `aten.t.default` was recorded"):
        output = checkpoint(block, x, use_reentrant=False, context_fn=lenient)
    found = gradients(block, output.sum())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = gradients(block, checkpoint(block, x, use_reentrant=False, context_fn=lenient).sum())
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    with pytest.raises(PolicyGraphError, match="APL393"):
        checkpoint(block, x, use_reentrant=False, context_fn=strict)


def test_a_recomputation_that_does_something_else_is_an_error() -> None:
    torch.manual_seed(0)
    block, x = Moody(), torch.randn(4, 8, requires_grad=True)
    output = run(block, policylang.parse("recompute everything"), x)
    block.extra = True
    with pytest.raises(PolicyGraphError, match=r"the recomputation of .* runs `aten.tanh.default`"):
        output.sum().backward()


def codes(error: pytest.ExceptionInfo[Any]) -> Iterable[str]:
    return [found.code for found in error.value.diagnostics]


def test_what_one_block_cannot_know_is_said_by_name() -> None:
    block, x = block_and_input()
    with pytest.raises(PolicyMatchError, match="counts over the whole graph") as error:
        run(block, policylang.parse("recompute every 2nd mm per graph"), x)
    assert codes(error) == ["APL306"]
    with pytest.raises(PolicyMatchError, match="asks which block this is"):
        run(block, policylang.parse("recompute mm in first 2 blocks"), x)
    with pytest.raises(PolicyMatchError, match="matches nothing"):
        run(block, policylang.parse("save bmm"), x)


def test_an_expectation_about_the_whole_graph_is_not_checked_and_the_report_says_so() -> None:
    block, x = block_and_input()
    run(block, policylang.parse("save mm; expect saved <= 1 KiB; expect exactly 2 mm per block"), x)
    report = policylang.report(block)
    assert [each.status for each in report.expectations] == ["deferred", "held"]
    assert any("sees one block at a time" in warning for warning in report.warnings)
    with pytest.raises(PolicyMatchError, match="APL305"):
        run(block, policylang.parse("save mm; expect saved per block <= 1 B"), x)


def test_which_block_it_is_counts_over_the_model() -> None:
    example = models.llama(layers=3)
    text = "recompute everything in block; save mm in last block; optional save mm in first 1 blocks"
    model = policylang.checkpoint_model(example.module, policylang.parse(text), strict=True)
    step(example, model)
    graphs = policylang.report(model).graphs
    saved = [graph.saved.bytes for graph in graphs if graph.saved is not None]
    assert saved[0] == saved[2] > 0
    assert saved[1] == 0
    assert [graph.rules[1].matched for graph in graphs] == [0, 0, 7]


def test_a_rule_that_matches_in_no_block_is_an_error_once_all_have_run() -> None:
    example = models.llama()
    model = policylang.checkpoint_model(example.module, policylang.parse("save mm; save bmm; save mm in lm_head"))
    with pytest.raises(PolicyMatchError) as error:
        step(example, model)
    assert [found.message.split("`")[1] for found in error.value.diagnostics] == ["save bmm", "save mm in lm_head"]


@pytest.mark.parametrize("again", [False, True])
def test_a_policy_is_taken_off(again: bool) -> None:
    example = models.llama()
    model, plain = example.module, twin(example.module)
    before = [{**vars(module)} for module in plain.modules()]
    own = model.model.model.layers[0].forward
    model.model.model.layers[1].forward = own  # an own forward of an instance, which is to come back
    policylang.checkpoint_model(model, policylang.parse(SAC))
    model = twin(model) if again else model
    step(example, model)
    assert policylang.checkpoint_model(model, None) is policylang.checkpoint_model(model, None)
    assert "forward" not in vars(model.model.model.layers[0])
    assert "forward" in vars(model.model.model.layers[1])
    del model.model.model.layers[1].forward
    assert [{*vars(module)} for module in model.modules()] == [{*each} for each in before]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert same(step(example, model), step(example, plain))
    with pytest.raises(PolicyGraphError, match="no policy has decided"):
        policylang.report(model)
    policylang.checkpoint_model(model, policylang.parse("recompute everything in block"))
    assert same(step(example, model), step(example, plain))
    assert policylang.report(model).saved.bytes == 0


def test_a_function_that_the_model_has_is_not_taken_off_in_silence() -> None:
    model = models.llama().module
    policylang.checkpoint_model(model, None)  # no policy at all: nothing to say
    policylang.context_fn(policylang.parse(SAC), model)
    with pytest.warns(policylang.PolicyWarning, match=r"those with a function of `context_fn` stay \(APL426\)"):
        policylang.checkpoint_model(model, None)


def test_a_checkpoint_behind_a_replaced_forward_is_not_taken_off() -> None:
    model = models.llama().module
    policylang.checkpoint_model(model, policylang.parse(SAC))
    block = model.model.model.layers[1]
    block.forward = partial(block.forward)
    for policy in (None, policylang.parse("recompute everything in block")):
        with pytest.raises(PolicyGraphError, match=r"replaced the forward of `.*layers\.1`") as caught:
            policylang.checkpoint_model(model, policy)
        assert caught.value.diagnostics[0].code == "APL427"
    assert "forward" in vars(model.model.model.layers[0])


def test_a_checkpoint_around_something_else_is_refused() -> None:
    block, x = block_and_input()
    other, _ = block_and_input()
    function = policylang.context_fn(policylang.parse("save mm"), block)
    with pytest.raises(PolicyGraphError, match="without running any module"):
        checkpoint(other, x, use_reentrant=False, context_fn=function)
    model = nn.Module()
    model.layers = nn.ModuleList([block, other])
    function = policylang.context_fn(policylang.parse("save mm"), model)
    with pytest.raises(PolicyGraphError, match="and then another block"):
        checkpoint(lambda y: other(block(y)), x, use_reentrant=False, context_fn=function)


def test_compiled_code_is_refused_by_name() -> None:
    block, x = block_and_input()
    block.first.compile(backend="eager")
    with pytest.raises(PolicyGraphError, match=r"`first` \(Linear\) is compiled"):
        run(block, policylang.parse("save mm"), x)


def test_a_saved_value_that_is_written_to_afterwards_is_an_error() -> None:
    class Shows(Block):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            hidden = self.first(x).sin()
            return self.second(hidden).cos(), hidden

    output, hidden = run(Shows(), policylang.parse("save sin"), torch.randn(4, 8, requires_grad=True))
    hidden.detach().add_(1)
    with pytest.raises(PolicyGraphError, match=r"saves the result of `aten\.sin\.default`"):
        output.sum().backward()


def test_a_copied_model_has_a_report_of_its_own() -> None:
    example = models.llama()
    plain = step(example, twin(example.module))
    model = policylang.checkpoint_model(example.module, policylang.parse(SAC), strict=True)
    other = twin(model)
    assert same(plain, step(example, other))
    assert len(policylang.report(other).graphs) == 2
    with pytest.raises(PolicyGraphError, match="no policy has decided"):
        policylang.report(model)
    assert same(plain, step(example, model))


def test_a_changed_policy_file_is_another_policy(tmp_path: Any) -> None:
    block, x = block_and_input()
    path = tmp_path / "mine.apl"
    path.write_text("save mm\n")
    first = policylang.context_fn(path, block)
    assert policylang.context_fn(path, block) is first
    path.write_text("save mm; save sin\n")
    os.utime(path, ns=(1, 1))
    second = policylang.context_fn(path, block)
    assert second is not first
    checkpoint(block, x, use_reentrant=False, context_fn=second).sum().backward()
    assert [rule.text for rule in policylang.report(second).rules] == ["save mm", "save sin"]


class Padded(torch.autograd.Function):
    """A kernel that lays its result into a larger memory than it fills."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.ops.policylang_test.padded(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@torch.library.custom_op("policylang_test::padded", mutates_args=())
def padded(x: Tensor) -> Tensor:
    return torch.cat([x, x])[: len(x)]


padded.register_fake(torch.empty_like)


def test_memory_beyond_what_is_planned_is_in_the_report() -> None:
    block = Function(lambda x: Padded.apply(x.sin()).cos())
    policy = policylang.parse("recompute everything; save policylang_test.padded")
    run(block, policy, torch.randn(4, 8, requires_grad=True)).sum().backward()
    report = policylang.report(block)
    assert not report.audit.agrees
    assert "holds 256 bytes, and the plan has 128" in str(report)


def test_a_check_without_a_result_is_not_held():
    """TorchTitan's experts check on the device that sizes are multiples."""

    def checked(x: Tensor) -> Tensor:
        torch._assert_async((x >= 0).all(), "negative")
        return x.sin()

    model = policylang.checkpoint_model(
        models.Layers(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), Function(checked)), end=torch.sum),
        policylang.parse("save everything in block"),
    )
    model(torch.ones(2, 4)).backward()
    report = policylang.report(model)
    assert report.audit.agrees
    assert not any("assert" in name for name in report.saved.names)
