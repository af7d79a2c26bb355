"""APL4xx: the graph that came out does not do what the plan said."""

from __future__ import annotations

from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Severity

CODES: tuple[Code, ...] = (
    Code(
        "APL401",
        "saved and not planned",
        "After a graph is split, policylang reads off the two halves what the forward keeps for the backward. This "
        "value is kept, and the plan says otherwise. Either the graph was changed between planning and splitting, or "
        "this version of torch splits graphs in a way policylang does not know; a report with the node's name helps.",
    ),
    Code(
        "APL402",
        "planned to be saved and not saved",
        "The backward needs this value and the plan says it is saved, but the forward does not keep it: the backward "
        "computes it again, or computes something else instead.",
    ),
    Code(
        "APL403",
        "recomputed and not planned",
        "This forward operator runs again in the backward, and the plan says its value is saved or not needed. It "
        "costs time that the report does not account for.",
    ),
    Code(
        "APL404",
        "planned to be recomputed and not recomputed",
        "The plan says that the backward computes this value again, and the backward does not contain the operator.",
    ),
    Code(
        "APL405",
        "a value that nobody planned",
        "The forward keeps something for the backward that is neither a node of the graph that was planned, nor the "
        "state of a random number generator, or that the backward does not take.",
    ),
    Code(
        "APL406",
        "an effect that happens twice",
        "A copy of a forward operator writes to memory that is not the copy's own: a counter would count twice, a "
        "running mean move twice. Planning refuses such a recomputation, so this is a bug in policylang or another "
        "pass's work.",
    ),
    Code(
        "APL407",
        "a recomputation that draws new random numbers",
        "A copy of a random operator does not start from the state that the forward kept, so its mask is not the one "
        "of the forward and the gradients would be wrong. This is a bug in policylang or another pass's work.",
    ),
    Code(
        "APL408",
        "a rewrite that came out otherwise",
        "A `fuse` or `collapse` line is planned node by node, names, shapes and strides included, and then carried "
        "out. Either the graph was changed in between, or the operators of this version of torch lay their results "
        "out in another way than planning knows. In the second case a report with the message helps.",
    ),
    Code(
        "APL409",
        "a checkpoint that holds other memory than planned",
        "The memory that an eager checkpoint holds for the backward was measured on the first call of a block, and is "
        "not what the plan says, although the values are those of the plan. That is a kernel's choice, which lays its "
        "result into a larger memory than it fills, or into one that another value has too. The report says so.",
        severity=Severity.WARNING,
    ),
    Code(
        "APL410",
        "run in another order than planned",
        "A graph orders by its edges what reads what, and by position alone what draws random numbers, writes to "
        "memory, meets other ranks in a collective, or copies a value to the host. One of these runs before or after "
        "another that it was planned to follow or precede, or a node runs before one that it reads. Another pass moved "
        "it, or this is a bug in policylang.",
    ),
    Code(
        "APL411",
        "offloaded, not planned",
        "The graph copies a value to the host and reads the copy in the backward, and no line of the policy decided "
        "`offload` for it.",
    ),
    Code(
        "APL412",
        "offloaded, and held on the device",
        "A value is copied to the host, and something keeps its memory on the device until the backward: a saved view "
        "of it, or a reader that the plan took for an earlier one. The copies would cost time and free nothing.",
    ),
    Code(
        "APL413",
        "a copy that nobody awaits",
        "A copy between device and host is read, or its source given back, without the `policylang::wait` that orders "
        "the two. Values would depend on how fast the copy is, so the graph is not run. Another pass changed it, or "
        "this is a bug in policylang.",
    ),
)
