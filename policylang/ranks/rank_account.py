"""The data that ranks compare: the messages between them, and a rank's plan for a graph, reduced to digests.

Needs neither torch nor the graph. Two kinds of facts are compared. Equal on all ranks that are connected over groups:
the operators and their decisions, the policy, the order in which groups are used, the recomputed collectives. Equal on
the members of one process group: each collective over it, with its reduction, element type and sizes. Sizes are numbers
here, symbolic ones those of this call: ranks that compare now are about to run now.

Names of nodes and files are not compared, nor nodes that compute sizes: a rank that has met more shapes has more of
them. Where a rank cuts its part out of a value, or pads it, operators that only move elements follow from its position:
the first may have a view of the whole, the last a padded shard.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any, TypeVar

from attrs import evolve, field, frozen

from policylang.graph.facts import Facts, Flag, InputKind, Ref, StepKind, found_in
from policylang.language.diagnostics import Diagnostic
from policylang.language.plain_data import OWN, from_plain, to_plain
from policylang.language.syntax import Policy
from policylang.operators.layouts import MOVERS, GroupMove, movers_of
from policylang.planning.edits.other_ranks import Proposal
from policylang.planning.plan import Plan, deciding_device, digest_of, policy_text
from policylang.planning.value_outcome import Decision, Why

LONGEST = 1 << 20
"""Bytes of a message. Whatever is longer was not written by policylang, and is not read."""
_LARGEST = 1 << 28  # bytes of decompressed text
_T = TypeVar("_T")


def address_of(*words: str) -> str:
    """``words``: what something is about, the same on every rank: ``compiling forward (model.py:12)``."""
    return hashlib.sha256("\0".join(words).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@frozen
class MeetingKey:
    """Names one comparison over a process group, alike on all of its members."""

    topic: str
    group: str
    """Its c10d name, the same on all members."""
    members: str = field()
    """Its global ranks, as :func:`ranges` writes them."""
    epoch: int
    """The number of times a rank has reached the topic."""

    @members.validator
    def _are_ranks(self, _field: object, text: str) -> None:
        ranks_in(text)

    @property
    def ranks(self) -> tuple[int, ...]:
        return ranks_in(self.members)

    @cached_property  # a rank asks for it once for each of the others
    def place(self) -> str:
        return address_of(self.topic, self.group, self.members)

    def message(self, rank: int, step: int) -> str:
        """The store key of a rank's message in one step, counted from 1."""
        return f"{self.place}/{self.epoch}/{step}/{rank}"

    @property
    def end(self) -> str:
        """The store key of the reason why nobody goes on."""
        return f"{self.place}/{self.epoch}/end"

    def at(self, rank: int) -> str:
        """The store key of a waiting rank's latest key at this place."""
        return f"{self.place}/at/{rank}"

    @property
    def done(self) -> str:
        """The store key that counts the ranks that are through."""
        return f"{self.place}/{self.epoch}/done"


@frozen
class GroupDigest:
    """A digest of what a rank is about to run over one process group; the same on every member."""

    name: str
    digest: str
    """Covers its ranks, in group order, and the collectives."""


@frozen
class Absence:
    """A rank takes no part in what others compare: it stopped before it could, or it does not compare."""

    id: str
    rank: int
    topic: str
    """Its address; empty where it concerns whatever is compared next."""
    epoch: int
    graph: str
    """The digest of the operators of what is not compared; empty where it stopped before there was a graph."""
    reason: str
    """For people."""

    @property
    def stopped(self) -> bool:
        return not self.graph


@frozen
class RankMessage:
    """One rank's message in one step, the same under each of its keys."""

    rank: int
    subject: str
    """``settings``, ``rewrites of the joint graph``, ``plan``, ``collectives``: what the step compares."""
    digest: str
    """Equal on all ranks that are connected through groups."""
    keys: tuple[MeetingKey, ...]
    label: str = ""
    """For people: what is compared, ``a joint graph of 812 nodes``."""
    policy: str = ""
    """The digest of its policy's text."""
    by_group: tuple[GroupDigest, ...] = ()
    """In the order in which the graph first uses the groups."""
    graph: str = ""
    absences: tuple[Absence, ...] = ()

    def over(self, key: MeetingKey) -> tuple[str, ...]:
        """The place of the group among all, and its digest: equal on all members of the group."""
        return tuple(f"{at} {each.digest}" for at, each in enumerate(self.by_group) if each.name == key.group)

    def misses(self, absence: Absence) -> bool:
        """It waits for a rank that is absent."""
        here = (absence.topic, absence.epoch) == (self.keys[0].topic, self.keys[0].epoch)
        return not absence.topic or (here and absence.graph in ("", self.graph))


@frozen
class EndOfComparison:
    """Why a comparison ends without anybody going on. All ranks show the same."""

    code: str
    message: str
    help: str | None = None
    details: tuple[str, ...] = ()
    rules: Mapping[str, int] = field(factory=dict)
    """By policy digest, the rule that the message is about."""
    absence: str = ""
    """The id of the absence that is why."""
    keys: tuple[MeetingKey, ...] = ()
    """All keys that it is sent under."""

    @classmethod
    def of(cls, found: Diagnostic, **more: Any) -> EndOfComparison:
        return cls(found.code, found.message, found.help, found.details, **more)

    @property
    def diagnostic(self) -> Diagnostic:
        return Diagnostic(self.code, self.message, help=self.help, details=self.details)


@frozen
class RankStatus:
    """The report of a rank outside of any comparison. The last one replaces those before."""

    kind: str = ""
    """``waiting``, ``stopped``, ``uncompared``; empty without anything to report."""
    text: str = ""
    """For people: what the rank has, why it stopped, or why it does not compare."""
    absences: tuple[Absence, ...] = ()
    keys: tuple[MeetingKey, ...] = ()
    """The keys of its comparison, while it waits and nothing else of it can run that others may wait for."""
    awaited: str = ""
    """The first message that it waits for, then."""
    awaited_rank: int = 0


# --- as text --------------------------------------------------------------------------------------------------------


def pack(value: Any) -> str:
    return json.dumps(to_plain(value), separators=(",", ":"))


def compress(value: Any) -> bytes:
    """:func:`pack` for long values."""
    return zlib.compress(pack(value).encode(), 1)


def unpack(kind: type[_T], text: str | bytes, longest: int = LONGEST) -> _T:
    """The inverse of :func:`pack`. Raises ``ValueError`` for what it would not write."""
    try:
        if len(text) > longest:
            raise ValueError(f"more than {longest} bytes")
        found = from_plain(kind, json.loads(text))
    except (RecursionError, TypeError) as error:
        raise ValueError(str(error)) from error
    return found


def decompress(kind: type[_T], data: bytes) -> _T:
    """The inverse of :func:`compress`. Raises ``ValueError`` for what it would not write."""
    try:
        text = zlib.decompressobj().decompress(data, _LARGEST)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    return unpack(kind, text, _LARGEST)


def ranges(ranks: Sequence[int]) -> str:
    """Sorted ranks, short: ``0-7``, ``0-56/8`` (every eighth), ``0,3,4``."""
    parts: list[str] = []
    start = 0
    while start < len(ranks):
        step = ranks[start + 1] - ranks[start] if start + 1 < len(ranks) else 0
        end = start
        while end + 1 < len(ranks) and ranks[end + 1] - ranks[end] == step:
            end += 1
        if end - start < 2:
            end = start
            parts.append(str(ranks[start]))
        else:
            parts.append(f"{ranks[start]}-{ranks[end]}" + (f"/{step}" if step > 1 else ""))
        start = end + 1
    return ",".join(parts)


@lru_cache(4096)
def ranks_in(text: str) -> tuple[int, ...]:
    """The inverse of :func:`ranges`. Raises ``ValueError`` for what it would not write."""
    parts = []
    for part in text.split(","):
        start, _, rest = part.partition("-")
        end, _, step = rest.partition("/")
        parts.append(range(int(start), int(end or start) + 1, int(step or 1)))
    found = tuple(chain(*parts)) if sum(map(len, parts)) <= LONGEST else ()
    if ranges(found) != text:
        raise ValueError(f"{text[:80]!r} in place of ranks")
    return found


def in_order(ranks: Sequence[int]) -> str:
    """Ranks whose order counts; as :func:`ranges` where they are sorted."""
    return ranges(ranks) if list(ranks) == sorted(ranks) else ", ".join(map(str, ranks))


def named(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranges(sorted(ranks))}"


SETTINGS = "settings"
PLAN = "plan"
COLLECTIVES = "collectives"
_DONE = {"save": "saves it", "recompute": "recomputes it", "offload": "offloads it"}
_STATIC = (InputKind.PARAMETER, InputKind.BUFFER)
_MOVES = frozenset(MOVERS) - movers_of(GroupMove)


# --- collectives ----------------------------------------------------------------------------------------------------


@frozen
class CollectiveCall:
    node: str
    operator: str
    terms: str
    """Its arguments but for tensors and the group: the reduction, the source. Of what every rank sends and receives in
    an ``all_to_all``, nothing: that is each rank's own."""
    types: str
    """The element types of its tensors."""
    sizes: str
    """The shapes; empty where they differ by rank."""
    group: str
    """The name of its process group."""
    ranks: tuple[int, ...]
    """The ranks of the group, in order."""
    when: str = ""
    """``forward`` or ``backward``, where the graph was split."""

    @property
    def but_for_sizes(self) -> str:
        return f"{self.when} {self.operator}({self.terms}) {self.types} {self.group}"

    def __str__(self) -> str:
        types = ", ".join(filter(None, (self.terms, f"{self.types}{self.sizes}")))
        return f"{self.operator.rpartition('.')[0]}({types})"


@frozen(eq=False)
class GraphRun:
    when: str
    """``forward``, ``backward``; empty for all at once."""
    facts: Facts
    rows: Collection[int] | None = None


def collectives_of(run: GraphRun) -> list[CollectiveCall]:
    """Collectives over groups of several ranks, in order."""
    found = []
    facts = run.facts
    for row, name in enumerate(facts.group_names):
        if name and len(facts.groups[name].ranks) > 1 and (run.rows is None or row in run.rows):
            own_sizes = "all_to_all" in facts.targets[row]
            tensors = [each.row for each in found_in(facts.arguments[row], Ref)]
            # lists are of tensors, or the sizes that differ per rank; some objects have no text
            terms = [
                text
                for value in facts.arguments[row]
                if not (isinstance(value, (Ref, tuple)) or value is None or value == name)
                and not (own_sizes and isinstance(value, int))
                and " at 0x" not in (text := str(value))
                and "ScriptObject" not in text
            ]
            types = ", ".join(dict.fromkeys(facts.dtypes[each] for each in tensors))
            sizes = "" if own_sizes else " ".join(str(list(facts.shapes[each] or ())) for each in tensors)
            node, target, ranks = facts.names[row], facts.targets[row], facts.groups[name].ranks
            found.append(CollectiveCall(node, target, ", ".join(terms), types, sizes, name, ranks, run.when))
    return found


# --- what is compared -----------------------------------------------------------------------------------------------


@frozen
class ComparedStep:
    """One fact that is compared about a graph."""

    name: str
    digest: str
    by_group: tuple[GroupDigest, ...] = ()
    session: str = ""
    """For a round of settling: the joint graph, or the forward or backward graph made of it."""
    known: StepContent | None = field(default=None, repr=False, eq=False)
    make: Callable[[], StepContent] | None = field(default=None, repr=False, eq=False, metadata={OWN: True})

    def content(self) -> StepContent:
        """The data behind the digest. For a plan it is made on demand: ranks that agree never need it."""
        return self.make() if self.make is not None else self.known or StepContent()


@frozen
class RankAccount:
    """All that is compared about one graph, in order; kept beside caches, for processes that take it from there."""

    label: str
    groups: tuple[str, ...]
    """The names of the process groups in the graph."""
    operators: str
    """The digest of its operators, those on sizes left out."""
    static: str
    """Types and sizes of its parameters and buffers, which do not change while a model trains."""
    inputs: str
    """Types and sizes of its other inputs."""
    signature: str
    """Equal for two compilations of one piece of code that differ in sizes alone: its parameters and buffers, and the
    collectives but for sizes."""
    steps: list[ComparedStep] = field(factory=list, eq=False)
    launched: list[str] = field(factory=list, eq=False)
    """The digest of the collectives that run, but for sizes, once it is known."""

    @property
    def rounds(self) -> list[ComparedStep]:
        return [each for each in self.steps if each.session]

    def pack(self) -> str:
        """Serialises the account as text, with the data behind its digests."""
        whole = evolve(self, steps=[evolve(each, known=each.content()) for each in self.steps])
        return base64.b64encode(compress(whole)).decode()

    @classmethod
    def unpack(cls, text: str) -> RankAccount:
        """Raises ``ValueError`` for a text that is not what :meth:`pack` gives."""
        return decompress(cls, base64.b64decode(text))


def account_of(facts: Facts, collectives: Iterable[CollectiveCall]) -> RankAccount:
    """``facts``: of the graph as it was collected, whose groups exist; a rewrite may name others."""
    label = f"a {facts.kind.value} graph of {len(facts)} nodes"
    static: list[str] = []
    inputs: list[str] = []
    for row, kind in enumerate(facts.input_kinds):
        if facts.dtypes[row] and kind not in (InputKind.NOT_AN_INPUT, InputKind.TANGENT):
            (static if kind in _STATIC else inputs).append(f"{facts.dtypes[row]}{facts.shapes[row]}")
    operators = digest_of(facts.targets[row] for row in _counted(facts))
    signature = digest_of([*static, "", *(each.but_for_sizes for each in collectives)])
    return RankAccount(label, tuple(facts.groups), operators, digest_of(static), digest_of(inputs), signature)


def policy_digest(policy: Policy) -> str:
    return digest_of([_text(policy)])


def _text(policy: Policy) -> str:
    """The policy's text without its name, which decides nothing."""
    first, _, rest = policy_text(policy).partition("\n")
    return rest if first.startswith("policy ") else f"{first}\n{rest}"


def plan_step(plan: Plan, collectives: Sequence[CollectiveCall]) -> ComparedStep:
    """``collectives``: of ``plan.before``, whose groups exist; the plan's own facts may name others."""
    facts = plan.facts
    rows = _counted(facts)
    recomputed = [facts.targets[row] for row in plan.schedule.rows_of(StepKind.SECOND_RUN) if facts.group_names[row]]
    digest = digest_of(
        [
            _text(plan.policy),
            *deciding_device(plan.policy, None if plan.times is None else plan.times.device),
            *(facts.targets[row] for row in rows),
            "",
            *(_decided(plan.decisions[row]) for row in rows),
            "",
            *_order(collectives),
            "",
            *recomputed,
            "",
            *plan.edits.words(),
            "",
            *(() if plan.order is None else plan.order.words()),
        ]
    )
    make = partial(_plan_content, plan, rows, collectives, tuple(recomputed))
    return ComparedStep(PLAN, digest, _by_group(collectives), make=make)


def collectives_step(runs: Sequence[GraphRun], settings: Sequence[str]) -> tuple[ComparedStep, str]:
    """The collectives that are run, and their digest but for sizes. ``settings``: what may be why they differ."""
    found = [each for run in runs for each in collectives_of(run)]
    launched = digest_of(each.but_for_sizes for each in found)
    rows = tuple(ComparedNode(each.node, each.operator, collective=each) for each in found)
    content = StepContent(rows=rows, lines=tuple(settings))
    return ComparedStep(COLLECTIVES, digest_of(_order(found)), _by_group(found), known=content), launched


def settings_step(settings: Sequence[str]) -> ComparedStep:
    """Lines that have to be the same on every rank."""
    return ComparedStep(SETTINGS, digest_of(settings), known=StepContent(lines=tuple(settings)))


def offers_step(session: str, offers: Sequence[Proposal]) -> ComparedStep:
    """One rank's proposed rewrites in one round of settling."""
    words = (f"{offer.name} {offer.terms} {offer.among}" for offer in offers)
    content = StepContent(offers=tuple(offers))
    return ComparedStep(f"rewrites of the {session} graph", digest_of(words), session=session, known=content)


def _counted(facts: Facts) -> list[int]:
    """The nodes that count: with a group, returned, or with a tensor and doing more than moving its elements. Several
    tensors may be empty on a rank that receives no token."""
    columns = zip(facts.dtypes, facts.bytes, facts.flags, facts.group_names, facts.ops, facts.targets, strict=True)
    return [
        row
        for row, (dtype, size, flags, group, op, target) in enumerate(columns)
        if group or op == "output" or ((dtype or size or flags & Flag.MULTI_OUTPUT) and target not in _MOVES)
    ]


def _by_group(collectives: Sequence[CollectiveCall]) -> tuple[GroupDigest, ...]:
    calls: dict[str, list[CollectiveCall]] = {}
    for each in collectives:
        calls.setdefault(each.group, []).append(each)
    return tuple(
        GroupDigest(name, digest_of([in_order(found[0].ranks), *(f"{each.when} {each}" for each in found)]))
        for name, found in calls.items()
    )


def _order(collectives: Sequence[CollectiveCall]) -> Iterator[str]:
    """The collectives in order, with group names, which differ from rank to rank, replaced by numbers."""
    numbers: dict[str, int] = {}
    for each in collectives:
        yield f"{each.when} {each.operator} {numbers.setdefault(each.group, len(numbers))}"


def _decided(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    return "auto" if decision.action is None else decision.action.name


# --- the content of a step, where digests differ -------------------------------------------------------------------


@frozen
class ComparedNode:
    """The treatment of a node, as text."""

    node: str
    operator: str
    did: str = ""
    """``saves it``."""
    by: str = ""
    """``` `save mm` (llama3_sac.apl:4) ```."""
    rule: int | None = None
    collective: CollectiveCall | None = None


@frozen
class StepContent:
    """The data behind the digest of a step."""

    policy: str = ""
    device: tuple[str, ...] = ()
    """The figures of a device that decides and that the policy does not name, one a line."""
    rewrites: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    """The collectives in the order of a policy's scheduling lines."""
    rows: tuple[ComparedNode, ...] = ()
    lines: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    """The collectives that are recomputed."""
    offers: tuple[Proposal, ...] = ()
    """To rewrite."""


def _plan_content(
    plan: Plan, rows: Sequence[int], collectives: Sequence[CollectiveCall], recomputed: tuple[str, ...]
) -> StepContent:
    facts = plan.facts
    calls = {each.node: each for each in collectives}
    nodes = tuple(
        ComparedNode(name, facts.targets[row], *_described(plan, plan.decisions[row]), calls.get(name))
        for row in rows
        for name in [facts.names[row]]
    )
    order, device = plan.order, deciding_device(plan.policy, None if plan.times is None else plan.times.device)
    return StepContent(
        _text(plan.policy),
        tuple(f"{key}: {json.dumps(value)}" for text in device for key, value in json.loads(text).items()),
        (*plan.edits.words(), *(() if order is None else order.edits.words())),
        () if order is None else tuple(order.communication()),
        nodes,
        recomputed=recomputed,
    )


def _described(plan: Plan, decision: Decision | None) -> tuple[str, str, int | None]:
    if decision is None:
        return "decides nothing there", "", None
    did = "leaves it to the partitioner"
    if decision.action is not None:
        action = decision.action.name.lower()
        word = action.removeprefix("must_").removeprefix("prefer_")
        did = _DONE.get(word, word) + (f" (`{action}`)" if word != action else "")
    if decision.rule is not None:
        rule = plan.policy.rules[decision.rule]
        return did, f"`{rule.text}` ({rule.source})", decision.rule
    return did, "no rule" if decision.why is Why.UNDECIDED else decision.reason or decision.why.value, None
