"""What CONTRIBUTING.md says of the package, and the page of the Python API of its public names, is true."""

import enum
import inspect
import re
from collections import defaultdict
from functools import cached_property
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from scripts.documentation.staging import documented

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


API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
NAMES = documented(API)
PUBLIC = (
    "policylang", "policylang.testing", "policylang.integrations.torchtitan",
    "policylang.integrations.torchtitan_eager", "policylang.integrations.transformers",
    "policylang.integrations.lightning", "policylang.integrations.apl_lexer",
)  # fmt: skip
"""The public ones: each has an ``__all__``."""

SOURCES = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "policylang").rglob("*.py")))
CALLED_BY_TORCH = {"Contexts", "PolicyBackend", "PolicyPartitioner", "PolicyPass"}
"""Handed on as they are: who is given one has nothing to ask it."""

OPTIONAL = {
    "torchtitan_eager": "torchtitan",
    "apl_lexer": "pygments",
    "transformers": "transformers",
    "lightning": "lightning",
}


def module_of(name: str) -> Any:
    wanted = OPTIONAL.get(name.rpartition(".")[2])
    if wanted:
        pytest.importorskip(wanted, reason="it is imported by a part of policylang that need not be used")
    return import_module(name)


def thing(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(module_of(module), last)


def test_no_name_is_there_twice_and_each_has_a_sentence() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert len(re.findall(r"^- `policylang\.[\w.]+`: \S", API, flags=re.MULTILINE)) == len(NAMES)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_has_a_place(module: str) -> None:
    assert {f"{module}.{name}" for name in module_of(module).__all__} <= set(NAMES)


def test_every_public_module_is_known_here() -> None:
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in (ROOT / "policylang").rglob("*.py")
        if re.search(r"^__all__ = ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    assert found == {*PUBLIC}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_takes_gives_and_raises(name: str) -> None:
    found = thing(name)
    if not callable(found):
        return  # a figure or a text, of which the line on the page says enough
    assert (inspect.getdoc(found) or "").strip(), "no docstring"
    if inspect.isclass(found):
        undocumented = [each for each, member in own(found) if not inspect.getdoc(member)]
        assert undocumented == []
    else:
        says_it(found)


@pytest.mark.parametrize("name", ["Report", "CheckResult", "Facts", *(name for name in NAMES if ".summary." in name)])
def test_every_figure_that_somebody_is_handed_says_what_it_is(name: str) -> None:
    """Below the field, or in the docstring of the class; a name that says it all is among these."""
    kind = thing(name if "." in name else f"policylang.{name}")
    source, told = inspect.getsource(kind), inspect.getdoc(kind) or ""
    fields = re.findall(r"^    ([a-z]\w*): [^\n]*\n(?!    \"\"\")", source, flags=re.MULTILINE)
    plain = {"names", "audit", "warnings", "groups", "torch_version", "lost_records", "agrees", "notes"}
    assert [each for each in fields if each not in plain and not re.search(rf"\b{each}\b", told)] == []


def own(kind: type) -> list[tuple[str, Any]]:
    """The methods and properties that a class has of its own and shows."""
    shown = [(each, member) for each, member in vars(kind).items() if not each.startswith("_")]
    return [
        (each, member)
        for each, member in shown
        if not isinstance(member, enum.Enum)
        and (inspect.isfunction(member) or isinstance(member, property | cached_property))
    ]


def says_it(function: Any) -> None:
    """In its docstring, or in that of a function which it refers to (``as :func:`load` ``)."""
    doc = inspect.getdoc(function) or ""
    for other in re.findall(r":func:`(?:policylang\.)?(\w+)`", doc):
        doc += inspect.getdoc(getattr(import_module("policylang"), other)) or ""
    assert re.search(r"\b[Rr]aise", doc), "not what it raises"
    parameters = inspect.signature(function).parameters.values()
    told = [each.name for each in parameters if each.kind not in (each.VAR_KEYWORD,)]
    missing = [each for each in told if not re.search(rf"(?<!\w){each}(?!\w)", doc)]
    assert missing in ([], [told[0]]), "not all that it takes; the first may be what the sentence is about"


def test_what_a_public_function_returns_is_on_the_page() -> None:
    """A class of policylang that somebody is handed has its attributes there."""
    functions = [name for name in NAMES if "integrations" not in name and not inspect.isclass(thing(name))]
    said = " ".join(str(inspect.signature(thing(name)).return_annotation) for name in functions)
    ours = {path.group(1) for path in re.finditer(r"^class (\w+)", SOURCES, flags=re.MULTILINE)}
    handed = set(re.findall(r"[A-Z]\w+", said)) & ours
    assert "Report" in handed
    assert handed - {name.rpartition(".")[2] for name in NAMES} == CALLED_BY_TORCH
