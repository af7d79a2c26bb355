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
        "a block that cannot be recorded (no longer raised)",
        "Blocks used to run once on tensors without data before their first call, and some could not. Now the first "
        "call itself is watched, and every block that runs can be followed.",
    ),
    Code(
        "APL393",
        "other operators than were recorded",
        "A plan is followed by position: the tenth operator of the block is the tenth of its first call. A block that "
        "does something else on the same inputs, by a counter or a flag of its own, does not fit its plan from "
        "that operator on. What follows is then recomputed in that call, and the next one is observed again; "
        "with `strict=True` it is an error. A recomputation that differs from its own forward always is.",
    ),
    Code(
        "APL394",
        "a checkpoint around something else",
        "`policylang.context_fn` was given a module, and the checkpoint it was passed to has to run that module, or "
        "one of its blocks, once and nothing beside it: what runs around it has not been recorded. And a checkpoint "
        "that runs a `FullyShardedDataParallel` is refused: it takes its weights apart inside its own forward, in "
        "another way the second time. `fully_shard` does not, and is left to itself.",
    ),
    Code(
        "APL395",
        "a value that was changed before the backward",
        "The block, or what came after it, wrote in place to a value that the policy saves, or let go of its "
        "memory; or a parameter, a buffer or a constant that the recomputation reads is another one by now, or was "
        "written to. The backward would compute with what is there now. Recompute the value instead, write to a "
        "copy, or run the backward before anything is exchanged. Where a buffer was written to and may be what it "
        "was, as DDP sends buffers around before each forward, this is a warning.",
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
    Code(
        "APL398",
        "a block under a transformation of torch.func",
        "`torch.func.grad`, `vjp` and `jacrev` keep what they need by themselves and allow no hooks on it, so that no "
        "checkpoint works there, PyTorch's own neither. Under `vmap` and `jvp` the block runs without its checkpoint, "
        "with a warning where its parameters are trained: the numbers are right, and the memory is not saved.",
    ),
    Code(
        "APL399",
        "a block with hooks of its own around all that it saves",
        "`torch.autograd.graph.save_on_cpu`, or other `saved_tensors_hooks`, inside a block take what autograd saves "
        "before the checkpoint does. Where they take all of it, the checkpoint has nothing to recompute, and the "
        "policy nothing to decide. Around the model they work: they are then given what the checkpoints hold.",
        severity=Severity.WARNING,
    ),
)
