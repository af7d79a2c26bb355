"""Runs files of policy tests, which is what ``policylang test`` prints, as data. Needs no torch.

The comments of a policy in a fenced block claim what comes of it: ``# matches: mm, mm_2``. A comment is cut at ``;``. A
piece that starts with one of the words and a colon is a claim, any other is prose. Behind a statement, a claim is about
that statement; on a line of its own, about the whole policy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

from attrs import define, evolve, field, frozen

from policylang.api.planned_graphs import findings, refused_of_any_graph, scheduled
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import SUFFIX, load
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import CODES, Diagnostic, Fix, Severity, Source, Span, diagnose, is_error, written
from policylang.language.files import SUFFIX as POLICIES
from policylang.language.files import find_policy, policy_files, read_source
from policylang.language.lexer import comments, split
from policylang.language.loader import load_source
from policylang.language.operators import OperatorTable
from policylang.language.parser import parse_file
from policylang.language.shown import counted, did_you_mean, nearest
from policylang.language.syntax import Bucket, Include, Let, Policy, Rewriting, Rule, Scheduling, Statement
from policylang.planning.capabilities import PLANNED, PathName, capabilities_for
from policylang.planning.graph_edit import Edit, Refusal
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import OrderPlan, Plan
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Selections, selections_for
from policylang.report.diagnostics import CheckResult

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})(?P<info>.*)")
_HEADING = re.compile(r"#{1,6}[ \t]")
_WORD = re.compile(r"\S+")


@frozen
class Fence:
    """A fenced block. ``section`` counts the headings above it."""

    words: tuple[Span, ...]
    """The words behind the opening fence: its language first."""
    start: int
    """The offset of its content in the file."""
    text: str
    section: int
    opening: Span

    @property
    def language(self) -> str:
        return self.words[0].text if self.words else ""


def fences(source: Source) -> list[Fence]:
    """The fenced blocks of a file from top to bottom; one that is never closed goes to its end."""
    found: list[Fence] = []
    opened: tuple[str, Span, int] | None = None
    section = position = 0
    for line in source.text.split("\n"):
        matched = _FENCE.fullmatch(line.rstrip("\r"))
        if opened is not None:
            marks, opening, start = opened
            if matched is not None and matched["marks"].startswith(marks) and not matched["info"].strip():
                found.append(_fence(source, opening, start, position, section))
                opened = None
        elif matched is not None and not (matched["marks"][0] == "`" and "`" in matched["info"]):
            span = Span(source, position + len(matched["indent"]), position + len(line.rstrip()))
            opened = matched["marks"], span, position + len(line) + 1
        elif _HEADING.match(line):
            section += 1
        position += len(line) + 1
    if opened is not None:
        found.append(_fence(source, opened[1], opened[2], len(source.text), section))
    return found


def _fence(source: Source, opening: Span, start: int, end: int, section: int) -> Fence:
    marks = len(opening.text) - len(opening.text.lstrip("`~"))
    at, found = opening.start + marks, _WORD.finditer(opening.text[marks:])
    words = tuple(Span(source, at + word.start(), at + word.end()) for word in found)
    return Fence(words, start, source.text[start:end], section, opening)


def lifted(fence: Fence) -> Source:
    """The content of a block as a separate source, whose lines have the numbers that they have in the file."""
    source = fence.opening.source
    return Source(source.name, "\n" * fence.opening.line + fence.text)


def lowered_diagnostic(diagnostic: Diagnostic, fence: Fence, source: Source) -> Diagnostic:
    """A diagnostic of a lifted block as one of the file; what points nowhere points at the fence."""
    related = tuple(evolve(each, span=lowered(each.span, fence, source)) for each in diagnostic.related)
    return evolve(diagnostic, span=lowered(diagnostic.span, fence, source) or fence.opening, related=related)


def lowered(span: Span | None, fence: Fence, source: Source) -> Span | None:
    """A span of a lifted block as a span of the file; one of another source as it is."""
    if span is None or span.source != source:
        return span
    shift = fence.start - fence.opening.line
    return Span(fence.opening.source, span.start + shift, span.end + shift)


CANNOT_BE_READ = "APL512"

OF_STATEMENTS = ("matches", "decides", "moves")
OF_POLICY = ("saved", "recomputed")
OF_DIAGNOSTICS = ("error", "warning")
WORDS = (*OF_STATEMENTS, *OF_POLICY, *OF_DIAGNOSTICS)
NOTHING = "nothing"

_CLAIM = re.compile(r"\s*(?P<word>[A-Za-z]+)\s*:(?P<value>.*)", re.DOTALL)
_WITHOUT_COLON = re.compile(r"\s*(error|warning)\s+APL\d+")
_CODE = re.compile(r"APL\d{3}")
_NAME = re.compile(r"\w+")
_COUNT = re.compile(r"\d{1,9}")


@frozen
class Claim:
    """``span``: where it is written; ``lines``: first and last of the statement that it is about, None for all."""

    word: str
    values: tuple[str, ...]
    """Node names or codes; empty for ``nothing``."""
    count: int | None
    """The number of nodes, where one is given in place of names."""
    span: Span
    lines: tuple[int, int] | None


def read_claims(source: Source) -> tuple[list[Claim], list[Diagnostic]]:
    """The claims of a policy's text, and what keeps others from being read."""
    claims: list[Claim] = []
    problems: list[Diagnostic] = []
    statements: dict[int, tuple[int, int]] = {}  # line to the first and last line of the statements that it holds
    for start, end in split(source).ranges:
        first, last = source.line_column(start)[0], source.line_column(end)[0]
        first = statements.get(first, (first, last))[0]
        statements |= dict.fromkeys(range(first, last + 1), (first, last))
    for start, end in comments(source):
        at = start + 1
        line = source.line_column(start)[0]
        alone = not source.text[source.text.rfind("\n", 0, start) + 1 : start].strip()
        lines = None if alone else statements.get(line, (line, line))
        for piece in source.text[start + 1 : end].split(";"):
            lead = len(piece) - len(piece.lstrip())
            span = Span(source, at + lead, at + len(piece.rstrip()))
            at += len(piece) + 1
            found = _read(piece, span, lines)
            if isinstance(found, Claim):
                claims.append(found)
            elif found is not None:
                problems.append(found)
    return claims, problems


def _read(piece: str, span: Span, lines: tuple[int, int] | None) -> Claim | Diagnostic | None:
    def wrong(message: str, help: str | None = None, fixes: tuple[Fix, ...] = ()) -> Diagnostic:
        return diagnose(CANNOT_BE_READ, message, span, help=help, fixes=fixes)

    found = _CLAIM.fullmatch(piece)
    if found is None:
        forgotten = _WITHOUT_COLON.match(piece)
        return wrong(f"a claim has a colon: `{forgotten[1]}: …`") if forgotten else None
    word, values = found["word"], [value.strip() for value in found["value"].split(",")]
    if word not in WORDS:
        near = nearest(word, WORDS)
        at = Span(span.source, span.start, span.start + len(word))
        fixes = written(at, near, near=True) if at.text == word else ()
        return wrong(f"there is no claim `{word}:`", did_you_mean(near), fixes) if near else None
    if word in OF_STATEMENTS and lines is None:
        return wrong(f"`{word}:` is about a statement", "write it after the rule or the `let` that it is about")
    if word in OF_POLICY and lines is not None:
        return wrong(f"`{word}:` is about the whole policy", "write it on a separate line")
    if word in OF_DIAGNOSTICS:
        for value in values:
            if not _CODE.fullmatch(value):
                return wrong(f"`{value}` is no code", "for example `# error: APL301`")
        unknown = [value for value in values if value not in CODES]
        if unknown:
            return wrong(f"no diagnostic has the code `{unknown[0]}`")
        return Claim(word, (*values,), None, span, lines)
    if values == [NOTHING]:
        return Claim(word, (), None, span, lines)
    if len(values) == 1 and _COUNT.fullmatch(values[0]):
        return Claim(word, (), int(values[0]), span, lines)
    if others := [value for value in values if not _NAME.fullmatch(value)]:
        help = f"after `{word}:` come names of nodes, their number, or `{NOTHING}`"
        return wrong(f"`{others[0]}` is no name of a node", help)
    return Claim(word, tuple(values), None, span, lines)


INFO = "APL504"

_KINDS = {kind.value: kind for kind in GraphKind if kind is not GraphKind.BACKWARD}


OTHERWISE, NOT_FOUND, NO_GRAPH = "APL510", "APL511", "APL513"
_UNUSED = "APL110"
_FIRST_ON_A_GRAPH = "APL3"
_MOST_NAMES = 8


@define(eq=False, slots=False)
class _Case:
    source: Source
    claims: Sequence[Claim]
    plan: Plan | None
    planned: bool
    graph_is_broken: bool
    allowed: frozenset[str]

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        return parse_file(self.source)[0].statements

    @cached_property
    def selections(self) -> Selections:
        assert self.plan is not None
        return selections_for(self.plan.policy, self.plan.facts, times=self.plan.times)

    def compare(self, found: Sequence[Diagnostic]) -> Iterable[Diagnostic]:
        """All that is not as it is claimed. Of a policy or graph that cannot be read, only why not."""
        unclaimed = list(self._unclaimed(found))
        yield from unclaimed
        unplanned = self.planned and self.plan is None and (self.graph_is_broken or any(map(is_error, unclaimed)))
        for claim in self.claims:
            if claim.word in OF_DIAGNOSTICS:
                yield from self._missing(claim, found, unplanned)
            elif self.plan is not None:
                yield from self._nodes(claim, self.plan)
            elif not self.planned:
                help = "name one after the fence, `apl graph=NAME`, or write a `graph` block above"
                yield diagnose(NO_GRAPH, f"`{claim.word}:` needs a graph, and there is none", claim.span, help=help)
            elif not unplanned:
                yield diagnose(OTHERWISE, "a policy with errors matches nothing", claim.span)

    def _unclaimed(self, found: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
        """Errors and warnings that the policy does not claim to get."""
        for each in found:
            if each.severity is Severity.NOTE or each.code in self.allowed:
                continue
            claims = [claim for claim in self.claims if self._is_about(claim, each)]
            looked_at = each.code == _UNUSED and any(claim.word == "matches" for claim in claims)
            if not looked_at and not any(c.word == each.severity.value and each.code in c.values for c in claims):
                yield each

    def _is_about(self, claim: Claim, diagnostic: Diagnostic) -> bool:
        if claim.lines is None or diagnostic.span is None:
            return claim.lines is None
        first, last = claim.lines
        if diagnostic.span.source != self.source:
            return any(isinstance(each, Include) and first <= each.span.line <= last for each in self.statements)
        return first <= diagnostic.span.line <= last

    def _missing(self, claim: Claim, found: Sequence[Diagnostic], unplanned: bool) -> Iterable[Diagnostic]:
        there = [each for each in found if self._is_about(claim, each)]
        for code in claim.values:
            if unplanned and code >= _FIRST_ON_A_GRAPH:
                continue
            if not any(each.code == code and each.severity.value == claim.word for each in there):
                said = sorted({f"{each.severity.value} {each.code}" for each in there})
                help = f"found: {', '.join(said)}" if said else "nothing was found here"
                yield diagnose(NOT_FOUND, f"there is no {claim.word} {code} here", claim.span, help=help)

    def _nodes(self, claim: Claim, made: Plan) -> Iterable[Diagnostic]:
        names = self._names(claim, made)
        if names is None:
            about, help = "rule", "it follows a rule or, with `matches:`, a `let`"
            if claim.word == "moves":
                about, help = "scheduling line", "it follows `bucket`, `prefetch`, `delay` or `overlap`"
            yield diagnose(OTHERWISE, f"`{claim.word}:` is about no {about}", claim.span, help=help)
            return
        if claim.count is not None:
            if claim.count != len(names):
                found = (f"found: {_listed(names)}",) if names else ()
                message = f"it {_SAYS[claim.word]} {counted(len(names), 'node')}, not {claim.count}"
                yield diagnose(OTHERWISE, message, claim.span, details=found)
            return
        there, said = set(names), set(claim.values)
        if there != said:
            missing = [name for name in claim.values if name not in there]
            beyond = [name for name in names if name not in said]
            message = f"it {_SAYS[claim.word]} {_listed(names)}"
            known = made.facts.index if made.order is None else {**made.facts.index, **made.order.facts.index}
            unknown = [name for name in missing if name not in known]
            evidence = {"not among them:": missing, "not expected:": beyond, "the graph has no node": unknown}
            details = tuple(f"{what} {_listed(which)}" for what, which in evidence.items() if which)
            yield diagnose(OTHERWISE, message, claim.span, details=details)

    def _names(self, claim: Claim, made: Plan) -> Sequence[str] | None:
        """The nodes that a claim is about, in graph order; None where there is nothing that it could be about."""
        rows: Sequence[int]
        match self._statement(claim), claim.word:
            case _, "saved":
                rows = saved_and_recomputed(made).saved
            case _, "recomputed":
                rows = saved_and_recomputed(made).recomputed
            case line, "matches" | "moves" if isinstance(line, Bucket | Scheduling):
                return None if made.order is None else _ordered(line, claim.word, made.policy, made.order)
            case Let() as let, "matches":
                rows = self.selections.rows(made.policy.lets[let.name].selector)
            case Rule() as rule, "matches" | "decides":
                account = next((each for each in made.rules if each.rule.span == rule.span), None)
                if account is None:
                    return None
                rows = self.selections.rows(account.rule.selector) if claim.word == "matches" else account.decided
            case _:
                return None
        return [made.facts.names[row] for row in rows]

    def _statement(self, claim: Claim) -> Rule | Let | Bucket | Scheduling | None:
        """The last rule, scheduling line or ``let`` on the lines that a claim is about."""
        first, last = claim.lines or (0, -1)
        kinds = Rule | Let | Bucket | Scheduling
        here = [each for each in self.statements if isinstance(each, kinds) and first <= each.span.line <= last]
        return here[-1] if here else None


def _ordered(statement: Bucket | Scheduling, word: str, policy: Policy, order: OrderPlan) -> Sequence[str] | None:
    """The collectives that a scheduling line selects or moves; for a bucket those that it merges, with `matches:` also
    those that it could not."""
    if isinstance(statement, Bucket):
        number = next(at for at, each in enumerate(policy.rewrites) if each.span == statement.span)
        left: Sequence[Refusal] = order.edits.refused if word == "matches" else ()
        found: list[Edit | Refusal] = [*order.edits.done, *left]
        return [name for each in found if each.statement == number for name in each.collectives]
    outcomes = (each for each in order.outcomes if each.statement.span == statement.span)
    return next((each.matched if word == "matches" else each.moved for each in outcomes), None)


_SAYS = {"matches": "matches", "decides": "decides", "moves": "moves", "saved": "saves", "recomputed": "recomputes"}


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"


UNCOVERED = "APL514"

_Line = Rule | Bucket | Scheduling
_Key = tuple[str, int]
"""The text of a rule's file, and where in it the rule starts: a file is the same by whatever path it is included."""


@define(eq=False)
class Coverage:
    _covered: set[_Key] = field(factory=set)

    def add(self, plan: Plan) -> None:
        """Count the rules and scheduling lines of a plan that matched."""
        self._covered.update(_key(outcome.rule) for outcome in plan.rules if outcome.matched)
        if (order := plan.order) is not None:
            made = {edit.statement for edit in order.edits.done}
            self._covered.update(_key(line) for at, line in enumerate(plan.policy.rewrites) if at in made)
            self._covered.update(_key(outcome.statement) for outcome in order.outcomes if outcome.matched)

    def of(self, paths: Sequence[str]) -> tuple[int, tuple[Diagnostic, ...]]:
        """The number of such lines in some files themselves, and an error for each that no plan covered."""
        rules = 0
        found: list[Diagnostic] = []
        for name in (file for path in paths for file in policy_files(path)):
            file, shown = find_policy(name)
            source = read_source(Path(file), shown)
            if isinstance(source, Diagnostic):
                found.append(source.found_in(shown))
                continue
            parsed, problems = parse_file(source)
            found.extend(problems)
            lines = [each for each in parsed.statements if isinstance(each, _Line)]
            rules += len(lines)
            for each in lines:
                if _key(each) not in self._covered:
                    help = "write one with a graph on which it matches"
                    found.append(diagnose(UNCOVERED, f"no test exercises `{each.span.one_line}`", each.span, help=help))
        return rules, tuple(found)


def _key(rule: Rewriting | _Line) -> _Key:
    return rule.span.source.text, rule.span.start


NO_TESTS = "APL515"
POLICY, GRAPH, PATH, ALLOW, IGNORE = "apl", "graph", "path", "allow", "ignore"
_MARKDOWN = ".md"
_INFO_HELP = "for example `apl graph=two_layers`, `apl path=eager`, `apl allow=APL303`, `apl ignore`"
_NOT_OURS = ("node_modules", "__pycache__")


@frozen
class TestResult:
    """The result of test files. ``found`` holds all that is not as the policies claim."""

    __test__ = False  # not one of pytest's, for all its name

    files: int
    policies: int
    claims: int
    found: CheckResult
    rules: int = 0
    """The number of rules that were to be covered."""


def run_files(paths: Sequence[str], cover: Sequence[str] = ()) -> TestResult:
    """Run the policy tests of Markdown files; a folder means every ``.md`` file below it that holds a policy. ``cover``
    names policies, files or folders of them: a rule of theirs that matches no node in any test is an error. Never
    raises for the content of a file, or for a missing file."""
    coverage, snapshots = Coverage(), dict[Path, Facts | None]()
    found: list[Diagnostic] = []
    files = [file for path in paths for file in files_of(path)]
    policies = claims = 0
    for name in files:
        if os.path.isdir(name):
            help = "a policy test is a Markdown file with a policy in a fenced block, ```apl"
            if os.path.isfile(policy_files(name)[0]):  # most likely to be checked, or covered
                covers = f"with `--cover {name}`, tests have to exercise them"
                help = f"`policylang check {name}` checks its policies; {covers}"
            found.append(diagnose(NO_TESTS, f"the folder `{name}` holds no policy tests", help=help).found_in(name))
            continue
        source = read_source(Path(name), name)
        if isinstance(source, Diagnostic):
            found.append(source.found_in(name))
            continue
        run = _File(source, snapshots, coverage)
        found.extend(each.found_in(name) for each in run.run())
        policies, claims = policies + run.policies, claims + run.claims
    rules, uncovered = coverage.of(cover)
    return TestResult(len(files), policies, claims, CheckResult(tuple(files), (*found, *uncovered)), rules)


def files_of(path: str) -> list[str]:
    """The files of a path. A folder without a policy in it is returned itself, so that it is reported."""
    if not os.path.isdir(path):
        return [path]
    root, found = Path(path), []
    for file in sorted(root.rglob(f"*{_MARKDOWN}")):
        if not any(part.startswith(".") or part in _NOT_OURS for part in file.relative_to(root).parts):
            source = read_source(file, str(file))
            if isinstance(source, Diagnostic) or any(fence.language == POLICY for fence in fences(source)):
                found.append(str(file))
    return found or [path]


@define(eq=False)
class _File:
    source: Source
    snapshots: dict[Path, Facts | None]
    """Snapshots that were read before; None for one that cannot be read, which was reported then."""
    coverage: Coverage
    named: dict[str, Facts | None] = field(factory=dict)
    """The facts of ``graph`` blocks by name; None as above."""
    latest: tuple[int, Facts | None] = (-1, None)
    """The section and facts of the last block without a name."""
    policies: int = 0
    claims: int = 0
    problems: list[Diagnostic] = field(factory=list)

    def run(self) -> list[Diagnostic]:
        blocks = fences(self.source)
        graphs = (each for each in blocks if each.language == GRAPH)
        named = [each for each in graphs if any(word.text not in _KINDS for word in each.words[1:])]
        for fence in (*named, *(each for each in blocks if each not in named)):
            if fence.language == GRAPH:
                self._draw(fence)
            elif fence.language == POLICY and [word.text for word in fence.words[1:]] != [IGNORE]:
                self._test(fence)
        if not any(fence.language == POLICY for fence in blocks):
            help = "write a policy in a fenced block, ```apl"
            if self.source.name.endswith(POLICIES):
                help = f"this is a policy: `policylang check {self.source.name}` checks it; a test is a Markdown file"
            self.problems.append(diagnose(NO_TESTS, f"`{self.source.name}` holds no policy to test", help=help))
        return sorted(dict.fromkeys(self.problems), key=lambda each: each.span.start if each.span else 0)

    def _draw(self, fence: Fence) -> None:
        """Read a ``graph`` block."""
        kind, name = None, None
        for word in fence.words[1:]:
            if word.text in _KINDS:
                kind = _KINDS[word.text]
            elif name is None and word.text.isidentifier():
                name = word
            else:
                help = "for example `graph two_layers flat`"
                self.problems.append(diagnose(INFO, f"`{word.text}` is no option of a graph", word, help=help))
        source = lifted(fence)
        facts, problems = read_graph(source, kind)
        self.problems.extend(lowered_diagnostic(each, fence, source) for each in problems)
        if name is None:
            self.latest = fence.section, facts
        elif name.text in self.named:
            self.problems.append(diagnose(INFO, f"there are two graphs `{name.text}`", name))
        else:
            self.named[name.text] = facts

    def _find(self, name: str, span: Span) -> Facts | None:
        """The graph of a name, else the snapshot of that path."""
        if name in self.named:
            return self.named[name]
        if not name.endswith(SUFFIX):
            near = nearest(name, self.named)
            help = did_you_mean(near) or f"a snapshot is a file `*{SUFFIX}`, a graph a block `graph {name}`"
            self.problems.append(diagnose(INFO, f"there is no graph `{name}`", span, help=help))
            return None
        path = Path(self.source.name).parent / name
        if path not in self.snapshots:
            self.snapshots[path] = None
            try:
                self.snapshots[path] = load(path)
            except PolicyGraphError as error:
                self.problems.extend(evolve(each, span=span) for each in error.diagnostics)
        return self.snapshots[path]

    def _test(self, fence: Fence) -> None:
        """Test the policy of an ``apl`` block on the graph that its fence names, or else on the one above it. Claims
        about a graph that cannot be read are left out."""
        section, facts = self.latest
        planned = section == fence.section
        facts = facts if planned else None
        named = False
        path: PathName | None = None
        allowed: tuple[str, ...] = ()
        for word in fence.words[1:]:
            key, sign, value = word.text.partition("=")
            if key == GRAPH and sign and not named:
                facts = self._find(value, evolve(word, start=word.start + len(key) + 1))
                named = planned = True
            elif key == PATH and path is None and value in PLANNED:
                path = cast(PathName, value)
            elif key == ALLOW and sign and not allowed and all(code in CODES for code in value.split(",")):
                allowed = tuple(value.split(","))
            else:
                near = nearest(word.text, (IGNORE, *(f"{PATH}={each}" for each in PLANNED)))
                help = did_you_mean(near) or _INFO_HELP
                self.problems.append(diagnose(INFO, f"`{word.text}` is no option of a policy", word, help=help))
        source = lifted(fence)
        claims, problems = read_claims(source)
        # By the manifest and the graph alone: a test has the same result whether torch is loaded or not.
        operators = OperatorTable.bundled(met=() if facts is None else facts.operators)
        loaded = load_source(source, Path(self.source.name), operators=operators)
        made, found = None, loaded.diagnostics
        policy = loaded.policy if facts is None or loaded.policy is None else scheduled(loaded.policy)
        if isinstance(policy, Diagnostic):
            found = (*found, policy)
        elif facts is not None and policy is not None:
            made = plan(policy, facts, capabilities_for(facts.kind, path))
            self.coverage.add(made)
            found = (*found, *findings(made))
        elif path is not None and not planned and policy is not None:
            found = (*found, *refused_of_any_graph(policy, path))
        case = _Case(source, claims, made, planned, planned and facts is None, frozenset(allowed))
        self.policies += 1
        self.claims += len(claims)
        self.problems.extend(lowered_diagnostic(each, fence, source) for each in (*problems, *case.compare(found)))
