"""The statements of the language: a registered class each.

A kind has its rule of ``grammar/apl.lark``, the words that open it, its tree transformation, what has to follow a text
that breaks off, its canonical text, and its checks that need no names. The parser, messages, digests and highlighting
ask the registry; data classes are in ``syntax.py``, meanings in ``data/words.toml``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import Any, ClassVar, get_args, get_type_hints

from attrs import evolve, frozen

from policylang.language import diagnostics, predicates, selectors, syntax
from policylang.language.diagnostics import Diagnostic, Fix, Span, TextChange, diagnose
from policylang.language.lexer import Lexeme, is_policy_name
from policylang.language.selectors import SelectorRules, SpannedSelector
from policylang.language.shown import ALIASES, did_you_mean, joined, nearest

LANGUAGE_VERSION = (0, 2)
"""The version of the language that this package reads: what ``requires policylang`` is compared with."""
_SYNONYMS = {syntax.Action.SAVE: "must_save", syntax.Action.RECOMPUTE: "prefer_recompute"}
_SPELLED = ((word, action) for action in syntax.Action for word in (action.word, _SYNONYMS.get(action)))
ACTIONS = {word: action for word, action in _SPELLED if word is not None}
FATES: tuple[str, ...] = get_args(get_type_hints(syntax.Undecided)["fate"])
FIGURES: tuple[str, ...] = get_args(get_type_hints(syntax.ExpectTotal)["figure"])
OUTCOMES: tuple[str, ...] = get_args(get_type_hints(syntax.ExpectFate)["fate"])
"""The outcomes that an expectation may require."""

SCHEDULES: tuple[str, ...] = (
    "gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev",
)  # fmt: skip
"""The schedules of ``torch.distributed.pipelining``."""

MissingRow = tuple[str, str, str, str | None]
"""The last word and the terminals that the parser accepts there (a minus: does not accept); then the name of what has
to follow, and an example."""
KINDS: list[StatementKind] = []
"""Every kind of statement, in the order of the grammar."""


class StatementKind:
    """One kind of statement; a subclass is registered."""

    made: ClassVar[type]
    rule: ClassVar[str]
    """The rule of the grammar."""
    opener: ClassVar[str] = ""
    """The words that open it; empty where an action or a selector does."""
    is_scheduling: ClassVar[bool] = False
    """True if it buckets or schedules collectives."""
    missing: ClassVar[tuple[MissingRow, ...]] = ()
    named: ClassVar[tuple[str, ...]] = ()
    """The names that may follow its opener, if the grammar allows any."""
    is_over_dims: ClassVar[bool] = False
    """True if `over` and mesh dimensions may end it."""
    closing: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Words that it has behind one terminal, and that are names everywhere else."""
    build: ClassVar[Callable[..., Any]]
    """Makes the statement from its span and the parts of its rule, without `optional`; reports mistakes in words."""

    def __init_subclass__(cls) -> None:
        KINDS.append(cls())

    def terminal(self) -> str:
        """The terminal of the words that open it."""
        return self.opener.upper().replace(" ", "_")

    def check(self, statement: Any) -> Iterator[Diagnostic]:
        """Check a statement, whatever its names mean."""
        yield from ()

    def text(self, statement: Any) -> str:
        """The canonical text, without an `optional` before it."""
        raise TypeError(f"a {type(statement).__name__} is no part of a resolved policy")


# --- what a policy is made of ----------------------------------------------------------------------------------


class PolicyNameKind(StatementKind):
    made, rule, opener = syntax.PolicyName, "policy", "policy"

    def build(self, span: Span, _word: Lexeme, name: Lexeme) -> syntax.PolicyName:
        return syntax.PolicyName(str(name), span=span)


class RequiresKind(StatementKind):
    made, rule, opener = syntax.Requires, "requires", "requires"
    missing = (
        ("COMPARISON", "", "a version", "such as `0.2`"),
        ("NAME", "", "a comparison", "such as `>= 0.2`"),
        ("", "", "`policylang`", "such as `requires policylang >= 0.2`"),
    )

    def build(self, span: Span, _word: Lexeme, name: Lexeme, sign: Lexeme, version: Lexeme) -> syntax.Requires:
        if name != "policylang":
            name.report("APL116", f"a policy can require `policylang` alone, not `{name}`")
        return syntax.Requires(str(sign), str(version), span=span)  # type: ignore[arg-type]

    def check(self, requires: syntax.Requires) -> Iterator[Diagnostic]:
        parts = requires.version.split(".")
        if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
            message, help = f"`{requires.version}` is not a version", "a version is written as `0.2`"
            yield diagnose("APL016", message, predicates.last_text(requires.version, requires.span), help=help)
            return
        here, wanted = zip(*zip_longest(LANGUAGE_VERSION, map(int, parts), fillvalue=0), strict=True)
        if not syntax.COMPARISONS[requires.op](here, wanted):
            own = ".".join(map(str, LANGUAGE_VERSION))
            message = f"the policy requires language version {requires.op} {requires.version}, and this is {own}"
            help = "install a newer policylang" if here < wanted else "adapt the policy, or install an older policylang"
            yield diagnose("APL204", message, requires.span, help=help)


class IncludeKind(StatementKind):
    made, rule, opener = syntax.Include, "include", "include"

    def build(self, span: Span, _word: Lexeme, target: Lexeme) -> syntax.Include:
        return syntax.Include(predicates.quoted(target), target.type == "BUNDLED", span=span)


class DeviceKind(StatementKind):
    made, rule, opener = syntax.Device, "device", "device"
    missing = (("DEVICE", "", "a device profile", 'such as `h100-sxm`, or a file, `"cluster.toml"`'),)

    def build(self, span: Span, _word: Lexeme, target: Lexeme) -> syntax.Device:
        if target.type != "STRING" and (not re.fullmatch(r"\w[\w.+-]*", target) or target.endswith(".toml")):
            message, good = "the file of a device profile is quoted", f'"{target}"'
            target.report("APL116", message, help=f"write `{good}`", write=[good])
        return syntax.Device(predicates.quoted(target), span=span)


class LetKind(StatementKind):
    made, rule, opener = syntax.Let, "let", "let"

    def build(self, span: Span, _word: Lexeme, name: Lexeme, _equals: Lexeme, selector: SpannedSelector) -> syntax.Let:
        return syntax.Let(str(name), selector.selector, span=span)

    def text(self, let: syntax.Let) -> str:
        return f"let {let.name} = {selectors.format_selector(let.selector)}"


class BlocksKind(StatementKind):
    made, rule, opener = syntax.Blocks, "blocks", "blocks"

    def build(self, span: Span, _word: Lexeme, glob: Lexeme) -> syntax.Blocks:
        return syntax.Blocks(predicates.quoted(glob), span=span)

    def text(self, blocks: syntax.Blocks) -> str:
        return f"blocks {predicates.format_glob(blocks.glob)}"


class UndecidedKind(StatementKind):
    made, rule, opener = syntax.Undecided, "undecided", "undecided"
    missing = (("", "ACTION", "`auto`, `save` or `recompute`", None),)
    elsewhere: ClassVar = {
        **dict.fromkeys(("keep", "store", "cache", "must_save"), "save"),
        **dict.fromkeys(("checkpoint", "remat", "drop", "discard", "must_recompute"), "recompute"),
        **dict.fromkeys(("default", "none", "min_cut", "mincut", "partitioner", "torch", "inductor", "leave"), "auto"),
    }

    def build(self, span: Span, _word: Lexeme, _arrow: Lexeme, fate: Lexeme) -> syntax.Undecided:
        if fate not in FATES:
            message = f"values that no rule decides cannot be left to `{fate}`"
            otherwise = "it is one of `auto`, `save`, `recompute`"
            fate.misnamed("APL116", message, FATES, otherwise, self.elsewhere.get(fate.lower()))
        return syntax.Undecided(str(fate), span=span)  # type: ignore[arg-type]

    def text(self, undecided: syntax.Undecided) -> str:
        return f"undecided -> {undecided.fate}"


class PipelineKind(StatementKind):
    made, rule, opener = syntax.Pipeline, "pipeline", "schedule"
    named = SCHEDULES
    closing = (("NAME", "into"), ("PATH", "into"), ("INT", "stages"), ("INT", "microbatches"))
    missing = (
        ("SCHEDULE", "", "a schedule", "such as `schedule 1f1b into 4 stages of 16 microbatches`"),
        ("", "-UP_TO", "a number of stages and of microbatches", "such as `into 4 stages of 16 microbatches`"),
    )

    def build(
        self, span: Span, _word: Lexeme, name: Lexeme, into: Lexeme, stages: Lexeme, *rest: Lexeme
    ) -> syntax.Pipeline:
        stages_word, _of, microbatches, word = rest
        if name not in SCHEDULES:
            name.misnamed("APL116", f"there is no schedule `{name}`", SCHEDULES, f"they are {joined([*SCHEDULES])}")
        for given, wanted in ((into, "into"), (stages_word, "stages"), (word, "microbatches")):
            if given not in (wanted, wanted.rstrip("s")):
                said = f"`{wanted}` is to be here, not `{given}`"
                given.report("APL010", said, help=f"write `{wanted}`", write=[wanted])
        numbers = predicates.integer(stages), predicates.integer(microbatches)
        return syntax.Pipeline(str(name), *numbers, span=span)

    def check(self, pipeline: syntax.Pipeline) -> Iterator[Diagnostic]:
        if not (pipeline.stages and pipeline.microbatches):
            message = "a pipeline has at least one stage and one microbatch"
            yield diagnose("APL205", message, pipeline.span, help="write numbers from 1")

    def text(self, pipeline: syntax.Pipeline) -> str:
        first, number = pipeline.firsts, pipeline.microbatches
        stages = f"{pipeline.stages} stages{f' at {first}' if first else ''}"  # `at` in keys of caches alone
        stage = "" if pipeline.stage is None else f" # stage {pipeline.stage}"
        return f"schedule {pipeline.schedule} into {stages} of {number} microbatches{stage}"


class BalanceKind(StatementKind):
    made, rule, opener = syntax.Balance, "balance", "balance"
    missing = (("", "", "a multiple of an even share", "such as `1.0`, or `up to 2.0`"),)

    def build(self, span: Span, word: Lexeme, *rest: Any) -> syntax.Balance:
        share: syntax.Quantity = rest[-1]
        if share.dimension != "number":
            help = "write a number, such as `2.0` for twice the share"
            word.report("APL116", f"`{share.span.one_line}` is no multiple of a share", share.span, help=help)
        return syntax.Balance(share.value, len(rest) == 2, span=span)

    def check(self, balance: syntax.Balance) -> Iterator[Diagnostic]:
        if not balance.factor or (balance.is_limit and balance.factor < 1):
            message = "the expert that receives the most receives at least its share"
            if not balance.is_limit:
                message = "an expert receives some multiple of its share that is above 0"
            yield diagnose("APL205", message, balance.span, help="write `balance 1.0` for an even load")

    def text(self, balance: syntax.Balance) -> str:
        return f"balance {'up to ' if balance.is_limit else ''}{balance.factor}"


# --- rules -----------------------------------------------------------------------------------------------------


class RuleKind(StatementKind):
    made, rule = syntax.Rule, "rule"

    def build(self, span: Span, *parts: Any) -> syntax.Rule:
        words = [part for part in parts if isinstance(part, Lexeme)]
        selector = next(part for part in parts if isinstance(part, SpannedSelector))
        modifiers = [word for word in words if word.type in ("OPTIONAL", "OVERRIDE")]
        verb = next(word for word in words if word.type in ("ACTION", "NAME"))
        for index, word in enumerate(modifiers):
            if word in modifiers[:index]:
                end = parts[index + 1].span.start
                fixes = [Fix("leave it out", (TextChange(Span(word.span.source, word.span.start, end), ""),))]
                word.report("APL209", f"`{word}` is before this rule twice", fixes=fixes)
        if verb not in ACTIONS:
            verb.misnamed("APL013", f"`{verb}` is not an action", ACTIONS, f"the actions are {', '.join(ACTIONS)}")
        names = [str(word) for word in modifiers]
        action = ACTIONS.get(verb, syntax.Action.LEAVE)
        budget = next((part for part in parts if isinstance(part, syntax.Quantity)), None)
        if budget is not None and verb in ACTIONS and not action.offloads:
            message = f"`{verb}` has no budget: only what is offloaded can be limited"
            fixes = [diagnostics.left_out(budget.span), *diagnostics.written(verb.span, ["offload"], is_choice=True)]
            verb.report("APL116", message, budget.span, help="leave it out, or write `offload`", fixes=fixes)
        form = next((part for part in parts if isinstance(part, syntax.NarrowForm)), None)
        if form is not None and verb in ACTIONS and not action.saves:
            message = f"`{verb}` has no form: only what is saved can be narrowed"
            fixes = [diagnostics.left_out(form.span), *diagnostics.written(verb.span, ["save"], is_choice=True)]
            verb.report("APL116", message, form.span, help="leave it out, or write `save`", fixes=fixes)
        return syntax.Rule(action, selector.selector, "optional" in names, "override" in names, budget, form, span=span)

    def text(self, rule: syntax.Rule) -> str:
        limit = "" if rule.budget is None else f" up to {predicates.quantity_text(rule.budget)} per rank"
        limit += "" if rule.form is None else f" as {rule.form.text}"
        action = f"{'override ' if rule.override else ''}{rule.action.word}"
        return f"{action} {selectors.format_selector(rule.selector)}{limit}"


# --- changes of the graph's structure ---------------------------------------------------------------------------


class FuseKind(StatementKind):
    made, rule, opener = syntax.Fuse, "fuse", "fuse"
    named, closing, is_over_dims = ("all_gather", "reduce_scatter"), (("NAME", "chains"),), True
    missing = (
        ("FUSE", "-OVER", "`all_gather chains` or `reduce_scatter chains`", None),
        ("OVER COMMA", "-OVER", "a mesh dimension", "such as `dp`"),
        ("", "-OVER", "`chains`", None),
    )
    collectives: ClassVar = {
        "all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter",
    }  # fmt: skip

    def build(self, span: Span, _word: Lexeme, collective: Lexeme, chains: Lexeme, *rest: Lexeme) -> syntax.Fuse:
        if collective not in self.collectives:
            message = f"chains of `{collective}` cannot be fused"
            otherwise = "chains of `all_gather` or `reduce_scatter` are"
            collective.misnamed("APL116", message, self.collectives, otherwise)
        if chains != "chains":
            message = f"`fuse {collective}` is followed by `chains`, not by `{chains}`"
            chains.report("APL010", message, help="write `chains`", write=["chains"])
        dims = tuple(str(dim) for dim in rest[1::2])
        known = self.collectives.get(collective, "all_gather")
        return syntax.Fuse(known, dims, span=span)  # type: ignore[arg-type]

    def text(self, fuse: syntax.Fuse) -> str:
        over = f" over {', '.join(fuse.dims)}" if fuse.dims else ""
        return f"fuse {fuse.collective} chains{over}"


class CollapseKind(StatementKind):
    made, rule, opener = syntax.Collapse, "collapse", "collapse"
    named, closing = ("round_trips",), (("COLLAPSE", "round_trips"),)
    missing = (("", "", "`round_trips`", None),)

    def build(self, span: Span, _word: Lexeme, what: Lexeme) -> syntax.Collapse:
        if what != "round_trips":
            message = f"`{what}` cannot be collapsed"
            what.report("APL116", message, help="write `collapse round_trips`", write=["round_trips"])
        return syntax.Collapse(span=span)

    def text(self, collapse: syntax.Collapse) -> str:
        return "collapse round_trips"


class ChunkKind(StatementKind):
    made, rule, opener = syntax.Chunk, "chunk", "chunk"
    named = ("loss", "module")
    closing = (
        *((each, "into") for each in ("NAME", "PATH", "BLOCK", "TO_LOSS")),
        *(("CHUNK", "loss"), ("OVER", "tokens")),
    )
    missing = (
        ("CHUNK", "", "`loss` or a module", "such as `chunk loss into 8` or `chunk module mlp in block into 4`"),
        ("MODULE", "", "a module", "such as `chunk module lm_head to loss into 8`"),
        ("UP_TO", "", "a size", "such as `up to 256 MiB`"),
        ("OVER", "", "`tokens`", None),
        ("NAME", "INT", "a number of slices", "such as `into 8`"),
        ("IN", "BLOCK", "`block`", None),
        ("", "UP_TO", "`into` and a number, or `up to` and a size", "such as `chunk loss into 8`"),
    )

    def build(self, span: Span, word: Lexeme, first: Any, *rest: Any) -> syntax.Chunk:
        if is_module := first.type == "MODULE":
            first, rest = rest[0], rest[1:]
        elif first != "loss":
            message = f"`chunk` cuts the `loss` or a `module`, not `{first}`"
            module = f"module {first}"
            first.report("APL116", message, help=f"write `loss`, or `{module}`", write=["loss", module])
        words = [part.type for part in rest if isinstance(part, Lexeme)]
        quantity = next(part for part in rest if isinstance(part, syntax.Quantity))
        count = int(quantity.value) if quantity.dimension == "number" else None
        return syntax.Chunk(
            predicates.quoted(first) if is_module else "",
            to_loss=not is_module or "TO_LOSS" in words,
            in_block="BLOCK" in words,
            slices=count,
            size=None if count is not None else quantity,
            tokens="OVER" in words,
            span=span,
        )

    def check(self, chunk: syntax.Chunk) -> Iterator[Diagnostic]:
        if chunk.slices is not None and chunk.slices < 2:
            message = f"`into {chunk.slices}` cuts nothing"
            yield diagnose("APL205", message, chunk.span, help="write a number from 2, such as `into 8`")
        yield from _of_nothing(chunk.size, "in a slice", "256 MiB")

    def text(self, chunk: syntax.Chunk) -> str:
        what = f"module {predicates.format_glob(chunk.module)}" if chunk.module else "loss"
        what += " to loss" if chunk.module and chunk.to_loss else " in block" if chunk.in_block else ""
        size = f"into {chunk.slices}" if chunk.size is None else f"up to {predicates.quantity_text(chunk.size)}"
        return f"chunk {what} {size}{' over tokens' if chunk.tokens else ''}"


# --- collectives: which become one, and when they run ------------------------------------------------------------

_OF_COLLECTIVES: MissingRow = ("", "EVERYTHING", "a selector", "such as `all_gather`, `reduce_scatter` or `collective`")
_AHEAD = "such as `prefetch all_gather 1 block ahead`"
_IN_FLIGHT = "such as `overlap collective up to 2 GiB in flight`"
_OF_PEAK = "such as `overlap collective within 1 GiB of peak`"


class BucketKind(StatementKind):
    made, rule, opener, is_scheduling = syntax.Bucket, "bucket", "bucket", True
    missing = (_OF_COLLECTIVES, ("UP_TO", "INT", "a size", "such as `up to 256 MiB`"))

    def build(
        self, span: Span, word: Lexeme, selector: SpannedSelector, size: syntax.Quantity | None = None
    ) -> syntax.Bucket:
        loose, blocks = word.origin.loose, None
        per = loose[-1][0] if loose and loose[-1][1].end == selector.span.end else None
        if per is syntax.Scope.BLOCK or isinstance(per, int):
            loose.pop()
            blocks = 1 if per is syntax.Scope.BLOCK else int(per)
        positions = (part for part in selectors.walk(selector.selector) if isinstance(part, syntax.Ordinal))
        ends = (each.scope for each in positions if each.span.end == selector.span.end)  # outside parentheses
        if blocks is None and (taken := next(filter(None, ends), None)) is not None:
            message = f"`per {taken.value}` counts within the selector here, not in a bucket"
            help = f"write `({selector.span.one_line})`, and behind it what goes into one bucket"
            word.report("APL014", message, selector.span, help=help)
        elif blocks is None and size is None and not loose:
            help = "write `per block`, `per 2 blocks`, or a size such as `up to 256 MiB`, behind it"
            said = evolve(diagnostics.inserted(span, "per block"), is_choice=True)
            message = "the size of a bucket is missing"
            word.report("APL116", message, span, help=help, fixes=[said])
        return syntax.Bucket(selector.selector, blocks, size, span=span)

    def check(self, bucket: syntax.Bucket) -> Iterator[Diagnostic]:
        return _of_nothing(bucket.size, "in one bucket", "256 MiB")

    def text(self, bucket: syntax.Bucket) -> str:
        per = {None: "", 1: " per block"}.get(bucket.blocks, f" per {bucket.blocks} blocks")
        limit = "" if bucket.size is None else f" up to {predicates.quantity_text(bucket.size)}"
        return f"bucket {selectors.format_picked(bucket.selector)}{per}{limit}"


class PrefetchKind(StatementKind):
    made, rule, opener, is_scheduling = syntax.Prefetch, "prefetch", "prefetch", True
    closing = (("BLOCK", "ahead"), ("BLOCKS", "ahead"))
    missing = (
        _OF_COLLECTIVES,
        ("BLOCK BLOCKS", "NAME", "`ahead`", _AHEAD),
        ("INT", "BLOCK BLOCKS -RPAR", "`block ahead`", _AHEAD),
        ("", "INT -STRING -BLOCK -COMPARISON", "how many blocks ahead", _AHEAD),
    )

    def build(
        self, span: Span, _word: Lexeme, selector: SpannedSelector, number: Lexeme, _block: Lexeme, ahead: Lexeme
    ) -> syntax.Prefetch:
        _check_ahead(ahead)
        return syntax.Prefetch(selector.selector, _distance(number), span=span)

    def text(self, prefetch: syntax.Prefetch) -> str:
        return f"prefetch {selectors.format_picked(prefetch.selector)} {_blocks(prefetch.blocks)} ahead"


class PrefetchOffloadedKind(StatementKind):
    made, rule, opener = syntax.PrefetchOffloaded, "prefetch_offloaded", "prefetch"

    def build(
        self, span: Span, _word: Lexeme, _what: Lexeme, number: Lexeme, _block: Lexeme, ahead: Lexeme
    ) -> syntax.PrefetchOffloaded:
        _check_ahead(ahead)
        return syntax.PrefetchOffloaded(_distance(number), span=span)

    def text(self, statement: syntax.PrefetchOffloaded) -> str:
        return f"prefetch offloaded {_blocks(statement.blocks)} ahead"


class DelayKind(StatementKind):
    made, rule, opener, is_scheduling = syntax.Delay, "delay", "delay", True
    missing = (
        _OF_COLLECTIVES,
        ("", "INT -STRING -BLOCK -COMPARISON", "how many blocks later", "such as `delay reduce_scatter 1 block`"),
    )

    def build(
        self, span: Span, _word: Lexeme, selector: SpannedSelector, number: Lexeme, _block: Lexeme
    ) -> syntax.Delay:
        return syntax.Delay(selector.selector, _distance(number), span=span)

    def text(self, delay: syntax.Delay) -> str:
        return f"delay {selectors.format_picked(delay.selector)} {_blocks(delay.blocks)}"


class OverlapKind(StatementKind):
    made, rule, opener, is_scheduling = syntax.Overlap, "overlap", "overlap", True
    closing = (("OF", "peak"),)
    missing = (
        _OF_COLLECTIVES,
        ("UP_TO", "INT", "a size", _IN_FLIGHT),
        ("WITHIN", "INT", "a size or a share", _OF_PEAK),
        ("", "IN_FLIGHT", "`in flight`", _IN_FLIGHT),
        ("NAME INT NUMBER PERCENT", "OF", "`of peak`", _OF_PEAK),
        ("OF", "NAME", "`peak`", _OF_PEAK),
    )

    def build(self, span: Span, _word: Lexeme, selector: SpannedSelector, *limits: _Limit) -> syntax.Overlap:
        found = {str(limit.of): limit.quantity for limit in limits}
        return syntax.Overlap(selector.selector, found.get("in flight"), found.get("peak"), span=span)

    def check(self, overlap: syntax.Overlap) -> Iterator[Diagnostic]:
        return _of_nothing(overlap.in_flight, "in flight", "2 GiB in flight")

    def text(self, overlap: syntax.Overlap) -> str:
        in_flight, peak = overlap.in_flight, overlap.peak
        limits = "" if in_flight is None else f" up to {predicates.quantity_text(in_flight)} in flight"
        limits += "" if peak is None else f" within {predicates.quantity_text(peak)} of peak"
        return f"overlap {selectors.format_picked(overlap.selector)}{limits}"


class KeepOrderKind(StatementKind):
    made, rule, opener, is_scheduling = syntax.KeepOrder, "keep_order", "keep order", True
    missing = (("KEEP_ORDER", "OF", "`of`", "such as `keep order of all_to_all`"), _OF_COLLECTIVES)

    def build(self, span: Span, _word: Lexeme, _of: Lexeme, selector: SpannedSelector) -> syntax.KeepOrder:
        return syntax.KeepOrder(selector.selector, span=span)

    def text(self, statement: syntax.KeepOrder) -> str:
        return f"keep order of {selectors.format_picked(statement.selector)}"


def _of_nothing(limit: syntax.Quantity | None, what: str, such: str) -> Iterator[Diagnostic]:
    """A limit of less than a byte. A peak that may not rise at all is a limit like others."""
    if limit is not None and limit.dimension == "bytes" and limit.value < 1:
        message = f"with less than a byte {what}, this line does nothing"
        yield diagnose("APL214", message, limit.span, help=f"write a size such as `up to {such}`")


def _check_ahead(word: Lexeme) -> None:
    if word != "ahead":
        message = f"a prefetch is so many blocks `ahead`, not `{word}`"
        word.report("APL010", message, help="write `ahead`", write=["ahead"])


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number} blocks"


def _distance(number: Lexeme) -> int:
    """A distance in blocks; 0 is reported and read as 1."""
    blocks = predicates.integer(number)
    if not blocks:
        message = "a distance of 0 blocks moves nothing"
        number.report("APL205", message, help="write `1`, or leave the line out", write=["1"])
    return blocks or 1


# --- expectations ----------------------------------------------------------------------------------------------


@frozen
class _Limit:
    """A limit, and the whole that it is a share of, if an expectation names it."""

    quantity: syntax.Quantity
    of: str | None
    span: Span


class ExpectTotalKind(StatementKind):
    made, rule, opener = syntax.ExpectTotal, "expect_total", "expect"
    missing = (("COMPARISON", "", "a figure", "such as `64 MiB`, `2 GFLOP`, `40 ms` or `20%`"),)
    elsewhere: ClassVar = {
        **dict.fromkeys(("memory", "mem", "max_memory", "peak_memory", "usage", "bytes", "total"), "peak"),
        **dict.fromkeys(("kept", "stored", "activations", "activation", "save"), "saved"),
        **dict.fromkeys(("recompute", "checkpointed", "recomputation"), "recomputed"),
        **dict.fromkeys(
            ("flops", "recompute_flops", "recomputed_flops", "compute", "work", "overhead"), "recomputed flops"
        ),
        **dict.fromkeys(("host", "host_memory", "pinned", "pinned_memory", "ram", "cpu_memory"), "host memory"),
        **dict.fromkeys(("recompute_time", "recomputed_time"), "recomputed time"),
        **dict.fromkeys(("time", "step", "step_time", "duration", "latency", "steptime"), "step time"),
        **dict.fromkeys(("exposed_time", "exposed_communication", "stall", "waiting", "idle"), "exposed"),
    }

    def build(self, span: Span, _word: Lexeme, figure: Lexeme, *rest: Any) -> syntax.ExpectTotal:
        per_stage = next((each for each in rest if isinstance(each, Lexeme) and each.type == "STAGE"), None)
        if per_stage is not None:
            rest = tuple(each for each in rest if not isinstance(each, Lexeme) or each.type not in ("PER", "STAGE"))
        *middle, sign, last = rest
        limit: syntax.Quantity = last.quantity
        name, end = " ".join(figure.split()), figure
        if per_stage is not None and name != "peak":
            per_stage.report("APL116", f"`peak` is expected per stage, not `{name}`", help="leave `per stage` out")
        elif per_stage is not None:
            name = "peak per stage"
        if middle and middle[0].type == "NAME":
            end = middle.pop(0)
            name = f"{name} {end}"
        if name == "host memory" and middle:
            if middle[-1] != "host":
                message = f"host memory is that of a rank, or `per host`, not `per {middle[-1]}`"
                middle[-1].report("APL010", message, help="write `per host`", write=["host"])
            name, middle = "host memory per host", []
        if name not in FIGURES:
            near = (self.elsewhere[name],) if name in self.elsewhere else nearest(name, FIGURES)
            help = did_you_mean(near) or f"the figures are {', '.join(FIGURES)}"
            if not near and limit.dimension == "number":
                help = f"{help}; how many nodes there are is written as `expect exactly {limit.span.text} {name}`"
            message = f"there is no figure `{name}` to expect something of"
            figure.report("APL116", message, figure.span.to(end.span), help=help, write=near)
        elif isinstance(last.of, Lexeme):
            of = "step" if name == "exposed" else "forward"
            if last.of != of:
                whose = "a share of `exposed` is one of the" if name == "exposed" else "a share is one of"
                last.of.report("APL116", f"{whose} `{of}`, not of `{last.of}`", help=f"write `of {of}`", write=[of])
            elif limit.dimension != "fraction":
                message = f"a share of the {of} is per cent, and `{limit.span.one_line}` is not"
                last.of.report("APL201", message, limit.span, help=f"write a share such as `30% of {of}`")
        elif name in ("saved", "recomputed") and limit.dimension == "fraction":
            message = f"`{limit.span.one_line}` is a share of nothing"
            share = f"{limit.span.one_line} of forward"
            figure.report("APL201", message, limit.span, help=f"write `{share}`", write=[share])
        return syntax.ExpectTotal(name, str(sign), limit, bool(middle), span=span)  # type: ignore[arg-type]

    @staticmethod
    def fit(expectation: syntax.ExpectTotal, report: predicates.Report) -> syntax.ExpectTotal:
        """Converts the limit to the dimension of the figure; reports a misfit."""
        return evolve(expectation, limit=predicates.fit_quantity(expectation.figure, expectation.limit, report))

    def text(self, expectation: syntax.ExpectTotal) -> str:
        per = " per block" if expectation.per_block else ""
        of = " of forward" if expectation.of_forward else ""
        if expectation.figure == "peak per stage":
            per, of = "", " per stage"
        figure = expectation.figure.removesuffix(" per stage")
        return f"expect {figure}{per} {expectation.op} {predicates.quantity_text(expectation.limit)}{of}"


class ExpectCountKind(StatementKind):
    made, rule, opener = syntax.ExpectCount, "expect_count", "expect"

    def build(self, span: Span, word: Lexeme, *rest: Any) -> syntax.ExpectCount:
        *bound, number, selector = rest
        loose = word.origin.loose
        scope: Any = None
        if loose and loose[-1][1].end == selector.span.end and isinstance(loose[-1][0], syntax.Scope):
            scope = loose.pop()[0]
        said: Any = " ".join(bound)
        return syntax.ExpectCount(said, predicates.integer(number), selector.selector, scope, span=span)

    def text(self, expectation: syntax.ExpectCount) -> str:
        counted = selectors.format_counted(expectation.selector, expectation.scope)
        return f"expect {expectation.bound} {expectation.n} {counted}"


class ExpectFateKind(StatementKind):
    made, rule, opener = syntax.ExpectFate, "expect_fate", "expect"

    def build(self, span: Span, word: Lexeme, *rest: Any) -> syntax.ExpectFate:
        *said, selector, fate = rest
        quantifier: Any = "no" if said == ["no"] else "every"
        if not said and not selector.span.text.startswith("every"):
            help = "write `every` or `no` before it"
            message = "`every` or `no` is missing before these nodes"
            fixes = [diagnostics.prefixed(selector.span, quantifier) for quantifier in ("every", "no")]
            word.report("APL208", message, selector.span, help=help, fixes=fixes)
        return syntax.ExpectFate(quantifier, selector.selector, str(fate), span=span)  # type: ignore[arg-type]

    def text(self, expectation: syntax.ExpectFate) -> str:
        return f"expect {expectation.quantifier} {selectors.format_picked(expectation.selector)} {expectation.fate}"


class ExpectLosslessKind(StatementKind):
    made, rule, opener = syntax.ExpectLossless, "expect_lossless", "expect"
    closing = (("EXPECT", "lossless"),)

    def build(self, span: Span, _word: Lexeme, _lossless: Lexeme) -> syntax.ExpectLossless:
        return syntax.ExpectLossless(span=span)

    def text(self, expectation: syntax.ExpectLossless) -> str:
        return "expect lossless"


# --- from the tree, and to text --------------------------------------------------------------------------------

_BY_CLASS = {kind.made: kind for kind in KINDS}
OPENERS = tuple(dict.fromkeys(kind.opener for kind in KINDS if kind.opener))
"""The words that open statements, except actions and what may precede a rule."""
MODIFIERS = ("optional", "override")
"""Words before a rule; the first also before changes of the graph's structure and scheduling."""


@predicates.spanned
class _LimitRules(SelectorRules):
    """The rules of the grammar for limits."""

    def budget(self, span: Span, up_to: Lexeme, limit: syntax.Quantity, _per_rank: Lexeme) -> syntax.Quantity:
        if limit.dimension != "bytes":
            help = "such as `up to 8 GiB per rank`"
            up_to.report("APL116", "a budget is a number of bytes", limit.span, help=help)
        return evolve(limit, span=span)

    def form(self, span: Span, _as: Lexeme, name: Lexeme, per_row: Lexeme | None = None) -> syntax.NarrowForm:
        dtype = ALIASES.get(name, str(name))
        if dtype not in syntax.NARROW_BYTES:
            message = f"nothing is kept as `{name}`"
            forms = f"values are narrowed to {joined([*syntax.NARROW_BYTES])}"
            name.misnamed("APL115", message, syntax.NARROW_BYTES, forms)
        elif syntax.NARROW_BYTES[dtype] == 1 and per_row is None:
            message, good = f"`{dtype}` has too few bits for values of any size: it needs a scale", f"{dtype} per row"
            name.report("APL116", message, help=f"write `{good}`", write=[good])
        elif syntax.NARROW_BYTES[dtype] > 1 and per_row is not None:
            fixes = [diagnostics.left_out(per_row.span)]
            per_row.report("APL116", f"`{dtype}` needs no scale", help="leave it out", fixes=fixes)
        return syntax.NarrowForm(dtype, per_row is not None, span=span)

    def limit(
        self, span: Span, limit: syntax.Quantity, _of: Lexeme | None = None, whole: Lexeme | None = None
    ) -> _Limit:
        return _Limit(limit, whole, span)

    def up_to(self, span: Span, word: Lexeme, size: syntax.Quantity) -> syntax.Quantity:
        return _bytes(size, span, word, "a bucket has a size in bytes", "up to 256 MiB")

    def slice_count(self, span: Span, into: Lexeme, number: Lexeme) -> syntax.Quantity:
        if into != "into":
            into.report("APL010", f"so many slices are written as `into {number}`", help="write `into`", write=["into"])
        return syntax.Quantity(float(predicates.integer(number)), "number", span=span)

    def slice_size(self, span: Span, word: Lexeme, size: syntax.Quantity) -> syntax.Quantity:
        return _bytes(size, span, word, "a slice is limited in bytes", "up to 256 MiB")

    def over_rows(self, span: Span, word: Lexeme, rows: Lexeme) -> Lexeme:
        if rows != "tokens":
            message = f"a region is cut over `tokens`, not over `{rows}`"
            rows.report("APL116", message, help="write `tokens`", write=["tokens"])
        return word

    def in_flight(self, span: Span, word: Lexeme, size: syntax.Quantity, _end: Lexeme) -> _Limit:
        size = _bytes(size, span, word, "what is in flight is limited in bytes", "up to 2 GiB in flight")
        return _Limit(size, "in flight", span)

    def within_peak(self, span: Span, word: Lexeme, size: syntax.Quantity, _of: Lexeme, peak: Lexeme) -> _Limit:
        if peak != "peak":
            message = f"a schedule stays within so much of `peak`, not of `{peak}`"
            peak.report("APL010", message, help="write `peak`", write=["peak"])
        if size.dimension != "fraction":
            size = _bytes(size, span, word, "a peak is limited in bytes, or per cent", "within 1 GiB of peak")
        return _Limit(evolve(size, span=span), "peak", span)


def _bytes(size: syntax.Quantity, span: Span, word: Lexeme, message: str, example: str) -> syntax.Quantity:
    if size.dimension != "bytes" and not word.origin.problems:
        word.report("APL116", message, size.span, help=f"such as `{example}`")
    return evolve(size, span=span)


def _callback(kind: StatementKind) -> Callable[..., syntax.Statement]:
    def build(_: object, span: Span, *parts: Any) -> syntax.Statement:
        if kind.made is syntax.Rule or parts[0].type != "OPTIONAL":
            return kind.build(span, *parts)  # type: ignore[no-any-return]
        return evolve(kind.build(span, *parts[1:]), optional=True)  # type: ignore[no-any-return]

    return build


_CALLBACKS = {kind.rule: _callback(kind) for kind in KINDS}
StatementRules = predicates.spanned(type("StatementRules", (_LimitRules,), _CALLBACKS))
"""The rules of the grammar from ``start`` down; a statement is built from the words of its rule."""


def kind_of(statement: syntax.Statement) -> StatementKind:
    """The kind of a statement; a ``KeyError`` where none is registered."""
    return _BY_CLASS[type(statement)]


def format_statement(statement: syntax.Statement) -> str:
    """The canonical text of a statement: ``optional save mm``, ``prefetch all_gather 1 block ahead``."""
    return f"{'optional ' if getattr(statement, 'optional', False) else ''}{kind_of(statement).text(statement)}"


def format_policy(policy: syntax.Policy) -> str:
    """The canonical text of a resolved policy: names that are used, includes in place, no comments. Digests and cache
    keys are made of it, so it holds everything that can change a decision and nothing else."""
    used = selectors.names_in(policy, policy.statements)
    lets = [let for name, let in policy.lets.items() if name in used]
    lines = [f"policy {policy.name}"] if is_policy_name(policy.name) else []
    lines += [] if policy.blocks is None else [format_statement(policy.blocks)]
    if policy.device is not None:  # the name wherever its file is, and the figures, which decide
        name = policy.device.name
        plain = re.fullmatch(r"\w[\w.+-]*", name) is not None
        lines.append(f"device {name}" if plain else 'device "' + re.sub(r'["\n]', " ", name) + '"')
        lines += [f"# {key}: {json.dumps(each)}" for key, each in json.loads(policy.device.canonical).items()]
    lines += [] if policy.undecided is None else [format_statement(policy.undecided)]
    ahead = tuple(each for each in (policy.prefetch_offloaded, policy.pipeline, policy.balance) if each is not None)
    rest = (*lets, *policy.rules, *policy.rewrites, *policy.scheduling, *ahead, *policy.expectations)
    return "\n".join((*lines, *map(format_statement, rest))) + "\n"


_COUNTING_WORDS = frozenset(("FIRST", "LAST", "ORDINAL", "EVERY_NTH", "EXACTLY", "LEAST", "MOST"))


def report_loose(statement_words: list[Lexeme]) -> None:
    """Report each ``per …`` that nothing in its phrase counts by."""
    if not statement_words:
        return
    word = statement_words[0]
    for scope, span in word.origin.loose:
        if not isinstance(scope, syntax.Scope):
            message = f"`{span.one_line}` belongs to a `bucket` alone"
            counts = any(each.type in _COUNTING_WORDS for each in statement_words)
            help = "write `per block`" if counts else "to take some of the blocks, write such as `in every 2nd block`"
            word.report("APL014", message, span, help=help, write=["per block"] if counts else [])
            continue
        message = f"`per {scope.value}` has no `first`, `last`, `3rd` or `every 2nd` before it"
        help = f"write which of them, such as `first … per {scope.value}`, or leave `per {scope.value}` out"
        word.report("APL014", message, span, help=help, fixes=[diagnostics.left_out(span)])
