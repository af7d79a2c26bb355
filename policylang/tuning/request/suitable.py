"""Whether a policy can be tuned for a graph, and what is to be said of the graph where it can."""

from __future__ import annotations

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind, Phase
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.planning.capabilities import HALF, Capabilities

UNSUITABLE = "APL630"
NO_BLOCKS = "APL631"
NO_COPIES = "APL632"

_WHOLE = "take a snapshot of a whole step: of `policylang.trace_step`, or of a model compiled under a policy"


def unsuitable(facts: Facts, called: str) -> Diagnostic | None:
    """Why there is nothing to tune in a graph; None where there is. ``called``: what messages call the graph."""
    if not any(op == "call_function" for op in facts.ops):
        return diagnose(UNSUITABLE, f"{called} is empty: no operator runs in it", help=_WHOLE)
    if facts.kind is GraphKind.BACKWARD:
        message = f"{called} is the backward half of a partition, where all has been decided"
        return diagnose(UNSUITABLE, message, help=_WHOLE)
    if Phase.BACKWARD not in facts.phases:
        half = "the forward half of a partition, or" if facts.kind is GraphKind.FORWARD else "a graph"
        message = f"{called} is {half} of a forward alone: without its backward nothing is kept"
        mend = f"{_WHOLE}, with gradients on" if facts.kind is not GraphKind.FORWARD else _WHOLE
        return diagnose(UNSUITABLE, message, help=mend)
    if not facts.forward:
        message = f"{called} has no forward: what its backward reads is given to it"
        return diagnose(UNSUITABLE, message, help=_WHOLE)
    if not any(facts.has(row, Flag.FEEDS_BACKWARD) for row in facts.forward):
        message = f"the backward of {called} reads nothing that its forward computes: there is nothing to decide"
        return diagnose(UNSUITABLE, message, help="it takes what it takes; no policy changes that")
    return None


def decides_nothing(capabilities: Capabilities) -> Diagnostic | None:
    """Why a path leaves a tuned policy nothing to decide; None where it does not."""
    if capabilities is not HALF:
        return None
    message = "a half of a partition is given a policy's rewrites alone: what is saved was decided when it was cut"
    return diagnose(UNSUITABLE, message, help="tune for the path that cuts it, `joint`, or for another one")


def no_copies(capabilities: Capabilities) -> Diagnostic | None:
    """Why values cannot be offloaded on a path; None where they can."""
    if capabilities.offloads:
        return None
    message = f"values cannot be offloaded: {capabilities.name} does not copy to the host"
    return diagnose(NO_COPIES, message, help="leave `offload` out, or tune for another path")


def without_blocks(facts: Facts, called: str) -> Diagnostic | None:
    """The note that goes with a graph in which no layer is numbered."""
    if blocks_of(facts, None).names:
        return None
    message = f"{called} has no numbered layers: its rules go by module, operator and size"
    return diagnose(NO_BLOCKS, message, help="where its layers have other names, a policy may say `blocks GLOB`")
