"""``torch.compile(backend="policylang", options=...)``: what it takes, and what a user reads who gets it wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import policylang
from policylang import PolicyMatchError, PolicyMeaningError, PolicySyntaxError
from tests.support.compiled import assert_bitwise_equal, train
from tests.support.models import counter, mlp

pytestmark = pytest.mark.usefixtures("nothing_compiled")


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    path = tmp_path / "products.apl"
    path.write_text("recompute everything\nsave matmul\n", encoding="utf-8")
    return path


def named(**options: Any) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, backend="policylang", options=options or None)


def run(**options: Any) -> None:
    model, inputs, _ = mlp()
    named(**options)(model)(*inputs)


def test_the_backend_is_found_by_name(policy_file: Path) -> None:
    assert "policylang" in torch._dynamo.list_backends()
    without = train(mlp())
    example = mlp()
    assert_bitwise_equal(train(example, named(policy=str(policy_file), inner="aot_eager")), without)
    report = policylang.report(example.module)
    assert [rule.text for rule in report.rules] == ["recompute everything", "save matmul"]
    assert report.saved.names


def test_a_changed_file_is_read_again(policy_file: Path) -> None:
    example = mlp()
    compiled = named(policy=policy_file, inner="aot_eager")
    example.loss_fn(compiled(example.module)(*example.inputs)).backward()
    policy_file.write_text("save everything\n", encoding="utf-8")
    torch._dynamo.reset()
    example.loss_fn(compiled(example.module)(*example.inputs)).backward()
    assert [rule.text for rule in policylang.report(example.module).rules] == ["save everything"]


@pytest.mark.parametrize(
    ("options", "code", "message", "help"),
    [
        ({}, "APL250", 'the backend "policylang" needs a policy', 'options={"policy": "llama3_sac.apl"}'),
        ({"policy": "/nowhere.apl"}, "APL103", "nowhere.apl", ""),
        ({"policy": "a.apl", "iner": ""}, "APL250", "unknown option `iner`", "did you mean `inner`?"),
        (
            {"policy": "save_all", "inner": "aot_eager", "max_autotune": True},
            "APL250",
            "unknown option `max_autotune`",
            "",
        ),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], code: str, message: str, help: str) -> None:
    with pytest.raises(PolicyMeaningError) as caught:
        run(**options)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == code
    assert message in diagnostic.message
    assert help in (diagnostic.help or "")


def test_a_file_that_is_not_a_policy(tmp_path: Path) -> None:
    path = tmp_path / "model.apl"
    path.write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(PolicySyntaxError) as caught:
        run(policy=path)
    assert caught.value.diagnostics[0].code == "APL001"


def test_all_the_errors_of_a_policy_reach_the_user(tmp_path: Path) -> None:
    path = tmp_path / "typos.apl"
    path.write_text("recompute everythin\nsave mmm\n", encoding="utf-8")
    with pytest.raises(PolicyMeaningError) as caught:
        run(policy=path)
    assert [diagnostic.span.text for diagnostic in caught.value.diagnostics] == ["everythin", "mmm"]
    text = str(caught.value)
    assert "did you mean" in text
    assert "TORCHDYNAMO" not in text
    assert "BackendCompilerFailed" not in text


def test_what_passes_through_dynamo_is_the_same_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyMeaningError) as caught:
        run(policy=tmp_path / "nowhere.apl")
    error = caught.value
    assert type(error).__name__ == "PolicyMeaningError"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is PolicyMeaningError
    assert copy.diagnostics == error.diagnostics
    assert str(copy) == str(error)


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(PolicyMeaningError) as caught:
        run(policy=3, inner="nvcc", root=0)
    assert [diagnostic.message for diagnostic in caught.value.diagnostics] == [
        "the option `policy` is a path, not a int",
        "unknown inner compiler `nvcc`",
        "the option `root` is a module path, not a int",
    ]


def test_a_mode_that_does_not_exist(policy_file: Path) -> None:
    model, inputs, _ = mlp()
    with pytest.raises(PolicyMeaningError, match="warp-speed"):
        torch.compile(model, backend=policylang.backend(policy_file), mode="warp-speed")(*inputs)


@pytest.mark.parametrize("asked", ["mode", "option", "setting"])
def test_no_cuda_graph_captures_copies_to_the_host(asked: str, tmp_path: Path) -> None:
    file = tmp_path / "moved.apl"
    file.write_text("undecided -> save\noptional offload mm, addmm\n", encoding="utf-8")
    backend, mode = policylang.backend(file), "reduce-overhead" if asked == "mode" else None
    options = {"triton.cudagraphs": True} if asked == "option" else None
    model, inputs, _ = mlp()
    set_to = torch._inductor.config.patch({"triton.cudagraphs": asked == "setting"})
    with set_to, pytest.raises(PolicyMeaningError) as caught:
        torch.compile(model, backend=backend, mode=mode, options=options)(*inputs)
    (found,) = caught.value.diagnostics
    assert (found.code, found.span and found.span.line) == ("APL338", 2)
    assert "which no CUDA graph captures" in found.message
    torch.compile(model, backend=policylang.backend(file), options={"triton.cudagraphs": False})(*inputs)


def test_a_mode_alone_is_told_where_modes_go() -> None:
    model, inputs, _ = mlp()
    with pytest.raises(PolicyMeaningError, match="needs a policy") as caught:
        torch.compile(model, backend="policylang", mode="reduce-overhead")(*inputs)
    assert 'backend=policylang.backend("llama3_sac.apl"), mode="reduce-overhead"' in str(caught.value)


def test_backend_checks_its_own_arguments(policy_file: Path) -> None:
    with pytest.raises(PolicyMeaningError, match="unknown inner compiler `nvcc`"):
        policylang.backend(policy_file, inner="nvcc")


def test_what_cannot_be_recomputed_is_raised_at_once() -> None:
    model, inputs, _ = counter()
    backend = policylang.backend(policylang.parse("recompute everything"), inner="aot_eager")
    with pytest.raises(PolicyMatchError) as caught:
        torch.compile(model, backend=backend)(*inputs)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL304"
    assert "optional recompute everything" in str(diagnostic.help)
