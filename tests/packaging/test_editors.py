"""The extension for VS Code agrees with the package: version, settings, snippets, and what lies in the .vsix."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

from policylang.api.load import KEYS
from policylang.language.diagnostics import is_error
from policylang.language.files import bundled_names
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import PLANNED

ROOT = Path(__file__).resolve().parents[2]
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


def test_its_types_and_its_tests_are_clean(node_packages):
    for script in ("check", "test"):
        done = subprocess.run(
            ["npm", "run", "--silent", script], cwd=EXTENSION, capture_output=True, text=True, timeout=300
        )
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
        "package.json",
        "readme.md",
        "changelog.md",
        "LICENSE.txt",
        "language-configuration.json",
        "syntaxes/policylang.tmLanguage.json",
        "snippets/policylang.json",
        "images/icon.png",
        "dist/extension.js",
        "dist/LICENSES.txt",
    }
    assert json.loads(held)["version"] == MANIFEST["version"]
    assert "vscode-languageclient" in licences
    assert str(ROOT) not in bundle
