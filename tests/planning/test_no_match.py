"""A rule that matches nothing, and what is said of it."""

from __future__ import annotations

import pytest

from policylang.language.diagnostics import Severity, one_cause
from policylang.language.loader import parse_policy
from policylang.language.selectors import nth
from policylang.planning.capabilities import HALF
from policylang.planning.planner import plan
from policylang.planning.selection.no_match import nearest_paths
from tests.planning.sentences import only, planned
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


def details(selector: str) -> tuple[str, ...]:
    return only(planned(LAYERS, f"recompute everything; save {selector}").diagnostics, "APL301").details


def test_the_message_names_the_rule_and_the_mend():
    found = only(planned(LAYERS, "recompute everything\nsave mm in encoder.*").diagnostics, "APL301")
    assert found.severity is Severity.ERROR
    assert found.message == "`save mm in encoder.*` matches nothing in this graph"
    assert found.help == "if that is intended, write `optional save mm in encoder.*`"
    assert (found.span.text, found.span.line) == ("mm in encoder.*", 2)


@pytest.mark.parametrize(
    ("selector", "told"),
    [
        (
            "mm in encoder.*",
            "mm: 3 nodes\n"
            "in encoder.*: 0 of them; nearest module paths: model.layers.0, model.layers, model.embed_tokens",
        ),
        (
            "every 2nd (mm where bytes >= 4 KiB) per block",
            "mm: 3 nodes\nwhere bytes >= 4 KiB: 0 of them\nevery 2nd per block: 0 of them",
        ),
        ("add feeding embedding", "add: 3 nodes\nembedding: 1 node\nfeeding: 0 nodes"),
        ("mm in blocks 5..7", "mm: 3 nodes\nin blocks 5..7: 0 of them; the graph has 3 blocks"),
        ("attention", "attention: 0 nodes"),  # a group of the prelude
    ],
)
def test_each_part_is_counted_on_its_own(selector: str, told: str):
    assert details(selector) == tuple(told.splitlines())


def test_a_misspelt_path_finds_its_neighbour_first():
    assert nearest_paths("layer.*", LAYERS)[0] == "model.layers.0"
    assert nearest_paths("layers.*.attn", LAYERS)[0] == "model.layers.0.self_attn"
    assert nearest_paths("/model.layers.7.self_attn.qproj", LAYERS)[0] == "model.layers.0.self_attn.q_proj"


def test_a_module_that_is_compared_with_finds_its_neighbours_too():
    text = "module == layers.*.self_attn.qproj"
    line = details(f"mm where {text}")[1]
    assert line.startswith(f"where {text}: 0 of them; nearest module paths: model.layers.0.self_attn.q_proj")


def test_blocks_that_are_not_there_are_said_to_be_missing():
    bare = facts_of("%x = input\n%mm = aten.mm.default(%x)")
    cause, follows = planned(bare, "recompute everything; save first mm per block").diagnostics
    assert follows.details == ("mm: 1 node", "first per block: 0 of them; the graph has no blocks")
    found = only(one_cause((cause, follows)), "APL302")
    assert found.message == "no blocks were found in this graph"
    assert [(each.message, each.span) for each in found.related] == [
        ("from it follows: `save first mm per block` matches nothing in this graph", follows.span)
    ]


def unmatched(definition: str) -> tuple[str, ...]:
    rules = f"let projection = {definition}; recompute everything; save projection and bmm or bmm"
    return only(planned(LAYERS, rules).diagnostics, "APL301").details


def test_a_name_that_stands_for_something_is_one_part():
    assert unmatched("mm in layers.0") == ("projection: 1 node", "bmm: 0 nodes", "and: 0 nodes", "or: 0 nodes")


def test_a_name_that_stands_for_nothing_is_taken_apart():
    found = unmatched("mm in lm_head")
    assert found[0] == "mm: 3 nodes"
    assert found[1].startswith("in lm_head: 0 of them; nearest module paths: ")
    assert found[2:] == ("projection: 0 nodes", "bmm: 0 nodes", "and: 0 nodes", "or: 0 nodes")


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
    assert second.message == (
        "`recompute mm in layers.0` decides nothing: other rules override the only node it matches"
    )


def test_what_the_users_checkpoint_kept_is_not_said_to_be_taken_over():
    facts = facts_of("%x = input\n%a = aten.mm.default(%x) tag=PREFER_RECOMPUTE\n%b = aten.mm.default(%a)")
    made = planned(facts, "save mm; recompute everything")
    found = only(made.diagnostics, "APL303")
    assert found.message == (
        "`save mm` decides nothing: other rules override 1 of the 2 nodes it matches, "
        "and the model's own checkpoint has tagged 1"
    )


def test_a_blocks_glob_that_matches_no_module_is_an_error():
    found = only(planned(LAYERS, "blocks encoder.layer.*; recompute everything").diagnostics, "APL302")
    assert found.message == "`encoder.layer.*` matches no module path of this graph, so there are no blocks"
    assert found.help.startswith("name them, `blocks model.layers.*`; nearest module paths: model.layers.0")


def test_a_graph_without_module_paths_says_so():
    bare = facts_of("%x = input\n%mm = aten.mm.default(%x)")
    found = only(planned(bare, "save mm in layers.*").diagnostics, "APL301")
    assert found.details[-1] == "in layers.*: 0 of them; no node of the graph has a module path"


def test_ordinals_are_written_as_they_are_said():
    assert [nth(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th"]
    )


def test_an_annotation_that_nobody_made_is_told_which_there_are():
    asked = "mm where annotated ap_must_sav"
    lines = "%x = input\n" + "\n".join(f"%m{i} = aten.mm.default(%x, %x) {note}" for i, note in enumerate(NOTES))
    found = only(planned(facts_of(lines), f"recompute everything; save {asked}").diagnostics, "APL301")
    assert found.details == (
        "mm: 3 nodes",
        "where annotated ap_must_sav: 0 of them; annotations of forward nodes: ap_must_save (2), stage (1)",
    )
    assert details(asked)[1] == "where annotated ap_must_sav: 0 of them; no forward node is annotated"


NOTES = ("note=ap_must_save", "note=ap_must_save note=stage", "")


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


def test_a_graph_that_names_no_parameters_is_told_from_one_without_gathers_of_them():
    gathered = "mm where from parameter"
    assert details(gathered) == (
        "mm: 3 nodes",
        "where from parameter: 0 of them; no input of the graph is known to be a parameter",
    )
    named = facts_of("%w = parameter model.head\n%x = input\n%y = aten.mm.default(%x, %w)")
    found = only(planned(named, f"recompute everything; save {gathered}").diagnostics, "APL301")
    assert found.details == ("mm: 1 node", "where from parameter: 0 of them")
