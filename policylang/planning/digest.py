"""A hash of a plan: equal plans have equal digests in every process and on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.language.selectors import tests_of
from policylang.language.syntax import TIMES, Compare, Overlap, Policy, Statement
from policylang.planning.edits.layout_chains import common_names
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import OrderPlan
from policylang.planning.value_outcome import Decision

_CHUNK = 1 << 14
NO_EDITS = Edits()


def plan_digest(
    policy: Policy,
    facts: Facts,
    decisions: Sequence[Decision | None],
    edits: Edits = NO_EDITS,
    device: DeviceProfile | None = None,
    order: OrderPlan | None = None,
) -> str:
    """Hex SHA-256 over the policy's resolved text, the node names, the operators, the decisions and the edits, and over
    the figures of a device that the policy decides by and does not name itself.

    An edit contributes what all ranks share: names and sizes, not the ranks of its group. A refused edit contributes
    nothing: it changes nothing, whatever the reason.
    """
    words: dict[int, str] = {}  # decisions are few shared objects, so each is spelled once
    decided = (words.get(id(d)) or words.setdefault(id(d), _word(d)) for d in decisions)
    columns = [[policy_text(policy)], common_names(facts), facts.targets, decided, edits.words()]
    if order is not None:
        columns.append(order.words())
    return digest_of((*map(digest_of, columns), *deciding_device(policy, device)))


def deciding_device(policy: Policy, device: DeviceProfile | None) -> tuple[str, ...]:
    """The figures of a device that is not in the policy's text, where a rule or an order goes by them."""
    if device is None or (policy.device is not None and policy.device.canonical == device.canonical):
        return ()
    timed = any(True for _ in timed_tests(policy, *policy.deciding))
    decides = timed or any(isinstance(each, Overlap) for each in policy.scheduling)
    return (device.canonical,) if decides else ()


def timed_tests(policy: Policy, *statements: Statement) -> Iterator[Compare]:
    for test in tests_of(policy, *statements):
        if isinstance(test, Compare) and test.quantity in TIMES:
            yield test


def policy_text(policy: Policy) -> str:
    """The canonical text; for a tree built by hand, which has none, its fields (spans take no part in a repr)."""
    if policy.canonical:
        return policy.canonical
    device = policy.device and policy.device.canonical
    statements = (policy.lets, policy.blocks, policy.rules, policy.undecided, policy.rewrites, policy.expectations)
    later = filter(None, (policy.scheduling, policy.prefetch_offloaded, device))
    return repr((*statements, *later))


def _word(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    action = "auto" if decision.action is None else decision.action.name
    form = "" if decision.form is None else f" as {decision.form.text}"
    return f"{action}{form} {decision.rule} {decision.why.name}"


def digest_of(words: Iterable[str]) -> str:
    """Hex SHA-256 over some words. None of them holds a NUL, so that they cannot run together."""
    digest, pending = hashlib.sha256(), iter(words)
    while chunk := list(islice(pending, _CHUNK)):
        digest.update("\0".join(chunk).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
