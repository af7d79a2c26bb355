"""The TextMate grammar as VS Code reads it: scopes of tokens, line by line."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from policylang.language.diagnostics import Source
from policylang.language.parser import parse_file
from tests.support.highlighters import VSCODE, node, node_environment, repository_policies, textmate_tokens

GRAMMAR = VSCODE / "syntaxes" / "policylang.tmLanguage.json"
ASSERTED = sorted((VSCODE / "tests" / "grammar").glob("*.apl"))


def test_the_assertions_beside_the_grammar_hold() -> None:
    """``npm test`` runs them as well."""
    script = "process.stdout.write(require.resolve('vscode-tmgrammar-test/package.json'))"
    found = subprocess.run([node(), "-e", script], cwd=VSCODE, env=node_environment(), capture_output=True, text=True)
    if found.returncode:
        pytest.skip("the packages of editors/vscode are not installed: npm ci there")
    package = json.loads((VSCODE / found.stdout).read_text(encoding="utf-8"))
    runner = (VSCODE / found.stdout).parent / package["bin"]["vscode-tmgrammar-test"]
    command = [node(), str(runner), "-g", str(GRAMMAR), *map(str, ASSERTED)]
    run = subprocess.run(command, cwd=VSCODE, env=node_environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("run successfuly") == len(ASSERTED) >= 6


@pytest.mark.parametrize("file", [file for file in ASSERTED if file.stem != "lines"], ids=lambda file: file.stem)
def test_what_is_asserted_of_is_a_policy(file) -> None:
    assert parse_file(Source("", file.read_text(encoding="utf-8")))[1] == ()


def scopes_of(text: str) -> list[tuple[str, str]]:
    """The words of a text, each with its innermost scope."""
    (tokens,) = textmate_tokens([text])
    words = ((text[begin:end], scopes[-1].removesuffix(".policylang")) for begin, end, scopes in tokens)
    return [(word, scope) for word, scope in words if word.strip()]


def test_a_statement_that_nobody_closed_ends_where_the_next_one_opens() -> None:
    for text in ("save (mm,\nlet x = bmm", "let y = ((mm\n  save bmm", "fuse all_gather chains over (\npolicy x"):
        *_, (opener, scope) = [each for each in scopes_of(text) if each[0] in ("let", "save", "policy")]
        assert scope in ("keyword.control.statement", "keyword.control.action"), (text, opener)


def test_no_token_of_the_repository_is_invalid_or_without_a_scope() -> None:
    texts = list(repository_policies().values())
    for text, tokens in zip(texts, textmate_tokens(texts), strict=True):
        for begin, end, scopes in tokens:
            inner = [scope for scope in scopes[1:] if not scope.startswith("meta.")]
            assert inner or not text[begin:end].strip(), f"`{text[begin:end]}` has no scope in {text!r}"
            assert not [scope for scope in scopes if scope.startswith("invalid")]


def test_themes_know_its_scopes_and_an_editor_its_first_line() -> None:
    grammar = json.loads(GRAMMAR.read_text(encoding="utf-8"))
    assert (grammar["scopeName"], grammar["fileTypes"]) == ("source.policylang", ["apl"])
    conventional = ("comment", "constant", "entity.name", "keyword", "meta", "punctuation", "storage", "string")
    names = re.findall(r'"name": "([^"]+)\.policylang"', json.dumps(grammar))
    assert [name for name in names if not name.startswith((*conventional, "support", "variable"))] == []
    first = re.compile(grammar["firstLineMatch"])
    policies = ("policy llama3", "  policy a.b", "policy x  # y", "requires policylang >= 0.2", "# of policylang")
    assert all(map(first.match, policies))
    assert not any(
        map(first.match, ("⍝ policy", "r←policy x", "# nothing", "policy", "policy: what holds", "requires 3"))
    )
