"""policylang is in no index of packages: who followed a line that installs it from there would run what somebody else
has put under its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KINDS = {".md", ".py", ".toml", ".yml", ".yaml", ".ts", ".mjs", ".json", ".sh", ""}
FROM_AN_INDEX = re.compile(
    r"\b(?:pip3?|uv|pipx|uvx)\s+(?:tool\s+)?(?:install|add|run)(?:[ ]+[^\s.|&;`#][^\s|&;`#]*)*?\s+[\"'`]?"
    r"policylang(?![-\w./*])(?!\s+(?:is|check|plan|list)\b)"
)


def texts() -> list[Path]:
    folders = ("docs", "examples", "policylang", "editors/vscode/src", "editors/vscode/tests", "scripts", "policies")
    top = [each for each in ROOT.iterdir() if each.is_file() and each.name != "CHANGELOG.md"]
    below = [each for folder in folders for each in (ROOT / folder).rglob("*") if each.is_file()]
    more = [ROOT / "editors/vscode/README.md", ROOT / "editors/tree-sitter-policylang/README.md"]
    return [each for each in (*top, *below, *more) if each.suffix in KINDS and "node_modules" not in each.parts]


def test_nothing_installs_policylang_from_an_index() -> None:
    found = {
        str(path.relative_to(ROOT)): line[0]
        for path in texts()
        for line in FROM_AN_INDEX.finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install policylang",
        'pip install "policylang[lsp]"',
        "pip install attrs lark && pip install --no-deps policylang",
        "so `pip install\npolicylang` brings it",
        "uv pip install policylang==0.2.0",
        "pip install attrs policylang",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert FROM_AN_INDEX.search(line)
