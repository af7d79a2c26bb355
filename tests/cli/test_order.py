"""Scheduling lines from the command line: planned, explained, compared and checked on a snapshot, without torch."""

from __future__ import annotations

import json
import re

import pytest

from policylang.graph.snapshot import write
from policylang.report.diagnostics import RENDERERS
from tests.support.ordered import sharded

PROFILE = """\
name = "slow"
[compute]
float16 = 1e6
[memory]
bandwidth = 1e9
[[network]]
bandwidth = 1e5
latency = 1e-3
"""
POLICY = """\
blocks layers.*
undecided -> save
bucket all_gather per block
prefetch all_gather 1 block ahead
"""
"""Four layers of two products of 10 ms and two gathers of 8.5 ms each. As traced all gathers are waited for; of the
buckets, which take 16 ms, the first alone."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(sharded(4), "a.graph")
    (tmp_path / "slow.toml").write_text(PROFILE)
    (tmp_path / "mine.apl").write_text(POLICY)
    (tmp_path / "plain.apl").write_text("blocks layers.*\nundecided -> save\n")
    return tmp_path


ON = ("--graph", "a.graph", "--device", "./slow.toml")


def test_a_plan_says_what_the_order_comes_to(policylang, folder):
    outcome = policylang("plan", "mine.apl", *ON)
    assert (outcome.code, outcome.err) == (0, "")
    assert re.search(r"order +as traced +as planned\nall-gather +8 +4\nexposed +68 ms \(45.9%\) +16 ms", outcome.out)
    assert re.search(r"mine.apl:3 +bucket all_gather per block +8 +8 +4 +\S+ ms\n", outcome.out)
    assert "mine.apl:3: each bucket checked on 4 ranks\n" in outcome.out
    assert re.search(r"mine.apl:4 +prefetch all_gather 1 block ahead +\d +3 ", outcome.out)
    assert re.search(r"\n +16 ms +16 ms +\S+ +\S+ of 2 .* layers.0 +data +mine.apl:3", outcome.out)


def test_what_is_expected_is_said_of_the_order_that_is_planned(policylang, folder):
    (folder / "expecting.apl").write_text(POLICY + "expect exposed <= 20%\nexpect step time <= 100 ms\n")
    outcome = policylang("plan", "expecting.apl", *ON, "--summary")
    assert outcome.code == 0
    assert re.search(r"expecting.apl:5 +exposed <= 20% +holds +16.7%", outcome.out)
    assert re.search(r"expecting.apl:6 +step time <= 100 ms +holds +96 ms", outcome.out)


def test_a_collective_and_a_line_are_explained(policylang, folder):
    found = json.loads(policylang("explain", "mine.apl", *ON, "--node", "gather_v1", "--output-format", "json").out)
    assert (found["name"], found["collective"]["traced"]["step"]) == ("gather_v1", 10)
    out = policylang("explain", "mine.apl", *ON, "--rule", "4").out
    assert out.startswith("mine.apl:4: prefetch all_gather 1 block ahead\n")
    assert "exposed: 16 ms with it, 64 ms without" in out
    missed = policylang("explain", "mine.apl", *ON, "--rule", "9")
    assert (missed.code, "its rules begin in 3, 4" in missed.err) == (2, True)


def test_a_difference_in_order_is_one(policylang, folder):
    outcome = policylang("diff", "plain.apl", "mine.apl", *ON)
    assert outcome.code == 1
    assert "8 collectives joined into buckets: gather_w0, gather_v0" in outcome.out
    assert re.search(r"exposed +68 ms +16 ms +-52 ms", outcome.out)
    assert policylang("diff", "mine.apl", "mine.apl", *ON).code == 0


def test_what_is_exposed_before_there_is_a_policy(policylang, folder):
    assert "as traced: a step of 148 ms, exposed 68 ms (45.9%)" in policylang("show", "a.graph", *ON[2:]).out
    assert "as traced" not in policylang("show", "a.graph").out
    found = json.loads(policylang("show", "a.graph", *ON[2:], "--output-format", "json").out)
    assert found["exposed_seconds"] == pytest.approx(0.068)


@pytest.mark.parametrize("form", [*RENDERERS])
def test_what_is_wrong_with_an_order_fails_a_check(policylang, folder, form):
    """`overlap` without a device; a delay of scatters that there are none of."""
    (folder / "wrong.apl").write_text(
        "blocks layers.*\nundecided -> save\noverlap all_gather\ndelay reduce_scatter 1 block\n"
    )
    outcome = policylang("check", "wrong.apl", "--graph", "a.graph", "--output-format", form)
    assert outcome.code == 1
    assert "APL370" in outcome.out
    assert len(set(re.findall(r"APL\d+", outcome.out))) == 2
    if form in ("json", "sarif"):
        json.loads(outcome.out)


@pytest.mark.parametrize("form", [*RENDERERS])
def test_a_path_that_keeps_no_order_refuses_it(policylang, folder, form):
    outcome = policylang("check", "mine.apl", *ON, "--path", "hook", "--output-format", form)
    assert outcome.code == 1
    assert "asks for an order of collectives" in outcome.out
