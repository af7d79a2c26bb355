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
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import evolve, field, frozen

from policylang.graph.facts import Facts, Group, InputKind, Ref
from policylang.language.syntax import Policy
from policylang.planning.digest import policy_text
from policylang.planning.edits.offers import Offer
from policylang.planning.plan import Decision, Plan, Why
from policylang.ranks.messages import Share

SETTINGS = "settings"
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
    content: Callable[[], Any] = field(repr=False, eq=False)
    """What is behind the digest. Made when it is asked for: ranks that agree never do."""


@frozen
class Round:
    """What a rank offers to rewrite in one round of settling."""

    session: str
    """Which of the graphs that are made of one: the joint graph itself, then its halves."""
    offers: tuple[Offer, ...]

    @property
    def stage(self) -> Stage:
        words = (f"{offer.name} {offer.terms} {offer.among}" for offer in self.offers)
        return Stage(f"rewrites of the {self.session} graph", _digest(words), (), lambda: self.offers)


@frozen
class Account:
    """All that is compared about one graph, in order. It is kept beside caches, for a process that takes the compiled
    graph from there."""

    label: str
    groups: tuple[str, ...]
    """The names of the process groups in the graph."""
    operators: str
    """The digest of its operators, those on sizes left out."""
    static: str
    """Of the types and sizes of its parameters and buffers, which do not change while a model trains."""
    inputs: str
    """Of those of its other inputs."""
    signature: str
    """Of what two compilations of one piece of code have alike where they differ in sizes alone: its parameters and
    buffers, and the collectives but for sizes."""
    steps: list[Stage | Round] = field(factory=list, eq=False)
    launched: list[str] = field(factory=list, eq=False)
    """The digest of the collectives that run, but for sizes, once it is known."""

    @property
    def rounds(self) -> tuple[Round, ...]:
        return tuple(each for each in self.steps if isinstance(each, Round))

    def pack(self) -> str:
        """As text, with all that is behind its digests."""
        steps = [
            evolve(each, content=Fixed(each.content())) if isinstance(each, Stage) else each for each in self.steps
        ]
        return base64.b64encode(zlib.compress(pickle.dumps(evolve(self, steps=steps)), 1)).decode()

    @classmethod
    def unpack(cls, text: str) -> Account:
        """Raises ``ValueError`` for a text that is not what :meth:`pack` gives."""
        try:
            found = pickle.loads(zlib.decompress(base64.b64decode(text, validate=True)))
        except Exception as error:  # whatever unpickling runs into
            raise ValueError(f"not an account: {error}") from error
        if not isinstance(found, cls):
            raise ValueError("not an account")
        return found


@frozen
class Fixed:
    """A content that was made before."""

    content: Any

    def __call__(self) -> Any:
        return self.content


def account_of(facts: Facts) -> Account:
    """``facts``: of the graph as it was collected, whose groups exist; a rewrite may name others."""
    label = f"a {facts.kind.value} graph of {len(facts)} nodes"
    static: list[str] = []
    inputs: list[str] = []
    for row, kind in enumerate(facts.input_kinds):
        if facts.dtypes[row] and kind not in (InputKind.NOT_AN_INPUT, InputKind.TANGENT):
            (static if kind in _STATIC else inputs).append(f"{facts.dtypes[row]}{facts.shapes[row]}")
    collectives = (each.but_for_sizes for each in collectives_of(Run("", facts)))
    operators = _digest(facts.targets[row] for row in _kept(facts))
    signature = _digest([*static, "", *collectives])
    return Account(label, tuple(facts.groups), operators, _digest(static), _digest(inputs), signature)


def policy_digest(policy: Policy) -> str:
    return _digest([policy_text(policy)])


def plan_stage(plan: Plan) -> Stage:
    """``plan.before`` has the groups that exist; the plan's own facts may name others."""
    before, facts = plan.before, plan.facts
    collectives = collectives_of(Run("", before))
    kept = _kept(facts)
    digest = _digest(
        [
            policy_text(plan.policy),
            *(facts.targets[row] for row in kept),
            "",
            *(_word(plan.decisions[row]) for row in kept),
            "",
            *_order(collectives),
            "",
            *plan.edits.words(),
        ]
    )
    return Stage(PLAN, digest, _shares(collectives, before.groups), partial(_plan_content, plan, kept, collectives))


def collectives_stage(runs: Sequence[Run], settings: Sequence[str]) -> tuple[Stage, str]:
    """The collectives that are run, and their digest but for sizes. ``settings``: what may be why they differ."""
    found = [each for run in runs for each in collectives_of(run)]
    groups = {name: group for run in runs for name, group in run.facts.groups.items()}
    launched = _digest(each.but_for_sizes for each in found)
    rows = tuple(Row(each.node, each.operator, collective=each, group=groups[each.group].ranks) for each in found)
    content = Fixed(Content(rows=rows, lines=tuple(settings)))
    return Stage(COLLECTIVES, _digest(_order(found)), _shares(found, groups), content), launched


def settings_stage(settings: Sequence[str]) -> Stage:
    """Lines that have to be the same on every rank."""
    return Stage(SETTINGS, _digest(settings), (), Fixed(Content(lines=tuple(settings))))


def _kept(facts: Facts) -> list[int]:
    """The rows that count: those with a tensor, those with a group, and what is returned."""
    dtypes, sizes, groups, ops = facts.dtypes, facts.bytes, facts.group_names, facts.ops
    return [
        row for row in range(len(facts)) if dtypes[row] or sizes[row] or groups[row] or ops[row] == "output"
    ]  # fmt: skip


def _shares(collectives: Sequence[Collective], groups: Mapping[str, Group]) -> tuple[Share, ...]:
    return tuple(
        Share(name, groups[name].ranks, _digest(f"{each.when} {each}" for each in collectives if each.group == name))
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
    """What is done with a node, as text."""

    node: str
    operator: str
    did: str = ""
    """``saves it``."""
    by: str = ""
    """``` `save mm` (llama3_sac.apl:4) ```."""
    rule: int | None = None
    collective: Collective | None = None
    group: tuple[int, ...] = ()
    """The ranks of the collective's group, in order."""


@frozen
class Content:
    """What is behind the digest of a stage."""

    policy: str = ""
    rewrites: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    lines: tuple[str, ...] = ()
    """Settings."""


def _plan_content(plan: Plan, kept: Sequence[int], collectives: Sequence[Collective]) -> Content:
    facts, groups = plan.facts, plan.before.groups
    calls = {each.node: each for each in collectives}
    rows = []
    for row in kept:
        name, call = facts.names[row], calls.get(facts.names[row])
        ranks = () if call is None else groups[call.group].ranks
        rows.append(Row(name, facts.targets[row], *_spelled(plan, plan.decisions[row]), call, ranks))
    return Content(policy_text(plan.policy), tuple(plan.edits.words()), tuple(rows))


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
