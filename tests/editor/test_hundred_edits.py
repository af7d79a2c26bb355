"""A server answers each of a hundred edits as the command line does: of the same text, the same diagnostics."""

import asyncio
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import define
from lsprotocol import types

from policylang.api import load, planned_graphs
from policylang.commands.cli import main
from policylang.language import syntax
from policylang.language.diagnostics import Source
from policylang.language.loader import parse_policy
from policylang.language.operators import OperatorTable
from policylang.language.parser import parse_file
from policylang.language.predicates import dimensions_of
from policylang.language.shown import format_quantity
from policylang.language.syntax import Statement
from tests.editor.conftest import GRAPHS, Editor

_WORD = re.compile(r"[A-Za-z_]{4,}")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_TYPED = (
    "save attention in block", "recompute every 2nd mm per block", "# a comment: → 😀", "let product = mm, bmm",
    "save first 3 add where bytes > 64 MiB", "optional save topk", "expect saved <= 1 GiB",
    "must_recompute chain through all_gather where from parameter",
)  # fmt: skip


def edits(start: str, others: Sequence[str], sound: Callable[[str], bool], random: Random) -> Iterator[str]:
    """Without end, each text one edit from the one before; ``others`` are policies to paste a rule from.

    What breaks a text is more often than not taken back, as people do; ``sound`` says whether one can be read.
    """
    text = start
    kinds = (_type, _type, _delete_line, _misspell, _add_optional, _change_number, _break_parentheses, _paste)
    while True:
        kind = random.choice(kinds)
        before = text
        for text in kind(before, others, random):
            yield text
        if text != before and random.random() < (0.3 if sound(text) else 0.8):
            text = before if sound(before) else start
            yield text


def _type(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    """A new line: one of its words character by character, what is before it and behind it at once."""
    lines = text.split("\n")
    at = random.randrange(len(lines) + 1)
    typed = random.choice(_TYPED)
    word = random.choice(list(re.finditer(r"\S+", typed)))
    for length in (*range(word.start() + 1, word.end() + 1), len(typed)):
        yield "\n".join([*lines[:at], typed[:length], *lines[at:]])


def _delete_line(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    lines = text.split("\n")
    del lines[random.randrange(len(lines))]
    yield "\n".join(lines)


def _misspell(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    """Two letters of a word swapped."""
    if words := list(_WORD.finditer(text)):
        word = random.choice(words)
        at = random.randrange(word.start(), word.end() - 1)
        yield text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def _add_optional(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    lines = text.split("\n")
    if rules := [at for at, line in enumerate(lines) if line.startswith(("save", "recompute", "must_", "prefer_"))]:
        at = random.choice(rules)
        lines[at] = f"optional {lines[at]}"
        yield "\n".join(lines)


def _change_number(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    if numbers := list(_NUMBER.finditer(text)):
        number = random.choice(numbers)
        yield f"{text[: number.start()]}{random.choice([0, 1, 2, 7, 4096])}{text[number.end() :]}"


def _break_parentheses(text: str, _: Sequence[str], random: Random) -> Iterator[str]:
    if places := [at for at, character in enumerate(text) if character in "(){}"]:
        at = random.choice(places)
        yield text[:at] + text[at + 1 :]
    else:
        at = random.randrange(len(text) + 1)
        yield text[:at] + random.choice("()") + text[at:]


def _paste(text: str, others: Sequence[str], random: Random) -> Iterator[str]:
    """A line of another policy."""
    source = [line for line in random.choice(others).split("\n") if line and not line.startswith(("#", "policy"))]
    lines = text.split("\n")
    lines.insert(random.randrange(len(lines) + 1), random.choice(source))
    yield "\n".join(lines)


OPEN = "still being computed"
"""What is said of a worth that is not there yet."""
_FILE = "<stdin>"
_MINUS = "−"
_SCHEDULING = (syntax.Bucket, syntax.Prefetch, syntax.Delay, syntax.Overlap, syntax.KeepOrder)
_EXPECTATIONS = (syntax.ExpectTotal, syntax.ExpectCount, syntax.ExpectFate)


def check_figures(text: str, plan: Any, hints: Sequence[types.InlayHint], *, weighed: bool = True) -> None:
    """Each rule, scheduling line and expectation of a text has the figures of its plan behind it, and its first
    statement those of the step. ``weighed``: also what each rule is worth."""
    shown: dict[tuple[int, int], list[str]] = {}
    for each in hints:
        shown.setdefault((each.position.line, each.position.character), []).append(str(each.label))
    statements, expected = parse_file(Source("edited.apl", text))[0].statements, []
    expected += list(_rules(statements, plan, weighed=weighed))
    expected += list(_expectations(statements, plan))
    expected += list(_scheduling(statements, plan))
    title = next((each for each in statements if isinstance(each, syntax.PolicyName)), statements[0])
    expected.append((title, totals(plan)))
    for statement, label in expected:
        end = text[: statement.span.end].split("\n")
        at = len(end) - 1, len(end[-1].encode("utf-16-le")) // 2
        found = shown.get(at, [])
        assert any(_same(each, label) for each in found), f"{statement.span.one_line}: {found}, not {label}\n{text}"


def _same(shown: str, label: str) -> bool:
    """What ends in dots begins with it."""
    return shown.startswith(label[:-1]) if label.endswith("…") else shown == label


def _rules(statements: Sequence[Statement], plan: Any, *, weighed: bool) -> Iterator[tuple[Statement, str]]:
    rules = [each for each in statements if isinstance(each, syntax.Rule)]
    for rule, planned in zip(rules, _own(plan["rules"]), strict=True):
        yield rule, rule_label(planned, timed=plan["device"] is not None, weighed=weighed)


def rule_label(planned: Any, *, timed: bool, weighed: bool = True) -> str:
    decided, worth = planned["decided"], planned["worth"]
    label = f"{decided:,} value{'' if decided == 1 else 's'}"
    if worth is None or not weighed:  # of what the user's own checkpoint keeps the plan says nothing
        return f"{label}…"
    pairs = [(worth["saved_bytes"], "bytes"), (worth["recomputed_flops"], "flops")]
    pairs += [(worth["recomputed_seconds"], "seconds")] if timed else []
    return " · ".join([label, *([signed(amount, unit) for amount, unit in pairs if amount] or ["changes nothing"])])


def totals(plan: Any) -> str:
    under, again = plan["with"], ""
    if under["recomputed"] and under["recomputed_flops"]:
        again = f"recomputes {format_quantity(under['recomputed_flops'] / plan['forward_flops'], 'fraction')}"
    elif under["recomputed"]:
        again = f"recomputes {format_quantity(under['recomputed_bytes'], 'bytes')}"
    parts = [
        f"keeps {format_quantity(under['saved_bytes'], 'bytes')}",
        f"offloads {format_quantity(under['offloaded_bytes'], 'bytes')}" if under["offloaded"] else "",
        again,
        f"peak {format_quantity(max(under['peak']['forward'], under['peak']['backward']), 'bytes')}",
        f"step {format_quantity(under['step_seconds'], 'seconds')}" if under["step_seconds"] is not None else "",
    ]
    return " · ".join(filter(None, parts))


def _expectations(statements: Sequence[Statement], plan: Any) -> Iterator[tuple[Statement, str]]:
    expected = [each for each in statements if isinstance(each, _EXPECTATIONS)]
    for statement, planned in zip(expected, _own(plan["expectations"]), strict=True):
        label, margin = f"{planned['status']}, {planned['found']}", planned["margin"]
        if margin and isinstance(statement, syntax.ExpectTotal):
            written = statement.limit.dimension
            meant = dimensions_of(statement.figure)[0] if written == "number" else written
            amount = format_quantity(abs(margin), meant)
            label += f" · {amount} to spare" if planned["status"] == "held" else f" · off by {amount}"
        yield statement, label


def _scheduling(statements: Sequence[Statement], plan: Any) -> Iterator[tuple[Statement, str]]:
    """Buckets come before the other lines, as they are made first."""
    lines = [each for each in statements if isinstance(each, _SCHEDULING)]
    lines.sort(key=lambda each: not isinstance(each, syntax.Bucket))
    for statement, planned in zip(lines, _own((plan["order"] or {"lines": []})["lines"]), strict=bool(plan["order"])):
        matched, into = len(planned["matched"]), ""
        if planned["buckets"]:
            into = f" into {sum(len(bucket['collectives']) for bucket in planned['buckets']):,}"
        noun = "collective" if matched == 1 else "collectives"
        yield statement, f"{matched:,} {noun} · {len(planned['moved']):,} moved{into}…"


def _own(planned: Sequence[Any]) -> list[Any]:
    """Without what included files say."""
    return [each for each in planned if each["source"].rpartition(":")[0] == _FILE]


def signed(amount: float, dimension: Any) -> str:
    """``−1.9 GiB``, ``+8.2 TFLOP``."""
    return f"{'+' if amount > 0 else _MINUS}{format_quantity(abs(amount), dimension)}" if amount else "0"


ROOT = GRAPHS.parents[1]
POLICIES = {
    file.stem: file.read_text() for file in sorted([*ROOT.glob("policies/*.apl"), *ROOT.glob("examples/*.apl")])
}
ORDERED = ("fsdp_overlap", "fsdp_tp_overlap")
"""Policies that say in which order collectives run: on a large graph their plans take seconds."""
DOCUMENT = "edited.apl"
_SEVERITIES = {"error": 1, "warning": 2, "note": 3}
_ON_A_GRAPH = "APL300"
"""Codes above it are of a policy on a graph: what has none below can be planned."""
_INCLUDE = re.compile(r'(?<![^\n])include +(<[^>\n]*>|"[^"\n]*")')
_LONGEST = 60.0
_SELDOM = 12
"""Of one in so many texts that can be planned it is waited for what each rule is worth: that takes a plan a rule on
either side."""


@pytest.mark.slow
def test_a_few_edits_on_a_small_graph(tmp_path, monkeypatch, capsys) -> None:
    edited(tmp_path, GRAPHS / "llama3_8b.graph", "every_2nd_layer", 9, 0, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_hundred_edits_on_a_recorded_step(tmp_path, monkeypatch, capsys, recorded_snapshot, name) -> None:
    count = 40 if name in ORDERED else 100
    edited(tmp_path, recorded_snapshot, name, count, None, monkeypatch, capsys)


@pytest.fixture(scope="module")
def recorded_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The joint graph of 19,655 nodes."""
    from policylang.graph.snapshot import write
    from tests.support import shared_graphs

    if not (shared_graphs.FOLDER / f"{shared_graphs.JOINT}.json.gz").is_file():
        pytest.skip("the recorded step is not here")
    file = tmp_path_factory.mktemp("recorded") / "step.graph"
    write(shared_graphs.shared_facts(shared_graphs.JOINT), file)
    return file


def edited(
    folder: Path,
    graph: Path,
    name: str,
    count: int,
    pause: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Edit a policy in a server, and ask the command line about each text, in a folder that holds what it includes."""
    monkeypatch.chdir(folder)
    for each, text in POLICIES.items():
        (folder / f"{each}.apl").write_text(text)
    as_a_process_without_torch(monkeypatch)
    others = [text for each, text in POLICIES.items() if each != name]
    texts = [POLICIES[name], *islice(edits(POLICIES[name], others, readable, Random(name)), count)]
    if pause is None and len(name) % 2:
        texts = [text.replace("\n", "\r\n") for text in texts]
    answers = asyncio.run(answered(folder, graph, texts, pause))
    for version, (text, found) in enumerate(zip(texts, answers, strict=True), 1):
        said = asked(text, graph, monkeypatch, capsys)
        for mine, theirs in zip(found.diagnostics, said, strict=True):
            assert mine == of_protocol(theirs, text, folder), f"version {version}:\n{text}"
        if found.weighed is not None:
            plan = planned(text, graph, monkeypatch, capsys)
            check_figures(text, plan, found.hints, weighed=False)
            check_figures(text, plan, found.weighed)
    assert sum(each.is_planned for each in answers) >= count // 4, "of many texts there is a plan"
    assert any(each.weighed for each in answers)


def as_a_process_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line, here, where torch is loaded, looks operators up as a process of its own does; it reads a
    snapshot once for all texts."""
    monkeypatch.setattr(load, "operators_at_hand", lambda met=(): OperatorTable.bundled(met=met))
    monkeypatch.setattr(planned_graphs, "read_any", cache(planned_graphs.read_any))


def readable(text: str) -> bool:
    return parse_policy(text).policy is not None


@define
class Answer:
    """What a server says of a text."""

    diagnostics: list[dict[str, Any]]
    hints: Sequence[types.InlayHint]
    """As soon as there is a plan."""
    weighed: Sequence[types.InlayHint] | None = None
    """Once what each rule is worth is known; None where nobody waited for that."""

    @property
    def is_planned(self) -> bool:
        return not any(
            each["severity"] == _SEVERITIES["error"] and each["code"] < _ON_A_GRAPH for each in self.diagnostics
        )


async def answered(folder: Path, graph: Path, texts: Sequence[str], pause: int | None) -> list[Answer]:
    """What a server says of each text, one after the other in one open document."""
    editor, found, document = await Editor.start(), list[Answer](), (folder / DOCUMENT).as_uri()
    waited_for = cycle([False] * (min(len(texts) // 4, _SELDOM) - 1) + [True])
    async with asyncio.timeout(_LONGEST + 5 * len(texts)):
        await editor.begin(folder, options={"graph": str(graph), "pause": pause})
        for version, text in enumerate(texts, 1):
            if version == 1:
                editor.open(document, text)
            else:
                editor.change(document, text, version)
            hints = await editor.hints(document)  # waits for the plan of the text
            said = editor.said[document][-1]
            assert said.version == version
            answer = Answer([_plain(each) for each in said.diagnostics], hints or ())
            if answer.is_planned and next(waited_for):
                answer.weighed = await _weighed(editor, document)
            found.append(answer)
        assert await editor.end() == 0
    return found


async def _weighed(editor: Editor, document: str) -> Sequence[types.InlayHint]:
    """The hints once all is worked out: an editor asks again each time that the server says that there is more."""
    while True:
        before = editor.refreshed
        hints = await editor.hints(document) or ()
        if not any(OPEN in _tooltip(each) for each in hints):
            return hints
        await editor.until(lambda before=before: editor.refreshed > before)  # type: ignore[misc]


def asked(text: str, graph: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> list[dict[str, Any]]:
    """What the command line says of a text, with the name of the document in place of the standard input's."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    main(["check", "-", "--graph", str(graph), "--output-format", "json"])
    printed = capsys.readouterr().out.replace("<stdin>", DOCUMENT)
    return list(json.loads(printed)["diagnostics"])


def planned(text: str, graph: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """What `policylang plan` says of a text."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), encoding="utf-8"))
    main(["plan", "-", "--graph", str(graph), "--output-format", "json"])
    return json.loads(capsys.readouterr().out)


def of_protocol(said: dict[str, Any], text: str, folder: Path) -> dict[str, Any]:
    """A diagnostic of the command line as a server publishes it: what lies in an included file at the include."""
    own, message = said["location"], said["message"]
    related = said["related"]
    if own is not None and own["file"] != DOCUMENT:
        message = f"{own['file']}:{own['start']['line']}: {message}"
        related = [{"message": said["message"], "location": own}, *related]
        here = [each["location"] for each in related if each["location"] and each["location"]["file"] == DOCUMENT]
        start, end = span(here[0]) if here else include_of(text, own["file"], folder)
    else:
        start, end = (0, 0) if own is None else span(own)
    notes = [f"note: {each['message']}" for each in related if each["location"] is None]
    help = [f"help: {said['help']}"] if said["help"] else []
    return {
        "code": said["code"],
        "severity": _SEVERITIES[said["severity"]],
        "message": "\n".join([message, *said["details"], *notes, *help]),
        "start": place(text, start),
        "end": place(text, end),
        "related": [of_related(each, text, folder) for each in related if each["location"] is not None],
    }


def of_related(each: dict[str, Any], text: str, folder: Path) -> tuple[Any, ...]:
    name = each["location"]["file"]
    file = ROOT / "policies" / f"{name[1:-1]}.apl" if name.startswith("<") else folder / name
    there = text if name == DOCUMENT else file.read_text()
    start, end = span(each["location"])
    return each["message"], file.as_uri(), place(there, start), place(there, end)


def span(location: dict[str, Any]) -> tuple[int, int]:
    return location["start"]["offset"], location["end"]["offset"]


def include_of(text: str, file: str, folder: Path) -> tuple[int, int]:
    """The first include of a text that leads to a file."""
    found = _INCLUDE.finditer(text)
    return next(each.span() for each in found if leads_to(each[1], file, folder))


def leads_to(target: str, file: str, folder: Path) -> bool:
    """Whether an include is one of a file, or of one that includes it."""
    name = target.strip('"')
    if name == file:
        return True
    there = ROOT / "policies" / f"{name[1:-1]}.apl" if name.startswith("<") else folder / name
    return there.is_file() and any(leads_to(each[1], file, folder) for each in _INCLUDE.finditer(there.read_text()))


def place(text: str, offset: int) -> tuple[int, int]:
    """Line and UTF-16 unit of a character, the slow way."""
    before = text[:offset].split("\n")
    return len(before) - 1, len(before[-1].encode("utf-16-le")) // 2


def _plain(found: types.Diagnostic) -> dict[str, Any]:
    return {
        "code": found.code,
        "severity": found.severity.value,
        "message": found.message,
        "start": _pair(found.range.start),
        "end": _pair(found.range.end),
        "related": [
            (each.message, each.location.uri, _pair(each.location.range.start), _pair(each.location.range.end))
            for each in found.related_information or ()
        ],
    }


def _tooltip(hint: types.InlayHint) -> str:
    return hint.tooltip.value if isinstance(hint.tooltip, types.MarkupContent) else hint.tooltip or ""


def _pair(position: types.Position) -> tuple[int, int]:
    return position.line, position.character
