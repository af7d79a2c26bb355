"""The operators, modules, blocks and nodes of a graph, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import groupby

from attrs import asdict, evolve

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts
from policylang.language.shown import (
    UNCOUNTED_UNKNOWN,
    counted,
    folded_names,
    format_quantity,
    shortened,
    uncounted_text,
)
from policylang.planning.inspection.breakdown import OUTSIDE as OUTSIDE_BLOCKS
from policylang.planning.inspection.overview import PHASES, GraphOverview, Totals, entries
from policylang.report.layout import bytes_text, exposed_text, seconds_text, table, times_text

VERSION = 1
_COUNTS = ("forward", "backward", "bytes", "FLOPs")
_TIMES = ("time", "backward time")
_LONGEST_SHAPE = 24
_REGION = "region "
_READABLE = 27
"""The width below which names of operators, modules and blocks make room for themselves."""
_NOTE = "bytes and FLOPs are those of the forward; a view has no bytes of its own"


def overview_text(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> str:
    """The counts by block, by operator, and by module and operator."""
    timed = found.times is not None
    head = (*_COUNTS, *_TIMES) if timed else _COUNTS
    by_block = [(label, *_totals(each)) for label, each in _blocks(found)]
    by_operator = [(operator, *_totals(each)) for operator, each in found.operators]
    by_module: list[tuple[str, ...]] = [("module", "operator", "forward", "bytes", "FLOPs", *_TIMES[:timed])]
    before = None
    for module, operator, sums in found.modules:
        calls, _, size, flops, *seconds = _totals(sums)
        shown = "" if module == before else module or "in no module"
        by_module.append((shown, operator, calls, size, flops, *seconds[:1]))
        before = module
    times = [times_text(found.times)]
    if found.step is not None:
        exposed = exposed_text(found.step)
        step = format_quantity(found.step.step, "seconds")
        times.append(f"as traced: a step of {step}, exposed {exposed if exposed != '-' else 'nothing'}")
    narrow = partial(table, ends=(0,), readable=_READABLE)
    totals = partial(narrow, right=range(1, len(head) + 1), spare=(2, 1))
    parts = [
        _heading(name, facts, blocks, found),
        totals([("block", *head), *by_block]) if blocks.names else "",
        totals([("operator", *head), *by_operator]) if by_operator else "",
        narrow(by_module, range(2, len(by_module[0])), spare=(2,)) if found.modules else "",
        _uncounted(found),
        "\n".join(filter(None, times)),
        _NOTE if found.operators else "",
    ]
    return "\n\n".join(filter(None, parts))


def nodes_text(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> str:
    """The nodes that were asked for, one a line."""
    total, times = found.total, found.times
    head = ("node", "operator", "module", "phase", "shape", "bytes", "FLOPs", *_TIMES[: times is not None])
    rows = [head]
    for row in found.rows:
        shape = shortened("×".join(map(str, facts.shapes[row] or ())), _LONGEST_SHAPE)
        cells = (
            facts.names[row],
            facts.targets[row] or facts.ops[row],
            facts.modules[row] or facts.modules[facts.owners[row]],
            PHASES[facts.phases[row]],  # type: ignore[index]
            f"{shape} {facts.dtypes[row]}".strip(),
            bytes_text(facts.bytes[row] or None),
            _flops(facts.flops[row], bool(facts.uncounted and facts.uncounted[row])),
        )
        rows.append((*cells, *([] if times is None else [seconds_text(times.seconds[row])])))
    flops = format_quantity(total.flops, "flops")
    if total.uncounted_calls:
        flops = f"at least {flops}" if total.flops else "FLOPs not counted"
    took, backward = (
        f" in {format_quantity(seconds, 'seconds')}" if seconds else ""
        for seconds in (total.seconds, total.backward_seconds)
    )
    sums = (
        f"{counted(total.forward, 'forward operator')} of {format_quantity(total.bytes, 'bytes')} and {flops}{took}, "
        f"{total.backward:,} in the backward{backward}; {_NOTE}"
    )
    listed = table(rows, right=range(5, len(head)), ends=(2,), spare=(4, 3))
    parts = (_heading(name, facts, blocks, found), listed, sums, _uncounted(found), times_text(times))
    return "\n\n".join(filter(None, parts))


def overview_json(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> Iterator[str]:
    """One JSON document in pieces, a node a line."""
    head = {
        "version": VERSION,
        "graph": name,
        "kind": facts.kind.value,
        "torch": facts.torch_version,
        "device": None if found.times is None else found.times.device.name,
        "step_seconds": None if found.step is None else found.step.step,
        "exposed_seconds": None if found.step is None else found.step.exposed,
        "phases": dict(found.phases),
        "total": asdict(found.total),
        "uncounted_operators": found.uncounted,
        "blocks": [{"name": block, **asdict(sums)} for block, sums in found.blocks],
        "operators": [{"name": operator, **asdict(sums)} for operator, sums in found.operators],
        "modules": [{"module": module, "operator": target, **asdict(sums)} for module, target, sums in found.modules],
    }
    yield json.dumps(head, indent=2).removesuffix("\n}")
    yield ',\n  "nodes": ['
    before = "\n    "
    for entry in entries(facts, blocks, found.rows, found.times):
        yield before + json.dumps(entry)
        before = ",\n    "
    yield "\n  ]\n}" if found.rows else "]\n}"


def _uncounted(found: GraphOverview) -> str:
    """The operators that the FLOPs leave out."""
    if found.uncounted is None:
        return UNCOUNTED_UNKNOWN
    return f"uncounted in the forward: {uncounted_text(found.uncounted)}" if found.uncounted else ""


def _flops(flops: int, uncounted: bool) -> str:
    """A lower bound where something is left out."""
    if not flops:
        return "not counted" if uncounted else ""
    return f"≥ {format_quantity(flops, 'flops')}" if uncounted else format_quantity(flops, "flops")


def _heading(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> str:
    made_with = f", torch {facts.torch_version}" if facts.torch_version else ""
    phases = ", ".join(f"{count:,} {phase}" for phase, count in found.phases)
    chosen = "" if len(found.rows) == len(facts) else f"{counted(len(found.rows), 'node')} asked for: "
    inside = counted(len(blocks.names), "block") if blocks.names else "no blocks"
    if blocks.names and blocks.names[0].startswith(_REGION):
        inside += " (the model's own checkpoint regions)"
    return (
        f"{name}: {facts.kind.value} graph of {counted(len(facts), 'node')}, {inside}{made_with}\n"
        f"{chosen}{phases or 'no nodes'}"
    )


def _blocks(found: GraphOverview) -> Iterator[tuple[str, Totals]]:
    """Neighbours of the same figures together."""

    def alike(block: tuple[str | None, Totals]) -> object:
        """Sums of times differ by their rounding."""
        return block[0] is None, evolve(block[1], seconds=None, backward_seconds=None), _totals(block[1])

    for _, each in groupby(found.blocks, key=alike):
        names, (sums, *_) = zip(*each, strict=True)
        if names[0] is None:
            yield OUTSIDE_BLOCKS, sums
        else:
            yield folded_names(names) + (f" ×{len(names)}, each" if len(names) > 1 else ""), sums


def _totals(sums: Totals) -> tuple[str, ...]:
    return (
        f"{sums.forward:,}" if sums.forward else "",
        f"{sums.backward:,}" if sums.backward else "",
        bytes_text(sums.bytes or None),
        _flops(sums.flops, bool(sums.uncounted_calls)),
        *([] if sums.seconds is None else map(seconds_text, (sums.seconds, sums.backward_seconds))),
    )
