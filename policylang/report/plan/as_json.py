"""A plan as one JSON document with a version."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from attrs import asdict

from policylang.language.diagnostics import Diagnostic
from policylang.planning.inspection.breakdown import BlockGroup, Breakdown, Scenario
from policylang.planning.inspection.peak_values import values_at_peak
from policylang.planning.inspection.worth import EditWorth, Worth
from policylang.planning.plan import Plan
from policylang.report.diagnostics import render_json
from policylang.report.order.as_json import order_data

VERSION = 1


def plan_json(
    found: Breakdown,
    worth: Sequence[Worth],
    diagnostics: Sequence[Diagnostic],
    *,
    edits: Sequence[EditWorth] = (),
    summary: bool = False,
) -> str:
    """Bytes and FLOPs are whole numbers, lines count from 1, blocks from 0. A summary has no ``groups``, and what its
    rules are worth is null.

    ``uncounted_operators``: the forward's operators that could do matrix work and that no FLOP formula counts, with the
    number of their calls; those of ``with`` are recomputed. Null where an older snapshot does not say. ``notes``: what
    the figures cannot know, of eager checkpoints planned on a graph that has the operators in another form.

    Seconds are those of ``device``, a profile by its name; without one, and where it lacks a figure, both are null.
    ``uncounted_operators`` are priced by the bytes that they move.

    ``rewrites``: what each ``fuse`` and ``collapse`` line that rewrites something is worth; empty in a summary.

    ``order``: what the scheduling lines come to, as :func:`policylang.report.order.as_json.order_data` has it.
    """
    plan = found.plan
    margins = {each.rule: each for each in worth}
    document = {
        "version": VERSION,
        "policy": plan.policy.name,
        "digest": plan.digest,
        "device": None if plan.shown_times is None else plan.shown_times.device.name,
        "forward_flops": found.forward_flops,
        "forward_seconds": found.forward_seconds,
        "seconds_per_gib": found.seconds_per_gib,
        "uncounted_operators": found.uncounted,
        "notes": found.notes,
        "with": {**_scenario(found.under), "uncounted_operators": found.uncounted_again},
        "without": _scenario(found.without),
        "rewrites": [_rewrite(plan, each) for each in edits],
        "rules": [
            {
                "source": outcome.rule.source,
                "text": outcome.rule.text,
                "matched": len(outcome.matched),
                "decided": len(outcome.decided),
                "worth": worth_data(margins.get(index)),
            }
            for index, outcome in enumerate(plan.rules)
        ],
        "expectations": [asdict(each) for each in plan.expectations],
        "order": order_data(found.communication, summary=summary),
        "at_peak": asdict(values_at_peak(found)),
        **({} if summary else {"groups": [_group(found, group) for group in found.groups]}),
        "diagnostics": json.loads(render_json(diagnostics))["diagnostics"],
    }
    return json.dumps(document, indent=2)


def _scenario(scenario: Scenario) -> dict[str, Any]:
    """Seconds that the step takes, and of these the ones in which computation waits; null without a device."""
    time = scenario.time
    return {
        **asdict(scenario.amounts),
        "step_seconds": None if time is None else time.step,
        "exposed_seconds": None if time is None else time.exposed,
        "peak": asdict(scenario.peak),
    }


def _rewrite(plan: Plan, worth: EditWorth) -> dict[str, Any]:
    span = plan.policy.rewrites[worth.statement].span
    return {
        "source": span.location,
        "text": span.one_line,
        "rewritten": len(plan.edits.of(worth.statement).done),
        "fewer_collectives": worth.fewer_collectives,
        "worth": {
            "saved_bytes": worth.saved_bytes,
            "peak_bytes": worth.peak_bytes,
            "step_seconds": worth.step_seconds,
            "exposed_seconds": worth.exposed_seconds,
        },
    }


def worth_data(margin: Worth | None) -> dict[str, Any] | None:
    if margin is None:
        return None
    amounts = asdict(margin, filter=lambda each, _: each.name != "rule")
    prices = {"flops_per_gib": margin.flops_per_gib, "seconds_per_gib": margin.seconds_per_gib}
    return {**amounts, "verdict": margin.verdict, **prices}


def _group(found: Breakdown, group: BlockGroup) -> dict[str, Any]:
    return {
        "label": group.label,
        "blocks": [found.plan.block_names[block] for block in group.blocks],
        **asdict(group.amounts),
        "values": [
            {"fate": entry.outcome.word, **asdict(entry, filter=lambda each, _: each.name != "outcome")}
            for entry in group.entries
        ],
    }
