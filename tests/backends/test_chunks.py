"""``chunk``: what runs slice by slice gives what the whole gives, in float64 to 1e-12; all else is refused by name."""

import copy
from collections.abc import Callable
from heapq import heappop
from itertools import product
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import policylang
from benchmarks.allocations import peak_allocated
from policylang.backends.joint import JointPartitioner
from policylang.backends.torch_compile.slices import share_slices
from policylang.errors import PolicyMatchError
from policylang.graph import marks
from policylang.graph.blocks import blocks_of
from policylang.graph.collect import collect
from policylang.planning.capabilities import EAGER, FLAT
from policylang.planning.edits import chunked_regions
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.torch_compat import compilers
from tests.support.architectures import ENDS, EVERY, GROUPED
from tests.support.compiled import backend_for
from tests.support.drawn import crossed, examples, slow
from tests.support.models import Function

ROWS, WIDTH, VOCABULARY = 12, 8, 40
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def Head(*, bias: bool = False, mlp: nn.Module | None = None) -> nn.Module:
    """A stem, and a head over a vocabulary."""
    stem, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=bias)
    inner = nn.Identity() if mlp is None else mlp
    return Function(lambda model, x: model.lm_head(model.mlp(model.stem(x).tanh())), stem=stem, mlp=inner, lm_head=head)


def SwiGlu() -> nn.Module:
    gate, up, down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, WIDTH)
    return Function(lambda mlp, x: mlp.down(F.silu(mlp.gate(x)) * mlp.up(x)), gate=gate, up=up, down=down)


def batch(*lead: int, ignored: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(*(lead or (ROWS,)), WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, lead or (ROWS,), generator=generator)
    if ignored:
        labels.view(-1)[::5] = -100
    return x, labels


def model(**options: Any) -> nn.Module:
    torch.manual_seed(2)
    return Head(**options).double()


def flat(logits: Tensor) -> Tensor:
    return logits.flatten(0, -2)


def cross_entropy(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(flat(m(x)), labels.flatten())


def scaled(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(m, x, labels) * 1024.0


def z_loss(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = flat(m(x))
    return F.cross_entropy(logits, labels.flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()


def capped(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(flat(torch.tanh(m(x) / 30.0) * 30.0), labels.flatten())


def smoothed(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(flat(m(x)), labels.flatten(), label_smoothing=0.1)


def summed(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(flat(m(x)), labels.flatten(), reduction="sum")


def per_token(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A clipped policy gradient on the log-probabilities of tokens."""
    logps = m(x).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    ratio = (logps - logps.detach() + 0.1 * x[..., 0]).exp()
    weights = (labels != -100).to(logps.dtype)
    return -(torch.minimum(ratio * x[..., 1], ratio.clamp(0.8, 1.2) * x[..., 1]) * weights).sum() / weights.sum()


def entropy(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    logits = m(x)
    probabilities = logits.softmax(-1)
    bonus = -(probabilities * logits.log_softmax(-1)).sum(-1).mean()
    return F.cross_entropy(flat(logits), labels.flatten()) - 0.01 * bonus


def squares(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return (m(x) - x.sum(-1, keepdim=True)).square().mean()


def preference(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Of two halves of a batch, whose whole log-probability is larger: the gradient of each row needs all rows."""
    logps = m(x).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    half = logps.shape[0] // 2
    return -F.logsigmoid(logps[:half].sum() - logps[half:].sum())


def weighed(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Each class by how often it comes; labels that are ignored count for none."""
    return F.cross_entropy(flat(m(x)), labels.flatten(), weight=x.new_ones(VOCABULARY).cumsum(0))


def shifted(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Logits of all tokens but the last, as older trainers take them."""
    dim = -2 if x.ndim > 2 else 0
    logits, steps = m(x), x.shape[dim]
    return F.cross_entropy(flat(logits.narrow(dim, 0, steps - 1)), labels.narrow(-1, 1, steps - 1).flatten())


def last_shifted(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """All tokens but the first two, by the log-probabilities of two rows fewer."""
    logps = m(x).log_softmax(-1)[..., 2:, :]
    return -logps.gather(-1, labels.clamp(min=0)[..., 2:, None]).mean()


def padded(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """A vocabulary that was padded: the last columns are left out."""
    return F.cross_entropy(flat(m(x))[:, : VOCABULARY - 3], labels.flatten().clamp(max=VOCABULARY - 4))


def indexed(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of each label, by its index in each row."""
    logps, rows = flat(m(x)).log_softmax(-1), torch.arange(labels.numel())
    return -(logps[rows, labels.flatten().clamp(min=0)] * (labels.flatten() != -100)).sum()


LOSSES: list[Loss] = [cross_entropy, scaled, z_loss, capped, smoothed, summed, per_token, entropy, squares]
SHIFTED: list[Loss] = [shifted, last_shifted, weighed, padded, indexed]


def step_of(m: nn.Module, loss: Loss, data: tuple[Tensor, Tensor]) -> policylang.TracedStep:
    return policylang.trace_step(m, loss, *data)


def plan_of(step: policylang.TracedStep, text: str) -> Plan:
    return plan(policylang.parse(text), collect(step.gm), FLAT)


def compare(want: tuple[Tensor, dict[str, Tensor]], found: tuple[Tensor, dict[str, Tensor]], within: float) -> None:
    torch.testing.assert_close(found[0], want[0], rtol=within, atol=within)
    assert found[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=within, atol=within, msg=name)


def check(m: nn.Module, loss: Loss, data: tuple[Tensor, Tensor], text: str, within: float = 1e-12) -> policylang.Report:
    step = step_of(m, loss, data)
    want = step(*data)
    policylang.apply(step.gm, policylang.parse(text))
    compare(want, step(*data), within)
    return policylang.report(step.gm)


@pytest.mark.parametrize(("loss", "lead"), crossed([*LOSSES, *SHIFTED, preference], [(ROWS,), (2, 6), (1, ROWS)]))
def test_a_chunked_loss_is_the_whole_one(loss: Loss, lead: tuple[int, ...]) -> None:
    (line,) = check(model(bias=True), loss, batch(*lead), "chunk loss into 2").rewrites
    assert line.done == 1
    assert "bits differ there, nowhere else" in " ".join(line.notes)


@pytest.mark.parametrize(
    ("loss", "form"), crossed(LOSSES, [(torch.float32, 4), (torch.bfloat16, 4), (torch.bfloat16, 2)])
)
def test_in_narrow_types_the_error_is_that_of_summing_in_slices(loss: Loss, form: tuple[torch.dtype, int]) -> None:
    """Of n slices, n - 1 additions round once, to half a unit in the last place of their result; a mean multiplies each
    slice, and divides once; both runs round last: 2 n + 2 roundings of sums that are not larger than their parts'."""
    (dtype, slices), (x, labels) = form, batch(ROWS)
    m = model().to(dtype)
    step = step_of(m, loss, (x.to(dtype), labels))
    want = step(x.to(dtype), labels)
    policylang.apply(step.gm, policylang.parse(f"chunk loss into {slices}"))
    found = step(x.to(dtype), labels)
    for one, other in ((want[0], found[0]), *((want[1][name], found[1][name]) for name in want[1])):
        scale = max(one.abs().max().item(), 1e-3 if loss is squares else 0.0)
        assert (one - other).abs().max().item() <= (2 * slices + 2) * torch.finfo(dtype).eps * scale


def test_columns_are_followed_where_a_vocabulary_is_padded() -> None:
    step = step_of(model(), padded, batch())
    policylang.apply(step.gm, policylang.parse("chunk loss into 4"))
    shapes = {tuple(getattr(node.meta.get("val"), "shape", ())) for node in step.gm.graph.nodes}
    assert {(3, VOCABULARY), (3, VOCABULARY - 3)} <= shapes
    assert not shapes & {(ROWS, VOCABULARY), (ROWS, VOCABULARY - 3)}


def test_rows_that_no_sum_is_made_of_keep_their_bits() -> None:
    step = step_of(model(), cross_entropy, data := batch())
    want = step(*data)
    policylang.apply(step.gm, policylang.parse("chunk loss into 3"))
    found = step(*data)
    assert torch.equal(found[1]["stem.weight"], want[1]["stem.weight"])  # from the gradient of the hidden state


def test_the_plan_names_the_sums_that_are_split_and_is_not_lossless() -> None:
    made = plan_of(step_of(model(), cross_entropy, batch()), "chunk loss into 4; expect lossless")
    assert made.expectations[0].found == "nll_loss_forward is a sum of slices"
    assert len(made.edits.split_sums) == 2
    note = next(each.note for each in made.edits.done if each.note)
    assert note.startswith("4 slices of 3 of 12 rows from mm on; 2 sums are split (nll_loss_forward, mm_")


def test_an_uneven_number_of_rows_is_said() -> None:
    (line,) = check(model(), cross_entropy, batch(), "chunk loss into 5").rewrites
    assert any(note.startswith("5 slices of 3 or 2 of 12 rows") for note in line.notes)


@pytest.mark.parametrize(
    ("text", "lead"),
    crossed(["", "; save everything", "; recompute everything", "; chunk loss into 3"], [(ROWS,), (2, 6)]),
)
def test_a_chunked_mlp_is_the_whole_one(lead: tuple[int, ...], text: str) -> None:
    data = batch(*lead)
    lines = check(model(mlp=SwiGlu()), cross_entropy, data, f"chunk module mlp into 3{text}").rewrites
    assert [line.done for line in lines] == [1] * len(lines)


def test_blocks_keep_their_order_where_one_behind_fills_a_tensor_of_a_sizes_alone() -> None:
    """Its fill was made in the first block: `in first 2 blocks` meant the first and the last."""
    filled = Function(lambda x: x * torch.zeros_like(x.softmax(0)).scatter(0, x.argmax(0, keepdim=True), 1.0))
    layers = nn.Sequential(Function(lambda block, x: x + block.mlp(x), mlp=SwiGlu()), nn.Sequential(nn.Tanh()), filled)
    body = Function(lambda body, x: body.layers(x), layers=layers)
    whole = model(mlp=body)
    check(whole, cross_entropy, batch(), "chunk module mlp in block into 3")
    made = plan_of(step_of(whole, cross_entropy, batch()), "chunk module mlp in block into 3")
    assert blocks_of(made.facts).names == tuple(f"mlp.layers.{number}" for number in range(3))


def test_the_regions_of_all_blocks_together_look_at_each_node_about_once(monkeypatch) -> None:
    """None at all that is behind it: that took half a minute for 126 blocks."""
    looked: list[int] = []
    monkeypatch.setattr(chunked_regions, "heappop", lambda heap: looked.append(heappop(heap)) or looked[-1])
    facts = policylang.load_snapshot("docs/graphs/llama3_8b.graph")
    assert not plan(policylang.parse("chunk module mlp in block into 4"), facts, FLAT).diagnostics
    assert 32 < len(looked) < 2 * len(facts)


def test_the_backward_of_a_chunked_mlp_computes_slices_again() -> None:
    made = plan_of(step_of(model(mlp=SwiGlu()), cross_entropy, batch()), "chunk module mlp into 3")
    reasons = {each.reason for each in made.decisions if each is not None and each.why.value == "chunked"}
    assert reasons == {"a slice: the backward computes it again, slice by slice"}


def test_a_chunked_loss_keeps_the_peak_below_that_of_the_logits() -> None:
    big = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4096, bias=False))
    x, labels = torch.randn(512, 16), torch.randint(4096, (512,))
    step = policylang.trace_step(big, lambda m, x, labels: F.cross_entropy(m(x), labels), x, labels)
    whole, cut = plan_of(step, "optional save convolution").peak.bytes, plan_of(step, "chunk loss into 8").peak.bytes
    logits = 512 * 4096 * 4
    assert whole > 3 * logits
    assert cut < whole - 2 * logits
    limited = plan_of(step, "chunk loss up to 2 MiB")
    assert limited.peak.bytes < cut
    policylang.apply(step.gm, policylang.parse(f"chunk loss into 8; expect peak <= {cut} B"))


REFUSED: dict[str, tuple[Loss, str]] = {
    "softmax over rows": (lambda m, x, y: (m(x).softmax(0) ** 2).sum(), "mixes rows: _softmax"),
    "sorted rows": (lambda m, x, y: (m(x).sort(0).values * x[:, :1]).sum(), "mixes rows: sort"),
    "random": (lambda m, x, y: F.cross_entropy(F.dropout(m(x), 0.5), y), "draws random numbers: "),
    "logits read whole": (
        lambda m, x, y: (lambda logits: F.cross_entropy(logits, y) + torch.linalg.svdvals(logits).sum())(m(x)),
        "not known to treat rows apart: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused_with_its_node(name: str) -> None:
    loss, why = REFUSED[name]
    step = step_of(model(), loss, batch())
    with pytest.raises(PolicyMatchError) as raised:
        policylang.apply(step.gm, policylang.parse("chunk loss into 3"))
    (found,) = raised.value.diagnostics
    assert found.code == "APL311"
    assert why in str(found)
    optional = plan_of(step, "optional chunk loss into 3")
    assert not optional.edits.done
    assert not optional.diagnostics


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("chunk loss into 13", "12 rows cannot be cut into 13 slices"),
        ("chunk module head to loss into 3", "no module `head` of this graph has a product that a loss is made of"),
        ("chunk module stem in block into 3", "no module `stem` of this graph has a product"),
    ],
)
def test_a_region_that_is_not_there_is_an_error(text: str, why: str) -> None:
    step = step_of(model(), cross_entropy, batch())
    with pytest.raises(PolicyMatchError) as raised:
        policylang.apply(step.gm, policylang.parse(text))
    assert why in str(raised.value)


def test_in_eager_it_is_refused_by_name() -> None:
    made = plan(policylang.parse("chunk loss into 3"), collect(step_of(model(), cross_entropy, batch()).gm), EAGER)
    (found,) = [each for each in made.diagnostics if each.code == "APL306"]
    assert found.message == "`chunk loss into 3` cuts a graph, which an eager checkpoint cannot do"


def test_sizes_that_are_not_fixed_are_refused() -> None:
    torch._dynamo.reset()
    backend = backend_for("chunk loss into 3")
    with pytest.raises(PolicyMatchError, match="sizes not fixed: mm"):
        torch.compile(cross_entropy, backend=backend, dynamic=True)(model(), *batch()).backward()


def test_two_products_of_one_head_are_two_regions() -> None:
    def both(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        other = m.stem(x).sin()
        return F.cross_entropy(m(x), labels) + F.cross_entropy(m.lm_head(other), labels)

    (line,) = check(model(), both, batch(), "chunk loss into 3").rewrites
    assert line.done == 2


def test_a_distilled_head_is_cut_with_its_teacher() -> None:
    teacher = model(bias=True)
    for parameter in teacher.parameters():
        parameter.requires_grad_(False)

    def distilled(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        student, taught = (each(x).log_softmax(-1) for each in (m.student, m.teacher))
        return F.kl_div(student, taught, log_target=True, reduction="none").sum()

    pair = Function(lambda pair, x: pair.student(x), student=model(), teacher=teacher)
    step = step_of(pair, distilled, data := batch())
    want = step(*data)
    policylang.apply(step.gm, policylang.parse("chunk loss into 4"))
    compare(want, step(*data), 1e-12)
    wide = [node for node in step.gm.graph.nodes if tuple(getattr(node.meta.get("val"), "shape", ())) == (12, 40)]
    assert not wide


TEXTS = ("chunk loss into 3", "chunk module mlp into 2", "chunk loss into 2; recompute everything")


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        *crossed([cross_entropy, per_token, preference, capped, weighed], TEXTS),
        *(slow(*pair) for pair in product([z_loss, shifted, padded, indexed], TEXTS)),
    ],
)
@pytest.mark.parametrize("lead", [slow((ROWS,)), (2, 6)], ids=str)
def test_a_joint_graph_gives_the_same(loss: Loss, lead: tuple[int, ...], text: str) -> None:
    whole, data = model(mlp=SwiGlu()), batch(*lead)
    cut = copy.deepcopy(whole)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend_for(text))
    compare(gradients(whole, loss, data, 3.0), gradients(cut, compiled, data, 3.0), 1e-12)
    report = policylang.report(compiled)
    assert report.rewrites[0].done == 1
    early = any("made in the forward, scaled when that of the loss comes" in note for note in report.rewrites[0].notes)
    assert early is (text.startswith("chunk loss") and loss is not preference)


def gradients(
    m: nn.Module, call: Loss, data: tuple[Tensor, Tensor], scale: float, backwards: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    found = call(m, *data)
    for at in range(backwards):
        (found * scale).sum().backward(retain_graph=at + 1 < backwards)
    return found.detach(), {name: each.grad for name, each in m.named_parameters() if each.grad is not None}


def test_a_backward_beside_its_forward_keeps_bits_and_serves_more_than_once() -> None:
    """The incoming gradient is a power of two: to scale by it afterwards rounds nothing."""
    for scale, backwards in ((1.0, 1), (0.25, 2)):
        whole, data = model(), batch()
        cut = copy.deepcopy(whole)
        torch._dynamo.reset()
        compiled = torch.compile(cross_entropy, backend=backend_for("chunk loss into 3"))
        found = gradients(cut, compiled, data, scale, backwards)[1]
        want = gradients(whole, cross_entropy, data, scale, backwards)[1]
        assert torch.equal(found["stem.weight"], want["stem.weight"])  # from the gradient of the hidden state


@pytest.mark.parametrize(("scale", "differ"), [(4.0, {"lm_head"}), (3.0, {"lm_head", "stem"})])
def test_bits_differ_in_what_is_split_or_scaled_afterwards_and_nowhere_else(scale: float, differ: set[str]) -> None:
    """The gradient of the head is a sum of slices. That of the hidden state is not, and reaches the stem: it is rounded
    once more where the incoming gradient is no power of two. What no slice computes keeps its bits."""

    def loss(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(m, x, labels) + m.beside.weight.exp().sum()

    whole, (x, labels) = model().bfloat16(), batch(96)
    whole.beside = nn.Linear(WIDTH, 3, bias=False).bfloat16()
    data, cut = (x.bfloat16(), labels), copy.deepcopy(whole)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend_for("chunk loss into 3"))
    found, want = gradients(cut, compiled, data, scale)[1], gradients(whole, loss, data, scale)[1]
    assert {name.split(".")[0] for name in want if not torch.equal(found[name], want[name])} == differ
    note = " ".join(policylang.report(compiled).rewrites[0].notes)
    assert "2 sums are split (nll_loss_forward, mm_1); 2 products are scaled afterwards" in note
    torch._dynamo.reset()
    strict = backend_for("chunk loss into 3; expect lossless")
    with pytest.raises(PolicyMatchError) as raised:
        gradients(cut, torch.compile(loss, backend=strict), data, scale)
    for said in ("nll_loss_forward is a sum of slices", "mm_1 is a sum of slices", "mm_2 is scaled after it was made"):
        assert said in str(raised.value)


def two_losses(m: nn.Module, x: Tensor, labels: Tensor) -> Any:
    logits = m(x)
    return F.cross_entropy(logits, labels), 1e-2 * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize(
    ("loss", "dtype", "why"),
    [
        (preference, torch.float64, "sum_1 is a sum over all rows, and "),
        (cross_entropy, torch.float16, "float16 needs the scale of the loss in its backward"),
        (two_losses, torch.float64, "2 incoming gradients, not that of one number"),
    ],
    ids=("preference", "float16", "two losses"),
)
def test_where_the_backward_cannot_run_beside_its_forward_the_plan_says_why(loss, dtype, why) -> None:
    torch._dynamo.reset()
    m, (x, labels) = model().to(dtype), batch()
    compiled = torch.compile(loss, backend=backend_for("chunk loss into 3"))
    loss_of = compiled(m, x.to(dtype), labels)
    (loss_of if isinstance(loss_of, Tensor) else loss_of[0] - loss_of[1]).backward()
    assert any(f"; the backward computes them again ({why}" in n for n in policylang.report(compiled).rewrites[0].notes)


HEADS: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2": ("LMHeadModel", {}, "graph break"), "Granite": ("ForCausalLM", {"logits_scaling": 8.0}, ""),
    "Bert": ("ForSequenceClassification", {}, ""), "Llama": ("ForCausalLM", {}, ""), "Gemma2": ("ForCausalLM", {}, ""),
    "Phi": ("ForCausalLM", {}, ""), "Qwen3Moe": ("ForCausalLM", {}, "graph break"), "Mamba": ("ForCausalLM", {}, ""),
    "T5": ("ForConditionalGeneration", {"dropout_rate": 0.0}, ""), "Qwen3": ("ForCausalLM", {}, ""),
    "Cohere": ("ForCausalLM", {**GROUPED, **ENDS}, ""), "ViT": ("ForImageClassification", {"num_labels": 7}, ""),
    "Roberta": ("ForMaskedLM", {}, ""),
}  # fmt: skip
"""By model: what it ends in, its settings, and what becomes of it under ``torch.compile``."""
SLOW_HEADS = [slow(name) for name in list(HEADS)[1:]]


@pytest.mark.parametrize("name", [*list(HEADS)[:1], *SLOW_HEADS])
def test_heads_of_hugging_face(name: str) -> None:
    """Tied, soft-capped, scaled and biased heads, experts with a loss of their router, classifiers of words and images;
    the loss in float64."""
    ending, settings, broken = HEADS[name]
    config = getattr(transformers, f"{name}Config")(**{**EVERY.get(name, ("", {}))[1], **settings})
    for key in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout_rate"):
        setattr(config, key, 0.0)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    whole = getattr(transformers, name + ending)(config).double().train()
    words = torch.randint(3, 60, (2, 8))

    def loss(m: Any, words: Tensor, labels: Tensor) -> Tensor:
        given = {"labels": labels, "pixel_values" if name == "ViT" else "input_ids": words}
        output = m(**given)
        found = F.cross_entropy(output.logits.flatten(0, -2), labels.flatten())
        return found if getattr(output, "aux_loss", None) is None else found + 0.1 * output.aux_loss

    data = (words, words)
    if "Classification" in ending:
        data = torch.randn(6, 3, 16, 16).double() if name == "ViT" else words.repeat(3, 1), torch.randint(2, (6,))
    check(whole, loss, data, "chunk loss into 3")
    if name in list(HEADS)[:3]:
        return
    cut = copy.deepcopy(whole)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend_for("chunk loss into 3"))
    if broken:
        with pytest.raises(PolicyMatchError, match=r"finds nothing to cut in any of the \d graphs") as raised:
            gradients(cut, compiled, data, 4.0)
        assert "Dynamo made " in str(raised.value)
        assert "`TORCH_LOGS=graph_breaks` names that code" in str(raised.value)
        return
    compare(gradients(whole, loss, data, 4.0), gradients(cut, compiled, data, 4.0), 1e-12)
    assert "made in the forward" in " ".join(policylang.report(compiled).rewrites[0].notes)


_UNARY = ("tanh", "exp", "sin", "sigmoid", "softmax", "log_softmax", "relu", "square")


@given(
    steps=st.lists(st.sampled_from([*_UNARY, "scale", "centre", "mask", "norm", "view"]), max_size=5),
    ending=st.sampled_from(["mean", "sum", "rows", "picked", "squares"]),
    lead=st.sampled_from([(6,), (2, 6), (3, 4)]),
    slices=st.integers(2, 3),
)
@settings(max_examples=examples(12, 60), deadline=None)
def test_random_regions_of_operators_that_treat_rows_apart(steps, ending, lead, slices) -> None:
    def loss(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        value = m(x)
        for name in steps:
            match name:
                case "softmax" | "log_softmax":
                    value = getattr(value, name)(-1)
                case "scale":
                    value = value * x[..., :1]
                case "centre":
                    value = value - value.mean(-1, keepdim=True)
                case "mask":
                    value = value.masked_fill(labels.unsqueeze(-1) == -100, 0.0)
                case "norm":
                    value = value / (value.square().sum(-1, keepdim=True) + 1.0).sqrt()
                case "view":
                    value = value.flatten(0, -2).view(value.shape)
                case _:
                    value = getattr(torch, name)(value.clamp(-3, 3))
        match ending:
            case "mean" | "sum":
                return getattr(value, ending)()
            case "rows":
                return (value.sum(-1).tanh() * x[..., 0]).sum()
            case "picked":
                return value.gather(-1, labels.clamp(min=0).unsqueeze(-1)).mean()
        return value.square().mean(-1).sum()

    check(model(), loss, batch(*lead), f"chunk loss into {slices}", 1e-11)


# --- under Inductor: one subgraph for all slices that are alike, to the bits of the slices in a row ---
def calls_in(gm: fx.GraphModule) -> list[str]:
    """The subgraph of each call."""
    return [str(node.args[1]) for node in gm.graph.nodes if "invoke_subgraph" in str(node.target)]


def compiled_by_hand(loss: Loss, text: str, halves: list[fx.GraphModule], *, share: bool) -> Any:
    """Partitioned under a policy and run node by node, with slices in a row or as calls."""
    partitioner = JointPartitioner(policylang.parse(text))

    def partition(gm: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        halves.extend(partitioner(gm, inputs, **options))
        if share:
            for half in halves:
                share_slices(half)
        return halves[-2], halves[-1]

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compilers.compile_with_aot_eager(gm, inputs, partition, lambda gm, run, is_backward: run)

    torch._dynamo.reset()
    return torch.compile(loss, backend=backend)


@pytest.mark.parametrize(
    "loss",
    [per_token, *(slow(e) for e in (weighed, cross_entropy, preference, shifted, z_loss))],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize(
    ("text", "slices"),
    [
        slow("chunk loss into 5", 5),
        slow("chunk module mlp into 4", 4),
        slow("chunk module mlp into 4; save everything", 4),
        ("chunk loss into 2; chunk module mlp into 3", 5),
    ],
)
def test_calls_of_subgraphs_keep_every_bit(loss: Loss, text: str, slices: int) -> None:
    whole, data = model(mlp=SwiGlu(), bias=True), batch()
    cut = copy.deepcopy(whole)
    unrolled: list[fx.GraphModule] = []
    shared: list[fx.GraphModule] = []
    want = gradients(whole, compiled_by_hand(loss, text, unrolled, share=False), data, 3.0)
    found = gradients(cut, compiled_by_hand(loss, text, shared, share=True), data, 3.0)
    assert torch.equal(found[0], want[0])
    assert all(torch.equal(found[1][name], want[1][name]) for name in want[1])
    calls = [calls_in(half) for half in shared]
    assert len(calls[0]) == slices
    assert all(len(set(each)) <= 4 for each in calls)
    products = [sum("mm" in str(node.target) for node in half.graph.nodes) for half in unrolled]
    assert sum("mm" in str(node.target) for node in shared[0].graph.nodes) < products[0]
    assert sum(calls_in(half) != [] for half in unrolled) == 0


def test_slices_that_are_alike_share_a_subgraph() -> None:
    halves: list[fx.GraphModule] = []
    gradients(model(), compiled_by_hand(cross_entropy, "chunk loss into 5", halves, share=True), batch(), 1.0)
    first, *others = calls_in(halves[0])  # 12 rows: 3, 3, 2, 2 and 2; the first slice adds to no sum
    assert [len({*others[at:]}) for at in (0, 1)] == [2, 1]
    assert first not in others


def test_a_row_that_starts_off_the_alignment_of_kernels_has_a_subgraph_of_its_own() -> None:
    """Labels are eight bytes each: of slices of three rows every second one starts off a multiple of sixteen."""
    halves: list[fx.GraphModule] = []
    gradients(model(), compiled_by_hand(cross_entropy, "chunk loss into 4", halves, share=True), batch(), 1.0)
    first, second, third, fourth = calls_in(halves[0])
    assert second == fourth != third
    assert first not in (second, third)


def test_views_and_pieces_that_others_read_are_made_outside() -> None:
    def pieces(x: Tensor) -> list[Tensor]:
        found = []
        for rows in (x[:2], x[2:]):
            doubled = rows * 2.0
            found += [doubled.max(1).values, doubled.view(12), doubled.view(3, 4) + 1.0, doubled, rows.view(12)]
        return found

    x, at = torch.randn(4, 6), -1
    gm = make_fx(pieces, tracing_mode="fake")(x)
    want = gm(x)
    for node in gm.graph.nodes:
        at += node.target is torch.ops.aten.mul.Tensor
        if node.op == "call_function" and node.target is not torch.ops.aten.slice.Tensor:
            node.meta["custom"] = {marks.SLICE: f"mul:{at}"}
    assert share_slices(gm) == 1
    assert all(torch.equal(one, other) for one, other in zip(gm(x), want, strict=True))
    assert len(calls_in(gm)) == 2
    (results,) = {node.args[0] for node in gm.chunk_slice_0.graph.nodes if node.op == "output"}  # type: ignore[union-attr]
    assert [node.name for node in results] == ["mul", "getitem", "add"]


def test_a_slice_that_something_outside_reads_and_goes_on_from_is_two_calls() -> None:
    def normed(x: Tensor) -> Tensor:
        one, two = x[:2].sin().cos(), x[2:].sin().cos()
        whole = one.sum() + two.sum()
        return torch.cat([(one / whole).exp(), (two / whole).exp()])

    x = torch.randn(4, 6)
    gm = make_fx(normed, tracing_mode="fake")(x)
    want = gm(x)
    first = True
    for node in gm.graph.nodes:
        name = str(node.target).split(".")[1] if node.op == "call_function" else ""
        if name in ("sin", "cos", "div", "exp"):
            node.meta["custom"] = {marks.SLICE: f"sin:{int(not first)}"}
            first = first if name in ("sin", "div") else not first
    assert share_slices(gm) == 2
    assert torch.equal(gm(x), want)
    assert len(calls_in(gm)) == 4


def inductor(text: str, width: int = 16, rows: int = 96) -> tuple[Any, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2048, bias=False))
    data = torch.randn(rows, width), torch.randint(2048, (rows,))
    torch._dynamo.reset()
    return head, torch.compile(loss_of, backend=backend_for(text, "inductor")), data


def loss_of(m: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(m(x), labels)


@pytest.mark.slow
def test_inductor_compiles_as_many_kernels_for_twelve_slices_as_for_four() -> None:
    kernels = []
    for count in (4, 12):
        head, compiled, data = inductor(f"chunk loss into {count}")
        found, codes = run_and_get_code(lambda c=compiled, h=head, d=data: gradients(h, c, d, 1.0))
        compare(gradients(copy.deepcopy(head), loss_of, data, 1.0), found, 1e-5)
        kernels.append(sum(code.count("async_compile.cpp_pybinding(") for code in codes))
        assert codes[0].count("def chunk_slice_") == 2
    assert kernels[0] == kernels[1]


@pytest.mark.slow
@pytest.mark.parametrize("slices", [4, 8])
def test_inductor_has_the_wide_values_of_one_slice_at_a_time(slices: int) -> None:
    """Logits and their gradient: two wide values a slice."""
    head, compiled, data = inductor(f"chunk loss into {slices}", rows=2048)

    def step() -> object:
        return gradients(head, compiled, data, 1.0)

    step()
    logits = 2048 * 2048 * 4
    assert peak_allocated(step) <= 2 * logits / slices + 5 * 2**20
