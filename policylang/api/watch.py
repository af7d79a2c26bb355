"""``policylang.watch``: what the first steps of a training take, beside what was planned for them."""

from __future__ import annotations

import gc
import json
import os
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from policylang.api.apply import report_on
from policylang.api.load import DeviceLike, PolicyLike, device_of, policy_of
from policylang.api.planned_graphs import checked_path, read_any, scheduled
from policylang.backends.copies import timed_copies
from policylang.backends.eager.checkpoint import blocks_in
from policylang.backends.refusals import checked_model
from policylang.errors import PolicyError, PolicyMatchError, PolicyWarning, check_argument, file_of, is_count
from policylang.graph.facts import InputKind
from policylang.language.diagnostics import Diagnostic, diagnose, is_error
from policylang.language.files import reason_of, write_whole
from policylang.language.shown import beside, format_quantity
from policylang.language.syntax import ExpectTotal, Policy
from policylang.planning.capabilities import PathName, capabilities_for
from policylang.planning.inspection.breakdown import breakdown, values_at_peak
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import digest_of
from policylang.planning.planner import plan
from policylang.planning.value_outcome import saved_bytes
from policylang.report.plan_comparison import RUN_VERSION, run_text
from policylang.simulation.streams import step_time
from policylang.torch_compat.compilers import is_compiled, is_profiling
from policylang.torch_compat.distributed import timed_collectives
from policylang.torch_compat.tracing import take_apart
from policylang.tuning.tuned_policy import fingerprint

BROKEN, BUSY = "APL655", "APL661"
_WATCHING: list[WatchedRun] = []
_UPDATE = "policylang: the optimizer's step"


def watch(
    subject: nn.Module,
    recipe: PolicyLike,
    *,
    to: str | os.PathLike[str] | None = None,
    graph: Any = None,
    path: PathName | None = None,
    device: DeviceLike | None = None,
    optimizer: Optimizer | None = None,
    steps: int = 3,
) -> WatchedRun:
    """A context over the first ``steps`` steps of a training, each of which ends with a call of its ``step()``.

    Args:
        subject: the model, compiled or not.
        recipe: the policy that it trains under.
        to: the file that gets what was planned and what was measured, as JSON.
        graph: what the policy was planned on, as :func:`policylang.tune` takes it; by default the snapshot beside the
            recipe, ``recipe.graph``.
        path: what carries the policy out, as for :func:`policylang.check`; by default ``"joint"`` where the model or a
            part of it is compiled, and ``"eager"`` else.
        device: the profile for planned times; by default the one that the policy's ``device`` line names.
        optimizer: whose state is counted apart from what the graph of the step holds; by default the first that makes a
            step. Name it where it has state already.

    On an accelerator memory is what its allocator says and time is that of events. On a CPU the first step, and the
    next if the first made the optimizer's state, run under torch's profiler, which reports every allocation, and are
    not timed. After the last step nothing is left in place; an error within a step removes everything and writes
    nothing. What cannot be seen is named in ``notes``.

    Raises ``PolicyError`` for a recipe or a graph that cannot be read, and where a training is watched or, on a CPU,
    profiled already. A step that takes more than the recipe expects is a ``PolicyWarning``, with the node and the line.
    """
    checked_model(subject, "what is watched is the training of a model")
    policy = policy_of(recipe)
    checked_path(path)
    file = None if to is None else file_of("to", to)
    if file is not None:
        there = not file.is_dir() and file.parent.is_dir()
        check_argument("to", os.fspath(file), there, "the path of a file in a folder that is there")
    check_argument("steps", steps, is_count(steps, 1), "a whole number from 1 on")
    check_argument("optimizer", optimizer, isinstance(optimizer, Optimizer | None), "a `torch.optim.Optimizer`")
    if graph is None and isinstance(recipe, str | os.PathLike):
        beside_it = Path(recipe).with_suffix(".graph")
        graph = beside_it if beside_it.is_file() else None
    if path is None:
        path = "joint" if any(map(is_compiled, subject.modules())) else "eager"
    planned = None if graph is None else planned_figures(policy, graph, path, device)
    name = os.fspath(recipe) if isinstance(recipe, str | os.PathLike) else policy.name
    return WatchedRun(subject, policy, name, planned, file, optimizer, steps)


class WatchedRun:
    """What :func:`watch` returns. ``str()`` is the comparison, ``data`` all of it as plain data, once it is there."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        name: str,
        planned: Mapping[str, Any] | None,
        to: Path | None,
        optimizer: Optimizer | None,
        steps: int,
    ) -> None:
        self.data: dict[str, Any] = {}
        self._model, self._policy, self._name, self._planned, self._to = model, policy, name, planned, to
        self._optimizer, self._steps = optimizer, steps
        accelerator = torch.accelerator.current_accelerator()
        self._on_cpu = accelerator is None or all(each.device.type == "cpu" for each in model.parameters())
        self._stack: ExitStack | None = None
        self._profiler: profile | None = None
        self._marks: list[tuple[str, Any, Any]] = []
        self._sums: list[dict[str, tuple[int, float]]] = []
        self._seconds: list[float] = []
        self._peak = self._graph = self._reserved = self._retries = self._resident = self._own = self._profiled = 0
        self._before = 0
        self._start = 0.0

    def __enter__(self) -> WatchedRun:
        if _WATCHING or (self._on_cpu and is_profiling()):
            message = f"this training is {'watched' if _WATCHING else 'profiled'} already"
            raise PolicyError([diagnose(BUSY, message, help="end the other one first, or begin this one after it")])
        with ExitStack() as stack:
            _WATCHING.append(self)
            stack.callback(_WATCHING.remove, self)
            stack.enter_context(timed_collectives(self._timed))
            stack.enter_context(timed_copies(self._timed))
            for module, path in blocks_in(self._model, self._policy, "").items():
                for handle in self._hooks(module, path):
                    stack.callback(handle.remove)
            stack.callback(register_optimizer_step_pre_hook(self._updates).remove)
            stack.callback(self._stop_profiler)
            self._retries = 0 if self._on_cpu else _retries()
            self._look()
            self._stack = stack.pop_all()
        self._start = perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and not self._sums:
            self.step()  # the context is one step
        self._end(write=kind is None)

    def step(self) -> None:
        """A step has ended. Does nothing once as many have as are watched."""
        if self._stack is None:
            return
        if not self._on_cpu:
            torch.accelerator.synchronize()
        self._seconds.append(perf_counter() - self._start)
        sums: dict[str, tuple[int, float]] = {}
        for name, begin, end in self._marks:
            calls, seconds = sums.get(name, (0, 0.0))
            sums[name] = calls + 1, seconds + (end - begin if self._on_cpu else begin.elapsed_time(end) / 1e3)
        self._marks.clear()
        self._sums.append(sums)
        if (profiled := self._stop_profiler()) is not None or not self._on_cpu:
            if profiled is None:
                peak, self._reserved = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
                before = self._before or peak
            else:
                before, peak = (self._resident + max(live) for live in live_bytes(profiled, _UPDATE))
                self._profiled = len(self._sums)
            self._peak, self._graph = max(self._peak, peak), before - self._own
        if len(self._sums) == 1:
            self._warn()
        if len(self._sums) >= self._steps:
            self._end(write=True)
        elif not self._on_cpu or (len(self._sums) == 1 and _bytes_of(self._state()) > self._own):
            self._look()  # with the state that the first step has made
        self._start = perf_counter()

    def __str__(self) -> str:
        return run_text(self.data) if self.data else "no step was watched to its end"

    def _updates(self, optimizer: Optimizer, *_given: Any) -> None:
        """The optimizer begins: what it needs besides its state is no part of the graph."""
        self._optimizer = self._optimizer or optimizer
        if self._on_cpu:
            with record_function(_UPDATE):
                pass
        else:
            self._before = torch.accelerator.max_memory_allocated()

    def _look(self) -> None:
        """From here on memory is measured, until the step's end."""
        self._own, self._before = _bytes_of(self._state()), 0
        if not self._on_cpu:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
            return
        gc.collect()
        self._resident = _bytes_of(self._held()) + (self._planned or {}).get("batch_bytes", 0)
        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profiler.__enter__()

    def _stop_profiler(self) -> profile | None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.__exit__(None, None, None)
        return profiler

    def _end(self, *, write: bool) -> None:
        if self._stack is None:
            return
        self._stack.close()
        self._stack = None
        if write:
            self.data = self._measured()
            if self._to is not None:
                try:
                    write_whole(self._to, (json.dumps(self.data, indent=2, allow_nan=False) + "\n").encode())
                except OSError as error:  # the training goes on: it has its steps, and `data` what was measured
                    message = (
                        f"`{self._to}` cannot be written: {reason_of(error)}; the run's `data` has what was measured"
                    )
                    warnings.warn(message, PolicyWarning, stacklevel=3)

    def _mark(self) -> Any:
        if self._on_cpu:
            return perf_counter()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = self._mark()
        try:
            yield
        finally:
            self._marks.append((name, begin, self._mark()))

    def _hooks(self, module: nn.Module, path: str) -> tuple[RemovableHandle, RemovableHandle]:
        """Time the forward of a block; a checkpoint calls no module again, but what is inside of it."""
        begun: list[Any] = []

        def before(_module: nn.Module, _given: Any) -> None:
            if not torch.compiler.is_compiling():  # where Dynamo follows it, a clock would break the graph
                begun.append(self._mark())

        def after(_module: nn.Module, _given: Any, _made: Any) -> None:
            if not torch.compiler.is_compiling():
                self._marks.append((f"block {path}", begun.pop(), self._mark()))

        return module.register_forward_pre_hook(before), module.register_forward_hook(after)

    def _held(self) -> Iterator[torch.Tensor]:
        """Parameters, gradients, buffers and optimizer state: the memory in use before a step, without its batch."""
        for parameter in self._model.parameters():
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
        yield from self._model.buffers()
        yield from self._state()

    def _state(self) -> Iterator[torch.Tensor]:
        for own in () if self._optimizer is None else self._optimizer.state.values():
            yield from (each for each in own.values() if isinstance(each, torch.Tensor))

    def _warn(self) -> None:
        """Warn where the graph, without the optimizer's state, exceeds the recipe's ``expect peak``."""
        found = self._graph
        for limit in (self._planned or {}).get("limits", ()):
            if found > limit["bytes"]:
                assert self._planned is not None
                said = beside(found, limit["bytes"], "bytes")
                message = f"the first step took {said}, and `{limit['text']}` ({limit['source']}) allows less"
                planned = format_quantity(self._planned["peak_bytes"], "bytes")
                details = [f"planned: {planned}, at `{self._planned['peak_at']}`"]
                first = self._planned["at_peak"][:1]
                details += [f"most there by `{line['text']}` ({line['source']})" for line in first]
                help = "tune again for what was seen: `policylang tune --measured run.json`"
                problem = diagnose(BROKEN, message, help=help, details=tuple(details))
                warnings.warn(str(PolicyError([problem])), PolicyWarning, stacklevel=4)

    def _notes(self) -> Iterator[str]:
        """What these figures leave out."""
        kinds = {type(each).__name__ for each in self._model.modules()}
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several and "DistributedDataParallel" in kinds:
            yield "not seen: the collectives of DistributedDataParallel, which C++ starts"
        if several and any(map(is_compiled, self._model.modules())):
            yield "not seen: the collectives of compiled graphs, which C++ starts"
        if self._planned is not None and self._policy.pipeline is not None:
            yield "planned: one microbatch through the whole model, on one rank; `policylang plan` has each stage"

    def _measured(self) -> dict[str, Any]:
        timed = slice(self._profiled if self._profiled < len(self._sums) else 0, None)
        names = dict.fromkeys(name for sums in self._sums[timed] for name in sums)

        def per_step(name: str) -> tuple[int, float]:
            calls, seconds = zip(*(sums.get(name, (0, 0.0)) for sums in self._sums[timed]), strict=True)
            return max(calls), statistics.median(seconds)

        waits = [(name, *per_step(name)) for name in names if not name.startswith("block ")]
        kept: dict[str, int] = {}
        with suppress(PolicyError):  # where the policy has decided nothing, as without a checkpoint
            rules = report_on(self._model).rules
            kept = {each.source: each.saved_bytes for each in rules if each.saved_bytes is not None}
        return {
            "version": RUN_VERSION,
            "policy": self._name,
            "digest": digest_of([self._policy.canonical]),
            "device": "cpu" if self._on_cpu else str(torch.accelerator.current_accelerator()),
            "torch": torch.__version__,
            "steps": len(self._sums),
            "planned": self._planned,
            "notes": list(self._notes()),
            "measured": {
                "peak_bytes": self._peak,
                "graph_bytes": self._graph,
                "state_bytes": self._own,
                "reserved_bytes": None if self._on_cpu else self._reserved,
                "allocator_retries": None if self._on_cpu else _retries() - self._retries,
                "step_seconds": statistics.median(self._seconds[timed]),
                "exposed_seconds": sum(seconds for _, _, seconds in waits),
                "waits": [{"name": name, "calls": calls, "seconds": seconds} for name, calls, seconds in waits],
                "blocks": [
                    {"name": name.removeprefix("block "), "forward_seconds": per_step(name)[1]}
                    for name in names
                    if name.startswith("block ")
                ],
                "saved_bytes_by_line": kept,
            },
        }


def planned_figures(policy: Policy, graph: Any, path: PathName, device: DeviceLike | None) -> dict[str, Any]:
    """What a plan says of a step, as plain data. Raises ``PolicyMatchError`` where policy and graph do not fit."""
    facts, ordered = read_any(graph), scheduled(policy)
    if isinstance(ordered, Diagnostic):
        raise PolicyMatchError([ordered])
    made = plan(ordered, facts, capabilities_for(facts.kind, path), device=device_of(device))
    if errors := [each for each in made.diagnostics if is_error(each)]:
        raise PolicyMatchError(errors)
    needs, peak = saved_and_recomputed(made), values_at_peak(breakdown(made))
    by_rule = [0] * len(made.rules)
    for row, size in zip(needs.saved, saved_bytes(facts, needs.saved, made.decisions), strict=True):
        decided = made.decisions[row]
        if decided is not None and decided.rule is not None:
            by_rule[decided.rule] += size
    took = None if made.shown_times is None else step_time(made.facts, made.schedule, made.shown_times)
    rules = [each.rule for each in made.rules]
    return {
        "graph": fingerprint(facts),
        "device": None if made.shown_times is None else made.shown_times.device.name,
        "peak_bytes": peak.bytes,
        "peak_at": "" if peak.at is None else peak.at.node,
        "batch_bytes": sum(facts.bytes[row] for row, kind in enumerate(facts.input_kinds) if kind == InputKind.USER),
        "saved_bytes": needs.saved_bytes,
        "step_seconds": None if took is None else took.step,
        "exposed_seconds": None if took is None else took.exposed,
        "lines": [
            {"source": rule.source, "text": rule.text, "saved_bytes": size}
            for rule, size in zip(rules, by_rule, strict=True)
        ],
        "at_peak": [
            {"source": each.source, "text": each.rule, "bytes": each.bytes} for each in peak.shares if each.source
        ],
        "limits": [
            {"source": each.span.location, "text": each.span.text, "bytes": int(each.limit.value)}
            for each in policy.expectations
            if isinstance(each, ExpectTotal) and each.figure == "peak" and each.op in ("<=", "<")
        ],
    }


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages, each counted once; a DTensor counts with its local shard."""
    plain, _ = take_apart([each.detach() for each in tensors])
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in plain}
    return sum(storages.values())


def _retries() -> int:
    return int(torch.accelerator.memory_stats().get("num_alloc_retries", 0))


def live_bytes(profiled: profile, mark: str) -> tuple[list[int], list[int]]:
    """The bytes alive beyond those that were there, from change to change: until ``mark`` began, and all of them. The
    exported trace is the one public form of a profile that has every allocation, in order."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    ends = min((each["ts"] for each in events if each.get("name") == mark), default=inf)
    changes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each.get("name") == "[memory]")
    live = list(accumulate((size for _, size in changes), initial=0))
    return live[: 1 + sum(at < ends for at, _ in changes)], live
