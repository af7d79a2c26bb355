"""What people write who know other languages, or this one by hearsay: each with what they are told and the mend.

A row is a pattern of one statement's text. The group ``bad`` is underlined and replaced; a row is said of a statement
only where the replacement is read further than the original (see ``mending.py``). The first row that helps is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from attrs import frozen

from policylang.language.parsing.predicate_tree import MEASURES, PROPERTIES
from policylang.language.parsing.statement_tree import ACTIONS
from policylang.language.parsing.statement_tree import FIGURES as _FIGURES

Replacement = str | Callable[[re.Match[str]], str | Sequence[str]]


@frozen
class Mistake:
    """``replacement``: a text with the pattern's groups in braces, or a function of the match; several where one of
    them is meant. ``help`` in place of "write" and the replacement, with ``{good}`` in it where that is said."""

    pattern: re.Pattern[str]
    replacement: Replacement
    message: str
    help: str | None = None
    code: str | None = None
    """Where it is another than that of the original."""

    def replacements(self, match: re.Match[str]) -> Sequence[str]:
        if isinstance(self.replacement, str):
            return [self.replacement.format(**match.groupdict(default=""))]
        made = self.replacement(match)
        return [made] if isinstance(made, str) else made


_ACTION = rf"(?:{'|'.join(sorted(ACTIONS, key=len, reverse=True))})"
_VERB = rf"^\s*(?:(?:optional|override)\s+)*{_ACTION}"
_OFFLOAD = r"\boffload\b"
_NAME = r"[A-Za-z_][\w.*]*"
_FIGURE = rf"(?:{'|'.join(sorted(_FIGURES, key=len, reverse=True))})(?:\s+per\s+block)?"
_SUBJECT = rf"(?:{'|'.join((*MEASURES, *PROPERTIES))})(?:\[-?\d+\])?"
_KIND = r"(?:view|random|multi_output|mutated)"
_BLOCK = r"(?:blocks?|layers?)"
_WHOLE = r"(?:\s+of)?(?:\s+the)?"
_LAST_WORD = r"(?!(?:where|per|in|outside|chain|and|or|except|feeding|fed|from)\b)[A-Za-z_][\w.*{}]*"
_LONG_DASH = "‐‑‒–—−"
_DASH = rf"\-{_LONG_DASH}"
_RANGE = rf"(?P<low>\d+)\s*(?:\.{{2,}}|…|[{_DASH}:~]|\bto\b|\bthrough\b)\s*(?P<high>\d+)"

_ORDINALS = {
    **{"second": "2nd", "third": "3rd", "fourth": "4th", "fifth": "5th", "sixth": "6th", "seventh": "7th"},
    **{"eighth": "8th", "ninth": "9th", "tenth": "10th"},
}
_NUMBERS = {
    word: str(number)
    for number, word in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)
}
_VERBS = {
    **dict.fromkeys(("keep", "store", "cache", "retain", "stash", "remember", "preserve", "saved"), "save"),
    **dict.fromkeys(("checkpoint", "remat", "rematerialize", "rematerialise", "recalculate", "rerun"), "recompute"),
    **dict.fromkeys(("drop", "discard", "forget", "free", "evict", "recomputed", "activation_checkpoint"), "recompute"),
    **dict.fromkeys(("swap", "move", "spill", "offload_to_cpu", "cpu_offload", "offloaded"), "offload"),
    **dict.fromkeys(("ignore", "skip"), "leave"),
}
_SIGNS = {
    **dict.fromkeys(("at most", "no more than", "not more than", "up to", "max", "maximum", "within", "=<"), "<="),
    **dict.fromkeys(("under", "below", "less than", "smaller than", "fewer than"), "<"),
    **dict.fromkeys(("at least", "no less than", "not less than", "min", "minimum", "=>"), ">="),
    **dict.fromkeys(("over", "above", "more than", "greater than", "larger than", "bigger than"), ">"),
    **dict.fromkeys(("equal to", "equals", "equal", "is", "eq", ":="), "=="),
}
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}


def _words(words: Sequence[str]) -> str:
    """A pattern of any of them, the longest first, whatever space is between their words."""
    longest = sorted(words, key=len, reverse=True)
    return "(?:" + "|".join(r"\s+".join(map(re.escape, word.split())) for word in longest) + ")"


def _looked_up(table: dict[str, str]) -> Replacement:
    return lambda match: table[" ".join(match["bad"].lower().split())]


def _ordinal(number: int) -> str:
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{({1: 'st', 2: 'nd', 3: 'rd'}).get(number % 10, 'th')}"


def _range(match: re.Match[str]) -> str:
    low, high = sorted((int(match["low"]), int(match["high"])))
    return f"{low}..{high}"


def _all_in(match: re.Match[str]) -> str:
    if match["low"]:
        return f"everything in blocks {_range(match)}"
    return f"everything in block {match['number']}" if match["number"] else "everything in block"


def _share(match: re.Match[str]) -> str:
    word = "last" if match["which"] in ("second", "last") else "first"
    part = " ".join(match["part"].split()).replace(" %", "%")
    part = {"quarter": "25%"}.get(part, part)
    return f"{word} {part} of blocks"


def _unquoted(match: re.Match[str]) -> Sequence[str]:
    return f'"{match["text"].strip()}"', match["text"].strip()


def _compared(match: re.Match[str]) -> str:
    left, subject = match["left"].strip(), match["subject"]
    turned = f"{subject} {_FLIPPED[match['sign']]} {left}"
    return turned if match["right"] is None else f"{turned} and {subject} {match['right'].strip()}"


def _any_of(match: re.Match[str]) -> str:
    values = re.findall(r"[\w.*]+", match["values"])
    return "(" + " or ".join(f"{match['subject']} == {value}" for value in values) + ")"


def _each_block(match: re.Match[str]) -> str:
    return ", ".join(f"{match['what']} in block {number}" for number in re.findall(r"\d+", match["numbers"]))


def _alternatives(match: re.Match[str]) -> Sequence[str]:
    globs = [glob.strip() for glob in match["bad"].split(",")]
    if not all(glob.endswith(".*") for glob in globs):
        return [""]  # which is no mend
    return ["{" + ",".join(glob.removesuffix(".*") for glob in globs) + "}.*"]


def _rows() -> Iterator[tuple[str, Replacement, str] | tuple[str, Replacement, str, str | None, str | None]]:
    # --- signs and quotes from elsewhere ---
    yield r"(?P<bad>/\*+(?P<text>.*?)\*/)\s*$", "#{text}", "a comment starts with `#`", None, "APL005"
    yield rf"(?:^|\s)(?P<bad>[{_LONG_DASH}]+\s+(?P<text>.*))$", "# {text}", "a comment starts with `#`", None, "APL005"
    yield (
        *(r"(?P<bad>[‘’‚“”„«»'`](?P<text>[^‘’“”„«»'`\"\n]*)[‘’“”«»'`])", _unquoted),
        *('a module path or a file may stand in `"`, nothing else is quoted', None, None),
    )
    yield rf'{_VERB}\b.*?(?P<bad>"(?P<text>[\w.*]+)")', "{text}", "operators are written without quotes"
    yield rf"(?P<bad>⇒|⟶|➔|➜|➞|=>|>>|~>|[{_DASH}]{{2,}}>|[{_LONG_DASH}]>)", "->", "an arrow is written `->`"
    yield rf"\S\s*(?P<bad>=)\s*{_ACTION}\s*$", "->", "`=` defines a name, an action stands behind `->`"
    yield rf"^\s*(?P<bad>undecided\s*[:=]?)\s*{_ACTION}\s*$", "undecided ->", "an arrow stands behind `undecided`"
    yield (
        rf"^\s*(?P<bad>(?:default|otherwise|else|rest|fallback|remaining)\s*(?:->|→|[:=])?\s*(?P<verb>{_ACTION})"
        r"(?:\s+everything)?)\s*$",
        lambda match: f"undecided -> {match['verb']}",
        "what no rule matches is `undecided`",
    )
    yield rf"^\s*(?P<bad>(?P<verb>{_ACTION})\s*:)", "{verb}", "an action is followed by a selector, without a colon"
    yield rf"^\s*(?P<bad>(?P<what>{_NAME})\s*:)\s*{_ACTION}\s*$", "{what} ->", "an action stands behind `->`"
    yield rf"^\s*(?P<bad>[-*])\s+{_ACTION}\b", "", "each statement has its line, without a dash before it"
    yield r"\w(?P<bad>\(\s*\))", "", "an operator is named, not called"
    yield rf"{_VERB}\s+(?P<bad>\[(?P<text>[^\]]+)\])", "{text}", "selectors are joined without brackets"
    yield r"\bwhere\b.*?(?P<bad>&&?)", " and ", "predicates are joined with `and`"
    yield r"\bwhere\b.*?(?P<bad>\|\|?)", " or ", "predicates are joined with `or`"
    either = "write `or` for the nodes of either, `and` for those that are of both"
    yield r"(?P<bad>&&?|\|\|?)", " or ", "`{bad}` does not join selectors", either, None
    yield rf"(?P<bad>(?:!|\bnot\s+)(?P<what>{_LAST_WORD}))\s*$", "everything except {what}", "selectors have no `not`"

    # --- the beginning of a statement ---
    negated = r"(?:do\s+not|don['’]t|dont|never|not|no)\s+"
    yield rf"^\s*(?P<bad>{negated}(?:save|keep|store))\b", "recompute", "what is not saved is recomputed"
    yield rf"^\s*(?P<bad>{negated}(?:recompute|checkpoint))\b", "save", "what is not recomputed is saved"
    yield (
        rf"^\s*(?P<bad>(?P<how>prefer|must)[\s{_DASH}]+(?P<verb>save|recompute|offload))\b",
        *("{how}_{verb}", "`{bad}` is one word"),
    )
    start = rf"^\s*(?:(?:optional|override)\s+)*(?P<bad>{_words([*_VERBS])})(?=\s+[\w(*])"
    yield start, _looked_up(_VERBS), "`{bad}` is not an action", None, "APL012"
    yield rf"(?:->|→)\s*(?P<bad>{_words([*_VERBS])})\s*$", _looked_up(_VERBS), "`{bad}` is not an action"
    yield r"^\s*(?P<bad>assert|require|requires|ensure|assume|check|limit)\s", "expect", "what has to hold is expected"
    yield r"^\s*(?P<bad>(?:def|var|define|alias|set|const)\s)", "let ", "a name is defined with `let`"
    yield r"^\s*let\s+[A-Za-z_]\w*\s*(?P<bad>:=|==|:|->|→|\bas\b|\bbe\b)", " =", "a name is defined with `=`"
    yield r"^\s*(?P<bad>let\s+(?P<name>[A-Za-z_]\w*):)", "let {name} =", "a name is defined with `=`"
    yield r"^\s*let\s+(?P<bad>(?P<name>[A-Za-z_]\w*))\s+[\w(]", "{name} =", "`=` is missing behind the name"
    yield r"^\s*(?P<bad>(?P<name>[A-Za-z_]\w*)\s*:?=)(?=[^=])", "let {name} =", "a name is defined with `let`"
    for word in ("if", "for", "while", "def", "class", "return", "elif"):
        yield rf"^\s*(?P<bad>{word})\b", lambda _: [], *_NO_PROGRAM
    yield r"^\s*(?P<bad>(?:blocks?|layers?)\s*(?:[:=]|->|→)|(?:block|layers?)\s)", "blocks ", *_BLOCKS
    yield (
        r"^\s*blocks\s+(?P<bad>\S+(?:\s*,\s*\S+)+)\s*$",
        *(_alternatives, "`blocks` is followed by one module path", None, None),
    )
    yield (
        r"^\s*blocks\s+(?P<bad>\S+(?:\s*,\s*\S+)+)\s*$",
        *(lambda _: [], "`blocks` is followed by one module path", "alternatives stand in braces: `{{layers,h}}.*`", None),
    )
    yield r"^\s*(?:optional\s+)?collapse\s+(?P<bad>round[\s\-]?trips?)\b", "round_trips", "`{bad}` is one word"
    yield (
        r"^\s*requires\s+(?P<bad>(?:version|policylang|apl)?\s*(?P<version>\d[\d.]*))\s*$",
        *("policylang >= {version}", "the version that is required is compared"),
    )
    yield r"^\s*(?P<bad>policy\s*[:=]|(?:name|title)(?:\s*[:=])?\s)", "policy ", "a policy is named by `policy`"
    yield r'^\s*policy\s+(?P<bad>"(?P<name>\w+)")', "{name}", "the name of a policy is one word, without quotes"
    yield (
        r"^\s*(?P<bad>(?:import|use|using|extends|inherit|from)\s+(?P<name>\w+))\s*$",
        *("include <{name}>", "the statements of another policy are brought in by `include`"),
    )

    # --- places ---
    yield r"\bfrom\s+(?P<bad>\d+)(?!\w)", lambda m: _ordinal(int(m["bad"])), "`from` is followed by an ordinal"
    yield rf"{_VERB}\s+(?P<bad>half\s+of|every\s+other)\s", "every 2nd", "a share is of the blocks alone"
    yield (
        rf"{_VERB}\s+(?P<bad>(?:(?:first|last)\s+)?(?:half|\d[\d.]*\s*%)\s+of)\s",
        *(lambda _: [], "a share is of the blocks alone", "such as `save mm in first half of blocks`", None),
    )
    yield (
        rf"(?:{_VERB}\s+|^\s*)(?P<bad>(?P<place>(?:in|outside)\s+(?:(?:block|blocks)(?:\s+\d[\d.]*)?"
        rf"|(?:first|last)(?:\s+\d+)?\s+blocks?|[\w.*/\[\]{{}}]+))\s+(?P<what>{_LAST_WORD}))",
        *("{what} {place}", "`{place}` stands behind what it narrows"),
    )
    yield rf"{_VERB}\s+(?P<bad>where)\s+\S.*$", "everything where", "no selector stands before `where`"
    yield rf"{_VERB}\s+(?P<bad>(?P<where>where\s+.+)\s+(?P<what>{_LAST_WORD}))$", "{what} {where}", *_BEHIND
    yield rf"{_VERB}\s+(?P<bad>in|outside)\s+\S", "everything {bad}", "no selector stands before `{bad}`"
    yield (
        rf"{_VERB}\s+(?P<bad>(?:(?:the|all|every)\s+)*{_BLOCK}(?:\s+(?:{_RANGE}|(?P<number>\d+)))?)(?!\S)",
        *(_all_in, "`{bad}` is a place, and stands behind a selector and `in`"),
    )
    yield (
        rf"{_VERB}\s+(?P<bad>(?:(?:first|last)(?:\s+\d+)?|every\s+\d+(?:st|nd|rd|th)|\d+(?:st|nd|rd|th)|"
        rf"(?:first|last)\s+(?:half|\d[\d.]*%)\s+of)\s+blocks?)(?!\S)",
        *("everything in {bad}", "`{bad}` is a place, and stands behind a selector and `in`"),
    )
    yield rf"\b(?:in|outside)\s+(?P<bad>{_BLOCK}\s+\[?{_RANGE}\]?)", lambda m: f"blocks {_range(m)}", *_A_RANGE
    yield rf"\b(?:in|outside)\s+(?P<bad>{_BLOCK}\s+(?P<number>\d+))\s*$", "block {number}", "one block is a `block`"
    yield (
        rf"(?P<bad>(?P<what>{_NAME})\s+in\s+{_BLOCK}\s+(?P<numbers>\d+(?:\s*(?:,\s*and\b|,|\band\b|\bor\b)\s*\d+)+))",
        *(_each_block, "a place is one block or a range of them"),
    )
    yield (
        rf"\b(?:in|outside)\s+(?P<bad>(?:the\s+)?(?:(?P<which>first|last|second)\s+)?"
        rf"(?P<part>half|quarter|\d+(?:\.\d+)?\s*%){_WHOLE}\s+{_BLOCK})\b",
        *(_share, "a share of the blocks is written as `first half of blocks` or `last 25% of blocks`"),
    )
    yield (
        rf"\b(?:in|outside)\s+(?:\w+\s+)?(?P<bad>thirds?|quarters|fifths?|tenths?){_WHOLE}\s+{_BLOCK}\b",
        *(lambda _: [], "a share is `half` or per cent", "such as `first 25% of blocks`", None),
    )
    yield (
        rf"\b(?:in|outside)\s+(?P<bad>(?:(?:each|every|all|any|the)\s+(?:of\s+)?(?:the\s+)?){_BLOCK})(?!\s+\d)(?!\S)",
        *("block", "all blocks are `block`"),
    )
    yield r"\b(?:in|outside)\s+(?P<bad>the)\s", "", "`the` is no word of the language"
    yield r"\bevery\s+(?P<bad>(?P<word>\d+)\s+(?:blocks|layers))\b", lambda m: f"{_ordinal(int(m['word']))} block", *_NTH
    yield r"\s(?P<bad>layers)\b", "blocks", "the layers of a model are its `blocks`"
    yield r"\s(?P<bad>layer)\b", "block", "a layer of a model is a `block`"
    yield r"\bper\s+(?P<bad>blocks|modules|chains|graphs)\b", lambda m: m["bad"][:-1], "`per` is followed by one of them"
    yield r"\s(?P<bad>not\s+in|not\s+inside|out\s+of|outside\s+of)\s", "outside", "what is not there is `outside`"
    yield r"\s(?P<bad>inside(?:\s+of)?|within|at(?!\s+(?:most|least)\b)|on|of|from(?!\s+\d)|under|for)\s", "in", "a place stands behind `in`"

    # --- positions ---
    yield (
        r"\b(?P<bad>(?:first|last)\s+[-−]\s?(?P<number>\d+))\b",
        *("last {number}", "positions and counts start at 1", "write `{good}` to count from the end", "APL205"),
    )
    yield r"\bevery\s+(?P<bad>\d+)(?!\w)", lambda match: _ordinal(int(match["bad"])), *_NTH
    yield rf"\bevery\s+(?P<bad>other|{_words([*_ORDINALS])})\b", _looked_up({**_ORDINALS, "other": "2nd"}), *_NTH
    yield rf"\b(?:first|last)\s+(?P<bad>{_words([*_NUMBERS])})\b", _looked_up(_NUMBERS), "counts are written in digits"
    yield (
        rf"(?:{_VERB}|\b(?:in|outside))\s+(?P<bad>{_words([*_ORDINALS])})\s",
        *(_looked_up(_ORDINALS), "positions are written in digits"),
    )
    yield rf"{_VERB}\s+(?P<bad>(?P<number>\d+))\s+[A-Za-z_(]", "first {number}", "a number alone is no position"
    yield rf"{_VERB}\s+(?P<bad>both\s+(?P<one>{_NAME})\s+and\s+(?P<other>{_NAME}))", "{one}, {other}", *_BOTH
    yield rf"{_VERB}\s+(?P<bad>every|each|all|all\s+of(?:\s+the)?|the|a|an|any)\s", "", *_ALL

    yield rf"{_VERB}\s+(?:\S+\s+)?(?P<bad>users|inputs)\s+(?!of\b)[A-Za-z_(]", "{bad} of", "`of` is missing"
    yield r"\s(?P<bad>the)\s", "", "`the` is no word of the language"

    # --- joining ---
    leaving_out = ["but", "but not", "except for", "without", "minus", "excluding", "besides", "other than", "and not"]
    yield rf"\s(?P<bad>{_words(leaving_out)})\s", "except", "what is left out stands behind `except`"
    yield r"(?P<bad>,|\band|\bor)\s*\b(?:in|outside|where)\b", "", "`{bad}` does not stand before what narrows a selector"
    yield r"\s(?P<bad>\+)\s", "or", "selectors are joined with `or` or a comma"

    # --- expectations ---
    yield r"^\s*expect\s+(?P<bad>(?:the\s+)?(?:peak|maximum|max)\s+(?:memory|usage|bytes))\b", "peak", *_FIGURES_ARE
    yield rf"^\s*expect\s+{_FIGURE}\s+(?P<bad>(?P<value>\d[\w.]*.*))$", "<= {value}", "the comparison is missing"
    yield rf"^\s*expect\s+{_FIGURE}\s+(?P<bad>is|are|to\s+be|of)\s*[<>=!]", "", "a comparison is a sign alone"
    yield rf"^\s*expect\s+{_FIGURE}\s+(?P<bad>(?:is\s+|of\s+)?{_words([*_SIGNS])}|of|to\s+be)(?=\s)", _sign, *_COMPARE
    yield rf"^\s*expect\s+{_FIGURE}\s*(?P<bad><\s+=|=<|=(?!=))", "<=", "a limit is written with `<=`"
    yield r"^\s*expect\s+(?P<bad>max(?:imum)?|no\s+more\s+than|up\s+to)\s+\d", "at most", "a limit to a count is `at most` or `at least`"
    yield r"^\s*expect\s+(?P<bad>min(?:imum)?|no\s+less\s+than)\s+\d", "at least", "a limit to a count is `at most` or `at least`"
    yield r"^\s*expect\s+(?P<bad>(?P<number>\d+))\s", "exactly {number}", "how many is said exactly, or as a limit"
    yield r"^\s*expect\s+(?P<bad>all(?:\s+of)?(?:\s+the)?|each|any)\s", "every", "all of them are `every`"
    yield r"^\s*expect\s+(?P<bad>none(?:\s+of)?|not|never)\s", "no", "none of them are `no`"
    yield (
        rf"^\s*expect\s+(?P<bad>(?P<what>{_LAST_WORD})\s+(?:is|are|be|to\s+be)\s+(?P<fate>saved|recomputed|offloaded))",
        *("every {what} {fate}", "it is not said whether all of these nodes or none of them"),
    )
    yield r"\s(?P<bad>is|are|to\s+be|be|gets|get)\s+(?:saved|recomputed|offloaded)\s*$", "", "a fate is one word"
    yield r"\s(?P<bad>per\s+(?:gpu|device|card|process|worker))\b", "per rank", "a budget is said per rank"
    yield r"^\s*expect\b.*\s(?P<bad>(?:per|on\s+each|on\s+every)\s+rank)\s*$", "", "a policy speaks of one rank's graph"
    yield rf"{_OFFLOAD}.*\s(?P<bad>to\s+(?:the\s+)?(?:cpu|host|ram|disk))(?!\S)", "", "what is offloaded goes to the host"
    yield rf"{_OFFLOAD}.*\s(?P<bad>max|maximum|at\s+most|under|<=|less\s+than)\s+\d", "up to", *_BUDGET

    # --- predicates ---
    yield r"\s(?P<bad>if|when|with|having|whose|such\s+that|that|which|while)\s", "where", "a condition follows `where`"
    yield (
        rf"\s(?P<bad>(?P<what>{_SUBJECT}|is|from|crosses|feeds|gathered|annotated|user))\s",
        *("where {what}", "`where` is missing before `{what}`"),
    )
    yield (
        rf"\bwhere\b.*?(?P<bad>(?P<last>[^\s,]+)\s*,)\s*(?={_SUBJECT}|is\b|not\b|from\b|crosses\b)",
        *("{last} and", "predicates are joined with `and`"),
    )
    yield (
        rf"(?P<bad>(?P<left>\d[\w.]*(?:\s*(?:[A-Za-z]+|%))?)\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<subject>{_SUBJECT})"
        r"(?:\s*(?P<right>(?:<=|>=|<|>)\s*\d[\w.]*(?:\s*(?:[A-Za-z]+|%))?))?)",
        *(_compared, "the property stands first, and is compared with one figure"),
    )
    yield (
        rf"\b(?P<bad>(?P<subject>dtype|device|module|overload)\s+in\s+[(\[{{]?(?P<values>[\w.*]+(?:\s*,\s*[\w.*]+)*)[)\]}}]?)",
        *(_any_of, "a property is compared with one value at a time"),
    )
    yield rf"\b(?:where|and|or|not)\s+(?P<bad>(?:is_)?(?P<kind>{_KIND}))(?!\S)", "is {kind}", "`is` is missing"
    yield (
        r"\b(?:where|and|or|not)\s+(?P<bad>(?:is_|is\s+)?(?:a\s+)?(?P<kind>parameter|buffer|input)s?)(?!\S)",
        *("from {kind}", "what is made of one {kind} is `from {kind}`"),
    )
    yield rf"\b(?:{_SUBJECT})\s+(?P<bad>(?:is\s+)?{_words([*_SIGNS])})(?=\s)", _sign, *_COMPARE
    yield rf"\b(?:{_SUBJECT})\s*(?P<bad>=)(?!=)", "==", "`=` defines a name, a comparison is `==`"

    # --- names with other signs in them ---
    yield (
        rf"(?P<bad>[A-Za-z_]\w*(?:[{_DASH}]\w+)+)",
        *(lambda match: re.sub(f"[{_DASH}]", "_", match["bad"]), "names are written with `_`", None, "APL005"),
    )


def _sign(match: re.Match[str]) -> str:
    words = " ".join(match["bad"].lower().split())
    return _SIGNS.get(words) or _SIGNS.get(words.removeprefix("is ").removeprefix("of ")) or "<="


_NO_PROGRAM = (
    "a policy has no `{bad}`: it is a list of rules",
    "a condition stands behind `where`, a place behind `in`, such as `save mm in block 3`",
    None,
)
_BEHIND = ("`where …` stands behind what it narrows",)
_A_RANGE = ("a range of blocks is written as `blocks 4..20`",)
_BLOCKS = ("which modules are blocks is said as in `blocks layers.*`",)
_BUDGET = ("a budget stands behind `up to`",)
_NTH = ("`every` is followed by an ordinal, such as `2nd`",)
_BOTH = ("`and` keeps what is of both, a comma what is of either",)
_ALL = ("a selector without a position means all of its nodes",)
_COMPARE = ("a comparison is a sign, such as `<=`",)
_FIGURES_ARE = ("the peak of memory is `peak`",)


def _made(row: Sequence[object]) -> Mistake:
    pattern, *rest = row
    return Mistake(re.compile(str(pattern), re.DOTALL), *rest)  # type: ignore[arg-type]


@cache
def mistakes() -> tuple[Mistake, ...]:
    """The rows, in the order in which they are tried; compiled once a statement cannot be read."""
    return tuple(map(_made, _rows()))
