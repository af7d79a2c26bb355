"""A standard stream that is full, or closed: said in a line, and never a bug of policylang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = "policylang: the output cannot be written: no space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("command", "code", "err"),
    [
        ("list > /dev/full", 2, FULL),
        ("--version > /dev/full", 2, FULL),
        ("show nowhere.graph 2> /dev/full", 2, ""),
        ("list >&-", 2, "policylang: the standard output is closed\n"),
        ("check llama3_sac 2>&-", 0, ""),
        ("check - <&-", 0, ""),
    ],
)
def test_a_stream_that_is_full_or_closed(command: str, code: int, err: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m policylang {command}", shell=True, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (code, err)
