"""A kind of graph edit, and what all kinds share: names, new nodes, proofs, aliasing, agreement among ranks.

A kind is a class that is given one statement and one graph, and yields edits and refusals. It is registered in
:data:`policylang.planning.edits.statement_edits.EDIT_KINDS`; nothing else knows it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Flag, Group
from policylang.language.syntax import Selector
from policylang.operators.names import GETITEM
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.layout_chains import LayoutSteps
from policylang.planning.edits.other_ranks import ConsensusRound, Grid, Proposal, dims_of, grid_of
from policylang.planning.edits.proof import ChainCall, Equivalence, Prover, new_call
from policylang.planning.graph_edit import Edit, NewNode, Node, Proof, Refusal

REDUCES = ("sum", "avg")
"""Reductions of which several can be one: the mean of means over groups of equal size is the mean of all."""
SAME_GRAPH = "other ranks, which were not asked, run the same graph"
Asked = TypeVar("Asked")
"""The statement of a kind."""
SelectRows = Callable[[Facts, Selector], tuple[Sequence[int], Sequence[int]]]
"""From a graph and a selector to the nodes that it denotes, backward and recomputations included, and the block of each
node of the graph, -1 outside the blocks."""


class RefusedError(Exception):
    """Why a candidate is left as it is: a reason, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@frozen
class Setting:
    """The graph that a statement is planned on, as earlier statements leave it, and what statements share."""

    facts: Facts
    number: int
    """The statement's, in ``Policy.rewrites``."""
    capabilities: Capabilities
    name_counts: dict[str, int]
    """The number of uses of each new name, without its number."""
    prover: Prover
    known: Mapping[str, Group]
    """The groups that exist, without those that earlier statements have planned."""
    consensus: ConsensusRound
    select: SelectRows | None = None
    """Evaluates selectors once values are decided."""
    blocks: str | None = None
    """The policy's glob of blocks, where it has one."""
    held: Collection[str] = ()
    """Nodes that no communication crosses: what a policy keeps in order, and unknown operators."""


class NewNodes:
    """The new nodes of one edit, in order. Their names are the same in every process: ``fused_view``, ``fused_view_1``,
    …, ``bucket_cat``. :meth:`take_names` makes them final; until then the next edit gets the same."""

    def __init__(self, setting: Setting, prefix: str = "fused") -> None:
        self._facts, self._prefix = setting.facts, prefix
        self._final, self._counts = setting.name_counts, dict(setting.name_counts)
        self.made: list[NewNode] = []

    def add(
        self,
        target: str,
        arguments: tuple[Any, ...],
        shape: Sequence[int],
        stride: Sequence[int],
        like: int,
        *,
        per_rank: bool = False,
    ) -> Node:
        """``like``: the node whose dtype, device, module and annotations it copies."""
        facts, base = self._facts, f"{self._prefix}_{target.split('.')[1].strip('_')}"
        name = ""
        while not name or name in facts.index:
            count = self._counts.get(base, 0)
            self._counts[base] = count + 1
            name = f"{base}_{count}" if count else base
        described = facts.dtypes[like], facts.devices[like], facts.modules[like], facts.names[like], per_rank
        self.made.append(NewNode(name, target, arguments, tuple(shape), tuple(stride), *described))
        return Node(name)

    def follow(self, start: Node, steps: LayoutSteps, like: int) -> Node:
        """Add a chain of layout operators; returns the last."""
        for step in steps.steps:
            arguments = (start,) if step.argument is None else (start, step.argument)
            start = self.add(step.target, arguments, step.shape, step.stride, like)
        return start

    def calls(self, since: int = 0) -> list[ChainCall]:
        return list(map(new_call, self.made[since:]))

    def take_names(self) -> None:
        self._final.update(self._counts)


class EditPlanner(ABC, Generic[Asked]):
    kind: ClassVar[str]
    counted: ClassVar[str]
    """The collective that it looks for, which a diagnostic counts if nothing is found; empty if it looks for none."""
    nothing_found: ClassVar[str]
    """The sentence of that diagnostic."""

    def __init__(self, statement: Asked, setting: Setting) -> None:
        self.statement = statement
        self.setting = setting
        self.facts = setting.facts
        self._grids: dict[tuple[str, ...], Grid | str] = {}

    @classmethod
    def nothing_in(cls, statement: Asked) -> str:
        """The sentence of the diagnostic for a statement that finds nothing."""
        return cls.nothing_found

    @abstractmethod
    def outcomes(self) -> Iterable[Edit | Refusal]:
        """Edits and refusals in graph order, an edit after those that it rests on. Linear in nodes and edges."""

    def names_of(self, rows: Iterable[int]) -> tuple[str, ...]:
        return tuple([self.facts.names[row] for row in rows])

    def groups_of(self, collectives: Iterable[int]) -> tuple[str, ...]:
        return tuple([self.facts.group_names[row] for row in collectives])

    def grid(self, groups: tuple[str, ...]) -> Grid:
        """The ranks that some groups join. Raises :class:`RefusedError` if that is none, or not known."""
        if groups not in self._grids:
            self._grids[groups] = grid_of(self.facts, groups)
        if isinstance(grid := self._grids[groups], str):
            raise RefusedError(grid)
        return grid

    def check_dims(self, collectives: Iterable[int], wanted: Collection[str]) -> None:
        """Check that collectives are over some of the wanted mesh dimensions, if any are named."""
        facts = self.facts
        for row in collectives if wanted else ():
            group = facts.groups[facts.group_names[row]]
            spanned = dims_of(group, facts.meshes)
            if not spanned:
                raise RefusedError(f"mesh dimension of group `{group.name}` not known")
            if not set(spanned) <= set(wanted):
                raise RefusedError(f"over {', '.join(spanned)}: {facts.names[row]}")

    def prove(
        self,
        sources: Sequence[int],
        old: Sequence[ChainCall],
        new: Sequence[ChainCall],
        replaced: Mapping[int, str],
        groups: tuple[str, ...],
    ) -> Proof:
        """Prove that new calls compute what old ones do, in the old ones' ``groups``; raises :class:`RefusedError`."""
        pairs = tuple((self.facts.names[row], name) for row, name in replaced.items())
        shapes = tuple((self.facts.names[row], self.facts.shapes[row] or ()) for row in sources)
        found = self.setting.prover.prove(Equivalence(shapes, old, new, pairs, self.grid(groups), groups))
        if isinstance(found, str):
            raise RefusedError("the check failed", found)
        return found if self.setting.consensus.asked else evolve(found, assumed=SAME_GRAPH)

    def refusal(self, collectives: Iterable[int], why: RefusedError) -> Refusal:
        return Refusal(self.names_of(collectives), why.reason, why.detail, self.setting.number)

    def edit(
        self,
        collectives: Iterable[int],
        sources: tuple[str, ...],
        before: int,
        nodes: Iterable[NewNode],
        replaced: Mapping[int, str],
        dead: Iterable[int],
        proof: Proof,
        restrided: Iterable[tuple[int, tuple[int, ...]]] = (),
        **others: Any,
    ) -> Edit:
        """An edit of this statement, from nodes; ``others``: further fields of it."""
        names = self.facts.names
        return Edit(
            statement=self.setting.number,
            kind=self.kind,
            collectives=self.names_of(collectives),
            sources=sources,
            before=names[before],
            nodes=tuple(nodes),
            replaced=tuple((names[row], name) for row, name in replaced.items()),
            dead=self.names_of(dead),
            proof=proof,
            restrided=tuple((names[row], stride) for row, stride in restrided),
            **others,
        )

    # --- consensus with the other ranks ---

    def rejected(self, *words: str) -> str:
        """Why a proposal of this name was rejected; empty if it was not."""
        return self.setting.consensus.rejected.get(" ".join((str(self.setting.number), *words)), "")

    def propose(self, words: Sequence[str], terms: Sequence[object], grid: Grid) -> None:
        """Propose a finding to the other ranks, if they are asked. ``words``: its name, alike on every rank."""
        if self.setting.consensus.asked:
            name = " ".join((str(self.setting.number), *words))
            alike = hashlib.sha256("\0".join(map(str, (*terms, grid.shape, grid.everyone))).encode()).hexdigest()
            among = () if grid.everyone else grid.ranks
            self.setting.consensus.proposals.append(Proposal(name, alike[:32], among))

    def shared(self, words: Sequence[str], groups: tuple[str, ...], plan: Callable[[], Edit]) -> Edit:
        """An edit, if every rank makes it."""
        words = (self.kind, *words)
        if why := self.rejected(*words):
            raise RefusedError(f"not on every rank: {why}")
        edit = plan()
        self.propose(words, [edit.proof.claim, *self.as_on_every_rank(edit).words()], self.grid(groups))
        return edit

    def as_on_every_rank(self, edit: Edit) -> Edit:
        """With names that all ranks have alike."""
        return edit


class ReplacedMemory:
    """Alias checks: memory that is read in place of another must not be written, nor returned twice."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.roots = facts.storage_roots
        self.written: dict[int, list[int]] = {}
        """By the node that allocates memory, the nodes that write there."""
        for row, flags in enumerate(facts.flags):
            if flags & Flag.WRITES:
                for source in facts.inputs[row]:
                    self.written.setdefault(self.roots[source], []).append(row)

    def check(self, home: int, row: int, since: int) -> None:
        """Raises :class:`RefusedError` where readers of ``row`` (memory of its own) may not read ``home`` as then."""
        facts, root = self.facts, self.roots[home]
        reach = self._aliases(row)
        last = max(user for each in reach for user in (each, *facts.users[each]))
        later = (writer for writer in self.written.get(root, ()) if since < writer <= last)
        for writer in (*self.written.get(self.roots[row], ()), *later):
            raise RefusedError(f"memory is written: {facts.names[writer]}")
        if facts.ops[root] != "call_function" or self.is_returned(root):
            for each in reach:
                if self._is_output(each):
                    shared = f"it would share memory with `{facts.names[root]}`"
                    raise RefusedError(f"returned: {facts.names[each]}", shared)

    def is_returned(self, row: int) -> bool:
        """True if the graph returns a node or a view of it."""
        return any(map(self._is_output, self._aliases(row)))

    def _is_output(self, row: int) -> bool:
        return any(self.facts.ops[user] == "output" for user in self.facts.users[row])

    def _aliases(self, row: int) -> list[int]:
        """A node and the views of it."""
        facts = self.facts
        found, pending = [row], [row]
        while pending:
            for user in facts.users[pending.pop()]:
                if facts.flags[user] & Flag.VIEW or facts.targets[user] == GETITEM:
                    found.append(user)
                    pending.append(user)
        return found
