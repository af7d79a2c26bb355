"""Code and operators of the user's own, and `policylang demo`: what goes wrong is shown from the user's code on."""

import json
import sys
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
from attrs import evolve

import policylang as package
from policylang.__main__ import main as script
from policylang.commands import agree as command
from policylang.commands import cli
from policylang.commands.small_llama import Settings
from policylang.graph.snapshot import write
from tests.support.textgraph import facts_of

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
    assert shown[start + 1].endswith('users_models.py", line 10, in boom')
    assert "KeyError: 'layers'" in shown


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("chained", "ValueError: no such model"),
        ("decorated", 'KeyError: "inside torch\'s wrapper"'),
        ("needs", "TypeError: needs() missing 1 required positional argument: 'size'"),
        ("no_memory", "MemoryError"),
        ("too_large", "RuntimeError: "),
        ("gone", "BrokenPipeError"),
        ("leaves", "SystemExit: 0"),
    ],
)
def test_whatever_it_raises(run, function, said):
    """With what caused it; a wrapper of torch is not their first frame."""
    shown = theirs(run("snapshot", function), said)
    assert shown.count(f"`users_models:{function}` does not run") == 1
    assert "_contextlib.py" not in shown
    if function == "chained":
        assert shown.index("KeyError: 'layers'") < shown.index("The above exception was the direct cause")


def test_an_interruption_is_none(run, monkeypatch):
    assert run("snapshot", "stopped").code == 130
    monkeypatch.setattr(cli, "parser", Mock(side_effect=KeyboardInterrupt))
    assert cli.main(["tune"]) == 130, "nor while the command is imported"
    monkeypatch.setattr(cli, "main", Mock(side_effect=KeyboardInterrupt))
    assert script() == 130, "nor while the command line is"


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
    assert outcome.code == 2
    assert outcome.err.startswith("policylang snapshot: `.users_models:boom` names no function\n")


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
    broken = Mock(side_effect=ZeroDivisionError("in the comparison"))
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
    monkeypatch.setattr("policylang.api.load.check", Mock(side_effect=error))
    outcome = policylang("check", "any.apl")
    assert (outcome.code, outcome.err.splitlines()[0]) == (1, "policylang: memory ran out")


GRAPH = """
    %x = input
    %w = parameter
    %a = mylab.fused_mlp.default(%x, %w) layers.0 bytes=256 flops=10
    %s = aten.sin.default(%a) layers.0 bytes=256
    %a_1 = mylab.fused_mlp.default(%s, %w) layers.1 bytes=256 flops=10
    %s_1 = aten.sin.default(%a_1) layers.1 bytes=256
    ---
    %b = aten.mul.Tensor(%s_1, %a_1) bytes=256
    %c = mylab.fused_mlp_backward.default(%b, %s, %a) bytes=256
    output(%s_1, %c)
"""
POLICY = "recompute everything\nsave mylab.fused_mlp in layers.0\nsave fused_mlp in layers.1\nexpect saved <= 1 KiB\n"
KERNELS = """
import torch
print("the kernels say hello")
library = torch.library.Library("mylab_kernels", "DEF")
library.define("fused_moe(Tensor x) -> Tensor")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    write(facts_of(GRAPH), "my.graph")
    (tmp_path / "my.apl").write_text(POLICY)
    (tmp_path / "mylab_kernels_module.py").write_text(KERNELS)
    (tmp_path / "mylab_fails.py").write_text("def need():\n    raise OSError('no GPU of\\ngeneration 9')\nneed()\n")
    (tmp_path / "mylab_ends.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "mylab_needs.py").write_text("import mylab_other_kernels\n")
    (tmp_path / "mylab_broken.py").write_text("def (:\n")
    return tmp_path


@pytest.fixture
def without_kernels():
    """A later test imports the module anew."""
    yield
    kernels = sys.modules.pop("mylab_kernels_module", None)
    if kernels is not None:
        kernels.library._destroy()


@pytest.mark.parametrize("more", [(), ("--torch",)])
def test_the_graph_knows_its_operators(policylang, folder, more):
    outcome = policylang("check", "my.apl", "--graph", "my.graph", "--deny", "warnings", *more)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("checked 1 file on 1 graph: clean\n")


def test_without_the_graph_they_are_unknown(policylang, folder):
    found = json.loads(policylang("check", "my.apl", "--output-format", "json").out)["diagnostics"]
    assert [each["code"] for each in found][-1] == "APL101"
    assert "`--import`" in found[0]["help"]


@pytest.mark.parametrize("asked", ["plan --summary", "diff my.apl", "explain --node a", "explain --rule 3"])
def test_in_every_command_that_plans(policylang, folder, asked):
    command, *more = asked.split()
    outcome = policylang(command, "my.apl", *more, "--graph", "my.graph")
    assert (outcome.code, outcome.err) == (0, "")


def test_in_python(folder):
    facts = package.load_snapshot("my.graph")
    for graph in ("my.graph", Path("my.graph"), facts):
        assert package.check("my.apl", graph=graph).diagnostics == ()
        assert len(package.load("my.apl", graph=graph).rules) == 3
    assert package.parse("save fused_mlp_backward", graph=facts).rules[0].text == "save fused_mlp_backward"
    with pytest.raises(package.PolicyMeaningError, match="fused_mlp"):
        package.load("my.apl")
    with pytest.raises(package.PolicyGraphError, match="nowhere"):
        package.load("my.apl", graph="nowhere.graph")


def test_a_namespace_that_the_graph_calls_may_hold_more(policylang, folder):
    """Nobody has seen its library, so that another of its names is a warning, with the near one that the graph has."""
    (folder / "my.apl").write_text("optional save mylab.fused_mpl, mylab.route\nsave fused_mpl\n")
    outcome = policylang("check", "my.apl", "--graph", "my.graph", "--torch", "--output-format", "json")
    found = json.loads(outcome.out)["diagnostics"]
    told = [(each["code"], each["message"].split("`")[1]) for each in found]
    assert told == [("APL102", "mylab.fused_mpl"), ("APL102", "mylab.route"), ("APL101", "fused_mpl")]
    near = [each["help"] for each in found if "did you mean" in each["help"]]
    assert near == ["did you mean `mylab.fused_mlp`?", "did you mean `fused_mlp`?"]


def test_a_module_that_is_named_registers_more(policylang, folder, without_kernels):
    (folder / "my.apl").write_text("save mylab_kernels.fused_moe, fused_moe\n")
    assert policylang("check", "my.apl").code == 1
    outcome = policylang("check", "my.apl", "--import", "mylab_kernels_module", "--output-format", "json")
    assert (outcome.code, json.loads(outcome.out)["diagnostics"]) == (0, [])
    assert outcome.err == "the kernels say hello\n", "what a module prints does not stand in the output"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("mylab_nowhere.kernels", "there is no module `mylab_nowhere`"),
        ("json.kernels", "there is no module `json.kernels`"),
        ("mylab_fails", "`mylab_fails` cannot be imported: OSError: no GPU of generation 9"),
        ("mylab_ends", "`mylab_ends` cannot be imported: SystemExit: 3"),
        ("mylab_needs", "`mylab_needs` cannot be imported: ModuleNotFoundError: No module named 'mylab_other_kernels'"),
        ("mylab_broken", "`mylab_broken` cannot be imported: SyntaxError:"),
        ("./mylab_fails.py", "`./mylab_fails.py` is no module\n = help: did you mean `mylab_fails`?"),
        ("a b", "`a b` is no module\n = help: the name of a module, as Python imports it"),
        ("", "`` is no module"),
    ],
)
def test_a_module_of_operators_that_cannot_be_imported(policylang, folder, module, said):
    outcome = policylang("check", "my.apl", "--import", module)
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.out.startswith(f"error[APL372]: {said}")
    assert "Traceback" not in outcome.out
    planned = policylang("plan", "my.apl", "--graph", "my.graph", "--import", module, "--output-format", "json")
    assert [each["code"] for each in json.loads(planned.out)["diagnostics"]] == ["APL372"]


def test_where_it_failed(policylang, folder):
    outcome = policylang("diff", "my.apl", "my.apl", "--graph", "my.graph", "--import", "mylab_fails")
    assert (outcome.code, outcome.out) == (1, "")
    assert "mylab_fails.py:3: need()" in outcome.err
    assert "raised in" in outcome.err
    assert "mylab_fails.py:2" in outcome.err


def test_nothing_is_imported_unasked(policylang, folder):
    """Neither for the name of an operator nor for what a graph calls."""
    (folder / "mylab.py").write_text("raise RuntimeError('imported unasked')\n")
    assert policylang("check", "my.apl", "--graph", "my.graph").code == 0
    assert policylang("show", "my.graph").code == 0
    assert "mylab" not in sys.modules


@pytest.mark.parametrize(
    "command", ["check", "plan", "explain", "diff", "agree", "snapshot", "import", "import-torchtitan"]
)
def test_who_takes_it(policylang, command):
    assert "--import MODULE" in policylang(command, "--help").out


def test_a_policy_test_knows_the_operators_of_its_graph(policylang, folder):
    page = f"```graph\n{GRAPH}\n```\n\n```apl\nsave fused_mlp, mylab.fused_mlp in layers.0  # matches: a, a_1\n```\n"
    (folder / "test.md").write_text(page)
    assert policylang("test", "test.md").out == "tested 1 policy in 1 file: 1 claim, all hold\n"


def test_torchtitans_selectors_too(policylang, folder):
    selector = "layers.*::mylab.fused_mlp.default"
    assert "APL102" in policylang("import-torchtitan", selector).err
    outcome = policylang("import-torchtitan", selector, "--graph", "my.graph")
    assert "APL102" not in outcome.err


SMALL = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": 64, "batch": 2, "sequence": 16}


@pytest.fixture
def small(monkeypatch):
    """The demo on a model that trains in a second."""
    import policylang.commands.small_llama as training

    monkeypatch.setattr(training, "Settings", lambda **chosen: Settings(**SMALL, **chosen))


@pytest.fixture(scope="module")
def compare():
    """One comparison for each set of arguments, however many ways it is printed in."""
    return cache(command._compare)


@pytest.fixture
def compared_once(monkeypatch, small, compare):
    monkeypatch.setattr(command, "_compare", compare)


@pytest.mark.slow
@pytest.mark.usefixtures("compared_once")
def test_the_demo_proves_equality_and_a_saving(policylang):
    outcome = policylang("demo", "--steps", "2", "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["bitwise_equal"] is True
    assert result["report"]["audit"] == {"agrees": True, "differences": []}
    assert 0 < result["with"]["saved_bytes"] < result["without"]["saved_bytes"]
    assert result["with"]["losses"] == result["without"]["losses"]
    assert result["with"]["losses"][1] < result["with"]["losses"][0]


@pytest.mark.usefixtures("compared_once")
def test_the_table_names_every_rule_and_both_measurements(policylang):
    outcome = policylang("demo", "--steps", "2")
    assert outcome.code == 0, outcome.err
    assert "recompute everything in block" in outcome.out
    assert "without (min-cut)" in outcome.out
    assert "kept for the backward" in outcome.out
    assert "are bitwise equal" in outcome.out


def test_a_difference_fails_the_demo(policylang, small, compare, monkeypatch):
    """Not a formality: another gradient of one parameter in one step has to be seen."""

    def tampered(*arguments):
        found = compare(*arguments)
        last = found.with_policy.steps[1]
        last = evolve(last, gradients={**last.gradients, "model.lm_head.weight": "0" * 64})
        return evolve(found, with_policy=evolve(found.with_policy, steps=(found.with_policy.steps[0], last)))

    monkeypatch.setattr(command, "_compare", tampered)
    outcome = policylang("demo", "--steps", "2")
    assert outcome.code == 1
    assert "NOT bitwise equal:\n  step 2: the gradient of model.lm_head.weight" in outcome.out


def test_a_policy_with_a_mistake(policylang, small, tmp_path):
    path = tmp_path / "mistake.apl"
    path.write_text("save attenton\n")
    outcome = policylang("demo", "--policy", str(path))
    assert outcome.code == 1
    assert "`attenton`" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_missing_package_is_named_with_the_mend(policylang, monkeypatch):
    find = command.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "transformers" else find(name))
    outcome = policylang("demo")
    assert outcome == (2, "", "policylang demo: the demo needs `transformers`\nhelp: pip install transformers\n")


@pytest.mark.parametrize("steps", ["1", "0", "-3", "many"])
def test_too_few_steps(policylang, steps):
    outcome = policylang("demo", f"--steps={steps}")
    assert outcome.code == 2
    assert f"`{steps}` is not a number of steps" in outcome.err
