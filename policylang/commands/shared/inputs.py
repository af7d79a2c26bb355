"""What several commands take: a policy, a snapshot; and how they say what is wrong with one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from policylang.commands.shared.exit import Exit
from policylang.planning.capabilities import PLANNED

if TYPE_CHECKING:
    from policylang.graph.facts import Facts
    from policylang.language.diagnostics import Diagnostic
    from policylang.language.syntax import Policy
    from policylang.planning.plan import Plan


def add_graph(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--graph", required=required, metavar="SNAPSHOT", help="a file that `policylang snapshot` wrote"
    )


def add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        choices=PLANNED,
        help="plan as torch.compile's backend does (joint) or as a traced step is (flat); by default what the graph is",
    )


def read_policy(name: str) -> Policy:
    """Raises ``PolicyError`` with every diagnostic of the file."""
    from policylang.api.load import operators_at_hand
    from policylang.errors import PolicyMeaningError
    from policylang.language.resolution.loader import load_policy

    loaded = load_policy(name, operators=operators_at_hand())
    if loaded.policy is None:
        raise PolicyMeaningError(loaded.diagnostics)
    return loaded.policy


def read_graph(name: str) -> Facts:
    """Raises ``PolicyError`` for a file that is no snapshot."""
    from policylang.graph.files.snapshot import load

    return load(name)


def planned(policy: Policy, facts: Facts, path: str | None) -> Plan:
    from policylang.planning.capabilities import capabilities_for
    from policylang.planning.planner import plan

    return plan(policy, facts, capabilities_for(facts.kind, path))


def refuse(diagnostics: Iterable[Diagnostic]) -> Exit:
    """Print what is wrong on the standard error; the exit code that goes with it."""
    from policylang.api.check import CheckResult
    from policylang.report.diagnostics import render_text

    found = tuple(diagnostics)
    print(render_text(found), file=sys.stderr)
    return Exit.USAGE if CheckResult((), found).unreadable else Exit.DIAGNOSTICS
