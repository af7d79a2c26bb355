"""Loads a policy: parses a file or a text, expands its includes, resolves it. Errors are values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar, assert_never

from attrs import define, evolve, field, frozen

from policylang.language import syntax
from policylang.language.cancellation import check_cancelled
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import meant_devices, read_device
from policylang.language.diagnostics import (
    Diagnostic,
    DiagnosticList,
    Related,
    Source,
    Span,
    bounded,
    diagnose,
    heeded,
    is_error,
    moved,
    removed,
    written,
)
from policylang.language.files import ENDS, SUFFIX, bundled_file, bundled_names, find_policy, meant_files, read_source
from policylang.language.lexer import MAX_STATEMENTS
from policylang.language.names import Definitions, doubtful_selectors
from policylang.language.operators import OperatorTable
from policylang.language.parser import parse_file
from policylang.language.predicates import check_path_glob
from policylang.language.resources import policies_folder
from policylang.language.shown import did_you_mean, nearest
from policylang.language.statements import ExpectTotalKind, format_policy, kind_of

MAX_CHAIN = 32
PRELUDE = "prelude"

Reader = Callable[[Path, str], Source | Diagnostic]
"""The text of a file under the name that reports will give it, or why it cannot be read."""
IncludeChain = tuple[tuple[str, syntax.Include | None], ...]
"""The chain of files, outermost first: each file, and the include that led to it."""


@frozen
class PlacedStatement:
    statement: syntax.Statement
    index: int
    """Its number in its file."""
    bundled: bool
    """True if its file belongs to the bundled library."""
    depth: int
    """0 in the file that was loaded, 1 in one that it includes, …"""
    folder: Path = Path()
    """The folder of its file: names of other files are relative to it."""
    include: Span | None = None
    """The include in the loaded file that leads to it."""


@frozen
class _Unit:
    """A parsed file, and the folder that its includes are relative to."""

    file: syntax.File
    folder: Path
    bundled: bool


@define
class Expansion:
    """The statements of a policy in the order in which they count, and what was wrong with the files."""

    statements: list[PlacedStatement] = field(factory=list)
    diagnostics: DiagnosticList = field(factory=DiagnosticList)
    files: dict[str, Path] = field(factory=dict)
    """The path of each file by its name in reports, unreadable ones included; a text without a file has none."""
    brought: dict[str, Span] = field(factory=dict)
    """By the same names, the first include in the loaded file that leads to each."""
    _reader: Reader = read_source
    _parsed: dict[str, _Unit | None] = field(factory=dict)
    _targets: dict[Span, tuple[Path | None, str, str]] = field(factory=dict)
    _reported: set[tuple[str, Span]] = field(factory=set)
    _steps: int = 0

    def add(self, unit: _Unit, chain: IncludeChain) -> None:
        by = chain[1][1].span if len(chain) > 1 and chain[1][1] is not None else None
        for index, statement in enumerate(unit.file.statements):
            self._steps += 1
            if self._steps > MAX_STATEMENTS:
                if not any(diagnostic.code == "APL106" for diagnostic in self.diagnostics):
                    message = f"the policy holds more than {MAX_STATEMENTS} statements, its includes expanded"
                    self.diagnostics.report("APL106", message, by)
                return
            if isinstance(statement, syntax.Include):
                self._include(statement, unit, chain)
            else:
                placed = PlacedStatement(statement, index, unit.bundled, len(chain) - 1, unit.folder, by)
                self.statements.append(placed)

    def parse(self, source: Source, folder: Path, bundled: bool) -> _Unit:
        file, diagnostics = parse_file(source)
        self.diagnostics.extend(diagnostics)
        return _Unit(file, folder, bundled)

    def _include(self, include: syntax.Include, unit: _Unit, chain: IncludeChain) -> None:
        if include.bundled and include.target == PRELUDE:
            return  # it is always there
        if include.span not in self._targets:  # files that include one another come by here many times
            path, name = self._target(include, unit, chain)
            self._targets[include.span] = path, name, "" if path is None else str(path.resolve())
        path, name, key = self._targets[include.span]
        if path is None:
            return
        if any(key == seen for seen, _ in chain):
            files = [each.span.source.name for _, each in (*chain, (key, include)) if each is not None]
            trail = " → ".join(f"`{file}`" for file in (*files, name))
            self._report("APL105", f"`{name}` includes itself: {trail}", include, chain)
            return
        if len(chain) >= MAX_CHAIN:
            self._report("APL106", f"includes are nested more than {MAX_CHAIN} deep", include, chain)
            return
        if key not in self._parsed:
            self._parsed[key] = self._read(path, name, include, chain)
        target = self._parsed[key]
        if target is not None:
            self.add(target, (*chain, (key, include)))

    def _target(self, include: syntax.Include, unit: _Unit, chain: IncludeChain) -> tuple[Path | None, str]:
        if not include.bundled:
            named = unit.file.span.source.name
            beside = "" if named.startswith("<") else os.path.dirname(named)
            name = os.path.normpath(os.path.join(beside, include.target))
            library = named.startswith("<") and unit.bundled
            return unit.folder / include.target, f"<{Path(name).stem}>" if library else name
        path = bundled_file(include.target)
        if path is None:
            known = bundled_names()
            near = nearest(include.target, known)
            help = did_you_mean(near) or f"the library has {', '.join(known)}"
            fixes = written(_target_span(include), [f"<{name}>" for name in near], near=True)
            message = f"the bundled library has no policy `{include.target}`"
            self._report("APL103", message, include, chain, help=help, fixes=fixes)
        return path, f"<{include.target.removesuffix('.apl')}>"

    def _read(self, path: Path, name: str, include: syntax.Include, chain: IncludeChain) -> _Unit | None:
        self.files.setdefault(name, path)
        first = chain[1][1] if len(chain) > 1 else include
        self.brought.setdefault(name, (first or include).span)
        source: Source | Diagnostic
        if path.suffix != SUFFIX and os.path.exists(path):  # its lines would be shown to whoever checks this one
            source = diagnose("APL104", f"`{name}` is no policy file", help=ENDS)
        else:
            source = self._reader(path, name)
        if isinstance(source, Source):
            return self.parse(source, path.parent, _is_bundled(path))
        if source.span is None:
            beside = os.path.dirname(include.target)
            near = meant_files(path, include.target)
            meant = [each if each.startswith("<") else f'"{os.path.join(beside, each)}"' for each in near]
            fixes = written(_target_span(include), meant, near=(source.help or "").startswith("did"))
            source = evolve(source, span=include.span, fixes=fixes)
        self.diagnostics.append(evolve(source, related=_included_from(chain)))
        return None

    def _report(self, code: str, message: str, include: syntax.Include, chain: IncludeChain, **more: Any) -> None:
        if (code, include.span) in self._reported:  # a file that is included twice is read once, and taken twice
            return
        self._reported.add((code, include.span))
        self.diagnostics.report(code, message, include.span, related=_included_from(chain), **more)


def _target_span(include: syntax.Include) -> Span:
    """The span of the included name, with its quotes or brackets."""
    span = include.span
    return Span(span.source, span.end - len(include.target) - 2, span.end)


def expand(source: Source, path: Path | None, read: Reader = read_source) -> Expansion:
    """Parse a source and all it includes, as ``read`` gives it. ``path``: the file it came from; None for none."""
    expansion = Expansion(reader=read)
    folder = path.parent if path is not None else Path()
    bundled = path is not None and _is_bundled(path)
    key = str(path.resolve()) if path is not None else source.name
    if path is not None:
        expansion.files[source.name] = path
    expansion.add(expansion.parse(source, folder, bundled), ((key, None),))
    return expansion


def _is_bundled(path: Path) -> bool:
    return path.parent.resolve() == policies_folder()


def _included_from(chain: IncludeChain) -> tuple[Related, ...]:
    """A note for each include of the chain, the innermost first."""
    return tuple(Related("included from here", include.span) for _, include in reversed(chain) if include is not None)


_COMPUTES = frozenset(("aten", "prims", "rngprims", "inductor_prims", "quantized", "builtin"))
"""Namespaces whose operators send nothing; a higher-order operator may, in the graph that it runs."""
_COLLECTIVES = ("collective", "all_gather", "reduce_scatter", "all_reduce", "all_to_all")

_Ordering = TypeVar("_Ordering", bound=syntax.Bucket | syntax.Scheduling)


def resolve(
    statements: Sequence[PlacedStatement], source: Source, operators: OperatorTable
) -> tuple[syntax.Policy, tuple[Diagnostic, ...]]:
    """The policy that the statements make, and what is wrong with it. With an error among that, the policy is not
    to be used: what could not be looked up is missing from it."""
    lets = [each.statement for each in statements if isinstance(each.statement, syntax.Let)]
    resolver = _Resolver(source, Definitions(operators, {let.name: let.span for let in reversed(lets)}))
    for placed in sorted(statements, key=lambda placed: -placed.depth):
        resolver.least_depth[type(placed.statement)] = placed.depth
    for placed in statements:
        check_cancelled()
        resolver.take(placed)
    return resolver.finish(statements)


@define
class _Resolver:
    source: Source
    names: Definitions
    diagnostics: DiagnosticList = field(factory=DiagnosticList)
    rules: list[syntax.Rule] = field(factory=list)
    rewrites: list[syntax.Rewriting] = field(factory=list)
    scheduling: list[syntax.Scheduling] = field(factory=list)
    expectations: list[syntax.Expectation] = field(factory=list)
    ordered: dict[tuple[type, syntax.Selector], syntax.Bucket | syntax.Scheduling] = field(factory=dict)
    once: dict[type, syntax.Statement] = field(factory=dict)
    least_depth: dict[type, int] = field(factory=dict)
    """By kind the smallest include depth at which it occurs: a file overrides what it includes."""
    device: DeviceProfile | None = None
    first: Span | None = None
    """The span of the first statement of the loaded file."""

    def take(self, placed: PlacedStatement) -> None:
        statement = placed.statement
        if not placed.depth:
            self.first = self.first or statement.span
        self.diagnostics.extend(kind_of(statement).check(statement))
        if isinstance(statement, syntax.Scheduling):
            self.scheduling.append(self._ordering(statement))
            return
        if isinstance(statement, syntax.Restructuring):
            self.rewrites.append(statement)
            return
        match statement:
            case syntax.PolicyName():
                self._policy_name(statement, placed)
            case syntax.Requires() | syntax.Include():
                pass  # what an include brings is in its place
            case syntax.Device():
                self._device(statement, placed)
            case syntax.Let():
                self.names.define(statement, placed.bundled)
            case (
                syntax.Blocks() | syntax.Undecided() | syntax.PrefetchOffloaded() | syntax.Pipeline() | syntax.Balance()
            ):
                self._only_once(statement, placed.depth)
            case syntax.Rule():
                rule = evolve(statement, selector=self.names.resolve(statement.selector))
                self.rules.append(rule)
                self.diagnostics.extend(doubtful_selectors(rule))
            case syntax.Bucket():
                self.rewrites.append(self._ordering(statement))
            case syntax.ExpectTotal():
                self.expectations.append(ExpectTotalKind.fit(statement, self.diagnostics.append))
            case syntax.ExpectCount() | syntax.ExpectFate():
                self.expectations.append(evolve(statement, selector=self.names.resolve(statement.selector)))
            case syntax.ExpectLossless():
                self.expectations.append(statement)
            case _:
                assert_never(statement)

    def _ordering(self, statement: _Ordering) -> _Ordering:
        """Resolves a line about collectives, and checks it against those before it."""
        statement = evolve(statement, selector=self.names.resolve(statement.selector))
        earlier = self.ordered.setdefault((type(statement), statement.selector), statement)
        word = kind_of(statement).opener
        if earlier is not statement:
            message = f"`{word}` is there twice for the same collectives"
            related = Related("first written here", earlier.span)
            help, fixes = "leave one of the two lines out", [removed(statement.span, "remove the second line")]
            self.diagnostics.report("APL213", message, statement.span, related=(related,), help=help, fixes=fixes)
        others = list(self._others(statement.selector))
        for each in others:
            said = each.span.one_line
            message = f"`{said}` is no collective, and `{word}` moves collectives alone"
            if isinstance(each, syntax.Everything | syntax.Reference):
                message = f"`{said}` is more than collectives, and `{word}` moves them alone"
            help = "write `collective`, or one of `all_gather`, `reduce_scatter`, `all_reduce` and `all_to_all`"
            self.diagnostics.report("APL215", message, each.span, help=help, fixes=written(each.span, _COLLECTIVES))
        if not others:
            self.diagnostics.extend(doubtful_selectors(statement))
        return statement

    def _others(self, selector: syntax.Selector) -> Iterator[syntax.Selector]:
        """The words of a selector that pick, whatever the graph, something else than collectives. What `where`, a chain
        or an `and` leaves of a selector is not known."""
        # each with the name that leads to it
        pending: list[tuple[syntax.Selector, syntax.Reference | None]] = [(selector, None)]
        seen: set[str] = set()
        while pending:
            current, named = pending.pop()
            inner: tuple[syntax.Selector, ...] = ()
            match current:
                case syntax.Union():
                    inner = current.parts
                case syntax.InModule() | syntax.InBlock() | syntax.Ordinal() | syntax.ChainOf():
                    inner = (current.selector,)
                case syntax.Difference() | syntax.Feeding():
                    inner = (current.left,)
                case syntax.Reference():
                    if current.name not in seen:
                        seen.add(current.name)
                        pending.append((self.names.lets[current.name].selector, named or current))
                case syntax.Everything():
                    yield named or current
                case syntax.Operator():
                    found = self.names.operators.matches(current.namespace, current.name, current.overload)
                    if found and all(name.partition(".")[0] in _COMPUTES for name in found):
                        yield named or current
                case syntax.Where() | syntax.Intersection() | syntax.Step() | syntax.Chain() | syntax.Word():
                    pass
                case _:
                    assert_never(current)
            pending.extend((part, named) for part in reversed(inner))

    def finish(self, statements: Sequence[PlacedStatement]) -> tuple[syntax.Policy, tuple[Diagnostic, ...]]:
        name: Any = self.once.get(syntax.PolicyName)
        blocks: Any = self.once.get(syntax.Blocks)
        undecided: Any = self.once.get(syntax.Undecided)
        ahead: Any = self.once.get(syntax.PrefetchOffloaded)
        pipeline: Any = self.once.get(syntax.Pipeline)
        balance: Any = self.once.get(syntax.Balance)
        rules, rewrites, expectations = tuple(self.rules), tuple(self.rewrites), tuple(self.expectations)
        name = (PurePath(self.source.name.strip("<>")).stem or "policy") if name is None else name.name
        includes: dict[str, Span] = {}
        for placed in statements:
            if placed.include is not None:
                includes.setdefault(placed.statement.span.source.name, placed.include)
        policy = syntax.Policy(
            *(name, self.names.lets, blocks, rules, undecided, rewrites, expectations, self.device),
            scheduling=tuple(self.scheduling),
            prefetch_offloaded=ahead,
            pipeline=pipeline,
            balance=balance,
            includes=includes,
        )
        decides = bool(rules or rewrites or self.scheduling or expectations or undecided)
        self.diagnostics.extend(self.names.finish(library=not decides))
        if not (decides or self.names.lets or any(map(is_error, self.diagnostics))):
            spans = [placed.statement.span for placed in statements if not placed.depth]
            self.diagnostics.report("APL207", "the policy decides nothing: it has no rule", spans[0] if spans else None)
        return policy, tuple(self.diagnostics)

    def _policy_name(self, statement: syntax.PolicyName, placed: PlacedStatement) -> None:
        if placed.index:
            fixes = [removed(statement.span)]
            if self.first is not None and syntax.PolicyName not in self.once and not placed.depth:
                fixes.insert(0, moved(statement.span, self.first, "move it to the top"))
            self.diagnostics.report("APL202", "`policy` has to be the first statement", statement.span, fixes=fixes)
        elif not placed.depth:
            self.once[syntax.PolicyName] = statement

    def _device(self, statement: syntax.Device, placed: PlacedStatement) -> None:
        """Reads the device. A policy and its includes have one; several files may name the same."""
        found = read_device(statement.target, placed.folder)
        if isinstance(found, Diagnostic):
            named = Related("named here", statement.span)
            if found.span is not None:
                self.diagnostics.append(evolve(found, related=(*found.related, named)))
                return
            span = statement.span
            target = Span(span.source, span.start + len(span.text.rstrip().rsplit(None, 1)[0]) + 1, span.end)
            fixes = written(target, meant_devices(statement.target), near=True)
            self.diagnostics.append(evolve(found, span=span, fixes=fixes))
            return
        earlier = self.once.setdefault(syntax.Device, statement)
        if self.device is not None and self.device.canonical != found.canonical:
            message = f"a policy has one device, and this is `{found.name}` beside `{self.device.name}`"
            if found.name == self.device.name:
                message = f"a policy has one device, and there are two profiles that are called `{found.name}`"
            related = (Related(f"`{self.device.name}` is named here", earlier.span),)
            self.diagnostics.report("APL212", message, statement.span, related=related, fixes=[removed(statement.span)])
        self.device = self.device or found

    def _only_once(self, statement: syntax.Statement, depth: int) -> None:
        if depth > self.least_depth[type(statement)]:
            return
        earlier = self.once.get(type(statement))
        if earlier is not None:
            kind = kind_of(statement)
            name = kind.opener if kind.rule == "pipeline" else kind.rule.replace("_", " ")
            message = f"a policy has one `{name}` line"
            related, fixes = (Related("first written here", earlier.span),), [removed(statement.span)]
            self.diagnostics.report("APL203", message, statement.span, related=related, fixes=fixes)
            return
        self.once[type(statement)] = statement
        if isinstance(statement, syntax.Blocks):
            check_path_glob(statement.glob, statement.span, self.diagnostics.append)


_BYTE_ORDER_MARK = "\ufeff"  # some editors on Windows begin a file with it
_ABOUT_WHAT_IS_MISSING = {"APL110", "APL207"}
"""Warnings that nothing uses a name, or that there is no rule: a statement that could not be read may be what does."""


@frozen
class Loaded:
    """A policy, unless one of the diagnostics is an error; they are sorted by position, file by file."""

    policy: syntax.Policy | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(filter(is_error, self.diagnostics))


def load_policy(path: str | os.PathLike[str], *, operators: OperatorTable | None = None) -> Loaded:
    """Load a policy file, or, for a bare name that is no file here, a policy of the bundled library. ``operators`` is
    what operator names are looked up in; by default the bundled manifest."""
    if not isinstance(path, str | os.PathLike):
        return Loaded(None, (_wrong_type("a policy is loaded by its path", path),))
    file, name = find_policy(os.fsdecode(path))
    source = read_source(file, name)
    return Loaded(None, (source,)) if isinstance(source, Diagnostic) else load_source(source, file, operators=operators)


def parse_policy(text: str, *, name: str = "<policy>", operators: OperatorTable | None = None) -> Loaded:
    """The policy that a text makes; what it includes is relative to the current folder."""
    if not isinstance(text, str):
        return Loaded(None, (_wrong_type("a policy is parsed from its text", text),))
    return load_source(Source(name, text.removeprefix(_BYTE_ORDER_MARK)), None, operators=operators)


def load_source(source: Source, file: Path | None, *, operators: OperatorTable | None = None) -> Loaded:
    """The policy that a source makes; what it includes is relative to the folder of ``file``."""
    return load_expanded(source, file, operators=operators)[0]


def load_expanded(
    source: Source, file: Path | None, *, operators: OperatorTable | None = None, read: Reader = read_source
) -> tuple[Loaded, Expansion]:
    """Loads a policy, and returns its expanded statements too; ``read`` reads included files."""
    expansion = expand(source, file, read)
    policy, found = resolve(expansion.statements, source, operators or OperatorTable.bundled())
    if any(map(is_error, expansion.diagnostics)):
        found = tuple(diagnostic for diagnostic in found if diagnostic.code not in _ABOUT_WHAT_IS_MISSING)
    diagnostics = bounded(heeded(_in_order((*expansion.diagnostics, *found))))
    if any(map(is_error, diagnostics)):
        return Loaded(None, diagnostics), expansion
    return Loaded(evolve(policy, canonical=format_policy(policy)), diagnostics), expansion


def _wrong_type(wanted: str, given: object) -> Diagnostic:
    example = 'for example `policylang.load("llama3_sac.apl")`'
    help = "it is loaded already" if isinstance(given, syntax.Policy) else example
    return diagnose("APL104", f"{wanted}, and this is a `{type(given).__name__}`", help=help)


def _in_order(diagnostics: tuple[Diagnostic, ...]) -> tuple[Diagnostic, ...]:
    """Sorts diagnostics by file, in order of appearance, and by position; drops duplicates."""
    files: dict[str, int] = {}

    def place(diagnostic: Diagnostic) -> tuple[int, int]:
        span = diagnostic.span
        return (-1, 0) if span is None else (files.setdefault(span.source.name, len(files)), span.start)

    return tuple(sorted(dict.fromkeys(diagnostics), key=place))
