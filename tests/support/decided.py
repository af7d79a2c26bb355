"""Plans with decisions put in by hand, where a test is not about rules."""

from collections.abc import Callable

from policylang.graph.facts import Facts, Flag
from policylang.language.syntax import Action, Policy
from policylang.planning.capabilities import FLAT
from policylang.planning.decisions.decide import why_unsafe
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import Plan
from policylang.planning.value_outcome import Decision, Why

_SAVE = Decision(Action.SAVE, None, Why.UNDECIDED, "the test says so")
_RECOMPUTE = Decision(Action.RECOMPUTE, None, Why.UNDECIDED, "the test says so")


def decided(facts: Facts, recompute: Callable[[int], bool], *, even_unsafe: bool = False) -> Plan:
    """A plan that recomputes the owners for which ``recompute`` is true, as far as that is safe, and saves the rest."""

    def decision(owner: int) -> Decision:
        safe = even_unsafe or (why_unsafe(facts, owner, FLAT) is None and not facts.has(owner, Flag.SYMBOLIC))
        return _RECOMPUTE if safe and recompute(owner) else _SAVE

    by_owner = {owner: decision(owner) for owner in dict.fromkeys(facts.owners[row] for row in facts.forward)}
    decisions: list[Decision | None] = [None] * len(facts)
    for row in facts.forward:
        decisions[row] = _SAVE if facts.has(row, Flag.SYMBOLIC) else by_owner[facts.owners[row]]
    return Plan(
        policy=Policy("by hand", {}, None, (), None, (), ()),
        facts=facts,
        decisions=decisions,
        rules=(),
        before=facts,
        edits=Edits(),
        expectations=(),
        diagnostics=(),
        undecided="save",
        digest="",
    )
