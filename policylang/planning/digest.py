"""One number for a plan: equal plans have equal digests in every process and on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import islice

from policylang.graph.facts import Facts
from policylang.language.syntax import Policy
from policylang.planning.edits.graph_edit import Edits
from policylang.planning.edits.pieces import common_names
from policylang.planning.plan import Decision

_CHUNK = 1 << 14
NO_EDITS = Edits()


def plan_digest(policy: Policy, facts: Facts, decisions: Sequence[Decision | None], edits: Edits = NO_EDITS) -> str:
    """Hex SHA-256 over the policy's resolved text, the node names, the operators, the decisions and the edits.

    Of an edit, what every rank has alike: names and sizes, not the ranks of its own group. What is left as it is does
    not count: it changes nothing, whatever the reason.
    """
    digest = hashlib.sha256()
    _feed(digest, [policy_text(policy)])
    _feed(digest, common_names(facts))
    _feed(digest, facts.targets)
    words: dict[int, str] = {}  # decisions are few shared objects, so each is spelled once
    _feed(digest, (words.get(id(d)) or words.setdefault(id(d), _word(d)) for d in decisions))
    if edits:
        _feed(digest, edits.words())
    return digest.hexdigest()


def policy_text(policy: Policy) -> str:
    """The canonical text; for a tree built by hand, which has none, its fields (spans take no part in a repr)."""
    if policy.canonical:
        return policy.canonical
    return repr((policy.lets, policy.blocks, policy.rules, policy.undecided, policy.rewrites, policy.expectations))


def _word(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    action = "auto" if decision.action is None else decision.action.name
    return f"{action} {decision.rule} {decision.why.name}"


def _feed(digest: hashlib._Hash, words: Iterable[str]) -> None:
    """Add a column. Neither names nor operators hold a NUL, so words and columns cannot run together."""
    pending = iter(words)
    while chunk := list(islice(pending, _CHUNK)):
        digest.update("\0".join(chunk).encode("utf-8", "surrogatepass") + b"\0")
    digest.update(b"\0\0")
