"""Recorded values are found by the nodes that came of an operator, whatever these are."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from policylang.graph.facts import LostMarker, Phase
from policylang.graph.marks import SavedMarker, find, from_annotation

NODE = re.compile(r"(\w+)(?:=(\w+)\(([\w,]*)\)(\d?))?")
GONE = "no forward node of this graph was traced from it"


def record(name: str, number: int | None = 0, *, count: int = 1, following: str = "", **found: Any) -> SavedMarker:
    return SavedMarker("p", name, number, count=count, following=following or name, **found or {"value": True})


def found_in(text: str, *marks: SavedMarker) -> tuple[list[str], list[LostMarker]]:
    """``neg=neg(x)0`` is a node, its operator, what it reads and which of the marks it carries; what reads ``tangent``
    is backward."""
    lines = [("x", "", "", ""), *(found.groups(default="") for found in NODE.finditer(text))]
    names = [name for name, *_ in lines]
    targets = [op and ("builtin.getitem" if op == "getitem" else f"aten.{op}.default") for _, op, *_ in lines]
    inputs = [tuple(map(names.index, filter(None, reads.split(",")))) for _, _, reads, _ in lines]
    users = [tuple(row for row, reads in enumerate(inputs) if read in reads) for read in range(len(lines))]
    phases: list[int] = []
    owners: list[int] = []
    for row, name in enumerate(names):
        backward = name == "tangent" or any(phases[read] == Phase.BACKWARD for read in inputs[row])
        phases.append(Phase.BACKWARD if backward else Phase.FORWARD if targets[row] else Phase.INPUT)
        owners.append(owners[inputs[row][0]] if targets[row] == "builtin.getitem" else row)
    markers = {row: marks[int(mark)] for row, (*_, mark) in enumerate(lines) if mark}
    columns = {"names": names, "targets": targets, "phases": phases, "inputs": inputs, "users": users, "owners": owners}
    found = find(markers, SimpleNamespace(**columns))
    return [names[row] for row in dict.fromkeys(row for row, _ in found.saved)], found.lost


VALUE, COPY, BOTH = record("op"), record("op", copies=True), record("op", value=True, copies=True)
TUPLE, COPY_OF_TUPLE = record("op", value=True, several=True), record("op", copies=True, several=True)
SOFTMAX = "softmax=_softmax(x)0 detach=detach(softmax)0 mm=mm(softmax) tangent grad=mul(detach,tangent)"
SILU = "neg=neg(x)0 exp=exp(neg)0 div=div(x,exp)0 mm=mm(div) tangent sigmoid=sigmoid(x,tangent)0 grad=mul(sigmoid,div)"
CALLED_TWICE = "neg=neg(x)0 div=div(neg)0 mm=mm(div) neg_1=neg(mm)0 div_1=div(neg_1)0 mm_1=mm(div_1)"
DECOMPOSED_NORM = "sub=sub(x)0 rsqrt=rsqrt(x)0 mul=mul(sub,rsqrt)"
NORM = "norm=layer_norm(x)0 out=getitem(norm)0 mean=getitem(norm)0 mul=mul(out) tangent grad=mul(mean,tangent)"


@pytest.mark.parametrize(
    ("text", "mark", "saved", "lost"),
    [
        (SILU, VALUE, ["div"], ""),  # the result of a decomposition is what is read from outside
        (SOFTMAX, VALUE, ["softmax"], ""),
        (SOFTMAX, COPY, ["detach"], ""),
        (SOFTMAX, BOTH, ["softmax", "detach"], ""),
        ("exp=exp(x)0 div=div(exp)0 mm=mm(div)", COPY, ["div"], ""),  # a copy that is not made is the value
        ("expand=expand(x)0 clone=clone(expand)0 view=view(clone)0 mm=mm(view)", VALUE, ["view"], ""),
        ("erf=erf(x)0 mul=mul(erf)0 mm=mm(mul,erf)", VALUE, [], "it may be any of `erf`, `mul`"),
        (CALLED_TWICE, VALUE, ["div", "div_1"], ""),
        (DECOMPOSED_NORM, TUPLE, ["sub", "rsqrt"], ""),
        (NORM, TUPLE, ["out", "norm", "mean"], ""),
        (DECOMPOSED_NORM, COPY_OF_TUPLE, [], "it may be any of `sub`, `rsqrt`"),
        (
            *("norm=norm(x)0 mul=mul(norm)", evolve(TUPLE, partly=True), []),
            "some of its values were saved and others recomputed, and a decision is for all of them",
        ),
    ],
)
def test_what_was_saved_is_found_or_reported(text: str, mark: SavedMarker, saved: list[str], lost: str) -> None:
    assert found_in(text, mark) == (saved, [LostMarker("op", lost)] if lost else [])


def test_what_is_gone_is_missed_and_named() -> None:
    names = ["a", "b", "c", "d"]
    marks = [record(name, row, count=4, following=names[(row + 1) % 4]) for row, name in enumerate(names)]
    saved, lost = found_in("c=sin(x)2 end=add(c)", *marks)
    assert saved == ["c"]
    assert lost == [LostMarker(name, GONE) for name in ("value 1 of 4", "value 2 of 4", "d")]


def test_a_dropped_view_is_saved_as_what_it_views() -> None:
    base = SavedMarker("p", "mul", count=1, stands_for=(0,))
    assert found_in("mul=mul(x)0 mm=mm(mul)", base) == (["mul"], [])
    assert found_in("mul=mul(x)0 view=view(mul)1 mm=mm(view)", base, record("view")) == (["view"], [])


def test_one_piece_of_an_unsaved_tuple_does_not_stand_in() -> None:
    """A decision on the operator would save the other pieces as well."""
    base = SavedMarker("p", "topk", count=1, several=True, stands_for=(0,))
    found = found_in("topk=topk(x)0 values=getitem(topk)0 mm=mm(values)", base)
    assert found == ([], [LostMarker("value 1 of 1", GONE)])


def test_backward_nodes_carry_annotations_and_are_no_part_of_it() -> None:
    assert found_in("tangent grad=mul(x,tangent)0 out=sin(grad)", VALUE) == ([], [])


def test_an_annotation_is_read_as_it_was_written() -> None:
    mark = evolve(record("silu", 3, count=7, following="mm"), stands_for=[4, 5])
    assert from_annotation(mark.annotation()) == mark
    assert from_annotation(True) is None
    assert from_annotation({"something": "else"}) is None
