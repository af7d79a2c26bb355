"""What the command line costs: a check of a policy, alone and on a recorded step of 19,655 nodes; plan; the snapshot.

    python -m benchmarks.cli --json benchmarks/results/cli.json

Each command runs in a process of its own. The time of an interpreter that does nothing is measured beside it and taken
off: what is left is policylang's. The least of several runs is given, since whatever else a machine does only adds;
where it does much else, the processor's seconds say more than those of the clock.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import seconds, table, write_results

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "llama3_8b_dp16_tp8_joint.json.gz"
COMMAND = (sys.executable, "-m", "policylang")
NO_TORCH = (
    "import sys; from policylang.commands.cli import main; code = main(sys.argv[1:]); "
    "sys.exit(3 if 'torch' in sys.modules else code)"
)


def least(command: Sequence[str], repeats: int) -> tuple[float, float]:
    """Seconds of wall time and of the processor."""
    walls, cpus = [], []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(seconds(lambda: subprocess.run(command, capture_output=True)))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(walls), min(cpus)


def needs_torch(*arguments: str) -> bool:
    """Whether a command has imported torch by the time it ends."""
    return subprocess.run((sys.executable, "-c", NO_TORCH, *arguments), capture_output=True).returncode == 3


def measure(policy: str, folder: Path, repeats: int) -> dict[str, Any]:
    graph, page = str(folder / "recorded.graph"), str(folder / "plan.html")
    subprocess.run((*COMMAND, "import", str(RECORDED), "-o", graph), check=True, capture_output=True)
    start, start_cpu = least((sys.executable, "-c", "pass"), repeats)
    commands = {
        "check": ("check", policy),
        "check --graph": ("check", policy, "--graph", graph),
        "explain --node": ("explain", policy, "--graph", graph, "--node", "add_3"),
        "diff": ("diff", policy, "torchtitan_full", "--graph", graph),
        "plan --html": ("plan", policy, "--graph", graph, "--html", page),
    }
    rows = []
    for name, arguments in commands.items():
        wall, cpu = least((*COMMAND, *arguments), repeats)
        torch = "yes" if needs_torch(*arguments) else "no"
        rows.append({"command": name, "wall s": wall - start, "processor s": cpu - start_cpu, "torch imported": torch})
    return {
        "interpreter wall s": start,
        "rows": rows,
        "snapshot": {"nodes": 19_655, "bytes": Path(graph).stat().st_size, "html bytes": Path(page).stat().st_size},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="llama3_sac")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options.policy, Path(folder), options.repeats)
    print(table(found["rows"]))
    print(table([found["snapshot"]]))
    write_results(options.json, {"benchmark": "cli", "policy": options.policy, **found})


if __name__ == "__main__":
    main()
