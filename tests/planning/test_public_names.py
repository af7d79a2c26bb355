"""What people call operations, sizes that come from data, and paths by name: registers, held against traces."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
import torch._inductor.lowering  # some decompositions of Inductor take it for imported
import torch.nn.functional as F
from functorch.compile import aot_function, default_partition
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table

import policylang
from policylang.api.planned_graphs import facts_of as facts_of_graph
from policylang.commands.small_llama import step_memory
from policylang.graph.blocks import Chains, blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.loader import parse_policy
from policylang.language.names import NEVER_TRACED, TRACED_AS, traced_texts
from policylang.language.operators import selector_of_groups
from policylang.planning.capabilities import EAGER, HOOK, PLANNED, Capabilities, path_entry
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.order.statements import cannot_order
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Selections
from tests.support import models
from tests.support.models import Layers
from tests.support.textgraph import facts_of
from tests.support.versions import needs_traced_generators

Function = Callable[[Tensor, Tensor, Tensor], Tensor]
WIDTH = 16
WHOLE, TAKEN_APART = False, True
"""Without decompositions, as eager checkpoints and traced steps see a forward, and with Inductor's, as its backend
does."""


def _labels() -> Tensor:
    return torch.zeros(WIDTH, dtype=torch.long)


COMMON: Mapping[str, Function] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "softmax": lambda x, w, b: F.softmax(x, -1),
    "dropout": lambda x, w, b: F.dropout(x, 0.1),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (WIDTH,), b),
    "layer_norm": lambda x, w, b: F.layer_norm(x, (WIDTH,), b, b),
    "gelu": lambda x, w, b: F.gelu(x),
    "silu": lambda x, w, b: F.silu(x),
    "sdpa": lambda x, w, b: F.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True),
    "conv2d": lambda x, w, b: F.conv2d(x[None], w[:2, :2, None, None]),
    "cross_entropy": lambda x, w, b: F.cross_entropy(x.reshape(-1, WIDTH), _labels()),
    "embedding": lambda x, w, b: F.embedding(_labels(), w),
}
OTHERS: Mapping[str, Function] = {
    "matmul": lambda x, w, b: torch.matmul(x, w), "einsum": lambda x, w, b: torch.einsum("bsd,de->bse", x, w),
    "flash_attention": lambda x, w, b: F.scaled_dot_product_attention(*[x[:, None]] * 3),
    "log_softmax": lambda x, w, b: F.log_softmax(x, -1), "group_norm": lambda x, w, b: F.group_norm(x, 4),
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x), "normalize": lambda x, w, b: F.normalize(x, dim=-1),
    "nll_loss": lambda x, w, b: F.nll_loss(x.reshape(-1, WIDTH), _labels()),
    "mse_loss": lambda x, w, b: F.mse_loss(x, x * 2), "l1_loss": lambda x, w, b: F.l1_loss(x, x * 2),
    "bce_with_logits": lambda x, w, b: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "conv1d": lambda x, w, b: F.conv1d(x, w[:8, :8, None]), "max_pool2d": lambda x, w, b: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x, w, b: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, w, b: F.adaptive_avg_pool2d(x, 1),
    "masked_fill": lambda x, w, b: x.masked_fill(torch.ones(WIDTH, dtype=torch.bool), 0.0),
    "cat": lambda x, w, b: torch.cat([x, x], -1), "stack": lambda x, w, b: torch.stack([x, x]),
    "chunk": lambda x, w, b: x.chunk(2, -1)[0] * 1, "reshape": lambda x, w, b: x.reshape(-1) * 1,
    "flatten": lambda x, w, b: x.flatten() * 1, "transpose": lambda x, w, b: x.transpose(0, 1) * 1,
    "contiguous": lambda x, w, b: x.transpose(0, 1).contiguous(), "float": lambda x, w, b: x.bfloat16().float(),
    "rsub": lambda x, w, b: 1 - x, "std": lambda x, w, b: x.std(-1),
    "repeat_interleave": lambda x, w, b: x.repeat_interleave(2, 1), "repeat": lambda x, w, b: x.repeat(2, 1, 1),
    "square": lambda x, w, b: x.square(),
    "index_select": lambda x, w, b: x.index_select(0, torch.zeros(2, dtype=torch.long)),
    "logsumexp": lambda x, w, b: x.logsumexp(-1), "relu6": lambda x, w, b: F.relu6(x),
    "logsigmoid": lambda x, w, b: F.logsigmoid(x),
}  # fmt: skip
ACTIVATIONS: Mapping[str, Function] = {
    "gelu": COMMON["gelu"],
    "silu": COMMON["silu"],
    "relu": lambda x, w, b: F.relu(x),
    "gelu_tanh": lambda x, w, b: F.gelu(x, approximate="tanh"),
    "mish": lambda x, w, b: F.mish(x),
}
OTHER_ACTIVATIONS: Mapping[str, Function] = {
    **{
        name: (lambda x, w, b, name=name: getattr(F, name)(x))
        for name in [
            "sigmoid", "tanh", "leaky_relu", "elu", "celu", "selu", "softplus", "hardsigmoid", "hardswish", "glu",
        ]
    },
    "prelu": lambda x, w, b: F.prelu(x, b[:8]),
    "by hand": lambda x, w, b: x * torch.sigmoid(1.702 * x),
    "gelu of GPT-2": lambda x, w, b: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0)))),
}  # fmt: skip


@cache
def traced(function: Function, taken_apart: bool, dtype: torch.dtype = torch.float32) -> Facts:
    """The joint graph of one function, as a partitioner is handed it."""
    seen: list[fx.GraphModule] = []

    def partition(gm: fx.GraphModule, joint_inputs: object, **options: object) -> object:
        seen.append(gm)
        return default_partition(gm, joint_inputs, **options)

    shapes = ((2, 8, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    given = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
    table = select_decomp_table() if taken_apart else None
    aot_function(function, lambda gm, _: gm, partition_fn=partition, decompositions=table)(*given)
    return collect(seen[0])


def count(facts: Facts, text: str) -> int:
    return len(Selections(facts, {}, blocks_of(facts, None), Chains(facts)).rows(selector_of_groups(text)))


@pytest.mark.parametrize("taken_apart", [WHOLE, TAKEN_APART])
def test_common_names_are_traced_as_the_register_says(taken_apart: bool) -> None:
    for name, function in COMMON.items():
        assert any(count(traced(function, taken_apart), text) for text in traced_texts(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("taken_apart", [WHOLE, TAKEN_APART])
def test_all_names_are_traced_as_the_register_says(taken_apart: bool) -> None:
    for name, function in {**OTHERS, **ACTIVATIONS, **OTHER_ACTIVATIONS}.items():
        texts = traced_texts(name)
        assert not texts or any(count(traced(function, taken_apart), text) for text in texts), name
    assert sum(bool(traced_texts(name)) for name in (*OTHERS, *ACTIVATIONS, *OTHER_ACTIVATIONS)) > 40


def test_every_row_of_the_register_can_be_read() -> None:
    for texts in TRACED_AS.values():
        assert texts
        for text in texts:
            selector_of_groups(text)
            assert policylang.parse(f"save {text}").rules


@pytest.mark.parametrize("taken_apart", [WHOLE, TAKEN_APART])
def test_operators_that_graphs_seldom_hold_are_in_none_of_these(taken_apart: bool) -> None:
    graphs = [traced(function, taken_apart) for function in COMMON.values()]
    held = {target.split(".")[1] for facts in graphs for target in facts.by_target if target.startswith("aten.")}
    assert held & NEVER_TRACED == set()
    assert all(traced_texts(name) for name in NEVER_TRACED)


@pytest.mark.parametrize("taken_apart", [WHOLE, TAKEN_APART])
def test_an_activation_is_one_node_on_every_path(taken_apart: bool) -> None:
    for name, function in ACTIVATIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            facts = traced(function, taken_apart, dtype)
            assert count(facts, "activation") == 1, (name, dtype)
            (row,) = Selections(facts, {}, blocks_of(facts, None), Chains(facts)).rows(selector_of_groups("activation"))
            assert facts.dtypes[row] == str(dtype).removeprefix("torch."), name


@pytest.mark.slow
@pytest.mark.parametrize("taken_apart", [WHOLE, TAKEN_APART])
def test_further_activations_are_one_node_on_every_path(taken_apart: bool) -> None:
    for name, function in OTHER_ACTIVATIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            assert count(traced(function, taken_apart, dtype), "activation") == 1, (name, dtype)
    for name, function in {**COMMON, **OTHERS}.items():
        if name not in ("gelu", "silu"):
            assert count(traced(function, taken_apart), "activation") == 0, name


# --- what is said ---
NAMED = facts_of("""
    %x = input
    %w = parameter
    %mm = aten.mm.default(%x, %w) layers.0
    %addmm = aten.addmm.default(%mm, %x, %w) layers.0
    %mm_1 = aten.mm.default(%addmm, %w) layers.0
    %neg = aten.neg.default(%mm_1) layers.0
    %exp = aten.exp.default(%neg) layers.0
    %add = aten.add.Tensor(%exp) layers.0
    %div = aten.div.Tensor(%mm_1, %add) layers.0
    %mean = aten.mean.dim(%div)
    %rsqrt = aten.rsqrt.default(%mean)
    %normal = aten.mul.Tensor(%div, %rsqrt)
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t, %div, %normal)
    output(%normal, %b)
""")


def details(text: str, facts: Facts = NAMED) -> tuple[str, ...]:
    made = plan(policylang.parse(text), facts, Capabilities("the test", replays_random=True, undecided="auto"))
    (found,) = [each for each in made.diagnostics if each.code == "APL301"]
    return found.details


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("save linear in block", "linear: 0 nodes; it is traced as `mm` (2 nodes) or `addmm` (1 node) here"),
        ("save aten.linear", "aten.linear: 0 nodes; it is traced as `mm` (2 nodes) or `addmm` (1 node) here"),
        (
            "save silu",
            "silu: 0 nodes; it is decomposed in this graph, into `div fed by (add fed by (exp fed by neg))` (1 node)",
        ),
        ("save rms_norm", "rms_norm: 0 nodes; it is decomposed in this graph, into `mul fed by rsqrt` (1 node)"),
        ("save norm", "norm: 0 nodes; it is decomposed in this graph, into `mul fed by rsqrt` (1 node)"),
        ("expect every linear saved", "linear: 0 nodes; it is traced as `mm` (2 nodes) or `addmm` (1 node) here"),
        ("save embedding", "embedding: 0 nodes"),
        ("save attention", "attention: 0 nodes"),
        ("save linear.default", "linear.default: 0 nodes"),
        ("save all in block", "all: 0 nodes; it is traced as `everything` (10 nodes) here"),
    ],
)
def test_a_rule_that_matches_nothing_says_what_a_name_is_here(text: str, line: str) -> None:
    assert details(text)[0] == line


def test_an_empty_graph_has_no_names_to_offer() -> None:
    backward_alone = facts_of("%x = input\n---\n%b = aten.mul.Tensor(%x)\noutput(%b)")
    assert details("save linear", backward_alone) == ("linear: 0 nodes",)


TOKENS, EXPERT_WIDTH = 96, 16


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(EXPERT_WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(EXPERT_WIDTH, 32), nn.Tanh()) for _ in range(2))
        self.down = nn.Linear(32, EXPERT_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        choice, total = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            total = total.index_add(0, rows, self.down(expert(x[rows])))
        return x + total


def Model() -> Layers:
    torch.manual_seed(0)
    return Layers(Experts(), Experts(), end=lambda x: x.pow(2).mean())


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, EXPERT_WIDTH, generator=torch.Generator().manual_seed(seed))


@cache
def traced_facts() -> Facts:
    return facts_of_graph(policylang.trace_step(Model(), lambda model: model(tokens())))[0]


def said(rules: str) -> list[str]:
    (made,) = policylang.check(policylang.parse(f"save everything\n{rules}"), graph=traced_facts()).plans
    return [each.message for each in made.diagnostics if each.code == "APL350"]


@needs_traced_generators
def test_a_size_counts_as_the_most_that_it_can_be_where_that_is_known() -> None:
    """Not as 4,096 rows, and not below what a step saves."""
    (made,) = policylang.check("save_all", graph=traced_facts()).plans
    under = breakdown(made).under.amounts.saved_bytes
    model, x = Model(), tokens()
    found = step_memory(lambda: model(x), [*model.parameters(), x], torch.device("cpu")).saved
    assert found <= under <= 4 * found


@needs_traced_generators
def test_a_plan_says_by_what_it_counts_and_what_that_may_come_to(tmp_path: Path) -> None:
    file = tmp_path / "experts.graph"
    policylang.snapshot(policylang.trace_step(Model(), lambda model: model(tokens())), file)
    (made,) = policylang.check("save_all", graph=file).plans
    (note,) = breakdown(made).notes
    assert note.startswith("saved counts 12 values by a hint of 96 rows, since their sizes come from data and no load ")
    assert note.endswith(", which may be from 0 B to 75 KiB")


@pytest.mark.parametrize(
    ("rules", "warned"),
    [
        ("expect saved <= 1 GiB", False),  # counted by the most that it can be
        ("expect saved >= 1 KiB", True),
        ("expect peak >= 1 KiB", True),
        ("expect recomputed operators <= 3", False),
        ("expect every tanh saved", False),
    ],
)
@needs_traced_generators
def test_an_expectation_about_such_a_figure_is_warned_of(rules: str, warned: bool) -> None:
    assert bool(said(rules)) is warned
    for message in said(rules):
        assert message.startswith(f"`{rules}` is compared with a figure that counts ")
        assert "by a hint of 96 rows" in message


@needs_traced_generators
def test_one_that_fails_says_so_itself() -> None:
    policy = policylang.parse("save everything\nexpect saved <= 1 KiB")
    found = policylang.check(policy, graph=traced_facts()).diagnostics
    assert any("by a hint of 96 rows" in detail for each in found if each.code == "APL305" for detail in each.details)


def test_in_eager_the_sizes_are_those_of_the_first_call() -> None:
    rules = "recompute everything in block\nsave addmm in experts.0\nexpect saved per block <= 1 MiB"
    model = policylang.checkpoint_model(Model(), policylang.parse(rules))
    for seed in range(3):
        model(tokens(seed)).backward()
    report = policylang.report(model)
    (note,) = (each for each in report.notes if "first call" in each)
    assert "of 2 blocks, the calls so far saved" in note
    least, most = note.rsplit("saved ", 1)[1].split(" to ")
    assert least != most
    assert all("APL350" in warning for warning in report.warnings)
    assert report.warnings
    assert note in json.loads(report.to_json())["notes"]


def test_what_is_picked_by_positions_is_of_a_known_size() -> None:
    picks = Layers(nn.Linear(4, 4), models.Function(lambda x: x[torch.tensor([1, 0, 1])].sin()), end=torch.sum)
    model = policylang.checkpoint_model(picks, policylang.parse("recompute everything in block"))
    model(torch.ones(2, 4)).backward()
    assert not policylang.report(model).notes


def test_a_path_is_found_by_its_name_and_another_word_is_told_the_names() -> None:
    assert [path_entry(name).name for name in PLANNED] == list(PLANNED)
    with pytest.raises(ValueError, match="there is no path `compiled`; there are eager, joint, flat, half, hook"):
        path_entry("compiled")


def test_eager_leaves_to_fsdp_what_fsdp_can_order() -> None:
    policy = parse_policy(
        "bucket all_gather per block; bucket all_gather in block per 2 blocks; bucket reduce_scatter up to 3 MiB\n"
        "prefetch all_gather 2 blocks ahead; delay reduce_scatter 1 block; optional overlap collective\n"
        "keep order of all_to_all"
    ).policy
    refused = cannot_order(policy, EAGER)
    assert [each.span and each.span.text for each in refused] == [
        "bucket all_gather per block",
        "bucket all_gather in block per 2 blocks",
        "bucket reduce_scatter up to 3 MiB",
        "delay reduce_scatter 1 block",
        "keep order of all_to_all",
    ]
    assert {each.code for each in refused} == {"APL306"}
    said = (
        "`fully_shard` gathers", "`fully_shard` gathers", "`fully_shard` gathers", "no call for that", "leave the line",
    )  # fmt: skip
    assert [part in (each.help or "") for part, each in zip(said, refused, strict=True)] == [True] * 5
    assert len(cannot_order(policy, HOOK)) == 6
