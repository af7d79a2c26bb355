"""`save … as`: what waits is narrow, what comes back is rounded and nothing else, and the plan knows the bytes."""

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import ViTConfig, ViTModel

import policylang
from benchmarks.allocations import step_allocations
from policylang.api.planned_graphs import facts_of
from policylang.audit.graphs import audit_flat
from policylang.backends import copies
from policylang.backends.applied_plans import AppliedPlan
from policylang.backends.flat import FlatPath
from policylang.backends.joint import partitions
from policylang.graph.collect import collect
from policylang.language.syntax import NARROW_BYTES, NarrowForm
from policylang.planning.capabilities import EAGER, JOINT
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.value_outcome import Why, recomputes
from policylang.simulation.memory import estimate_peak, simulate
from policylang.testing import Agreement, agree
from tests.backends import test_chunks as chunks
from tests.graph.captured import flat_of
from tests.support import models
from tests.support.architectures import IMAGES
from tests.support.by_hand import BF16, ROWS8, narrowed_by_hand, rounded
from tests.support.compiled import backend_for
from tests.support.drawn import crossed, examples
from tests.support.flat_graphs import Flat, assert_bitwise_equal, copy_graph, flat_graph
from tests.support.joint import capture_joint
from tests.support.measured import measured, measured_flat
from tests.support.models import MLP, Example, Function, square_loss
from tests.support.random_flat import random_flat
from tests.support.run_partition import Traced, trace
from tests.support.run_partition import traced as zoo_traced

SAVE = "undecided -> save\n"
CROSSING = "recompute everything in block\nsave everything where crosses block"


def applied(flat: Flat, text: str) -> tuple[Flat, AppliedPlan]:
    after = flat.fresh()
    outcome = FlatPath().apply(after.gm, policylang.parse(text))
    after.gm.graph.lint()
    return after, outcome


# --- what a form does to a value --------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("form", [BF16, NarrowForm("float16"), ROWS8, NarrowForm("float8_e5m2", per_row=True)], ids=str)
def test_a_value_comes_back_rounded_with_its_strides(dtype: torch.dtype, form: NarrowForm) -> None:
    torch.manual_seed(0)
    for value in (torch.randn(7, 33), torch.randn(33, 7).t(), torch.randn(2, 3, 5, 8).transpose(1, 2), torch.randn(9)):
        value = (value * torch.logspace(-6, 3, value.shape[-1])).to(dtype)
        parts = copies.narrowed(value, form)
        assert parts[0].dtype is getattr(torch, form.dtype)
        assert sum(part.numel() * part.itemsize for part in parts) == form.bytes(tuple(value.shape), value.numel())
        back = copies.widened(parts, dtype)
        assert back.stride() == value.stride()
        assert torch.equal(back, rounded(value, form))
        unit = torch.finfo(getattr(torch, form.dtype)).eps / 2 + torch.finfo(dtype).eps + torch.finfo(torch.float32).eps
        if form.per_row:  # numbers far below the largest of their row lose bits, as numbers below the smallest normal
            least = value.double().abs().amax(-1, keepdim=True) / torch.finfo(getattr(torch, form.dtype)).max
            floor = least * torch.finfo(getattr(torch, form.dtype)).smallest_normal
            assert ((back - value).double().abs() <= 2 * unit * torch.maximum(value.double().abs(), floor)).all()


def test_large_values_are_narrowed_in_slices_to_the_same_bits() -> None:
    torch.manual_seed(0)
    value = torch.randn(3, 1024, 257).transpose(0, 1)
    assert value.numel() * 4 > copies._SMALL
    assert torch.equal(copies.widened(copies.narrowed(value, ROWS8), torch.float32), rounded(value, ROWS8))


def test_rows_without_a_scale() -> None:
    """Zeros stay zeros. A row that holds an infinity or NaN is converted as it is, and spoils no other row."""
    value = torch.tensor([[0.0, 0.0], [torch.inf, 3.0], [torch.nan, -2.0], [1e-44, 0.0], [1e38, 1.0]])
    for form in (ROWS8, NarrowForm("float8_e5m2", per_row=True)):
        back = copies.widened(copies.narrowed(value, form), torch.float32)
        plain = value.to(getattr(torch, form.dtype)).float()
        for row in (0, 1, 2, 3):
            assert torch.equal(back[row].nan_to_num(7), plain[row].nan_to_num(7))
        assert back[2].isnan().tolist() == [True, False]
        assert back[4, 0] == pytest.approx(1e38, rel=0.07)


# --- the same bits as by hand -----------------------------------------------------------------------------------------
class _ByHand(fx.Interpreter):
    """Runs the graph as it was traced; what the backward reads is what the plan says becomes of it, one value after the
    other: rounded, or computed again of what was rounded."""

    def __init__(self, gm: fx.GraphModule, plan: Plan) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.plan = plan
        self.again: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        row = self.plan.facts.index[n.name]
        if n.op == "call_function" and not self.plan.facts.forward_mask[row]:
            args, kwargs = fx.map_arg((n.args, n.kwargs), self._seen)
            return n.target(*args, **kwargs)
        return super().run_node(n)

    def _seen(self, node: fx.Node) -> Any:
        decision = self.plan.decisions[self.plan.facts.index[node.name]]
        if decision is None or node.op != "call_function":
            return self.env[node]
        if decision.form is not None:
            return rounded(self.env[node], decision.form)
        if recomputes(decision) and node not in self.again:
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._seen)
            self.again[node] = node.target(*args, **kwargs)
        return self.again.get(node, self.env[node])


def by_hand(gm: fx.GraphModule, inputs: Sequence[Any], plan: Plan) -> list[Tensor]:
    torch.manual_seed(7)
    with torch.no_grad():
        return tree_leaves(_ByHand(gm, plan).run(*inputs))  # type: ignore[no-any-return]


FORMS = ("bfloat16", "float16", "float8_e4m3fn per row", "float8_e5m2 per row")
NAMES = ("sin", "mul", "mm", "t", "add", "cos", "clone", "native_dropout", "rand_like", "everything")


@settings(max_examples=examples(40, 2000), suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(0, 63), min_size=24, max_size=90),
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from((*FORMS, ""))), min_size=1, max_size=4),
)
def test_random_graphs_under_random_rules_give_the_bits_of_an_evaluator(drawn, rules) -> None:
    flat = random_flat(drawn)
    text = SAVE + "\n".join(f"optional save {name}{f' as {form}' if form else ''}" for name, form in rules)
    after, outcome = applied(flat, text)
    plan, facts = outcome.plan, outcome.plan.facts
    assert_bitwise_equal(
        [value.nan_to_num() for value in by_hand(flat.fresh().gm, flat.inputs, plan)],
        [value.nan_to_num() for value in after.run()],
    )
    narrowed = [*plan.schedule.forms]
    for row in narrowed:
        of_its_memory = (facts.targets[each] for each, owner in enumerate(facts.owners) if owner == row)
        names = {"everything", *(target.split(".")[1] for target in of_its_memory)}
        last = next((form for name, form in reversed(rules) if name in names), "")
        decision = plan.decisions[row]
        assert decision.form.text == last or decision.reason.startswith("it holds the memory of"), "the last rule wins"
        assert facts.dtypes[row] == "float32"
    assert_kept_as_planned(after.gm, plan)


def assert_kept_as_planned(gm: fx.GraphModule, plan: Plan) -> None:
    """Each narrowed value that the backward reads has one narrow form in the graph, and its bytes are those planned."""
    for row, form in plan.schedule.forms.items():
        narrowing = gm.graph.find_nodes(op="call_function", target=copies.NARROW_OP)
        nodes = [node for node in narrowing if node.args[0].name == plan.facts.names[row]]
        assert len(nodes) <= 1
        for node in nodes:
            assert node.args[2] is getattr(torch, form.dtype)
            parts = [each for each in (node, node.args[1]) if each is not None]
            found = sum(part.meta["val"].numel() * part.meta["val"].itemsize for part in parts)
            assert found == form.bytes(plan.facts.shapes[row] or (), plan.facts.numel[row])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mlp", SAVE + "save gelu, addmm as bfloat16"),
        ("mlp", SAVE + "save everything as float8_e4m3fn per row"),
        ("mlp", "recompute everything\nsave addmm as bfloat16"),
        ("resnet", "undecided -> save\nsave convolution as bfloat16"),
        pytest.param("llama", SAVE + "save everything as bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt2", SAVE + "save matmul as float8_e5m2 per row", marks=pytest.mark.slow),
    ],
)
def test_flat_graphs_give_the_bits_of_narrowing_by_hand(name: str, text: str) -> None:
    flat = flat_of(name)
    after, outcome = applied(flat, text)
    assert outcome.plan.schedule.forms
    assert_bitwise_equal(by_hand(flat.fresh().gm, flat.inputs, outcome.plan), after.run())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mlp", "recompute everything\nsave addmm as bfloat16"),
        pytest.param("gpt2", f"{CROSSING} as float16\nsave native_dropout", marks=pytest.mark.slow),
        pytest.param("llama", "recompute everything\nsave matmul as float8_e4m3fn per row", marks=pytest.mark.slow),
        pytest.param("resnet", SAVE + "save convolution as float8_e5m2 per row", marks=pytest.mark.slow),
        pytest.param("mixtral", "recompute everything\nsave matmul as bfloat16", marks=pytest.mark.slow),
    ],
)
def test_both_halves_give_the_bits_of_narrowing_by_hand(name: str, text: str) -> None:
    graph = zoo_traced(name)
    found = graph.run(text)
    assert found.partition.plan.schedule.forms
    primals = [each.clone() if isinstance(each, Tensor) else each for each in graph.primals]
    expected = by_hand(graph.fresh(), [*primals, *graph.tangents], found.partition.plan)
    for one, other in zip((*found.outputs, *found.gradients), expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


# --- bytes ------------------------------------------------------------------------------------------------------------
LAYERS, WIDTH, LONG = 6, 16, 256
GELU = LONG * 2 * WIDTH * 4


wide = partial(models.mlp, LAYERS, WIDTH, LONG)
"""What its layers keep is many times its parameters."""
wide_joint, wide_flat = cache(lambda: capture_joint(*wide())), cache(lambda: flat_graph(wide()))


def partitioned(text: str) -> tuple[int, int, Plan]:
    graph = wide_joint()
    partition = graph.partition(text)
    seen = measured(partition, graph.num_fwd_outputs)
    assert seen.saved == partition.audit.saved_bytes
    return max(seen.forward, seen.backward), seen.saved, partition.plan


def in_place(text: str) -> tuple[int, int, Plan]:
    gm = copy_graph(wide_flat().gm)
    outcome = FlatPath().apply(gm, policylang.parse(text))
    return measured_flat(gm), outcome.audit.saved_bytes, outcome.plan


@pytest.mark.parametrize(("road", "form"), crossed([partitioned, in_place], [BF16, ROWS8]))
def test_the_peak_is_that_of_the_plan(road: Callable[[str], tuple[int, int, Plan]], form: NarrowForm) -> None:
    text = SAVE + "save gelu{}"
    whole, narrow = road(text.format("")), road(text.format(f" as {form.text}"))
    freed = LAYERS * (GELU - form.bytes((LONG, 2 * WIDTH), LONG * 2 * WIDTH))
    assert whole[1] - narrow[1] == freed
    assert narrow[0] < whole[0]
    for peak, _, made in (whole, narrow):
        assert peak == pytest.approx(estimate_peak(made.facts, made.schedule).bytes, rel=0.02)


# --- the audit --------------------------------------------------------------------------------------------------------
def _narrower(node: fx.Node) -> None:
    node.args = (*node.args[:2], torch.float16)


def _without_scale(node: fx.Node) -> None:
    node.args = (node.args[0], None, node.args[2])


def _kept_whole(node: fx.Node) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(node.args[0])


@pytest.mark.parametrize(
    ("form", "target", "change", "code"),
    [
        ("bfloat16", copies.NARROW_OP, _narrower, "APL420"),
        ("bfloat16", copies.WIDEN_OP, _narrower, "APL420"),
        ("float8_e4m3fn per row", copies.NARROW_OP, _without_scale, "APL420"),
        ("float8_e4m3fn per row", copies.WIDEN_OP, _without_scale, "APL420"),
        ("bfloat16", copies.NARROW_OP, _kept_whole, "APL401"),
    ],
)
def test_the_audit_notices_another_form(form: str, target: Any, change: Callable[[fx.Node], None], code: str) -> None:
    after, outcome = applied(flat_of("mlp"), SAVE + f"save gelu as {form}")
    assert audit_flat(outcome.plan, after.gm.graph).agrees
    change(after.gm.graph.find_nodes(op="call_function", target=target)[0])
    found = audit_flat(outcome.plan, after.gm.graph)
    assert code in [each.code for each in found.differences]


# --- what is narrowed, and what is not --------------------------------------------------------------------------------
def traced(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> Traced:
    given = tuple(each.clone().requires_grad_(each.is_floating_point()) for each in inputs)
    return trace(Function(function), given, square_loss, **options)


def test_a_view_is_taken_again_and_its_memory_narrowed_once() -> None:
    graph = traced(lambda x: (x.sin().t() @ x).cos(), torch.randn(4, 4))
    for lines in ("optional save t, permute", "save sin", "save everything\nsave sin"):
        text = f"{lines} as bfloat16"
        partition = graph.partition(SAVE + text)
        plan = partition.plan
        assert "sin" in [plan.facts.names[row] for row in plan.schedule.forms]
        assert not {*partition.audit.saved} & {"permute", "t"}


def test_a_later_line_keeps_a_view_and_so_its_memory() -> None:
    graph = traced(lambda x: (x.sin().t() @ x).cos(), torch.randn(4, 4))
    partition = graph.partition(SAVE + "save sin as bfloat16\noptional save t, permute")
    assert not partition.plan.schedule.forms
    assert "t" in partition.audit.saved
    assert [each.code for each in partition.plan.diagnostics] == ["APL309"]


def test_what_narrows_nothing_is_an_error_with_the_reasons() -> None:
    graph = traced(lambda x: x.sin().cos().bfloat16().exp().float(), torch.randn(4, 4))
    with pytest.raises(policylang.PolicyMatchError, match="narrows nothing") as raised:
        graph.partition(SAVE + "save exp as bfloat16")
    assert "it is bfloat16, which is that narrow already" in str(raised.value)
    assert "APL339" in str(raised.value)


def test_whole_numbers_masks_and_outputs_stay() -> None:
    def masked(x: Tensor, length: Tensor) -> Tensor:
        positions = torch.arange(4)[None] < length[:, None]
        bias = torch.where(positions, 0.0, -torch.inf)
        weights = (x + bias).softmax(-1)
        return (weights * x.sin()).cumsum(-1).exp() * bias.exp()

    graph = traced(masked, torch.randn(4, 4), torch.tensor([1, 2, 3, 4]))
    partition = graph.partition(SAVE + "save everything as bfloat16")
    plan = partition.plan
    reasons = {
        plan.facts.names[row]: each.reason
        for row, each in enumerate(plan.decisions)
        if each is not None and each.why is Why.STAYS
    }
    assert any("masks and positions" in reason for reason in reasons.values()), reasons
    for row in plan.schedule.forms:
        assert plan.facts.dtypes[row] == "float32"


def test_router_logits_are_narrowed_only_by_a_line_that_picks_nothing_else() -> None:
    def routed(x: Tensor, gate: Tensor) -> Tensor:
        chances = (x.sin() @ gate).softmax(-1)
        best, at = chances.topk(2)
        return torch.gather(chances, 1, at) * best

    graph = traced(routed, torch.randn(8, 16), torch.randn(16, 4))
    partition = graph.partition(SAVE + "save everything as bfloat16")
    names = {partition.plan.facts.names[row] for row in partition.plan.schedule.forms}
    assert "sin" in names
    assert not any(name.startswith(("mm", "_softmax", "softmax", "div")) for name in names), names
    named = graph.partition(SAVE + "save _softmax, div as bfloat16".replace("save _", "optional save _"))
    assert named.plan.schedule.forms


@pytest.mark.slow
def test_what_steers_a_mixture_of_experts_or_a_dropout_stays() -> None:
    plan = zoo_traced("mixtral").partition(SAVE + "save everything as bfloat16").plan
    reasons = {each.reason for each in plan.decisions if each is not None and each.why is Why.STAYS}
    assert {"topk chooses by it", "topk_1 chooses by it", "it is int64, and no floating-point value"} < reasons
    assert "it is computed of whole numbers and constants alone, as masks and positions are" in reasons
    named = zoo_traced("mixtral").partition(SAVE + "save detach in gate as bfloat16").plan
    assert [plan.facts.names[row] for row in named.schedule.forms] == ["_softmax", "_softmax_1"]
    plan = zoo_traced("gpt2").partition(SAVE + "save everything where is random as bfloat16").plan
    assert {plan.facts.dtypes[row] for row in plan.schedule.forms} == {"float32"}
    decided = zip(plan.facts.targets, plan.decisions, strict=True)
    assert {(target, each.reason) for target, each in decided if each is not None and each.why is Why.STAYS} == {
        ("aten.native_dropout.default", "it is not a single tensor"),
        ("builtin.getitem", "it is bool, and no floating-point value"),
    }


@pytest.mark.slow
def test_the_seeds_of_a_generator_are_never_narrowed() -> None:
    """Inductor keeps the seed of a dropout for the backward, which draws the mask again: zeros are at its places."""
    torch.compiler.reset()
    x = torch.randn(64, 64, requires_grad=True)
    text = SAVE + "save everything as bfloat16\nrecompute gt, everything where is random"
    with partitions() as done, torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(lambda x: F.dropout(x.sin(), 0.5).exp() * 2.0, backend=backend_for(text, "inductor"))
        found = compiled(x)
        found.sum().backward()
    (partition,) = done
    facts, schedule = partition.plan.facts, partition.plan.schedule
    seeds = [
        row for row, target in enumerate(facts.targets) if target.startswith("prims.inductor_") and "seed" in target
    ]
    reasons = {decision.reason for row in seeds if (decision := partition.plan.decisions[row]) is not None}
    assert reasons == {
        "a seed: recomputed operators draw the same numbers from it",
        "it is int64, and no floating-point value",
    }
    assert schedule.forms
    assert {facts.dtypes[row] for row in schedule.forms} == {"float32"}
    assert torch.equal(x.grad == 0, found == 2)
    torch.compiler.reset()


def test_the_digest_changes_with_the_form() -> None:
    forms = ("", *map(" as {}".format, FORMS))
    assert len({applied(flat_of("mlp"), f"{SAVE}save gelu{form}")[1].plan.digest for form in forms}) == 5
    assert {*NARROW_BYTES} == {form.split()[0] for form in FORMS}


@pytest.mark.parametrize("text", ["expect lossless\nsave gelu as bfloat16", "save gelu as bfloat16\nexpect lossless"])
def test_expect_lossless_names_the_value(text: str) -> None:
    with pytest.raises(policylang.PolicyMatchError, match="gelu is saved as bfloat16"):
        applied(flat_of("mlp"), SAVE + text)
    _, outcome = applied(flat_of("mlp"), SAVE + "expect lossless\nsave gelu")
    assert [each.status for each in outcome.plan.expectations] == ["held"]


@pytest.mark.parametrize(
    ("text", "on_graph", "said"),
    [
        ("save mm as bfloat16", False, ["`save mm as bfloat16` is lossy: the backward computes with other bits"]),
        ("chunk loss into 4", False, ["`chunk loss into 4` is lossy: it may split sums"]),
        ("chunk loss into 4", True, ["`chunk loss into 4` is lossy: nll_loss_forward is a sum of slices and 1 more"]),
        ("save mm", True, []),
    ],
)
def test_what_is_denied_is_what_is_not_lossless(text: str, on_graph: bool, said: list[str]) -> None:
    graph = [collect(chunks.step_of(chunks.model(), chunks.cross_entropy, chunks.batch()).gm)] * on_graph
    found = policylang.check(policylang.parse(SAVE + text), graph=graph, lossless=True).diagnostics
    denied = [each.message for each in found if each.code == "APL216"]
    assert all(each.startswith(start) for each, start in zip(denied, said, strict=True))
    if on_graph:
        held = policylang.check(policylang.parse(f"{SAVE}{text}\nexpect lossless"), graph=graph).plans[0].expectations
        assert [each.status for each in held] == ["failed" if said else "held"]


# --- under torch.compile ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", [BF16, ROWS8], ids=str)
def test_compiled_with_dynamic_sizes(inner: Any, form: NarrowForm) -> None:
    """To the bits of narrowing by hand; Inductor's kernels round otherwise in between."""
    torch.compiler.reset()
    model = MLP(2, 16)
    text = f"recompute everything in block\nsave everything in block where crosses block\nsave addmm as {form.text}"
    backend = backend_for(text, inner)
    compiled = torch.compile(copy.deepcopy(model), backend=backend, dynamic=True)
    hand = narrowed_by_hand(copy.deepcopy(model), form)
    for rows in (8, 12, 20):
        x, found = torch.randn(rows, 16), list[list[Tensor]]()
        for run in (hand, compiled, model):
            parameters = list(run.parameters())
            found.append([*torch.autograd.grad(run(x).square().mean(), parameters)])
        for one, other in zip(*found[:2], strict=True):
            assert (one - other).abs().max() <= (2.0**-16 * one.abs().max() if inner == "inductor" else 0)
        assert not all(map(torch.equal, found[0], found[2]))
    report = policylang.report(backend)
    assert (report.rules[2].narrowed_bytes or 0) > 0
    assert report.audit.agrees
    torch.compiler.reset()


def test_values_on_the_host_and_narrow_ones_side_by_side() -> None:
    flat = flat_of("mlp")
    after, outcome = applied(flat, SAVE + "save gelu as float8_e4m3fn per row\noffload addmm")
    assert outcome.audit.offloaded
    assert outcome.plan.schedule.forms
    assert_bitwise_equal(by_hand(flat.fresh().gm, flat.inputs, outcome.plan), after.run())


def test_the_last_rule_wins() -> None:
    for text, forms in (
        ("save gelu as bfloat16\nsave gelu", set()),
        ("save gelu\nsave gelu as float16", {"float16"}),
        ("save gelu as float16\nsave gelu as bfloat16", {"bfloat16"}),
        ("save gelu as float16\nrecompute gelu", set()),
    ):
        _, outcome = applied(flat_of("mlp"), SAVE + text)
        assert {form.text for form in outcome.plan.schedule.forms.values()} == forms


# --- models of Hugging Face's, on all paths ---
def vit() -> Example:
    torch.manual_seed(0)
    config = ViTConfig(**IMAGES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        """Not the sum of squares: that of what a norm returns is constant, and its gradients are rounding alone."""
        return (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sin().square().mean()

    vit = ViTModel(config, add_pooling_layer=False)
    model = Function(lambda module, pixels: module.model(pixels).last_hidden_state, model=vit)
    return Example(model, (torch.randn(2, 3, 16, 16),), loss)


class WithHead(models.Layers):
    def __init__(self) -> None:
        super().__init__(*models.MLP(2, 16).layers)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))  # type: ignore[no-any-return]


def with_head() -> Example:
    torch.manual_seed(0)
    return Example(WithHead(), models.mlp().inputs, models.square_loss)


MAKERS: dict[str, Callable[[], Example]] = {
    "mlp": with_head,
    "llama": models.llama,
    "gpt2": lambda: models.gpt2(dropout=0.0),
    "mixtral": models.mixtral,
    "vit": vit,
}
ROUTER = {"mixtral": 4}
"""How many columns the product has by which experts are chosen."""
TEXT = (
    "recompute everything in block; save everything in block where crosses block\n"
    "save matmul in block as {0}; save everything in block where crosses block outside last block as {0}"
)


def both(name: str, form: NarrowForm) -> tuple[Agreement, dict[str, Tensor]]:
    """How the paths agree, and the gradients that a person's narrowing gives."""
    example = MAKERS[name]()

    def loss_of(model: nn.Module, *batch: Tensor) -> Tensor:
        return example.loss_fn(model(*batch))

    policy = policylang.parse(TEXT.format(form.text))
    compared = agree(lambda: copy.deepcopy(example.module), loss_of, example.inputs, policy)
    model = narrowed_by_hand(copy.deepcopy(example.module), form, experts=ROUTER.get(name, 0), crossing=True)
    loss_of(model, *example.inputs).backward()
    return compared, {each: value.grad for each, value in model.named_parameters() if value.grad is not None}


SLOW = ("llama", "gpt2", "mixtral", "vit")


@pytest.mark.parametrize("form", [BF16, pytest.param(ROWS8, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_gradients_are_those_of_narrowing_by_hand(name: str, form: NarrowForm) -> None:
    """To the bit, where the path gives the plain model's bits; else off by the order in which it adds up."""
    compared, expected = both(name, form)
    assert compared.agrees, str(compared)
    for result in compared.results:
        found = result.ran.numbers.gradients
        assert found.keys() == expected.keys()
        largest = max(each.abs().max().item() for each in expected.values())
        for each, gradient in found.items():
            off = (gradient - expected[each]).abs().max().item()
            assert off <= (0 if result.numbers.bitwise else 2.0**-20 * largest), each
        assert max(result.numbers.narrowed.values()) > 2.0**-12, "by far more than that"
        assert result.ran.report.audit.agrees
    assert len({result.ran.report.rules[2].narrowed_bytes for result in compared.results if result.ran}) == 1
    assert compared.to_dict()["paths"][0]["numbers"]["narrowed"]
    assert "narrows saved values: a gradient is off by" in str(compared)


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW[:3])])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "joint"])
def test_the_report_says_what_the_allocator_frees(name: str, is_compiled: bool) -> None:
    example, saved, narrowed = MAKERS[name](), [], 0
    for ending in ("", " as bfloat16", " as float8_e4m3fn per row"):
        policy = policylang.parse(f"recompute everything in block\nsave matmul in block{ending}")
        model = copy.deepcopy(example.module)
        torch.compiler.reset()
        if is_compiled:
            model = torch.compile(model, backend=policylang.backend(policy, inner="aot_eager"))
        else:
            policylang.checkpoint_model(model, policy)
        for _ in range(2):
            memory = step_allocations(lambda model=model: example.loss_fn(model(*example.inputs)))
        saved.append(memory.saved + (policylang.report(model).rules[1].narrowed_bytes or 0))
        narrowed = policylang.report(model).rules[1].narrowed_bytes or 0
    assert narrowed > 0
    assert len(set(saved)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "joint"])
def test_the_peak_of_a_resnet_falls_by_what_is_planned(is_compiled: bool) -> None:
    """Beside the plan are the workspaces of convolutions: as many bytes whatever waits in which form."""
    beside, peaks = set[int](), list[int]()
    x = torch.randn(2, 3, 24, 24)

    def step(made: nn.Module) -> Tensor:
        return models.square_loss(made(x))

    for ending in ("", " as bfloat16", " as float8_e4m3fn per row"):
        model = models.resnet(4, 16).module
        text = f"recompute everything in block\nundecided -> save\nsave convolution in block{ending}"
        policy = policylang.parse(text)
        torch.compiler.reset()
        if is_compiled:
            model = torch.compile(model, backend=policylang.backend(policy, inner="aot_eager"))
            step(model).backward()
            (facts,), able = facts_of(model), JOINT
        else:
            (facts,), able = facts_of(policylang.trace_step(model, step)), EAGER
            policylang.checkpoint_model(model, policy)
            step(model).backward()
        model.zero_grad(set_to_none=True)
        made = plan(policy, facts, able)
        timeline = simulate(made.facts, made.schedule)
        peaks.append(step_allocations(partial(step, model)).peak)
        beside.add(peaks[-1] - (max(timeline.live) - timeline.resident))
    assert len(beside) == 1, "bytes beside the plan"
    assert peaks[0] > peaks[1] > peaks[2]
