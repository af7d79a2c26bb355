"""Operators without a FLOP formula, wherever a figure in FLOPs is printed or expected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

import policylang
from policylang.commands.cli import main
from policylang.testing import agree

POLICY = """policy {name}
blocks layers.*
recompute everything in block
{rules}expect recomputed flops <= 1%
"""
FUSED = "uncounted_here.fused.default"


class Layer(nn.Module):
    """A layer whose work is that of a custom operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.uncounted_here.fused(x.sin(), self.weight).cos()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).sum()


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[None]:
    library = torch.library.Library("uncounted_here", "DEF")
    library.define("fused(Tensor x, Tensor w) -> Tensor")
    library.impl("fused", lambda x, w: x @ w, "CompositeExplicitAutograd")
    torch.library.register_fake("uncounted_here::fused", lambda x, w: x.new_empty(x.shape[0], w.shape[1]), lib=library)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient

    torch.library.register_autograd(
        "uncounted_here::fused",
        backward,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=library,
    )
    yield
    library._destroy()


def compiled() -> Any:
    """The report on a model that was compiled and trained."""
    torch._dynamo.reset()
    text = POLICY.format(name="mine", rules="")
    backend = policylang.backend(policylang.parse(text.replace("flops <= 1%", "flops <= 90%")), inner="aot_eager")
    model = torch.compile(Model(), backend=backend)
    model(torch.randn(4, 8)).backward()
    return policylang.report(model), backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, library: None) -> Path:
    """A snapshot of the model's joint graph, and two policies."""
    folder = tmp_path_factory.mktemp("uncounted")
    report, backend = compiled()
    policylang.snapshot(backend, folder / "model.graph")
    (folder / "report.txt").write_text(str(report))
    (folder / "report.json").write_text(report.to_json())
    (folder / "mine.apl").write_text(POLICY.format(name="mine", rules=""))
    (folder / "saving.apl").write_text(POLICY.format(name="saving", rules="save uncounted_here.fused in block\n"))
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(list(arguments))
    return capsys.readouterr().out


def test_a_report_names_what_it_does_not_count(folder: Path) -> None:
    text, data = (folder / "report.txt").read_text(), json.loads((folder / "report.json").read_text())
    assert f"            and {FUSED} ×2 (no FLOP formula, so counted as 0)" in text
    assert data["uncounted"] == data["uncounted_recomputed"] == {FUSED: 2}
    (warning,) = data["warnings"]
    assert warning.startswith("<policy>:4: `expect recomputed flops <= 90%` does not count 2 calls of")
    assert "(APL332)" in warning


def test_a_plan_names_what_it_does_not_count(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    text = said(capsys, "plan", "mine.apl", "--graph", "model.graph", "--values")
    named = f"{FUSED} ×2 (no FLOP formula, so counted as 0)"
    assert f"uncounted in the forward: {named}; recomputed of them: {named}" in text
    assert "not counted" in next(line for line in text.splitlines() if line.strip().startswith(f"recomputed  {FUSED}"))
    data = json.loads(said(capsys, "plan", "mine.apl", "--graph", "model.graph", "--output-format", "json"))
    assert data["uncounted_operators"] == data["with"]["uncounted_operators"] == {FUSED: 2}
    data = json.loads(said(capsys, "plan", "saving.apl", "--graph", "model.graph", "--output-format", "json"))
    assert data["uncounted_operators"] == {FUSED: 2}
    assert data["with"]["uncounted_operators"] == {}
    assert "APL332" not in {each["code"] for each in data["diagnostics"]}
    said(capsys, "plan", "mine.apl", "--graph", "model.graph", "--html", "page.html")
    page = (folder / "page.html").read_text()
    assert "without FLOPs" in page
    assert f"{FUSED} ×2 (no FLOP formula, so counted as 0); 2 calls recomputed" in page


def test_an_expectation_over_what_is_not_counted_is_a_warning(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    text = said(capsys, "check", "mine.apl", "--graph", "model.graph")
    assert f"warning[APL332]: `expect recomputed flops <= 1%` does not count 2 calls of `{FUSED}`" in text
    assert "fused (uncounted_here.fused.default) in layers.0" in text
    assert "register_flop_formula" in text
    assert "APL332" not in said(capsys, "check", "saving.apl", "--graph", "model.graph")


def test_a_comparison_and_an_explanation_say_it_too(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(folder)
    text = said(capsys, "diff", "mine.apl", "saving.apl", "--graph", "model.graph")
    assert f"before: recomputed without {FUSED} ×2 (no FLOP formula, so counted as 0)" in text
    assert "after: recomputed without" not in text
    text = said(capsys, "diff", "mine.apl", "saving.apl", "--graph", "model.graph", "--output-format", "markdown")
    assert f"before: recomputed without {FUSED} ×2" in text
    text = said(capsys, "explain", "mine.apl", "--graph", "model.graph", "--node", "fused")
    assert "FLOPs not counted" in text


def test_a_registered_formula_is_used_when_facts_are_collected(folder: Path) -> None:
    register_flop_formula(torch.ops.uncounted_here.fused)(lambda x, w, **_: 2 * x[0] * x[1] * w[1])
    try:
        report, _ = compiled()
    finally:
        del flop_registry[torch.ops.uncounted_here.fused]
    assert report.uncounted == {}
    assert report.recomputed.flops == 2 * 2 * 4 * 8 * 8
    assert report.warnings == ()


class ChoosingLayer(Layer):
    """Another kernel where it is compiled, as the expert layers of Transformers have it."""

    def forward(self, x: Tensor) -> Tensor:
        fused = torch.ops.uncounted_here.fused
        return (fused(x, self.weight) if torch.compiler.is_compiling() else x @ self.weight).cos()


class ChoosingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ChoosingLayer() for _ in range(2))


def test_operators_that_one_path_alone_has_are_named_with_what_is_not_counted() -> None:
    policy = policylang.parse("blocks layers.*\nrecompute everything in block")
    x = torch.randn(4, 8)
    found = agree(ChoosingModel, lambda model, x: model(x), (x,), policy, paths=["eager", "joint"])
    assert found.agrees
    assert found.decisions.alone["eager"]["aten.mm.default"] == found.decisions.alone["joint"][FUSED] == 2
    text = str(found)
    assert re.search(r"eager alone: .*aten\.mm\.default ×2", text)
    assert f"joint without {FUSED} ×2 (no FLOP formula, so counted as 0)" in text


def test_a_formula_is_part_of_the_key_of_compiled_graphs() -> None:
    from policylang.backends.caching import formulas_key

    keys = [formulas_key()]
    for factor in (2, 3):
        register_flop_formula(torch.ops.uncounted_here.fused)(
            (lambda x, w, **_: 2 * x[0]) if factor == 2 else (lambda x, w, **_: 3 * x[0])
        )
        keys.append(formulas_key())
        del flop_registry[torch.ops.uncounted_here.fused]
    assert len(set(keys)) == 3
    assert formulas_key() == keys[0]
