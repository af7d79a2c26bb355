"""``%%policy`` in a real IPython shell: what a cell shows, what it binds, and what ends it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython", reason="needs IPython")

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import policylang
from tests.support.textgraph import CHAIN, facts_of

GRAPHS = Path(__file__).resolve().parents[2] / "docs" / "graphs"
TEXT = "recompute everything in block\nsave attention in block\n"


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """With the extension loaded, in a folder with a snapshot."""
    shutil.copy(GRAPHS / "tutorial.graph", tmp_path / "small.graph")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell()
    shell.history_manager.enabled = False
    policylang.load_ipython_extension(shell)
    yield shell
    shell.history_manager.end_session()


def run(shell: Any, text: str) -> tuple[Any, str]:
    """The result of a cell, and what it printed."""
    with capture_output(display=False) as printed:
        done = shell.run_cell(text, store_history=True)
    return done, printed.stdout


def test_a_cell_is_checked_planned_and_bound(shell) -> None:
    done, printed = run(shell, f"%%policy small.graph --name mine\n{TEXT}")
    found = done.result
    assert not found.diagnostics
    assert [outcome.rule.text for outcome in found.plans[0].rules] == TEXT.splitlines()
    assert "<In[1]>:2  recompute everything in block" in printed, "lines are those that the notebook numbers"
    assert "saved" in printed
    assert printed.endswith("checked on small.graph: clean\n")
    assert shell.user_ns["mine"] is found.policy
    html = found._repr_html_()
    assert ">recompute everything in block</td>" in html
    assert "checked on small.graph: clean" in html


def test_an_error_is_shown_underlined_and_ends_the_run(shell) -> None:
    done, printed = run(shell, "%%policy --name mine\nsave mm\nsave attenton <b>\n")
    assert isinstance(done.error_in_exec, policylang.PolicyMeaningError)
    assert "mine" not in shell.user_ns
    assert " --> <In[1]>:3:" in printed
    assert printed.count("attenton <b>") == 1, "the traceback does not say it again"
    assert "error above" in printed
    done, printed = run(shell, "%%policy small.graph\nsave topk in block\n")
    assert isinstance(done.error_in_exec, policylang.PolicyMatchError)
    assert "error[APL301]" in printed


def test_warnings_end_nothing(shell) -> None:
    done, printed = run(shell, "%%policy --name mine\nsave mm and bmm\n")
    assert done.success
    assert "warning[APL151]" in printed
    assert isinstance(shell.user_ns["mine"], policylang.Policy)


class Spans(HTMLParser):
    """The texts of the elements that are underlined, and all tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.underlined: list[str] = []
        self.tags: set[str] = set()
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._inside = tag == "span" and "underline" in (dict(attrs).get("style") or "")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.underlined.append(data)
            self._inside = False


def test_html_underlines_the_span_and_escapes_the_text() -> None:
    from policylang.report.diagnostics.as_html import render_html

    text = 'save attenton in "<script>x</script>"\nsave (mm,\n  bmn)\n'
    found = Spans(
        html := render_html(policylang.check(policylang.language.diagnostics.Source("<In[1]>", text)).diagnostics)
    )
    assert found.underlined[0] == "attenton"
    assert "script" not in found.tags
    assert "&lt;script&gt;" in html
    assert "did you mean `attention`" in html


@pytest.mark.parametrize("value", ["facts", "plan", "path", "text", "cell"])
def test_a_graph_is_a_variable(shell, value) -> None:
    facts = facts_of(CHAIN)
    policy = policylang.parse("save mm")
    held = {"facts": facts, "path": Path("small.graph"), "text": "small.graph"}
    held["plan"] = policylang.check(policy, graph=facts).plans[0]
    held["cell"] = run(shell, "%%policy small.graph\nsave mm")[0].result
    shell.user_ns["box"] = type("Box", (), {"it": held[value]})
    done, printed = run(shell, "%%policy box.it\nsave everything")
    assert done.success
    assert printed.endswith("checked on box.it: clean\n")
    assert done.result.plans[0].rules[0].matched


def test_a_traced_step_is_a_graph(shell) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    step = policylang.trace_step(model, lambda found, x: found(x).sum(), torch.ones(2, 4))
    shell.user_ns.update(step=step, gm=step.gm)
    for name in ("step", "gm", "step.gm"):
        done, _ = run(shell, f"%%policy {name}\nsave matmul")
        assert done.success
        assert done.result.plans[0].rules[0].decided


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no/small.graph", "error[APL355]: `no/small.graph` cannot be read"),
        ("small.grap", "did you mean `small.graph`?"),
        ("graf", "error[APL648]: `graf` is neither a variable of this notebook nor a file"),
        ("grahp", "did you mean `graph`?"),
        ("number", "error[APL356]: a `int` has no graph"),
        ("small.graph --device h1000", "error[APL152]: there is no device profile `h1000`"),
        ("a b", "UsageError: a graph at most: %%policy [GRAPH]"),
        ("--name 3x", "UsageError: `3x` cannot be the name of a variable"),
        ("--paht joint", "UsageError: unrecognized arguments: --paht"),
    ],
)
def test_what_cannot_be_is_said_without_a_traceback(shell, line, said) -> None:
    shell.user_ns.update(number=3, graph=facts_of(CHAIN))
    done, printed = run(shell, f"%%policy {line}\nsave mm")
    assert not done.success
    assert said in f"{printed}UsageError: {done.error_in_exec}"
    assert "Traceback" not in printed


def test_the_project_names_a_graph(shell, tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.policylang]\ngraph = "small.graph"\npath = "joint"\n')
    summary = "\nchecked on small.graph (graph and path from pyproject.toml): clean\n"
    assert run(shell, "%%policy\nsave mm")[1].endswith(summary)
    assert run(shell, "%%policy --no-project\nsave mm")[1] == "Out[2]: checked, without a graph: clean\n"
    (tmp_path / "pyproject.toml").write_text("[tool.policylang]\ngraphs = 1\n")
    assert "error[APL646]" in run(shell, "%%policy\nsave mm")[1]


def test_the_line_takes_a_file(shell, tmp_path) -> None:
    (tmp_path / "mine.apl").write_text("save mm\n")
    _, printed = run(shell, "%policy mine.apl small.graph --name mine --device h100")
    assert "mine.apl:1  save mm" in printed
    assert shell.user_ns["mine"].device.name == "h100-sxm"
    assert run(shell, "sac = %policy llama3_sac")[0].success
    assert shell.user_ns["sac"].policy.name == "llama3_sac"
    assert not run(shell, "%policy")[0].success


def test_a_path_with_spaces_is_quoted(shell, tmp_path) -> None:
    (tmp_path / "small.graph").rename(tmp_path / "a small.graph")
    (tmp_path / "my own.apl").write_text("save mm\n")
    for quote in "\"'":
        assert run(shell, f"%%policy {quote}a small.graph{quote}\nsave mm")[0].success
    assert run(shell, "%policy 'my own.apl' \"a small.graph\"")[0].success


def test_it_can_be_unloaded(shell) -> None:
    policylang.unload_ipython_extension(shell)
    assert "not found" in str(run(shell, "%%policy\nsave mm")[0].error_in_exec)
    policylang.unload_ipython_extension(shell)


def test_importing_policylang_needs_no_ipython() -> None:
    code = "import sys, policylang; policylang.load_ipython_extension; assert 'IPython' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
