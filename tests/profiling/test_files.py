"""Where `policylang profile` writes, what it replaces, and what it refuses before it measures anything."""

import json
import os
from pathlib import Path

import pytest
import torch

import policylang
from policylang.commands.cli import main
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.profiling import trials
from tests.profiling.test_measurement import FakeMachine


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine()
    monkeypatch.setattr(trials, "DeviceClock", lambda device: fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return fake


def profile(*arguments: str) -> int:
    return main(["profile", *arguments])


def test_a_profile_is_written_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "our-machine.toml"
    assert profile("-o", str(path), "--device", "cpu") == 0
    device = read_device(str(path))
    assert device.name == "our-machine"
    assert "100 GFLOP/s in float32" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["our-machine.toml"]


def test_the_form_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a b.toml"
    assert profile("-o", str(path), "--name", 'the "big" one, größer', "--output-format", "json") == 0
    told = json.loads(capsys.readouterr().out)
    device = read_device(path)
    assert device.name == told["name"] == 'the "big" one, größer'
    assert told["path"] == str(path)
    assert told["figures"] == json.loads(device.canonical)


def test_a_measurement_is_replaced_and_nothing_else(tmp_path, machine, capsys) -> None:
    path = tmp_path / "our-machine.toml"
    assert profile("-o", str(path)) == 0
    machine.rates["float32"] = 30e9
    assert profile("-o", str(path)) == 0
    device = read_device(path)
    assert device.compute["float32"].at(1e9) == pytest.approx(30e9, rel=0.01)
    by_hand = 'name = "by hand"\n'
    path.write_text(by_hand, encoding="utf-8")
    machine.timed.clear()
    assert profile("-o", str(path)) == 2
    assert "is there, and no measurement wrote it\nhelp: name another file" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == by_hand
    path.write_bytes(b"\xff\xfe\x00")
    assert profile("-o", str(path)) == 2
    assert machine.timed == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", "{tmp}"), "is a folder"),
        (("-o", "{tmp}/nowhere/our.toml"), "cannot write `{tmp}/nowhere/our.toml`: there is no folder `{tmp}/nowhere`"),
        (("-o", "{tmp}/our.toml", "--device", "cuda"), "torch sees no CUDA device here\nhelp: `cpu`"),
        (("-o", os.devnull), "is there, and no measurement wrote it"),
        (("-o", "{tmp}/our.toml", "--device", "gpu"), "there is no device `gpu`"),
        (("-o", "{tmp}/our.toml", "--device", "mps"), "a device of the kind `mps` is not measured"),
        (("-o", "{tmp}/our.toml", "--seconds", "0"), "`0` seconds are no time to measure in"),
        (("-o", "{tmp}/our.toml", "--seconds", "nan"), "`nan` seconds are no time to measure in"),
        (("-o", "{tmp}/our.toml", "--name", "two\nlines"), "a text of one line"),
        (("-o", "{tmp}/our\n.toml"), "a text of one line"),
        (("-o", "{tmp}/our.toml", "--name", " "), "a text of one line"),
        (("-o", "{tmp}/\0.toml"), "`path` is the path of a file, and not"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(tmp_path, machine, capsys, arguments, said) -> None:
    assert profile(*(each.replace("{tmp}", str(tmp_path)) for each in arguments)) == 2
    told = capsys.readouterr().err
    assert said.replace("{tmp}", str(tmp_path)) in told
    assert "Traceback" not in told
    assert machine.timed == []
    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "our.toml").symlink_to(tmp_path / "kept" / "machine.toml")
    for _ in range(2):
        assert profile("-o", str(tmp_path / "our.toml")) == 0
        assert (tmp_path / "our.toml").is_symlink()
        assert isinstance(read_device(tmp_path / "kept" / "machine.toml"), DeviceProfile)


def test_ranks_do_not_share_a_gpu(tmp_path, monkeypatch, capsys) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    assert profile("-o", str(tmp_path / "our.toml"), "--device", "cuda:1") == 2
    assert "each rank needs its GPU to measure on" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert profile("-o", str(tmp_path / "our.toml")) == 2
    assert "Permission denied" in capsys.readouterr().err


def test_in_python_the_same_are_errors_with_codes(tmp_path: Path) -> None:
    found = policylang.profile_device(tmp_path / "our.toml", device=torch.device("cpu"), name="ours", seconds=2)
    assert found.name == "ours"
    for arguments, code in (
        ({"path": tmp_path}, "APL617"),
        ({"path": tmp_path / "our.toml", "device": "cuda"}, "APL616"),
        ({"path": tmp_path / "our.toml", "device": 3.5}, "APL616"),
        ({"path": tmp_path / "our.toml", "seconds": -1}, "APL616"),
    ):
        with pytest.raises(policylang.PolicyError) as failed:
            policylang.profile_device(**arguments)  # type: ignore[arg-type]
        assert failed.value.diagnostics[0].code == code
