"""``policylang agree`` and ``demo``: commands that train a model under a policy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from policylang.commands import inputs
from policylang.commands.output import Exit, UsageError, add_form, add_width, say, tell
from policylang.errors import PolicyError
from policylang.planning.capabilities import COMPARED

if TYPE_CHECKING:
    from policylang.commands.small_llama import RunComparison, Settings


_LLAMA = "llama"


def agree_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="POLICY", help="a policy file or a bundled policy")
    parser.add_argument(
        "--model", default=_LLAMA, metavar="MODEL", help="`llama` (default), or package.module:function"
    )
    parser.add_argument(
        "--path", action="append", choices=COMPARED, help="only this path; may be given several times (default: all)"
    )
    inputs.add_options(parser, "--import")
    add_form(parser, "json")


def agree(options: argparse.Namespace) -> Exit:
    """Take one step of a model on every path under a policy, and show where the paths agree and differ.

    The paths are eager checkpoints, torch.compile (without Inductor) and a traced step. The table shows what each saves
    and recomputes, whether loss and gradients equal those of the plain model, and why a path cannot apply the policy.
    Below it are the values that paths decide differently, with the line that decided on each.

    --model is `llama`, a small Llama of Hugging Face with random weights, or package.module:function, a Python function
    without arguments that returns (model, loss_fn, batch), anew in each call; loss_fn(model, *batch) is the loss. The
    current folder is searched for it first, as `python -m` does.

    examples:

      policylang agree llama3_sac
      policylang agree mine.apl --model train.models:small --path eager --path joint
      policylang agree mine.apl --model train.models:small --import my_package.kernels

    exit codes: 0 all agree, 1 they do not, a path refuses, or the model fails, 2 usage or a package that is missing
    """
    try:
        if options.model != _LLAMA:
            inputs.need_torch()
            _function(options.model)  # its module may register operators that the policy names
        policy = inputs.read_policy(options.policy)
        inputs.need_torch()
        from policylang.testing.agreement import Setup, batch_of, compare_paths

        function = _function(options.model)
        with inputs.users_code():
            model, loss_fn, batch = function()
        made = [model]
        setup = Setup(lambda: made.pop() if made else function()[0], loss_fn, batch_of(batch), guard=inputs.users_code)
        found = compare_paths(setup, policy, options.path, _tell)
    except inputs.UsersCodeError as failed:
        help = "the function returns (model, loss_fn, batch), and loss_fn(model, *batch) a scalar"
        return inputs.show(failed, "agree", options.model, help)
    if options.output_format == "json":
        say(json.dumps(found.to_dict(), indent=2), "json")
    else:
        say(found)
    return Exit.CLEAN if found.agrees else Exit.DIAGNOSTICS


def _tell(stage: str) -> None:
    print(f"policylang agree: {stage} …", file=sys.stderr, flush=True)


def _function(text: str) -> Callable[[], Any]:
    if text != _LLAMA:
        return inputs.named_function(text)
    if find_spec("transformers") is None:
        raise UsageError(
            "the model `llama` needs `transformers`",
            "pip install transformers, or name your model with `--model package.module:function`",
        )
    return _llama


def _llama() -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    from policylang.commands.small_llama import Settings, batch_of, build

    settings = Settings(layers=4, hidden=64, heads=4, vocabulary=256, batch=2, sequence=32)
    return build(settings), lambda model, tokens: model(tokens), (batch_of(settings),)


_INNER = "aot_eager"


def demo_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy", default="llama3_sac", help="a policy file or a bundled policy (default: llama3_sac)"
    )
    parser.add_argument("--steps", type=_steps, default=10, help="training steps of each run (default: 10)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_width(parser)


def demo(options: argparse.Namespace) -> Exit:
    """Train a small Llama (Hugging Face, random weights) without and with a policy, and compare.

    Prints what each rule decided, the memory and time of a step measured both ways, and whether the loss and the
    gradients of every step are bitwise equal. Both runs use the same inner compiler, torch's aot_eager, which generates
    no code, so that equal means equal; without a policy, PyTorch's min-cut decides what is saved. Nothing is
    downloaded.

    examples:

      policylang demo --steps 6
      policylang demo --policy mine.apl --json

    exit codes: 0 equal, 1 not equal, 2 usage or a package that is missing
    """
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
