"""The mends of what is wrong between a policy and a graph: with each, that is wrong no more."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.api.planned_graphs import on_graph
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, Source, is_error
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import PathName
from tests.planning.order.sharded_steps import sharded_step
from tests.support.drawn import examples
from tests.support.textgraph import facts_of

GRAPH = facts_of("""
    %x = input
    %w = parameter
    %e = aten.embedding.default(%x) model.embed shape=8x8 bytes=256
    %mm = aten.mm.default(%e, %w) model.layers.0.attention.q shape=8x8 bytes=256
    %sin = aten.sin.default(%mm) model.layers.0 shape=8x8 bytes=256
    %mm_1 = aten.mm.default(%sin, %w) model.layers.1.attention.q shape=8x8 bytes=256
    %cos = aten.cos.default(%mm_1) model.layers.1 shape=8x8 bytes=256
    ---
    %b = aten.mul.Tensor(%cos, %mm_1)
    %c = aten.mul.Tensor(%b, %sin)
    %d = aten.mul.Tensor(%c, %mm)
    output(%cos, %d)
""")


def found_in(text: str, path: PathName | None = None, graph: Facts = GRAPH) -> tuple[Diagnostic, ...]:
    loaded = parse_policy(text)
    planned = () if loaded.policy is None else on_graph(loaded.policy, {"g": graph}, path, one_model=False)[1]
    return (*loaded.diagnostics, *planned)


def of(code: str, text: str, path: PathName | None = None) -> list[tuple[str, str]]:
    (found,) = (each for each in found_in(text, path) if each.code == code)
    assert found.span is not None
    return [(fix.title, fix.applied(found.span.source)) for fix in found.fixes]


OPTIONAL = "write `optional` before it"


@pytest.mark.parametrize(
    ("code", "text", "first", "last"),
    [
        ("APL301", "save bmm", OPTIONAL, "optional save bmm"),
        ("APL301", "bmm -> save", OPTIONAL, "optional bmm -> save"),
        ("APL301", "save mm in layer.*", "did you mean `model.layers.*`?", "optional save mm in layer.*"),
        ("APL301", "save linear", "write `mm`", "optional save linear"),
        ("APL301", 'save mm in "block"', "did you mean `model`?", 'optional save mm in "block"'),
        ("APL301", "override save bmm", OPTIONAL, "optional override save bmm"),
        ("APL302", "blocks h.*\nsave mm in block", "did you mean `model.layers.*`?", None),
        ("APL303", "save mm\nrecompute mm", "remove the line", "recompute mm"),
        ("APL303", "save mm\nrecompute mm, sin", "remove the line", "recompute mm, sin\nsave mm"),
        ("APL314", "must_save mm\nrecompute mm in layers.0, sin", "move it below line 2", None),
        ("APL369", "save mm in first 1% of blocks", "write `first block`", "optional save mm in first 1% of blocks"),
        ("APL379", "overlap all_gather", OPTIONAL, "optional overlap all_gather"),
        ("APL311", "collapse round_trips", OPTIONAL, "optional collapse round_trips"),
        ("APL370", "save mm\nexpect step time < 1 s", "write `device a100-sxm-80gb` above it", None),
    ],
)
def test_what_is_written(code: str, text: str, first: str, last: str | None) -> None:
    told = of(code, text)
    assert told[0][0] == first
    assert last is None or told[-1][1] == last


SMALL = facts_of("""
    %x = input
    %w = parameter
    %mm = aten.mm.default(%x, %w) fc1 shape=8x8 bytes=256
    %r = aten.add_.Tensor(%mm) fc2 writes shape=8x8 bytes=256
    %sin = aten.sin.default(%r) fc2 shape=8x8 bytes=256
    ---
    %b = aten.mul.Tensor(%sin, %r)
    output(%sin, %b)
""")


@pytest.mark.parametrize(
    ("code", "text", "told"),
    [
        ("APL302", "save everything in block", ["write `blocks fc1` above it", "write `blocks fc2` above it"]),
        ("APL302", "blocks h.*\nsave everything in block", ["did you mean `fc1`?", "did you mean `fc2`?"]),
        ("APL304", "recompute everything", ["write `save aten.add_` below it", OPTIONAL]),
        ("APL304", "undecided -> recompute", ["write `save aten.add_` below it"]),
    ],
)
def test_each_mend_of_a_model_without_numbered_layers(code: str, text: str, told: list[str]) -> None:
    (found,) = (each for each in found_in(text, graph=SMALL) if each.code == code)
    assert [fix.title for fix in found.fixes] == told
    assert "layers" not in (found.help or "")
    for fix in found.fixes:
        assert not [each for each in found_in(fix.applied(found.span.source), graph=SMALL) if is_error(each)]


def test_an_included_rule_is_there_to_be_amended(tmp_path) -> None:
    from policylang.language.loader import load_policy

    (tmp_path / "shared.apl").write_text("recompute mm\nsave cos\nrecompute cos\n")
    (tmp_path / "mine.apl").write_text('include "shared.apl"\nsave mm\nsave sin\nrecompute sin\n')
    policy = load_policy(tmp_path / "mine.apl").policy
    assert policy is not None
    found = on_graph(policy, {"g": GRAPH}, None, one_model=False)[1]
    assert [each.message.split("`")[1] for each in found if each.code == "APL303"] == ["save cos", "save sin"]


def test_a_comment_stays_with_its_line() -> None:
    text = "# on top\nsave mm  # products\nrecompute mm, sin  # both\nsave cos\n"
    removed, below = of("APL303", text)
    assert removed[1] == "# on top\nrecompute mm, sin  # both\nsave cos\n"
    assert below == ("move it below line 3", "# on top\nrecompute mm, sin  # both\nsave mm\nsave cos\n")


def test_another_action_where_a_path_cannot_offload() -> None:
    text = "offload mm up to 1 GiB per rank\nundecided -> save"
    assert of("APL306", text, "hook") == [
        ("write `save`", "save mm\nundecided -> save"),
        ("write `recompute`", "recompute mm\nundecided -> save"),
    ]


def test_lines_of_an_included_file_are_mended_together(tmp_path) -> None:
    from policylang.language.loader import load_policy

    (tmp_path / "shared.apl").write_text("save bmm\nrecompute bmm\n")
    (tmp_path / "mine.apl").write_text('include "shared.apl"\nsave mm\n')
    loaded = load_policy(tmp_path / "mine.apl")
    assert loaded.policy is not None
    (found,) = (each for each in on_graph(loaded.policy, {"g": GRAPH}, None, one_model=False)[1] if is_error(each))
    (fix,) = found.fixes
    (source,) = fix.sources
    assert (fix.title, source.name.endswith("shared.apl")) == ("write `optional` before 2 lines", True)
    assert fix.applied(source) == "optional save bmm\noptional recompute bmm\n"


def test_a_policy_that_comes_along_is_not_mended() -> None:
    found = found_in("include <fsdp>\nsave mm")
    assert [each.code for each in found if is_error(each)]
    assert all(source.name == "<policy>" for each in found for fix in each.fixes for source in fix.sources)


SELECTORS = ["mm", "sin", "everything", "bmm", "linear", "mm in layer.*", "mm in layers.0", "cos where from buffer"]
SELECTORS += ["mm in block", "first mm per block", "(mm, cos) in layers.*", "mm in last 20% of blocks", "(bmm or mm)"]
SELECTORS += ["everything where module == layer.1", "mm where from input", "mm in h.*.attention.q", "e"]
RULES = [f"{action} {each}" for each in SELECTORS for action in ("save", "recompute", "optional save", "must_save")]
OTHERS = ["undecided -> save", "blocks layers.*", "blocks h.*", "let big = mm", "expect saved <= 4 GiB", "leave mm"]
OTHERS += ["prefetch all_gather 1 block ahead", "bucket all_gather per block", "policy p", "save all_gather"]


@given(st.lists(st.sampled_from([*RULES, *OTHERS]), min_size=1, max_size=5, unique=True))
@settings(max_examples=examples(25, 100))
def test_a_mend_mends(lines: list[str]) -> None:
    hold("\n".join(lines), GRAPH)


def hold(text: str, graph: Facts) -> None:
    found = found_in(text, graph=graph)
    for each in found:
        for fix in each.fixes:
            assert each.span is not None
            after = found_in(fix.applied(Source("<policy>", text)), graph=graph)
            same = [said for said in after if (said.code, said.message) == (each.code, each.message)]
            before = [said for said in found if (said.code, said.message) == (each.code, each.message)]
            assert len(same) < len(before), (text, fix, [said.message for said in after])
            # a line that is read, or that matches something now, may be wrong in another way
            reveals = parse_policy(text).policy is None or not fix.is_choice or each.code in ("APL302", "APL370")
            assert reveals or sum(map(is_error, after)) <= sum(map(is_error, found)), (
                text,
                fix,
                [said.message for said in after],
            )


STEP = sharded_step(blocks=3)
GATHERS = ["all_gather", "reduce_scatter", "(all_gather or mm)", "collective", "all_gather in layer.1", "all_to_all"]
LINES = [f"prefetch {each} {far} ahead" for each in GATHERS for far in ("1 block", "9 blocks")]
LINES += [f"delay {each} 1 block" for each in GATHERS]
LINES += [f"bucket {each} {how}" for each in GATHERS for how in ("per block", "per 2 blocks up to 1 B", "up to 9 GiB")]
LINES += ["keep order of all_gather", "keep order of (mm or all_gather)", "blocks h.*", "save mm", "undecided -> save"]


@given(st.lists(st.sampled_from(LINES), min_size=1, max_size=3, unique=True))
@settings(max_examples=examples(12, 50))
def test_a_mend_of_a_line_that_schedules_mends(lines: list[str]) -> None:
    hold("\n".join(lines), STEP)


def test_a_line_that_names_other_operators_is_narrowed_down_to_collectives() -> None:
    def told(text: str) -> list[str]:
        found = next(each for each in found_in(text, graph=STEP) if each.code == "APL371")
        assert found.span is not None
        return [fix.applied(found.span.source) for fix in found.fixes]

    for text, better in (
        (
            "bucket everything where bytes > 0 per block",
            "bucket ((everything where bytes > 0) and collective) per block",
        ),
        ("let a = users of (mm or all_gather), all_gather\ndelay a 1 block", None),
    ):
        (mended,) = told(text)
        assert better is None or mended == better
        assert "APL371" not in [each.code for each in found_in(mended, graph=STEP)]
