"""How each rule stands to one node."""

from __future__ import annotations

import pytest

from policylang.planning.inspection.worth import rules_on
from tests.planning.sentences import planned
from tests.support.textgraph import facts_of

FACTS = facts_of("""
    %x = input
    %mm = aten.mm.default(%x)
    %sin = aten.sin.default(%mm) region=0 tag=MUST_SAVE
    %size = aten.sym_size.int(%sin) symbolic
    ---
    %b = aten.mul.Tensor(%sin)
    output(%sin, %b)
""")


def standings(name: str) -> list[str]:
    made = planned(FACTS, "recompute everything; save mm; optional recompute cos")
    return [found.standing for found in rules_on(made, FACTS.index[name])]


def test_each_rule_is_listed_in_order():
    assert standings("mm") == ["overridden", "decided", "no match"]
    assert standings("sin") == ["kept by the user", "no match", "no match"]
    assert standings("size") == ["always saved", "no match", "no match"]


def test_the_rule_that_took_over_is_named():
    made = planned(FACTS, "recompute everything; save mm")
    assert rules_on(made, FACTS.index["mm"])[0].by == made.rules[1].rule


def test_inputs_and_backward_nodes_have_no_rules():
    made = planned(FACTS, "recompute everything")
    with pytest.raises(ValueError, match="no rule ranges over b: it is not a forward call"):
        rules_on(made, FACTS.index["b"])
