"""Keys of compiled graphs, the source files they cover, and what is stored beside Inductor's caches.

Inductor's caches key a graph by its code and its inputs. A policy also reads module paths and annotations, so these
enter the key of the partitioner, or a model whose modules were renamed would be given the decisions of the old one.

On a cache hit no partitioner runs, so there would be no plan to check and nothing to report. The cache sidecar, a small
JSON file named by :func:`sidecar_key`, has what was decided. Losing one costs a compilation, never an answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from policylang.backends import runtime
from policylang.graph import marks
from policylang.language.diagnostics import CODES
from policylang.language.files import write_whole
from policylang.language.syntax import Policy
from policylang.operators.work import registered_formulas
from policylang.planning.plan import digest_of, policy_text
from policylang.torch_compat import compilers, distributed, graphs

_PACKAGE = "policylang"
_ROOTS = ("api", "backends", "integrations")
"""Every module in these begins a compile or is called by one, but for those in :data:`_BEFORE`."""
_BEFORE = frozenset(("api/fit.py", "api/tune.py", "api/profile_device.py", "api/watch.py"))
"""These return a file or a policy, whose decisions are in the policy, or measure what others do."""
_SUFFIX = ".py"
_IMPORT = re.compile(
    rf"^([ \t]*)(?:from[ \t]+({_PACKAGE}[\w.]*)[ \t]+import[ \t]*(\([^)]*\)|.*)|import[ \t]+(.*))", re.M
)
_NAME = re.compile(r"[\w.]+")
_RENDERERS = "report/"  # imports in a function that renders a page take no part in a compile
_IMPORTED_LATER = re.compile(rf'"{_PACKAGE}\.([\w.]+):\w+"')


def acting_sources(package: Traversable) -> dict[str, bytes]:
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


def policy_key(policy: Policy, *, root: str) -> str:
    """Hex SHA-256 over the policy's resolved text, the options, and the source of everything that acts on them."""
    return digest_of(("policy", code_digest(), root, policy_text(policy)))


@cache
def code_digest() -> str:
    """Over the sources that decide what a policy does to a graph, the language's version, and what stops a compile."""
    found = acting_sources(files("policylang"))
    words = [word for path, content in found.items() for word in (path, hashlib.sha256(content).hexdigest())]
    words += [f"{code} {CODES[code].severity.value}" for code in sorted(CODES)]
    return digest_of(words)


def context_of(graph: fx.GraphModule | Iterable[fx.Graph]) -> str:
    """Over what a policy may read of Dynamo's graph, and of those nested in it, that is not in their code."""
    words = []
    graphs = (module.graph for module in _modules(graph)) if isinstance(graph, fx.GraphModule) else graph
    for node in (node for each in graphs for node in each.nodes):
        words.append("|".join(str(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()))
        words.append(repr(sorted((str(name), repr(value)) for name, value in marks.custom(node.meta).items())))
    return digest_of(words)


def groups_key(policy: Policy) -> str:
    """Over the process groups around, if the policy rewrites collectives: no graph has their ranks."""
    return digest_of([runtime.groups_around()]) if policy.rewrites else ""


def formulas_key() -> str:
    """Over the FLOP formulas that the program has registered: decisions and figures go by them."""
    registered = registered_formulas()
    return digest_of(registered) if registered else ""


def sidecar_key(key: str, graph: fx.GraphModule, inputs: Sequence[Any]) -> str:
    """Over everything that decides which compiled graph Inductor would take from its caches; ``key`` is the
    partitioner's. Keys differ between ranks, since a sidecar names process groups. Symbolic sizes count by name."""
    words = [key, torch.__version__, str(torch.is_grad_enabled()), distributed.place_among_ranks()]
    words += (module.code for module in _modules(graph))
    words += (_input_word(value) for value in inputs)
    for device in sorted({"cpu"} | {value.device.type for value in inputs if isinstance(value, torch.Tensor)}):
        if torch.is_autocast_enabled(device):
            words.append(f"autocast {device} {torch.get_autocast_dtype(device)}")
    words += compilers.settings_lines("inductor", compilers.inductor_settings())
    words += compilers.settings_lines("functorch", graphs.functorch_settings())
    return digest_of(words)


def _modules(graph: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph and those nested in it, in a fixed order."""
    return (module for _, module in graph.named_modules() if isinstance(module, fx.GraphModule))


def _input_word(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value}"
    strides = tuple(map(str, value.stride())) if value.layout is torch.strided else ()
    sizes = tuple(map(str, value.shape))
    kind = type(value).__name__
    return f"{kind} {value.dtype} {value.device} {sizes} {strides} {value.requires_grad}"


_SIDECAR_FORMAT = 1


def write_sidecar(key: str, content: dict[str, Any]) -> bool:
    """Store a sidecar; False where the folder does not take it (read-only, full)."""
    whole = {"format": _SIDECAR_FORMAT, "key": key, "content": content}
    text = json.dumps(whole, separators=(",", ":"), sort_keys=True)
    path = _sidecar_path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
    except OSError:
        return False
    return True


def read_sidecar(key: str) -> dict[str, Any] | None:
    """The stored content; None where there is none that can be read and is about this graph."""
    try:
        found = json.loads(_sidecar_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or (found.get("format"), found.get("key")) != (_SIDECAR_FORMAT, key):
        return None
    content = found.get("content")
    return content if isinstance(content, dict) else None


def _sidecar_path(key: str) -> Path:
    """Spread over folders, as Inductor's caches are."""
    return Path(compilers.inductor_cache_folder()) / "policylang" / key[:2] / f"{key}.json"
