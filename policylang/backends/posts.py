"""What ranks tell each other about a graph, as plain data: a short entry always, the whole account if they differ."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from attrs import field, frozen

from policylang.graph.facts import Facts
from policylang.planning.digest import policy_text
from policylang.planning.plan import Decision, Plan, Why
from policylang.planning.rewrites.alike import common_names, words_of
from policylang.planning.rewrites.offers import Offer

_DONE = {"save": "saves it", "recompute": "recomputes it", "offload": "offloads it"}


PLAN = 0
"""The stage in which plans are compared; those before it settle rewrites, and count from 1."""


@frozen
class Key:
    """A set of ranks, and which of the graphs that they share it is, counted from 0."""

    ranks: tuple[int, ...]
    """Global ranks, sorted."""
    number: int

    def post(self, rank: int, stage: int = PLAN) -> str:
        """Where a rank posts its plan, or what it offers in a round of settling, counted from 1."""
        return f"graph/{spell(self.ranks)}/{self.number}{f'.{stage}' if stage else ''}/{rank}"


@frozen
class Entry:
    """What a rank posts for a graph, the same under each of its keys."""

    rank: int
    digest: str
    keys: tuple[Key, ...]
    label: str = ""
    """For people: what is compared, ``a joint graph of 812 nodes``."""
    error: str = ""
    """Why the rank goes no further with this graph, where it does not."""
    rounds: int = 0
    """Of a rank that settles nothing with the others: how many rounds it posts in all."""
    closed: bool = False
    """Of a round of such a rank: whether what it offers there was settled, and is what it has done."""

    def to_json(self) -> str:
        keys = [(spell(key.ranks), key.number) for key in self.keys]
        return json.dumps([self.rank, self.digest, keys, self.label, self.error, self.rounds, self.closed])

    @classmethod
    def from_json(cls, text: str | bytes) -> Entry:
        rank, digest, keys, label, error, count, closed = json.loads(text)
        return cls(
            rank, digest, tuple(Key(unspell(ranks), number) for ranks, number in keys), label, error, count, closed
        )


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
        """Raises ``TypeError`` or ``ValueError`` for data that is not what :meth:`to_json` writes."""
        session, offers = data
        return cls(str(session), tuple(Offer(str(name), str(terms), tuple(among)) for name, terms, among in offers))

    def pack(self) -> bytes:
        return json.dumps(self.to_json(), separators=(",", ":")).encode("utf-8", "surrogatepass")

    @classmethod
    def unpack(cls, content: bytes) -> Round:
        return cls.from_json(json.loads(content))


@frozen
class Account:
    """A plan as other ranks see it: enough to compare two of them node by node, without torch or the graph."""

    digest: str
    groups: tuple[str, ...]
    """The names of the process groups in the graph; they differ from rank to rank, and are not compared."""
    label: str
    pack: Callable[[], bytes] = field(repr=False, eq=False)
    """Made when it is asked for: ranks that agree never do."""
    rounds: list[Round] = field(factory=list, eq=False)
    """How its rewrites were settled; what is settled later for the halves of the graph is added."""

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "groups": list(self.groups),
            "label": self.label,
            "rounds": [each.to_json() for each in self.rounds],
            "packed": base64.b64encode(self.pack()).decode(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Account:
        """Raises ``KeyError`` or ``ValueError`` for data that is not what :meth:`to_json` writes."""
        packed = base64.b64decode(data["packed"], validate=True)
        rounds = [Round.from_json(each) for each in data["rounds"]]
        return cls(data["digest"], tuple(data["groups"]), data["label"], lambda: packed, rounds)


@frozen
class Taken:
    """What was decided about a node, as text."""

    node: str
    operator: str
    did: str
    """``saves it``."""
    by: str
    """``` `save mm` (llama3_sac.apl:4) ```."""
    rule: int | None


def label_of(facts: Facts) -> str:
    return f"a {facts.kind.value} graph of {len(facts)} nodes"


def account_of(plan: Plan, facts: Facts, rounds: list[Round]) -> Account:
    """``facts``: of the graph as it was collected, whose groups exist; a rewrite may name others."""
    return Account(plan.digest, tuple(facts.groups), label_of(facts), partial(pack, plan), rounds)


def pack(plan: Plan) -> bytes:
    """The policy's text, the rewrites and, of every node, its name, operator and decision."""
    facts = plan.facts
    operators, by_operator = _numbered(facts.targets)
    decisions, by_decision = _numbered([id(decision) for decision in plan.decisions])
    first = {id(decision): decision for decision in plan.decisions}
    spelled = [_spelled(plan, first[each]) for each in decisions]
    rewrites = list(words_of(plan.rewrites))
    content = [policy_text(plan.policy), rewrites, common_names(facts), operators, by_operator, spelled, by_decision]
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode("utf-8", "surrogatepass"), 1)


def first_difference(left: bytes, right: bytes) -> tuple[Taken | None, Taken | None] | None:
    """The first node that two packed accounts differ in, as each has it; None where an account has no such node.

    A graph that differs comes before a decision that differs, and what is done with a node before which rule says so.
    None for accounts in which no node differs: then it is the policies that do.
    """
    ours, theirs = list(_rows(left)), list(_rows(right))
    for one, two in zip(ours, theirs, strict=False):
        if (one.node, one.operator) != (two.node, two.operator):
            return one, two
    if len(ours) != len(theirs):
        at = min(len(ours), len(theirs))
        return ours[at] if at < len(ours) else None, theirs[at] if at < len(theirs) else None
    pairs = list(zip(ours, theirs, strict=True))
    by_action = ((one, two) for one, two in pairs if one.did != two.did)
    by_rule = ((one, two) for one, two in pairs if one.rule != two.rule)
    return next(by_action, None) or next(by_rule, None)


def policy_lines_that_differ(left: bytes, right: bytes) -> tuple[str, str]:
    """Of two policies, the first line in which they differ; empty where one has ended."""
    return _first_lines(_unpack(left)[0].splitlines(), _unpack(right)[0].splitlines())


def rewrites_that_differ(left: bytes, right: bytes) -> tuple[str, str]:
    """Of what two plans rewrite, the first that they do not have in common; empty where there is none."""
    return _first_lines(_unpack(left)[1], _unpack(right)[1])


def _first_lines(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    for at in range(max(len(ours), len(theirs))):
        one, two = "".join(ours[at : at + 1]), "".join(theirs[at : at + 1])
        if one != two:
            return one, two
    return "", ""


def spell(ranks: Sequence[int]) -> str:
    """Sorted ranks, short: ``0-7``, ``0-56/8`` (every eighth), ``0,3,4``."""
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        end = start
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end - start < 2:
            parts.append(str(ranks[start]))
            start += 1
            continue
        parts.append(f"{ranks[start]}-{ranks[end]}" + (f"/{step}" if step > 1 else ""))
        start = end + 1
    return ",".join(parts)


def unspell(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(","):
        bounds, _, step = part.partition("/")
        first, _, last = bounds.partition("-")
        found.extend(range(int(first), int(last or first) + 1, int(step or 1)))
    return tuple(found)


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


def _rows(packed: bytes) -> Iterator[Taken]:
    _, _, names, operators, by_operator, decisions, by_decision = _unpack(packed)
    for name, operator, decision in zip(names, by_operator, by_decision, strict=True):
        did, by, rule = decisions[decision]
        yield Taken(name, operators[operator], did, by, rule)


def _unpack(packed: bytes) -> list[Any]:
    content: list[Any] = json.loads(zlib.decompress(packed))
    return content


def _numbered(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """The distinct values in the order they come, and for each value its number there."""
    numbers: dict[Any, int] = {}
    by_value = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), by_value
