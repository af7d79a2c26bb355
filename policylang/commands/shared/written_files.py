"""Where a command writes: refused before any work where it would replace what the command reads."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path

from policylang.commands.shared.exit import UsageError
from policylang.language.files import find_policy, policy_files, reason_of, write_whole

_OUTPUTS = {"output": "-o", "html": "--html", "trace": "--trace"}
_FILES = ("policy", "old", "new", "subject", "graph", "file", "files", "paths", "cover", "device")
_MODULES = ("imports", "function", "model")
_NAMED = re.compile(r'"([^"\n]+)"')
_NAMES_FILES = (".apl", ".toml", ".md")
_MOST = 4 << 20
"""Bytes of a text that names others; what is longer is not read either."""


def check_outputs(options: argparse.Namespace) -> None:
    """Raises ``UsageError`` for an output that is an input too, by whatever name, or that is another output.

    Inputs are the files that the command line names, those that they name in turn (what is included, the profile of a
    device and its tables, the project's graph), and the modules that it imports.
    """
    outputs = {flag: out for name, flag in _OUTPUTS.items() if (out := getattr(options, name, None))}
    for flag, out in outputs.items():
        if os.path.isdir(out):
            raise UsageError(f"`{out}` is a folder", "name a file in it")
        if not os.path.isdir(parent := os.path.dirname(out) or os.curdir):
            raise UsageError(f"cannot write `{out}`: there is no folder `{parent}`")
        if any(_is_same(out, other) for name, other in outputs.items() if name != flag):
            raise UsageError(f"`{out}` is written by {' and by '.join(f'`{each}`' for each in outputs)}", _MEND)
    there = {flag: out for flag, out in outputs.items() if os.path.isfile(out)}
    for read in _inputs(options) if there else ():
        for flag, out in there.items():
            if os.path.exists(read) and os.path.samefile(read, out):
                raise UsageError(f"`{flag} {out}` would replace a file that the command reads", _MEND)


_MEND = "name another file"


def write_output(text: str, out: str) -> None:
    """Write a whole file and say so. Raises ``UsageError`` where it cannot be written."""
    from policylang.commands.shared.output import tell

    try:
        write_whole(Path(out), text.encode())
    except OSError as error:
        raise UsageError(f"cannot write `{out}`: {reason_of(error)}") from None
    tell(f"wrote {out}")


def _is_same(one: str, other: str) -> bool:
    there = os.path.exists(one) and os.path.exists(other)
    return os.path.samefile(one, other) if there else os.path.realpath(one) == os.path.realpath(other)


def _inputs(options: argparse.Namespace) -> Iterator[str]:
    from policylang.api.project.settings import project_settings

    waiting = [find_policy(file)[0] for word in _words(options, _FILES) for file in policy_files(word)]
    if getattr(options, "project", False):
        settings = project_settings(Path())[0]
        waiting += [Path(file) for file in (settings.file, settings.graph, settings.device) if file is not None]
    known = set[str]()
    while waiting:
        file = waiting.pop()
        if str(file) not in known:
            known.add(str(file))
            yield str(file)
            waiting.extend(file.parent / name for name in _named_in(file))
    for module in _words(options, _MODULES):
        path = os.path.join(*module.partition(":")[0].split("."))
        yield from (f"{path}.py", os.path.join(path, "__init__.py"))


def _words(options: argparse.Namespace, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = getattr(options, name, None)
        yield from value if isinstance(value, list) else [value] if value else []


def _named_in(file: Path) -> list[str]:
    """What a text has in quotes: any of it may name a file."""
    try:
        if file.suffix not in _NAMES_FILES or not file.is_file() or file.stat().st_size > _MOST:
            return []
        return _NAMED.findall(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return []
