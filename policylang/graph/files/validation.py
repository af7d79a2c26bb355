"""Checks of facts that come from a file: planning relies on them, and a file may hold anything.

A column is checked by its distinct values, which are few; what ties rows to each other is checked row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from policylang.graph.facts import FLAGS, Facts, GraphKind, Group, InputKind, LostMarker, Mesh, Phase
from policylang.graph.files.plain import DamagedError

_ALL_FLAGS = sum(FLAGS.values())
_LARGEST = 1 << 63
_MOST_DIMENSIONS = 256
_MOST_RANKS = 1 << 20


def _is_text(value: Any) -> bool:
    return type(value) is str and value.isprintable()


def _is_amount(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_sizes(value: Any) -> bool:
    return type(value) is tuple and len(value) <= _MOST_DIMENSIONS and all(type(size) is int for size in value)


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is_names(value: Any) -> bool:
    return type(value) is tuple and all(map(_is_text, value))


def _is_one_of(kind: type, known: Iterable[Any]) -> Callable[[Any], bool]:
    """Of exactly this type: ``True`` is no number."""
    among = frozenset(known)
    return lambda value: type(value) is kind and value in among


COLUMNS: Mapping[str, Callable[[Any], bool]] = {
    "ops": _is_one_of(str, ("placeholder", "get_attr", "call_function", "output")),
    "targets": _is_text,
    "phases": _is_one_of(int, map(int, Phase)),
    "modules": _is_text,
    "ac_regions": _or_none(lambda value: type(value) is int),
    "user_tags": _or_none(_is_text),
    "flags": lambda value: _is_amount(value) and value <= _ALL_FLAGS,
    "bytes": _is_amount,
    "numel": _is_amount,
    "shapes": _or_none(_is_sizes),
    "strides": _or_none(_is_sizes),
    "dtypes": _is_text,
    "devices": _is_text,
    "flops": _is_amount,
    "input_kinds": _is_one_of(int, map(int, InputKind)),
    "input_names": _is_text,
    "group_names": _is_text,
    "annotations": _is_names,
    "uncounted": _is_text,
    "data_sizes": lambda value: value == () or (_is_sizes(value) and len(value) == 3 and min(value) >= -1),
}
"""What a value of each column may be; names and columns of rows are checked where they are read."""


def check_document(found: Mapping[str, Any]) -> None:
    """What is said of the whole graph. Raises :class:`DamagedError`."""
    for name, check in DOCUMENT.items():
        if not check(found[name]):
            raise DamagedError(f"what it says as `{name}` cannot be")


def check_columns(facts: Facts) -> None:
    """Facts that did not come from a snapshot, as one would be read. Raises :class:`DamagedError`."""
    for name, check in COLUMNS.items():
        if not all(map(check, set(getattr(facts, name)))):
            raise DamagedError(f"its column `{name}` holds what cannot be there")
    check_document({name: getattr(facts, name) for name in DOCUMENT} | {"kind": facts.kind.value})
    check_facts(facts)


def check_facts(facts: Facts) -> None:
    """What ties rows to each other. Raises :class:`DamagedError`."""
    owners = facts.owners
    for row, owner in enumerate(owners):
        if owner > row or owners[owner] != owner:
            raise DamagedError("its column `owners` has a node share the decision of one that shares another's")
    called = {target for op, target in zip(facts.ops, facts.targets, strict=True) if op == "call_function"}
    if not all(target.count(".") >= 1 for target in called):
        raise DamagedError("its column `targets` has an operator without a namespace")
    named = {*facts.groups, *(group.name for group in facts.groups.values())}
    if not named.issuperset(filter(None, facts.group_names)):
        raise DamagedError("its column `group_names` names a process group that it does not list")


def _is_group(name: str, group: Any) -> bool:
    return (
        isinstance(group, Group)
        and _is_text(name)
        and _is_text(group.name)
        and type(group.size) is int
        and (group.dim is None or _is_text(group.dim))
        and _is_ranks(group.ranks)
    )


def _is_mesh(mesh: Any) -> bool:
    return (
        isinstance(mesh, Mesh)
        and type(mesh.dims) is tuple
        and all(map(_is_text, mesh.dims))
        and type(mesh.shape) is tuple
        and all(map(_is_amount, mesh.shape))
        and _is_ranks(mesh.ranks)
        and (not mesh.dims or len(mesh.dims) == len(mesh.shape))
        and prod(mesh.shape) == len(mesh.ranks)
    )


def _is_ranks(ranks: Any) -> bool:
    return type(ranks) is tuple and len(ranks) <= _MOST_RANKS and all(map(_is_amount, ranks))


def _is_lost_marker(marker: Any) -> bool:
    return isinstance(marker, LostMarker) and _is_text(marker.name) and _is_text(marker.reason)


DOCUMENT: Mapping[str, Callable[[Any], bool]] = {
    "kind": _is_one_of(str, (kind.value for kind in GraphKind)),
    "groups": lambda value: type(value) is dict and all(_is_group(name, group) for name, group in value.items()),
    "meshes": lambda value: type(value) is tuple and all(map(_is_mesh, value)),
    "rank": _or_none(_is_amount),
    "torch_version": _is_text,
    "lost_records": lambda value: type(value) is tuple and all(map(_is_lost_marker, value)),
}
"""What is said of the whole graph, and what that may be."""
