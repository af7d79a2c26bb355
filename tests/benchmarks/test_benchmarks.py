"""The benchmarks: what is measured is kept, what is not is named, and their pages say what a run gives."""

import json
import os
import subprocess
import sys
import time
from functools import cache, partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from attrs import evolve
from functorch.compile import min_cut_rematerialization_partition
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import policylang
from benchmarks import budgets, compared, gpu, lsp, scale, schedule, schedule_peers, tune, tuned_steps
from benchmarks.allocations import step_allocations
from benchmarks.graphs import JointGraph, llama_joint
from benchmarks.schedule_graphs import process_groups, synthetic_half
from benchmarks.training_step import MIB, StepModel
from benchmarks.tuning_peers import Point, of_policy, of_saved, saved_by_torch
from policylang.api.load import load_device
from policylang.graph.facts import Group
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import JOINT
from policylang.planning.liveness import saved_and_recomputed
from policylang.simulation.node_times import CollectivePrices, node_times
from tests.support.compiled import backend_for
from tests.support.keeping import kept_two
from tests.support.versions import needs_overlap_scheduling_by_given_times


def test_saved_and_peak_to_the_byte() -> None:
    kept_two(lambda step, _: step_allocations(step))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_a_compiled_step_keeps_is_what_the_plan_says(inner: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
    batch = torch.rand(32, 64)
    backend = backend_for("recompute everything; save addmm", inner)
    compiled = torch.compile(model, backend=backend)
    compiled(batch).sum().backward()
    memory = step_allocations(lambda: compiled(batch).sum())
    assert memory.saved == policylang.report(backend).saved.bytes > 0
    assert memory.peak > memory.saved


RESULTS = json.loads((Path(compared.__file__).parent / "results" / "compared.json").read_text(encoding="utf-8"))
COUNTED = ("saved MiB", "peak MiB", "GFLOP")
pinned = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the results are of torch 2.13")


def test_the_gradients_that_a_compiled_backward_returns() -> None:
    with torch.device("meta"):
        assert round(sum(parameter.nbytes for parameter in StepModel(compared.SHAPE).parameters()) / MIB) == 36


def test_same_decisions_come_to_no_more_bytes_and_flops() -> None:
    """Of the peak, half a percent more at most."""
    for keeps in compared.POLICIES:
        for how in (compared.EAGER, compared.COMPILED):
            rows = [row for row in RESULTS["rows"] if (row["keeps"], row["how"]) == (keeps, how)]
            ours = [row for row in rows if row["contender"] == "policylang"]
            for row in rows:
                assert all(mine["peak MiB"] <= row["peak MiB"] * 1.005 for mine in ours)
                assert all(mine["GFLOP"] <= row["GFLOP"] for mine in ours)


def test_gradients_without_a_compiler_and_under_a_policy_are_equal_to_the_bit() -> None:
    exact = [row for row in RESULTS["rows"] if row["how"] == compared.EAGER or row["contender"] == "policylang"]
    assert len(exact) > 8
    assert {row["gradients"] for row in exact} == {0.0}


@pinned
def test_dropout_is_what_the_results_say() -> None:
    recorded = {row["contender"]: row["gradients differ by"] for row in RESULTS["dropout"]}
    found = {row["contender"]: row["gradients differ by"] for row in compared.measure_dropout()}
    assert found.items() <= recorded.items()
    assert len(found) >= 5


@pinned
@pytest.mark.slow
def test_the_results_are_those_of_a_run() -> None:
    found = {(row["contender"], row["how"], row["keeps"]): row for row in compared.measure_all()}
    for row in RESULTS["rows"]:
        again = found.get((row["contender"], row["how"], row["keeps"]))
        if again is None:  # the packages of some are not there
            assert find_spec("torch_remat") is None or find_spec("torchtitan") is None
            continue
        assert {key: again[key] for key in COUNTED} == pytest.approx({key: row[key] for key in COUNTED}, rel=1e-3)


BUDGETS = json.loads((Path(compared.__file__).parent / "results" / "budgets.json").read_text(encoding="utf-8"))["rows"]


def test_a_tuned_policy_takes_what_is_simulated() -> None:
    """Under ``torch.compile`` a step with dropout takes more."""
    rows = [row for row in BUDGETS if "policylang's peak MiB" in row]
    assert {row["contender"] for row in rows} == set(budgets.PATHS)
    for row in rows:
        eager = row["policylang's path"] == compared.EAGER
        simulated, peak = row["policylang's simulated MiB"], row["policylang's peak MiB"]
        above = 0.001 if eager or row["model"] != "gpt2" else 0.067
        assert simulated <= row["policylang's asked MiB"]
        assert peak == pytest.approx(simulated, rel=above)
        assert row["policylang's gradients"] <= (0.0 if eager else 1e-6)


def test_a_recomputed_dropout_under_pytorchs_budgets_draws_other_numbers() -> None:
    for row in BUDGETS:
        redrawn = row["model"] == "gpt2" and row["contender"] != budgets.SAC_MILP and row["asked"] < 1
        if "gradients" in row:
            assert row["gradients"] > 0.28 if redrawn else row["gradients"] == 0


def test_each_operator_of_a_module_gets_its_own_decision_of_sac_milp() -> None:
    """Of two of a kind the second is kept."""
    ran: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func._overloadpacket.__name__)
            return func(*args, **kwargs or {})

    def run(names: list[str]) -> None:
        context_fn = partial(budgets.contexts, names, [0, 1, 0])
        x = torch.ones(4, requires_grad=True)
        y = checkpoint(lambda x: x.sin().sin().exp(), x, use_reentrant=False, context_fn=context_fn, early_stop=False)
        ran.clear()
        with Seen():
            y.sum().backward()

    run(["sin", "sin", "exp"])
    assert (ran.count("sin"), ran.count("exp")) == (1, 1)
    with pytest.raises(AssertionError, match="the statistics have cos where"):
        run(["sin", "cos", "exp"])


@pinned
@pytest.mark.slow
@pytest.mark.skipif(not all(map(find_spec, budgets.NEEDS)), reason="sac_milp is not installed")
def test_budgets_are_what_the_results_say() -> None:
    recorded = [row for row in BUDGETS if row["model"] == "llama"]
    for row, again in zip(recorded, budgets.measure("llama"), strict=True):
        assert again.keys() == row.keys()
        counted = {key for key, value in row.items() if isinstance(value, float) and "gradients" not in key}
        assert {key: again[key] for key in counted} == pytest.approx({key: row[key] for key in counted}, rel=1e-3)


REFERENCE = load_device(schedule.REFERENCE)
SMALL = synthetic_half(150)
"""Two blocks."""


@pytest.mark.slow
@needs_overlap_scheduling_by_given_times
def test_torch_schedules_by_our_times_without_a_gpu() -> None:
    with process_groups(SMALL.groups):
        before = schedule.judged(schedule.as_traced(SMALL), REFERENCE)
        alone, bucketed = (
            schedule.judged(schedule.of_torch(SMALL, REFERENCE, name), REFERENCE)
            for name in ("torch", "torch, pre-bucketing")
        )
    assert alone["exposed ms"] < before["exposed ms"]
    assert alone["collectives"] == before["collectives"] == 28
    assert bucketed["collectives"] < 28
    assert [node.name for node in SMALL.graph.nodes] == list(SMALL.facts.names)  # it got copies


def test_times_are_those_of_the_profile_and_a_size_of_nothing_is_its_latency() -> None:
    module = SMALL.fresh()
    prices = schedule_peers._Prices(SMALL, module, REFERENCE)
    times = node_times(SMALL.facts, REFERENCE)
    gather = next(row for row, target in enumerate(SMALL.facts.targets) if "all_gather" in target)
    node = list(module.graph.nodes)[gather]
    assert prices.milliseconds(node, None) == 1e3 * times.seconds[gather]
    assert prices.milliseconds(node, 0) == pytest.approx(1e3 * 30e-6)
    new = module.graph.node_copy(node)  # what a pass adds is priced when it asks
    assert prices.milliseconds(new, None) == prices.milliseconds(node, None)


@needs_overlap_scheduling_by_given_times
def test_torch_plans_by_the_names_of_blocks() -> None:
    assert schedule.blocks_of(SMALL.facts) == ["layers.1", "layers.0"]
    with process_groups(SMALL.groups):
        found = schedule.judged(schedule.of_torch(SMALL, REFERENCE, schedule.MANUAL), REFERENCE)
    assert found["collectives"] == 4  # a gather and a scatter of each block


def test_a_table_of_times_takes_the_place_of_the_networks(tmp_path: Path) -> None:
    path = tmp_path / "measured.table"
    path.write_text(
        "Group  Group Size  Collective  1MB (ms)  32MB (ms)\n"
        "0  64  all_gather_into_tensor  1.0  8.0\n"
        "1  8  all_gather_into_tensor  0.1  0.5\n"
    )
    device = schedule.with_times(REFERENCE, path)
    gather = next(row for row, target in enumerate(SMALL.facts.targets) if "all_gather" in target)
    near = evolve(SMALL.facts, groups={"0": Group("0", tuple(range(8)), 8)})
    prices = CollectivePrices(device)
    assert prices.seconds(SMALL.facts, gather) == pytest.approx((1 - 7 / 62) * 1e-3)  # 512 KiB: the line
    assert prices.seconds(near, gather) < 1.1e-4
    assert device.name == "measured"


DEVICE = load_device("h100-sxm")


@cache
def joint() -> JointGraph:
    return llama_joint(2)


@cache
def subject() -> tune.Subject:
    return tune.Subject.of("two layers", joint())


@cache
def measured() -> dict[str, Any]:
    return tune.measure(subject(), DEVICE, 2, ["dp"], lambda _: None, numbers=[1])


@pytest.mark.slow
def test_every_contender_is_measured_and_none_beats_what_is_tuned() -> None:
    found = measured()
    assert {each["family"] for each in found["others"]} == {"bundled", "by hand", "torch"}
    assert found["beaten"] == []
    assert found["fits"]
    assert found["monotone"]
    assert len(found["tuned"]) == len(found["tuned saved"]) == 2
    assert all(each["recompute"] >= each["bound"] - 1e-12 for each in found["tuned saved"])
    assert "faster at the same peak: 0 of" in tune.verdicts(found)
    assert len(tune.rows_of(found)) == 2


@pytest.mark.slow
def test_a_point_that_is_faster_is_said_to_beat() -> None:
    facts = subject().facts()
    tuner = tune.Tuner(facts, node_times(facts, DEVICE), JOINT)
    free = Point("torch", "made up", measured()["tuned"][0]["peak"], 0, 0.0)
    (found,) = tune.beaten(tune.at_their_peaks(tuner, [free], []), tuner.forward)
    assert found["name"] == "made up"
    assert found["faster by"] == pytest.approx(measured()["tuned"][0]["recompute"] / tuner.forward)


@pytest.mark.slow
def test_what_torch_is_said_to_save_is_what_its_partition_saves() -> None:
    graph = joint()
    facts = subject().facts()
    arguments = subject().arguments
    seconds = dict(zip(facts.names, node_times(facts, DEVICE).seconds, strict=True))
    chosen = saved_by_torch(graph.fresh(), graph.inputs, seconds, [1.0], ["dp"], **arguments)["dp", 1.0]
    with functorch_config.patch(cse=False, activation_memory_budget=1.0):
        forward, _ = min_cut_rematerialization_partition(graph.fresh(), graph.inputs, **arguments)
    outputs = forward.graph.output_node().args[0][arguments["num_fwd_outputs"] :]
    inputs = {name for name, op in zip(facts.names, facts.ops, strict=True) if op == "placeholder"}
    assert {node.name for node in outputs} - inputs == chosen - inputs != set()


@pytest.mark.slow
def test_a_choice_of_values_comes_to_what_the_same_policy_comes_to() -> None:
    facts = subject().facts()
    times = node_times(facts, DEVICE)
    text = "recompute everything\nsave mm\n"
    policy = tune.Tuner(facts, times, JOINT).evaluation.planned(text)
    saved = {facts.names[row] for row in saved_and_recomputed(policy).saved}
    by_policy = of_policy("policy", "", text, facts, times)
    assert by_policy == of_saved("policy", "", saved, facts, times)
    assert by_policy.recompute > 0


@pytest.mark.slow
def test_the_allocator_sees_the_peak_that_was_simulated() -> None:
    for row in tuned_steps.measure("llama", ["flat"], tuned_steps.TINY, 2):
        assert row["measured / simulated"] == pytest.approx(1, abs=0.05)


TIGHTEST_WITH_DROPOUT = ("gpt2", "aot_eager")
"""At its smallest budget a step holds one attention's scores more than the simulation says, 16 of 243 MiB."""


@pytest.mark.slow
@pytest.mark.parametrize("path", ["flat", "aot_eager"])
@pytest.mark.parametrize("model", tuned_steps.MODELS)
def test_at_five_budgets_the_allocators_peak_is_within_5_percent(model: str, path: str) -> None:
    rows = tuned_steps.measure(model, [path])
    assert len(rows) == 5
    if (model, path) == TIGHTEST_WITH_DROPOUT:
        assert rows.pop(0)["measured / simulated"] < 1.08
    assert [row for row in rows if abs(row["measured / simulated"] - 1) > 0.05] == []
    assert max(row["simulated MiB"] for row in rows) > 150


SCRIPT = gpu.ROOT / "scripts" / "gpu"


def part(name: str, code: str, minutes: float = 1.0) -> gpu.Part:
    command = (sys.executable, "-c", f"import sys, time, json; path = sys.argv[1]\n{code}")
    return gpu.Part(name, command, minutes, gpu.read_json)


def wrote(rows: list[dict[str, Any]]) -> str:
    return f"open(path, 'w').write(json.dumps({{'machine': 'told once', 'rows': {rows!r}}}))"


def test_each_part_ends_by_itself_and_leaves_what_it_measured() -> None:
    agrees = [{"contender": "policylang", "audit": "agrees"}]
    kept: list[list[str]] = []
    accounts = gpu.run_all(
        [
            part("whole", wrote(agrees)),
            part("cut short", wrote(agrees) + "\nsys.stdout.flush(); time.sleep(60)", minutes=0.5 / 60),
            part("broken", "sys.exit(3)"),
            part("no memory", wrote([{"contender": "eager", "failed": "out of memory"}])),
            part("otherwise", wrote([{"contender": "policylang", "audit": "mm_3 is not saved"}])),
        ],
        minutes=5,
        write=lambda found: kept.append([each["part"] for each in found]),
    )
    assert [each["outcome"] for each in accounts] == ["done", "out of time", "failed", "done", "done"]
    assert accounts[0]["rows"] == accounts[1]["rows"] == agrees
    assert "machine" not in accounts[0]
    assert accounts[2]["exit"] == 3
    assert kept[0] == ["whole"]
    assert len(kept[-1]) == 5
    assert gpu.failures(accounts) == [
        "cut short: out of time",
        "broken: failed",
        "no memory: eager: out of memory",
        "otherwise: policylang: mm_3 is not saved",
    ]


def test_the_limit_is_that_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LEAST_SECONDS", 0.3)
    start = time.monotonic()
    sleeps = part("long", "time.sleep(60)")
    never = evolve(sleeps, cannot="torch is too old for it")
    accounts = gpu.run_all([sleeps, never, sleeps], minutes=0.5 / 60, write=lambda _: None)
    assert [each["outcome"] for each in accounts] == ["out of time", "left out", "not started"]
    assert accounts[1]["reason"] == "torch is too old for it"
    assert gpu.failures(accounts) == ["long: out of time", "long: not started"]
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_how_each_test_ended_and_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(record_property): record_property('allocated_ratio', 0.9)\n"
        "def test_bad(): assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.skip(reason='needs four GPUs')\n"
        "def test_left(): pass\n"
    )
    path = tmp_path / "junit.xml"
    command = (*gpu.parts("cpu", "")[0].command, str(path))
    arguments = [str(tmp_path) if each == "tests/gpu" else each for each in command]
    subprocess.run(arguments, cwd=tmp_path, capture_output=True)
    rows = {row["test"].rpartition("::")[2]: row for row in gpu.read_tests(path)["tests"]}
    assert rows["test_good"]["outcome"] == "passed"
    assert rows["test_good"]["allocated_ratio"] == "0.9"
    assert rows["test_left"]["outcome"] == "skipped"
    assert "needs four GPUs" in rows["test_left"]["message"]
    assert [
        line.rpartition("::")[2]
        for line in gpu.failures([{"part": "tests", "outcome": "done", **gpu.read_tests(path)}])
    ] == ["test_bad: AssertionError: one is not two"]


def test_every_benchmark_that_knows_a_device_is_a_part_of_the_run() -> None:
    folder = gpu.ROOT / "benchmarks"
    with_device = {path.stem for path in folder.glob("*.py") if '"--device"' in path.read_text()} - {"gpu"}
    commands = [part.command for part in gpu.parts("cuda", "llama3_sac.apl")]
    words = (word for command in commands for word in command)
    assert {word.removeprefix("benchmarks.") for word in words if "benchmarks." in word} == with_device
    assert all(command[command.index("--device") + 1] == "cuda" for command in commands[1:])
    shapes = [command[command.index("--shape") + 1] for command in commands if "benchmarks.training_step" in command]
    assert shapes == ["1b", "8b"]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_so_and_installs_nothing() -> None:
    before = (gpu.ROOT / ".venv-gpu").exists()
    found = subprocess.run([SCRIPT], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable})
    assert found.returncode == 2
    assert found.stderr == "no GPU: nvidia-smi finds none; `scripts/gpu --device cpu` rehearses the run without one\n"
    assert (gpu.ROOT / ".venv-gpu").exists() == before


@pytest.mark.slow
def test_a_rehearsal_without_a_gpu_runs_every_part(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--minutes", "30", "--json", str(path)]
    environment = {**os.environ, "PYTHON": sys.executable}
    found = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, env=environment)
    results = json.loads(path.read_text())
    assert found.returncode == 0, found.stdout + found.stderr
    assert results["machine"]["torch"] == torch.__version__
    steps = {each["part"]: each["rows"] for each in results["parts"] if each["part"].startswith("training_step")}
    assert len(steps) == 2
    for rows in steps.values():
        ours = next(row for row in rows if row["contender"].startswith("policylang"))
        assert ours["audit"] == "agrees"
        assert {"eager SAC by hand", "memory budget 0.5"} <= {row["contender"].partition(",")[0] for row in rows}


# --- the benchmark of the language server ---
GRAPH = Path(__file__).resolve().parents[2] / "docs" / "graphs" / "tutorial.graph"


def test_the_policy_has_a_hundred_lines_and_all_edits_but_each_fifth_can_be_planned() -> None:
    text = lsp.policy_text()
    assert text.count("\n") == lsp.LINES
    found = [parse_policy(each).policy is not None for each in islice(lsp.policy_edits(text), 20)]
    assert found == [at % 5 != 3 for at in range(20)]


def test_of_a_hundred_values_the_ninety_fifth() -> None:
    found = lsp.row("it", [float(each) for each in range(100, 0, -1)], graph="g")
    assert found == {"graph": "g", "what": "it", "times": 100, "p50 ms": 50.5, "p95 ms": 96.0, "max ms": 100.0}


@pytest.mark.slow
def test_a_short_run(tmp_path) -> None:
    found = lsp.measure({"small": (GRAPH, 984)}, 8, tmp_path)
    assert {row["what"] for row in found["rows"]} >= {"diagnostics of the text", "hover", "completion"}
    measured = (row for row in found["rows"] if "less" not in row["what"])
    assert all(0 < row["p50 ms"] <= row["p95 ms"] <= row["max ms"] for row in measured)
    assert found["memory"][0]["most MiB"] >= found["memory"][0]["now MiB"] > 10
    assert all(row["ours / peer"] > 0 for row in found["peers"])


@pytest.mark.slow
@pytest.mark.parametrize("model", scale.MODELS)
def test_a_model_traced_from_few_layers_is_the_whole_one(model: str) -> None:
    assert scale.measure_whole(model, 9)["equal"] == "yes"
    row = scale.measure(model, 9, ("plan", "stages", "order"))
    assert len(row["stage peaks GiB"]) == scale.STAGES
    assert row["exposed ms a layer"] < row["step ms a layer"]
