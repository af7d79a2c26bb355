"""Runs a traced step in which time passes as a device profile says: computation sleeps, collectives sleep beside it.

Every operator does its work, on tensors small enough that it takes next to nothing, and sleeps until the time of its
profile has passed. The collectives are real ones, in a thread for each process group, and sleep there: what is on the
way passes while computation sleeps, also where the processors are shared, since a sleep takes none of them. So a step
takes as long as its order makes it wait, which is what a simulation of the same profile says beforehand.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from attrs import define, field, frozen
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from policylang.graph.collect import collect
from policylang.graph.facts import Flag
from policylang.language.devices.profile import DeviceProfile
from policylang.planning.schedule import build_schedule
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import StepTime, step_time

_FINEST = 1e-3
"""Seconds of computation that are slept at once: shorter sleeps are less exact."""


def simulated(gm: fx.GraphModule, device: DeviceProfile) -> StepTime:
    """The time of a step that runs the graph in its own order."""
    facts = collect(gm)
    return step_time(facts, build_schedule(facts, ()), node_times(facts, device))


@frozen
class _OnTheWay:
    """The result of a collective, or a piece of it, and when it is there."""

    future: Future[tuple[Any, float]]
    piece: tuple[int, ...] = ()

    def there(self) -> tuple[Any, float]:
        value, when = self.future.result()
        for index in self.piece:
            value = value[index]
        return value, when


@define(eq=False)
class SleptGraph:
    """A graph as it runs on one rank. A view of what is on the way waits for it, as a ``wait_tensor`` does."""

    gm: fx.GraphModule
    device: DeviceProfile
    _seconds: Mapping[fx.Node, float] = field(init=False)
    _streams: Mapping[fx.Node, str] = field(init=False)
    _threads: dict[str, ThreadPoolExecutor] = field(factory=dict)
    _free: dict[str, float] = field(factory=dict)
    """By stream, when what was started on it is over; written by its own thread."""

    def __attrs_post_init__(self) -> None:
        facts = collect(self.gm)
        nodes = list(self.gm.graph.nodes)
        self._seconds = dict(zip(nodes, node_times(facts, self.device).seconds, strict=True))
        self._streams = {
            node: facts.group_names[row]
            for row, node in enumerate(nodes)
            if facts.flags[row] & Flag.COLLECTIVE and facts.group_names[row]
        }

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    @torch.no_grad()
    def run(self, inputs: Sequence[Any]) -> tuple[Any, float]:
        """What the graph returns, and the seconds on the clock until all of it is over."""
        given, values = iter(inputs), dict[fx.Node, Any]()
        began = now = time.perf_counter()
        returned: Any = None
        self._free.clear()
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = getattr(self.gm, node.target)
            elif node.op == "output":
                now, returned = self._value(node.args[0], values, now)
            elif node in self._streams:
                now = self._start(node, values, now)
            elif node.target is operator.getitem and isinstance(values[node.args[0]], _OnTheWay):
                whole = values[node.args[0]]
                values[node] = _OnTheWay(whole.future, (*whole.piece, node.args[1]))
            else:
                now = self._compute(node, values, now)
        over = max([now, *self._free.values()])
        _sleep_until(over)
        return returned, max(over, time.perf_counter()) - began

    def _compute(self, node: fx.Node, values: dict[fx.Node, Any], now: float) -> float:
        now, (args, kwargs) = self._value((node.args, node.kwargs), values, now)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        now += self._seconds[node]
        if now - time.perf_counter() > _FINEST:
            _sleep_until(now)
        return now

    def _start(self, node: fx.Node, values: dict[fx.Node, Any], now: float) -> float:
        """Hands a collective to the thread of its group, when computation has come so far."""
        now, (args, kwargs) = self._value((node.args, node.kwargs), values, now)
        _sleep_until(now)
        stream, length, target = self._streams[node], self._seconds[node], node.target
        if stream not in self._threads:
            self._threads[stream] = ThreadPoolExecutor(1)

        def communicate() -> tuple[Any, float]:
            begun = max(now, self._free.get(stream, 0.0))
            with torch.no_grad():
                result = target(*args, **kwargs)  # type: ignore[operator]
                for each in result if isinstance(result, list | tuple) else (result,):
                    torch.ops._c10d_functional.wait_tensor(each)
            _sleep_until(begun + length)
            over = self._free[stream] = max(begun + length, time.perf_counter())
            return result, over

        values[node] = _OnTheWay(self._threads[stream].submit(communicate))
        return now

    def _value(self, arguments: Any, values: Mapping[fx.Node, Any], now: float) -> tuple[float, Any]:
        """The arguments of a node, once what is on the way among them is there: computation has come to ``now``."""
        found = fx.node.map_arg(arguments, values.__getitem__)
        waiting = [each for each in tree_leaves(found) if isinstance(each, _OnTheWay)]
        if waiting:
            _sleep_until(now)
            now = max(now, *(each.there()[1] for each in waiting))
            found = tree_map_only(_OnTheWay, lambda each: each.there()[0], found)
        return now, found


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
