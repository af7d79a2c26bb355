"""Diagnostics for graphs that the paths refuse, and for partitions that cannot be made."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from os.path import basename
from typing import Any

from attrs import frozen
from torch import nn

from policylang.errors import PolicyGraphError, PolicyMatchError, PolicyMeaningError
from policylang.graph.facts import Flag, Phase
from policylang.language.diagnostics import Diagnostic, Span, diagnose
from policylang.language.syntax import Policy
from policylang.operators.names import GETITEM
from policylang.planning import refusals as planning_refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.decide import why_unsafe
from policylang.planning.liveness import SavedForBackward
from policylang.planning.plan import Plan, policy_text
from policylang.planning.value_outcome import saves
from policylang.torch_compat.compilers import FrameLeft


@frozen
class Problem:
    """A diagnostic; its message is formatted with what is found, mostly the ``name`` of a :func:`block`."""

    code: str
    message: str
    help: str

    def diagnostic(self, details: Sequence[str] = (), span: Span | None = None, **found: Any) -> Diagnostic:
        message, help = self.message.format(**found), self.help.format(**found)
        return diagnose(self.code, message, span, help=help, details=tuple(details))

    def error(self, details: Sequence[str] = (), span: Span | None = None, **found: Any) -> PolicyGraphError:
        return PolicyGraphError([self.diagnostic(details, span, **found)])

    def refused(self, span: Span, **found: Any) -> PolicyMatchError:
        return PolicyMatchError([self.diagnostic(span=span, **found)])


CAPTURED_COPIES = Problem(
    "APL338",
    "`{line}` copies values to the host while the step runs, which no CUDA graph captures",
    'leave out what captures one (`mode="reduce-overhead"`, `triton.cudagraphs`, `torch.cuda.graph`), '
    'or take `mode="max-autotune-no-cudagraphs"`',
)


def refuse_captured_copies(policy: Policy) -> None:
    """Raises ``PolicyMeaningError`` that names the first line of a policy which offloads, if there is one."""
    if span := next((rule.span for rule in policy.rules if rule.action.offloads), None):
        raise PolicyMeaningError([CAPTURED_COPIES.diagnostic(span=span, line=span.one_line)])


_MOST_FRAMES = 8
_LEFT = (
    "change the code that Dynamo names, or apply the policy in eager with "
    "`policylang.checkpoint_model(model, policy)`; `TORCH_LOGS=graph_breaks` shows more"
)


UNSAVEABLE = Problem(
    "APL321",
    "{asked} `{name}` ({target}): it returns several values at once, and `{reader}` in the backward reads them as one",
    "recompute it with a later rule",
)
NO_PARTITION = Problem(
    "APL322",
    "PyTorch's min-cut finds no cut for the values that the rules of this policy leave to it",
    "write `undecided -> save` or `undecided -> recompute`",
)
NOT_A_JOINT_GRAPH = Problem(
    "APL323",
    "this is not a joint graph: none of its inputs is a tangent",
    "partition the graph that AOTAutograd passes to its `partition_fn`; for a flat graph call `policylang.apply` alone",
)
NO_PATH = Problem(
    "APL324",
    "this is a {kind} graph of a partition, and the policy has no line that acts on one",
    "apply the policy to the joint graph, or compile the model with `policylang.backend(policy)`; here only "
    "lines that rewrite or order collectives are applied",
)
NO_POLICY = Problem(
    "APL325", "no policy was applied to this graph", "call `policylang.apply(gm, policy)` first, or pass `policy=`"
)
UPDATES_BUFFER = Problem(
    "APL326",
    "the forward updates a buffer (`{node}`, {target}), which torch cannot differentiate a second time",
    "update the buffers outside the code that is compiled twice, or freeze them (`module.eval()` for BatchNorm)",
)
NOT_A_GRAPH = Problem(
    "APL328",
    "{wanted}, and this is a `{kind}`",
    "{comes} from `policylang.trace_step` or AOTAutograd; or compile the model with `policylang.backend`",
)
NOTHING_TO_REPORT = Problem(
    "APL328",
    "`report` takes a graph, a traced step, a model, a compiled function or a backend, and this is a `{kind}`",
    "pass the model, or what `torch.compile(…, backend=policylang.backend(policy))` returned; if several, one by one",
)
RUNS_AS_IT_IS = Problem("APL425", "{frame}, and follows no policy: {why}", _LEFT)
TWO_POLICIES = Problem(
    "APL397",
    "a block is under two policies: the checkpoint follows {ours}, {whose} {theirs}",
    "give the same policy to both",
)
NOTHING_DECIDED = "APL327"


def not_a_graph(given: object, wanted: str) -> PolicyGraphError:
    kind = type(given).__name__
    comes = f"the graph of a `{kind}` comes" if isinstance(given, nn.Module) else "a graph comes"
    return NOT_A_GRAPH.error(wanted=wanted, kind=kind, comes=comes)


def checked_model(model: object, wanted: str) -> nn.Module:
    """A model; raises ``PolicyGraphError`` for anything else."""
    if not isinstance(model, nn.Module):
        message = f"{wanted}, and this is a `{type(model).__name__}`"
        raise PolicyGraphError([Diagnostic(NOT_A_GRAPH.code, message, help="pass the `torch.nn.Module`")])
    return model


def unsaveable(plan: Plan) -> tuple[Diagnostic, ...]:
    """Operators decided *save* whose tuple a backward node reads as a whole: only tensors can be saved."""
    facts = plan.facts
    found: list[Diagnostic] = []
    for row in facts.forward:
        if not facts.flags[row] & Flag.MULTI_OUTPUT or not saves(plan.decisions[row]):
            continue
        readers = [user for user in facts.users[row] if facts.owners[user] != facts.owners[row]]
        reader = next((user for user in readers if facts.phases[user] == Phase.BACKWARD), None)
        if reader is None or facts.targets[reader] == GETITEM:
            continue
        rule = plan.rule_of(row)
        asked, span = (f"`{rule.text}` cannot save", rule.span) if rule is not None else ("nothing can save", None)
        name, target = facts.names[row], facts.targets[row]
        reader_name = facts.names[reader]
        found.append(UNSAVEABLE.diagnostic(span=span, asked=asked, name=name, target=target, reader=reader_name))
    return tuple(found)


def unsafe_after_all(plan: Plan, needs: SavedForBackward, capabilities: Capabilities) -> tuple[Diagnostic, ...]:
    """Decided recomputations that would be wrong and that are needed only after nodes are merged and min-cut has
    chosen. Planning has checked all that it could see to be needed; this is the second check."""
    by_rule: dict[int, dict[int, str]] = {}
    for row in needs.recomputed:
        decision = plan.decisions[row]
        if decision is None or decision.rule is None or plan.facts.owners[row] != row:
            continue
        reason = why_unsafe(plan.facts, row, capabilities)
        if reason is not None:
            by_rule.setdefault(decision.rule, {})[row] = reason
    found = []
    for index, reasons in sorted(by_rule.items()):
        rule = plan.policy.rules[index]
        found.append(planning_refusals.unsafe(rule, list(reasons), list(reasons.values()), plan.facts))
    return tuple(found)


def no_partition(plan: Plan, error: RuntimeError) -> Diagnostic:
    """PyTorch's min-cut gave up: a decided recomputation needs what it can neither save nor recompute."""
    undecided = plan.policy.undecided
    details = [line for line in str(error).splitlines() if line.startswith("  ")]
    return NO_PARTITION.diagnostic(details[:8], None if undecided is None else undecided.span)


def nothing_decided(
    *, checkpointed: bool, compiled: bool, left: Sequence[FrameLeft] = (), skipped: Diagnostic | None = None
) -> Diagnostic:
    """For a model whose blocks have checkpoints under a policy, one that a backend of ours compiles, or neither.
    ``left``: what Dynamo has compiled nothing of, where it was to compile the model; ``skipped``: what was warned of
    where the blocks have run without the checkpoints."""
    if left:
        message = "no graph with gradients was compiled: the policy decides nothing, and none of its lines is checked"
        details = tuple(f"{of_frame(frame)}: {frame.why}" for frame in left[:_MOST_FRAMES])
        return diagnose(NOTHING_DECIDED, message, help=_LEFT, details=details)
    if skipped is not None:
        return diagnose(NOTHING_DECIDED, skipped.message, help=skipped.help)
    if checkpointed:
        then = ": a block is planned when its checkpoint first runs it"
    elif compiled:
        then = ": a graph is planned when it is compiled, on the first call; after that, nothing of it was compiled, "
        then += "and `fullgraph=True` shows why"
    else:
        then = ", under a policy: with the checkpoints of `policylang.checkpoint_model(model, policy)`, or compiled "
        then += "with `policylang.backend(policy)`"
    help = f"run the model once, with gradients{then}"
    return diagnose(NOTHING_DECIDED, "no policy has decided anything here yet", help=help)


def runs_as_it_is(frame: FrameLeft) -> Diagnostic:
    """Dynamo compiled nothing of a piece of code, and other parts of the model."""
    return RUNS_AS_IT_IS.diagnostic(frame=of_frame(frame), why=frame.why)


def of_frame(frame: FrameLeft) -> str:
    return f"Dynamo runs `{frame.name}` ({basename(frame.file)}:{frame.line}) as it is"


def refuse_another(ours: Policy, other: Policy, whose: str) -> None:
    """Raises ``PolicyMatchError`` if ``whose`` policy differs from the checkpoint's."""
    texts = policy_text(ours), policy_text(other)
    if texts[0] == texts[1]:
        return
    lines = zip_longest(*(text.splitlines() for text in texts), fillvalue="nothing more")
    first = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
    details = f"the checkpoint's has `{first[0].strip()}`", f"{whose}'s has `{first[1].strip()}`"
    raise PolicyMatchError([TWO_POLICIES.diagnostic(details, ours=_told(ours), theirs=_told(other), whose=whose)])


def _told(policy: Policy) -> str:
    sources = dict.fromkeys(each.span.source.name for each in policy.rules if each.span is not None)
    return f"`{policy.name}` ({', '.join(sources)})" if sources else f"`{policy.name}`"
