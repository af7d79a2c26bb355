"""The command line as a user has it: in this process where the output is what matters, in one of its own where the
process is."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from policylang.commands.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def policylang(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def run(*arguments: str) -> Outcome:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return Outcome(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def process() -> Callable[..., Outcome]:
    def run(*arguments: str, env: dict[str, str] | None = None, cwd: str | None = None) -> Outcome:
        everything = os.environ | (env or {})
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=everything)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def standard_input(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], None]:
    """What the next command reads from its standard input."""

    def give(content: str | bytes) -> None:
        stream = io.BytesIO(content if isinstance(content, bytes) else content.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream, encoding="utf-8"))

    return give
