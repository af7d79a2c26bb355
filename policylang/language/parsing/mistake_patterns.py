"""The words, patterns and replacements that rows of ``common_mistakes.py`` are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from attrs import frozen

from policylang.language.parsing.predicate_tree import MEASURES, PROPERTIES
from policylang.language.parsing.statement_tree import ACTIONS, FIGURES

Replacement = str | Callable[[re.Match[str]], str | Sequence[str]]


@frozen
class Mistake:
    """``replacement``: a text with the pattern's groups in braces, or a function of the match; several where one of
    them is meant. ``help`` in place of "write" and the replacement, with ``{good}`` in it where that is said."""

    pattern: re.Pattern[str]
    replacement: Replacement
    message: str
    help: str | None = None
    code: str | None = None
    """Where it is another than that of the original."""

    def replacements(self, match: re.Match[str]) -> Sequence[str]:
        if isinstance(self.replacement, str):
            return [self.replacement.format(**match.groupdict(default=""))]
        made = self.replacement(match)
        return [made] if isinstance(made, str) else made


ACTION = rf"(?:{'|'.join(sorted(ACTIONS, key=len, reverse=True))})"
VERB = rf"^\s*(?:(?:optional|override)\s+)*{ACTION}"
OFFLOAD = r"\boffload\b"
NAME = r"[A-Za-z_][\w.*]*"
FIGURE = rf"(?:{'|'.join(sorted(FIGURES, key=len, reverse=True))})(?:\s+per\s+block)?"
SUBJECT = rf"(?:{'|'.join(sorted((*MEASURES, *PROPERTIES), key=len, reverse=True))})(?:\[-?\d+\])?"
KIND = r"(?:view|random|multi_output|mutated)"
BLOCK = r"(?:blocks?|layers?)"
WHOLE = r"(?:\s+of)?(?:\s+the)?"
LAST_WORD = r"(?!(?:where|per|in|outside|chain|and|or|except|feeding|fed|from)\b)[A-Za-z_][\w.*{}]*"
LONG_DASH = "‐‑‒–—−"
DASH = rf"\-{LONG_DASH}"
RANGE = rf"(?P<low>\d+)\s*(?:\.{{2,}}|…|[{DASH}:~]|\bto\b|\bthrough\b)\s*(?P<high>\d+)"

ORDINALS = {
    "second": "2nd",
    "third": "3rd",
    "fourth": "4th",
    "fifth": "5th",
    "sixth": "6th",
    "seventh": "7th",
    "eighth": "8th",
    "ninth": "9th",
    "tenth": "10th",
}
NUMBERS = {
    word: str(number)
    for number, word in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)
}
VERBS = {
    **dict.fromkeys(("keep", "store", "cache", "retain", "stash", "remember", "preserve", "saved"), "save"),
    **dict.fromkeys(("checkpoint", "remat", "rematerialize", "rematerialise", "recalculate", "rerun"), "recompute"),
    **dict.fromkeys(("drop", "discard", "forget", "free", "evict", "recomputed", "activation_checkpoint"), "recompute"),
    **dict.fromkeys(("swap", "move", "spill", "offload_to_cpu", "cpu_offload", "offloaded"), "offload"),
    **dict.fromkeys(("ignore", "skip"), "leave"),
}
SIGNS = {
    **dict.fromkeys(("at most", "no more than", "not more than", "up to", "max", "maximum", "within", "=<"), "<="),
    **dict.fromkeys(("under", "below", "less than", "smaller than", "fewer than"), "<"),
    **dict.fromkeys(("at least", "no less than", "not less than", "min", "minimum", "=>"), ">="),
    **dict.fromkeys(("over", "above", "more than", "greater than", "larger than", "bigger than"), ">"),
    **dict.fromkeys(("equal to", "equals", "equal", "is", "eq", ":="), "=="),
}
FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def any_word(words: Sequence[str]) -> str:
    """A pattern of any of them, the longest first, whatever space is between their words."""
    longest = sorted(words, key=len, reverse=True)
    return "(?:" + "|".join(r"\s+".join(map(re.escape, word.split())) for word in longest) + ")"


def looked_up(table: dict[str, str]) -> Replacement:
    return lambda match: table[" ".join(match["bad"].lower().split())]


def hyphenated(match: re.Match[str]) -> str:
    return "-".join(match["bad"].split())


def ordinal(number: int) -> str:
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"


def range_of(match: re.Match[str]) -> str:
    low, high = sorted((int(match["low"]), int(match["high"])))
    return f"{low}..{high}"


def all_in(match: re.Match[str]) -> str:
    if match["low"]:
        return f"everything in blocks {range_of(match)}"
    return f"everything in block {match['number']}" if match["number"] else "everything in block"


def share_written(match: re.Match[str]) -> str:
    word = "last" if match["which"] in ("second", "last") else "first"
    part = " ".join(match["part"].split()).replace(" %", "%")
    part = {"quarter": "25%"}.get(part, part)
    return f"{word} {part} of blocks"


def unquoted(match: re.Match[str]) -> Sequence[str]:
    return f'"{match["text"].strip()}"', match["text"].strip()


def turned_round(match: re.Match[str]) -> str:
    left, subject = match["left"].strip(), match["subject"]
    turned = f"{subject} {FLIPPED[match['sign']]} {left}"
    return turned if match["right"] is None else f"{turned} and {subject} {match['right'].strip()}"


def any_of(match: re.Match[str]) -> str:
    values = re.findall(r"[\w.*]+", match["values"])
    return "(" + " or ".join(f"{match['subject']} == {value}" for value in values) + ")"


def each_block(match: re.Match[str]) -> str:
    return ", ".join(f"{match['what']} in block {number}" for number in re.findall(r"\d+", match["numbers"]))


def alternatives(match: re.Match[str]) -> Sequence[str]:
    globs = [glob.strip() for glob in match["bad"].split(",")]
    if not all(glob.endswith(".*") for glob in globs):
        return [""]  # which is no mend
    return ["{" + ",".join(glob.removesuffix(".*") for glob in globs) + "}.*"]


def sign_of(match: re.Match[str]) -> str:
    words = " ".join(match["bad"].lower().split())
    return SIGNS.get(words) or SIGNS.get(words.removeprefix("is ").removeprefix("of ")) or "<="
