"""Files as policies: exceptions, warnings, includes, files that cannot be read, and work that nobody wants any more."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import policylang
from policylang.api.planned_graphs import read_any
from policylang.errors import PolicyError
from policylang.graph.facts import Facts
from policylang.language.cancellation import Cancelled, cancellable, check_cancelled
from policylang.language.diagnostics import Fix, Source, Span, TextChange
from policylang.language.formatting import format_source
from policylang.language.loader import load_policy, parse_policy
from policylang.planning.capabilities import capabilities_for
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.worth import worth_of_rules
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.report.diagnostics import render_text
from tests.support.drawn import slow


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


SECRET = "token = hunter2 of root\n"
PROFILE = "[compute]\nfloat32 = 1e12\n[memory]\nbandwidth = 1e12\n[[network]]\nranks = 2\ntimes = "


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('include "secret"', "APL104"), ('include "../{folder}/secret"', "APL104"), ('include "link.apl"', "APL104"),
        ('device "./secret"', "APL154"), ('device "link.toml"', "APL154"), ('device "own.toml"', "APL158"),
    ],
)  # fmt: skip
def test_no_line_of_another_file_is_shown(text: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET, encoding="utf-8")
    for link in ("link.apl", "link.toml"):
        (tmp_path / link).symlink_to("secret")
    (tmp_path / "own.toml").write_text(f'{PROFILE}"secret"\n', encoding="utf-8")
    (tmp_path / "p.apl").write_text(text.format(folder=tmp_path.name) + "\nsave mm\n", encoding="utf-8")
    (found,) = load_policy(tmp_path / "p.apl").diagnostics
    assert found.code == code
    assert "hunter2" not in render_text([found])
    (linked,) = load_policy(tmp_path / "link.apl").diagnostics
    assert "hunter2" not in render_text([linked])


@pytest.mark.parametrize("line", ["save mmm whre", "save nope in layers.*", "let a = mm", "save mm in layer block 1"])
def test_a_thousand_mistakes_are_shown_and_the_others_counted(line: str) -> None:
    found = parse_policy(f"{line}\n" * 1202).diagnostics
    assert len(found) == 1001
    assert found[-1].code == "APL117"
    assert found[-1].message in ("202 further diagnostics are not shown", "201 further diagnostics are not shown")
    if "whre" in line:
        assert format_source(Source("<policy>", f"{line}\n" * 1202)).diagnostics == found


def test_a_mend_of_a_part_copies_no_more_than_the_part() -> None:
    source = Source("p.apl", "save mm\nsave mmm\nsave mm\n")
    fix = Fix("", (TextChange(Span(source, 13, 16), "bmm"), TextChange(Span(source, 0, 4), "drop")))
    assert fix.applied(source, 8, 16) == "save bmm"
    assert fix.applied(source) == "drop mm\nsave bmm\nsave mm\n"


def test_includes_that_multiply_are_reported_once(tmp_path: Path) -> None:
    for number in range(1, 40):
        (tmp_path / f"{number}.apl").write_text(f'include "{number - 1}.apl"\n' * 2, encoding="utf-8")
    found = load_policy(tmp_path / "39.apl").diagnostics
    assert [each.code for each in found] == ["APL106", "APL106"]
    assert len(render_text(found)) < 20_000


@pytest.fixture(scope="module")
def facts() -> Facts:
    return read_any(Path(__file__).parents[2] / "docs" / "graphs" / "fsdp.graph")


def planned(name: str, facts: Facts) -> Plan:
    policy = load_policy(name).policy
    return plan(policy, facts, capabilities_for(facts.kind))


def test_without_anybody_to_ask_nothing_stops() -> None:
    check_cancelled()
    with cancellable(lambda: True):
        check_cancelled()
    with pytest.raises(Cancelled), cancellable(lambda: False):
        check_cancelled()
    check_cancelled()


@pytest.mark.parametrize("name", ["llama3_sac", slow("fsdp_overlap")])
def test_a_plan_can_be_given_up_wherever_it_asks_and_is_the_same_afterwards(name: str, facts: Facts) -> None:
    """Given up at places spread over the whole of it, on facts that it shares with the plan that is made in the end."""
    asked = 0

    def counting() -> bool:
        nonlocal asked
        asked += 1
        return True

    expected = planned(name, facts)
    with cancellable(counting):
        assert planned(name, facts).digest == expected.digest
    assert asked > 20
    for stop in range(0, asked, max(asked // 12, 1)):
        left = stop

        def wanted() -> bool:
            nonlocal left
            left -= 1
            return left >= 0

        with pytest.raises(Cancelled), cancellable(wanted):
            planned(name, facts)
        assert left == -1, "it stops at once"
    made = planned(name, facts)
    assert (made.digest, made.diagnostics) == (expected.digest, expected.diagnostics)


def test_loading_and_figures_can_be_given_up(facts: Facts) -> None:
    made = planned("llama3_sac", facts)
    for work in (
        lambda: load_policy("llama3_sac"),
        lambda: breakdown(made),
        lambda: worth_of_rules(made, capabilities_for(facts.kind)),
    ):
        with pytest.raises(Cancelled), cancellable(lambda: False):
            work()
