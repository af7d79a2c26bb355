"""The table of the parser that travels with the package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from policylang.language import lexer, parser
from policylang.language.diagnostics import Source
from policylang.language.lexer import TABLE, key, table_of
from policylang.language.parser import parse_file
from policylang.language.resources import grammar_file

ROOT = Path(__file__).parents[2]
GRAMMAR = grammar_file().read_text(encoding="utf-8")


@pytest.mark.parametrize("seed", ["1", "2"])
def test_the_table_is_that_of_the_grammar_whatever_the_hash_seed(seed: str) -> None:
    program = (
        "from policylang.language.lexer import table_of\n"
        "from policylang.language.resources import grammar_file\n"
        "print(table_of(grammar_file().read_text(encoding='utf-8')), end='')\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert made.stdout == TABLE.read_text(encoding="utf-8"), "run scripts/make_grammar_table.py"


TEXT = "policy p\nsave mm in layers.*; recompute every 2nd mm per blok\nexpect saved <= 1 GiB\nsave (mm or"
CACHES = (lexer.tables, lexer._terminals, lexer.lexer, parser.statement_parser)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", None])
def test_a_table_that_does_not_fit_is_not_used_and_the_grammar_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    with_table = parse_file(Source("p.apl", TEXT))
    table = tmp_path / "table.json"
    table.write_text(table_of(GRAMMAR).replace(key(GRAMMAR), key("another grammar")) if content is None else content)
    monkeypatch.setattr(lexer, "TABLE", table)
    try:
        for cache in CACHES:
            cache.cache_clear()
        assert parse_file(Source("p.apl", TEXT)) == with_table
    finally:
        for cache in CACHES:
            cache.cache_clear()
