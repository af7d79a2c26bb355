"""Make a snapshot of a recorded graph: JSON, gzipped or not, as docs/snapshots.md describes it.

Needs torch, which knows what the recorded operators are and what they cost.

exit codes: 0 written, 1 not a recorded graph, 2 a file that cannot be read or written
"""

from __future__ import annotations

import argparse
from pathlib import Path

from policylang.commands.shared.exit import Exit

NAME = "import"
SUMMARY = "make a snapshot of a graph recorded as JSON"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recorded graph, .json or .json.gz")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the snapshot, such as llama3_8b.graph")


def run(options: argparse.Namespace) -> Exit:
    from policylang.commands.shared.inputs import refuse
    from policylang.commands.shared.users_code import torch_is_missing

    if torch_is_missing(NAME):
        return Exit.USAGE
    from policylang.errors import PolicyError
    from policylang.graph.files.json_import import recorded_facts
    from policylang.graph.files.snapshot import write

    try:
        facts = recorded_facts(options.file)
        write(facts, options.output)
    except PolicyError as error:
        return refuse(error.diagnostics)
    size = Path(options.output).stat().st_size
    print(f"{options.output}: {facts.kind.value} graph of {len(facts):,} nodes, {size:,} bytes")
    return Exit.CLEAN
