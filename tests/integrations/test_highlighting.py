"""Pygments, TextMate and tree-sitter colour the same words, and those are the words of the language."""

import json
import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

import pytest
from _pytest.outcomes import Skipped

from policylang.language.diagnostics import Source
from policylang.language.lexer import Lexeme, keywords, word_pairs, words_of
from policylang.language.operators import group_names
from policylang.language.parser import parse_file
from policylang.language.predicates import FLAGS, MEASURES, PROPERTIES
from policylang.language.shown import UNITS
from policylang.language.statements import ACTIONS, FATES, FIGURES
from policylang.language.words import word_lists
from tests.support.drawn import examples, slow
from tests.support.highlighters import (
    HIGHLIGHTERS,
    TREE_SITTER,
    VSCODE,
    Classes,
    is_read,
    node,
    node_environment,
    repository_policies,
    repository_statements,
    textmate_tokens,
)

WORDS = frozenset(word for word in keywords() if word.isidentifier())
NO_WORDS = ("NAME", "PATH", "INT", "NUMBER", "ORDINAL", "RANGE", "STRING", "BUNDLED", "COMPARISON", "ARROW")
MARKS = ("LPAR", "RPAR", "COMMA", "EQUAL", "PERCENT")
SENTENCES = (
    *("{}", "{} mm", "save {}", "optional {} mm", "{} -> save", "undecided -> {}", "fuse all_gather {}", "collapse {}"),
    *("save {} of mm", "save chain {} mm", "save mm {} mm", "save mm in {}", "save mm in {} block", "save mm per {}"),
    *("save mm where {} > 3", "save mm where {} == x", "save mm where is {}", "save mm where from {}"),
    *(
        "save mm where gathered {}",
        "save mm where {} block",
        "save mm where {} saved",
        "save mm where {} cut per 2 GiB",
    ),
    *("save mm where {} mine", "save mm where bytes > 3 {}", "expect {} <= 5%", "expect recomputed {} <= 5%"),
    *("expect saved <= 5% of {}", "expect exposed <= 5% of {}", "expect every mm {}", "expect {} 1 mm"),
    *("overlap collective within 5% of {}", "prefetch all_gather 1 block {}", "bucket all_gather {} to 3 MiB"),
    *("bucket all_gather up {} 3 MiB", "overlap collective up to 3 MiB in {}", "offload mm up to 3 MiB per {}"),
    *(
        "save mm in last {} of blocks", "{} order of mm", "keep {} of mm", "expect step {} <= 5 ms", "device {}",
        "policy {}",
    ),
)  # fmt: skip
"""A place for each word of the language, and for what only looks like one."""


@cache
def classes_of(texts: tuple[str, ...]) -> dict[str, list[Classes]]:
    """By those highlighters that are installed."""
    found: dict[str, list[Classes]] = {}
    for name, highlighter in HIGHLIGHTERS.items():
        with suppress(Skipped):
            found[name] = highlighter(list(texts))
    return found if found else pytest.skip("no highlighter is installed")


def differences(texts: tuple[str, ...]) -> Iterator[str]:
    """Where two highlighters tell different things of a character."""
    found = classes_of(texts)
    for index, text in enumerate(texts):
        told = list(zip(*(classes[index] for classes in found.values()), strict=True))
        at = next((at for at, each in enumerate(told) if len(set(each)) > 1), None)
        if at is not None:
            yield f"{text[at : at + 12]!r} in {text!r}: {dict(zip(found, told[at], strict=True))}"


def test_the_policies_of_the_repository_look_the_same_everywhere() -> None:
    policies = tuple(repository_policies().values())
    assert len(policies) > 200
    assert list(differences(policies)) == []


def test_every_word_and_every_comment_of_these_policies_has_its_class() -> None:
    """By the language's own lexer: a keyword of the grammar is a keyword, a number one, and so on."""
    texts = tuple(repository_statements())
    seen: set[str] = set()
    for name, found in classes_of(texts).items():
        for text, classes in zip(texts, found, strict=True):
            for word, wanted in _wanted(text):
                told = {classes[at] for at in range(*word) if not text[at].isspace()}
                assert told <= wanted, f"{name} takes `{text[slice(*word)]}` in `{text}` for {told}"
                seen.add(text[slice(*word)])
    assert seen >= WORDS, "each word of the grammar stands in a policy of the repository"


def _wanted(text: str) -> Iterator[tuple[tuple[int, int], set[str | None]]]:
    words = words_of(Source("", text), 0, len(text))
    for index, word in enumerate(words):
        begin, kind = word.start_pos or 0, word.type
        compared = index + 1 < len(words) and words[index + 1].type == "COMPARISON"
        wanted: set[str | None] = {"keyword"}
        if kind in NO_WORDS or kind in MARKS:
            wanted = _plain(kind, words, index)
        elif kind in ("STEP_TIME", "HOST_MEMORY") or (compared and word in MEASURES + PROPERTIES):
            wanted = {"property"}
        elif kind in word_pairs():
            wanted = {"keyword", "number"} if kind == "EVERY_NTH" else {"keyword"}
            if "#" in word:
                wanted |= {"comment"}
        yield (begin, begin + len(word)), wanted


def _plain(kind: str, words: list[Lexeme], index: int) -> set[str | None]:
    if kind in ("NAME", "PATH"):
        return {None, "group", "property", "number", "constant", "keyword"}
    if kind in ("INT", "NUMBER"):  # one behind `in` is a module
        return {None} if words[index - 1].type in ("IN", "OUTSIDE", "BLOCKS") else {"number"}
    exact = {
        "STRING": "string", "BUNDLED": "string", "COMPARISON": "operator", "ARROW": "operator", "EQUAL": "operator",
    }  # fmt: skip
    return {exact.get(kind, "number" if kind in ("ORDINAL", "RANGE", "PERCENT") else None)}


def _cases() -> Iterator[tuple[str, str, str]]:
    """A sentence, a word of it, and the class of that word."""
    yield from ((f"{action} mm", action, "keyword") for action in ACTIONS)
    yield from ((f"save {group}", group, "group") for group in group_names())
    for flag in (*FLAGS, "crosses cut per 2 GiB", "annotated mine"):
        names = [word for word in flag.split() if word.isidentifier() and word not in ("GiB", "mine")]
        yield from ((f"save mm where {flag}", word, "keyword" if word in WORDS else "property") for word in names)
    for measure in MEASURES:
        subject = f"{measure}[-1]" if measure == "shape" else measure
        yield f"save mm where {subject} > 3", subject, "property"
    yield from ((f"save mm where {each} == x", each, "property") for each in PROPERTIES)
    yield from ((f"save mm where bytes > 3 {unit}", unit, "number") for unit in UNITS)
    yield from ((f"save mm where bytes > 3{unit}", f"3{unit}", "number") for unit in UNITS)
    for figure in FIGURES:
        names = figure.split()
        limit = "1 GiB" if figure in ("saved", "recomputed") else "5%"
        kinds = [(word, "keyword" if word in WORDS or word == "stage" else "property") for word in names]
        yield from ((f"expect {figure} <= {limit}", *each) for each in kinds)
    yield from ((f"expect {figure} <= 5% of forward", "forward", "property") for figure in ("saved", "recomputed"))
    yield "expect exposed <= 5% of step", "step", "property"
    yield "save mm where crosses cut per auto", "auto", "constant"
    yield from ((f"undecided -> {fate}", fate, "constant" if fate == "auto" else "keyword") for fate in FATES)


def test_what_the_language_defines_is_known_everywhere() -> None:
    cases = list(_cases())
    sentences = tuple(sentence for sentence, _, _ in cases)
    assert [sentence for sentence in sentences if not is_read(sentence)] == []
    for name, found in classes_of(sentences).items():
        for (sentence, word, wanted), classes in zip(cases, found, strict=True):
            at = sentence.rindex(word)
            told = set(classes[at : at + len(word)])
            assert told == {wanted}, f"{name} takes `{word}` in `{sentence}` for {told}"


def test_the_lists_of_the_editors_are_those_of_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import make_word_lists

    made = make_word_lists.made()
    old = [file.name for file, text in made.items() if file.read_text(encoding="utf-8") != text]
    assert old == [], "run scripts/make_word_lists.py"
    lists = {name: (*words, "pinned") for name, words in word_lists().items()}
    monkeypatch.setattr(make_word_lists, "word_lists", lambda: lists)
    assert all(text.count("pinned") > made[file].count("pinned") for file, text in make_word_lists.made().items())


def _listed() -> set[str]:
    """The words that the grammars and queries list."""
    grammar = (VSCODE / "syntaxes" / "policylang.tmLanguage.json").read_text(encoding="utf-8")
    lists = re.findall(r'"(?:match|begin|end)": "(.*)"', grammar)
    quoted = [*TREE_SITTER.glob("queries/**/*.scm"), TREE_SITTER / "grammar.js"]
    lists += [
        text for file in quoted for text in re.findall(r"""["']([^"'\n]*)["']""", file.read_text(encoding="utf-8"))
    ]
    return {word for text in lists for word in re.findall(r"(?<!\\)[A-Za-z_]{1,20}", text)}


@pytest.mark.parametrize("all_words", [False, slow(True)], ids=["others", "all"])
def test_what_one_of_them_knows_all_of_them_know(all_words: bool) -> None:
    """Each word that is listed, in each place where it can stand: those that the language has not named above first."""
    known = {*WORDS, *ACTIONS, *group_names(), *UNITS, *FATES}
    known |= {part for name in (*FLAGS, *MEASURES, *PROPERTIES, *FIGURES) for part in name.split()}
    words = _listed() | known if all_words else _listed() - known
    candidates = (sentence.format(word) for word in sorted(words) for sentence in SENTENCES)
    sentences = tuple(sentence for sentence in candidates if is_read(sentence))
    assert len(sentences) > 100
    assert list(differences(sentences)) == []


def test_a_word_of_some_places_is_a_name_in_all_others() -> None:
    soft = "device bucket prefetch delay overlap keep order ahead within flight peak up to rank half step time"
    sentences = tuple(
        sentence
        for word in soft.split()
        for sentence in (f"save {word}", f"{word} -> save", f"save mm, ({word} in {word}) in block", f"let {word} = mm")
    )
    assert [sentence for sentence in sentences if not is_read(sentence)] == []
    for name, found in classes_of(sentences).items():
        for sentence, classes in zip(sentences, found, strict=True):
            names = [word.span() for word in re.finditer(r"\w+", sentence) if word.group() in soft.split()]
            told = {classes[at] for begin, end in names for at in range(begin, end)}
            assert told == {None}, f"{name} takes a name of `{sentence}` for {told}"


def _drawn(count: int, seed: int) -> tuple[str, ...]:
    """Statements of the repository with words of others in place of theirs, of those that the language reads."""
    chance, statements = random.Random(seed), repository_statements()
    pieces = [re.findall(r"#[^\n]*\n?|\"[^\"\n]*\"|\w[\w.*\[\]-]*|[<>=!-]+|\S", text) for text in statements]
    soft = ["up", "to", "half of", "per rank", "in flight", "step time", "device", "keep order of", "1 block", "ahead"]
    drawn: dict[str, None] = {}
    for _ in range(count):
        words = list(chance.choice(pieces))
        for _ in range(chance.randint(1, 2)):
            other, at = chance.choice(pieces), chance.randrange(len(words) + 1)
            begin = chance.randrange(len(other))
            taken = chance.choice([other[begin : begin + chance.randint(1, 4)], [chance.choice(soft)]])
            words[at : at + chance.randint(0, 2)] = taken
        drawn[" ".join(words)] = None
    return tuple(text for text in drawn if is_read(text))


@pytest.mark.parametrize(("count", "seed"), [(examples(800, 20_000), 0), slow(60_000, 1)], ids=["few", "many"])
def test_drawn_statements_look_the_same_everywhere(count: int, seed: int) -> None:
    assert list(differences(_drawn(count, seed))) == []


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
