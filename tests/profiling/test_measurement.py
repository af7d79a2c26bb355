"""From what a clock says to what a profile holds, on a machine whose rates are known and on this one."""

from pathlib import Path

import pytest
import torch
from attrs import define, field

import policylang
from policylang.api import profile_device as api
from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network
from policylang.language.devices.reading import read_device, read_table
from policylang.profiling import trials
from policylang.profiling.profiler import MIB, MeasuredGroup, Profiled, in_a_table, number, profiled, ring, table_text
from policylang.profiling.trials import (
    ATTENTION,
    BEFORE,
    CONVOLUTION,
    FUSED,
    MOST_ROUNDS,
    OVERHEAD,
    STREAM,
    UNFUSED,
    DeviceClock,
    Operands,
    Trial,
    functions,
    fused,
    host_copies,
    measure,
    products,
    shares,
    streams,
)
from tests.support.process import TORCHRUN, python

OVERHEAD_SECONDS = 2e-6


@define
class FakeMachine:
    """A clock whose seconds follow from the work of a trial; nothing is run."""

    rates: dict[str, float] = field(
        factory=lambda: {
            "float32": 100e9, "bfloat16": 400e9, "float64": 50e9, STREAM: 20e9, ATTENTION: 80e9, CONVOLUTION: 150e9,
            "to host": 5e9, "from host": 4e9, BEFORE + "tanh": 3e9,
        }
    )  # fmt: skip
    """FLOPs or bytes a second by key; a function without one is as fast as a stream."""
    refuses: dict[str, str] = field(factory=dict)
    """What it says to trials of a key."""
    disturbed: int | None = None
    """The round in which everything takes ten times as long."""
    time: float = 0.0
    timed: list[tuple[str, float]] = field(factory=list)
    _rounds: dict[Trial, int] = field(factory=dict)

    def now(self) -> float:
        return self.time

    def seconds(self, trial: Trial) -> float:
        if trial.key in self.refuses:
            raise RuntimeError(self.refuses[trial.key])
        self.timed.append((trial.name, trial.work))
        self._rounds[trial] = self._rounds.get(trial, 0) + 1
        took = self._undisturbed(trial) * (10 if self._rounds[trial] == self.disturbed else 1)
        self.time += took
        return took

    def _undisturbed(self, trial: Trial) -> float:
        if trial.key == OVERHEAD:
            return OVERHEAD_SECONDS
        if trial.key in (FUSED, UNFUSED):
            return 1e-3 if trial.key == UNFUSED else 0.4e-3
        rate = self.rates.get(trial.key, self.rates[STREAM] if trial.key.startswith(BEFORE) else 1e9)
        return OVERHEAD_SECONDS + trial.work / rate


def measured(machine: FakeMachine, *, compiled: bool = False, budget: float = 1e6) -> Profiled:
    found = profiled(torch.device("cpu"), "fake", "fake.table", compiled=compiled, budget=budget, clock=machine)
    assert found is not None
    return found


def read_back(found: Profiled, folder: Path) -> DeviceProfile:
    path = folder / "our-machine.toml"
    path.write_text(found.text, encoding="utf-8")
    device = read_device(path)
    assert isinstance(device, DeviceProfile), device
    return device


def test_the_file_holds_the_rates_of_the_machine(tmp_path: Path) -> None:
    device = read_back(measured(FakeMachine(refuses={"float16": "no"})), tmp_path)
    assert sorted(device.compute) == ["bfloat16", "float32", "float64"]
    for dtype, rate in (("float32", 100e9), ("bfloat16", 400e9), ("float64", 50e9)):
        assert all(reached == pytest.approx(rate, rel=0.01) for _, reached in device.compute[dtype].points)
    assert all(reached == pytest.approx(20e9, rel=0.01) for _, reached in device.bandwidth.points)
    assert device.overhead == OVERHEAD_SECONDS
    assert device.attention == pytest.approx(0.8, rel=0.01)
    assert device.convolution == pytest.approx(1.5, rel=0.01)
    assert device.operators == {"aten.tanh": 3e9}
    assert device.host_bandwidth == pytest.approx(4e9, rel=0.01)
    assert device.pointwise == 1
    assert device.capacity


def test_sizes_rise_and_those_that_are_mostly_overhead_are_left_out() -> None:
    profile = measured(FakeMachine()).profile
    for rate in (*profile.compute.values(), profile.bandwidth):
        sizes = [size for size, _ in rate.points]
        assert sizes == sorted(set(sizes))
        assert len(sizes) > 3
    assert min(size for size, _ in profile.bandwidth.points) > 20e9 * OVERHEAD_SECONDS


@pytest.mark.parametrize("compiled", [False, True])
def test_what_was_measured_is_what_is_read(tmp_path: Path, compiled: bool) -> None:
    found = measured(FakeMachine(), compiled=compiled)
    assert read_back(found, tmp_path).canonical == found.profile.canonical
    assert found.profile.pointwise == (0.4 if compiled else 1)
    assert ("under torch.compile" in found.text) == compiled


def test_a_dtype_that_the_machine_lacks_is_named_and_left_out(tmp_path: Path) -> None:
    said = "\"addmm_impl_cpu_\" not implemented for 'Half'\nmore of it\x1b"
    found = measured(FakeMachine(refuses={"float16": said}))
    assert "# float16 was left out: \"addmm_impl_cpu_\" not implemented for 'Half'\n" in found.text
    assert "more of it" not in found.text
    assert "float16" not in read_back(found, tmp_path).compute


def test_without_attention_or_convolutions_their_shares_are_one(tmp_path: Path) -> None:
    found = measured(FakeMachine(refuses={"attention": "no", "convolution": "no"}))
    device = read_back(found, tmp_path)
    assert (device.attention, device.convolution) == (1, 1)


def test_attention_never_reaches_more_than_a_profile_may_say(tmp_path: Path) -> None:
    machine = FakeMachine()
    machine.rates["attention"] = 1000e9
    assert read_back(measured(machine), tmp_path).attention == 1


def test_a_round_that_others_disturb_changes_nothing_and_is_told(tmp_path: Path) -> None:
    undisturbed, disturbed = measured(FakeMachine()), measured(FakeMachine(disturbed=2))
    assert disturbed.profile.canonical == undisturbed.profile.canonical
    assert "within ±0.0%" in undisturbed.text
    assert "±450%" in disturbed.text


def trial(name: str, work: float, ladder: str = "") -> Trial:
    return Trial(name, "float32", work, lambda: lambda: None, ladder)


def test_one_round_is_whole_and_further_ones_end_with_the_budget() -> None:
    trials = [trial(f"product {i}", 100e9) for i in range(5)]  # a second each
    for budget, rounds in ((0.1, 1), (12.0, 2), (1e6, MOST_ROUNDS)):
        found = measure(trials, FakeMachine(), budget)
        assert len(found.of) == 5
        assert found.rounds == rounds


def test_sizes_end_where_one_run_takes_too_much_of_the_budget() -> None:
    trials = [trial("product", 1e9 * 8**i, "products") for i in range(6)]  # 10 ms and up
    found = measure(trials, FakeMachine(), budget=400.0)
    assert [each.work for each in found.of] == [1e9, 8e9, 64e9]


def test_the_first_size_is_measured_whatever_it_takes() -> None:
    trials = [trial("product", 1e12 * 8**i, "products") for i in range(3)]
    assert [each.work for each in measure(trials, FakeMachine(), budget=1.0).of] == [1e12]


def test_a_size_that_does_not_fit_ends_the_sizes_and_not_the_dtype() -> None:
    class Small(FakeMachine):
        def seconds(self, trial: Trial) -> float:
            if trial.work > 1e10:
                raise RuntimeError("out of memory")
            return super().seconds(trial)

    trials = [trial("product", 1e9 * 8**i, "products") for i in range(4)]
    found = measure(trials, Small(), budget=1e6)
    assert [each.work for each in found.of] == [1e9, 8e9]
    assert found.refused == {}


def test_progress_says_what_comes_next() -> None:
    said: list[str] = []
    measure([trial("product", 1.0)], FakeMachine(), 1.0, said.append)
    assert said[0] == "round 1: product"


def test_a_machine_that_refuses_everything_has_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = dict.fromkeys(("float32", "bfloat16", "float16", "float64", "stream", "overhead"), "no kernel")
    monkeypatch.setattr(trials, "DeviceClock", lambda device: FakeMachine(refuses=everything))
    with pytest.raises(policylang.PolicyError, match="nothing could be timed on `cpu`") as failed:
        policylang.profile_device(tmp_path / "our-machine.toml", device="cpu")
    assert failed.value.diagnostics[0].code == api.NO_FIGURES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("figure", [1.0, 102e9, 5.72e9, 999e12, 1e12, 2.05e-6, 9.99e-6, 0.843, 12.3, 4.4e3, 0.0, 1e-9])
def test_numbers_are_written_in_thousands_and_read_back(figure: float) -> None:
    assert float(number(figure)) == figure


def test_numbers_are_short() -> None:
    assert [number(each) for each in (102e9, 5.72e9, 2.05e-6, 0.843)] == ["102e9", "5.72e9", "2.05e-6", "0.843"]


BANDWIDTH, LATENCY = 10e9, 30e-6


def on_a_ring(collective: str, ranks: int, sent: float) -> CollectiveTimes:
    """``sent``: how many times its bytes a rank sends."""
    sizes = [MIB, 4 * MIB, 16 * MIB]
    return CollectiveTimes(collective, ranks, tuple((size, LATENCY + size * sent / BANDWIDTH) for size in sizes))


def test_bandwidth_and_latency_of_a_ring_are_found() -> None:
    ranks = 4
    times = [
        on_a_ring("all_gather_into_tensor", ranks, ranks - 1),
        on_a_ring("reduce_scatter_tensor", ranks, (ranks - 1) / ranks),
        on_a_ring("all_reduce", ranks, 2 * (ranks - 1) / ranks),
        on_a_ring("all_to_all_single", ranks, (ranks - 1) / ranks),
    ]
    assert ring(times) == (pytest.approx(BANDWIDTH, rel=0.01), pytest.approx(LATENCY, rel=0.01))


@pytest.mark.parametrize("seconds", [(1e-3,), (1e-3, 0.9e-3), (1e-3, 1e-3)])
def test_a_fit_to_noise_is_still_a_bandwidth(seconds: tuple[float, ...]) -> None:
    points = tuple((float(MIB * 2**at), each) for at, each in enumerate(seconds))
    bandwidth, latency = ring([CollectiveTimes("all_reduce", 2, points)])
    assert 0 < bandwidth < 1e12
    assert latency >= 0


def test_a_table_is_read_back_as_it_was_measured(tmp_path: Path) -> None:
    several = {
        "all_reduce": [(1.0 * MIB, 1.23456e-4), (2.0 * MIB, 3e-4), (4.0 * MIB, 5e-4)],
        "all_gather_into_tensor": [(1.0 * MIB, 2e-9), (2.0 * MIB, 1.5)],
        "all_to_all_single": [],
    }
    inside, across = in_a_table(several, 2), in_a_table(several, 8)
    groups = [MeasuredGroup("1", Network(2, 1e9, 0.0, inside)), MeasuredGroup("0", Network(None, 1e9, 0.0, across))]
    path = tmp_path / "measured.table"
    path.write_text(table_text(groups), encoding="utf-8")
    assert read_table(path, path.name) == (*(("1", each) for each in inside), *(("0", each) for each in across))
    assert [len(each.points) for each in inside] == [2, 2]


CPU = torch.device("cpu")


def small(trials: list[Trial]) -> list[Trial]:
    """The least size of each."""
    return list({(each.name, each.key, each.ladder): each for each in reversed(trials)}.values())


def test_every_trial_runs_here_and_takes_some_time() -> None:
    operands = Operands(CPU)
    trials = [
        *(each for each in products(operands) if each.key != "float16"),  # some processors have none
        *(each for each in streams(operands) if each.key != STREAM or each.work <= 2**22),
        *host_copies(operands),
        *shares(operands, torch.float32),
        *functions(operands),
    ]
    found = measure(small(trials), DeviceClock(CPU), budget=1e-6)
    assert found.rounds == 1
    assert found.refused == {}
    assert all(0 < timing.seconds < 10 for timing in found.of.values())


@pytest.mark.slow
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    command = ("-m", "policylang", "profile", "-o", path, "--device", "cpu", "--compiled", "--seconds", 5)
    ran = python(*command, OMP_NUM_THREADS="1")
    assert "Traceback" not in ran.stderr
    device = read_device(path)
    assert 0 < device.pointwise <= 1
    assert 1e8 < device.compute["float32"].at(1e9) < 1e15


@pytest.mark.slow
def test_fused_chains_compute_what_they_compute_in_eager() -> None:
    trials = list(fused(Operands(CPU)))
    for eager, compiled in zip(trials[::2], trials[1::2], strict=True):
        torch.testing.assert_close(eager.prepare()(), compiled.prepare()())


@pytest.mark.slow
def test_under_torchrun_the_collectives_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    command = (*TORCHRUN, 2, "-m", "policylang", "profile", "--device", "cpu", "--seconds", 6, "-o")
    ran = python(*command, path, OMP_NUM_THREADS="1")
    assert "deprecated" not in ran.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["node.table", "node.toml"]
    assert ran.stdout.count("GFLOP/s in float32") == 1  # the first rank speaks
    device = read_device(path)
    (network,) = device.networks
    assert network.ranks is None
    assert network.bandwidth
    measured = {each.collective: each for each in network.times}
    assert {"all_gather_into_tensor", "all_reduce", "all_to_all_single"} <= set(measured)
    for each in measured.values():
        assert each.ranks == 2
        assert all(seconds > 0 for _, seconds in each.points)
        assert each.points[0][0] == 2**20

    # What one rank cannot do, all say, and none waits for another
    with pytest.raises(AssertionError, match="cannot write"):
        python(*command, tmp_path / "nowhere" / "node.toml", OMP_NUM_THREADS="1")
