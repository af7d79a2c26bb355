"""Device profiles: what a file says, each mistake in one, whatever else it holds, and `device …` in a policy."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import strategies as st

import policylang
from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network, Rate
from policylang.language.devices.reading import bundled_devices, parse_device, read_device, table_rows
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.formatting import format_source
from policylang.language.loader import load_policy, parse_policy
from policylang.language.resources import devices_folder
from policylang.language.shown import DTYPES, beside, format_quantity
from policylang.language.statements import format_policy
from policylang.language.syntax import Action, Compare, Operator, Quantity, Rule, Where
from policylang.report.diagnostics import render_json, render_text
from tests.language.test_forms import policy, told
from tests.support.drawn import drawn

GOOD = """\
name = "our-cluster"

[compute]
float32 = 60e12
bf16 = [[1e9, 200e12], [1e12, 600e12]]
overhead = 5e-6
attention = 0.7

[memory]
bandwidth = 2.6e12
pointwise = 0.35
capacity = "80 GiB"

[host]
bandwidth = 50e9

[[network]]
ranks = 8
bandwidth = 400e9
latency = 20e-6

[[network]]
bandwidth = 45e9
latency = 30e-6
"""
LEAST = "[compute]\nfloat32 = 1e12\n[memory]\nbandwidth = 1e12\n"


def read(text: str, folder: Path) -> DeviceProfile | Diagnostic:
    (folder / "d.toml").write_text(text, encoding="utf-8")
    return read_device("d.toml", folder)


def good(text: str, folder: Path) -> DeviceProfile:
    found = read(text, folder)
    assert isinstance(found, DeviceProfile), render_text((found,))
    return found


def wrong(text: str, folder: Path) -> Diagnostic:
    found = read(text, folder)
    assert isinstance(found, Diagnostic)
    assert render_text((found,))
    return found


def test_every_figure_is_read(tmp_path: Path) -> None:
    found = good(GOOD, tmp_path)
    assert found.name == "our-cluster"
    assert found.compute == {"float32": Rate.constant(60e12), "bfloat16": Rate(((1e9, 200e12), (1e12, 600e12)))}
    assert (found.bandwidth, found.pointwise, found.attention) == (Rate.constant(2.6e12), 0.35, 0.7)
    assert (found.overhead, found.capacity, found.host_bandwidth) == (5e-6, 80 << 30, 50e9)
    assert found.networks == (Network(8, 400e9, 20e-6), Network(None, 45e9, 30e-6))


def test_operators_and_convolutions_have_figures_of_their_own(tmp_path: Path) -> None:
    more = "[operators]\ntanh = 4e11\n'aten.exp' = 2e11\n'my_kernels.norm' = 1e12\n"
    text = LEAST.replace("[memory]", "convolution = 2.5\n[memory]") + more
    found = good(text, tmp_path)
    assert found.convolution == 2.5
    assert found.operators == {"aten.tanh": 4e11, "aten.exp": 2e11, "my_kernels.norm": 1e12}
    plain = good(LEAST, tmp_path)
    assert (plain.convolution, plain.operators) == (1, {})
    assert len({found.canonical, plain.canonical, evolve(found, operators={}).canonical}) == 3
    assert found.canonical == good(text.replace("tanh", "'aten.tanh'"), tmp_path).canonical
    assert found.canonical != good(text.replace("4e11", "5e11"), tmp_path).canonical


def test_what_is_left_out_has_a_meaning(tmp_path: Path) -> None:
    found = good(LEAST, tmp_path)
    assert (found.name, found.pointwise, found.attention, found.overhead) == ("d", 1, 1, 0)
    assert (found.capacity, found.host_bandwidth, found.networks) == (None, None, ())


def test_equal_figures_have_one_canonical_text_however_they_are_written(tmp_path: Path) -> None:
    other = """
        network = [{bandwidth = 400_000_000_000, ranks = 8, latency = 0.00002}, {latency = 3e-5, bandwidth = 45e9}]
        # the same cluster
        host.bandwidth = 50000000000
        name = 'another name'
        [memory]
        capacity = 85899345920
        bandwidth = 2600e9
        pointwise = 35e-2
        [compute]
        attention = 0.70
        overhead = 0.000005
        bfloat16 = [
            [1e9, 2e14],  # small
            [1e12, 6e14]
        ]
        f32 = 6e13
    """
    one, two = good(GOOD, tmp_path), good(other, tmp_path)
    assert one.canonical == two.canonical
    assert evolve(one, overhead=6e-6).canonical != one.canonical
    changes = [("60e12", "61e12"), ("0.35", "0.36"), ('"80 GiB"', '"81 GiB"'), ("50e9", "51e9"), ("20e-6", "21e-6")]
    changes += [("ranks = 8", "ranks = 4"), ("0.7", "0.8"), ("[1e9, 200e12]", "[2e9, 200e12]"), ("5e-6", "4e-6")]
    texts = {good(GOOD.replace(*change), tmp_path).canonical for change in changes}
    assert len(texts) == len(changes)
    assert one.canonical not in texts


def test_a_rate_goes_straight_over_the_logarithm_of_the_size() -> None:
    rate = Rate(((1e9, 200.0), (1e11, 600.0)))
    assert [round(rate.at(size)) for size in (0, 1, 1e9, 1e10, 1e11, 1e15)] == [200, 200, 200, 400, 600, 600]


# (what is wrong with GOOD, its mend there, code, underlined, message, part of the help)
MISTAKES = [
    ("float32 = 60e12", "flaot32 = 60e12", "APL155", "flaot32", "`flaot32` means nothing in `[compute]`", "float32"),
    ("float32 = 60e12", "tf32 = 60e12", "APL155", "tf32", "`tf32` is no dtype of a tensor", "`float32`"),
    ("float32 = 60e12", "bfloat16 = 60e12", "APL155", "bf16", "`bf16` gives the rate of bfloat16 a second time", ""),
    ("float32 = 60e12", 'float32 = "60 TFLOP/s"', "APL157", '"60 TFLOP/s"', "`float32` is a text, and should be",
     "6e+13"),
    ("float32 = 60e12", "float32 = 0", "APL157", "0", "`float32 = 0` cannot be: it is a number of FLOP per second", ""),
    ("float32 = 60e12", "float32 = -1", "APL157", "-1", "`float32 = -1` cannot be", ""),
    ("float32 = 60e12", "float32 = inf", "APL157", "inf", "`float32 = inf` cannot be", ""),
    ("float32 = 60e12", "float32 = nan", "APL157", "nan", "`float32 = nan` cannot be", ""),
    ("float32 = 60e12", "float32 = true", "APL157", "true", "`float32` is true or false, and should be a number", ""),
    ("float32 = 60e12", "float32 = 1979-05-27", "APL157", "1979-05-27", "`float32` is a date or a time", ""),
    ("float32 = 60e12", "float32 = []", "APL157", "[]", "`float32` is an empty list", "points"),
    ("float32 = 60e12", "float32 = [1e9, 2e12]", "APL157", "[1e9, 2e12]", "`float32` has a number that is not a size",
     "[["),
    ("float32 = 60e12", "float32 = [[1, 2, 3]]", "APL157", "[[1, 2, 3]]", "`float32` has a list that is not a size",
     ""),
    ("[1e9, 200e12]", "[1e12, 200e12]", "APL157", "[[1e12, 200e12], [1e12, 600e12]]", "do not rise", ""),
    ("[1e9, 200e12]", "[0, 200e12]", "APL157", "[[0, 200e12], [1e12, 600e12]]", "`bf16 = 0` cannot be: it is a size",
     ""),
    ("overhead = 5e-6", "overhead = -5e-6", "APL157", "-5e-6",
     "`overhead = -5e-06` cannot be: it is a number of seconds", ""),
    ("attention = 0.7", "attention = 70", "APL157", "70", "`attention = 70` cannot be: it is a share", ""),
    ("pointwise = 0.35", "pointwise = 0", "APL157", "0", "`pointwise = 0` cannot be: it is a share, above 0", ""),
    ("pointwise = 0.35", "pointwsie = 0.35", "APL155", "pointwsie", "`pointwsie` means nothing in `[memory]`",
     "pointwise"),
    ("bandwidth = 2.6e12\n", "", "APL156", "[memory]", "`memory.bandwidth` is missing", "2.6e12"),
    ("bandwidth = 2.6e12", 'bandwidth = "2.6 TB/s"', "APL157", '"2.6 TB/s"', "`bandwidth` is a text", "2.6e+12"),
    ('"80 GiB"', '"80"', "APL157", '"80"', "`capacity` is not a number of bytes", 'capacity = "80 GiB"'),
    ('"80 GiB"', '"80 gigs"', "APL157", '"80 gigs"', "`capacity` is not a number of bytes", ""),
    ('"80 GiB"', '"0 GiB"', "APL157", '"0 GiB"', "`capacity = 0` cannot be", ""),
    ('"80 GiB"', "[80]", "APL157", "[80]", "`capacity` is a list, and should be a number of bytes", ""),
    ("[host]\nbandwidth = 50e9", "[host]", "APL156", "[host]", "`host.bandwidth` is missing", "50e9"),
    ("[host]\nbandwidth = 50e9", "[hots]\nbandwidth = 50e9", "APL155", "[hots]", "`hots` means nothing in a device",
     "host"),
    ("ranks = 8", "ranks = 1", "APL157", "1", "`ranks = 1` cannot be: it is a whole number of ranks, from 2 on", ""),
    ("ranks = 8", "ranks = 8.5", "APL157", "8.5", "`ranks = 8.5` cannot be", ""),
    ("ranks = 8", 'ranks = "8"', "APL157", '"8"', "`ranks` is a text", ""),
    ("ranks = 8\n", "", "APL155", "[[network]]", "no group ever uses this network: one above", "narrower"),
    ("bandwidth = 45e9", "ranks = 4\nbandwidth = 45e9", "APL155", "[[network]]", "takes groups inside 8 ranks",
     "narrower"),
    ("bandwidth = 45e9\n", "", "APL156", "[[network]]", "`network.bandwidth` is missing", "times"),
    ("bandwidth = 45e9", "bandwidth = 45e9\ngroup = '0'", "APL155", "group", "`group` means nothing without `times`",
     ""),
    ("[host]", "[operators]\ntahn = 4e11\n[host]", "APL155", "tahn", "`tahn` is no operator", "`tanh`"),
    ("[host]", "[operators]\n'aten.tanh.default' = 4\n[host]", "APL155", "'aten.tanh.default'",
     "`aten.tanh.default` is no operator", "tanh"),
    ("[host]", "[operators]\n'' = 4\n[host]", "APL155", "''", "`` is no operator", "my_kernels.fused_norm"),
    ("[host]", "[operators]\n'größe.x' = 4\n[host]", "APL155", "'größe.x'", "`größe.x` is no operator", "tanh"),
    ("[host]", "[operators]\ntanh = 'fast'\n[host]", "APL157", "'fast'",
     "`tanh` is a text, and should be a number of bytes per second", ""),
    ("[host]", "[operators]\ntanh = 0\n[host]", "APL157", "0", "`tanh = 0` cannot be", ""),
    ('name = "our-cluster"', "operators = 3", "APL157", "operators", "`operators` is a number, and should be a table",
     ""),
    ("attention = 0.7", "convolution = 11", "APL157", "11",
     "`convolution = 11` cannot be: it is a share, above 0 and at most 10", ""),
    ("attention = 0.7", "convolution = 0", "APL157", "0", "`convolution = 0` cannot be", ""),
    ("bandwidth = 45e9", "times = 3", "APL157", "3", "`times` should be the path of a table", ""),
    ("bandwidth = 45e9", "times = 'no.table'", "APL153", "'no.table'", "`no.table` cannot be read: no such file", ""),
    ('name = "our-cluster"', "name = 3", "APL157", "3", "`name` should be a text of one line", ""),
    ('name = "our-cluster"', "memory = 3", "APL154", "", "the file is not TOML: cannot", ""),
    ('name = "our-cluster"', "name = ", "APL154", "", "the file is not TOML: invalid value", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("right", "mistake", "code", "underlined", "message", "help"), MISTAKES, ids=lambda text: text[:30]
)
def test_a_mistake_is_named_where_it_stands(right, mistake, code, underlined, message, help, tmp_path) -> None:
    assert right in GOOD
    found = wrong(GOOD.replace(right, mistake), tmp_path)
    assert (found.code, found.span and found.span.text) == (code, underlined)
    assert message in found.message
    assert help in (found.help or "")
    assert found.span.source.name == "d.toml"


def test_the_place_is_that_of_the_very_network_and_inside_one_line_of_the_key(tmp_path: Path) -> None:
    found = wrong(GOOD.replace("latency = 30e-6", "latency = 'long'"), tmp_path)
    assert (found.span.line, found.span.column) == (24, 11)
    found = wrong(LEAST + "[[network]]\nbandwidth = 1e9\n'rank s' = 4\n", tmp_path)
    assert found.span.text == "'rank s'"
    found = wrong("network = [{bandwidth = 1e9, ranks = 0}]\n" + LEAST, tmp_path)
    assert found.span.text == "[{bandwidth = 1e9, ranks = 0}]"
    found = wrong('text = """\n[memory]\n"""\nlist = [\n[1, 2],\n[3]\n]\n' + LEAST.replace("1e12\n", "0\n"), tmp_path)
    assert [note.span and note.span.text for note in found.related] == ["list", "0", "0"]


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    found = wrong("[compute]\nfloat32 = 0\n[memory]\npointwise = 2\n[hots]\n", tmp_path)
    assert found.message == "`memory.bandwidth` is missing" or found.code == "APL157"
    told = [found.message, *(note.message for note in found.related)]
    assert len(told) == 4
    for part in ("float32 = 0", "memory.bandwidth", "pointwise = 2", "hots"):
        assert sum(part in each for each in told) == 1


def test_empty_files_and_tables(tmp_path: Path) -> None:
    found = wrong("", tmp_path)
    assert (found.code, found.message) == ("APL156", "`[compute]` is missing")
    assert [note.message for note in found.related] == [
        "besides, `[memory]` is missing (write `[memory]`, and below it `bandwidth = 2.6e12`)"
    ]
    assert wrong("[compute]\n[memory]\nbandwidth = 1e9\n", tmp_path).message == "`compute` is missing"
    assert (
        wrong("compute = 3\n[memory]\nbandwidth = 1e9\n", tmp_path).message
        == "`compute` is a number, and should be a table"
    )
    assert (
        wrong(f"network = {{bandwidth = 1e9}}\n{LEAST}", tmp_path).help
        == "write `[[network]]`, with two brackets, for each"
    )


# --- files ------------------------------------------------------------------------------------------------------------
def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b"name = 'a'\n# caf\xe9\n")
    (tmp_path / "huge.toml").write_bytes(b"#" * ((1 << 20) + 1))
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "digits.toml").write_text("a = " + "9" * 5000)
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    os.mkfifo(tmp_path / "pipe.toml")
    for name, code, part in (
        ("latin.toml", "APL153", "byte 0xe9 in line 2 is not UTF-8"),
        ("huge.toml", "APL153", "larger than the 1 MiB"),
        ("folder.toml", "APL153", "is a folder"),
        ("pipe.toml", "APL153", "is not a regular file"),
        ("digits.toml", "APL154", "too many digits"),
        ("deep.toml", "APL154", "too deep"),
        ("missing.toml", "APL152", "there is no device profile `missing.toml`"),
        ("nu\0ll.toml", "APL152", "there is no device profile"),
    ):
        found = read_device(name, tmp_path)
        assert (found.code, part in found.message) == (code, True), found
        assert render_text((found,))
    (tmp_path / "windows.toml").write_bytes(b"\xef\xbb\xbf" + LEAST.replace("\n", "\r\n").encode())
    assert isinstance(read_device("windows.toml", tmp_path), DeviceProfile)


# --- names ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, name) for name in bundled_devices()),
        ("h100", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("a100", "a100-sxm-80gb"),
        ("a100-sxm", "a100-sxm-80gb"),
    ],
)
def test_a_bundled_profile_goes_by_its_name_as_far_as_a_dash(name: str, device: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("no profile")  # a file of that name changes nothing
    found = read_device(name, tmp_path)
    assert found.name == device


def test_a_path_is_never_a_name(tmp_path: Path) -> None:
    (tmp_path / "h100-sxm").write_text(LEAST + "[host]\nbandwidth = 7\n")
    (tmp_path / "mine").write_text(LEAST)
    for name in ("./h100-sxm", Path("h100-sxm"), tmp_path / "h100-sxm", str(tmp_path / "h100-sxm")):
        found = read_device(name, tmp_path)
        assert found.host_bandwidth == 7
    assert isinstance(read_device("mine", tmp_path), DeviceProfile)


def test_an_ambiguous_beginning_names_what_it_could_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import policylang.language.devices.reading as lookup

    monkeypatch.setattr(lookup, "bundled_devices", lambda: ("h100-pcie", "h100-sxm"))
    found = read_device("h100", tmp_path)
    assert found.message == "`h100` is the beginning of several device profiles: `h100-pcie` and `h100-sxm`"


@pytest.mark.parametrize(
    ("name", "help"),
    [
        ("h10", "did you mean `h100-sxm`? bundled are"),
        ("mi300", "did you mean `mi300x`? bundled are"),
        ("gaudi", "bundled are a100-sxm-80gb, b200, cpu, h100-sxm, h200, mi300x; a file is given by its path"),
        ("h100-sxm.toml", "the bundled profile of that name is written `h100-sxm`"),
        ("./H200", "the bundled profile of that name is written `h200`"),
        ("", "bundled are"),
    ],
)
def test_an_unknown_name_says_what_there_is(name: str, help: str, tmp_path: Path) -> None:
    found = read_device(name, tmp_path)
    assert found.code == "APL152"
    assert (found.help or "").startswith(help)
    found = read_device(3)  # type: ignore[arg-type]
    assert found.message == "a device is given by its name or the path of its profile, and this is a `int`"


# --- bundled ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", bundled_devices())
def test_a_bundled_profile_says_what_it_stands_for_and_every_figure(name: str) -> None:
    found = read_device(name)
    assert found.name == name
    assert {"float32", "bfloat16", "float16", "float64"} <= set(found.compute)
    assert found.capacity
    assert found.host_bandwidth
    assert found.networks[-1].ranks is None  # every group fits one
    lines = (devices_folder() / f"{name}.toml").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    for at, line in enumerate(lines):
        if line.startswith("["):  # each table says where its figures are from
            assert lines[at - 1].startswith("# ") or lines[at + 1].startswith("# "), line


# --- measured collectives ---------------------------------------------------------------------------------------------
TABLE = """\
  Group    Group Size  Collective                1MB (ms)    2MB (ms)
-------  ------------  ----------------------  ----------  ----------
      0            64  all_reduce                    0.20        0.35
      1             8  all_gather_into_tensor      0.0495      0.0716
      0             8  all_gather_into_tensor      0.2397      0.4059
"""


def with_table(table: str | bytes, folder: Path, more: str = "") -> DeviceProfile | Diagnostic:
    (folder / "deep").mkdir(exist_ok=True)
    content = table.encode() if isinstance(table, str) else table
    (folder / "deep" / "t.table").write_bytes(content)
    (folder / "deep" / "d.toml").write_text(f"{LEAST}[[network]]\ntimes = 't.table'\n{more}")
    return read_device("deep/d.toml", folder)


def test_a_table_is_read_from_beside_the_profile_in_bytes_and_seconds(tmp_path: Path) -> None:
    found = with_table(TABLE, tmp_path, "group = '0'")
    assert found.networks[0].times == (
        CollectiveTimes("all_reduce", 64, ((1 << 20, 0.20 * 1e-3), (2 << 20, 0.35 * 1e-3))),
        CollectiveTimes("all_gather_into_tensor", 8, ((1 << 20, 0.2397 * 1e-3), (2 << 20, 0.4059 * 1e-3))),
    )


def test_the_figures_of_a_table_are_figures_of_the_profile(tmp_path: Path) -> None:
    canonical = []
    spaced = "\n# ours\n" + TABLE.replace("  ", "    ").replace("0.20 ", "2e-1 ")
    head, _, *rows = TABLE.splitlines()
    turned = "\n".join((head, *reversed(rows)))
    for table in (TABLE, spaced, turned, TABLE.replace("0.35", "0.36"), TABLE.replace("2MB", "3MB")):
        found = with_table(table, tmp_path, "group = '0'")
        canonical.append(found.canonical)
    assert canonical[0] == canonical[1] == canonical[2]
    assert len(set(canonical)) == 3


@pytest.mark.parametrize(
    ("right", "mistake", "underlined", "message"),
    [
        ("(ms)", "", "Group    Group Size  Collective                1MB     2MB", "the first line names no sizes"),
        ("1MB", "3MB", "Group    Group Size  Collective                3MB (ms)    2MB (ms)", "the sizes do not rise"),
        (
            "0.20        ",
            "",
            "0            64  all_reduce                    0.35",
            "the row has 4 words, and 5 are wanted",
        ),
        ("64", "many", "many", "`many` is not the size of a group"),
        ("all_reduce", "sin", "sin", "`sin` is no collective"),
        ("0.20", "fast", "fast", "`fast` is not a number"),
        ("0.20", "-0.2", "-0.2", "`-0.2` is not the time of a collective"),
        ("0.20", "nan", "nan", "`nan` is not the time of a collective"),
        ("0.20", "1e999", "1e999", "`1e999` is not the time of a collective"),
        ("      1 ", "      0 ", "0             8", "`all_gather_into_tensor` of group `0` is there twice"),
    ],
)
def test_a_line_of_a_table_that_is_none_is_named(right, mistake, underlined, message, tmp_path) -> None:
    found = with_table(TABLE.replace(right, mistake), tmp_path)
    assert found.code == "APL158"
    assert found.span.source.name == "t.table"
    assert found.span.text.strip().startswith(underlined)
    assert found.message.startswith(message)
    assert [note.message for note in found.related] == ["the table is named here"]


def test_a_table_with_one_size_of_group_twice_wants_to_know_which(tmp_path: Path) -> None:
    found = with_table(TABLE, tmp_path)
    assert found.message == "the table measures `all_gather_into_tensor` of 8 ranks in several groups"
    assert found.help == 'choose one: `group = "0"`'
    for group, message in (("'2'", "the table has no group `2`"), ("0", "`group` should be a text")):
        found = with_table(TABLE, tmp_path, f"group = {group}")
        assert found.message == message
    assert isinstance(with_table(TABLE, tmp_path, "group = '1'"), DeviceProfile)


def test_tables_that_are_none(tmp_path: Path) -> None:
    for content, code, message in (
        (b"", "APL158", "the table has no rows"),
        (b"\xff\xfe", "APL153", "the file is not text"),
        (TABLE.splitlines()[0], "APL158", "the table has no rows"),
    ):
        found = with_table(content, tmp_path)
        assert (found.code, message in found.message) == (code, True)
        assert render_text((found,))


def test_a_table_is_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "huge").write_bytes(b"#" * ((1 << 20) + 1))
    for name, message in (
        ("pipe", "is not a regular file"),
        ("folder", "is a folder"),
        ("huge", "larger than the 1 MiB"),
    ):
        found = wrong(f"{LEAST}[[network]]\ntimes = '{name}'\n", tmp_path)
        assert (found.code, message in found.message) == ("APL153", True)
        assert found.span is not None
    assert wrong(f"{LEAST}[[network]]\ntimes = 'nu\\u0000ll'\n".replace("'", '"'), tmp_path).code == "APL153"


def test_a_latency_and_networks_beside_a_table(tmp_path: Path) -> None:
    found = with_table(TABLE, tmp_path, "group = '1'\nlatency = 1e-6")
    assert found.message.startswith("`latency` means nothing without `bandwidth`")
    both = with_table(TABLE, tmp_path, "group = '1'\nlatency = 1e-6\nbandwidth = 1e9")
    assert (both.networks[0].bandwidth, len(both.networks[0].times)) == (1e9, 1)
    behind = "group = '1'\n[[network]]\nranks = 8\nbandwidth = 1e9\n[[network]]\nbandwidth = 1e8"
    assert [network.ranks for network in with_table(TABLE, tmp_path, behind).networks] == [None, 8, None]


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


def test_what_is_wrong_with_a_profile_is_said_in_the_profile(folder: Path) -> None:
    (folder / "profiles" / "wrong.toml").write_text("[memory]\nbandwidth = 1e12\n", encoding="utf-8")
    (folder / "profiles" / "bytes.toml").write_bytes(b"\xff\xfe")
    for file in ("wrong", "bytes"):
        (folder / "a.apl").write_text(f'device "profiles/{file}.toml"\n{TIMED}', encoding="utf-8")
        (found,) = load_policy(folder / "a.apl").diagnostics
        assert found.span.source.name == f"profiles/{file}.toml"
        assert [each.span.text for each in found.related if each.span] == [f'device "profiles/{file}.toml"']
    (folder / "a.apl").write_text(f'device "profiles/missing.toml"\n{TIMED}', encoding="utf-8")
    (found,) = load_policy(folder / "a.apl").diagnostics
    assert found.span.text == 'device "profiles/missing.toml"', "what is no device is underlined where it is named"
    assert "profiles/missing.toml" in found.message


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
    assert found.device.name == "h100-sxm"
    assert found != (without := policy("policy demo\n" + TIMED))
    assert without.device is None


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
    [
        (0, "0 s"),
        (0.01231, "12.3 ms"),
        (3e-9, "3 ns"),
        (412e-6, "412 us"),
        (0.0123, "12.3 ms"),
        (0.99996, "1 s"),
        (1234.5, "1234.5 s"),
    ],
)
def test_a_time_as_reports_print_it(seconds: float, text: str) -> None:
    assert format_quantity(seconds, "seconds") == text
    assert beside(seconds, seconds, "seconds") == text
    assert beside(0.01231, 0.0123, "seconds") == "12.3 ms (0.01231 s)", "in full where it rounds to its limit"


KEYS = ("name", "compute", "memory", "host", "network", "bandwidth", "latency", "ranks", "times", "group", "pointwise")
MORE = ("capacity", "overhead", "attention", "float32", "bf16", "tf32", "other", "a b", '"', "é", "")
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, 1, 2, 8, 10**400, 1e12, 2.6e12, 0.35, float("inf"), float("nan"), -0.0, 5e-324]),
    st.floats(),
)
LEAVES = st.one_of(NUMBERS, st.booleans(), st.text(max_size=5), st.sampled_from(["80 GiB", "1 TB/s", "x.table", "."]))
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS + MORE), inner, max_size=4)
    ),
    max_leaves=12,
)
RATE = st.one_of(LEAVES, st.lists(st.lists(NUMBERS, max_size=3), max_size=3))
NETWORK = st.dictionaries(st.sampled_from(("ranks", "bandwidth", "latency", "times", "group")), LEAVES)
PROFILES = st.fixed_dictionaries(
    {"compute": st.dictionaries(st.sampled_from((*DTYPES[:4], "bf16", "overhead", "attention")), RATE)},
    optional={
        "name": LEAVES,
        "memory": st.dictionaries(st.sampled_from(("bandwidth", "pointwise", "capacity")), RATE),
        "host": st.dictionaries(st.just("bandwidth"), RATE),
        "network": st.lists(NETWORK, max_size=3),
    },
)
"""Nearly profiles."""


def toml(tree: Any) -> str:
    """A value in TOML; tables in one line."""
    if isinstance(tree, bool):
        return str(tree).lower()
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{quoted(key)} = {toml(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(toml, tree)) + "]"
    return quoted(tree) if isinstance(tree, str) else str(tree)


def quoted(text: str) -> str:
    return '"' + "".join(f"\\U{ord(each):08x}" if not 0xD800 <= ord(each) < 0xE000 else "?" for each in text) + '"'


def accept(found: DeviceProfile | Diagnostic) -> None:
    if isinstance(found, DeviceProfile):
        assert found.canonical
        return
    assert "APL152" <= found.code <= "APL158"
    assert render_text((found,))
    assert render_json((found,))
    for span in (found.span, *(note.span for note in found.related)):
        assert span is None or 0 <= span.start <= span.end <= len(span.source.text)


@drawn(25, 1000, st.binary(max_size=200))
def test_random_bytes(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "d.toml").write_bytes(content)
        accept(read_device("d.toml", Path(folder)))


@drawn(25, 1000, st.dictionaries(st.sampled_from(KEYS + MORE), TREES, max_size=5), PROFILES, st.booleans())
def test_random_trees(tree: dict[str, Any], profile: dict[str, Any], near: bool) -> None:
    text = "\n".join(f"{quoted(key)} = {toml(value)}" for key, value in (profile if near else tree).items())
    accept(parse_device(Source("d.toml", text), Path("/nowhere")))


WORDS = st.sampled_from(
    ["[", "]", "[[", "]]", "=", ".", ",", "{", "}", '"', "'", '"""', "'''", "#", "\n", "\r\n", " ", "\\", "a", "1", "é"]
)


@drawn(25, 1000, st.lists(WORDS, max_size=25).map("".join))
def test_places_are_looked_for_in_any_text(text: str) -> None:
    accept(parse_device(Source("d.toml", text), Path("/nowhere")))


CELLS = st.sampled_from(
    [
        "Group", "1MB (ms)", "2MB (ms)", "1GB (s)", "0", "64", "all_reduce", "0.5", "nan", "1e999", "-", "---", "\n",
        "\n", "é",
    ]
)  # fmt: skip


@drawn(25, 1000, st.lists(CELLS, max_size=25).map(" ".join))
def test_any_table(text: str) -> None:
    found = table_rows(Source("t.table", text))
    if isinstance(found, Diagnostic):
        accept(found)
    else:
        assert found
