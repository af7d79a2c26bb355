"""Rules in order, the user's own tags, what always holds."""

from __future__ import annotations

from policylang.language.diagnostics import Severity
from policylang.language.syntax import Action
from policylang.planning.capabilities import Capabilities
from policylang.planning.value_outcome import Why
from tests.planning.sentences import actions, names, only, planned
from tests.support.textgraph import facts_of

NO_REPLAY = Capabilities("a flat graph", undecided="auto")

TWO_LAYERS = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) model.layers.0.attn bytes=128 flops=1024
    %sin = aten.sin.default(%mm) model.layers.0.attn bytes=128
    %mm_1 = aten.mm.default(%sin, %w) model.layers.1.attn bytes=128 flops=1024
    ---
    %t = tangent
    %mul = aten.mul.Tensor(%t, %sin)
    %mul_1 = aten.mul.Tensor(%mul, %mm_1)
    output(%mm_1, %mul_1)
"""


def test_the_last_rule_that_matches_decides():
    made = planned(facts_of(TWO_LAYERS), "recompute everything; save mm; recompute mm in layers.1")
    assert actions(made) == {"mm": "save", "sin": "recompute", "mm_1": "recompute"}
    first, second, third = made.rules
    assert names(made.facts, first.matched) == ["mm", "sin", "mm_1"]
    assert names(made.facts, first.decided) == ["sin"]
    assert first.overridden_by == {1: 1, 2: 1}
    assert names(made.facts, second.decided) == ["mm"]
    assert second.overridden_by == {2: 1}
    assert names(made.facts, third.decided) == ["mm_1"]
    assert made.diagnostics == ()


def test_a_decision_on_a_follower_is_a_decision_on_its_owner():
    facts = facts_of("""
        %x = input
        %norm = aten.native_layer_norm.default(%x) multi_output
        %out = builtin.getitem(%norm)
        %mean = builtin.getitem(%norm)
        %gather = _c10d_functional.all_gather_into_tensor.default(%out) collective group=dp:4
        %wait = _c10d_functional.wait_tensor.default(%gather)
        ---
        %b = aten.mul.Tensor(%wait, %mean)
        output(%wait, %b)
    """)
    made = planned(facts, "recompute everything; save wait_tensor; save builtin.getitem")
    assert set(actions(made).values()) == {"save"}
    assert names(facts, made.rules[1].matched) == ["gather"]
    assert names(facts, made.rules[2].matched) == ["norm"]


# --- the user's own checkpoint -------------------------------------------------------------------------------------

CHECKPOINTED = """
    %x = input
    %a = aten.sin.default(%x) region=0 tag=PREFER_RECOMPUTE
    %b = aten.cos.default(%a) region=0 tag=PREFER_RECOMPUTE
    %c = aten.sin.default(%b) region=1 tag=PREFER_RECOMPUTE
    %d = aten.mm.default(%c) region=1 tag=MUST_SAVE
    %e = aten.sin.default(%d)
    ---
    %f = aten.mul.Tensor(%a, %b, %c, %d, %e)
    output(%e, %f)
"""


def test_the_users_tags_stay_and_are_counted():
    made = planned(facts_of(CHECKPOINTED), "save sin")
    assert actions(made) == {"a": "recompute", "b": "save", "c": "recompute", "d": "save", "e": "save"}
    assert made.rules[0].kept_by_user == 2
    assert names(made.facts, made.rules[0].decided) == ["e"]
    assert made.decisions[1].why is Why.USER


def test_a_value_at_the_border_of_two_regions_is_saved():
    made = planned(facts_of(CHECKPOINTED), "save sin")
    border = made.decisions[made.facts.index["b"]]
    assert (border.action, border.why) == (Action.SAVE, Why.USER)
    assert border.reason == "the user's next checkpoint region reads it"


def test_override_changes_what_the_user_tagged_and_no_later_plain_rule_takes_it_back():
    made = planned(facts_of(CHECKPOINTED), "override save sin; recompute everything")
    assert actions(made) == {"a": "save", "b": "save", "c": "save", "d": "save", "e": "recompute"}
    everything_rule = made.rules[1]
    assert everything_rule.overridden_by == {0: 2}
    assert everything_rule.kept_by_user == 2


def test_a_rule_that_only_meets_the_users_tags_is_a_warning():
    made = planned(facts_of(CHECKPOINTED), "save cos")
    found = only(made.diagnostics, "APL307")
    assert found.severity is Severity.WARNING
    assert found.message == "`save cos` decides nothing: the model's own checkpoint has tagged the only node it matches"
    assert found.help == "write `override save cos` to change them"


# --- what always holds ---------------------------------------------------------------------------------------------

RANDOM = """
    %x = input
    %drop = aten.native_dropout.default(%x) model.layers.0 random multi_output
    %out = builtin.getitem(%drop) model.layers.0
    %mask = builtin.getitem(%drop) model.layers.0
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t, %mask)
    output(%out, %b)
"""


def test_a_random_value_is_recomputed_only_where_it_can_be_replayed():
    assert planned(facts_of(RANDOM), "recompute everything").diagnostics == ()
    made = planned(facts_of(RANDOM), "recompute everything", NO_REPLAY)
    found = only(made.diagnostics, "APL304")
    assert found.severity is Severity.ERROR
    assert found.message == (
        "`recompute everything` cannot recompute `drop`: it draws random numbers, and a flat graph cannot replay them"
    )
    assert found.details == (
        "drop (aten.native_dropout.default) in model.layers.0: "
        "it draws random numbers, and a flat graph cannot replay them",
    )
    assert found.span.text == "recompute everything"
    assert found.help == (
        "save these values with a later rule, or write `optional recompute everything` to have them saved"
    )


def test_an_optional_rule_saves_what_it_cannot_recompute():
    made = planned(facts_of(RANDOM), "optional recompute everything", NO_REPLAY)
    assert made.diagnostics == ()
    for name in ("drop", "out", "mask"):
        decision = made.decisions[made.facts.index[name]]
        assert (decision.action, decision.rule, decision.why) == (Action.SAVE, 0, Why.UNSAFE)
    assert decision.reason == "it draws random numbers, and a flat graph cannot replay them"


def test_a_value_that_the_backward_does_not_need_may_be_as_unsafe_as_it_likes():
    facts = facts_of("""
        %x = input
        %counter = buffer
        %add = aten.add_.Tensor(%counter) writes
        %sin = aten.sin.default(%x)
        ---
        %b = aten.mul.Tensor(%sin)
        output(%sin, %b)
    """)
    assert planned(facts, "recompute everything").diagnostics == ()


def test_every_reason_not_to_recompute_is_given():
    reasons = {
        "writes": "it writes to one of its arguments, and recomputation would write twice",
        "effectful": "it has an effect beyond its result, and recomputation would repeat it",
        "reads_mutated": ("it reads memory that the graph changes, and recomputation would read other content"),
    }
    for flag, reason in reasons.items():
        facts = facts_of(f"""
            %x = input
            %sin = aten.sin.default(%x) {flag}
            ---
            %b = aten.mul.Tensor(%sin)
            output(%sin, %b)
        """)
        found = only(planned(facts, "recompute everything").diagnostics, "APL304")
        assert found.message == f"`recompute everything` cannot recompute `sin`: {reason}"


def test_undecided_recompute_meets_the_same_objection():
    made = planned(facts_of(RANDOM), "undecided -> recompute", NO_REPLAY)
    found = only(made.diagnostics, "APL304")
    assert found.message.startswith("`undecided -> recompute` cannot recompute `drop`: it draws random numbers")
    assert found.help == "save these values with a rule"


def test_the_users_own_recomputation_is_saved_where_it_would_be_wrong():
    facts = facts_of("""
        %x = input
        %rand = aten.bernoulli.p(%x) random region=0 tag=PREFER_RECOMPUTE
        ---
        %b = aten.mul.Tensor(%rand)
        output(%rand, %b)
    """)
    made = planned(facts, "undecided -> auto", NO_REPLAY)
    assert made.decisions[1].why is Why.UNSAFE
    assert actions(made) == {"rand": "save"}


def test_sizes_are_saved_whatever_a_rule_says():
    facts = facts_of("""
        %x = input
        %size = aten.sym_size.int(%x) symbolic
        %view = aten.view.default(%x, %size)
        ---
        %b = aten.mul.Tensor(%view, %size)
        output(%view, %b)
    """)
    made = planned(facts, "must_recompute everything")
    assert made.diagnostics == ()
    size = made.decisions[1]
    assert (size.action, size.rule, size.why, size.reason) == (Action.SAVE, None, Why.ALWAYS, "symbolic size")
    assert names(facts, made.rules[0].matched) == ["size", "view"]
    assert names(facts, made.rules[0].decided) == ["view"]


# --- what a path cannot do -----------------------------------------------------------------------------------------


def test_offloading_is_refused_where_it_cannot_be_done():
    made = planned(facts_of(TWO_LAYERS), "recompute everything\n\n\noffload mm")
    found = only(made.diagnostics, "APL306")
    assert found.message == "`offload mm` asks for offloading, which the joint-graph partitioner cannot do"
    assert found.span.line == 4


def test_a_rewrite_is_refused_where_it_cannot_be_done():
    rules = "recompute everything; {}fuse all_gather chains"
    made = planned(facts_of(TWO_LAYERS), rules.format(""))
    found = only(made.diagnostics, "APL306")
    assert found.message == (
        "`fuse all_gather chains` asks for a rewrite of collectives, which the joint-graph partitioner cannot do"
    )
    able = Capabilities("rewrites", replays_random=True, rewrites=True, undecided="auto")
    made = planned(facts_of(TWO_LAYERS), rules.format(""), able)
    assert only(made.diagnostics, "APL311").message == "`fuse all_gather chains` finds nothing to rewrite in this graph"
    assert planned(facts_of(TWO_LAYERS), rules.format("optional "), able).diagnostics == ()


def test_undecided_values_are_refused_where_no_partitioner_takes_them():
    path = Capabilities("a flat graph", replays_random=True)
    made = planned(facts_of(TWO_LAYERS), "save mm", path)
    found = only(made.diagnostics, "APL306")
    assert found.message == (
        "no rule decides 1 forward value that the backward reads, and a flat graph has no partitioner to leave them to"
    )
    assert found.details == ("sin (aten.sin.default) in model.layers.0.attn",)
    assert found.help == "write `undecided -> save` or `undecided -> recompute`"
    assert planned(facts_of(TWO_LAYERS), "save everything", path).diagnostics == ()


def test_an_explicit_auto_and_leave_are_refused_there_too():
    path = Capabilities("a flat graph", replays_random=True)
    made = planned(facts_of(TWO_LAYERS), "save everything; leave mm; undecided -> auto", path)
    assert [found.message for found in made.diagnostics] == [
        "`leave mm` leaves values to PyTorch's partitioner, and a flat graph has none",
        "`undecided -> auto` leaves values to PyTorch's partitioner, and a flat graph has none",
    ]


def test_a_bare_name_counts_tensor_operators_alone():
    """With dynamic shapes a graph adds sizes too; they must not shift `first add`."""
    facts = facts_of("""
        %x = input bytes=32
        %size = builtin.add(%x) symbolic
        %sum = aten.add.Tensor(%x) bytes=32
        output(%sum)
    """)
    made = planned(facts, "save add")
    assert names(made.facts, made.rules[0].matched) == ["sum"]
