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
    Code(
        "APL383",
        "TorchTitan's graph trainer cannot be imported",
        "The integration enters a policy into the registry of TorchTitan's graph trainer, which is imported for it. "
        "TorchTitan 0.3.0 installs beside torch; its mixture-of-experts kernels, which the graph trainer imports too, "
        "need triton, which comes with torch for CUDA.",
    ),
    Code(
        "APL384",
        "a memory policy on a graph that is not a whole step",
        "TorchTitan's graph trainer hands its memory policies the graph of forward, loss and backward in one. Here it "
        "was another kind of graph. With pipeline parallelism a stage's graph has no loss: there, apply the policy to "
        "the graphs themselves, with `policylang.apply`.",
    ),
    Code(
        "APL385",
        "a precompiled step under a name that any policy may have",
        "TorchTitan knows a precompiled step by its configuration, of which a memory policy is a name alone. Under a "
        "name that stays the same when the policy is edited, the step of the old policy would be loaded. "
        "`policylang.integrations.torchtitan.register` returns a name that changes with the policy: choose that one.",
    ),
)
