"""Train a small Llama (Hugging Face, random weights) without and with a policy, and compare.

Prints what each rule decided, the memory and time of a step measured both ways, and whether the loss and the gradients
of every step are bitwise equal. Both runs use the same inner compiler, torch's aot_eager, which generates no code, so
that equal means equal; without a policy, PyTorch's min-cut decides what is saved. Nothing is downloaded.

examples:

  policylang demo --steps 6
  policylang demo --policy mine.apl --json

exit codes: 0 equal, 1 not equal, 2 usage or a package that is missing
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING

from policylang.commands.inputs import add_width
from policylang.commands.output import Exit, UsageError, say, tell
from policylang.errors import PolicyError

if TYPE_CHECKING:
    from policylang.commands.small_llama import RunComparison, Settings

_INNER = "aot_eager"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", default="llama3_sac", help="a policy file or a bundled policy (default: llama3_sac)"
    )
    parser.add_argument("--steps", type=_steps, default=10, help="training steps of each run (default: 10)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_width(parser)


def run(options: argparse.Namespace) -> Exit:
    missing = [name for name in ("torch", "transformers", "rich") if find_spec(name) is None]
    if missing:
        names = " and ".join(f"`{name}`" for name in missing)
        raise UsageError(f"the demo needs {names}", f"pip install {' '.join(missing)}")
    import torch

    from policylang.commands.small_llama import Settings

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("torch sees no CUDA device here", "leave out `--device cuda`")
    try:
        comparison = _compare(Settings(steps=options.steps, device=options.device), options.policy)
    except PolicyError as error:
        tell(error)
        return Exit.DIAGNOSTICS
    if options.json:
        say(json.dumps(comparison.to_dict(), indent=2), "json")
    else:
        say(comparison)
    return Exit.CLEAN if comparison.agrees else Exit.DIAGNOSTICS


def _compare(settings: Settings, policy: str) -> RunComparison:
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    import policylang
    from policylang.commands.small_llama import RunComparison, train

    loaded = policylang.load(policy)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("without a policy", total=2 * (settings.steps + 1))
        without = train("min-cut", settings, _INNER, lambda: progress.advance(task))
        progress.update(task, description=f"with {loaded.name}")
        backend = policylang.backend(loaded, inner=_INNER)
        with_policy = train(loaded.name, settings, backend, lambda: progress.advance(task))
    return RunComparison(settings, without, with_policy, policylang.report(with_policy.compiled), torch.__version__)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number of steps; the first step compiles: give 2 or more")
    return int(text)
