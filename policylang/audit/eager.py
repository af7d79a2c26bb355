"""Audits an eager checkpoint: the memory that the running block really holds for its backward.

Measured on the tensors themselves: the storages that the checkpoint keeps alive, each once, those of the block's own
inputs and parameters left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import evolve
from torch import Tensor

from policylang.audit.against_plan import NOT_SAVED, SAVED_UNPLANNED, Expected, Wording, runs_otherwise, summary
from policylang.audit.outcome import Audit, Found
from policylang.language.diagnostics import diagnose
from policylang.planning.checkpoints import kept_rows
from policylang.planning.liveness import Needs
from policylang.planning.plan import Plan
from policylang.torch_compat.eager import held_bytes

OTHER_BYTES = "APL409"
_WORDING = Wording(
    "{node} {found}",
    "this is a bug in policylang",
    {
        SAVED_UNPLANNED: "{node} is held, and the plan does not say so",
        NOT_SAVED: "{node} is not held, and the plan says so",
    },
    is_brief=True,
)


def audit_eager(plan: Plan, needs: Needs, held: Mapping[int, Sequence[Tensor]], outside: Iterable[Tensor]) -> Audit:
    """Compare one call of a block with its plan.

    Args:
        needs: what follows from the plan (:func:`policylang.planning.liveness.saved_and_recomputed`).
        held: by row of the operator, the plain tensors that the checkpoint holds.
        outside: those of the block's parameters, buffers and inputs, which are alive anyway.
    """
    facts = plan.facts
    planned = {facts.owners[row] for row in kept_rows(facts, needs.saved)}
    found = Found(saved=sorted({facts.owners[row] for row in held}))
    wrong = tuple(runs_otherwise(_WORDING, plan, Expected(planned, planned), found.saved, found))
    # the second run is still to come: it is taken as planned
    audit = summary(plan, evolve(found, recomputed=list(needs.recomputed)), wrong, saved=needs.saved)
    measured = held_bytes((tensor for tensors in held.values() for tensor in tensors), outside)
    if measured != audit.saved_bytes:
        said = f"the checkpoint holds {measured:,} bytes, and the plan says {audit.saved_bytes:,}"
        why = "a kernel lays its result into a larger memory than it fills, or into one that another value has too"
        wrong = (*wrong, diagnose(OTHER_BYTES, said, help=why))
    return evolve(audit, saved_bytes=measured, differences=wrong)
