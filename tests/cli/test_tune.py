"""`policylang tune`: from a budget to a policy on the command line."""

import json
import sys
from pathlib import Path

import pytest

from policylang.graph.facts import GraphKind
from policylang.graph.snapshot import write
from tests.support.textgraph import facts_of
from tests.support.tuned import written

SMALL = ("--graph", "small.graph", "--device", "h100-sxm")

CANDIDATE = {"rules", "peak_bytes", "graph_peak_bytes", "peak_at", "saved_bytes", "offloaded_bytes"}
CANDIDATE |= {f"{what}_seconds" for what in ("recomputed", "exposed", "copies", "step")}
KEYS = {"version", "graph", "device", "budget", "besides", "forward_seconds", "bound_seconds", "chosen", "less", "more"}
KEYS |= {"table", "policy", "diagnostics", "pipeline", "stages", "alike"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a snapshot in it."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    return tmp_path


def test_the_policy_is_printed_and_what_it_comes_to_beside_it(policylang, here):
    outcome = policylang("tune", *SMALL, "--peak", "500 MiB")
    assert outcome.code == 0
    assert outcome.out.startswith("# Tuned with `policylang tune` for small.graph (joint graph of 43 nodes, facts ")
    assert outcome.out.endswith("\n\nexpect peak <= 500 MiB\n")
    assert outcome.err.startswith("tuned for small.graph on h100-sxm: a peak of at most 500 MiB\n\n")
    assert " of the budget are left\n" in outcome.err
    again = policylang("tune", *SMALL, "--peak", "500 MiB")
    assert again.out == outcome.out


def test_the_policy_is_written_and_holds(policylang, here):
    outcome = policylang("tune", *SMALL, "--peak", "500 MiB", "-o", "tuned.apl")
    assert (outcome.code, outcome.err) == (0, "wrote tuned.apl\n")
    assert outcome.out.startswith("tuned for small.graph on h100-sxm: a peak of at most 500 MiB\n\n")
    head = next(line for line in outcome.out.splitlines() if "this policy" in line)
    assert head.split("  ")[-1].strip() == "more memory"
    assert Path("tuned.apl").read_text().endswith("\n\nexpect peak <= 500 MiB\n")
    assert policylang("fmt", "--check", "tuned.apl").code == 0
    checked = policylang("check", "tuned.apl", "--graph", "small.graph", "--deny", "warnings")
    assert checked.code == 0, checked.out
    assert [each.name for each in here.iterdir()].count("tuned.apl") == len(list(here.iterdir())) - 1


def test_one_that_cannot_be_met_leaves_an_existing_file_as_it_is(policylang, here):
    Path("tuned.apl").write_text("save everything\n")
    outcome = policylang("tune", *SMALL, "--peak", "100 MiB", "-o", "tuned.apl")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("error[APL625]: no policy keeps the peak within 100 MiB: the smallest is ")
    assert Path("tuned.apl").read_text() == "save everything\n"
    assert policylang("tune", *SMALL, "--peak", "100 MiB", "-o", "other.apl").code == 1
    assert not Path("other.apl").exists()


def test_everything_saved_is_a_note(policylang, here):
    outcome = policylang("tune", *SMALL, "--peak", "2 GiB")
    assert outcome.code == 0
    assert outcome.err.startswith("note[APL627]: nothing has to be recomputed: with all saved, 1.3 GiB of the budget")


@pytest.mark.slow
def test_the_whole_trade_off(policylang, here):
    outcome = policylang("tune", *SMALL, "--table")
    assert outcome.code == 0
    heading, _blank, head, *rows = outcome.out.splitlines()
    assert heading.endswith(" policies for small.graph on h100-sxm, none better in both memory and time")
    assert " ".join(head.split()) == "peak saved recomputed of the forward step rules that the row above lacks"
    assert int(heading.split()[0]) == len(rows)
    assert rows[-1].endswith("  save everything")
    marked = policylang("tune", *SMALL, "--table", "--peak", "500 MiB")
    assert [line for line in marked.out.splitlines() if line.startswith("->")] != []
    assert "a peak of at most 500 MiB" in marked.out
    narrow = policylang("tune", *SMALL, "--table", "--width", "60")
    assert max(map(len, narrow.out.splitlines())) <= 60


def test_json(policylang, here):
    found = json.loads(policylang("tune", *SMALL, "--peak", "500 MiB", "--table", "--output-format", "json").out)
    assert found.keys() == KEYS
    assert found["graph"].keys() == {"name", "kind", "nodes", "fingerprint"}
    assert found["besides"].keys() == {"optimizer", "reserve"}
    for each in (found["chosen"], found["less"], found["more"], *found["table"]):
        assert each is None or each.keys() == CANDIDATE
    assert found["budget"] == {"figure": "peak", "limit": 500 << 20}
    assert found["chosen"] in found["table"]
    assert found["policy"] == policylang("tune", *SMALL, "--peak", "500 MiB").out
    table = json.loads(policylang("tune", *SMALL, "--table", "--output-format", "json").out)
    assert table.keys() == KEYS
    assert (table["budget"], table["chosen"], table["policy"]) == (None, None, None)
    assert table["table"] == found["table"]
    refused = policylang("tune", *SMALL, "--peak", "100 MiB", "--output-format", "json")
    assert refused.code == 1
    assert [each["code"] for each in json.loads(refused.out)["diagnostics"]] == ["APL625"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--graph", "small.graph", "--peak", "1 GiB"), "times need a device\nhelp: name one with `--device`: a100-"),
        (SMALL, "error[APL624]: there is no budget to tune for\n"),
        ((*SMALL, "--peak", "70"), "error[APL624]: the peak of `70` has no unit\n"),
        ((*SMALL, "--peak", "1 GiB", "--optimizer", "adm"), "error[APL628]: there is no optimizer `adm`\n"),
        ((*SMALL, "--peak", "1 GiB", "--reserve", "100%"), "error[APL629]: a reserve of `100%` leaves no memory\n"),
        ((*SMALL, "--peak", "1 GiB", "-o", "."), "`.` is a folder"),
        ((*SMALL, "--peak", "1 GiB", "-o", "no/tuned.apl"), "cannot write `no/tuned.apl`: there is no folder `no`"),
        ((*SMALL, "--table", "-o", "tuned.apl"), "a policy is tuned for a budget, and none is given"),
        ((*SMALL, "--peak", "1 GiB", "--saved", "1 GiB"), "argument --saved: not allowed with argument --peak"),
    ],
)
def test_what_cannot_be_asked(policylang, here, words, says):
    outcome = policylang("tune", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert says in outcome.err


def test_graphs_and_devices_that_cannot_be(policylang, here):
    unknown = policylang("tune", "--graph", "small.graph", "--device", "h1000", "--peak", "1 GiB")
    assert unknown.code == 2
    assert "error[APL152]" in unknown.err
    Path("text.graph").write_bytes(b"\xff\xfe\x00")
    assert policylang("tune", "--graph", "text.graph", "--device", "h100", "--peak", "1 GiB").code in (1, 2)
    write(facts_of("%x = input bytes=4\noutput(%x)", GraphKind.JOINT), "empty.graph")
    empty = policylang("tune", "--graph", "empty.graph", "--device", "h100", "--peak", "1 GiB")
    assert (empty.code, empty.out) == (1, "")
    assert empty.err.startswith("error[APL630]: `empty.graph` is empty: no operator runs in it\n")


@pytest.mark.slow
def test_it_needs_no_torch(process, here):
    program = "import sys; from policylang.commands.cli import main; code = main(sys.argv[1:]); "
    program += "assert 'torch' not in sys.modules; sys.exit(code)"
    root = str(Path(__file__).parents[2])
    outcome = process("-c", program, "tune", *SMALL, "--peak", "500 MiB", env={"PYTHONPATH": root}, cwd=str(here))
    assert outcome.code == 0, outcome.err


def test_progress_is_for_terminals(policylang, here, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert "\r\x1b[K" in policylang("tune", *SMALL, "--peak", "500 MiB", "-o", "tuned.apl").err
