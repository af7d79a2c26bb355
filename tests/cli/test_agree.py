"""`policylang agree`: the same policy on every path, and how it says that it is not the same."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agree.md"

MODELS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def small():
    return Net(), lambda model, x: model(x).square().mean(), (torch.ones(4, 8),)

def broken():
    return Net(), lambda model, x: model(x, x), (torch.ones(4, 8),)
"""
POLICY = "policy mine\nblocks layers.*\nrecompute everything in block\nsave addmm in block\n"


@pytest.fixture
def agree(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("models_for_agree.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "models_for_agree", raising=False)

    def run(policy: str, *more: str, model: str = "models_for_agree:small"):
        Path("mine.apl").write_text(policy)
        return policylang("agree", "mine.apl", "--model", model, *more)

    return run


def test_paths_that_agree(agree):
    outcome = agree(POLICY)
    assert outcome.code == 0, outcome.out
    assert outcome.out.startswith("policy mine, one step, compared with the plain model: loss ")
    assert [line.split()[0] for line in outcome.out.splitlines()[2:6]] == ["path", "eager", "joint", "flat"]
    assert outcome.out.endswith("eager, joint and flat agree\n")
    assert "policylang agree: the joint path …\n" in outcome.err


def test_a_path_that_refuses(agree):
    outcome = agree("recompute everything\nsave every 2nd addmm per graph\n", "--path", "eager")
    assert outcome.code == 1
    assert "eager cannot apply it: APL306: mine.apl:2: " in outcome.out
    assert "Traceback" not in outcome.out + outcome.err


def test_json_of_the_paths_that_were_named(agree):
    outcome = agree(POLICY, "--path", "flat", "--output-format", "json")
    assert outcome.code == 0, outcome.err
    plain = json.loads(outcome.out)
    assert [path["path"] for path in plain["paths"]] == ["flat"]
    assert plain["agrees"] is True


def test_a_policy_with_a_mistake(agree):
    outcome = agree("save attenton\n")
    assert outcome.code == 1
    assert "`attenton`" in outcome.err


@pytest.mark.parametrize("model", ["models_for_agree:large", "no_such_module:small", "small"])
def test_a_model_there_is_not(agree, model):
    outcome = agree(POLICY, model=model)
    assert outcome.code == 2
    assert "help: name a function as `package.module:function`" in outcome.err


def test_a_model_that_does_not_run(agree):
    outcome = agree(POLICY, model="models_for_agree:broken")
    assert outcome.code == 1
    assert "policylang agree: `models_for_agree:broken` does not run" in outcome.err
    assert "TypeError" in outcome.err
    assert outcome.out == ""


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page shows the figures of torch 2.13")
def test_the_page_shows_what_the_command_prints(policylang):
    """All but the loss and what it says of bits, which may be another machine's."""
    outcome = policylang("agree", "llama3_sac")
    assert outcome.code == 0, outcome.out
    (shown,) = re.findall(r"^```\n(policy .*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert _figures(outcome.out) == _figures(shown)
    assert _account(outcome.out) == _account(shown)


def _figures(table: str) -> list[str]:
    """The rows of the paths, up to what is recomputed."""
    rows = re.findall(r"^(?:eager|joint|flat)  .*?FLOP", table, flags=re.MULTILINE)
    assert len(rows) == 3
    return rows


def _account(table: str) -> str:
    return table[table.index("decisions   ") :]
