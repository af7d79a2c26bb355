"""A tuned policy: its text, its figures, and what there was to choose among."""

from __future__ import annotations

import os
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from functools import partial
from pathlib import Path

from attrs import field, frozen

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.files import write_whole
from policylang.language.formatting import format_source
from policylang.language.shown import UNITS, counted, format_quantity, logged, one_line, write_quantity
from policylang.planning.pipelines import StageFigures
from policylang.planning.plan import digest_of
from policylang.tuning.evaluation import Besides, Budget, Candidate, Tuned, TunedStages


@frozen(eq=False)
class TunedPolicy:
    """The result of :func:`policylang.tune`. ``str()`` is the policy's text.

    Bytes are those of one rank, times those of the device profile.
    """

    text: str
    """The policy, as a file holds it."""
    tuned: Tuned = field(repr=False)
    """The choice as plain data."""
    subject: TuningSubject
    """The graph and device that it is tuned for."""
    notes: tuple[Diagnostic, ...] = ()
    """Notes beside it, such as that nothing has to be recomputed."""

    def __repr__(self) -> str:
        peak, saved = (format_quantity(each, "bytes") for each in (self.peak, self.tuned.chosen.saved))
        return f"<policylang.TunedPolicy for {self.subject.called}: peak {peak}, {saved} saved>"

    @property
    def stages(self) -> tuple[StageFigures, ...]:
        """The figures of each stage of a pipeline; empty for a single step. With stages the other bytes are
        those of the rank with the highest peak, and times those of all microbatches."""
        return () if self.tuned.stages is None else self.tuned.stages.figures.stages

    @property
    def rules(self) -> str:
        """The statements that decide, a line each."""
        return self.tuned.chosen.rules

    @property
    def peak(self) -> int:
        """Bytes of the step at its highest moment: of the graph, of the optimizer's state, and in reserve."""
        return self.tuned.besides.on(self.tuned.chosen.peak)

    @property
    def graph_peak(self) -> int:
        """Bytes of the graph alone at its highest moment, which ``expect peak`` limits."""
        return self.tuned.chosen.peak

    @property
    def saved(self) -> int:
        """Bytes kept on the device for the backward."""
        return self.tuned.chosen.saved

    @property
    def offloaded(self) -> int:
        """Bytes kept on the host for the backward."""
        return self.tuned.chosen.offloaded

    @property
    def recompute_seconds(self) -> float:
        """Seconds of recomputation."""
        return self.tuned.chosen.recompute

    @property
    def recompute_share(self) -> float:
        """Recomputation as a fraction of the forward's time; 0 where the forward takes none."""
        return self.recompute_seconds / self.tuned.forward if self.tuned.forward else 0.0

    @property
    def bound_seconds(self) -> float | None:
        """Seconds of recomputation that no choice of values can go below that saves as many bytes; None where that is
        not known."""
        return self.tuned.bound

    @property
    def table(self) -> tuple[Candidate, ...]:
        """The whole trade-off, by rising memory: every policy that no other beats in both memory and time."""
        return self.tuned.table

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the policy to a file, in one step; returns where it is. Raises ``OSError`` where it cannot."""
        target = Path(path)
        write_whole(target, self.text.encode())
        return target

    def __str__(self) -> str:
        return self.text


_SHOWN = 12
_DIGITS = 3
_SHORT = 4
_SIZES = ("TiB", "GiB", "MiB", "KiB", "B")


@frozen
class TuningSubject:
    """The graph and device that a policy is tuned for, in words that are the same on every machine."""

    graph: str
    """The name of the graph's file, without the folder; empty if it has none."""
    kind: str
    nodes: int
    fingerprint: str
    """The fingerprint of the facts, hex."""
    device: str
    """The name that its profile gives itself."""
    device_named: str
    """The device in a policy: the name of a bundled profile or the path of a file in quotes; empty without a name."""
    optimizer: str = ""
    """The name of the optimizer whose state counts; empty where its size is given, or there is none."""
    path: str = ""
    """The path that the policy is for, if given."""
    balance: str = ""
    """The line with the load of the experts, if stated."""
    priced_by_bytes: Mapping[str, int] = field(factory=dict)
    """The operators that no FLOP formula counts, and how many calls: their times are those of moving their bytes."""

    @property
    def called(self) -> str:
        """The name of the graph in headings."""
        return self.graph or f"a {self.kind} graph"


def fingerprint(facts: Facts) -> str:
    """Hex SHA-256 of what planning and simulation read of a graph; the same for the graph and its snapshot, on every
    machine. What differs by rank is left out."""
    columns = (
        facts.names,
        facts.targets,
        facts.phases,
        facts.modules,
        facts.user_tags,
        facts.flags,
        facts.shapes,
        facts.dtypes,
        facts.bytes,
        facts.flops,
        facts.inputs,
        facts.owners,
        facts.input_kinds,
    )
    return digest_of(digest_of(map(str, column)) for column in columns)


def tuned_text(tuned: Tuned, subject: TuningSubject, *, timed: bool = True) -> str:
    """The policy, in canonical form, with a line end. ``timed``: whether it may promise a time."""
    if tuned.stages is not None:
        return _staged_text(tuned.stages, tuned, subject)
    promises = _promises(tuned, subject, timed=timed and bool(subject.device_named))
    load = [subject.balance] if subject.balance else []
    rules = (*_comment(tuned, subject), "", *load, tuned.chosen.rules.strip("\n"), "", *promises)
    return _canonical("\n".join(rules) + "\n")


def _canonical(text: str) -> str:
    canonical = format_source(Source("<tuned>", text)).text
    return text if canonical is None else canonical


def _commented(line: str) -> str:
    return f"# {logged(one_line(line))}".rstrip()


def _staged_text(found: TunedStages, tuned: Tuned, subject: TuningSubject) -> str:
    said, limit = found.pipeline, int(tuned.budget.limit * (1 - tuned.besides.reserve))
    rows: list[tuple[str, ...]] = [("stage", "blocks", "in flight", "saved", "peak", "recomputed")]
    for each in found.figures.stages:
        sizes = (format_quantity(size, "bytes") for size in (each.saved, each.peak))
        again = format_quantity(each.recomputed_seconds or 0.0, "seconds")
        rows.append((f"{each.stage}", each.blocks_text("-"), f"{each.in_flight}", *sizes, again))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    besides = besides_words(tuned.besides, subject.optimizer)
    lines = [
        f"Tuned with `policylang tune` for {_graph_words(subject)}, on {subject.device}.",
        *([f"It is for `--path {subject.path}`."] if subject.path else []),
        f"The budget: {budget_words(tuned.budget)} on each rank{f', with {besides}' if besides else ''}.",
        *([f"Plan it with `--stages {','.join(map(str, said.firsts))}`."] if said.firsts else []),
        "",
        *(f"  {row}" for row in cells),
        "",
        stages_words(found),
    ]
    peak = max(each.peak for each in found.figures.stages)
    room = limit - max(found.state)
    promise = f"expect peak <= {at_most(room, peak) if room > peak else rounded_up(peak)} per stage"
    load = [subject.balance] if subject.balance else []
    schedule = f"schedule {said.schedule} into {said.stages} stages of {said.microbatches} microbatches"
    parts = [*map(_commented, lines), "", schedule, *load, "", found.rules.strip("\n"), "", promise]
    return _canonical("\n".join(parts) + "\n")


def stages_words(found: TunedStages) -> str:
    """``a step takes 7.7 s; with the same rules in all stages 8.2 s``."""
    alike = "no policy with the same rules in all stages fits"
    if found.alike is not None:
        alike = f"with the same rules in all stages {_four_figures(found.alike.step)}"
    return f"a step takes {_four_figures(found.step)}; {alike}"


def _four_figures(seconds: float) -> str:
    """``7.724 s``, ``37.93 us``: a digit more than elsewhere, for what differs by little."""
    return write_quantity(float(f"{seconds:.4g}"), "seconds")


def budget_words(budget: Budget) -> str:
    """``a peak of at most 70 GiB``."""
    if budget.figure == "recompute time":
        return f"recomputation of at most {format_quantity(budget.limit, 'fraction')} of the forward's time"
    limit = int(budget.limit)
    size = write_quantity(limit, "bytes")
    if len(size.partition(" ")[0]) > _SHORT:
        size = f"{format_quantity(limit, 'bytes')} ({limit:,} bytes)"
    return f"a peak of at most {size}" if budget.figure == "peak" else f"at most {size} saved for the backward"


def neighbour_words(tuned: Tuned) -> str:
    """``with 2.1 GiB more, 14 ms less; with 1.2 GiB less, 9 ms more``; empty where there is neither."""
    said, memory_of = [], partial(tuned.besides.memory, budget=tuned.budget)
    for other, memory, time in ((tuned.more, "more", "less"), (tuned.less, "less", "more")):
        if other is not None:
            size = abs(memory_of(other) - memory_of(tuned.chosen))
            seconds = abs(other.price - tuned.chosen.price)
            said.append(f"with {format_quantity(size, 'bytes')} {memory}, {format_quantity(seconds, 'seconds')} {time}")
    return "; ".join(said)


def recomputed_words(tuned: Tuned) -> str:
    """``14.2 ms, 3.1% of the forward``."""
    again = tuned.chosen.recompute
    share = f", {format_quantity(again / tuned.forward, 'fraction')} of the forward" if tuned.forward else ""
    return f"{format_quantity(again, 'seconds')}{share}" if again else "nothing that takes time"


def step_words(each: Candidate) -> str:
    """The time of the step, precise enough to distinguish neighbours: ``1.12 s``, ``905.3 ms``."""
    return f"{each.step:.2f} s" if each.step >= 1 else format_quantity(each.step, "seconds")


def besides_words(besides: Besides, optimizer: str = "") -> str:
    """``24 GiB of optimizer state (adamw) and 5% in reserve``; empty where there is nothing."""
    name = f" ({optimizer})" if optimizer else ""
    parts = [
        f"{format_quantity(besides.optimizer, 'bytes')} of optimizer state{name}" if besides.optimizer else "",
        f"{format_quantity(besides.reserve, 'fraction')} in reserve" if besides.reserve else "",
    ]
    return " and ".join(filter(None, parts))


def _comment(tuned: Tuned, subject: TuningSubject) -> list[str]:
    chosen, besides = tuned.chosen, besides_words(tuned.besides, subject.optimizer)
    peak = f"{format_quantity(tuned.besides.on(chosen.peak), 'bytes')}, at {chosen.peak_at or 'its beginning'}"
    figures = [
        ("peak", peak),
        ("of it", f"{format_quantity(chosen.peak, 'bytes')} of the graph, {besides}" if besides else ""),
        ("saved", f"{format_quantity(chosen.saved, 'bytes')} for the backward"),
        ("offloaded", f"{format_quantity(chosen.offloaded, 'bytes')} to the host" if chosen.offloaded else ""),
        ("recomputed", recomputed_words(tuned)),
        ("bound", bound_words(tuned)),
        ("step", step_words(chosen)),
        (
            "waiting",
            f"{format_quantity(chosen.exposed, 'seconds')} of the step for copies and collectives"
            if chosen.exposed
            else "",
        ),
    ]
    beside = neighbour_words(tuned)
    said = [
        f"Tuned with `policylang tune` for {_graph_words(subject)}, on {subject.device}.",
        *([f"It is for `--path {subject.path}`."] if subject.path else []),
        f"The budget: {budget_words(tuned.budget)}.",
        "",
        *(f"  {name:<10}  {words}" for name, words in figures if words),
        *(["", f"On either side: {beside}." if "; " in beside else f"Beside it: {beside}."] if beside else []),
    ]
    return list(map(_commented, said))


def _graph_words(subject: TuningSubject) -> str:
    nodes, facts = counted(subject.nodes, "node"), f"facts {subject.fingerprint[:_SHOWN]}"
    if subject.graph:
        return f"{subject.graph} ({subject.kind} graph of {nodes}, {facts})"
    return f"{subject.called} of {nodes} ({facts})"


def bound_words(tuned: Tuned) -> str:
    """The bound that no choice of values can beat; empty where it is unknown or zero."""
    if tuned.bound is None or not tuned.chosen.recompute:
        return ""
    keeps = "saves or offloads" if tuned.chosen.offloaded else "saves"
    return f"{format_quantity(tuned.bound, 'seconds')}: no choice of values that {keeps} as much recomputes for less"


def _promises(tuned: Tuned, subject: TuningSubject, *, timed: bool) -> list[str]:
    budget, chosen, besides = tuned.budget, tuned.chosen, tuned.besides
    if budget.figure == "saved":
        return [f"expect saved <= {at_most(int(budget.limit), chosen.saved)}"]
    if budget.figure == "recompute time":
        share = write_quantity(budget.limit, "fraction")
        promised = [f"device {subject.device_named}", f"expect recomputed time <= {share}"] if timed else []
        return [*promised, f"expect peak <= {rounded_up(chosen.peak)}"]
    alone = int(budget.limit * (1 - besides.reserve)) - besides.optimizer
    less = besides_words(besides, subject.optimizer)
    why = f"  # of the graph: {write_quantity(int(budget.limit), 'bytes')} less {less}" if less else ""
    return [f"expect peak <= {at_most(max(alone, chosen.peak), chosen.peak)}{why}"]


def at_most(limit: int, least: int) -> str:
    """A size of few digits between ``least`` and ``limit`` bytes, near the limit: ``42.5 GiB``."""
    exact = write_quantity(limit, "bytes")
    if len(exact.partition(" ")[0]) <= _SHORT or limit < 1024:
        return exact
    for text, size in _rounded(limit, ROUND_FLOOR):
        if size >= least:
            return text
    return exact


def rounded_up(size: int) -> str:
    """A size of few digits that is not less."""
    return next((text for text, _ in _rounded(size, ROUND_CEILING)), f"{size} B")


def _rounded(size: int, way: str) -> list[tuple[str, Decimal]]:
    """The size with more and more digits, in the largest unit that it reaches."""
    unit = next((each for each in _SIZES if size >= UNITS[each][0]), "B")
    scale = Decimal(int(UNITS[unit][0]))
    whole = len(str(int(size // scale)))
    found = []
    for decimals in range(max(_DIGITS - whole, 0), 7):
        number = (Decimal(size) / scale).quantize(Decimal(1).scaleb(-decimals), rounding=way)
        text = format(number, "f")
        text = text.rstrip("0").rstrip(".") if "." in text else text
        found.append((f"{text} {unit}", number * scale))
    return found
