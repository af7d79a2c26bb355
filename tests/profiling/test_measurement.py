"""From what a clock says to what a profile's file holds, on a machine whose rates are known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import policylang
from policylang.api import profile_device as api
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.profiling import profiler
from policylang.profiling.profiler import Profiled, Profiling, number, profiled
from policylang.profiling.trials import MOST_ROUNDS, Trial, measure
from tests.profiling.fake_machine import OVERHEAD_SECONDS, FakeMachine


def measured(machine: FakeMachine, *, compiled: bool = False, budget: float = 1e6) -> Profiled:
    found = profiled(Profiling(torch.device("cpu"), "fake", compiled, budget), "fake.table", machine)
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
    monkeypatch.setattr(profiler, "DeviceClock", lambda device: FakeMachine(refuses=everything))
    with pytest.raises(policylang.PolicyError, match="nothing could be timed on `cpu`") as failed:
        policylang.profile_device(tmp_path / "our-machine.toml", device="cpu")
    assert failed.value.diagnostics[0].code == api.NO_FIGURES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("figure", [1.0, 102e9, 5.72e9, 999e12, 1e12, 2.05e-6, 9.99e-6, 0.843, 12.3, 4.4e3, 0.0, 1e-9])
def test_numbers_are_written_in_thousands_and_read_back(figure: float) -> None:
    assert float(number(figure)) == figure


def test_numbers_are_short() -> None:
    assert [number(each) for each in (102e9, 5.72e9, 2.05e-6, 0.843)] == ["102e9", "5.72e9", "2.05e-6", "0.843"]
