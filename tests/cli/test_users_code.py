"""Code of the user's that a command runs: what goes wrong in it is the user's, and is shown from there on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

MODELS = """\
import functools
import sys

import torch
from torch import nn

import policylang


def boom():
    return build(3)


def build(layers):
    raise KeyError("layers")


def chained():
    try:
        build(3)
    except KeyError as error:
        raise ValueError("no such model") from error


def needs(size):
    return size


def leaves():
    sys.exit(0)


def no_memory():
    raise MemoryError


def too_large():
    return torch.empty(2**62, dtype=torch.uint8)


def gone():
    raise BrokenPipeError


@torch.no_grad()
def decorated():
    raise KeyError("inside torch's wrapper")


def bad_policy():
    return policylang.parse("save attenton", name="theirs.apl")


def no_policy():
    return policylang.load("nowhere.apl")


class Net(nn.Module):
    def forward(self, x):
        return x["tokens"]


def untraceable():
    return policylang.trace_step(Net(), lambda model, x: model(x).sum(), torch.ones(2))


def stopped():
    raise KeyboardInterrupt


def wrong_model():
    return Net(), lambda model, x: model(x), torch.ones(2)


def not_scalar():
    return nn.Linear(2, 2), lambda model, x: model(x), torch.ones(2)


def nothing():
    return None


MADE = nn.Linear(2, 2)


def same():
    return MADE, lambda model, x: model(x).sum(), torch.ones(2)


made = []


def second_fails():
    made.append(1)
    if len(made) > 1:
        raise KeyError("the second model")
    return nn.Linear(2, 2), lambda model, x: model(x).sum(), torch.ones(2)
"""
BUG = "bug in policylang"


@pytest.fixture
def run(policylang, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    Path("users_models.py").write_text(MODELS)
    Path("mine.apl").write_text("policy mine\nrecompute everything\n")

    def run(command: str, function: str, module: str = "users_models"):
        name = f"{module}:{function}"
        if command == "snapshot":
            return policylang("snapshot", name, "-o", "x.graph")
        return policylang("agree", "mine.apl", "--model", name, "--path", "flat")

    yield run
    for name in set(sys.modules) - before:
        if name.startswith("users_"):
            del sys.modules[name]


def theirs(outcome, *last: str) -> str:
    """What is shown: a traceback without a frame of ours."""
    assert (outcome.code, outcome.out) == (1, "")
    assert BUG not in outcome.err
    assert "policylang/" not in outcome.err.replace("policylang/tests", "")
    assert not Path("x.graph").exists()
    for said in last:
        assert said in outcome.err
    return outcome.err


@pytest.mark.parametrize("command", ["snapshot", "agree"])
def test_their_traceback_from_their_first_frame_on(run, command):
    shown = theirs(run(command, "boom"), f"policylang {command}: `users_models:boom` does not run\nhelp: ").splitlines()
    start = shown.index("Traceback (most recent call last):")
    assert shown[start + 1].endswith('users_models.py", line 11, in boom')
    assert "KeyError: 'layers'" in shown


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("chained", "ValueError: no such model"),
        ("needs", "TypeError: needs() missing 1 required positional argument: 'size'"),
        ("no_memory", "MemoryError"),
        ("too_large", "RuntimeError: "),
        ("gone", "BrokenPipeError"),
        ("leaves", "SystemExit: 0"),
    ],
)
def test_whatever_it_raises(run, function, said):
    assert theirs(run("snapshot", function), said).count(f"`users_models:{function}` does not run") == 1


def test_what_caused_an_error_is_shown_as_well(run):
    shown = theirs(run("snapshot", "chained"))
    assert shown.index("KeyError: 'layers'") < shown.index("The above exception was the direct cause")


def test_a_wrapper_of_torch_is_not_their_first_frame(run):
    shown = theirs(run("snapshot", "decorated"), 'KeyError: "inside torch\'s wrapper"')
    assert "_contextlib.py" not in shown


def test_an_interruption_is_none(run):
    assert run("snapshot", "stopped").code == 130


@pytest.mark.parametrize("command", ["snapshot", "agree"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("import sys\nsys.exit(0)\n", "it ends the process"),
        ("1 / 0\n", "ZeroDivisionError"),
        ("def __getattr__(name):\n    raise RuntimeError(name)\n", "RuntimeError: boom"),
    ],
)
def test_a_module_that_cannot_be_imported(run, command, text, said):
    Path("users_broken.py").write_text(text)
    shown = theirs(run(command, "boom", module="users_broken"), said, "`users_broken:boom` does not run")
    assert "importlib" not in shown


def test_a_relative_name_names_no_function(run):
    outcome = run("snapshot", "boom", module=".users_models")
    assert (outcome.code, outcome.err.splitlines()[0]) == (
        2,
        "policylang snapshot: `.users_models:boom` names no function",
    )


@pytest.mark.parametrize("command", ["snapshot", "agree"])
@pytest.mark.parametrize(
    ("function", "said"), [("bad_policy", "error[APL101]"), ("no_policy", "`nowhere.apl`")], ids=["wrong", "not there"]
)
def test_a_policy_of_theirs_is_diagnosed_as_ours_are(run, command, function, said):
    outcome = run(command, function)
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert said in outcome.err


def test_an_error_in_the_forward_while_it_is_traced(run):
    """The diagnostic names the line; above it stands the whole error, from their first frame on."""
    outcome = run("snapshot", "untraceable")
    assert outcome.code == 1
    trace, _, rest = outcome.err.partition("error[APL363]")
    assert "the step cannot be traced: " in rest
    frames = [line for line in trace.splitlines() if line.startswith("  File ")]
    assert frames[0].endswith("in <lambda>")
    assert any("users_models.py" in frame and frame.endswith("in forward") for frame in frames)


def test_a_call_that_goes_wrong_inside_policylang_says_so(run, monkeypatch):
    monkeypatch.setattr("policylang.tracing.step.read_state", None)
    outcome = run("snapshot", "untraceable")
    assert outcome.code == 1
    assert "in untraceable" in outcome.err
    assert "help: the error was raised in policylang" in outcome.err


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("wrong_model", "in forward"),
        ("not_scalar", "RuntimeError: grad can be implicitly created only for scalar outputs"),
        ("nothing", "TypeError: cannot unpack non-iterable NoneType object"),
        ("same", "ValueError: the factory returns one model over and over"),
        ("second_fails", "KeyError: 'the second model'"),
    ],
)
def test_a_model_that_cannot_be_compared(run, function, said):
    outcome = run("agree", function)
    shown = "\n".join(line for line in outcome.err.splitlines() if not line.endswith(" …"))
    theirs(outcome._replace(err=shown), said, "help: the function returns (model, loss_fn, batch)")


def test_a_bug_of_ours_is_not_called_theirs(run, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("in the comparison")

    monkeypatch.setattr("policylang.testing.agreement.compare_decisions", broken)
    Path("users_models.py").write_text(MODELS.replace("len(made) > 1", "False"))
    outcome = run("agree", "second_fails")
    assert outcome.code == 101
    assert outcome.err.rstrip().endswith("the file that caused it")
    assert BUG in outcome.err


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
)
def test_memory_that_runs_out_is_no_bug(policylang, monkeypatch, error):
    def broken(*paths, **options):
        raise error

    monkeypatch.setattr("policylang.api.load.check", broken)
    outcome = policylang("check", "any.apl")
    assert (outcome.code, outcome.err.splitlines()[0]) == (1, "policylang: memory ran out")
