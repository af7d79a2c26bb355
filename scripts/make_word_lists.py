"""Bring the lists of words in the files of editors up to date with the language; ``--check`` says which are not.

A list is any run of three or more words, ``a|b|c`` in a pattern or ``"a" "b" "c"`` in a query or grammar. Each is
brought to the list of :func:`policylang.language.words.word_lists` that it nearly is: words that stay keep their order,
words that are new follow. The query of Helix is the one of the others under its names for captures.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from policylang.language.words import word_lists

EDITORS = Path(__file__).resolve().parents[1] / "editors"
TREE_SITTER = EDITORS / "tree-sitter-policylang"
FILES = (
    EDITORS / "vscode" / "syntaxes" / "policylang.tmLanguage.json",
    TREE_SITTER / "grammar.js",
    TREE_SITTER / "queries" / "highlights.scm",
)
HELIX = TREE_SITTER / "queries" / "helix" / "highlights.scm"
_WORD = r"[A-Za-z_µμ]+"
_RUN = re.compile(
    rf"(?<![\w\\|]){_WORD}(?:\|{_WORD}){{2,}}|(?P<quote>[\"']){_WORD}(?P=quote)(?:,?\s+(?P=quote){_WORD}(?P=quote)){{2,}}"
)
_HELIX = {
    "keyword.modifier": "keyword.storage.modifier",
    "number": "constant.numeric",
    "property": "variable.other.member",
    "module": "namespace",
}
_ALIKE = 0.6
"""Of the words of a run and a list, the part that both have, for the run to be that list."""


def brought_up_to_date(text: str) -> str:
    """A file's text with every list of words as the language has it."""
    return _RUN.sub(_run, text)


def for_helix(query: str) -> str:
    """The query with the capture names of Helix."""
    body = re.sub(r"\A(?:;.*\n)+", "; ../highlights.scm with the capture names of Helix.\n", query)
    return re.sub(r"@([\w.]+)", lambda name: f"@{_HELIX.get(name[1], name[1])}", body)


def made() -> dict[Path, str]:
    """Every file with the text that it has to have."""
    texts = {file: brought_up_to_date(file.read_text(encoding="utf-8")) for file in FILES}
    return {**texts, HELIX: for_helix(texts[FILES[-1]])}


def _run(found: re.Match[str]) -> str:
    run, quote = found.group(), found["quote"] or ""
    words = re.findall(_WORD, run)
    likeness, wanted = max((len({*words} & {*each}) / len({*words} | {*each}), each) for each in word_lists().values())
    if likeness < _ALIKE or {*words} == {*wanted}:
        return run
    kept = [word for word in words if word in wanted]
    between = ", " if "," in run else " "
    separator = between if quote else "|"
    return separator.join(f"{quote}{word}{quote}" for word in dict.fromkeys((*kept, *wanted)))


if __name__ == "__main__":
    old = [file for file, text in made().items() if file.read_text(encoding="utf-8") != text]
    for file in old:
        print(file.relative_to(EDITORS.parent))
        if "--check" not in sys.argv:
            file.write_text(made()[file], encoding="utf-8")
    sys.exit(bool(old and "--check" in sys.argv))
