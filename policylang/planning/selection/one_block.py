"""What would match if the graph were one block: where a graph has no blocks, such rules fail for that one reason."""

from __future__ import annotations

import re
from array import array

from attrs import evolve

from policylang.graph.blocks import BlockTable
from policylang.language.globs import PathGlob
from policylang.language.syntax import (
    Expectation,
    ExpectCount,
    ExpectTotal,
    InBlock,
    Is,
    Ordinal,
    Policy,
    Rule,
    Scope,
    Where,
)
from policylang.language.walk import predicates, selector_of, with_lets
from policylang.planning.selection.selectors import Selections, selections_for


def speaks_of_blocks(statement: Rule | Expectation, policy: Policy) -> bool:
    """Whether a sentence says `in block`, `per block`, `crosses block`, or uses a name that does."""
    if isinstance(statement, ExpectTotal):
        return statement.per_block
    if isinstance(statement, ExpectCount) and statement.scope is Scope.BLOCK:
        return True
    selector = selector_of(statement)
    return selector is not None and any(
        isinstance(part, InBlock)
        or (isinstance(part, Ordinal) and part.scope is Scope.BLOCK)
        or (isinstance(part, Where) and any(_crosses_block(test) for test in predicates(part.predicate)))
        for part in with_lets(policy, selector)
    )


def _crosses_block(test: object) -> bool:
    return isinstance(test, Is) and test.name == "crosses block"


class AsOneBlock:
    """The selections of a policy on a graph without blocks, as if all of it were one."""

    def __init__(self, policy: Policy, selections: Selections) -> None:
        self._policy = policy
        self._without = selections
        self._with: Selections | None = None

    def explains(self, statement: Rule | Expectation) -> bool:
        """Whether a sentence that fails would not if the graph had blocks: no block is all that it lacks."""
        if self._without.blocks.names or not speaks_of_blocks(statement, self._policy):
            return False
        selector = selector_of(statement)
        if selector is None:
            return True
        if self._with is None:
            name, facts = _name_of_a_block(self._policy), self._without.facts
            inside = [f"{name}.{path}" if path else name for path in facts.modules]
            table = BlockTable(array("i", bytes(4 * len(facts))), (name,), alone=0)
            self._with = selections_for(self._policy, evolve(facts, modules=inside), table, times=self._without.times)
        return bool(self._with.rows(selector))


def _name_of_a_block(policy: Policy) -> str:
    """A path that the policy's ``blocks`` would match: of `{layers,h}.*` it is `layers.0`."""
    if policy.blocks is None:
        return "layers.0"
    name = re.sub(r"\{([^,}]*)[^}]*\}", r"\1", policy.blocks.glob.strip("/"))
    name = re.sub(r"\[(.)[^\]]*\]", r"\1", name).replace("*", "0").replace("?", "0")
    return name if PathGlob(policy.blocks.glob).outermost(name) == name else "layers.0"
