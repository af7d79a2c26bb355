"""The wheel and the extension for VS Code carry what they need; ``scripts/test --changed`` runs what can break."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from policylang.api.load import KEYS
from policylang.language.diagnostics import is_error
from policylang.language.files import bundled_names
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import PLANNED
from tests.support.process import python

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, lent: bool = False) -> str:
    """``lent``: with torch and what else is installed here."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # may name the checkout
    if lent:
        environment["PYTHONPATH"] = sysconfig.get_path("purelib")
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """What `python -m build` makes: the sdist, and the wheel out of the sdist."""
    pytest.importorskip("build", reason="scripts/test installs it")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel, lark and attrs, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in ("lark", "attr", "attrs"):
        package = Path(importlib.util.find_spec(name).origin).parent
        shutil.copytree(package, site / name, ignore=shutil.ignore_patterns("__pycache__"))
    return python


@pytest.mark.slow
def test_both_are_fit_for_an_index(dist):
    pytest.importorskip("twine", reason="scripts/test installs it")
    said = run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=dist)
    assert said.count("PASSED") == 2


def test_the_sdist_has_what_its_wheel_and_its_tests_are_made_of_and_nothing_else(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    if not tracked:
        pytest.skip("this is no checkout")
    here = {name for name in names if (ROOT / name).is_file()}
    assert names - here == {"PKG-INFO"}
    assert {name for name in here - set(tracked) if "/" not in name} == set()  # what lies about in the checkout
    left_out = {name for name in tracked if (ROOT / name).is_file() and not name.startswith(".github/")} - names
    assert left_out == {".gitattributes"}
    made = re.compile(r"(^|/)(\.venv|build|dist|\.git|__pycache__|\.\w+_cache)(/|$)")
    assert not [name for name in names if made.search(name)]


def test_every_file_that_the_package_reads_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    policies = {f"policylang/policies/{path.name}" for path in (ROOT / "policies").glob("*.apl")}
    assert len(policies) >= 8
    pages = {f"policylang/codes/{path.name}" for path in (ROOT / "docs" / "codes").glob("APL*.md")}
    assert len(pages) >= 140
    devices = {f"policylang/devices/{path.name}" for path in (ROOT / "devices").glob("*.toml")}
    assert len(devices) >= 6
    assert names >= policies | pages | devices | {"policylang/grammar/apl.lark", "policylang/py.typed"}
    in_package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "policylang").rglob("*")
        if path.suffix in (".py", ".json", ".gz", ".html", ".css", ".js")
    }
    assert names >= in_package
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_the_wheel_out_of_the_sdist_holds_the_files_of_the_checkout_as_they_are(wheel):
    beside = {"grammar": "grammar", "policies": "policies", "devices": "devices", "codes": "docs/codes"}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            package, _, rest = name.partition("/")
            folder, _, file = rest.partition("/")
            source = ROOT / beside[folder] / file if folder in beside else ROOT / name
            assert package.endswith(".dist-info") or archive.read(name) == source.read_bytes(), name


@pytest.mark.slow
def test_it_checks_a_policy_in_an_environment_with_nothing_else(bare, tmp_path):
    command = bare.with_name("policylang")
    (tmp_path / "mine.apl").write_text("include <fsdp>\nsave attention\n")
    assert run(command, "check", "llama3_sac", "mine.apl", cwd=tmp_path) == "checked 2 files: clean\n"
    assert run(bare, "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=tmp_path) == "None\n"
    listed = run(command, "explain", cwd=tmp_path).splitlines()
    assert len(listed) == len(list((ROOT / "docs" / "codes").glob("APL*.md")))


@pytest.mark.slow
def test_what_an_extra_brings_is_asked_for_by_its_name(bare, tmp_path):
    command = [bare.with_name("policylang"), "lsp"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert said.returncode == 2
    assert said.stderr.endswith("pip install pygls\n")
    asked = run(bare, "-c", "import importlib.metadata as m; print(*m.requires('policylang'), sep='|')", cwd=tmp_path)
    assert [each.split(">")[0] for each in asked.split("|") if re.search(r"extra == .lsp.", each)] == ["pygls"]


@pytest.mark.slow
def test_pygments_finds_the_lexer_of_the_installed_package(bare, tmp_path):
    pytest.importorskip("pygments")
    (tmp_path / "mine.apl").write_text("save attention  # worth it\n")
    script = """
from pygments.lexers import get_lexer_by_name, guess_lexer_for_filename
text = open("mine.apl").read()
lexer = get_lexer_by_name("policylang")
print([str(kind) for kind, value in lexer.get_tokens(text) if value.strip()])
print(guess_lexer_for_filename("mine.apl", text).name)
"""
    kinds = "['Token.Keyword', 'Token.Name.Builtin', 'Token.Comment.Single']"
    assert run(bare, "-c", script, cwd=tmp_path, lent=True) == f"{kinds}\nAPL policy language\n"


@pytest.mark.slow
def test_the_wheel_is_installed_with_what_it_asks_for(wheel, tmp_path):
    """As a user does: into an empty environment, with torch and the rest from the index under the constraints."""
    venv.create(tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "-c", ROOT / "constraints.txt")
    run(*install, "--retries", "1", "--timeout", "60", wheel, cwd=tmp_path)
    assert run(python.with_name("policylang"), "check", "llama3_sac", cwd=tmp_path) == "checked 1 file: clean\n"
    program = "import torch, policylang; print(policylang.backend('llama3_sac').policy.name)"
    said = run(python, "-c", program, cwd=tmp_path)
    assert said == "llama3_sac\n"


@pytest.mark.slow
def test_the_installed_package_makes_a_backend(bare, tmp_path):
    script = """
import torch, policylang
assert "site-packages" in policylang.__file__, policylang.__file__
policy = policylang.load("save_all")
print(policylang.backend(policy).policy.name)
"""
    assert run(bare, "-c", script, cwd=tmp_path, lent=True) == "save_all\n"


EXTENSION = ROOT / "editors" / "vscode"
MANIFEST = json.loads((EXTENSION / "package.json").read_text(encoding="utf-8"))
CONTRIBUTES = MANIFEST["contributes"]
SETTINGS = CONTRIBUTES["configuration"]["properties"]
SNIPPETS = json.loads((EXTENSION / "snippets" / "policylang.json").read_text(encoding="utf-8"))
CODE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((EXTENSION / "src").glob("*.ts")))


def test_its_version_and_its_licence_are_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    manifests = list(ROOT.glob("editors/*/package.json"))
    assert EXTENSION / "package.json" in manifests
    assert {json.loads(each.read_text(encoding="utf-8"))["version"] for each in manifests} == {project["version"]}
    assert f"## {project['version']}\n" in (EXTENSION / "CHANGELOG.md").read_text(encoding="utf-8")
    assert MANIFEST["license"] == project["license"]
    assert (EXTENSION / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    lock = json.loads((EXTENSION / "package-lock.json").read_text(encoding="utf-8"))
    assert lock["version"] == project["version"]
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]  # a place to download from


def test_the_language_is_that_of_policies_and_its_files_are_there():
    (language,) = CONTRIBUTES["languages"]
    assert (language["id"], language["extensions"]) == ("policylang", [".apl"])
    (grammar,) = CONTRIBUTES["grammars"]
    scope = json.loads((EXTENSION / grammar["path"]).read_text(encoding="utf-8"))["scopeName"]
    assert scope == grammar["scopeName"] == "source.policylang"
    for file in (language["configuration"], MANIFEST["icon"], *(each["path"] for each in CONTRIBUTES["snippets"])):
        assert (EXTENSION / file).is_file()


def test_its_settings_are_those_that_the_server_reads_and_its_own():
    own = {"command", "trace.server"}
    assert {name.removeprefix("policylang.") for name in SETTINGS} - own == {*KEYS, "pause"}
    assert SETTINGS["policylang.path"]["enum"] == ["", *PLANNED]
    restricted = MANIFEST["capabilities"]["untrustedWorkspaces"]["restrictedConfigurations"]
    assert set(restricted) == set(SETTINGS)
    page = (EXTENSION / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(policylang\.[\w.]+)`", page, re.MULTILINE)) == set(SETTINGS)


def test_each_command_has_code_and_a_line_in_the_readme():
    commands = {each["command"]: f"{each['category']}: {each['title']}" for each in CONTRIBUTES["commands"]}
    in_code = set(re.findall(r'^        "(policylang\.\w+)": ', CODE, re.MULTILINE))
    assert in_code == set(commands)
    named = {each["command"] for place in CONTRIBUTES["menus"].values() for each in place}
    assert named <= set(commands)
    page = (EXTENSION / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(policylang: [^`]+)`", page, re.MULTILINE)) == set(commands.values())


def test_what_the_extension_asks_the_server_can_answer():
    pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")
    from policylang.editor.server import server

    asked = set(re.findall(r'\.ask<[^(]+>\(\s*"(policylang\.\w+)"', CODE))
    assert len(asked) >= 4
    assert asked <= set(server().protocol.fm.commands)


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_with_its_defaults_is_a_policy(name):
    body = SNIPPETS[name]["body"]
    text = filled(body if isinstance(body, str) else "\n".join(body))
    assert "$" not in text
    loaded = parse_policy(text)
    assert [each.message for each in loaded.diagnostics if is_error(each)] == []


def test_every_choice_of_a_snippet_is_a_policy_too():
    for snippet in SNIPPETS.values():
        body = snippet["body"] if isinstance(snippet["body"], str) else "\n".join(snippet["body"])
        for number, choices in re.findall(r"\$\{(\d+)\|([^|]*)\|\}", body):
            for choice in choices.split(","):
                text = filled(body, {number: choice})
                errors = [each.message for each in parse_policy(text).diagnostics if is_error(each)]
                assert errors == [], text


def test_snippets_offer_the_bundled_policies():
    (choices,) = re.findall(r"<\$\{1\|([^|]*)\|\}>", SNIPPETS["include"]["body"])
    assert set(choices.split(",")) <= set(bundled_names())


def filled(body: str, chosen: dict[str, str] | None = None) -> str:
    """A snippet as an editor inserts it: each place with its default, or its first choice; a place that is named again
    has what it has."""
    values = dict(chosen or {})
    for number, default in re.findall(r"\$\{(\d+)[:|]([^}|]*)\|?\}", body):
        values.setdefault(number, default.split(",")[0] if "|" in body[body.index("${" + number) :][:5] else default)
    body = re.sub(r"\$\{(\d+)[:|][^}]*\}", lambda found: values[found[1]], body)
    return re.sub(r"\$(\d)", lambda found: values.get(found[1], ""), body)


@pytest.fixture(scope="module")
def node_packages() -> Path:
    installed = EXTENSION / "node_modules"
    if shutil.which("npm") is None or not (installed / "installed").is_file():
        pytest.skip("scripts/test installs the packages of editors/vscode where node and a registry are")
    return installed


@pytest.mark.slow
def test_its_types_and_its_tests_are_clean(node_packages):
    for script in ("check", "test"):
        command = ["npm", "run", "--silent", script]
        done = subprocess.run(command, cwd=EXTENSION, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_one_command_makes_the_extension_with_what_it_needs_and_nothing_else(node_packages):
    done = subprocess.run([ROOT / "scripts" / "editors"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(ROOT / "build" / f"policylang-{MANIFEST['version']}.vsix") as package:
        names = {name.removeprefix("extension/") for name in package.namelist() if name.startswith("extension/")}
        held = package.read("extension/package.json")
        bundle = package.read("extension/dist/extension.js").decode()
        licences = package.read("extension/dist/LICENSES.txt").decode()
    assert names == {
        "package.json", "readme.md", "changelog.md", "LICENSE.txt", "language-configuration.json",
        "syntaxes/policylang.tmLanguage.json", "snippets/policylang.json", "images/icon.png", "dist/extension.js",
        "dist/LICENSES.txt",
    }  # fmt: skip
    assert json.loads(held)["version"] == MANIFEST["version"]
    assert "vscode-languageclient" in licences
    assert str(ROOT) not in bundle


PRINT = """
import sys
sys.path.insert(0, "scripts")
import changed_tests
graph = changed_tests.import_graph()
changed_tests.import_graph = lambda: graph
for change in sys.argv[1:]:
    print(*changed_tests.tests_of({change} if change else set()))
"""


@pytest.mark.slow
def test_a_change_runs_what_imports_it() -> None:
    pytest.importorskip("grimp", reason="import-linter brings it, with the extra dev")
    changes = ["policylang/language/syntax.py", "policylang/editor/server.py", "docs/faq.md", "policies/fsdp.apl", ""]
    done = python("-c", PRINT, *changes)
    syntax, editor, page, policy, nothing = (set(line.split()) for line in done.stdout.split("\n")[:-1])
    assert {
        "tests/language/test_formatter.py",
        "tests/planning/test_planner.py",
        "tests/editor/test_server.py",
    } <= syntax
    assert "tests/editor/test_server.py" in editor
    assert not {"tests/language/test_formatter.py", "tests/planning/test_outcome.py"} & editor  # they start no process
    assert "tests/documents/test_python_blocks.py" in page
    assert not any(each.startswith("tests/planning") for each in page)
    assert policy == {"tests"}
    assert not nothing
