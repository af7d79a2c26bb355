"""What every statement that changes a graph's structure is planned on and with, and how it refuses a candidate."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Group
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.collectives.grids import Grid
from policylang.planning.edits.data import Proof
from policylang.planning.edits.naming import Names
from policylang.planning.edits.offers import Ledger, Offer
from policylang.planning.edits.proof.equivalence import Claim, Prover

SAME_GRAPH = "other ranks, which were not asked, run the same graph"


class RefusedError(Exception):
    """Why a candidate is left as it is: a reason, and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


@frozen
class Setting:
    """One statement's place in its policy, and the graph as the statements before it leave it."""

    facts: Facts
    number: int
    """Of the statement, among those of its policy that change the structure."""
    capabilities: Capabilities
    names: Names
    prover: Prover
    known: Mapping[str, Group]
    """The groups that exist, without those that earlier statements have planned."""
    ledger: Ledger
    """What is settled with the other ranks."""

    def key(self, *words: str) -> str:
        """The name of an offer, alike on every rank whose graph has the same names."""
        return " ".join((str(self.number), *words))

    def check_shared(self, key: str) -> None:
        """Raises :class:`RefusedError` for what not every rank has offered."""
        if key in self.ledger.left:
            raise RefusedError(f"not on every rank: {self.ledger.left[key]}")

    def offer(self, key: str, terms: Sequence[object], grid: Grid) -> None:
        """Offer what has been found to the other ranks, if they are asked."""
        if self.ledger.asked:
            alike = hashlib.sha256("\0".join(map(str, (*terms, grid.shape, grid.everyone))).encode()).hexdigest()
            self.ledger.offers.append(Offer(key, alike[:32], () if grid.everyone else grid.ranks))

    def proof(self, claim: Claim) -> Proof:
        """Raises :class:`RefusedError` where old and new chain are not the same, or that cannot be told."""
        found = self.prover.prove(claim)
        if isinstance(found, str):
            raise RefusedError("the check failed", found)
        return found if self.ledger.asked else evolve(found, assumed=SAME_GRAPH)
