"""The first call of a block is the one that the program makes: nothing runs beside it, so nothing shows."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import detect_anomaly
from torch.distributed._tools.mod_tracker import ModTracker
from torch.fx import traceback
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

import policylang
from policylang.commands.small_llama import step_memory
from policylang.errors import PolicyGraphError, PolicyWarning
from policylang.language.cancellation import collector_paused
from tests.backends.eager.test_checkpoint import counted
from tests.support.eager import Step, differences, train
from tests.support.models import Function, Layers

POLICY = """
blocks layers.*
recompute everything in block
save first addmm per block
"""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin()) + x


class Model(Layers):
    def __init__(self, kind: Callable[[], nn.Module] = Layer, layers: int = 2) -> None:
        torch.manual_seed(0)
        super().__init__(*(kind() for _ in range(layers)))


Run = Callable[[nn.Module, int], Tensor]


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def plainly(model: nn.Module, number: int) -> Tensor:
    loss = model(batch(number)).sum()
    loss.backward()
    return loss


def checkpointed(model: nn.Module, policy: str = POLICY, strict: bool = True) -> nn.Module:
    return policylang.checkpoint_model(model, policylang.parse(policy), strict=strict)


def both(make: Callable[[], nn.Module], run: Run = plainly, steps: int = 3) -> tuple[list[Step], list[Step], nn.Module]:
    """The steps of a model as it is, and of its twin under the policy, which is the last."""
    expected = train(make(), run, steps)
    model = checkpointed(make())
    return expected, train(model, run, steps), model


def check(make: Callable[[], nn.Module], run: Run = plainly) -> nn.Module:
    """Bitwise equal, warnings are errors, and the audit agrees."""
    expected, found, model = both(make, run)
    assert differences(expected, found) == []
    report = policylang.report(model)
    assert report.audit.agrees
    return model


@lru_cache
def table(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32)[:, None]


class ReadsTable(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * table(len(x)).cos())


KNOWN: dict[int, Tensor] = {}


class ReadsDictionary(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in KNOWN:
            KNOWN[len(x)] = torch.arange(len(x), dtype=torch.float32)[:, None].cos()
        return super().forward(x * KNOWN[len(x)])


class MakesAttribute(Layer):
    cosines: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cosines is None:
            self.cosines = torch.arange(len(x), dtype=torch.float32)[:, None].cos()
        return super().forward(x * self.cosines)


@pytest.mark.parametrize("kind", [ReadsTable, ReadsDictionary, MakesAttribute])
def test_what_a_block_makes_once_is_real_and_the_parameters_move(kind: type[nn.Module]) -> None:
    """Rotary embeddings keep such tables. A fake one in them trains nothing, and says nothing."""

    def make() -> nn.Module:
        table.cache_clear()
        KNOWN.clear()
        return Model(kind)

    model = check(make)
    made = [table(4), *KNOWN.values(), *(each.cosines for each in model.layers if kind is MakesAttribute)]
    assert not any(isinstance(each, FakeTensor) for each in made)
    assert not any(isinstance(each.grad, FakeTensor) for each in model.parameters())


def test_a_key_value_cache_is_filled_once_and_the_loss_is_that_without_checkpoints() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=True
    )
    plain = LlamaForCausalLM(config)
    tokens = torch.randint(64, (2, 12))
    caches = []

    def run(model: nn.Module, number: int) -> Tensor:
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        caches.append(output.past_key_values)
        return output.loss

    ours = policylang.checkpoint_model(copy.deepcopy(plain), "llama3_sac", strict=True)
    assert differences(train(plain, run), train(ours, run)) == []
    assert [cache.get_seq_length() for cache in caches] == [12] * 4, "a recomputation appends nothing"


def test_a_value_that_a_hook_keeps_reaches_the_loss() -> None:
    def run(model: nn.Module, number: int) -> Tensor:
        kept: list[Tensor] = []
        hooks = [layer.up.register_forward_hook(lambda _m, _a, out: kept.append(out)) for layer in model.layers]
        output = model(batch(number))
        loss = output.sum() + sum((each**2).mean() for each in kept)
        for hook in hooks:
            hook.remove()
        loss.backward()
        return loss

    check(Model, run)


def test_router_logits_that_transformers_collects_reach_the_loss() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    plain = Qwen3MoeForCausalLM(config)
    tokens = torch.randint(64, (2, 12))

    def run(model: nn.Module, number: int) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    ours = policylang.checkpoint_model(copy.deepcopy(plain), "llama3_sac", strict=True)
    assert differences(train(plain, run), train(ours, run)) == []


@contextmanager
def anomalies() -> Iterator[None]:
    with pytest.warns(UserWarning, match="Anomaly Detection"), detect_anomaly():
        yield


@pytest.mark.parametrize(
    "around", [anomalies, lambda: FlopCounterMode(display=False), ModTracker], ids=["anomalies", "flops", "modules"]
)
@pytest.mark.parametrize("first", [0, 1], ids=["from the first call", "from the second call"])
def test_people_debug_and_measure(around: Callable[[], Any], first: int) -> None:
    """From the first call or around a later one, which has operators beside those of the block."""

    def run(model: nn.Module, number: int) -> Tensor:
        if number < first:
            return plainly(model, number)
        with around():
            return plainly(model, number)

    check(Model, run)


def test_the_first_call_runs_what_every_call_runs() -> None:
    model = checkpointed(Model())
    counts = []
    for _ in range(2):
        counts.append(counted(lambda: plainly(model, 0)))
        del counts[-1]["aten::detach"]  # what is kept from there on is taken off its history
        model.zero_grad()
    assert counts[0] == counts[1]


@pytest.fixture
def _notes_of_modes() -> Iterator[None]:
    """Torch notes in globals that a dispatch mode is active. Modes of several threads that end in another order than
    they began leave the note standing (with torch's own contexts too), and Dynamo then compiles at every call.

    ``torch.get_rng_state`` makes a Python object while it holds the generator's mutex. A collection in it that frees a
    tensor lets another thread run, which waits for the mutex without letting go of the interpreter: none goes on.
    """
    before = {name: value for name, value in vars(_python_dispatch).items() if name.startswith("_is_in_")}
    with collector_paused():
        yield
    vars(_python_dispatch).update(before)


@pytest.mark.usefixtures("_notes_of_modes")
def test_threads_train_their_own_models_and_one_that_they_share() -> None:
    shared = checkpointed(Model())
    failed: list[BaseException] = []

    def work(seed: int, model: nn.Module) -> None:
        try:
            for number in range(4):
                model(batch(seed + number)).sum().backward()
        except BaseException as error:
            failed.append(error)

    for own in (True, False):
        given = [(seed, checkpointed(Model()) if own else shared) for seed in range(6)]
        threads = [threading.Thread(target=work, args=each) for each in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    check(Model)


def test_a_users_own_exception_stays_what_it_is() -> None:
    class Fails(Layer):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise KeyError("mine")
            return super().forward(x)

    model = checkpointed(Model(Fails))
    with pytest.raises(KeyError, match="mine"):
        model(batch(0))
    Fails.fails = False
    expected = train(Model(Fails), plainly)
    assert differences(expected, train(model, plainly)) == []


class EndsInsideMark(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(x).sin())
        with torch.profiler.record_function("the last"):
            return y.cos()


class CountsInFinally(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.down(self.up(x).sin()).cos().exp()
        finally:
            self.calls.add_(1)
            torch.zeros(2).mul(3)


class Closes:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        torch.ones(3).sum()


class EndsInsideContext(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with Closes():
            return self.down(self.up(x).sin()).cos().exp()


@pytest.mark.parametrize("kind", [EndsInsideMark, CountsInFinally, EndsInsideContext])
def test_what_runs_while_an_early_stop_unwinds_is_no_divergence(kind: type[nn.Module]) -> None:
    model = check(lambda: Model(kind))
    if kind is CountsInFinally:
        assert [float(layer.calls) for layer in model.layers] == [3.0, 3.0]


class Force(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        energy = self.down(self.up(x).tanh()).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x + force.sin()


def test_a_block_may_differentiate_a_part_of_itself() -> None:
    check(lambda: Model(Force))


def test_second_derivatives_of_a_model() -> None:
    plain, ours = Model(), checkpointed(Model())

    def second(model: nn.Module) -> Tensor:
        x = batch(0).requires_grad_()
        (first,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.pow(2).sum(), x)
        return found

    assert torch.equal(second(plain), second(ours))
    assert torch.equal(second(plain), second(ours))


class ReassignsBuffer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.memory = 0.9 * self.memory + x.detach()
        return super().forward(x * self.memory.cos())


class CountsInPython(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * self.calls)


def forwards_first(model: nn.Module, number: int) -> Tensor:
    losses = [model(batch(number + micro)).sum() for micro in range(3)]
    for loss in reversed(losses):
        loss.backward()
    return torch.stack(losses).sum()


@pytest.mark.parametrize("kind", [ReassignsBuffer, CountsInPython])
@pytest.mark.parametrize("run", [plainly, forwards_first])
def test_a_recomputation_finds_what_its_forward_found_and_leaves_no_trace(kind: type[nn.Module], run: Run) -> None:
    """PyTorch's checkpoint reads the buffer of the last forward, and counts twice."""
    expected = Model(kind)
    reference = train(expected, run)
    model = checkpointed(Model(kind))
    assert differences(reference, train(model, run)) == []
    for one, other in zip(expected.layers, model.layers, strict=True):
        if kind is CountsInPython:
            assert one.calls == other.calls
        else:
            assert torch.equal(one.memory, other.memory)


def test_parameters_that_stand_in_for_one_call_are_those_of_its_recomputation() -> None:
    """``functional_call``, as MAML uses it: the backward runs when the model has its own parameters again."""

    def run(model: nn.Module, number: int) -> Tensor:
        fast = {name: each * 1.5 for name, each in model.named_parameters()}
        loss = torch.func.functional_call(model, fast, (batch(number),)).sum()
        loss.backward()
        return loss

    check(Model, run)


@pytest.mark.parametrize("exchange", ["data", "in place"])
def test_parameters_that_change_before_the_backward_are_an_error_by_name(exchange: str) -> None:
    # what it reads is not saved by autograd, which would say so itself
    model = Model(lambda: Function(lambda block, x: (x + block.shift).sin().cos(), shift=nn.Parameter(torch.ones(8))))
    model = checkpointed(model, "blocks layers.*; recompute everything in block")
    loss = model(batch(0)).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            if exchange == "data":
                parameter.data = parameter.data * 2
            else:
                parameter.mul_(2)
    with pytest.raises(PolicyGraphError, match=r"APL395.*`layers.1`"):
        loss.backward()


def test_a_buffer_that_is_written_before_the_backward_is_a_warning() -> None:
    """DDP writes the same values again before each forward: an error would refuse what is right."""

    class Scales(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scale)

    model = checkpointed(Model(Scales))
    loss = model(batch(0)).sum()
    for layer in model.layers:
        layer.scale.copy_(layer.scale.clone())
    with pytest.warns(PolicyWarning, match="written to in place since its forward"):
        loss.backward()


def test_a_block_without_anything_to_differentiate_simply_runs() -> None:
    def frozen() -> nn.Module:
        model = Model(layers=3)
        model.layers[0].requires_grad_(False)
        return model

    def run(model: nn.Module) -> list[Tensor]:
        plainly(model, 0)
        return [each.grad for each in model.parameters() if each.grad is not None]

    expected = run(frozen())
    model = checkpointed(frozen())
    assert all(torch.equal(one, other) for one, other in zip(expected, run(model), strict=True))
    assert len(policylang.report(model).graphs) == 2
    model.requires_grad_(False)
    assert torch.equal(model(batch(1)), frozen()(batch(1)))


def test_a_rule_that_matches_nowhere_is_an_error_although_a_block_is_frozen() -> None:
    model = Model(layers=3)
    model.layers[0].requires_grad_(False)
    checkpointed(model, POLICY + "save bmm in block")
    with pytest.raises(policylang.PolicyError, match="APL301"):
        model(batch(0))


def picks_experts(block: Any, x: Tensor) -> Tensor:
    scores = block.gate(x).sigmoid()
    _, chosen = torch.topk(scores, 2, dim=-1)
    return block.out(x * scores.gather(-1, chosen).sum(-1, keepdim=True))


def test_what_stands_in_for_a_result_that_nobody_reads_is_not_held() -> None:
    """TorchTitan's routers read the indices of a ``topk`` and not its values."""
    picks = Model(lambda: Function(picks_experts, gate=nn.Linear(8, 8), out=nn.Linear(8, 8)))
    model = checkpointed(picks, "blocks layers.*; recompute everything in block; save topk in block")
    for number in range(2):
        plainly(model, number)
        report = policylang.report(model)
        assert report.audit.differences == ()


def test_the_memory_of_the_first_step_is_that_of_a_full_checkpoint() -> None:
    """Until a block has returned, all that it makes is held, as it is when it is recomputed; no longer."""
    x = torch.randn(512, 8)

    def peak(model: nn.Module) -> int:
        found = step_memory(lambda: model(x).sum(), [*model.parameters(), x], torch.device("cpu"))
        model.zero_grad()
        return found.peak

    model = checkpointed(Model(layers=8), "blocks layers.*; recompute everything in block")
    first, later = peak(model), peak(model)
    assert first == later < 0.7 * peak(Model(layers=8))


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_a_model_without_data_is_followed_as_well(device: str) -> None:
    """The peak of a step that is too big for the machine is measured this way."""
    with FakeTensorMode() if device == "fake" else torch.device("meta"):
        model = checkpointed(Model(kind=plain))
        for _ in range(2):
            model(torch.empty(4, 8)).sum().backward()
    report = policylang.report(model)
    assert report.audit.agrees
    assert report.saved.bytes == 2 * 4 * 8 * 4


def plain() -> nn.Module:
    up, down = nn.Linear(8, 8), nn.Linear(8, 8)
    return Function(lambda block, x: block.down(block.up(x).sin()), up=up, down=down)


class KeepsByItself(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x)


def test_a_block_that_hands_everything_to_hooks_of_its_own_says_so_once() -> None:
    model = checkpointed(Model(KeepsByItself))
    with pytest.warns(PolicyWarning, match="APL399") as warned:
        found = train(model, plainly)
    assert len(warned) == len(model.layers)
    assert differences(train(Model(KeepsByItself), plainly), found) == []
    with torch.autograd.graph.save_on_cpu():
        check(Model)


class Annotated(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with traceback.annotate({"narrow": True, "phase": "backward", "module_fqn": "elsewhere"}):
            x = self.up(x)
        with traceback.annotate({"narrow": False}):
            return self.down(x.sin())


def test_what_the_model_annotates_is_found() -> None:
    policy = policylang.parse("recompute everything in block\nsave addmm in up where annotated narrow")
    model = policylang.checkpoint_model(Model(Annotated), policy)
    model(batch(0)).sum().backward()
    report = policylang.report(model)
    assert (report.rules[1].matched, report.rules[1].decided) == (2, 2)
    wide = policylang.checkpoint_model(Model(Annotated), policylang.parse("save everything where annotated wide"))
    with pytest.raises(policylang.PolicyMatchError, match=r"annotations of forward nodes: narrow \(2\)"):
        wide(batch(0)).sum().backward()
