"""The figures at the ends of statements: those of ``policylang plan``, where the statements end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import attrs
import pytest

pytest.importorskip("pytest_lsp", reason="needs a client of the language server")

from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types

from policylang.editor.hover import hints, stale_hints
from policylang.editor.state import State
from policylang.language.parser import parse_file
from policylang.language.shown import format_quantity
from policylang.planning.inspection.worth import MOST_RULES
from tests.editor.conftest import GRAPHS
from tests.editor.real_client import CAPABILITIES, Editor
from tests.editor.test_hover import ORDERED, POLICIES, SAC, TEXTS, command, signed, state_of
from tests.support.drawn import examples


def shown(state: State) -> dict[str, list[str]]:
    """By the statement that they stand behind, the labels."""
    text, positions = state.document.source.text, state.document.positions
    ends = {each.span.end: each.span.one_line for each in state.text.file.statements}
    found: dict[str, list[str]] = {}
    for each in hints(state, 0, len(text)):
        assert isinstance(each.label, str)
        found.setdefault(ends[positions.offset(each.position)], []).append(each.label)
    return found


def tooltip(state: State, label: str) -> str:
    found = next(
        each for each in hints(state, 0, len(state.document.source.text), markdown=False) if each.label == label
    )
    return found.tooltip.value


@pytest.mark.parametrize("device", [None, "h100-sxm"])
def test_rules_and_totals_are_those_of_plan(device) -> None:
    plan = command("plan", SAC, "tutorial.graph", *(["--device", device] if device else []))
    found = shown(state_of(SAC, "tutorial.graph", device))
    for rule in plan["rules"]:
        worth, decided = rule["worth"], rule["decided"]
        parts = [f"{decided:,} value{'' if decided == 1 else 's'}"]
        if worth is not None:
            pairs = [(worth["saved_bytes"], "bytes"), (worth["recomputed_flops"], "flops")]
            pairs += [(worth["recomputed_seconds"], "seconds")] if device else []
            parts += [signed(amount, unit) for amount, unit in pairs if amount] or ["changes nothing"]
        assert found[rule["text"]] == [" · ".join(parts)]
    under = plan["with"]
    totals = [
        f"keeps {format_quantity(under['saved_bytes'], 'bytes')}",
        f"recomputes {format_quantity(under['recomputed_flops'] / plan['forward_flops'], 'fraction')}",
        f"peak {format_quantity(max(under['peak']['forward'], under['peak']['backward']), 'bytes')}",
        *([f"step {format_quantity(under['step_seconds'], 'seconds')}"] if device else []),
    ]
    assert found["policy llama3_sac"] == [" · ".join(totals)]


def test_other_statements() -> None:
    text = (
        "let wide = mm\nblocks layers.*\nrecompute everything in block; save wide\ninclude <fsdp>\n"
        "undecided -> save\nexpect exactly 7 mm per block\nexpect saved <= 1 MiB\n"
    )
    state = state_of(text, "fsdp.graph")
    found, rules = shown(state), state.graph.plan.rules
    assert found["let wide = mm"][0] == "57 nodes"
    assert found["let wide = mm"][1].startswith("keeps ")
    assert found["blocks layers.*"] == ["8 blocks"]
    assert found["include <fsdp>"] == [f"1 rule · {len(rules[2].decided):,} values"]
    for each in command("plan", text, "fsdp.graph")["expectations"]:
        label = f"{each['status']}, {each['found']}"
        if each["text"].startswith("expect saved"):
            label += f" · off by {format_quantity(-each['margin'], 'bytes')}"
        assert found[each["text"]] == [label]
    assert found["undecided -> save"][0].endswith(" values")


def test_an_expectation_says_what_is_to_spare() -> None:
    text = "recompute everything\nundecided -> save\nexpect saved <= 1 GiB\n"
    (plan,) = command("plan", text, "tutorial.graph")["expectations"]
    found = shown(state_of(text, "tutorial.graph"))["expect saved <= 1 GiB"]
    assert found == [f"held, {plan['found']} · {format_quantity(plan['margin'], 'bytes')} to spare"]


def check_scheduling(text: str, device: str | None) -> dict[str, list[str]]:
    found = shown(state_of(text, "fsdp.graph", device))
    order = command("plan", text, "fsdp.graph", *(["--device", device] if device else []))["order"]
    (line,) = order["lines"]
    into = f" into {sum(len(bucket['collectives']) for bucket in line['buckets'])}" if line["buckets"] else ""
    label = f"{len(line['matched'])} collectives · {len(line['moved'])} moved{into}"
    if device:
        change = order["as_planned"]["exposed_seconds"] - line["exposed_seconds_without"]
        label += f" · exposed {signed(change, 'seconds')}"
    assert found[line["text"]][0] == label
    return found


def test_scheduling_lines() -> None:
    check_scheduling(ORDERED, "h100-sxm")


@pytest.mark.slow
def test_buckets_and_lines_without_a_device() -> None:
    text = "let gathers = all_gather where from parameter\nbucket gathers per block\n"
    for device in (None, "h100-sxm"):
        found = check_scheduling(text, device)
        assert found["let gathers = all_gather where from parameter"][0] == "150 collectives"


def test_figures_come_when_they_are_known() -> None:
    text = "policy mine\nrecompute everything in block\nsave mm\n"
    state = state_of(text, "tutorial.graph", weighed=False)
    assert shown(state) == {"recompute everything in block": ["276 values"], "save mm": ["29 values"]}
    assert not state.graph.knows("breakdown")


TAGGED = """
%x = input
%w = parameter
%mm = aten.mm.default(%x, %w) layers.0 shape=8x8 bytes=256 tag=MUST_SAVE
%sin = aten.sin.default(%mm) layers.0 shape=8x8 bytes=256 tag=MUST_SAVE
---
%cos = aten.cos.default(%sin)
output(%sin, %cos)
"""


def test_what_the_users_own_checkpoint_keeps_is_told(tmp_path: Path) -> None:
    file = tmp_path / "tagged.graph.txt"
    file.write_text(TAGGED)
    found = shown(state_of("policy mine\nrecompute mm\n", str(file)))
    assert found["recompute mm"] == ["0 values · 1 kept by the user's checkpoint"]


def test_nothing_is_said_of_a_text_with_errors_and_without_a_snapshot() -> None:
    assert hints(state_of("save mm\n"), 0, 100) == []
    assert hints(state_of("save mm\nsave mmm\n", "tutorial.graph"), 0, 100) == []
    assert hints(state_of("", "tutorial.graph"), 0, 0) == []


def stale(before: State, text: str) -> State:
    """The state of an edited text, with the hints that its lines had."""
    found = state_of(text, "tutorial.graph")
    return attrs.evolve(found, stale=stale_hints(before, found.document.positions))


def by_line(state: State) -> dict[int, str]:
    text = state.document.source.text
    return {
        each.position.line: str(each.label) for each in hints(state, 0, len(text)) if "keeps" not in str(each.label)
    }


KEPT = "policy mine\nrecompute everything in block  # 𝔘\n\nsave mm\nsave attention\nundecided -> save\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (KEPT.replace("save mm", "save mmm"), {1: 1, 3: 3, 4: 4, 5: 5}),  # a mistake within a line
        (KEPT.replace("save mm", "save mm where"), {1: 1, 3: 3, 4: 4, 5: 5}),
        (KEPT.replace("save mm", "sa\nsave mm"), {1: 1, 4: 3, 5: 4, 6: 5}),  # in a new line
        (KEPT.replace("save mm\n", "").replace("save attention", "save attentio"), {1: 1, 4: 5}),  # of two lines, one
        (KEPT + "sav\n", {1: 1, 3: 3, 4: 4, 5: 5}),
        (KEPT.replace("\n", "\r\n").replace("mm", "mmm"), {1: 1, 3: 3, 4: 4, 5: 5}),
        ("}", {}),
        ("", {}),
    ],
)
def test_a_text_with_mistakes_has_the_figures_of_the_last_plan(text: str, lines: dict[int, int]) -> None:
    before = state_of(KEPT, "tutorial.graph")
    if "\r" in text:
        before = state_of(KEPT.replace("\n", "\r\n"), "tutorial.graph")
    was, state = by_line(before), stale(before, text)
    assert len(was) == 4
    assert by_line(state) == ({new: f"{was[old]} · stale" for new, old in lines.items()} if text else {})
    assert by_line(stale(state, text)) == by_line(state), "one edit after another"
    assert by_line(stale(state, KEPT)) == was, "once it is mended, those of its own plan"


def test_stale_figures_stand_where_the_others_do_and_at_the_end_of_changed_lines() -> None:
    before = state_of(KEPT, "tutorial.graph")
    state = stale(before, KEPT.replace("save mm", "save mmm # 😀"))
    places = {(each.position.line, each.position.character) for each in hints(state, 0, 200)}
    assert places == {(0, 11), (1, 29), (3, 13), (4, 14), (5, 17)}
    assert [each.position.line for each in hints(state, 0, 11)] == [0], "only in the range that is asked for"
    assert "without mistakes" in tooltip(state, next(str(each.label) for each in hints(state, 0, 11)))


def test_hints_stand_at_the_ends_of_statements_before_comments() -> None:
    text = '# 😀\r\nsave (  # 😀\r\n  mm,\r\n  bmm\r\n) in "layers.*"  # behind\r\nundecided -> save # 😀\r\n'
    found = hints(state_of(text, "tutorial.graph"), 0, len(text))
    assert {(each.position.line, each.position.character) for each in found} == {(4, 15), (5, 17)}
    assert all(each.padding_left for each in found)


def test_only_the_range_that_is_asked_for() -> None:
    text = "policy mine\nsave mm\nsave attention\n"
    state = state_of(text, "tutorial.graph")
    lines = [[each.position.line for each in hints(state, start, end)] for start, end in ((0, 11), (12, 20), (20, 36))]
    assert lines == [[0], [1], [2]]


def test_tooltips_say_more() -> None:
    state = state_of("recompute everything in block\nsave mm\n", "tutorial.graph")
    label = shown(state)["save mm"][0]
    assert "It matches 29 nodes, decides 29." in tooltip(state, label)
    assert "It buys FLOPs" in tooltip(state, label)


def test_very_many_rules_are_not_weighed_and_the_tooltip_says_so() -> None:
    facts = state_of("save mm\n", "tutorial.graph").facts
    names = [facts.modules[row] for row in facts.forward if facts.modules[row]]
    modules = list(dict.fromkeys(names))
    text = "\n".join(f"save everything where module == /{module}" for module in modules)
    text += "\n" + "\n".join(f"optional recompute everything where numel == {n} or is view" for n in range(5))
    state = state_of(text, "tutorial.graph", weighed=False)
    state.graph.look()
    object.__setattr__(state.graph, "worth", ())  # as of rules beyond the bound
    assert str(MOST_RULES) in tooltip(state, shown(state)[f"save everything where module == /{modules[0]}"][0])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda path: path.stem)
def test_hints_of_every_policy_stand_at_the_ends_of_its_statements(policy) -> None:
    state = state_of(policy.read_text(encoding="utf-8"), "tutorial.graph", weighed=False)
    if state.graph is not None:
        state.graph.look()
        assert shown(state) or not state.text.file.statements


@settings(max_examples=examples(20, 300))
@given(st.sampled_from(TEXTS), st.integers(0, 4000), st.integers(1, 400))
def test_hints_of_a_stretch_of_a_policy_stand_at_the_ends_of_its_statements(text: str, start: int, length: int) -> None:
    piece = text[start % len(text) :][:length]
    state = state_of.__wrapped__(piece, "tutorial.graph", weighed=False)
    ends = {each.span.end for each in parse_file(state.document.source)[0].statements}
    for each in hints(state, 0, len(piece)):
        assert state.document.positions.offset(each.position) in ends


TEXT = "policy mine\nrecompute everything in block\nsave mm  # 𝔘\n"


@pytest.mark.slow
@pytest.mark.parametrize("markdown", [True, False])
def test_figures_come_and_are_refreshed_once_rules_are_weighed(tmp_path: Path, markdown: bool) -> None:
    asyncio.run(_session(tmp_path, markdown=markdown))


async def _session(folder: Path, *, markdown: bool) -> None:
    editor, uri = await Editor.start(), (folder / "mine.apl").as_uri()
    formats = [types.MarkupKind.Markdown, types.MarkupKind.PlainText] if markdown else []
    hover = types.HoverClientCapabilities(content_format=formats)
    text = attrs.evolve(CAPABILITIES.text_document, hover=hover, inlay_hint=types.InlayHintClientCapabilities())
    options = {"graph": str(GRAPHS / "tutorial.graph"), "pause": 0}
    await editor.begin(folder, options=options, capabilities=attrs.evolve(CAPABILITIES, text_document=text))
    editor.open(uri, TEXT)
    first = await editor.hints(uri)
    assert [each.position.line for each in first] == [0, 1, 2]
    assert [each.label for each in first][1].startswith("276 values")
    await editor.until(lambda: editor.refreshed > 1)
    labels = [each.label for each in await editor.hints(uri) or ()]
    assert all(" · " in str(each) for each in labels)
    document, place = types.TextDocumentIdentifier(uri), types.Position(2, 5)
    found = await editor.client.text_document_hover_async(types.HoverParams(document, place))
    assert found.range == types.Range(place, types.Position(2, 7))
    assert found.contents.kind == ("markdown" if markdown else "plaintext")
    assert ("`aten.mm.default`" in found.contents.value) is markdown
    behind = types.HoverParams(document, types.Position(2, 12))
    assert await editor.client.text_document_hover_async(behind) is None
    await editor.end()
