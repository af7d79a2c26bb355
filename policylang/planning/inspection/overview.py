"""The nodes of a graph by phase, block, operator and module, before there is any policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from attrs import field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import Facts, Flag, Phase, uncounted_operators
from policylang.language.globs import NameGlob, PathGlob
from policylang.planning.schedule import build_schedule
from policylang.planning.value_outcome import own_bytes
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import StepTime, step_time

PHASES = {phase: phase.name.lower() for phase in Phase}


@frozen
class NodeEntry:
    """One node, as a program reads it."""

    name: str
    operator: str
    """In full, ``aten.mm.default``; of a node that calls none what it is: ``placeholder``, ``get_attr``, ``output``."""
    module: str
    """Its module path, normalised; empty where it has none."""
    block: str | None
    """The path of its block, None outside every block."""
    phase: str
    bytes: int
    """All the tensors that it returns. A view counts what it shows, though the memory is another node's."""
    flops: int
    uncounted: str
    """The operators of the call whose work is not in ``flops``; empty too where an older snapshot does not say."""
    seconds: float | None
    """None without a device."""


@frozen
class Totals:
    """The forward and backward calls of a group of nodes. Bytes and FLOPs are those of the forward; bytes are of values
    with memory of their own, so that a view counts nothing."""

    forward: int = 0
    backward: int = 0
    bytes: int = 0
    flops: int = 0
    uncounted_calls: int | None = 0
    """Forward calls of operators that no FLOP formula counts; None where an older snapshot does not say."""
    seconds: float | None = None
    """The forward calls; None without a device."""
    backward_seconds: float | None = None


@frozen
class GraphOverview:
    """The nodes that were asked for, counted."""

    rows: Sequence[int] = field(repr=False)
    phases: tuple[tuple[str, int], ...]
    """Nodes by phase, in the order of the phases; none of a phase without nodes."""
    total: Totals
    uncounted: Mapping[str, int] | None
    """The forward's operators that could do matrix work and that no FLOP formula counts, and how many calls; None where
    an older snapshot does not say."""
    blocks: tuple[tuple[str | None, Totals], ...]
    """By path, in graph order; last what lies outside every block, under None."""
    operators: tuple[tuple[str, Totals], ...]
    """On a device those that take longest first; else those with the most bytes, then those with the most calls."""
    modules: tuple[tuple[str, str, Totals], ...]
    """Module, operator and totals, for the forward; modules, and the operators of each, in graph order.
    Modules that differ in numbers alone are one, with ``*`` for each number. On a device those that take longest come
    first."""
    times: NodeTimes | None = None
    """The whole graph; None without a device."""
    step: StepTime | None = None
    """The whole graph as it was traced, nothing recomputed; None without a device, and of a graph without
    collectives."""


def overview(facts: Facts, blocks: BlockTable, rows: Sequence[int], times: NodeTimes | None = None) -> GraphOverview:
    """One pass over the rows."""
    seconds, timed = (None, False) if times is None else (times.seconds, True)
    phases, targets, owners, modules = facts.phases, facts.targets, facts.owners, facts.modules
    by_phase = dict.fromkeys(Phase, 0)
    by_block: dict[int, _Sum] = {}
    by_operator: dict[str, _Sum] = {}
    by_module: dict[str, dict[str, _Sum]] = {}
    paths: dict[str, set[str]] = {}
    total = _Sum(timed)
    for row in rows:
        phase = Phase(phases[row])
        by_phase[phase] += 1
        if facts.ops[row] != "call_function":
            continue
        module, target = modules[row] or modules[owners[row]], targets[row]
        block = blocks.block_of[row]
        sums = [total, by_block.setdefault(block, _Sum(timed)), by_operator.setdefault(target, _Sum(timed))]
        if phase == Phase.FORWARD:
            folded = _folded(module)
            paths.setdefault(folded, set()).add(module)
            sums.append(by_module.setdefault(folded, {}).setdefault(target, _Sum(timed)))
        for each in sums:
            each.add(facts, row, phase, None if seconds is None else seconds[row])
    inside = sorted(block for block in by_block if block != OUTSIDE)
    order = [*inside, *([OUTSIDE] if OUTSIDE in by_block else [])]
    return GraphOverview(
        rows=rows,
        phases=tuple((PHASES[phase], count) for phase, count in by_phase.items() if count),
        total=total.totals(),
        uncounted=uncounted_operators(facts, (row for row in rows if phases[row] == Phase.FORWARD)),
        blocks=tuple((None if each == OUTSIDE else blocks.names[each], by_block[each].totals()) for each in order),
        operators=tuple((name, found.totals()) for name, found in sorted(by_operator.items(), key=_rank)),
        modules=tuple(
            (module if len(paths[module]) > 1 else next(iter(paths[module])), target, found.totals())
            for module, calls in sorted(
                by_module.items(), key=lambda each: -sum(sums.time for sums in each[1].values())
            )
            for target, found in sorted(calls.items(), key=lambda each: -each[1].time)
        ),
        times=times,
        step=_step(facts, times),
    )


def _step(facts: Facts, times: NodeTimes | None) -> StepTime | None:
    if times is None or not any(flag & Flag.COLLECTIVE for flag in facts.flags):
        return None
    return step_time(facts, build_schedule(facts, ()), times)


def _rank(item: tuple[str, _Sum]) -> tuple[float, int, int, str]:
    name, found = item
    return -found.time, -found.bytes, -found.calls, name


def entries(
    facts: Facts, blocks: BlockTable, rows: Iterable[int], times: NodeTimes | None = None
) -> Iterator[NodeEntry]:
    """The nodes in some rows, in order."""
    modules, owners = facts.modules, facts.owners
    for row in rows:
        block = blocks.block_of[row]
        yield NodeEntry(
            name=facts.names[row],
            operator=facts.targets[row] or facts.ops[row],
            module=modules[row] or modules[owners[row]],
            block=None if block == OUTSIDE else blocks.names[block],
            phase=PHASES[Phase(facts.phases[row])],
            bytes=facts.bytes[row],
            flops=facts.flops[row],
            uncounted=facts.uncounted[row] if facts.uncounted else "",
            seconds=None if times is None else times.seconds[row],
        )


def rows_asked(facts: Facts, modules: Sequence[str] = (), operators: Sequence[str] = ()) -> list[int]:
    """The rows of nodes in one of some modules (as ``in`` reads a glob) that call one of some operators; of either any
    where none is named."""
    found: Iterable[int] = range(len(facts))
    if modules:
        covers = _any([PathGlob(each).covers for each in modules])
        found = (row for row in found if covers(facts.modules[row] or facts.modules[facts.owners[row]]))
    if operators:
        calls = _any([_names(each) for each in operators])
        found = (row for row in found if facts.targets[row] and calls(facts.targets[row]))
    return list(found)


def _any(tests: Sequence[Callable[[str], bool]]) -> Callable[[str], bool]:
    return cache(lambda text: any(test(text) for test in tests))


def _names(glob: str) -> Callable[[str], bool]:
    """True if a glob is an operator's name: in full, without the overload, or without the namespace as well."""
    matches = NameGlob(glob).matches

    def test(target: str) -> bool:
        namespace, _, rest = target.partition(".")
        name, _, overload = rest.partition(".")
        return any(map(matches, (target, f"{namespace}.{name}", name, f"{name}.{overload}")))

    return test


@cache
def _folded(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


class _Sum:
    """Totals while they are added up."""

    __slots__ = ("backward", "backward_seconds", "bytes", "flops", "forward", "seconds", "uncounted_calls")

    def __init__(self, timed: bool) -> None:
        self.forward = self.backward = self.bytes = self.flops = 0
        self.uncounted_calls: int | None = 0
        self.seconds: float | None = 0.0 if timed else None
        self.backward_seconds: float | None = 0.0 if timed else None

    @property
    def time(self) -> float:
        """All of it; 0 without a device, so that it decides no order."""
        return (self.seconds or 0.0) + (self.backward_seconds or 0.0)

    @property
    def calls(self) -> int:
        return self.forward + self.backward

    def add(self, facts: Facts, row: int, phase: Phase, seconds: float | None) -> None:
        if seconds and phase == Phase.FORWARD:
            self.seconds = (self.seconds or 0.0) + seconds
        elif seconds:
            self.backward_seconds = (self.backward_seconds or 0.0) + seconds
        if phase == Phase.FORWARD:
            self.forward += 1
            self.bytes += own_bytes(facts, row)
            self.flops += facts.flops[row]
            if not facts.uncounted:
                self.uncounted_calls = None
            elif self.uncounted_calls is not None:
                self.uncounted_calls += bool(facts.uncounted[row])
        else:
            self.backward += 1

    def totals(self) -> Totals:
        counts = self.forward, self.backward, self.bytes, self.flops, self.uncounted_calls
        return Totals(*counts, self.seconds, self.backward_seconds)
