"""A step traced with ``path="eager"`` has the operators that eager runs on its batch."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.optim import SGD

from policylang import trace_step
from policylang.errors import PolicyError, PolicyGraphError
from policylang.torch_compat.eager import DispatchMode
from tests.support.drawn import slow

aten = torch.ops.aten


class Asking(nn.Module):
    """Multiplies by its weight, and takes the sine where a question about a value is answered by yes."""

    def __init__(self, question: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("steps", torch.tensor(3))
        self.question = question

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        product = x * self.weight
        return product.sin() if self.question(self, ids, x) else product


def loss_fn(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).sum()


def writes_what_is_unknown(_model: nn.Module, _ids: Tensor, x: Tensor) -> Tensor:
    kept = torch.zeros(4, dtype=torch.bool)
    kept[:2] = x[0, :2] > 0  # through a view
    return kept.any()


YES = {
    "no compiler": lambda *_: not torch.compiler.is_compiling(),
    "nothing": lambda *_: (torch.arange(5).diff() == 1).all(),
    "the batch": lambda _model, ids, _x: 7 in ids[:, [0, -1]],
    "a buffer": lambda model, *_: model.steps.item() == 3,
    "ones": lambda _model, ids, _x: torch.ones(ids.shape, dtype=torch.bfloat16).bool().all(),
    "writes": lambda _model, ids, _x: ids.new_zeros(3).fill_(2).add_(ids[0, 0])[1] == 9,
}
UNKNOWN = {
    "a weight": lambda model, *_: model.weight[0] > 0,
    "floats of the batch": lambda _model, _ids, x: x.sum() > 0,
    "random numbers": lambda *_: torch.randint(2, (3,)).any(),
    "a write": writes_what_is_unknown,
}


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 4), torch.tensor([[7, 1, 2, 3]])


@pytest.mark.parametrize("question", YES)
def test_a_question_whose_answer_is_known_is_answered(question: str) -> None:
    for answer in (True, False):
        model = Asking(lambda *given, answer=answer: bool(YES[question](*given)) == answer)
        step = trace_step(model, loss_fn, *batch(), path="eager")
        assert (aten.sin.default in {node.target for node in step.gm.graph.nodes}) == answer
    assert model.steps == 3


@pytest.mark.parametrize("question", UNKNOWN)
def test_any_other_question_is_refused(question: str) -> None:
    with pytest.raises(PolicyGraphError, match="APL362"):
        trace_step(Asking(UNKNOWN[question]), loss_fn, *batch(), path="eager")


def test_such_a_step_is_planned_and_not_run() -> None:
    step = trace_step(Asking(YES["the batch"]), loss_fn, *batch(), path="eager")
    with pytest.raises(PolicyGraphError, match=r"APL615.*for one batch"):
        step(*batch())


class InPlace(nn.Module):
    """Writes to what it made, as a whole, by views and in part, to its buffers and to its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y = self.norm(self.norm(self.conv(x)))
        y += x
        y.flatten(1).mul_(self.count)
        z = self.dropout(self.relu(y))
        z[:, 0] += 1
        return z.clamp_(max=2)


def test_what_is_written_in_place_is_so_in_the_graph_and_the_inputs_are_written_once() -> None:
    model, x = InPlace(), torch.randn(2, 3, 4, 4)
    step = trace_step(model, lambda model, x: model(x).sum(), x, path="eager")
    with Counted() as counted:
        model(x)
    traced = Counter(node.target for node in step.gm.graph.nodes)
    written = (aten.mul_.Tensor, aten.relu_.default, aten.bernoulli_.float, aten.div_.Scalar, aten.clamp_.default)
    for operator in (*written, aten.native_batch_norm.default):
        assert traced[operator] == counted.targets[operator] > 0, operator
    assert traced[aten.add_.Tensor] == counted.targets[aten.add_.Tensor] - 1, "of a part, as a functional graph has it"
    copied = step.gm.graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert not any(node.args[0].op == "placeholder" for node in copied)
    assert not any("policylang_written_by" in node.meta.get("custom", {}) for node in step.gm.graph.nodes)


def test_an_optimizer_is_traced_as_without_it() -> None:
    model, given = nn.Linear(4, 4), (torch.randn(2, 4),)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn(model, *given).backward()
    optimizer.step()
    graphs = [trace_step(model, loss_fn, *given, optimizer=optimizer, path=path).gm for path in (None, "eager")]
    assert graphs[0].code == graphs[1].code


def test_what_a_compiled_function_calls_is_traced() -> None:
    sine = torch.compile(torch.sin, backend="eager")
    step = trace_step(nn.Linear(4, 4), lambda model, x: sine(model(x)).sum(), torch.randn(2, 4), path="eager")
    assert "sin" in {node.name for node in step.gm.graph.nodes}


def test_another_path_is_refused() -> None:
    with pytest.raises(PolicyError, match="APL251"):
        trace_step(nn.Linear(4, 4), loss_fn, torch.randn(2, 4), path="joint")


class Counted(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.targets: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.targets[func] += 1
        return func(*args, **(kwargs or {}))


COMPARED = (aten.where.self, aten.clone.default, aten.mm.default, aten._unsafe_view.default)


@pytest.mark.parametrize("pad", [slow(None), 0])
def test_a_llama_without_cache_has_no_mask(pad: int | None) -> None:
    """Transformers looks at positions, and with a padding token at the batch."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, pad_token_id=pad,
    )  # fmt: skip
    model, ids = transformers.LlamaForCausalLM(config).train(), torch.randint(1, 64, (2, 16))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss

    traced, compiled = (
        Counter(node.target for node in trace_step(model, loss, ids, path=path).gm.graph.nodes)
        for path in ("eager", None)
    )
    with Counted() as eager:
        loss(model, ids).backward()
    assert compiled[aten.where.self]
    assert [traced[each] for each in COMPARED] == [eager.targets[each] for each in COMPARED]
