"""Objects of attrs classes as plain data and back, by the types of their fields.

Strict: files, and the messages of other processes, may hold anything.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from attrs import asdict, fields, has

OWN = "own"
"""In the metadata of a field that stays with its object."""
_T = TypeVar("_T")


def to_plain(value: Any) -> dict[str, Any]:
    """Ready for JSON."""
    return asdict(value, filter=lambda field, _: OWN not in field.metadata)


def from_plain(kind: type[_T], data: Any) -> _T:
    """The inverse of :func:`to_plain`, also through JSON. Raises ``TypeError`` or ``ValueError`` for anything else."""
    found: _T = _from_plain(kind, data)
    return found


def _from_plain(kind: Any, data: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if data is None else _from_plain(parts[0], data)
    if has(kind):
        types = _types(kind)
        return kind(**{name: _from_plain(types.get(name), each) for name, each in _checked(data, dict).items()})
    if origin in (tuple, list):
        return origin(_from_plain(parts[0], each) for each in _checked(data, list, tuple))
    if origin is Literal:
        return parts[parts.index(data)]
    if origin is not None:
        return {_checked(name, str): _from_plain(parts[1], each) for name, each in _checked(data, dict).items()}
    return _checked(data, kind) if kind in (str, int, bool) else data


def _checked(data: Any, *kinds: type[Any]) -> Any:
    if type(data) not in kinds:
        raise ValueError(f"{type(data).__name__} in place of {kinds[0].__name__}")
    return data


@cache
def _types(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
