"""The mistakes of people who know other languages or PyTorch's settings: the message, and the fix.

A row is a pattern of one statement's text. The group ``bad`` is underlined and replaced. A row is reported only where
the statement, so changed, can be read, or is read on beyond the place that was changed; the first such row is. Nothing
is guessed by likeness here. A mistake without a row gets the general diagnostic of ``parser.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

from attrs import evolve, frozen

from policylang.language.diagnostics import Diagnostic, Fix, Span, diagnose, written
from policylang.language.lexer import BEHIND_SELECTOR
from policylang.language.predicates import ANNOTATED, FLAGS, MEASURES, PROPERTIES
from policylang.language.selectors import nth
from policylang.language.statements import ACTIONS, FIGURES, KINDS, MODIFIERS

Replacement = str | Callable[[re.Match[str]], str | Sequence[str]]
Reads = Callable[[str], int | None]
"""Returns the offset at which a text cannot be read any further; None if all of it can."""

_LONGEST = 600  # characters of a statement that is looked at: nobody misplaces a word in a longer one and wonders why
_COMMENT = re.compile(r'"[^"\n]*"|(?P<comment>#[^\n]*)')


@frozen
class Mistake:
    """``replacement``: a text with the pattern's groups in braces, or a function of the match; several if one of them
    is meant. ``help`` replaces "write" and the replacement, and may contain ``{good}``."""

    pattern: re.Pattern[str]
    replacement: Replacement
    message: str
    help: str | None = None
    code: str | None = None
    """The code, where the general diagnostic has another."""

    def replacements(self, match: re.Match[str]) -> Sequence[str]:
        if isinstance(self.replacement, str):
            return [self.replacement.format(**match.groupdict(default=""))]
        made = self.replacement(match)
        return [made] if isinstance(made, str) else made


def find_mistake(statement: Span, problem: Diagnostic, reads: Reads) -> Diagnostic | None:
    """The mistake that explains why a statement cannot be read, to be reported in place of the general problem."""
    text, stops = statement.text, problem.span.start - statement.start if problem.span is not None else 0
    comment = next((each for each in _COMMENT.finditer(text) if each["comment"] is not None), None)
    if comment is not None:
        text = "" if text[comment.end() :].strip() else text[: comment.start()]
    text = text.rstrip()
    if len(text) > _LONGEST or not text.strip():
        return None
    partial: Diagnostic | None = None
    for mistake in mistakes():
        match = mistake.pattern.search(text)
        if match is None:
            continue
        start, end = match.span("bad")
        replacements = mistake.replacements(match)
        if not replacements:
            return partial or _found(mistake, match, None, statement, problem)
        for good in replacements:
            stopped = reads(text[:start] + good + text[end:])
            if stopped is None:
                return _found(mistake, match, good, statement, problem)
            if partial is None and stopped > start + len(good) and stopped - len(good) + end - start > stops:
                partial = _found(mistake, match, good, statement, problem)
    return partial


def _found(
    mistake: Mistake, match: re.Match[str], good: str | None, statement: Span, problem: Diagnostic
) -> Diagnostic:
    """The diagnostic of a mistake, with its fix. Spaces around a replacement stay; a word that goes takes one along."""
    source, text, (start, end) = statement.source, match.string, match.span("bad")
    bad, shown = match["bad"], " ".join((good or "").split())
    left, right = len(bad) - len(bad.lstrip()), len(bad) - len(bad.rstrip())
    underlined = Span(source, statement.start + start + left, statement.start + end - right)
    groups = {name: " ".join((group or "").split()) for name, group in match.groupdict().items()}
    help = None if mistake.help is None else mistake.help.format(good=shown)
    fixes: tuple[Fix, ...] = ()
    if good is not None:
        help = help or (f"write `{shown}`" if shown else f"leave `{groups['bad']}` out")
        if not good:
            end += text[start - 1 : start].isspace() and text[end : end + 1].isspace()
        elif bad[-1].isspace() and not good[-1].isspace() and text[end : end + 1].strip():
            good += " "
        fixes = written(Span(source, statement.start + start, statement.start + end), [good])
        if not shown:
            fixes = (evolve(fixes[0], title=help),)
    message = mistake.message.format(**groups)
    return diagnose(mistake.code or problem.code, message, underlined, help=help, fixes=fixes)


# --- patterns --------------------------------------------------------------------------------------------------


def _any_of(words: Sequence[str]) -> str:
    """A pattern of any of them, the longest first, whatever space is between their words."""
    longest = sorted(words, key=len, reverse=True)
    return "(?:" + "|".join(r"\s+".join(map(re.escape, word.split())) for word in longest) + ")"


_ACTION = _any_of([*ACTIONS])
_SCHEDULING = _any_of([kind.opener for kind in KINDS if kind.is_scheduling and kind.opener.isalpha()])
_MODIFIERS = rf"^\s*(?:{_any_of(MODIFIERS)}\s+)*"
_VERB = rf"{_MODIFIERS}{_ACTION}"
_NAME = r"[A-Za-z_][\w.*]*"
_LAST_WORD = rf"(?!{_any_of(BEHIND_SELECTOR)}\b)[A-Za-z_][\w.*{{}}]*"
_FIGURE = rf"{_any_of(FIGURES)}(?:\s+per\s+block)?"
_SUBJECT = rf"{_any_of((*MEASURES, *PROPERTIES))}(?:\[-?\d+\])?"
_BLOCK = r"(?:blocks?|layers?)"
_LONG_DASH = "‐‑‒–—−"
_DASH = rf"\-{_LONG_DASH}"
_RANGE = rf"(?P<low>\d+)\s*(?:\.{{2,}}|…|[{_DASH}:~]|\bto\b|\bthrough\b)\s*(?P<high>\d+)"
_START = r"^\s*(?:optional\s+)?"
_IN = r"\b(?:in|outside)\s+"

_ORDINALS = {
    word: nth(number)
    for number, word in enumerate(
        ("second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"), 2
    )
}
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"], 1)
}
_ACTIONS_ELSEWHERE = {
    **dict.fromkeys(("keep", "store", "cache", "retain", "stash", "remember", "preserve", "saved"), "save"),
    **dict.fromkeys(("checkpoint", "remat", "rematerialize", "rematerialise", "recalculate", "rerun"), "recompute"),
    **dict.fromkeys(("drop", "discard", "forget", "free", "evict", "recomputed", "activation_checkpoint"), "recompute"),
    **dict.fromkeys(("swap", "move", "spill", "offload_to_cpu", "cpu_offload", "offloaded"), "offload"),
    **dict.fromkeys(("ignore", "skip"), "leave"),
}
_STATEMENTS_ELSEWHERE = {
    **dict.fromkeys(("prefetching", "pre_fetch", "pre-fetch", "preload", "hoist"), "prefetch"),
    **dict.fromkeys(("bucketing", "bucketize", "buckets", "coalesce", "merge", "group", "combine"), "bucket"),
    **dict.fromkeys(("postpone", "defer"), "delay"),
    **dict.fromkeys(("overlapping", "hide", "reorder"), "overlap"),
    **dict.fromkeys(("assert", "require", "ensure", "assume", "check", "limit"), "expect"),
    **dict.fromkeys(("def", "var", "define", "alias", "set", "const"), "let"),
    **dict.fromkeys(("preserve order of", "preserve the order of", "keep the order of"), "keep order of"),
}
_SETTINGS = {
    r"(?P<knob>bucket_cap_mb)\s*[:=]?\s*(?P<n>\d[\d.]*)": "bucket reduce_scatter up to {n} MiB",
    r"(?P<knob>forward_prefetch|backward_prefetch|set_modules_to_(?:for|back)ward_prefetch)\b.*": (
        "prefetch (all_gather where from parameter) 1 block ahead"
    ),
    r"(?P<knob>reshard_after_forward)\s*[:=]?\s*(?:False|false|0)": "include <fsdp_reshard_never>",
    r"(?P<knob>reshard_after_forward)\b.*": "include <fsdp_reshard_always>",
}
_SIGNS = {
    **dict.fromkeys(("at most", "no more than", "not more than", "up to", "max", "within", "=<"), "<="),
    **dict.fromkeys(("under", "below", "less than", "smaller than", "fewer than"), "<"),
    **dict.fromkeys(("at least", "no less than", "not less than", "min", "=>"), ">="),
    **dict.fromkeys(("over", "above", "more than", "greater than", "larger than", "bigger than"), ">"),
    **dict.fromkeys(("equal to", "equals", "equal", "is"), "=="),
}
_LEAVING_OUT = ("but", "but not", "except for", "without", "minus", "excluding", "other than", "and not")
_FLAGS = {flag.split()[1]: flag for flag in reversed(FLAGS) if flag.startswith(("is ", "from "))}
_LAYERS = {"layer": "block", "layers": "blocks"}


# --- replacements ----------------------------------------------------------------------------------------------


def _looked_up(table: Mapping[str, str]) -> Replacement:
    return lambda match: table[" ".join(match["bad"].lower().split())]


def _range(match: re.Match[str]) -> str:
    low, high = sorted((int(match["low"]), int(match["high"])))
    return f"blocks {low}..{high}"


def _range_of_modules(match: re.Match[str]) -> str:
    """The part after the range is a path within each block."""
    return f"{match['stack']}.*{match['rest']} in {_range(match)}" if match["rest"] else _range(match)


def _blocks_below(match: re.Match[str]) -> str:
    sign, number = match["sign"], int(match["number"])
    first = f"first {number + (sign in ('<=', '>'))} blocks"
    place = f"in block {number}" if sign == "==" else f"in {first}" if sign < "=" else f"in block outside {first}"
    return place + (" where" if match["more"] else "")


def _everything_in_layers(match: re.Match[str]) -> str:
    action = _ACTIONS_ELSEWHERE.get(match["verb"], match["verb"])
    if match["number"] is None:
        nth = _ORDINALS.get(match["nth"], "2nd" if match["nth"] == "other" else match["nth"])
        return f"{action} everything in {f'every {nth} ' if nth else ''}block"
    number = _NUMBERS.get(match["number"], match["number"])
    return f"{action} everything in {match['which']} {number} blocks"


def _share(match: re.Match[str]) -> str:
    word = "last" if match["which"] in ("second", "last") else "first"
    part = " ".join(match["part"].split()).replace(" %", "%")
    return f"{word} {'25%' if part == 'quarter' else part} of blocks"


def _every_nth(match: re.Match[str]) -> str:
    return f"{nth(int(match['number']))}{' block' if match['blocks'] else ''}"


def _sign(match: re.Match[str]) -> str:
    words = " ".join(match["bad"].lower().split())
    return _SIGNS.get(words) or _SIGNS.get(words.removeprefix("is "), "<=")


def _everything_in(match: re.Match[str]) -> str:
    place = _range(match) if match["low"] else f"block {match['number'] or ''}".rstrip()
    return f"everything in {place}"


def _operators_left_out(match: re.Match[str]) -> str:
    return " ".join(filter(None, ("where" if match["and"] else "", match["rest"], "except", match["what"])))


# --- rows ------------------------------------------------------------------------------------------------------

_Row = tuple[str, Replacement, str] | tuple[str, Replacement, str, str | None, str | None]
_COMPARE = "a comparison is a sign, such as `<=`"
_EVERY = "`every` is followed by an ordinal, such as `2nd`"
_LEFT_OUT = "what is left out follows `except`"
_NO_WHERE = "a place follows a selector, without `where`"
_ONE_WORD = "`{bad}` is one word"
_PLACE = "`{bad}` is a place, and follows a selector and `in`"


def _rows() -> Iterator[_Row]:
    # the order of collectives, by PyTorch's settings or by hearsay
    for setting, line in _SETTINGS.items():
        yield (
            rf"^\s*(?P<bad>(?:[\w.]+\.)?{setting})\s*$",
            *(line, "`{knob}` is a PyTorch setting; a policy has a line for it", None, "APL012"),
        )
    yield (
        rf"{_START}(?P<bad>{_SCHEDULING})\s+(?:per|in|outside|where|chain|up\s+to|within)\s",
        *("{bad} all_gather", "no selector follows `{bad}`", "such as `{good}`", None),
    )
    # blocks, as other tools number them, and a budget
    yield (
        r"^\s*(?P<bad>(?:(?:activation_)?(?:memory_)?budget|max_memory|memory_limit)\b)\s*[:=]?\s*\d",
        *(lambda _: [], "a policy has no `{bad}`: `policylang tune` writes a policy for one"),
        *('run `policylang tune --graph my.graph --saved "6 GiB"`, or with `--peak "70 GiB"`', None),
    )
    yield (
        rf"{_MODIFIERS}(?P<bad>(?P<verb>{_any_of([*_ACTIONS_ELSEWHERE, *ACTIONS])})\s+(?:(?:all|each|every)"
        rf"(?:\s+(?P<nth>other|\d+(?:st|nd|rd|th)|{_any_of([*_ORDINALS])}))?|"
        rf"(?P<which>first|last)\s+(?P<number>\d+|{_any_of([*_NUMBERS])}))(?:\s+(?:of\s+)?the)?\s+(?:transformer\s+|decoder\s+)?{_BLOCK})\s*$",
        *(_everything_in_layers, "blocks are a place: they follow a selector and `in`"),
    )
    yield (
        rf"{_IN}(?P<bad>(?P<stack>(?:[A-Za-z_]\w*\.)*(?:layers?|blocks?|h))\.{_RANGE}(?P<rest>(?:\.[\w*]+)*))(?!\S)",
        *(_range_of_modules, "a range of blocks is written as `blocks 4..20`"),
    )
    yield (
        r"^(?!.*\bwhere\b.*\bor\b).*?\s(?P<bad>(?:where|and)\s+(?:layer|block)(?:_?(?:id|idx|index|number|num))?\s*"
        r"(?P<sign><=?|>=?|==)\s*(?P<number>\d+)(?P<more>\s+and\b)?)",
        *(_blocks_below, "blocks are chosen by a place, not by a condition"),
    )
    # beginnings of statements, signs and quotes
    yield (
        r"(?P<bad>[‘’‚“”„«»'`](?P<text>[^‘’“”„«»'`\"\n]*)[‘’“”«»'`])",
        lambda match: (f'"{match["text"].strip()}"', match["text"].strip()),
        'only a module path or a file is quoted, in `"`',
    )
    yield rf"(?P<bad>⇒|⟶|➔|➜|=>|>>|~>|[{_DASH}]{{2,}}>|[{_LONG_DASH}]>)", "->", "an arrow is written `->`"
    yield rf"^\s*(?P<bad>(?P<verb>{_ACTION})\s*:)", "{verb}", "an action is followed by a selector, without a colon"
    yield rf"^\s*(?P<bad>(?P<how>prefer|must)[\s{_DASH}]+(?P<verb>save|recompute|offload))\b", "{how}_{verb}", _ONE_WORD
    actions, said = rf"(?P<bad>{_any_of([*_ACTIONS_ELSEWHERE])})", "`{bad}` is not an action"
    yield rf"{_MODIFIERS}{actions}(?=\s+[\w(*])", _looked_up(_ACTIONS_ELSEWHERE), said, None, "APL012"
    yield rf"(?:->|→)\s*{actions}\s*$", _looked_up(_ACTIONS_ELSEWHERE), said
    yield (
        rf"{_START}(?P<bad>{_any_of([*_STATEMENTS_ELSEWHERE])})(?=\s+[\w(*])",
        *(_looked_up(_STATEMENTS_ELSEWHERE), "`{bad}` does not start a statement", None, "APL012"),
    )
    yield (
        rf"^\s*(?P<bad>(?P<name>[A-Za-z_]\w*)\s*:?=)(?!=|\s*{_ACTION}\s*$)",
        *("let {name} =", "a name is defined with `let`"),
    )
    yield (
        r"^\s*(?P<bad>(?:device|gpu|hardware|machine)\s*[:=]|(?:gpu|hardware|machine)\s)",
        *("device ", "a device profile is named in one word, such as `device h100-sxm`", None, "APL010"),
    )
    yield (
        r"^\s*(?P<bad>(?:blocks?|layers?)\s*(?:[:=]|->|→)|(?:block|layers?)\s)",
        *("blocks ", "blocks are named as in `blocks layers.*`"),
    )
    yield (
        r"^\s*(?P<bad>(?:import|use|extends|from)\s+(?P<name>\w+))\s*$",
        *("include <{name}>", "the statements of another policy are brought in by `include`"),
    )
    yield (
        rf"^(?!\s*device\b).*?(?P<bad>[A-Za-z_]\w*(?:[{_DASH}]\w+)+)",
        *(lambda match: re.sub(f"[{_DASH}]", "_", match["bad"]), "names are written with `_`", None, "APL005"),
    )
    # places, positions, and how selectors are joined
    yield rf"{_VERB}\s+(?P<bad>where|in|outside)\s+\S", "everything {bad}", "no selector precedes `{bad}`"
    whole = rf"(?:(?:the|all|every)\s+)*{_BLOCK}(?:\s+(?:{_RANGE}|(?P<number>\d+)))?"
    yield rf"{_VERB}\s+(?P<bad>{whole})(?!\S)", _everything_in, _PLACE
    nth = r"\d+(?:st|nd|rd|th)"
    some = rf"(?:first|last)(?:\s+\d+)?|every\s+{nth}|{nth}|(?:first|last)\s+(?:half|\d[\d.]*%)\s+of"
    yield rf"{_VERB}\s+(?P<bad>(?:{some})\s+blocks?)(?!\S)", "everything in {bad}", _PLACE
    yield rf"{_IN}(?P<bad>{_BLOCK}\s+\[?{_RANGE}\]?)", _range, "a range of blocks is written as `blocks 4..20`"
    yield (
        rf"{_IN}(?P<bad>(?:the\s+)?(?:(?P<which>first|last|second)\s+)?"
        rf"(?P<part>half|quarter|\d+(?:\.\d+)?\s*%)(?:\s+of)?(?:\s+the)?\s+{_BLOCK})\b",
        *(_share, "a share of the blocks is written as `first half of blocks` or `last 25% of blocks`"),
    )
    yield (
        rf"{_IN}(?P<bad>(?:(?:each|every|all|any|the)\s+(?:of\s+)?(?:the\s+)?){_BLOCK})(?!\s+\d)(?!\S)",
        *("block", "all blocks are `block`"),
    )
    yield rf"\bevery\s+(?P<bad>other|{_any_of([*_ORDINALS])})\b", _looked_up({**_ORDINALS, "other": "2nd"}), _EVERY
    yield r"\bevery\s+(?P<bad>(?P<number>\d+)(?:\s+(?P<blocks>blocks|layers))?)(?!\w)", _every_nth, _EVERY
    yield r"\s(?P<bad>layers?)\b", _looked_up(_LAYERS), "the layers of a model are its `blocks`"
    yield r"\s(?P<bad>not\s+in|not\s+inside|out\s+of|outside\s+of)\s", "outside", "what is not there is `outside`"
    yield (
        r"\s(?P<bad>inside(?:\s+of)?|within|on|(?<!half\s)of|from(?!\s+\d)|under|(?<!except )for(?!\s+\d))\s",
        "in",
        "a place follows `in`",
    )
    yield (
        rf"{_VERB}\s+(?P<bad>every|each|all|all\s+of(?:\s+the)?|the|a|an|any)\s",
        *("", "a selector without a position means all of its nodes"),
    )
    yield rf"\s(?P<bad>{_any_of(_LEAVING_OUT)})\s", "except", _LEFT_OUT
    yield rf"(?P<bad>(?:!|\bnot\s+)(?P<what>{_LAST_WORD}))\s*$", "everything except {what}", "selectors have no `not`"
    yield (
        r"(?P<bad>&&?|\|\|?)",
        *(lambda match: " and " if "&" in match["bad"] else " or ", "`{bad}` is written as a word"),
    )
    yield r"\boffload\b.*\s(?P<bad>to\s+(?:the\s+)?(?:cpu|host|ram))(?!\S)", "", "what is offloaded goes to the host"
    # expectations
    peak = r"(?:peak|maximum|max)\s+(?:memory|usage)"
    yield rf"^\s*expect\s+(?:the\s+)?(?P<bad>{peak})\b", "peak", "the peak of memory is `peak`"
    signs = rf"(?P<bad>(?:is\s+)?{_any_of([*_SIGNS, '='])}|of|to\s+be)(?=\s)"
    yield rf"^\s*expect\s+{_FIGURE}\s+{signs}", _sign, _COMPARE
    # predicates
    yield r"\s(?P<bad>if|when|with|having|whose|such\s+that|that|which)\s", "where", "a condition follows `where`"
    yield (
        rf"^(?!\s*expect\b).*?\s(?P<bad>(?P<what>{_SUBJECT}|is|from|crosses|feeds|gathered|annotated|user))\s",
        *("where {what}", "`where` is missing before `{what}`"),
    )
    yield (
        rf"\b(?:where|and|or|not)\s+(?P<bad>(?:is_|is\s+)?(?:a\s+)?(?P<kind>{_any_of([*_FLAGS])})s?)(?!\S)",
        *(lambda match: _FLAGS[match["kind"]], "this property of nodes has two words"),
    )
    yield rf"\b(?:{_SUBJECT})\s+(?P<bad>(?:is\s+)?{_any_of([*_SIGNS])})(?=\s)", _sign, _COMPARE
    yield r"\s(?P<bad>where\s+(?P<not>not\s+)?in)\s", lambda match: "outside" if match["not"] else "in", _NO_WHERE
    name = rf"(?!(?:{_SUBJECT}|{_any_of([flag.split()[0] for flag in (*FLAGS, ANNOTATED)])})(?!\S)){_NAME}"
    what = rf"(?P<what>{name}|\({name}(?:\s*(?:,|\bor\b|\band\b)\s*{name})*\))"
    ends, rest = r"(?=\s*(?:$|->|→|,|\)))", r"(?P<rest>(?:(?!\bor\b|->|→|,|\)).)+?)"
    left = rf"where\s+not\s+{what}(?:\s+(?:(?P<and>and)\s+|(?=(?:in|outside)\s)){rest})?"
    yield rf"\s(?P<bad>{left}){ends}", _operators_left_out, _LEFT_OUT
    joined = "a comparison is written as `bytes > 64 MiB`; to select operators, write `{good}`"
    yield rf"\s(?P<bad>where\s+{what}){ends}", "and {what}", "no comparison follows `where`", joined, None
    yield rf"\s(?P<bad>where\s+{what}\s+and)\s", "and {what} where", "no comparison follows `where`", joined, None


@cache
def mistakes() -> tuple[Mistake, ...]:
    """The rows, in the order in which they are tried; compiled once a statement cannot be read."""
    return tuple(Mistake(re.compile(pattern, re.DOTALL), *rest) for pattern, *rest in _rows())
