"""The page of setups, and the messages that lead to it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import policylang
from policylang.planning.capabilities import FSDP2_BLOCKS, PAGE, WHAT_FSDP_MEANS, WHOLE_MODEL

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / PAGE).read_text()
ROWS = re.findall(r"^\| \[.*?\]\(#(?P<anchor>[\w-]+)\).*\[`(?P<script>\w+\.py)`\]", TEXT, flags=re.MULTILINE)


def anchors() -> set[str]:
    headings = re.findall(r"^#+ (.+)$", TEXT, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_is_called_as_readers_look_for_it() -> None:
    assert TEXT.startswith("# Which setup am I?\n")


def test_every_setup_is_a_row_with_a_section_and_a_script() -> None:
    assert len(ROWS) == 8
    assert {anchor for anchor, _ in ROWS} <= anchors()
    assert all((ROOT / "examples" / script).is_file() for _, script in ROWS)


@pytest.mark.parametrize("script", [script for _, script in ROWS])
def test_a_test_runs_the_script(script: str) -> None:
    """By its name as a module, or as a file."""
    places = [ROOT / "tests" / folder for folder in ("backends", "distributed", "integrations", "documents")]
    texts = [each.read_text() for place in places for each in place.rglob("test_*.py") if each != Path(__file__)]
    stem = script.removesuffix(".py")
    assert any(re.search(rf"\b{stem}\b", text) for text in texts)


def test_every_message_that_names_the_page_names_a_place_on_it() -> None:
    found = set()
    for path in (ROOT / "policylang").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.findall(rf"{PAGE}#([\w-]+)", node.value))
    links = {FSDP2_BLOCKS, WHOLE_MODEL, WHAT_FSDP_MEANS, *(f"{PAGE}#{each}" for each in found)}
    assert {link.partition("#")[2] for link in links} <= anchors()
    assert found, "the trace step's refusal names its row"


@pytest.mark.parametrize("name", ["sac_fsdp.apl", "titan_graph.apl"])
def test_the_policies_of_the_scripts_are_clean(name: str) -> None:
    assert policylang.check(ROOT / "examples" / name).diagnostics == ()
