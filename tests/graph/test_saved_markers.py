"""Recorded values are found by the nodes that came of an operator, whatever these are."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from policylang.graph.facts import LostMarker, Phase
from policylang.graph.marks import FoundMarkers, MarkerColumns, SavedMarker, find, from_annotation

Line = tuple[str, str, str, SavedMarker | None]
"""Name, operator, names of what it reads, record. What reads ``tangent`` is backward."""


def record(name: str, number: int | None = 0, *, count: int = 1, following: str = "", **found: Any) -> SavedMarker:
    found = found or {"value": True}
    return SavedMarker("p", name, number, count=count, following=following or name, **found)


def found_in(*lines: Line) -> tuple[list[str], list[LostMarker]]:
    names = [name for name, *_ in lines]
    inputs = [tuple(names.index(read) for read in reads.split()) for _, _, reads, _ in lines]
    users = [tuple(row for row, reads in enumerate(inputs) if read in reads) for read in range(len(lines))]
    phases: list[int] = []
    owners: list[int] = []
    for row, (name, target, _, _) in enumerate(lines):
        backward = name == "tangent" or any(phases[read] == Phase.BACKWARD for read in inputs[row])
        phases.append(Phase.BACKWARD if backward else Phase.FORWARD if target else Phase.INPUT)
        owners.append(owners[inputs[row][0]] if target == "builtin.getitem" else row)
    columns = MarkerColumns(names, [target for _, target, _, _ in lines], phases, inputs, users, owners)
    found: FoundMarkers = find({row: line[3] for row, line in enumerate(lines) if line[3] is not None}, columns)
    return [names[row] for row in dict.fromkeys(found.saved)], found.lost


X: Line = ("x", "", "", None)
TANGENT: Line = ("tangent", "", "", None)


def test_the_result_of_a_decomposition_is_what_is_read_from_outside() -> None:
    silu = record("silu")
    saved, lost = found_in(
        X,
        ("neg", "aten.neg.default", "x", silu),
        ("exp", "aten.exp.default", "neg", silu),
        ("div", "aten.div.Tensor", "x exp", silu),
        ("mm", "aten.mm.default", "div", None),
        TANGENT,
        ("sigmoid", "aten.sigmoid.default", "x tangent", silu),
        ("grad", "aten.mul.Tensor", "sigmoid div", None),
    )
    assert (saved, lost) == (["div"], [])


def test_a_copy_that_autograd_keeps_is_told_from_the_value() -> None:
    def softmax(**found: bool) -> tuple[list[str], list[LostMarker]]:
        mark = record("softmax", **found)
        return found_in(
            X,
            ("softmax", "aten._softmax.default", "x", mark),
            ("detach", "aten.detach.default", "softmax", mark),
            ("mm", "aten.mm.default", "softmax", None),
            TANGENT,
            ("grad", "aten.mul.Tensor", "detach tangent", None),
        )

    assert softmax(value=True) == (["softmax"], [])
    assert softmax(copies=True) == (["detach"], [])
    assert softmax(value=True, copies=True) == (["softmax", "detach"], [])


def test_a_copy_that_is_not_made_is_the_value() -> None:
    mark = record("softmax", copies=True)
    saved, lost = found_in(
        X, ("exp", "aten.exp.default", "x", mark), ("div", "aten.div.Tensor", "exp", mark), ("mm", "a.b.c", "div", None)
    )
    assert (saved, lost) == (["div"], [])


def test_a_clone_inside_a_decomposition_is_no_copy() -> None:
    mark = record("repeat")
    saved, lost = found_in(
        X,
        ("expand", "aten.expand.default", "x", mark),
        ("clone", "aten.clone.default", "expand", mark),
        ("view", "aten.view.default", "clone", mark),
        ("mm", "aten.mm.default", "view", None),
    )
    assert (saved, lost) == (["view"], [])


def test_two_results_that_could_be_the_value_are_reported() -> None:
    mark = record("gelu")
    saved, lost = found_in(
        X,
        ("erf", "aten.erf.default", "x", mark),
        ("mul", "aten.mul.Tensor", "erf", mark),
        ("mm", "aten.mm.default", "mul erf", None),
    )
    assert saved == []
    assert lost == [LostMarker("gelu", "it may be any of `erf`, `mul`")]


def test_a_module_called_twice_has_each_value_twice() -> None:
    mark = record("silu")
    saved, lost = found_in(
        X,
        ("neg", "aten.neg.default", "x", mark),
        ("div", "aten.div.Tensor", "neg", mark),
        ("mm", "aten.mm.default", "div", None),
        ("neg_1", "aten.neg.default", "mm", mark),
        ("div_1", "aten.div.Tensor", "neg_1", mark),
        ("mm_1", "aten.mm.default", "div_1", None),
    )
    assert (saved, lost) == (["div", "div_1"], [])


def test_of_a_tuple_all_results_were_saved() -> None:
    norm = record("norm", value=True, several=True)
    rest: Line = ("mul", "aten.mul.Tensor", "sub rsqrt", None)
    saved, lost = found_in(X, ("sub", "aten.sub.Tensor", "x", norm), ("rsqrt", "aten.rsqrt.default", "x", norm), rest)
    assert (saved, lost) == (["sub", "rsqrt"], [])
    whole = found_in(
        X,
        ("norm", "aten.native_layer_norm.default", "x", norm),
        ("out", "builtin.getitem", "norm", norm),
        ("mean", "builtin.getitem", "norm", norm),
        ("mul", "aten.mul.Tensor", "out", None),
        TANGENT,
        ("grad", "aten.mul.Tensor", "mean tangent", None),
    )
    assert whole == (["out", "norm", "mean"], [])


def test_a_tuple_saved_in_part_is_reported() -> None:
    norm = record("norm", value=True, several=True, partly=True)
    saved, lost = found_in(X, ("norm", "a.b.c", "x", norm), ("mul", "aten.mul.Tensor", "norm", None))
    assert saved == []
    assert lost[0].name == "norm"
    assert "others recomputed" in lost[0].reason


def test_one_kept_copy_of_a_decomposed_tuple_is_not_guessed_at() -> None:
    norm = record("norm", copies=True, several=True)
    saved, lost = found_in(
        X,
        ("sub", "aten.sub.Tensor", "x", norm),
        ("rsqrt", "aten.rsqrt.default", "x", norm),
        ("mul", "aten.mul.Tensor", "sub rsqrt", None),
    )
    assert saved == []
    assert lost == [LostMarker("norm", "it may be any of `sub`, `rsqrt`")]


def test_what_is_gone_is_missed_and_named() -> None:
    names = ["a", "b", "c", "d"]
    marks = [record(name, row, count=4, following=names[(row + 1) % 4]) for row, name in enumerate(names)]
    gone = "no forward node of this graph comes of it"
    end: Line = ("end", "aten.add.Tensor", "c", None)
    saved, lost = found_in(X, ("c", "aten.sin.default", "x", marks[2]), end)
    assert saved == ["c"]
    assert lost == [LostMarker("value 1 of 4", gone), LostMarker("value 2 of 4", gone), LostMarker("d", gone)]


def test_a_dropped_view_is_saved_as_what_it_views() -> None:
    base = SavedMarker("p", "mul", count=1, stands_for=(0,))
    end: Line = ("mm", "aten.mm.default", "mul", None)
    assert found_in(X, ("mul", "aten.mul.Tensor", "x", base), end) == (["mul"], [])
    kept = found_in(
        X,
        ("mul", "aten.mul.Tensor", "x", base),
        ("view", "aten.view.default", "mul", record("view")),
        ("mm", "aten.mm.default", "view", None),
    )
    assert kept == (["view"], [])


def test_one_piece_of_an_unsaved_tuple_does_not_stand_in() -> None:
    """A decision on the operator would save the other pieces as well."""
    base = SavedMarker("p", "topk", count=1, several=True, stands_for=(0,))
    saved, lost = found_in(
        X,
        ("topk", "aten.topk.default", "x", base),
        ("values", "builtin.getitem", "topk", base),
        ("mm", "aten.mm.default", "values", None),
    )
    assert saved == []
    assert lost == [LostMarker("value 1 of 1", "no forward node of this graph comes of it")]


def test_backward_nodes_carry_annotations_and_are_no_part_of_it() -> None:
    mark = record("silu")
    assert found_in(X, TANGENT, ("grad", "aten.mul.Tensor", "x tangent", mark), ("out", "a.b.c", "grad", None)) == (
        [],
        [],
    )


def test_an_annotation_is_read_as_it_was_written() -> None:
    mark = evolve(record("silu", 3, count=7, following="mm"), stands_for=[4, 5])
    assert from_annotation(mark.annotation()) == mark
    assert from_annotation(True) is None
    assert from_annotation({"something": "else"}) is None
