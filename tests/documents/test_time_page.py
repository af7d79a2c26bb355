"""The page about time: its profile is one, its table is that of the files, and it names every key."""

from __future__ import annotations

import re
from pathlib import Path

from policylang.language.devices import reading
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import bundled_devices, read_device

PAGE = (Path(__file__).parents[2] / "docs" / "time.md").read_text(encoding="utf-8")


def test_the_profile_of_the_page_is_one_that_says_all_there_is(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (table,) = re.findall(r"```\n(Group .*?)```", PAGE, re.DOTALL)
    (tmp_path / "our-cluster.toml").write_text(text, encoding="utf-8")
    (tmp_path / "our.table").write_text(table, encoding="utf-8")
    found = read_device("our-cluster.toml", tmp_path)
    assert isinstance(found, DeviceProfile), found
    assert found.name == "our-cluster"
    assert [len(network.times) for network in found.networks] == [0, 2, 0]
    keys = set(re.findall(r"^\[*(\w+)", text, re.MULTILINE))
    words = {*reading._TABLES, *reading._NETWORK, *reading._SHARES_OF_COMPUTE, "pointwise", "capacity"}
    assert words <= keys


def test_the_table_of_profiles_is_that_of_the_files() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} == set(bundled_devices()) - {"cpu"}
    for name, row in rows:
        device = read_device(name)
        assert isinstance(device, DeviceProfile)
        within, across = device.networks
        expected = [
            f"{device.compute['bfloat16'].at(1) / 1e12:g} TFLOP/s",
            f"{device.compute['float32'].at(1) / 1e12:g} TFLOP/s",
            f"{device.bandwidth.at(1) / 1e12:g} TB/s",
            f"{(within.bandwidth or 0) / 1e9:g} GB/s",
            f"{(across.bandwidth or 0) / 1e9:g} GB/s",
        ]
        assert [cell.strip() for cell in row.split("|")] == expected
