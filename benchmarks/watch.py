"""What does ``policylang.watch`` cost a training, in the steps that it times, in the one that it profiles, and after?

The Llama of ``benchmarks.eager`` under the same policy, twice: watched and not, in turns, in one process. Times are
processor time of the fastest step: what else the machine does only adds. The profiled step is the first, of which a
CPU's allocations are reported; no time of it is in the run's figures.

    python -m benchmarks.watch --json benchmarks/results/watch.json
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import policylang
from benchmarks.common import table, write_results
from benchmarks.eager import POLICY, llama, step


def seconds(run: Callable[[], None]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def ratio(one: Callable[[], None], other: Callable[[], None], repeats: int) -> float:
    """Of the fastest step of one to that of the other, in turns."""
    times = [(seconds(one), seconds(other)) for _ in range(repeats)]
    return min(each for each, _ in times) / min(each for _, each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=41)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device, policy = torch.device("cpu"), policylang.parse(POLICY)
    plain = policylang.checkpoint_model(llama(256, options.layers, device), policy, strict=True)
    watched = copy.deepcopy(plain)
    tokens = torch.randint(256, (2, 256), device=device)
    one, other = partial(step, watched, tokens), partial(step, plain, tokens)
    one()
    other()
    with policylang.watch(watched, policy, steps=options.repeats + 1) as run:

        def timed() -> None:
            one()
            run.step()

        row = {"profiled / not watched": ratio(timed, other, 1)}
        row["timed / not watched"] = ratio(timed, other, options.repeats)
    row["after / not watched"] = ratio(one, other, options.repeats)
    row["timed / after"] = row["timed / not watched"] / row["after / not watched"]  # of one model
    print(table([row]))
    write_results(options.json, {"layers": options.layers, "repeats": options.repeats, **row})


if __name__ == "__main__":
    main()
