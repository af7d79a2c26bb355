"""Which graph input is a parameter, and what it is called."""

from typing import Any

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, InputKind
from policylang.graph.phases import ModulePaths, normalise, raw_path
from tests.graph.captured import facts_of_model, joint_of
from tests.support.drawn import drawn, slow
from tests.support.models import ZOO, Function
from tests.support.sharded import fake_ranks


def kinds_and_names(facts: Facts) -> list[tuple[InputKind, str]]:
    rows = [row for row in range(len(facts)) if facts.ops[row] == "placeholder"]
    return [(InputKind(facts.input_kinds[row]), facts.input_names[row]) for row in rows]


def facts_while_compiling(run: Any, *inputs: Any, dynamic: bool = False) -> Facts:
    """The facts that a partitioner collects in the midst of ``torch.compile``."""
    found: list[Facts] = []

    def partition(gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        found.append(collect(gm, static_inputs=options.get("static_lifetime_input_indices")))
        return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def keep(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        return gm

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    torch.compile(run, backend=backend, dynamic=dynamic)(*inputs)
    torch._dynamo.reset()
    return found[0]


SLOW = [slow(name, True) for name in ("resnet", "shared_parameters")]


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [("counter", False), ("shared_parameters", False), ("mlp", True), slow("mlp", False), slow("resnet", False), *SLOW],
)
def test_under_dynamo_parameters_and_buffers_have_the_names_of_the_module(name: str, dynamic: bool) -> None:
    module, inputs, _ = ZOO[name]()
    found = kinds_and_names(facts_while_compiling(module, *inputs, dynamic=dynamic))
    parameters = {path for kind, path in found if kind is InputKind.PARAMETER}
    buffers = {path for kind, path in found if kind is InputKind.BUFFER}
    assert parameters == {path for path, _ in module.named_parameters()}
    assert buffers == {path for path, _ in module.named_buffers()}


@pytest.mark.parametrize("name", ["mlp", "resnet", "llama"])
def test_without_names_a_parameter_is_what_is_static_and_gets_a_gradient(name: str) -> None:
    joint = joint_of(name)
    facts = collect(joint.gm, static_inputs=joint.static_lifetime_input_indices)
    found = [kind for kind, _ in kinds_and_names(facts)]
    module = ZOO[name]().module
    assert found.count(InputKind.PARAMETER) == len(list(module.parameters()))
    assert found.count(InputKind.TANGENT) == 1
    assert InputKind.USER in found


def frozen() -> nn.Module:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        model.unused(x)
        return model.adapter(model.base(x)) * y.shape[0]

    parts = {name: nn.Linear(4, 4) for name in ("base", "adapter", "unused")}
    parts["base"].requires_grad_(False)
    return Function(forward, **parts)


def test_a_frozen_parameter_is_a_parameter() -> None:
    found = kinds_and_names(facts_while_compiling(frozen(), torch.randn(3, 4), torch.randn(5, 2)))
    names = {path for kind, path in found if kind is InputKind.PARAMETER}
    assert {"base.weight", "base.bias", "adapter.weight", "adapter.bias"} <= names


class Extras(nn.Module):
    """Reads the sizes of tensors that the graph does not take, before, between and behind those it does."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.up.weight
        self.base = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.register_buffer("scale", torch.ones(4))
        self.extra = [torch.empty(3, 4) for _ in range(5)]
        self.at = at

    def reads(self, step: int) -> int:
        return self.extra[step].shape[0] if step in self.at else 3

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x) * self.reads(0)
        x = x * self.scale * self.reads(1)
        x = self.down(x) * self.reads(2)
        x = x @ self.base * self.reads(3)
        return self.head(x) * self.reads(4)


@pytest.mark.parametrize("at", [set(), {0, 4}, {1, 3}, {0, 1, 2, 3, 4}])
def test_tensors_of_which_only_the_size_is_read_change_nothing(at: set[int]) -> None:
    found = kinds_and_names(facts_while_compiling(Extras(at), torch.randn(3, 4)))
    parameters = sorted(path for kind, path in found if kind is InputKind.PARAMETER)
    assert parameters == ["base", "down.bias", "down.weight", "up.bias", "up.weight"]
    assert [path for kind, path in found if kind is InputKind.BUFFER] == ["scale"]
    assert [kind for kind, _ in found].count(InputKind.USER) == 1


@pytest.mark.parametrize("named", [slow(True), False])
def test_sharded_parameters_and_buffers_beside_plain_ones(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DTensor comes as its local tensor and its mesh: the inputs behind it keep their places."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    if not named:
        monkeypatch.setattr("policylang.graph.phases.running_dynamo_inputs", list)
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))

        def sharded() -> DTensor:
            return distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)], src_data_rank=None)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Parameter(sharded()), nn.Parameter(sharded())
                self.bias = nn.Parameter(torch.randn(16))
                self.register_buffer("table", sharded())
                self.register_buffer("plain", torch.ones(16))

            def forward(self, x: Tensor, read: Tensor) -> Tensor:
                x = x * read.shape[0]
                for weight in (self.first, self.table, self.second):
                    x = x @ weight.full_tensor()
                return x * self.plain + self.bias

        facts = facts_while_compiling(Model(), torch.randn(3, 16), torch.randn(2))
    found = kinds_and_names(facts)
    kinds = [kind for kind, _ in found if kind is not InputKind.OTHER]
    assert sorted(kinds) == sorted(
        [InputKind.PARAMETER] * 3 + [InputKind.BUFFER] * 2 + [InputKind.USER, InputKind.TANGENT]
    )
    names = [path for kind, path in found if kind is InputKind.PARAMETER]
    assert sorted(names) == (["bias", "first", "second"] if named else [""] * 3)


def test_a_compiled_function_knows_the_parameters_that_it_closes_over() -> None:
    weight, other = nn.Parameter(torch.randn(4, 4)), torch.empty(3, 4)
    linear = nn.Linear(4, 4)

    def function(x: Tensor) -> Tensor:
        return linear(x * other.shape[0]) @ weight

    found = kinds_and_names(facts_while_compiling(function, torch.randn(2, 4, requires_grad=True)))
    assert [kind for kind, _ in found].count(InputKind.PARAMETER) == 3
    assert [kind for kind, _ in found].count(InputKind.USER) == 1


def test_the_names_of_one_compilation_are_not_given_to_another_graph() -> None:
    """A graph with other inputs that is planned while Dynamo is compiling."""
    inner = joint_of("mlp")
    found: list[Facts] = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.append(collect(inner.gm, static_inputs=inner.static_lifetime_input_indices))
        return gm

    torch._dynamo.reset()
    torch.compile(frozen(), backend=backend)(torch.randn(3, 4), torch.randn(5, 2))
    torch._dynamo.reset()
    assert {path for _, path in kinds_and_names(found[0])} == {""}


def test_two_modules_in_one_step_are_told_apart() -> None:
    left, right = nn.Linear(4, 4), nn.Linear(4, 4)

    def step(generator: nn.Module, critic: nn.Module, x: Tensor) -> Tensor:
        return critic(generator(x))

    found = kinds_and_names(facts_while_compiling(step, left, right, torch.randn(2, 4)))
    names = {path for kind, path in found if kind is InputKind.PARAMETER}
    assert names == {"generator.weight", "generator.bias", "critic.weight", "critic.bias"}


def test_descriptors_say_it_outright() -> None:
    graph = fx.Graph()
    descs = [
        ParamAOTInput("layers.0._checkpoint_wrapped_module.wq.weight"),
        BufferAOTInput("freqs"),
        SubclassGetAttrAOTInput(ParamAOTInput("head.weight"), "_local_tensor"),
        TangentAOTInput(PlainAOTOutput(0)),
    ]
    for index, desc in enumerate(descs):
        graph.placeholder(f"primals_{index}").meta["desc"] = desc
    graph.output(())
    assert kinds_and_names(collect(graph)) == [
        (InputKind.PARAMETER, "layers.0.wq.weight"),
        (InputKind.BUFFER, "freqs"),
        (InputKind.PARAMETER, "head.weight"),
        (InputKind.TANGENT, ""),
    ]


def test_a_parameter_read_by_get_attr_is_a_parameter() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    weight = nn.Parameter(torch.randn(4, 4))
    gm = make_fx(lambda x: x @ weight)(torch.randn(2, 4))
    facts = collect(gm)
    (row,) = [row for row in range(len(facts)) if facts.ops[row] == "get_attr"]
    assert facts.input_kinds[row] == InputKind.PARAMETER


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("L['self'].model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("L['fn'].model.layers.0", "model.layers.0"), ("L['self']", ""), ("", ""), ("model.layers.0", "model.layers.0"),
        ("L['self']._orig_mod.layers.3.mlp", "layers.3.mlp"),
        ("L['self'].layers.0._checkpoint_wrapped_module.attention.wq.weight", "layers.0.attention.wq.weight"),
        ("L['self']._fsdp_wrapped_module.layers.0._fsdp_wrapped_module.attn", "layers.0.attn"),
        ("L['self']._modules['layers']._modules['0']._modules['up']", "layers.0.up"),
        ("L['self']._modules['linear']._parameters['weight']", "linear.weight"),
        ("L['self'].layers[0].attn", "layers.0.attn"), ("L['self'].layers['0'].attn", "layers.0.attn"),
        ('L["self"].layers["12"].attn', "layers.12.attn"), ("getattr(L['self'].layers, '0').attn", "layers.0.attn"),
        ("getattr(getattr(L['self'].model.layers, '0'), 'self_attn').q_proj", "model.layers.0.self_attn.q_proj"),
        ("L['self']._export_root.layers.0.__dict__['_modules']['_checkpoint_wrapped_module'].norm", "layers.0.norm"),
        ("L['fn'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("G['model'].encoder.layers.1", "encoder.layers.1"),
    ],
)  # fmt: skip
def test_known_forms(raw: str, path: str) -> None:
    assert normalise(raw)[1] == path


COMPONENT = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True) | st.integers(0, 99).map(str)
PATH = st.lists(COMPONENT, min_size=1, max_size=6)
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@st.composite
def written(draw: st.DrawFn) -> tuple[str, str]:
    """A path in any mixture of the forms in which torch writes them, and the path itself."""
    path = draw(PATH)
    raw = draw(st.sampled_from(("L['self']", "L['model']", 'L["fn"]', "G['net']")))
    for component in path:
        form = draw(st.sampled_from(("dot", "modules", "key", "index", "getattr")))
        if form == "modules":
            raw += f"._modules['{component}']"
        elif form == "getattr":
            raw = f"getattr({raw}, '{component}')"
        elif form == "key":
            raw += f"['{component}']"
        elif form == "index" and component.isdigit():
            raw += f"[{component}]"
        else:
            raw += f".{component}"
        if draw(st.booleans()):
            raw += "." + draw(st.sampled_from(WRAPPERS))
    return raw, ".".join(path)


@drawn(40, 2000, written())
def test_every_mixture_of_forms_leads_to_the_same_path_and_normalising_twice_changes_nothing(case) -> None:
    raw, path = case
    assert normalise(raw)[1] == path
    assert normalise(path) == ("", path)


@drawn(40, 2000, st.text(max_size=60))
def test_any_text_gives_some_path(text: str) -> None:
    _, path = normalise(text)
    assert not path.startswith(".")
    assert ".." not in path


@pytest.mark.parametrize(
    ("prefix", "raw", "paths"),
    [
        ("", ("L['generator'].a.0", "L['critic'].a.0", "L['self'].a.0"), ("generator.a.0", "critic.a.0", "a.0")),
        ("", ("L['generator'].layers.0",), ("layers.0",)),  # one model is not named for its variable
        ("layers.7", ("L['self'].attention.wq", "L['self']"), ("layers.7.attention.wq", "layers.7")),
    ],
)
def test_paths_of_a_graph(prefix: str, raw: tuple[str, ...], paths: tuple[str, ...]) -> None:
    """Two models keep their names apart; a block compiled on its own lies where the caller says."""
    table = ModulePaths(prefix)
    added = [table.add(each) for each in raw]
    assert tuple(table.table()[each] for each in added) == paths
    assert table.table()[""] == ""


def test_a_backward_node_lies_where_its_forward_node_does() -> None:
    stack = {"1": ("L['self']", object), "2": ("L['self'].layers.0", object)}
    assert raw_path({"fwd_nn_module_stack": stack}) == "L['self'].layers.0"
    assert raw_path({"fwd_nn_module_stack": None}) == ""


def test_an_annotation_names_the_module_where_there_is_no_stack() -> None:
    assert raw_path({"custom": {"module_fqn": "layers.0.moe"}}) == "layers.0.moe"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama", "model.model.layers.1.self_attn.q_proj"),
        ("gpt2", "model.transformer.h.1.attn.c_attn"),
        pytest.param("bart", "model.model.decoder.layers.0.encoder_attn.k_proj", marks=pytest.mark.slow),
        ("resnet", "layers.1.bn2"),
        ("flex", "layers.1.qkv"),
    ],
)
def test_paths_of_real_models(model: str, expected: str) -> None:
    facts = facts_of_model(model)
    forward = {facts.modules[row] for row in facts.forward}
    backward = {facts.modules[row] for row in range(len(facts)) if row not in facts.forward}
    assert expected in forward
    assert expected in backward
    assert not any("_" + "modules" in path or "[" in path for path in forward)
