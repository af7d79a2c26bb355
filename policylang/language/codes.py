"""Diagnostic codes: title, severity, long form and examples of each, read from its page ``docs/codes/APLnnn.md``.

A page is read when its code is first diagnosed or explained: importing this module reads none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Mend, Related, Severity, written
from policylang.language.figures import counted
from policylang.language.resources import codes_folder, policies_folder
from policylang.language.shown import one_line, printable
from policylang.language.source import Source, Span

_CODE = re.compile(r"APL[0-9]{3}")
_PAGE = re.compile(
    r"# (?P<code>APL[0-9]{3}): (?P<title>.+)\n"
    r"\n\*(?P<severity>error|warning|note)\*\n"
    r"\n(?P<text>(?:.+\n)+)"
    r"(?:\nWrong:\n\n```apl ignore\n(?P<wrong>(?:.*\n)*?)```\n)?"
    r"(?:\nRight:\n\n```apl(?: ignore)?\n(?P<mended>(?:.*\n)*?)```\n)?"
)


@frozen
class Code:
    """One kind of diagnostic. ``wrong`` and ``mended`` are policy text; either is empty where no text shows it."""

    code: str
    title: str
    severity: Severity
    text: str
    """The long form, one paragraph: what it means, why it matters, what to do."""
    wrong: str
    mended: str


class _Codes(Mapping[str, Code]):
    """Every code that has a page."""

    def __getitem__(self, code: str) -> Code:
        return _read(code)

    def __iter__(self) -> Iterator[str]:
        return (page.stem for page in codes_folder().glob("*.md") if _CODE.fullmatch(page.stem))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@cache
def _read(code: str) -> Code:
    """The page of a code.

    Raises:
        KeyError: there is no such page.
        ValueError: it is not in the form of a page.
    """
    if not _CODE.fullmatch(code):
        raise KeyError(code)
    page = codes_folder() / f"{code}.md"
    try:
        found = _PAGE.fullmatch(page.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise KeyError(code) from None
    if found is None or found["code"] != code:
        raise ValueError(f"{page} is not in the form of a page of {code}")
    examples = ((found[name] or "").removesuffix("\n") for name in ("wrong", "mended"))
    return Code(code, found["title"], Severity(found["severity"]), " ".join(found["text"].splitlines()), *examples)


CODES: Mapping[str, Code] = _Codes()


MOST = 1000
"""Diagnostics of one policy, or of one on a graph."""


def diagnose(
    code: str,
    message: str,
    span: Span | None = None,
    *,
    help: str | None = None,
    related: tuple[Related, ...] = (),
    details: tuple[str, ...] = (),
    write: Sequence[str] = (),
    mends: Iterable[Mend] = (),
) -> Diagnostic:
    """A diagnostic of a code, with the severity that its page gives.

    ``write``: texts that can stand in place of the span, each a mend; ``mends``: those that change something else. A
    mend of a policy that comes along is left out, as is one of a rule that no text says: nobody writes there.
    """
    if write and span is not None:
        mends = (*written(span, write, near=(help or "").startswith("did you mean")), *mends)
    mends = tuple(mend for mend in mends if all(map(_is_written, mend.sources)))
    help = None if help is None else printable(help)
    details = tuple(map(printable, details))
    return Diagnostic(code, one_line(message), span, help, related, CODES[code].severity, details, mends=mends)


def bounded(found: Sequence[Diagnostic]) -> tuple[Diagnostic, ...]:
    """As many as somebody reads, and how many more there are."""
    if len(found) <= MOST:
        return tuple(found)
    more = f"{counted(len(found) - MOST, 'further diagnostic is', 'further diagnostics are')} not shown"
    span = next((each.span for each in found[MOST:] if each.span is not None), None)
    return (*found[:MOST], diagnose("APL117", more, span, help="mend those that are shown first"))


def _is_written(source: Source) -> bool:
    name = source.name
    comes_along = name.startswith("<") and (policies_folder() / f"{name.strip('<>')}.apl").is_file()
    return bool(source.text) and not comes_along


def is_error(diagnostic: Diagnostic) -> bool:
    return diagnostic.severity is Severity.ERROR


def is_syntax(diagnostic: Diagnostic) -> bool:
    """Whether a diagnostic says that a text cannot be read, rather than what it means."""
    return diagnostic.code.startswith("APL0")
