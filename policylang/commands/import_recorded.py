"""Make a snapshot of a recorded graph: JSON, gzipped or not, as docs/snapshots.md describes it.

Needs torch, which knows what the recorded operators are and what they cost.

examples:

  policylang import recorded.json.gz -o recorded.graph

exit codes: 0 written, 1 not a recorded graph, 2 a file that cannot be read or written
"""

from __future__ import annotations

import argparse
from pathlib import Path

from policylang.commands.inputs import add_options, add_snapshot, print_snapshot
from policylang.commands.output import Exit, doing
from policylang.commands.users_code import need_torch


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a recorded graph, .json or .json.gz")
    add_options(parser, "--import")
    add_snapshot(parser)


def run(options: argparse.Namespace) -> Exit:
    need_torch()
    from policylang.graph.recorded import recorded_facts
    from policylang.graph.snapshot import write

    with doing(f"reading {options.file}"):
        facts = recorded_facts(options.file)
    write(facts, options.output)
    print_snapshot(Path(options.output), facts)
    return Exit.CLEAN
