"""Recorded graphs with something wrong in them: each is a graph that a snapshot holds, or a diagnostic."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.recorded import recorded_facts
from tests.graph.test_recorded import SMALL, TENSOR
from tests.support.shared_graphs import JOINT, recorded

REFUSED = {"APL340", "APL341", "APL357"}
KINDS = ("placeholder", "get_attr", "call_function", "call_module", "call_method", "output", "root", "")
WORDS = (
    *KINDS,
    *("mm", "w", "a.b", "__class__", "\0", "é", "\ud800", "MUST_SAVE", "is_forward", "is_backward"),
    *("aten.mm.default", "lab.nothing.default", "lab.own.default", "lab.__class__.default", "lab.mm"),
    *("<built-in function getitem>", "<built-in function exec>", "_c10d_functional.wait_tensor.default"),
    *("ParamAOTInput(target='w')", "ParamAOTInput(target=3)", "PlainAOTInput()", "GradAOTOutput(grad_of=1)"),
)
NUMBERS = (0, 1, -1, 2**31, 2**62, 2**63, 2**70, -(2**63), 1.5, float("nan"), float("inf"))
WRAPPED = (
    *({"n": "mm"}, {"n": "output"}, {"n": []}, {"dtype": "x"}, {"dtype": "bits8"}, {"device": "x"}),
    *({"slice": []}, {"slice": [1, 2, 3, 4]}, {"repr": "strided"}, {"repr": "x"}, {"scalar": []}),
    *(TENSOR, [TENSOR, TENSOR], {**TENSOR, "shape": [2**40, 2**40]}, {**TENSOR, "shape": [-1, 4]}),
    {**TENSOR, "dtype": "quint8"},
)
VALUES = st.one_of(
    st.sampled_from([None, True, [], {}, [[]], [None], [0], [1, 2, 3]]),
    *map(st.sampled_from, (WORDS, NUMBERS, WRAPPED)),
)


@cache
def of_a_model() -> dict[str, Any]:
    """The first call of each operator at the beginning of a recorded step, with what they read."""
    recording = recorded(JOINT)
    rows = {row[0]: row for row in recording["nodes"]}
    calls = [row for row in recording["nodes"] if row[1] == "call_function"][:300]
    pending = list({row[2]: row[0] for row in reversed(calls)}.values())
    wanted: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in wanted:
            wanted.add(name)
            pending.extend(reads(rows[name][3:5]))
    nodes = [row for name, row in rows.items() if name in wanted]
    output = ["output", "output", "output", [[{"n": nodes[-1][0]}]], {}, None, {}]
    return {**recording, "nodes": [*nodes, output]}


def reads(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and "n" in value:
        yield value["n"]
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from reads(part)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value holds others, from the outside in."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(value[key], (*at, key))


def damage(recording: dict[str, Any], draw: st.DataObject) -> None:
    """One change: something else in a place, nothing in it, a row twice or elsewhere, another kind of node."""
    nodes = recording.get("nodes")
    rows = nodes if isinstance(nodes, list) else []
    how = draw.draw(st.sampled_from(("change", "change", "drop", "repeat", "move", "kind")))
    row = draw.draw(st.integers(0, len(rows) - 1)) if rows else None
    if how in ("change", "drop"):
        whole = row is None or draw.draw(st.integers(0, 4)) == 0
        found = {key: each for key, each in recording.items() if key != "nodes"} if whole else rows[row or 0]
        at = list(places(found))
        if not at:
            return
        *way, last = draw.draw(st.sampled_from(at))
        place: Any = recording if whole else found
        for step in way:
            place = place[step]
        if how == "drop":
            del place[last]
        else:
            place[last] = copy.deepcopy(draw.draw(VALUES))
    elif row is not None and how == "kind":
        if isinstance(rows[row], list) and len(rows[row]) > 1:
            rows[row][1] = draw.draw(st.sampled_from(KINDS))
    elif row is not None:
        moved = copy.deepcopy(rows[row]) if how == "repeat" else rows.pop(row)
        if how == "repeat" and isinstance(moved, list) and moved and draw.draw(st.booleans()):
            moved[0] = "another"
        rows.insert(draw.draw(st.integers(0, len(rows))), moved)


@pytest.mark.parametrize("base", [lambda: SMALL, of_a_model], ids=["small", "of a model"])
def test_whatever_is_wrong_is_a_diagnostic(base: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("recorded")

    @settings(max_examples=100, deadline=None)
    @given(st.data(), st.integers(1, 3))
    def check(draw: st.DataObject, changes: int) -> None:
        recording = copy.deepcopy(base())
        for _ in range(changes):
            damage(recording, draw)
        (folder / "r.json").write_text(json.dumps(recording))
        codes: set[str] = set()
        try:
            facts = recorded_facts(folder / "r.json")
        except PolicyGraphError as error:
            codes = {found.code for found in error.diagnostics}
        assert codes <= REFUSED
        if codes:
            return
        snapshot.write(facts, folder / "r.graph")
        assert list(snapshot.load(folder / "r.graph").names) == list(facts.names)

    check()
