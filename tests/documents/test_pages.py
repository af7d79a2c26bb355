"""Pages say what is so: what their commands print, their links, tables, figures, install lines and outputs."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch

import policylang
from policylang.commands.cli import main, parser
from policylang.language.devices.reading import bundled_devices, read_device
from policylang.language.diagnostics import is_error
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import FSDP2_BLOCKS, PAGE, WHAT_FSDP_MEANS, WHOLE_MODEL
from tests.documents.outputs import LONG, PICTURE, SLOW, Shown, blocks, example, masked, picture, produce
from tests.documents.outputs import PAGES as WITH_OUTPUTS
from tests.support.tuned import written

ROOT = Path(__file__).resolve().parents[2]
_FILE = re.compile(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PIECES = re.compile(r"^<!-- file: (?P<file>\S+) -->$|^```console\n(?P<console>.*?)^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def fenced(text: str, kind: str = "") -> list[str]:
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [block for named, block in blocks if named == kind]


def without_blocks(page: Path) -> str:
    return re.sub(r"^(```+).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchor of each heading: lowercase, without marks and punctuation, with hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


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
ANCHORS = anchors(ROOT / PAGE)


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


PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    """As the repository's own view of Markdown resolves them; ``test_site.py`` does the same for the site."""
    missing = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("command", ["scripts/demo", "scripts/docs", "scripts/test", ".ci/run"])
def test_the_commands_are_there(command):
    assert os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize("version", ["", "9.8.7"])
def test_the_tests_run_under_another_torch_in_an_environment_of_its_own(tmp_path, version):
    for name in ("scripts/environment.sh", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / (f".venv-{version}" if version else ".venv") / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nwhile [ $1 != --constraint ]; do shift; done; cat $2\n")
    python.chmod(0o755)
    told = ["bash", "-c", "source scripts/environment.sh; use_environment test"]
    environment = {**os.environ, "POLICYLANG_TORCH": version}
    run = subprocess.run(told, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    pinned = (ROOT / "constraints.txt").read_text()
    assert run.stdout == (re.sub(r"(?m)^torch==.*", f"torch=={version}", pinned) if version else pinned)


def test_ci_runs_the_test_command_of_the_readme():
    assert "./scripts/test " in (ROOT / "README.md").read_text()
    assert 'exec "$(dirname "${BASH_SOURCE[0]}")/../scripts/test" "$@"' in (ROOT / ".ci" / "run").read_text()


def test_every_policy_of_the_tutorial_loads_and_the_one_it_arrives_at_is_clean():
    assert policylang.check(ROOT / "examples" / "mine.apl").diagnostics == ()
    for text in fenced(page("tutorial.md"), "apl"):
        policylang.parse(text)


FOUND = [shown for page in WITH_OUTPUTS for shown in blocks(page)]


CASES = [
    pytest.param(
        shown,
        id=str(shown),
        marks=[pytest.mark.slow] * (shown.words[0] in SLOW or any(each in shown.text for each in LONG)),
    )
    for shown in FOUND
]


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages show the figures of torch 2.13")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("shown", CASES)
def test_a_page_shows_what_the_run_prints(shown: Shown):
    assert masked(shown, shown.text) == masked(shown, produce(shown)), "run scripts/update_docs_figures.py"


def test_the_picture_of_the_readme_has_the_figures_below_it():
    (shown,) = [block for block in FOUND if block.words[0] == "picture"]
    assert PICTURE.read_text(encoding="utf-8") == picture(shown), "run scripts/update_docs_figures.py"


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the pages show the figures of torch 2.13")
def test_the_example_prints_what_the_tutorial_shows():
    (shown,) = [block for block in FOUND if block.name == "tutorial-report"]
    assert example() == shown.text


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the snapshots are those of torch 2.13")
def test_the_snapshots_are_those_of_the_models(tmp_path: Path):
    """In a process of its own, in which one rank of a fake process group is played."""
    folder = f"Path({str(tmp_path)!r})"
    program = f"from pathlib import Path; from scripts.update_docs_figures import trace_graphs; trace_graphs({folder})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True, timeout=580)
    kept = ROOT / "docs" / "graphs"
    names = sorted(path.name for path in tmp_path.glob("*.graph"))
    assert names == sorted(path.name for path in kept.glob("*.graph"))
    others = [name for name in names if _columns(tmp_path / name) != _columns(kept / name)]
    assert others == [], "run scripts/update_docs_figures.py --graphs"


def _columns(path: Path) -> dict[str, object]:
    """What a snapshot holds: its bytes also depend on the release of zlib."""
    facts = policylang.load_snapshot(path)
    return {each.name: getattr(facts, each.name) for each in attrs.fields(type(facts))}


def test_pages_have_outputs():
    assert len(FOUND) > 40


# Every figure of the documentation is settled: a test repeats it, or the page says when and how it was taken.
#
# A figure is a number with a unit of memory, work or time, a percentage or a ratio, in running text or in a table. It
# is settled where it is also in the output of a run on the same page; or where its section says how, in a comment that
# no reader sees:
#
#     <!-- figures: tests/…::test_name, … -->    a test that compares the figure
#     <!-- figures: FILE -->                     a results file of benchmarks, which has the machine
#     <!-- figures: source: … -->                somebody else's, with the place where it stands
#     <!-- figures: given: … -->                 no measurement: a limit, a default, a figure of speech
#
# Times, and what follows from them, also need their date in the text of the page: ``2026-11-22``.
FIGURE = re.compile(
    r"(?<![\w.#/-])[+−-]?\d[\d,.]*"
    r"(?:%|×| ?(?:[KMGT]i?B|bytes|[KMGTP]?FLOPs?|µs|ms|seconds?|minutes?|hours?|s)\b)"
)
TIME = re.compile(r"\d (?:µs|ms|seconds?|minutes?|hours?|s)$")
SETTLED = re.compile(r"<!-- figures: (.*?) -->", re.DOTALL)
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
_FENCES = re.compile(r"^(```+|~~~+).*?^\1$", re.MULTILINE | re.DOTALL)


def sections(page: Path) -> list[tuple[str, str]]:
    """Each heading with its text, outputs of runs and code left out."""
    text = page.read_text(encoding="utf-8")
    for shown in reversed(blocks(page)):
        text = text[: shown.start] + text[shown.end :]
    text = _FENCES.sub("", text)
    parts = re.split(r"^(#+ .*)$", text, flags=re.MULTILINE)
    return [("", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]


def figures(text: str) -> list[str]:
    return FIGURE.findall(re.sub(r"`[^`\n]+`|<!--.*?-->", " ", text, flags=re.DOTALL))


@pytest.mark.parametrize("page", WITH_OUTPUTS, ids=lambda page: page.stem)
def test_every_figure_is_settled(page: Path):
    shown = " ".join(block.text for block in blocks(page))
    open_ones = []
    for heading, text in sections(page):
        left = [each for each in figures(text) if not re.search(rf"(?<![\d.]){re.escape(each)}(?!\d)", shown)]
        if left and not SETTLED.search(text):
            open_ones.append((heading, left))
    assert open_ones == [], "say where they are from, as the comment above `FIGURE` explains"


@pytest.mark.parametrize("page", WITH_OUTPUTS, ids=lambda page: page.stem)
def test_what_settles_a_figure_is_there_and_times_have_their_date(page: Path):
    text = page.read_text(encoding="utf-8")
    for entry in SETTLED.findall(text):
        if entry.startswith(("source: ", "given: ")):
            continue
        for each in entry.split(", "):
            file, _, test = each.partition("::")
            assert (ROOT / file).is_file(), each
            assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), each
    # In the section, or above the first of them.
    timed = [
        each for heading, part in sections(page) if "given: " not in part for each in figures(part) if TIME.search(each)
    ]
    assert not timed or DATE.search(text), timed


COMING_FROM_PAGE = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
OPENERS = "save|recompute|offload|must_save|must_recompute|prefer_save|include|undecided|prefetch|delay"
LINES = [
    line
    for row in re.findall(r"^\| .* \| (.*) \|$", COMING_FROM_PAGE, flags=re.MULTILINE)
    for line in re.findall(rf"`((?:{OPENERS}) [^`]*)`", row)
]


def test_there_are_many() -> None:
    assert len(LINES) > 40


@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_a_line_is_a_policy(line: str) -> None:
    assert [found.message for found in parse_policy(line).diagnostics if is_error(found)] == []


NAMES = ("torch", "accelerate", "transformers", "trl", "lightning")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_a_framework_with_its_setting_and_with_the_lines(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same FLOPs, so the same is recomputed, and the same weights to the last bit."""
    pytest.importorskip(name)
    if name == "trl":
        pytest.importorskip("datasets")
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
    example = importlib.import_module("coming_from")
    assert set(example.FRAMEWORKS) == set(NAMES)
    plain = example.trained(example.nothing, example.by_hand, False)[0]
    for what, setting, lines, train in example.FRAMEWORKS[name]:
        own, ours, equal = example.compared(setting, lines, train)
        assert own == ours, what
        assert ours > plain * 1.05, "something is recomputed"
        assert equal, what
        assert set(lines.split("; ")) - set("; ".join(LINES).split("; ")) <= {"save attention in block"}


KINDS = {".md", ".py", ".toml", ".yml", ".yaml", ".ts", ".mjs", ".json", ".sh", ""}
FROM_AN_INDEX = re.compile(
    r"\b(?:pip3?|uv|pipx|uvx)\s+(?:tool\s+)?(?:install|add|run)(?:[ ]+[^\s.|&;`#][^\s|&;`#]*)*?\s+[\"'`]?"
    r"policylang(?![-\w./*])(?!\s+(?:is|check|plan|list)\b)"
)


def texts() -> list[Path]:
    folders = ("docs", "examples", "policylang", "editors/vscode/src", "editors/vscode/tests", "scripts", "policies")
    top = [each for each in ROOT.iterdir() if each.is_file() and each.name != "CHANGELOG.md"]
    below = [each for folder in folders for each in (ROOT / folder).rglob("*") if each.is_file()]
    more = [ROOT / "editors/vscode/README.md", ROOT / "editors/tree-sitter-policylang/README.md"]
    return [each for each in (*top, *below, *more) if each.suffix in KINDS and "node_modules" not in each.parts]


def test_nothing_installs_policylang_from_an_index() -> None:
    found = {
        str(path.relative_to(ROOT)): line[0]
        for path in texts()
        for line in FROM_AN_INDEX.finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install policylang",
        'pip install "policylang[lsp]"',
        "pip install attrs lark && pip install --no-deps policylang",
        "so `pip install\npolicylang` brings it",
        "uv pip install policylang==0.2.0",
        "pip install attrs policylang",
    ],
)
def test_such_a_line_would_be_found(line: str) -> None:
    assert FROM_AN_INDEX.search(line)
