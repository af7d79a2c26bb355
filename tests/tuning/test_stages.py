"""Policies that are tuned for the stages of a pipeline: every rank fits, and no uniform policy has a shorter step."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from attrs import asdict

import policylang
from policylang.api.planned_graphs import on_graph, read_pipeline, with_order
from policylang.commands.cli import main
from policylang.graph.facts import Facts
from policylang.language.diagnostics import is_error
from policylang.planning.plan import Plan
from policylang.report.plan_comparison import account_text
from tests.support.drawn import slow

pytest.importorskip("highspy")
GRAPHS = Path(__file__).parents[2] / "docs" / "graphs"
GIB = 2**30
STAGES = 2
HOW = {"device": "h100-sxm", "schedule": "1f1b", "stages": STAGES, "microbatches": 4}


@pytest.fixture(scope="module")
def gpt2() -> Facts:
    return policylang.load_snapshot(GRAPHS / "gpt2.graph")


def planned(text: str, facts: Facts, stages: int | str, schedule: str = "1f1b", microbatches: int = 4) -> Plan:
    pipeline = read_pipeline(schedule, stages, microbatches)
    (made,), found = on_graph(
        policylang.parse(text),
        {"graph": facts},
        None,
        one_model=False,
        device=policylang.load_device("h100-sxm"),
        pipeline=with_order(pipeline),
    )
    assert [each for each in found if is_error(each)] == []
    return made


def peaks(facts: Facts, rule: str) -> list[int]:
    return [each.peak for each in planned(rule, facts, STAGES).pipeline.stages]


LEAN = "recompute everything in block; save everything in block where crosses block"


@pytest.fixture(scope="module")
def budget(gpt2: Facts) -> int:
    """Some stages can save all, and not all of them."""
    all_saved = peaks(gpt2, "save everything")
    found = (max(peaks(gpt2, LEAN)) + 2 * max(all_saved)) // 3
    assert min(all_saved) < found < max(all_saved)
    return found


@pytest.fixture(scope="module")
def tuned(gpt2: Facts, budget: int) -> policylang.TunedPolicy:
    return policylang.tune(gpt2, peak=budget, chunk=False, **HOW)


def test_stages_without_room_save_less_and_the_step_is_shorter_than_with_the_same_rules_in_all(gpt2, budget, tuned):
    made = planned(tuned.text, gpt2, STAGES)
    assert made.pipeline.stages == tuned.stages  # as written, and nothing else
    assert made.expectations[-1].status == "held"
    assert max(each.peak for each in tuned.stages) <= budget
    assert [each.in_flight for each in tuned.stages] == [2, 1]
    recompute = [each.recomputed_seconds > 0 for each in tuned.stages]
    assert recompute == [each > budget for each in peaks(gpt2, "save everything")]
    alike = tuned.tuned.stages.alike
    assert alike is not None
    assert " stage" not in alike.rules
    assert made.pipeline.step_seconds == tuned.tuned.chosen.step < alike.step
    assert f"a step takes {1e3 * tuned.tuned.chosen.step:.4g} ms; with the same rules in all stages" in tuned.text
    assert len(tuned.rules.splitlines()) <= 16


def test_no_choice_among_rules_by_hand_is_faster(gpt2: Facts, budget: int, tuned: policylang.TunedPolicy) -> None:
    """Each stage follows one of three policies that people write."""
    rules = [[], ["save attention in stage {0}"], ["save everything in stage {0}"]]
    found = []
    for of_stages in product(rules, repeat=STAGES):
        lines = [line.format(stage) for stage, each in enumerate(of_stages) for line in each]
        made = planned("; ".join([LEAN, *lines]), gpt2, STAGES).pipeline
        if max(each.peak for each in made.stages) <= budget:
            found.append(made.step_seconds)
    assert len(found) > 3
    assert tuned.tuned.chosen.step <= min(found)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv", "gpipe"])
@pytest.mark.parametrize("graph", ["gpt2", "fsdp"])
def test_every_schedule_is_tuned(schedule: str, graph: str) -> None:
    """Uneven stages too, with an optimizer's state and what the allocator wastes."""
    facts = policylang.load_snapshot(GRAPHS / f"{graph}.graph")
    stages = {"gpt2": "0,2,5,9", "fsdp": "0,1,3,6"}[graph]
    most = max(each.peak for each in planned("save everything", facts, stages, schedule, 8).pipeline.stages)
    how = {**HOW, "schedule": schedule, "stages": stages, "microbatches": 8}
    tuned = policylang.tune(facts, peak=1.1 * most, optimizer="adamw", reserve="5%", **how)
    assert planned(tuned.text, facts, stages, schedule, 8).pipeline.stages == tuned.stages
    assert tuned.peak <= 1.1 * most
    assert f"--stages {stages}" in tuned.text
    assert tuned.tuned.stages.alike is None or tuned.tuned.chosen.step <= tuned.tuned.stages.alike.step


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        slow({"peak": 1 * GIB}, "APL625.*no policy keeps rank 1, of stage 1, within 1 GiB: the smallest takes"),
        ({"saved": 1 * GIB}, "APL624.*stages are not tuned for saved bytes or for time"),
        ({"peak": GIB, "lossy": True}, "APL624.*stages are not tuned with narrower copies"),
        ({"peak": GIB, "stages": 13, "microbatches": 16}, "APL657.*13 stages, and has 12 blocks"),
        ({"peak": GIB, "stages": None}, "APL657.*a pipeline needs"),
        ({"peak": GIB, "schedule": "1f2b"}, "APL657.*there is no schedule `1f2b`.*\n.*1f1b"),
        ({"peak": GIB, "stages": 4, "microbatches": 2}, "APL657.*`1f1b` does not take 4 stages of 2 microbatches"),
    ],
)
def test_what_cannot_be_tuned_is_said(gpt2: Facts, asked: dict[str, object], message: str) -> None:
    with pytest.raises(policylang.PolicyError, match=message):
        policylang.tune(gpt2, **{**HOW, "chunk": False, **asked})


@pytest.mark.slow
def test_the_command_line_writes_the_policy_and_its_stages(budget, tuned, tmp_path, capsys) -> None:
    graph, written = str(GRAPHS / "gpt2.graph"), tmp_path / "tuned.apl"
    how = ["--graph", graph, "--no-project", "--device", "h100-sxm", "--no-chunk", "--peak", f"{budget} B"]
    pipeline = ["--schedule", "1f1b", "--stages", f"{STAGES}", "--microbatches", "4"]
    assert main(["tune", *how, *pipeline, "-o", str(written), "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stages"] == [{**asdict(each), "blocks": [*each.blocks]} for each in tuned.stages]
    assert {"peak", "saved", "recomputed_seconds", "step_seconds"} <= found["stages"][0].keys()
    assert found["chosen"]["step_seconds"] == found["pipeline"]["step_seconds"] < found["alike"]["step_seconds"]
    assert written.read_text() == found["policy"]
    assert main(["check", str(written), "--graph", graph, "--no-project"]) == 0
    assert "with the same rules in all stages" in account_text(tuned)
