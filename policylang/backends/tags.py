"""Writes decisions onto nodes: the ``recompute`` tag that PyTorch's partitioners read, and who decided.

Only forward nodes are tagged. Tagging twice with the same plan changes nothing; tagging with another one first removes
policylang's tags, and restores the user's tags that an ``override`` rule had replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from policylang.backends import refusals
from policylang.backends.path import BackendPath
from policylang.backends.runtime import timed
from policylang.graph import marks
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Action
from policylang.planning.plan import Plan
from policylang.planning.value_outcome import Decision, Why, is_open

_RECOMPUTE = "recompute"
_REGION = "ac_graph_id"

_UNSAFE = Flag.WRITES | Flag.EFFECTFUL | Flag.READS_MUTATED


def write(graph: fx.Graph, plan: Plan) -> None:
    """Tag the nodes of ``graph`` with what ``plan`` decided, and untag every other node. Values that the user's
    ``checkpoint`` decided keep their tag, except those that torch's border rule saves."""
    index, decisions = plan.facts.index, plan.decisions
    for node in graph.nodes:
        remove(node)
        row = index.get(node.name)
        decision = None if row is None else decisions[row]
        if decision is None or (decision.why is Why.UNDECIDED and decision.action is None):
            continue
        if decision.why is Why.USER:
            assert decision.action is not None
            node.meta[_RECOMPUTE] = CheckpointPolicy[decision.action.tag]
        else:
            _tag(node, decision, provenance(plan, decision))


@contextmanager
def lent_to_min_cut(graph: fx.Graph, plan: Plan) -> Iterator[None]:
    """Within, every value that may not be recomputed is tagged ``MUST_SAVE``, the one tag that min-cut obeys, offloaded
    values included: they are copied back, so min-cut need not save what is made of them. The collectives of the
    backward are tagged to stay there: min-cut would move those that need no gradient into the forward and save what
    they gather. All these tags are removed after: no rule asked for them."""
    before = {node: node.meta[_RECOMPUTE] for node in graph.nodes if _RECOMPUTE in node.meta}
    facts = plan.facts
    communicated = _communicated_in_backward(facts)
    for node in graph.nodes:
        row = facts.index.get(node.name)
        decision = None if row is None else plan.decisions[row]
        if row in communicated:
            node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_RECOMPUTE
        if row is None or decision is None:
            continue
        if is_unsafe(facts, row) if is_open(decision) else decision.outcome.is_held:
            node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        for node in graph.nodes:
            if node in before:
                node.meta[_RECOMPUTE] = before[node]
            else:
                node.meta.pop(_RECOMPUTE, None)


def _communicated_in_backward(facts: Facts) -> set[int]:
    """The collectives of the backward and what it computes to hand them."""
    found: set[int] = set()
    for row in range(len(facts) - 1, -1, -1):
        if facts.phases[row] != Phase.BACKWARD or facts.flags[row] & Flag.EFFECTFUL:
            continue
        if facts.flags[facts.owners[row]] & Flag.COLLECTIVE or any(user in found for user in facts.users[row]):
            found.add(row)
    return found


def is_unsafe(facts: Facts, row: int) -> bool:
    """True if recomputation would get a value wrong on this path; random numbers it can replay."""
    return bool((facts.flags[row] | facts.flags[facts.owners[row]]) & _UNSAFE)


def provenance(plan: Plan, decision: Decision) -> str:
    """Who decided, as written on the node: ``file:line`` of the rule, or of the ``undecided`` line."""
    if decision.rule is not None:
        return plan.policy.rules[decision.rule].source
    if decision.why is Why.UNDECIDED and plan.policy.undecided is not None:
        return plan.policy.undecided.span.location
    return decision.why.value


def remove(node: fx.Node) -> None:
    """Take policylang's tag off a node; a user's tag that it replaced comes back."""
    meta = node.meta
    if not marks.is_ours(meta):
        return
    annotations = dict(meta["custom"])
    tag, region = marks.user_tag(meta)
    for key in (marks.PROVENANCE, marks.USER_TAG):
        annotations.pop(key, None)
    _set_custom(meta, annotations)
    meta.pop(_RECOMPUTE, None)
    meta.pop(_REGION, None)
    if tag is not None:
        meta[_RECOMPUTE] = CheckpointPolicy[tag]
    if region is not None:
        meta[_REGION] = region


def mark_saved(graph: fx.Graph, saved: Mapping[str, bool | str]) -> None:
    """Leave ``custom["policylang_saved"]`` on the named nodes and no others, for ``where recorded saved``."""
    for node in graph.nodes:
        if node.name in saved:
            node.meta["custom"] = {**marks.custom(node.meta), marks.SAVED: saved[node.name]}
        elif marks.SAVED in marks.custom(node.meta):
            _set_custom(node.meta, {key: value for key, value in node.meta["custom"].items() if key != marks.SAVED})


def _tag(node: fx.Node, decision: Decision, who: str) -> None:
    """Write a rule's decision. ``leave`` writes no tag, and takes the user's off where it overrides one."""
    meta = node.meta
    if decision.action is None and _RECOMPUTE not in meta:
        return
    annotations = {**marks.custom(meta), marks.PROVENANCE: who}
    if _RECOMPUTE in meta:
        annotations[marks.USER_TAG] = list(marks.user_tag(meta))
    meta["custom"] = annotations
    if decision.action is None:
        del meta[_RECOMPUTE]
    else:
        meta[_RECOMPUTE] = CheckpointPolicy[decision.action.tag]
        meta[_REGION] = marks.AC_GRAPH_ID


def _set_custom(meta: dict[str, Any], annotations: dict[str, Any]) -> None:
    if annotations:
        meta["custom"] = annotations
    else:
        meta.pop("custom", None)


NOT_BY_MIN_CUT = "APL330"


class HookPath(BackendPath):
    name: ClassVar[str] = "hook"
    compares_ranks: ClassVar[bool] = False

    def refusals(self, plan: Plan) -> Sequence[Diagnostic]:
        return (*refusals.unsaveable(plan), *_beyond_min_cut(plan))

    def lower(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        with timed(seconds, "tag"):
            write(gm.graph, plan)


def _beyond_min_cut(plan: Plan) -> Iterator[Diagnostic]:
    """The lines that min-cut would pass over in silence."""
    for rule in plan.policy.rules:
        if rule.action is Action.PREFER_SAVE:
            message = f"`{rule.text}` would do nothing behind a hook of Inductor's: min-cut knows no `prefer_save`"
            help = "write `save`, or compile with `policylang.backend`, which partitions itself"
            yield diagnose(NOT_BY_MIN_CUT, message, rule.span, help=help)
    for expectation, planned in zip(plan.policy.expectations, plan.expectations, strict=True):
        if planned.status == "deferred":
            message = f"`{planned.text}` cannot be checked behind a hook of Inductor's: min-cut decides after it"
            help = "write `undecided -> save` or `undecided -> recompute`, or compile with `policylang.backend`"
            yield diagnose(NOT_BY_MIN_CUT, message, expectation.span, help=help)
