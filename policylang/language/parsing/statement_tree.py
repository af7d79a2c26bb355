"""Parser callbacks that build statements (see ``tree.py``)."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

from attrs import evolve, frozen
from lark import v_args

from policylang.language import syntax
from policylang.language.diagnostics import Mend, Span, TextChange, left_out, prefixed, written
from policylang.language.lexer import Lexeme
from policylang.language.parsing.order_tree import OrderRules, opened
from policylang.language.predicates import integer, quoted
from policylang.language.selectors import SpannedSelector
from policylang.language.syntax import Action, Quantity, Rule, Scope
from policylang.language.wording import did_you_mean, nearest

_SYNONYMS = {"must_save": "save", "prefer_recompute": "recompute"}
_ACTION_WORDS = (
    *("save", "must_save", "prefer_save", "recompute", "prefer_recompute", "must_recompute"),
    *("offload", "prefer_offload", "leave"),
)
ACTIONS = {word: Action[_SYNONYMS.get(word, word).upper()] for word in _ACTION_WORDS}
FATES = ("auto", "save", "recompute")
FIGURES: tuple[str, ...] = get_args(get_type_hints(syntax.ExpectTotal)["figure"])
_OF_FORWARD = ("saved", "recomputed")
"""Figures whose share is not said by a per cent sign alone."""
_DEVICE_NAME = re.compile(r"\w[\w.+-]*")
_FATES_ELSEWHERE = {
    **dict.fromkeys(("keep", "store", "cache", "must_save"), "save"),
    **dict.fromkeys(("checkpoint", "remat", "drop", "discard", "must_recompute"), "recompute"),
    **dict.fromkeys(("default", "none", "min_cut", "mincut", "partitioner", "torch", "inductor", "leave"), "auto"),
}
_FIGURES_ELSEWHERE = {
    **dict.fromkeys(("memory", "mem", "max_memory", "peak_memory", "usage", "bytes", "total"), "peak"),
    **dict.fromkeys(("kept", "stored", "activations", "activation", "save"), "saved"),
    **dict.fromkeys(("recompute", "checkpointed", "recomputation"), "recomputed"),
    **dict.fromkeys(
        ("flops", "recompute_flops", "recomputed_flops", "compute", "work", "overhead"), "recomputed flops"
    ),
    **dict.fromkeys(("recompute_time", "recomputed_time"), "recomputed time"),
    **dict.fromkeys(("time", "step", "step_time", "duration", "latency", "steptime"), "step time"),
    **dict.fromkeys(("exposed_time", "exposed_communication", "stall", "waiting", "idle"), "exposed"),
}
"""What other tools call the figures."""
_COUNTING = frozenset(("FIRST", "LAST", "ORDINAL", "EVERY_NTH", "EXACTLY", "LEAST", "MOST"))
_COLLECTIVES = {"all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}


@frozen
class _Limit:
    """What an expectation compares with, and of what it says that it is a share."""

    quantity: Quantity
    whole: Lexeme | None
    span: Span


@v_args(inline=True)
class StatementRules(OrderRules):
    """The rules of the grammar from ``start`` down; a statement is built from the tokens of its rule."""

    def policy(self, word: Lexeme, name: Lexeme) -> syntax.PolicyName:
        return syntax.PolicyName(str(name), word.span.to(name.span))

    def requires(self, word: Lexeme, name: Lexeme, sign: Lexeme, version: Lexeme) -> syntax.Requires:
        if name != "policylang":
            name.report("APL116", f"a policy can require `policylang` alone, not `{name}`")
        return syntax.Requires(str(sign), str(version), word.span.to(version.span))  # type: ignore[arg-type]

    def include(self, word: Lexeme, target: Lexeme) -> syntax.Include:
        return syntax.Include(quoted(target), target.type == "BUNDLED", word.span.to(target.span))

    def device(self, word: Lexeme, target: Lexeme) -> syntax.Device:
        if target.type != "STRING" and (not _DEVICE_NAME.fullmatch(target) or target.endswith(".toml")):
            target.report(
                "APL116",
                "the file of a device profile stands in quotes",
                help=f'write `"{target}"`',
                write=[f'"{target}"'],
            )
        return syntax.Device(quoted(target), word.span.to(target.span))

    def let(self, word: Lexeme, name: Lexeme, _equals: Lexeme, selector: SpannedSelector) -> syntax.Let:
        return syntax.Let(str(name), selector.selector, word.span.to(selector.span))

    def blocks(self, word: Lexeme, glob: Lexeme) -> syntax.Blocks:
        return syntax.Blocks(quoted(glob), word.span.to(glob.span))

    def undecided(self, word: Lexeme, _arrow: Lexeme, fate: Lexeme) -> syntax.Undecided:
        if fate not in FATES:
            near = _FATES_ELSEWHERE.get(str(fate).lower())
            meant = (near,) if near else nearest(str(fate), FATES)
            help = did_you_mean(meant) or "it is one of `auto`, `save`, `recompute`"
            message = f"values that no rule decides cannot be left to `{fate}`"
            fate.report("APL116", message, fate.span, help=help, write=meant)
        return syntax.Undecided(str(fate), word.span.to(fate.span))  # type: ignore[arg-type]

    def fuse(self, *words: Lexeme) -> syntax.Fuse:
        word, (collective, chains, *rest), optional = opened(words)
        if collective not in _COLLECTIVES:
            near = nearest(str(collective), _COLLECTIVES)
            help = did_you_mean(near) or "chains of `all_gather` or `reduce_scatter` are"
            message = f"chains of `{collective}` cannot be fused"
            collective.report("APL116", message, help=help, write=near)
        if chains != "chains":
            message = f"`fuse {collective}` is followed by `chains`, not by `{chains}`"
            chains.report("APL010", message, help="write `chains`", write=["chains"])
        end = rest[-1] if rest else chains
        dims = tuple(str(dim) for dim in rest[1::2])
        known = _COLLECTIVES.get(collective, "all_gather")
        return syntax.Fuse(known, dims, optional, word.span.to(end.span))  # type: ignore[arg-type]

    def collapse(self, *words: Lexeme) -> syntax.Collapse:
        word, (what,), optional = opened(words)
        if what != "round_trips":
            message = f"`{what}` cannot be collapsed"
            what.report("APL116", message, help="write `collapse round_trips`", write=["round_trips"])
        return syntax.Collapse(optional, word.span.to(what.span))

    # --- rules ---

    def rule(self, *parts: Any) -> Rule:
        words = [part for part in parts if isinstance(part, Lexeme)]
        selector = next(part for part in parts if isinstance(part, SpannedSelector))
        modifiers = [word for word in words if word.type in ("OPTIONAL", "OVERRIDE")]
        verb = next(word for word in words if word.type in ("ACTION", "NAME"))
        for index, word in enumerate(modifiers):
            if word in modifiers[:index]:
                end = parts[index + 1].span.start
                mends = [Mend("leave it out", (TextChange(Span(word.span.source, word.span.start, end), ""),))]
                word.report("APL209", f"`{word}` stands before this rule twice", mends=mends)
        if verb not in ACTIONS:
            near = nearest(str(verb), ACTIONS)
            help = did_you_mean(near) or f"the actions are {', '.join(ACTIONS)}"
            verb.report("APL013", f"`{verb}` is not an action", help=help, write=near)
        span = parts[0].span.to(parts[-1].span)
        names = [str(word) for word in modifiers]
        action = ACTIONS.get(verb, Action.LEAVE)
        budget = next((part for part in parts if isinstance(part, Quantity)), None)
        if budget is not None and verb in ACTIONS and not action.offloads:
            message = f"`{verb}` has no budget: only what is offloaded can be limited"
            mends = [left_out(budget.span), *written(verb.span, ["offload"], is_choice=True)]
            verb.report("APL116", message, budget.span, help="leave it out, or write `offload`", mends=mends)
        return Rule(action, selector.selector, "optional" in names, "override" in names, span, budget)

    def budget(self, up_to: Lexeme, limit: Quantity, per_rank: Lexeme) -> Quantity:
        if limit.dimension != "bytes":
            help = "such as `up to 8 GiB per rank`"
            up_to.report("APL116", "a budget is a number of bytes", limit.span, help=help)
        return evolve(limit, span=up_to.span.to(per_rank.span))

    # --- expectations ---

    def limit(self, limit: Quantity, _of: Lexeme | None = None, whole: Lexeme | None = None) -> _Limit:
        return _Limit(limit, whole, limit.span.to((whole or limit).span))

    def expect_total(self, word: Lexeme, figure: Lexeme, *rest: Any) -> syntax.ExpectTotal:
        last: _Limit = rest[-1]
        limit = last.quantity
        sign: Lexeme = rest[-2]
        middle = rest[:-2]
        name, end = " ".join(figure.split()), figure
        if middle and middle[0].type == "NAME":
            end = middle[0]
            name, middle = f"{name} {end}", middle[1:]
        if name not in FIGURES:
            near = (_FIGURES_ELSEWHERE[name],) if name in _FIGURES_ELSEWHERE else nearest(name, FIGURES)
            help = did_you_mean(near) or f"the figures are {', '.join(FIGURES)}"
            if not near and limit.dimension == "number":
                help = f"{help}; how many nodes there are is written as `expect exactly {limit.span.text} {name}`"
            message = f"there is no figure `{name}` to expect something of"
            figure.report("APL116", message, figure.span.to(end.span), help=help, write=near)
        elif last.whole is not None:
            _check_whole(name, limit, last.whole)
        elif name in _OF_FORWARD and limit.dimension == "fraction":
            message = f"`{limit.span.one_line}` does not say of what"
            share = f"{limit.span.one_line} of forward"
            figure.report("APL201", message, limit.span, help=f"write `{share}`", write=[share])
        span = word.span.to(last.span)
        return syntax.ExpectTotal(name, str(sign), limit, bool(middle), span)  # type: ignore[arg-type]

    def expect_count(self, word: Lexeme, *rest: Any) -> syntax.ExpectCount:
        selector: SpannedSelector = rest[-1]
        number: Lexeme = rest[-2]
        bound: Any = " ".join(str(part) for part in rest[:-2])
        loose = number.origin.loose
        scope: Scope | None = None
        if loose and loose[-1][1].end == selector.span.end and isinstance(loose[-1][0], Scope):
            scope = loose.pop()[0]  # type: ignore[assignment]
        return syntax.ExpectCount(bound, integer(number), selector.selector, scope, word.span.to(selector.span))

    def expect_fate(self, word: Lexeme, *rest: Any) -> syntax.ExpectFate:
        selector: SpannedSelector = rest[-2]
        fate: Lexeme = rest[-1]
        quantifier: Any = "no" if len(rest) == 3 and rest[0] == "no" else "every"
        if len(rest) == 2 and not selector.span.text.startswith("every"):
            help = "write `every` or `no` before it"
            message = "this expectation does not say whether all of these nodes or none of them"
            mends = [prefixed(selector.span, quantifier) for quantifier in ("every", "no")]
            word.report("APL208", message, selector.span, help=help, mends=mends)
        span = word.span.to(fate.span)
        return syntax.ExpectFate(quantifier, selector.selector, str(fate), span)  # type: ignore[arg-type]


def _check_whole(name: str, limit: Quantity, whole: Lexeme) -> None:
    """Report a share of something else than the figure is one of."""
    of = "step" if name == "exposed" else "forward"
    if whole != of:
        message = f"a share is one of `{of}`, not of `{whole}`"
        if name == "exposed":
            message = f"a share of `exposed` is one of the `{of}`, not of `{whole}`"
        whole.report("APL116", message, help=f"write `of {of}`", write=[of])
    elif limit.dimension != "fraction":
        message = f"a share of the {of} is per cent, and `{limit.span.one_line}` is not"
        whole.report("APL201", message, limit.span, help=f"write a share such as `30% of {of}`")


def report_loose(statement_words: list[Lexeme]) -> None:
    """Report each ``per …`` that nothing in its phrase counts by."""
    if not statement_words:
        return
    origin = statement_words[0].origin
    for scope, span in origin.loose:
        if not isinstance(scope, Scope):
            message = f"`{span.one_line}` belongs to a `bucket` alone"
            counts = any(word.type in _COUNTING for word in statement_words)
            help = "write `per block`" if counts else "to take some of the blocks, write such as `in every 2nd block`"
            at = Span(span.source, span.start, span.end)
            origin.report("APL014", message, at, help=help, write=["per block"] if counts else [])
            continue
        message = f"`per {scope.value}` has no `first`, `last`, `3rd` or `every 2nd` of its own before it"
        help = f"write which of them, such as `first … per {scope.value}`, or leave `per {scope.value}` out"
        at = Span(span.source, span.start, span.end)
        origin.report("APL014", message, at, help=help, mends=[left_out(at)])
