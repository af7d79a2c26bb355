"""Hovers and hints on real snapshots: the figures are those that the command line prints."""

import asyncio
import contextlib
import io
import json
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import strategies as st
from lsprotocol import types

from policylang.api.load import load_device
from policylang.api.planned_graphs import read_any
from policylang.commands.cli import main
from policylang.editor.hover import hints, hover, stale_hints
from policylang.editor.state import Document, State, read_graph, read_text
from policylang.graph.facts import Facts, Phase
from policylang.language.diagnostics import Source
from policylang.language.files import read_source
from policylang.language.globs import PathGlob
from policylang.language.parser import parse_file
from policylang.language.shown import format_quantity
from policylang.planning.inspection.worth import MOST_RULES
from tests.documents.outputs import signed
from tests.editor.conftest import CAPABILITIES, Editor
from tests.support.drawn import drawn, slow
from tests.support.hostile import hostile_graph, raw_in

ROOT = Path(__file__).resolve().parents[2]
GRAPHS = ROOT / "docs" / "graphs"
POLICIES = sorted((ROOT / "policies").glob("*.apl"))
SAC = (ROOT / "policies" / "llama3_sac.apl").read_text(encoding="utf-8")


@cache
def snapshot(graph: str) -> Facts:
    return read_any(GRAPHS / graph)


@cache
def state_of(text: str, graph: str | None = None, device: str | None = None, *, weighed: bool = True) -> State:
    document = Document("file:///tmp/mine.apl", 1, Source("mine.apl", text), Path("/tmp/mine.apl"))
    facts = None if graph is None else snapshot(graph)
    read = read_text(document, facts, read_source)
    profile = None if device is None else load_device(device)
    planned = None if facts is None else read_graph(read, facts, str(graph), None, profile)
    if planned is not None and weighed:
        planned.look()
        planned.weigh()
    return State(document, read, planned, facts)


def said(state: State, needle: str, skip: int = 0, *, markdown: bool = False) -> str:
    """The hover at the first place of a text; ``skip`` characters into it."""
    found = hover(state, state.document.source.text.index(needle) + skip, markdown=markdown)
    return found.contents.value


def covered(state: State, needle: str, skip: int = 0) -> str:
    """The text that the hover says it is of."""
    text, positions = state.document.source.text, state.document.positions
    found = hover(state, text.index(needle) + skip)
    return text[positions.offset(found.range.start) : positions.offset(found.range.end)]


@cache
def command(name: str, text: str, graph: str, *more: str) -> Any:
    """The JSON of a command, of a policy as text."""
    out = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(out):
        file = Path(folder) / "mine.apl"
        file.write_text(text, encoding="utf-8")
        main([name, str(file), "--graph", str(GRAPHS / graph), *more, "--output-format", "json"])
    return json.loads(out.getvalue())


# --- rules ---
@pytest.mark.parametrize("device", [None, "h100-sxm"])
def test_a_rule_says_what_plan_says(device) -> None:
    state = state_of(SAC, "tutorial.graph", device)
    plan = command("plan", SAC, "tutorial.graph", *(["--device", device] if device else []))
    for rule in plan["rules"]:
        shown = said(state, rule["text"])
        assert f"matches {rule['matched']:,} node" in shown
        assert f"decides {rule['decided']:,}." in shown
        worth = rule["worth"]
        if worth is None:
            assert "Compared with" not in shown
            continue
        assert f"saved {signed(worth['saved_bytes'], 'bytes')}, " in shown
        assert f"recomputed {signed(worth['recomputed_flops'], 'flops')}, " in shown
        assert f"peak {signed(worth['peak_bytes'], 'bytes')}. It {worth['verdict']}" in shown
        assert (f"its time {signed(worth['recomputed_seconds'] or 0, 'seconds')}" in shown) is (device is not None)
        price, unit = (worth["seconds_per_gib"], "seconds") if device else (worth["flops_per_gib"], "flops")
        if price is not None:
            assert f"at {format_quantity(price, unit)} a GiB." in shown


def test_a_rule_says_what_becomes_of_its_values_block_by_block() -> None:
    state = state_of(SAC, "tutorial.graph")
    groups = command("plan", SAC, "tutorial.graph")["groups"]
    line = SAC[: SAC.index("save matmul")].count("\n") + 1
    values = ((group, entry) for group in groups for entry in group["values"])
    mine = [each for each in values if (each[1]["source"] or "").endswith(f":{line}")]
    kept = sum(entry["bytes"] * len(group["blocks"]) for group, entry in mine if entry["fate"] == "saved")
    assert kept
    shown = said(state, "save matmul")
    assert f"Decided and needed by the backward: {format_quantity(kept, 'bytes')} saved" in shown
    in_one = {sum(entry["bytes"] for other, entry in mine if other is group) for group, _ in mine}
    assert len(in_one) == 1  # the first block begins with another cast: what the rule comes to there is the same
    assert f"By block: {format_quantity(in_one.pop(), 'bytes')} saved in model.layers.0–3, each." in shown


def test_the_amounts_of_all_lines_are_those_of_the_plan() -> None:
    graph = state_of(SAC, "tutorial.graph", "h100-sxm").graph
    whole, lines = graph.breakdown.under.amounts, graph.amounts.values()
    nobodys = [
        (entry, group.times) for group in graph.breakdown.groups for entry in group.entries if entry.source is None
    ]
    assert whole.saved == sum(each.amounts.saved for each in lines) + sum(e.count * n for e, n in nobodys)
    assert whole.saved_bytes == sum(each.amounts.saved_bytes for each in lines) + sum(e.bytes * n for e, n in nobodys)
    assert whole.recomputed_flops == sum(each.amounts.recomputed_flops for each in lines)
    seconds = sum(each.amounts.recomputed_seconds or 0.0 for each in lines)
    assert seconds == pytest.approx(whole.recomputed_seconds)
    for line in lines:
        assert line.amounts.saved_bytes == sum(each.amounts.saved_bytes * each.times for each in line.groups)


def test_a_rule_says_what_explain_says() -> None:
    state = state_of(SAC, "tutorial.graph")
    line = SAC[: SAC.index("recompute everything")].count("\n") + 1
    explained = command("explain", SAC, "tutorial.graph", "--rule", str(line))
    shown = said(state, "recompute everything in block")
    for other in explained["taken_over"]:
        number = other["source"].rpartition(":")[2]
        count = other["why"].split()[0]
        assert f"- {count} overridden by line {number}: {other['text']}" in shown
    assert f"It decides {explained['names'][0]} in model.layers.0" in shown
    for part in explained["parts"]:
        assert f"- {part}" in shown


def test_a_statement_that_no_plan_has_says_what_it_means_once() -> None:
    shown = said(state_of("optional save attention in block"), "attention", -1)
    assert "Save what the nodes compute for the backward" in shown
    assert "The nodes are those of attention in block." in shown
    assert "may match nothing" in shown
    state = state_of("keep order of all_to_all\nsave mm\n")
    assert said(state, "keep", 10) == "keep order of all_to_all\n\n" + KEPT
    assert said(state, "keep").startswith("keep order of all_to_all\n\n" + KEPT + "\n\nFor example")
    assert said(state, "save mm").count("Save what the nodes compute for the backward") == 1


KEPT = "No scheduler moves communication across these nodes."


@pytest.mark.parametrize(
    ("text", "graph", "place", "shown"),
    [
        ("offload mm up to 64 MiB per rank", None, "offload", ["64 MiB on each rank"]),
        ("save mm; save attention\n", "tutorial.graph", "save attention", ["Decided by this line and needed"]),
        ("optional collapse round_trips\n", "tensor_parallel.graph", "collapse", ["Nothing to rewrite."]),
        ("optional collapse round_trips\n", "tensor_parallel.graph", "round_trips",
         ["gathered from all ranks and sliced back"]),
        ("device h100-sxm\nsave mm where time > 1 us\n", "tutorial.graph", "h100-sxm",
         ["h100-sxm", "bfloat16 products", "capacity"]),
        ("save aten.t\n", None, "aten.t", ["another look at the memory"]),
        ("save aten.bernoulli\n", None, "aten.bern", ["draws random numbers"]),
        ("optional save linear\n", "tutorial.graph", "linear", ["it is traced as mm (29 nodes) here"]),
        ("save aten.*mm\n", "tutorial.graph", "aten.*mm", ["aten.mm.default: 29", "Among torch's operators it means"]),
        ("save attention\n", "tutorial.graph", "attention",
         ["let attention = (", "Every form of scaled-dot-product attention",
          "4 nodes of the forward: 1 in each of the 4 blocks"]),
        ("save first 2 mm per block\n", "tutorial.graph", "first", ["first 2 mm per block: 8 forward nodes here."]),
        ("save first 2 mm per block\n", "tutorial.graph", "block", ["Counted separately in each block"]),
        ("expect peak <= 1 GiB per stage\n", None, "per stage", ["The highest peak of any rank"]),
    ],
)  # fmt: skip
def test_what_is_said_at_a_place(text: str, graph: str | None, place: str, shown: list[str]) -> None:
    found = said(state_of(text, graph), place)
    for each in shown:
        assert each in found


def test_what_is_not_weighed_yet_is_not_waited_for() -> None:
    text = "recompute everything\nsave mm\nexpect saved <= 1 TiB\n"
    state = state_of(text, "tutorial.graph", weighed=False)
    assert "still being computed" in said(state, "save mm")
    assert not any(state.graph.knows(each) for each in ("worth", "order", "breakdown", "selections"))
    for offset in range(len(text)):
        hover(state, offset)
    assert not state.graph.knows("worth")


# --- other statements ---
def test_expectations_say_what_was_found() -> None:
    text = "recompute everything in block\nundecided -> save\n"
    text += "expect saved <= 25 MiB\nexpect exactly 7 mm per block\nexpect recomputed flops <= 10%\n"
    state = state_of(text, "tutorial.graph")
    found = command("plan", text, "tutorial.graph")["expectations"]
    for each in found:
        shown = said(state, each["text"])
        status = {"held": "holds", "failed": "does not hold", "deferred": "cannot be checked yet"}[each["status"]]
        assert f"It {status}: {each['found']}." in shown
    assert f"the limit: {format_quantity(found[0]['margin'], 'bytes')}." in said(state, "expect saved")
    assert f"the limit: {format_quantity(-found[2]['margin'], 'fraction')}." in said(state, "expect recomputed")


def test_the_policy_line_has_the_totals() -> None:
    state = state_of(SAC, "tutorial.graph", "h100-sxm")
    plan = command("plan", SAC, "tutorial.graph", "--device", "h100-sxm")
    shown = said(state, "policy llama3_sac")
    for name in ("with", "without"):
        assert format_quantity(plan[name]["saved_bytes"], "bytes") in shown
        assert format_quantity(max(plan[name]["peak"][each] for each in ("forward", "backward")), "bytes") in shown
        assert format_quantity(plan[name]["step_seconds"], "seconds") in shown
    assert format_quantity(plan["with"]["recomputed_flops"] / plan["forward_flops"], "fraction") in shown


ORDERED = "prefetch (all_gather where from parameter) 1 block ahead\n"


def test_a_scheduling_line_says_what_explain_says() -> None:
    state = state_of(ORDERED, "fsdp.graph", "h100-sxm")
    explained = command("explain", ORDERED, "fsdp.graph", "--rule", "1", "--device", "h100-sxm")
    shown = said(state, "prefetch")
    assert f"matches {len(explained['matched']):,} collectives, moves {len(explained['moved']):,}" in shown
    with_it, without = (format_quantity(explained[f"exposed_seconds{each}"], "seconds") for each in ("", "_without"))
    assert f"exposed: {with_it} with it, {without} without" in shown
    assert explained["matched"][0] in shown


def test_an_include_says_what_it_brings() -> None:
    state = state_of("recompute everything in block\ninclude <fsdp>\n", "fsdp.graph")
    outcome = state.graph.plan.rules[1]
    shown = said(state, "<fsdp>")
    assert "It brings 2 names and 1 rule." in shown
    assert f"{outcome.rule.text}: {len(outcome.decided):,} values" in shown


def test_undecided_says_of_how_many_values() -> None:
    state = state_of("save mm\nundecided -> recompute\n", "tutorial.graph")
    facts = state.graph.facts
    values = sum(facts.owners[row] == row for row in facts.forward) - len(facts.by_target["aten.mm.default"])
    always = sum(d is not None and d.why.value == "always" for d in state.graph.plan.decisions)
    assert f"No rule decides {values - always:,} values" in said(state, "undecided")


# --- names ---
@pytest.mark.parametrize(("graph", "operator"), [("tutorial.graph", "mm"), ("vit.graph", "addmm")])
def test_an_operator_is_counted_as_the_graph_has_it(graph: str, operator: str) -> None:
    facts = snapshot(graph)
    target = f"aten.{operator}.default"
    counts = Counter(phase for phase, each in zip(facts.phases, facts.targets, strict=True) if each == target)
    shown = said(state_of(f"save {operator}\n", graph), operator)
    assert f"{counts[Phase.FORWARD]:,} nodes of the forward" in shown
    backward = counts[Phase.BACKWARD]
    assert ("of the backward" in shown) is bool(backward)
    assert not backward or f"{backward:,} nodes of the backward" in shown
    flops = sum(facts.flops[row] for row in facts.by_target[target])
    assert f"{format_quantity(flops, 'flops')} in all" in shown
    assert f"Overloads: aten.{operator}.default" in shown
    assert "In the groups matmul and compute." in shown


def test_an_operator_is_explained_without_a_graph() -> None:
    shown = said(state_of("save mm\nsave aten.t\nsave bernoulli\n"), "mm")
    assert "nodes" not in shown
    assert "linear" in shown


def test_a_name_is_shown_with_its_definition_and_comment() -> None:
    text = "# What is wide.\n# Two lines of it.\nlet wide = mm where bytes > 1 KiB\n"
    text += "let other = bmm  # behind\nsave wide, other\n"
    state = state_of(text, "tutorial.graph")
    shown = said(state, "save wide", 5)
    assert shown.startswith("let wide = mm where bytes > 1 KiB\n\nWhat is wide. Two lines of it.")
    assert "29 nodes of the forward" in shown
    assert "behind" in said(state, "other\n")
    assert said(state, "let wide", 4).startswith("let wide")


def test_a_name_that_only_scheduling_lines_use_counts_collectives() -> None:
    text = "let scatters = reduce_scatter\ndelay scatters 1 block\n"
    state = state_of(text, "fsdp.graph")
    order = state.graph.order
    assert f"pick {len(order.lines[0].matched)} collectives" in said(state, "scatters")


def test_names_of_a_text_with_errors_are_still_explained() -> None:
    state = state_of("let wide = mm\nsave wide\nsave matmul\nsave mm where\n", "tutorial.graph")
    assert state.graph is None
    assert said(state, "save wide", 5).startswith("let wide = mm")
    assert "29 nodes" in said(state, "matmul")
    shown = said(state, "save mm where")
    assert "Save what the nodes compute for the backward" in shown
    assert shown.count("For example") == 1


# --- predicates, places, words ---
def test_a_predicate_says_how_many_nodes_pass() -> None:
    facts = snapshot("tutorial.graph")
    mms = facts.by_target["aten.mm.default"]
    large = sum(facts.bytes[row] > 512 * 1024 for row in mms)
    state = state_of("save mm where bytes > 512 KiB and not is view\n", "tutorial.graph")
    assert f"holds of {large} of the 29 forward nodes of mm" in said(state, "bytes")
    assert covered(state, "bytes", 6) == "bytes > 512 KiB"
    assert "bytes of all tensors" in said(state, ">")
    shown = said(state, "is view", 3)
    assert shown.startswith("is view: Its results are views")
    assert "holds of 0 of the 29" in shown


@pytest.mark.parametrize(
    ("text", "skip", "shown", "of"),
    [
        ("save mm where bytes > 1 GiB", 24, "1 GiB = 1,073,741,824 bytes", "1 GiB"),
        ("save mm where bytes > 2.5GB", 22, "2.5 GB = 2,500,000,000 bytes", "2.5GB"),
        ("save mm where flops > 2 GFLOP", 22, "2 GFLOP = 2,000,000,000 operations", "2 GFLOP"),
        ("device h100-sxm; save mm where time > 400 us", 42, "400 us = 0.0004 s", "400 us"),
        ("expect recomputed flops <= 20%", 29, "20% = 0.2 of the whole", "20%"),
    ],
)
def test_a_unit_is_shown_in_base_units(text: str, skip: int, shown: str, of: str) -> None:
    state = state_of(text)
    assert shown in said(state, text, skip)
    assert covered(state, text, skip) == of


def test_a_module_glob_says_which_modules_it_matches() -> None:
    facts = snapshot("tutorial.graph")
    shown = said(state_of("save everything in layers.*.mlp\n", "tutorial.graph"), "layers.*.mlp")
    covers = PathGlob("layers.*.mlp").covers
    nodes = sum(covers(facts.modules[row]) for row in facts.forward)
    assert f"4 modules, {nodes} forward nodes in them." in shown
    assert "- model.layers.0.mlp: " in shown
    shown = said(state_of("optional save mm in layers.*.mpl\n", "tutorial.graph"), "layers.*.mpl")
    assert "No module matches layers.*.mpl; nearest module paths: model.layers.0.mlp" in shown


@pytest.mark.parametrize(
    ("place", "blocks"),
    [
        ("block", "4 of 4 blocks: model.layers.0–3"),
        ("first 2 blocks", "2 of 4 blocks: model.layers.0–1"),
        ("last half of blocks", "2 of 4 blocks: model.layers.2–3"),
        ("every 2nd block", "2 of 4 blocks: model.layers.1, 3"),
        ("blocks 1..1", "1 of 4 blocks: model.layers.1"),
        ("3rd block", "1 of 4 blocks: model.layers.2"),
    ],
)
def test_a_place_says_which_blocks_it_means(place: str, blocks: str) -> None:
    state = state_of(f"save mm in {place}\n", "tutorial.graph")
    for word in place.split():
        assert blocks in said(state, "in " + place, 3 + place.index(word))


def test_nothing_is_said_of_comments_and_blanks() -> None:
    text = "# a comment\nsave mm  # behind\n\n   \nsave bmm ;  save mm\n"
    state = state_of(text)
    blanks = {*range(text.index("save mm")), *range(text.index("  # behind"), text.index("save bmm"))}
    for offset in (*blanks, text.index(" ;"), len(text)):
        assert hover(state, offset) is None, offset


# --- form ---
def test_markdown_for_clients_that_show_it_and_plain_text_for_others() -> None:
    state = state_of("save mm\n", "tutorial.graph")
    rich, plain = (hover(state, 0, markdown=each) for each in (True, False))
    assert rich.contents.kind is types.MarkupKind.Markdown
    assert rich.contents.value.startswith("```apl\nsave mm\n```\n")
    assert plain.contents.kind is types.MarkupKind.PlainText
    assert "`" not in plain.contents.value
    assert plain.contents.value.startswith("save mm\n")


def test_names_of_a_graph_are_no_markup() -> None:
    from policylang.editor.statements import Article, code

    article = Article().say(f"in {code('a`b``c')} and <b>*x*</b>").policy("save ```\nx")
    assert article.markdown() == "in ```a`b``c``` and \\<b\\>\\*x\\*\\</b\\>\n\n````apl\nsave ```\nx\n````"
    assert article.plain() == "in a`b``c and <b>*x*</b>\n\nsave ```\nx"


def test_ranges_count_in_utf16_and_over_both_line_ends() -> None:
    text = '# 😀\r\nsave mm in "😀.é"\r\nsave (\r\n  bmm, # 😀\r\n  mm)\r\n'
    state = state_of(text, "tutorial.graph")
    found = hover(state, text.index("bmm"))
    assert found.range == types.Range(types.Position(3, 2), types.Position(3, 5))
    whole = hover(state, text.index("save ("))
    assert whole.range == types.Range(types.Position(2, 0), types.Position(4, 5))
    place = hover(state, text.index('"😀') + 1)
    assert place.range == types.Range(types.Position(1, 11), types.Position(1, 17))


@pytest.mark.parametrize("graph", [None, *(slow(f"{name}.graph") for name in ("tutorial", "fsdp", "resnet50"))])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda path: path.stem)
def test_every_place_of_every_policy_can_be_asked(policy: Path, graph: str | None) -> None:
    text = policy.read_text(encoding="utf-8")
    state = state_of(text, graph)
    for offset in range(0, len(text) + 1, 1 if graph or len(text) < 500 else 11):
        found, positions = hover(state, offset), state.document.positions
        if found is not None:
            assert positions.offset(found.range.start) <= offset < positions.offset(found.range.end)


TEXTS = [policy.read_text(encoding="utf-8") for policy in POLICIES]


@drawn(20, 300, st.sampled_from(TEXTS), st.data())
def test_no_broken_text_raises(text: str, data: st.DataObject) -> None:
    """A stretch of a policy, cut anywhere, with characters put in anywhere."""
    start = data.draw(st.integers(0, len(text) - 1))
    piece = text[start : start + data.draw(st.integers(1, 300))]
    at = data.draw(st.integers(0, len(piece)))
    broken = (
        piece[:at]
        + data.draw(st.sampled_from(["", "(", ")", '"', "#", "\r\n", "😀", " where ", " in ", "{"]))
        + piece[at:]
    )
    state = state_of.__wrapped__(broken, "tutorial.graph")
    for offset in range(0, len(broken) + 1, 3):
        hover(state, offset, markdown=bool(offset % 2))


def test_a_text_with_errors_is_asked_twice_about_a_name_that_nothing_says(state_of):
    """What cannot be answered is not taken for what was asked next."""
    text = "let big = mm\nsave big where bytes = 3 MiB\nsave (big or mm) where bytes > 1 MiB\nsave bmm where is view\n"
    state = state_of(text, "gpt2.graph")
    broken = [hover(state, text.index(word)) for word in ("bytes = 3", "bytes > 1", "bytes > 1", "is view")]
    alone = "save bmm where is view\nsave mm where bytes = 3 MiB\n"
    assert broken[1] == broken[2]
    assert broken[3].contents == hover(state_of(alone, "gpt2.graph"), alone.index("is view")).contents


def test_nothing_of_a_graph_is_markup(tmp_path: Path) -> None:
    from policylang.editor.actions import explained_line, explained_node

    graph = hostile_graph(snapshot("tutorial.graph"), tmp_path, dtypes=False)
    text = "blocks layers.*\nsave mm in layers.0.attention\nrecompute everything in block\nexpect saved <= 1 B\n"
    state = state_of(text, str(graph), "h100-sxm")
    places = ("blocks", "layers.*", "save", "mm", "layers.0", "recompute", "everything", "block", "expect", "saved")
    shown = [said(state, each, markdown=True) for each in places]
    assert len("".join(shown)) > 2000
    shown += [explained_node(state, "*mm*"), explained_line(state, 1)]
    assert "@everyone" in "".join(shown)
    assert {raw_in(each, "hover") for each in shown} == {""}
    assert {raw_in(said(state, each), "plain") for each in places} == {""}


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
    shown = hints(state, 0, len(state.document.source.text), markdown=False)
    found = next(each for each in shown if each.label == label)
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


GATHERS = "let gathers = all_gather where from parameter\nbucket gathers per block\n"


@pytest.mark.parametrize(("text", "device"), [(ORDERED, "h100-sxm"), slow(GATHERS, None), slow(GATHERS, "h100-sxm")])
def test_scheduling_lines(text: str, device: str | None) -> None:
    found = shown(state_of(text, "fsdp.graph", device))
    order = command("plan", text, "fsdp.graph", *(["--device", device] if device else []))["order"]
    (line,) = order["lines"]
    into = f" into {sum(len(bucket['collectives']) for bucket in line['buckets'])}" if line["buckets"] else ""
    label = f"{len(line['matched'])} collectives · {len(line['moved'])} moved{into}"
    if device:
        change = order["as_planned"]["exposed_seconds"] - line["exposed_seconds_without"]
        label += f" · exposed {signed(change, 'seconds')}"
    assert found[line["text"]][0] == label
    assert text != GATHERS or found["let gathers = all_gather where from parameter"][0] == "150 collectives"


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


HINTS_KEPT = "policy mine\nrecompute everything in block  # 𝔘\n\nsave mm\nsave attention\nundecided -> save\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (HINTS_KEPT.replace("save mm", "save mmm"), {1: 1, 3: 3, 4: 4, 5: 5}),  # a mistake within a line
        (HINTS_KEPT.replace("save mm", "save mm where"), {1: 1, 3: 3, 4: 4, 5: 5}),
        (HINTS_KEPT.replace("save mm", "sa\nsave mm"), {1: 1, 4: 3, 5: 4, 6: 5}),  # in a new line
        (
            HINTS_KEPT.replace("save mm\n", "").replace("save attention", "save attentio"),
            {1: 1, 4: 5},
        ),  # of two lines, one
        (HINTS_KEPT + "sav\n", {1: 1, 3: 3, 4: 4, 5: 5}),
        (HINTS_KEPT.replace("\n", "\r\n").replace("mm", "mmm"), {1: 1, 3: 3, 4: 4, 5: 5}),
        ("}", {}),
        ("", {}),
    ],
)
def test_a_text_with_mistakes_has_the_figures_of_the_last_plan(text: str, lines: dict[int, int]) -> None:
    before = state_of(HINTS_KEPT, "tutorial.graph")
    if "\r" in text:
        before = state_of(HINTS_KEPT.replace("\n", "\r\n"), "tutorial.graph")
    was, state = by_line(before), stale(before, text)
    assert len(was) == 4
    assert by_line(state) == ({new: f"{was[old]} · stale" for new, old in lines.items()} if text else {})
    assert by_line(stale(state, text)) == by_line(state), "one edit after another"
    assert by_line(stale(state, HINTS_KEPT)) == was, "once it is mended, those of its own plan"


def test_stale_figures_stand_where_the_others_do_and_at_the_end_of_changed_lines() -> None:
    before = state_of(HINTS_KEPT, "tutorial.graph")
    state = stale(before, HINTS_KEPT.replace("save mm", "save mmm # 😀"))
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


@drawn(20, 300, st.sampled_from(TEXTS), st.integers(0, 4000), st.integers(1, 400))
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
