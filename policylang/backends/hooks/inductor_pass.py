"""``policylang.pass_``: a policy as an item of a list of graph passes, and as a hook of Inductor's.

In a list, a pass does what ``policylang.apply`` does. Behind a hook of Inductor's it knows less and may do less: it
writes tags for the partitioner that comes next, PyTorch's min-cut, which knows no others than these; nobody audits what
that makes of them; and where Inductor takes a graph from its caches, the pass is not called at all.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import fx, nn

from policylang.backends import refusals
from policylang.backends.caching import fingerprint
from policylang.backends.caching.keyed import KeyedForCaches
from policylang.backends.dispatch import apply_policy
from policylang.backends.hooks.path import HookPath
from policylang.errors import PolicyError, PolicyGraphError
from policylang.graph.facts import GraphKind
from policylang.graph.reading.collect import collect
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Policy
from policylang.torch_compat import dynamo, inductor
from policylang.torch_compat.process_groups import mesh_ranks

WRONG_HOOK = "APL331"

_Base: Any = inductor.graph_pass_base()


class PolicyPass(KeyedForCaches, _Base):  # type: ignore[misc]
    """What :func:`pass_` returns."""

    def __init__(self, policy: Policy, mesh: Any = None, agree: bool = True) -> None:
        self.policy = policy
        self.mesh = mesh
        self.agree = agree
        self.__name__ = f"apl_{policy.name}"  # what lists of passes call it in their logs
        ranks = () if mesh is None else (tuple(mesh.mesh_dim_names or ()), mesh_ranks(mesh))
        self._key = f"{fingerprint.policy_key(policy, root='')}:{ranks!r}"

    def __repr__(self) -> str:
        return f"policylang.pass_({self.policy.name!r})"

    def __call__(self, graph: fx.Graph | fx.GraphModule, *ignored: Any, **also_ignored: Any) -> fx.GraphModule | None:
        """Carry the policy out, in place. What passes are handed besides the graph (example inputs) is not needed.

        Raises as ``policylang.apply`` does, and behind a hook ``PolicyMatchError`` and ``PolicyGraphError`` with what
        cannot be done there.
        """
        if isinstance(graph, fx.GraphModule):
            return apply_policy(graph, self.policy, self.mesh, agree=self.agree)
        if not isinstance(graph, fx.Graph):
            raise PolicyGraphError([refusals.not_a_graph(graph, "a pass is called with a graph module or a graph")])
        owner = graph.owning_module
        gm = owner if owner is not None else fx.GraphModule(nn.Module(), graph)
        hooks = inductor.hooks_that_hold(self)
        if not hooks:
            apply_policy(gm, self.policy, self.mesh, agree=self.agree)
            return None
        try:
            _tag(gm, self.policy, self.mesh, hooks)
        except PolicyError as error:
            raise dynamo.through_dynamo(error, sys._getframe()) from None
        return None


def _tag(gm: fx.GraphModule, policy: Policy, mesh: Any, hooks: tuple[str, ...]) -> None:
    """Write a policy's tags on a joint graph, for min-cut."""
    facts = collect(gm, mesh=mesh)
    joint_only = all(name.startswith("joint_") for name in hooks)
    if facts.kind is GraphKind.FORWARD and joint_only:
        return  # a model that runs without gradients: it keeps nothing, so nothing is decided
    path = HookPath()
    if not path.recognises(facts):
        raise PolicyGraphError([_wrong_hook(hooks, facts.kind)])
    path.apply(gm, policy, facts)


def _wrong_hook(hooks: tuple[str, ...], kind: GraphKind) -> Diagnostic:
    return diagnose(
        WRONG_HOOK,
        f"behind `{hooks[0]}` this is a {kind.value} graph, where nothing is decided about what is saved",
        help="set `joint_custom_post_pass`; of a half, lines that rewrite or order collectives are carried out by "
        "`policylang.backend`, or by a pass in a list of your own",
    )
