"""Write the facts of a graph to a file, for check, plan, explain and diff to plan on without the model.

MODULE:FUNCTION names a Python function without arguments, package.module:function, that returns a graph module, what
policylang.trace_step returned, or a model that was compiled under a policy and has run forward. The current folder is
searched for it first, as `python -m` does.

exit codes: 0 written, 1 the function or its module failed, which is shown, or returned nothing that has a graph, 2 no
such function
"""

from __future__ import annotations

import argparse
import sys

from policylang.commands.shared.exit import Exit

NAME = "snapshot"
SUMMARY = "write the facts of a graph to a file"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what returns a graph, a traced step or a model")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the snapshot, such as llama3_8b.graph")


def run(options: argparse.Namespace) -> Exit:
    from policylang.commands.shared.inputs import refuse
    from policylang.commands.shared.users_code import UsersCodeError, named_function, show, torch_is_missing, users_code
    from policylang.errors import PolicyError

    if torch_is_missing(NAME):
        return Exit.USAGE
    try:
        function = named_function(options.function)
        if isinstance(function, str):
            print(f"policylang snapshot: {function}", file=sys.stderr)
            print("help: name a function as `package.module:function`", file=sys.stderr)
            return Exit.USAGE
        with users_code():
            subject = function()
    except UsersCodeError as failed:
        return show(failed, NAME, options.function, "the function is called without arguments")
    from policylang.api.snapshot import load_snapshot, snapshot

    try:
        paths = snapshot(subject, options.output)
    except PolicyError as error:
        return refuse(error.diagnostics)
    for path in paths:
        facts = load_snapshot(path)
        print(f"{path}: {facts.kind.value} graph of {len(facts):,} nodes, {path.stat().st_size:,} bytes")
    return Exit.CLEAN
