"""What people write who know other languages, or this one by hearsay: each with what they are told and the mend.

A row is a pattern of one statement's text. The group ``bad`` is underlined and replaced; a row is said of a statement
only where the replacement is read further than the original (see ``mending.py``). The first row that helps is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

from policylang.language.parsing import order_mistakes
from policylang.language.parsing.mistake_patterns import (
    ACTION,
    BLOCK,
    DASH,
    FIGURE,
    KIND,
    LAST_WORD,
    LONG_DASH,
    NAME,
    NUMBERS,
    OFFLOAD,
    ORDINALS,
    RANGE,
    SIGNS,
    SUBJECT,
    VERB,
    VERBS,
    WHOLE,
    Mistake,
    Replacement,
    all_in,
    alternatives,
    any_of,
    any_word,
    each_block,
    hyphenated,
    looked_up,
    ordinal,
    range_of,
    share_written,
    sign_of,
    turned_round,
    unquoted,
)


def _rows() -> Iterator[tuple[str, Replacement, str] | tuple[str, Replacement, str, str | None, str | None]]:
    # --- signs and quotes from elsewhere ---
    yield r"(?P<bad>/\*+(?P<text>.*?)\*/)\s*$", "#{text}", "a comment starts with `#`", None, "APL005"
    yield rf"(?:^|\s)(?P<bad>[{LONG_DASH}]+\s+(?P<text>.*))$", "# {text}", "a comment starts with `#`", None, "APL005"
    yield (
        *(r"(?P<bad>[‘’‚“”„«»'`](?P<text>[^‘’“”„«»'`\"\n]*)[‘’“”«»'`])", unquoted),
        *('a module path or a file may stand in `"`, nothing else is quoted', None, None),
    )
    yield rf'{VERB}\b.*?(?P<bad>"(?P<text>[\w.*]+)")', "{text}", "operators are written without quotes"
    yield rf"(?P<bad>⇒|⟶|➔|➜|➞|=>|>>|~>|[{DASH}]{{2,}}>|[{LONG_DASH}]>)", "->", "an arrow is written `->`"
    yield rf"\S\s*(?P<bad>=)\s*{ACTION}\s*$", "->", "`=` defines a name, an action stands behind `->`"
    yield rf"^\s*(?P<bad>undecided\s*[:=]?)\s*{ACTION}\s*$", "undecided ->", "an arrow stands behind `undecided`"
    yield (
        rf"^\s*(?P<bad>(?:default|otherwise|else|rest|fallback|remaining)\s*(?:->|→|[:=])?\s*(?P<verb>{ACTION})"
        r"(?:\s+everything)?)\s*$",
        lambda match: f"undecided -> {match['verb']}",
        "what no rule matches is `undecided`",
    )
    yield rf"^\s*(?P<bad>(?P<verb>{ACTION})\s*:)", "{verb}", "an action is followed by a selector, without a colon"
    yield rf"^\s*(?P<bad>(?P<what>{NAME})\s*:)\s*{ACTION}\s*$", "{what} ->", "an action stands behind `->`"
    yield rf"^\s*(?P<bad>[-*])\s+{ACTION}\b", "", "each statement has its line, without a dash before it"
    yield r"\w(?P<bad>\(\s*\))", "", "an operator is named, not called"
    yield rf"{VERB}\s+(?P<bad>\[(?P<text>[^\]]+)\])", "{text}", "selectors are joined without brackets"
    yield r"\bwhere\b.*?(?P<bad>&&?)", " and ", "predicates are joined with `and`"
    yield r"\bwhere\b.*?(?P<bad>\|\|?)", " or ", "predicates are joined with `or`"
    either = "write `or` for the nodes of either, `and` for those that are of both"
    yield r"(?P<bad>&&?|\|\|?)", " or ", "`{bad}` does not join selectors", either, None
    yield rf"(?P<bad>(?:!|\bnot\s+)(?P<what>{LAST_WORD}))\s*$", "everything except {what}", "selectors have no `not`"

    # --- the beginning of a statement ---
    negated = r"(?:do\s+not|don['’]t|dont|never|not|no)\s+"
    yield rf"^\s*(?P<bad>{negated}(?:save|keep|store))\b", "recompute", "what is not saved is recomputed"
    yield rf"^\s*(?P<bad>{negated}(?:recompute|checkpoint))\b", "save", "what is not recomputed is saved"
    yield (
        rf"^\s*(?P<bad>(?P<how>prefer|must)[\s{DASH}]+(?P<verb>save|recompute|offload))\b",
        *("{how}_{verb}", "`{bad}` is one word"),
    )
    start = rf"^\s*(?:(?:optional|override)\s+)*(?P<bad>{any_word([*VERBS])})(?=\s+[\w(*])"
    yield start, looked_up(VERBS), "`{bad}` is not an action", None, "APL012"
    yield rf"(?:->|→)\s*(?P<bad>{any_word([*VERBS])})\s*$", looked_up(VERBS), "`{bad}` is not an action"
    yield r"^\s*(?P<bad>assert|require|requires|ensure|assume|check|limit)\s", "expect", "what has to hold is expected"
    yield r"^\s*(?P<bad>(?:def|var|define|alias|set|const)\s)", "let ", "a name is defined with `let`"
    yield r"^\s*let\s+[A-Za-z_]\w*\s*(?P<bad>:=|==|:|->|→|\bas\b|\bbe\b)", " =", "a name is defined with `=`"
    yield r"^\s*(?P<bad>let\s+(?P<name>[A-Za-z_]\w*):)", "let {name} =", "a name is defined with `=`"
    yield r"^\s*let\s+(?P<bad>(?P<name>[A-Za-z_]\w*))\s+[\w(]", "{name} =", "`=` is missing behind the name"
    yield r"^\s*(?P<bad>(?P<name>[A-Za-z_]\w*)\s*:?=)(?=[^=])", "let {name} =", "a name is defined with `let`"
    yield (
        r"^\s*(?P<bad>(?:device|gpu|accelerator|hardware|machine|profile)\s*[:=]|(?:gpu|accelerator|hardware|machine)\s)",
        *("device ", *_DEVICES, None, "APL010"),
    )
    yield (
        rf"^\s*device\s+(?P<bad>\w[\w.]*(?:[{LONG_DASH}][\w.]+)+)\s*$",
        *(lambda match: re.sub(f"[{LONG_DASH}]", "-", match["bad"]), "names are written with `-`", None, "APL005"),
    )
    yield r"^\s*device\s+(?P<bad>\w[\w.]*(?:[ \t]+\w[\w.]*)+)\s*$", hyphenated, *_DEVICES
    for word in ("if", "for", "while", "def", "class", "return", "elif"):
        yield rf"^\s*(?P<bad>{word})\b", lambda _: [], *_NO_PROGRAM
    yield r"^\s*(?P<bad>(?:blocks?|layers?)\s*(?:[:=]|->|→)|(?:block|layers?)\s)", "blocks ", *_BLOCKS
    yield (
        r"^\s*blocks\s+(?P<bad>\S+(?:\s*,\s*\S+)+)\s*$",
        *(alternatives, "`blocks` is followed by one module path", None, None),
    )
    yield (
        r"^\s*blocks\s+(?P<bad>\S+(?:\s*,\s*\S+)+)\s*$",
        *(
            lambda _: [],
            "`blocks` is followed by one module path",
            "alternatives stand in braces: `{{layers,h}}.*`",
            None,
        ),
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
    yield r"\bfrom\s+(?P<bad>\d+)(?!\w)", lambda m: ordinal(int(m["bad"])), "`from` is followed by an ordinal"
    yield rf"{VERB}\s+(?P<bad>half\s+of|every\s+other)\s", "every 2nd", "a share is of the blocks alone"
    yield (
        rf"{VERB}\s+(?P<bad>(?:(?:first|last)\s+)?(?:half|\d[\d.]*\s*%)\s+of)\s",
        *(lambda _: [], "a share is of the blocks alone", "such as `save mm in first half of blocks`", None),
    )
    yield (
        rf"(?:{VERB}\s+|^\s*)(?P<bad>(?P<place>(?:in|outside)\s+(?:(?:block|blocks)(?:\s+\d[\d.]*)?"
        rf"|(?:first|last)(?:\s+\d+)?\s+blocks?|[\w.*/\[\]{{}}]+))\s+(?P<what>{LAST_WORD}))",
        *("{what} {place}", "`{place}` stands behind what it narrows"),
    )
    yield rf"{VERB}\s+(?P<bad>where)\s+\S.*$", "everything where", "no selector stands before `where`"
    yield rf"{VERB}\s+(?P<bad>(?P<where>where\s+.+)\s+(?P<what>{LAST_WORD}))$", "{what} {where}", *_BEHIND
    yield rf"{VERB}\s+(?P<bad>in|outside)\s+\S", "everything {bad}", "no selector stands before `{bad}`"
    yield (
        rf"{VERB}\s+(?P<bad>(?:(?:the|all|every)\s+)*{BLOCK}(?:\s+(?:{RANGE}|(?P<number>\d+)))?)(?!\S)",
        *(all_in, "`{bad}` is a place, and stands behind a selector and `in`"),
    )
    yield (
        rf"{VERB}\s+(?P<bad>(?:(?:first|last)(?:\s+\d+)?|every\s+\d+(?:st|nd|rd|th)|\d+(?:st|nd|rd|th)|"
        rf"(?:first|last)\s+(?:half|\d[\d.]*%)\s+of)\s+blocks?)(?!\S)",
        *("everything in {bad}", "`{bad}` is a place, and stands behind a selector and `in`"),
    )
    yield rf"\b(?:in|outside)\s+(?P<bad>{BLOCK}\s+\[?{RANGE}\]?)", lambda m: f"blocks {range_of(m)}", *_A_RANGE
    yield rf"\b(?:in|outside)\s+(?P<bad>{BLOCK}\s+(?P<number>\d+))\s*$", "block {number}", "one block is a `block`"
    yield (
        rf"(?P<bad>(?P<what>{NAME})\s+in\s+{BLOCK}\s+(?P<numbers>\d+(?:\s*(?:,\s*and\b|,|\band\b|\bor\b)\s*\d+)+))",
        *(each_block, "a place is one block or a range of them"),
    )
    yield (
        rf"\b(?:in|outside)\s+(?P<bad>(?:the\s+)?(?:(?P<which>first|last|second)\s+)?"
        rf"(?P<part>half|quarter|\d+(?:\.\d+)?\s*%){WHOLE}\s+{BLOCK})\b",
        *(share_written, "a share of the blocks is written as `first half of blocks` or `last 25% of blocks`"),
    )
    yield (
        rf"\b(?:in|outside)\s+(?:\w+\s+)?(?P<bad>thirds?|quarters|fifths?|tenths?){WHOLE}\s+{BLOCK}\b",
        *(lambda _: [], "a share is `half` or per cent", "such as `first 25% of blocks`", None),
    )
    yield (
        rf"\b(?:in|outside)\s+(?P<bad>(?:(?:each|every|all|any|the)\s+(?:of\s+)?(?:the\s+)?){BLOCK})(?!\s+\d)(?!\S)",
        *("block", "all blocks are `block`"),
    )
    yield r"\b(?:in|outside)\s+(?P<bad>the)\s", "", "`the` is no word of the language"
    yield (
        r"\bevery\s+(?P<bad>(?P<word>\d+)\s+(?:blocks|layers))\b",
        lambda m: f"{ordinal(int(m['word']))} block",
        *_NTH,
    )
    yield r"\s(?P<bad>layers)\b", "blocks", "the layers of a model are its `blocks`"
    yield r"\s(?P<bad>layer)\b", "block", "a layer of a model is a `block`"
    yield (
        r"\bper\s+(?P<bad>blocks|modules|chains|graphs)\b",
        lambda m: m["bad"][:-1],
        "`per` is followed by one of them",
    )
    yield r"\s(?P<bad>not\s+in|not\s+inside|out\s+of|outside\s+of)\s", "outside", "what is not there is `outside`"
    yield (
        r"\s(?P<bad>inside(?:\s+of)?|within|at(?!\s+(?:most|least)\b)|on|of|from(?!\s+\d)|under|for)\s",
        "in",
        "a place stands behind `in`",
    )

    # --- positions ---
    yield (
        r"\b(?P<bad>(?:first|last)\s+[-−]\s?(?P<number>\d+))\b",
        *("last {number}", "positions and counts start at 1", "write `{good}` to count from the end", "APL205"),
    )
    yield r"\bevery\s+(?P<bad>\d+)(?!\w)", lambda match: ordinal(int(match["bad"])), *_NTH
    yield rf"\bevery\s+(?P<bad>other|{any_word([*ORDINALS])})\b", looked_up({**ORDINALS, "other": "2nd"}), *_NTH
    yield rf"\b(?:first|last)\s+(?P<bad>{any_word([*NUMBERS])})\b", looked_up(NUMBERS), "counts are written in digits"
    yield (
        rf"(?:{VERB}|\b(?:in|outside))\s+(?P<bad>{any_word([*ORDINALS])})\s",
        *(looked_up(ORDINALS), "positions are written in digits"),
    )
    yield rf"{VERB}\s+(?P<bad>(?P<number>\d+))\s+[A-Za-z_(]", "first {number}", "a number alone is no position"
    yield rf"{VERB}\s+(?P<bad>both\s+(?P<one>{NAME})\s+and\s+(?P<other>{NAME}))", "{one}, {other}", *_BOTH
    yield rf"{VERB}\s+(?P<bad>every|each|all|all\s+of(?:\s+the)?|the|a|an|any)\s", "", *_ALL

    yield rf"{VERB}\s+(?:\S+\s+)?(?P<bad>users|inputs)\s+(?!of\b)[A-Za-z_(]", "{bad} of", "`of` is missing"
    yield r"\s(?P<bad>the)\s", "", "`the` is no word of the language"

    # --- joining ---
    leaving_out = ["but", "but not", "except for", "without", "minus", "excluding", "besides", "other than", "and not"]
    yield rf"\s(?P<bad>{any_word(leaving_out)})\s", "except", "what is left out stands behind `except`"
    yield (
        r"(?P<bad>,|\band|\bor)\s*\b(?:in|outside|where)\b",
        "",
        "`{bad}` does not stand before what narrows a selector",
    )
    yield r"\s(?P<bad>\+)\s", "or", "selectors are joined with `or` or a comma"

    # --- expectations ---
    yield r"^\s*expect\s+(?P<bad>(?:the\s+)?(?:peak|maximum|max)\s+(?:memory|usage|bytes))\b", "peak", *_FIGURES_ARE
    yield (
        r"^\s*expect\s+(?P<figure>peak|exposed|step\s+time)\s+(?P<bad>(?:per|in\s+each|in\s+every)\s+block)\b",
        *("", "`{figure}` is a figure of the whole step"),
    )
    yield (
        r"^\s*expect\s+(?:the\s+)?(?P<bad>exposed\s+(?:time|communication|comms?|collectives?|copies))\b",
        *("exposed", "the time in which compute waits is `exposed`"),
    )
    yield (
        r"^\s*expect\s+(?:the\s+)?(?P<bad>(?:iteration|total|training|step)\s+(?:time|duration|latency))\b",
        *("step time", "the time of a step is `step time`"),
    )
    yield rf"^\s*expect\s+{FIGURE}\s+(?P<bad>(?P<value>\d[\w.]*.*))$", "<= {value}", "the comparison is missing"
    yield rf"^\s*expect\s+{FIGURE}\s+(?P<bad>is|are|to\s+be|of)\s*[<>=!]", "", "a comparison is a sign alone"
    yield rf"^\s*expect\s+{FIGURE}\s+(?P<bad>(?:is\s+|of\s+)?{any_word([*SIGNS])}|of|to\s+be)(?=\s)", sign_of, *_COMPARE
    yield rf"^\s*expect\s+{FIGURE}\s*(?P<bad><\s+=|=<|=(?!=))", "<=", "a limit is written with `<=`"
    yield (
        r"^\s*expect\s+(?P<bad>max(?:imum)?|no\s+more\s+than|up\s+to)\s+\d",
        "at most",
        "a limit to a count is `at most` or `at least`",
    )
    yield (
        r"^\s*expect\s+(?P<bad>min(?:imum)?|no\s+less\s+than)\s+\d",
        "at least",
        "a limit to a count is `at most` or `at least`",
    )
    yield r"^\s*expect\s+(?P<bad>(?P<number>\d+))\s", "exactly {number}", "how many is said exactly, or as a limit"
    yield r"^\s*expect\s+(?P<bad>all(?:\s+of)?(?:\s+the)?|each|any)\s", "every", "all of them are `every`"
    yield r"^\s*expect\s+(?P<bad>none(?:\s+of)?|not|never)\s", "no", "none of them are `no`"
    yield (
        rf"^\s*expect\s+(?P<bad>(?P<what>{LAST_WORD})\s+(?:is|are|be|to\s+be)\s+(?P<fate>saved|recomputed|offloaded))",
        *("every {what} {fate}", "it is not said whether all of these nodes or none of them"),
    )
    yield r"\s(?P<bad>is|are|to\s+be|be|gets|get)\s+(?:saved|recomputed|offloaded)\s*$", "", "a fate is one word"
    yield r"\s(?P<bad>per\s+(?:gpu|device|card|process|worker))\b", "per rank", "a budget is said per rank"
    yield r"^\s*expect\b.*\s(?P<bad>(?:per|on\s+each|on\s+every)\s+rank)\s*$", "", "a policy speaks of one rank's graph"
    yield (
        rf"{OFFLOAD}.*\s(?P<bad>to\s+(?:the\s+)?(?:cpu|host|ram|disk))(?!\S)",
        "",
        "what is offloaded goes to the host",
    )
    yield rf"{OFFLOAD}.*\s(?P<bad>max|maximum|at\s+most|under|<=|less\s+than)\s+\d", "up to", *_BUDGET

    # --- predicates ---
    yield r"\s(?P<bad>if|when|with|having|whose|such\s+that|that|which|while)\s", "where", "a condition follows `where`"
    yield (
        rf"\s(?P<bad>(?P<what>{SUBJECT}|is|from|crosses|feeds|gathered|annotated|user))\s",
        *("where {what}", "`where` is missing before `{what}`"),
    )
    yield (
        rf"\bwhere\b.*?(?P<bad>(?P<last>[^\s,]+)\s*,)\s*(?={SUBJECT}|is\b|not\b|from\b|crosses\b)",
        *("{last} and", "predicates are joined with `and`"),
    )
    yield (
        rf"(?P<bad>(?P<left>\d[\w.]*(?:\s*(?:[A-Za-zµμ]+|%))?)\s*(?P<sign><=|>=|==|!=|<|>)\s*(?P<subject>{SUBJECT})"
        r"(?:\s*(?P<right>(?:<=|>=|<|>)\s*\d[\w.]*(?:\s*(?:[A-Za-zµμ]+|%))?))?)",
        *(turned_round, "the property stands first, and is compared with one figure"),
    )
    yield (
        r"\b(?P<bad>(?P<subject>dtype|device|module|overload)\s+in\s+[(\[{]?(?P<values>[\w.*]+(?:\s*,\s*[\w.*]+)*)[)\]}]?)",
        *(any_of, "a property is compared with one value at a time"),
    )
    yield rf"\b(?:where|and|or|not)\s+(?P<bad>(?:is_)?(?P<kind>{KIND}))(?!\S)", "is {kind}", "`is` is missing"
    yield (
        r"\b(?:where|and|or|not)\s+(?P<bad>(?:is_|is\s+)?(?:a\s+)?(?P<kind>parameter|buffer|input)s?)(?!\S)",
        *("from {kind}", "what is made of one {kind} is `from {kind}`"),
    )
    yield rf"\b(?:{SUBJECT})\s+(?P<bad>(?:is\s+)?{any_word([*SIGNS])})(?=\s)", sign_of, *_COMPARE
    yield rf"\b(?:{SUBJECT})\s*(?P<bad>=)(?!=)", "==", "`=` defines a name, a comparison is `==`"

    # --- names with other signs in them ---
    yield (
        rf"(?P<bad>[A-Za-z_]\w*(?:[{DASH}]\w+)+)",
        *(lambda match: re.sub(f"[{DASH}]", "_", match["bad"]), "names are written with `_`", None, "APL005"),
    )


_NO_PROGRAM = (
    "a policy has no `{bad}`: it is a list of rules",
    "a condition stands behind `where`, a place behind `in`, such as `save mm in block 3`",
    None,
)
_BEHIND = ("`where …` stands behind what it narrows",)
_A_RANGE = ("a range of blocks is written as `blocks 4..20`",)
_BLOCKS = ("which modules are blocks is said as in `blocks layers.*`",)
_DEVICES = ("a device profile is named in one word, such as `device h100-sxm`",)
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
    return tuple(map(_made, (*order_mistakes.rows(), *_rows())))
