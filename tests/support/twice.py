"""A graph that is compiled a second time as it stands: the halves of a first partition, traced through with what their
nodes carry, as parallelizers do that hand an already partitioned graph to ``torch.compile``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

import policylang
from policylang.backends.joint import JointPartitioner, Partition
from policylang.language.syntax import Policy

REPLAY = policylang.load("replay")


def keep_meta(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """A compiler that runs a graph node by node: who traces the run gives each node's metadata to what it becomes."""

    def run(arguments: list[Any]) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            return fx.Interpreter(gm).boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def partitioned_twice(
    function: Callable[..., Tensor],
    arguments: Sequence[Tensor],
    first: Policy,
    second: Policy = REPLAY,
    *,
    decompositions: Any = None,
    done: list[Partition] | None = None,
) -> tuple[Partition, Partition]:
    """The partition of a function under ``first``, and that of the compiled function under ``second``.

    ``done`` gets each as soon as it is made.
    """
    done = [] if done is None else done
    by = [partition_by(policy, done) for policy in (first, second)]
    compiled_twice(function, arguments, *by, decompositions=decompositions)
    one, two = done
    return one, two


def partition_by(policy: Policy, done: list[Partition]) -> Callable[..., Any]:
    """A partition function of AOTAutograd's that notes what it has done."""

    def partition(gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        static = options.get("static_lifetime_input_indices")
        more = {"num_fwd_outputs": num_fwd_outputs, "static_lifetime_input_indices": static}
        done.append(JointPartitioner(policy).partition(gm, **more))
        return done[-1].forward, done[-1].backward

    return partition


class Once(NamedTuple):
    """The partition of one compiled graph, the number of its forward's own outputs, and what it was called with."""

    partition: Partition
    num_fwd_outputs: int
    arguments: tuple[Any, ...]


def partitioned_once(step: Callable[[Callable[..., Any]], object], policy: str) -> Once:
    """``step`` is given the backend that it is to compile one graph with, whose halves run operator by operator."""
    partitioned: list[Partition] = []
    outputs: list[int] = []
    calls: list[tuple[Any, ...]] = []
    by_policy = partition_by(policylang.parse(policy), partitioned)

    def partition(gm: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        outputs.append(num_fwd_outputs)
        return by_policy(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = aot_eager(gm, inputs, partition)

        def call(*arguments: Any) -> Any:
            calls.append(arguments)
            return compiled(*arguments)

        return call

    step(backend)
    torch._dynamo.reset()
    (done,), (num_fwd_outputs,) = partitioned, outputs
    return Once(done, num_fwd_outputs, calls[0])


def aot_eager(
    gm: fx.GraphModule, inputs: Sequence[Any], partition: Callable[..., Any], decompositions: Any = None
) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    compilers = {"fw_compiler": boxed_nop, "bw_compiler": boxed_nop}
    return aot_autograd(**compilers, partition_fn=partition, decompositions=decompositions)(gm, inputs)


def compiled_twice(
    function: Callable[..., Tensor],
    arguments: Sequence[Tensor],
    first: Callable[..., Any],
    second: Callable[..., Any],
    *,
    decompositions: Any = None,
) -> None:
    """Compile a function with one partition function, and what comes of it with another."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import aot_function

    compiled: list[Callable[..., Any]] = []
    taken: list[Sequence[Any]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compilers = {"fw_compiler": keep_meta, "bw_compiler": keep_meta}
        compiled.append(aot_autograd(**compilers, partition_fn=first)(gm, inputs))

        def call(*given: Any) -> Any:
            taken.append(given)
            return compiled[0](*given)

        return call

    torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    torch._dynamo.reset()
    aot_function(
        lambda *given: compiled[0](*given),
        fw_compiler=lambda gm, inputs: gm,
        bw_compiler=lambda gm, inputs: gm,
        partition_fn=second,
        decompositions=decompositions,
    )(*taken[0])
