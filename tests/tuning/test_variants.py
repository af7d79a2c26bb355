"""What a tuned policy says beside its rules: slices, narrower copies, FSDP's gathers and the order of collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from policylang import report, trace_step
from policylang.api.load import load_device, parse
from policylang.api.planned_graphs import on_graph
from policylang.api.tune import tune
from policylang.errors import PolicyMatchError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import load
from policylang.language.diagnostics import Diagnostic, Severity, diagnose
from policylang.planning.capabilities import JOINT, Capabilities, PathName, capabilities_for
from policylang.planning.inspection import costly
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.simulation.node_times import node_times
from policylang.tuning.tuned_policy import TunedPolicy
from policylang.tuning.tuner import Tuner
from tests.support.measured import measured_flat
from tests.support.textgraph import facts_of
from tests.support.tuned import tuned_facts, tuned_graph

GRAPHS = Path(__file__).parents[2] / "docs" / "graphs"
DEVICE = "h100-sxm"
GATHER = "_c10d_functional.all_gather_into_tensor.default"
GIB = 1 << 30


def planned(text: str, facts: Facts, path: PathName | None = None) -> tuple[int, float]:
    """Bytes at the peak, and seconds of the step."""
    made = plan(parse(text), facts, capabilities_for(facts.kind, path), device=load_device(DEVICE))
    assert made.step_time is not None
    assert all(each.status == "held" for each in made.expectations)
    return made.peak.bytes, made.step_time.step


def assert_holds(tuned: TunedPolicy, facts: Facts, path: PathName | None = None) -> None:
    """The text is clean under ``--deny warnings``, within its budget, and takes what it says."""
    _, said = on_graph(parse(tuned.text), {"": facts}, path, one_model=False, device=load_device(DEVICE))
    assert [each for each in said if each.severity is not Severity.NOTE] == []
    assert planned(tuned.text, facts, path) == (tuned.graph_peak, tuned.tuned.chosen.step)
    assert tuned.tuned.besides.on(tuned.graph_peak) <= tuned.tuned.budget.limit
    assert tuned.tuned.chosen in tuned.table


def sharded_graph(flops: str = "flops=64000000000") -> Facts:
    """A small stack of layers whose first weight is gathered among eight ranks of one host; ``flops`` of a product."""
    at = "bytes=8388608 shape=1024x4096 dtype=bfloat16"
    lines = list[str]()
    for line in tuned_graph().splitlines():
        found = re.match(r"%w(\d+) = parameter", line)
        if found:
            lines.append(f"%s{found[1]} = parameter bytes=1048576 shape=128x4096 dtype=bfloat16")
            continue
        norm = re.match(r"\s*%norm(\d+) = ", line)
        if norm:
            n, module = norm[1], f"layers.{norm[1]}.up"
            gather = f"{GATHER}(%s{n}) {module} collective group=dp:8 {at}"
            lines += [f"%a{n} = {gather}", f"%w{n} = _c10d_functional.wait_tensor.default(%a{n}) {module} {at}"]
        lines.append(line)
    return facts_of("\n".join(lines).replace("flops=64000000000", flops), GraphKind.JOINT)


@pytest.mark.slow
def test_collectives_are_ordered_in_what_the_budget_leaves() -> None:
    facts = sharded_graph()
    ordered, traced = (tune(facts, peak="560 MiB", device=DEVICE, order=order) for order in (True, False))
    assert_holds(ordered, facts)
    assert "overlap collective within " in ordered.text
    assert f"device {DEVICE}\n" in ordered.text
    assert ordered.tuned.chosen.step < traced.tuned.chosen.step
    assert "overlap" not in traced.text
    assert ordered.text == tune(facts, peak="560 MiB", device=DEVICE).text


@pytest.mark.slow
def test_an_order_needs_a_path_that_carries_it_out_and_a_step_to_shorten() -> None:
    facts = sharded_graph()
    assert "overlap" not in tune(facts, recompute_time="5%", device=DEVICE).text
    assert "overlap" not in tune(facts, peak="2 GiB", device=DEVICE, path="eager").text
    assert "overlap collective within 5% of peak" in tune(facts, saved="300 MiB", device=DEVICE).text
    unnamed = attrs.evolve(load_device(DEVICE), name="of our own")
    assert "overlap" not in tune(facts, peak="560 MiB", device=unnamed).text


def gathers_said(facts: Facts) -> list[str]:
    """What the tuner may write of gathers in blocks."""
    found = Tuner(facts, node_times(facts, load_device(DEVICE)), JOINT).spaces[0].inside.phrases
    return [each.text("in block", inside=True) for each in found if "all_gather" in each.subject]


def test_gathers_are_named_by_what_they_gather_and_by_their_ranks() -> None:
    at = r"layers.\2.down collective shape=4096x1024 dtype=bfloat16 bytes"
    gathers = rf"\1%a\2 = {GATHER}(%v\2) {at}=65536 group=dp:16\n\1%b\2 = {GATHER}(%a\2) {at}=524288 group=tp:8\n"
    text = re.sub(r"(?m)^( *)(?=%down(\d) = )", gathers, tuned_graph())
    text = re.sub(r"(%down\d = .*)%v", r"\1%b", text)
    said = gathers_said(facts_of(text, GraphKind.JOINT))
    assert said == [f"all_gather in block where from parameter and group_size == {ranks}" for ranks in (8, 16)]
    of_norm = rf"\1%t\2 = {GATHER}(%norm\2) layers.\2.up collective bytes=16777216 group=tp:8\n\1%up\2"
    text = re.sub(r"(?m)^( *)%up(\d)(?= = )", of_norm, text)
    assert "all_gather in block where not from parameter" in gathers_said(facts_of(text, GraphKind.JOINT))


@pytest.mark.slow
def test_values_are_narrowed_where_that_is_asked_for() -> None:
    facts = sharded_graph("flops=640000000000")
    plain, lossy = (tune(facts, peak="400 MiB", device=DEVICE, lossy=lossy) for lossy in (False, True))
    assert_holds(lossy, facts)
    assert " as " not in plain.rules
    assert " as float8_e4m3fn per row" in lossy.rules
    assert lossy.tuned.chosen.step < plain.tuned.chosen.step


def test_a_step_whose_loss_is_cut_gives_the_gradients_and_takes_what_is_planned() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4096, bias=False))
    batch = torch.randn(512, 64), torch.randint(4096, (512,))

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), labels)

    plain, step = (trace_step(model, loss, *batch) for _ in range(2))
    tuned = tune(collect(step.gm), peak="16 MiB", device=DEVICE)
    assert "chunk loss into " in tuned.text
    step.apply(parse(tuned.text))
    assert report(step.gm).audit.agrees
    for ours, theirs in zip(step(*batch)[1].values(), plain(*batch)[1].values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert measured_flat(step.gm) <= tuned.graph_peak <= 16 << 20 < measured_flat(plain.gm)


@pytest.mark.slow
@pytest.mark.parametrize("path", [None, "eager"])
def test_a_sharded_step(path: PathName | None) -> None:
    """Tuned and ordered together it is never longer than tuned first and ordered after; in eager FSDP gathers."""
    facts = load(GRAPHS / "fsdp.graph")
    found = tune(facts, peak="18 GiB", device=DEVICE, path=path, chunk=False)
    assert_holds(found, facts, path)
    if path == "eager":
        assert found.rules.endswith("include <fsdp>\n")
        return
    first = tune(facts, peak="18 GiB", device=DEVICE, order=False, chunk=False)
    left = (18 * GIB - first.graph_peak) >> 20
    after = f"{first.rules}device {DEVICE}\noptional overlap collective within {left} MiB of peak\n"
    peak, step = planned(after, facts)
    assert peak <= 18 * GIB
    assert found.tuned.chosen.step <= step < first.tuned.chosen.step


@pytest.mark.slow
def test_a_module_named_by_a_word_of_the_language_is_not_cut() -> None:
    facts = load(GRAPHS / "tutorial.graph")
    facts = attrs.evolve(facts, modules=tuple(each.replace(".mlp", ".blocks") for each in facts.modules))  # as in Swin
    assert "chunk module" not in tune(facts, peak="48 MiB", device=DEVICE).rules


@pytest.mark.slow
def test_an_mlp_is_cut_where_nothing_else_fits() -> None:
    facts = load(GRAPHS / "vit.graph")
    found = tune(facts, peak="700 MiB", device=DEVICE)
    assert_holds(found, facts)
    assert found.rules.startswith("chunk module mlp in block into 4")
    with pytest.raises(PolicyMatchError):
        tune(facts, peak="700 MiB", device=DEVICE, chunk=False)


@pytest.mark.slow
def test_logits_are_cut_where_they_do_not_fit_or_where_that_pays() -> None:
    facts = load(GRAPHS / "gpt2.graph")
    cut, whole = (tune(facts, peak="5.1 GiB", device=DEVICE, chunk=chunk) for chunk in (True, False))
    assert_holds(cut, facts)
    assert "chunk loss into 8\n" in cut.rules
    assert cut.tuned.chosen.step < 0.9 * whole.tuned.chosen.step
    with pytest.raises(PolicyMatchError):
        tune(facts, peak="2 GiB", device=DEVICE, chunk=False)
    assert_holds(tune(facts, peak="2 GiB", device=DEVICE), facts)
    with pytest.raises(PolicyMatchError, match="the smallest is"):
        tune(facts, peak="0.5 GiB", device=DEVICE)
    least = tune(facts, recompute_time="5%", device=DEVICE)
    assert "chunk loss into" in least.rules
    assert "overlap" not in tune(facts, peak="64 GiB", device=DEVICE).rules


def test_a_line_that_is_warned_of_stays_where_it_saves_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(made: Plan, _: Capabilities) -> Iterator[Diagnostic]:
        rules = (each.rule for each in made.rules)
        yield from (diagnose("APL709", "saved twice", each.span) for each in rules if "matmul" in each.text)

    facts, rule = tuned_facts(), "save matmul in last 3 blocks"
    assert f"{rule}\n" in tune(facts, peak="450 MiB", device=DEVICE).rules
    monkeypatch.setattr(costly, "costly_rules", warned)
    found = tune(facts, peak="450 MiB", device=DEVICE)
    assert f"{rule}  # allow: APL709\n" in found.text
    assert found.tuned.chosen in found.table


def test_an_include_that_is_warned_of_is_allowed_where_it_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(made: Plan, _: Capabilities) -> Iterator[Diagnostic]:
        spans = (each.rule.span for each in made.rules)
        yield from (diagnose("APL709", "saved twice", span) for span in spans if made.policy.included_by(span))

    facts = sharded_graph()
    assert tune(facts, peak="560 MiB", device=DEVICE, path="eager").rules.endswith("\ninclude <fsdp>\n")
    monkeypatch.setattr(costly, "costly_rules", warned)
    _, said = on_graph(parse("save everything\ninclude <fsdp>\n"), {"": facts}, "eager", one_model=False)
    assert "APL709" in {each.code for each in said}
    found = tune(facts, peak="560 MiB", device=DEVICE, path="eager")
    assert found.rules.endswith("\ninclude <fsdp>  # allow: APL709\n")
    assert_holds(found, facts, "eager")
