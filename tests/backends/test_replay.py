"""A partition's forward, compiled a second time under ``replay.apl``, is partitioned as it was the first time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table

import policylang
from policylang import PolicyGraphError, PolicyMatchError
from policylang.backends.finalize import mark_saved
from policylang.backends.joint import Partition, _saved_marks, partitions
from policylang.backends.recompilable import recompilable
from policylang.graph import marks
from policylang.graph.facts import Phase
from policylang.graph.marks import from_annotation
from policylang.language.syntax import Policy
from policylang.operators.names import AUTOGRAD_COPIES
from policylang.planning.liveness import SavedForBackward
from tests.support.models import ZOO, Example, dropout, gpt2, llama, mixtral, resnet
from tests.support.twice import aot_eager, partition_by, partitioned_once

pytestmark = pytest.mark.usefixtures("nothing_compiled")

SAVE_PRODUCTS = "recompute everything; optional save matmul or attention"
SAVE_ALL = "save everything"


def one_layer() -> Example:
    return llama(layers=1)


class First(NamedTuple):
    """A first step and all that went through the compiled graph."""

    example: Example
    partition: Partition
    num_fwd_outputs: int
    arguments: tuple[Any, ...]
    loss: Tensor
    gradients: list[Tensor | None]


@cache
def first_step(make: Callable[[], Example], policy: str) -> First:
    """Shared by tests that change nothing of it; ``first_step.__wrapped__`` makes another."""
    example = make()
    module, inputs, loss_fn = example
    losses: list[Tensor] = []

    def step(backend: Callable[..., Any]) -> None:
        torch.manual_seed(3)
        losses.append(loss_fn(torch.compile(module, backend=backend, fullgraph=True)(*inputs)))
        losses[0].backward()

    once = partitioned_once(step, policy)
    return First(example, *once, losses[0].detach(), taken_gradients(example))


def taken_gradients(example: Example) -> list[Tensor | None]:
    gradients = [parameter.grad for parameter in example.module.parameters()]
    example.module.zero_grad(set_to_none=True)
    return gradients


def second_step(first: First, backend: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The same step through the recompiled forward."""
    module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
    torch.manual_seed(3)
    (output,) = torch.compile(module, backend=backend, fullgraph=True)(*first.arguments)
    loss = first.example.loss_fn(output)
    loss.backward()
    return loss.detach(), taken_gradients(first.example)


def saved_values(partition: Partition) -> list[tuple[str, str, Any]]:
    facts = partition.plan.facts
    rows = [facts.index[name] for name in partition.audit.saved]
    return [(facts.targets[row], facts.modules[row], facts.shapes[row]) for row in rows]


def saved_memory(partition: Partition) -> Counter[tuple[str, int, str]]:
    """What is kept alive, by module, bytes and type: the same whatever the operators and views are called.

    A copy that autograd kept counts as the value it is of: a ``clone`` of what was then written to in the model's code
    is not made in a forward that writes to nothing.
    """
    facts = partition.plan.facts
    roots = facts.storage_roots
    kept: set[int] = set()
    for name in partition.audit.saved:
        row = roots[facts.index[name]]
        if facts.targets[row] in AUTOGRAD_COPIES and all(
            facts.phases[user] == Phase.BACKWARD for user in facts.users[row]
        ):
            row = roots[facts.inputs[row][0]]
        if facts.ops[row] == "call_function":
            kept.add(row)
    return Counter((facts.modules[row], facts.bytes[row], facts.dtypes[row]) for row in kept)


def replay() -> Policy:
    return policylang.load("replay")


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        (one_layer, SAVE_PRODUCTS),
        (one_layer, SAVE_ALL),
        pytest.param(llama, SAVE_PRODUCTS, marks=pytest.mark.slow),
        pytest.param(llama, SAVE_ALL, marks=pytest.mark.slow),
        pytest.param(gpt2, SAVE_PRODUCTS, marks=pytest.mark.slow),
        pytest.param(gpt2, SAVE_ALL, marks=pytest.mark.slow),
        pytest.param(mixtral, SAVE_PRODUCTS, marks=pytest.mark.slow),
        pytest.param(ZOO["qwen3"], SAVE_ALL, marks=pytest.mark.slow),
        (ZOO["mlp"], SAVE_ALL),
        (ZOO["shared_parameters"], SAVE_PRODUCTS),
    ],
)
def test_the_second_partition_is_the_first(model: Callable[[], Example], policy: str) -> None:
    first = first_step(model, policy)
    with partitions() as done:
        loss, gradients = second_step(first, policylang.backend(replay(), inner="aot_eager"))
    (second,) = done
    assert saved_values(second) == saved_values(first.partition)
    assert second.audit.saved_bytes == first.partition.audit.saved_bytes
    assert torch.equal(loss, first.loss)
    for again, before in zip(gradients, first.gradients, strict=True):
        assert (again is None) == (before is None)
        assert again is None or torch.equal(again, before)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        (one_layer, SAVE_ALL),
        (one_layer, SAVE_PRODUCTS),
        pytest.param(gpt2, SAVE_ALL, marks=pytest.mark.slow),
        (ZOO["dropout"], SAVE_PRODUCTS),
    ],
)
def test_the_same_memory_is_saved_under_the_decompositions_of_inductor(
    model: Callable[[], Example], policy: str
) -> None:
    first = first_step(model, policy)
    done: list[Partition] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return aot_eager(gm, inputs, partition_by(replay(), done), select_decomp_table())

    second_step(first, backend)
    assert set(done[0].plan.facts.targets) != set(first.partition.plan.facts.targets)
    assert saved_memory(done[0]) == saved_memory(first.partition)
    assert done[0].audit.saved_bytes == first.partition.audit.saved_bytes


@pytest.mark.parametrize(
    ("model", "policy", "inner"),
    [
        pytest.param(mixtral, SAVE_ALL, "aot_eager", marks=pytest.mark.slow),
        (ZOO["mlp"], SAVE_ALL, "inductor"),
        pytest.param(one_layer, SAVE_ALL, "inductor", marks=pytest.mark.slow),
        pytest.param(gpt2, SAVE_ALL, "inductor", marks=pytest.mark.slow),
        pytest.param(mixtral, SAVE_ALL, "inductor", marks=pytest.mark.slow),
    ],
)
def test_the_same_memory_is_saved_where_operators_are_decomposed(
    model: Callable[[], Example], policy: str, inner: Any
) -> None:
    """Inductor decomposes SiLU, GELU, softmax and layer norms, and drops views that change nothing."""
    first = first_step(model, policy)
    with partitions() as done, inductor_config.patch(force_disable_caches=True, fallback_random=True):
        loss, gradients = second_step(first, policylang.backend(replay(), inner=inner))
    (second,) = done
    assert saved_memory(second) == saved_memory(first.partition)
    assert second.audit.saved_bytes == first.partition.audit.saved_bytes
    torch.testing.assert_close((loss, gradients), (first.loss, first.gradients))


def test_a_module_called_twice_in_one_graph_saves_twice() -> None:
    """Both calls carry the same records."""
    first = first_step(ZOO["mlp"], "recompute everything; save addmm")
    module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)

    def twice(*arguments: Any) -> Tensor:
        others = [value if isinstance(value, nn.Parameter) else value.cos() for value in arguments]
        return module(*arguments)[0].sum() + module(*others)[0].sum()

    with partitions() as done:
        torch.compile(twice, backend=policylang.backend(replay(), inner="aot_eager"), fullgraph=True)(*first.arguments)
    once = Counter(saved_values(first.partition))
    assert once
    assert Counter(saved_values(done[0])) == once + once


def test_a_record_that_is_lost_is_an_error_and_not_a_smaller_partition() -> None:
    first = first_step(one_layer, SAVE_ALL)
    module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
    (victim,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.silu.default)
    del victim.meta["custom"]
    with pytest.raises(PolicyMatchError) as caught:
        torch.compile(module, backend=policylang.backend(replay(), inner="aot_eager"))(*first.arguments)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL310"
    assert diagnostic.span.text == "everything where recorded saved"
    assert "`silu` is lost" in diagnostic.message
    assert diagnostic.details == ("silu: no forward node of this graph was traced from it",)


def test_a_tuple_saved_in_part_is_an_error() -> None:
    """Min-cut may save one piece of an operator and run it again for another."""
    first = first_step.__wrapped__(one_layer, SAVE_PRODUCTS)
    facts = first.partition.plan.facts
    piece, *_ = (facts.index[name] for name in first.partition.audit.saved if name.startswith("getitem"))
    needs = SavedForBackward.of(saved=(piece,), recomputed=(facts.owners[piece],))
    mark_saved(first.partition.forward.graph, _saved_marks(facts, needs))
    module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
    with pytest.raises(PolicyMatchError, match="scaled_dot_product_flash_attention_for_cpu` is lost") as caught:
        torch.compile(module, backend=policylang.backend(replay(), inner="aot_eager"))(*first.arguments)
    (line,) = next(found for found in caught.value.diagnostics if found.code == "APL310").details
    assert "some of its values were saved and others recomputed" in line


@pytest.mark.slow
def test_autograd_sums_in_its_own_order_the_second_time() -> None:
    """BART reads its embedding in three places. The second differentiation adds the three gradients in another order,
    with any partitioner; the replayed partition is then compared with one that saves what autograd saves."""
    first = first_step(ZOO["bart"], SAVE_PRODUCTS)
    with partitions() as done:
        _, gradients = second_step(first, policylang.backend(replay(), inner="aot_eager"))
    torch._dynamo.reset()
    _, plain = second_step(first, "aot_eager_default_partitioner")
    assert saved_values(done[0]) == saved_values(first.partition)
    for again, other in zip(gradients, plain, strict=True):
        assert again is None or torch.equal(again, other)


def test_dropout_draws_for_itself_again() -> None:
    """The first forward keeps generator states; the recompiled one draws where they were drawn."""
    first = first_step(dropout, SAVE_PRODUCTS)
    assert first.partition.audit.random_states == 2
    module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
    targets = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    assert "run_and_save_rng_state" not in targets
    loss, gradients = second_step(first, policylang.backend(replay(), inner="aot_eager"))
    assert torch.equal(loss, first.loss)
    for again, before in zip(gradients, first.gradients, strict=True):
        assert torch.equal(again, before)


def test_the_record_lies_on_the_operator_of_a_tuple() -> None:
    first = first_step(one_layer, SAVE_PRODUCTS)
    module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
    (attention,) = (node for node in module.graph.nodes if "scaled_dot_product" in node.name)
    record = from_annotation(marks.custom(attention.meta)[marks.SAVED])
    assert (record.name, record.value, record.several, record.partly) == (attention.name, True, True, False)
    assert not any(marks.SAVED in marks.custom(piece.meta) for piece in attention.users)


def test_the_forward_is_left_as_it_was() -> None:
    first = first_step(one_layer, SAVE_PRODUCTS)
    forward = first.partition.forward
    before = [(node.name, dict(marks.custom(node.meta))) for node in forward.graph.nodes]
    module = recompilable(forward, num_fwd_outputs=first.num_fwd_outputs)
    assert [(node.name, dict(marks.custom(node.meta))) for node in forward.graph.nodes] == before
    assert not any(marks.is_ours(node.meta) or "recompute" in node.meta for node in module.graph.nodes)


def test_nothing_recorded_is_an_error_and_not_full_recomputation() -> None:
    module, inputs, loss_fn = ZOO["mlp"]()
    loss = loss_fn(torch.compile(module, backend=policylang.backend(replay(), inner="aot_eager"))(*inputs))
    with pytest.raises(PolicyMatchError) as caught:
        loss.backward()
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL301"
    assert "where recorded saved" in diagnostic.message


def test_a_forward_that_updates_a_buffer_is_refused() -> None:
    first = first_step(resnet, "optional recompute everything; optional save aten.convolution")
    with pytest.raises(PolicyGraphError) as caught:
        recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL326"
    assert "aten._native_batch_norm_legit_functional.default" in diagnostic.message
