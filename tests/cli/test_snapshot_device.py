"""`policylang snapshot --device cuda`, and `device="cuda"` in Python: a snapshot for a GPU that is not there."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

import policylang as library
from policylang.graph.traced_device import attention_kernels, traced_on

STEP = """\
import torch
import torch.nn.functional as F
from torch import nn

import policylang


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(32, 96, dtype=torch.bfloat16), dropout

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout).transpose(1, 2).flatten(2)


def traced(device, dropout=0.0):
    with torch.device(device):
        model, x = Block(dropout), torch.zeros(2, 16, 32, dtype=torch.bfloat16)
    return policylang.trace_step(model, lambda model, x: model(x).float().mean(), x)


def on_cpu():
    return traced("cpu")


def on_meta():
    return traced("meta")


def with_dropout():
    return traced("cpu", 0.1)


def under_autocast():
    model, x = nn.Linear(8, 8), torch.zeros(2, 8)
    with torch.autocast("cuda", torch.bfloat16):
        return policylang.trace_step(model, lambda model, x: model(x).float().mean(), x)


def compiled():
    model = nn.Linear(4, 4)
    compiled = torch.compile(model, backend=policylang.backend(policylang.parse("save everything"), inner="aot_eager"))
    compiled(torch.ones(2, 4)).sum().backward()
    return compiled
"""
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU chooses for itself")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "device_steps.py").write_text(STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("device_steps", None)


def kernels(path: str = "m.graph") -> list[str]:
    return list(attention_kernels(library.load_snapshot(path)))


def test_from_the_command_line(policylang):
    done = policylang("snapshot", "device_steps:on_meta", "-o", "m.graph", "--device", "cuda")
    nodes = len(library.load_snapshot("m.graph"))
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"m.graph: flat graph of {nodes} nodes, {Path('m.graph').stat().st_size:,} bytes\n"
        "traced as on cuda, compute capability 9.0; attention: 1 × aten._scaled_dot_product_cudnn_attention.default\n"
    )
    assert policylang("check", "llama3_sac", "--graph", "m.graph").out.count("APL319") == 0
    done = policylang("snapshot", "device_steps:on_cpu", "-o", "m.graph", "--compute-capability", "8.0")
    assert done.code == 0
    assert kernels() == ["aten._scaled_dot_product_flash_attention.default"]
    done = policylang("snapshot", "device_steps:on_meta", "-o", "m.graph", "--device", "cpu")
    assert (done.code, done.err, kernels()) == (0, "", ["aten._scaled_dot_product_flash_attention_for_cpu.default"])


def test_a_snapshot_of_other_kernels_is_said_to_be_one(policylang):
    done = policylang("snapshot", "device_steps:on_meta", "-o", "m.graph")
    assert done.code == 0
    assert "warning[APL319]: the graph was traced on `meta`" in done.err
    assert policylang("check", "llama3_sac", "--graph", "m.graph", "--deny", "warnings").out.count("APL319") == 1
    assert "APL319" in policylang("plan", "llama3_sac", "--graph", "m.graph").out
    done = policylang("snapshot", "device_steps:with_dropout", "-o", "m.graph")
    assert "note[APL320]: 1 attention is written out in bmm and softmax, as the CPU runs it" in done.err
    assert policylang("snapshot", "device_steps:with_dropout", "-o", "m.graph", "--device", "cpu").err == ""
    assert policylang("snapshot", "device_steps:on_cpu", "-o", "m.graph").err == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("on_cpu", "--device", "tpu"), 2, "no step can be traced as on `tpu`"),
        (("on_cpu", "--device", "h100-sxm"), 2, "given to what shows times, as `policylang plan --device` does"),
        (("on_cpu", "--device", "cuda", "--compute-capability", "9"), 2, "`9` is no compute capability"),
        (("on_cpu", "--device", "cpu", "--compute-capability", "9.0"), 2, "belongs to a GPU"),
        (("compiled", "--device", "cuda"), 1, "error[APL614]: the graph was traced on `cpu`"),
    ],
)
def test_what_cannot_be_done(policylang, arguments, code, said):
    function, *options = arguments
    done = policylang("snapshot", f"device_steps:{function}", "-o", "m.graph", *options)
    assert done.code == code
    assert said in done.err
    assert not Path("m.graph").exists()


def test_from_python():
    import device_steps  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library.snapshot(device_steps.on_meta, "m.graph", device="cuda", compute_capability=(8, 0))
        assert kernels() == ["aten._scaled_dot_product_flash_attention.default"]
        library.snapshot(device_steps.on_meta, "m.graph", compute_capability="10.0")
        assert kernels() == ["aten._scaled_dot_product_cudnn_attention.default"]
        library.snapshot(device_steps.under_autocast, "m.graph", device="cuda")
        facts = library.load_snapshot("m.graph")
        assert [facts.dtypes[row] for row in facts.by_target["aten.addmm.default"]] == ["bfloat16"]
        library.snapshot(device_steps.with_dropout, "m.graph", device=torch.device("cpu"))
        assert (kernels(), traced_on(library.load_snapshot("m.graph"))) == (["aten._safe_softmax.default"], {"cpu"})
    with pytest.warns(library.PolicyWarning, match="APL320"):
        library.snapshot(device_steps.with_dropout(), "m.graph")
    with pytest.warns(library.PolicyWarning, match="traced on `meta`.*APL319.*--device cuda"):
        library.snapshot(device_steps.on_meta(), "m.graph")
    with pytest.raises(library.PolicyGraphError, match=r"APL614(?s:.*)pass the function"):
        library.snapshot(device_steps.on_cpu(), "m.graph", device="cuda")
