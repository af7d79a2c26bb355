"""A Python process of its own: another hash seed, another environment, nothing imported yet."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def python(*arguments: object, cwd: Path = ROOT, timeout: float = 300, **environment: str) -> Any:
    """What ran, once it ended with 0; its output is text."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done
