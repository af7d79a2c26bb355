"""The interface of a kind of graph edit, and what all kinds share: names, new nodes, proofs, agreement among ranks.

A kind is a class: it is given one statement and one graph, and yields edits and refusals. It is registered in
:mod:`policylang.planning.edits.statement_edits`; nothing else knows it.


---

Alias check of an edit that replaces a copy: the memory read in its place is neither written nor returned twice."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Flag, Group
from policylang.graph.storage import storage_roots
from policylang.language.syntax import Selector
from policylang.operators.names import GETITEM
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.layout_chains import LayoutSteps
from policylang.planning.edits.other_ranks import Grid, Ledger, Offer, grid_of
from policylang.planning.edits.proof import ChainCall, Equivalence, Prover, new_call
from policylang.planning.graph_edit import Edit, NewNode, Node, Proof, Refusal

SAME_GRAPH = "other ranks, which were not asked, run the same graph"
Asked = TypeVar("Asked")
"""The statement of a kind."""


Pick = Callable[[Facts, Selector], tuple[Sequence[int], Sequence[int]]]
"""From a graph and a selector to the rows that it denotes, backward and recomputations included, and the block of each
row of the graph, -1 outside the blocks."""


class RefusedError(Exception):
    """Why a candidate is left as it is: a reason, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


class NodeNames:
    """Names of nodes that do not exist yet, the same in every process: ``fused_view``, ``fused_view_1``, …, and
    ``bucket_cat`` of a bucket."""

    def __init__(self, taken: Container[str], counts: Mapping[str, int] | None = None) -> None:
        self._taken = taken
        self._counts = dict(counts or {})

    def new(self, target: str, prefix: str) -> str:
        """A name after the operator, ``aten.view.default``: neither the graph's nor given out before."""
        base = f"{prefix}_{target.split('.')[1].strip('_')}"
        while True:
            count = self._counts.get(base, 0)
            self._counts[base] = count + 1
            name = f"{base}_{count}" if count else base
            if name not in self._taken:
                return name

    def trial(self) -> NodeNames:
        """Names to try out: unless they are taken, the next trial gets the same."""
        return NodeNames(self._taken, self._counts)

    def take(self, trial: NodeNames) -> None:
        self._counts = trial._counts


@frozen
class Setting:
    """One statement's place in its policy, and the graph as the statements before it leave it."""

    facts: Facts
    number: int
    """Of the statement, among those of its policy that change the structure."""
    capabilities: Capabilities
    names: NodeNames
    prover: Prover
    known: Mapping[str, Group]
    """The groups that exist, without those that earlier statements have planned."""
    ledger: Ledger
    """What is settled with the other ranks."""
    pick: Pick | None = None
    """What selectors denote, where values are decided already."""
    held: Collection[str] = ()
    """Nodes that nothing which communicates crosses: what a policy keeps in order, and operators that nobody knows."""


class NewNodes:
    """The new nodes of one edit, one after the other. Their names are taken for good only by :meth:`take_names`."""

    def __init__(self, setting: Setting, prefix: str = "fused") -> None:
        self._facts = setting.facts
        self._prefix = prefix
        self._names = setting.names
        self._trial = setting.names.trial()
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
        """``like``: the row whose element type, device, module and annotations it has."""
        facts, name = self._facts, self._trial.new(target, self._prefix)
        self.made.append(
            NewNode(
                name=name,
                target=target,
                arguments=arguments,
                shape=tuple(shape),
                stride=tuple(stride),
                dtype=facts.dtypes[like],
                device=facts.devices[like],
                module=facts.modules[like],
                like=facts.names[like],
                per_rank=per_rank,
            )
        )
        return Node(name)

    def follow(self, start: Node, steps: LayoutSteps, like: int) -> Node:
        """Layout operators, one on what the other makes; what the last one makes."""
        for step in steps.steps:
            arguments = (start,) if step.argument is None else (start, step.argument)
            start = self.add(step.target, arguments, step.shape, step.stride, like)
        return start

    def calls(self, since: int = 0) -> list[ChainCall]:
        return list(map(new_call, self.made[since:]))

    def take_names(self) -> None:
        self._names.take(self._trial)


class EditPlanner(ABC, Generic[Asked]):
    """One statement on one graph."""

    kind: ClassVar[str]
    """As the statement's own ``kind`` says."""
    counted: ClassVar[str]
    """The collective that it looks for: a diagnostic counts its nodes where nothing is found."""
    nothing_found: ClassVar[str]
    """What a graph has not in which nothing is found, as a sentence."""

    def __init__(self, statement: Asked, setting: Setting) -> None:
        self.statement = statement
        self.setting = setting
        self.facts = setting.facts
        self._grids: dict[tuple[str, ...], Grid | str] = {}

    @abstractmethod
    def outcomes(self) -> Iterable[Edit | Refusal]:
        """What is done for the statement and what is refused, each in graph order: an edit comes after those that make
        what it starts from, or that read what it removes. Linear in nodes and edges."""

    def names_of(self, rows: Iterable[int]) -> tuple[str, ...]:
        return tuple([self.facts.names[row] for row in rows])

    def groups_of(self, collectives: Iterable[int]) -> tuple[str, ...]:
        return tuple([self.facts.group_names[row] for row in collectives])

    def grid(self, groups: tuple[str, ...]) -> Grid:
        """The ranks that some groups join. Raises :class:`RefusedError` where they join none, or that is not known."""
        if groups not in self._grids:
            self._grids[groups] = grid_of(self.facts, groups)
        grid = self._grids[groups]
        if isinstance(grid, str):
            raise RefusedError(grid)
        return grid

    def prove(
        self,
        sources: Sequence[int],
        old: Sequence[ChainCall],
        new: Sequence[ChainCall],
        pairs: Sequence[tuple[str, str]],
        groups: tuple[str, ...],
    ) -> Proof:
        """That old and new calls make the same of some rows; ``groups`` are those of the old collectives.

        Raises :class:`RefusedError` where they do not, or that cannot be told.
        """
        shapes = tuple((self.facts.names[row], self.facts.shapes[row] or ()) for row in sources)
        found = self.setting.prover.prove(Equivalence(shapes, old, new, pairs, self.grid(groups), groups))
        if isinstance(found, str):
            raise RefusedError("the check failed", found)
        return found if self.setting.ledger.asked else evolve(found, assumed=SAME_GRAPH)

    def refusal(self, collectives: Iterable[int], why: RefusedError) -> Refusal:
        return Refusal(self.setting.number, self.names_of(collectives), why.reason, why.detail)

    # --- what is settled with the other ranks ---

    def left(self, *words: str) -> str:
        """Why an offer of this name is made no more: not every rank made it alike. Empty where it is still open."""
        return self.setting.ledger.left.get(self._key(words), "")

    def offer(self, words: Sequence[str], terms: Sequence[object], grid: Grid) -> None:
        """Offer what has been found to the other ranks, if they are asked. ``words``: its name, alike on every rank."""
        if self.setting.ledger.asked:
            alike = hashlib.sha256("\0".join(map(str, (*terms, grid.shape, grid.everyone))).encode()).hexdigest()
            among = () if grid.everyone else grid.ranks
            self.setting.ledger.offers.append(Offer(self._key(words), alike[:32], among))

    def shared(self, words: Sequence[str], groups: tuple[str, ...], plan: Callable[[], Edit]) -> Edit:
        """An edit, if every rank makes it."""
        words = (self.kind, *words)
        if left := self.left(*words):
            raise RefusedError(f"not on every rank: {left}")
        edit = plan()
        self.offer(words, [edit.proof.claim, *self.as_on_every_rank(edit).words()], self.grid(groups))
        return edit

    def as_on_every_rank(self, edit: Edit) -> Edit:
        """With names that all ranks have alike, where a kind knows them."""
        return edit

    def _key(self, words: Sequence[str]) -> str:
        return " ".join((str(self.setting.number), *words))


class ReplacedMemory:
    """The memory of one graph's values, and who writes there."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.roots = storage_roots(facts)
        self.written: dict[int, list[int]] = {}
        """Memory, by the row that made it, and the rows that write there."""
        for row, flags in enumerate(facts.flags):
            if flags & Flag.WRITES:
                for source in facts.inputs[row]:
                    self.written.setdefault(self.roots[source], []).append(row)

    def check(self, home: int, row: int, since: int) -> None:
        """Whether readers of ``row``, which lies in memory of its own, may read ``home``, as it was at ``since``.

        Raises :class:`RefusedError` where they may not.
        """
        facts = self.facts
        reach = self._aliases(row)
        last = max(user for each in reach for user in (each, *facts.users[each]))
        later = (writer for writer in self.written.get(self.roots[home], ()) if since < writer <= last)
        for writer in (*self.written.get(self.roots[row], ()), *later):
            raise RefusedError(f"memory is written: {facts.names[writer]}")
        given = facts.ops[self.roots[home]] != "call_function" or self.is_returned(self.roots[home])
        for each in reach if given else ():
            if any(facts.ops[user] == "output" for user in facts.users[each]):
                name = facts.names[self.roots[home]]
                raise RefusedError(f"returned: {facts.names[each]}", f"it would share memory with `{name}`")

    def is_returned(self, row: int) -> bool:
        """Whether the graph returns a row or a view of it."""
        facts = self.facts
        return any(facts.ops[user] == "output" for each in self._aliases(row) for user in facts.users[each])

    def _aliases(self, row: int) -> list[int]:
        """A row and the views of it."""
        facts = self.facts
        found, pending = [row], [row]
        while pending:
            for user in facts.users[pending.pop()]:
                if facts.flags[user] & Flag.VIEW or facts.targets[user] == GETITEM:
                    found.append(user)
                    pending.append(user)
        return found
