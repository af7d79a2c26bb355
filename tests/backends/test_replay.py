"""A forward that is compiled a second time under ``replay.apl`` is partitioned as the first time, tags and all."""

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from functorch.compile import nop
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import policylang
from policylang import PolicyGraphError, PolicyMatchError, PolicyMeaningError
from policylang.audit.report import Report
from policylang.backends.finalize import mark_saved
from policylang.backends.joint import Partition, _saved_marks, partitions
from policylang.backends.recompilable import recompilable
from policylang.graph import marks
from policylang.graph.facts import Phase
from policylang.graph.marks import from_annotation
from policylang.language.syntax import Policy
from policylang.operators.names import AUTOGRAD_COPIES
from policylang.planning.liveness import SavedForBackward
from tests.support import models
from tests.support.compiled import backend_for
from tests.support.drawn import crossed, drawn, slow
from tests.support.flat_graphs import assert_bitwise_equal
from tests.support.late import Late, copied_over
from tests.support.models import ZOO, Example, Layers, dropout, gpt2, llama, mixtral, products, resnet
from tests.support.sharded import fake_ranks
from tests.support.twice import aot_eager, compiled_twice, keep_meta, partition_by, partitioned_once, partitioned_twice
from tests.support.versions import needs_marked_backwards


@pytest.fixture(autouse=True)
def _fresh(nothing_compiled: None) -> Iterator[None]:
    with inductor_config.patch(force_disable_caches=True):
        yield


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
        in_backward = all(facts.phases[user] == Phase.BACKWARD for user in facts.users[row])
        if facts.targets[row] in AUTOGRAD_COPIES and in_backward:
            row = roots[facts.inputs[row][0]]
        if facts.ops[row] == "call_function":
            kept.add(row)
    return Counter((facts.modules[row], facts.bytes[row], facts.dtypes[row]) for row in kept)


def replay() -> Policy:
    return policylang.load("replay")


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        slow(one_layer, SAVE_PRODUCTS), (ZOO["mlp"], SAVE_ALL), slow(ZOO["shared_parameters"], SAVE_PRODUCTS),
        slow(one_layer, SAVE_ALL), slow(llama, SAVE_PRODUCTS), slow(llama, SAVE_ALL), slow(gpt2, SAVE_PRODUCTS),
        slow(gpt2, SAVE_ALL), slow(mixtral, SAVE_PRODUCTS), slow(ZOO["qwen3"], SAVE_ALL),
    ]
)  # fmt: skip
def test_the_second_partition_is_the_first(model: Callable[[], Example], policy: str) -> None:
    first = first_step(model, policy)
    with partitions() as done:
        loss, gradients = second_step(first, policylang.backend(replay(), inner="aot_eager"))
    (second,) = done
    assert saved_values(second) == saved_values(first.partition)
    assert second.audit.saved_bytes == first.partition.audit.saved_bytes
    assert_bitwise_equal([loss, *gradients], [first.loss, *first.gradients])


@pytest.mark.parametrize(
    ("model", "policy"),
    [slow(one_layer, SAVE_ALL), slow(one_layer, SAVE_PRODUCTS), slow(gpt2, SAVE_ALL), (ZOO["dropout"], SAVE_PRODUCTS)],
)
def test_the_same_memory_is_saved_under_the_decompositions_of_inductor(model, policy) -> None:
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
        slow(mixtral, SAVE_ALL, "aot_eager"),
        slow(ZOO["mlp"], SAVE_ALL, "inductor"),
        slow(one_layer, SAVE_ALL, "inductor"),
        slow(gpt2, SAVE_ALL, "inductor"),
        slow(mixtral, SAVE_ALL, "inductor"),
    ],
)
def test_the_same_memory_is_saved_where_operators_are_decomposed(model, policy, inner) -> None:
    """Inductor decomposes SiLU, GELU, softmax and layer norms, and drops views that change nothing."""
    first = first_step(model, policy)
    with partitions() as done, inductor_config.patch(fallback_random=True):
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert_bitwise_equal([loss, *gradients], [first.loss, *first.gradients])


@pytest.mark.slow
def test_the_record_lies_on_the_operator_of_a_tuple_and_the_forward_is_left_as_it_was() -> None:
    first = first_step(one_layer, SAVE_PRODUCTS)
    module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
    (attention,) = (node for node in module.graph.nodes if "scaled_dot_product" in node.name)
    record = from_annotation(marks.custom(attention.meta)[marks.SAVED])
    assert (record.name, record.value, record.several, record.partly) == (attention.name, True, True, False)
    assert not any(marks.SAVED in marks.custom(piece.meta) for piece in attention.users)
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


def arguments() -> list[Tensor]:
    return [torch.randn(8, 8, requires_grad=True) for _ in range(3)]


def block(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return F.silu(x @ first) @ second


def normed(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return x + F.gelu(F.layer_norm(x, (8,)) @ first) @ second


def split(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    up, gate = (x @ torch.cat([first, second], 1)).chunk(2, -1)
    return torch.softmax(gate.view(2, 4, 8).transpose(1, 2).reshape(8, 8), -1) * up.tanh()


Function = Callable[..., Tensor]


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


@pytest.mark.parametrize(("shape", "policy"), crossed([one, several, nested, beside], FIRST))
def test_what_the_first_partition_saved_is_saved(shape: Callable[[Function], Function], policy: str) -> None:
    first, second = partitioned_twice(shape(block), arguments(), policylang.parse(policy))
    assert first.audit.saved
    same(first, second)
    assert values(first, "targets", "shapes") == values(second, "targets", "shapes")


@pytest.mark.parametrize("policy", [FIRST[0], *map(slow, FIRST[1:])])
def test_so_it_is_under_the_decompositions_of_inductor(policy: str) -> None:
    table = select_decomp_table()
    same(*partitioned_twice(several(block), arguments(), policylang.parse(policy), decompositions=table))


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


@drawn(6, 15, function=_functions(), policy=_policies(), decomposed=st.booleans())
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
    texts = ("undecided -> save", "recompute everything\nsave everything where recorded saved")
    policies = map(policylang.parse, texts)
    first, second = partitioned_twice(lambda *given: selective(block)(*given).sin(), arguments(), *policies)
    assert first.audit.saved
    same(first, second)


@pytest.mark.parametrize(("shape", "decomposed"), crossed([several, nested, beside], [False, True]))
def test_the_record_of_another_partitioner_is_read_by_its_annotation(shape, decomposed) -> None:
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


@pytest.mark.parametrize("policy", [slow("fsdp_reshard_never"), "fsdp_reshard_always"])
def test_gathered_weights_are_gathered_as_often_as_in_the_first_backward(policy: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        shards = (distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)], src_data_rank=None) for _ in range(3))

        def layer(x: Tensor, weight: Any) -> Tensor:
            return (x @ weight.redistribute(placements=[Replicate()]).to_local()).relu()

        def forward(model: Any, x: Tensor) -> Tensor:
            for weight in model.weights:
                x = checkpoint(layer, x, weight, use_reentrant=False)
            return x

        model = models.Function(forward, weights=nn.ParameterList(map(nn.Parameter, shards)))
        text = f"optional save mm\ninclude <{policy}>"
        first, second = partitioned_twice(model, [torch.randn(4, 16, requires_grad=True)], policylang.parse(text))
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


OUTER = "blocks layers.*\nrecompute everything\nsave everything in block where crosses block"
WIDTH = 8


# Both halves of a partition traced into one graph and partitioned again, as under a parallelizer: the first backward
# runs forward operators again, with the metadata of the nodes that they repeat.
def residual() -> nn.Module:
    up, down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    return models.Function(lambda block, x: x + block.down(block.up(x).relu().sin()), up=up, down=down)


def split_by(text: str, reports: list[Report]) -> Callable[..., Any]:
    policy = policylang.parse(text)

    def split(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        halves = policylang.partition(gm, joint_inputs, policy=policy, **options)
        reports.append(policylang.report(halves[0]))
        return halves

    return split


def twice(first: str, second: str) -> tuple[list[Report], list[Tensor | None]]:
    """The reports of both partitions, and the gradients of a step."""
    torch.manual_seed(0)
    reports: list[Report] = []
    compiled: list[Callable[..., Any]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        split = split_by(first, reports)
        compiled.append(aot_autograd(fw_compiler=keep_meta, bw_compiler=keep_meta, partition_fn=split)(gm, inputs))
        return compiled[0]

    model = torch.compile(Layers(residual(), residual(), residual()), backend=backend)
    model(torch.randn(WIDTH, WIDTH, requires_grad=True))
    arguments = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(7)]
    split = split_by(second, reports)
    again = aot_function(lambda *values: compiled[0](*values), fw_compiler=nop, bw_compiler=nop, partition_fn=split)
    (result,) = again(*arguments)
    result.sum().backward()
    return reports, [argument.grad for argument in arguments]


@pytest.mark.slow
@needs_marked_backwards
@pytest.mark.parametrize("second", [OUTER, f"{OUTER}\nsave mm in block", "blocks layers.*\nsave sin in block"])
def test_what_the_first_backward_runs_again_is_no_forward_value(second: str) -> None:
    (before, after), found = twice(OUTER, second)
    assert after.forward_nodes == before.forward_nodes - 3  # what autograd kept of each relu is made in the backward
    assert after.blocks == 3
    if second == OUTER:
        assert after.rules[1].matched == before.rules[1].matched == 2
        assert after.saved.bytes == before.saved.bytes
    _, wanted = twice("save everything", "save everything")
    assert_bitwise_equal(found, wanted)


# --- what a partition offloaded is offloaded by the next one, of other sizes too ---
OFFLOADS = "recompute everything\nsave addmm\noffload gelu"
INNER = ["aot_eager", slow("inductor")]


def moved(partition: Any) -> list[tuple[str, Any, int]]:
    facts = partition.plan.facts
    rows = [facts.index[name] for name in partition.audit.offloaded]
    return sorted((facts.modules[row], facts.shapes[row], facts.bytes[row]) for row in rows)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (products, "undecided -> save\noffload mm"),
        slow(ZOO["mlp"], OFFLOADS),
        slow(ZOO["mlp"], "save everything\noffload gelu"),
        slow(one_layer, "recompute everything\nsave mm\noffload attention"),
        slow(one_layer, "undecided -> save\noffload mm, aten.silu"),
    ],
)
def test_the_second_partition_offloads_what_the_first_did(model: Any, text: str, inner: str) -> None:
    """Inductor decomposes GELU, SiLU and softmax: what is moved is what these became."""
    first = first_step(model, text)
    assert first.partition.audit.offloaded
    link = Late(1)
    with partitions() as done, copied_over(link):
        loss, gradients = second_step(first, policylang.backend(replay(), inner=inner))
    (second,) = done
    assert moved(second) == moved(first.partition)
    assert second.audit.saved_bytes == first.partition.audit.saved_bytes
    assert link.out == link.back == len(second.audit.offloaded)
    assert link.pending == []
    if inner == "aot_eager":
        assert torch.equal(loss, first.loss)
        assert all(torch.equal(again, before) for again, before in zip(gradients, first.gradients, strict=True))
    torch.testing.assert_close((loss, gradients), (first.loss, first.gradients))


@pytest.mark.slow
def test_a_piece_of_a_result_is_offloaded_though_other_nodes_are_merged() -> None:
    """A Llama computes its positions twice: the operator itself, no single tensor, cannot leave the device."""
    first = first_step(one_layer, "recompute everything\nsave mm\noffload attention")
    assert first.partition.audit.offloaded == ("getitem", "getitem_1")


def test_another_policy_may_keep_it_on_the_device() -> None:
    first = first_step(ZOO["mlp"], OFFLOADS)
    text = "override recompute everything\noverride save everything where recorded saved"
    with partitions() as done:
        second_step(first, backend_for(text))
    (second,) = done
    assert not second.audit.offloaded
    moved_bytes = sum(size for *_, size in moved(first.partition))
    assert second.audit.saved_bytes == first.partition.audit.saved_bytes + moved_bytes


def test_cuda_graphs_are_refused_only_where_something_was_offloaded() -> None:
    with inductor_config.patch({"triton.cudagraphs": True}):
        second_step(first_step(products, "recompute everything\nsave mm"), policylang.backend(replay()))
        with pytest.raises(PolicyMeaningError, match="copies values to the host") as caught:
            second_step(first_step(products, "undecided -> save\noffload mm"), policylang.backend(replay()))
    assert [each.code for each in caught.value.diagnostics] == ["APL338"]


def test_nothing_is_taken_from_a_forward_whose_record_says_otherwise() -> None:
    """The digest of a partition knows what was moved: a second compilation is cached by it."""
    records = []
    for text in (OFFLOADS, OFFLOADS.replace("offload", "save")):
        first = first_step(ZOO["mlp"], text)
        module = recompilable(first.partition.forward, num_fwd_outputs=first.num_fwd_outputs)
        found = [node.meta["custom"]["policylang_saved"] for node in module.graph.nodes if node.name == "gelu"]
        records += [(each["partition"], each["offloaded"]) for each in found]
    assert [offloaded for _, offloaded in records] == [True, False]
    assert len({partition for partition, _ in records}) == 2


def deep() -> nn.Module:
    return Layers(*(nn.Sequential(nn.Linear(8, 8), models.Function(torch.sin)) for _ in range(3)))


@pytest.mark.parametrize("inner", INNER)
def test_a_graph_of_other_sizes_offloads_as_the_first(inner: str) -> None:
    """Dynamo compiles a second time, with symbolic sizes, and not a third."""
    torch.manual_seed(0)
    model, link = deep(), Late(1)
    policy = "undecided -> recompute\noffload sin"
    compiled = torch.compile(model, backend=backend_for(policy, inner))
    with partitions() as done, copied_over(link):
        for rows in (4, 6, 9):
            x = torch.randn(rows, 8)
            found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
            wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
            torch.testing.assert_close(found, wanted)
    assert [len(each.audit.offloaded) for each in done] == [2, 2]
    assert link.out == link.back == 6


@pytest.mark.parametrize("inner", INNER)
def test_a_second_backward_fetches_again(inner: str) -> None:
    torch.manual_seed(0)
    model, link = deep(), Late(1)
    compiled = torch.compile(model, backend=backend_for("undecided -> recompute\noffload sin", inner))
    with copied_over(link):
        loss = compiled(torch.randn(4, 8)).square().sum()
        once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    assert (link.out, link.back) == (2, 4)
    assert link.pending == []
