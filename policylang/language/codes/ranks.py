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
        "The plans of all ranks that share a graph are compared before anything is compiled. This rank has posted "
        "none: it has died, has never loaded a policy, or compiles or applies something else. A rank gives a sign of "
        "life from the moment it loads a policy, makes a backend or traces a step, so one that is only slow is waited "
        "for: 10 minutes, or what `POLICYLANG_AGREE_TIMEOUT` says, in seconds. One without a sign of life is given up "
        "after 20 seconds (`POLICYLANG_AGREE_SILENCE`).",
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
)
