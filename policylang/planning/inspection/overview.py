"""The nodes of a graph by phase, block, operator and module, before there is any policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from attrs import define, field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import Facts, Flag, Phase, uncounted_operators
from policylang.language.globs import NameGlob, PathGlob
from policylang.planning.schedule import build_schedule
from policylang.planning.selection.selectors import split_target
from policylang.planning.value_outcome import own_bytes
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import StepTime, step_time

PHASES = {phase: phase.name.lower() for phase in Phase}


@define
class Totals:
    """The forward and backward calls of a group of nodes. Bytes and FLOPs are those of the forward; bytes are of values
    that allocate memory, so that a view counts nothing."""

    forward: int = 0
    backward: int = 0
    bytes: int = 0
    flops: int = 0
    uncounted_calls: int | None = 0
    """Forward calls of operators that no FLOP formula counts; None if an older snapshot lacks it."""
    seconds: float | None = None
    """The forward calls; None without a device."""
    backward_seconds: float | None = None

    @property
    def time(self) -> float:
        """All of it; 0 without a device, so that it decides no order."""
        return (self.seconds or 0.0) + (self.backward_seconds or 0.0)

    def add(self, facts: Facts, row: int, seconds: float) -> None:
        """Add a call, with its time on the device."""
        if facts.phases[row] != Phase.FORWARD:
            self.backward += 1
            if self.backward_seconds is not None:
                self.backward_seconds += seconds
            return
        self.forward += 1
        self.bytes += own_bytes(facts, row)
        self.flops += facts.flops[row]
        if self.seconds is not None:
            self.seconds += seconds
        if not facts.uncounted:
            self.uncounted_calls = None
        elif self.uncounted_calls is not None:
            self.uncounted_calls += bool(facts.uncounted[row])


@frozen
class GraphOverview:
    """The nodes that were asked for, counted."""

    rows: Sequence[int] = field(repr=False)
    phases: tuple[tuple[str, int], ...]
    """Nodes by phase, in the order of the phases; none of a phase without nodes."""
    total: Totals
    uncounted: Mapping[str, int] | None
    """The forward's operators that could do matrix work and that no FLOP formula counts, and how many calls; None if an
    older snapshot lacks it."""
    blocks: tuple[tuple[str | None, Totals], ...]
    """By path, in graph order; the nodes outside every block last, under None."""
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
    """One pass over the nodes."""
    zero = None if times is None else 0.0
    new = partial(Totals, seconds=zero, backward_seconds=zero)
    by_phase = dict.fromkeys(Phase, 0)
    by_block, by_operator = defaultdict[int, Totals](new), defaultdict[str, Totals](new)
    by_module = defaultdict[str, defaultdict[str, Totals]](lambda: defaultdict(new))
    paths = defaultdict[str, set[str]](set)
    total = new()
    for row in rows:
        phase = Phase(facts.phases[row])
        by_phase[phase] += 1
        if facts.ops[row] != "call_function":
            continue
        module, target = facts.modules[row] or facts.modules[facts.owners[row]], facts.targets[row]
        sums = [total, by_block[blocks.block_of[row]], by_operator[target]]
        if phase == Phase.FORWARD:
            folded = _folded(module)
            paths[folded].add(module)
            sums.append(by_module[folded][target])
        for each in sums:
            each.add(facts, row, 0.0 if times is None else times.seconds[row])
    slowest = sorted(by_module.items(), key=lambda each: -sum(sums.time for sums in each[1].values()))
    return GraphOverview(
        rows=rows,
        phases=tuple((PHASES[phase], count) for phase, count in by_phase.items() if count),
        total=total,
        uncounted=uncounted_operators(facts, (row for row in rows if facts.phases[row] == Phase.FORWARD)),
        blocks=tuple(
            (None if block == OUTSIDE else blocks.names[block], sums)
            for block, sums in sorted(by_block.items(), key=lambda each: (each[0] == OUTSIDE, each[0]))
        ),
        operators=tuple(sorted(by_operator.items(), key=_rank)),
        modules=tuple(
            (module if len(paths[module]) > 1 else next(iter(paths[module])), target, sums)
            for module, calls in slowest
            for target, sums in sorted(calls.items(), key=lambda each: -each[1].time)
        ),
        times=times,
        step=_step(facts, times),
    )


def _step(facts: Facts, times: NodeTimes | None) -> StepTime | None:
    if times is None or not any(flag & Flag.COLLECTIVE for flag in facts.flags):
        return None
    return step_time(facts, build_schedule(facts, ()), times)


def _rank(item: tuple[str, Totals]) -> tuple[float, int, int, str]:
    name, sums = item
    return -sums.time, -sums.bytes, -(sums.forward + sums.backward), name


def entries(
    facts: Facts, blocks: BlockTable, rows: Iterable[int], times: NodeTimes | None = None
) -> Iterator[dict[str, Any]]:
    """Some nodes, in order, as a program reads them.

    ``operator`` is the operator in full; of a node that calls none its kind: ``placeholder``, ``get_attr``, ``output``.
    ``block`` is None outside every block, ``seconds`` without a device. The ``bytes`` are those of all the tensors that
    it returns: a view counts its size, though the memory is another node's. ``uncounted``, where it is there, names the
    operators of the call whose work is not in ``flops``.
    """
    for row in rows:
        block = blocks.block_of[row]
        yield {
            "name": facts.names[row],
            "operator": facts.targets[row] or facts.ops[row],
            "module": facts.modules[row] or facts.modules[facts.owners[row]],
            "block": None if block == OUTSIDE else blocks.names[block],
            "phase": PHASES[Phase(facts.phases[row])],
            "bytes": facts.bytes[row],
            "flops": facts.flops[row],
            "seconds": None if times is None else times.seconds[row],
            **({"uncounted": facts.uncounted[row]} if facts.uncounted and facts.uncounted[row] else {}),
        }


def rows_asked(facts: Facts, modules: Sequence[str] = (), operators: Sequence[str] = ()) -> list[int]:
    """The nodes in one of some modules (as ``in`` reads a glob) that call one of some operators; empty means any."""
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
        namespace, name, overload = split_target(target)
        return any(map(matches, (target, f"{namespace}.{name}", name, f"{name}.{overload}")))

    return test


@cache
def _folded(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))
