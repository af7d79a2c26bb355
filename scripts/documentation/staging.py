"""Lays out what Sphinx reads: the pages under ``docs/``, with links that hold in the site as they do in the repository.

Pages are written for the repository's own view of Markdown. Three things are different in the site, and made here, so
that the pages need no marks for it:

- a link to a file that is no page (a policy, an example) leads to a page that shows the file;
- the navigation is what ``docs/index.md`` lists, heading by heading;
- a line of ``docs/api.md`` that begins with a name of the package becomes what its docstring says.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

_FENCED = r"^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)`*[^\S\n]*$"
_CODE = r"(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)"
_TARGET = r"(?:(?<=\]\()(?P<target>[^()\s]+)(?=\))|(?<=^\[\w\]: )(?P<defined>\S+))"
_PIECES = re.compile(f"{_FENCED}|{_CODE}|{_TARGET}", re.MULTILINE | re.DOTALL)
_LISTED = re.compile(r"^- \[([^\]]+)\]\(([^)#\s]+\.md)\)", re.MULTILINE)
_DOCUMENTED = re.compile(r"^- `(policylang\.[\w.]+)`", re.MULTILINE)
_LANGUAGES = {".apl": "apl", ".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
_LANGUAGES |= {".md": "markdown", ".sh": "bash"}
_IMAGES = {".png", ".svg", ".jpg", ".gif"}
_APART = "---\norphan: true\n---\n\n"
"""Of a page that is linked and stands in no navigation: each page of the site carries it, and there are 150 codes."""
_OF_ANOTHER_LIBRARY = {"policylang.integrations.apl_lexer.PolicyLexer"}
"""Classes whose attributes are what that library asks for, and documents."""
_LONGEST_SHOWN = 200_000  # bytes


class Staging:
    """The folder that Sphinx reads, being filled with the pages of the repository at ``root``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.docs, self.folder = root, root / "docs", folder
        self.index, codes = self.docs / "index.md", self.docs / "codes" / "README.md"
        self.pages = pages(root)
        self.codes = {codes.parent / page for _, page in listed(codes.read_text(encoding="utf-8"))}
        self.shown: set[Path] = set()
        self.written: set[Path] = set()

    def fill(self) -> None:
        """Write every page, and every file that one of them leads to. Unchanged files keep their time of change."""
        for page, place in self.pages.items():
            self.write(place, self.in_the_site(page))
        for left in set(filter(Path.is_file, self.folder.rglob("*"))) - self.written:
            left.unlink()

    def write(self, place: str, text: str) -> None:
        path = self.folder / place
        self.written.add(path)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def in_the_site(self, page: Path) -> str:
        text = page.read_text(encoding="utf-8")
        trees = [self.tree(page, *section) for section in navigation(text)] if page == self.index else []
        if page == self.docs / "api.md":
            text = _DOCUMENTED.sub(lambda found: _directive(found[1]), _without_leads(text))
        written = _PIECES.sub(lambda piece: self.piece(page, piece), text)
        return "".join([_APART if page in self.codes else "", written, *trees])

    def tree(self, page: Path, caption: str, entries: list[tuple[str, str]]) -> str:
        lines = [f"{title} <{self.place(page, target)}>" for title, target in entries]
        return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```", ""])

    def piece(self, page: Path, piece: re.Match[str]) -> str:
        target = piece["target"] or piece["defined"]
        return piece[0] if target is None else self.place(page, target)

    def place(self, page: Path, target: str) -> str:
        """Where a link of a page leads in the site. What leads nowhere is left as it is, for Sphinx to complain of."""
        name, mark, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return target
        path = Path(os.path.normpath(page.parent / name))
        if path == self.root / "policies" and self.docs / "policies.md" in self.pages:
            path = self.docs / "policies.md"
        index = next((path / each for each in ("README.md", "index.md") if path / each in self.pages), path)
        if index in self.pages:
            return f"/{self.pages[index]}{mark}{anchor}"
        if not path.is_relative_to(self.root) or not path.exists():
            return target
        return self.show(path)

    def show(self, path: Path) -> str:
        """The page that shows a file, or lists a folder, of the repository."""
        name = path.relative_to(self.root).as_posix()
        if path.suffix in _IMAGES:
            self.copy(path, name)
            return f"/{name}"
        place = f"repository/{name}{'/index' if path.is_dir() else ''}.md"
        if path not in self.shown:
            self.shown.add(path)
            self.write(place, f"{_APART}# {name}\n\n{self.content(path)}\n")
        return f"/{place}"

    def content(self, path: Path) -> str:
        if path.is_dir():
            inside = [each for each in sorted(path.iterdir()) if each.is_file() and not each.name.startswith("__")]
            return "\n".join(f"- [`{each.name}`]({self.show(each)})" for each in inside)
        try:
            text = path.read_text(encoding="utf-8") if path.stat().st_size <= _LONGEST_SHOWN else None
        except UnicodeDecodeError:
            text = None
        if text is None:
            return f"{path.stat().st_size} bytes, not shown here."
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text)), 3)
        return f"{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}"

    def copy(self, path: Path, place: str) -> None:
        self.written.add(self.folder / place)
        (self.folder / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, self.folder / place)


def pages(root: Path) -> dict[Path, str]:
    """The Markdown files that are pages of the site, and the place of each there."""
    docs = root / "docs"
    found = {path: path.relative_to(docs).as_posix() for path in sorted(docs.rglob("*.md"))}
    found |= {docs / "codes" / "README.md": "codes/index.md"}
    beside = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
    return found | {root / name: name.lower() for name in beside if (root / name).is_file()}


def navigation(index: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The sections of the front page, each with the pages it lists: a title and a path."""
    for section in index.split("\n## ")[1:]:
        heading, _, rest = section.partition("\n")
        if entries := listed(rest):
            yield heading.strip(), entries


def listed(text: str) -> list[tuple[str, str]]:
    """The pages that the lists of a text name: title and path, without what has an anchor."""
    return _LISTED.findall(text)


def documented(text: str) -> list[str]:
    """The names that ``docs/api.md`` lists."""
    return _DOCUMENTED.findall(text)


def _without_leads(text: str) -> str:
    """The list of names without what is said behind each: in the site the docstring says it."""
    return re.sub(r"^(- `policylang\.[\w.]+`)(?:[^\n]*(?:\n[ ]{2,}\S[^\n]*)*)", r"\1", text, flags=re.MULTILINE)


def _directive(name: str) -> str:
    last = name.rpartition(".")[2]
    if last.endswith(("Error", "Warning")):
        kind = "autoexception"
    elif last.startswith("__"):
        kind = "autodata"
    else:
        kind = "autoclass" if last[0].isupper() else "autofunction"
    members = "\n   :no-members:" if name in _OF_ANOTHER_LIBRARY else ""
    return f"\n```{{eval-rst}}\n.. {kind}:: {name}{members}\n```\n"
