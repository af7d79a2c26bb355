"""The same policy on every path of real models: the same decisions and numbers, and one register of paths."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

import policylang
from policylang.backends.path import BackendPath, path_named
from policylang.commands.agree import agree_arguments
from policylang.commands.plan import plan_arguments
from policylang.graph.facts import Facts, GraphKind
from policylang.language.resources import policies_folder
from policylang.language.syntax import Policy
from policylang.planning import capabilities
from policylang.testing import agree, agreement
from policylang.testing.agreement import STEPS, Agreement, Numbers
from tests.backends.eager import test_measured_device as measured
from tests.support.drawn import drawn
from tests.support.fused_process import MESH
from tests.support.lines import NAMES, Layers, placements_of
from tests.support.models import ZOO
from tests.support.process import python
from tests.support.sharded import fake_ranks
from tests.support.versions import needs_groups_in_any_order

MODELS = ("llama", "qwen3", "mixtral", "gpt2")
ALIKE = tuple(rule for rule in measured.RULES if "every 2nd" not in rule and "feeds backward" not in rule)
NOT_POLICIES = ("prelude",)
FOR_OTHER_MODELS = {
    "fsdp": "sharded ones",
    "fsdp_overlap": "sharded ones",
    "fsdp_reshard_always": "sharded ones",
    "fsdp_reshard_never": "sharded ones",
    "fsdp_tp_overlap": "sharded ones",
    "replay": "graphs that were partitioned before",
}
OF_TORCHTITAN = ("moe", "torchtitan_default", "torchtitan_eager", "torchtitan_graph_full")
"""Where eager has what their rules are about, they are decided alike."""
BUNDLED = tuple(
    file.stem
    for file in sorted(policies_folder().glob("*.apl"))
    if file.stem not in (*NOT_POLICIES, *FOR_OTHER_MODELS, *OF_TORCHTITAN)
)


def setup(name: str) -> tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[Tensor, ...]]:
    loss_fn = ZOO[name]().loss_fn

    def factory() -> nn.Module:
        module = ZOO[name]().module
        if name == "mixtral":  # the grouped matmul takes bfloat16 alone where nothing is really computed
            module.model.set_experts_implementation("batched_mm")
        return module

    return factory, lambda model, *batch: loss_fn(model(*batch)), ZOO[name]().inputs


def check(name: str, policy: Any) -> Agreement:
    found = agree(*setup(name), policy)
    assert found.agrees, str(found)
    _right(found)
    return found


def _right(found: Agreement) -> None:
    """Every path carried the policy out with the right numbers, eager to the bit."""
    assert all(result.agrees for result in found.results), str(found)
    assert [result.path for result in found.results] == ["eager", "joint", "flat"]
    eager = found["eager"].numbers
    assert eager.bitwise
    for result in found.results:
        report = result.ran.report
        assert report.saved is not None
        assert f"{len(report.recomputed)} values" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("policy", BUNDLED)
@pytest.mark.parametrize("name", MODELS)
def test_every_bundled_policy(name: str, policy: str) -> None:
    found = check(name, policy)
    assert str(found).endswith("eager, joint and flat agree")
    if (name, policy) == ("gpt2", "llama3_sac"):
        assert found.decisions.alike > 100


@pytest.mark.slow
def test_experts_that_are_other_operators_on_each_path_are_said() -> None:
    """The grouped product and what stands in for it under a compiler are two operators: a rule may name one of them."""
    factory, loss_fn, batch = setup("mixtral")

    def grouped() -> nn.Module:
        module = factory()
        module.model.set_experts_implementation("grouped_mm")
        return module

    found = agree(grouped, loss_fn, batch, policylang.parse("recompute everything in block\noptional save topk"))
    assert found.agrees, str(found)
    assert found.decisions.alone["eager"]["aten._grouped_mm.default"] > 0
    assert "aten._grouped_mm.default" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("policy", FOR_OTHER_MODELS)
def test_a_bundled_policy_for_other_models_is_refused_on_every_path(policy: str) -> None:
    found = agree(*setup("llama"), policy)
    refused = [result.refused for result in found.results]
    assert all(each is not None and not each.error and each.diagnostics for each in refused), str(found)
    assert not found.agrees


@pytest.mark.slow
@pytest.mark.parametrize("policy", OF_TORCHTITAN)
def test_a_policy_of_torchtitan_is_decided_alike_or_refused(policy: str) -> None:
    found = agree(*setup("llama"), policy)
    refused = [result.refused for result in found.results if result.refused is not None]
    assert all(not each.error and each.diagnostics for each in refused), str(found)
    assert len(refused) < len(found.results)
    assert not found.decisions.differences


def test_other_random_numbers_are_not_drawn() -> None:
    """Dropout: compiled, traced and checkpointed, the masks are those of the plain model."""
    found = agree(*setup("dropout"), policylang.parse("recompute everything in block"))
    assert all(result.numbers is not None and result.numbers.bitwise for result in found.results), str(found)


@needs_groups_in_any_order
@pytest.mark.filterwarnings("ignore")
def test_what_rewrites_made_is_compared_too() -> None:
    """Of pretended ranks: what is gathered is not looked at."""
    text = "fuse all_gather chains\nrecompute everything\nsave all_gather"
    with fake_ranks(8):
        mesh = DeviceMesh("cpu", torch.tensor(MESH), mesh_dim_names=NAMES[:2])
        found = agree(
            lambda: Layers(mesh, placements_of(2, "one")),
            lambda model, batch: model(batch).sum(),
            (torch.ones(2, 16),),
            policylang.parse(text),
            paths=["joint", "flat"],
        )
    assert found.decisions.differences == ()
    assert found.decisions.alone.get("joint", {}).keys() <= {"aten.detach.default"}  # torch 2.15 traces it as an alias
    assert found.decisions.alone["flat"].keys() <= {"aten.sum.default", "aten.alias.default"}  # it has the loss
    for path in ("joint", "flat"):
        ran = found[path].ran
        assert sum("fused_all_gather" in name for name in ran.report.decisions) == 2
        assert ran.report.saved.bytes > 0


COUNTING = "blocks h.*\nrecompute everything in block\nsave every 2nd everything per block\n"
"""A dropout is one operator in one graph and three in another: counted through, other values are the second ones."""


@pytest.mark.slow
def test_values_that_are_decided_otherwise_are_shown_with_their_lines(tmp_path) -> None:
    file = tmp_path / "counting.apl"
    file.write_text(COUNTING)
    found = agree(*setup("gpt2"), str(file), paths=["joint", "flat"])
    assert not found.agrees
    assert all(result.agrees for result in found.results)  # each does what the file says, with the right numbers
    differences = found.decisions.differences
    assert differences
    actions = [{side.action for sides in each.sides.values() for side in sides} for each in differences]
    assert all(each == {"save", "recompute"} for each in actions)
    text = str(found)
    assert f"the paths do NOT agree: {len(differences)} values decided otherwise" in text
    first = differences[0]
    assert f"{first.place.operator} in {first.place.module}" in text
    assert "  joint  save  " in text or "  joint  recompute  " in text
    assert "counting.apl:3" in text


def test_a_path_that_cannot_says_why_and_is_no_agreement() -> None:
    """A block that is recorded on its own does not know what else the graph has."""
    found = agree(*setup("mlp"), policylang.parse("recompute everything\nsave every 2nd addmm per graph"))
    refused = found["eager"].refused
    assert [each.code for each in refused.diagnostics] == ["APL306"]
    text = str(found)
    assert "eager  refused" in text
    assert re.search(r"^eager cannot apply it: APL306: \S+:2: `save every 2nd addmm per graph`", text, re.MULTILINE)
    assert "Traceback" not in text
    assert not found.agrees
    assert text.endswith("the paths do NOT agree: eager refused")


def test_what_is_offloaded_is_the_same_on_every_path() -> None:
    policy = policylang.parse("undecided -> save\noffload addmm")
    found = agree(*setup("mlp"), policy)
    assert found.agrees
    assert not found.decisions.differences
    assert re.search(r"^path +saved +offloaded +recomputed", str(found), re.MULTILINE)
    reports = [found[path].ran.report for path in ("eager", "joint", "flat")]
    assert len({report.offloaded.bytes for report in reports}) == 1
    assert reports[0].offloaded.bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", ["save everything", "undecided -> save", "recompute everything"])
@pytest.mark.parametrize("rule", ["offload matmul", "offload everything in block up to 100 KiB per rank"])
def test_an_offload_is_decided_alike_whether_or_not_the_backward_reads_it(first: str, rule: str) -> None:
    found = agree(*setup("llama"), policylang.parse(f"{first}\n{rule}"))
    assert str(found).endswith("eager, joint and flat agree")
    assert found.decisions.alike > 100


def _decided_alike(data: st.DataObject, most: int) -> None:
    """What rules decide on a graph and block by block, values that the backward does not read among them."""
    programs = data.draw(st.lists(measured.random_block, min_size=1, max_size=most).map(tuple).filter(any))
    rules = data.draw(st.lists(st.sampled_from(ALIKE), min_size=1, max_size=most, unique=True))
    text = "\n".join(["blocks layers.*", f"optional {data.draw(st.sampled_from(measured.GROUNDS))}", *rules])
    setup = lambda: measured.Model(programs), lambda model, x: model(x), (measured.batch(),)
    found = agree(*setup, policylang.parse(text), paths=["eager", "flat"])
    assert found.agrees, str(found)


@drawn(5, 100, st.data())
def test_random_blocks_are_decided_alike(data: st.DataObject) -> None:
    _decided_alike(data, 3)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=200)
def test_many_random_blocks_are_decided_alike(data: st.DataObject) -> None:
    _decided_alike(data, 5)


@pytest.mark.slow
def test_what_crosses_blocks_is_decided_alike_and_comes_back_as_early() -> None:
    lines = (
        "undecided -> save",
        "recompute everything in block",
        "offload everything in block where crosses block",
        "offload attention in block outside last block",
        "prefetch offloaded 2 blocks ahead",
    )
    found = agree(*setup("llama"), policylang.parse("\n".join(lines)))
    assert str(found).endswith("eager, joint and flat agree")
    assert found.decisions.alike > 100
    eager, *graphs = (found[path].ran.report.offloaded.bytes for path in ("eager", "joint", "flat"))
    # what the embedding hands to the first block is made outside the blocks, where eager has no checkpoint
    assert graphs[0] == graphs[1] >= eager > 0


def test_a_policy_that_no_path_can_carry_out() -> None:
    found = agree(*setup("mlp"), policylang.parse("save aten.convolution"))
    assert not found.agrees
    assert str(found).endswith("no path applies the policy to this model")
    assert [each.refused.diagnostics[0].code for each in found.results if each.refused] == ["APL301"] * 3


def _tampered(change: Callable[[Tensor], Tensor]) -> Callable[[Numbers], Numbers]:
    def tamper(numbers: Numbers) -> Numbers:
        name = next(iter(numbers.gradients))
        gradients = {**numbers.gradients, name: change(numbers.gradients[name])}
        return Numbers(numbers.loss, gradients, numbers.buffers)

    return tamper


def _one_bit(gradient: Tensor) -> Tensor:
    changed = gradient.clone()
    changed.view(-1).view(torch.int32)[3] ^= 1
    return changed


@pytest.mark.parametrize(
    ("change", "with_control", "said"),
    [
        (_one_bit, False, "flat COMPUTES something else: its bits are not those without the policy"),
        (_one_bit, True, "flat rounds differently from the plain model, within tolerance"),
        (lambda gradient: gradient + 1, True, "flat COMPUTES something else than the plain model, without the policy"),
    ],
    ids=["one bit", "one bit, without the policy too", "another number"],
)
def test_a_wrong_gradient_is_seen(change, with_control: bool, said: str, monkeypatch) -> None:
    """Not a formality: one flipped bit that the policy is to blame for is no agreement, and neither is a wrong number
    that it is not to blame for."""
    tamper, step = _tampered(change), agreement.STEPS["flat"]

    def take(setup: agreement.Setup, model: nn.Module, policy: Any) -> tuple[Numbers, Any]:
        numbers, subject = step.take(setup, model, policy)
        return (tamper(numbers) if with_control or policy is not None else numbers), subject

    monkeypatch.setitem(agreement.STEPS, "flat", agreement.PathStep(take))
    found = agree(*setup("mlp"), policylang.parse("save everything"), paths=["flat"])
    assert said in str(found)
    assert found.agrees is (with_control and change is _one_bit)


def test_it_is_plain_data_too() -> None:
    found = agree(*setup("mlp"), policylang.parse("blocks layers.*\nrecompute everything in block"))
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["agrees"] is True
    assert [path["path"] for path in plain["paths"]] == ["eager", "joint", "flat"]
    assert all(path["numbers"]["gradients"]["tensors"] == found.gradients == 12 for path in plain["paths"])
    assert plain["values"]["differences"] == []


def test_the_caller_keeps_threads_and_random_numbers() -> None:
    given = setup("mlp")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    agree(*given, policylang.parse("save everything"), paths=["flat"])
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == threads


def test_a_factory_that_hands_out_one_model_is_refused() -> None:
    factory, loss_fn, batch = setup("mlp")
    model = factory()
    with pytest.raises(ValueError, match="one model over and over"):
        agree(lambda: model, loss_fn, batch, policylang.parse("save everything"), paths=["flat"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"paths": ["flat", "jit"]}, "`paths` is a list of some of eager, joint, flat, and not `'jit'`"),
        ({"paths": "flat"}, "and not `'flat'`"),
        ({"paths": 3}, "and not `3`"),
        ({"progress": lambda: None}, "`progress` is a function of one text, and not a `function`"),
        ({"progress": 3}, "and not `3`"),
    ],
)
def test_an_argument_of_another_kind_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(policylang.PolicyError, match=f"APL251.*{re.escape(said)}"):
        agree(*setup("mlp"), policylang.parse("save everything"), **given)


PAGE = Path(__file__).parents[2] / "docs" / "how-it-works.md"


@pytest.mark.parametrize("entry", capabilities.PATHS, ids=lambda entry: entry.name)
def test_an_entry_and_its_class_agree(entry: capabilities.PathEntry) -> None:
    path = path_named(entry.name)
    assert isinstance(path, BackendPath)
    assert type(path).__module__ + ":" + type(path).__name__ == entry.implementation
    assert (path.name, path.entry, path.capabilities) == (entry.name, entry, entry.capabilities)
    assert path.report(object()) is None


def test_a_graph_of_every_kind_has_a_path() -> None:
    assert {kind: capabilities.path_taking(kind).name for kind in GraphKind} == {
        GraphKind.JOINT: "joint",
        GraphKind.FLAT: "flat",
        GraphKind.FORWARD: "half",
        GraphKind.BACKWARD: "half",
    }
    found = {kind: capabilities.capabilities_for(kind).name for kind in GraphKind}
    assert found.pop(GraphKind.FLAT) == "a flat graph"
    assert set(found.values()) == {"the joint-graph partitioner"}
    assert capabilities.capabilities_for(GraphKind.FLAT, "joint").name == "the joint-graph partitioner"


def test_the_commands_and_the_comparison_offer_what_is_registered() -> None:
    assert get_args(capabilities.PathName) == capabilities.PLANNED
    assert tuple(STEPS) == capabilities.COMPARED
    for arguments, offered in ((plan_arguments, capabilities.PLANNED), (agree_arguments, capabilities.COMPARED)):
        parser = argparse.ArgumentParser()
        arguments(parser)
        (option,) = (action for action in parser._actions if action.dest == "path")
        assert option.choices == offered


def test_the_register_needs_no_torch() -> None:
    python("-c", "import sys, policylang.planning.capabilities; sys.exit('torch' in sys.modules)")


def test_the_page_has_the_table_of_the_register() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def table() -> str:
    head = ("path", "applied by", "`undecided -> auto`", "recomputed random numbers", "`offload`")
    rows = [(*head, "`fuse`, `collapse`", "[order](order.md)")]
    for path in capabilities.PATHS:
        can = path.capabilities
        word = "min-cut" if can.undecided == "auto" else str(can.undecided)
        yes = ["yes" if each else "no" for each in (can.replays_random, can.offloads, can.rewrites)]
        order = "yes" if can.orders else "[by FSDP2](order.md#eager-fsdp2)" if can.orders_weights else "no"
        rows.append((f"`{path.name}`", can.name, word, *yes, order))
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((first, "|---" * len(rows[0]) + "|", *others))


class Noting(BackendPath):
    """A path of somebody's: it counts the nodes."""

    name: ClassVar[str] = "noting"
    noted: ClassVar[list[int]] = []

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        self.noted.append(len(facts))

    def lower(self, gm: fx.GraphModule, plan: Any, seconds: dict[str, float]) -> None:
        gm.meta["noted"] = plan.digest


def test_one_entry_makes_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """``apply`` carries a policy out on it, and ``report`` finds what was done."""
    entry = capabilities.PathEntry("noting", capabilities.HALF, f"{__name__}:Noting", (GraphKind.FORWARD,))
    monkeypatch.setattr(capabilities, "PATHS", (entry, *capabilities.PATHS))
    gm = fx.symbolic_trace(lambda x: x + 1)
    policylang.apply(gm, policylang.parse("optional save mm"))
    assert Noting.noted == [3]
    assert gm.meta["noted"]
    assert policylang.report(gm).policy == "policy"
