"""Serve an editor: a language server over standard input and output.

An editor starts it, once set up (docs/editor.md has the settings of VS Code, Neovim, Helix and Emacs). It needs the
extra lsp: pip install pygls.

exit codes: 0 the editor ended it as it should, 1 the connection ended before, 2 the extra is not installed
"""

from __future__ import annotations

import argparse

from policylang.commands.output import Exit, UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stdio", action="store_true", help="what it does anyway; some clients say so")


def run(options: argparse.Namespace) -> Exit:
    try:
        import pygls  # noqa: F401
    except ImportError:
        message = "the language server needs pygls, which is not installed"
        raise UsageError(message, "pip install pygls") from None
    from policylang.editor.server import serve

    return Exit(serve())
