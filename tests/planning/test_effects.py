"""A rule that decides values and changes nothing is told of: a tag nobody consumes."""

from __future__ import annotations

import pytest

from policylang.language.diagnostics import Severity
from tests.planning.sentences import planned
from tests.support.textgraph import facts_of

SAVED_VIEW = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) layers.0 bytes=128 flops=1024
    %view = aten.view.default(%mm) layers.0 bytes=128 view
    %sin = aten.sin.default(%view) layers.0 bytes=128
    %add = aten.add.Tensor(%sin, %x) layers.0 bytes=128
    ---
    %t = tangent
    %cos = aten.mul.Tensor(%t, %view)
    %mul = aten.mul.Tensor(%cos, %sin)
    output(%add, %mul)
"""


def effects(rules: str):
    return [found for found in planned(facts_of(SAVED_VIEW), rules).diagnostics if found.code == "APL309"]


def test_a_product_whose_view_is_saved_is_not_recomputed_and_the_rule_is_named():
    (found,) = effects("save everything; recompute mm")
    assert found.severity is Severity.WARNING
    assert found.message.endswith(
        "decides 1 forward value and changes nothing: the backward reads none of them: "
        "`view`, which reads `mm`, is saved in its place"
    )
    assert "from `mm` to `view`" in found.help


def test_a_save_that_the_backward_does_not_read_is_named_without_a_keeper():
    (found,) = effects("recompute everything; save add")
    assert "decides 1 forward value and changes nothing: the backward reads none of them" in found.message
    assert found.help == "remove the rule, or select the values that the backward reads"


@pytest.mark.parametrize(
    "rules",
    [
        "save everything; recompute mm; recompute view",
        "save everything; optional recompute mm",
        "recompute mm",  # min-cut may still call for it
    ],
)
def test_of_any_other_rule_nothing_is_said(rules: str):
    assert effects(rules) == []
