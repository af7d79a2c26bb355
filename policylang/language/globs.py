"""Globs over module paths and over names.

A path glob is matched whole components at a time and, as in ``.gitignore``, anywhere in the path unless it starts
with ``/``. In a component ``*`` is any run of characters, ``?`` one character, ``{a,b}`` either and ``[0-3]`` one of a
range; a component ``**`` is any number of components (at the end of a glob at least one). A name glob is one such
component. Case matters. Matching takes time linear in the path for each component of the glob, however odd that is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product

_PIECE = re.compile(r"\{([^{}]*)\}|\[([^\[\]]*)\]|(\*+)|(\?)|([^*?{}\[\]]+)|(.)", re.DOTALL)
_RANGE = re.compile(r"!?[\w-]+")
_MAGIC = frozenset("*?{}[]")
MAX_ALTERNATIVES = 256


class NameGlob:
    """A glob over one name: ``*attention*``, ``{mm,bmm}``."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._match = _compiled(pattern)

    def matches(self, name: str) -> bool:
        return name == self.pattern if self._match is None else self._match.fullmatch(name) is not None


class PathGlob:
    """A glob over dotted module paths: ``layers.*``, ``/model.layers.{0,1}``, ``**.attention``."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._anchored = pattern.startswith("/")
        parts = split_outside_braces(pattern.removeprefix("/"))
        self._parts = tuple(None if part == "**" else NameGlob(part) for part in parts)
        self._end = len(self._parts)
        self._start = self._closure({0})

    def outermost(self, path: str) -> str | None:
        """The shortest prefix of the path, in whole components, that the glob matches; None where none does."""
        lengths = (length for length, states in enumerate(self._along(path)) if self._end in states)
        length = next(lengths, None)
        return None if length is None else ".".join(path.split(".")[:length])

    def covers(self, path: str) -> bool:
        """True if the path is, or is inside, a module that matches."""
        return self.outermost(path) is not None

    def progress(self, path: str) -> frozenset[int] | None:
        """How much of the glob has matched at the end of a path; None where it covers it. Paths with the same progress
        are treated alike, and so are paths inside them."""
        return None if self.covers(path) else [*self._along(path)][-1]

    def matches(self, path: str) -> bool:
        """True if the glob matches the whole path."""
        return self._end in [*self._along(path)][-1]

    def _along(self, path: str) -> Iterator[frozenset[int]]:
        """How much of the glob has matched before the path and after each of its components."""
        states = self._start
        yield states
        for component in path.split(".") if path else []:
            states = self._step(states, component)
            if not self._anchored:
                states |= self._start
            yield states

    def _step(self, states: frozenset[int], component: str) -> frozenset[int]:
        reached: set[int] = set()
        for state in states:
            if state == self._end:
                continue
            part = self._parts[state]
            if part is None:
                reached.add(state)
                if state == self._end - 1:
                    reached.add(self._end)
            elif part.matches(component):
                reached.add(state + 1)
        return self._closure(reached)

    def _closure(self, states: set[int]) -> frozenset[int]:
        """Adds every state that is reached over an empty ``**``."""
        for state in sorted(states):
            at = state
            while at < self._end - 1 and self._parts[at] is None:
                at += 1
                states.add(at)
        return frozenset(states)


@lru_cache(maxsize=256)
def covering(glob: str) -> Callable[[str], bool]:
    """:meth:`PathGlob.covers` of a glob, remembered by path: thousands of nodes are in few modules."""
    return lru_cache(maxsize=65_536)(PathGlob(glob).covers)


def split_outside_braces(text: str) -> list[str]:
    """The text split at its dots, those inside ``{}`` and ``[]`` left alone."""
    parts, start, depth = [], 0, 0
    for index, character in enumerate(text):
        if character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
        elif character == "." and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return parts


def is_magic(pattern: str) -> bool:
    """True if a name glob can match more than one name."""
    return not _MAGIC.isdisjoint(pattern)


def path_glob_problem(pattern: str) -> str | None:
    """The problem of a path glob, as the end of a sentence; None if it is well formed."""
    body = pattern.removeprefix("/")
    if not body:
        return "names no module"
    for part in split_outside_braces(body):
        if not part:
            return "has an empty component"
        if part != "**":
            problem = name_glob_problem(part)
            if problem:
                return problem
    return None


def name_glob_problem(pattern: str) -> str | None:
    """The problem of a name glob, as the end of a sentence; None if it is well formed."""
    alternatives = 1
    for match in _PIECE.finditer(pattern):
        braced, ranged, stars, _, literal, stray = match.groups()
        if stars and len(stars) > 1:
            return "has a `**` that is not alone between dots"
        if stray:
            return f"has a `{stray}` without its other half"
        if literal and ("/" in literal or "," in literal):
            return f"has a `{'/' if '/' in literal else ','}` inside it"
        if ranged is not None and _range_problem(ranged):
            return f"has a range `[{ranged}]` that holds nothing"
        if braced is not None:
            if not _MAGIC.union(".").isdisjoint(braced):
                return "has dots or globs inside its braces"
            choices = [choice.strip() for choice in braced.split(",")]
            if not all(choices):
                return "has an empty choice in its braces"
            alternatives *= len(choices)
            if alternatives > MAX_ALTERNATIVES:
                return f"stands for more than {MAX_ALTERNATIVES} alternatives"
    return None


def _range_problem(body: str) -> bool:
    try:
        re.compile(f"[{_range(body)}]")
    except re.error:
        return True
    return not _RANGE.fullmatch(body)


def _range(body: str) -> str:
    return ("^" if body.startswith("!") else "") + body.removeprefix("!").replace("\\", "")


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    """The glob as a regular expression that never backtracks; None for a plain name."""
    if not is_magic(pattern):
        return None
    pieces: list[list[str]] = []
    for match in _PIECE.finditer(pattern):
        braced, ranged, stars, single, literal, stray = match.groups()
        if braced is not None:
            pieces.append([re.escape(choice.strip()) for choice in braced.split(",")])
        elif ranged is not None:
            pieces.append(["\\[" + re.escape(ranged) + "\\]" if _range_problem(ranged) else f"[{_range(ranged)}]"])
        else:
            pieces.append(["*" if stars else "." if single else re.escape(literal or stray)])
    return re.compile("|".join(_sequence(choice) for choice in product(*pieces)), re.DOTALL)


def _sequence(pieces: tuple[str, ...]) -> str:
    """One alternative: each star but the last takes the first place where what follows it fits, and keeps it."""
    texts = [""]
    for piece in pieces:
        if piece == "*":
            texts.append("")
        else:
            texts[-1] += piece
    if len(texts) == 1:
        return texts[0]
    middle = "".join(f"(?>.*?{text})" for text in texts[1:-1] if text)
    return f"{texts[0]}{middle}.*{texts[-1]}"
