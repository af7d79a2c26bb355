"""What `fuse` is worth on a device: one gather over all ranks may leave the network that one of two stayed in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import policylang
from policylang.commands.cli import main
from policylang.language.devices.profile import DeviceProfile

GRAPH = "docs/graphs/fsdp.graph"
TEXT = "optional fuse all_gather chains\nundecided -> save"


def warned(text: str, device: DeviceProfile | str | None) -> list[policylang.Diagnostic]:
    found = policylang.check(policylang.parse(text), graph=GRAPH, device=device).diagnostics
    return [each for each in found if each.code == "APL380"]


def test_a_gather_that_leaves_its_server_is_a_warning_with_its_figures() -> None:
    (found,) = warned(TEXT, "h100-sxm")
    assert found.message == (
        "`optional fuse all_gather chains` slows the step on h100-sxm, from 360.2 ms to 453.8 ms: "
        "157.4 ms of it waits for collectives, without the line 63.8 ms"
    )
    assert found.details == ("75 over 128 ranks, in place of 16 and 8",)
    assert (found.severity.value, found.span is not None) == ("warning", True)
    assert found.fixes[0].applied(found.span.source).strip() == "undecided -> save"  # type: ignore[union-attr]


def test_on_one_network_it_gains_and_without_a_device_nothing_is_said() -> None:
    device = policylang.load_device("h100-sxm")
    whole = evolve(device, networks=tuple(each for each in device.networks if each.ranks is None))
    assert not warned(TEXT, whole)
    assert not warned(TEXT, None)


def highest(document: dict[str, Any]) -> int:
    return max(document["with"]["peak"][half] for half in ("forward", "backward"))


def test_what_a_line_is_worth_is_the_step_with_it_less_the_step_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.apl"
    steps = []
    for text in (TEXT, "undecided -> save\n"):
        path.write_text(text)
        main(["plan", str(path), "--graph", GRAPH, "--device", "h100-sxm", "--output-format", "json"])
        steps.append(json.loads(capsys.readouterr().out))
    under, without = steps
    assert not without["rewrites"]
    (rewrite,) = under["rewrites"]
    assert (rewrite["text"], rewrite["rewritten"], rewrite["fewer_collectives"]) == (
        "optional fuse all_gather chains",
        75,
        75,
    )
    for figure in ("step_seconds", "exposed_seconds", "saved_bytes"):
        assert rewrite["worth"][figure] == pytest.approx(under["with"][figure] - without["with"][figure])
    assert rewrite["worth"]["peak_bytes"] == highest(under) - highest(without)
