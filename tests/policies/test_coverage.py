"""Every rule of every bundled policy is exercised by a policy test, and those tests hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Source
from policylang.language.resources import policies_folder
from policylang.report.diagnostics import render_text
from policylang.testing.suites import Coverage, fences, lifted, run_files

TESTS = Path(__file__).parent
POLICIES = policies_folder()
RULES = 30
"""There are at least as many, or coverage has lost sight of them."""


def test_every_rule_of_the_bundled_policies_is_exercised():
    result = run_files([str(TESTS)], cover=[str(POLICIES)])
    assert result.found.diagnostics == (), render_text(result.found.diagnostics)
    assert result.rules >= RULES


def test_a_rule_that_nothing_exercises_is_missed():
    rules, missed = Coverage().of([str(POLICIES)])
    assert {each.code for each in missed} == {"APL514"}
    assert len(missed) == rules >= RULES


@pytest.mark.parametrize("page", sorted(TESTS.glob("*.md")), ids=lambda page: page.stem)
def test_the_graphs_are_written_for_the_backward_to_read_everything(page: Path):
    """A value that the backward does not read is neither saved nor recomputed, and the test would not see it."""
    for fence in fences(Source(page.name, page.read_text(encoding="utf-8"))):
        if fence.language != "graph":
            continue
        facts, problems = read_graph(lifted(fence))
        assert problems == ()
        unread = [facts.names[row] for row in facts.forward if not facts.users[row]]
        assert unread == []
