"""What every benchmark shares: the machine's description, a table, and a results file."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What a figure was taken on, without anything that names the host."""
    return {
        "processor": _processor(),
        "cores": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows with the same keys as aligned text, numbers to the right."""
    if not rows:
        return "(nothing)"
    columns = list(rows[0])
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    right = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            value.rjust(width) if numeric else value.ljust(width)
            for value, width, numeric in zip(values, widths, right, strict=True)
        ).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *(line(row) for row in cells)])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def write_results(path: Path | None, results: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def growth_exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The slope of log time over log size by least squares: 1 is linear."""
    return statistics.linear_regression([math.log(s) for s in sizes], [math.log(t) for t in times]).slope
