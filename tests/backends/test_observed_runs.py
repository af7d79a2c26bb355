"""What logs, traces and reports of a training say of its policy, of shared code too, while the collector pauses."""

import gc
import json
import logging
from base64 import b64decode
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import policylang
from policylang.audit.report import AuditReport, Report, ValuesReport
from policylang.backends import joint as module
from policylang.backends import runtime
from policylang.backends.eager import plan_modes
from policylang.backends.torch_compile import backend
from policylang.commands.small_llama import step_memory
from policylang.graph import marks, snapshot
from policylang.language.cancellation import collector_paused
from tests.support.compiled import backend_for, fresh_dynamo
from tests.support.models import Function, Layers
from tests.support.process import python
from tests.support.run_partition import partitioner, traced

SAVES = "blocks layers.*\nrecompute everything in block\nsave addmm in block\n"
MOVES = "blocks layers.*\nundecided -> save\noffload addmm in block\n"


def Model() -> Layers:
    torch.manual_seed(0)
    blocks = (Function(lambda layer, x: layer.linear(x).sin().cos(), linear=nn.Linear(8, 8)) for _ in range(2))
    return Layers(*blocks, end=torch.sum)


X = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
Step = Callable[[], list[Tensor]]


def eager(text: str) -> Step:
    model = Model()
    policylang.checkpoint_model(model, policylang.parse(text))
    return lambda: list(torch.autograd.grad(model(X), list(model.parameters())))


def compiled(text: str) -> Step:
    torch._dynamo.reset()
    model = Model()
    run = torch.compile(model, backend=backend_for(text))
    return lambda: list(torch.autograd.grad(run(X), list(model.parameters())))


def flat(text: str) -> Step:
    step = policylang.trace_step(Model(), lambda model, x: model(x), X).apply(policylang.parse(text))
    return lambda: list(step(X)[1].values())


Profiled = Callable[[Step], tuple[dict[str, int], list[Tensor]]]


def by_torch(step: Step) -> tuple[dict[str, int], list[Tensor]]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        gradients = step()
    named = (each for each in seen.key_averages() if each.key.startswith("policylang: "))
    return {each.key.removeprefix("policylang: "): each.count for each in named}, gradients


def stood_in(step: Step) -> tuple[dict[str, int], list[Tensor]]:
    """Torch's profiler takes seconds to start."""
    found: Counter[str] = Counter()

    def named_range(name: str) -> AbstractContextManager[None]:
        found[name.removeprefix("policylang: ")] += 1
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        for module in (runtime, plan_modes, backend):
            patch.setattr(module, "is_profiling", lambda: True)
            patch.setattr(module, "named_range", named_range)
        gradients = step()
    return dict(found), gradients


profilers = pytest.mark.parametrize("ranges", [stood_in, pytest.param(by_torch, marks=pytest.mark.slow)])


@profilers
@pytest.mark.parametrize("path", [eager, compiled, flat])
def test_a_profile_has_what_runs_again_by_its_line_and_not_a_bit_is_other(path, ranges) -> None:
    step = path(SAVES)
    before = step()
    found, gradients = ranges(step)
    again = found.pop("recompute, <policy>:2")
    assert again >= 2  # the sine of either layer; eager counts an operator that no gradient flows through, too
    assert all(name.startswith("graph 0 (") and name.endswith("), policy policy") for name in found)
    assert len(found) == (path is compiled)
    assert all(map(torch.equal, before, gradients))
    assert all(map(torch.equal, before, step()))


@profilers
@pytest.mark.parametrize("path", [compiled, flat])
def test_a_profile_has_the_copies_by_their_line(path: Callable[[str], Step], ranges: Profiled) -> None:
    step = path(MOVES)
    before = step()
    found, gradients = ranges(step)
    line = "<policy>:3"
    copies = {name: count for name, count in found.items() if not name.startswith("graph 0")}
    assert copies == {f"copy to the host, {line}": 2, f"copy from the host, {line}": 2, f"wait for a copy, {line}": 4}
    assert all(map(torch.equal, before, gradients))


def test_a_fused_collective_has_the_range_of_its_line() -> None:
    asked_for = runtime.asked_for
    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.sin.default, (graph.placeholder("x"),))
    assert asked_for(node) is None
    node.meta["custom"] = {marks.PROVENANCE: "a.apl:1"}
    assert asked_for(node) is None
    assert asked_for(node, is_backward=True) == "policylang: recompute, a.apl:1"
    node.meta["custom"] = {marks.REWRITTEN: "mesh.apl:3"}
    assert asked_for(node) == "policylang: fused collective, mesh.apl:3"


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[int], list[str]]:
    def at(level: int) -> list[str]:
        return [each.getMessage() for each in caplog.records if each.name == "policylang" and each.levelno == level]

    return at


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        (eager, ["policy on layers.0 of ", "policy on layers.1 of "]),
        (compiled, ["policy on a joint graph of "]),
        (flat, ["policy on a flat graph of "]),
    ],
)
def test_the_log_has_one_line_a_graph(path: Any, lines: list[str], messages: Any, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "policylang"):
        path(SAVES)()
    said = messages(logging.INFO)
    assert len(said) == len(lines)
    for line, start in zip(said, lines, strict=True):
        assert line.startswith(start)
        assert line.endswith("audit agrees")
        assert "saved" in line
    assert messages(logging.DEBUG) == []


def test_the_rest_of_the_log_is_for_debugging(messages: Any, caplog: Any) -> None:
    with caplog.at_level(logging.DEBUG, "policylang"):
        compiled(SAVES)()
    (report,) = messages(logging.DEBUG)
    assert report.startswith("policy policy: ")
    assert "<policy>:2  recompute everything in block" in report
    assert "\nseconds     collect " in report


def test_nothing_is_worked_out_where_nobody_listens(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from policylang.backends import applied_plans

    monkeypatch.setattr(applied_plans, "findings_of", lambda done: pytest.fail("a report was made for nobody"))
    with caplog.at_level(logging.WARNING, "policylang"):
        flat(SAVES)()


def test_a_graph_from_a_compile_cache_has_its_line_too(messages: Any, caplog: Any) -> None:
    from policylang.backends.applied_plans import announce_cached

    with caplog.at_level(logging.INFO, "policylang"):
        announce_cached(Report("mine", forward_nodes=10, saved=ValuesReport(("a",), 1024), audit=AuditReport(True)))
    (line,) = messages(logging.INFO)
    assert line == "mine on a graph from the compile cache: 10 forward values, 1 KiB in 1 value saved, audit agrees"


class _Trace(logging.Handler):
    """Stands where the handler of ``TORCH_TRACE`` would."""

    root_dir = "here"

    def __init__(self) -> None:
        super().__init__()
        self.artifacts: dict[str, Any] = {}

    def emit(self, record: Any) -> None:
        artifact = record.metadata.get("artifact")
        if artifact is not None:
            self.artifacts[artifact["name"]] = record.payload


def test_a_trace_has_the_report_the_page_and_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._logging._internal import trace_log

    trace = _Trace()
    monkeypatch.setattr(trace_log, "handlers", [trace])
    monkeypatch.setattr(trace_log, "disabled", False)
    flat(SAVES)()
    found = {name: payload for name, payload in trace.artifacts.items() if name.startswith("policylang")}
    _check_artifacts(found, "flat")


def _check_artifacts(found: Any, kind: str) -> None:
    assert json.loads(found["policylang_report"])["policy"] == "policy"
    assert "recompute everything in block" in found["policylang_report_text"]
    assert found["policylang_plan_page"].startswith("<!doctype html>")
    assert snapshot.parse(b64decode(found["policylang_snapshot"]), "trace").kind.value == kind


CODE = """
import policylang, torch
from tests.backends.test_observed_runs import SAVES, compiled, eager
compiled(SAVES)()
eager(SAVES)()
"""


@pytest.mark.slow
def test_torch_logs_and_torch_trace_have_it(tmp_path: Path) -> None:
    """In another process: torch reads both variables when it is imported."""
    done = python("-c", CODE, TORCH_TRACE=str(tmp_path), TORCH_LOGS="policylang")
    assert done.stderr.count("policy on a joint graph of ") == 1
    assert done.stderr.count("policy on layers.") == 2
    (file,) = tmp_path.glob("*.log")
    found = _artifacts(file.read_text())
    assert [name for name, _ in found].count("policylang_report") == 3  # the compiled graph, and each block
    _check_artifacts(dict(reversed(found)), "joint")


def _artifacts(text: str) -> list[tuple[str, str]]:
    """Of torch's structured trace: a record a line, and below it, indented by a tab, its payload."""
    found: list[tuple[str, list[str]]] = []
    for line in text.split("\n"):
        if line.startswith("\t") and found:
            found[-1][1].append(line[1:])
        elif "] {" in line:
            record = json.loads(line[line.index("] {") + 2 :])
            found.append((record.get("artifact", {}).get("name", ""), []))
    return [(name, "\n".join(payload)) for name, payload in found if name.startswith("policylang")]


POLICY = policylang.parse("recompute everything in block; save matmul in block")
BLOCKS, WIDTH, ROWS = 4, 16, 8
STATE = ROWS * WIDTH * 4
"""Bytes of what one block hands to the next, which the next one keeps as its input."""


def block() -> nn.Module:
    up, down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
    return Function(lambda block, x: x + block.down(block.up(x.tanh()).sin()), up=up, down=down)


def Stack(blocks: int = BLOCKS) -> Layers:
    return Layers(*(block() for _ in range(blocks)))


def checkpointed(model: Layers) -> Callable[..., object]:
    policylang.checkpoint_model(model, POLICY)
    return policylang.backend(POLICY, inner="aot_eager")


def in_place(model: Layers) -> None:
    backend = checkpointed(model)
    for layer in model.layers:
        layer.compile(backend=backend)


def replaced(model: Layers) -> None:
    backend = checkpointed(model)
    for name, layer in list(model.layers.named_children()):
        model.layers.register_module(name, torch.compile(layer, backend=backend))


def beside_eager(model: Layers) -> None:
    backend = checkpointed(model)
    for layer in model.layers[1:3]:
        layer.compile(backend=backend)


def without_checkpoints(model: Layers) -> None:
    backend = policylang.backend(POLICY, inner="aot_eager", root="layers.0")
    for layer in model.layers:
        layer.compile(backend=backend)


def a_backend_a_half(model: Layers) -> None:
    for half in (model.layers[:2], model.layers[2:]):
        backend = policylang.backend(POLICY, inner="aot_eager", root="layers.0")
        for layer in half:
            layer.compile(backend=backend)


def step(model: nn.Module) -> tuple[Report, int]:
    """The report after a step, and the bytes that a step keeps from its forward to its backward."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    model(x).sum().backward()
    resident = [*model.parameters(), x, *(each.grad for each in (*model.parameters(), x))]
    saved = step_memory(lambda: model(x).sum(), resident, torch.device("cpu")).saved
    return policylang.report(model), saved


WAYS = [in_place, replaced, beside_eager, without_checkpoints, a_backend_a_half]


@pytest.mark.parametrize("compiled", WAYS)
def test_the_report_holds_what_a_step_of_the_model_keeps(compiled: Callable[[Layers], None]) -> None:
    with fresh_dynamo():
        model = Stack()
        compiled(model)
        report, kept = step(model)
    assert report.blocks == BLOCKS
    assert report.saved.bytes == kept - (BLOCKS - 1) * STATE  # each block's input is none of its values
    assert report.audit.agrees


def test_each_model_on_a_backend_counts_its_own_blocks_and_the_backend_all_that_live(tmp_path: Path) -> None:
    with fresh_dynamo():
        backend = policylang.backend(POLICY, inner="aot_eager", root="layers.0")
        small, large = Stack(2), Stack(5)
        for model in (small, large):
            for layer in model.layers:
                layer.compile(backend=backend)
            step(model)
        assert len(backend.graphs) == 1
        assert [policylang.report(each).blocks for each in (small, large, backend)] == [2, 5, 7]
        assert policylang.report(large.layers[0]).blocks == 1
        assert len(policylang.snapshot(large, tmp_path / "one.graph")) == 1  # a graph is a file, whoever runs it
        del model, layer, large
        gc.collect()
        assert policylang.report(backend).blocks == 2


def test_blocks_that_a_later_backend_compiles_count_for_that_one() -> None:
    with fresh_dynamo():
        model = Stack()
        without_checkpoints(model)
        step(model)
        other = policylang.backend("save_all", inner="aot_eager")
        for layer in model.layers[2:]:
            layer.compile(backend=other)
        report, _ = step(model)
    assert sorted(each.policy for each in report.graphs) == ["policy", "policy", "save_all", "save_all"]


def test_a_model_compiled_whole_counts_once() -> None:
    with fresh_dynamo():
        model = Stack()
        compiled = torch.compile(model, backend=policylang.backend(POLICY, inner="aot_eager"))
        step(compiled)
        assert [policylang.report(each).blocks for each in (model, compiled)] == [BLOCKS, BLOCKS]
        assert not policylang.report(compiled).graphs


@pytest.mark.parametrize("enabled", [True, False])
def test_it_is_as_it_was_after_an_error_too(enabled: bool):
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ValueError, match="inside"), collector_paused():
            raise ValueError("inside" if not gc.isenabled() else "not paused")
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_a_graph_is_split_without_it(monkeypatch):
    seen: list[bool] = []
    split = module.split

    def watched(*arguments, **options):
        seen.append(gc.isenabled())
        return split(*arguments, **options)

    monkeypatch.setattr(module, "split", watched)
    assert traced("mlp").partition(partitioner("recompute everything")).audit.agrees
    assert seen
    assert not any(seen)
    assert gc.isenabled()
