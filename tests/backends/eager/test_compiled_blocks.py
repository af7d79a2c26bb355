"""Compiled blocks inside and around checkpoints: the compiler applies the same policy, and another one is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import policylang
from policylang import PolicyGraphError, PolicyMatchError, PolicyWarning
from policylang.audit.report import Report
from policylang.backends.torch_compile.backend import PolicyBackend
from policylang.language.syntax import Policy
from tests.support import models
from tests.support.drawn import slow
from tests.support.eager import Step, backward_of, blocks_of, differences, loss_of, train, twin

pytestmark = pytest.mark.usefixtures("nothing_compiled")

TEXT = """
recompute everything in block; save matmul in block; recompute every 2nd matmul per block
save everything in block where crosses block
"""
POLICY = policylang.parse(TEXT)
ALONE = policylang.parse("blocks layers.*\n" + TEXT)
"""The same for a compiled block in no checkpoint: there `root` says that it is a block."""


def backend(policy: Policy = POLICY) -> PolicyBackend:
    return policylang.backend(policy, inner="aot_eager", root="layers.0" if policy is ALONE else "")


def each_block(model: nn.Module, by: PolicyBackend) -> nn.Module:
    for block in blocks_of(model):
        block.compile(backend=by)
    return model


def each_wrapped(model: nn.Module, by: PolicyBackend) -> nn.Module:
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):
            for number, block in enumerate(parent):
                parent[number] = torch.compile(block, backend=by)
    return model


def whole(model: nn.Module, by: PolicyBackend) -> nn.Module:
    return torch.compile(model, backend=by)


def checkpointed(model: nn.Module) -> nn.Module:
    return policylang.checkpoint_model(model, POLICY)


class Own(nn.Module):
    """As a user writes it: a checkpoint around each block, in the model's own code."""

    def __init__(self, model: nn.Module, policy: Policy = POLICY) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks_of(model))
        self.context_fn = policylang.context_fn(policy, self)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context_fn)
        return x


Way = Callable[[nn.Module, PolicyBackend], nn.Module]

WAYS: dict[str, Way] = {
    "each block around its checkpoint": lambda model, by: each_block(checkpointed(model), by),
    "each block, then checkpoints": lambda model, by: checkpointed(each_block(model, by)),
    "each block inside its checkpoint": lambda model, by: checkpointed(each_wrapped(model, by)),
    "the model": lambda model, by: whole(checkpointed(model), by),
}
SLOW = ("each block around its checkpoint", "each block, then checkpoints", "the model")


class Counting(TorchDispatchMode):
    """Counts operators, in compiled code too; not those that a checkpoint calls for its own bookkeeping."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += str(func) not in ("aten.detach.default", "aten.empty.memory_format")
        return func(*args, **(kwargs or {}))


def operators_of_a_step(model: nn.Module, run: Callable[[nn.Module, int], Tensor]) -> int:
    """What runs in a step of a model that is compiled: forward, backward, and what is run again."""
    with Counting() as mode:
        run(model, 0)
    return int(mode.seen)


@pytest.mark.parametrize("way", [slow(each) if name in SLOW else each for name, each in WAYS.items()], ids=WAYS)
def test_the_compiler_carries_the_policy_out_and_the_checkpoint_runs_nothing_again(way: Way) -> None:
    example = models.gpt2(1)  # with dropout
    run = backward_of(loss_of(example))
    model = way(twin(example.module), backend())
    assert differences(train(twin(example.module), run), train(model, run)) == []
    ran = operators_of_a_step(model, run)
    report = policylang.report(model)
    assert report.audit.agrees
    assert report.saved.names
    assert report.recomputed.names
    assert all(rule.matched for rule in report.rules)
    assert report.blocks == 1
    expected, operators = without_checkpoints(way is WAYS["the model"])
    assert report.saved.bytes == expected.saved.bytes
    assert report.recomputed.bytes == expected.recomputed.bytes
    assert fates(report) == fates(expected)
    assert ran == operators > 0


@cache
def without_checkpoints(as_whole: bool) -> tuple[Report, int]:
    example = models.gpt2(1)
    run = backward_of(loss_of(example))
    torch.compiler.reset()
    model = (whole if as_whole else each_block)(twin(example.module), backend(POLICY if as_whole else ALONE))
    train(model, run)
    return policylang.report(model), operators_of_a_step(model, run)


def fates(report: Report) -> dict[str, str]:
    return {name: decision.action for name, decision in report.decisions.items()}


OWN: dict[str, Way] = {
    "each block in place": lambda model, by: each_block(Own(model), by),
    "each block, then checkpoints": lambda model, by: Own(each_wrapped(model, by)),
    "the model": lambda model, by: whole(Own(model), by),
    "checkpoints, then each block": lambda model, by: each_wrapped(Own(model), by),
}


@pytest.mark.parametrize("way", OWN.values(), ids=OWN)
def test_checkpoints_of_the_users_own(way: Way) -> None:
    run = backward_of(loss_of(models.mlp()))
    model = way(twin(models.mlp().module), backend())
    assert differences(train(twin(models.mlp().module), run), train(model, run)) == []
    report = policylang.report(model)
    assert all(rule.matched for rule in report.rules)
    assert report.recomputed.names


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [each_block, whole])
def test_the_switch_of_hugging_face(compiled: Way) -> None:
    example = models.gpt2(1)
    run = backward_of(loss_of(example))
    model = twin(example.module)
    inner: Any = model.model
    function = policylang.context_fn(POLICY, inner)
    inner.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})
    model = compiled(model, backend())
    assert differences(train(twin(example.module), run), train(model, run)) == []
    assert all(rule.matched for rule in policylang.report(model).rules)
    assert policylang.report(function).decisions


def test_autocast_and_micro_batches_whose_forwards_run_first() -> None:
    loss = loss_of(models.mlp(2))

    def run(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            first, second = loss(model, 2 * step), loss(model, 2 * step + 1)
        second.backward()
        first.backward()
        return first + second

    def trained(way: Way, policy: Policy) -> list[Step]:
        torch.compiler.reset()
        return train(way(twin(models.mlp(2).module), backend(policy)), run)

    without = trained(each_block, ALONE)
    assert differences(without, trained(WAYS["each block around its checkpoint"], POLICY)) == []
    assert differences(without, trained(WAYS["each block inside its checkpoint"], POLICY)) == []


@pytest.mark.parametrize("make", [models.products, pytest.param(models.mlp, marks=pytest.mark.slow)])
def test_over_inductor(make: Callable[[int], models.Example]) -> None:
    example = make(1)
    run = backward_of(loss_of(example))
    without = train(each_block(twin(example.module), policylang.backend(ALONE, root="layers.0")), run)
    torch.compiler.reset()
    model = each_block(checkpointed(twin(example.module)), policylang.backend(POLICY))
    assert differences(without, train(model, run)) == []
    assert policylang.report(model).decisions


@pytest.mark.parametrize("named", [True, False])
def test_by_the_backends_name(tmp_path: Path, named: bool) -> None:
    """Without a policy among the options it is that of the checkpoint, inside and around."""
    path = tmp_path / "mine.apl"
    path.write_text(TEXT)
    options = {"inner": "aot_eager", "agree": False} | ({"policy": str(path)} if named else {})
    run = backward_of(loss_of(models.mlp()))
    expected = train(twin(models.mlp().module), run)
    inside, around = twin(models.mlp().module), policylang.checkpoint_model(twin(models.mlp().module), path)
    layers: Any = inside.layers
    for number, block in enumerate(layers):
        layers[number] = torch.compile(block, backend="policylang", options=options)
    policylang.checkpoint_model(inside, path)
    for block in blocks_of(around):
        block.compile(backend="policylang", fullgraph=True, options=options)
    for model in (inside, around):
        assert differences(expected, train(model, run)) == []
        report = policylang.report(model)
        assert [rule.source.rpartition("/")[2] for rule in report.rules][:1] == ["mine.apl:2"]
        assert all(rule.matched for rule in report.rules)


def test_the_report_has_compiled_blocks_blocks_in_eager_and_the_head() -> None:
    example = models.llama(2)
    policy = policylang.parse("recompute everything; save matmul")
    model = policylang.checkpoint_model(twin(example.module), policy)
    by = backend(policy)
    blocks_of(model)[1].compile(backend=by)
    inner: Any = model.model
    inner.lm_head = torch.compile(inner.lm_head, backend=by)
    loss_of(example)(model, 0).backward()
    report = policylang.report(model)
    assert len(report.graphs) == 3
    saved = [graph.saved.bytes for graph in report.graphs if graph.saved is not None]
    assert report.saved.bytes == sum(saved)


OTHER = policylang.parse("policy other; recompute everything in block; save matmul in block")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_two_policies_are_refused(way: Way) -> None:
    with pytest.raises(PolicyMatchError, match=r"checkpoint follows `policy`.*, the compiler `other`") as caught:
        loss_of(models.mlp())(way(twin(models.mlp().module), backend(OTHER)), 0)
    assert [found.code for found in caught.value.diagnostics] == ["APL397"]


def test_two_policies_are_refused_where_the_code_was_compiled_without_the_checkpoint() -> None:
    loss, model = loss_of(models.mlp()), twin(models.mlp().module)
    by = backend(policylang.parse("policy other; recompute everything"))
    each_block(model, by)
    loss(model, 0).backward()
    own = Own(model)
    with pytest.raises(PolicyMatchError, match="two policies"):
        loss(own, 0)


def test_layout_and_comments_do_not_make_another_policy() -> None:
    same = policylang.parse("# the same\n" + TEXT)
    by = backend(same)
    loss_of(models.mlp())(each_block(checkpointed(twin(models.mlp().module)), by), 0).backward()
    assert policylang.report(by).decisions


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("save matmul in first 2 blocks", "asks which block this is"),
        ("save matmul in layers.1", "treats `layers.1` otherwise than `layers.0`"),
        slow("save matmul where module == layers.0.up", "treats `layers.1` otherwise than `layers.0`"),
        slow("optional bucket (all_gather in first 2 blocks) up to 1 MiB", "asks which block this is"),
    ],
)
def test_blocks_that_share_a_graph_cannot_be_told_apart(rule: str, why: str) -> None:
    policy = policylang.parse(f"recompute everything; {rule}")
    loss = loss_of(models.mlp())
    model = policylang.checkpoint_model(twin(models.mlp().module), policy)
    with pytest.raises(PolicyMatchError, match=why) as caught:
        loss(each_block(model, backend(policy)), 0)
    assert [found.code for found in caught.value.diagnostics] == ["APL306"]
    torch.compiler.reset()
    model = whole(policylang.checkpoint_model(twin(models.mlp().module), policy), backend(policy))
    loss(model, 0).backward()  # as the help says
    assert all(rule.matched for rule in policylang.report(model).rules)


def test_names_below_the_block_are_those_of_the_model() -> None:
    policy = policylang.parse("recompute everything in layers.*; save matmul in layers.*.up")
    model = each_block(policylang.checkpoint_model(twin(models.mlp().module), policy), backend(policy))
    loss_of(models.mlp())(model, 0).backward()
    recompute, save = policylang.report(model).rules
    assert recompute.matched > save.matched > 0


@pytest.mark.parametrize("way", [WAYS["each block around its checkpoint"], WAYS["each block inside its checkpoint"]])
def test_a_rule_that_matches_nothing_is_an_error_at_the_first_backward(way: Way) -> None:
    policy = policylang.parse(TEXT + "save softmax in block")
    model = each_block(policylang.checkpoint_model(twin(models.mlp().module), policy), backend(policy))
    loss = loss_of(models.mlp())(model, 0)
    with pytest.raises(PolicyMatchError, match="save softmax in block"):
        loss.backward()


def breaks(part: nn.Module, x: Tensor) -> Tensor:
    x = part.block(x)
    torch._dynamo.graph_break()
    return torch.relu(part.after(x))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_graph_break_in_a_block(way: Way) -> None:
    """Around a checkpoint Dynamo takes a block as a whole or not at all. In the second case the policy is followed
    operator by operator, and where the block itself was to be compiled that is said."""
    example = models.mlp()
    run = backward_of(loss_of(example))
    model = twin(example.module)
    layers: Any = model.layers
    for number, block in enumerate(layers):
        layers[number] = models.Function(breaks, block=block, after=nn.Linear(16, 16))
    expected = train(twin(model), run)
    model = way(model, backend())
    in_place = way in list(WAYS.values())[:2]
    with pytest.warns(PolicyWarning, match="does not compile") if in_place else nullcontext():
        assert differences(expected, train(model, run)) == []
    report = policylang.report(model)
    assert report.decisions
    assert all(rule.matched for rule in report.rules)


def parts(width: int) -> nn.Module:
    """A block with a list of modules of its own, as a mixture of experts has."""
    linears = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
    return models.Function(lambda block, x: reduce(lambda x, part: torch.tanh(part(x)), block.parts, x), parts=linears)


@pytest.mark.parametrize("named", [True, False])
def test_a_compiled_block_is_the_block_whatever_lists_it_has(named: bool) -> None:
    """Also where the checkpoint was given one block and no name, and the policy names blocks."""
    torch.manual_seed(0)
    block, x = parts(8), torch.randn(4, 8, requires_grad=True)
    policy = policylang.parse("blocks layers.*\nrecompute everything in block; save last matmul per block")
    by = backend(policy)
    block.compile(backend=by)
    function = policylang.context_fn(policy, block, root="layers.0" if named else "")
    output: Any = checkpoint(block, x, use_reentrant=False, context_fn=function)
    output.sum().backward()
    report = policylang.report(by)
    assert report.blocks == 1
    assert [rule.matched for rule in report.rules][1] == 1
    without = policylang.parse("recompute everything in block; save last matmul per block")
    model = models.Layers(parts(8), parts(8))
    policylang.checkpoint_model(model, without)
    by = backend(without)
    for each in model.layers:
        each.compile(backend=by)
    model(x).sum().backward()
    assert [graph.blocks for graph in policylang.report(model).graphs or [policylang.report(model)]] == [1, 1]


def test_what_dynamo_does_not_compile_any_more_is_said() -> None:
    """Around its checkpoint a block is followed operator by operator; inside there is nothing to follow."""
    run = backward_of(loss_of(models.mlp()))
    expected = train(twin(models.mlp().module), run)
    with torch._dynamo.config.patch(recompile_limit=1):
        around = each_block(checkpointed(twin(models.mlp().module)), backend())
        with pytest.warns(PolicyWarning, match="`layers.1` .* in eager: the checkpoint follows the policy"):
            assert differences(expected, train(around, run)) == []
        torch.compiler.reset()
        with pytest.raises(PolicyGraphError, match=r"did not compile one of 3 blocks, `layers.0` .*ran it in eager"):
            run(each_block(Own(twin(models.mlp().module)), backend()), 0)


# --- compilers without the policy, around and inside a checkpoint: refused by name ------------------------------------
MEND = r"block\.compile\(backend=policylang\.backend"
MADE: dict[str, Callable[[], nn.Module]] = {
    "ours": lambda: checkpointed(twin(models.mlp().module)),
    "own": lambda: Own(twin(models.mlp().module)),
}
AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "aot_eager": partial(torch.compile, backend="aot_eager"),
    "eager": partial(torch.compile, backend="eager"),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@pytest.mark.parametrize("compiled", AROUND.values(), ids=AROUND)
def test_around_is_refused(make: Callable[[], nn.Module], compiled: Callable[[nn.Module], nn.Module]) -> None:
    loss = loss_of(models.mlp())
    with pytest.raises(Exception, match=r"APL396") as caught:
        loss(compiled(make()), 0).backward()
    assert caught.match("is compiled without a policy, and an eager checkpoint sees no operators of compiled code")
    assert caught.match(MEND)


def test_a_block_compiled_in_place_lies_around_its_checkpoint() -> None:
    model = MADE["ours"]()
    blocks_of(model)[1].compile(backend="aot_eager")
    with pytest.raises(Exception, match="APL396"):
        loss_of(models.mlp())(model, 0)


def compiled_in_place(block: nn.Module) -> None:
    block.compile(backend="aot_eager")


def compiled_part(block: nn.Module) -> None:
    block.up = torch.compile(block.up, backend="aot_eager")


INSIDE = [("ours", compiled_part), ("own", compiled_part), ("own", compiled_in_place)]


@pytest.mark.parametrize(("made", "compile_it"), INSIDE)
def test_inside_is_refused(made: str, compile_it: Callable[[nn.Module], None]) -> None:
    """Torch itself would run such a block without the compiler, and not say so."""
    model = MADE[made]()
    compile_it(blocks_of(model)[1])
    with pytest.raises(policylang.PolicyGraphError, match=MEND) as caught:
        loss_of(models.mlp())(model, 0)
    assert [found.code for found in caught.value.diagnostics] == ["APL396"]
    assert "layers.1" in str(caught.value)


def test_a_compiled_part_outside_of_the_blocks_is_none_of_their_business() -> None:
    example = models.llama()
    run = backward_of(loss_of(example))

    def with_compiled_head() -> nn.Module:
        model = twin(example.module)
        model.model.lm_head = torch.compile(model.model.lm_head, backend="aot_eager")
        return model

    expected = train(with_compiled_head(), run)
    assert differences(expected, train(checkpointed(with_compiled_head()), run)) == []


def test_a_part_that_is_compiled_after_the_first_step_is_refused_too() -> None:
    model, loss = MADE["ours"](), loss_of(models.mlp())
    loss(model, 0).backward()
    blocks_of(model)[1].up.compile(backend="aot_eager")
    with pytest.raises(policylang.PolicyGraphError, match=r"`layers\.1\.up` .* is only a part of `layers\.1`"):
        loss(model, 1)
