"""What CONTRIBUTING.md says of the package is true of it."""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "policylang"
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "__init__"]
ENDINGS = re.compile(r"(ations?|ings?|ions?|ments?|ers?|ors?|ed|es|s|e|y|ies)$")
PER_PATH = {"path"}
"""Every path has a module of this name: it stands for the same thing in each."""


def rows_below(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_room_is_in_the_table() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert {row[0].strip("`/") for row in rows_below("Stages")} == rooms


def test_at_the_root_stand_the_public_names_the_errors_and_nothing_else() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_the_glossary_is_short_and_says_each_word_once() -> None:
    words = [word.strip() for row in rows_below("Words") for word in row[0].split(",")]
    assert len(rows_below("Words")) <= 40
    assert len(words) == len(set(words))


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for name in re.findall(r"^ *class (\w+)[:(]", path.read_text(encoding="utf-8"), flags=re.MULTILINE):
            places[name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_two_modules_or_folders_of_a_room_have_names_that_differ_by_an_ending() -> None:
    found: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path in (*MODULES, *{path.parent for path in MODULES}):
        parts = path.relative_to(PACKAGE).parts
        if len(parts) > 1 and path.stem not in PER_PATH:
            found[parts[0], ENDINGS.sub("", path.stem.rstrip("_"))].append(path)
    alike = {
        (one.stem, other.stem)
        for paths in found.values()
        for one, other in combinations(paths, 2)
        if one.stem != other.stem and one.parent != other and other.parent != one
    }
    assert alike == set()


def test_files_that_it_names_exist() -> None:
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|lark|toml|txt|md))`", PAGE)
    assert len(named) > 20
    assert [name for name in named if not any((root / name).is_file() for root in (PACKAGE, ROOT))] == []
