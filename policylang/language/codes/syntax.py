"""APL0xx: the text cannot be read."""

from __future__ import annotations

from policylang.language.codes.declaration import Code

CODES: tuple[Code, ...] = (
    Code(
        "APL001",
        "text that is not text",
        "A policy is UTF-8 text. The file holds bytes that are not UTF-8, a NUL character, or half of a surrogate"
        " pair, so it is most likely not a policy file at all, or was written in another encoding.",
    ),
    Code(
        "APL002",
        "file too large",
        "A policy file may hold 4 MiB and 100,000 statements. Real policies are a page long; a file of "
        "this size is a mistake, and reading it would only delay the message that says so.",
    ),
    Code(
        "APL003",
        "statement too long",
        "One statement may hold 64 KiB of text. A statement ends at a line end or at `;`, unless inside "
        "parentheses. Give the parts of a long selector names with `let`.",
    ),
    Code(
        "APL004",
        "nested too deeply",
        "Parentheses, prefixes, filters and predicates may be nested 100 deep. Give the parts of the selector "
        "names with `let`.",
    ),
    Code(
        "APL005",
        "unexpected character",
        "The text holds a character that has no meaning in a policy. Typographic quotes and comparison signs "
        "(`≤`) are the usual cause, and hyphens in names, which are written with `_`.",
        wrong="save all-gather",
        mended="save all_gather",
    ),
    Code(
        "APL006",
        "quote never closed",
        "A quoted path or glob starts on this line and does not end on it.",
        wrong='include "fsdp.apl',
        mended="include <llama3_sac>",
    ),
    Code(
        "APL007",
        "parenthesis never closed or never opened",
        "Every `(` needs its `)`. While a parenthesis is open, line ends do not end a statement.",
        wrong="save (mm or bmm in block",
        mended="save (mm or bmm) in block",
    ),
    Code(
        "APL010",
        "unexpected word",
        "The statement cannot be read on from this word: what stands before it needs something else to follow. "
        "The message says what.",
        wrong="save mm bmm",
        mended="save mm, bmm",
    ),
    Code(
        "APL011",
        "statement ends early",
        "The line ends where something has to follow. A statement ends at a line end or at `;`; to go on over "
        "several lines, put the selector in parentheses.",
        wrong="save mm or",
        mended="save mm or bmm",
    ),
    Code(
        "APL012",
        "not a statement",
        "A statement starts with an action (`save`, `recompute`, …), with a word such as `let` or `expect`, or is"
        " a selector followed by `->` and an action. This one is neither.",
        wrong="sav mm",
        mended="save mm",
    ),
    Code(
        "APL013",
        "not an action",
        "After `->` comes one of the actions: `save`, `prefer_save`, `recompute`, `must_recompute`, `offload`, "
        "`prefer_offload`, `leave` (and the aliases `must_save` and `prefer_recompute`).",
        wrong="mm -> keep",
        mended="mm -> save",
    ),
    Code(
        "APL014",
        "`per` without a position",
        "`per block`, `per module`, `per chain` and `per graph` say over what `first`, `last`, `3rd` or `every 2nd` "
        "count afresh. The phrase holds no such word that does not have its `per` already.",
        wrong="save mm per block",
        mended="save first mm per block",
    ),
    Code(
        "APL015",
        "reserved word",
        "The word is part of the language and cannot name a selector. An operator of that name is reached with its "
        "namespace (`aten.where`), a module of that name in quotes; a policy and a mesh dimension may be called so.",
        wrong="let block = mm\nsave mm",
        mended="let matrices = mm\nsave matrices",
    ),
    Code(
        "APL016",
        "number that cannot be read",
        "A count, position or figure is too large, or is not a number that the language has.",
        wrong="save first 99999999999999999999 mm",
        mended="save first 9 mm",
    ),
)
