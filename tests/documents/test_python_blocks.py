"""Every Python block of every page is run, as it stands there.

A page is a program that runs from top to bottom, in a folder with the bundled policies, those of the examples, and the
files that the page itself shows (``<!-- file: NAME -->``). Where a page takes names for granted, ``TAKEN_FOR_GRANTED``
has what makes them, anew before each block. A block that cannot be run says why in a line above it, which no reader of
the page sees: ``<!-- not run: REASON -->``.
"""

import functools
import re
import shutil
from pathlib import Path

import pytest
import torch

import policylang
from tests.support.drawn import slow

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

MODEL = """
import torch, policylang
from tests.documents.small_model import Model, loss_of
torch.manual_seed(0)
model, tokens = Model(), torch.randint(32, (2, 8))
"""
TAKEN_FOR_GRANTED = {
    "README.md": MODEL,
    "docs/adopting.md": MODEL
    + """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
""",
    "docs/agree.md": MODEL + "make_model, loss_fn = Model, loss_of",
    "docs/compile.md": MODEL
    + """
from torch._dynamo.backends.common import aot_autograd
compile_half = lambda gm, inputs: gm
""",
    "docs/measured.md": MODEL + "loss_fn, batch = loss_of, (tokens,)",
    "docs/pipelines.md": MODEL
    + """
gm = policylang.trace_step(model, loss_of, tokens).gm
remove_noops = bucket_collectives = lambda gm: gm
""",
    "docs/snapshots.md": MODEL
    + """
step = policylang.trace_step(model, loss_of, tokens)
gm = step.gm
model = torch.compile(model, backend=policylang.backend("save_all"))
model(tokens)
""",
    "docs/tuning.md": """
import policylang
from pathlib import Path
from tests.support.tuned import written
written(Path(), "llama3_8b.graph")
""",
    "docs/tutorial.md": MODEL,
    "docs/setups.md": """
import policylang, torch
from types import SimpleNamespace
from tests.support.models import llama
wrapped, (tokens,), _ = llama()
model, labels = wrapped.model, tokens
loss_fn = lambda model, tokens, labels: model(input_ids=tokens, labels=labels, use_cache=False).loss
mesh = None
data, arguments = [], None
# tests/distributed/test_setups.py runs the scripts of the rows, with what these two stand for.
fully_shard = lambda module, mesh: module
Trainer = lambda model, arguments, train_dataset: SimpleNamespace(train=loss_fn(model, tokens, labels).backward)
""",
    "docs/watching.md": MODEL
    + """
model = torch.compile(model, backend=policylang.backend("save_all"))
loss_of(model, tokens).backward()
""",
}
BEFORE_ONE = {
    'policylang.snapshot(step, "llama3_8b.graph", device="cuda")': """
def step(): return policylang.trace_step(Model(), loss_of, tokens)
loss_fn, batch = loss_of, (tokens,)
""",
    'policylang.snapshot(stages, "model.graph")': """
from tests.planning.test_pipelines import part
stages, batch = [part(1) for _ in range(3)], torch.randn(2, 8)
""",
    'step.apply("fsdp_tp.apl", mesh)': """
from pathlib import Path
Path("fsdp_tp.apl").write_text("include <llama3_sac>")  # the model here is not sharded
""",
    "PolicyAC.Config": """
from types import SimpleNamespace
import pytest
pytest.importorskip("torchtitan")
from policylang.integrations.torchtitan_eager import PolicyAC
config = SimpleNamespace()
""",
    'torchtitan.register("titan_graph.apl")': """
from policylang.integrations import torchtitan
from tests.support.titan import config as configuration, graph_trainer
graph_trainer("memory_policy")
config = configuration("default")
""",
}
"""The same, before the blocks that hold these words."""
MADE_ONCE = {
    "docs/snapshots.md": """
import torch
library = torch.library.Library("mylib", "FRAGMENT")
library.define("fused_mlp(Tensor x, Tensor w1, Tensor w2) -> Tensor")
""",
    "docs/compile.md": MODEL
    + """
from tests.support.joint import capture_joint
joint, joint_inputs, n, _ = capture_joint(model, (tokens,))
""",
    "docs/torchtitan.md": """
from tests.support.titan import config as configuration, graph_trainer
graph_trainer("memory_policy")  # skips where TorchTitan is not installed
config = configuration("default")
""",
}
"""The same, before the first block of a page alone."""
COMPARED = {"docs/eager.md", "docs/two-paths.md"}
"""Pages that have a test of their own, which runs their blocks and compares what they print."""


def pages() -> list[str]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found if BLOCK.search(path.read_text(encoding="utf-8")))


LONG = {"docs/snapshots.md", "docs/pipelines.md", "docs/setups.md", "docs/agree.md"}


@pytest.mark.parametrize("page", [*map(slow, sorted(LONG)), *sorted({*pages()} - COMPARED - LONG)])
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for policy in (*(ROOT / "policies").glob("*.apl"), *(ROOT / "examples").glob("*.apl")):
        shutil.copy(policy, tmp_path)
    for name, content in FILE.findall(text):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    # Inductor generates code and compiles it; what a block says of policylang is the same without.
    monkeypatch.setattr(policylang, "backend", functools.partial(policylang.backend, inner="aot_eager"))
    names: dict[str, object] = {"__name__": "page"}
    exec(MADE_ONCE.get(page, ""), names)
    for block in BLOCK.finditer(text):
        reason = (block["mark"] or "").removeprefix("not run: ")
        if reason != (block["mark"] or ""):
            assert reason.strip(), f"{page} does not say why a block is not run"
            continue
        torch.compiler.reset()
        exec(TAKEN_FOR_GRANTED.get(page, ""), names)
        for words, made in BEFORE_ONE.items():
            exec(made if words in block["code"] else "", names)
        run(block["code"], names, page)
    if isinstance(library := names.get("library"), torch.library.Library):
        library._destroy()  # other tests have no such operators


def run(code: str, names: dict[str, object], page: str) -> None:
    """A block, and what it leaves to be done: a line ``...`` is a step of training, a test is called."""
    code = re.sub(r"^\.\.\.$", "loss_of(model, tokens).backward()", code, flags=re.MULTILINE)
    before = set(names)
    exec(compile(code, page, "exec"), names)
    for name in sorted(set(names) - before):
        if name.startswith("test_"):
            names[name]()  # type: ignore[operator]


def test_a_page_that_is_left_out_has_a_test_that_reads_it() -> None:
    others = {*(ROOT / "tests" / "documents").rglob("*.py")} - {Path(__file__)}
    read = "".join(test.read_text(encoding="utf-8") for test in others)
    assert [page for page in COMPARED if f'"{Path(page).name}"' not in read] == []


def test_no_entry_is_about_a_page_that_has_no_blocks() -> None:
    assert {*TAKEN_FOR_GRANTED, *MADE_ONCE, *COMPARED} <= {*pages()}


def test_every_block_with_python_in_it_says_so() -> None:
    """Else it would not be run, nor highlighted."""
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        fences = re.findall(r"^ *(?:```|~~~)([^\n]*)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert not [words for words in fences if re.match(r"(py|python3|pycon)\b", words)], page
        assert not [words for words in fences if words.startswith("python ")], page
