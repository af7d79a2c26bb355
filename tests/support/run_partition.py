"""Joint graphs that are split and run as they come out: two splits that compute the same agree to the bit.

:func:`trace` traces a model once, and :meth:`Traced.run` splits and runs it under as many policies as one likes.
:func:`run_step` goes through AOTAutograd's runtime instead, which is what a user's training step does.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from attrs import frozen
from functorch.compile import default_partition, nop
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from policylang.api.load import parse
from policylang.backends.joint import JointPartitioner, Partition

Split = str | JointPartitioner | Callable[..., Any]
"""The text of a policy, a ready partitioner of ours, or any other partition function."""


class Result(NamedTuple):
    outputs: tuple[Any, ...]
    """Of the forward; what the step writes to its inputs is among them, or in ``inputs``."""
    gradients: tuple[Any, ...]
    inputs: tuple[Any, ...]
    partition: Partition | None

    @property
    def audit(self) -> Any:
        assert self.partition is not None
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
            names = [value.name if isinstance(value, fx.Node) else "" for value in _output_args(forward)]
            kept = dict(zip(names, returned, strict=True))
            states = iter([kept[name] for name in names[self.num_fwd_outputs :] if _is_state(forward, name)])
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
    module: nn.Module,
    inputs: Sequence[Tensor],
    loss_fn: Callable[[Any], Tensor],
    *,
    dynamic: bool | None = False,
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
    backend = aot_autograd(
        fw_compiler=watched(primals, ""), bw_compiler=watched(tangents, "tangents"), partition_fn=split
    )
    torch.manual_seed(0)
    compiled = torch.compile(copy.deepcopy(module), backend=backend, dynamic=dynamic, fullgraph=True)
    loss_fn(compiled(*inputs)).backward()
    torch._dynamo.reset()
    ((gm, num_fwd_outputs, static),) = graphs
    return Traced(gm, num_fwd_outputs, static, primals[0], tangents[0])


def assert_same_result(left: Result, right: Result) -> None:
    """Outputs, gradients and written inputs, bit by bit."""
    for name in ("outputs", "gradients", "inputs"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert len(ours) == len(theirs)
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
            assert same, f"{name}[{position}] differs"


class Step(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    partitions: list[Partition]

    @property
    def audit(self) -> Any:
        (only,) = self.partitions
        return only.audit


def partitioner(policy: str) -> JointPartitioner:
    return JointPartitioner(parse(policy))


def run_step(
    module: nn.Module,
    inputs: Sequence[Tensor],
    loss_fn: Callable[[Any], Tensor],
    split: Split = default_partition,
    *,
    dynamic: bool | None = False,
    seed: int = 7,
    steps: int = 1,
) -> Step:
    """Train a copy of ``module`` without an optimizer: the last loss, the summed gradients, the buffers."""
    split = partitioner(split) if isinstance(split, str) else split
    partitions: list[Partition] = []

    def partition(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        if not isinstance(split, JointPartitioner):
            return split(gm, joint_inputs, **options)
        partitions.append(split.partition(gm, **options))
        return partitions[-1].forward, partitions[-1].backward

    trained = copy.deepcopy(module)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    compiled = torch.compile(trained, backend=backend, dynamic=dynamic)
    torch.manual_seed(seed)
    for _ in range(steps):
        loss = loss_fn(compiled(*inputs))
        loss.backward()
    torch._dynamo.reset()
    gradients = {name: value.grad for name, value in trained.named_parameters() if value.grad is not None}
    return Step(loss.detach(), gradients, dict(trained.named_buffers()), partitions)


def assert_same_training(left: Step, right: Step) -> None:
    """Loss, every gradient and every buffer, bit by bit."""
    assert torch.equal(left.loss, right.loss), f"loss {left.loss} and {right.loss}"
    for mine, theirs in ((left.gradients, right.gradients), (left.buffers, right.buffers)):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), f"{name} differs by {(value - theirs[name]).abs().max()}"


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own pytree specs, on being copied
        return copy.deepcopy(gm)


def _output_args(gm: fx.GraphModule) -> Sequence[Any]:
    (output,) = gm.graph.find_nodes(op="output")
    return output.args[0]


def _is_state(gm: fx.GraphModule, name: str) -> bool:
    (output,) = gm.graph.find_nodes(op="output")
    node = next(value for value in output.args[0] if isinstance(value, fx.Node) and value.name == name)
    source = node.args[0] if node.args else None
    return isinstance(source, fx.Node) and getattr(source.target, "__name__", "") == "run_and_save_rng_state"
