"""The edge: exceptions, warnings, and what is imported for them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import policylang
from policylang.errors import PolicyError


def test_a_policy_comes_out() -> None:
    assert [rule.text for rule in policylang.parse("save mm; recompute every 2nd mm").rules] == [
        "save mm",
        "recompute every 2nd mm",
    ]
    assert policylang.load("llama3_sac").name == "llama3_sac"


def test_text_that_cannot_be_read_is_a_syntax_error_with_everything_that_is_wrong() -> None:
    with pytest.raises(policylang.PolicySyntaxError) as caught:
        policylang.parse("sav mm\nsave mn", name="mine.apl")
    assert [each.code for each in caught.value.diagnostics] == ["APL012", "APL101"]
    assert "mine.apl:1:1" in str(caught.value)
    assert "did you mean `save`?" in str(caught.value)


def test_text_that_means_nothing_is_an_error_of_meaning() -> None:
    with pytest.raises(policylang.PolicyMeaningError):
        policylang.parse("save mn")
    with pytest.raises(policylang.PolicyMeaningError, match="there is no policy file"):
        policylang.load("no_such_file.apl")


@pytest.mark.parametrize(
    ("given", "help"),
    [
        (None, 'for example `policylang.load("llama3_sac.apl")`'),
        (7, 'for example `policylang.load("llama3_sac.apl")`'),
        (b"llama3_sac", 'for example `policylang.load("llama3_sac.apl")`'),
        (policylang.parse("save mm"), "it is loaded already"),
    ],
)
@pytest.mark.parametrize("act", [policylang.load, policylang.parse])
def test_what_is_no_path_and_no_text_is_refused_by_name(act: Any, given: Any, help: str) -> None:
    with pytest.raises(policylang.PolicyMeaningError) as caught:
        act(given)
    (found,) = caught.value.diagnostics
    assert found.code == "APL104"
    assert f"and this is a `{type(given).__name__}`" in found.message
    assert found.help == help


@pytest.mark.parametrize(
    "text", ["save mm; recompute every 2nd mm", "save mm\nsave bmm\n", "save mm\n" * 5_000, "x" * 5_000]
)
def test_a_text_in_the_place_of_a_path_is_told_apart(text: str) -> None:
    with pytest.raises(policylang.PolicyMeaningError) as caught:
        policylang.load(text)
    (found,) = caught.value.diagnostics
    assert found.code == "APL103"
    assert len(found.message) < 300
    assert found.help == ("`policylang.parse` takes the text of a policy" if " " in text else None)


def test_an_empty_path_is_no_policy_and_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.apl").write_text("save mm")
    monkeypatch.chdir(tmp_path)
    assert [found.code for found in policylang.check("").diagnostics] == ["APL103"]
    assert policylang.check(".").files == ("mine.apl",)


def test_errors_survive_pickling() -> None:
    with pytest.raises(PolicyError) as caught:
        policylang.parse("save mn")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert again.diagnostics == caught.value.diagnostics


def test_warnings_are_warned_of() -> None:
    with pytest.warns(policylang.PolicyWarning, match="the name `big` is never used"):
        policylang.parse("let big = mm\nsave mm")


@pytest.mark.parametrize("act", ["policylang.parse('save matmul')", "policylang.load('llama3_sac')"])
def test_a_policy_is_read_without_importing_torch(act: str) -> None:
    code = f"import policylang, sys; {act}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_policy_without_a_file_is_checked_on_graphs() -> None:
    graph = Path(__file__).parents[2] / "docs" / "graphs" / "tutorial.graph"
    policy = policylang.parse("recompute everything in block\nsave topk in block", name="mine")
    alone = policylang.check(policy)
    assert (alone.files, alone.diagnostics) == ((policy.name,), ())
    found = policylang.check(policy, policylang.load("llama3_sac"), graph=graph)
    assert [(each.code, each.span and each.span.location) for each in found.diagnostics] == [("APL301", "mine:2")]
    assert found.files == (policy.name, "llama3_sac")
    assert len(found.plans) == 2


@pytest.mark.parametrize("given", [3, None, b"llama3_sac"])
def test_what_is_no_policy_is_a_diagnostic(given: Any) -> None:
    found = policylang.check(given)
    assert found.files == (f"<{type(given).__name__}>",)
    assert [each.code for each in found.diagnostics] == ["APL104"]
    assert f"`{type(given).__name__}`" in found.diagnostics[0].message
