"""Lookup of operator names: in a manifest that travels with the package, and in further sources of names.

The manifest (:mod:`policylang.language.resources`) lists the operators of one torch version, so that a policy is
checked without importing torch. A source of further names,
such as the registry of a torch that is loaded, is asked only for what the manifest lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from attrs import define, field

from policylang.language.globs import NameGlob, is_magic, split_outside_braces
from policylang.language.resources import Overloads, manifest
from policylang.language.syntax import Operator
from policylang.language.wording import nearest

PLAIN_FUNCTIONS = "builtin"
"""The namespace of Python's own functions. A bare name does not reach it where a tensor operator has the name, or
``add`` would count the additions of sizes in a graph with dynamic shapes."""


@define(eq=False)
class OperatorTable:
    """Looks operator names up. ``more`` lists further full names (``mylib.fused.default``), and is called once.

    ``met`` are full names that are known to exist and say nothing of what else there is: those that a graph calls.
    """

    namespaces: Mapping[str, Overloads]
    more: Callable[[], Iterable[str]] | None = None
    met: Collection[str] = ()
    _with_met: Mapping[str, Overloads] | None = field(default=None, init=False)
    _listed: Mapping[str, Overloads] | None = field(default=None, init=False)
    _everything: Mapping[str, Overloads] | None = field(default=None, init=False)

    @classmethod
    def bundled(cls, more: Callable[[], Iterable[str]] | None = None, met: Collection[str] = ()) -> OperatorTable:
        return cls(manifest().namespaces, more, met)

    @property
    def complete(self) -> bool:
        """Whether a namespace that is not here is nowhere: a torch that is loaded has been asked."""
        return self.more is not None

    def has_namespace(self, pattern: str) -> bool:
        glob = NameGlob(pattern)
        return any(glob.matches(namespace) for namespaces in self._tables() for namespace in namespaces)

    def is_only_met(self, pattern: str) -> bool:
        """Whether every namespace of the name was met in a graph alone, so that it may hold more than is known here."""
        glob = NameGlob(pattern)
        listed = self.namespaces if self.more is None else self._all_listed(self.more)
        return self.has_namespace(pattern) and not any(map(glob.matches, listed))

    def matches(self, namespace: str | None, name: str, overload: str | None) -> tuple[str, ...]:
        """The full names of the operators that fit the parts, each a glob or None for any; sorted."""
        found = (_search(namespaces, namespace, name, overload) for namespaces in self._tables())
        return next(filter(None, found), ())

    def nearest(self, text: str) -> tuple[str, ...]:
        """The known names closest to a misspelt one, in as many parts as it has."""
        parts = split_outside_braces(text)
        *_, namespaces = self._tables()
        if len(parts) == 1:
            return nearest(text, sorted({name for names in namespaces.values() for name in names}))
        qualified = (f"{namespace}.{name}" for namespace, names in namespaces.items() for name in names)
        if len(parts) == 2:
            return nearest(text, qualified)
        stem, overload = ".".join(parts[:2]), parts[2]
        overloads = namespaces.get(parts[0], {}).get(parts[1])
        if overloads:
            return tuple(f"{stem}.{near}" for near in nearest(overload, overloads) or overloads[:3])
        return nearest(stem, qualified)

    def _tables(self) -> Iterable[Mapping[str, Overloads]]:
        """The manifest, then, only if the caller is still looking, everything."""
        yield self.namespaces
        if self.met:
            if self._with_met is None:
                self._with_met = _extend(self.namespaces, self.met)
            yield self._with_met
        if self.more is not None:
            if self._everything is None:
                listed = self._all_listed(self.more)
                self._everything = _extend(listed, self.met) if self.met else listed
            yield self._everything

    def _all_listed(self, more: Callable[[], Iterable[str]]) -> Mapping[str, Overloads]:
        if self._listed is None:
            self._listed = _extend(self.namespaces, more())
        return self._listed


def split_operator(text: str, known_namespace: Callable[[str], bool]) -> Operator | None:
    """The parts of an operator name: ``mm``, ``aten.mm``, ``add.Tensor`` or ``aten.add.Tensor``.

    Two parts are namespace and name if the first is a namespace, else name and overload. None for more than three.
    """
    parts = split_outside_braces(text)
    if len(parts) == 1:
        return Operator(None, parts[0], None)
    if len(parts) == 2:
        if known_namespace(parts[0]):
            return Operator(parts[0], parts[1], None)
        return Operator(None, parts[0], parts[1])
    if len(parts) == 3:
        return Operator(parts[0], parts[1], parts[2])
    return None


def _search(
    namespaces: Mapping[str, Overloads], namespace: str | None, name: str, overload: str | None
) -> tuple[str, ...]:
    found: list[str] = []
    for space, names in namespaces.items():
        if namespace is not None and not NameGlob(namespace).matches(space):
            continue
        chosen = [known for known in names if NameGlob(name).matches(known)] if is_magic(name) else [name]
        for known in chosen:
            overloads = names.get(known)
            if overloads is None:
                continue
            glob = NameGlob("*" if overload is None else overload)
            found.extend(f"{space}.{known}.{each}" for each in overloads if glob.matches(each))
            if overload is None and not overloads:
                found.append(f"{space}.{known}")
    return tuple(sorted(found))


def _extend(base: Mapping[str, Overloads], more: Iterable[str]) -> dict[str, dict[str, tuple[str, ...]]]:
    extended = {namespace: dict(names) for namespace, names in base.items()}
    for full in more:
        namespace, _, rest = full.partition(".")
        name, _, overload = rest.partition(".")
        names = extended.setdefault(namespace, {})
        overloads = names.setdefault(name, ())
        if overload and overload not in overloads:
            names[name] = (*overloads, overload)
    return extended
