"""APL314, APL315: what a check on a snapshot finds beside what applying the policy would."""

from __future__ import annotations

from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Severity

CODES: tuple[Code, ...] = (
    Code(
        "APL314",
        "what must be done is softened",
        "A rule says `must_save` or `must_recompute`, and later rules that do not say `must_…` ask for the opposite on "
        "some of its nodes. The last rule that matches a node decides, so the word `must_` has no weight of its own "
        "against them. Exceptions are written after the rule they are exceptions to; what must be done, last.",
        wrong="must_recompute all_gather\nsave everything in block where crosses block",
        mended="save everything in block where crosses block\nmust_recompute all_gather",
        severity=Severity.WARNING,
    ),
    Code(
        "APL315",
        "an expectation that a snapshot cannot settle",
        "The expectation depends on values that no rule decides and that are left to PyTorch's partitioner, which is "
        "asked only when a model is compiled: it is checked then. With `undecided -> save` or `undecided -> recompute` "
        "a check on a snapshot settles it too.",
        severity=Severity.NOTE,
    ),
)
