"""What several commands take: policies, snapshots, the form of the output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from policylang.commands.shared.exit import Exit, UsageError
from policylang.planning.capabilities import PLANNED

if TYPE_CHECKING:
    from policylang.api.check import CheckResult
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


def add_form(parser: argparse.ArgumentParser, *more: str, help: str | None = None) -> None:
    parser.add_argument("--output-format", choices=("text", *more), default="text", help=help)


def add_form_of_findings(parser: argparse.ArgumentParser) -> None:
    add_form(parser, "concise", "json", "github", "sarif", help="how to print what was found (default: text)")


def add_snapshot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the snapshot, such as llama3_8b.graph")


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


def print_findings(found: CheckResult, form: str, summary: str, *, failed: bool) -> Exit:
    """Print diagnostics in a form, for people with a last line that sums them up; the exit code that goes with them."""
    from policylang.report.diagnostics import RENDERERS

    parts = [RENDERERS[form](found.diagnostics).rstrip("\n"), summary if form == "text" else ""]
    if printed := "\n\n".join(filter(None, parts)):
        print(printed)
    return Exit.USAGE if found.unreadable else Exit.DIAGNOSTICS if failed else Exit.CLEAN


def write_page(page: str, out: str) -> None:
    """Raises ``UsageError`` where it cannot be written."""
    try:
        Path(out).write_text(page, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write `{out}`: {error.strerror or error}") from None
    print(f"wrote {out}", file=sys.stderr)


def print_snapshot(path: Path, facts: Facts) -> None:
    print(f"{path}: {facts.kind.value} graph of {len(facts):,} nodes, {path.stat().st_size:,} bytes")
