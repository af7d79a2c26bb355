"""APL2xx: the text can be read and every name is known, and yet it means nothing."""

from __future__ import annotations

from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Severity

CODES: tuple[Code, ...] = (
    Code(
        "APL201",
        "unit that does not fit",
        "Bytes are compared with bytes or plain numbers, operations with operations or plain numbers, counts and "
        "sizes with plain numbers, and per cent is for `recomputed flops` alone.",
        wrong="save mm where bytes > 2 GFLOP",
        mended="save mm where flops > 2 GFLOP",
    ),
    Code(
        "APL202",
        "`policy` is not first",
        "The name of a policy is its first statement.",
        wrong="save mm\npolicy late",
        mended="policy early\nsave mm",
    ),
    Code(
        "APL203",
        "said twice",
        "A policy has one name, one set of blocks and one fate for what no rule decides. Included files count.",
        wrong="blocks layers.*\nblocks h.*\nsave mm in block",
        mended="blocks layers.*\nsave mm in block",
    ),
    Code(
        "APL204",
        "needs another version",
        "The policy says which versions of the language it was written for, and this is not one of them.",
        wrong="requires policylang >= 99",
        mended="requires policylang >= 0.1\nsave mm",
    ),
    Code(
        "APL205",
        "position out of range",
        "Positions and counts start at 1; the numbers of `blocks 0..3` start at 0 and go upwards.",
        wrong="save every 0th mm",
        mended="save every 2nd mm",
    ),
    Code(
        "APL206",
        "comparison that does not fit",
        "Names are compared with `==` and `!=` alone; numbers with numbers, names with names or globs; `shape` "
        "has an index and nothing else has.",
        wrong="save mm where dtype < bf16",
        mended="save mm where dtype == bf16",
    ),
    Code(
        "APL207",
        "policy without a rule",
        "The policy decides nothing: it has neither a rule, nor `undecided`, nor a rewrite, nor an expectation.",
        wrong="policy empty",
        mended="policy something\nsave mm",
        severity=Severity.WARNING,
    ),
    Code(
        "APL208",
        "expectation without `every` or `no`",
        "An expectation about a set of nodes says whether all of them or none of them are to be saved.",
        wrong="expect mm saved",
        mended="expect every mm saved",
    ),
    Code(
        "APL209",
        "word said twice",
        "`optional` and `override` may each stand before a rule once.",
        wrong="optional optional save mm",
        mended="optional save mm",
    ),
    Code(
        "APL210",
        "stage without a size",
        "`crosses cut per SIZE` cuts the forward into stages that make about that many bytes each, so there has to be "
        "at least one byte.",
        wrong="save everything where crosses cut per 0 GiB",
        mended="save everything where crosses cut per 2 GiB",
    ),
)
