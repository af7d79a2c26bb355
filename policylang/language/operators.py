"""Operator names and the groups that every policy knows (``policies/prelude.apl``), looked up without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, cached_property

from attrs import define, evolve

from policylang.language.diagnostics import Source
from policylang.language.globs import NameGlob, is_magic, split_outside_braces
from policylang.language.parser import parse_file
from policylang.language.resources import Overloads, manifest, policies_folder
from policylang.language.selectors import rebuild, union_of
from policylang.language.shown import nearest
from policylang.language.syntax import Let, Operator, Selector, Union, Word

PLAIN_FUNCTIONS = "builtin"
"""The namespace of Python's own functions. A bare name does not reach it where a tensor operator has the name, or
``add`` would count the additions of sizes in a graph with dynamic shapes."""


@define(eq=False, slots=False)
class OperatorTable:
    """Looks operator names up. ``more`` lists further full names (``mylib.fused.default``), and is called once. ``met``
    are full names known to exist, as those that a graph calls; others may exist."""

    namespaces: Mapping[str, Overloads]
    more: Callable[[], Iterable[str]] | None = None
    met: Collection[str] = ()

    @classmethod
    def bundled(cls, more: Callable[[], Iterable[str]] | None = None, met: Collection[str] = ()) -> OperatorTable:
        return cls(manifest().namespaces, more, met)

    @property
    def complete(self) -> bool:
        """True if the registry of a loaded torch is included, so that an unknown namespace does not exist."""
        return self.more is not None

    def has_namespace(self, pattern: str) -> bool:
        glob = NameGlob(pattern)
        return any(glob.matches(namespace) for namespaces in self._tables() for namespace in namespaces)

    def is_only_met(self, pattern: str) -> bool:
        """True if the namespace is known from a graph alone and may hold more operators than are known."""
        return self.has_namespace(pattern) and not any(map(NameGlob(pattern).matches, self._listed))

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
            yield self._with_met
        if self.more is not None:
            yield self._everything

    @cached_property
    def _with_met(self) -> Mapping[str, Overloads]:
        return _extend(self.namespaces, self.met)

    @cached_property
    def _listed(self) -> Mapping[str, Overloads]:
        return self.namespaces if self.more is None else _extend(self.namespaces, self.more())

    @cached_property
    def _everything(self) -> Mapping[str, Overloads]:
        return _extend(self._listed, self.met) if self.met else self._listed


def split_operator(text: str, known_namespace: Callable[[str], bool]) -> Operator | None:
    """The parts of an operator name: ``mm``, ``aten.mm``, ``add.Tensor`` or ``aten.add.Tensor``. Two parts are
    namespace and name if the first is a namespace, else name and overload. None for more than three."""
    match split_outside_braces(text):
        case [name]:
            return Operator(None, name, None)
        case [namespace, name] if known_namespace(namespace):
            return Operator(namespace, name, None)
        case [name, overload]:
            return Operator(None, name, overload)
        case [namespace, name, overload]:
            return Operator(namespace, name, overload)
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


PRELUDE_NAME = "<prelude>"


@cache
def prelude_group(name: str) -> Let | None:
    """The resolved definition of a group; None where the prelude has none of that name. It is self-contained: a group
    that builds on another one has it inlined. So a policy may redefine a group's name without changing the others.
    Operators are not looked up in any torch: the prelude covers several."""
    let = _lets().get(name)
    return None if let is None else evolve(let, selector=rebuild(let.selector, _look_up))


def group_names() -> tuple[str, ...]:
    """The groups in the order of the prelude."""
    return tuple(_lets())


def selector_of_groups(text: str) -> Selector:
    file, diagnostics = parse_file(Source(PRELUDE_NAME, f"let it = {text}"))
    (let,) = file.statements
    if diagnostics or not isinstance(let, Let):
        raise ValueError(f"`{text}` is no selector")
    return rebuild(let.selector, _look_up)


@cache
def _lets() -> dict[str, Let]:
    source = Source(PRELUDE_NAME, (policies_folder() / "prelude.apl").read_text(encoding="utf-8"))
    file, diagnostics = parse_file(source)
    if diagnostics:
        first = diagnostics[0]
        raise RuntimeError(f"the prelude cannot be read: {first.span and first.span.location}: {first.message}")
    return {statement.name: statement for statement in file.statements if isinstance(statement, Let)}


def _look_up(selector: Selector) -> Selector:
    if isinstance(selector, Union):
        return union_of(selector.parts, selector.span)
    if not isinstance(selector, Word):
        return selector
    if (group := prelude_group(selector.text)) is not None:
        return group.selector
    operator = split_operator(selector.text, lambda _: True)
    if operator is None:
        raise RuntimeError(f"the prelude names `{selector.text}`, which is no operator")
    return evolve(operator, span=selector.span)
