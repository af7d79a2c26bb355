"""``policylang.partitioner``: a policy where torch takes a partitioner, Inductor's ``custom_partitioner_fn`` for one.

Behind it nobody wraps the compiled graph, as ``policylang.backend`` does. So every graph is held to the whole policy,
and where something has to happen before a graph runs that a cache would leave out (ranks compare plans, process groups
are made), the caches of other processes are not used.
"""

from __future__ import annotations

import sys
import uuid
from typing import Any

import torch.distributed as dist
from torch import fx

from policylang.backends.caching import fingerprint
from policylang.backends.caching.keyed import KeyedForCaches
from policylang.backends.findings import Findings, findings_of
from policylang.backends.joint.path import JointPartitioner, partitions
from policylang.backends.torch_compile import dynamo_graph
from policylang.errors import PolicyError, PolicyMatchError
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Policy
from policylang.ranks.comparison import AgreedAccounts, comparing
from policylang.torch_compat import dynamo, inductor

_Base: Any = inductor.partitioner_base()
_INDUCTOR = "inductor"
"""What it calls itself when it calls a partitioner."""
ORDER_NOT_KEPT = "APL344"
_THIS_PROCESS = uuid.uuid4().hex


class PolicyPartitioner(KeyedForCaches, _Base):  # type: ignore[misc]
    """What :func:`partitioner` returns."""

    def __init__(self, policy: Policy, root: str = "", agree: bool = True) -> None:
        self.policy = policy
        self.root = root
        self.agree = agree
        self._partitioner = JointPartitioner(policy, root=root)
        self._key = fingerprint.policy_key(policy, root=root)
        self.findings: list[Findings] = []
        """What was decided on each graph that it split in this process, in order."""
        self._known: dict[int, AgreedAccounts] = {}
        """By the code that Dynamo compiles, the graphs that ranks have agreed on."""

    def __repr__(self) -> str:
        root = f", root={self.root!r}" if self.root else ""
        return f"policylang.partitioner({self.policy.name!r}{root})"

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Split a joint graph. Raises as ``policylang.partition`` does, and ``PolicyMatchError`` for a policy that
        schedules where Inductor is going to compile the halves: nobody tells it to keep their order."""
        known = self._known.setdefault(dynamo.code_being_compiled(), [])
        topic = dynamo_graph.topic_of("splitting", "a joint graph", self.root)
        settings = dynamo_graph.comparable_settings
        try:
            if self.policy.scheduling and options.get("compiler") == _INDUCTOR:
                raise PolicyMatchError([_unkept(self.policy)])
            with comparing(topic, self.agree, known=known, settings=settings), partitions() as done:
                halves = self._partitioner(gm, joint_inputs, **options)
        except PolicyError as error:
            if not dynamo.dynamo_graphs():
                raise
            raise dynamo.through_dynamo(error, sys._getframe()) from None
        self.findings.extend(findings_of(each.carried_out) for each in done)
        return halves

    def uuid(self) -> str:
        """Stands for the partitioner in the keys of torch's caches, with all that it would read of the graph that
        Dynamo is handing over and that the graph's code does not say."""
        context = fingerprint.context_of_graphs(dynamo.dynamo_graphs())
        surroundings = fingerprint.groups_key(self.policy), fingerprint.formulas_key()
        return ":".join((self._key, context, *surroundings, self._process()))

    def _process(self) -> str:
        """What keeps the caches of other processes away where a graph may not run before something has happened."""
        compares = self.agree and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return _THIS_PROCESS if compares or self.policy.rewrites else ""

    def __copy__(self) -> PolicyPartitioner:
        return self

    def __deepcopy__(self, memo: object) -> PolicyPartitioner:
        return self


def _unkept(policy: Policy) -> Diagnostic:
    message = (
        "the order that this line gives is not kept behind `custom_partitioner_fn`: Inductor sorts both halves anew"
    )
    help = "compile with `policylang.backend`, which has Inductor keep it"
    return diagnose(ORDER_NOT_KEPT, message, policy.scheduling[0].span, help=help)
