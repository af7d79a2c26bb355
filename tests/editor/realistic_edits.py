"""Texts as they come while a policy is written: typed by the character, misspelt, mended, broken and taken back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

_WORD = re.compile(r"[A-Za-z_]{4,}")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_TYPED = (
    "save attention in block",
    "recompute every 2nd mm per block",
    "# a comment: → 😀",
    "let product = mm, bmm",
    "save first 3 add where bytes > 64 MiB",
    "optional save topk",
    "expect saved <= 1 GiB",
    "must_recompute chain through all_gather where from parameter",
)


def edits(start: str, others: Sequence[str], sound: Callable[[str], bool], random: Random) -> Iterator[str]:
    """Without end, each text one edit from the one before; ``others`` are policies to paste a rule from.

    What breaks a text is more often than not taken back, as people do; ``sound`` says whether one can be read.
    """
    text = start
    kinds = (_type, _type, _delete_line, _misspell, _add_optional, _change_number, _break_parentheses, _paste)
    while True:
        kind = random.choice(kinds)
        before = text
        for text in kind(before, others, random):
            yield text
        if text != before and random.random() < (0.3 if sound(text) else 0.8):
            text = before if sound(before) else start
            yield text


def _type(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    """A new line: one of its words character by character, what is before it and behind it at once."""
    lines = text.split("\n")
    at = random.randrange(len(lines) + 1)
    typed = random.choice(_TYPED)
    word = random.choice(list(re.finditer(r"\S+", typed)))
    for length in (*range(word.start() + 1, word.end() + 1), len(typed)):
        yield "\n".join([*lines[:at], typed[:length], *lines[at:]])


def _delete_line(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    lines = text.split("\n")
    del lines[random.randrange(len(lines))]
    yield "\n".join(lines)


def _misspell(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    """Two letters of a word swapped."""
    if words := list(_WORD.finditer(text)):
        word = random.choice(words)
        at = random.randrange(word.start(), word.end() - 1)
        yield text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def _add_optional(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    lines = text.split("\n")
    if rules := [at for at, line in enumerate(lines) if line.startswith(("save", "recompute", "must_", "prefer_"))]:
        at = random.choice(rules)
        lines[at] = f"optional {lines[at]}"
        yield "\n".join(lines)


def _change_number(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    if numbers := list(_NUMBER.finditer(text)):
        number = random.choice(numbers)
        yield f"{text[: number.start()]}{random.choice([0, 1, 2, 7, 4096])}{text[number.end() :]}"


def _break_parentheses(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    if places := [at for at, character in enumerate(text) if character in "(){}"]:
        at = random.choice(places)
        yield text[:at] + text[at + 1 :]
    else:
        at = random.randrange(len(text) + 1)
        yield text[:at] + random.choice("()") + text[at:]


def _paste(text: str, others: Sequence[str], random: Random) -> Iterator[str]:
    """A line of another policy."""
    source = [line for line in random.choice(others).split("\n") if line and not line.startswith(("#", "policy"))]
    lines = text.split("\n")
    lines.insert(random.randrange(len(lines) + 1), random.choice(source))
    yield "\n".join(lines)
