"""APL38x: carrying a plan out on a flat graph, where forward, loss and backward are one."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL381",
        "the graph changed after it was planned",
        "A plan names the nodes of one graph. Another pass has added, removed or renamed nodes since, so the decisions "
        "no longer say what they said. Apply the policy after the passes that change the graph.",
    ),
    Code(
        "APL382",
        "a second policy on one flat graph",
        "Carrying out a policy on a flat graph inserts copies and erases forward nodes, so a second policy would "
        "decide on what the first one left. Trace the step again, or put both policies into one file: the last rule "
        "that matches decides.",
    ),
)
