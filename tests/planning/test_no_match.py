"""What is wrong between a policy and a graph: rules without a match, one cause as one error, and what mends it."""

import json
from pathlib import Path
from typing import get_args

import pytest
from attrs import evolve, fields_dict
from hypothesis import strategies as st

import policylang
from policylang.api.planned_graphs import on_graph
from policylang.errors import PolicyMatchError
from policylang.graph.blocks import Chains, blocks_of
from policylang.graph.facts import Facts, LostMarker
from policylang.language import syntax
from policylang.language.diagnostics import Diagnostic, Severity, Source, is_error, one_cause
from policylang.language.loader import load_policy, parse_policy
from policylang.language.plain_data import from_plain, to_plain
from policylang.language.syntax import Operator, Policy
from policylang.planning import statement_errors
from policylang.planning.capabilities import HALF, JOINT, PathName, capabilities_for
from policylang.planning.planner import plan
from policylang.planning.selection.no_match import nearest_paths
from policylang.planning.selection.selectors import Selections
from policylang.report.diagnostics import render_json, render_sarif, render_text
from tests.planning.strategies import only, planned, sharded_step
from tests.support.drawn import drawn
from tests.support.textgraph import facts_of

LAYERS = facts_of(
    """
    %x = input
    %embed = aten.embedding.default(%x) model.embed_tokens
    """
    + "\n".join(
        f"""
        %mm_{i} = aten.mm.default({"%embed" if i == 0 else f"%add_{i - 1}"}) model.layers.{i}.self_attn.q_proj bytes=128
        %add_{i} = aten.add.Tensor(%mm_{i}) model.layers.{i} bytes=64
        """
        for i in range(3)
    )
)


def test_the_message_names_the_rule_and_the_mend():
    found = only(planned(LAYERS, "recompute everything\nsave mm in encoder.*").diagnostics, "APL301")
    assert found.severity is Severity.ERROR
    assert found.message == "`save mm in encoder.*` matches nothing in this graph"
    assert found.help == "if that is intended, write `optional save mm in encoder.*`"
    assert (found.span.text, found.span.line) == ("mm in encoder.*", 2)


PATHS = "nearest module paths: model.layers.0"
BARE = "%x = input\n%mm = aten.mm.default(%x)"
NOTES = ("note=ap_must_save", "note=ap_must_save note=stage", "")
NOTED = "%x = input\n" + "\n".join(f"%m{i} = aten.mm.default(%x, %x) {note}" for i, note in enumerate(NOTES))
NAMED_WEIGHT = "%w = parameter model.head\n%x = input\n%y = aten.mm.default(%x, %w)"
PARTS = ("bmm: 0 nodes", "and: 0 nodes", "or: 0 nodes")


@pytest.mark.parametrize(
    ("graph", "definition", "selector", "told"),
    [
        (LAYERS, "", "mm where module == layers.*.self_attn.qproj",
         ("mm: 3 nodes", f"where module == layers.*.self_attn.qproj: 0 of them; {PATHS}.self_attn.q_proj")),
        (facts_of(BARE), "", "mm in layers.*",
         ("mm: 1 node", "in layers.*: 0 of them; no node of the graph has a module path")),
        # a name that stands for something is one part, one that stands for nothing is taken apart
        (LAYERS, "mm in layers.0", "named and bmm or bmm", ("named: 1 node", *PARTS)),
        (LAYERS, "mm in lm_head", "named and bmm or bmm",
         ("mm: 3 nodes", f"in lm_head: 0 of them; {PATHS[:21]}", "named: 0 nodes", *PARTS)),
        (LAYERS, "", "mm where annotated ap",
         ("mm: 3 nodes", "where annotated ap: 0 of them; no forward node is annotated")),
        (facts_of(NOTED), "", "mm where annotated ap", ("mm: 3 nodes",
         "where annotated ap: 0 of them; annotations of forward nodes: ap_must_save (2), stage (1)")),
        # a graph that names no parameters is told from one without gathers of them
        (LAYERS, "", "mm where from parameter",
         ("mm: 3 nodes", "where from parameter: 0 of them; no input of the graph is known to be a parameter")),
        (facts_of(NAMED_WEIGHT), "", "mm where from parameter", ("mm: 1 node", "where from parameter: 0 of them")),
        (LAYERS, "", "mm in encoder.*",
         ("mm: 3 nodes", f"in encoder.*: 0 of them; {PATHS}, model.layers, model.embed_tokens")),
        (LAYERS, "", "every 2nd (mm where bytes >= 4 KiB) per block",
         ("mm: 3 nodes", "where bytes >= 4 KiB: 0 of them", "every 2nd per block: 0 of them")),
        (LAYERS, "", "add feeding embedding", ("add: 3 nodes", "embedding: 1 node", "feeding: 0 nodes")),
        (LAYERS, "", "mm in block 5", ("mm: 3 nodes", "in block 5: 0 of them; the graph has 3 blocks")),
        (LAYERS, "", "mm in blocks 5..7", ("mm: 3 nodes", "in blocks 5..7: 0 of them; the graph has 3 blocks")),
        (LAYERS, "", "attention", ("attention: 0 nodes",)),  # a group of the prelude
    ],
)  # fmt: skip
def test_each_part_is_counted_on_its_own(graph: Facts, definition: str, selector: str, told: tuple[str, ...]):
    text = f"let named = {definition}\n" * bool(definition) + f"recompute everything; save {selector}"
    found = only(planned(graph, text).diagnostics, "APL301").details
    assert len(found) == len(told)
    for one, other in zip(found, told, strict=True):
        assert one == other or ("nearest" in other and one.startswith(other))


def test_a_misspelt_path_finds_its_neighbour_first():
    for asked, near in (
        ("layer.*", "layers.0"), ("layers.*.attn", "layers.0.self_attn"),
        ("/model.layers.7.self_attn.qproj", "layers.0.self_attn.q_proj"),
    ):  # fmt: skip
        assert nearest_paths(asked, LAYERS)[0] == f"model.{near}"
    found = only(planned(LAYERS, "blocks encoder.layer.*; recompute everything").diagnostics, "APL302")
    assert found.message == "`encoder.layer.*` matches no module path of this graph, so there are no blocks"
    assert found.help.startswith(f"name them, `blocks model.layers.*`; {PATHS}")


def test_blocks_that_are_not_there_are_said_to_be_missing():
    bare = facts_of("%x = input\n%mm = aten.mm.default(%x)")
    cause, follows = planned(bare, "recompute everything; save first mm per block").diagnostics
    assert follows.details == ("mm: 1 node", "first per block: 0 of them; the graph has no blocks")
    found = only(one_cause((cause, follows)), "APL302")
    assert found.message == "no blocks were found in this graph"
    assert [(each.message, each.span) for each in found.related] == [
        ("from it follows: `save first mm per block` matches nothing in this graph", follows.span)
    ]


def test_an_optional_rule_may_match_nothing():
    made = planned(LAYERS, "recompute everything; optional save bmm")
    assert made.diagnostics == ()
    assert made.rules[1].matched == ()


def test_a_rule_that_is_wholly_overridden_is_a_warning_that_names_who_did_it():
    made = planned(LAYERS, "save mm\nrecompute mm in layers.0\nsave everything")
    first, second = made.diagnostics
    assert (first.code, first.severity) == ("APL303", Severity.WARNING)
    assert first.message == "`save mm` decides nothing: other rules override all 3 nodes it matches"
    assert [related.message for related in first.related] == ["`save everything` overrides 3"]
    assert first.related[0].span.line == 3
    said = "`recompute mm in layers.0` decides nothing: other rules override the only node it matches"
    assert second.message == said


def test_what_the_users_checkpoint_kept_is_not_said_to_be_taken_over():
    facts = facts_of("%x = input\n%a = aten.mm.default(%x) tag=PREFER_RECOMPUTE\n%b = aten.mm.default(%a)")
    made = planned(facts, "save mm; recompute everything")
    found = only(made.diagnostics, "APL303")
    overridden = "`save mm` decides nothing: other rules override 1 of the 2 nodes it matches"
    assert found.message == f"{overridden}, and the model's own checkpoint has tagged 1"


def test_a_graph_that_knows_no_parameters_is_told_which_gathers_it_has():
    """As in a recorded graph, whose inputs are all taken for the user's."""
    gather = "_c10d_functional.all_gather_into_tensor.default(%w) group=dp:2 collective"
    facts = facts_of(f"%w = input\n%a = {gather}\n%b = _c10d_functional.wait_tensor.default(%a)\noutput(%b)")
    for line in ("save all_gather where from parameter", "prefetch (all_gather where gathered buffer) 1 block ahead"):
        found = only(plan(parse_policy(line).policy, facts, HALF).diagnostics, "APL301")
        instead = "from input" if "from" in line else "gathered input"
        said = f"in a graph that does not mark its inputs, `{instead}` selects 1; if that is intended"
        assert found.help.startswith(said)
        instead = line.replace("from parameter", instead).replace("gathered buffer", instead)
        assert "APL301" not in [each.code for each in plan(parse_policy(instead).policy, facts, HALF).diagnostics]
    nobody = facts_of("%x = input\n%y = aten.mm.default(%x, %x)\noutput(%y)")
    only_of = plan(parse_policy("save wait where from parameter").policy, nobody, HALF).diagnostics
    assert "from input" not in only(only_of, "APL301").help


BLOCK = """
    %x = input
    %mm = aten.mm.default(%x) mlp.up
    %sin = aten.sin.default(%mm) mlp
    %add = aten.add.Tensor(%sin, %mm)
    %tangent = tangent
    %back = aten.mul.Tensor(%mm, %sin, %add, %tangent) backward
    %out = output(%sin, %add, %back)
"""
"""A block that was compiled by itself: its paths begin inside it."""
HEAD = """
    %x = input
    %exp = aten.exp.default(%x) head
    %tangent = tangent
    %back = aten.mul.Tensor(%exp, %tangent) backward
"""
NAMED = "blocks layers.*\n"
DEPENDENT = """recompute everything in block
save first mm per block
save everything in block where crosses block
save sin where module == layers.*.mlp and crosses block
"""


def policy_of(text: str) -> Policy:
    policy = parse_policy(text).policy
    assert policy is not None
    return policy


def errors(text: str, graph: str = BLOCK) -> tuple[Diagnostic, ...]:
    made = plan(policy_of(text), facts_of(graph), JOINT)
    return PolicyMatchError([each for each in made.diagnostics if is_error(each)]).diagnostics


@pytest.mark.parametrize("blocks", [NAMED, ""])
def test_without_blocks_all_that_needs_them_is_one_error(blocks: str) -> None:
    (error,) = errors(blocks + DEPENDENT)
    assert error.code == "APL302"
    notes = [each.message for each in error.related]
    rules = DEPENDENT.splitlines()
    assert notes == [f"from it follows: `{rule}` matches nothing in this graph" for rule in rules]
    assert [each.span.text for each in error.related if each.span is not None][1] == "first mm per block"


def test_an_error_of_blocks_is_one_where_they_are_named_or_would_help_a_rule() -> None:
    cause, own = errors(f"{NAMED}recompute everything in block\nsave bmm in block")
    assert (cause.code, len(cause.related)) == ("APL302", 1)
    assert (own.code, own.details[0]) == ("APL301", "bmm: 0 nodes")
    (named,) = errors(f"{NAMED}recompute everything")
    assert (named.code, named.related) == ("APL302", ())
    (error,) = errors("recompute everything\nsave bmm in block")
    assert error.code == "APL301"


@pytest.mark.parametrize("text", ["expect exactly 1 mm per block", "expect saved per block <= 1 MiB"])
def test_an_expectation_per_block_follows_as_well(text: str) -> None:
    (error,) = errors(f"{NAMED}recompute everything\n{text}")
    assert error.code == "APL302"
    (follows,) = error.related
    assert follows.message == f"from it follows: `{text}` does not hold: the graph has no blocks"


def test_over_several_graphs_the_cause_is_that_of_any() -> None:
    """The head lacks what the rules name; in the block they would match."""
    policy = policy_of(NAMED + DEPENDENT)
    found = []
    for name, graph in (("block", BLOCK), ("head", HEAD)):
        made = plan(policy, facts_of(graph), JOINT)
        kept = [json.dumps(to_plain(each)) for each in statement_errors.complaints(policy, made.diagnostics)]
        found.append((name, [from_plain(statement_errors.Complaint, json.loads(each)) for each in kept]))
    (error,) = statement_errors.shared_by_all(policy, found, root="")
    assert error.code == "APL302"
    assert len(error.related) == len(DEPENDENT.splitlines())
    assert "any of the 2 graphs" in error.message
    assert "policylang.checkpoint_model" in str(error.help)
    (sharded,) = statement_errors.shared_by_all(policy, found, root="", sharded=True)
    assert "`fully_shard`" in sharded.details[0]
    assert "docs/setups.md#fsdp2-with-compiled-blocks" in str(sharded.help)


def gathered(blocks: int) -> str:
    gather = "_c10d_functional.all_gather_into_tensor.default"
    lines = ["%x0 = input", *(f"%w{n} = parameter" for n in range(blocks))]
    for n in range(blocks):
        lines += [
            f"%gather{n} = {gather}(%w{n}) layers.{n} collective group=dp:4 bytes=8",
            f"%wait{n} = _c10d_functional.wait_tensor.default(%gather{n}) layers.{n} bytes=8",
            f"%x{n + 1} = aten.mm.default(%x{n}, %wait{n}) layers.{n} bytes=8",
        ]
    last = f"%x{blocks}"
    back = f"%back = aten.mul.Tensor({last}, %tangent) backward"
    return "\n".join([*lines, "%tangent = tangent", back, f"%out = output({last}, %back)"])


def test_a_scheduling_line_has_to_find_something_in_one_of_the_graphs() -> None:
    """Whatever each of them lacks: one has no collective, another two blocks in which nothing can start earlier."""
    policy = policy_of("blocks layers.*\nprefetch all_gather 1 block ahead")

    def codes(*graphs: str) -> list[tuple[str, str]]:
        found = []
        for graph in graphs:
            made = plan(policy, facts_of(graph), JOINT)
            errors = [each for each in made.diagnostics if is_error(each)]
            assert {each.code for each in errors} <= {*statement_errors.DEFERRED_CODES, "APL302"}
            found.append((graph[:8], statement_errors.complaints(policy, errors)))
        shared = statement_errors.shared_by_all(policy, found, root="layers.0")
        return [(each.code, each.span.text if each.span else "") for each in shared]

    line = "prefetch all_gather 1 block ahead"
    assert codes(gathered(2)) == codes(gathered(2), gathered(0)) == []
    assert codes(gathered(0)) == codes(gathered(0), gathered(0)) == [("APL302", "blocks layers.*"), ("APL379", line)]
    assert [code for code, _ in codes(gathered(1), gathered(0))] == ["APL373"]


def test_lines_of_an_included_file_that_lack_one_thing_are_one_error_at_the_include(tmp_path: Path) -> None:
    (tmp_path / "inner.apl").write_text("recompute mm in decoder.*\nsave sin in decoder.*\nsave bmm\nsave conv2d\n")
    (tmp_path / "outer.apl").write_text('save add\ninclude "inner.apl"\n')
    policy = load_policy(tmp_path / "outer.apl").policy
    made = plan(policy, facts_of(BLOCK), JOINT)
    found = PolicyMatchError([each for each in made.diagnostics if is_error(each)]).diagnostics
    both, *own = found
    assert both.message == '`include "inner.apl"` matches nothing in this graph: 0 nodes are `in decoder.*`'
    assert both.span.source.name.endswith("outer.apl")
    assert [each.span.line for each in both.related if each.span is not None] == [1, 2]
    said = "`save {}` matches nothing in this graph"
    assert [each.message for each in own] == [said.format(name) for name in ("bmm", "conv2d")]
    assert [each.related[-1].message for each in own] == ["included from here"] * 2


def test_every_form_shows_the_notes() -> None:
    found = errors(NAMED + DEPENDENT)
    text = render_text(found)
    assert text.count("error[") == 1
    assert "= note: from it follows: `save first mm per block` matches nothing in this graph (<policy>:3)" in text
    (as_json,) = json.loads(render_json(found))["diagnostics"]
    assert [each["location"]["start"]["line"] for each in as_json["related"]] == [2, 3, 4, 5]
    (result,) = json.loads(render_sarif(found))["runs"][0]["results"]
    assert result["ruleId"] == "APL302"
    assert result["message"]["text"].count("from it follows") == len(DEPENDENT.splitlines())


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


def of(code: str, text: str, path: PathName | None = None, graph: Facts = GRAPH) -> list[tuple[str, str]]:
    (found,) = (each for each in found_in(text, path, graph) if each.code == code)
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
    (tmp_path / "shared.apl").write_text("recompute mm\nsave cos\nrecompute cos\n")
    (tmp_path / "mine.apl").write_text('include "shared.apl"\nsave mm\nsave sin\nrecompute sin\n')
    policy = load_policy(tmp_path / "mine.apl").policy
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
    (tmp_path / "shared.apl").write_text("save bmm\nrecompute bmm\n")
    (tmp_path / "mine.apl").write_text('include "shared.apl"\nsave mm\n')
    loaded = load_policy(tmp_path / "mine.apl")
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


@drawn(25, 100, st.lists(st.sampled_from([*RULES, *OTHERS]), min_size=1, max_size=5, unique=True))
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
            told = (text, fix, [said.message for said in after])
            assert len(same) < len(before), told
            # a line that is read, or that matches something now, may be wrong in another way
            reveals = parse_policy(text).policy is None or not fix.is_choice or each.code in ("APL302", "APL370")
            assert reveals or sum(map(is_error, after)) <= sum(map(is_error, found)), told


STEP = sharded_step(blocks=3)
GATHERS = ["all_gather", "reduce_scatter", "(all_gather or mm)", "collective", "all_gather in layer.1", "all_to_all"]
LINES = [f"prefetch {each} {far} ahead" for each in GATHERS for far in ("1 block", "9 blocks")]
LINES += [f"delay {each} 1 block" for each in GATHERS]
LINES += [f"bucket {each} {how}" for each in GATHERS for how in ("per block", "per 2 blocks up to 1 B", "up to 9 GiB")]
LINES += ["keep order of all_gather", "keep order of (mm or all_gather)", "blocks h.*", "save mm", "undecided -> save"]


@drawn(12, 50, st.lists(st.sampled_from(LINES), min_size=1, max_size=3, unique=True))
def test_a_mend_of_a_line_that_schedules_mends(lines: list[str]) -> None:
    hold("\n".join(lines), STEP)


def test_a_line_that_names_other_operators_is_narrowed_down_to_collectives() -> None:
    large = "everything where bytes > 0"
    for text, better in (
        (f"bucket {large} per block", f"bucket (({large}) and collective) per block"),
        ("let a = users of (mm or all_gather), all_gather\ndelay a 1 block", None),
    ):
        ((_, mended),) = of("APL371", text, graph=STEP)
        assert better is None or mended == better
        assert "APL371" not in [each.code for each in found_in(mended, graph=STEP)]


UNANSWERABLE_GATHERS = """
%x = input bytes=64
%w0 = parameter bytes=64
%w1 = parameter bytes=64
%g0 = _c10d_functional.all_gather_into_tensor.default(%w0) layers.0 collective group=dp:4 bytes=256
%t0 = _c10d_functional.wait_tensor.default(%g0) layers.0 bytes=256
%m0 = aten.mm.default(%x, %t0) layers.0 compute bytes=64
%g1 = _c10d_functional.all_gather_into_tensor.default(%w1) layers.1 collective group=dp:4 bytes=256
%t1 = _c10d_functional.wait_tensor.default(%g1) layers.1 bytes=256
%m1 = aten.mm.default(%m0, %t1) layers.1 compute bytes=64
---
%b = aten.mul.Tensor(%m1, %m0) bytes=64
output(%m1, %b)
"""
LACKING = evolve(facts_of(UNANSWERABLE_GATHERS), annotations=(), uncounted=(), data_sizes=())


@pytest.mark.parametrize(
    "text",
    [
        "save mm where annotated ap_must_save",
        "optional save mm where annotated ap_must_save",
        "save mm where not annotated ap_must_save",
        "save mm where is view or annotated ap_must_save",
        "let noted = mm where annotated ap_must_save\nundecided -> save\nexpect every noted saved",
    ],
)
def test_what_a_file_cannot_answer_is_refused_by_name(text: str) -> None:
    found = plan(policylang.parse(text), LACKING, capabilities_for(LACKING.kind)).diagnostics
    (refused,) = [each for each in found if each.code == "APL358"]
    said = "`annotated ap_must_save` cannot be evaluated: an older policylang wrote the snapshot"
    assert refused.message.startswith(said)
    assert refused.span.text == "annotated ap_must_save"


UNANSWERABLE_LINES: dict[type, str] = {
    syntax.Rule: "save {}", syntax.Let: "let picked = {}\noptional save picked",
    syntax.Bucket: "optional bucket ({}) per block", syntax.Prefetch: "optional prefetch ({}) 1 block ahead",
    syntax.Delay: "optional delay ({}) 1 block", syntax.Overlap: "device h100-sxm\noptional overlap ({})",
    syntax.KeepOrder: "optional keep order of ({})", syntax.ExpectCount: "expect at most 9 ({})",
    syntax.ExpectFate: "expect no ({}) recomputed",
}  # fmt: skip
ASKED = {
    "APL358": "all_gather where not annotated a",
    "APL310": "all_gather where not recorded saved",
    "APL370": "all_gather where not time >= 1 s",
    "APL369": "all_gather in first 20% of blocks",
}


def test_the_kinds_of_statements_below_are_all_that_pick_nodes() -> None:
    assert set(UNANSWERABLE_LINES) == {kind for kind in get_args(syntax.Statement) if "selector" in fields_dict(kind)}


@pytest.mark.parametrize("code", ASKED)
@pytest.mark.parametrize("kind", UNANSWERABLE_LINES, ids=lambda kind: kind.__name__)
def test_what_a_graph_cannot_answer_is_refused_in_every_statement(kind: type, code: str) -> None:
    line = UNANSWERABLE_LINES[kind].format(ASKED[code])
    if code == "APL370":
        line = line.removeprefix("device h100-sxm\n")
    if code == "APL369":
        line = line.replace("optional ", "")
    marker = LostMarker("value 1 of 1", "it is gone")
    facts = evolve(LACKING, lost_records=(marker,))
    text = f"blocks layers.*\n{line}\nundecided -> save"
    found = plan(policylang.parse(text), facts, capabilities_for(facts.kind)).diagnostics
    codes = [each.code for each in found]
    assert codes.count(code) == 1
    assert "APL301" not in codes or code != "APL369", "one mistake is one error"


@pytest.mark.filterwarnings("ignore:.*is never used")
def test_what_nothing_asks_for_is_not_missed() -> None:
    policy = policylang.parse("let noted = mm where annotated ap_must_save\nsave mm")
    made = plan(policy, LACKING, capabilities_for(LACKING.kind))
    assert not [each for each in made.diagnostics if each.code == "APL358"]


SELECTED = "%x = input\n%a = aten.mm.default(%x, %x)\n%b = aten.add.Tensor(%a, %x)\noutput(%b)"


def test_a_selector_that_raises_leaves_the_others_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor asks the same selections of one selector after the other, some with words that nobody looked up."""
    facts = facts_of(SELECTED)
    selections = Selections(facts, {}, blocks_of(facts), Chains(facts))
    broken, mm, add = (Operator(None, name, None) for name in ("broken", "mm", "add"))
    evaluate = Selections.evaluate

    def fails(self: Selections, node: object, parts: list[list[int]]) -> list[int]:
        if node is broken:
            raise TypeError
        return evaluate(self, node, parts)

    monkeypatch.setattr(Selections, "evaluate", fails)
    for _ in range(2):
        with pytest.raises(TypeError):
            selections.rows(broken)
        assert [facts.names[row] for row in selections.rows(mm)] == ["a"]
        assert [facts.names[row] for row in selections.rows(add)] == ["b"]
