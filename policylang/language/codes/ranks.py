"""APL6xx: ranks that share a graph and do not agree about it."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL601",
        "ranks decided differently",
        "Ranks that share a graph run its collectives together, so what one of them recomputes all of them have to "
        "recompute, or they wait for each other for ever. Before anything is compiled the plans are compared; this is "
        "the first node about which two ranks decided differently. Most often the ranks read different policy files.",
    ),
    Code(
        "APL602",
        "ranks have different graphs",
        "Ranks that share a graph have to trace the same operators in the same order. This is the first node that two "
        "of them do not have in common: a branch of the model that depends on the rank, or an option that one rank "
        "was started with and another was not.",
    ),
    Code(
        "APL603",
        "ranks have different policies",
        "On this graph the two policies come to the same, node by node. On the next one they need not: give every "
        "rank the same policy file.",
    ),
    Code(
        "APL604",
        "a rank is missing",
        "Ranks that share a graph compare what they are about to do, and wait for each other as long as their process "
        "groups would: the group's own timeout, or what `POLICYLANG_AGREE_TIMEOUT` says, in seconds. This rank has not "
        "come: it has died, waits somewhere else, or compiles or applies something else. After ten seconds the log "
        "(`policylang.ranks`) says whom a rank waits for, and since when.",
    ),
    Code(
        "APL605",
        "another rank stopped",
        "A rank that shares this graph found an error between its policy and its graph, and goes no further. This "
        "rank would wait for it in the first collective, so it stops too. The message is the other rank's.",
    ),
    Code(
        "APL606",
        "a mesh without the graph's groups",
        "The mesh that is passed with a policy names the dimensions of the graph's collectives and says which ranks "
        "share the graph. A collective of this graph runs over ranks that the mesh does not contain.",
    ),
    Code(
        "APL607",
        "ranks wait for different graphs",
        "This rank waits for the plan of another rank, which itself waits, for a plan of a graph that this rank does "
        "not have or does not share with the same ranks. Neither would ever go on.",
    ),
    Code(
        "APL608",
        "a cached graph is rewritten where others would not",
        "`fuse` and `collapse` change collectives only where every rank that shares the graph makes the same change. "
        "One rank took the compiled graph from its cache, with changes that were settled when it was compiled, and "
        "the ranks that compile now cannot all make them. The cached graph would wait in collectives that the "
        "others do not have.",
    ),
    Code(
        "APL609",
        "ranks run different collectives",
        "The members of a process group run its collectives together: the same ones in the same order, with the same "
        "reduction, element type and sizes. With another order or size they hang or abort; with another element type "
        "or reduction they train on, on wrong numbers. This is the first collective in which two ranks differ. Where "
        "the plans are the same and what came of them is not, a setting of torch differs "
        "(`torch._functorch.config.cse`), which the message names.",
    ),
    Code(
        "APL610",
        "ranks have different settings",
        "Some settings change the collectives of a graph after the policy has been carried out: Inductor's bucketing, "
        "reordering and custom passes. They have to be the same on every rank that shares the graph, and so does the "
        "mesh that is passed with a policy.",
    ),
    Code(
        "APL611",
        "compiled again alone, and otherwise",
        "A rank compiles code again when it meets a new shape, which other ranks may never see, so it cannot ask them. "
        "What it comes to is held against what the ranks agreed on for this code: sizes may differ, the collectives "
        "that run may not. Most often a threshold in bytes decides otherwise for the new batch, and what is recomputed "
        "now gathers weights again that the other ranks have saved.",
    ),
    Code(
        "APL612",
        "only some ranks compare",
        "`agree=False` and `POLICYLANG_AGREE=0` are for all ranks or for none: a rank that compares waits for all that "
        "share its graph.",
    ),
)
