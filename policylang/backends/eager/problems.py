"""Diagnostics of eager checkpoints: the one place where their sentences are written."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from policylang.backends.refusals import Problem
from policylang.errors import PolicyWarning
from policylang.language.diagnostics import Diagnostic
from policylang.planning.refusals import NO_SUCH_BLOCKS, PATH_CANNOT
from policylang.planning.schedule import WHOLE_GRAPH

AROUND_IT = "the model around this checkpoint"
_COMPILE = "`block.compile(backend=policylang.backend(...))`; `torch.compile` of the model takes the same backend"


DRIFTED = Problem(  # in the forward: another operator than in the first call
    "APL393",
    "{name} runs {came} as operator {number}, where {expected} was recorded",
    "this call recomputes the rest, and the next call is recorded anew; "
    "look for a counter, a flag or a random choice that changes what the block runs",
)
DIVERGED = Problem(  # in the recomputation: another operator than in its forward
    "APL393",
    "the recomputation of {name} runs {came} as operator {number}, where its forward ran {expected}",
    "a block has to run the same operators both times: look for a counter, a flag or an unseeded choice",
)
OTHER_NUMBER = Problem(
    "APL393",
    "the recomputation of {name} calls `{operator}` (operator {number}) with {now}, where its forward did with {then}",
    "keep what counts or draws in an attribute or a buffer of the block, or pass it as an argument",
)
DRAWN_MEANWHILE = Problem(
    "APL393",
    "another thread drew random numbers as {name} did, in `{operator}` (operator {number}): it cannot draw them again",
    "run the step in one thread; with `preserve_rng_state=False` blocks of several threads may draw at the same time, "
    "as long as nothing else does",
)
NO_LIST = Problem(
    NO_SUCH_BLOCKS,
    "the model ({kind}) has no `ModuleList` whose children could be its blocks",
    "name them in the policy, `blocks layers.*`",
)
NO_BLOCKS = Problem(
    NO_SUCH_BLOCKS,
    "`{glob}` matches no module of the model ({kind})",
    "write `blocks` with a glob of the names in `model.named_modules()`",
)
DIFFERENTIATED = Problem(
    "APL398",
    "{name} is differentiated by `torch.func`, which keeps what it needs where no checkpoint can reach it",
    "differentiate with `loss.backward()` or `torch.autograd.grad`, or leave the checkpoints out here",
)
DIFFERENTIATES = Problem(
    "APL398",
    "{name} differentiates a function by `torch.func`, which allows no checkpoint around it",
    f"call `torch.autograd.grad` there, or compile the block with the same policy: {_COMPILE}",
)
RUNS_TRANSFORMED = Problem(  # only a warning: the numbers are right
    "APL398",
    "{name} runs under a transformation of `torch.func`, without its checkpoint: its backward keeps all it reads",
    "run it under `torch.no_grad()` if no backward follows, or leave `vmap` and `jvp` out of the step",
)
NESTED_MADE = Problem(  # each run gives one of jagged layout another symbol for its size
    "APL428",
    "{name} makes a nested tensor, in `{operator}`, which no checkpoint can make again",
    "make it before the blocks, with `layout=torch.jagged`, and pass it to them",
)
NESTED_GIVEN = Problem(
    "APL428",
    "{name} is called with a nested tensor of strided layout, which has no sizes that a plan could count",
    "make it with `layout=torch.jagged`",
)
HOOKED = Problem(  # only a warning: the numbers are right
    "APL399",
    "{name} sets hooks for its saved tensors, so the policy decides nothing there",
    "take `save_on_cpu` or `saved_tensors_hooks` out of the block, or use them around the whole model",
)
NOTHING_YET = Problem(  # only a warning: another block may have what the rule names
    "APL359",
    "{found} so far, and {names} has not run",
    "ignore this if the rule is meant for that block alone",
)
ONLY_ONE_BLOCK = Problem(
    "APL394",
    "a copy of {name} shares the checkpoint of the original, which runs the original block",
    "copy the model with `copy.deepcopy`, and use DistributedDataParallel instead of DataParallel",
)
NOT_RUN = Problem(
    "APL394",
    "the checkpoint ended without running any module that its `context_fn` was made for",
    "pass the module that the checkpoint calls, or the model that has it among its blocks; "
    f"a compiled one needs the same policy: {_COMPILE}",
)
WITHOUT_MODEL = Problem(
    "APL394",
    "the `context_fn` of the checkpoint has lost its model: it was stored without it, or the model was deleted",
    "make one for the model that you train: `policylang.context_fn(policy, model)`",
)
_ONE_CHECKPOINT = (
    "switch the other one off (`activation_checkpointing` or `gradient_checkpointing` in a trainer's arguments), "
    "or leave `checkpoint_model` out and give the other one the policy as its `context_fn`"
)
OWN_CHECKPOINT = Problem(  # around all of its forward, and inside ours
    "APL394",
    "another checkpoint, inside the policy's, runs all of {name}: the policy decides nothing",
    _ONE_CHECKPOINT,
)
AROUND_OURS = Problem(  # only a warning, as the next two: the numbers are right
    "APL426",
    "the checkpoint of {name} is inside another one, which recomputes the whole block once more",
    _ONE_CHECKPOINT,
)
IN_BACKWARD = Problem(
    "APL426",
    "{name} runs with gradients only in the backward, as under `use_reentrant=True`: nothing that the policy saves "
    "is kept",
    _ONE_CHECKPOINT,
)
IN_PLACE_OF_OURS = Problem(
    "APL426",
    "all blocks have run with gradients, from {name} on, and none in a checkpoint with the policy's `context_fn`",
    "a trainer with `activation_checkpointing` or `gradient_checkpointing` set adds checkpoints itself: give it the "
    "function there, or switch that off",
)
NOT_TAKEN_OFF = Problem(
    "APL426",
    "{name} has no checkpoints of `checkpoint_model` to remove, and those with a function of `context_fn` stay",
    "checkpoint with `use_reentrant=False` alone, or none: `model.gradient_checkpointing_disable()` in Transformers",
)
FIRST_FSDP = Problem(
    "APL394",
    "{part}, which runs inside the checkpoint of {name}, is a `FullyShardedDataParallel`: it splits its "
    "weights in its forward, and differently when it is recomputed",
    "wrap the block's checkpoint in `FullyShardedDataParallel`, or shard with `fully_shard`",
)
RUN_TWICE = Problem(
    "APL394",
    "the checkpoint runs {name} and then another block: it was recorded for one",
    "put a checkpoint around each block",
)
REPLACED = Problem(
    "APL427",
    "something has replaced the forward of {name} since the checkpoint was added, and calls the checkpoint",
    "undo that first, then call `policylang.checkpoint_model`",
)
CHANGED = Problem(
    "APL395",
    "{name} saves the result of `{operator}` (operator {number}), and {happened} since",
    "recompute this value, or let the model write to a copy",
)
MOVED_WRITTEN = Problem(
    "APL395",
    "{name} offloads a tensor of shape {shape}, which was written to in place while it was copied to the host",
    "save or recompute this value, or let the model write to a copy",
)
OTHER_TENSOR = Problem(
    "APL395",
    "`{operator}` (operator {number}) in the recomputation of {name} reads another tensor than in the forward, where "
    "it read one of shape {shape}",
    "run the backward before you replace parameters, buffers or other tensors that the block reads "
    "(`functional_call`, `p.data = …`), or save what is computed from them",
)
WRITTEN_TENSOR = Problem(  # only a warning where it may hold what it held before: the buffers that DDP sends around
    "APL395",
    "the recomputation of {name} reads a tensor of shape {shape} in `{operator}` (operator {number}) that was written "
    "to in place since its forward",
    "run the backward before parameters and buffers are updated, or save what is computed from them",
)
OVERWRITTEN = Problem(  # autograd's own error, which a checkpoint hides
    "APL395",
    "the backward of {name} reads a tensor of shape {shape} that the block itself writes to afterwards, in "
    "`{operator}` (operator {number}): without a checkpoint PyTorch refuses that too",
    "let the block write to a copy",
)
INPUT_WRITTEN = Problem(
    "APL395",
    "{name} was called with a tensor that was written to in place since, and cannot be recomputed from it",
    "let the block, or the code behind it, write to a copy",
)
CHANGED_BETWEEN = Problem(
    "APL395",
    "a backward of {name} reads a tensor of shape {shape} that another backward has recomputed, and {happened} since",
    "run both backwards before parameters, buffers and saved values are written to",
)
RUN_AGAIN = Problem(
    "APL395",
    "the backward of {name} runs twice, and the first run freed the saved values",
    "call the first backward with `retain_graph=True`",
)
COMPILED = Problem(  # by another compiler than policylang's
    "APL396",
    "{name} is compiled without a policy, and an eager checkpoint sees no operators of compiled code",
    f"compile it with the same policy: {_COMPILE}",
)
COMPILED_PART = Problem(
    "APL396",
    "{part} is compiled and is only a part of {name}: a policy applies to the whole block",
    f"compile the whole block: {_COMPILE}",
)
NEEDS_A_COMPILER = Problem(  # torch's own error speaks of dispatch modes
    "APL396",
    "{name} calls code that has to be compiled (`flex_attention`, `fullgraph=True`), and an eager checkpoint sees "
    "no operators of compiled code",
    f"compile the whole block: {_COMPILE}",
)
TRACES_AGAIN = Problem(  # `torch.cond` and what is like it
    "APL396",
    "{name} calls `{operator}`: torch compiles its functions, and cannot do so inside an eager checkpoint",
    f"branch or loop in Python, or compile the block with the same policy: {_COMPILE}",
)
LEFT_ALONE = Problem(
    "APL396",
    "`torch.compile` did not compile {names} and ran it in eager",
    "`TORCH_LOGS=recompiles,graph_breaks` shows why; `torch._dynamo.config.recompile_limit` is one reason",
)
RUNS_UNCOMPILED = Problem(  # only a warning: what the compiler leaves to eager, the checkpoint follows
    "APL396",
    "`torch.compile` does not compile {name} and runs it in eager: the checkpoint follows the policy",
    "`TORCH_LOGS=recompiles,graph_breaks` shows why",
)
NOT_FULLY_SHARDED = Problem(
    "APL387",
    "this line orders gathers, which in eager only `fully_shard` can do: `{name}` cannot",
    "shard the model with `fully_shard`, or leave the line out",
)
NONE_SHARDED = Problem(
    "APL387",
    "`{line}` is about gathers of `fully_shard`, which has sharded none of the blocks",
    "call `fully_shard` with each block and then with the model, before the first step; "
    "`FullyShardedDataParallel` and `DistributedDataParallel` take no order",
)
GATHERED_TOGETHER = Problem(
    "APL388",
    "`{line}` counts gathers by block, and `fully_shard` of {units} gathers more than one block at once",
    "call `fully_shard` with each block by itself, then with the model",
)
PREFETCH_BY_TIMES = Problem(
    "APL389",
    "`{line}` selects gathers by their times, which are not known in eager",
    "select them by `bytes`, or by module",
)
PREFETCHES_NOTHING = Problem(
    "APL389",
    "`{line}` selects no weight of a block",
    "in eager only weights are gathered: write `all_gather where from parameter`",
)
PREFETCHES_A_PART = Problem(
    "APL389",
    "`{line}` selects a part of the weights that `fully_shard` of {units} gathers at once",
    "select all of a block's gathers, such as `all_gather where from parameter`",
)
PREFETCHES_ONE_BLOCK = Problem(
    "APL389",
    "`{line}` starts gathers a block earlier, and the model has only one block",
    "leave the line out, or write `optional` before it",
)
WITHOUT_ROOT = Problem(
    "APL387",
    "this line gathers blocks ahead, and `fully_shard` has sharded `{name}` but not the model around the blocks",
    "call `fully_shard` with the model too, after its blocks",
)
TOLD_OTHERWISE = Problem(
    "APL390",
    "{name} was set to gather {wanted} ahead in the {half}, and is now set to gather {is_so}",
    "do not set FSDP's prefetch yourself, or take the line out of the policy",
)
ONE_OF_THE_BLOCKS = Problem(
    PATH_CANNOT,
    "this line is about the order of a model's blocks, and the `context_fn` was made for {name} alone",
    "make it for the model, `policylang.context_fn(policy, model)`, or call `policylang.checkpoint_model`",
)


UNCHECKED = Problem(  # only a warning
    WHOLE_GRAPH,
    "`{line}` is not checked: a policy of scheduling lines alone plans no values in eager",
    "check it with `policylang plan` on a snapshot of the model",
)


def block(module: nn.Module, root: str) -> str:
    """A block as a sentence names it."""
    return f"`{root}` ({type(module).__name__})" if root else f"the block ({type(module).__name__})"


def operator(found: Any) -> str:
    """An operator as a sentence names it; None is the end of a block."""
    return "nothing more" if found is None else f"`{found}`"


def warn(found: Diagnostic) -> None:
    warnings.warn(f"{found.message} ({found.code}); {found.help}", PolicyWarning, stacklevel=3)
