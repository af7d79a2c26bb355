"""A policy where torch takes a pass or a partitioner, ``policylang.pass_`` and ``policylang.partitioner``, and the
findings on whatever users hold of compiled code and of checkpoints.

In a list of passes, a pass does what ``policylang.apply`` does. Behind a hook of Inductor's it writes tags for the
partitioner that comes next, PyTorch's min-cut, which knows no others than these; nobody audits what that makes of them;
and where Inductor takes a graph from its caches, the pass is not called at all.

Behind ``custom_partitioner_fn`` nobody wraps the compiled graph, as ``policylang.backend`` does. So every graph is
checked against the whole policy, and where something has to happen before a graph runs that a cache would leave out
(ranks compare plans, process groups are made), the caches of other processes are not used.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from attrs import evolve
from torch import fx, nn

from policylang.backends import caching, refusals
from policylang.backends.compiled_graphs import GraphUse
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.joint import JointPartitioner, partitions
from policylang.backends.path import apply_policy
from policylang.backends.records import AppliedPlan, Findings, findings_of
from policylang.backends.tags import HookPath
from policylang.backends.torch_compile import inductor
from policylang.backends.torch_compile.backend import graph_uses_of
from policylang.backends.torch_compile.inductor import KeyedPartitioner, KeyedPass
from policylang.errors import PolicyError
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind
from policylang.language.syntax import Policy
from policylang.ranks.comparison import AgreedAccounts, comparing
from policylang.torch_compat import compilers
from policylang.torch_compat.distributed import mesh_ranks

WRONG_HOOK = refusals.Problem(
    "APL331",
    "behind `{hook}` this is a {kind} graph, where nothing is decided about what is saved",
    "set `joint_custom_post_pass`; lines that rewrite or order collectives are applied here by "
    "`policylang.backend`, or by a pass in your list of passes",
)
ORDER_NOT_KEPT = refusals.Problem(
    "APL344",
    "the order that this line gives is not kept behind `custom_partitioner_fn`: Inductor sorts both graphs anew",
    "compile with `policylang.backend`, which has Inductor keep it",
)


class PolicyPass(KeyedPass):
    """The result of :func:`pass_`."""

    def __init__(self, policy: Policy, mesh: Any = None, agree: bool = True) -> None:
        self.policy = policy
        self.mesh = mesh
        self.agree = agree
        self.__name__ = f"apl_{policy.name}"  # what lists of passes call it in their logs
        ranks = () if mesh is None else (tuple(mesh.mesh_dim_names or ()), mesh_ranks(mesh))
        self._key = f"{caching.policy_key(policy, root='')}:{ranks!r}"

    def __repr__(self) -> str:
        return f"policylang.pass_({self.policy.name!r})"

    def __call__(self, graph: fx.Graph | fx.GraphModule, *ignored: Any, **also_ignored: Any) -> fx.GraphModule | None:
        """Apply the policy, in place. The other arguments of passes (example inputs) are not needed. Raises as
        ``policylang.apply`` does, and behind a hook with what cannot be done there."""
        if isinstance(graph, fx.GraphModule):
            return apply_policy(graph, self.policy, self.mesh, agree=self.agree)
        if not isinstance(graph, fx.Graph):
            raise refusals.not_a_graph(graph, "a pass is called with a graph module or a graph")
        owner = graph.owning_module
        gm = owner if owner is not None else fx.GraphModule(nn.Module(), graph)
        hooks = compilers.hooks_that_hold(self)
        if not hooks:
            apply_policy(gm, self.policy, self.mesh, agree=self.agree)
            return None
        try:
            self._tag(gm, hooks)
        except PolicyError as error:
            raise compilers.through_dynamo(error, sys._getframe()) from None
        return None

    def _tag(self, gm: fx.GraphModule, hooks: tuple[str, ...]) -> None:
        """Write the policy's tags on a joint graph, for min-cut."""
        facts = collect(gm, mesh=self.mesh)
        if facts.kind is GraphKind.FORWARD and all(name.startswith("joint_") for name in hooks):
            return  # a model that runs without gradients: it keeps nothing, so nothing is decided
        path = HookPath()
        if facts.kind not in path.entry.kinds:
            raise WRONG_HOOK.error(hook=hooks[0], kind=facts.kind.value)
        path.apply(gm, self.policy, facts)


_INDUCTOR = "inductor"
"""Inductor's name for itself when it calls a partitioner."""
_THIS_PROCESS = uuid.uuid4().hex


class PolicyPartitioner(KeyedPartitioner):
    """The result of :func:`partitioner`."""

    def __init__(self, policy: Policy, root: str = "", agree: bool = True) -> None:
        self.policy = policy
        self.root = root
        self.agree = agree
        self._partitioner = JointPartitioner(policy, root=root)
        self._key = caching.policy_key(policy, root=root)
        self.findings: list[Findings] = []
        """The findings on each graph that it split in this process, in order."""
        self._known: dict[int, AgreedAccounts] = {}
        """By the code that Dynamo compiles, the graphs that ranks have agreed on."""

    def __repr__(self) -> str:
        root = f", root={self.root!r}" if self.root else ""
        return f"policylang.partitioner({self.policy.name!r}{root})"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph. Raises as ``policylang.partition`` does, and ``PolicyMatchError`` for a policy that
        schedules if Inductor is going to compile the result: nothing makes it keep the order."""
        known = self._known.setdefault(compilers.code_being_compiled(), [])
        topic = inductor.topic_of("splitting", "a joint graph", self.root)
        settings = inductor.comparable_settings
        try:
            if self.policy.scheduling and options.get("compiler") == _INDUCTOR:
                raise ORDER_NOT_KEPT.refused(self.policy.scheduling[0].span)
            with comparing(topic, self.agree, known=known, settings=settings), partitions() as done:
                halves = self._partitioner(gm, joint_inputs, **options)
        except PolicyError as error:
            if not compilers.dynamo_graphs():
                raise
            raise compilers.through_dynamo(error, sys._getframe()) from None
        self.findings.extend(findings_of(each.applied) for each in done)
        return halves

    def uuid(self) -> str:
        """Identifies the partitioner in the keys of torch's caches, with all that it would read of Dynamo's graph and
        that is not in the graph's code."""
        context = caching.context_of(compilers.dynamo_graphs())
        surroundings = caching.groups_key(self.policy), caching.formulas_key()
        compares = self.agree and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # where something has to happen before a graph runs, the caches of other processes are kept away
        process = _THIS_PROCESS if compares or self.policy.rewrites else ""
        return ":".join((self._key, context, *surroundings, process))

    def __copy__(self) -> PolicyPartitioner:
        return self

    def __deepcopy__(self, memo: object) -> PolicyPartitioner:
        return self


def of_compiled(subject: Any) -> Sequence[Findings] | None:
    """The findings by graph and module that runs it, in order of compilation; None where it is not compiled by us."""
    if isinstance(subject, PolicyPartitioner):
        return tuple(subject.findings)
    uses = graph_uses_of(subject)
    return None if uses is None else _findings(uses)


def of_checkpoints(subject: Any) -> Sequence[Findings] | None:
    """The findings by block and kind of call, in the order of the blocks; then by graph compiled in checkpoints or
    around them, and module that runs it. None without a checkpoint of ours."""
    sessions = sessions_of(subject)
    if not sessions:
        return None
    found: list[Findings] = []
    for region in (region for session in sessions for region in session.regions.values()):
        for kept in region.kept.values():
            each = findings_of(AppliedPlan("eager", kept.instructions.plan, kept.audit))
            found.append(evolve(each, report=evolve(each.report, label=region.root)))
    compiled = [session for session in sessions if session.compiled]
    if not compiled:
        return found
    # of the whole subject, where it is a model of which only parts are checkpoints
    modules = [subject] if isinstance(subject, nn.Module) else [block for each in compiled for block in each.regions]
    uses = [use for module in modules for use in graph_uses_of(module) or ()]
    if not uses:
        uses = [GraphUse(graph) for session in compiled for graph in session.graphs]
    return [*found, *_findings(uses)]


def _findings(uses: Iterable[GraphUse]) -> list[Findings]:
    """The findings of a graph as often as modules run it: each of them keeps what the graph keeps. With what the
    generated code was read to do, which is known of the backward only once that has run."""
    return [
        found if use.graph.code is None else evolve(found, report=evolve(found.report, code=use.graph.code.reports()))
        for use in uses
        for _ in range(use.modules)
        for found in use.graph.findings
    ]
