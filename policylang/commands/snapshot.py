"""Write the facts of a graph to a file, for check, plan, explain and diff to plan on without the model.

MODULE:FUNCTION names a Python function without arguments, package.module:function, that returns a graph module, what
policylang.trace_step returned, or a model that was compiled under a policy and has run forward. The current folder is
searched for it first, as `python -m` does.

exit codes: 0 written, 1 the function failed or returned nothing that has a graph, 2 no such function
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from policylang.commands import Exit

NAME = "snapshot"
SUMMARY = "write the facts of a graph to a file"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="what returns a graph, a traced step or a model")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the snapshot, such as llama3_8b.graph")


def run(options: argparse.Namespace) -> Exit:
    function = _function(options.function)
    if isinstance(function, str):
        print(f"policylang snapshot: {function}", file=sys.stderr)
        print("help: name a function as `package.module:function`", file=sys.stderr)
        return Exit.USAGE
    from policylang.commands.inputs import refuse
    from policylang.errors import PolicyError
    from policylang.snapshots import load_snapshot, snapshot

    try:
        paths = snapshot(function(), options.output)
    except PolicyError as error:
        return refuse(error.diagnostics)
    for path in paths:
        facts = load_snapshot(path)
        print(f"{path}: {facts.kind.value} graph of {len(facts):,} nodes, {path.stat().st_size:,} bytes")
    return Exit.CLEAN


def _function(text: str) -> Callable[[], Any] | str:
    """The function that a text names, or what is wrong with the text."""
    from importlib import import_module

    module_name, mark, name = text.partition(":")
    if not mark or not module_name or not name:
        return f"`{text}` names no function"
    sys.path.insert(0, "")
    try:
        found: Any = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # it is there, and needs something that is not
        return f"there is no module `{error.name}`"
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if callable(found) else f"`{module_name}` has no function `{name}`"
