"""The audit of an eager checkpoint has to name what is held otherwise: each test holds something else by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.audit.graphs import audit_eager
from policylang.audit.outcome import Audit
from policylang.backends.eager import region
from policylang.language.diagnostics import Severity

POLICY = "recompute everything\nsave sin"
Held = dict[int, Sequence[Tensor]]


class Block(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().cos().exp().tanh()


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    """What the audit of one call was given."""
    seen: list[tuple[Any, ...]] = []

    def noted(plan: Any, needs: Any, held: Mapping[int, Sequence[Tensor]], outside: Sequence[Tensor]) -> Audit:
        seen.append((plan, needs, dict(held), list(outside)))
        return audit_eager(plan, needs, held, outside)

    monkeypatch.setattr(region, "audit_eager", noted)
    model = policylang.checkpoint_model(nn.Sequential(Block()), policylang.parse("blocks *\n" + POLICY), strict=True)
    model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    yield from seen


def named(plan: Any, name: str) -> int:
    return int(plan.facts.index[name])


def test_agrees_with_what_a_block_holds(audited: tuple[Any, ...]) -> None:
    found = audit_eager(*audited)
    assert found.agrees
    assert found.saved == ("sin",)
    assert found.saved_bytes == 64
    assert found.recomputed == ("cos", "exp", "tanh")


def test_names_a_saved_value_that_is_not_held(audited: tuple[Any, ...]) -> None:
    plan, needs, held, outside = audited
    del held[named(plan, "sin")]
    found = audit_eager(plan, needs, held, outside).differences
    assert [(each.code, each.message, each.help) for each in found] == [
        ("APL402", "`sin` (aten.sin.default) is not held, and the plan saves it", "this is a bug in policylang"),
        ("APL409", "the checkpoint holds 0 bytes, and the plan has 64", found[1].help),
    ]
    assert found[0].span is None
    assert found[0].severity is Severity.ERROR
    assert found[1].severity is Severity.WARNING


def test_names_a_recomputed_value_that_is_held(audited: tuple[Any, ...]) -> None:
    plan, needs, held, outside = audited
    held[named(plan, "cos")] = [torch.zeros(4, 4)]
    found = audit_eager(plan, needs, held, outside).differences
    assert [(each.code, each.message) for each in found] == [
        ("APL401", "`cos` (aten.cos.default) is held, and the plan does not save it"),
        ("APL409", "the checkpoint holds 128 bytes, and the plan has 64"),
    ]


def test_one_memory_counts_once_and_what_is_there_anyway_not_at_all(audited: tuple[Any, ...]) -> None:
    plan, needs, held, outside = audited
    row = named(plan, "sin")
    (value,) = held[row]
    assert audit_eager(plan, needs, {**held, row: [value, value.t()]}, outside).agrees
    found = audit_eager(plan, needs, held, [*outside, value.view(-1)])
    assert [each.code for each in found.differences] == ["APL409"]
