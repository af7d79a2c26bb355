"""The joint graph of a module exactly as a partitioner receives it under ``torch.compile``."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

import policylang
from policylang.backends.joint import JointPartitioner, Partition
from policylang.language.syntax import Policy
from tests.support.flat_graphs import copy_graph


class Joint(NamedTuple):
    gm: fx.GraphModule
    joint_inputs: Any
    """As the partitioner is handed them: primals, tangents."""
    num_fwd_outputs: int
    static_lifetime_input_indices: list[int] | None

    def partition(self, text: str) -> Partition:
        """As a policy partitions a copy of the graph."""
        outputs, static = self.num_fwd_outputs, self.static_lifetime_input_indices
        partitioner, gm = JointPartitioner(policylang.parse(text)), copy_graph(self.gm)
        return partitioner.partition(gm, num_fwd_outputs=outputs, static_lifetime_input_indices=static)

    def halves(self, policy: Policy | str | None = None, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What ``policylang.partition`` makes of the graph, which it changes."""
        options |= {"num_fwd_outputs": self.num_fwd_outputs, "policy": policy}
        static = self.static_lifetime_input_indices
        return policylang.partition(self.gm, self.joint_inputs, static_lifetime_input_indices=static, **options)


def capture_joints(
    module: nn.Module,
    inputs: Sequence[Tensor],
    loss_fn: Callable[[Any], Tensor] | None = None,
    *,
    dynamic: bool | None = False,
    fullgraph: bool = False,
) -> list[Joint]:
    """The joint graphs of one forward under ``torch.compile``, in order: more than one where the graph breaks.

    With ``loss_fn`` the loss is part of the compiled graph. Nothing runs backwards.
    """
    captured: list[Joint] = []

    def record(gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own pytree specs, on being copied
            copied = copy.deepcopy(gm)
        static = options.get("static_lifetime_input_indices")
        captured.append(Joint(copied, joint_inputs, num_fwd_outputs, static))
        return min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def keep(gm: fx.GraphModule, example_inputs: Any) -> fx.GraphModule:
        return gm

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=record)
    compiling = {"backend": backend, "dynamic": dynamic, "fullgraph": fullgraph}
    if loss_fn is None:
        torch.compile(module, **compiling)(*inputs)
    else:  # a function of the module, not an object that holds it: module paths stay those of the model
        torch.compile(lambda model, *batch: loss_fn(model(*batch)), **compiling)(module, *inputs)
    torch._dynamo.reset()
    return captured


def capture_joint(
    module: nn.Module,
    inputs: Sequence[Tensor],
    loss_fn: Callable[[Any], Tensor] | None = None,
    dynamic: bool | None = False,
) -> Joint:
    """The one joint graph of a module that compiles whole."""
    (joint,) = capture_joints(module, inputs, loss_fn, dynamic=dynamic, fullgraph=True)
    return joint
