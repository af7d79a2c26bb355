"""``torch.compile(backend="policylang")``: options, and graphs that return what their backward reads."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.utils import _pytree as pytree

import policylang
from policylang import PolicyMatchError, PolicyMeaningError
from policylang.backends.torch_compile.inductor import Inner
from policylang.torch_compat import eager
from tests.support import models
from tests.support.compiled import assert_bitwise_equal, backend_for, train
from tests.support.drawn import crossed, slow
from tests.support.joint import capture_joint
from tests.support.models import Layers, counter, mlp

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "products.apl"
    path.write_text("recompute everything\nsave matmul\n", encoding="utf-8")
    return path


def named(**options: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, backend="policylang", options=options or None)


def run(**options: Any) -> None:
    model, inputs, _ = mlp()
    named(**options)(model)(*inputs)


def test_the_backend_is_found_by_name(policy_file: Path) -> None:
    assert "policylang" in torch._dynamo.list_backends()
    without = train(mlp())
    example = mlp()
    assert_bitwise_equal(train(example, named(policy=str(policy_file), inner="aot_eager")), without)
    report = policylang.report(example.module)
    assert [rule.text for rule in report.rules] == ["recompute everything", "save matmul"]
    assert report.saved.names


def test_a_changed_file_is_read_again(policy_file: Path) -> None:
    example = mlp()
    compiled = named(policy=policy_file, inner="aot_eager")
    example.loss_fn(compiled(example.module)(*example.inputs)).backward()
    policy_file.write_text("save everything\n", encoding="utf-8")
    torch._dynamo.reset()
    example.loss_fn(compiled(example.module)(*example.inputs)).backward()
    assert [rule.text for rule in policylang.report(example.module).rules] == ["save everything"]


@pytest.mark.parametrize(
    ("options", "code", "message", "help"),
    [
        ({}, "APL250", 'the backend "policylang" needs a policy', 'options={"policy": "llama3_sac.apl"}'),
        ({"policy": "/nowhere.apl"}, "APL103", "nowhere.apl", ""),
        ({"policy": "a.apl", "iner": ""}, "APL250", "unknown option `iner`", "did you mean `inner`?"),
        (
            {"policy": "save_all", "inner": "aot_eager", "max_autotune": True},
            "APL250",
            "unknown option `max_autotune`",
            "",
        ),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], code: str, message: str, help: str) -> None:
    with pytest.raises(PolicyMeaningError) as caught:
        run(**options)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert message in diagnostic.message
    assert help in (diagnostic.help or "")


def test_all_the_errors_of_a_policy_reach_the_user(tmp_path: Path) -> None:
    path = tmp_path / "typos.apl"
    path.write_text("recompute everythin\nsave mmm\n", encoding="utf-8")
    with pytest.raises(PolicyMeaningError) as caught:
        run(policy=path)
    assert [diagnostic.span.text for diagnostic in caught.value.diagnostics] == ["everythin", "mmm"]
    text = str(caught.value)
    assert "did you mean" in text
    assert "TORCHDYNAMO" not in text
    assert "BackendCompilerFailed" not in text


def test_what_passes_through_dynamo_is_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyMeaningError) as caught:
        run(policy=tmp_path / "nowhere.apl")
    error, copy = caught.value, pickle.loads(pickle.dumps(caught.value))
    assert (type(error).__name__, type(copy)) == ("PolicyMeaningError", PolicyMeaningError)
    assert (copy.diagnostics, str(copy)) == (error.diagnostics, str(error))


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(PolicyMeaningError) as caught:
        run(policy=3, inner="nvcc", root=0)
    assert [diagnostic.message for diagnostic in caught.value.diagnostics] == [
        "the option `policy` is a path, not a int",
        "unknown inner compiler `nvcc`",
        "the option `root` is a module path, not a int",
    ]


def test_a_mode_that_does_not_exist(policy_file: Path) -> None:
    model, inputs, _ = mlp()
    with pytest.raises(PolicyMeaningError, match="warp-speed"):
        torch.compile(model, backend=policylang.backend(policy_file), mode="warp-speed")(*inputs)


@pytest.mark.parametrize("asked", ["mode", slow("option"), slow("setting")])
def test_no_cuda_graph_captures_copies_to_the_host(asked: str, tmp_path: Path) -> None:
    file = tmp_path / "moved.apl"
    file.write_text("undecided -> save\noptional offload mm, addmm\n", encoding="utf-8")
    backend, mode = policylang.backend(file), "reduce-overhead" if asked == "mode" else None
    options = {"triton.cudagraphs": True} if asked == "option" else None
    model, inputs, _ = mlp()
    set_to = torch._inductor.config.patch({"triton.cudagraphs": asked == "setting"})
    with set_to, pytest.raises(PolicyMeaningError) as caught:
        torch.compile(model, backend=backend, mode=mode, options=options)(*inputs)
    (found,) = caught.value.diagnostics
    assert (found.code, found.span and found.span.line) == ("APL338", 2)
    assert "which no CUDA graph captures" in found.message
    torch.compile(model, backend=policylang.backend(file), options={"triton.cudagraphs": False})(*inputs)


def test_a_mode_alone_is_told_where_modes_go() -> None:
    model, inputs, _ = mlp()
    with pytest.raises(PolicyMeaningError, match="needs a policy") as caught:
        torch.compile(model, backend="policylang", mode="reduce-overhead")(*inputs)
    assert 'backend=policylang.backend("llama3_sac.apl"), mode="reduce-overhead"' in str(caught.value)


def test_backend_checks_its_own_arguments(policy_file: Path) -> None:
    with pytest.raises(PolicyMeaningError, match="unknown inner compiler `nvcc`"):
        policylang.backend(policy_file, inner="nvcc")


def test_what_cannot_be_recomputed_is_raised_at_once() -> None:
    model, inputs, _ = counter()
    backend = backend_for("recompute everything")
    with pytest.raises(PolicyMatchError) as caught:
        torch.compile(model, backend=backend)(*inputs)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL304"
    assert "optional recompute everything" in str(diagnostic.help)


Function = Callable[[Tensor, Tensor, Tensor], Any]

POLICIES = {
    "auto": "undecided -> auto", "save": "undecided -> save", "recompute": "undecided -> recompute",
    "leave": "leave everything", "save products": "optional save matmul or mm or addmm",
    "recompute products": "optional recompute matmul or mm or addmm", "save everything": "save everything",
    "recompute everything": "optional recompute everything",
}  # fmt: skip
WITHOUT: dict[Inner, str] = {"aot_eager": "aot_eager_default_partitioner", "inductor": "inductor"}


# What a graph returns and its backward reads as well. Min-cut may move what the backward makes of such a value into the
# forward: then nothing of the backward reads it any more, and nobody keeps or repeats it.
def Returning(function: Function) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    w, v = (nn.Parameter(torch.randn(4, 4, generator=generator)) for _ in range(2))
    return models.Function(lambda model, x: function(x, model.w, model.v), w=w, v=v)


def step(module: nn.Module, x: Tensor, backend: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Every tensor that is returned, and every gradient."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    module.zero_grad()
    x = x.clone().requires_grad_()
    leaves = (
        leaf for leaf in pytree.tree_leaves(torch.compile(module, backend=backend)(x)) if isinstance(leaf, Tensor)
    )
    returned = [leaf for leaf in leaves if leaf.is_floating_point()]
    losses = [(number + 1) * (value.square() + value).sum() for number, value in enumerate(returned)]
    torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()
    return [value.detach() for value in returned], [x.grad, *(parameter.grad for parameter in module.parameters())]


KNOWN: dict[tuple[str, Inner], tuple[list[Tensor], list[Tensor | None]]] = {}
"""What comes of a named case without a policy."""


def assert_same_as_without(module: nn.Module, x: Tensor, text: str, inner: Inner, name: str = "") -> None:
    wanted = KNOWN.get((name, inner)) or step(module, x, WITHOUT[inner])
    if name:
        KNOWN[name, inner] = wanted
    backend = backend_for(text, inner)
    found = step(module, x, backend)
    close = {"rtol": 0.0, "atol": 0.0} if inner == "aot_eager" else {}  # Inductor fuses otherwise, and rounds otherwise
    torch.testing.assert_close(found, wanted, equal_nan=True, **close)
    audit = policylang.report(backend).audit
    assert audit.agrees


# --- activations at the end of a graph --------------------------------------------------------------------------------
_ARGUMENTS: dict[str, tuple[Any, ...]] = {"Softmax": (1,), "LogSoftmax": (1,), "Softmin": (1,), "Threshold": (0.1, 0.2)}
ACTIVATIONS = [name for name in nn.modules.activation.__all__ if name != "MultiheadAttention"]


def ending_in(activation: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    end = getattr(nn, activation)(*_ARGUMENTS.get(activation, ()))
    if activation == "Softmax2d":
        return nn.Sequential(nn.Conv2d(4, 4, 1), end), torch.randn(2, 4, 3, 3)
    return nn.Sequential(nn.Linear(16, 16), end), torch.randn(4, 16)


@pytest.mark.parametrize(
    "activation", ["ReLU", "GELU", "Softmax", *map(slow, ("Sigmoid", "Hardtanh", "PReLU", "Softplus"))]
)
def test_min_cut_beside_an_activation_at_the_end(activation: str) -> None:
    assert_same_as_without(*ending_in(activation), POLICIES["auto"], "aot_eager", activation)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_at_the_end_under_every_policy(activation: str, policy: str, inner: Inner) -> None:
    assert_same_as_without(*ending_in(activation), POLICIES[policy], inner, activation)


# --- values returned in other ways ------------------------------------------------------------------------------------
def written_before(x: Tensor, w: Tensor, v: Tensor) -> Any:
    clone = (x @ w).sigmoid().clone()
    clone[0] = 0
    return clone, clone @ v


def relu_of(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def in_place(x: Tensor, w: Tensor, v: Tensor) -> Any:
    value = x @ w
    return value, value.relu_(), value @ v


RETURNING: dict[str, Function] = {
    "read": lambda x, w, v: ((c := x @ w), c @ w),
    "twice": lambda x, w, v: ((c := x @ w), c),
    "read and twice": lambda x, w, v: ((c := relu_of(x, w)), c @ v, c),
    "views": lambda x, w, v: ((c := x @ w), c.t(), c.view(-1)),
    "views that are read": lambda x, w, v: ((c := relu_of(x, w)), c.t(), (c.t() @ v).sigmoid()),
    "as they came in": lambda x, w, v: (x, x @ w, w),
    "inputs and views of them": lambda x, w, v: (x, w.t(), v, (x @ w * w).relu()),
    "one after the other": lambda x, w, v: ((a := relu_of(x, w)), (a @ v).relu()),
    "the same one at both ends": lambda x, w, v: ((b := ((x @ w).sigmoid() * v).tanh()), x @ w, b),
    "pieces": lambda x, w, v: ((a := relu_of(x, w)), *a.split(2), a.split(2)[0] @ v),
    "a gradient": lambda x, w, v: (x.exp() * v, x.exp(), (x * w).exp(), w.exp()),
    "a softmax and its maximum": lambda x, w, v: ((a := (x @ w).softmax(-1)), a @ v, a.max(-1)[0]),
    "detached": lambda x, w, v: ((a := relu_of(x, w)), a.detach(), (a.detach() @ v).exp()),
    "dropped out": lambda x, w, v: ((a := torch.dropout(x @ w, 0.5, True)), (a @ v).relu()),
    "beside what is no tensor": lambda x, w, v: ((a := relu_of(x, w)), 3, None, a > 0, a @ v),
    "nested": lambda x, w, v: {"a": (a := relu_of(x, w)), "b": [a, (a @ v, a.t())]},
    "of a norm": lambda x, w, v: ((a := nn.functional.layer_norm(x @ w, (4,), v[0], v[1])), a.relu(), a.mean()),
    "the largest": lambda x, w, v: (*relu_of(x, w).topk(2), relu_of(x, w).sum()),
    "written to": in_place,
    "written to before": written_before,
}

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("inner", ["aot_eager", slow("inductor")])
@pytest.mark.parametrize(("function", "policy"), crossed(RETURNING, POLICIES))
def test_values_that_are_returned(function: str, policy: str, inner: Inner) -> None:
    assert_same_as_without(Returning(RETURNING[function]), X, POLICIES[policy], inner, function)


def test_what_min_cut_moved_a_reader_of_is_neither_kept_nor_repeated() -> None:
    """The product that is returned: the backward reads its transpose, which min-cut has the forward keep."""
    backend = backend_for("undecided -> auto")
    step(Returning(RETURNING["read"]), torch.ones(4, 4), backend)
    report = policylang.report(backend)
    assert report.saved.bytes == 4 * 4 * 4
    assert not report.recomputed.names


def test_the_seeds_of_inductors_dropout_are_kept_and_its_numbers_drawn_again() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    x = torch.randn(4, 16)
    backend = backend_for("recompute everything", "inductor")
    wanted = step(module, x, "inductor")
    torch.testing.assert_close(step(module, x, backend), wanted)
    report = policylang.report(backend)
    assert report.saved.names == ("inductor_seeds_default",)
    assert report.decisions["inductor_seeds_default"].reason.startswith("a seed")


# --- random modules ---------------------------------------------------------------------------------------------------
ONE = (
    Tensor.relu, Tensor.sigmoid, Tensor.tanh, Tensor.t, Tensor.detach, Tensor.clone, Tensor.contiguous,
    lambda a: a.softmax(-1), lambda a: a.reshape(-1).view(4, 4), lambda a: a.chunk(2)[1].repeat(2, 1),
    lambda a: a.clone().mul_(0.5), lambda a: a.sum(0, keepdim=True).expand(4, 4),
    lambda a: a.max(-1, keepdim=True)[0] * a, lambda a: torch.dropout(a, 0.5, True),
)  # fmt: skip
TWO = (torch.mm, torch.mul, torch.add, torch.minimum, lambda a, b: torch.where(a > b, a, b))


@st.composite
def functions(draw: st.DrawFn) -> Function:
    """Some operators on earlier values, and some of the values returned, some of them twice."""
    calls: list[tuple[Any, tuple[int, ...]]] = []
    for count in range(3, 3 + draw(st.integers(1, 7))):
        reads = draw(st.sampled_from([1, 2]))
        operator = draw(st.sampled_from(ONE if reads == 1 else TWO))
        calls.append((operator, tuple(draw(st.integers(max(0, count - 4), count - 1)) for _ in range(reads))))
    returned = draw(st.lists(st.integers(0, 2 + len(calls)), min_size=1, max_size=5))

    def function(*given: Tensor) -> Any:
        values = list(given)
        for operator, reads in calls:
            values.append(operator(*(values[read] for read in reads)))
        return (values[-1] * given[1], *(values[number] for number in returned))

    return function


def same_for_random_modules(function: Function, policy: str) -> None:
    assert_same_as_without(Returning(function), torch.linspace(-1, 1, 16).view(4, 4), POLICIES[policy], "aot_eager")


@settings(max_examples=6)
@given(functions(), st.sampled_from(sorted(POLICIES)))
def test_random_modules_that_return_values_of_the_middle(function: Function, policy: str) -> None:
    same_for_random_modules(function, policy)


@pytest.mark.slow
@settings(max_examples=600)
@given(functions(), st.sampled_from(sorted(POLICIES)))
def test_many_random_modules_that_return_values_of_the_middle(function: Function, policy: str) -> None:
    same_for_random_modules(function, policy)


# --- CUDA graphs: what halves run can be captured wherever the traced step can ---
RECOMPUTE = "recompute everything\noptional save matmul"


def not_captured(*graphs: fx.GraphModule) -> list[str]:
    return [str(node.target) for each in graphs if (node := get_first_incompatible_cudagraph_node(each)) is not None]


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "resnet"])
def test_halves_can_be_captured_where_the_step_can(name: str) -> None:
    joint = capture_joint(*models.ZOO[name]())
    assert not_captured(joint.gm) == []
    assert not_captured(*joint.halves(policylang.parse(RECOMPUTE))) == []


@pytest.mark.parametrize("safe", [True, False])
def test_random_numbers_are_drawn_again_by_a_generator_that_a_capture_knows(safe, monkeypatch) -> None:
    """As on a GPU, where the state is a generator that both halves are given. A CPU has none such: its state is a
    tensor that is read as the step runs, which no capture allows."""
    joint = capture_joint(*models.ZOO["dropout"]())
    if safe:
        if not hasattr(partitioners, "supports_graphsafe_rng"):
            pytest.skip("this torch asks for CUDA itself")
        made = partitioners.apply_graphsafe_rng_functionalization

        def as_numbered(*arguments: object) -> object:  # a GPU has a number
            return made(*(torch.device("cpu", 0) if isinstance(each, torch.device) else each for each in arguments))

        monkeypatch.setattr(partitioners, "supports_graphsafe_rng", lambda _device: True)
        monkeypatch.setattr(partitioners, "get_default_generator", lambda _device: torch.Generator())
        monkeypatch.setattr(partitioners, "apply_graphsafe_rng_functionalization", as_numbered)
    forward, backward = joint.halves(policylang.parse("recompute everything"))
    assert not_captured(forward, backward) == ([] if safe else ["run_and_save_rng_state", "run_with_rng_state"])
    inputs = (half.graph.find_nodes(op="placeholder") for half in (forward, backward))
    given = [sum(isinstance(node.meta.get("val"), torch.Generator) for node in each) for each in inputs]
    assert given[0] == given[1]
    assert bool(given[0]) == safe


def test_an_eager_checkpoint_reads_no_generator_where_nothing_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture allows no reading of a generator, and torch's own checkpoint does it unless it is told not to."""
    model = Layers(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    policylang.checkpoint_model(model, policylang.parse("recompute everything"), preserve_rng_state=False)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        for module, name in ((torch, "get_rng_state"), (eager, "default_generator")):
            monkeypatch.setattr(module, name, lambda *_: pytest.fail("a generator is read"))
