"""The settings that docs/editor.md prints, in the editors that are installed here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "editor.md").read_text(encoding="utf-8")
GRAPH = Path(__file__).resolve().parents[2] / "docs" / "graphs" / "tutorial.graph"
MAIN = 'include "lib.apl"\nrecompute everything\nsave   big; save matmul\nsave everything in layers.9\nlet small = mm\n'
LIB = "# \N{MATHEMATICAL ITALIC SMALL ALPHA}\nlet big = mm\n"
FORMATTED = MAIN.replace("save   big; ", "save big\n")

NEOVIM = """
vim.cmd('edit main.apl')
local function clients() return (vim.lsp.get_clients or vim.lsp.get_active_clients)() end
vim.wait(20000, function() return #vim.diagnostic.get(0) > 0 end, 50)
local said = { filetype = vim.bo.filetype, comments = vim.bo.commentstring, codes = {} }
for _, each in ipairs(vim.diagnostic.get(0)) do table.insert(said.codes, each.code) end
local client = clients()[1]
said.root = client.config.root_dir or client.root_dir
vim.api.nvim_win_set_cursor(0, { 3, 7 })
vim.lsp.buf.definition()
vim.wait(10000, function() return vim.fn.expand('%:t') == 'lib.apl' end, 50)
said.definition = { vim.fn.expand('%:t'), vim.api.nvim_win_get_cursor(0) }
vim.cmd('edit main.apl')
if vim.lsp.buf.format then vim.lsp.buf.format({ timeout_ms = 10000 }) else vim.lsp.buf.formatting_sync(nil, 10000) end
vim.cmd('silent wall')
local out = io.open('said.json', 'w')
out:write(vim.fn.json_encode(said))
out:close()
vim.cmd('qa!')
"""

EMACS = """
(package-initialize)
(load (expand-file-name "init.el"))
(setq eglot-sync-connect 20 eglot-confirm-server-initiated-edits nil)
(find-file "main.apl")
(call-interactively #'eglot)
(with-timeout (20) (while (not (flymake-diagnostics)) (accept-process-output nil 0.1)))
(let ((mode (symbol-name major-mode)) (comments comment-start) place
      (texts (mapcar #'flymake-diagnostic-text (flymake-diagnostics))))
  (goto-char (point-min)) (search-forward "big") (backward-char 2)
  (call-interactively #'xref-find-definitions)
  (setq place (list (buffer-name) (line-number-at-pos) (current-column)))
  (switch-to-buffer "main.apl")
  (eglot-format-buffer)
  (save-some-buffers t)
  (with-temp-file "said.json"
    (insert (json-serialize (list :mode mode :comments comments :place (vconcat place) :texts (vconcat texts))))))
(eglot-shutdown (eglot-current-server))
"""


def settings_for(editor: str) -> str:
    found = re.search(rf"<!-- editor: {re.escape(editor)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, editor
    return found[1]


def neovims() -> list[str]:
    """The settings that are for the Neovim that is installed."""
    if shutil.which("nvim") is None:
        return []
    said = subprocess.run(["nvim", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v0\.(\d+)", said)
    minor = int(found[1]) if found else 99
    return ["0.11"] if minor >= 11 else []


def project(folder: Path) -> dict[str, str]:
    """Two policies and a snapshot, and an environment in which ``policylang`` is this one."""
    (folder / "main.apl").write_text(MAIN)
    (folder / "lib.apl").write_text(LIB, encoding="utf-8")
    shutil.copy(GRAPH, folder / "ours.graph")
    (folder / "pyproject.toml").write_text('[tool.policylang]\ngraph = "ours.graph"\n')
    command = folder / "bin" / "policylang"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m policylang.commands.cli "$@"\n')
    command.chmod(0o755)
    homes = {name: str(folder / name) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")}
    path = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, **homes, "PATH": path, "PYTHONPATH": root}


@pytest.mark.parametrize("settings", ["0.11"])
def test_neovim(tmp_path: Path, settings: str) -> None:
    if settings not in neovims():
        pytest.skip(f"no Neovim that takes the settings of {settings}")
    environment = project(tmp_path)
    init = tmp_path / "XDG_CONFIG_HOME" / "nvim" / "init.lua"
    init.parent.mkdir(parents=True)
    init.write_text(settings_for(f"nvim {settings}"))
    (tmp_path / "try.lua").write_text(NEOVIM)
    command = ["nvim", "--headless", "-n", "-c", "luafile try.lua"]
    subprocess.run(command, cwd=tmp_path, env=environment, timeout=120, check=True, stdin=subprocess.DEVNULL)
    said = json.loads((tmp_path / "said.json").read_text())
    said["codes"].sort()
    assert said == {
        "filetype": "policylang",
        "comments": "# %s",
        "codes": ["APL110", "APL301", "APL303"],
        "root": str(tmp_path),
        "definition": ["lib.apl", [2, 4]],
    }
    assert (tmp_path / "main.apl").read_text(encoding="utf-8") == FORMATTED


def test_emacs(tmp_path: Path) -> None:
    if shutil.which("emacs") is None:
        pytest.skip("no Emacs")
    has_eglot = ["emacs", "--batch", "--eval", "(progn (package-initialize) (require 'eglot))"]
    if subprocess.run(has_eglot, capture_output=True, check=False).returncode:
        pytest.skip("no eglot")
    environment = project(tmp_path)
    (tmp_path / "init.el").write_text(settings_for("emacs"))
    (tmp_path / "try.el").write_text(EMACS)
    subprocess.run(["emacs", "--batch", "-l", "try.el"], cwd=tmp_path, env=environment, timeout=120, check=False)
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["mode"], said["comments"], said["place"]) == ("policylang-mode", "# ", ["lib.apl", 2, 4])
    assert any("[APL301]" in text for text in said["texts"])
    assert (tmp_path / "main.apl").read_text(encoding="utf-8") == FORMATTED
