"""Reads recorded graphs, JSON that ``docs/snapshots.md`` describes, as facts.

The graph is rebuilt as an FX graph, so that its facts are collected as those of a live one are. An operator that this
torch does not have counts as one that reads its arguments and returns new tensors. No text of a recording is run.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from attrs import evolve

from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts, Group, Mesh
from policylang.graph.files.rebuild import MalformedError, rebuilt
from policylang.graph.reading.collect import collect
from policylang.graph.snapshot import (
    MOST_BYTES,
    MOST_NODES,
    TOO_LARGE,
    UNREADABLE,
    DamagedError,
    check_facts,
    graph_error,
)
from policylang.language.files import reason_of

NOT_RECORDED = "APL357"
_GZIP = b"\x1f\x8b"
_UNPACKED, _ANY_BYTES = 128, 1 << 23
"""Bytes for each byte of a file that is packed, and of any: recordings unpack to some twenty times their size."""
_ANY_NODES = 1 << 14
"""Beside one for each byte of the file."""
_FIELDS = ("name", "op", "target", "args", "kwargs", "val", "meta")


def recorded_facts(path: str | os.PathLike[str]) -> Facts:
    """The facts of a recorded graph, ``.json`` or ``.json.gz``. Needs torch.

    Raises ``PolicyGraphError`` for a file that cannot be read, is no recording, or is too large.
    """
    name = os.fsdecode(path)
    try:
        data, size = _content(path, name)
        recording = _parsed(data)
        del data
        nodes = recording.get("nodes")
        if isinstance(nodes, list) and len(nodes) > min(MOST_NODES, _ANY_NODES + size):
            raise _too_large(name, f"its {size:,} bytes hold {len(nodes):,} nodes")
        return facts_of_recording(recording)
    except MalformedError as error:
        raise graph_error(NOT_RECORDED, f"`{name}` is not a recorded graph: {error}") from None


def facts_of_recording(recording: Mapping[str, Any]) -> Facts:
    """The same, for what the file holds. Raises :class:`MalformedError`."""
    graph = rebuilt(_rows(recording))
    mesh = _mesh(recording.get("mesh"))
    groups = _groups(recording.get("groups") or {}, mesh)
    facts = collect(graph, groups=groups)
    groups = {name: groups.get(name, Group(name, (), 0)) for name in facts.groups}
    facts = evolve(facts, groups=groups, meshes=() if mesh is None else (mesh,), rank=None)  # none of this process's
    try:
        check_facts(facts)
    except DamagedError as error:
        raise MalformedError(str(error)) from None
    return facts


def _rows(recording: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fields of each node, by name."""
    fields, nodes = recording.get("fields"), recording.get("nodes")
    if not isinstance(fields, list) or not isinstance(nodes, list):
        raise MalformedError("it has no `fields` and `nodes`")
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise MalformedError(f"its nodes have no `{missing[0]}`")
    found = []
    for number, node in enumerate(nodes):
        if not isinstance(node, list) or len(node) != len(fields):
            raise MalformedError(f"node {number} is not a list of {len(fields)} fields")
        found.append(dict(zip(fields, node, strict=True)))
    return found


def _mesh(recorded: Any) -> Mesh | None:
    if recorded is None:
        return None
    dims, shape = (recorded.get("dims"), recorded.get("shape")) if isinstance(recorded, dict) else (None, None)
    if not isinstance(dims, list) or not isinstance(shape, list) or len(dims) != len(shape):
        raise MalformedError("its `mesh` is not `dims` and `shape`")
    if not all(isinstance(dim, str) for dim in dims) or not all(type(size) is int and size > 0 for size in shape):
        raise MalformedError("its `mesh` is not names and sizes of dimensions")
    if prod(shape) > 1 << 20:
        raise MalformedError("its `mesh` has more than a million ranks")
    return Mesh(tuple(dims), tuple(shape), tuple(range(prod(shape))))


def _groups(recorded: Any, mesh: Mesh | None) -> dict[str, Group]:
    if not isinstance(recorded, dict):
        raise MalformedError("its `groups` are not lists of ranks by name")
    groups = {}
    for name, ranks in recorded.items():
        if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise MalformedError(f"its group `{name}` is not a list of ranks")
        groups[name] = Group(name, tuple(ranks), len(ranks), _dim(ranks, mesh))
    return groups


def _dim(ranks: Sequence[int], mesh: Mesh | None) -> str | None:
    """The dimension of the mesh that a group runs along."""
    if mesh is None or not ranks:
        return None
    for position, (dim, size) in enumerate(zip(mesh.dims, mesh.shape, strict=True)):
        step = prod(mesh.shape[position + 1 :])
        start = ranks[0]
        along = list(range(start, start + size * step, step))
        if start // step % size == 0 and list(ranks) == along:
            return dim
    return None


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedError("it is not JSON") from None
    if not isinstance(found, dict):
        raise MalformedError("it is not a JSON object")
    return found


def _content(path: str | os.PathLike[str], name: str) -> tuple[bytes, int]:
    """The JSON, unpacked if it is gzipped, and never more than the limit; and the size of the file."""
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            size = os.fstat(file.fileno()).st_size
            most = min(MOST_BYTES, _ANY_BYTES + _UNPACKED * size) if packed else MOST_BYTES
            data: bytes = gzip.GzipFile(fileobj=file).read(most + 1) if packed else file.read(most + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise MalformedError("it cannot be unpacked") from None
    except (OSError, ValueError) as error:
        raise graph_error(UNREADABLE, f"`{name}` cannot be read: {reason_of(error)}") from None
    if len(data) > most:
        raise _too_large(name, f"its {size:,} bytes hold more than {most:,} bytes of JSON")
    return data, size


def _too_large(name: str, reason: str) -> PolicyGraphError:
    return graph_error(TOO_LARGE, f"`{name}` is larger than a recorded graph can be: {reason}")
