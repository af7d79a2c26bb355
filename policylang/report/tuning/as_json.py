"""A tuned policy as one JSON document with a version."""

from __future__ import annotations

import json
from typing import Any

from attrs import asdict

from policylang.report.diagnostics import render_json
from policylang.tuning.evaluation import Candidate, Tuned
from policylang.tuning.tuned_policy import TunedPolicy

VERSION = 1


def tuned_json(found: TunedPolicy, *, chosen: bool = True) -> str:
    """Bytes are whole numbers, times seconds. ``limit`` is in bytes, of ``recompute time`` a fraction. Without a budget
    ``policy``, ``chosen``, ``less`` and ``more`` are null, as a neighbour is where there is none."""
    tuned, subject = found.tuned, found.subject
    document = {
        "version": VERSION,
        "graph": {
            "name": subject.graph or None,
            "kind": subject.kind,
            "nodes": subject.nodes,
            "fingerprint": subject.fingerprint,
        },
        "device": subject.device,
        "budget": asdict(tuned.budget) if chosen else None,
        "besides": asdict(tuned.besides),
        "forward_seconds": tuned.forward,
        "bound_seconds": tuned.bound if chosen else None,
        "chosen": candidate_data(tuned.chosen, tuned) if chosen else None,
        "less": _or_none(tuned.less, tuned) if chosen else None,
        "more": _or_none(tuned.more, tuned) if chosen else None,
        "table": [candidate_data(each, tuned) for each in tuned.table],
        "policy": found.text if chosen else None,
        "diagnostics": json.loads(render_json(found.notes))["diagnostics"],
    }
    return json.dumps(document, indent=2, allow_nan=False)


def candidate_data(each: Candidate, tuned: Tuned) -> dict[str, Any]:
    return {
        "rules": each.rules.splitlines(),
        "peak_bytes": tuned.besides.on(each.peak),
        "graph_peak_bytes": each.peak,
        "peak_at": each.peak_at,
        "saved_bytes": each.saved,
        "offloaded_bytes": each.offloaded,
        "recomputed_seconds": each.recompute,
        "exposed_seconds": each.exposed,
        "copies_seconds": each.copies,
        "step_seconds": each.step,
    }


def _or_none(each: Candidate | None, tuned: Tuned) -> dict[str, Any] | None:
    return None if each is None else candidate_data(each, tuned)
