"""Policies loaded, parsed, checked and formatted; device profiles; ``[tool.policylang]`` in a ``pyproject.toml``.

Commands and the language server read the project's settings; ``policylang.check`` and other functions do not.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from policylang.errors import (
    PolicyGraphError,
    PolicyMeaningError,
    PolicySyntaxError,
    PolicyWarning,
    check_argument,
    check_flags,
)
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import find_device, kind_of, one_of, place_of, read_device, tables_of
from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose, is_syntax, left_out, removed
from policylang.language.files import decoded, policy_files, read_source, reason_of, write_whole
from policylang.language.formatting import format_source, line_end_of
from policylang.language.loader import Loaded, load_policy, load_source, parse_policy
from policylang.language.names import SELDOM_IN_GRAPHS
from policylang.language.operators import OperatorTable
from policylang.language.selectors import selectors_of, with_lets
from policylang.language.shown import counted, shortened
from policylang.language.statements import format_policy
from policylang.language.syntax import Chunk, InBlock, Pipeline, Policy, Statement
from policylang.planning.capabilities import PLANNED
from policylang.report.diagnostics import CheckResult, render_text

if TYPE_CHECKING:
    from policylang.planning.capabilities import PathName
    from policylang.planning.plan import Plan

DeviceLike = DeviceProfile | str | os.PathLike[str]
"""A device profile, the path of one, or the bare name of a bundled one."""

TRACED_FOR = "APL416"
_TYPES = frozenset({"cuda", "gpu", "hip", "hpu", "meta", "mps", "mtia", "xla", "xpu"})


def load_device(name: str | os.PathLike[str]) -> DeviceProfile:
    """Load a device profile from a file, or a bundled one by its bare name, such as ``h100-sxm``.

    Raises :class:`PolicyMeaningError` for an unknown name and for a file that is not a profile.
    """
    found = read_device(name)
    if isinstance(found, DeviceProfile):
        return found
    if str(name).partition(":")[0].lower() in _TYPES:  # the name of a device to trace for
        message = f"`{name}` is a device that a step is traced for, and times are worked out from a device profile"
        help = "a snapshot records what it was traced for; name the device of the step, as in `--device h100-sxm`"
        found = diagnose(TRACED_FOR, message, help=f"{help}: {found.help}" if found.help else help)
    raise PolicyMeaningError([found])


def device_of(given: DeviceLike | None) -> DeviceProfile | None:
    """The device that is given, loaded if need be; raises as :func:`load_device` does."""
    return given if given is None or isinstance(given, DeviceProfile) else load_device(given)


def on_device(policy: Policy, device: DeviceLike | None) -> Policy:
    """The policy with another device, in plans, digests and cache keys too. Raises as :func:`load_device` does."""
    profile = device_of(device)
    if profile is None:
        return policy
    moved = evolve(policy, device=profile)
    return evolve(moved, canonical=format_policy(moved)) if policy.canonical else moved


PolicyLike = Policy | str | os.PathLike[str]
"""A policy, or the path of one."""


def load(
    path: str | os.PathLike[str],
    *,
    graph: Any = None,
    device: DeviceLike | None = None,
    stage: int | None = None,
) -> Policy:
    """Load a policy file, or a bundled policy by its bare name.

    ``graph`` is a graph of the model, as :func:`policylang.check` takes it: operators that it calls are known, even
    without the library that defines them. ``device`` overrides the policy's ``device`` line: a name or path as for
    :func:`policylang.load_device`, or what that returned. ``stage``: the policy is for this stage of its pipeline,
    numbered from 0, and not for the whole model.

    Raises :class:`PolicySyntaxError` if the text cannot be parsed, :class:`PolicyMeaningError` if a name, a file or a
    figure in it is wrong. Both carry every diagnostic. Warns with :class:`PolicyWarning`.
    """
    made = _policy(load_policy(path, operators=operators_at_hand(met=_operators_of(graph))))
    return staged(on_device(made, device), stage)


def staged(policy: Policy, stage: int | None) -> Policy:
    """The policy for one stage of its pipeline, numbered from 0, where lines about other stages match nothing; without
    a stage, the policy itself. Raises ``PolicyGraphError`` where it has no ``schedule`` line, or fewer stages."""
    if stage is None:
        return policy
    pipeline = policy.pipeline
    if pipeline is None or not 0 <= stage < pipeline.stages:
        has = "no `schedule` line" if pipeline is None else counted(pipeline.stages, "stage")
        help = "write such as `schedule 1f1b into 4 stages of 16 microbatches`; stages are numbered from 0"
        raise PolicyGraphError([diagnose("APL657", f"the policy has {has}, and this is stage {stage}", help=help)])
    from policylang.planning.selection.selectors import chosen_blocks

    def elsewhere(statement: Statement) -> bool:
        """It is about other stages alone, and matches nothing in this one."""
        for part in with_lets(policy, *selectors_of([statement])):
            if not isinstance(part, InBlock) or part.which.of != "stage":
                continue
            if chosen_blocks(part.which, pipeline.stages)[stage] is part.outside:
                return True
        return False

    def here(line: Any) -> Any:
        return evolve(line, optional=True) if elsewhere(line) else line

    policy = evolve(
        policy,
        pipeline=evolve(pipeline, stage=stage),
        rules=tuple(map(here, policy.rules)),
        rewrites=tuple(map(here, policy.rewrites)),
        scheduling=tuple(map(here, policy.scheduling)),
        expectations=tuple(each for each in policy.expectations if not elsewhere(each)),
    )
    return evolve(policy, canonical=format_policy(policy))


def policy_of(given: PolicyLike, device: DeviceLike | None = None) -> Policy:
    """The policy that is given, loaded if need be, on a device; raises and warns as :func:`load` does."""
    return on_device(given if isinstance(given, Policy) else load(given), device)


def parse(
    text: str,
    *,
    name: str = "<policy>",
    graph: Any = None,
    device: DeviceLike | None = None,
    stage: int | None = None,
) -> Policy:
    """Load a policy from its text; raises and warns as :func:`load` does. Reports call the text ``name``."""
    check_argument("name", name, isinstance(name, str), "what reports call the text")
    made = _policy(parse_policy(text, name=name, operators=operators_at_hand(met=_operators_of(graph))))
    return staged(on_device(made, device), stage)


def operators_at_hand(met: Collection[str] = ()) -> OperatorTable:
    """The bundled manifest, the operators that were met in a graph, and with them the registry of torch, custom
    operators included, if torch is loaded.

    Importing torch takes seconds, so a check of a policy does not: it asks a torch that is there already.
    """
    if "torch" not in sys.modules:
        return OperatorTable.bundled(met=met)
    from policylang.torch_compat.graphs import operator_names

    return OperatorTable.bundled(more=operator_names, met=met)


def _operators_of(graph: Any) -> Collection[str]:
    if graph is None:
        return ()
    from policylang.api.planned_graphs import read_any  # planning, which a policy by itself can do without

    return read_any(graph).operators


def _policy(loaded: Loaded) -> Policy:
    if loaded.policy is None:
        kind = PolicySyntaxError if any(map(is_syntax, loaded.errors)) else PolicyMeaningError
        raise kind(loaded.diagnostics)
    if loaded.diagnostics:
        warnings.warn(render_text(loaded.diagnostics), PolicyWarning, stacklevel=3)
    return loaded.policy


@frozen
class Formatting:
    """The result of formatting one file. Nothing has been written yet."""

    name: str
    content: bytes
    written: bytes | None
    """The file in canonical form; None if diagnostics explain why there is none."""
    diagnostics: tuple[Diagnostic, ...] = ()
    unreadable: bool = False

    @property
    def failed(self) -> bool:
        return self.written is None

    @property
    def changes(self) -> bool:
        return self.written is not None and self.written != self.content

    def diff(self) -> str:
        """The change as a unified diff; empty where there is none."""
        if not self.changes or self.written is None:
            return ""
        sides = (text.decode("utf-8-sig", errors="replace") for text in (self.content, self.written))
        old, new = (text.splitlines(keepends=True) for text in sides)
        return "".join(difflib.unified_diff(old, new, self.name, f"{self.name} (formatted)"))

    def save(self) -> Formatting:
        """Write the file if it changes; the result reports a failure."""
        if not self.changes or self.written is None:
            return self
        try:
            write_whole(Path(self.name), self.written)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            problem = diagnose("APL104", f"`{self.name}` cannot be written: {reason}")
            return evolve(self, written=None, diagnostics=(*self.diagnostics, problem), unreadable=True)
        return self


def format_files(paths: Sequence[str]) -> list[Formatting]:
    """Format policy files; a folder means every ``.apl`` file below it. Nothing is written."""
    done = []
    for name in (file for path in paths for file in policy_files(path)):
        source = read_source(Path(name), name)
        if isinstance(source, Diagnostic):
            done.append(Formatting(name, b"", None, (source,), unreadable=source.code in ("APL103", "APL104")))
        else:
            done.append(_format(source, Path(name).read_bytes()))
    return done


def format_text(content: bytes, name: str = "<stdin>") -> Formatting:
    source = decoded(content, name, "APL001", "a policy")
    return Formatting(name, content, None, (source,)) if isinstance(source, Diagnostic) else _format(source, content)


def _format(source: Source, content: bytes) -> Formatting:
    formatted = format_source(source)
    if formatted.text is None:
        return Formatting(source.name, content, None, formatted.diagnostics)
    written = formatted.text.replace("\n", line_end_of(source.text)).encode()
    return Formatting(source.name, content, written, formatted.diagnostics)


UNREADABLE, UNKNOWN_KEY, WRONG_VALUE = "APL645", "APL646", "APL647"
PROBLEMS = frozenset({UNREADABLE, UNKNOWN_KEY, WRONG_VALUE})
"""The codes of all that can be wrong with settings."""

KEYS = ("graph", "path", "device")
_FILE = "pyproject.toml"
_TABLE = ("tool", "policylang")
_LONGEST = 60
_WHAT = {
    "graph": 'the path of a snapshot, as a text: `graph = "llama3_8b.graph"`',
    "path": 'the name of a path, as a text: `path = "joint"`',
    "device": 'a bundled device profile or the path of one, as a text: `device = "h100-sxm"`',
}


@frozen
class ProjectSettings:
    """Each is None if the project does not set it. Files are absolute, so that they mean the same in every folder."""

    graph: str | None = None
    """A snapshot, or another form of a graph that ``policylang check --graph`` takes."""
    path: str | None = None
    """The path that policies are applied on."""
    device: str | None = None
    """A bundled device profile by its name, or a file of one."""
    file: Path | None = None
    """The ``pyproject.toml`` with the table."""
    places: Mapping[str, Span] = field(factory=dict, repr=False, eq=False)


def project_settings(folder: Path) -> tuple[ProjectSettings, tuple[Diagnostic, ...]]:
    """Read the nearest ``pyproject.toml`` in a folder or above it that has the table, and find what is wrong with it.

    An empty table is one too: nothing above it counts. A file that cannot be read, and may have the table, is an error.
    Diagnostics name the file as seen from the folder.
    """
    try:
        start = Path(os.path.abspath(folder))
    except OSError:  # the current folder, which has gone
        return ProjectSettings(), ()
    for each in (start, *start.parents):
        file = each / _FILE
        if os.path.isfile(file):
            found = _of_file(file, os.path.relpath(file, start))
            if found is not None:
                return found
    return ProjectSettings(), ()


def as_typed(value: str) -> str:
    """A file as typed in the current folder, distinct from bundled names; other words stay."""
    if not os.path.isabs(value):
        return value
    try:
        found = os.path.relpath(value)
    except ValueError:  # on another drive
        return value
    found = found if os.sep in found or "." in found else os.path.join(os.curdir, found)
    return min(found, value, key=len)


def _of_file(file: Path, name: str) -> tuple[ProjectSettings, tuple[Diagnostic, ...]] | None:
    """None for a file without the table."""
    try:
        content = file.read_bytes()
    except OSError as error:
        message = f"`{name}` cannot be read: {reason_of(error)}"
        return ProjectSettings(file=file), (diagnose(UNREADABLE, message, Span(Source(name, ""), 0, 0)),)
    if _TABLE[-1].encode() not in content.replace(b"\0", b""):  # most projects: nothing to parse
        return None
    try:
        source = Source(name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        at = len(content[: error.start].decode("utf-8-sig"))
        span = Span(Source(name, content.decode("utf-8-sig", errors="replace")), at, at + 1)
        message = f"the file is not text: byte 0x{content[error.start]:02x} is not UTF-8"
        return ProjectSettings(file=file), (diagnose(UNREADABLE, message, span, help="TOML is UTF-8 text"),)
    table: Any = tables_of(source, UNREADABLE)
    if isinstance(table, Diagnostic):
        return ProjectSettings(file=file), (table,)
    for key in _TABLE:
        table = table.get(key) if isinstance(table, dict) else None
    return None if table is None else _settings(file, source, table)


def _settings(file: Path, source: Source, table: Any) -> tuple[ProjectSettings, tuple[Diagnostic, ...]]:
    problems: list[Diagnostic] = []

    def value_of(key: str) -> Span:
        return place_of(source, _TABLE, key).value

    def wrong(message: str, span: Span, help: str | None = None, code: str = WRONG_VALUE) -> None:
        problems.append(diagnose(code, message, span, help=help))

    if not isinstance(table, dict):
        message = f"`policylang` is {kind_of(table)}, and should be a table"
        help = "write `[tool.policylang]`, and below it the settings"
        wrong(message, place_of(source, _TABLE, None).key, help)
        return ProjectSettings(file=file), tuple(problems)
    for key in table:
        if key not in KEYS:
            message = f"`{shortened(key, _LONGEST)}` means nothing in `[tool.policylang]`"
            wrong(message, place_of(source, _TABLE, key).key, one_of(key, KEYS), UNKNOWN_KEY)
    given: dict[str, str] = {}
    for key in filter(table.__contains__, KEYS):
        value = table[key]
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            what = (
                f"is {kind_of(value)}" if not isinstance(value, str) else "has a NUL" if value.strip() else "is empty"
            )
            wrong(f"`{key}` {what}, and should be {_WHAT[key]}", value_of(key))
        elif key == "path" and value not in PLANNED:
            wrong(f"there is no path `{shortened(value, _LONGEST)}`", value_of(key), one_of(value, PLANNED))
        elif key == "device":
            found = find_device(value, file.parent)
            if isinstance(found, Diagnostic):
                wrong(found.message, value_of(key), found.help)
            else:
                device, shown = found
                given[key] = value if shown.startswith("<") else os.path.normpath(file.parent / device)
        else:
            given[key] = os.path.normpath(file.parent / value) if key == "graph" else value
    places = {key: value_of(key) for key in given}
    problems.sort(key=lambda each: each.span.start if each.span else 0)
    return ProjectSettings(**given, file=file, places=places), tuple(problems)


def check(
    *paths: PolicyLike | Source,
    graph: Any = (),
    path: PathName | None = None,
    one_model: bool = False,
    device: DeviceLike | None = None,
    lossless: bool = False,
    pipeline: Pipeline | None = None,
) -> CheckResult:
    """Check policy files, or bundled policies by their bare names. A folder means every ``.apl`` file below it.

    Args:
        graph: one or several to plan each policy on, as files, facts or what :func:`policylang.snapshot` takes: rules
            that match nothing or decide nothing, expectations, values that cannot be recomputed.
        path: ``"joint"`` to plan as ``policylang.backend`` does, ``"flat"`` as ``policylang.apply`` does on a traced
            step, ``"eager"`` as ``policylang.checkpoint_model`` does, and so on: what that path refuses is an error,
            without a graph what it refuses of any. By default what each graph is. A path that there is not raises
            ``PolicyError``.
        one_model: whether the snapshots are the graphs of one model, where a rule has to match in one of them.
        device: the device that times are worked out for, as :func:`policylang.load_device` takes it, or what that
            returned; by default the one that a policy's ``device`` line names. A name that there is not raises
            ``PolicyError``.

    Operators are looked up in the bundled manifest, in the graphs and, if torch is loaded, in torch's registry. A
    ``Source`` is a text in memory. A ``Policy`` was checked when it was loaded: only errors on the graphs are reported.

        lossless: a line after which the backward computes with other bits than the forward made is an error.
        pipeline: in place of that of a policy's ``schedule`` line; graphs are of the whole model.

    A mistake in a policy or a graph, or a missing file, is a diagnostic: it never raises for them.
    """
    check_flags(one_model=one_model, lossless=lossless)
    check_argument("pipeline", pipeline, isinstance(pipeline, Pipeline | None), "a `Pipeline`")
    given = [each for path in paths for each in _loaders(path)]
    files = tuple(name for name, _ in given)
    profile = device_of(device)
    on = [graph] if not isinstance(graph, Sequence) or isinstance(graph, str | bytes) else graph
    if path is not None:
        from policylang.api.planned_graphs import checked_path

        checked_path(path)
    found: list[Diagnostic] = []
    if not on:
        operators = operators_at_hand()
        for name, load in given:
            loaded = load(operators=operators)
            of_file = [*loaded.diagnostics, *_lossy(loaded.policy if lossless else None, None)]
            if path is not None and loaded.policy is not None:
                from policylang.api.planned_graphs import refused_of_any_graph  # a text alone can do without planning

                of_file += refused_of_any_graph(loaded.policy, path)
            found += (each.found_in(name) for each in of_file)
        return CheckResult(files, tuple(_once(found)))
    from policylang.api.planned_graphs import on_graph, read_graphs

    graphs, problems = read_graphs(on)
    operators = operators_at_hand(met=dict.fromkeys(name for facts in graphs.values() for name in facts.operators))
    found += problems  # a graph file shows its kind itself
    plans: list[Plan] = []
    for name, load in given:
        loaded = load(operators=operators)
        of_file = [said for said in loaded.diagnostics if not (graphs and said.code == SELDOM_IN_GRAPHS)]
        made: tuple[Plan, ...] = ()
        if loaded.policy is not None and graphs:
            made, more = on_graph(loaded.policy, graphs, path, one_model=one_model, device=profile, pipeline=pipeline)
            plans += made
            of_file += more
        of_file += _lossy(loaded.policy if lossless else None, made or None)
        found += (each.found_in(name) for each in of_file)
    return CheckResult(files, tuple(_once(found)), tuple(graphs), tuple(plans))


def _lossy(policy: Policy | None, plans: Sequence[Plan] | None) -> Iterator[Diagnostic]:
    """The lines that change bits; without a graph those of `chunk`, which may split a sum."""
    if policy is None:
        return
    for rule in policy.narrowing:
        message = f"`{rule.text}` is lossy: the backward computes with other bits than the forward made"
        fixes = [] if rule.tail is None else [left_out(rule.tail)]
        yield diagnose("APL216", message, rule.span, help="save these values as they are", fixes=fixes)
    for at, chunk in ((at, each) for at, each in enumerate(policy.rewrites) if isinstance(each, Chunk)):
        lost = [phrase for made in plans or () for phrase in made.edits.of(at).lossy]
        if lost or plans is None:
            more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
            why = f"{lost[0]}{more}" if lost else "it may split sums"
            message = f"`{chunk.span.one_line}` is lossy: {why}, and bits differ there"
            yield diagnose("APL216", message, chunk.span, help="leave it out", fixes=[removed(chunk.span)])


def _loaders(given: PolicyLike | Source) -> list[tuple[str, Callable[..., Loaded]]]:
    """The files that are given by path, and the loader of each."""
    match given:
        case Policy():
            return [(given.name, lambda operators: Loaded(given, ()))]
        case Source():
            return [(given.name, partial(load_source, given, None))]
        case str() | os.PathLike():
            return [(file, partial(load_policy, file)) for file in policy_files(os.fsdecode(given))]
    return [(f"<{type(given).__name__}>", partial(load_policy, given))]  # no policy, which is a diagnostic


def _once(diagnostics: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
    """Drop repetitions: two files that include the same faulty one, or are planned on one graph, report it once."""
    found: dict[Diagnostic, Diagnostic] = {}
    for each in diagnostics:
        found.setdefault(evolve(each, about=""), each)
    return found.values()
