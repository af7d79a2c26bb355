"""Offers: ranks settle which edits all of them make before a plan is fixed; an edit that one lacks is made nowhere.

Which part of a value a rank takes is a number in its graph, another one in every rank's. On one rank it may be the
rank's own part by accident; on the next it is not. If only one of them took its gather out, the other would wait in it
for ever. So each rank offers the rewrites that its graph allows, and every finding that they rest on. What not all
ranks offer alike is left, the rewrites are planned anew without it, and so on until all offers are the same: a few
rounds, of which nearly every graph needs one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from attrs import field, frozen, mutable

UNASKED = "other ranks cannot be asked"
"""Why something is left that one rank's graph does not tell."""


@frozen
class Offer:
    """A rewrite, or a finding that rewrites rest on, as one rank has it."""

    name: str
    """Which one it is: called alike on every rank."""
    terms: str
    """All of it that has to be alike."""
    among: tuple[int, ...] = ()
    """The ranks that take part in it as this rank has it, in order, where no mesh says so: each of them has to have the
    same."""


class Ranks(Protocol):
    """The ranks that share a graph, this one among them, as far as they can be asked."""

    def unshared(self, offers: Sequence[Offer]) -> Mapping[str, str]:
        """Tell the other ranks what this one offers, and hear what they do.

        Gives the names of what not all ranks offer alike, the same names on every rank, with a phrase each that says
        on which ranks it is missing. Empty once nothing is left to settle; otherwise every rank asks again.
        """


@mutable
class Ledger:
    """One attempt at a plan: what it offers, and what the attempts before it have shown to be no rewrite."""

    asked: bool
    """Whether other ranks are asked at all."""
    left: Mapping[str, str] = field(factory=dict)
    """What is not offered any more, and why."""
    offers: list[Offer] = field(factory=list)


def compared(offered: Mapping[tuple[Offer, ...], Sequence[int]]) -> dict[str, str]:
    """What not all ranks offer alike, and on which it is missing. ``offered``: the ranks, by what they offer."""
    everyone = sorted(rank for ranks in offered.values() for rank in ranks)
    variants: dict[str, dict[str, list[int]]] = {}
    members: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for offers, ranks in offered.items():
        for offer in offers:
            variants.setdefault(offer.name, {}).setdefault(offer.terms, []).extend(ranks)
            members.setdefault(offer.name, {}).setdefault(offer.among, []).extend(ranks)
    found: dict[str, str] = {}
    for name in sorted(variants):
        offering = {rank for ranks in variants[name].values() for rank in ranks}
        if missing := [rank for rank in everyone if rank not in offering]:
            found[name] = f"not on {_ranks(missing)}"
        elif len(variants[name]) > 1:
            usual = min(variants[name].values(), key=lambda ranks: (-len(ranks), min(ranks)))
            found[name] = f"otherwise on {_ranks(sorted(offering - set(usual)))}"
        elif apart := [ranks for among, ranks in members[name].items() if among and sorted(among) != sorted(ranks)]:
            found[name] = f"over other ranks on {_ranks(sorted(rank for ranks in apart for rank in ranks))}"
    return found


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
