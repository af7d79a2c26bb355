"""What the planning of rewrites hands on: what is to be done, node by node, and what was refused and why.

Everything refers to nodes by their names, which an FX graph keeps unique, so that one statement's rewrites can be
planned on what the statement before it leaves. Nodes that do not exist yet have their names here: whoever carries a
plan out gives them these and no others.
"""

from __future__ import annotations

from typing import Any, Literal

from attrs import field, frozen

Kind = Literal["all_gather", "reduce_scatter", "round_trip"]


@frozen
class Node:
    """Of the arguments of a new node: another node, old or new, by its name."""

    name: str


@frozen
class FusedGroup:
    """The process group of a fused collective; as an argument of a new node it stands for that group's name."""

    ranks: tuple[int, ...]
    """Global ranks in group order: it decides which shard lies where."""
    name: str | None = None
    """A group of the graph that has exactly these ranks in exactly this order; None where one has to be made."""
    dims: tuple[str, ...] = ()
    """The mesh dimensions it spans, slow to fast, where they are known."""
    everyone: tuple[tuple[int, ...], ...] = ()
    """The groups of all ranks, this rank's among them, in the same order on every rank; empty where a mesh that says
    so is not known."""

    @property
    def sorted(self) -> bool:
        """Whether torch makes such a group even where it sorts the ranks it is given."""
        return list(self.ranks) == sorted(self.ranks)


@frozen
class NewNode:
    name: str
    target: str
    """The operator in full, ``aten.permute.default``."""
    arguments: tuple[Any, ...]
    """In the order of the operator's schema, defaults at the end left out: numbers, strings (also for what is a dtype
    or a memory format in the schema), tuples, :class:`Node`, :class:`FusedGroup`. Keyword-only arguments stand in
    their place and are passed by keyword."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    module: str
    like: str
    """An old node whose phase, module and annotations it takes over."""
    per_rank: bool = False
    """Whether its arguments say which rank it runs on, so that they differ between ranks that agree."""


@frozen
class Proof:
    """A check that passed: old and new nodes gave the same tensors on every rank."""

    ranks: int
    """How many ranks took part."""
    shard: tuple[int, ...]
    """The shape of each rank's shard in the check: each length that nothing depends on is made small."""
    assumed: str = ""
    """What was not known and had to be taken for granted, as a phrase; empty where everything was known."""
    claim: str = ""
    """What was checked, as one number: the same on every rank whose chain is the same."""
    exact: bool = True
    """False where sums are taken in another order, so that results agree up to rounding only."""


@frozen
class Rewrite:
    """One change of the graph. New nodes stand one after the other, right before :attr:`before`."""

    statement: int
    """Indexes ``Policy.rewrites``."""
    kind: Kind
    collectives: tuple[str, ...]
    """The collectives of the old chain, in the order in which they run."""
    source: str
    """The old node whose value the new nodes start from."""
    before: str
    """The old node before which the new ones are put."""
    nodes: tuple[NewNode, ...]
    replaced: tuple[tuple[str, str], ...]
    """Old node, and the node that everyone outside :attr:`dead` reads in its place from now on. The chain's result
    comes first; others are values in its middle that somebody else reads."""
    dead: tuple[str, ...]
    """The old nodes that go, in graph order."""
    proof: Proof
    group: FusedGroup | None = None
    restrided: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Old nodes that stay, in graph order, whose values are laid out anew because of it, and their strides then."""
    note: str = ""
    """What a reader of the report should know of it, as a phrase."""


@frozen
class Refused:
    """A chain that looked like one to rewrite and was left as it is."""

    statement: int
    kind: Kind
    collectives: tuple[str, ...]
    """As in :class:`Rewrite`."""
    reason: str
    """A short phrase, ``other consumer: view_12``."""
    detail: str = ""
    """A sentence more, where there is more to say."""


@frozen
class Rewrites:
    """All that the ``fuse`` and ``collapse`` statements of a policy came to on one graph, in the order of carrying
    them out: statement by statement, then in graph order."""

    done: tuple[Rewrite, ...] = field(default=())
    refused: tuple[Refused, ...] = field(default=())

    def __bool__(self) -> bool:
        """Whether the graph is to be changed."""
        return bool(self.done)
