"""``replay.apl`` repeats the first partition of models with checkpoints of their own: their tags travel along."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import policylang
from policylang import PolicyMatchError
from policylang.backends.joint import Partition
from tests.support.drawn import examples
from tests.support.sharded import fake_ranks
from tests.support.twice import compiled_twice, partition_by, partitioned_twice

pytestmark = pytest.mark.usefixtures("nothing_compiled")

Function = Callable[..., Tensor]


def arguments() -> list[Tensor]:
    return [torch.randn(8, 8, requires_grad=True) for _ in range(3)]


def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.silu(x @ first) @ second


def normed(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, (8,)) @ first) @ second


def split(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    up, gate = (x @ torch.cat([first, second], 1)).chunk(2, -1)
    return torch.softmax(gate.view(2, 4, 8).transpose(1, 2).reshape(8, 8), -1) * up.tanh()


def kept(function: Function, **options: Any) -> Function:
    return partial(checkpoint, function, use_reentrant=False, **options)


def save_products(context: Any, called: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    saves = called is torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def selective(function: Function) -> Function:
    return kept(function, context_fn=partial(create_selective_checkpoint_contexts, save_products))


def one(inner: Function) -> Function:
    return lambda x, first, second: kept(inner)(x, first, second).sin()


def several(inner: Function) -> Function:
    return lambda x, first, second: kept(inner)(selective(inner)(x, first, second), first, second).sin()


def nested(inner: Function) -> Function:
    def outer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return kept(inner)(x, first, second) * 2 + selective(inner)(x.cos(), first, second)

    return lambda x, first, second: kept(outer)(x, first, second).sin()


def beside(inner: Function) -> Function:
    return lambda x, first, second: inner(kept(inner)(inner(x, first, second), first, second), second, first)


def same(first: Partition, second: Partition) -> None:
    """What the second compilation keeps is what the first one kept, whatever its operators are called."""
    assert second.audit.saved_bytes == first.audit.saved_bytes
    assert second.audit.random_states == first.audit.random_states
    assert values(first, "shapes", "dtypes") == values(second, "shapes", "dtypes")


def values(made: Partition, *columns: str) -> list[tuple[Any, ...]]:
    facts = made.plan.facts
    rows = [facts.index[name] for name in made.audit.saved]
    return sorted(tuple(str(getattr(facts, column)[row]) for column in columns) for row in rows)


FIRST = (
    "override save mm",
    "override save everything",
    "override must_recompute everything\noverride save mm",
    "optional override save silu or tanh or aten.add",
    "optional save everything\noverride leave mm",
)


@pytest.mark.parametrize("policy", FIRST)
@pytest.mark.parametrize("shape", [one, several, nested, beside])
def test_what_the_first_partition_saved_is_saved(shape: Callable[[Function], Function], policy: str) -> None:
    first, second = partitioned_twice(shape(block), arguments(), policylang.parse(policy))
    assert first.audit.saved
    same(first, second)
    assert values(first, "targets", "shapes") == values(second, "targets", "shapes")


@pytest.mark.parametrize("policy", FIRST)
def test_so_it_is_under_the_decompositions_of_inductor(policy: str) -> None:
    made = partitioned_twice(
        several(block), arguments(), policylang.parse(policy), decompositions=select_decomp_table()
    )
    same(*made)


_INNER = st.sampled_from([block, normed, split])
_WRAP = st.sampled_from([kept, selective, lambda inner: inner])
_ACTIONS = st.sampled_from(["save", "recompute", "must_recompute", "prefer_save", "leave"])
_WHAT = st.sampled_from(
    ["everything", "mm", "where bytes >= 256 B", "where is view", "where user tagged", "silu or tanh", "pointwise"]
)


@st.composite
def _functions(draw: st.DrawFn) -> Function:
    """A line of blocks, each as it is, in a checkpoint, in a selective one, and these in one another."""
    layers: list[Function] = []
    for _ in range(draw(st.integers(1, 3))):
        layer = draw(_WRAP)(draw(_INNER))
        layers.append(draw(_WRAP)(layer))

    def function(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x, first, second)
        return x.sin()

    return function


@st.composite
def _policies(draw: st.DrawFn) -> str:
    lines = []
    for _ in range(draw(st.integers(0, 3))):
        what = draw(_WHAT)
        selector = f"everything {what}" if what.startswith("where") else what
        override = draw(st.sampled_from(["", "override "]))
        lines.append(f"optional {override}{draw(_ACTIONS)} {selector}")
    return "\n".join([*lines, f"undecided -> {draw(st.sampled_from(['auto', 'save', 'recompute']))}"])


@settings(max_examples=examples(6, 15))
@given(function=_functions(), policy=_policies(), decomposed=st.booleans())
def test_random_models_under_random_policies(function: Function, policy: str, decomposed: bool) -> None:
    torch._dynamo.reset()
    table = select_decomp_table() if decomposed else None
    done: list[Partition] = []
    refused: list[str] = []
    try:
        partitioned_twice(function, arguments(), policylang.parse(policy), decompositions=table, done=done)
    except PolicyMatchError as error:
        refused = [found.code for found in error.diagnostics]
    if done[0].audit.saved:
        same(*done)
    else:  # nothing was recorded, which cannot be told from a record that is lost
        assert refused == ["APL301"]


def test_a_rule_that_the_tags_outrank_is_an_error() -> None:
    again = policylang.parse("recompute everything\nsave everything where recorded saved")
    with pytest.raises(PolicyMatchError) as caught:
        partitioned_twice(one(block), arguments(), policylang.parse("override save mm"), again)
    (diagnostic,) = [found for found in caught.value.diagnostics if found.code == "APL317"]
    assert diagnostic.span.text == "save everything where recorded saved"
    assert diagnostic.details == ("mm", "mm_1")
    assert diagnostic.help == "write `override save everything where recorded saved`"


def test_where_the_tags_say_the_same_no_override_is_needed() -> None:
    again = policylang.parse("recompute everything\nsave everything where recorded saved")
    first, second = partitioned_twice(
        lambda *given: selective(block)(*given).sin(), arguments(), policylang.parse("undecided -> save"), again
    )
    assert first.audit.saved
    same(first, second)


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("shape", [several, nested, beside])
def test_the_record_of_another_partitioner_is_read_by_its_annotation(
    shape: Callable[[Function], Function], decomposed: bool
) -> None:
    """As AutoParallel does it: what the first forward returns is annotated, of a tuple the operator."""
    from functorch.compile import min_cut_rematerialization_partition

    saved: list[int] = []

    def first(gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        halves = min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs)
        returned = halves[0].graph.output_node().args[0]
        kept = [node for node in returned[num_fwd_outputs:] if node.op == "call_function"]
        saved.extend(node.meta["val"].untyped_storage().nbytes() for node in kept)
        for node in (*returned[:num_fwd_outputs], *kept):
            maker = node.args[0] if node.target is operator.getitem else node
            maker.meta["custom"] = {**maker.meta.get("custom", {}), "ap_must_save": True}
        return halves

    again = policylang.parse("override recompute everything\noverride save everything where annotated ap_must_save")
    done: list[Partition] = []
    table = select_decomp_table() if decomposed else None
    compiled_twice(shape(normed), arguments(), first, partition_by(again, done), decompositions=table)
    assert saved
    assert done[0].audit.saved_bytes == sum(saved)


@pytest.mark.parametrize("policy", ["fsdp_reshard_never", "fsdp_reshard_always"])
def test_gathered_weights_are_gathered_as_often_as_in_the_first_backward(policy: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        weights = [
            torch.nn.Parameter(distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)], src_data_rank=None))
            for _ in range(3)
        ]

        def layer(x: Tensor, weight: Any) -> Tensor:
            return (x @ weight.redistribute(placements=[Replicate()]).to_local()).relu()

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weights = torch.nn.ParameterList(weights)

            def forward(self, x: Tensor) -> Tensor:
                for weight in self.weights:
                    x = checkpoint(layer, x, weight, use_reentrant=False)
                return x

        text = f"optional save mm\ninclude <{policy}>"
        first, second = partitioned_twice(Model(), [torch.randn(4, 16, requires_grad=True)], policylang.parse(text))
    assert gathers(first) == gathers(second)
    assert gathers(first)[1] == (0 if policy == "fsdp_reshard_never" else 3)
    same(first, second)


def gathers(made: Partition) -> tuple[int, int]:
    halves = (made.forward, made.backward)
    forward, backward = (sum("all_gather" in node.name for node in half.graph.nodes) for half in halves)
    return forward, backward


def test_a_derivative_that_min_cut_has_moved_into_the_forward_is_saved_again() -> None:
    """The cosine of a sine at the end: autograd's hooks saw it in a backward, and the first forward made it."""
    policy = policylang.parse("optional override save everything\noptional override leave mm\nundecided -> auto")
    first, second = partitioned_twice(lambda *given: normed(*given).sin(), arguments(), policy)
    assert "cos" in first.audit.saved
    same(first, second)
