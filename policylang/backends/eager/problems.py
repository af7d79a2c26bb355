"""What can be wrong with an eager checkpoint: the one place where these sentences are written."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from torch import nn

from policylang.errors import PolicyGraphError, PolicyMatchError, PolicyWarning
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.source import Span
from policylang.language.syntax import Policy
from policylang.planning.digest import policy_text
from policylang.planning.refusals import NO_SUCH_BLOCKS

DRIFTED = "APL393"
AROUND = "APL394"
CHANGED = "APL395"
COMPILED = "APL396"
TWO_POLICIES = "APL397"
TRANSFORMED = "APL398"
HOOKED = "APL399"

AROUND_IT = "the model around this checkpoint"
_COMPILE = "`block.compile(backend=policylang.backend(...))`; `torch.compile` of the model takes the same backend"


def block(module: nn.Module, root: str) -> str:
    """A block as a sentence names it."""
    return f"`{root}` ({type(module).__name__})" if root else f"the block ({type(module).__name__})"


def drifted(name: str, position: int, expected: Any, came: Any) -> Diagnostic:
    """In the forward: another operator than the first call ran at a position, counted from 0."""
    return diagnose(
        DRIFTED,
        f"{name} runs `{came}` as operator {position + 1}, where {_expected(expected)} was recorded",
        help="what follows is recomputed in this call, and the next one is observed again; "
        "look for a counter, a flag or a random choice that changes what the block runs",
    )


def diverged(name: str, position: int, expected: Any, came: Any) -> PolicyGraphError:
    """In the recomputation: another operator than its own forward ran."""
    return _error(
        DRIFTED,
        f"the recomputation of {name} runs `{came}` as operator {position + 1}, where its forward ran "
        f"{_expected(expected)}",
        help="what a block runs has to be the same both times: look for a counter, a flag or an unseeded choice",
    )


def _expected(operator: Any) -> str:
    return "nothing more" if operator is None else f"`{operator}`"


def no_blocks(model: nn.Module, policy: Policy) -> PolicyGraphError:
    if policy.blocks is None:
        message = f"the model ({type(model).__name__}) has no `ModuleList` whose children could be its blocks"
        help = "name them in the policy, `blocks layers.*`"
    else:
        message = f"`{policy.blocks.glob}` matches no module of the model ({type(model).__name__})"
        help = "write `blocks` with a glob of the names in `model.named_modules()`"
    span = None if policy.blocks is None else policy.blocks.span
    return _error(NO_SUCH_BLOCKS, message, help, span=span)


def differentiated(name: str) -> PolicyGraphError:
    return _error(
        TRANSFORMED,
        f"{name} is differentiated by `torch.func`, which keeps what it needs where no checkpoint can reach it",
        help="differentiate with `loss.backward()` or `torch.autograd.grad`, or leave the checkpoints out here",
    )


def runs_transformed(name: str) -> Diagnostic:
    """Only a warning: the numbers are right."""
    return diagnose(
        TRANSFORMED,
        f"{name} runs under a transformation of `torch.func`, without its checkpoint: its backward keeps all it reads",
        help="run it under `torch.no_grad()` if no backward follows, or leave `vmap` and `jvp` out of the step",
    )


def hooked(name: str) -> Diagnostic:
    """Only a warning: the numbers are right."""
    return diagnose(
        HOOKED,
        f"{name} hands all that its backward reads to hooks of its own, and nothing is left for a policy to decide",
        help="take `save_on_cpu` or `saved_tensors_hooks` out of the block, or put them around the whole model",
    )


def only_one_block(name: str) -> PolicyGraphError:
    return _error(
        AROUND,
        f"a copy of {name} shares its checkpoint, whose forward belongs to the block alone",
        help="copy the model with `copy.deepcopy`, and use DistributedDataParallel instead of DataParallel",
    )


def not_run(names: Sequence[str]) -> PolicyGraphError:
    return _error(
        AROUND,
        "the checkpoint ended, and none of the modules that its `context_fn` was made for has run inside it",
        help="pass the module that the checkpoint calls, or the model that has it among its blocks; "
        f"a compiled one needs the same policy: {_COMPILE}",
        details=[f"made for: {name or 'the module itself'}" for name in names[:8]],
    )


def first_fsdp(name: str, part: str) -> PolicyGraphError:
    return _error(
        AROUND,
        f"{part}, which runs inside the checkpoint of {name}, is a `FullyShardedDataParallel`: it takes its weights "
        "apart in its forward, and in another way when it is run again",
        help="put `FullyShardedDataParallel` around the block's checkpoint, or shard with `fully_shard`",
    )


def run_twice(name: str) -> PolicyGraphError:
    return _error(
        AROUND,
        f"the checkpoint runs {name} and then another block: it was recorded for one",
        help="put a checkpoint around each block",
    )


def changed(name: str, operator: Any, position: int, resized: bool) -> PolicyGraphError:
    happened = "its memory was let go or resized" if resized else "that was written to in place"
    return _error(
        CHANGED,
        f"{name} saves what `{operator}` (operator {position + 1}) gives, and {happened} since",
        help="recompute this value, or let the model write to a copy",
    )


def other_tensor(name: str, operator: Any, position: int, shape: Sequence[int]) -> PolicyGraphError:
    return _error(
        CHANGED,
        f"the recomputation of {name} reads another tensor in `{operator}` (operator {position + 1}) than its forward "
        f"did, in the place of one of shape {list(shape)}",
        help="run the backward before the block's parameters, its buffers, or what it takes from around it are "
        "exchanged (`functional_call`, `p.data = …`), or save what is computed from them",
    )


def written_tensor(name: str, operator: Any, position: int, shape: Sequence[int]) -> Diagnostic:
    """Only a warning, where what was written may be what was there before: the buffers that DDP sends around."""
    return diagnose(
        CHANGED,
        f"the recomputation of {name} reads a tensor of shape {list(shape)} in `{operator}` (operator "
        f"{position + 1}) that was written to in place since its forward",
        help="run the backward before parameters and buffers are updated, or save what is computed from them",
    )


def warn(found: Diagnostic) -> None:
    warnings.warn(f"{found.message} ({found.code}); {found.help}", PolicyWarning, stacklevel=3)


def run_again(name: str) -> PolicyGraphError:
    return _error(
        CHANGED,
        f"the backward of {name} runs a second time, and what it saved is freed",
        help="call the first backward with `retain_graph=True`",
    )


def compiled(name: str) -> PolicyGraphError:
    """By another compiler than ours."""
    return _error(
        COMPILED,
        f"{name} is compiled without a policy, and an eager checkpoint sees no operators of compiled code",
        help=f"compile it with the same policy: {_COMPILE}",
    )


def compiled_part(name: str, part: str) -> PolicyGraphError:
    return _error(
        COMPILED,
        f"{part} is compiled, and it is a part of {name}: the policy of a block is not carried out on a part of it",
        help=f"compile the whole block: {_COMPILE}",
    )


def left_alone(names: Sequence[str]) -> PolicyGraphError:
    """Which of the compiled blocks it is is not known: its hooks were left to the compiler."""
    subject = names[0] if len(names) == 1 else f"one of {len(names)} blocks, {names[0]} to {names[-1]},"
    return _error(
        COMPILED,
        f"{subject} was to be compiled, and `torch.compile` ran it as it is",
        help="`TORCH_LOGS=recompiles,graph_breaks` says why; `torch._dynamo.config.recompile_limit` is one reason",
    )


def runs_uncompiled(name: str) -> Diagnostic:
    """Only a warning: what the compiler leaves to eager, the checkpoint follows operator by operator."""
    return diagnose(
        COMPILED,
        f"{name} was to be compiled, and `torch.compile` runs it as it is: the policy is followed operator by operator",
        help="`TORCH_LOGS=recompiles,graph_breaks` says why",
    )


def refuse_another(ours: Policy, other: Policy, whose: str) -> None:
    """Raises ``PolicyMatchError`` where ``whose`` policy does not say what the checkpoint's does."""
    texts = policy_text(ours), policy_text(other)
    if texts[0] == texts[1]:
        return
    lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing more")
    first = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
    raise PolicyMatchError(
        [
            diagnose(
                TWO_POLICIES,
                f"a block is under two policies: the checkpoint follows {_told(ours)}, {whose} {_told(other)}",
                help="give the same policy to both",
                details=(f"the checkpoint's says `{first[0].strip()}`", f"{whose}'s says `{first[1].strip()}`"),
            )
        ]
    )


def _told(policy: Policy) -> str:
    sources = dict.fromkeys(each.span.source.name for each in policy.rules if each.span is not None)
    return f"`{policy.name}` ({', '.join(sources)})" if sources else f"`{policy.name}`"


def _error(
    code: str, message: str, help: str, details: Sequence[str] = (), span: Span | None = None
) -> PolicyGraphError:
    return PolicyGraphError([diagnose(code, message, span, help=help, details=tuple(details))])
