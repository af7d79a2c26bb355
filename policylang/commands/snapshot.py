"""Write the facts of a graph to a file, for check, plan, explain and diff to plan on without the model.

MODULE:FUNCTION names a Python function without arguments, package.module:function, that returns a graph module, what
policylang.trace_step returned, or a model that was compiled under a policy and has run forward. The current folder is
searched for it first, as `python -m` does.

examples:

  policylang snapshot train.models:llama3_8b -o llama3_8b.graph
  policylang snapshot train.models:moe -o moe.graph --import my_package.kernels

exit codes: 0 written, 1 the function or its module failed, which is shown, or returned nothing that has a graph, 2 no
such function
"""

from __future__ import annotations

import argparse

from policylang.commands.shared.exit import Exit
from policylang.commands.shared.inputs import add_import, add_snapshot, print_snapshot

NAME = "snapshot"
SUMMARY = "write the facts of a graph to a file"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what returns a graph, a traced step or a model")
    add_import(parser)
    add_snapshot(parser)


def run(options: argparse.Namespace) -> Exit:
    from policylang.commands.shared.users_code import UsersCodeError, named_function, need_torch, show, users_code

    need_torch()
    try:
        function = named_function(options.function)
        with users_code():
            subject = function()
    except UsersCodeError as failed:
        return show(failed, NAME, options.function, "the function is called without arguments")
    from policylang.api.snapshot import load_snapshot, snapshot

    for path in snapshot(subject, options.output):
        print_snapshot(path, load_snapshot(path))
    return Exit.CLEAN
