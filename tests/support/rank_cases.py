"""What a rank does in the rows of ``tests/distributed/test_rank_faults.py``: small models that gather their weights."""

import ctypes
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from unittest import mock

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import policylang
from policylang import TracedStep, trace_step
from policylang.backends import path
from policylang.ranks import meeting
from tests.support.compiled import backend_for
from tests.support.flat_graphs import copy_graph
from tests.support.joint import capture_joint
from tests.support.models import Function, Layers
from tests.support.rank_faults import Case, Place, gradients

SAVE = "undecided -> save\n"
RECOMPUTE = "undecided -> recompute\n"
LARGE = "optional save mm where bytes > 1KiB\n"
"""Of products as wide as :data:`WIDTH`: those of more than 32 rows."""
WIDTH = 8


def batch(rows: int = 2, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, rows * width).view(rows, width).to(dtype)


def shard(rows: int, width: int) -> nn.Parameter:
    """Another on every rank."""
    generator = torch.Generator().manual_seed(11 + dist.get_rank())
    return nn.Parameter(torch.randn(rows, width, generator=generator) / 4)


# --- models ---------------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    """A weight that is gathered over one group after the other."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], width: int = WIDTH) -> None:
        super().__init__()
        self.groups = list(groups)
        parts = 1
        for group in groups:
            parts *= group.size()
        self.weight = shard(width // parts, width)
        self.error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        for group in self.groups:
            weight = functional.all_gather_tensor_autograd(weight, 0, group)
        if self.error is not None:
            raise self.error("this rank has read another batch")
        return x + torch.sin(x @ weight.t())


class Net(nn.Module):
    """``groups``: of each layer, those that its weight is gathered over. Nothing else communicates."""

    def __init__(self, groups: Sequence[Any], width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        sets = [each if isinstance(each, (tuple, list)) else [each] for each in groups]
        self.layers = nn.ModuleList(Layer(each, width) for each in sets)
        self.dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.dropout is not None:
                x = self.dropout(x)
        return x


def Products(group: dist.ProcessGroup) -> nn.Module:
    def forward(products: Any, x: Tensor) -> Tensor:
        for weight in (products.first, products.second):
            x = x @ functional.all_gather_tensor_autograd(weight, 0, group).t()
        return x

    return Function(forward, first=shard(WIDTH // 2, WIDTH), second=shard(WIDTH // 2, WIDTH))


def Twice(group: dist.ProcessGroup) -> nn.Module:
    """Gathers one weight two times, where common subexpressions are left alone."""

    def forward(twice: Any, x: Tensor) -> Tensor:
        first, second = (functional.all_gather_tensor_autograd(twice.weight, 0, group).t() for _ in range(2))
        return x @ first + torch.sin(x) @ second

    return Function(forward, weight=shard(WIDTH // 2, WIDTH))


def Reduced(group: dist.ProcessGroup, operation: str) -> nn.Module:
    """Adds what all ranks have."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.inner(x)
        return x + functional.all_reduce(x.detach(), operation, group)

    return Function(forward, inner=Net([group]))


def Branching(group: dist.ProcessGroup) -> nn.Module:
    """Has one layer more for a large batch."""

    def forward(model: Any, x: Tensor) -> Tensor:
        x = model.net(x)
        return model.more(x) if x.shape[0] > 8 else x

    return Function(forward, net=Net([group]), more=Net([group]))


class Broken(nn.Module):
    def __init__(self, net: Net, graph_break: bool = False, error: bool = False) -> None:
        super().__init__()
        self.net, self.graph_break, self.error = net, graph_break, error

    def forward(self, x: Tensor) -> Tensor:
        if self.error:
            raise ValueError("this rank has read another batch")
        for layer in self.net.layers:
            x = layer(x)
            if self.graph_break:
                torch._dynamo.graph_break()
        return x


def FeedForward() -> nn.Module:
    up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    return Function(lambda block, x: x + block.down(torch.relu(block.up(x))), up=up, down=down)


def Plain() -> Layers:
    """Two blocks without collectives of their own, for DTensor and FSDP to put them there."""
    torch.manual_seed(3)
    return Layers(FeedForward(), FeedForward())


# --- under torch.compile --------------------------------------------------------------------------------------------
def compiled(model: nn.Module, policy: str, *, dynamic: bool | None = None, **options: Any) -> Any:
    backend = policylang.backend(policylang.parse(policy), **{"inner": "aot_eager", **options})
    return torch.compile(model, backend=backend, dynamic=dynamic)


def trains(at: Place, model: nn.Module, policy: str = SAVE, x: Tensor | None = None, **options: Any) -> None:
    at.trains(compiled(model, policy, **options), model, batch() if x is None else x)


def nets(at: Place) -> Net:
    return Net([at.group, at.group])


def policies(here: str, there: str) -> Case:
    """One model, and ``there`` is the policy of who is at fault."""
    return lambda at, fault: trains(at, nets(at), there if fault else here)


def models(here: Callable[[Place], nn.Module], there: Callable[[Place], nn.Module], policy: str = SAVE) -> Case:
    """One policy, and ``there`` makes the model of who is at fault."""
    return lambda at, fault: trains(at, (there if fault else here)(at), policy)


def batches(make: Callable[[Place], nn.Module], here: Tensor, there: Tensor, policy: str = SAVE) -> Case:
    """One model and policy, and ``there`` is the first batch of who is at fault."""
    return lambda at, fault: trains(at, make(at), policy, there if fault else here)


def settings(
    make: Callable[[Place], nn.Module],
    change: Callable[[], AbstractContextManager[Any]],
    policy: str = "",
    **options: Any,
) -> Case:
    """One model and policy, and who is at fault runs within a setting of torch's."""

    def case(at: Place, fault: bool) -> None:
        model = make(at)
        with torch._inductor.config.patch(force_disable_caches=True), change() if fault else nullcontext():
            trains(at, model, SAVE + policy, **options)

    return case


def in_another_order(at: Place, fault: bool) -> None:
    one, other = nets(at), Net([at.group] * 3)
    for model in (other, one) if fault else (one, other):
        trains(at, model)


def after_evaluation(at: Place, fault: bool) -> None:
    model = nets(at)
    step = compiled(model, RECOMPUTE if fault else SAVE)
    with torch.no_grad():
        step(batch())
    at.trains(step, model, batch())


def same_backend_again(at: Place, fault: bool) -> None:
    model = nets(at)
    step = compiled(model, RECOMPUTE if fault else SAVE)
    caught(at, lambda: gradients(step, model, batch()))
    at.trains(step, model, batch())


def mended_in_between(at: Place, fault: bool) -> None:
    model = nets(at)
    caught(at, lambda: gradients(compiled(model, RECOMPUTE if fault else SAVE), model, batch()))
    trains(at, model)


def after_ones_own_error(at: Place, fault: bool) -> None:
    """Who is at fault has an error of its own, the other is told; then both have the same."""
    model = nets(at)
    caught(at, lambda: gradients(compiled(model, SAVE + "save attention\n" * fault), model, batch()))
    trains(at, model)


def caught(at: Place, call: Callable[[], Any]) -> None:
    """Where somebody is at fault, every rank is told."""
    try:
        call()
    except policylang.PolicyError:
        return
    assert not at.faulty, "nobody was told"


def second_backend(at: Place, fault: bool) -> None:
    model = nets(at)
    trains(at, model)
    trains(at, model, RECOMPUTE if fault else SAVE)


def block_by_block(policy: str, here: str, there: str) -> Case:
    """Each block with a backend of its own; ``here`` and ``there`` are the roots of the second one."""

    def case(at: Place, fault: bool) -> None:
        model = nets(at)
        for layer, root in zip(model.layers, ("layers.0", there if fault else here), strict=True):
            layer.compile(backend=backend_for(policy, root=root))
        plain = nets(at)
        expected = None if at.faulty else gradients(plain, plain, batch())
        found = gradients(model, model, batch())
        if expected is not None:
            torch.testing.assert_close(found, expected)

    return case


def another_shape(
    make: Callable[[Place], nn.Module], policy: str, here: int, there: int, dynamic: bool | None = False
) -> Case:
    """Rows of the second batch; of the first all have two."""

    def case(at: Place, fault: bool) -> None:
        model = make(at)
        step = compiled(model, policy, dynamic=dynamic)
        at.trains(step, model, batch())
        at.trains(step, model, batch(there if fault else here))

    return case


def told_at_the_next(at: Place, fault: bool) -> None:
    """A graph compiled alone is refused before anything of it runs; who did not launch anything goes on to compare."""
    model = nets(at)
    step = compiled(model, RECOMPUTE + LARGE, dynamic=False)
    at.trains(step, model, batch())
    if fault:
        with suppress(policylang.PolicyError):
            step(batch(64))
    trains(at, nets(at))


def frozen_weight(at: Place, fault: bool) -> None:
    model = nets(at)
    model.layers[0].weight.requires_grad_(not fault)
    trains(at, model)


def evaluated(at: Place, fault: bool) -> None:
    model = Net([at.group] * 2, dropout=0.5).train(not fault)
    step = compiled(model, SAVE)
    gradients(step, model, batch())


def of_dtypes(here: torch.dtype, there: torch.dtype) -> Case:
    def case(at: Place, fault: bool) -> None:
        dtype = there if fault else here
        trains(at, nets(at).to(dtype), x=batch(dtype=dtype))

    return case


def of_widths(here: int, there: int) -> Case:
    def case(at: Place, fault: bool) -> None:
        width = there if fault else here
        trains(at, Net([at.group] * 2, width), x=batch(width=width))

    return case


def left_out(how: str) -> Case:
    """Who is at fault compares nothing."""

    def case(at: Place, fault: bool) -> None:
        if fault and how != "agree":
            os.environ["POLICYLANG_AGREE"] = "0"
        trains(at, nets(at), **({"agree": False} if fault and how == "agree" else {}))

    return case


def nobody_compares(at: Place, fault: bool) -> None:
    """What is decided differently has no collective in it."""
    os.environ["POLICYLANG_AGREE"] = "0"
    trains(at, nets(at), SAVE + "recompute mm\n" * fault)


def fails_in_the_forward(at: Place, fault: bool) -> None:
    trains(at, Broken(nets(at), error=fault))


def fails_in_a_block(error: type[BaseException]) -> Case:
    """In the first forward of a checkpoint, behind its collectives."""

    def case(at: Place, fault: bool) -> None:
        model = checkpointed(nets(at), SAVE)
        model.layers[0].error = error if fault else None
        try:
            at.trains(model, model, batch(), plain=nets(at))
        except (SystemExit, KeyboardInterrupt) as told:
            raise ValueError(*told.args) from told

    return case


def writes_garbage(at: Place, fault: bool) -> None:
    """Of ranks that differ: those that are alike read nothing."""
    with mock.patch.object(meeting, "pack", return_value="gAOVCg==") if fault else nullcontext():
        trains(at, nets(at), SAVE + "optional save bmm\n" * (fault and at.rank))


def under_other_names(at: Place, fault: bool) -> None:
    """One text, in a file of each rank's own."""
    model = nets(at)
    backend = policylang.backend(policylang.parse(SAVE, name=f"own{at.rank}.apl"), inner="aot_eager")
    at.trains(torch.compile(model, backend=backend), model, batch())


class OwnPart(nn.Module):
    """Cuts this rank's part out of what is gathered: the first has all of it, as it may where one rank pads."""

    def __init__(self, at: Place, other: bool) -> None:
        super().__init__()
        self.inner, self.other = Net([at.group]), other

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.inner(torch.ops.aten.alias(x) if self.other else x[:, :WIDTH].clone())


# --- flat graphs, joint graphs --------------------------------------------------------------------------------------
def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def traced(model: nn.Module, x: Tensor | None = None) -> TracedStep:
    return trace_step(model, square, batch() if x is None else x)


def runs(at: Place, step: TracedStep, model: nn.Module) -> None:
    expected = gradients(model, model, batch()) if not at.faulty else None
    _, found = step(batch())
    if expected is not None:
        torch.testing.assert_close({name: found[name] for name in expected}, expected)


def flat(
    here: str, there: str, make: Callable[[Place], nn.Module] = nets, other: Callable[[Place], nn.Module] = nets
) -> Case:
    def case(at: Place, fault: bool) -> None:
        model = (other if fault else make)(at)
        policy = policylang.parse(there if fault else here, name="odd.apl" if fault else "even.apl")
        runs(at, traced(model).apply(policy), model)

    return case


def meshed(
    here: Callable[[Place], DeviceMesh | None], there: Callable[[Place], DeviceMesh | None], dims: int = 1
) -> Case:
    """The same graph and policy, and ``there`` is the mesh that who is at fault passes."""

    def case(at: Place, fault: bool) -> None:
        groups = [at.mesh.get_group(dim) for dim in range(dims)]
        model = Net([groups] * 2)
        step = traced(model).apply(policylang.parse(SAVE), (there if fault else here)(at))
        runs(at, step, model)

    return case


def swapped_names(at: Place) -> DeviceMesh:
    groups = [at.mesh.get_group(dim) for dim in range(2)]
    return DeviceMesh.from_group(groups, "cpu", mesh=at.mesh.mesh, mesh_dim_names=("tp", "dp"))


def row_of(at: Place) -> DeviceMesh:
    """The smaller of two meshes: this rank's part of ``tp``."""
    return at.mesh["tp"]


def gathers_of(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)


def reordered(at: Place, fault: bool) -> None:
    """A pass of the user's starts the second gather before the first, on one rank."""
    model = nets(at)
    step = traced(model)
    if fault:
        first, second = gathers_of(step.gm)[:2]
        first.prepend(second)
        step.gm.recompile()
    runs(at, step.apply(policylang.parse(SAVE)), model)


def not_a_graph(at: Place, fault: bool) -> None:
    model = nets(at)
    step = traced(model)
    if fault:
        policylang.apply(model, policylang.parse(SAVE))  # the model in place of its graph
    runs(at, step.apply(policylang.parse(SAVE)), model)


def a_second_policy(at: Place, fault: bool) -> None:
    """Of which it is said before anything is planned."""
    step, again = traced(nets(at)), traced(nets(at))
    step.apply(policylang.parse(RECOMPUTE))
    (step if fault else again).apply(policylang.parse(SAVE))


def partitioned(at: Place, fault: bool) -> None:
    joint = capture_joint(nets(at), [batch()])
    forward, backward = joint.halves(policylang.parse(RECOMPUTE if fault else SAVE))
    assert gathers_of(forward)
    assert not gathers_of(backward), "what is saved is not gathered again"


# --- eager ----------------------------------------------------------------------------------------------------------
def eager(
    make: Callable[[Place], nn.Module], here: str, there: str, other: Callable[[Place], nn.Module] | None = None
) -> Case:
    """``checkpoint_model`` on what ``make`` returns, twice the same; ``other`` makes the model of who is at fault."""

    def case(at: Place, fault: bool) -> None:
        made = other if fault and other is not None else make
        plain = made(at)
        model = checkpointed(made(at), there if fault else here)
        at.trains(model, model, batch(), plain=plain)

    return case


def checkpointed(model: nn.Module, policy: str) -> nn.Module:
    return policylang.checkpoint_model(model, policylang.parse(policy))


def tensor_parallel(at: Place) -> nn.Module:
    model = Plain()
    for layer in model.layers:
        parallelize_module(layer, at.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sharded_inside(at: Place) -> nn.Module:
    """FSDP on the linear layers, so that their gathers lie within the checkpoints."""
    return sharded(Plain(), at)


def sharded(model: nn.Module, at: Place) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer.up, mesh=at.mesh)
        fully_shard(layer.down, mesh=at.mesh)
    return fully_shard(model, mesh=at.mesh)


def checkpointed_and_sharded(here: str, there: str) -> Case:
    """The checkpoints come first, as the documents want it."""

    def case(at: Place, fault: bool) -> None:
        plain = sharded_inside(at)
        model = sharded(checkpointed(Plain(), there if fault else here), at)
        at.trains(model, model, batch(), plain=plain)

    return case


# --- threads, time --------------------------------------------------------------------------------------------------
def trains_in_two_threads(at: Place, fault: bool) -> None:
    """Two models over two groups of equal ranks, by each rank in another order at another time, again and again."""
    made = [checkpointed(Net([group] * (2 + number)), SAVE) for number, group in enumerate(at.groups)]
    plain = [Net([group] * (2 + number)) for number, group in enumerate(at.groups)]

    def trained(number: int) -> None:
        pauses = random.Random(f"{at.rank} {number} {fault}")
        for rows in (1, 2, 3, 4):  # each is compared again
            time.sleep(pauses.choice((0.0, 0.1, 0.4)))
            found = gradients(made[number], made[number], batch(rows))
            torch.testing.assert_close(found, gradients(plain[number], plain[number], batch(rows)))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(trained, (0, 1)))


def in_two_threads(at: Place, fault: bool) -> None:
    """Two models over two groups of equal ranks; who is at fault starts with the other one."""
    made = [Net([group] * (2 + number)) for number, group in enumerate(at.groups)]
    steps = [traced(model) for model in made]

    def applied(number: int) -> None:
        steps[number].apply(policylang.parse(SAVE))

    with ThreadPoolExecutor(2) as pool:
        results = []
        for number in (1, 0) if fault else (0, 1):
            results.append(pool.submit(applied, number))
            time.sleep(0.3)
        for result in results:
            result.result()
    for step, model in zip(steps, made, strict=True):
        runs(at, step, model)


def keys_stay_few(at: Place, fault: bool) -> None:
    """The store of a long program does not fill up."""
    if not at.faulty:
        return  # once is enough: there is no fault in it
    step = traced(nets(at))
    policy = policylang.parse(SAVE)
    store = dist.distributed_c10d._get_default_store()
    counts = []
    for times in (3, 12):
        for _ in range(times):
            policylang.apply(copy_graph(step.gm), policy)
        at.meet()
        counts.append(store.num_keys())
        at.meet()
    assert counts[1] - counts[0] <= 6, f"twelve comparisons leave {counts[1] - counts[0]} keys"


def no_thread_runs(at: Place, fault: bool) -> None:
    if not at.faulty:
        return  # once is enough: there is no fault in it
    model = nets(at)
    trains(at, model)
    running = [thread.name for thread in threading.enumerate() if thread.name.startswith("policylang")]
    assert not running, f"threads of policylang's run: {running}"


def is_late(seconds: float, noticed: float) -> Case:
    """``noticed``: seconds after which the others say whom they wait for."""

    def case(at: Place, fault: bool) -> None:
        if fault:
            time.sleep(seconds)
        with mock.patch.object(meeting, "NOTICE", noticed):
            trains(at, nets(at))

    return case


def holds_the_lock(seconds: int) -> Case:
    """No other thread of the rank runs meanwhile."""

    def case(at: Place, fault: bool) -> None:
        if fault:
            ctypes.PyDLL(None).sleep(seconds)
        trains(at, nets(at))

    return case


def is_killed(at: Place, fault: bool) -> None:
    if fault:
        os.kill(os.getpid(), signal.SIGKILL)
    trains(at, nets(at))


def is_killed_with_a_plan(at: Place, fault: bool) -> None:
    """Before the others have changed anything."""
    model = nets(at)
    step = traced(model)
    before = str(step.gm.graph)
    dies = mock.patch.object(path, "agree_on_plan", side_effect=lambda *_: is_killed(at, True))
    with dies if fault else nullcontext():
        try:
            step.apply(policylang.parse(SAVE))
        except policylang.PolicyError:
            assert str(step.gm.graph) == before
            raise
    runs(at, step, model)


def is_stopped(seconds: int) -> Case:
    def case(at: Place, fault: bool) -> None:
        if fault:
            waker = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            waker.wait()
        trains(at, nets(at))

    return case


def never_comes(at: Place, fault: bool) -> None:
    """Who is at fault does something else, and is there all the time."""
    if not fault:
        trains(at, nets(at))


def reads_its_policy(fault: bool) -> None:
    """Before there is a process group; the other rank reads it afterwards."""
    if fault:
        policylang.parse(SAVE)
        backend_for(SAVE)
