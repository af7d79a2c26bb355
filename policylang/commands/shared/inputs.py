"""What several commands take: policies, snapshots, the form of the output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

from policylang.commands.shared.exit import Exit, UsageError
from policylang.planning.capabilities import PLANNED
from policylang.report.diagnostics import RENDERERS, CheckResult, render_text

if TYPE_CHECKING:
    from policylang.graph.facts import Facts
    from policylang.language.devices.profile import DeviceProfile
    from policylang.language.diagnostics import Diagnostic, Source
    from policylang.language.syntax import Policy
    from policylang.planning.plan import Plan


STDIN = "-"
STDIN_NAME = "<stdin>"


def add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--graph",
        metavar="GRAPH",
        help="a snapshot that `policylang snapshot` wrote, a recorded graph in JSON, or a graph as text",
    )


def add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--path",
        choices=PLANNED,
        help="plan as this path carries policies out, and refuse what it refuses: eager checkpoints (eager), "
        "torch.compile's backend (joint), a traced step (flat), a half of a partition (half), a hook of Inductor's "
        "(hook); by default what the graph is",
    )


def add_device(parser: argparse.ArgumentParser, *, of_policy: bool = True) -> None:
    default = "; by default the one that the policy's `device` line names, where it has one" if of_policy else ""
    parser.add_argument(
        "--device",
        metavar="NAME|FILE",
        help=f"say times too, of this device: a bundled profile such as h100-sxm, or a file with one{default}",
    )


def add_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this Python module first, for the operators that it registers; the current folder is searched "
        "for it; may be given several times",
    )


def add_form(parser: argparse.ArgumentParser, *more: str, help: str | None = None) -> None:
    parser.add_argument("--output-format", choices=tuple(dict.fromkeys(("text", *more))), default="text", help=help)
    add_width(parser)


class _Gone(argparse.Action):
    """An option that is no more: it says what there is instead."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(f"there is no page of this any more\nhelp: {self.const}")


def add_gone_page(parser: argparse.ArgumentParser, instead: str) -> None:
    parser.add_argument("--html", action=_Gone, const=instead, help=argparse.SUPPRESS)


def add_width(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--width",
        type=_width,
        metavar="COLUMNS",
        help="fit text to so many columns; 0 for as many as it takes (default: the terminal's, all in a pipe or file)",
    )


def _width(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"`{text}` is no number of columns")
    return int(text)


def add_form_of_findings(parser: argparse.ArgumentParser) -> None:
    add_form(parser, *RENDERERS, help="how to print what was found (default: text)")


def add_snapshot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the snapshot, such as llama3_8b.graph")


def read_policy(name: str, facts: Facts | None = None) -> Policy:
    """The policy of a file, of the library, or, for ``-``, of the standard input; ``facts`` are of the graph that it is
    for. Raises ``PolicyError`` with every diagnostic of the file."""
    from policylang.api.load import operators_at_hand, operators_in
    from policylang.errors import PolicyMeaningError
    from policylang.language.diagnostics import Diagnostic
    from policylang.language.loader import load_policy, load_source

    operators = operators_at_hand(met=() if facts is None else operators_in(facts))
    if name == STDIN:
        source = read_stdin()
        if isinstance(source, Diagnostic):
            raise PolicyMeaningError((source,))
        loaded = load_source(source, None, operators=operators)
    else:
        loaded = load_policy(name, operators=operators)
    if loaded.policy is None:
        raise PolicyMeaningError(loaded.diagnostics)
    return loaded.policy


def read_stdin() -> Source | Diagnostic:
    """The policy that stands in the standard input, or why it cannot be read. What it includes is looked for from the
    current folder."""
    from policylang.language.files import source_of
    from policylang.language.lexer import MAX_FILE

    return source_of(sys.stdin.buffer.read(MAX_FILE + 1), STDIN_NAME)


def check_policies(names: Sequence[str], **how: Any) -> CheckResult:
    """``policylang.check`` of policies one of which may be the standard input."""
    from policylang.api.check import check
    from policylang.language.diagnostics import Diagnostic

    given = [(name, read_stdin() if name == STDIN else name) for name in names]
    result = check(*(each for _, each in given if not isinstance(each, Diagnostic)), **how)
    problems = tuple(each for _, each in given if isinstance(each, Diagnostic))
    if not problems:
        return result
    return evolve(
        result,
        files=(*result.files, STDIN_NAME),
        diagnostics=(*(each.found_in(STDIN_NAME) for each in problems), *result.diagnostics),
    )


def once_at_most(*names: str) -> None:
    """Raise ``UsageError`` where the standard input is named twice: it can be read once."""
    if names.count(STDIN) > 1:
        raise UsageError("`-`, the standard input, can be read once")


def read_graph(name: str) -> Facts:
    """Raises ``PolicyError`` for a file that holds no graph."""
    from policylang.api.planned_graphs import facts_of

    return facts_of(name)


def read_profile(name: str | None) -> DeviceProfile | None:
    """What ``--device`` names. Raises ``PolicyError`` where there is no such profile."""
    from policylang.api.devices import device_of

    return device_of(name)


def planned(policy: Policy, facts: Facts, path: str | None, device: DeviceProfile | None = None) -> Plan:
    from policylang.planning.capabilities import capabilities_for
    from policylang.planning.planner import plan

    return plan(policy, facts, capabilities_for(facts.kind, path), device=device)


def warn_of_devices(facts: Facts, *plans: Plan) -> None:
    """Say on the standard error where the graph has other kernels than those of the device that it trains on, and where
    the device that is to say times has no figure for something."""
    from policylang.commands.shared.output import tell
    from policylang.graph.traced_device import kernel_findings

    untold = (made.untold for made in plans if made.untold is not None)
    if found := tuple(dict.fromkeys((*kernel_findings(facts), *untold))):
        tell(render_text(found))


def refuse(diagnostics: Iterable[Diagnostic]) -> Exit:
    """Print what is wrong on the standard error; the exit code that goes with it."""
    from policylang.api.project.settings import PROBLEMS as WRONG_SETTINGS
    from policylang.commands.shared.output import tell

    found = tuple(diagnostics)
    tell(render_text(found))
    unreadable = CheckResult((), found).unreadable or any(each.code in WRONG_SETTINGS for each in found)
    return Exit.USAGE if unreadable else Exit.DIAGNOSTICS


def print_findings(found: CheckResult, form: str, summary: str = "", *, failed: bool) -> Exit:
    """Print what was found in a format, for people with a last line that sums all up; the exit code that goes with
    it."""
    from policylang.commands.shared.output import say

    printed = RENDERERS[form](found).rstrip("\n")
    if form == "text":
        printed = "\n\n".join(filter(None, (printed, summary)))
    if printed:
        say(printed, form)
    return Exit.USAGE if found.unreadable else Exit.DIAGNOSTICS if failed else Exit.CLEAN


def print_snapshot(path: Path, facts: Facts) -> None:
    from policylang.commands.shared.output import say

    say(f"{path}: {facts.kind.value} graph of {len(facts):,} nodes, {path.stat().st_size:,} bytes")
