"""Pages with a walk, a table or an example of their own: their commands are run, in a folder with the files that they
show; what they print, and what they say of the code and of each other, is so."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import torch

import policylang
from policylang.commands.cli import main, parser
from policylang.language.devices.reading import bundled_devices, read_device
from policylang.planning.capabilities import FSDP2_BLOCKS, PAGE, WHAT_FSDP_MEANS, WHOLE_MODEL
from tests.support.tuned import written

ROOT = Path(__file__).resolve().parents[2]
_FILE = re.compile(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PIECES = re.compile(r"^<!-- file: (?P<file>\S+) -->$|^```console\n(?P<console>.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def fenced(text: str, kind: str = "") -> list[str]:
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for named, block in blocks if named == kind]


def run(command: str) -> int:
    words = shlex.split(command, comments=True)
    assert words[0] == "policylang"
    return int(main(words[1:]))


def walk(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> int:
    """Run a page's commands in their order; files come into being where the page shows them, and what it prints below
    a command is what the command prints. Returns how many there were."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)  # as `python -m` has it
    files, ran = dict(_FILE.findall(text)), 0
    for piece in _PIECES.finditer(text):
        if piece["file"]:
            path = folder / piece["file"]
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[piece["file"]])
            continue
        for part in re.split(r"^\$ ", piece["console"], flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            code, said = run(command), capsys.readouterr()
            assert code == (1 if "# exits with 1" in command else 0), (command, said.out, said.err)
            assert printed == "" or without_bytes(said.out) == without_bytes(printed), command
            ran += 1
    return ran


def without_bytes(text: str) -> str:
    """The length of a file depends on the release of xz."""
    return re.sub(r"[\d,]+ bytes", "bytes", text)


# --- adopting a policy ---

WORKFLOW = (ROOT / "examples" / "github-actions.yml").read_text(encoding="utf-8")


def test_adopting_runs_the_commands_of_the_page(tmp_path, monkeypatch, capsys):
    assert walk(page("adopting.md"), tmp_path, monkeypatch, capsys) >= 10
    assert (tmp_path / "plan.html").stat().st_size > 1000
    assert (tmp_path / "titan.apl").read_text().startswith("# TorchTitan's")


@pytest.mark.parametrize("command", re.findall(r"policylang (?:fmt|check|test|diff)[^\n>]*", WORKFLOW))
def test_the_commands_of_the_workflow_can_be_read(command):
    words = shlex.split(command.replace("&& continue", ""))
    assert parser().parse_args(words[1:]).run is not None


def test_the_workflow_and_the_hooks_are_yaml_that_says_so():
    yaml = pytest.importorskip("yaml")
    assert "steps" in yaml.safe_load(WORKFLOW)["jobs"]["check"]
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    hooks = {hook["id"]: hook for hook in yaml.safe_load(text)}
    assert set(hooks) == {"policylang-check", "policylang-fmt"}
    local = yaml.safe_load(dict(_FILE.findall(page("adopting.md")))[".pre-commit-config.yaml"])["repos"][0]["hooks"]
    for hook in local:
        for key in ("name", "entry", "files", "types"):
            assert hook[key] == hooks[hook["id"]][key]
    (pattern,) = set(re.findall(r"files: '([^']*)'", text))
    assert re.search(pattern, "policies/sac.apl")
    assert not re.search(pattern, "sac.apl.md")


# --- snapshots: an 8B policy is checked on a machine without a GPU ---


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page speaks of a machine without a GPU")
def test_snapshots_prints_what_it_shows(tmp_path, monkeypatch, capsys):
    text = page("snapshots.md")
    assert walk(text, tmp_path, monkeypatch, capsys) == 2
    run("policylang plan sac.apl --graph qwen3_8b.graph")
    (shown,) = re.findall(r"begins with\n\n```\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert shown in capsys.readouterr().out


def test_the_files_of_snapshots_are_those_of_the_walk():
    assert {name for name, _ in _FILE.findall(page("snapshots.md"))} == {"qwen3_8b.py", "sac.apl"}


# --- tuning: the workflow, step by step on a small graph ---

TUNED = (ROOT / "examples" / "tuned-policy.yml").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:        run: |          )(policylang [^\n>]*)", TUNED, flags=re.MULTILINE)


def test_the_workflow_of_tuning_is_yaml_that_ends_in_its_step():
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(TUNED)["jobs"]["tuned"]["steps"][-1]["name"] == "it is what tuning gives today"


def test_the_workflow_passes_until_the_policy_is_another(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "model.graph")
    Path("policies").mkdir()
    tuned = policylang.tune("model.graph", peak="75 GiB", device="h100-sxm", optimizer="adamw", reserve="5%")
    path = tuned.save("policies/model_75g.apl")
    assert [words[1] for words in map(shlex.split, COMMANDS)] == ["check", "tune", "diff"]
    assert list(map(run, COMMANDS)) == [0, 0, 0]
    path.write_text("recompute everything in block\nundecided -> save\nexpect peak <= 300 MiB\n")
    assert list(map(run, COMMANDS)) == [1, 0, 1]
    assert "expect peak" in capsys.readouterr().out


# --- time: its profile is one, its table is that of the files, and it names every key ---


def test_the_profile_of_time_is_one_that_says_all_there_is(tmp_path: Path) -> None:
    (text,) = fenced(page("time.md"), "toml")
    (table,) = (each for each in fenced(page("time.md")) if each.startswith("Group "))
    (tmp_path / "our-cluster.toml").write_text(text, encoding="utf-8")
    (tmp_path / "our.table").write_text(table, encoding="utf-8")
    found = read_device("our-cluster.toml", tmp_path)
    assert found.name == "our-cluster"
    assert [len(network.times) for network in found.networks] == [0, 2, 0]
    keys = set(re.findall(r"^\[*(\w+)", text, re.MULTILINE))
    least = "[compute]\nbfloat16 = 1e12\n[memory]\nbandwidth = 1e12\n"
    network = f"{least}[[network]]\nbandwidth = 1e9\n"
    for wrong_text in (f"zzzzzz = 1\n{least}", f"{least}zzzzzz = 1\n", f"{network}zzzzzz = 1\n"):
        (tmp_path / "wrong.toml").write_text(wrong_text)
        wrong = read_device("wrong.toml", tmp_path)
        told = re.findall(r"`(\w+)`", f"{wrong.help} {wrong.details}".partition("there are ")[2])
        assert told
        assert set(told) <= keys


def test_the_table_of_profiles_is_that_of_the_files() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", page("time.md"), re.MULTILINE)
    assert {name for name, _ in rows} == set(bundled_devices()) - {"cpu"}
    for name, row in rows:
        device = read_device(name)
        compute = (device.compute[dtype].at(1) / 1e12 for dtype in ("bfloat16", "float32"))
        expected = [*(f"{rate:g} TFLOP/s" for rate in compute), f"{device.bandwidth.at(1) / 1e12:g} TB/s"]
        expected += [f"{(network.bandwidth or 0) / 1e9:g} GB/s" for network in device.networks]
        assert [cell.strip() for cell in row.split("|")] == expected


# --- the two paths, and eager: the example's policy comes to the same ---

REPORTS = [each for name in ("tutorial.md", "eager.md") for each in fenced(page(name)) if each.startswith("policy ")]


def test_the_rules_come_to_the_same_on_both_paths_and_save_the_same_bytes_in_eager():
    joint, eager = ([line for line in each.splitlines() if line.startswith("mine.apl:")] for each in REPORTS)
    (others,) = re.findall(r"^<!-- output: two-paths flat -->\n```\n(.*?)^```$", page("two-paths.md"), re.M | re.S)
    assert "undecided" in others, "what the flat graph's report has in place of the lines of the compiled model's"
    assert "mine.apl:" not in others
    assert len(joint) == 5
    saved = [[line for line in each if re.search(r" save (attention|matmul) ", line)] for each in (joint, eager)]
    assert saved[0] == saved[1]
    assert len(saved[0]) == 2


# --- setups, and the messages that lead to them ---

TEXT = (ROOT / PAGE).read_text()
ROWS = re.findall(r"^\| \[.*?\]\(#(?P<anchor>[\w-]+)\).*\[`(?P<script>\w+\.py)`\]", TEXT, flags=re.MULTILINE)
ANCHORS = {
    re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
    for heading in re.findall(r"^#+ (.+)$", TEXT, flags=re.MULTILINE)
}


def test_every_setup_is_a_row_with_a_section_and_a_script_that_a_test_runs() -> None:
    """The page is called as readers look for it; scripts are named as modules or as files."""
    assert TEXT.startswith("# Which setup am I?\n")
    assert len(ROWS) == 8
    assert {anchor for anchor, _ in ROWS} <= ANCHORS
    places = [ROOT / "tests" / folder for folder in ("backends", "distributed", "integrations", "documents")]
    tests = "".join(each.read_text() for place in places for each in place.rglob("test_*.py"))
    for _, script in ROWS:
        assert (ROOT / "examples" / script).is_file()
        assert re.search(rf"\b{script.removesuffix('.py')}\b", tests), script


def test_every_message_that_names_the_page_names_a_place_on_it() -> None:
    found = set()
    for path in (ROOT / "policylang").rglob("*.py"):
        if PAGE in (text := path.read_text(encoding="utf-8")):
            texts = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found.update(each for value in texts for each in re.findall(rf"{PAGE}#([\w-]+)", str(value)))
    links = {FSDP2_BLOCKS, WHOLE_MODEL, WHAT_FSDP_MEANS, *(f"{PAGE}#{each}" for each in found)}
    assert {link.partition("#")[2] for link in links} <= ANCHORS
    assert found, "the trace step's refusal names its row"


@pytest.mark.parametrize("name", ["sac_fsdp.apl", "titan_graph.apl"])
def test_the_policies_of_the_scripts_are_clean(name: str) -> None:
    assert policylang.check(ROOT / "examples" / name).diagnostics == ()
