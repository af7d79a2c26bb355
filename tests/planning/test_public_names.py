"""What people call operations: the register of what they are traced as, held against traces, and what a rule that
matches nothing says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
import torch._inductor.lowering  # some decompositions of Inductor take it for imported
import torch.nn.functional as F
from functorch.compile import aot_function, default_partition
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table

import policylang
from policylang.graph.blocks import blocks_of
from policylang.graph.chains import Chains
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.names import NEVER_TRACED, TRACED_AS, traced_texts
from policylang.language.operators import selector_of_groups
from policylang.planning.capabilities import Capabilities
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Selections
from tests.support.textgraph import facts_of

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
    "matmul": lambda x, w, b: torch.matmul(x, w),
    "einsum": lambda x, w, b: torch.einsum("bsd,de->bse", x, w),
    "flash_attention": lambda x, w, b: F.scaled_dot_product_attention(*[x[:, None]] * 3),
    "log_softmax": lambda x, w, b: F.log_softmax(x, -1),
    "group_norm": lambda x, w, b: F.group_norm(x, 4),
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.zeros(8), torch.ones(8), training=True),
    "instance_norm": lambda x, w, b: F.instance_norm(x),
    "normalize": lambda x, w, b: F.normalize(x, dim=-1),
    "nll_loss": lambda x, w, b: F.nll_loss(x.reshape(-1, WIDTH), _labels()),
    "mse_loss": lambda x, w, b: F.mse_loss(x, x * 2),
    "l1_loss": lambda x, w, b: F.l1_loss(x, x * 2),
    "bce_with_logits": lambda x, w, b: F.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "conv1d": lambda x, w, b: F.conv1d(x, w[:8, :8, None]),
    "max_pool2d": lambda x, w, b: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x, w, b: F.avg_pool2d(x, 2),
    "adaptive_avg_pool2d": lambda x, w, b: F.adaptive_avg_pool2d(x, 1),
    "masked_fill": lambda x, w, b: x.masked_fill(torch.ones(WIDTH, dtype=torch.bool), 0.0),
    "cat": lambda x, w, b: torch.cat([x, x], -1),
    "stack": lambda x, w, b: torch.stack([x, x]),
    "chunk": lambda x, w, b: x.chunk(2, -1)[0] * 1,
    "reshape": lambda x, w, b: x.reshape(-1) * 1,
    "flatten": lambda x, w, b: x.flatten() * 1,
    "transpose": lambda x, w, b: x.transpose(0, 1) * 1,
    "contiguous": lambda x, w, b: x.transpose(0, 1).contiguous(),
    "float": lambda x, w, b: x.bfloat16().float(),
    "rsub": lambda x, w, b: 1 - x,
    "std": lambda x, w, b: x.std(-1),
    "repeat_interleave": lambda x, w, b: x.repeat_interleave(2, 1),
    "repeat": lambda x, w, b: x.repeat(2, 1, 1),
    "square": lambda x, w, b: x.square(),
    "index_select": lambda x, w, b: x.index_select(0, torch.zeros(2, dtype=torch.long)),
    "logsumexp": lambda x, w, b: x.logsumexp(-1),
    "relu6": lambda x, w, b: F.relu6(x),
    "logsigmoid": lambda x, w, b: F.logsigmoid(x),
}
ACTIVATIONS: Mapping[str, Function] = {
    "gelu": COMMON["gelu"],
    "silu": COMMON["silu"],
    "relu": lambda x, w, b: F.relu(x),
    "gelu_tanh": lambda x, w, b: F.gelu(x, approximate="tanh"),
    "mish": lambda x, w, b: F.mish(x),
}
SIGMOIDS = ("sigmoid", "tanh", "hardsigmoid", "hardswish")
OTHER_ACTIVATIONS: Mapping[str, Function] = {
    **{
        name: (lambda x, w, b, name=name: getattr(F, name)(x))
        for name in [
            "sigmoid",
            "tanh",
            "leaky_relu",
            "elu",
            "celu",
            "selu",
            "softplus",
            "hardsigmoid",
            "hardswish",
            "glu",
        ]
    },
    "prelu": lambda x, w, b: F.prelu(x, b[:8]),
    "by hand": lambda x, w, b: x * torch.sigmoid(1.702 * x),
    "gelu of GPT-2": lambda x, w, b: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0)))),
}


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
    assert details("save linear", facts_of("%x = input\n---\n%b = aten.mul.Tensor(%x)\noutput(%b)")) == (
        "linear: 0 nodes",
    )
