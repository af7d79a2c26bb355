"""Take one step of a model on every path under a policy, and show where the paths agree and differ.

The paths are eager checkpoints, torch.compile (without Inductor) and a traced step. The table shows what each saves and
recomputes, whether loss and gradients equal those of the plain model, and why a path cannot apply the policy. Below it
are the values that paths decide differently, with the line that decided on each.

--model is `llama`, a small Llama of Hugging Face with random weights, or package.module:function, a Python function
without arguments that returns (model, loss_fn, batch), anew in each call; loss_fn(model, *batch) is the loss. The
current folder is searched for it first, as `python -m` does.

examples:

  policylang agree llama3_sac
  policylang agree mine.apl --model train.models:small --path eager --path joint
  policylang agree mine.apl --model train.models:small --import my_package.kernels

exit codes: 0 all agree, 1 they do not, a path refuses, or the model fails, 2 usage or a package that is missing
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from policylang.commands.inputs import add_form, add_options, read_policy
from policylang.commands.output import Exit, UsageError, say
from policylang.commands.users_code import UsersCodeError, named_function, need_torch, show, users_code
from policylang.planning.capabilities import COMPARED

_LLAMA = "llama"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", metavar="POLICY", help="a policy file or a bundled policy")
    parser.add_argument(
        "--model", default=_LLAMA, metavar="MODEL", help="`llama` (default), or package.module:function"
    )
    parser.add_argument(
        "--path", action="append", choices=COMPARED, help="only this path; may be given several times (default: all)"
    )
    add_options(parser, "--import")
    add_form(parser, "json")


def run(options: argparse.Namespace) -> Exit:
    try:
        if options.model != _LLAMA:
            need_torch()
            _function(options.model)  # its module may register operators that the policy names
        policy = read_policy(options.policy)
        need_torch()
        from policylang.testing.path_runs import Setup, batch_of, compare_paths

        function = _function(options.model)
        with users_code():
            model, loss_fn, batch = function()
        made = [model]
        setup = Setup(lambda: made.pop() if made else function()[0], loss_fn, batch_of(batch), guard=users_code)
        found = compare_paths(setup, policy, options.path, _tell)
    except UsersCodeError as failed:
        help = "the function returns (model, loss_fn, batch), and loss_fn(model, *batch) a scalar"
        return show(failed, "agree", options.model, help)
    if options.output_format == "json":
        say(json.dumps(found.to_dict(), indent=2), "json")
    else:
        say(found)
    return Exit.CLEAN if found.agrees else Exit.DIAGNOSTICS


def _tell(stage: str) -> None:
    print(f"policylang agree: {stage} …", file=sys.stderr, flush=True)


def _function(text: str) -> Callable[[], Any]:
    if text != _LLAMA:
        return named_function(text)
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
