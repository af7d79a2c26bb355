"""What is in a graph, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby

from attrs import asdict

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts
from policylang.language.figures import UNCOUNTED_UNKNOWN, counted, figure, folded_names, shortened, uncounted_text
from policylang.planning.inspection.breakdown import OUTSIDE as OUTSIDE_BLOCKS
from policylang.planning.inspection.overview import PHASES, GraphOverview, Totals, entries
from policylang.report.width import table

VERSION = 1
_COUNTS = ("forward", "backward", "bytes", "FLOPs")
_LONGEST_SHAPE = 24
_REGION = "region "
_NOTE = "bytes and FLOPs are those of the forward; a view has no bytes of its own"


def overview_text(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> str:
    """The counts by block, by operator, and by module and operator."""
    by_block = [(label, *_totals(each)) for label, each in _blocks(found)]
    by_operator = [(operator, *_totals(each)) for operator, each in found.operators]
    parts = [
        _heading(name, facts, blocks, found),
        table([("block", *_COUNTS), *by_block], right=range(1, 5)) if blocks.names else "",
        table([("operator", *_COUNTS), *by_operator], right=range(1, 5)) if by_operator else "",
        _modules(found),
        _uncounted(found),
        _NOTE if found.operators else "",
    ]
    return "\n\n".join(part for part in parts if part)


def nodes_text(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> str:
    """The nodes that were asked for, one a line."""
    rows: list[tuple[str, ...]] = [("node", "operator", "module", "phase", "shape", "bytes", "FLOPs")]
    rows += [_node(facts, row) for row in found.rows]
    flops = figure(found.total.flops, "flops")
    if found.total.uncounted_calls:
        flops = f"at least {flops}" if found.total.flops else "FLOPs not counted"
    total = (
        f"{counted(found.total.forward, 'forward operator')} of {figure(found.total.bytes, 'bytes')} and "
        f"{flops}, {found.total.backward:,} in the backward; {_NOTE}"
    )
    listed = table(rows, right=range(5, 7), ends=(2,), spare=(4, 3))
    parts = (_heading(name, facts, blocks, found), listed, total, _uncounted(found))
    return "\n\n".join(part for part in parts if part)


def overview_json(name: str, facts: Facts, blocks: BlockTable, found: GraphOverview) -> Iterator[str]:
    """One JSON document in pieces, a node a line."""
    head = {
        "version": VERSION,
        "graph": name,
        "kind": facts.kind.value,
        "torch": facts.torch_version,
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
    for entry in entries(facts, blocks, found.rows):
        yield before + json.dumps(
            {
                "name": entry.name,
                "operator": entry.operator,
                "module": entry.module,
                "block": entry.block,
                "phase": entry.phase,
                "bytes": entry.bytes,
                "flops": entry.flops,
                **({"uncounted": entry.uncounted} if entry.uncounted else {}),
            }
        )
        before = ",\n    "
    yield "\n  ]\n}" if found.rows else "]\n}"


def _uncounted(found: GraphOverview) -> str:
    """What the FLOPs leave out."""
    if found.uncounted is None:
        return UNCOUNTED_UNKNOWN
    return f"uncounted in the forward: {uncounted_text(found.uncounted)}" if found.uncounted else ""


def _flops(flops: int, uncounted: bool) -> str:
    """A lower bound where something is left out."""
    if not flops:
        return "not counted" if uncounted else ""
    return f"≥ {figure(flops, 'flops')}" if uncounted else figure(flops, "flops")


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
    for (sums, outside), each in groupby(found.blocks, key=lambda block: (block[1], block[0] is None)):
        names = [name for name, _ in each if name is not None]
        if outside:
            yield OUTSIDE_BLOCKS, sums
        else:
            yield folded_names(names) + (f" ×{len(names)}, each" if len(names) > 1 else ""), sums


def _modules(found: GraphOverview) -> str:
    rows: list[tuple[str, ...]] = [("module", "operator", "forward", "bytes", "FLOPs")]
    before = None
    for module, operator, sums in found.modules:
        shown = "" if module == before else module or "in no module"
        before = module
        calls, _, size, flops = _totals(sums)
        rows.append((shown, operator, calls, size, flops))
    return table(rows, right=range(2, 5), ends=(0,)) if len(rows) > 1 else ""


def _totals(sums: Totals) -> tuple[str, str, str, str]:
    return (
        f"{sums.forward:,}" if sums.forward else "",
        f"{sums.backward:,}" if sums.backward else "",
        figure(sums.bytes, "bytes") if sums.bytes else "",
        _flops(sums.flops, bool(sums.uncounted_calls)),
    )


def _node(facts: Facts, row: int) -> tuple[str, ...]:
    shape = facts.shapes[row]
    what = shortened("×".join(map(str, shape)), _LONGEST_SHAPE) if shape is not None else ""
    return (
        facts.names[row],
        facts.targets[row] or facts.ops[row],
        facts.modules[row] or facts.modules[facts.owners[row]],
        PHASES[facts.phases[row]],  # type: ignore[index]
        f"{what} {facts.dtypes[row]}".strip(),
        figure(facts.bytes[row], "bytes") if facts.bytes[row] else "",
        _flops(facts.flops[row], bool(facts.uncounted and facts.uncounted[row])),
    )
