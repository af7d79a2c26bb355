"""Times on a device, and operators without a FLOP formula: wherever such a figure is printed or expected."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

import policylang
import policylang as library
from policylang.errors import PolicyError
from policylang.graph.snapshot import load, write
from policylang.language.shown import format_quantity
from policylang.planning.capabilities import JOINT
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.planner import plan
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import step_time
from policylang.testing import agree
from tests.support.compiled import backend_for
from tests.support.textgraph import facts_of

PROFILE = """
name = "slow"
[compute]
bfloat16 = 1e12
float32 = 1e11
[memory]
bandwidth = 1e9
[host]
bandwidth = 1e8
[[network]]
bandwidth = 1e9
latency = 1e-3
"""
BFLOAT = "shape=8x8 dtype=bfloat16"
LAYER = f"""
    %a{{n}} = aten.mm.default(%b{{before}}, %w) layers.{{n}} bytes=1000000 flops=20000000000 {BFLOAT}
    %b{{n}} = aten.sin.default(%a{{n}}) layers.{{n}} bytes=1000000 {BFLOAT}
"""
BACKWARD = f"    %g{{n}} = aten.mul.Tensor(%g{{after}}, %b{{n}}, %a{{n}}) bytes=1000000 {BFLOAT}"
GRAPH = "\n".join(
    [
        *(f"%b0 = input bytes=1000000 {BFLOAT}", f"%w = parameter bytes=1000000 {BFLOAT}"),
        *(LAYER.format(n=n, before=n - 1) for n in range(1, 5)),
        *("---", f"%g5 = tangent bytes=1000000 {BFLOAT}"),
        *(BACKWARD.format(n=n, after=n + 1) for n in (4, 3, 2, 1)),
        "output(%b4, %g1)",
    ]
)
"""Four layers: a product takes 20 ms, a sine 2 ms, and what the backward does of each layer 4 ms."""

POLICY = "blocks layers.*\nrecompute everything in block\nsave sin in block\n"
OTHER = "blocks layers.*\nrecompute everything in block\nsave mm in block\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(facts_of(GRAPH), "small.graph")
    (tmp_path / "slow.toml").write_text(PROFILE)
    (tmp_path / "mine.apl").write_text(POLICY)
    (tmp_path / "other.apl").write_text(OTHER)
    return tmp_path


ON = ("--graph", "small.graph", "--device", "./slow.toml")


def test_a_plan_says_its_times_beside_the_other_figures(policylang, folder):
    outcome = policylang("plan", "mine.apl", *ON, "--values")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"recomputed time +80 ms \(90\.9%\) +-\n", outcome.out), "four products of 88 ms"
    assert re.search(r"step time +184 ms +104 ms\n", outcome.out)
    assert "exposed" not in outcome.out, "nothing is"
    assert "\n\ntimes: slow\n\n" in outcome.out
    save = r"save sin in block +4 +4 +\+\S+ MiB +0 +-8 ms +\S+ \S+ +buys time +\S+ s\n"
    assert re.search(save, outcome.out), "no FLOPs, and time all the same"
    assert "976.6 KiB and 20 GFLOP recomputed in 20 ms, each\n" in outcome.out
    assert re.search(r"recomputed +aten.mm.default +8×8 bfloat16 +976.6 KiB +20 GFLOP +20 ms +mine.apl:2", outcome.out)


def test_json_has_what_the_simulation_gives(policylang, folder):
    found = json.loads(policylang("plan", "mine.apl", *ON, "--output-format", "json").out)
    facts, device = load("small.graph"), library.load_device("./slow.toml")
    made = plan(library.load("mine.apl"), facts, JOINT, device=device)
    times = node_times(facts, device)
    time = step_time(facts, made.schedule, times)
    assert found["device"] == "slow"
    assert found["forward_seconds"] == time.forward == pytest.approx(0.088)
    under, without = found["with"], found["without"]
    assert [each["recomputed_seconds"] for each in (under, without)] == [time.recomputed, 0.0]
    assert under["step_seconds"] == time.step
    assert under["exposed_seconds"] == time.exposed == 0.0
    freed = without["peak"]["backward"] - under["peak"]["backward"]
    assert freed > 0
    assert found["seconds_per_gib"] == pytest.approx((time.step - without["step_seconds"]) / (freed / 2**30))
    (again,) = (value for group in found["groups"] for value in group["values"] if value["flops"])
    assert again["seconds"] == times.seconds[facts.index["a1"]]
    ground, save = (rule["worth"] for rule in found["rules"])
    assert (ground["verdict"], save["verdict"]) == ("buys memory", "buys time")
    assert (save["recomputed_seconds"], save["step_seconds"]) == (pytest.approx(-0.008), pytest.approx(-0.008))
    assert save["seconds_per_gib"] == pytest.approx(0.008 / (save["saved_bytes"] / 2**30))
    assert save["flops_per_gib"] is None
    shown = json.loads(policylang("show", "small.graph", *ON[2:], "--output-format", "json").out)
    assert [each["seconds"] for each in shown["nodes"]] == list(times.seconds)
    assert shown["total"]["seconds"] == pytest.approx(time.forward)
    assert shown["total"]["backward_seconds"] == pytest.approx(0.016)
    compared = json.loads(policylang("diff", "other.apl", "mine.apl", *ON, "--output-format", "json").out)
    assert compared["new"]["step_seconds"] == time.step
    assert (compared["old"]["device"], compared["old"]["recomputed_seconds"]) == ("slow", pytest.approx(0.008))
    node = json.loads(policylang("explain", "mine.apl", *ON, "--node", "a1", "--output-format", "json").out)
    assert (node["seconds"], node["device"]) == (times.seconds[facts.index["a1"]], "slow")


def test_without_a_device_nothing_speaks_of_time(policylang, folder):
    for command in (
        ("plan", "mine.apl", "--graph", "small.graph"),
        ("diff", "other.apl", "mine.apl", "--graph", "small.graph"),
        ("explain", "mine.apl", "--graph", "small.graph", "--node", "a1"),
        ("explain", "mine.apl", "--graph", "small.graph", "--rule", "2"),
        ("show", "small.graph"),
        ("show", "small.graph", "--operator", "mm"),
        ("check", "mine.apl", "--graph", "small.graph"),
    ):
        said = policylang(*command).out
        assert not re.search(r"\btimes?\b|\bms\b", said), said
    found = json.loads(policylang("plan", "mine.apl", "--graph", "small.graph", "--output-format", "json").out)
    assert found["device"] is found["forward_seconds"] is found["seconds_per_gib"] is None
    for side in (found["with"], found["without"]):
        assert side["recomputed_seconds"] is side["step_seconds"] is side["exposed_seconds"] is None
    assert found["groups"][0]["values"][0]["seconds"] is found["groups"][0]["recomputed_seconds"] is None
    assert found["rules"][0]["worth"]["recomputed_seconds"] is found["rules"][0]["worth"]["seconds_per_gib"] is None
    shown = json.loads(policylang("show", "small.graph", "--output-format", "json").out)
    assert shown["device"] is shown["total"]["seconds"] is shown["nodes"][3]["seconds"] is None


def test_a_graph_is_shown_by_what_takes_longest(policylang, folder):
    out = policylang("show", "small.graph", *ON[2:]).out
    assert re.search(r"\noperator +forward +backward +bytes +FLOPs +time +backward time\naten\.mm\.default ", out)
    assert re.search(r"aten\.mm\.default .* 80 ms\naten\.mul\.Tensor .* 16 ms\naten\.sin\.default .* 8 ms\n", out)
    assert re.search(r"layers\.\*? +aten\.mm\.default +4 +3\.8 MiB +80 GFLOP +80 ms\n +aten\.sin", out)
    assert "\n\ntimes: slow\n" in out
    nodes = policylang("show", "small.graph", *ON[2:], "--operator", "mm").out
    assert re.search(r"a1 +aten.mm.default +layers.1 +forward +8×8 bfloat16 +976.6 KiB +20 GFLOP +20 ms\n", nodes)
    assert "80 GFLOP in 80 ms, 0 in the backward;" in nodes


def test_a_comparison_and_an_explanation(policylang, folder):
    text = policylang("diff", "other.apl", "mine.apl", *ON).out
    assert re.search(r"recomputed time +8 ms +80 ms +\+72 ms\nstep time +112 ms +184 ms +\+72 ms\n", text)
    assert "\ntimes: slow" in text
    marked = policylang("diff", "other.apl", "mine.apl", *ON, "--output-format", "markdown").out
    assert "| step time | 112 ms | 184 ms | +72 ms |" in marked
    assert "\n\ntimes: slow\n" in marked
    assert "976.6 KiB, 20 GFLOP, 20 ms on slow\n" in policylang("explain", "mine.apl", *ON, "--node", "a1").out
    several = policylang("explain", "mine.apl", *ON, "--node", "layers.1").out
    assert several.startswith("layers.1: 2 nodes, 22 ms on slow\n")
    assert re.search(r"b1 .* 2 ms\n", several)
    assert "matches 4, decides 4, 8 ms on slow\n" in policylang("explain", "mine.apl", *ON, "--rule", "3").out
    assert policylang("check", "mine.apl", *ON).out == "checked 1 file on 1 graph, with times of slow: clean\n"


def test_a_page_says_times_in_its_head_and_tables(policylang, folder):
    policylang("plan", "mine.apl", *ON, "--html", "plan.html")
    text = (folder / "plan.html").read_text()
    static = re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)
    assert '<dt>recomputed time</dt><dd class="big">80 ms</dd>' in static
    assert re.search(r"90\.9% of the forward&#x27;s 88 ms, at a price of \S+ s a GiB of peak", static)
    step = '<dt>step time</dt><dd class="big">184 ms</dd><dd class="small">104 ms without recomputation; times: slow'
    assert step in static
    assert '<th scope="col" class="number">recompute time</th>' in static
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)[0])
    assert data["device"] == "slow"
    assert data["nodes"]["seconds"][0] == pytest.approx(0.02)
    policylang("plan", "mine.apl", "--graph", "small.graph", "--html", "plan.html")
    without = (folder / "plan.html").read_text()
    assert "recomputed time" not in without
    assert "recompute time" not in without


def test_what_is_priced_by_bytes_is_named_once(policylang, folder):
    from attrs import evolve

    facts = facts_of(GRAPH)
    write(evolve(facts, uncounted=["mylab.scan" if name == "b1" else "" for name in facts.names]), "small.graph")
    for command in (("plan", "mine.apl", "--graph"), ("show",), ("diff", "other.apl", "mine.apl", "--graph")):
        out = policylang(*command, "small.graph", *ON[2:]).out
        assert out.count("times: slow; mylab.scan (no FLOP formula, so priced by bytes)") == 1, command


def test_a_collective_that_nothing_hides(policylang, folder):
    """Its wait stands right behind it: all of it is exposed."""
    gathered = f"""
        %x = input bytes=8 {BFLOAT}
        %w = parameter bytes=1000000 {BFLOAT}
        %g = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:2 bytes=2000000 {BFLOAT}
        %v = _c10d_functional.wait_tensor.default(%g) bytes=2000000 follows=g {BFLOAT}
        %a = aten.mm.default(%x, %v) layers.0 bytes=1000000 flops=20000000000 {BFLOAT}
        ---
        %t = tangent bytes=8 {BFLOAT}
        %b = aten.mul.Tensor(%t, %a) bytes=8 {BFLOAT}
        output(%a, %b)
    """
    write(facts_of(gathered), "small.graph")
    out = policylang("plan", "mine.apl", *ON, "--summary").out
    assert re.search(r"exposed +\S+ ms \(\d+(\.\d)?%\) +\S+ ms \(\d", out)


@pytest.mark.parametrize("command", [("plan", "mine.apl", "--graph"), ("show",)])
def test_what_is_no_device(policylang, folder, command):
    outcome = policylang(*command, "small.graph", "--device", "h10")
    assert (outcome.code, outcome.out) == (2, "")
    assert "there is no device profile `h10`" in outcome.err
    for name in ("cuda", "cuda:0", "meta"):
        outcome = policylang(*command, "small.graph", "--device", name)
        assert (outcome.code, outcome.out) == (2, "")
        assert f"error[APL416]: `{name}` is a device that a step is traced for, and times are" in outcome.err
    assert policylang("check", "mine.apl", "--device", "h100-sxm").code == 2, "times of what?"


def test_a_device_in_python(folder):
    device = library.load_device("./slow.toml")
    assert (device.name, device.host_bandwidth) == ("slow", 1e8)
    for given in (device, "./slow.toml", folder / "slow.toml"):
        found = library.check("mine.apl", graph="small.graph", device=given)
        assert found.devices == ("slow",)
        assert breakdown(found.plans[0]).forward_seconds == pytest.approx(0.088)
    assert library.check("mine.apl", graph="small.graph").devices == ()
    with pytest.raises(PolicyError, match="there is no device profile `h10`"):
        library.check("mine.apl", graph="small.graph", device="h10")
    with pytest.raises(PolicyError, match="APL416"):
        library.load("mine.apl", device="cuda")


WRITTEN_OUT = f"""
    %w = parameter bytes=1000000 device=cpu {BFLOAT}
    %s = aten._safe_softmax.default(%w) layers.1 bytes=1000000 {BFLOAT}
    ---
    %t = tangent bytes=8 {BFLOAT}
    %g = aten.mul.Tensor(%t, %s) bytes=8 {BFLOAT}
    output(%s, %g)
"""


@pytest.mark.parametrize(
    "command",
    [
        ("explain", "mine.apl", "--node", "layers.1", "--graph"),
        ("explain", "mine.apl", "--rule", "2", "--output-format", "json", "--graph"),
        ("diff", "mine.apl", "mine.apl", "--graph"),
        ("diff", "mine.apl", "mine.apl", "--output-format", "json", "--graph"),
    ],
)
def test_what_the_graph_was_traced_for_is_told_wherever_it_is_planned(policylang, folder, command):
    (folder / "mine.apl").write_text("blocks layers.*\nrecompute everything in block\n")
    write(facts_of(WRITTEN_OUT), "cpu.graph")
    outcome = policylang(*command, "cpu.graph")
    assert outcome.code == 0
    assert outcome.err.startswith("note[APL320]: 1 attention is written out in bmm and softmax, as the CPU runs it\n")
    assert "APL320" not in outcome.out
    assert policylang(*command, "small.graph").err == ""


def test_a_profile_that_lacks_a_figure_makes_no_time_up(policylang, folder):
    (folder / "slow.toml").write_text(PROFILE.replace("bfloat16 = 1e12\n", ""))
    said = "error[APL159]: the profile of `slow` has no figure for matrix work in bfloat16 (4 calls)"
    shown = policylang("show", "small.graph", *ON[2:])
    assert (shown.code, shown.out) == (1, "")
    assert said in shown.err
    plan = policylang("plan", "mine.apl", *ON)
    assert plan.code == 1
    assert plan.out.startswith(said)
    assert "no times: the profile of `slow` has no figure" in plan.out
    assert " ms" not in plan.out
    found = json.loads(policylang("plan", "mine.apl", *ON, "--output-format", "json").out)
    assert found["device"] is found["with"]["recomputed_seconds"] is None
    for command in (("diff", "other.apl", "mine.apl"), ("explain", "mine.apl", "--node", "a1")):
        outcome = policylang(*command, *ON)
        assert said in outcome.err
        assert " ms" not in outcome.out


def test_the_device_of_a_policy_and_the_flag_that_wins(policylang, folder):
    (folder / "named.apl").write_text(f'device "slow.toml"\n{POLICY}')
    (folder / "fast.toml").write_text(PROFILE.replace("slow", "fast").replace("1e9", "1e12"))
    graph = ("--graph", "small.graph")
    assert "\ntimes: slow\n" in policylang("plan", "named.apl", *graph).out
    assert re.search(r"step time +184 ms", policylang("plan", "named.apl", *graph).out)
    assert "\ntimes: fast\n" in policylang("plan", "named.apl", *graph, "--device", "./fast.toml").out
    assert policylang("explain", "named.apl", *graph, "--node", "a1").out.count("20 ms on slow") == 1
    assert "with times of slow: clean" in policylang("check", "named.apl", *graph).out
    found = json.loads(policylang("check", "named.apl", "mine.apl", *graph, "--output-format", "json").out)
    assert found["devices"] == ["slow"]
    loaded = library.load("named.apl")
    assert library.load("mine.apl", device="./slow.toml").canonical.replace("mine", "named") == loaded.canonical
    assert library.load("named.apl", device="./fast.toml").device.name == "fast"


def test_two_policies_of_which_one_names_a_device(policylang, folder):
    """They are compared by the same times; two devices are both named."""
    (folder / "named.apl").write_text(f'device "slow.toml"\n{POLICY}')
    for sides in (("other.apl", "named.apl"), ("named.apl", "other.apl")):
        out = policylang("diff", *sides, "--graph", "small.graph").out
        assert re.search(r"recomputed time +\d+ ms +\d+ ms +[+-]72 ms\n", out)
        assert "\ntimes: slow\n" in out
    (folder / "fast.toml").write_text(PROFILE.replace("slow", "fast").replace("1e9", "1e12"))
    (folder / "fast.apl").write_text(f'device "fast.toml"\n{POLICY}')
    out = policylang("diff", "named.apl", "fast.apl", "--graph", "small.graph").out
    assert "no decision changes" in out
    assert "\ntimes before: slow\ntimes after: fast\n" in out


@pytest.mark.parametrize("path", ["joint", "eager"])
def test_what_is_expected_of_time_is_what_is_shown(policylang, folder, path):
    """In eager a block runs again up to the last value that its backward reads: more than a schedule has."""
    (folder / "all.apl").write_text(POLICY + "expect step time <= 1 ms\nexpect recomputed time <= 1%\n")
    outcome = policylang("plan", "all.apl", *ON, "--path", path, "--output-format", "json")
    found = json.loads(outcome.out)
    assert outcome.code == 1
    step, again = (each["found"] for each in found["expectations"])
    assert step == format_quantity(found["with"]["step_seconds"], "seconds")
    assert again == format_quantity(found["with"]["recomputed_seconds"] / found["forward_seconds"], "fraction")


UNCOUNTED_POLICY = """policy {name}
blocks layers.*
recompute everything in block
{rules}expect recomputed flops <= 1%
"""
FUSED = "uncounted_here.fused.default"


class Layer(nn.Module):
    """A layer whose work is that of a custom operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.uncounted_here.fused(x.sin(), self.weight).cos()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@pytest.fixture(scope="module")
def uncounted_library() -> Iterator[None]:
    library = torch.library.Library("uncounted_here", "DEF")
    library.define("fused(Tensor x, Tensor w) -> Tensor")
    library.impl("fused", lambda x, w: x @ w, "CompositeExplicitAutograd")
    torch.library.register_fake("uncounted_here::fused", lambda x, w: x.new_empty(x.shape[0], w.shape[1]), lib=library)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient

    def kept(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    torch.library.register_autograd("uncounted_here::fused", backward, setup_context=kept, lib=library)
    yield
    library._destroy()


def compiled() -> Any:
    """The report on a model that was compiled and trained."""
    torch._dynamo.reset()
    text = UNCOUNTED_POLICY.format(name="mine", rules="")
    backend = backend_for(text.replace("flops <= 1%", "flops <= 90%"))
    model = torch.compile(Model(), backend=backend)
    model(torch.randn(4, 8)).backward()
    return policylang.report(model), backend


@pytest.fixture(scope="module")
def uncounted_folder(tmp_path_factory: pytest.TempPathFactory, uncounted_library: None) -> Path:
    """A snapshot of the model's joint graph, and two policies."""
    uncounted_folder = tmp_path_factory.mktemp("uncounted")
    report, backend = compiled()
    policylang.snapshot(backend, uncounted_folder / "model.graph")
    (uncounted_folder / "report.txt").write_text(str(report))
    (uncounted_folder / "report.json").write_text(report.to_json())
    for name, rules in (("mine", ""), ("saving", "save uncounted_here.fused in block\n")):
        (uncounted_folder / f"{name}.apl").write_text(UNCOUNTED_POLICY.format(name=name, rules=rules))
    return uncounted_folder


def test_a_report_names_what_it_does_not_count(uncounted_folder: Path) -> None:
    text, data = ((uncounted_folder / name).read_text() for name in ("report.txt", "report.json"))
    data = json.loads(data)
    assert f"            and {FUSED} ×2 (no FLOP formula, so counted as 0)" in text
    assert data["uncounted"] == data["uncounted_recomputed"] == {FUSED: 2}
    (warning,) = data["warnings"]
    assert warning.startswith("<policy>:4: `expect recomputed flops <= 90%` does not count 2 calls of")
    assert "(APL332)" in warning


def test_every_command_names_what_is_not_counted(uncounted_folder: Path, monkeypatch: Any, policylang) -> None:
    monkeypatch.chdir(uncounted_folder)

    def said(command: str) -> str:
        return policylang(*command.split(), "--graph", "model.graph").out

    named = f"{FUSED} ×2 (no FLOP formula, so counted as 0)"
    text = said("plan mine.apl --values")
    assert f"uncounted in the forward: {named}; recomputed of them: {named}" in text
    assert "not counted" in next(line for line in text.splitlines() if line.strip().startswith(f"recomputed  {FUSED}"))
    mine, saving = (json.loads(said(f"plan {name}.apl --output-format json")) for name in ("mine", "saving"))
    assert mine["uncounted_operators"] == mine["with"]["uncounted_operators"] == {FUSED: 2}
    assert (saving["uncounted_operators"], saving["with"]["uncounted_operators"]) == ({FUSED: 2}, {})
    assert "APL332" not in {each["code"] for each in saving["diagnostics"]}
    said("plan mine.apl --html page.html")
    page = (uncounted_folder / "page.html").read_text()
    assert "without FLOPs" in page
    assert f"{named}; 2 calls recomputed" in page
    text = said("check mine.apl")
    assert f"warning[APL332]: `expect recomputed flops <= 1%` does not count 2 calls of `{FUSED}`" in text
    assert "fused (uncounted_here.fused.default) in layers.0" in text
    assert "register_flop_formula" in text
    assert "APL332" not in said("check saving.apl")
    for form in ("text", "markdown"):
        text = said(f"diff mine.apl saving.apl --output-format {form}")
        assert f"before: recomputed without {named}" in text
        assert "after: recomputed without" not in text
    assert "FLOPs not counted" in said("explain mine.apl --node fused")


def test_a_registered_formula_is_used_when_facts_are_collected(uncounted_folder: Path) -> None:
    register_flop_formula(torch.ops.uncounted_here.fused)(lambda x, w, **_: 2 * x[0] * x[1] * w[1])
    try:
        report, _ = compiled()
    finally:
        del flop_registry[torch.ops.uncounted_here.fused]
    assert report.uncounted == {}
    assert report.recomputed.flops == 2 * 2 * 4 * 8 * 8
    assert report.warnings == ()


class ChoosingLayer(Layer):
    """Another kernel where it is compiled, as the expert layers of Transformers have it."""

    def forward(self, x: Tensor) -> Tensor:
        fused = torch.ops.uncounted_here.fused
        return (fused(x, self.weight) if torch.compiler.is_compiling() else x @ self.weight).cos()


class ChoosingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ChoosingLayer() for _ in range(2))


@pytest.mark.usefixtures("uncounted_library")
def test_operators_that_one_path_alone_has_are_named_with_what_is_not_counted() -> None:
    policy = policylang.parse("blocks layers.*\nrecompute everything in block")
    x = torch.randn(4, 8)
    found = agree(ChoosingModel, lambda model, x: model(x), (x,), policy, paths=["eager", "joint"])
    assert found.agrees
    assert found.decisions.alone["eager"]["aten.mm.default"] == found.decisions.alone["joint"][FUSED] == 2
    text = str(found)
    assert re.search(r"eager alone: .*aten\.mm\.default ×2", text)
    assert f"joint without {FUSED} ×2 (no FLOP formula, so counted as 0)" in text


@pytest.mark.usefixtures("uncounted_library")
def test_a_formula_is_part_of_the_key_of_compiled_graphs() -> None:
    from policylang.backends.caching import formulas_key

    keys = [formulas_key()]
    for factor in (2, 3):
        formula = (lambda x, w, **_: 2 * x[0]) if factor == 2 else (lambda x, w, **_: 3 * x[0])
        register_flop_formula(torch.ops.uncounted_here.fused)(formula)
        keys.append(formulas_key())
        del flop_registry[torch.ops.uncounted_here.fused]
    assert len(set(keys)) == 3
    assert formulas_key() == keys[0]
