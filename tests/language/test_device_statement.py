"""`device …`: which profile a policy names, where its file is looked for, and that a policy has one."""

from __future__ import annotations

from pathlib import Path

import pytest

import policylang
from policylang.language.diagnostics import Source
from policylang.language.layout import format_source
from policylang.language.loader import load_policy, parse_policy
from policylang.language.shown import beside, format_quantity
from policylang.language.statements import format_policy
from policylang.language.syntax import Action, Compare, Operator, Quantity, Rule, Where
from tests.language.told import policy, told

PROFILE = """\
name = "{name}"
[compute]
float32 = 1e12
[memory]
bandwidth = {bandwidth}
"""
TIMED = "save everything where time > 400 us\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "profiles").mkdir()
    for file, name, bandwidth in (("ours", "our-cluster", "1e12"), ("again", "our-cluster", "2e12")):
        text = PROFILE.format(name=name, bandwidth=bandwidth)
        (tmp_path / "profiles" / f"{file}.toml").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_bundled_device() -> None:
    device = policy("device h100-sxm\n" + TIMED).device
    assert device.name == "h100-sxm"
    assert policy(TIMED).device is None


def test_a_file_is_looked_for_beside_the_policy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.apl").write_text(f'device "profiles/ours.toml"\n{TIMED}', encoding="utf-8")
    found = policylang.load(folder / "a.apl")
    assert found.device.name == "our-cluster"
    monkeypatch.chdir(folder)
    text = policylang.parse(f'device "profiles/ours.toml"\n{TIMED}')
    assert text.device.canonical == found.device.canonical


def test_an_included_file_names_the_device_of_the_policy(folder: Path) -> None:
    (folder / "profiles" / "cluster.apl").write_text('device "ours.toml"', encoding="utf-8")
    (folder / "a.apl").write_text(f'include "profiles/cluster.apl"\n{TIMED}', encoding="utf-8")
    (folder / "b.apl").write_text(f'device "profiles/ours.toml"\ninclude "a.apl"\n{TIMED}', encoding="utf-8")
    for name in ("a", "b"):
        loaded = load_policy(folder / f"{name}.apl")
        assert not loaded.diagnostics
        assert loaded.policy.device.name == "our-cluster"


def test_two_devices_are_an_error_that_names_both(folder: Path) -> None:
    (folder / "cluster.apl").write_text("device h100-sxm", encoding="utf-8")
    (folder / "a.apl").write_text(f'device "profiles/ours.toml"\ninclude "cluster.apl"\n{TIMED}', encoding="utf-8")
    (found,) = load_policy(folder / "a.apl").diagnostics
    assert found.code == "APL212"
    assert found.message == "a policy has one device, and this is `h100-sxm` beside `our-cluster`"
    assert found.span.text == "device h100-sxm"
    (earlier,) = found.related
    assert earlier.span.text == 'device "profiles/ours.toml"'


def test_two_profiles_of_one_name_are_two_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (found,) = told(f'device "profiles/ours.toml"\ndevice "profiles/again.toml"\n{TIMED}')
    assert found.code == "APL212"
    assert "two profiles that are called `our-cluster`" in found.message


def test_what_is_no_device_is_underlined_where_it_is_named(folder: Path) -> None:
    (folder / "a.apl").write_text(f'device "profiles/missing.toml"\n{TIMED}', encoding="utf-8")
    (found,) = load_policy(folder / "a.apl").diagnostics
    assert found.span.text == 'device "profiles/missing.toml"'
    assert "profiles/missing.toml" in found.message


def test_what_is_wrong_with_a_profile_is_said_in_the_profile(folder: Path) -> None:
    (folder / "profiles" / "wrong.toml").write_text("[memory]\nbandwidth = 1e12\n", encoding="utf-8")
    (folder / "profiles" / "bytes.toml").write_bytes(b"\xff\xfe")
    for file in ("wrong", "bytes"):
        (folder / "a.apl").write_text(f'device "profiles/{file}.toml"\n{TIMED}', encoding="utf-8")
        (found,) = load_policy(folder / "a.apl").diagnostics
        assert found.span.source.name == f"profiles/{file}.toml"
        assert [each.span.text for each in found.related if each.span] == [f'device "profiles/{file}.toml"']


def test_the_canonical_text_holds_the_figures_and_no_path(folder: Path) -> None:
    texts = []
    for file in ("ours", "again"):
        (folder / "a.apl").write_text(f'device "profiles/{file}.toml"\n{TIMED}', encoding="utf-8")
        texts.append(policylang.load(folder / "a.apl").canonical)
    (folder / "profiles" / "b.apl").write_text(f'policy a\ndevice "ours.toml"\n{TIMED}', encoding="utf-8")
    assert texts[0] != texts[1], "the figures decide"
    assert texts[0] == policylang.load(folder / "profiles" / "b.apl").canonical, "where the file lies does not"
    assert str(folder) not in texts[0]
    assert "device our-cluster\n" in texts[0]


def test_a_policy_with_a_device_reads_back_and_equals_itself() -> None:
    found = policy("policy demo\ndevice h100-sxm\n" + TIMED)
    again = policy(format_policy(found))
    assert again == found
    assert again.canonical == found.canonical
    assert found != policy("policy demo\n" + TIMED)


def test_the_layout_of_a_device_is_kept() -> None:
    text = 'device    h100-sxm   # ours\ndevice "../cluster.toml"\nexpect   step   time<=900ms\n'
    made = format_source(Source("", text)).text
    assert made == 'device h100-sxm  # ours\ndevice "../cluster.toml"\nexpect step time <= 900ms\n'


@pytest.mark.parametrize(
    "text",
    [
        "let device = mm\ndevice -> save",
        "let device = mm\ndevice, bmm -> save",
        "let device = mm\ndevice in layers.0 -> save",
        "let device = mm\ndevice where bytes > 3 -> save",
        "let time = mm\nlet step = time\nlet exposed = step\nsave time, step, exposed",
        "let time = mm\nsave time where time > 3 us",
    ],
)
def test_the_words_of_time_stay_names(text: str) -> None:
    assert {each.code for each in parse_policy(text).diagnostics} <= {"APL111"}


def test_a_property_is_still_called_device() -> None:
    (found,) = policy("device h100-sxm; save mm where device == cuda").rules
    assert isinstance(found.selector, Where)


def test_a_time_is_a_figure_in_seconds() -> None:
    wanted = Rule(Action.SAVE, Where(Operator(None, "mm", None), Compare("time", ">", Quantity(0.0004, "seconds"))))
    for text in ("400 us", "400us", "400 µs", "400\N{GREEK SMALL LETTER MU}s", "0.4 ms", "0.0004 s", "400_000 ns"):
        assert policy(f"save mm where time > {text}").rules == (wanted,)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (3e-9, "3 ns"), (412e-6, "412 us"), (0.0123, "12.3 ms"), (0.99996, "1 s"), (1234.5, "1234.5 s")],
)
def test_a_time_as_reports_print_it(seconds: float, text: str) -> None:
    assert format_quantity(seconds, "seconds") == text
    assert beside(seconds, seconds, "seconds") == text


def test_a_time_that_rounds_to_its_limit_is_given_in_full() -> None:
    assert beside(0.01231, 0.0123, "seconds") == "12.3 ms (0.01231 s)"
