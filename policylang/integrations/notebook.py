"""``%%policy``: a cell of a notebook with a policy, checked, planned on a graph that is at hand, and shown.

``%load_ext policylang`` registers it, and ``%policy`` for a file. It needs IPython; importing policylang needs none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen
from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import display

from policylang.api.check import check
from policylang.api.load import DeviceLike, on_device, operators_at_hand
from policylang.api.planned_graphs import GraphLike, PathName
from policylang.api.settings import ProjectSettings, as_typed, project_settings
from policylang.errors import PolicyError, PolicyMatchError, PolicyMeaningError
from policylang.graph.facts import Facts
from policylang.language.codes import diagnose, is_error
from policylang.language.diagnostics import Diagnostic
from policylang.language.figures import counted, file_name, joined
from policylang.language.nearest import did_you_mean, nearest
from policylang.language.resolution.loader import load_policy, load_source
from policylang.language.source import Source
from policylang.language.syntax import Policy
from policylang.planning.capabilities import PLANNED
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.plan import Plan
from policylang.report.diagnostics import CheckResult, render_text
from policylang.report.layout import table
from policylang.report.plan_text import plan_text

NO_GRAPH = "APL648"
_NAMES = ("policy",)
_DOTTED = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@frozen(eq=False, repr=False)
class CheckedCell:
    """What ``%%policy`` shows, and what ``_`` is after it."""

    policy: Policy | None
    """None where the text has errors."""
    plans: tuple[Plan, ...]
    """One for each graph; none without a graph."""
    diagnostics: tuple[Diagnostic, ...]
    """What is wrong with the text, and between it and the graphs."""
    summary: str = field(default="")
    """``checked on llama3_8b.graph, from pyproject.toml: 1 error``."""

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (render_text(self.diagnostics), *map(_shown, self.plans), self.summary)))

    def __repr__(self) -> str:
        return str(self)


def _shown(plan: Plan) -> str:
    """What each rule matches and decides, and the totals without their heading."""
    rows = [("line", "rule", "matched", "decided")]
    rows += [
        (file_name(each.rule.source), each.rule.text, f"{len(each.matched):,}", f"{len(each.decided):,}")
        for each in plan.rules
    ]
    totals = plan_text(breakdown(plan), (), summary=True).partition("\n\n")[2]
    return "\n\n".join((str(plan), table(rows, right=range(2, 4)), totals))


def register(shell: Any) -> None:
    """Let a shell know ``%%policy`` and ``%policy``."""
    shell.register_magic_function(_magic(shell), "line_cell", _NAMES[0])


def unregister(shell: Any) -> None:
    """Take them away again."""
    for kind in shell.magics_manager.magics.values():
        for name in _NAMES:
            kind.pop(name, None)


def _parser() -> MagicArgumentParser:
    parser = MagicArgumentParser(prog="%policy", description="Check a policy, and plan it on a graph.")
    parser.add_argument(
        "given",
        nargs="*",
        type=_unquoted,
        metavar="GRAPH",
        help="a variable (facts, a plan, a graph module, a traced step, a compiled model) or the file of a snapshot; "
        "before it, behind `%%policy` with no cell below, a policy file or a bundled policy. Without a graph, the one "
        "that `[tool.policylang]` of the project's pyproject.toml names",
    )
    parser.add_argument("--path", choices=PLANNED, help="plan as this path carries policies out")
    parser.add_argument(
        "--device", type=_unquoted, help="say times too: a bundled profile, a file with one, or a variable"
    )
    parser.add_argument("--name", help="the variable that the policy is bound to")
    parser.add_argument(
        "--no-project", action="store_false", dest="project", help="take nothing from the project's pyproject.toml"
    )
    return parser


def _unquoted(word: str) -> str:
    """A word of the line as it is meant: IPython leaves the quotes that a path with spaces needs."""
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" else word


def _magic(shell: Any) -> Callable[..., CheckedCell | None]:
    parser = _parser()

    def policy(line: str, cell: str | None = None) -> CheckedCell | None:
        options = parser.parse_argstring(line)
        wanted = (0, 1) if cell is not None else (1, 2)
        if not wanted[0] <= len(options.given) <= wanted[1]:
            raise UsageError("a graph at most: %%policy [GRAPH]" if cell is not None else "%policy FILE [GRAPH]")
        if options.name is not None and not options.name.isidentifier():
            raise UsageError(f"`{options.name}` cannot be the name of a variable")
        if cell is not None:
            # The line of the magic counts: lines are those that the notebook numbers.
            text: Source | str = Source(f"<In[{shell.displayhook.prompt_count}]>", f"\n{cell}")
        else:
            text = options.given.pop(0)
        found, at_hand = _checked(shell, text, options)
        if any(map(is_error, found.diagnostics)):
            display(found)
            raise _quiet(PolicyMatchError if at_hand else PolicyMeaningError, found)
        if options.name is not None:
            shell.user_ns[options.name] = found.policy
        return found

    policy.__doc__ = parser.format_help()
    return policy


def _checked(shell: Any, text: Source | str, options: Any) -> tuple[CheckedCell, bool]:
    """And whether it is the graph that the text does not fit."""
    settings, problems = project_settings(Path()) if options.project else (ProjectSettings(), ())
    if problems:
        return CheckedCell(None, (), problems, "the project's settings are wrong"), False
    named = options.given[0] if options.given else None
    try:
        graphs = _graphs(shell, named) if named is not None else [as_typed(settings.graph)] if settings.graph else []
        path = options.path or (settings.path if graphs else None)
        device = _variable(shell, options.device) or options.device or (settings.device if graphs else None)
        result = check(text, graph=graphs, path=cast("PathName | None", path), device=cast("DeviceLike | None", device))
        policy = _policy(text, result, device)
    except PolicyError as error:
        return CheckedCell(None, (), error.diagnostics, "not checked"), False
    taken = [key for key in ("graph", "path", "device") if getattr(settings, key) and not _given(options, key)]
    summary = _summary(result, named, settings, taken if graphs else [])
    return CheckedCell(policy, result.plans, result.diagnostics, summary), bool(result.plans)


def _given(options: Any, key: str) -> bool:
    return bool(options.given if key == "graph" else getattr(options, key))


def _policy(text: Source | str, result: CheckResult, device: Any) -> Policy | None:
    """Loaded, on its device; None where the text has errors. Raises ``PolicyError`` for a device that there is not."""
    if result.plans:
        loaded: Policy | None = result.plans[0].policy
    else:
        made = load_source(text, None, operators=operators_at_hand()) if isinstance(text, Source) else load_policy(text)
        loaded = made.policy
    return None if loaded is None else on_device(loaded, device)


def _summary(result: CheckResult, named: str | None, settings: ProjectSettings, taken: Sequence[str]) -> str:
    warnings, errors = counted(result.warnings, "warning"), counted(result.errors, "error")
    verdict = f"{errors}, {warnings}" if result.errors or result.warnings else "clean"
    graph = named or (as_typed(settings.graph) if settings.graph and "graph" in taken else None)
    where = f" on {graph}" if graph is not None else ", without a graph"
    from_ = f" ({joined(taken)} from {as_typed(str(settings.file))})" if taken else ""
    return f"checked{where}{from_}: {verdict}"


def _graphs(shell: Any, named: str) -> Sequence[GraphLike]:
    """What a variable holds, else the file of that name. Raises ``PolicyError`` where it is neither."""
    value = _variable(shell, named)
    if value is None:
        if Path(named).exists() or not _DOTTED.fullmatch(named):
            return [named]
        raise PolicyMeaningError([_neither(shell, named)])
    if isinstance(value, Facts | str | Path):
        return [value]
    if isinstance(value, Plan):
        return [value.before]
    if isinstance(value, CheckedCell):
        return [plan.before for plan in value.plans]
    from policylang.api.snapshot import facts_of  # what has a graph of torch's needs torch, and is there with it

    return facts_of(value)


def _variable(shell: Any, named: str | None) -> Any:
    """What a name, or a path of attributes, stands for in the notebook; None for what is none of its variables."""
    if named is None or not _DOTTED.fullmatch(named):
        return None
    first, *attributes = named.split(".")
    value = shell.user_ns.get(first)
    for attribute in attributes:
        value = getattr(value, attribute, None)
    return value


def _neither(shell: Any, named: str) -> Diagnostic:
    mine = [name for name, value in shell.user_ns.items() if not name.startswith("_") and not isinstance(value, type)]
    files = [file.name for file in Path().glob("*.graph")]
    help = did_you_mean(nearest(named, [*mine, *files])) or "trace one with `policylang.trace_step`, or name a snapshot"
    return diagnose(NO_GRAPH, f"`{named}` is neither a variable of this notebook nor a file", help=help)


def _quiet(kind: type[PolicyError], found: CheckedCell) -> PolicyError:
    """An error that ends the cell, and the run of all cells, without saying again what stands above it."""
    error = kind(found.diagnostics)
    count = counted(sum(map(is_error, found.diagnostics)), "error")
    error._render_traceback_ = lambda: [f"{kind.__name__}: {count} above"]  # type: ignore[attr-defined]
    return error
