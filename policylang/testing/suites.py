"""Runs files of policy tests: what ``policylang test`` prints, as data. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from attrs import define, evolve, field, frozen

from policylang.graph.facts import Facts
from policylang.language.diagnostics import CODES, Diagnostic, Source, diagnose
from policylang.language.files import SUFFIX as POLICIES
from policylang.language.files import policy_files, read_source
from policylang.language.wording import did_you_mean, nearest
from policylang.report.diagnostics import CheckResult
from policylang.testing.cases import run_case
from policylang.testing.coverage import Coverage
from policylang.testing.fences import Fence, fences
from policylang.testing.graphs import INFO, DrawnGraph, Graphs

NO_TESTS = "APL515"
POLICY, GRAPH, ALLOW, IGNORE = "apl", "graph", "allow", "ignore"
SUFFIX = ".md"
_INFO_HELP = "for example `apl graph=two_layers`, `apl allow=APL303`, `apl ignore`"
_NOT_OURS = ("node_modules", "__pycache__")


@frozen
class TestResult:
    """What the policies of some files came to. ``found`` holds all that is not as the policies claim."""

    __test__ = False  # not one of pytest's, for all its name

    files: int
    policies: int
    claims: int
    found: CheckResult
    rules: int = 0
    """How many rules were to be covered."""


def run_files(paths: Sequence[str], cover: Sequence[str] = ()) -> TestResult:
    """Run the policy tests of Markdown files; a folder stands for every ``.md`` file below it that holds a policy.

    ``cover`` names policies, files or folders of them: a rule of theirs that matches no node in any test is an error.
    Never raises for what is in a file, or for a file that is not there.
    """
    coverage, snapshots = Coverage(), dict[str, Facts | None]()
    found: list[Diagnostic] = []
    files = [file for path in paths for file in files_of(path)]
    policies = claims = 0
    for name in files:
        if os.path.isdir(name):
            found.append(_no_tests_in(name).found_in(name))
            continue
        source = read_source(Path(name), name)
        if isinstance(source, Diagnostic):
            found.append(source.found_in(name))
            continue
        run = _File(source, Graphs(Path(name).parent, snapshots=snapshots), coverage)
        found.extend(each.found_in(name) for each in run.run())
        policies, claims = policies + run.policies, claims + run.claims
    rules, uncovered = coverage.of(cover)
    return TestResult(len(files), policies, claims, CheckResult(tuple(files), (*found, *uncovered)), rules)


def files_of(path: str) -> list[str]:
    """The files a path stands for. A folder without a policy in it stands for itself, so that someone says so."""
    if not os.path.isdir(path):
        return [path]
    found = sorted(str(file) for file in Path(path).rglob(f"*{SUFFIX}") if _is_ours(file.relative_to(path)))
    return [file for file in found if _holds_a_policy(file)] or [path]


def _no_tests_in(folder: str) -> Diagnostic:
    """Of a folder without a test. One of policies was most likely meant to be checked, or to be covered."""
    help = "a policy test is a Markdown file with a policy in a fenced block, ```apl"
    if os.path.isfile(policy_files(folder)[0]):
        help = f"`policylang check {folder}` checks its policies; with `--cover {folder}`, tests have to exercise them"
    return diagnose(NO_TESTS, f"the folder `{folder}` holds no policy tests", help=help)


def _is_ours(file: Path) -> bool:
    return not any(part.startswith(".") or part in _NOT_OURS for part in file.parts)


def _holds_a_policy(file: str) -> bool:
    source = read_source(Path(file), file)
    return isinstance(source, Diagnostic) or any(fence.language == POLICY for fence in fences(source))


@define(eq=False)
class _File:
    """The run of one file."""

    source: Source
    graphs: Graphs
    coverage: Coverage
    policies: int = 0
    claims: int = 0
    problems: list[Diagnostic] = field(factory=list)

    def run(self) -> list[Diagnostic]:
        blocks = fences(self.source)
        for fence in blocks:
            if fence.language == GRAPH and self.graphs.is_named(fence):
                self.graphs.draw(fence)
        for fence in blocks:
            if fence.language == GRAPH and not self.graphs.is_named(fence):
                self.graphs.draw(fence)
            elif fence.language == POLICY:
                self._policy(fence)
        if not any(fence.language == POLICY for fence in blocks):
            help = "a policy stands in a fenced block, ```apl"
            if self.source.name.endswith(POLICIES):
                help = f"this is a policy: `policylang check {self.source.name}` checks it; a test is a Markdown file"
            self.problems.append(diagnose(NO_TESTS, f"`{self.source.name}` holds no policy to test", help=help))
        found = [*self.problems, *self.graphs.problems]
        return sorted(dict.fromkeys(found), key=lambda each: each.span.start if each.span else 0)

    def _policy(self, fence: Fence) -> None:
        words = [word.text for word in fence.words[1:]]
        if words == [IGNORE]:
            return
        drawn, allowed = self._info(fence)
        facts = None if drawn is None else drawn.facts
        outcome = run_case(fence, Path(self.source.name), facts, planned=drawn is not None, allowed=allowed)
        self.policies += 1
        self.claims += outcome.claims
        self.problems.extend(outcome.diagnostics)
        if outcome.plan is not None:
            self.coverage.add(outcome.plan)

    def _info(self, fence: Fence) -> tuple[DrawnGraph | None, tuple[str, ...]]:
        """The graph that a policy names behind its fence, or else stands below; and the codes that it allows."""
        drawn: DrawnGraph | None = None
        allowed: tuple[str, ...] = ()
        for word in fence.words[1:]:
            key, sign, value = word.text.partition("=")
            if key == GRAPH and sign and drawn is None:
                drawn = self.graphs.find(value, evolve(word, start=word.start + len(key) + 1))
            elif key == ALLOW and sign and not allowed and all(code in CODES for code in value.split(",")):
                allowed = tuple(value.split(","))
            else:
                help = did_you_mean(nearest(word.text, (IGNORE,))) or _INFO_HELP
                self.problems.append(diagnose(INFO, f"`{word.text}` says nothing of a policy", word, help=help))
        return drawn or self.graphs.above(fence), allowed
