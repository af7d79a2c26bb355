"""The text of a tuned policy, from Python: what it says, what it promises, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import policylang
from policylang.commands.cli import main
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.language.devices.reading import read_device
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.simulation.node_times import node_times
from policylang.tuning.budgets import infeasible
from policylang.tuning.evaluation import Besides, Budget, Infeasible
from policylang.tuning.tuned_policy import at_most, rounded_up
from policylang.tuning.tuner import Tuner
from tests.graph.captured import flat_of
from tests.support.compiled import assert_bitwise_equal, backend_for, train
from tests.support.hand import same_bits
from tests.support.joint import capture_joints
from tests.support.models import ZOO
from tests.support.process import python
from tests.support.textgraph import facts_of
from tests.support.tuned import tuned_facts, tuned_graph, written

MIB, GIB = 1 << 20, 1 << 30
DEVICE = "h100-sxm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a snapshot of four layers in it."""
    folder = tmp_path_factory.mktemp("tuned")
    written(folder)
    return folder


@pytest.fixture(scope="module")
def tuned(folder: Path) -> policylang.TunedPolicy:
    return policylang.tune(folder / "small.graph", peak="500 MiB", device=DEVICE)


def test_the_text_says_where_it_is_from(tuned):
    first, second, blank, *rest = tuned.text.splitlines()
    assert first.startswith("# Tuned with `policylang tune` for small.graph (joint graph of 43 nodes, facts ")
    assert first.endswith("), on h100-sxm.")
    assert (second, blank) == ("# The budget: a peak of at most 500 MiB.", "#")
    comment = [line for line in rest if line.startswith("#")]
    assert [line.split()[1] for line in comment if line.startswith("#   ")][:3] == ["peak", "saved", "recomputed"]
    assert comment[-1].startswith("# On either side: with ")
    assert tuned.rules in tuned.text
    assert tuned.text.endswith("\n\nexpect peak <= 500 MiB\n")
    assert str(tuned) == tuned.text


def test_the_figures_are_those_of_the_plan(tuned, folder):
    found = policylang.check(policylang.parse(tuned.text), graph=folder / "small.graph")
    assert found.diagnostics == ()
    (plan,) = found.plans
    (expectation,) = plan.expectations
    assert expectation.margin == 500 * MIB - tuned.graph_peak
    assert tuned.peak == tuned.graph_peak <= 500 * MIB
    assert tuned.saved > 0
    assert 0 < tuned.recompute_share == tuned.recompute_seconds / tuned.tuned.forward
    assert tuned.tuned.chosen in tuned.table
    assert [each.peak for each in tuned.table] == sorted(each.peak for each in tuned.table)


def test_fmt_leaves_it_and_check_has_nothing_to_say(tuned, folder, capsys):
    path = str(tuned.save(folder / "saved.apl"))
    assert main(["fmt", "--check", path]) == 0
    assert main(["check", path, "--graph", str(folder / "small.graph"), "--deny", "warnings"]) == 0
    assert capsys.readouterr().out.count("clean") == 1


def test_the_same_graph_gives_the_same_text_from_the_file_and_from_memory(tuned, folder):
    facts = policylang.load_snapshot(folder / "small.graph")
    again = policylang.tune(facts, peak=500 * MIB, device=read_device(DEVICE))
    assert again.text.splitlines()[1:] == tuned.text.splitlines()[1:]
    assert again.subject.fingerprint == tuned.subject.fingerprint
    assert "for a joint graph of 43 nodes (facts " in again.text
    other = policylang.tune(tuned_facts(5), peak="500 MiB", device=DEVICE)
    assert other.subject.fingerprint != tuned.subject.fingerprint


@pytest.mark.slow
def test_the_text_is_the_same_in_every_process(tuned, folder):
    program = f"import policylang; print(policylang.tune('small.graph', peak='500 MiB', device='{DEVICE}'), end='')"
    for seed in ("1", "2"):
        assert python("-c", program, cwd=folder, PYTHONHASHSEED=seed).stdout == tuned.text


def test_what_takes_memory_beside_the_graph(folder):
    found = policylang.tune(folder / "small.graph", peak="800 MiB", optimizer="adamw", reserve="5%", device=DEVICE)
    assert found.peak == round((found.graph_peak + 128 * MIB) / 0.95) <= 800 * MIB
    assert "of it       " in found.text
    assert "128 MiB of optimizer state (adamw) and 5% in reserve" in found.text
    # 800 MiB × 0.95 − 128 MiB
    promise = "# of the graph: 800 MiB less 128 MiB of optimizer state (adamw) and 5% in reserve"
    assert found.text.splitlines()[-1] == f"expect peak <= 632 MiB  {promise}"


def test_a_budget_of_saved_bytes(folder):
    found = policylang.tune(folder / "small.graph", saved="310 MiB", device=DEVICE)
    assert found.saved <= 310 * MIB
    assert found.text.endswith("\n\nexpect saved <= 310 MiB\n")
    assert "# The budget: at most 310 MiB saved for the backward.\n" in found.text


def test_a_budget_of_time_names_its_device(folder, monkeypatch):
    found = policylang.tune(folder / "small.graph", recompute_time="30%", device="h100")
    assert found.recompute_share <= 0.3
    device, time, peak = found.text.splitlines()[-3:]
    assert (device, time) == ("device h100-sxm", "expect recomputed time <= 30%")
    assert peak == f"expect peak <= {rounded_up(found.graph_peak)}"
    mine = (Path(policylang.__file__).parents[1] / "devices" / "h100-sxm.toml").read_text()
    (folder / "mine.toml").write_text(mine.replace('"h100-sxm"', '"mine"'))
    monkeypatch.chdir(folder)
    assert '\ndevice "mine.toml"\n' in policylang.tune("small.graph", recompute_time="30%", device="mine.toml").text
    profile = read_device("mine.toml")
    assert "\ndevice " not in policylang.tune("small.graph", recompute_time="30%", device=profile).text


def test_more_than_enough_memory_saves_everything(folder):
    found = policylang.tune(folder / "small.graph", peak="20 GiB", device=DEVICE)
    (note,) = found.notes
    assert note.code == "APL627"
    room = 20 * GIB - found.peak
    assert note.message == f"nothing has to be recomputed: with all saved, {room / GIB:.1f} GiB of the budget are left"
    assert found.recompute_seconds == 0
    assert found.text.endswith("expect peak <= 20 GiB\n")


def refused(kind: type[policylang.PolicyError], graph: object, **how: object) -> policylang.Diagnostic:
    with pytest.raises(kind) as caught:
        policylang.tune(graph, **{"device": DEVICE, **how})
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_a_budget_that_no_policy_meets(folder):
    found = refused(policylang.PolicyMatchError, folder / "small.graph", peak="200 MiB")
    assert found.code == "APL625"
    smallest = policylang.tune(folder / "small.graph", peak="1 GiB", device=DEVICE, table=True).table[0]
    least = f"{smallest.peak / MIB:.1f} MiB".replace(".0 ", " ")
    said = f"no policy keeps the peak within 200 MiB: the smallest is {least}, at `{smallest.peak_at}`"
    assert found.message == said
    assert found.details[0] == f"alive there, {least}:"
    assert "  64 MiB parameters" in found.details
    assert found.help == f"the least that can be met is a peak of {least}"
    assert policylang.tune(folder / "small.graph", peak=smallest.peak, device=DEVICE).peak == smallest.peak


def test_a_budget_below_the_parameters(folder):
    found = refused(policylang.PolicyMatchError, folder / "small.graph", peak="60 MiB")
    assert found.code == "APL626"
    there = "a peak of 60 MiB is less than what is alive before the step: 64 MiB of parameters and buffers"
    assert found.message == there
    with_state = refused(policylang.PolicyMatchError, folder / "small.graph", peak="150 MiB", optimizer="adamw")
    assert with_state.code == "APL626"
    assert with_state.message.endswith("64 MiB of parameters and buffers, 128 MiB of optimizer state")


def test_fewer_saved_bytes_than_can_be():
    """Where a guard keeps values, as one that routing reads, not all can be recomputed."""
    facts = tuned_facts(2)
    all_saved = policylang.tune(facts, peak="1 GiB", device=DEVICE).tuned.chosen
    found = Infeasible(Budget("saved", 1024), Besides(), all_saved)
    said = infeasible(found, facts, node_times(facts, read_device(DEVICE)), JOINT)
    assert said.code == "APL625"
    assert said.message == "no policy saves as little as 1 KiB for the backward: the least is 304 MiB"
    assert said.help == "the least that can be met is 304 MiB"
    assert said.details[:2] == ("what stays:", "  64 MiB aten.mm.default of `up` in layers.0")
    assert said.details[-1].endswith(" more")


PLAIN = """
    %x = input bytes=1048576 dtype=float32
    %w = parameter bytes=65536 dtype=float32
    %a = aten.mm.default(%x, %w) a bytes=4194304 dtype=float32 flops=1000000000
    %b = aten.relu.default(%a) bytes=4194304 dtype=float32
    %c = aten.mm.default(%b, %w) b bytes=4194304 dtype=float32 flops=1000000000
    %d = aten.tanh.default(%c) bytes=4194304 dtype=float32
    %loss = aten.sum.default(%d) bytes=4 dtype=float32
    ---
    %ones = aten.ones_like.default(%loss) bytes=4 dtype=float32
    %dd = aten.tanh_backward.default(%ones, %d) bytes=4194304 dtype=float32
    %dc = aten.mm.default(%dd, %b) bytes=65536 dtype=float32 flops=1000000000
    %dw = aten.mm.default(%dc, %x) bytes=65536 dtype=float32 flops=1000000000
    output(%loss, %dw)
"""
"""Without layers, and with a loss that the backward reads and that is returned anyway."""


@pytest.mark.parametrize("saved", ["6 MiB", "1 MiB"])
def test_a_model_without_layers_has_budgets_too(saved):
    found = policylang.tune(facts_of(PLAIN, GraphKind.FLAT), saved=saved, device="cpu")
    assert found.saved <= (6 * MIB if saved == "6 MiB" else MIB)


LOGITS = """
    %tokens = input bytes=8192 shape=8x128 dtype=int64
    %table = parameter bytes=1048576 shape=4096x64 dtype=float32
    %x = aten.embedding.default(%table, %tokens) embed bytes=262144 shape=8x128x64 dtype=float32
    %h = aten.sin.default(%x) layers.0 bytes=262144 shape=8x128x64 dtype=float32
    %logits = aten.mm.default(%h, %table) lm_head bytes=16777216 flops=1000000 shape=1024x4096 dtype=float32
    %log = aten._log_softmax.default(%logits) bytes=16777216 shape=1024x4096 dtype=float32
    %loss = aten.sum.default(%log) bytes=4
    ---
    %t = tangent bytes=4
    %dlog = aten._log_softmax_backward_data.default(%t, %log) bytes=16777216 shape=1024x4096 dtype=float32
    %dtable = aten.mm.default(%dlog, %h) bytes=1048576 flops=1000000 shape=4096x64 dtype=float32
    output(%loss, %dtable)
"""


def test_the_logits_in_the_way():
    found = refused(policylang.PolicyMatchError, facts_of(LOGITS, GraphKind.JOINT), peak="20 MiB")
    (line,) = [each for each in found.details if each.startswith("too large")]
    assert line.startswith("too large: the logits and what is made of them, 32 MiB in 2 values as wide as the vocabul")
    assert "such as `log" in line


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("%x = input bytes=4\noutput(%x)", GraphKind.JOINT, "the graph is empty: no operator runs in it"),
        (tuned_graph(1), GraphKind.BACKWARD, "the graph is the backward graph of a partition, where all is decided"),
        (
            "%x = input bytes=4\n%a = aten.sin.default(%x) bytes=4\noutput(%a)",
            GraphKind.FORWARD,
            "the graph is a partition's forward graph, or of a forward alone: without its backward nothing is kept",
        ),
        (
            "%x = input bytes=4\n%a = aten.sin.default(%x) bytes=4\noutput(%a)",
            GraphKind.FLAT,
            "the graph is a graph of a forward alone: without its backward nothing is kept",
        ),
        (
            "%x = input bytes=4\n%a = aten.sin.default(%x) bytes=4\n---\n%t = tangent bytes=4\n"
            "%b = aten.mul.Tensor(%t, %x) bytes=4\noutput(%a, %b)",
            GraphKind.JOINT,
            "the backward of the graph reads nothing that its forward computes: there is nothing to decide",
        ),
        (
            "%x = input bytes=4\n---\n%t = tangent bytes=4\n%b = aten.mul.Tensor(%t, %x) bytes=4\noutput(%x, %b)",
            GraphKind.JOINT,
            "the graph has no forward: what its backward reads is given to it",
        ),
    ],
    ids=["empty", "half", "forward", "no backward", "nothing to decide", "no forward"],
)
def test_a_graph_that_nothing_can_be_tuned_for(text, kind, says):
    found = refused(policylang.PolicyGraphError, facts_of(text, kind), peak="1 GiB")
    assert (found.code, found.message) == ("APL630", says)
    assert found.help


def test_a_graph_without_numbered_layers(folder):
    found = policylang.tune(tuned_facts(2, at="stage_"), peak="1 GiB", device=DEVICE)
    assert [note.code for note in found.notes] == ["APL631", "APL627"]
    assert found.notes[0].message == "the graph has no numbered layers: its rules go by module, operator and size"


def test_offloading_needs_a_bandwidth_and_a_path(folder, tmp_path):
    text = (Path(policylang.__file__).parents[1] / "devices" / "h100-sxm.toml").read_text()
    head, _, rest = text.partition("[host]")
    (tmp_path / "no_host.toml").write_text(head + rest[rest.index("[[") :])
    graph = folder / "small.graph"
    found = refused(policylang.PolicyMatchError, graph, peak="1 GiB", offload=True, device=tmp_path / "no_host.toml")
    assert (found.code, found.message) == ("APL159", "the profile of `h100-sxm` has no figure for copies to the host")
    allowed = policylang.tune(graph, peak="500 MiB", offload=True, device=DEVICE)
    moves = any(each.offloaded for each in (allowed.tuned.chosen, *allowed.table))
    assert ("APL634" in [note.code for note in allowed.notes]) != moves
    found = refused(policylang.PolicyMatchError, graph, peak="1 GiB", offload=True, path="hook")
    assert found.code == "APL632"
    assert found.message == "values cannot be offloaded: a hook of Inductor's does not copy to the host"


def test_a_path_is_named_and_one_that_decides_nothing_refused(folder):
    found = policylang.tune(folder / "small.graph", peak="500 MiB", device=DEVICE, path="eager")
    assert "# It is for `--path eager`.\n" in found.text
    checked = policylang.check(policylang.parse(found.text), graph=folder / "small.graph", path="eager")
    assert checked.errors == 0
    refusal = refused(policylang.PolicyGraphError, folder / "small.graph", peak="500 MiB", path="half")
    assert refusal.code == "APL630"
    assert refusal.message.startswith("a forward or backward graph is given a policy's rewrites alone")


def test_no_budget_says_what_the_device_has(folder):
    found = refused(policylang.PolicyMeaningError, folder / "small.graph")
    assert (found.code, found.message) == ("APL624", "there is no budget to tune for")
    assert found.help.startswith("`h100-sxm` has 79 GiB: a peak of `79 GiB` uses all of it")
    assert refused(policylang.PolicyMeaningError, folder / "small.graph", peak="70").code == "APL624"
    assert refused(policylang.PolicyMeaningError, folder / "small.graph", peak=1, path="on foot").code == "APL633"
    assert refused(policylang.PolicyMeaningError, folder / "small.graph", peak=1, optimizer="none").code == "APL628"
    assert refused(policylang.PolicyMeaningError, folder / "small.graph", peak=1, reserve="100%").code == "APL629"


@pytest.mark.parametrize("missing", ["highspy", "numpy"])
def test_without_the_extra_it_says_what_to_install(folder, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    for module in [name for name in sys.modules if name.startswith("policylang.tuning.")]:
        monkeypatch.delitem(sys.modules, module)  # what has imported it already
    found = refused(policylang.PolicyError, folder / "small.graph", peak="500 MiB")
    assert found.code == "APL619"
    assert f"`{missing}` is not installed" in found.message
    assert f"`pip install {missing}`" in found.help


def test_promises_are_read_by_people():
    assert at_most(70 * GIB, 1) == "70 GiB"
    assert at_most(int(42.4857 * GIB), 40 * GIB) == "42.4 GiB"
    assert at_most(int(42.4857 * GIB), int(42.45 * GIB)) == "42.48 GiB"
    assert at_most(987_654_321, 987_654_321) == "987654321 B"
    assert at_most(54602 << 10, 1) == "53.3 MiB"
    assert rounded_up(int(42.41 * GIB)) == "42.5 GiB"
    assert rounded_up(1000) == "1000 B"
    assert rounded_up(1023 * MIB + 1) == "1024 MiB"


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import tune_llama

    return tune_llama


@pytest.mark.slow
def test_it_trains_within_the_budget(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned, losses, measured = example.main(folder=tmp_path)
    assert losses[-1] < losses[0]
    assert tuned.recompute_seconds > 0
    assert tuned.peak <= tuned.tuned.budget.limit
    assert measured == pytest.approx(tuned.graph_peak, rel=0.05)
    assert "MiB measured" in capsys.readouterr().out
    found = policylang.check(tmp_path / "tuned.apl", graph=tmp_path / "tune_llama.graph")
    assert [each.status for _, each in found.expectations] == ["held"]


CPU_DEVICE = DeviceProfile("small", {"float32": Rate.constant(1e9)}, Rate.constant(1e9))


def _halfway(facts: Facts, capabilities: Capabilities) -> str:
    """What is chosen where half as much may be kept as there is to keep."""
    tuner = Tuner(facts, node_times(facts, CPU_DEVICE), capabilities)
    found = tuner.tuned(Budget("saved", tuner.save_all.saved / 2))
    assert found.chosen.recompute > 0
    return found.chosen.rules


@pytest.mark.parametrize("name", ["mlp", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_flat_graph_has_the_bits_that_it_had(name: str) -> None:
    flat = flat_of(name)
    same_bits(flat, _halfway(collect(flat.gm), FLAT))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_a_compiled_step_has_the_bits_that_it_had(name: str) -> None:
    module, inputs, _ = ZOO[name]()
    text = _halfway(collect(capture_joints(module, inputs)[0].gm), JOINT)
    tuned = backend_for(text)
    without = train(ZOO[name](), lambda model: torch.compile(model, backend="aot_eager"))
    assert_bitwise_equal(without, train(ZOO[name](), lambda model: torch.compile(model, backend=tuned)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"),
    [("tutorial", "30%"), ("gpt2", "10%"), ("vit", "5%")],
)
def test_a_tuned_policy_has_no_warnings(name: str, share: str) -> None:
    """Lines that change nothing noticeably are left out: the workflow of the docs denies warnings."""
    graph = f"docs/graphs/{name}.graph"
    tuned = policylang.tune(graph, recompute_time=share, device="h100-sxm")
    assert policylang.check(policylang.parse(tuned.text), graph=graph).diagnostics == ()
    assert "# allow" not in tuned.text
