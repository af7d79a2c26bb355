"""torch's own schedulers where there is no GPU: on a graph of fake tensors, with the times of a device profile.

They ask a GPU three things. What a *product* takes by a roofline, even where an estimator is given, which is then
taken instead: answered with nothing. The *figures for a log*, from NCCL's cost model, which asks triton for the GPU:
nothing is logged. From what size on a collective fills *the network*, for buckets that are made beforehand, by a table
of GPUs: answered by torch as it answers for a machine of eight GPUs whose kind it cannot tell.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from attrs import define, evolve, field, frozen
from torch import fx
from torch._subclasses import FakeTensorMode

from benchmarks.schedule_graphs import Subject, values_anew
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.simulation.node_times import node_times


@frozen
class Passed:
    """What one of torch's passes made of a graph."""

    facts: Facts = field(repr=False)
    module: fx.GraphModule = field(repr=False)
    seconds: float
    """Of processor time, of the pass alone: neither of reading the graph nor of pricing its nodes."""


def overlap(subject: Subject, device: DeviceProfile, **settings: Any) -> Passed:
    """``schedule_overlap_bucketing`` with its own defaults, except for what is set; buckets are made where it is said.

    Regions of fused kernels are left out of its estimates, since the prices that it is given have fusion in them.
    """
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    module = subject.fresh()
    prices = _Prices(subject, module, device)
    given = {"enable_fusion_regions": False, "pre_bucketing_fsdp_collectives": False, **settings}

    def run() -> None:
        schedule_overlap_bucketing(
            module,
            custom_runtime_estimation=prices.milliseconds,
            collective_estimator="analytical",
            compute_estimator="analytical",
            **given,
        )

    return _passed(subject, module, run, prices)


def manual(subject: Subject, device: DeviceProfile, plan: Sequence[list[str] | str]) -> Passed:
    """``manual_overlap_bucketing`` with a plan of modules' names; it asks for no time."""
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing

    module = subject.fresh()
    prices = _Prices(subject, module, device)
    return _passed(subject, module, lambda: manual_overlap_bucketing(module, list(plan), bucket_mode="default"), prices)


@define(eq=False)
class _Prices:
    """Our times of the nodes of a graph, in milliseconds. What a pass puts into the graph is priced when it asks."""

    subject: Subject
    module: fx.GraphModule
    device: DeviceProfile
    seconds: float = 0.0
    """Of processor time that pricing took."""
    _whole: dict[fx.Node, float] = field(factory=dict)
    _least: dict[fx.Node, float] = field(factory=dict)

    def milliseconds(self, node: fx.Node, size: int | None) -> float:
        """``size`` is 0 where the latency of a collective is asked for, and None otherwise."""
        if node not in self._whole:
            start = time.process_time()
            self.read()
            self.seconds += time.process_time() - start
        return 1e3 * (self._whole if size is None else self._least)[node]

    def read(self) -> None:
        facts = self.subject.read(self.module)
        empty = evolve(facts, bytes=array("q", bytes(8 * len(facts))))
        nodes = list(self.module.graph.nodes)
        self._whole = dict(zip(nodes, node_times(facts, self.device).seconds, strict=True))
        self._least = dict(zip(nodes, node_times(empty, self.device).seconds, strict=True))


def _passed(subject: Subject, module: fx.GraphModule, run: Callable[[], object], prices: _Prices) -> Passed:
    prices.read()
    logging.disable(logging.WARNING)  # what it says of each graph and each cycle
    try:
        with gpu_queries_answered(), subject.mode:
            start = time.process_time()
            run()
            spent = time.process_time() - start
    finally:
        logging.disable(logging.NOTSET)
    return Passed(subject.read(module), module, spent - prices.seconds)


def peak_as_torch_counts(graph: fx.Graph) -> int:
    """Bytes, by the tracker that torch's scheduler holds to its limits: what a backward is given goes when it was last
    read, parameters stay. The process groups have to be there."""
    from torch._inductor.fx_passes.memory_estimator import MemoryTracker

    with FakeTensorMode():
        values_anew(graph)
    tracker = MemoryTracker(graph)
    for node in graph.nodes:
        tracker.schedule_node(node)
    return int(tracker.peak_memory)


@contextmanager
def gpu_queries_answered() -> Iterator[None]:
    """Within, torch's schedulers run without a GPU and without triton."""
    import torch._inductor.config as config
    import torch._inductor.fx_passes.node_runtime_estimation as logs
    import torch._inductor.fx_passes.overlap_scheduling as scheduling

    with (
        patch.object(scheduling, "estimate_roofline_runtime_ms", lambda node: 0.0),
        patch.object(logs, "_log_compute_estimations", lambda *args, **kwargs: None),
        patch.object(logs, "_log_collective_benchmarks", lambda *args, **kwargs: None),
        # its bucketing ends in an error about a cycle of its own on some graphs, and names this as the way around
        patch.object(config.aten_distributed_optimizations, "overlap_scheduling_autofix_cycles", True),
    ):
        yield
