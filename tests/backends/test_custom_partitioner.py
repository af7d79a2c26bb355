"""``policylang.partitioner``: Inductor's ``custom_partitioner_fn``, its caches, and AOTAutograd's ``partition_fn``."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.backends.torch_compile import backend
from policylang.errors import PolicyError, PolicyMatchError, PolicyMeaningError
from policylang.graph.facts import GraphKind
from tests.support.models import Function

POLICY = "recompute everything\nsave first mm\n"
SAME_POLICY = "# moves every line\n\nrecompute   everything\nsave first mm"
OTHER_WORD = "recompute everything\nsave last mm\n"


class Products(nn.Module):
    """Its second product is in a module without parameters: no placeholder of the graph tells that one's name. Products
    alone take Inductor no C++ compiler."""

    def __init__(self, name: str = "square", nested: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.name, self.nested = name, nested
        setattr(self, name, Function(lambda x: x @ x.detach()))

    def forward(self, x: Tensor) -> Tensor:
        square, x = getattr(self, self.name), self.linear(x)
        return checkpoint(square, x, use_reentrant=False) if self.nested else square(x)


@pytest.fixture(autouse=True)
def _caches_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def partitioner(text: str, **options: Any) -> backend.PolicyPartitioner:
    return policylang.partitioner(policylang.parse(text), **options)


def gradient(compiled: Callable[[nn.Module], Callable[..., Any]], model: nn.Module | None = None) -> Tensor:
    """Of one step, compiled anew."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = model or Products()
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
    compiled(model)(torch.ones(4, 4)).sum().backward()
    weight = next(model.parameters())
    assert weight.grad is not None
    return weight.grad


def by_options(split: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, options={"custom_partitioner_fn": split})


def by_configuration(split: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        with config.patch(custom_partitioner_fn=split):
            return compile_fx(gm, inputs)

    return lambda model: torch.compile(model, backend=backend)


def hit() -> bool:
    found = counters["aot_autograd"]
    assert found["autograd_cache_hit"] + found["autograd_cache_miss"] == 1
    return bool(found["autograd_cache_hit"])


@pytest.mark.parametrize(
    ("way", "text", "saved"), [(by_options, POLICY, 64), (by_configuration, "recompute everything", 0)]
)
def test_inductor_takes_it_in_either_way_and_does_what_the_policy_says(way: Any, text: str, saved: int) -> None:
    split = partitioner(text)
    torch.testing.assert_close(gradient(way(split)), gradient(lambda model: model))
    report = policylang.report(split)
    assert report.saved.bytes == saved
    assert report.audit.agrees


def test_the_same_policy_hits_and_a_changed_word_misses() -> None:
    cold = gradient(by_options(partitioner(POLICY)))
    assert not hit()
    assert torch.equal(gradient(by_options(partitioner(SAME_POLICY))), cold)
    assert hit()
    gradient(by_configuration(partitioner(POLICY)))
    assert hit()
    gradient(by_options(partitioner(OTHER_WORD)))
    assert not hit()
    gradient(by_options(partitioner(POLICY, root="layers.0")))
    assert not hit()


@pytest.mark.parametrize("nested", [False, True])
def test_a_renamed_module_misses(nested: bool) -> None:
    text = "optional save everything in square; undecided -> recompute"
    gradient(by_options(partitioner(text)), Products("square", nested))
    gradient(by_options(partitioner(text)), Products("square", nested))
    assert hit()
    gradient(by_options(partitioner(text)), Products("other", nested))
    assert not hit()


def test_what_stands_for_it_in_keys_is_its_policy_alone() -> None:
    split = partitioner(POLICY)
    assert isinstance(split, CustomPartitionerFn)
    assert split.uuid() == partitioner(SAME_POLICY).uuid()
    assert pickle.dumps(split) == pickle.dumps(partitioner(SAME_POLICY))
    for other in (partitioner(OTHER_WORD), partitioner(POLICY, root="layers.0")):
        assert split.uuid() != other.uuid()
        assert pickle.dumps(split) != pickle.dumps(other)
    assert copy.deepcopy({"partitioner": split})["partitioner"] is split


def test_graphs_with_rewritten_collectives_are_not_taken_from_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their groups are made when they are partitioned."""
    rewriting, other = partitioner("optional fuse all_gather chains"), partitioner(POLICY)
    before = rewriting.uuid(), other.uuid()
    monkeypatch.setattr(backend, "_THIS_PROCESS", "another")
    assert rewriting.uuid() != before[0]
    assert other.uuid() == before[1]


def test_aot_autograd_takes_it_as_a_partition_function(tmp_path: Path) -> None:
    split = partitioner(POLICY)
    backend = aot_autograd(fw_compiler=lambda gm, _: gm, partition_fn=split)
    found = gradient(lambda model: torch.compile(model, backend=backend))
    assert torch.equal(found, gradient(lambda model: torch.compile(model, backend="aot_eager")))
    assert [rule.decided for rule in policylang.report(split).rules] == [3, 1]
    (written,) = policylang.snapshot(split, tmp_path / "model.graph")
    assert policylang.load_snapshot(written).kind is GraphKind.JOINT


def test_mistakes_are_told_as_they_are() -> None:
    with pytest.raises(PolicyMatchError, match="`save bmm` matches nothing in this graph"):
        gradient(by_options(partitioner("save bmm")))
    with pytest.raises(PolicyMeaningError, match="the option `agree` is True or False"):
        partitioner(POLICY, agree="yes")
    with pytest.raises(PolicyError, match="no policy file"):
        policylang.partitioner("missing.apl")
    with pytest.raises(PolicyError, match="no policy has decided anything here yet"):
        policylang.report(partitioner(POLICY))
