"""A snapshot as somebody might craft one, whose every text tries to be something else: an escape sequence, a command to
the runner of a build, markup, a mention, another line."""

import re
from pathlib import Path

import attrs

from policylang.graph.facts import Facts, LostMarker
from policylang.graph.snapshot import write

START = "::error file=x::"
END = (
    "\x1b]0;pwned\x07\x1b[31m\n::error file=x::evil%0A\r##[error]x ##vso[task]\u2028\u202eRTL"
    "<script>alert(1)</script><img src=x onerror=alert(2)>\"'|`](javascript:alert(3)) @everyone ``` "
)
MARKUP = re.compile(r"<script>alert|<img|@everyone|\]\(javascript")


def hostile_graph(facts: Facts, folder: Path, *, dtypes: bool = True) -> Path:
    """The facts of a snapshot with other names. ``dtypes``: of these as well, which have no times then."""

    def evil(values: object, *, starts: bool = False) -> list[str]:
        return [f"{START if starts else ''}{value}{END}" if value else value for value in values]  # type: ignore[attr-defined]

    every_third = [target if not target or at % 3 else target + END for at, target in enumerate(facts.targets)]
    named = attrs.evolve(
        facts,
        names=evil(facts.names, starts=True),
        modules=evil(facts.modules),
        targets=every_third,
        input_names=evil(facts.input_names),
        devices=evil(facts.devices),
        dtypes=[f"{dtype}{END}" if dtypes and dtype and not at % 5 else dtype for at, dtype in enumerate(facts.dtypes)],
        user_tags=[END if not at % 2 else tag for at, tag in enumerate(facts.user_tags)],
        annotations=[(END, *names) for names in facts.annotations],
        uncounted=[END if not at % 4 else each for at, each in enumerate(facts.uncounted)],
        torch_version=f"2.13{END}",
        lost_records=(LostMarker(f"lost{END}", f"reason{END}"),),
    )
    path = folder / "hostile.graph"
    write(named, path)
    return path


def raw_in(text: str, form: str = "text") -> str:
    """What of a text would be acted on where it is shown in a form; empty where it is harmless."""
    found = None if form in ("hover", "plain") else re.search(r"##\[|##vso\[", text)
    odd = next((at for at, each in enumerate(text) if not each.isprintable() and each not in "\n\t"), None)
    if odd is not None:
        return repr(text[max(0, odd - 40) : odd + 20])
    if form in ("text", "json", "markdown"):
        found = found or re.search(r"^\s*::", text, re.MULTILINE)
    if form == "html":
        found = re.search(r"<img|<script>alert", text)
    if form in ("markdown", "hover"):
        outside = re.sub(r"(?s)(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
        found = found or MARKUP.search(re.sub(r"\\[\W_]", "", outside))
    return "" if found is None else repr(text[max(0, found.start() - 40) : found.end() + 20])
