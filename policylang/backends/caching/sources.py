"""The source files that take part in a compile: what the backends import, and what that imports, wherever it says so.

Found by reading the import lines, and the names ``"policylang.module:Name"`` that are imported when they are needed, so
that a new module is among them without being listed anywhere; commands and the renderers that only they use are not. A
line that looks like an import and is none adds a file too many, which costs a compilation, never an answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources.abc import Traversable

_PACKAGE = "policylang"
_ROOTS = ("api", "backends", "integrations")
"""Every module in these begins a compile or is called by one, but for those in :data:`_BEFORE`."""
_BEFORE = frozenset(("api/tune.py", "api/profile_device.py"))
"""What these give is a file, or a policy that was read, and what is decided by either is in the policy."""
_SUFFIX = ".py"
_IMPORT = re.compile(
    rf"^([ \t]*)(?:from[ \t]+({_PACKAGE}[\w.]*)[ \t]+import[ \t]*(\([^)]*\)|.*)|import[ \t]+(.*))", re.M
)
_NAME = re.compile(r"[\w.]+")
_RENDERERS = "report/"
"""What these import when somebody looks at a page takes no part in a compile."""
_IMPORTED_LATER = re.compile(rf'"{_PACKAGE}\.([\w.]+):\w+"')


def acting(package: Traversable) -> dict[str, bytes]:
    """Path in the package to content, in the order of the paths."""
    found: dict[str, bytes] = {}
    pending = [path for root in _ROOTS for path in _modules_below(package / root, root) if path not in _BEFORE]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found[path] = content = package.joinpath(path).read_bytes()
        for module in _imported(content.decode("utf-8", "surrogateescape"), later=not path.startswith(_RENDERERS)):
            pending.extend(each for each in _files_of(module, package) if each not in found)
    return dict(sorted(found.items()))


def _imported(text: str, *, later: bool) -> Iterator[str]:
    """The dotted names that a source imports from the package, without the package's own. ``later``: those too that
    its functions import when they are called."""
    if later:
        yield from _IMPORTED_LATER.findall(text)
    for indent, source, names, whole in _IMPORT.findall(text):
        if indent and not later:
            continue
        if source:
            yield from (f"{source}.{name}".partition(".")[2] for name in _NAME.findall(names))
        else:
            yield from (name.partition(".")[2] for name in _NAME.findall(whole) if name.startswith(f"{_PACKAGE}."))


def _files_of(module: str, package: Traversable) -> Iterator[str]:
    """The files that importing a dotted name runs: of each package on the way, and of the module, if it is one."""
    place, way = package, ""
    yield f"__init__{_SUFFIX}"
    for part in module.split("."):
        if place.joinpath(f"{part}{_SUFFIX}").is_file():
            yield f"{way}{part}{_SUFFIX}"
            return
        place = place / part
        way = f"{way}{part}/"
        if not place.joinpath(f"__init__{_SUFFIX}").is_file():
            return
        yield f"{way}__init__{_SUFFIX}"


def _modules_below(place: Traversable, path: str) -> Iterator[str]:
    if place.is_dir():
        for child in place.iterdir():
            yield from _modules_below(child, f"{path}/{child.name}")
    elif path.endswith(_SUFFIX):
        yield path
