"""What a rank is about to do with a graph, as other ranks see it: enough to compare, without torch or the graph.

Two kinds of things are compared. What all ranks have alike that hang together: the operators and what was decided
about them, the policy, the order in which groups are used. And what the members of one process group have alike: each
collective over it, with its reduction, element type and sizes. Sizes are numbers here, symbolic ones those of this
call: ranks that compare now are about to run now. Names of nodes are for people. A rank that has seen more shapes than
another has nodes for sizes that the other has not, so nodes without a tensor do not count.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import field, frozen

from policylang.graph.facts import Facts, InputKind, Ref
from policylang.language.syntax import Policy
from policylang.planning.digest import policy_text
from policylang.planning.plan import Decision, Plan, Why
from policylang.planning.rewrites.alike import words_of
from policylang.planning.rewrites.offers import Offer
from policylang.ranks.messages import Share

PLAN = "plan"
COLLECTIVES = "collectives"
_DONE = {"save": "saves it", "recompute": "recomputes it", "offload": "offloads it"}
_STATIC = (InputKind.PARAMETER, InputKind.BUFFER)


# --- collectives ----------------------------------------------------------------------------------------------------


@frozen
class Collective:
    """One call of a collective."""

    node: str
    operator: str
    terms: str
    """Its arguments but for tensors and the group: the reduction, the source. Of what every rank sends and receives in
    an ``all_to_all``, nothing: that is each rank's own."""
    types: str
    """The element types of its tensors."""
    sizes: str
    """Their shapes; empty where they are each rank's own."""
    group: str
    """The name of its process group."""
    when: str = ""
    """``forward`` or ``backward``, where the graph was split."""

    @property
    def but_for_sizes(self) -> str:
        return f"{self.when} {self.operator}({self.terms}) {self.types} {self.group}"

    def __str__(self) -> str:
        types = ", ".join(filter(None, (self.terms, f"{self.types}{self.sizes}")))
        return f"{self.operator.rpartition('.')[0]}({types})"


@frozen(eq=False)
class Run:
    """A graph that is run, or a part of one."""

    when: str
    """``forward``, ``backward``; empty for all at once."""
    facts: Facts
    rows: Collection[int] | None = None
    """Where it is a part."""


def collectives_of(run: Run) -> list[Collective]:
    """Those over groups of several ranks, in order."""
    found = []
    facts, when = run.facts, run.when
    for row, name in enumerate(facts.group_names):
        if name and len(facts.groups[name].ranks) > 1 and (run.rows is None or row in run.rows):
            own_sizes = "all_to_all" in facts.targets[row]
            tensors = list(_tensors(facts.arguments[row]))
            found.append(
                Collective(
                    facts.names[row],
                    facts.targets[row],
                    ", ".join(_plain_terms(facts.arguments[row], name, own_sizes)),
                    ", ".join(dict.fromkeys(facts.dtypes[each] for each in tensors)),
                    "" if own_sizes else " ".join(str(list(facts.shapes[each] or ())) for each in tensors),
                    name,
                    when,
                )
            )
    return found


def _tensors(values: Sequence[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, Ref):
            yield value.row
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _plain_terms(values: Sequence[Any], group: str, own_sizes: bool) -> Iterator[str]:
    for value in values:
        if isinstance(value, (Ref, tuple)) or value is None or value == group:
            continue  # lists are of tensors, or the sizes that are each rank's own
        if own_sizes and isinstance(value, int):
            continue
        text = str(value)
        if " at 0x" not in text and "ScriptObject" not in text:  # what has no words of its own
            yield text


# --- what is compared -----------------------------------------------------------------------------------------------


@frozen
class Stage:
    """One thing that is compared about a graph."""

    name: str
    digest: str
    shares: tuple[Share, ...]
    pack: Callable[[], bytes] = field(repr=False, eq=False)
    """Made when it is asked for: ranks that agree never do."""

    def to_json(self) -> list[Any]:
        shares = [[share.name, list(share.ranks), share.digest] for share in self.shares]
        return [self.name, self.digest, shares, base64.b64encode(self.pack()).decode()]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Stage:
        name, digest, shares, packed = data
        content = base64.b64decode(packed, validate=True)
        found = tuple(Share(str(group), tuple(ranks), str(each)) for group, ranks, each in shares)
        return cls(str(name), str(digest), found, lambda: content)


@frozen
class Round:
    """What a rank offers to rewrite in one round of settling."""

    session: str
    """Which of the graphs that are made of one: the joint graph itself, then its halves."""
    offers: tuple[Offer, ...]

    def to_json(self) -> list[Any]:
        return [self.session, [[offer.name, offer.terms, list(offer.among)] for offer in self.offers]]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Round:
        session, offers = data
        return cls(str(session), tuple(Offer(str(name), str(terms), tuple(among)) for name, terms, among in offers))

    def pack(self) -> bytes:
        return _packed(self.to_json())

    @classmethod
    def unpack(cls, content: bytes) -> Round:
        return cls.from_json(json.loads(zlib.decompress(content)))


@frozen
class Account:
    """All that is compared about one graph, in order. It is kept beside caches, for a process that takes the compiled
    graph from there."""

    label: str
    groups: tuple[str, ...]
    """The names of the process groups in the graph."""
    signature: str
    """See :func:`signature_of`."""
    operators: str = ""
    """The digest of its operators, those on sizes left out."""
    steps: list[Stage | Round] = field(factory=list, eq=False)
    launched: list[str] = field(factory=list, eq=False)
    """The digest of the collectives that run, but for sizes, once it is known."""

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(each for each in self.steps if isinstance(each, Round))

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "groups": list(self.groups),
            "signature": self.signature,
            "operators": self.operators,
            "steps": [[isinstance(each, Round), each.to_json()] for each in self.steps],
            "launched": list(self.launched),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Account:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for data that is not what :meth:`to_json` writes."""
        steps = [Round.from_json(step) if is_round else Stage.from_json(step) for is_round, step in data["steps"]]
        words = (str(data["signature"]), str(data["operators"]))
        groups, launched = tuple(map(str, data["groups"])), list(map(str, data["launched"]))
        return cls(str(data["label"]), groups, *words, steps, launched)


def account_of(facts: Facts) -> Account:
    """``facts``: of the graph as it was collected, whose groups exist; a rewrite may name others."""
    label = f"a {facts.kind.value} graph of {len(facts)} nodes"
    operators = _digest(facts.targets[row] for row in _kept(facts))
    return Account(label, tuple(facts.groups), signature_of(facts), operators)


def signature_of(facts: Facts) -> str:
    """What two compilations of one piece of code have alike where they differ in sizes alone: parameters and buffers,
    whose sizes do not change, and the collectives but for theirs."""
    inputs = (
        f"{facts.dtypes[row]}{facts.shapes[row]}" for row, kind in enumerate(facts.input_kinds) if kind in _STATIC
    )
    return _digest([*inputs, "", *(each.but_for_sizes for each in collectives_of(Run("", facts)))])


def policy_digest(policy: Policy) -> str:
    return _digest([policy_text(policy)])


def plan_stage(plan: Plan) -> Stage:
    """``plan.before`` has the groups that exist; the plan's own facts may name others."""
    before, facts = plan.before, plan.facts
    collectives = collectives_of(Run("", before))
    words: dict[int, str] = {}  # decisions are few shared objects, so each is spelled once
    decided = [words.get(id(d)) or words.setdefault(id(d), _word(d)) for d in plan.decisions]
    kept = _kept(facts)
    digest = _digest(
        [
            policy_text(plan.policy),
            *(facts.targets[row] for row in kept),
            "",
            *(decided[row] for row in kept),
            "",
            *_order(collectives),
            "",
            *words_of(plan.rewrites),
        ]
    )
    return Stage(PLAN, digest, _shares(collectives, before), partial(_pack_plan, plan, kept, collectives))


def collectives_stage(runs: Sequence[Run], settings: Sequence[str]) -> tuple[Stage, str]:
    """The collectives that are run, and their digest but for sizes. ``settings``: what may be why they differ."""
    found = [each for run in runs for each in collectives_of(run)]
    groups = {name: group for run in runs for name, group in run.facts.groups.items()}
    launched = _digest(each.but_for_sizes for each in found)
    shares = tuple(
        Share(name, groups[name].ranks, _digest(f"{each.when} {each}" for each in found if each.group == name))
        for name in _groups(found)
    )
    pack = partial(_pack_collectives, found, {name: groups[name].ranks for name in _groups(found)}, settings)
    return Stage(COLLECTIVES, _digest(_order(found)), shares, pack), launched


def settings_stage(settings: Sequence[str], shares: tuple[Share, ...]) -> Stage:
    """Lines that have to be the same on every rank."""
    return Stage("settings", _digest(settings), shares, lambda: _packed(list(settings)))


def _kept(facts: Facts) -> list[int]:
    """The rows that count: those with a tensor, those with a group, and what is returned."""
    dtypes, sizes, groups, ops = facts.dtypes, facts.bytes, facts.group_names, facts.ops
    return [
        row for row in range(len(facts)) if dtypes[row] or sizes[row] or groups[row] or ops[row] == "output"
    ]  # fmt: skip


def _shares(collectives: Sequence[Collective], facts: Facts) -> tuple[Share, ...]:
    return tuple(
        Share(name, facts.groups[name].ranks, _digest(str(each) for each in collectives if each.group == name))
        for name in _groups(collectives)
    )


def _groups(collectives: Iterable[Collective]) -> dict[str, int]:
    """By name, which of the groups it is in the order of their first use."""
    numbers: dict[str, int] = {}
    for each in collectives:
        numbers.setdefault(each.group, len(numbers))
    return numbers


def _order(collectives: Sequence[Collective]) -> Iterator[str]:
    """What is run over which group, told without the names of groups: those differ from rank to rank."""
    numbers = _groups(collectives)
    return (f"{each.when} {each.operator} {numbers[each.group]}" for each in collectives)


def _word(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    return "auto" if decision.action is None else decision.action.name


def _digest(words: Iterable[str]) -> str:
    digest = hashlib.sha256()
    digest.update("\0".join(words).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


# --- the content of a stage, where digests differ -------------------------------------------------------------------


@frozen
class Row:
    """What was decided about a node, as text."""

    node: str
    operator: str
    did: str
    """``saves it``."""
    by: str
    """``` `save mm` (llama3_sac.apl:4) ```."""
    rule: int | None
    group: tuple[int, ...] = ()
    """The ranks of a collective's group, in order."""
    name: str = ""
    """The group's name."""
    call: str = ""
    """A collective in words."""
    when: str = ""
    """Of a graph that was split: ``forward`` or ``backward``."""


@frozen
class Content:
    """A stage as another rank reads it."""

    policy: str = ""
    rewrites: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    lines: tuple[str, ...] = ()
    """Settings."""


def unpack(name: str, packed: bytes) -> Content:
    """``name``: the stage's."""
    content = json.loads(zlib.decompress(packed))
    if name == PLAN:
        policy, rewrites, names, operators, by_operator, decisions, by_decision, calls = content
        rows = []
        for at, (node, operator, decision) in enumerate(zip(names, by_operator, by_decision, strict=True)):
            did, by, rule = decisions[decision]
            ranks, group, call = calls.get(str(at), ((), "", ""))
            rows.append(Row(node, operators[operator], did, by, rule, tuple(ranks), group, call))
        return Content(policy, tuple(rewrites), tuple(rows))
    if name == COLLECTIVES:
        rows = [
            Row(node, operator, "", "", None, tuple(ranks), group, call, when)
            for when, node, operator, ranks, group, call in content[0]
        ]
        return Content(rows=tuple(rows), lines=tuple(content[1]))
    return Content(lines=tuple(content))


def _pack_plan(plan: Plan, kept: Sequence[int], collectives: Sequence[Collective]) -> bytes:
    facts = plan.facts
    operators, by_operator = _numbered([facts.targets[row] for row in kept])
    chosen = [plan.decisions[row] for row in kept]
    decisions, by_decision = _numbered([id(decision) for decision in chosen])
    first = {id(decision): decision for decision in chosen}
    spelled = [_spelled(plan, first[each]) for each in decisions]
    names = [facts.names[row] for row in kept]
    at = {name: number for number, name in enumerate(names)}
    groups = plan.before.groups
    calls = {
        at[each.node]: (groups[each.group].ranks, each.group, str(each)) for each in collectives if each.node in at
    }
    rewrites = list(words_of(plan.rewrites))
    return _packed([policy_text(plan.policy), rewrites, names, operators, by_operator, spelled, by_decision, calls])


def _pack_collectives(
    collectives: Sequence[Collective], ranks: Mapping[str, tuple[int, ...]], settings: Sequence[str]
) -> bytes:
    rows = [(each.when, each.node, each.operator, ranks[each.group], each.group, str(each)) for each in collectives]
    return _packed([rows, list(settings)])


def _packed(content: Any) -> bytes:
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode("utf-8", "surrogatepass"), 1)


def _spelled(plan: Plan, decision: Decision | None) -> tuple[str, str, int | None]:
    if decision is None:
        return "decides nothing there", "", None
    action = decision.action
    did = "leaves it to the partitioner" if action is None else _done(action.name.lower())
    if decision.rule is not None:
        rule = plan.policy.rules[decision.rule]
        return did, f"`{rule.text}` ({rule.source})", decision.rule
    if decision.why is Why.UNDECIDED:
        return did, "no rule", None
    return did, decision.reason or decision.why.value, None


def _done(action: str) -> str:
    word = action.removeprefix("must_").removeprefix("prefer_")
    return _DONE.get(word, word) + (" (`" + action + "`)" if word != action else "")


def _numbered(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """The distinct values in the order they come, and for each value its number there."""
    numbers: dict[Any, int] = {}
    by_value = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), by_value
