"""The code in the compile caches' key: whatever runs while a graph is compiled, and nothing that only shows results."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from attrs import evolve

import policylang
from policylang.backends import caching
from policylang.backends.caching import acting_sources
from policylang.language.diagnostics import CODES, Severity
from policylang.planning.capabilities import PATHS, PathEntry
from tests.support.compiled import backend_for
from tests.support.joint import capture_joint
from tests.support.models import llama, mlp
from tests.support.process import python
from tests.tracing.test_against_eager import loss_of

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "policylang"
KEY = set(acting_sources(PACKAGE))
ALL = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
MOVES = "undecided -> recompute\noffload mm or addmm\n"


def file_of(path: PathEntry) -> str:
    module = path.implementation.partition(":")[0].removeprefix("policylang.")
    return f"{module.replace('.', '/')}.py"


@pytest.fixture
def run_of() -> Callable[..., set[str]]:
    """The files of the package in which a function of ours ran while another one did."""
    ran: set[str] = set()

    def watch(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    def run(action: Callable[[], object]) -> set[str]:
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            action()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        return {Path(name).relative_to(PACKAGE).as_posix() for name in ran if name.startswith(f"{PACKAGE}{os.sep}")}

    return run


def compiled(policy: str, inner: str = "aot_eager") -> Callable[[], object]:
    def train() -> None:
        torch._dynamo.reset()
        example = mlp()
        backend = backend_for(policy, inner)
        example.loss_fn(torch.compile(example.module, backend=backend)(*example.inputs)).backward()

    return train


def traced() -> None:
    example = mlp()
    step = policylang.trace_step(example.module, loss_of(example), *example.inputs)
    step.apply(policylang.parse(MOVES))(*example.inputs)


def partitioned_twice() -> None:
    example = mlp()
    joint = capture_joint(example.module, example.inputs, example.loss_fn)
    policylang.apply(joint.gm, policylang.parse("undecided -> recompute\nsave mm or addmm\n"))
    forward, _ = policylang.partition(joint.gm, (), num_fwd_outputs=joint.num_fwd_outputs)
    again = policylang.recompilable(forward, num_fwd_outputs=joint.num_fwd_outputs)
    inputs = [node.meta["val"] for node in forward.graph.find_nodes(op="placeholder")]
    inputs = [torch.ones(value.shape, dtype=value.dtype, requires_grad=value.is_floating_point()) for value in inputs]
    torch._dynamo.reset()
    backend = policylang.backend("replay", inner="aot_eager")
    outputs = torch.compile(again, backend=backend)(*inputs)
    next(value for value in outputs if value.requires_grad).sum().backward()


def checkpointed() -> None:
    example = llama(1)
    policylang.checkpoint_model(example.module, "torchtitan_full")
    example.loss_fn(example.module(*example.inputs)).backward()
    policylang.report(example.module)


@pytest.mark.parametrize(
    "action",
    [
        pytest.param(compiled("undecided -> auto\nsave mm or addmm\n"), id="compiled"),
        pytest.param(compiled(MOVES), id="compiled, offloading"),
        pytest.param(traced, id="traced, offloading"),
        pytest.param(partitioned_twice, id="partitioned twice", marks=pytest.mark.slow),
        pytest.param(checkpointed, id="checkpointed"),
    ],
)
def test_what_runs_while_a_graph_is_compiled_is_in_the_key(run_of, action) -> None:
    ran = run_of(action)
    assert "planning/planner.py" in ran
    assert ran - KEY == set()


PROGRAM = """
import json, sys, torch, policylang
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config

MOVES = policylang.parse("undecided -> recompute; offload mm or addmm")
SAVES = policylang.parse("blocks /1; undecided -> recompute; save tanh")
FUSES = policylang.parse("optional fuse all_gather chains")
made = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
batch = torch.ones(2, 4)

def train(model=made, **options):
    torch.compile(model, **options)(batch).sum().backward()

def keep(gm, inputs):
    return gm

def split(gm, inputs, **options):
    behind_a_hook = policylang.pass_(SAVES)
    with config.patch(joint_custom_post_pass=behind_a_hook):
        behind_a_hook(gm.graph)
    policylang.apply(gm, SAVES)
    return policylang.partition(gm, inputs, **options)

def fuse(gm, inputs):
    return policylang.pass_(FUSES)(gm)

def checkpointed():
    return policylang.checkpoint_model(made, SAVES)

for action in (
    lambda: train(backend=policylang.backend(MOVES, inner="aot_eager")),
    lambda: train(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=split)),
    lambda: train(backend=aot_autograd(fw_compiler=fuse, bw_compiler=fuse, partition_fn=policylang.partitioner(SAVES))),
    lambda: policylang.trace_step(made, lambda model, x: model(x).sum(), batch).apply(MOVES)(batch),
    lambda: checkpointed()(batch).sum().backward(),
    lambda: train(checkpointed(), backend=policylang.backend(SAVES, inner="aot_eager")),
):
    torch._dynamo.reset()
    action()
files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith("policylang")]
print(json.dumps(files))
"""


@pytest.mark.slow
def test_what_a_compile_imports_is_in_the_key(tmp_path: Path) -> None:
    """On every path, in a process that has imported nothing but what compiling needs."""
    done = python("-c", PROGRAM, cwd=tmp_path)
    imported = {Path(file).relative_to(PACKAGE).as_posix() for file in json.loads(done.stdout.splitlines()[-1])}
    acting = {f"audit/{name}.py" for name in ("graphs", "order")} | {"api/apply.py", "api/load.py"}
    assert {file_of(path) for path in PATHS} | acting <= imported
    assert imported - KEY == set()


REPORTED = {f"planning/inspection/{name}.py" for name in ("__init__", "breakdown", "communication", "costly", "worth")}
"""What a sidecar says of an order, and a check of a line's worth, is worked out there."""


def test_what_does_not_act_is_not() -> None:
    for room in ("commands", "testing", "planning/inspection", "tuning", "profiling"):
        assert [name for name in ALL if name.startswith(f"{room}/")]
        assert not [name for name in KEY - REPORTED if name.startswith(f"{room}/")]
    others = {
        *(f"report/{name}.py" for name in ("explain", "plan_comparison", "plan_page", "plan_text")),
        "__main__.py",
    }
    assert others <= ALL
    assert not KEY & others


def test_a_byte_of_what_acts_changes_the_files_and_no_other_does(tmp_path: Path) -> None:
    package = tmp_path / "policylang"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = acting_sources(package)
    assert before == acting_sources(PACKAGE)
    for name in sorted(ALL - KEY):
        (package / name).write_bytes(b"# another text\n")
    assert acting_sources(package) == before
    (package / "audit/graphs.py").write_bytes(before["audit/graphs.py"] + b"# a change\n")
    assert acting_sources(package) != before


def test_the_severity_of_a_code_is_in_the_key_and_its_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = caching.code_digest.__wrapped__
    before = digest()
    warning = CODES["APL309"]
    monkeypatch.setattr(caching, "CODES", {**CODES, "APL309": evolve(warning, text="Another text.")})
    assert digest() == before
    monkeypatch.setattr(caching, "CODES", {**CODES, "APL309": evolve(warning, severity=Severity.ERROR)})
    assert digest() != before


def test_a_new_module_is_found(tmp_path: Path) -> None:
    """However an import is written; what only commands import is left out."""
    texts = {
        "__init__.py": "",
        "backends/__init__.py": "",
        "backends/main.py": "from policylang import one\nfrom policylang.rooms import (\n    two,  # of 2\n    f,\n)\n",
        "one.py": "def f():\n    import policylang.three\n    from policylang.four import f as g\n",
        "rooms/__init__.py": "",
        "rooms/two.py": "import os, policylang.five as five\nLATER = 'x', \"policylang.rooms.eight:Class\"\n",
        "api/traced_step.py": "import policylang.seven\n",
        "rooms/eight.py": "",
        **dict.fromkeys(("three.py", "four.py", "five.py", "six.py", "seven.py"), ""),
        "commands.py": "from policylang import six\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "integrations").mkdir()
    assert set(acting_sources(tmp_path)) == set(texts) - {"commands.py", "six.py"}
