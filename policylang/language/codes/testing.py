"""APL5xx: policy tests and the graphs that are written in them, formatting, and policies made from other forms."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL501",
        "not a line of a graph",
        "A graph in a policy test is written one node a line, such as "
        "`%y = aten.mm.default(%x, %w) layers.0 shape=8x8 dtype=bf16`. `docs/policy-tests.md` describes the form.",
    ),
    Code(
        "APL502",
        "a node that is not there, or twice",
        "A line of a graph may read the nodes of the lines above it, by their names, and a name is given once.",
    ),
    Code(
        "APL503",
        "a word that says nothing of a node",
        "Behind the call, a line of a graph holds the module path of its node, flags such as `view`, and figures such "
        "as `bytes=64`. The operator has to be one that torch has, in full; a misspelt one would make a test that "
        "passes for the wrong reason.",
    ),
    Code(
        "APL520",
        "formatting would change more than the layout",
        "`policylang fmt` proves what it writes: the same tree, the same words, every comment between the same words, "
        "and nothing left to format. The proof failed, so the file is as it was. This is a bug in policylang.",
    ),
)
