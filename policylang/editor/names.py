"""Where policies define names and use them, and which files they name: of one text, and of the policies around it.

A statement that cannot be read still says words, so that a mistake does not take the name on its own line away.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path

from attrs import define, field, frozen

from policylang.editor.state import Document, uri_of_path
from policylang.language.diagnostics import Source, Span
from policylang.language.files import SUFFIX, bundled_file, read_source
from policylang.language.grammar import words_of
from policylang.language.lexer import FOREIGN_COMMENT, Lexeme
from policylang.language.loader import PRELUDE
from policylang.language.parser import parse_file
from policylang.language.resources import policies_folder
from policylang.language.syntax import Device, Include, Let, Statement, Word
from policylang.language.walk import selector_of, walk

_COMMENT = re.compile(rf"#[^\n]*|{FOREIGN_COMMENT}")
_LINE = re.compile(r"[^;\n]*[^;\s][^;\n]*")
MOST_FILES = 2000
_MOST_FOLDERS = 10_000
_SKIPPED = frozenset(("node_modules", "site-packages", "__pycache__"))
_NO_NAMES_AFTER = frozenset(
    ("IN", "OUTSIDE", "COMPARISON", "POLICY", "OVER", "BLOCKS", "WHERE", "IS", "NOT", "UNDECIDED", "REQUIRES", "DEVICE")
)
"""Words behind which a name is one of a module, a figure or a dimension, in a statement that cannot be read."""


@frozen
class Occurrence:
    """A word of a selector, or the name that a ``let`` defines."""

    name: str
    span: Span
    statement: Span | None = None
    """The ``let`` that defines it here; None for a use."""

    @property
    def defines(self) -> bool:
        return self.statement is not None


@frozen(slots=False)
class Occurrences:
    """``parts`` are in the order of the text: names, and the statements that name files."""

    parts: tuple[Occurrence | Include | Device, ...]

    @cached_property
    def names(self) -> tuple[Occurrence, ...]:
        return tuple(part for part in self.parts if isinstance(part, Occurrence))

    @cached_property
    def includes(self) -> tuple[Include, ...]:
        return tuple(part for part in self.parts if isinstance(part, Include))

    def of(self, name: str) -> tuple[Occurrence, ...]:
        return tuple(each for each in self.names if each.name == name)

    def at(self, offset: int) -> Occurrence | Include | Device | None:
        """The part at an offset, the offset behind its last character included."""
        return next((part for part in self.parts if part.span.start <= offset <= part.span.end), None)


@lru_cache(maxsize=512)
def occurrences(source: Source) -> Occurrences:
    """The occurrences in a text; linear in its length, and cached for the texts asked of last."""
    found: list[Occurrence | Include | Device] = []
    done = 0
    for statement in parse_file(source)[0].statements:
        found += _unread(source, done, statement.span.start)
        found += _read(statement)
        done = statement.span.end
    return Occurrences((*found, *_unread(source, done, len(source.text))))


def _read(statement: Statement) -> Iterator[Occurrence | Include | Device]:
    if isinstance(statement, Include | Device):
        yield statement
    if isinstance(statement, Let):
        span = statement.span
        yield Occurrence(statement.name, words_of(span.source, span.start, span.end)[1].span, span)
    selector = selector_of(statement)
    for part in walk(selector) if selector is not None else ():
        if isinstance(part, Word):
            yield Occurrence(part.text, part.span)


def _unread(source: Source, start: int, end: int) -> Iterator[Occurrence]:
    """The names in unparsable text between two statements, line by line."""
    text = _COMMENT.sub(lambda found: " " * len(found[0]), source.text[start:end])
    for line in _LINE.finditer(text):
        at = start + line.start()
        words = list(_words(Source(source.name, line[0])))
        kinds = ["", *(word.type for word in words), ""]
        for index, word in enumerate(words):
            span, before, after = word.span, kinds[index], kinds[index + 2]
            here = Span(source, at + span.start, at + span.end)
            if word.type == "NAME" and before == "LET":
                yield Occurrence(str(word), here, Span(source, at, start + line.end()))
            elif word.type in ("NAME", "PATH") and before not in _NO_NAMES_AFTER and after != "COMPARISON":
                yield Occurrence(str(word), here)


def _words(line: Source) -> Iterator[Lexeme]:
    """The words of a line, past characters that no word has, as far as an open quote."""
    done = 0
    while done < len(line.text):
        words = words_of(line, done, len(line.text))
        yield from words
        rest = line.text[words[-1].span.end if words else done :].lstrip()
        if rest.startswith('"'):
            return
        done = len(line.text) - len(rest) + 1


# --- the policies around a document ---


@frozen(slots=False, eq=False)
class PolicyText:
    """A policy as it is now: in the editor where it is open, else on disk."""

    uri: str
    source: Source
    path: Path | None

    @property
    def key(self) -> str:
        """Identifies it, however its path is written."""
        return self.uri if self.path is None else os.path.realpath(self.path)

    @property
    def occurrences(self) -> Occurrences:
        return occurrences(self.source)

    @property
    def includes(self) -> list[Path]:
        """The files that it includes; the prelude is there without an include."""
        found = self.occurrences.includes if "include" in self.source.text else ()
        return [path for path in map(self._target, found) if path is not None]

    def _target(self, include: Include) -> Path | None:
        if include.bundled:
            return None if include.target == PRELUDE else bundled_file(include.target)
        return (Path() if self.path is None else self.path.parent) / include.target

    def of(self, name: str) -> tuple[Occurrence, ...]:
        return self.occurrences.of(name) if name in self.source.text else ()

    def definition(self, name: str) -> Occurrence | None:
        return next((each for each in self.of(name) if each.defines), None)


@frozen(slots=False)
class PolicyFiles:
    """The policies at one time by their keys: open documents, those of the workspace, and what these include."""

    texts: Mapping[str, PolicyText]
    roots: tuple[str, ...]
    """The policies that may be loaded by themselves: all but files that are only included."""
    _included: dict[str, tuple[str, ...]] = field(factory=dict)

    def text_of(self, document: Document) -> PolicyText:
        return self.texts[_key(document)]

    def policy_of(self, root: str) -> tuple[PolicyText, ...]:
        """A text with all that it includes, at any depth, in the order in which they come up."""
        if root not in self._included:
            found: dict[str, None] = {}
            pending = [root]
            while pending:
                key = pending.pop()
                if key in self.texts and key not in found:
                    found[key] = None
                    pending += map(os.path.realpath, reversed(self.texts[key].includes))
            self._included[root] = tuple(found)
        return tuple(self.texts[key] for key in self._included[root])

    @property
    def prelude(self) -> PolicyText | None:
        """The groups that every policy knows."""
        return self.texts.get(os.path.realpath(_prelude()))

    def defines(self, root: str, name: str) -> bool:
        """True if a policy has a ``let`` of this name."""
        return any(text.definition(name) for text in self.policy_of(root))

    def policies_with(self, keys: Iterable[str]) -> tuple[str, ...]:
        """The roots whose policies hold one of these texts."""
        wanted = set(keys)
        return tuple(root for root in self.roots if any(text.key in wanted for text in self.policy_of(root)))

    def texts_of(self, roots: Iterable[str]) -> tuple[PolicyText, ...]:
        """All that some policies hold, each once."""
        return tuple({text.key: text for root in roots for text in self.policy_of(root)}.values())


@define
class PolicyFolder:
    """Reads the policy files of a workspace; each again where its size or time has changed."""

    _read: dict[str, tuple[tuple[int, int], PolicyText | None]] = field(factory=dict)

    def files(self, folders: Iterable[Path], documents: Iterable[Document]) -> PolicyFiles:
        """Read the policies of the workspace's folders as they are now, and the open documents."""
        texts = {_key(each): PolicyText(each.uri, each.source, each.path) for each in documents}
        tops = tuple(folders)
        for path in _policies_below(tops):
            self._take(path, texts, tops)
        roots = tuple(texts)
        self._take(_prelude(), texts, ())
        pending = list(texts.values())
        while pending:
            found = (self._take(target, texts, tops) for target in pending.pop().includes)
            pending += [text for text in found if text is not None]
        return PolicyFiles(texts, roots)

    def _take(self, path: Path, texts: dict[str, PolicyText], tops: Sequence[Path]) -> PolicyText | None:
        """Add a file that is not among the texts yet; None where it is, or cannot be read."""
        key = os.path.realpath(path)
        if key in texts:
            return None
        try:
            found = os.stat(key)
        except (OSError, ValueError):
            return None
        stamp = found.st_mtime_ns, found.st_size
        if key not in self._read or self._read[key][0] != stamp:
            source = read_source(Path(key), _name_of(path, tops))
            text = PolicyText(uri_of_path(path), source, Path(key)) if isinstance(source, Source) else None
            self._read[key] = stamp, text
        read = self._read[key][1]
        if read is not None:
            texts[key] = read
        return read


def is_bundled(path: Path) -> bool:
    return os.path.realpath(path.parent) == os.path.realpath(policies_folder())


def _key(document: Document) -> str:
    return document.uri if document.path is None else os.path.realpath(document.path)


def _name_of(path: Path, tops: Sequence[Path]) -> str:
    """The name of a file in messages: its path from its folder of the workspace on."""
    if is_bundled(path):
        return f"<{path.stem}>"
    plain = Path(os.path.abspath(path))
    around = [top for top in tops if plain.is_relative_to(top)]
    return str(plain.relative_to(max(around, key=lambda top: len(top.parts))) if around else plain)


def _prelude() -> Path:
    return policies_folder() / f"{PRELUDE}{SUFFIX}"


def _policies_below(tops: Iterable[Path]) -> list[Path]:
    """The first policy files of some folders, without what tools keep for themselves."""
    found: list[Path] = []
    for number, (parent, folders, names) in enumerate(chain.from_iterable(map(os.walk, tops))):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in _SKIPPED)
        found += [Path(parent, name) for name in sorted(names) if name.endswith(SUFFIX)]
        if len(found) > MOST_FILES or number >= _MOST_FOLDERS:
            break
    return found[:MOST_FILES]
