"""Plans of whole models as pipelines: which stage a node is in, what is in flight, and what the figures come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.api.planned_graphs import facts_of, on_graph, scheduled
from policylang.commands.cli import main
from policylang.commands.small_llama import step_memory
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.language.statements import SCHEDULES, format_policy
from policylang.language.syntax import Pipeline
from policylang.planning.pipelines import PipelineFigures
from policylang.planning.plan import Plan
from tests.support.compiled import backend_for
from tests.support.models import Function

GRAPH = Path(__file__).parents[2] / "docs" / "graphs" / "llama3_8b.graph"
ROUND = "recompute everything in block; save everything in block where crosses block\n"


@pytest.fixture(scope="module")
def llama() -> Facts:
    return policylang.load_snapshot(GRAPH)


def planned(facts: Facts, text: str, device: str | None = None) -> tuple[Plan, list[str]]:
    on = device and policylang.load_device(device)
    (made,), found = on_graph(policylang.parse(text), {"graph": facts}, None, one_model=False, device=on)
    return made, [f"{each.code} {each.message}" for each in found if is_error(each)]


def figures(made: Plan) -> PipelineFigures:
    assert made.pipeline is not None
    return made.pipeline


def test_lines_about_stages_are_formatted_as_they_are_read() -> None:
    text = (
        "save mm in stage 0\nsave mm in last stage\nsave mm in first half of stages\nsave mm outside stages 1..2\n"
        "save mm in every 2nd stage\nsave mm in first 2 stages\n"
        "schedule 1f1b into 4 stages of 16 microbatches\nexpect peak <= 70 GiB per stage\n"
    )
    assert format_policy(policylang.parse(text)) == f"policy policy\n{text}"
    assert "save mm in stage 0" in format_policy(policylang.parse("save mm in stages 0..0"))


def test_a_module_may_be_called_stages() -> None:
    text = "save mm in stages\nsave mm in stages.0\nsave mm in stage\n"
    assert format_policy(policylang.parse(text)) == f"policy policy\n{text}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedule 1f2b into 4 stages of 2 microbatches", "there is no schedule `1f2b`"),
        ("schedule 1f1b into 0 stages of 2 microbatches", "a pipeline has at least one stage"),
        ("schedule gpipe into 4 steps of 2 microbatches", "`stages` is to be here, not `steps`"),
        ("expect exposed <= 1 ms per stage", "`peak` is expected per stage, not `exposed`"),
        ("schedule gpipe into 2 stages of 2 microbatches; " * 2, "a policy has one `schedule` line"),
    ],
)
def test_what_is_written_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(policylang.PolicyError, match=message):
        policylang.parse(f"{text}\nsave mm")


def test_stages_are_cut_by_blocks(llama: Facts) -> None:
    said = "schedule 1f1b into 4 stages of 16 microbatches\n"
    made, errors = planned(llama, f"{said}{ROUND}save mm in stage 1; save mm in last stage")
    assert errors == []
    names = [[llama.modules[row] for row in rule.decided] for rule in made.rules[2:]]
    assert {name.split(".")[2] for name in names[0]} == {str(block) for block in range(8, 16)}
    assert "lm_head" in names[1]  # behind the last block
    assert {name.split(".")[2] for name in names[1] if "layers" in name} == {str(block) for block in range(24, 32)}


def test_saved_values_count_as_often_as_microbatches_are_in_flight(llama: Facts) -> None:
    single, _ = planned(llama, f"schedule gpipe into 4 stages of 1 microbatches\n{ROUND}")
    one = [each.saved for each in figures(single).stages]
    for schedule, in_flight in (("1f1b", [4, 3, 2, 1]), ("gpipe", [16] * 4)):
        made, _ = planned(llama, f"schedule {schedule} into 4 stages of 16 microbatches\n{ROUND}")
        found = figures(made).stages
        assert [each.in_flight for each in found] == in_flight
        assert [each.saved for each in found] == [count * size for count, size in zip(in_flight, one, strict=True)]
        assert [each.blocks for each in found] == [(0, 8), (8, 16), (16, 24), (24, 32)]
        assert all(each.peak > each.saved for each in found)
    alone = figures(planned(llama, f"schedule gpipe into 1 stages of 1 microbatches\n{ROUND}")[0])
    whole = planned(llama, ROUND)[0].peak.bytes
    logits = 2 * 8192 * 128256  # which a stage holds until its backward is over
    assert whole + logits <= alone.stages[0].peak <= 1.005 * (whole + logits)


class Sandwich(nn.Module):
    """A block that ends in a norm and a sum, whose backwards read nothing that the checkpoint alone holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + rms_norm(self.down(nn.functional.gelu(self.up(rms_norm(x)))))


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Scaled(nn.Module):
    """Scales what it embeds, outside its modules, as Gemma does."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 8), nn.ModuleList([Sandwich() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 3
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("text", ["save matmul", "recompute everything in block"])
def test_a_stage_holds_what_its_checkpoints_hold(text: str) -> None:
    x, sent = torch.randn(16, 4), list[Tensor]()
    facts = facts_of(policylang.trace_step(Scaled(4), lambda model, x: model(x).square().sum(), x))[0]
    rules = policylang.parse(f"blocks layers.*; {text}; undecided -> save")
    policy = scheduled(rules, Pipeline("1f1b", 2, 4))
    assert not isinstance(policy, Diagnostic)
    (made,), _ = on_graph(policy, {"": facts}, "eager", one_model=True)
    stage = Scaled(2)
    policylang.checkpoint_model(stage, rules)

    def forward() -> Tensor:
        sent.append(stage(x))
        return sent[0].sum()

    found = step_memory(forward, [*stage.parameters(), x], x.device)
    assert figures(made).stages[0].saved == 2 * found.saved  # two microbatches are in flight


def test_a_stage_that_saves_more_has_the_higher_peak(llama: Facts) -> None:
    said = "schedule 1f1b into 4 stages of 16 microbatches\n"
    base, more = (figures(planned(llama, f"{said}{ROUND}{rule}")[0]).stages for rule in ("", "save mm in stage 2"))
    changed = [one.stage for one, other in zip(base, more, strict=True) if one.peak != other.peak]
    assert changed == [2]


def test_a_peak_per_stage_is_expected(llama: Facts) -> None:
    said = f"schedule 1f1b into 4 stages of 16 microbatches\n{ROUND}"
    made, _ = planned(llama, said)
    most = max(figures(made).stages, key=lambda each: each.peak)
    limit = most.peak / 2**30
    held, errors = planned(llama, f"{said}expect peak <= {limit + 0.1:.2f} GiB per stage")
    assert errors == []
    assert held.expectations[0].status == "held"
    _, errors = planned(llama, f"{said}expect peak <= {limit - 0.1:.2f} GiB per stage")
    assert len(errors) == 1
    assert f"in stage {most.stage}" in errors[0]


def test_times_are_those_of_all_microbatches(llama: Facts) -> None:
    text = "schedule 1f1b into 4 stages of 16 microbatches\n"
    made, _ = planned(llama, text + ROUND, "h100-sxm")
    found, one = figures(made), made.step_time
    assert found.step_seconds is not None
    busy = [each.step_seconds or 0.0 for each in found.stages]
    assert sum(busy) == pytest.approx(16 * one.step, rel=1e-6)
    assert sum(each.recomputed_seconds or 0.0 for each in found.stages) == pytest.approx(16 * one.recomputed, rel=1e-6)
    slots = (16 + 3) / 16  # of equal stages; the last has the head as well
    assert max(busy) < found.step_seconds < slots * max(busy)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_torch_tells_every_step_of_a_schedule(schedule: str, ranks: int, microbatches: int) -> None:
    stages = ranks * (1 if schedule in ("gpipe", "1f1b") else 2)
    policy = scheduled(policylang.parse("save mm"), Pipeline(schedule, stages, microbatches))
    assert not isinstance(policy, Diagnostic)
    steps = [step for rank in policy.pipeline.order for step in rank]
    assert len(policy.pipeline.order) == ranks
    assert len(set(steps)) == len(steps)
    every = {(stage, batch) for stage in range(stages) for batch in range(microbatches)}
    for kinds in ("F", "BI", "BW"):
        assert {step[1:] for step in steps if step[0] in kinds} == every
    for rank in policy.pipeline.order:
        at = {step: number for number, step in enumerate(rank)}
        for kind, stage, batch in rank:
            if kind != "F":
                assert at["F", stage, batch] < at[kind, stage, batch]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("save mm in stage 0", "APL656 `save mm in stage 0` asks for stages, and it is not known which there are"),
        ("schedule 1f1b into 64 stages of 64 microbatches; save mm", "APL657 the model is to be cut into 64 stages"),
        ("schedule 1f1b into 4 stages of 2 microbatches; save mm", "APL657 `1f1b` does not take 4 stages of 2"),
        ("schedule zbv into 3 stages of 4 microbatches; save mm", "APL657 `zbv` does not take 3 stages"),
        ("schedule 1f1b into 4 stages of 8 microbatches; save mm in stage 4", "matches nothing"),
        ("schedule 1f1b into 4 stages of 8 microbatches; save mm in first 10% of stages", "APL369"),
    ],
)
def test_what_cannot_be_is_refused_by_line(llama: Facts, text: str, message: str) -> None:
    result = policylang.check(policylang.parse(text), graph=llama)
    assert any(message in f"{each.code} {each.message}" for each in result.diagnostics if is_error(each))


def test_a_policy_is_for_one_stage() -> None:
    text = "schedule 1f1b into 4 stages of 16 microbatches\nsave mm in stage 1"
    texts = {policylang.parse(text, stage=stage).canonical for stage in (None, 0, 1)}
    assert len(texts) == 3  # caches tell them apart
    for wrong in (4, -1):
        with pytest.raises(policylang.PolicyGraphError, match=r"APL657.*the policy has 4 stages"):
            policylang.parse(text, stage=wrong)
    with pytest.raises(policylang.PolicyGraphError, match="no `schedule` line"):
        policylang.parse("save mm", stage=0)


def test_the_command_line_says_the_pipeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    policy = tmp_path / "mine.apl"
    policy.write_text(ROUND)
    how = ["plan", str(policy), "--graph", str(GRAPH), "--no-project", "--summary"]
    pipeline = ["--schedule", "interleaved_1f1b", "--microbatches", "8"]
    assert main([*how, *pipeline, "--stages", "0,3,9,20", "--output-format", "json", "--device", "h100-sxm"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["blocks"] for each in found["stages"]] == [[0, 3], [3, 9], [9, 20], [20, 32]]
    assert [each["rank"] for each in found["stages"]] == [0, 1, 0, 1]
    assert {"peak", "saved", "recomputed_seconds", "step_seconds"} <= found["stages"][0].keys()
    assert found["pipeline"]["step_seconds"] > max(each["step_seconds"] for each in found["stages"])
    assert main([*how, *pipeline, "--stages", "4"]) == 0
    assert "pipeline interleaved_1f1b: 4 stages on 2 ranks, 8 microbatches" in capsys.readouterr().out
    for wrong in (["--stages", "0,3,3"], ["--stages", "2,3"], ["--stages", "x"], []):
        assert main([*how, *pipeline, *wrong]) == 2


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def part(layers: int, head: int = 0) -> nn.Module:
    """A stage with so many blocks, which it numbers from 0, and perhaps a head."""
    blocks = nn.Sequential(*(Block(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(layers)))
    end = nn.Linear(8, head) if head else nn.Identity()
    return Function(lambda stage, x: stage.head(stage.layers(x)), layers=blocks, head=end)


def graph_of(stage: nn.Module, *, is_first: bool) -> Facts:
    """The joint graph of one microbatch."""
    torch.compiler.reset()
    stage.compile(backend=backend_for("undecided -> save"), fullgraph=True)
    stage(torch.randn(16, 8, requires_grad=not is_first))
    return facts_of(stage)[0]


@pytest.fixture(scope="module")
def parts() -> dict[str, Facts]:
    given = {"first": part(2), "last": part(2, 4), "whole": part(4, 4), "none": part(0, 8)}
    return {name: graph_of(stage, is_first=name in ("first", "whole")) for name, stage in given.items()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("rules", ["undecided -> save", "recompute everything in block; save gelu in stage 1"])
def test_the_stages_own_graphs_are_planned_as_the_whole_model_cut(parts, schedule, rules, tmp_path) -> None:
    policylang.snapshot([parts["first"], parts["last"]], tmp_path / "model.graph")
    text = f"blocks layers.*; schedule {schedule} into 2 stages of 4 microbatches; {rules}"
    stages = policylang.load_snapshot(tmp_path / "model.graph")
    joined, whole = (planned(facts, text, "h100-sxm") for facts in (stages, parts["whole"]))
    assert joined[1] == whole[1] == []
    assert figures(joined[0]).stages == figures(whole[0]).stages
    assert figures(joined[0]).step_seconds == figures(whole[0]).step_seconds
    modules = {name.split(".")[1] for name in joined[0].facts.modules if name.startswith("layers.")}
    assert modules == {"0", "1", "2", "3"}


def test_stages_without_blocks_are_planned_and_other_stages_refused(parts, tmp_path, capsys) -> None:
    files = [str(tmp_path / f"{name}.graph") for name in ("first", "none", "last")]
    for file in files:
        policylang.snapshot(parts[Path(file).stem], file)
    model = str(tmp_path / "model.graph")
    assert main(["import", *files, "-o", model]) == 0
    how = ["llama3_sac", "--graph", model, "--no-project", "--schedule", "1f1b", "--microbatches", "4"]
    capsys.readouterr()
    assert main(["plan", *how, "--stages", "3", "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["blocks"] for each in found["stages"]] == [[0, 2], [2, 2], [2, 4]]
    for stages, message in (
        ("2", "the graph holds 3 stages, and the pipeline has 2"),
        ("0,1,2", "begin with the blocks 0, 2 and 2"),
    ):
        assert main(["plan", *how, "--stages", stages]) == 1
        said = capsys.readouterr()
        assert message in said.out + said.err
    tune = ["tune", "--graph", model, "--no-project", "--peak", "1 GiB", "--device", "h100-sxm", "--schedule", "1f1b"]
    assert main([*tune, "--microbatches", "4", "--stages", "3"]) == 0
    written = capsys.readouterr().out
    assert "schedule 1f1b into 3 stages" in written
    assert "#       1    none " in written


def test_stages_that_do_not_fit_together_are_refused(parts: dict[str, Facts], tmp_path: Path) -> None:
    for stages, message in (
        (["last", "first"], r"`\w+` \(float32\[16, 4\]\) is no input of stage 1"),
        (["first", "whole"], "gets no gradient that is to be found"),
    ):
        with pytest.raises(policylang.PolicyGraphError, match=f"APL670.*{message}"):
            policylang.snapshot([parts[name] for name in stages], tmp_path / "model.graph")
