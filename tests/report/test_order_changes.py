"""How the order of two plans differs, as text, Markdown and JSON."""

from __future__ import annotations

import json

from attrs import evolve

from policylang.planning.inspection.compare import compare
from policylang.report.plan_comparison import comparison_json, comparison_markdown, comparison_text
from tests.support.ordered import ordered_plan, schedule_of_names


def test_what_changes_between_two_orders() -> None:
    """Without any line, and with the buckets and the prefetch."""
    new = ordered_plan(4)
    old = evolve(new, order=None)
    found = compare(old, new)
    assert not found.same
    text = comparison_text(found).split("\n")
    assert text[0] == "no decision changes: 16 decisions are the same"
    assert text[2].startswith("8 collectives joined into buckets: gather_w0, gather_v0, gather_w1, ")
    assert text[2].endswith(", and 2 more")
    rows = [" ".join(line.split()) for line in text]
    assert "collectives 8 4 -4" in rows
    assert "buckets 0 4 +4" in rows
    assert "exposed 68 ms 16 ms -52 ms" in rows
    assert "step time 148 ms 96 ms -52 ms" in rows
    assert "in flight at most 1000 B 2 KiB +1000 B" in rows
    assert comparison_text(compare(new, old)).split("\n")[2].startswith("8 collectives in a bucket no more: gather_w0")
    same = compare(new, new)
    assert same.same
    assert "no collective runs elsewhere" in comparison_text(same)
    assert json.loads(comparison_json(found))["order"]["new"]["buckets"] == 4
    assert json.loads(comparison_json(found))["same"] is False
    assert "8 collectives joined" in comparison_markdown(found)
    assert compare(old, old).order is None


def test_collectives_that_start_elsewhere_are_named() -> None:
    """The same buckets; in one of the plans each starts where it is read."""
    new = ordered_plan(4)
    assert new.order is not None
    late = [name for name, op in zip(new.order.facts.names, new.order.facts.ops, strict=True) if op == "call_function"]
    old = evolve(new, order=evolve(new.order, schedule=schedule_of_names(new.order.facts, late)))
    found = compare(old, new).order
    assert found is not None
    assert found.starts == ("gather_w1", "gather_v1", "gather_w2", "gather_v2", "gather_w3", "gather_v3")
    assert found.awaited == found.joined == found.parted == ()
    assert "6 collectives started elsewhere: gather_w1" in comparison_text(compare(old, new))
