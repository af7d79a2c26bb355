"""Errors of statements: on one graph, and of one graph that are only errors if every graph of the model has them.

Each error names its cause if known, so that one cause can be one error. A model compiles to several graphs: one for
each graph break, separately compiled block, and shape. A rule has to match in one of them, not in each, and nobody
knows which graph is the last; so such errors wait until no further graph can be compiled before the first step.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import floor

from attrs import evolve, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.expert_load import makers_of, untold
from policylang.graph.facts import LATER_COLUMNS, Facts, InputKind
from policylang.graph.traced_device import OTHER_KERNELS
from policylang.language import syntax
from policylang.language.devices.reading import bundled_devices
from policylang.language.diagnostics import (
    Diagnostic,
    Severity,
    Span,
    diagnose,
    one_cause,
    prefixed,
    put_before,
    written,
)
from policylang.language.globs import PathGlob
from policylang.language.predicates import format_predicate
from policylang.language.selectors import own_words, selector_of, selectors_of, tests_of, walk, with_lets
from policylang.language.shown import counted, first_lines
from policylang.language.syntax import Expectation, Policy, Rule
from policylang.operators.names import STAND_INS, is_all_gather
from policylang.planning import refusals
from policylang.planning.capabilities import FSDP2_BLOCKS, WHOLE_MODEL
from policylang.planning.decisions.rule_warnings import origins_asked
from policylang.planning.order import statements
from policylang.planning.plan import RuleOutcome, timed_tests
from policylang.planning.schedule import AroundBlocks
from policylang.planning.selection import no_match
from policylang.planning.selection.selectors import Selections, column_of, operator_matcher, selections_for
from policylang.simulation.node_times import NodeTimes, lacking

OLDER, NOTHING_YET, SHARE_OF_NONE, NO_DEVICE, LOAD = "APL358", "APL359", "APL369", "APL370", "APL660"
_MOST_NAMES = 8


def speaks_of_blocks(statement: Rule | Expectation, policy: Policy) -> bool:
    """True if a statement contains `in block`, `per block`, `crosses block`, or uses a name that does."""
    if isinstance(statement, syntax.ExpectTotal):
        return statement.per_block
    if isinstance(statement, syntax.ExpectCount) and statement.scope is syntax.Scope.BLOCK:
        return True
    parts = with_lets(policy, *selectors_of([statement]))
    blocks = (
        (isinstance(each, syntax.InBlock) and each.which.of == "block")
        or getattr(each, "scope", None) is syntax.Scope.BLOCK
        for each in parts
    )
    tests = (isinstance(each, syntax.Is) and each.name == "crosses block" for each in tests_of(policy, statement))
    return any(blocks) or any(tests)


def _name_of_a_block(policy: Policy) -> str:
    """A path that the policy's ``blocks`` would match: of `{layers,h}.*` it is `layers.0`."""
    if policy.blocks is None:
        return "layers.0"
    name = re.sub(r"\{([^,}]*)[^}]*\}", r"\1", policy.blocks.glob.strip("/"))
    name = re.sub(r"\[(.)[^\]]*\]", r"\1", name).replace("*", "0").replace("?", "0")
    return name if PathGlob(policy.blocks.glob).outermost(name) == name else "layers.0"


_SHARE = re.compile(r"\b(?:first|last)\s+\S+(?:\s*%)?\s+of\s+(?:block|stage)s?$")


def empty_shares(policy: Policy, selections: Selections) -> Iterator[Diagnostic]:
    """An error for each statement that speaks of a share of the blocks that is none; an ``optional`` line may."""
    counts = {"block": len(selections.blocks.names), "stage": policy.pipeline.stages if policy.pipeline else 0}
    for statement in policy.statements:
        if not isinstance(statement, Expectation) and statement.optional:
            continue
        may_be = not isinstance(statement, Expectation)
        for part in with_lets(policy, *selectors_of([statement])):
            if not isinstance(part, syntax.InBlock) or (share := part.which.share) is None:
                continue
            of = part.which.of
            count = counts[of]
            if floor(share * count) or (of == "stage" and not count):
                continue
            line, own, one = statement.span, part.span, f"{part.which.kind} {of}"
            words = own_words(part).partition(" ")[2]
            has, help = "has no blocks", f"if that is intended, write `optional {line.one_line}`"
            if count:
                has = f"has {counted(count, of)}, and a share is rounded down"
                help = f"write `{one}` for one of them"
            fixes = [prefixed(line, "optional")] if may_be else []
            if count and (said := _SHARE.search(own.text)) and line.start <= own.start < line.end:
                fixes = [*written(Span(own.source, own.start + said.start(), own.end), [one]), *fixes]
            message = f"`{words}` of `{line.one_line}` is no {of}: this graph {has}"
            span = next(selectors_of([statement])).span
            yield diagnose(SHARE_OF_NONE, message, span=span, help=help if count or may_be else None, fixes=fixes)
            break


def unanswerable(policy: Policy, facts: Facts) -> Iterator[Diagnostic]:
    """An error for each test that asks for a column which the facts lack."""
    missing = {column for column in LATER_COLUMNS if len(getattr(facts, column)) != len(facts)}
    if not missing:
        return
    for test in dict.fromkeys(test for test in tests_of(policy, *policy.statements) if column_of(test) in missing):
        message = (
            f"`{format_predicate(test)}` cannot be evaluated: an older policylang wrote the snapshot, without the "
            f"{column_of(test)} of its nodes"
        )
        yield diagnose(OLDER, message, test.span, help="write the snapshot again with this policylang")


def loads_untold(balance: syntax.Balance | None, facts: Facts) -> Iterator[Diagnostic]:
    """A warning for a stated load that tells none of the sizes of a graph, or not all."""
    if balance is None:
        return
    line, rows = f"`{balance.span.one_line}`", untold(facts)
    if not any(facts.data_sizes):
        message, help = f"{line} changes nothing: no size of this graph comes from data", "leave it out for this model"
        yield diagnose(LOAD, message, balance.span, help=help)
    elif len(facts.data_terms) != len(facts):
        message = f"{line} changes nothing: these facts do not say which node makes a size that comes from data"
        yield diagnose(LOAD, message, balance.span, help="make the snapshot again with this policylang")
    elif rows:
        makers = makers_of(facts, rows)
        places = [f"{facts.names[row]} ({facts.targets[row]}) in {facts.modules[row] or 'no module'}" for row in makers]
        values, sizes = counted(len(rows), "value"), counted(len(makers), "node")
        message = f"{line} does not tell the size of {values}: {sizes} make them, and count no tokens that are routed"
        help = "they count by a hint: expect what becomes of these values, no figure"
        yield diagnose(LOAD, message, balance.span, help=help, details=first_lines(places, _MOST_NAMES))


def named_alone(policy: Policy, facts: Facts) -> Iterator[Diagnostic]:
    """A warning for each rule that names what a graph made by a compiler has in place of an eager operator, or that
    operator, and not both, unless another rule with the same action names the other."""
    forms = {compiled: eager for compiled, eager in STAND_INS.items() if compiled in facts.by_target}
    if not forms:
        return
    named = [
        [operator_matcher(part) for part in with_lets(policy, rule.selector) if isinstance(part, syntax.Operator)]
        for rule in policy.rules
    ]
    for compiled, eager in forms.items():
        both = [form.rpartition(".")[0] for form in (eager, compiled)]
        sides = [(any(each(compiled) for each in names), any(each(eager) for each in names)) for names in named]
        found = {(rule.action, *side) for rule, side in zip(policy.rules, sides, strict=True)}
        for rule, (in_graph, in_eager) in zip(policy.rules, sides, strict=True):
            if in_graph == in_eager or (rule.action, in_eager, in_graph) in found:
                continue
            parts = [part for part in walk(rule.selector) if isinstance(part, syntax.Operator)]
            alone = [part.span for part in parts if any(map(operator_matcher(part), (eager, compiled)))]
            choices = [f"({', '.join(both)})", "matmul"]
            yield diagnose(
                OTHER_KERNELS,
                f"`{rule.text}` names one of two forms: the graph, made under a compiler, has `{compiled}` where "
                f"the model most likely runs `{eager}` in eager",
                rule.span,
                help=f"name both, `{', '.join(both)}`, or say `matmul`",
                fixes=written(alone[0], choices, is_choice=True) if len(alone) == 1 else (),
            )


def time_errors(policy: Policy, times: NodeTimes | None, *, asked_for: bool, copies: bool) -> Iterator[Diagnostic]:
    """Why times that are asked for are not known: nobody named a device, or its profile lacks a figure. ``asked_for``:
    whether somebody named the device for this plan, who then wants to see times. ``copies``: whether the plan moves
    values to the host."""
    phrases: dict[tuple[str, Span], None] = {}  # tests of statements, and expectations about time
    for statement in policy.statements:
        if isinstance(statement, syntax.Overlap) or (isinstance(statement, syntax.ExpectTotal) and statement.of_time):
            phrases[statement.span.one_line, statement.span] = None
        phrases |= dict.fromkeys((format_predicate(test), test.span) for test in timed_tests(policy, statement))
    asked = list(phrases)
    if times is not None:
        if (asked or asked_for) and (found := lacking(times, asked[0][1] if asked else None, copies=copies)):
            yield found
    elif asked:
        (words, span), *others = asked
        own = [each.span for each in policy.statements if policy.included_by(each.span) is None]
        first = min(own, key=lambda each: each.start, default=span)
        more = f", as {counted(len(others), 'other phrase is', 'other phrases are')}" if others else ""
        yield diagnose(
            NO_DEVICE,
            f"`{words}` is about time{more}, and no device is given",
            span,
            help="write `device h100-sxm` into the policy, or plan it with `--device h100-sxm`, in Python with "
            f"`device=`; bundled are {', '.join(bundled_devices())}, and a profile of your own is "
            '`device "cluster.toml"`',
            details=first_lines([f"{where.location}: {phrase}" for phrase, where in others], _MOST_NAMES),
            fixes=[put_before(first, f"device {name}") for name in bundled_devices()],
        )


class StatementErrors:
    """Errors of one policy's statements on one graph. ``with_shares``: whether the graph has all blocks that a share is
    one of."""

    def __init__(self, policy: Policy, selections: Selections, *, with_shares: bool) -> None:
        self._policy = policy
        self._selections = selections
        self._shares = tuple(empty_shares(policy, selections)) if with_shares else ()
        self._of_no_share = {each.span for each in self._shares}

    def no_blocks(self, rules: Collection[RuleOutcome]) -> Iterator[Diagnostic]:
        """An error where the policy names blocks that the graph has not, or speaks of blocks and the graph has none."""
        policy, facts, blocks = self._policy, self._selections.facts, self._policy.blocks
        if self._selections.blocks.names:
            return
        if blocks is not None:
            near = no_match.block_globs(blocks.glob, facts)
            message = f"`{blocks.glob}` matches no module path of this graph, so there are no blocks"
            help = no_match.naming_blocks(facts, blocks.glob)
            fixes = written(no_match.glob_span(blocks.glob, blocks.span), near, near=True)
            found = diagnose(refusals.NO_SUCH_BLOCKS, message, span=blocks.span, help=help, fixes=fixes)
            yield evolve(found, include=policy.included_by(blocks.span))
            return
        wanting = (each.rule for each in rules if not each.matched and not each.rule.optional)
        first = next((rule for rule in wanting if speaks_of_blocks(rule, policy)), None)
        if first is not None:
            found = diagnose(
                refusals.NO_SUCH_BLOCKS,
                "no blocks were found in this graph",
                span=first.selector.span,
                help=no_match.naming_blocks(facts),
                fixes=[put_before(first.span, f"blocks {glob}") for glob in no_match.block_globs("layers.*", facts)],
            )
            yield evolve(found, cause=refusals.NO_SUCH_BLOCKS)

    def shares(self) -> Iterator[Diagnostic]:
        for each in self._shares:
            yield each if self._selections.blocks.names else evolve(each, cause=refusals.NO_SUCH_BLOCKS)

    def of_rules(
        self, rules: Sequence[RuleOutcome], by_fsdp: Collection[int], around: AroundBlocks
    ) -> Iterator[Diagnostic]:
        """Rules that match nothing, or that decide nothing. ``by_fsdp``: the rules that FSDP answers."""
        policy, selections = self._policy, self._selections
        gathers = any(map(is_all_gather, selections.facts.by_target))
        for index, outcome in enumerate(rules):
            rule = outcome.rule
            include = policy.included_by(rule.span)
            takers = (policy.rules[taker].span.source for taker in outcome.overridden_by)
            if not outcome.matched:
                if not rule.optional and index not in by_fsdp and rule.selector.span not in self._of_no_share:
                    of_weights = not gathers and InputKind.PARAMETER in origins_asked(rule, policy)
                    found = refusals.matches_nothing(rule, selections, of_weights=of_weights)
                    if around.outside and selections.rows(rule.selector):
                        why = "all of it lies outside the blocks, where an eager checkpoint decides nothing"
                        found = evolve(found, details=(*found.details, why))
                    yield self._of_cause(evolve(found, include=include), rule)
            elif outcome.decided or (include is not None and any(taker != rule.span.source for taker in takers)):
                continue  # a file is included to be amended: rules of another file override its rules
            elif outcome.overridden_by:
                yield refusals.overridden(policy, outcome, rules)
            elif outcome.kept_by_user:
                yield refusals.kept_by_user(outcome)

    def of_expectations(self, failures: Mapping[int, Diagnostic]) -> Iterator[Diagnostic]:
        """``failures``: what was found wrong, by the expectation's number."""
        for at, failure in failures.items():
            if not self._is_of_no_share(failure):
                yield self._of_cause(failure, self._policy.expectations[at])

    def of_order(self, found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
        """``found``: what is wrong with scheduling lines."""
        return (each for each in found if not self._is_of_no_share(each))

    def _is_of_no_share(self, found: Diagnostic) -> bool:
        return found.code == refusals.MATCHES_NOTHING and found.span in self._of_no_share

    def _of_cause(self, found: Diagnostic, statement: Rule | Expectation) -> Diagnostic:
        """An error with its cause: no device, or no blocks if it would hold with blocks."""
        policy, selections = self._policy, self._selections
        timed = isinstance(statement, syntax.ExpectTotal) and statement.of_time
        if selections.times is None and (timed or any(True for _ in timed_tests(policy, statement))):
            return evolve(found, cause=NO_DEVICE)
        if selections.blocks.names or not speaks_of_blocks(statement, policy):
            return found
        selector = selector_of(statement)
        lacks_blocks = selector is None or self._as_one_block.rows(selector)
        return evolve(found, cause=refusals.NO_SUCH_BLOCKS) if lacks_blocks else found

    @cached_property
    def _as_one_block(self) -> Selections:
        """The selections on a graph without blocks, as if all of it were one."""
        name, facts = _name_of_a_block(self._policy), self._selections.facts
        inside = [f"{name}.{path}" if path else name for path in facts.modules]
        table = BlockTable(array("i", bytes(4 * len(facts))), (name,), alone=0)
        return selections_for(self._policy, evolve(facts, modules=inside), table, times=self._selections.times)


_COMPILE_BLOCKS = (
    "call `policylang.checkpoint_model(model, policy)`, "
    "then `block.compile(backend=policylang.backend(policy))` for each block"
)
_ROOT = 'give the backend the path of one, `root="layers.0"`'
_NOTHING_ORDERED = (
    *(statements.NONE_IN_GRAPH, refusals.NO_BLOCKS, statements.NOTHING_MOVES),
    *(statements.NOTHING_FITS, statements.NONE_ALIKE, statements.NONE_IN_BLOCKS),
)
DEFERRED_CODES = (
    *(refusals.MATCHES_NOTHING, refusals.NO_SUCH_BLOCKS, refusals.NOTHING_TO_REWRITE, SHARE_OF_NONE),
    *_NOTHING_ORDERED,
)
"""The diagnostics that report "nothing here": a rule, a ``blocks`` glob, a ``fuse`` or ``collapse`` line, a share of
the blocks; a line that orders collectives, and one that joins them."""
_NOTHING_HERE = frozenset((refusals.MATCHES_NOTHING, refusals.NOTHING_TO_REWRITE, *_NOTHING_ORDERED))
"""The diagnostics that report it of one line for different reasons: one graph has no collective, another none that
moves."""


def in_stage(found: Iterable[Diagnostic], stage: int | None) -> Iterator[Diagnostic]:
    """The diagnostics of one stage's graph: a line that matches nothing in it may match in another stage, so each error
    that says so is a warning."""
    for each in found:
        if each.code not in DEFERRED_CODES or each.severity is not Severity.ERROR:
            yield each
        elif each.cause == each.code or each.cause not in DEFERRED_CODES:
            message = f"{each.message.replace('this graph', f'stage {stage}')}; another stage may have it"
            help = "ignore this if the line is meant for another stage"
            warned = diagnose(NOTHING_YET, message, each.span, help=help, details=each.details)
            yield evolve(warned, include=each.include)


@frozen
class Complaint:
    """One deferred diagnostic of one graph, as plain data that a sidecar can hold. ``statement`` numbers the sentences
    that planning acts on; ``start`` and ``end`` count from its start, so that a sidecar outlives edits elsewhere."""

    statement: int
    code: str
    message: str
    help: str | None
    details: tuple[str, ...]
    start: int
    end: int
    cause: str = ""
    """The cause of the diagnostic."""

    @property
    def identity(self) -> tuple[int, str]:
        return self.statement, refusals.MATCHES_NOTHING if self.code in _NOTHING_HERE else self.code


def complaints(policy: Policy, diagnostics: Iterable[Diagnostic]) -> tuple[Complaint, ...]:
    """The diagnostics of a plan that other graphs may answer."""
    spans = _statements(policy)
    found: list[Complaint] = []
    for diagnostic in diagnostics:
        span = diagnostic.span
        if span is None or diagnostic.code not in DEFERRED_CODES or diagnostic.severity is not Severity.ERROR:
            continue
        for number, statement in enumerate(spans):
            if statement.source == span.source and statement.start <= span.start and span.end <= statement.end:
                start, end = span.start - statement.start, span.end - statement.start
                texts = (diagnostic.code, diagnostic.message, diagnostic.help, diagnostic.details)
                found.append(Complaint(number, *texts, start, end, diagnostic.cause))
                break
    return tuple(found)


def shared_by_all(
    policy: Policy, graphs: Sequence[tuple[str, Sequence[Complaint]]], *, root: str, sharded: bool = False
) -> tuple[Diagnostic, ...]:
    """The diagnostics that every graph has, each with the findings of every graph. ``graphs``: labels and diagnostics.
    ``root``: the prefix that was given for the paths of the graphs. ``sharded``: ``fully_shard`` gathers weights."""
    if not graphs:
        return ()
    by_graph = [{complaint.identity: complaint for complaint in complaints} for _, complaints in graphs]
    shared = set(by_graph[0]).intersection(*by_graph[1:])
    identities = sorted(shared, key=lambda identity: (identity[1] != refusals.NO_SUCH_BLOCKS, identity))
    spans = _statements(policy)
    labels = [label for label, _ in graphs]
    found = [
        _diagnostic(policy, spans, [(label, by[identity]) for label, by in zip(labels, by_graph, strict=True)])
        for identity in identities
        if identity[0] < len(spans)
    ]
    for at, each in enumerate(found):
        if root or each.code != refusals.NO_SUCH_BLOCKS:
            continue
        if sharded:
            why = "`fully_shard` gathers weights in hooks around each block, and `torch.compile` breaks the graph there"
            why += ": what is compiled of a block begins inside it, and its path is not known"
            help = f"{_COMPILE_BLOCKS}; see {FSDP2_BLOCKS}"
            found[at] = evolve(each, details=(why, *each.details), help=help)
        else:
            ways = f"{_COMPILE_BLOCKS}, or {_ROOT}; see {WHOLE_MODEL}"
            found[at] = evolve(each, help=f"{each.help}; of blocks that are compiled one by one: {ways}")
    return one_cause(found)


def _statements(policy: Policy) -> list[Span]:
    """``blocks`` last: a separately compiled block gets one if the policy has none."""
    blocks = [policy.blocks.span] if policy.blocks is not None else []
    return [*(each.span for each in policy.statements), *blocks]


def _diagnostic(policy: Policy, statements: Sequence[Span], found: Sequence[tuple[str, Complaint]]) -> Diagnostic:
    _, first = found[0]
    statement = statements[first.statement]
    span = Span(statement.source, statement.start + first.start, min(statement.start + first.end, statement.end))
    details, message, help = first.details, first.message, first.help
    if len(found) > 1:
        indented = ((label, [f"  {line}" for line in complaint.details]) for label, complaint in found)
        details = tuple(line for label, lines in indented for line in ((f"{label}:", *lines) if lines else (label,)))
        message = first.message.replace("this graph", f"any of the {len(found)} graphs of this model")
        is_chunk = first.code == refusals.NOTHING_TO_REWRITE and isinstance(
            policy.statements[first.statement], syntax.Chunk
        )
        if is_chunk:
            broken = (
                f"what a line cuts is in one graph, and Dynamo made {len(found)}: it breaks a graph at code that it"
            )
            details = (f"{broken} cannot trace, here perhaps between the head and the loss", *details)
            help = f"`TORCH_LOGS=graph_breaks` names that code, and `policylang.trace_step` has no breaks; {help}"
    # not of one graph alone: where another graph has what a rule lacks, the rule would match there
    causes = [complaint.cause for _, complaint in found]
    cause = refusals.NO_SUCH_BLOCKS if refusals.NO_SUCH_BLOCKS in causes else first.cause
    include = None if first.code == refusals.NOTHING_TO_REWRITE else policy.included_by(statement)
    return Diagnostic(first.code, message, span, help, details=details, cause=cause, include=include)
