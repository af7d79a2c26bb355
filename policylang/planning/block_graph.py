"""A graph that is one block of a model, as an eager checkpoint traces it, and the rules it cannot follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import (
    ExpectCount,
    ExpectTotal,
    InBlock,
    Ordinal,
    Policy,
    Rule,
    Scope,
)
from policylang.language.walk import with_lets
from policylang.operators.names import DETACHES
from policylang.planning.checkpoints import handed_on

PATH_CANNOT, WHOLE_GRAPH = "APL306", "APL391"


@frozen(eq=False)
class Place:
    """Which part of a model a traced block is, and how far a second run of it comes."""

    reach: int
    """The first row that a second run does not reach."""
    blocks: BlockTable | None = None
    """Where the graph is one block: that one, among the others. None for a whole model."""
    numbered: bool = True
    """Whether it is known which block it is."""
    unchanged: frozenset[int] = frozenset()
    """The rows that give their argument as it is, and that a second run may come by without."""
    inner: Mapping[int, int] = field(factory=dict)
    """By row of an operation inside an operator (a DTensor's), the row of that operator, with which alone it runs."""


@frozen(eq=False)
class AroundBlocks:
    """What checkpoints that see one block each leave out, of a graph that holds the whole model."""

    outside: frozenset[int] = frozenset()
    """The forward rows outside every block: no checkpoint is there, and no rule ranges over them."""
    handed_on: frozenset[int] = frozenset()
    """What a block returns: the next one's checkpoint holds it as its input, whatever a rule says."""
    detached: Mapping[int, int] = field(factory=dict)
    """By ``detach``, what it reads. Autograd asks for it, as often as it likes: it is no operator of a block."""


def around_blocks(facts: Facts, blocks: BlockTable) -> AroundBlocks:
    """One pass over the edges; nothing of a graph without blocks, which is one block as a whole."""
    if not blocks.names:
        return AroundBlocks()
    block_of, owners = blocks.block_of, facts.owners
    outside = frozenset(row for row in facts.forward if block_of[row] == OUTSIDE)
    returned = {owners[row] for row in facts.forward if block_of[row] != OUTSIDE and handed_on(facts, row, block_of)}
    detached = [row for row in facts.forward if facts.targets[row] in DETACHES and facts.inputs[row]]
    return AroundBlocks(outside, frozenset(returned), {row: facts.inputs[row][0] for row in detached})


def beyond_one_block(policy: Policy, place: Place | None) -> Iterator[Diagnostic]:
    """An error for every rule that one block cannot follow as the whole model would, and a warning for every
    expectation about the whole, unless the graph is the whole model."""
    for rule in policy.rules:
        if (reason := _beyond(rule, policy, place is None or place.numbered)) is not None:
            yield diagnose(PATH_CANNOT, f"`{rule.text}` {reason[0]}", rule.span, help=reason[1])
    for expectation in policy.expectations if place is not None else ():
        if is_about_whole(expectation):
            yield diagnose(
                WHOLE_GRAPH,
                f"`{expectation.span.one_line}` is about a whole graph, and is not checked: "
                "an eager checkpoint sees one block at a time",
                span=expectation.span,
                help="say it `per block`, or check it with `policylang plan` on a snapshot of the model",
            )


def is_about_whole(expectation: object) -> bool:
    """Whether it adds up or counts over the whole graph."""
    if isinstance(expectation, ExpectTotal):
        return not expectation.per_block
    return isinstance(expectation, ExpectCount) and expectation.scope in (None, Scope.GRAPH)


def _beyond(rule: Rule, policy: Policy, numbered: bool) -> tuple[str, str] | None:
    for part in with_lets(policy, rule.selector):
        if isinstance(part, Ordinal) and part.scope is Scope.GRAPH:
            return "counts over the whole graph, and an eager checkpoint sees one block at a time", "count `per block`"
        if isinstance(part, InBlock) and part.which.kind != "any" and not numbered:
            return (
                "asks which block this is, and the checkpoint was not told",
                "use `policylang.checkpoint_model`, or give `policylang.context_fn` the whole model",
            )
    return None
