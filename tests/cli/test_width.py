"""Text fits the terminal: tables give up columns and cells, sentences are wrapped, machine forms stay."""

from __future__ import annotations

import json
import re
import sys

import pytest

from policylang.commands.output import text_width
from policylang.graph.snapshot import write
from policylang.report.layout import columns, fit, fitted, table
from tests.cli.test_plan import GRAPH
from tests.support.textgraph import facts_of

POLICY = """blocks layers.*
recompute everything in block where bytes > 1 KiB or numel > 12345 or bytes > 3 KiB or numel > 4 or numel > 5
save mm in block where bytes > 1 KiB
must_recompute sin in block
save sin in block
expect saved <= 10 GiB
expect recomputed flops per block <= 1%
"""
COMMANDS = {
    "check": ("check", "a_policy_with_a_long_name.apl", "--graph", "small.graph"),
    "plan": ("plan", "a_policy_with_a_long_name.apl", "--graph", "small.graph"),
    "values": ("plan", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--values"),
    "summary": ("plan", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--summary"),
    "diff": ("diff", "a_policy_with_a_long_name.apl", "save_all", "--graph", "small.graph"),
    "node": ("explain", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--node", "a0"),
    "nodes": ("explain", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--node", "layers.*"),
    "rule": ("explain", "a_policy_with_a_long_name.apl", "--graph", "small.graph", "--rule", "2"),
    "code": ("explain", "APL304"),
    "codes": ("explain",),
    "show": ("show", "small.graph"),
    "module": ("show", "small.graph", "--module", "layers.*"),
    "list": ("list",),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_policy_with_a_long_name.apl").write_text(POLICY)
    write(facts_of(GRAPH), "small.graph")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [60, 80])
def test_no_line_is_longer(policylang, folder, name, width):
    full = policylang(*COMMANDS[name], "--width", "0")
    fits = policylang(*COMMANDS[name], "--width", str(width))
    assert fits.code == full.code
    assert max(map(len, fits.out.splitlines())) <= width
    assert policylang(*COMMANDS[name]).out == full.out, "in a pipe there is room for all"


@pytest.fixture
def long_names(folder):
    """Names, modules and operators as long as those of real models."""
    deep = "model.language_model.model.layers.0.self_attn.attention_interface"
    text = GRAPH.replace("layers.0", deep).replace(
        "aten.sin.default", "aten._scaled_dot_product_flash_attention.default"
    )
    for name in ("a0", "b0", "a1", "b1"):
        text = text.replace(f"%{name}", f"%{name}_scaled_dot_product_flash_attention_for_a_device")
    write(facts_of(text), "long.graph")
    (folder / "all.apl").write_text("blocks layers.*\nsave everything in block\n")
    return "plan", "all.apl", "--graph", "long.graph", "--values"


def test_what_is_alive_at_the_peak_fits_a_page_in_a_pipe(policylang, long_names):
    def tables(*width):
        out = policylang(*long_names, *width).out
        return out[out.index("alive at the peak") :].split("\n\n")[1:4:2]

    by_line, by_value = tables()
    assert max(map(len, (*by_value.splitlines(), *by_line.splitlines()))) <= 120
    assert "…" in by_value
    assert re.search(r" \d–end\n", by_value), "the steps stay"
    _, whole = tables("--width", "0")
    assert "…" not in whole
    assert max(map(len, whole.splitlines())) > 120
    assert max(map(len, tables("--width", "80")[1].splitlines())) <= 80
    assert tables("--width", "250")[1] == whole, "who says how wide it may be is believed"


def test_machine_forms_do_not_care(policylang, folder):
    for form in ("json", "concise", "sarif", "github"):
        full, narrow = (policylang(*COMMANDS["check"], "--output-format", form, "--width", w).out for w in ("0", "20"))
        assert full == narrow
    assert json.loads(policylang(*COMMANDS["plan"], "--width", "20", "--output-format", "json").out)["rules"]


def test_figures_stay_whole(policylang, folder):
    out = policylang(*COMMANDS["values"], "--width", "80").out
    assert re.search(r"\nsaved +4 GiB +4 GiB\n", out)
    assert "(no room for " in out
    assert re.search(r"…\w+_name.apl:3\n", out), "of the place of a rule the line stays"


def test_a_terminal_has_its_own_width(monkeypatch):
    assert text_width(None) is None, "no terminal here"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "71")
    assert (text_width(None), text_width(0), text_width(90)) == (71, 0, 90)


def test_not_a_width(policylang):
    outcome = policylang("list", "--width", "wide")
    assert outcome.code == 2
    assert "`wide` is no number of columns" in outcome.err


def test_tables():
    rows = [("place", "words", "n"), ("folder/file.apl:12", "recompute everything in block", "1,234")]
    assert "recompute everything in block" in table(rows, right=range(2, 3))
    with fitted(40):
        assert table(rows, right=range(2, 3), ends=(0,)).splitlines()[1] == "…er/file.apl:12  recompute every…  1,234"
        assert table(rows, right=range(2, 3), spare=(0,)).splitlines() == [
            "words                              n",
            "recompute everything in block  1,234",
            "(no room for `place`: --width 0)",
        ]
    with fitted(3):
        assert columns() == 20
        assert max(map(len, table(rows, right=range(2, 3)).splitlines())) <= 20
    assert columns() is None


def test_sentences():
    long = "error[APL301]: one two three four five six\n  = help: seven eight nine ten eleven twelve\n12 | " + "x" * 50
    assert fit(long) == long
    with fitted(24):
        assert fit(long).splitlines() == [
            "error[APL301]: one two",
            "  three four five six",
            "  = help: seven eight",
            "    nine ten eleven",
            "    twelve",
            "12 | " + "x" * 18 + "…",
        ]
