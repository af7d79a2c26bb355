"""Steps traced as a GPU runs them, on a machine without one: the kernels that it would choose, at true sizes."""

import resource
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Phase
from policylang.graph.traced_device import attention_kernels, kernel_findings, traced_on
from policylang.planning.capabilities import FLAT, JOINT
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.torch_compat.absent_cuda import ON_CUDA, cuda_hooks
from policylang.torch_compat.tracing import functionalized
from policylang.tracing.capture import _kernels_of
from policylang.tracing.target_device import AttentionCall, TargetDevice, chosen_kernel, target_device, tracing_for
from tests.support.sharded import fake_ranks
from tests.support.shared_graphs import ONE_DEVICE, shared_graph
from tests.support.versions import VERSION

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU chooses for itself, and needs no stand-in")
CUDNN, FLASH = "aten._scaled_dot_product_cudnn_attention", "aten._scaled_dot_product_flash_attention"
EFFICIENT, MATH = "aten._scaled_dot_product_efficient_attention", "aten._safe_softmax"
HALF = torch.bfloat16


class Attention(nn.Module):
    """Attention of 4 heads, whose keys and values have their own numbers of heads, length and head dimension."""

    def __init__(self, head: int = 16, groups: int = 4, of_values: int = 0, **options: Any) -> None:
        super().__init__()
        self.head, self.groups, self.of_values = head, groups, of_values or head
        self.query = nn.Linear(32, 4 * head)
        self.key = nn.Linear(32, groups * head)
        self.value = nn.Linear(32, groups * self.of_values)
        self.options = options

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if other is None else other
        query = self.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
        key = self.key(source).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        value = self.value(source).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options)


def mean(model: nn.Module, *batch: Any) -> Tensor:
    return model(*batch).float().mean()  # type: ignore[no-any-return]


def traced(
    model: nn.Module, *batch: Any, loss: Callable[..., Tensor] = mean, capability: str | None = None
) -> tuple[Facts, Counter[str]]:
    step = policylang.trace_step(model, loss, *batch, device="cuda", compute_capability=capability)
    facts = collect(step.gm)
    return facts, Counter(facts.targets)


def kernel(options: dict[str, Any], *, dtype: torch.dtype = HALF, loss: Callable[..., Tensor] = mean) -> str:
    """The attention that a step on an H100 runs, and that its backward is the same one's."""
    with torch.device("meta"):
        model = Attention(**options).to(dtype)
    facts, targets = traced(model, torch.zeros(2, 32, 32, dtype=dtype), loss=loss, capability="9.0")
    (found,) = attention_kernels(facts)
    name = found.removesuffix(".default")
    assert name == MATH or targets[f"{name}_backward.default"] == 1
    return name


X = torch.zeros(2, 32, 32, dtype=HALF)


def attention_call(
    dtype: torch.dtype = HALF,
    *,
    device: str = "meta",
    head: int = 16,
    of_values: int = 0,
    groups: int = 4,
    keys: int = 32,
    mask: tuple[int, ...] = (),
    dropout: float = 0.0,
    is_causal: bool = False,
    trains: bool = True,
    strides: tuple[int, ...] = (),
) -> AttentionCall:
    """A call with 4 heads and 32 queries."""

    def of(heads: int, length: int, width: int) -> Tensor:
        made = torch.empty(2, heads, length, width, dtype=dtype, device=device, requires_grad=trains)
        return made.transpose(2, 3) if strides else made

    tensors = of(4, 32, head), of(groups, keys, head), of(groups, keys, of_values or head)
    bias = torch.empty(mask, dtype=torch.bool, device=device) if mask else None
    return AttentionCall(*tensors, bias, dropout, is_causal, None, groups < 4)


def chosen(capability: tuple[int, int], **call: Any) -> str:
    return NAMES[chosen_kernel(attention_call(**call), capability)]


NAMES = {
    SDPBackend.CUDNN_ATTENTION: CUDNN,
    SDPBackend.FLASH_ATTENTION: FLASH,
    SDPBackend.EFFICIENT_ATTENTION: EFFICIENT,
    SDPBackend.MATH: MATH,
}
T4, A100, RTX30, L40, H100, B200, RTX50 = (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)

CALLS: list[tuple[tuple[int, int], dict[str, Any], str]] = [
    (H100, {}, CUDNN), (B200, {}, CUDNN), (A100, {}, FLASH), (RTX50, {}, FLASH), (L40, {"dtype": torch.float16}, FLASH),
    (T4, {}, MATH), (T4, {"dtype": torch.float16}, EFFICIENT), ((4, 0), {"dtype": torch.float32}, MATH),
    (A100, {"is_causal": True, "dropout": 0.1}, FLASH), (A100, {"groups": 2}, FLASH), (H100, {"groups": 2}, CUDNN),
    (A100, {"groups": 3}, MATH), (H100, {"dtype": torch.float32}, EFFICIENT),
    (T4, {"dtype": torch.float32, "groups": 2}, MATH if VERSION < (2, 14) else EFFICIENT),
    (H100, {"dtype": torch.float64}, MATH), (H100, {"mask": (32, 32)}, CUDNN), (H100, {"mask": (2, 1, 32, 32)}, CUDNN),
    (H100, {"mask": (2, 32, 32)}, EFFICIENT), (A100, {"mask": (32, 32)}, EFFICIENT), (A100, {"keys": 48}, FLASH),
    (A100, {"keys": 48, "is_causal": True}, EFFICIENT), (H100, {"keys": 1}, FLASH), (H100, {"keys": 0}, MATH),
    (H100, {"head": 20}, FLASH), (A100, {"head": 20, "dtype": torch.float32}, EFFICIENT),
    (A100, {"head": 18, "dtype": torch.float32}, MATH), ((7, 0), {"head": 18, "dtype": torch.float32}, EFFICIENT),
    (H100, {"head": 256}, CUDNN), (B200, {"head": 256}, FLASH), (A100, {"head": 200}, FLASH),
    (RTX30, {"head": 200}, EFFICIENT), (RTX30, {"head": 200, "trains": False}, FLASH),
    (RTX50, {"head": 256, "dropout": 0.1}, EFFICIENT), (H100, {"head": 264}, EFFICIENT),
    (B200, {"head": 192, "of_values": 128}, CUDNN), (A100, {"head": 192, "of_values": 128}, EFFICIENT),
    (H100, {"head": 32, "strides": (1,)}, MATH),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "call", "expected"), CALLS)
def test_attention_runs_the_kernel_that_the_gpu_chooses(gpu, call, expected):
    assert chosen(gpu, **call) == expected


def test_what_the_user_switches_on_and_puts_first_counts(monkeypatch):
    def under(*arguments: Any) -> Callable[..., Tensor]:
        def loss(model: nn.Module, x: Tensor) -> Tensor:
            with sdpa_kernel(*arguments):
                return mean(model, x)

        return loss

    assert kernel({}) == CUDNN
    assert kernel({}, loss=under([SDPBackend.MATH])) == MATH
    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert kernel({}, loss=under(order, True)) == EFFICIENT
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        assert chosen(H100) == FLASH
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(H100) == FLASH
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert kernel({"is_causal": True, "dropout_p": 0.1}) == FLASH
    with pytest.raises(policylang.PolicyGraphError, match="none of the attention kernels that are switched on"):
        kernel({}, dtype=torch.float32, loss=under([SDPBackend.FLASH_ATTENTION]))


def test_what_the_kernels_keep_has_the_sizes_of_the_gpu():
    """Heads of 20 are padded to 24; the logarithm of the memory-efficient sums is padded to 32 rows; a mask is what is
    added to the scores, aligned, and not one for every head."""
    with torch.device("meta"):
        model, long = Attention(head=20).to(HALF), torch.zeros(2, 33, 32, dtype=HALF)
    facts, _ = traced(model, long, capability="8.0")
    shapes = {facts.shapes[row] for row in facts.followers[facts.by_target[f"{FLASH}.default"][0]]}
    assert {(2, 4, 33, 24), (2, 4, 33)} <= shapes
    mask = torch.ones(33, 33, dtype=torch.bool)
    facts, _ = traced(Attention().to(HALF), long, long, mask, capability="8.0")
    (row,) = facts.by_target[f"{EFFICIENT}.default"]
    assert (2, 4, 64) in {facts.shapes[other] for other in facts.followers[row]}
    bias = next(each for each in facts.inputs[row] if facts.targets[each] == "aten.expand.default")
    assert (facts.shapes[bias], facts.strides[bias]) == ((2, 4, 33, 33), (0, 0, 40, 1))


class Others(nn.Module):
    """What else depends on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.linear, self.rms, self.layer = nn.Linear(8, 8), nn.RMSNorm(8), nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        assert x.is_cuda
        assert torch.cuda.get_device_capability(x.device) == (8, 9)
        scale = torch.tensor([1.0, 2.0], device=x.device)[1].item()
        return F.mish(F.silu(self.dropout(self.layer(self.rms(self.linear(x)))))).cuda() * scale


def test_other_operators_that_have_kernels_of_their_own_on_a_gpu():
    with torch.device("meta"):
        model = Others()
    facts, targets = traced(model, torch.zeros(2, 3, 8, 8), capability="8.9")
    once = ("_fused_rms_norm", "_fused_rms_norm_backward", "native_layer_norm", "native_layer_norm_backward")
    once += ("native_dropout", "native_dropout_backward", "convolution", "convolution_backward")
    once += ("silu", "silu_backward", "mish", "mish_backward", "native_batch_norm_backward")
    assert {name: targets[f"aten.{name}.default"] for name in once} == dict.fromkeys(once, 1)
    assert traced_on(facts) == {"cuda"}
    assert not list(kernel_findings(facts))


@pytest.mark.slow
def test_the_operators_with_kernels_of_their_own_are_those_that_torch_is_built_from():
    yaml, torchgen = pytest.importorskip("yaml"), pytest.importorskip("torchgen")
    functions = yaml.safe_load((Path(torchgen.__path__[0]) / "packaged/ATen/native/native_functions.yaml").read_text())
    names = {function["func"].partition("(")[0]: function for function in functions}
    found = set()
    for name, function in names.items():
        delegate = names.get(function.get("structured_delegate", ""), {})
        keys = {
            key.strip() for each in (function, delegate) for word in each.get("dispatch", {}) for key in word.split(",")
        }
        if {"CUDA", "CompositeImplicitAutograd"} <= keys:
            found.add(name)
    assert found == set(ON_CUDA)


def test_autocast_is_that_of_the_gpu():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).float().mean()

    with torch.device("meta"):
        model = nn.Sequential(Attention(), nn.Flatten(2), nn.Softmax(-1))
    facts, _ = traced(model, torch.zeros(2, 32, 32), loss=loss, capability="8.0")
    assert attention_kernels(facts) == {f"{FLASH}.default": 1}
    (softmax,) = facts.by_target["aten._softmax.default"]
    assert facts.dtypes[softmax] == "float32"  # on a GPU autocast asks for it, on a CPU it does not


def test_wherever_the_model_is_and_whatever_its_step_does_the_graph_is_the_same():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        first = mean(model, x[:1])
        first.backward()  # a loss in chunks
        (slope,) = torch.autograd.grad(mean(model, x), model.query.weight, create_graph=True)
        return mean(model, x) + slope.square().sum()

    graphs = []
    for context in (torch.device("cpu"), torch.device("meta"), FakeTensorMode()):
        with context:
            model, batch = Attention(), torch.zeros(2, 32, 32)
        facts, _ = traced(model, batch, loss=loss_of_math(loss), capability="8.0")
        graphs.append((facts.targets, facts.shapes, facts.devices))
    assert graphs[0] == graphs[1] == graphs[2]


def loss_of_math(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A fused attention has no second derivative."""

    def under(model: nn.Module, x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            return loss(model, x)

    return under


def test_a_step_of_an_optimizer_and_tied_weights():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, device="meta"))
    model[1].weight = model[0].weight
    model[1].bias = model[0].bias
    optimizer = torch.optim.AdamW(model.parameters())
    mean(model, torch.zeros(2, 8)).backward()
    optimizer.step()
    step = policylang.trace_step(model, mean, torch.zeros(2, 8), optimizer=optimizer, device="cuda")
    facts = collect(step.gm)
    assert facts.input_names.count("0.weight") == 1
    assert {facts.devices[row] for row in facts.forward} == {"cuda:0"}
    with pytest.raises(policylang.PolicyGraphError, match=r"APL615.*traced as on `cuda, compute capability 9.0`"):
        step(torch.zeros(2, 8))


def test_dtensors_of_a_mesh_of_cpu_processes():
    with fake_ranks(4, rank=1):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        here = collect(policylang.trace_step(model, mean, torch.zeros(4, 8)).gm)
        there, _ = traced(model, torch.zeros(4, 8))
        assert (there.targets, there.shapes) == (here.targets, here.shapes)
        assert traced_on(there) == {"cuda"}
        assert mesh.device_type == "cpu"


def test_flex_attention_which_has_no_backward_on_a_cpu():
    class Flex(Attention):
        def forward(self, x: Tensor, *_others: Any) -> Tensor:
            query = self.query(x).unflatten(-1, (4, -1)).transpose(1, 2)
            return flex_attention(query, query, query, score_mod=lambda score, b, h, q, k: torch.tanh(score))

    facts, targets = traced(Flex(), torch.zeros(1, 128, 32))
    assert attention_kernels(facts) == {"higher_order.flex_attention": 1}
    assert targets["higher_order.flex_attention_backward"] == 1


def test_nothing_is_left_behind_and_nothing_allocated():
    before = torch.Tensor._make_wrapper_subclass, torch.autograd.graph._engine_run_backward, torch.cuda.is_available
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16384, 16384) for _ in range(8)))  # 8 GiB
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    traced(model, torch.zeros(1, 16384))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown < 2**19  # KiB
    with pytest.raises(policylang.PolicyGraphError, match="APL363"):
        traced(nn.Linear(4, 4), torch.zeros(2, 4), loss=lambda model, x: 1 / 0)
    after = torch.Tensor._make_wrapper_subclass, torch.autograd.graph._engine_run_backward, torch.cuda.is_available
    assert before == after
    assert "_make_wrapper_subclass" not in vars(torch.Tensor)
    assert "cuda" in vars(FunctionalTensor)
    with FakeTensorMode():
        fake = torch.empty(1, 1, 8, 8, device="cuda", dtype=HALF)
        assert F.scaled_dot_product_attention(fake, fake, fake).shape == (1, 1, 8, 8)
    model = nn.Linear(4, 4)
    _loss, gradients = policylang.trace_step(model, mean, torch.ones(2, 4))(torch.ones(2, 4))
    assert gradients["bias"].device.type == "cpu"


def test_where_nothing_depends_on_the_device_the_operators_are_the_cpus():
    """Not one of them comes in through the back door of autograd."""
    model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8), nn.Mish(), nn.Linear(8, 1))
    here = collect(policylang.trace_step(model, mean, torch.zeros(2, 8)).gm)
    there, _ = traced(model, torch.zeros(2, 8))
    assert (there.targets, there.shapes, there.inputs) == (here.targets, here.shapes, here.inputs)


def test_a_tensor_that_stays_on_the_cpu_is_named():
    mask = torch.ones(32, 32, dtype=torch.bool)
    with pytest.raises(policylang.PolicyGraphError, match=r"cuda:0(,| and) cpu") as refused:
        traced(Attention().to(HALF), X, loss=lambda model, x: mean(model, x, x, mask))
    assert "make it a buffer" in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"device": "mps"}, "no step can be traced as on `mps`"),
        ({"device": "gpu"}, "no step can be traced as on `gpu`"),
        ({"device": "cpu", "compute_capability": "8.0"}, "belongs to a GPU"),
        ({"device": "cuda", "compute_capability": "sm_80"}, "`sm_80` is no compute capability"),
        ({"compute_capability": (8,)}, "`8` is no compute capability"),
    ],
)
def test_devices_that_no_step_is_traced_for(arguments, said):
    with pytest.raises(policylang.PolicyGraphError, match=f"APL613.*{said}"):
        policylang.trace_step(nn.Linear(4, 4), mean, torch.zeros(2, 4), **arguments)


@pytest.mark.slow
def test_recurrent_layers_are_said_to_run_otherwise():
    def first(model: nn.Module, x: Tensor) -> Tensor:
        return mean(lambda x: model(x)[0], x)

    with torch.device("meta"):
        model, other = nn.LSTM(8, 8, batch_first=True, dtype=HALF), nn.GRU(8, 8, batch_first=True, dtype=HALF)
    for each in (model, other):
        if each is other and VERSION < (2, 15):
            with pytest.raises(policylang.PolicyGraphError, match=r"the sizes of what `aten._thnn_fused_gru_cell"):
                traced(each, X[..., :8], loss=first)
            continue
        facts, _ = traced(each, X[..., :8], loss=first)
        (found,) = kernel_findings(facts)
        assert (found.code, found.message.split(",")[0]) == ("APL319", "a recurrent layer was traced as 32 cells")


POLICY = "include <llama3_sac>\nundecided -> save"
MIB, GIB = 2**20, 2**30


def language_model(config: Any, layers: int, **sizes: Any) -> nn.Module:
    sizes |= {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
            config(num_hidden_layers=layers, **sizes), dtype=torch.bfloat16
        )


def qwen3_8b(layers: int) -> nn.Module:
    return language_model(transformers.Qwen3Config, layers, intermediate_size=12288, head_dim=128, vocab_size=151936)


def llama3_8b(layers: int) -> nn.Module:
    sizes = {"intermediate_size": 14336, "vocab_size": 128256, "rope_theta": 500000.0}
    return language_model(transformers.LlamaConfig, layers, **sizes)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def qwen_step(layers: int, **device: Any) -> Facts:
    ids = torch.zeros(1, 4096, dtype=torch.long, device="cpu" if device else "meta")
    return collect(policylang.trace_step(qwen3_8b(layers), loss, ids, **device).gm)


def outcome(facts: Facts, capabilities: Any = FLAT) -> Any:
    return saved_and_recomputed(plan(policylang.parse(POLICY), facts, capabilities))


def test_a_model_on_meta_and_a_batch_that_is_not_are_told_about_devices():
    ids = torch.zeros(1, 4, dtype=torch.long)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    with pytest.raises(policylang.PolicyGraphError, match=r'trains on: `device="cuda"`'):
        policylang.trace_step(model, lambda model, ids: (model[1](model[0](ids)) + torch.ones(4, 8)).mean(), ids)


@pytest.mark.slow
def test_what_a_block_of_qwen3_keeps_is_what_its_shapes_say():
    facts = qwen_step(2, device="cuda")
    assert attention_kernels(facts) == {"aten._scaled_dot_product_cudnn_attention.default": 2}
    hidden, keys, gate = 4096 * 4096 * 2, 4096 * 1024 * 2, 4096 * 12288 * 2
    attention = hidden + 32 * 4096 * 4 + 2 * 8  # its output, a logarithm a row and head, seed and offset of dropout
    # the products with q, v and gate; the first residual, and the hidden state that the block hands on
    assert outcome(facts).saved_bytes_by_block[0] == hidden + keys + gate + attention + 2 * hidden == 243_793_936


@pytest.mark.slow
def test_qwen3_8b_keeps_an_eighth_of_what_meta_says():
    fused = outcome(qwen_step(36, device="cuda", compute_capability="8.0")).saved_bytes / GIB
    with_scores = outcome(qwen_step(36)).saved_bytes / GIB
    assert (round(fused, 1), round(with_scores, 1)) == (10.6, 83.7)


@pytest.mark.slow
def test_llama3_8b_runs_the_kernels_of_the_recorded_step_and_keeps_its_bytes():
    """The recording is TorchTitan's model as AutoParallel traces it: products are `einsum`, casts an operator of
    AutoParallel's, SiLU is written out."""
    graph = shared_graph(ONE_DEVICE)
    for node in graph.graph.nodes:
        node.meta.pop("recompute", None)  # what its own checkpoint had tagged
    recorded = collect(graph)
    step = policylang.trace_step(
        llama3_8b(32),
        lambda model, ids: model(input_ids=ids).logits.float().mean(),
        torch.zeros(32, 8192, dtype=torch.long),
        device="cuda",
        compute_capability="8.0",
    )
    traced = collect(step.gm)
    assert attention_kernels(traced) == attention_kernels(recorded)
    assert counts(traced, "aten.mm.default") == counts(recorded, "aten.einsum.default")
    assert sum(counts(traced, "aten.mm.default")) == 3 * (7 * 32 + 1)
    for name in ("_scaled_dot_product_flash_attention_backward", "pow.Tensor_Scalar", "mean.dim", "rsqrt"):
        target = f"aten.{name}" if "." in name else f"aten.{name}.default"
        assert counts(traced, target) == counts(recorded, target)
    (first, *_), (other, *_) = (
        facts.by_target["aten._scaled_dot_product_flash_attention.default"] for facts in (traced, recorded)
    )
    assert kept_by(traced, first) == kept_by(recorded, other)

    here, there = outcome(traced), outcome(recorded, JOINT)
    assert here.recomputed_flops_by_block == there.recomputed_flops_by_block
    assert here.saved_bytes_by_block == there.saved_bytes_by_block


def counts(facts: Facts, target: str) -> tuple[int, int]:
    """In the forward, and in the backward."""
    found = Counter(phase for phase, each in zip(facts.phases, facts.targets, strict=True) if each == target)
    return found[Phase.FORWARD], found[Phase.BACKWARD]


def kept_by(facts: Facts, row: int) -> set[Any]:
    """The shapes of the large results of an operator."""
    return {facts.shapes[each] for each in facts.followers[row] if facts.bytes[each] > MIB}


CPP = "policylang.torch_compat.absent_cuda.torch"


def test_a_torch_that_lacks_what_it_takes_is_refused_before_it_can_abort(monkeypatch, tmp_path):
    monkeypatch.setattr(f"{CPP}.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(policylang.PolicyGraphError, match=r"APL613.*has no library libc10"):
        traced(nn.Linear(4, 4), torch.zeros(2, 4))


def test_a_build_with_cuda_that_hides_its_hooks_is_refused_too(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    for found in (Path(torch.__file__).parent / "lib").glob("libc10.*"):
        (tmp_path / "lib" / found.name).symlink_to(found)
    monkeypatch.setattr(f"{CPP}.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr(f"{CPP}.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(policylang.PolicyGraphError, match=r"APL613.*has no library libtorch_cpu"):
        traced(nn.Linear(4, 4), torch.zeros(2, 4))


def test_a_build_with_cuda_is_lent_the_hooks_of_one_without(monkeypatch):
    hooks, without_cuda = cuda_hooks()
    before, seen = hooks.value, []
    assert (before == without_cuda) is not torch.backends.cuda.is_built()
    monkeypatch.setattr(f"{CPP}.backends.cuda.is_built", lambda: True)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(hooks.value)
        return mean(model, x)

    traced(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss)
    assert (seen, hooks.value) == ([without_cuda], before)


def test_what_a_model_asks_of_the_gpu_that_does_not_change_the_step():
    class Asks(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            torch.cuda.set_device(x.device)
            self.flatten_parameters()
            with torch.random.fork_rng(), torch.cuda.device(x.device):
                torch.cuda.manual_seed(torch.cuda.get_rng_state().numel())
                assert torch.backends.cudnn.version() >= 90_000
            return super().forward(x)[0]  # type: ignore[no-any-return]

    here, _ = traced(nn.LSTM(4, 4), torch.zeros(2, 4), loss=lambda model, x: mean(lambda x: model(x)[0], x))
    there, _ = traced(Asks(4, 4), torch.zeros(2, 4))
    assert there.targets == here.targets
    with pytest.raises(policylang.PolicyGraphError, match=r"APL363.*asks torch.cuda for what only a GPU has"):
        traced(
            nn.Linear(4, 4),
            torch.zeros(2, 4),
            loss=lambda model, x: mean(model, x) * torch.cuda.mem_get_info()[0],
        )


def test_a_machine_with_a_gpu_is_lent_nothing(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("policylang.tracing.capture.absent_cuda", lambda *_: pytest.fail("something is lent"))
    monkeypatch.setattr("policylang.tracing.target_device.autocast_to", lambda *_: pytest.fail("something is lent"))
    device = target_device("cuda")
    assert device == TargetDevice("cuda")
    with tracing_for(device), _kernels_of(device) as functional:
        assert type(functional) is type(functionalized())
