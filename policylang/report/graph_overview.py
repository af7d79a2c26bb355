"""The operators, modules, blocks and nodes of a graph, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
from policylang.report.layout import exposed_text, seconds_text, table, times_text
from policylang.simulation.node_times import NodeTimes

VERSION = 1
_COUNTS = ("forward", "backward", "bytes", "FLOPs")
_TIMES = ("time", "backward time")
_LONGEST_SHAPE = 24
_REGION = "region "
_NOTE = "bytes and FLOPs are those of the forward; a view has no bytes of its own"


def overview_text(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> str:
    """The counts by block, by operator, and by module and operator."""
    head = (*_COUNTS, *_TIMES) if found.times is not None else _COUNTS
    by_block = [(label, *_totals(each)) for label, each in _blocks(found)]
    by_operator = [(operator, *_totals(each)) for operator, each in found.operators]
    numbers = range(1, len(head) + 1)
    parts = [
        _heading(name, facts, blocks, found),
        table([("block", *head), *by_block], right=numbers) if blocks.names else "",
        table([("operator", *head), *by_operator], right=numbers) if by_operator else "",
        _modules(found),
        _uncounted(found),
        "\n".join(filter(None, (times_text(found.times), _exposed(found)))),
        _NOTE if found.operators else "",
    ]
    return "\n\n".join(part for part in parts if part)


def nodes_text(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> str:
    """The nodes that were asked for, one a line."""
    timed = found.times is not None
    head = ("node", "operator", "module", "phase", "shape", "bytes", "FLOPs", *_TIMES[:timed])
    rows = [head, *(_node(facts, row, found.times) for row in found.rows)]
    flops = format_quantity(found.total.flops, "flops")
    if found.total.uncounted_calls:
        flops = f"at least {flops}" if found.total.flops else "FLOPs not counted"
    total = (
        f"{counted(found.total.forward, 'forward operator')} of {format_quantity(found.total.bytes, 'bytes')} and "
        f"{flops}{_total_time(found.total.seconds)}, {found.total.backward:,} in the backward"
        f"{_total_time(found.total.backward_seconds)}; {_NOTE}"
    )
    listed = table(rows, right=range(5, len(head)), ends=(2,), spare=(4, 3))
    parts = (_heading(name, facts, blocks, found), listed, total, _uncounted(found), times_text(found.times))
    return "\n\n".join(part for part in parts if part)


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


def _exposed(found: GraphOverview) -> str:
    """Empty without a device, and for a graph without collectives."""
    if found.step is None:
        return ""
    exposed = exposed_text(found.step)
    step = format_quantity(found.step.step, "seconds")
    return f"as traced: a step of {step}, exposed {exposed if exposed != '-' else 'nothing'}"


def _total_time(seconds: float | None) -> str:
    return f" in {format_quantity(seconds, 'seconds')}" if seconds else ""


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
    for (_, _, outside), each in groupby(found.blocks, key=lambda block: (*_alike(block[1]), block[0] is None)):
        names, all_sums = zip(*each, strict=True)
        sums = all_sums[0]
        if outside:
            yield OUTSIDE_BLOCKS, sums
        else:
            yield folded_names(names) + (f" ×{len(names)}, each" if len(names) > 1 else ""), sums


def _alike(sums: Totals) -> tuple[Totals, tuple[str, ...]]:
    """The key by which blocks are folded; sums of times differ by their rounding."""
    return evolve(sums, seconds=None, backward_seconds=None), _seconds(sums)


def _modules(found: GraphOverview) -> str:
    timed = found.times is not None
    rows: list[tuple[str, ...]] = [("module", "operator", "forward", "bytes", "FLOPs", *_TIMES[:timed])]
    before = None
    for module, operator, sums in found.modules:
        shown = "" if module == before else module or "in no module"
        before = module
        calls, _, size, flops, *seconds = _totals(sums)
        rows.append((shown, operator, calls, size, flops, *seconds[:1]))
    return table(rows, right=range(2, len(rows[0])), ends=(0,)) if len(rows) > 1 else ""


def _seconds(sums: Totals) -> tuple[str, ...]:
    if sums.seconds is None:
        return ()
    return seconds_text(sums.seconds), seconds_text(sums.backward_seconds)


def _totals(sums: Totals) -> tuple[str, ...]:
    return (
        f"{sums.forward:,}" if sums.forward else "",
        f"{sums.backward:,}" if sums.backward else "",
        format_quantity(sums.bytes, "bytes") if sums.bytes else "",
        _flops(sums.flops, bool(sums.uncounted_calls)),
        *_seconds(sums),
    )


def _node(facts: Facts, row: int, times: NodeTimes | None) -> tuple[str, ...]:
    shape = facts.shapes[row]
    what = shortened("×".join(map(str, shape)), _LONGEST_SHAPE) if shape is not None else ""
    return (
        facts.names[row],
        facts.targets[row] or facts.ops[row],
        facts.modules[row] or facts.modules[facts.owners[row]],
        PHASES[facts.phases[row]],  # type: ignore[index]
        f"{what} {facts.dtypes[row]}".strip(),
        format_quantity(facts.bytes[row], "bytes") if facts.bytes[row] else "",
        _flops(facts.flops[row], bool(facts.uncounted and facts.uncounted[row])),
        *([] if times is None else [seconds_text(times.seconds[row])]),
    )
