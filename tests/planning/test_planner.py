"""The planner: by hand, and against a slow reference for any graph and any policy."""

import pytest
from attrs import evolve
from hypothesis import strategies as st

import policylang
from policylang.graph.blocks import Chains, blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.language.diagnostics import Severity
from policylang.language.loader import parse_policy
from policylang.language.syntax import Action, CrossesCut, Everything, Is, Policy, Where
from policylang.planning.capabilities import EAGER, FLAT, HOOK, Capabilities
from policylang.planning.capabilities import JOINT as ON_JOINT
from policylang.planning.inspection.worth import rules_on
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Cuts, Selections
from policylang.planning.value_outcome import Why
from policylang.simulation.node_times import NodeTimes, node_times
from tests.planning import strategies
from tests.planning.reference import Reference
from tests.planning.strategies import JOINT, planned
from tests.support.drawn import drawn
from tests.support.process import python
from tests.support.textgraph import facts_of
from tests.support.trees import policy_of, span

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
    made = strategies.planned(facts_of(TWO_LAYERS), "recompute everything; save mm; recompute mm in layers.1")
    assert strategies.actions(made) == {"mm": "save", "sin": "recompute", "mm_1": "recompute"}
    first, second, third = made.rules
    assert strategies.names(made.facts, first.matched) == ["mm", "sin", "mm_1"]
    assert strategies.names(made.facts, first.decided) == ["sin"]
    assert first.overridden_by == {1: 1, 2: 1}
    assert strategies.names(made.facts, second.decided) == ["mm"]
    assert second.overridden_by == {2: 1}
    assert strategies.names(made.facts, third.decided) == ["mm_1"]
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
    made = strategies.planned(facts, "recompute everything; save wait_tensor; save builtin.getitem")
    assert set(strategies.actions(made).values()) == {"save"}
    assert strategies.names(facts, made.rules[1].matched) == ["gather"]
    assert strategies.names(facts, made.rules[2].matched) == ["norm"]


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
    made = strategies.planned(facts_of(CHECKPOINTED), "save sin")
    assert strategies.actions(made) == {"a": "recompute", "b": "save", "c": "recompute", "d": "save", "e": "save"}
    assert made.rules[0].kept_by_user == 2
    assert strategies.names(made.facts, made.rules[0].decided) == ["e"]
    assert made.decisions[1].why is Why.USER
    border = made.decisions[made.facts.index["b"]]
    assert (border.action, border.why) == (Action.SAVE, Why.USER)
    assert border.reason == "the user's next checkpoint region reads it"


def test_override_changes_what_the_user_tagged_and_no_later_plain_rule_takes_it_back():
    made = strategies.planned(facts_of(CHECKPOINTED), "override save sin; recompute everything")
    assert strategies.actions(made) == {"a": "save", "b": "save", "c": "save", "d": "save", "e": "recompute"}
    everything_rule = made.rules[1]
    assert everything_rule.overridden_by == {0: 2}
    assert everything_rule.kept_by_user == 2


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


NO_PARTITIONER = Capabilities("a flat graph", replays_random=True)
REWRITES = Capabilities("rewrites", replays_random=True, rewrites=True, undecided="auto")
DRAWS = "it draws random numbers, and a flat graph cannot replay them"
DROP = (f"drop (aten.native_dropout.default) in model.layers.0: {DRAWS}",)
FLAGGED = "%x = input\n%sin = aten.sin.default(%x) {}\n---\n%b = aten.mul.Tensor(%sin)\noutput(%sin, %b)"
REASONS = {
    "writes": "it writes to one of its arguments, and recomputation would write twice",
    "effectful": "it has an effect beyond its result, and recomputation would repeat it",
    "reads_mutated": "it reads memory that the graph changes, and recomputation would read other content",
}
FUSE, UNABLE = "fuse all_gather chains", "which the joint-graph partitioner cannot do"
REFUSED = [  # graph, policy, path, code, line, message, then details and help where they are said
    (CHECKPOINTED, "save cos", JOINT, "APL307", 1,
     "`save cos` decides nothing: the model's own checkpoint has tagged the only node it matches", (),
     "write `override save cos` to change them"),
    (RANDOM, "recompute everything", NO_REPLAY, "APL304", 1, f"`recompute everything` cannot recompute `drop`: {DRAWS}",
     DROP, "save these values with a later rule, or write `optional recompute everything` to have them saved"),
    (RANDOM, "undecided -> recompute", NO_REPLAY, "APL304", 1,
     f"`undecided -> recompute` cannot recompute `drop`: {DRAWS}", DROP, "save these values with a rule"),
    *((FLAGGED.format(flag), "recompute everything", JOINT, "APL304", 1,
       f"`recompute everything` cannot recompute `sin`: {reason}", None, None) for flag, reason in REASONS.items()),
    (TWO_LAYERS, "recompute everything\n\n\noffload mm", JOINT, "APL306", 4,
     f"`offload mm` asks for offloading, {UNABLE}", None, None),
    (TWO_LAYERS, f"recompute everything; {FUSE}", JOINT, "APL306", 1,
     f"`{FUSE}` asks for a rewrite of collectives, {UNABLE}", None, None),
    (TWO_LAYERS, f"recompute everything; {FUSE}", REWRITES, "APL311", 1,
     f"`{FUSE}` finds nothing to rewrite in this graph", None, None),
    (TWO_LAYERS, "save mm", NO_PARTITIONER, "APL306", None, "no rule decides 1 forward value that the backward reads, "
     "and a flat graph has no partitioner to leave them to", ("sin (aten.sin.default) in model.layers.0.attn",),
     "write `undecided -> save` or `undecided -> recompute`"),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "text", "path", "code", "line", "message", "details", "help"), REFUSED)
def test_what_cannot_be_done_is_said_with_its_reason(graph, text, path, code, line, message, details, help):
    found = strategies.only(strategies.planned(facts_of(graph), text, path).diagnostics, code)
    assert (found.severity, found.message) == (Severity.WARNING if code == "APL307" else Severity.ERROR, message)
    assert line is None or found.span.line == line
    assert details is None or (found.details, found.help) == (details, help)


@pytest.mark.parametrize(
    ("graph", "text", "path"),
    [
        (RANDOM, "recompute everything", JOINT), (TWO_LAYERS, f"recompute everything; optional {FUSE}", REWRITES),
        (TWO_LAYERS, "save everything", NO_PARTITIONER),
    ],
)  # fmt: skip
def test_where_it_can_be_nothing_is_said(graph, text, path):
    assert strategies.planned(facts_of(graph), text, path).diagnostics == ()


def test_an_optional_rule_saves_what_it_cannot_recompute():
    made = strategies.planned(facts_of(RANDOM), "optional recompute everything", NO_REPLAY)
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
    assert strategies.planned(facts, "recompute everything").diagnostics == ()


def test_the_users_own_recomputation_is_saved_where_it_would_be_wrong():
    facts = facts_of("""
        %x = input
        %rand = aten.bernoulli.p(%x) random region=0 tag=PREFER_RECOMPUTE
        ---
        %b = aten.mul.Tensor(%rand)
        output(%rand, %b)
    """)
    made = strategies.planned(facts, "undecided -> auto", NO_REPLAY)
    assert made.decisions[1].why is Why.UNSAFE
    assert strategies.actions(made) == {"rand": "save"}


def test_sizes_are_saved_whatever_a_rule_says():
    facts = facts_of("""
        %x = input
        %size = aten.sym_size.int(%x) symbolic
        %view = aten.view.default(%x, %size)
        ---
        %b = aten.mul.Tensor(%view, %size)
        output(%view, %b)
    """)
    made = strategies.planned(facts, "must_recompute everything")
    assert made.diagnostics == ()
    size = made.decisions[1]
    assert (size.action, size.rule, size.why, size.reason) == (Action.SAVE, None, Why.ALWAYS, "symbolic size")
    assert strategies.names(facts, made.rules[0].matched) == ["size", "view"]
    assert strategies.names(facts, made.rules[0].decided) == ["view"]


# --- what a path cannot do -----------------------------------------------------------------------------------------
def test_an_explicit_auto_and_leave_are_refused_there_too():
    path = Capabilities("a flat graph", replays_random=True)
    made = strategies.planned(facts_of(TWO_LAYERS), "save everything; leave mm; undecided -> auto", path)
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
    made = strategies.planned(facts, "save add")
    assert strategies.names(made.facts, made.rules[0].matched) == ["sum"]


def the_planner(replays_random: bool) -> Capabilities:
    return Capabilities("the test", replays_random=replays_random, undecided="auto")


def one_selector(facts: Facts, selector, times: NodeTimes | None = None) -> list[int]:
    return Selections(facts, {}, blocks_of(facts), Chains(facts), times).rows(selector)


@drawn(25, 200, strategies.graphs(), strategies.selectors(()))
def test_a_selector_denotes_what_its_sentence_says(facts, selector):
    assert one_selector(facts, selector) == sorted(Reference(policy_of(), facts).nodes(selector))


@drawn(20, 100, strategies.graphs(), strategies.predicates)
def test_a_predicate_filters_as_its_sentence_says(facts, predicate):
    times = node_times(facts, strategies.QUICK)
    selector = Where(Everything(span=span("everything")), predicate, span=span("everything where …"))
    reference = Reference(policy_of(), facts, list(times.seconds))
    assert one_selector(facts, selector, times) == sorted(reference.nodes(selector))


@drawn(20, 100, strategies.graphs())
def test_every_property_of_a_node_is_what_its_name_says(facts):
    reference = Reference(policy_of(), facts)
    for name in strategies.PROPERTIES:
        predicate = Is(name, span=span(name))
        selector = Where(Everything(span=span("everything")), predicate, span=span(f"everything where {name}"))
        assert (name, one_selector(facts, selector)) == (name, sorted(reference.nodes(selector)))


@drawn(25, 200, strategies.graphs(), strategies.cut_sizes)
def test_the_forward_is_cut_and_crossed_as_the_reference_says(facts, size):
    reference = Reference(policy_of(), facts)
    cuts = Cuts(facts, Chains(facts))
    assert list(cuts.positions(size.value)) == reference.cuts(size.value)
    predicate = CrossesCut(size, span=span("…"))
    selector = Where(Everything(span=span("everything")), predicate, span=span("everything where …"))
    assert one_selector(facts, selector) == sorted(reference.nodes(selector))


@drawn(12, 100, strategies.graphs(), strategies.policies(), st.booleans())
def test_a_plan_decides_what_the_rules_say(facts: Facts, policy: Policy, replays_random: bool):
    times = list(node_times(facts, strategies.QUICK).seconds)
    made = plan(policy, facts, the_planner(replays_random), device=strategies.QUICK)
    reference = Reference(policy, facts, times)
    expected = reference.decisions(replays_random)
    assert {row: (d.action, d.rule, d.why.value) for row, d in enumerate(made.decisions) if d is not None} == expected
    for rule, outcome in zip(policy.rules, made.rules, strict=True):
        assert outcome.matched == tuple(sorted(reference.matched(rule)))
    nothing = {outcome.rule.span for outcome in made.rules if not outcome.matched and not outcome.rule.optional}
    codes = {found.code for found in made.diagnostics}
    assert bool(nothing) if "APL301" in codes else not nothing or "APL369" in codes  # a share of no block says it all
    assert bool(reference.refused(expected, replays_random)) == any(d.code == "APL304" for d in made.diagnostics)


@drawn(12, 150, strategies.graphs(), strategies.policies())
def test_the_outcome_is_what_the_backward_needs(facts: Facts, policy: Policy):
    made = plan(policy, facts, the_planner(True))
    outcome = saved_and_recomputed(made)
    reference = Reference(policy, facts)
    decided = {row: (d.action, d.rule, d.why.value) for row, d in enumerate(made.decisions) if d is not None}
    certain, possible = reference.needed(decided)
    open_rows = {row for row in certain | possible if row in decided and decided[row][0] is None}
    assert set(outcome.undecided) == open_rows
    recomputed = {row for row in certain - open_rows if reference.recomputes(decided, row)}
    assert set(outcome.recomputed) == recomputed
    kept = set(outcome.saved) | set(outcome.inputs) | set(outcome.symbolic)
    assert certain - open_rows - recomputed <= kept <= (certain | possible) - open_rows - recomputed
    assert set(outcome.contingent) == {row for row in possible - open_rows if row in decided} - kept
    making = [row for row in reference.forward if facts.owners[row] == row and not facts.flags[row] & Flag.VIEW]
    assert outcome.forward("bytes")[0] == sum(facts.bytes[row] for row in making)
    computing = {row for row in making if not facts.flags[row] & Flag.SYMBOLIC}
    assert outcome.recomputed_operators == len(recomputed & computing)
    in_blocks = [len([row for row in computing if reference.block[row] == n]) for n in range(reference.block_count)]
    assert outcome.forward("operators") == (len(computing), tuple(in_blocks))


@drawn(12, 100, strategies.graphs(), strategies.policies())
def test_every_match_is_accounted_for(facts: Facts, policy: Policy):
    """Decided, taken over by another rule, kept by the user, or a size that no rule decides."""
    made = plan(policy, facts, the_planner(True))
    for index, outcome in enumerate(made.rules):
        sizes = sum(made.decisions[row].why.value == "always" for row in outcome.matched)
        taken = sum(outcome.overridden_by.values())
        assert len(outcome.matched) == len(outcome.decided) + taken + outcome.kept_by_user + sizes
        assert index not in outcome.overridden_by
        assert all(made.decisions[row].rule == index for row in outcome.decided)


SAVED_VIEW = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) layers.0 bytes=128 flops=1024
    %view = aten.view.default(%mm) layers.0 bytes=128 view
    %sin = aten.sin.default(%view) layers.0 bytes=128
    %add = aten.add.Tensor(%sin, %x) layers.0 bytes=128
    ---
    %t = tangent
    %cos = aten.mul.Tensor(%t, %view)
    %mul = aten.mul.Tensor(%cos, %sin)
    output(%add, %mul)
"""


def effects(rules: str):
    return [found for found in strategies.planned(facts_of(SAVED_VIEW), rules).diagnostics if found.code == "APL309"]


def test_a_product_whose_view_is_saved_is_not_recomputed_and_the_rule_is_named():
    (found,) = effects("save everything; recompute mm")
    assert found.severity is Severity.WARNING
    assert found.message.endswith(
        "decides 1 forward value and changes nothing: the backward reads none of them: "
        "`view`, which reads `mm`, is saved in its place"
    )
    assert "from `mm` to `view`" in found.help


def test_a_save_that_the_backward_does_not_read_is_named_without_a_keeper():
    (found,) = effects("recompute everything; save add")
    assert "decides 1 forward value and changes nothing: the backward reads none of them" in found.message
    assert found.help == "remove the rule, or select the values that the backward reads"


@pytest.mark.parametrize(
    "rules",
    [
        "save everything; recompute mm; recompute view",
        "save everything; optional recompute mm",
        "recompute mm",  # min-cut may still call for it
    ],
)
def test_of_any_other_rule_nothing_is_said(rules: str):
    assert effects(rules) == []


FACTS = facts_of("""
    %x = input
    %mm = aten.mm.default(%x)
    %sin = aten.sin.default(%mm) region=0 tag=MUST_SAVE
    %size = aten.sym_size.int(%sin) symbolic
    ---
    %b = aten.mul.Tensor(%sin)
    output(%sin, %b)
""")


def standings(name: str) -> list[str]:
    made = strategies.planned(FACTS, "recompute everything; save mm; optional recompute cos")
    return [found.standing for found in rules_on(made, FACTS.index[name])]


def test_each_rule_is_listed_in_order_and_inputs_and_backward_nodes_have_none():
    assert standings("mm") == ["overridden", "decided", "no match"]
    assert standings("sin") == ["kept by the user", "no match", "no match"]
    assert standings("size") == ["always saved", "no match", "no match"]
    made = strategies.planned(FACTS, "recompute everything; save mm")
    assert rules_on(made, FACTS.index["mm"])[0].why.endswith(f": {made.rules[1].rule.text}"), "the one that took over"
    with pytest.raises(ValueError, match="no rule ranges over b: it is not a forward call"):
        rules_on(made, FACTS.index["b"])


ROUTED = """
    %x = input dtype=float32
    %w = parameter dtype=float32
    %scores = aten.mm.default(%x, %w) dtype=float32 {region}
    %topk = aten.topk.default(%scores) multi_output {region}
    %weights = builtin.getitem(%topk) dtype=float32 {region}
    %chosen = builtin.getitem(%topk) dtype=int64 {region}
    %sort = aten.sort.stable(%chosen) multi_output {region}
    %order = builtin.getitem(%sort) dtype=int64 {region}
    %rows = aten.index.Tensor(%x, %order) dtype=float32 {region}
    %most = aten.max.default(%scores) dtype=float32 {region}
    %kept = aten.where.self(%rows, %most) dtype=float32 {region}
    %y = aten.mul.Tensor(%kept, %weights) dtype=float32 {region}
    ---
    %t = tangent dtype=float32
    %g = aten.mul.Tensor(%t, %y, %order, %chosen, %weights, %most) dtype=float32
    output(%y, %g)
"""
PATHS = pytest.mark.parametrize("path", [ON_JOINT, HOOK, EAGER, FLAT], ids=lambda path: path.name)


def routed(text: str, path: Capabilities, region: str = "") -> Plan:
    policy = parse_policy(text).policy
    kind = GraphKind.FLAT if path is FLAT else GraphKind.JOINT
    return plan(policy, facts_of(ROUTED.format(region=region), kind), path)


def fate(made: Plan, name: str) -> str | None:
    decision = made.decisions[made.facts.index[name]]
    return None if decision.action is None else decision.action.name.lower()


def codes(made: Plan) -> list[str]:
    return [found.code for found in made.diagnostics]


@PATHS
def test_a_sweeping_rule_leaves_it_saved_with_a_note(path: Capabilities):
    made = routed("recompute everything", path)
    assert [fate(made, name) for name in ("topk", "weights", "chosen")] == ["save"] * 3
    decision = made.decisions[made.facts.index["chosen"]]
    assert (decision.rule, decision.why) == (0, Why.ROUTING)
    assert codes(made) == ["APL308"]
    assert made.diagnostics[0].message.startswith("`recompute everything` leaves 1 forward value saved that steer")
    # Nor is the largest of some floats a choice, though `where` reads it.
    assert [fate(made, name) for name in ("sort", "order", "most")] == ["recompute"] * 3


@PATHS
def test_a_rule_that_names_it_has_the_last_word(path: Capabilities):
    made = routed("recompute everything; recompute topk", path)
    assert fate(made, "chosen") == "recompute"
    assert codes(made) == []


@PATHS
def test_the_users_own_checkpoint_has_its_say(path: Capabilities):
    """Where it stands: eager checkpoints under a policy take its place."""
    made = routed("undecided -> save", path, region="region=0 tag=PREFER_RECOMPUTE")
    assert fate(made, "chosen") == ("save" if path is EAGER else "recompute")
    assert codes(made) == []
    swept = routed("override recompute everything", path, region="region=0 tag=PREFER_RECOMPUTE")
    assert fate(swept, "chosen") == "save"
    assert codes(swept) == ["APL308"]


@PATHS
def test_what_is_undecided(path: Capabilities):
    """Min-cut decides where there is one; a checkpoint would recompute, and is not let."""
    expected = {ON_JOINT: None, HOOK: None, EAGER: "save", FLAT: "save"}
    made = routed("save mm", path)
    assert fate(made, "chosen") == expected[path]
    notes = [found.message for found in made.diagnostics if found.code == "APL308"]
    assert [note.partition(" leaves")[0] for note in notes] == (["the checkpoint"] if path is EAGER else [])
    swept = routed("save mm; undecided -> recompute", path)
    assert fate(swept, "chosen") == "save"
    assert "`undecided -> recompute` leaves 1 forward value" in swept.diagnostics[-1].message


# --- the same policy on the same graph is the same plan, in every process ---
_SCRIPT = """
import sys

from policylang.language.loader import parse_policy
from policylang.planning.planner import plan
from tests.planning.strategies import JOINT
from tests.support.textgraph import facts_of

text = "%x = input\\n%w = parameter\\n"
last = "x"
for layer in range(3):
    text += f"%g{layer} = _c10d_functional.all_gather_into_tensor.default(%w) layers.{layer} collective group=dp:4\\n"
    text += f"%w{layer} = _c10d_functional.wait_tensor.default(%g{layer}) layers.{layer}\\n"
    for step in range(4):
        text += f"%mm{layer}_{step} = aten.mm.default(%{last}, %w{layer}) layers.{layer}.attn bytes=8\\n"
        last = f"mm{layer}_{step}"
text += "---\\n%t = tangent\\n%b = aten.mul.Tensor(%t, %mm0_0, %mm2_3, %w1)\\noutput(%" + last + ", %b)"
policy = parse_policy('''
recompute everything in block
save matmul or attention or compute in block
recompute every 2nd mm per block
must_recompute chain through all_gather where from parameter
optional save (view, cast, pointwise) in layers.{0,2}
expect saved per block <= 1 B
''').policy
made = plan(policy, facts_of(text), JOINT)
print(made.digest)
print([outcome.matched for outcome in made.rules])
print([(found.code, found.message, found.details) for found in made.diagnostics])
from policylang.planning import capabilities
from tests.planning.strategies import sharded_step

ordered = parse_policy('''
recompute (cast, all_gather) in block
keep order of (reduce_scatter in layers.1)
prefetch all_gather 1 block ahead
delay reduce_scatter 2 blocks
prefetch (all_gather in nowhere) 3 blocks ahead
''').policy
made = plan(ordered, sharded_step(blocks=4, regathers=True, unknown=2, head=True), capabilities.JOINT)
print(made.digest)
print(list(made.order.schedule), list(made.order.words()))
print([(each.matched, each.moved, dict(each.left)) for each in made.order.outcomes], made.order.barriers)
print([(found.code, found.message, found.details) for found in made.diagnostics])
print("torch" in sys.modules)
"""


def test_hash_seeds_do_not_reach_a_plan_and_torch_is_not_imported():
    outputs = {python("-c", _SCRIPT, PYTHONHASHSEED=seed).stdout for seed in ("0", "12345")}
    assert len(outputs) == 1
    digest, *_, torch = outputs.pop().splitlines()
    assert len(digest) == 64
    assert torch == "False"


GRAPH = "%x = input\n%mm = aten.mm.default(%x)\n%sin = aten.sin.default(%mm)\n---\n%b = aten.mul.Tensor(%sin)"


def test_a_digest_covers_names_operators_decisions_and_the_policy():
    digests = [
        planned(facts_of(GRAPH), "recompute everything; save mm").digest,
        planned(facts_of(GRAPH), "recompute everything; prefer_save mm").digest,
        planned(facts_of(GRAPH), "recompute everything; save aten.mm").digest,
        planned(facts_of(GRAPH.replace("%sin", "%sine")), "recompute everything; save mm").digest,
        planned(facts_of(GRAPH.replace("aten.sin", "aten.cos")), "recompute everything; save mm").digest,
        planned(facts_of(GRAPH), "recompute everything; save mm; undecided -> save").digest,
    ]
    assert len(set(digests)) == len(digests)
    assert digests[0] == planned(facts_of(GRAPH), "recompute everything; save mm").digest


def test_a_digest_is_of_the_canonical_text_where_there_is_one():
    policy = policylang.parse("recompute everything")
    facts = facts_of(GRAPH)
    one, other = (plan(evolve(policy, canonical=text), facts, JOINT).digest for text in ("a", "b"))
    assert one != other
