"""Module paths as the model's owner would write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policylang.graph.inputs import ModulePaths, normalise, raw_path
from tests.graph.captured import facts_of_model


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("L['self'].model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("L['fn'].model.layers.0", "model.layers.0"),
        ("L['self']", ""),
        ("", ""),
        ("model.layers.0", "model.layers.0"),
        ("L['self']._orig_mod.layers.3.mlp", "layers.3.mlp"),
        ("L['self'].layers.0._checkpoint_wrapped_module.attention.wq.weight", "layers.0.attention.wq.weight"),
        ("L['self']._fsdp_wrapped_module.layers.0._fsdp_wrapped_module.attn", "layers.0.attn"),
        ("L['self']._modules['layers']._modules['0']._modules['up']", "layers.0.up"),
        ("L['self']._modules['linear']._parameters['weight']", "linear.weight"),
        ("L['self'].layers[0].attn", "layers.0.attn"),
        ("L['self'].layers['0'].attn", "layers.0.attn"),
        ('L["self"].layers["12"].attn', "layers.12.attn"),
        ("getattr(L['self'].layers, '0').attn", "layers.0.attn"),
        ("getattr(getattr(L['self'].model.layers, '0'), 'self_attn').q_proj", "model.layers.0.self_attn.q_proj"),
        ("L['self']._export_root.layers.0.__dict__['_modules']['_checkpoint_wrapped_module'].norm", "layers.0.norm"),
        ("L['fn'].__closure__[0].cell_contents.layers.0", "layers.0"),
        ("G['model'].encoder.layers.1", "encoder.layers.1"),
    ],
)
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


@given(written())
def test_every_mixture_of_forms_leads_to_the_same_path(case: tuple[str, str]) -> None:
    raw, path = case
    assert normalise(raw)[1] == path


@given(written())
def test_normalising_twice_changes_nothing(case: tuple[str, str]) -> None:
    path = normalise(case[0])[1]
    assert normalise(path) == ("", path)


@given(st.text(max_size=60))
def test_any_text_gives_some_path(text: str) -> None:
    _, path = normalise(text)
    assert not path.startswith(".")
    assert ".." not in path


def test_two_models_in_one_graph_keep_their_names_apart() -> None:
    paths = ModulePaths()
    raw = [paths.add("L['generator'].layers.0"), paths.add("L['critic'].layers.0"), paths.add("L['self'].layers.0")]
    table = paths.table()
    assert [table[each] for each in raw] == ["generator.layers.0", "critic.layers.0", "layers.0"]


def test_one_model_is_not_named_for_its_variable() -> None:
    paths = ModulePaths()
    raw = paths.add("L['generator'].layers.0")
    assert paths.table()[raw] == "layers.0"


def test_a_block_compiled_on_its_own_lies_where_the_caller_says() -> None:
    paths = ModulePaths("layers.7")
    inner, own = paths.add("L['self'].attention.wq"), paths.add("L['self']")
    table = paths.table()
    assert (table[inner], table[own], table[""]) == ("layers.7.attention.wq", "layers.7", "")


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
        ("bart", "model.model.decoder.layers.0.encoder_attn.k_proj"),
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
