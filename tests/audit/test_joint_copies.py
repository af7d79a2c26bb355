"""The audit of what two halves move to the host and back has to name what was spoiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import fx

from policylang.audit.graphs import audit_copies
from policylang.audit.outcome import Found
from policylang.backends import copies as copy_operators
from policylang.backends.joint import Partition
from policylang.language.diagnostics import Diagnostic
from policylang.planning.liveness import SavedForBackward
from tests.support.run_partition import traced

Crossings = dict[int, tuple[int, int]]


def offloaded(text: str = "undecided -> save\noffload gelu") -> tuple[Partition, Crossings]:
    """A partition, and where the values that it offloads cross."""
    split = traced("mlp").partition(text)
    facts = split.plan.facts
    rows = [facts.index[name] for name in split.audit.offloaded]
    sent = [node.name for node in output_of(split.forward)]
    taken = [node.name for node in split.backward.graph.find_nodes(op="placeholder")]
    names = [f"{facts.names[row]}_host" for row in rows]
    return split, {row: (sent.index(name), taken.index(name)) for row, name in zip(rows, names, strict=True)}


def first_of(crossings: Crossings) -> tuple[int, int]:
    return next(iter(crossings.values()))


def output_of(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="output")[0].args[0])


def differences(split: Partition, crossings: Crossings) -> tuple[Diagnostic, ...]:
    found, needs = Found(places=crossings), SavedForBackward.of(offloaded=tuple(crossings))
    return audit_copies(split.plan, needs, found, split.forward.graph, split.backward.graph)


def found_by_audit(split: Partition, crossings: Crossings) -> set[str]:
    return {each.code for each in differences(split, crossings)}


def copies(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def test_the_audit_reads_both_halves() -> None:
    assert found_by_audit(*offloaded()) == set()


def awaits_another(split: Partition, half: str) -> None:
    graph = getattr(split, half).graph
    wait = copies(getattr(split, half), copy_operators.WAIT_OP)[0]
    wait.args = (wait.args[0], graph.find_nodes(op="placeholder")[0], wait.args[2])


def read_where_it_lies(split: Partition, half: str) -> None:
    wait = copies(getattr(split, half), copy_operators.WAIT_OP)[0]
    next(iter(wait.users)).replace_input_with(wait, wait.args[1])


@pytest.mark.parametrize(
    ("spoil", "half"), [(awaits_another, "forward"), (awaits_another, "backward"), (read_where_it_lies, "backward")]
)
def test_the_audit_sees_a_copy_that_is_not_awaited(spoil: Callable[[Partition, str], None], half: str) -> None:
    split, crossing = offloaded()
    spoil(split, half)
    assert "APL413" in found_by_audit(split, crossing)


def test_the_audit_sees_what_was_moved_and_is_kept() -> None:
    split, crossing = offloaded()
    (output,) = split.forward.graph.find_nodes(op="output")
    host = output.args[0][first_of(crossing)[0]]
    output.args = ((*output.args[0], host.args[1]),)
    assert found_by_audit(split, crossing) == {"APL412"}


def test_the_audit_sees_what_was_not_moved_and_what_nobody_planned() -> None:
    split, crossing = offloaded()
    (output,) = split.forward.graph.find_nodes(op="output")
    returned = list(output.args[0])
    returned[first_of(crossing)[0]] = returned[first_of(crossing)[0]].args[1]
    output.args = (tuple(returned),)
    assert {"APL411", "APL412"} <= found_by_audit(split, crossing)
    split, crossing = offloaded()
    assert found_by_audit(split, dict(list(crossing.items())[1:])) == {"APL411"}


def test_the_audit_sees_a_copy_that_starts_before_its_value_exists() -> None:
    split, crossing = offloaded()
    start = copies(split.forward, copy_operators.OFFLOAD_OP)[0]
    start.args[0].prepend(start)
    (found,) = differences(split, crossing)
    assert found.code == "APL410"
    said = f"`{start.name}` runs before `{start.args[0].name}`, which it reads, which is not the order of the plan"
    assert found.message == said


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_the_audit_names_the_copy_that_is_not_awaited(half: str) -> None:
    split, crossing = offloaded()
    graph = getattr(split, half)
    wait = copies(graph, copy_operators.WAIT_OP)[0]
    ticket = wait.args[0]
    wait.replace_all_uses_with(ticket)
    graph.graph.erase_node(wait)
    said = f"`{ticket.name}` is part of a copy to the host or back that is not awaited as it has to be"
    assert said in [each.message for each in differences(split, crossing)]
