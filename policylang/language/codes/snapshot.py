"""APL35x: files that hold the facts of a graph."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL351",
        "not a snapshot",
        "A snapshot is a file that `policylang snapshot` or `policylang.snapshot` wrote: the facts of a graph, without "
        "weights and without code. This file is something else. A recorded graph in JSON becomes a snapshot with "
        "`policylang import`.",
    ),
    Code(
        "APL352",
        "a snapshot of a newer format",
        "The snapshot was written by a policylang that knows more of a graph than this one. What it does not know it "
        "would have to leave out, and a plan without it could be another one. Update policylang, or write the snapshot "
        "again with this version.",
    ),
    Code(
        "APL353",
        "a damaged snapshot",
        "The file begins like a snapshot, and its content is not what was written: it was cut short, changed on its "
        "way, or put together by something else. Nothing is read from such a file. Write the snapshot again.",
    ),
    Code(
        "APL354",
        "too large for a snapshot",
        "A snapshot has at most 2,097,152 nodes and 128 MiB, packed and unpacked. More than that is no graph of a "
        "training step, and reading it could take all memory, so it is refused before it is read.",
    ),
    Code(
        "APL355",
        "a snapshot that cannot be read or written",
        "The file is not there, is a folder, or its permissions forbid it.",
    ),
    Code(
        "APL356",
        "nothing to take a snapshot of",
        "A snapshot holds what was known of a graph when its policy was planned, or what can be told of a graph "
        "module. A model has a graph once it was compiled under a policy and has run forward with gradients. Where "
        "the graph came from a compile cache it was planned in an earlier process, and its facts are not there; "
        "compile once with `torch._inductor.config.force_disable_caches = True` and take the snapshot then.",
    ),
    Code(
        "APL357",
        "not a recorded graph",
        "`policylang import` reads recorded graphs: JSON, gzipped or not, with `fields`, and `nodes`, one list a node "
        "in graph order. The message says what is missing or wrong, and where.",
    ),
)
