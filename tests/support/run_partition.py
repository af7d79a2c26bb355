"""Joint graphs that are split and run as they come out: two splits that compute the same agree to the bit.

:func:`trace` traces a model once, and :meth:`Traced.run` splits and runs it under as many policies as one likes.
:func:`run_step` goes through AOTAutograd's runtime instead, as a user's training step does.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from attrs import frozen
from functorch.compile import default_partition, nop
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from policylang.api.load import parse
from policylang.audit.graphs import is_random_state
from policylang.backends.joint import JointPartitioner, Partition
from tests.support.compiled import Trained, train
from tests.support.heap import settle
from tests.support.models import ZOO, Example, gpt2, llama, mlp

Split = str | JointPartitioner | Callable[..., Any]
"""The text of a policy, a ready partitioner of ours, or any other partition function."""


class Result(NamedTuple):
    outputs: tuple[Any, ...]
    """Those of the forward; what the step writes to its inputs is among them, or in ``inputs``."""
    gradients: tuple[Any, ...]
    inputs: tuple[Any, ...]
    partition: Partition | None

    @property
    def audit(self) -> Any:
        return self.partition.audit


@frozen(eq=False)
class Traced:
    """A joint graph and real inputs for it."""

    gm: fx.GraphModule
    num_fwd_outputs: int
    static: list[int] | None
    primals: list[Any]
    tangents: list[Any]

    def fresh(self) -> fx.GraphModule:
        return _copied(self.gm)

    def split(self, split: Split, gm: fx.GraphModule | None = None) -> tuple[fx.GraphModule, fx.GraphModule]:
        _, forward, backward = self._split(split, gm)
        return forward, backward

    def partition(self, policy: str | JointPartitioner, gm: fx.GraphModule | None = None) -> Partition:
        partition, _, _ = self._split(policy, gm)
        assert partition is not None
        return partition

    def run(self, split: Split, seed: int = 7) -> Result:
        """Split a copy of the graph and run both halves."""
        partition, forward, backward = self._split(split)
        outputs, gradients, inputs = self.execute(forward, backward, seed)
        return Result(outputs, gradients, inputs, partition)

    def execute(
        self, forward: fx.GraphModule, backward: fx.GraphModule, seed: int = 7
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Outputs, gradients, and the inputs as the step left them. Kept values are handed over by name."""
        inputs = [value.clone() if isinstance(value, Tensor) else value for value in self.primals]
        torch.manual_seed(seed)
        with torch.no_grad():
            returned = forward(*inputs)
            given = list(zip(output_args(forward), returned, strict=True))
            kept = {node.name: value for node, value in given if isinstance(node, fx.Node)}
            states = iter([value for node, value in given[self.num_fwd_outputs :] if is_random_state(node)])
            tangents = iter(self.tangents)
            arguments = []
            for node in backward.graph.find_nodes(op="placeholder"):
                if "tangents" in node.name:
                    arguments.append(next(tangents))
                elif node.name.startswith("rng_state_output"):
                    arguments.append(next(states))
                else:
                    arguments.append(kept[node.name])
            gradients = backward(*arguments)
        return tuple(returned[: self.num_fwd_outputs]), tuple(gradients), tuple(inputs)

    def _split(
        self, split: Split, gm: fx.GraphModule | None = None
    ) -> tuple[Partition | None, fx.GraphModule, fx.GraphModule]:
        gm = self.fresh() if gm is None else gm
        split = partitioner(split) if isinstance(split, str) else split
        options = {"num_fwd_outputs": self.num_fwd_outputs, "static_lifetime_input_indices": self.static}
        if isinstance(split, JointPartitioner):
            partition = split.partition(gm, **options)
            return partition, partition.forward, partition.backward
        forward, backward = split(gm, (), **options)
        return None, forward, backward


def trace(
    module: nn.Module, inputs: Sequence[Tensor], loss_fn: Callable[[Any], Tensor], *, dynamic: bool | None = False
) -> Traced:
    """Trace a model under ``torch.compile`` and run a step of it, keeping what went into both halves."""
    graphs: list[tuple[fx.GraphModule, int, list[int] | None]] = []
    primals: list[list[Any]] = []
    tangents: list[list[Any]] = []

    def split(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        graphs.append((_copied(gm), options["num_fwd_outputs"], options.get("static_lifetime_input_indices")))
        return default_partition(gm, joint_inputs, **options)

    def watched(seen: list[list[Any]], prefix: str) -> Callable[..., Any]:
        def compile(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            names = [node.name for node in gm.graph.find_nodes(op="placeholder")]

            def run(arguments: list[Any]) -> Any:
                wanted = [value for name, value in zip(names, arguments, strict=True) if prefix in name]
                seen.append([value.detach().clone() if isinstance(value, Tensor) else value for value in wanted])
                return gm(*arguments)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile

    torch._dynamo.reset()
    forward, backward = watched(primals, ""), watched(tangents, "tangents")
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=split)
    torch.manual_seed(0)
    compiled = torch.compile(copy.deepcopy(module), backend=backend, dynamic=dynamic, fullgraph=True)
    loss_fn(compiled(*inputs)).backward()
    torch._dynamo.reset()
    ((gm, num_fwd_outputs, static),) = graphs
    return Traced(gm, num_fwd_outputs, static, primals[0], tangents[0])


ONE_LAYER = {"llama": partial(llama, 1), "gpt2": partial(gpt2, 1), "mlp": mlp}
"""Tracing with sizes that are not known takes long."""


def traced(model: str, dynamic: bool = False) -> Traced:
    """A model of the zoo, traced once for all tests of a process."""
    return _traced(model, dynamic)  # a cache takes a default that is written out for another call


def unpartitioned(model: str, dynamic: bool = False) -> Result:
    """The same step, split by PyTorch's default partitioner."""
    return _unpartitioned(model, dynamic)


@cache
def _traced(model: str, dynamic: bool) -> Traced:
    found = trace(*(ONE_LAYER if dynamic else ZOO)[model](), dynamic=dynamic)
    settle()
    return found


@cache
def _unpartitioned(model: str, dynamic: bool) -> Result:
    return _traced(model, dynamic).run(default_partition)


def assert_same_result(left: Result, right: Result) -> None:
    """Outputs, gradients and written inputs, bit by bit."""
    for name in ("outputs", "gradients", "inputs"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert len(ours) == len(theirs)
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
            assert same, f"{name}[{position}] differs"


def partitioner(policy: str) -> JointPartitioner:
    return JointPartitioner(parse(policy))


def run_step(
    example: Example, split: Split = default_partition, *, dynamic: bool | None = False, steps: int = 1
) -> tuple[Trained, list[Partition]]:
    """Train a copy of a model that AOTAutograd splits so; with the partitions that were ours."""
    split = partitioner(split) if isinstance(split, str) else split
    partitions: list[Partition] = []

    def partition(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        if not isinstance(split, JointPartitioner):
            return split(gm, joint_inputs, **options)
        partitions.append(split.partition(gm, **options))
        return partitions[-1].forward, partitions[-1].backward

    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    copied = example._replace(module=copy.deepcopy(example.module))
    found = train(copied, lambda model: torch.compile(model, backend=backend, dynamic=dynamic), steps=steps)
    torch._dynamo.reset()
    return found, partitions


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own pytree specs, on being copied
        return copy.deepcopy(gm)


def output_args(gm: fx.GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    return output.args[0]
