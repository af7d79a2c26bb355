"""What every statement that changes a graph's structure is planned on and with, and how it refuses a candidate."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from policylang.graph.facts import Facts, Group
from policylang.planning.plan import Capabilities
from policylang.planning.rewrites.data import Proof
from policylang.planning.rewrites.naming import Names
from policylang.planning.rewrites.proof import Claim, Prover


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

    def proof(self, claim: Claim) -> Proof:
        """Raises :class:`RefusedError` where old and new chain are not the same, or that cannot be told."""
        found = self.prover.prove(claim)
        if isinstance(found, str):
            raise RefusedError("the check failed", found)
        return found
