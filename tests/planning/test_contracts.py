"""Gathers that look like FSDP's and are of no parameter: a contract leaves them, and the report names them."""

from __future__ import annotations

import pytest

import policylang
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.planning.capabilities import JOINT
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.textgraph import facts_of


def graph(*inputs: str, needed: bool = True) -> Facts:
    """A gather of each input, and what is made of all of them and read by the backward."""
    lines = []
    for number, kind in enumerate(inputs):
        lines += [
            f"%i{number} = {kind}",
            f"%g{number} = _c10d_functional.all_gather_into_tensor.default(%i{number}, 4, 0) collective group=dp:4"
            " bytes=1MiB",
            f"%w{number} = _c10d_functional.wait_tensor.default(%g{number}) bytes=1MiB",
            f"%v{number} = aten.permute.default(%w{number}) view bytes=1MiB",
        ]
    read = [f"%v{number}" for number, kind in enumerate(inputs) if needed or kind.startswith("parameter")]
    lines += [f"%cat = aten.cat.default({', '.join(f'%v{number}' for number in range(len(inputs)))}) bytes=4MiB"]
    lines += ["---", "%t = tangent", f"%b = aten.mul.Tensor(%t, {', '.join(read)})", "output(%cat, %b)"]
    return facts_of("\n".join(lines))


def planned(text: str, facts: Facts) -> Plan:
    return plan(policylang.parse(text), facts, JOINT)


def notes(text: str, facts: Facts) -> list[Diagnostic]:
    return [found for found in planned(text, facts).diagnostics if found.code == "APL318"]


PARAMETER, BUFFER, INPUT = "parameter name=head.weight", "buffer name=rope.table", "input"


@pytest.mark.parametrize("name", ["fsdp_reshard_always", "fsdp_reshard_never"])
def test_gathers_of_a_buffer_and_of_an_input_are_named(name: str) -> None:
    (note,) = notes(f"include <{name}>", graph(BUFFER, PARAMETER, INPUT))
    assert note.severity is Severity.NOTE
    assert "is about parameters, and leaves 2 all-gathers of other inputs" in note.message
    assert note.details == ("g0: of the buffer `rope.table`, 1 MiB", "g2: of the input `i2`, 1 MiB")
    assert note.help == (
        "to decide about them too, write rules for `chain through (all_gather where from buffer)` and "
        "`chain through (all_gather where from input)`"
    )


def test_a_rule_about_them_covers_them() -> None:
    facts = graph(BUFFER, PARAMETER, INPUT)
    text = "include <fsdp_reshard_always>\noverride must_recompute chain through (all_gather where from buffer)"
    (note,) = notes(text, facts)
    assert note.details == ("g2: of the input `i2`, 1 MiB",)
    made = planned(f"{text}\nmust_recompute everything where gathered input", facts)
    assert not [found for found in made.diagnostics if found.code == "APL318"]
    for name in ("g0", "v0", "g1", "v1", "g2", "v2"):
        decision = made.decisions[facts.index[name]]
        assert decision.action.recomputes


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("include <fsdp_reshard_always>", graph(PARAMETER, PARAMETER)),
        ("include <fsdp_reshard_always>", graph(PARAMETER, BUFFER, needed=False)),
        ("recompute everything", graph(PARAMETER, BUFFER)),
        ("must_recompute chain through all_gather where from parameter", graph(PARAMETER, BUFFER)),
        ("recompute everything where from buffer", graph(PARAMETER, BUFFER)),
    ],
)
def test_nothing_is_said_where_nothing_is_left_or_nothing_is_promised(text: str, facts: Facts) -> None:
    assert notes(text, facts) == []
