"""APL39x: a policy carried out by an eager checkpoint, operator by operator."""

from __future__ import annotations

from policylang.language.codes.declaration import Code
from policylang.language.diagnostics import Severity

CODES: tuple[Code, ...] = (
    Code(
        "APL391",
        "an expectation about the whole graph",
        "An eager checkpoint plans one block at a time and never sees the whole model. An expectation that adds up or "
        "counts over a whole graph is not checked there, and the report says so. What is said `per block` is checked, "
        "and `policylang plan` checks the rest on a snapshot of the model.",
        wrong="expect saved <= 6 GiB",
        mended="expect saved per block <= 200 MiB",
        severity=Severity.WARNING,
    ),
    Code(
        "APL392",
        "a block that cannot be recorded",
        "Before a block runs for the first time under a policy, it is run once on tensors without data, to learn which "
        "operators it calls and what its backward reads. A block that branches on the values of a tensor, or that "
        "calls code which needs real data, cannot be. Leave such a part outside the block.",
    ),
    Code(
        "APL393",
        "other operators than were recorded",
        "A plan is replayed by position: the tenth operator of the block is the tenth that was recorded. A block that "
        "does something else on the same inputs, by a counter or a flag of its own, does not fit its plan from "
        "that operator on. What follows is then recomputed in that call, and the block is recorded again for the "
        "next one; with `strict=True` it is an error. A recomputation that differs from its own forward always is.",
    ),
    Code(
        "APL394",
        "a checkpoint around something else",
        "`policylang.context_fn` was given a module, and the checkpoint it was passed to has to run that module, or "
        "one of its blocks, once and nothing beside it: what runs around it has not been recorded.",
    ),
    Code(
        "APL395",
        "a saved value that was changed",
        "The block, or what came after it, wrote in place to a value that the policy saves. The backward would compute "
        "with what is there now. Recompute the value instead, or write to a copy.",
    ),
    Code(
        "APL396",
        "compiled code in an eager checkpoint",
        "`torch.compile` replaces the operators of a block by kernels of its own, so that there is no operator left "
        "for an eager checkpoint to save. A checkpoint under a policy and a compiler go together where the compiler "
        "has the same policy and carries it out by itself: `block.compile(backend=policylang.backend(...))`, or "
        "`torch.compile(model, backend=policylang.backend(...))`. Any other compiler around or inside such a "
        "checkpoint is refused, and so is a block of which a part is compiled. A block that was to be compiled with a "
        "policy, and that `torch.compile` ran as it is, is a warning: the policy is then followed operator by "
        "operator.",
    ),
    Code(
        "APL397",
        "two policies for one block",
        "A block that is compiled lies in a checkpoint, or has one inside, and compiler and checkpoint were given "
        "different policies; or a step was traced from a model whose checkpoints follow another policy than the step "
        "is given. Only one of them can be carried out. Give the same file to both; comments and layout do not count.",
    ),
)
