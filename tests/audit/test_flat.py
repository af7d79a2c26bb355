"""The audit of a flat graph has to name what was spoiled: each test changes one thing in a graph that came out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

import policylang
from policylang.audit.graphs import audit_flat
from policylang.backends import copies
from policylang.backends.flat import FlatPath
from policylang.graph import marks
from policylang.language.diagnostics import Diagnostic
from policylang.planning.plan import Plan
from tests.support.hand import Hand, aten, by_hand, c10d

Spoil = Callable[[fx.Graph], None]


def chain() -> fx.GraphModule:
    """A gather, two draws and two writes to a buffer, all of which the backward goes back to."""
    hand = Hand()
    x, buffer = hand.input("x"), hand.input("buffer")
    wait = hand.f(c10d.wait_tensor.default, hand.f(c10d.all_gather_into_tensor.default, x, 1, "0"))
    first = hand.f(aten.rand_like.default, wait)
    second = hand.f(aten.rand_like.default, wait)
    hand.f(aten.add_.Tensor, buffer, 1)
    hand.f(aten.mul_.Tensor, buffer, 2)
    sine = hand.f(aten.sin.default, wait)
    cosine = hand.f(aten.cos.default, sine)
    sum_ = hand.f(aten.add.Tensor, first, second)
    loss = hand.f(aten.mul.Tensor, cosine, sum_)
    back = hand.b(aten.mul.Tensor, loss, cosine)
    for value in (sine, second, first, wait):
        back = hand.b(aten.mul.Tensor, back, value)
    return hand.done(loss, back)


RECOMPUTE = "undecided -> save; recompute sin, rand_like, all_gather"
OFFLOAD = "undecided -> save; recompute rand_like; offload sin, cos"


def spoiled(text: str, spoil: Spoil) -> list[Diagnostic]:
    plan, graph = applied(text)
    assert audit_flat(plan, graph).agrees
    spoil(graph)
    return list(audit_flat(plan, graph).differences)


def applied(text: str) -> tuple[Plan, fx.Graph]:
    gm = chain()
    return FlatPath().apply(gm, policylang.parse(text)).plan, gm.graph


def at(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def said(found: list[Diagnostic]) -> list[tuple[str, str]]:
    """The codes, and what is said up to where the nodes are told apart."""
    return [(each.code, each.message) for each in found]


def saved_after_all(graph: fx.Graph) -> None:
    again = at(graph, "sin_default_recomputed")
    again.replace_all_uses_with(at(graph, "sin_default"))
    graph.erase_node(again)


def recomputed_after_all(graph: fx.Graph) -> None:
    cosine = at(graph, "cos_default")
    readers = [user for user in cosine.users if user.meta.get("custom", {}).get("phase") == "backward"]
    with graph.inserting_before(readers[0]):
        again = graph.call_function(cosine.target, cosine.args)
    again.meta = {**cosine.meta, "custom": {"phase": "backward", marks.RECOMPUTED: cosine.name}}
    for reader in readers:
        reader.replace_input_with(cosine, again)


def recomputed_without_a_mark(graph: fx.Graph) -> None:
    recomputed_after_all(graph)
    next(node for node in graph.nodes if marks.custom(node.meta).get(marks.RECOMPUTED) == "cos_default").meta = {}


def gathered_twice(graph: fx.Graph) -> None:
    again = at(graph, "all_gather_into_tensor_default_recomputed")
    with graph.inserting_after(again):
        more = graph.node_copy(again)
    assert more.meta["custom"][marks.RECOMPUTED] == "all_gather_into_tensor_default"


def draws_exchanged(graph: fx.Graph) -> None:
    one, other = at(graph, "rand_like_default_recomputed"), at(graph, "rand_like_default_1_recomputed")
    states = one.args[0], other.args[0]
    one.update_arg(0, states[1])
    other.update_arg(0, states[0])


def drawn_anew(graph: fx.Graph) -> None:
    again = at(graph, "rand_like_default_recomputed")
    again.target, again.args = aten.rand_like.default, again.args[2:]
    again.kwargs = {}


def writes_swapped(graph: fx.Graph) -> None:
    at(graph, "add__tensor").prepend(at(graph, "mul__tensor"))


def draws_swapped(graph: fx.Graph) -> None:
    at(graph, "rand_like_default").prepend(at(graph, "rand_like_default_1"))


def read_before_it_is_made(graph: fx.Graph) -> None:
    at(graph, "sin_default").prepend(at(graph, "cos_default"))


NOT_PLANNED = "which is not what was planned"
NOT_THE_ORDER = "which is not the order of the plan"
COSINE_UNSAVED = ("APL402", f"`cos_default` (aten.cos.default) was not saved, {NOT_PLANNED}")
SINE_SAVED = ("APL401", f"`sin_default` (aten.sin.default) was saved, {NOT_PLANNED}")
COSINE_AGAIN = ("APL403", f"`cos_default` (aten.cos.default) was recomputed, {NOT_PLANNED}")
STRANGER = ("APL405", "the graph has a node `cos_default_1`, which the graph that was planned does not have")
GATHER = "`all_gather_into_tensor_default` (_c10d_functional.all_gather_into_tensor.default)"
TWICE = ("APL403", f"{GATHER} was recomputed more than once for the same part of the backward, {NOT_PLANNED}")
DRAWN, DRAWN_1 = (
    ("APL407", f"`{name}` (aten.rand_like.default) draws new random numbers, {NOT_PLANNED}")
    for name in ("rand_like_default", "rand_like_default_1")
)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (saved_after_all, [SINE_SAVED]),
        (recomputed_after_all, [COSINE_UNSAVED, SINE_SAVED, COSINE_AGAIN]),
        (recomputed_without_a_mark, [COSINE_UNSAVED, STRANGER]),
        (gathered_twice, [TWICE]),
        (draws_exchanged, [DRAWN, DRAWN_1]),
        (drawn_anew, [DRAWN]),
        (writes_swapped, [("APL410", f"`add__tensor` runs after `mul__tensor`, {NOT_THE_ORDER}")]),
        (draws_swapped, [("APL410", f"`rand_like_default` runs after `rand_like_default_1`, {NOT_THE_ORDER}")]),
        (
            read_before_it_is_made,
            [("APL410", f"`cos_default` runs before `sin_default`, which it reads, {NOT_THE_ORDER}")],
        ),
    ],
)
def test_names_what_was_spoiled(spoil: Spoil, expected: list[tuple[str, str]]) -> None:
    assert sorted(said(spoiled(RECOMPUTE, spoil))) == sorted(expected)


def waits(graph: fx.Graph, ending: str) -> list[fx.Node]:
    found = graph.find_nodes(op="call_function", target=copies.WAIT_OP)
    return [node for node in found if node.name.endswith(ending)]


def awaits_another(graph: fx.Graph) -> None:
    one, other = waits(graph, "_reloaded")
    one.args, other.args = (other.args[0], *one.args[1:]), (one.args[0], *other.args[1:])


def not_awaited(graph: fx.Graph) -> None:
    wait = waits(graph, "_host")[0]
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)


def read_on_the_host(graph: fx.Graph) -> None:
    wait = waits(graph, "_reloaded")[0]
    next(iter(wait.users)).replace_input_with(wait, wait.args[1])


def read_on_the_device(graph: fx.Graph) -> None:
    wait = waits(graph, "_reloaded")[0]
    next(iter(wait.users)).replace_input_with(wait, at(graph, wait.name.removesuffix("_reloaded")))


def started_too_early(graph: fx.Graph) -> None:
    at(graph, "sin_default").prepend(at(graph, "sin_default_offload"))


def sent_late(graph: fx.Graph) -> None:
    at(graph, "sin_default_reload").prepend(at(graph, "sin_default_host"))


def one_more(graph: fx.Graph) -> None:
    value = at(graph, "add_tensor")
    reader = next(node for node in graph.nodes if node.name == "mul_tensor_1")
    with graph.inserting_before(reader):
        out = graph.call_function(copies.OFFLOAD_OP, (value,))
        host = graph.call_function(copies.WAIT_OP, (out, value, copies.HOST))
        back = graph.call_function(copies.RELOAD_OP, (host, torch.device("cpu")))
        here = graph.call_function(copies.WAIT_OP, (back, host, torch.device("cpu")))
    reader.update_arg(1, here)


RACE = "is part of a copy to the host or back that is not awaited as it has to be"
TOO_EARLY = f"`sin_default_offload` runs before `sin_default`, which it reads, {NOT_THE_ORDER}"
HELD = f"`sin_default` (aten.sin.default) was offloaded and is held on the device all the same, {NOT_PLANNED}"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (awaits_another, ("APL413", f"`sin_default_reloaded` {RACE}")),
        (not_awaited, ("APL413", f"`sin_default_offload` {RACE}")),
        (read_on_the_host, ("APL413", f"`mul_tensor_1` {RACE}")),
        (read_on_the_device, ("APL401", f"`cos_default` (aten.cos.default) was saved, {NOT_PLANNED}")),
        (started_too_early, ("APL410", TOO_EARLY)),
        (one_more, ("APL411", f"`add_tensor` was offloaded, {NOT_PLANNED}")),
        (sent_late, ("APL412", HELD)),
    ],
)
def test_names_the_copy_that_was_spoiled(spoil: Spoil, expected: tuple[str, str]) -> None:
    assert expected in said(spoiled(OFFLOAD, spoil))


def test_a_copy_that_starts_before_its_memory_is_written_is_named() -> None:
    gm = by_hand(
        "x; kept = sin(x); written = add_(kept, 1); loss = exp(written); back := mul(loss, written); -> loss, back"
    )
    plan = FlatPath().apply(gm, policylang.parse("undecided -> save; optional offload everything")).plan
    assert audit_flat(plan, gm.graph).agrees
    (start,) = gm.graph.find_nodes(op="call_function", target=copies.OFFLOAD_OP)
    at(gm.graph, "add__tensor").prepend(start)
    (wait,) = waits(gm.graph, "_host")
    start.update_arg(0, at(gm.graph, "sin_default"))
    wait.update_arg(1, at(gm.graph, "sin_default"))
    said_of_it = "runs before `add__tensor`, which writes to what it copies, which is not the order of the plan"
    found = said(list(audit_flat(plan, gm.graph).differences))
    assert ("APL410", f"`add__tensor_offload` {said_of_it}") in found
