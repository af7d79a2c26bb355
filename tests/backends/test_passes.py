"""A policy as a pass: in lists of passes, and behind Inductor's hooks, with its caches."""

import pickle
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass

import policylang
from policylang.backends import caching
from policylang.backends.torch_compile.backend import PolicyPass
from policylang.errors import PolicyGraphError, PolicyMatchError, PolicyMeaningError
from policylang.torch_compat import compilers
from tests.support.flat_graphs import assert_bitwise_equal, flat_graph
from tests.support.joint import capture_joint
from tests.support.models import ZOO, llama

KEEPS_MATMULS = "recompute everything\nsave mm"
SAME_RULES = "# a comment moves every line\n\nrecompute  everything\nsave mm"
ONE_WORD_OTHER = "recompute everything\nrecompute mm"


def made(text: str) -> PolicyPass:
    return policylang.pass_(policylang.parse(text))


# --- in a list ----------------------------------------------------------------------------------------------------
def lint(gm: fx.GraphModule) -> fx.GraphModule:
    gm.graph.lint()
    return gm


def through(passes: list[Callable[[Any], Any]], gm: fx.GraphModule) -> fx.GraphModule:
    return reduce(lambda module, each: each(module), passes, gm)


@pytest.mark.slow
def test_in_a_list_of_passes_on_a_joint_graph():
    joint = capture_joint(*llama(1))
    gm = through([lint, policylang.pass_("llama3_sac"), lint], joint.gm)
    assert gm is joint.gm
    report = policylang.report(gm)
    tagged = [node.name for node in gm.graph.nodes if "recompute" in node.meta]
    assert tagged == [name for name, decision in report.decisions.items() if decision.rule]
    assert len(tagged) > 50


def test_in_a_list_of_passes_on_a_flat_graph():
    traced = flat_graph(llama(1))
    expected, flat = traced.fresh().run(), traced.fresh()
    gm = through([lint, policylang.pass_("llama3_sac"), lint], flat.gm)
    assert policylang.report(gm).audit.agrees
    assert_bitwise_equal(flat.run(), expected)


@pytest.mark.slow
def test_in_a_list_of_passes_on_halves():
    halves = capture_joint(*llama(1)).halves("save_all")
    for half, kind in zip(halves, ("forward", "backward"), strict=True):
        assert through([lint, made("optional fuse all_gather chains\nsave mm"), lint], half) is half
        with pytest.raises(PolicyGraphError, match=f"this is a {kind} graph of a partition"):
            through([lint, policylang.pass_("llama3_sac")], half)


def test_a_graph_comes_back_as_nothing_and_is_changed_in_place():
    by_module, by_graph = (capture_joint(*ZOO["mlp"]()).gm for _ in range(2))
    policy = made("recompute everything in block\nsave matmul")
    assert policy(by_module) is by_module
    assert policy(by_graph.graph) is None
    tags = [[node.meta.get("recompute") for node in gm.graph.nodes] for gm in (by_module, by_graph)]
    assert tags[0] == tags[1]
    assert policylang.report(by_graph).decisions == policylang.report(by_module).decisions


def test_other_arguments_of_passes_are_accepted_and_what_is_no_graph_is_refused():
    joint = capture_joint(*ZOO["mlp"]())
    assert made("save mm, addmm")(joint.gm, joint.joint_inputs) is joint.gm
    with pytest.raises(PolicyGraphError, match="with a graph module or a graph, and this is a `Linear`"):
        made("save mm")(nn.Linear(2, 2))


def test_a_policy_that_means_nothing_makes_no_pass(tmp_path):
    path = tmp_path / "mine.apl"
    path.write_text("save mmm\n")
    with pytest.raises(PolicyMeaningError, match="mmm"):
        policylang.pass_(path)


# --- the key ------------------------------------------------------------------------------------------------------
def test_the_uuid_is_that_of_the_rules_and_of_the_code_that_acts(monkeypatch: pytest.MonkeyPatch):
    key = made(KEEPS_MATMULS).uuid()
    assert isinstance(made(KEEPS_MATMULS), CustomGraphPass)
    assert made(SAME_RULES).uuid() == key
    assert made(ONE_WORD_OTHER).uuid() != key
    assert pickle.dumps(made(KEEPS_MATMULS)) == pickle.dumps(made(SAME_RULES))
    monkeypatch.setattr(caching, "code_digest", lambda: "of another version")
    assert made(KEEPS_MATMULS).uuid() != key


# --- behind Inductor's hooks --------------------------------------------------------------------------------------
class Step(NamedTuple):
    hits: int
    saved: list[tuple[int, ...]]
    """Shapes of what autograd holds between forward and backward."""
    gradient: Tensor


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of its own; torch reads the variable at every use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
        torch._dynamo.reset()


def compiled_step(policy: PolicyPass | None, hook: str = "joint_custom_pre_pass") -> Step:
    """Without a policy in eager."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((8, 6), (6, 5), (5, 3))))  # no kernel of C++
    batch = torch.randn(4, 8)
    before = compilers.cache_hits()
    saved: list[tuple[int, ...]] = []

    def pack(value: Tensor) -> Tensor:
        saved.append(tuple(value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        result = (module if policy is None else torch.compile(module, options={hook: policy}))(batch)
    result.sum().backward()
    gradient = module[0].weight.grad
    assert gradient is not None
    return Step(compilers.cache_hits() - before, sorted(saved), gradient)


INPUTS = [(4, 8), (5, 6), (3, 5)]
"""The batch and the later weights, which the backward reads whatever the policy says."""


def test_min_cut_does_what_the_tags_say_behind_either_hook_and_a_changed_word_misses_the_caches():
    plain = compiled_step(None)
    cold = compiled_step(made(KEEPS_MATMULS))
    assert compiled_step(made(KEEPS_MATMULS), "joint_custom_post_pass").saved == cold.saved
    assert (cold.hits, cold.saved) == (0, sorted([*INPUTS, (4, 6), (4, 5)]))
    warm = compiled_step(made(SAME_RULES))
    assert (warm.hits, warm.saved) == (1, cold.saved)
    other = compiled_step(made(ONE_WORD_OTHER))
    assert other.hits == 0
    assert other.saved != cold.saved
    for step in (cold, warm, other):
        assert torch.allclose(step.gradient, plain.gradient, rtol=1e-5, atol=1e-6)


def test_a_model_that_needs_no_gradients_runs_as_it_is():
    torch._dynamo.reset()
    module = nn.Linear(8, 8, bias=False)
    batch = torch.randn(4, 8)
    with torch.no_grad():
        result = torch.compile(module, options={"joint_custom_pre_pass": made(KEEPS_MATMULS)})(batch)
        assert torch.allclose(result, module(batch), atol=1e-6)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("prefer_save mm", "APL330", "min-cut knows no `prefer_save`"),
        ("save mm\nexpect saved <= 1 GiB", "APL330", "`expect saved <= 1 GiB` cannot be checked"),
        ("save mm\nfuse all_gather chains", "APL306", "which a hook of Inductor's cannot do"),
        ("offload mm", "APL306", "which a hook of Inductor's cannot do"),
        ("save mm in layers.*.atention", "APL301", "matches nothing"),
    ],
)
def test_what_cannot_be_done_behind_a_hook_is_refused_by_name(text: str, code: str, words: str):
    with pytest.raises(PolicyMatchError) as caught:
        compiled_step(made(text))
    assert [found.code for found in caught.value.diagnostics] == [code]
    assert words in str(caught.value)


def test_an_expectation_that_min_cut_has_no_say_in_is_checked():
    with pytest.raises(PolicyMatchError, match="expect saved <= 1 B"):
        compiled_step(made("save everything\nexpect saved <= 1 B"))


@pytest.mark.parametrize("hook", ["pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_a_hook_without_a_joint_graph_is_refused_by_name(hook: str):
    with pytest.raises(PolicyGraphError, match=f"behind `{hook}` this is a forward graph") as caught:
        compiled_step(made(KEEPS_MATMULS), hook)
    assert [found.code for found in caught.value.diagnostics] == ["APL331"]
