"""The policy files around an open document: the other open ones, those of the workspace, and what they include.

What is open counts as it is in the editor. Files on disk are read again where their size or time has changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from attrs import define, field, frozen

from policylang.editor.locations import uri_of_path
from policylang.editor.names.occurrences import Occurrence, Occurrences, occurrences
from policylang.editor.state import Document
from policylang.language.diagnostics import Source
from policylang.language.files import SUFFIX, bundled_file, read_source
from policylang.language.loader import PRELUDE
from policylang.language.resources import policies_folder
from policylang.language.syntax import Include

MOST_FILES = 2000
MOST_FOLDERS = 10_000
_SKIPPED = frozenset(("node_modules", "site-packages", "__pycache__"))


@frozen(slots=False, eq=False)
class PolicyText:
    """A policy as it is now: in the editor where it is open, else on disk."""

    uri: str
    source: Source
    path: Path | None
    version: int | None = None
    """Where it is open."""
    bundled: bool = False

    @property
    def key(self) -> str:
        """What it is told by, however it is written."""
        return self.uri if self.path is None else os.path.realpath(self.path)

    @property
    def said(self) -> Occurrences:
        return occurrences(self.source)

    def target(self, include: Include) -> Path | None:
        """The file that an include of this one brings: the prelude is there without one."""
        if include.bundled:
            return None if include.target == PRELUDE else bundled_file(include.target)
        return (Path() if self.path is None else self.path.parent) / include.target

    def has(self, name: str) -> bool:
        return name in self.source.text and bool(self.said.of(name))

    def defines(self, name: str) -> bool:
        return name in self.source.text and any(each.defines for each in self.said.of(name))


@frozen(slots=False)
class PolicyFiles:
    """All of them at one time, by what they are told by."""

    texts: Mapping[str, PolicyText]
    roots: tuple[str, ...]
    """Those that may be loaded by themselves: all but what is there only because another includes it."""
    complete: bool = True
    """False where the workspace holds more files than are looked at."""
    _included: dict[str, tuple[str, ...]] = field(factory=dict)

    def of(self, document: Document) -> PolicyText:
        """The text of an open document."""
        return self.texts[document.uri if document.path is None else os.path.realpath(document.path)]

    def policy_of(self, root: str) -> tuple[PolicyText, ...]:
        """A text with all that it includes, at any depth, in the order in which they come up."""
        if root not in self._included:
            found: dict[str, None] = {}
            pending = [root]
            while pending:
                key = pending.pop()
                text = self.texts.get(key)
                if text is None or key in found:
                    continue
                found[key] = None
                targets = (text.target(include) for include in reversed(_includes(text)))
                pending += [os.path.realpath(target) for target in targets if target is not None]
            self._included[root] = tuple(found)
        return tuple(self.texts[key] for key in self._included[root])

    @property
    def prelude(self) -> PolicyText | None:
        """The groups that every policy knows."""
        return self.texts.get(os.path.realpath(_prelude()))

    def defines(self, root: str, name: str) -> bool:
        """Whether a policy has a ``let`` of this name."""
        return any(text.defines(name) for text in self.policy_of(root))

    def policies_with(self, keys: Iterable[str]) -> tuple[str, ...]:
        """The roots whose policies hold one of these texts."""
        wanted = set(keys)
        return tuple(root for root in self.roots if any(text.key in wanted for text in self.policy_of(root)))

    def texts_of(self, roots: Iterable[str]) -> tuple[PolicyText, ...]:
        """All that some policies hold, each once."""
        return tuple({text.key: text for root in roots for text in self.policy_of(root)}.values())

    def first_definition(self, root: str, name: str) -> tuple[PolicyText, Occurrence] | None:
        """The definition of a name that counts in a policy: the first, one that can be read before others."""
        found = list(self._definitions(root, name))
        return next((each for each in found if each[1].read), found[0] if found else None)

    def _definitions(self, root: str, name: str) -> Iterator[tuple[PolicyText, Occurrence]]:
        """In the order in which they count. A file that comes up again defines nothing that it has not before."""
        seen = {root}
        pending = [(text, iter(text.said.parts)) for text in self.policy_of(root)[:1]]
        while pending:
            text, parts = pending[-1]
            part = next(parts, None)
            if part is None:
                pending.pop()
            elif isinstance(part, Occurrence):
                if part.defines and part.name == name:
                    yield text, part
            elif isinstance(part, Include) and (target := text.target(part)) is not None:
                key = os.path.realpath(target)
                if key in self.texts and key not in seen:
                    seen.add(key)
                    pending.append((self.texts[key], iter(self.texts[key].said.parts)))


@define
class PolicyFolder:
    """Reads the policy files of a workspace, each once for every time that it changes."""

    _read: dict[str, tuple[tuple[int, int], PolicyText | None]] = field(factory=dict)

    def files(self, folders: Iterable[Path], documents: Iterable[Document]) -> PolicyFiles:
        """As they are now. ``folders``: the workspace's; ``documents``: the open ones."""
        texts: dict[str, PolicyText] = {}
        for document in documents:
            bundled = document.path is not None and _is_bundled(document.path)
            text = PolicyText(document.uri, document.source, document.path, document.version, bundled)
            texts[text.key] = text
        tops = tuple(folders)
        paths, complete = _policies_below(tops)
        for path in paths:
            self._take(path, texts, tops)
        roots = tuple(texts)
        self._take(_prelude(), texts, ())
        pending = list(texts.values())
        while pending:
            text = pending.pop()
            targets = (text.target(include) for include in _includes(text))
            pending += filter(None, (self._take(target, texts, tops) for target in targets if target is not None))
        return PolicyFiles(texts, roots, complete)

    def _take(self, path: Path, texts: dict[str, PolicyText], tops: Sequence[Path]) -> PolicyText | None:
        """Put a file there that is not yet; None where it is, or cannot be read."""
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
            text = None
            if isinstance(source, Source):
                text = PolicyText(uri_of_path(path), source, Path(key), bundled=_is_bundled(Path(key)))
            self._read[key] = stamp, text
        read = self._read[key][1]
        if read is not None:
            texts[key] = read
        return read


def _includes(text: PolicyText) -> tuple[Include, ...]:
    return text.said.includes if "include" in text.source.text else ()


def _name_of(path: Path, tops: Sequence[Path]) -> str:
    """What messages call a file: its path from its folder on, where it lies in one of the workspace's."""
    if _is_bundled(path):
        return f"<{path.stem}>"
    plain = Path(os.path.abspath(path))
    around = [top for top in tops if plain.is_relative_to(top)]
    return str(plain.relative_to(max(around, key=lambda top: len(top.parts))) if around else plain)


def _prelude() -> Path:
    return policies_folder() / f"{PRELUDE}{SUFFIX}"


def _is_bundled(path: Path) -> bool:
    return os.path.realpath(path.parent) == os.path.realpath(policies_folder())


def _policies_below(tops: Iterable[Path]) -> tuple[list[Path], bool]:
    """The policy files of some folders, without what tools keep for themselves, and whether these are all."""
    found: list[Path] = []
    walked = chain.from_iterable(map(os.walk, tops))
    for number, (parent, folders, names) in enumerate(walked):
        folders[:] = sorted(each for each in folders if not each.startswith(".") and each not in _SKIPPED)
        found += [Path(parent, name) for name in sorted(names) if name.endswith(SUFFIX)]
        if len(found) > MOST_FILES or number >= MOST_FOLDERS:
            return found[:MOST_FILES], False
    return found, True
