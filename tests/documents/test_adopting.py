"""The page on adopting a policy: its commands are run, in a folder with the files that it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from policylang.commands.cli import main, parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adopting.md").read_text(encoding="utf-8")
WORKFLOW = (ROOT / "examples" / "github-actions.yml").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))
PIECES = re.compile(r"^<!-- file: (?P<file>\S+) -->$|^```console\n(?P<console>.*?)^```$", re.MULTILINE | re.DOTALL)


def run(command: str) -> int:
    words = shlex.split(command, comments=True)
    assert words[0] == "policylang"
    return int(main(words[1:]))


def test_the_commands_of_the_page_in_their_order(tmp_path, monkeypatch, capsys):
    """Files come into being where the page shows them; what it prints below a command is what the command prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` has it
    ran = 0
    for piece in PIECES.finditer(PAGE):
        if piece["file"]:
            path = tmp_path / piece["file"]
            path.parent.mkdir(exist_ok=True)
            path.write_text(FILES[piece["file"]])
            continue
        for part in re.split(r"^\$ ", piece["console"], flags=re.MULTILINE)[1:]:
            command, _, printed = part.partition("\n")
            code, said = run(command), capsys.readouterr()
            assert code == (1 if "# exits with 1" in command else 0), (command, said.out, said.err)
            assert printed == "" or said.out == printed, command
            ran += 1
    assert ran >= 10
    assert (tmp_path / "plan.html").stat().st_size > 1000
    assert (tmp_path / "titan.apl").read_text().startswith("# TorchTitan's")


@pytest.mark.parametrize("command", re.findall(r"policylang (?:fmt|check|test|diff)[^\n>]*", WORKFLOW))
def test_the_commands_of_the_workflow_can_be_read(command):
    words = shlex.split(command.replace("&& continue", ""))
    assert parser().parse_args(words[1:]).run is not None


def test_the_workflow_and_the_hooks_are_yaml_that_says_so():
    yaml = pytest.importorskip("yaml")
    assert "steps" in yaml.safe_load(WORKFLOW)["jobs"]["check"]
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert set(hooks) == {"policylang-check", "policylang-fmt"}
    local = yaml.safe_load(FILES[".pre-commit-config.yaml"])["repos"][0]["hooks"]
    for hook in local:
        assert {key: hook[key] for key in ("name", "entry", "files", "types")} == {
            key: hooks[hook["id"]][key] for key in ("name", "entry", "files", "types")
        }


def test_the_hooks_are_for_policies_alone():
    text = (ROOT / ".pre-commit-hooks.yaml").read_text()
    (pattern,) = set(re.findall(r"files: '([^']*)'", text))
    assert re.search(pattern, "policies/sac.apl")
    assert not re.search(pattern, "sac.apl.md")
