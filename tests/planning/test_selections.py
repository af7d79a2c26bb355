"""What selectors denote, where one of them cannot be asked."""

from __future__ import annotations

import pytest

from policylang.graph.blocks import blocks_of
from policylang.graph.chains import Chains
from policylang.language.syntax import Operator
from policylang.planning.selection.selectors import Selections
from tests.support.textgraph import facts_of

GRAPH = "%x = input\n%a = aten.mm.default(%x, %x)\n%b = aten.add.Tensor(%a, %x)\noutput(%b)"


def test_a_selector_that_raises_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor asks the same selections of one selector after the other, some with words that nobody looked up."""
    facts = facts_of(GRAPH)
    selections = Selections(facts, {}, blocks_of(facts), Chains(facts))
    broken, mm, add = (Operator(None, name, None) for name in ("broken", "mm", "add"))
    evaluate = Selections.evaluate

    def fails(self: Selections, node: object, parts: list[list[int]]) -> list[int]:
        if node is broken:
            raise TypeError
        return evaluate(self, node, parts)

    monkeypatch.setattr(Selections, "evaluate", fails)
    for _ in range(2):
        with pytest.raises(TypeError):
            selections.rows(broken)
        assert [facts.names[row] for row in selections.rows(mm)] == ["a"]
        assert [facts.names[row] for row in selections.rows(add)] == ["b"]
