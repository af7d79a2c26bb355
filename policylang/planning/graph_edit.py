"""Graph edits as data: nodes that come and go and who reads what instead, and candidates that were refused.

Everything refers to nodes by their names, which an FX graph keeps unique, so that one statement's edits can be
planned on what the statement before it leaves. Nodes that do not exist yet have their names here: whoever carries a
plan out gives them these and no others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.language.plain_data import OWN
from policylang.language.syntax import Action
from policylang.operators.layouts import GroupMove, movers_of
from policylang.operators.names import GETITEM

_COLLECTIVES = movers_of(GroupMove)


@frozen
class Node:
    """An argument of a new node: another node, old or new, by its name."""

    name: str


@frozen
class FusedGroup:
    """The process group of a fused collective; as an argument of a new node it becomes that group's name."""

    ranks: tuple[int, ...]
    """Global ranks in group order, which is the order of the shards."""
    name: str | None = None
    """A group of the graph that has exactly these ranks in exactly this order; None where one has to be made."""
    dims: tuple[str, ...] = ()
    """The mesh dimensions it spans, slow to fast, where they are known."""
    everyone: tuple[tuple[int, ...], ...] = ()
    """The groups of all ranks, this rank's among them, in the same order on every rank; empty without a known mesh."""

    @property
    def label(self) -> str:
        """The name in facts: where it is still to be made, a name that follows from its ranks."""
        if self.name is not None:
            return self.name
        return "fused_" + hashlib.sha256(",".join(map(str, self.ranks)).encode()).hexdigest()[:12]

    @property
    def sorted(self) -> bool:
        """True if torch makes such a group even where it sorts the ranks it is given."""
        return list(self.ranks) == sorted(self.ranks)


@frozen
class NewNode:
    name: str
    target: str
    """The operator in full, ``aten.permute.default``."""
    arguments: tuple[Any, ...]
    """In the order of the operator's schema, defaults at the end left out: numbers, strings (also for what is a dtype
    or a memory format in the schema), tuples, :class:`Node`, :class:`FusedGroup`. Keyword-only arguments are in
    their place and are passed by keyword."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    module: str
    like: str
    """An old node whose phase, module and annotations it copies."""
    per_rank: bool = False
    """True if its arguments depend on the rank, so that they differ between ranks that agree."""
    call: str = ""
    """The old node whose call it repeats on a slice; empty for what only moves elements or adds slices up."""
    share: tuple[int, int] = (1, 1)
    """The rows of the slice, and of the whole."""
    slice: str = ""
    """The slice that it belongs to, one name for forward and backward: compilers may compile equal ones once."""
    action: Action | None = None
    """The action for a forward value that no rule decides: a slice that the backward reads slice by slice is
    recomputed, a gradient that was made beside its slice is saved."""


@frozen
class Proof:
    """A check that passed: old and new nodes gave the same tensors on every rank."""

    ranks: int
    """The number of ranks that took part."""
    shards: tuple[tuple[int, ...], ...]
    """The shapes of what each rank starts from in the check: each length that nothing depends on is made small."""
    assumed: str = ""
    """Unknown facts that were assumed, as a phrase; empty where everything was known."""
    claim: str = ""
    """A hash of the check: the same on every rank that checks the same."""
    exact: bool = True
    """False where sums are taken in another order, so that results agree up to rounding only."""


@frozen
class Edit:
    """One change of the graph: new nodes take the place of old ones. New nodes follow one another, right before
    :attr:`before`, where all that they read is made and nobody has read yet what they replace, once the nodes that they
    or their readers are made of, :attr:`ahead` and :attr:`behind`, are on the right side of them."""

    statement: int
    """Indexes ``Policy.rewrites``."""
    kind: str
    """The word under which the statement's planner is registered."""
    collectives: tuple[str, ...]
    """The old collectives, in the order in which they run."""
    sources: tuple[str, ...]
    """The old nodes whose values the new nodes start from."""
    before: str
    """The old node before which the new ones are inserted."""
    nodes: tuple[NewNode, ...]
    replaced: tuple[tuple[str, str], ...]
    """Old node, and the node, new or old, that everyone outside :attr:`dead` reads in its place from now on."""
    dead: tuple[str, ...]
    """The old nodes that go, in graph order."""
    proof: Proof
    restrided: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Old nodes that stay, in graph order, whose strides change because of the edit, and their new strides."""
    ahead: tuple[str, ...] = ()
    """Old nodes that move to right before the new ones, in graph order."""
    behind: tuple[str, ...] = ()
    """Old nodes that move to right behind the new ones, in graph order."""
    note: str = ""
    """A remark for the report, as a phrase."""
    split_sums: tuple[str, ...] = ()
    """The old nodes whose sums are now sums of slices: bits differ there."""
    scaled: tuple[str, ...] = ()
    """The old nodes that are made for an incoming gradient of 1 and multiplied by the incoming one afterwards, which
    rounds once more unless it is a power of two: bits differ there. They differ nowhere but in these and split sums."""
    goes_on: bool = False
    """True for a part of a change that another edit begins."""
    per_rank: bool = False
    """True if the old nodes are other ones on every rank, so that ranks that agree do not compare them."""

    @property
    def groups(self) -> tuple[FusedGroup, ...]:
        """The group of each new collective."""
        return tuple(value for node in self.nodes for value in node.arguments if isinstance(value, FusedGroup))

    @property
    def fewer_collectives(self) -> int:
        """By how much it reduces the number of collectives."""
        dead = frozenset(self.dead)
        return sum(name in dead for name in self.collectives) - sum(node.target in _COLLECTIVES for node in self.nodes)

    def words(self) -> Iterator[str]:
        """The part of the edit that is equal on every rank that makes it: names and sizes, not the ranks of its groups.
        Where all of it is a rank's own, the number of collectives that it issues."""
        if self.per_rank and self.nodes and all(node.per_rank for node in self.nodes):
            yield f"{self.statement} {self.kind} {self.collectives} {-self.fewer_collectives:+}"
            return
        yield f"{self.statement} {self.kind} {' '.join(self.sources)} {self.collectives}"
        if not self.per_rank:
            yield f"{self.before} {self.replaced} {self.dead} {self.restrided}"
            if self.ahead or self.behind:
                yield f"{self.ahead} {self.behind}"
        for node in self.nodes:
            arguments = () if node.per_rank else [_alike(value) for value in node.arguments]
            yield f"{node.name} {node.target} {node.shape} {node.stride} {node.dtype} {arguments}"


@frozen
class Refusal:
    """A candidate for an edit that was left as it is."""

    collectives: tuple[str, ...]
    """The nodes of the candidate, in the order in which they run."""
    reason: str
    """A short phrase, ``other consumer: view_12``."""
    detail: str = ""
    """A further sentence, if any."""
    statement: int = field(default=0, eq=False, metadata={OWN: True})
    """The number of the statement, as in :class:`Edit`; reports name the line instead."""


@frozen
class Edits:
    """The changes of a policy's statements to one graph, as they are applied: by statement, then in graph order."""

    done: tuple[Edit, ...] = ()
    refused: tuple[Refusal, ...] = ()

    def __bool__(self) -> bool:
        """True if the graph is to be changed."""
        return bool(self.done)

    @property
    def count(self) -> int:
        """The number of changes."""
        return sum(not edit.goes_on for edit in self.done)

    @property
    def split_sums(self) -> tuple[str, ...]:
        """The nodes of the traced graph whose sums are now sums of slices."""
        return tuple(name for edit in self.done for name in edit.split_sums)

    @property
    def lossy(self) -> tuple[str, ...]:
        """Why bits of the traced graph's nodes differ, a phrase each."""
        split = (f"{name} is a sum of slices" for name in self.split_sums)
        scaled = (f"{name} is scaled after it was made" for edit in self.done for name in edit.scaled)
        return (*split, *scaled)

    def of(self, statement: int) -> Edits:
        done = tuple(edit for edit in self.done if edit.statement == statement)
        return Edits(done, tuple(refusal for refusal in self.refused if refusal.statement == statement))

    def followed_by(self, others: Edits) -> Edits:
        """These, and then others."""
        return Edits((*self.done, *others.done), (*self.refused, *others.refused))

    def words(self) -> Iterator[str]:
        """The parts that are alike on every rank."""
        for edit in self.done:
            yield from edit.words()


def _alike(value: object) -> object:
    return len(value.ranks) if isinstance(value, FusedGroup) else value


def common_names(facts: Facts) -> list[str]:
    """The names of all nodes as every rank has them. If each rank takes only its piece of a split, the piece is another
    ``getitem`` on every rank. There may be other pieces that nobody reads."""
    names, users, targets = list(facts.names), facts.users, facts.targets
    for row, readers in enumerate(users):
        if not facts.flags[row] & Flag.VIEW:
            continue
        pieces = [user for user in readers if targets[user] == GETITEM]
        if len(readers) - sum(not users[piece] for piece in pieces) <= 1:
            for piece in pieces:
                names[piece] = f"a piece of {names[row]}"
    return names
