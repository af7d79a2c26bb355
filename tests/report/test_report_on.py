"""Reports of whatever a user may hold, to the letter, at a prompt and in a logger; blocks that do the same."""

import copy
import json
import operator
import pickle
import re
from collections.abc import Callable
from importlib.metadata import version

import attrs
import pytest
import torch
from attrs import evolve
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import policylang
from policylang.audit.outcome import combined
from policylang.audit.report import AuditReport, DecisionReport, Report, RuleReport, ValuesReport
from policylang.graph.collect import collect
from policylang.language.diagnostics import Diagnostic, Related, Severity, Source, Span, diagnose
from policylang.language.plain_data import from_plain
from policylang.language.shown import format_quantity
from policylang.planning.capabilities import capabilities_for
from policylang.planning.plan import ExpectationOutcome
from policylang.planning.planner import plan
from policylang.report.diagnostics import render_concise, render_github, render_json, render_text
from policylang.report.plan_comparison import distinctions
from policylang.simulation.node_times import node_times
from policylang.tuning.evaluation import Besides, Budget, Candidate, Tuned
from policylang.tuning.tuned_policy import neighbour_words
from tests.graph.captured import joint_of
from tests.support.compiled import backend_for
from tests.support.drawn import slow
from tests.support.models import aliased_output, llama
from tests.support.process import python
from tests.support.textgraph import CHAIN, facts_of

TEXT = """\
recompute everything in block
save matmul in block
recompute every 2nd mm per block
save everything in block where crosses block
"""


@pytest.fixture(scope="module")
def joint():
    return joint_of("llama")


@pytest.fixture
def policy():
    return policylang.parse(TEXT)


def test_a_planned_graph(joint, policy):
    gm = policylang.apply(copy.deepcopy(joint.gm), policy)
    report = policylang.report(gm)
    assert [rule.source for rule in report.rules] == [f"<policy>:{line}" for line in (1, 2, 3, 4)]
    assert [rule.text for rule in report.rules] == TEXT.splitlines()
    assert report.blocks == 2
    assert report.decisions["mm"] == DecisionReport("save", "<policy>:2")
    assert report.decisions["mm_1"] == DecisionReport("recompute", "<policy>:3")
    assert report.decisions["mm_2"] == DecisionReport("save", "<policy>:2")
    assert (report.saved, report.recomputed, report.audit) == (None, None, None)
    for rule in report.rules:
        assert rule.matched >= rule.decided + rule.overridden
        assert rule.saved_bytes is None
    ground = report.rules[0]
    assert ground.overridden == report.rules[1].matched + 2, "the matmuls, and what crosses"
    assert report.forward_nodes >= sum(rule.decided for rule in report.rules) + report.undecided


PROFILE = """
name = "slow"
compute.float32 = 1e9
memory.bandwidth = 1e9
"""


@pytest.fixture
def device(tmp_path):
    (tmp_path / "slow.toml").write_text(PROFILE)
    return policylang.load_device(tmp_path / "slow.toml")


def test_a_report_on_a_device_says_the_time_of_what_runs_again(joint, policy, device, tmp_path):
    """Given where the policy is carried out, or by its own line; what is decided is the same."""
    more = {"num_fwd_outputs": joint.num_fwd_outputs}
    plain, *timed = (
        policylang.report(
            policylang.partition(copy.deepcopy(joint.gm), joint.joint_inputs, policy=given, **more, **on)[0]
        )
        for given, on in (
            (policy, {}),
            (policy, {"device": device}),
            (policylang.parse(f'device "{tmp_path / "slow.toml"}"\n{TEXT}'), {}),
        )
    )
    facts = collect(joint.gm)
    seconds = dict(zip(facts.names, node_times(facts, device).seconds, strict=True))
    for report in timed:
        assert report.device == "slow"
        assert report.forward_seconds == pytest.approx(sum(seconds[facts.names[row]] for row in facts.forward))
        assert report.recomputed.seconds == pytest.approx(sum(seconds[name] for name in report.recomputed.names))
        by_rule = [rule.recomputed_seconds for rule in report.rules]
        of_rules = [seconds[name] for name in report.recomputed.names if report.decisions[name].rule is not None]
        assert sum(by_rule) == pytest.approx(sum(of_rules))
        assert by_rule[1] == 0.0 < by_rule[2]
        scalars = report.scalars(prefix="")
        assert scalars["recomputed_seconds"] == report.recomputed.seconds
        assert scalars["recomputed_time_share"] == report.recomputed.seconds / report.forward_seconds
        said = format_quantity(report.recomputed.seconds, "seconds")
        assert re.search(rf"\nrecomputed .* of the forward, {said} on slow, \d+% of its time\n", str(report))
        assert report.decisions.keys() == plain.decisions.keys()
        assert [each.action for each in report.decisions.values()] == [e.action for e in plain.decisions.values()]
        assert json.loads(report.to_json())["recomputed"]["seconds"] == report.recomputed.seconds
    assert (plain.device, plain.forward_seconds, plain.recomputed.seconds) == (None, None, None)
    assert "recomputed_seconds" not in plain.scalars(prefix="")
    assert not re.search(r"\btime\b", str(plain))


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_half_is_called_a_half_and_nothing_is_decided_on_it(joint, policy, kind):
    half = copy.deepcopy(joint._replace(gm=copy.deepcopy(joint.gm)).halves(policy)[kind == "backward"])
    report = policylang.report(policylang.apply(half, policylang.parse("save mm; optional fuse all_gather chains")))
    calls = [node for node in half.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    assert str(report).startswith(f"policy policy: {kind} graph of a partition, {len(calls)} operators\n")
    assert "forward value" not in str(report)
    assert "undecided" not in str(report)
    assert not report.decisions


def test_a_partitioned_graph_and_either_half_of_it(joint, policy):
    gm = copy.deepcopy(joint.gm)
    forward, backward = joint._replace(gm=gm).halves(policy)
    report = policylang.report(forward)
    assert policylang.report(backward) == report
    assert policylang.report(gm) == report
    assert report.audit.agrees

    # The figures, against the graph itself: what the forward hands over beyond its own outputs.
    output = next(iter(forward.graph.find_nodes(op="output"))).args[0][joint.num_fwd_outputs :]
    kept = {node.name for node in output if node.op == "call_function"}
    assert set(report.saved.names) == kept
    by_rule = sum(rule.saved_bytes for rule in report.rules)
    assert report.saved.bytes == by_rule + report.undecided_saved_bytes
    recomputed = {node.name for node in backward.graph.nodes if node.name in report.decisions}
    assert set(report.recomputed.names) == {name for name in recomputed if name not in kept}

    assert json.loads(report.to_json())["decisions"]["mm_1"] == {
        "action": "recompute",
        "rule": "<policy>:3",
        "reason": "",
    }
    assert all(rule in str(report) for rule in TEXT.splitlines())
    assert "audit       the changed graphs do what was planned" in str(report)

    # Every 2nd of seven products a layer, and attention: q times k, and that times v, for 2 texts and 4 heads of 8.
    attention = 2 * 2 * (2 * 2 * 4 * 8 * 8 * 8)
    assert report.rules[0].recomputed_flops == attention
    assert report.rules[2].recomputed_flops == report.recomputed.flops - attention > 0


def test_a_compiled_model_its_backend_and_the_model_itself(policy):
    module, inputs, loss_fn = llama()
    backend = policylang.backend(policy, inner="aot_eager")
    compiled = torch.compile(module, backend=backend)
    loss_fn(compiled(*inputs)).backward()
    report = policylang.report(compiled)
    assert report.audit.agrees
    assert report.rules[1].matched == 14
    assert policylang.report(module) == report
    assert policylang.report(backend) == report


def test_what_has_no_report_is_refused_by_name(joint):
    module, inputs, _ = aliased_output()
    never_trained = policylang.backend("save_all", inner="aot_eager")
    for subject, code, said in (
        ("a string", "APL328", "this is a `str`"),
        (None, "APL328", "this is a `NoneType`"),
        ([module], "APL328", "this is a `list`"),
        (torch.compile(module.forward, backend="eager"), "APL328", "this is a `function`"),
        (torch.compile(module.forward, backend=never_trained), "APL327", "run the model once, with gradients"),
        (copy.deepcopy(joint.gm), "APL325", r"`policylang\.apply\(gm, policy\)`"),
        (module, "APL327", "run the model once, with gradients"),
        (never_trained, "APL327", "run the model once, with gradients"),
        (torch.compile(module, backend="eager"), "APL327", "run the model once, with gradients"),
    ):
        with pytest.raises(policylang.PolicyGraphError, match=said) as caught:
            policylang.report(subject)
        assert [found.code for found in caught.value.diagnostics] == [code]
    with torch.no_grad():
        torch.compile(module, backend=never_trained)(*inputs)
    with pytest.raises(policylang.PolicyGraphError, match="with gradients"):
        policylang.report(never_trained)


def test_a_compiled_function_has_the_report_of_its_backend():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    backend = backend_for("save mm, addmm\nrecompute relu")

    @torch.compile(backend=backend)
    def loss(x):
        return model(x).square().mean()

    loss(torch.ones(2, 4)).backward()
    found = policylang.report(loss)
    assert found.rules[1].matched == 1
    assert str(found) == str(policylang.report(backend))


def test_a_model_whose_checkpoints_have_not_run_is_told_of_its_checkpoints():
    model = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    holder = torch.nn.Module()
    holder.layers = model
    policylang.checkpoint_model(holder, policylang.parse("recompute everything in block"))
    for subject in (holder, model[0]):
        with pytest.raises(policylang.PolicyGraphError) as caught:
            policylang.report(subject)
        (found,) = caught.value.diagnostics
        assert found.code == "APL327"
        assert "when its checkpoint first runs it" in found.help
        assert "compile" not in found.help


def test_the_name_stays_a_function_whatever_is_imported_first():
    script = (
        "import policylang.report.report_text, policylang.audit.outcome, policylang; "
        "import policylang.errors; assert callable(policylang.report), policylang.report"
    )
    python("-c", script)


SAVE, AGAIN = DecisionReport("save", "p.apl:2"), DecisionReport("recompute", "p.apl:1")


def block(number: int, size: int = 1024, margin: float | None = None, **more: DecisionReport) -> Report:
    found = f"{size} B in block {number}"
    return Report(
        policy="p",
        forward_nodes=2,
        blocks=1,
        decisions={"mm": SAVE, "sin": AGAIN, **more},
        saved=ValuesReport(("mm",), size),
        recomputed=ValuesReport(("sin",), 512),
        audit=AuditReport(True),
        expectations=(
            ExpectationOutcome("expect saved <= 1 GiB", "p.apl:8", "deferred", "it is about a whole graph"),
            ExpectationOutcome("expect saved per block <= 2 KiB", "p.apl:9", "held", found, margin),
        ),
        label=f"layers.{number}",
    )


def rows(report: Report) -> list[str]:
    return str(report).split("\n\n")[-1].splitlines()


def expected(report: Report) -> list[str]:
    return [line for line in str(report).splitlines() if line.startswith("expect")]


def test_blocks_that_do_the_same_are_one_row_with_counts_and_sums() -> None:
    report = combined([*(block(n, margin=1024) for n in range(3)), block(3, 2048, 0)])
    assert rows(report) == [
        "block       times  forward values  saved  recomputed  total saved  total recomputed",
        "layers.0–2      3               2  1 KiB       512 B        3 KiB           1.5 KiB",
        "layers.3        1               2  2 KiB       512 B        2 KiB             512 B",
    ]
    assert expected(report) == [
        "expect      saved <= 1 GiB: deferred, it is about a whole graph",
        "expect      saved per block <= 2 KiB: held, 2048 B in block 3, the worst of 4 blocks",
    ]
    assert len(json.loads(report.to_json())["expectations"]) == 8
    assert len(json.loads(report.to_json())["graphs"]) == 4


def test_an_expectation_that_all_blocks_meet_alike_says_so_and_what_fails_is_named_though_others_hold() -> None:
    report = combined([block(n, margin=1024) for n in range(3)])
    assert expected(report)[1] == "expect      saved per block <= 2 KiB: held, 1024 B in each of 3 blocks"
    failed = block(1, 4096)
    failed = evolve(failed, expectations=(evolve(failed.expectations[1], status="failed", margin=-2048.0),))
    text = expected(combined([block(0, margin=1024), failed, block(2, margin=1024)]))
    assert text[1].endswith("failed, 4096 B in block 1; failed in 1 of 3 blocks: layers.1")


def test_a_block_that_decides_otherwise_for_the_same_figures_keeps_its_row() -> None:
    report = combined([block(0), block(1, mm=AGAIN), block(2)])
    assert [line.split()[0] for line in rows(report)] == ["block", "layers.0,", "layers.1"]
    assert rows(report)[1].startswith("layers.0, 2 ")
    assert rows(combined([block(0), block(1, 2048)])) == [  # where all differ there are no sums
        "block     forward values  saved  recomputed",
        "layers.0               2  1 KiB       512 B",
        "layers.1               2  2 KiB       512 B",
    ]


def test_values_by_their_short_names() -> None:
    report = combined([block(0), block(1, mm=AGAIN, only=SAVE), block(1)])
    found = report.decisions
    assert list(found)[-1] == "layers.1#2/sin"
    assert found["layers.1/mm"] == found["sin"] == AGAIN
    assert found["only"] == found["layers.0/mm"] == SAVE
    assert all(name in found for name in ("sin", "only", "layers.1#2/mm", "layers.1/mm"))
    assert not any(name in found for name in ("mm", "sim", "", "/", None, 1))
    assert found.get("sin") == found.get("layers.1/mm") == found.get("sin", SAVE) == AGAIN
    assert found.get("mm") is None
    assert found.get("mm", SAVE) == SAVE
    assert found.get("sim", "no such value") == "no such value"
    assert "sin" not in list(found)
    with pytest.raises(KeyError) as caught:
        found["mm"]
    assert caught.value.args == (
        "`mm` is decided differently in 3 graphs: save layers.0/mm, layers.1#2/mm; recompute layers.1/mm",
    )
    for name, said in {
        "sim": "did you mean `sin`?",
        "layers.7/mm": "did you mean `layers.0/mm`",
        "": "the report has 7 values",
        "/": "the report has 7 values",
    }.items():
        with pytest.raises(KeyError, match=re.escape(said)):
            found[name]
    assert pickle.loads(pickle.dumps(report)) == copy.deepcopy(report) == report
    assert pickle.loads(pickle.dumps(report)).decisions["sin"] == AGAIN
    assert from_plain(Report, json.loads(report.to_json())) == report


POLICY = """\
recompute everything in block
save matmul in block
recompute every 2nd (mm or addmm) per block
expect recomputed flops <= 90%
expect saved per block <= 30 MiB
"""
IDS = torch.arange(16).reshape(1, 16)


def like_blocks() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=5, use_cache=False, **sizes))


def t5() -> PreTrainedModel:
    layers = {"num_layers": 3, "num_decoder_layers": 4, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_heads=2, use_cache=False, **layers)
    return T5ForConditionalGeneration(config)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "labels", "product"),
    [
        (like_blocks, ["model.layers.0–4"], "mm_3"),
        slow(t5, ["encoder.block.0", "encoder.block.1–2", "decoder.block.0", "decoder.block.1–3"], "mm_3"),
    ],
)
def test_real_models(make: Callable[[], PreTrainedModel], labels: list[str], product: str) -> None:
    torch.manual_seed(0)
    model = make().eval()  # without dropout: GPT-2 and T5 would have it
    blocks = "blocks {encoder,decoder}.block.*\n" if make is t5 else ""
    policylang.checkpoint_model(model, policylang.parse(blocks + POLICY))
    model(input_ids=IDS, labels=IDS).loss.backward()
    report = policylang.report(model)
    assert [line.split()[0] for line in rows(report)[1:]] == labels
    assert sum(int(line.split()[1]) for line in rows(report)[1:]) == len(report.graphs) == report.blocks
    assert [line.split(": ")[1].split(",")[0] for line in expected(report)] == ["deferred", "held"]
    assert len(report.expectations) == 2 * len(report.graphs)
    margins = [each.margin for each in report.expectations if each.margin is not None]
    assert sum(30 * 2**20 - margin for margin in margins) == report.saved.bytes
    first = report.graphs[0].label
    assert report.decisions[product] == report.decisions[f"{first}/{product}"]
    assert report.decisions[product].action == "recompute"
    assert report.decisions[f"{first.rpartition('.')[2]}/{product}"].rule == report.decisions[product].rule


REPORT = Report(
    policy="mine",
    forward_nodes=675,
    blocks=8,
    rules=(
        RuleReport("dir/mine.apl:3", "save mm where bytes < 2 MiB", 8, 8, 0, saved_bytes=8 << 20),
        RuleReport("dir/mine.apl:4", "recompute <b>everything</b>", 4, 4, 0, recomputed_flops=3_900_000_000),
    ),
    saved=ValuesReport(("a", "b"), 8 << 20),
    recomputed=ValuesReport(("c",), 1 << 20, 3_900_000_000),
    forward_flops=15_600_000_000,
    undecided=2,
    undecided_saved_bytes=0,
    uncounted={"mylib.fused.default": 2},
    audit=AuditReport(True),
    digest="0" * 64,
)


def test_a_report_a_plan_facts_and_the_result_of_a_check_at_a_prompt_are_one_line() -> None:
    assert repr(REPORT) == "<policylang.Report mine: 675 forward values, 8 MiB saved, 1 MiB recomputed, audit agrees>"
    both = combined([REPORT, evolve(REPORT, audit=AuditReport(False, ("a difference",)))])
    assert repr(both).startswith("<policylang.Report mine: 2 graphs, 1,350 forward values, 16 MiB saved")
    assert repr(both).endswith("audit DIFFERS>")
    assert repr(Report("p")) == "<policylang.Report p: 0 forward values, no audit>"
    facts = facts_of(CHAIN)
    planned = plan(policylang.parse("recompute everything"), facts, capabilities_for(facts.kind))
    assert repr(planned).startswith("<policylang.Plan: policy policy on a joint graph of 10 nodes: 4 forward values")
    assert repr(facts).startswith("<policylang.Facts: joint graph of 10 nodes, torch ")
    found = policylang.check(policylang.parse("recompute everything"), Source("more.apl", "save attenton"))
    assert repr(found) == "<policylang.CheckResult: 2 files, 1 error, 0 warnings>"
    assert str(found).startswith("error[APL101]: there is no operator, group or name `attenton`\n --> more.apl:1:6\n")
    assert str(found).endswith(f"\n\n{found!r}")


def test_scalars_for_a_metrics_logger() -> None:
    found = REPORT.scalars()
    assert all(name.startswith("policylang/") for name in found)
    assert all(type(value) in (int, float) for value in found.values())
    assert found["policylang/saved_bytes"] == 8 << 20
    assert found["policylang/recomputed_share"] == 0.25
    assert found["policylang/uncounted_calls"] == 2
    assert found["policylang/audit_differences"] == 0
    both = combined([REPORT, REPORT]).scalars(prefix="train/")
    assert both["train/saved_bytes"] == 2 * (8 << 20)
    assert both["train/recomputed_share"] == 0.25
    assert (both["train/graphs"], both["train/blocks"]) == (2, 16)
    assert "policylang/saved_bytes" not in Report("p").scalars()  # not known before a partition


def test_the_version_is_that_of_the_package_and_needs_no_torch() -> None:
    assert policylang.__version__ == version("policylang")
    assert "__version__" in dir(policylang)
    python("-c", "import sys, policylang; policylang.__version__; assert 'torch' not in sys.modules")
    few = "assert len([each for each in sys.modules if each.startswith('policylang')]) == 1"  # Ctrl-C may come
    python("-c", f"import sys, policylang; {few}; import policylang.report; assert policylang.report.__doc__[0] == 'R'")


MIB = 2**20
WHOLE = Report(
    policy="llama3_sac",
    forward_nodes=300,
    blocks=8,
    decisions={
        "mm": DecisionReport("save", "policies/llama3_sac.apl:9"),
        "add": DecisionReport("auto", None, "no rule"),
    },
    rules=(
        RuleReport("policies/llama3_sac.apl:8", "recompute everything in block", 200, 120, 80, 0, 0, 2_500_000),
        RuleReport("policies/llama3_sac.apl:9", "save matmul in block", 80, 80, 0, 3, 5 * MIB, 0),
    ),
    undecided=100,
    saved=ValuesReport(("mm", "add"), 6 * MIB),
    recomputed=ValuesReport(("sin",), 3 * MIB, 2_500_000),
    forward_flops=10_000_000,
    undecided_saved_bytes=MIB,
    expectations=(ExpectationOutcome("expect saved <= 8 MiB", "p.apl:3", "held", "6 MiB"),),
    warnings=("p.apl:4: something to know (APL999)",),
    audit=AuditReport(True),
)
WHOLE_TEXT = """\
policy llama3_sac: 300 forward values, 8 blocks

line              rule                           matched  decided  saved  recomputed
llama3_sac.apl:8  recompute everything in block      200      120          2.5 MFLOP
llama3_sac.apl:9  save matmul in block                80       80  5 MiB
                  undecided -> auto                  100      100  1 MiB

saved       6 MiB in 2 values
recomputed  3 MiB in 1 value, 2.5 MFLOP, 25% of the forward
kept        3 matches have a tag of the user's own checkpoint
expect      saved <= 8 MiB: held, 6 MiB
warning     p.apl:4: something to know (APL999)
audit       the changed graphs do what was planned"""


def test_times_stand_beside_flops():
    assert str(WHOLE) == WHOLE_TEXT
    rules = [evolve(rule, recomputed_seconds=each) for rule, each in zip(WHOLE.rules, (2.5e-3, 0.0), strict=True)]
    recomputed = evolve(WHOLE.recomputed, seconds=2.5e-3)
    timed = evolve(WHOLE, rules=tuple(rules), recomputed=recomputed, device="h100-sxm", forward_seconds=0.01)
    assert (
        "decided  saved  recomputed    time\n"
        "llama3_sac.apl:8  recompute everything in block      200      120          2.5 MFLOP  2.5 ms\n"
        "llama3_sac.apl:9  save matmul in block                80       80  5 MiB\n"
    ) in str(timed)
    assert (
        "\nrecomputed  3 MiB in 1 value, 2.5 MFLOP, 25% of the forward, 2.5 ms on h100-sxm, 25% of its time\n"
        in str(timed)
    )
    both = combined([timed, timed])
    assert (both.device, both.recomputed.seconds, both.rules[0].recomputed_seconds) == ("h100-sxm", 5e-3, 5e-3)
    assert "5 ms on h100-sxm, 25% of its time" in str(both)
    assert from_plain(Report, timed.to_dict()) == timed


def test_a_plan_without_a_partition_claims_no_bytes():
    planned = evolve(
        WHOLE,
        rules=tuple(evolve(rule, saved_bytes=None, recomputed_flops=None) for rule in WHOLE.rules),
        saved=None,
        recomputed=None,
        undecided_saved_bytes=None,
        audit=None,
    )
    text = str(planned)
    assert "MiB in" not in text
    assert "audit       not yet: the graph is planned, and not partitioned" in text


def test_differences_are_printed_one_by_one():
    wrong = evolve(WHOLE, audit=AuditReport(False, ("`mm` was not saved",)))
    assert combined([WHOLE, wrong]).audit == AuditReport(False, ("graph 1: `mm` was not saved",))
    text = str(evolve(WHOLE, audit=AuditReport(False, ("`mm` was not saved", "`sin` was saved"))))
    assert "audit       `mm` was not saved\naudit       `sin` was saved" in text
    assert "do what was planned" not in text


def test_a_long_rule_is_cut_and_a_path_is_shortened():
    rule = RuleReport("/some/where/deep/p.apl:3", "save " + "mm or " * 30 + "bmm", 1, 1, 0)
    line = next(line for line in str(evolve(WHOLE, rules=(rule,))).splitlines() if "p.apl:3" in line)
    assert line.startswith("p.apl:3 ")
    assert "…" in line


def test_several_graphs_are_summed_rule_by_rule():
    cached = evolve(WHOLE, from_cache=True, forward_nodes=10)
    both = combined([WHOLE, cached])
    assert both.graphs == (WHOLE, cached)
    assert both.forward_nodes == 310
    assert both.rules[0] == RuleReport(
        "policies/llama3_sac.apl:8", "recompute everything in block", 400, 240, 160, 0, 0, 5_000_000
    )
    assert both.saved == ValuesReport(("0/mm", "0/add", "1/mm", "1/add"), 12 * MIB)
    assert both.decisions["1/mm"] == DecisionReport("save", "policies/llama3_sac.apl:9")
    assert both.warnings == WHOLE.warnings
    text = str(both)
    assert text.startswith("policy llama3_sac: 310 forward values, 16 blocks, 2 graphs\n")
    assert "graph  forward values  blocks  saved  recomputed" in text
    assert "1                  10       8  6 MiB       3 MiB  from the compile cache" in text


def candidate(rules: str, peak: int, recompute: float, saved: int = 0) -> Candidate:
    return Candidate(rules, peak, "mm", saved or peak // 2, 0, recompute, 0.0, 1.0 + recompute)


ALL = candidate("recompute everything\nsave everything in block where crosses block\n", 10 << 30, 0.6)
SOME = candidate(
    "recompute everything\nsave matmul in block\nsave everything in block where crosses block\n", 20 << 30, 0.2
)
NONE = candidate("save everything\n", 30 << 30, 0.0)


def tuned(budget: Budget = Budget("peak", 25 << 30), bound: float | None = 0.15) -> Tuned:  # noqa: B008
    return Tuned(budget, Besides(), SOME, ALL, NONE, (ALL, SOME, NONE), bound, 1.0)


def test_what_distinguishes_each_from_the_one_before():
    lines = "recompute everything; save everything in block where crosses block"
    assert distinctions((ALL, SOME, NONE)) == [lines, "save matmul in block", "save everything"]
    assert distinctions((SOME, ALL)) == [SOME.rules.strip().replace("\n", "; "), "without save matmul in block"]
    turned = attrs.evolve(ALL, rules="\n".join(reversed(ALL.rules.splitlines())))
    assert distinctions((ALL, turned))[1] == "the same rules in another order"


def test_copies_to_the_host_cost_what_the_step_waits_for_them():
    moved = attrs.evolve(
        SOME, rules="save everything\noffload mm\n", recompute=0.0, offloaded=1 << 30, step=1.4, copies=0.4
    )
    chosen = attrs.evolve(tuned(), chosen=moved, table=(ALL, moved, NONE))
    assert moved.price == 0.4
    assert neighbour_words(chosen) == "with 10 GiB more, 400 ms less; with 10 GiB less, 200 ms more"


def at(text: str, start: int, end: int, name: str = "a.apl") -> Span:
    return Span(Source(name, text), start, end)


FOLDER, NOTE = (
    "`x` is a folder",
    Diagnostic("APL101", "by the way", severity=Severity.NOTE, related=(Related("there"),)),
)
PRINTED = [
    (render_text, diagnose("APL101", "no", at("save mm", 5, 7), details=("mm: 224 nodes", "in a: 0 of them")),
     "error[APL101]: no\n --> a.apl:1:6\n  |\n1 | save mm\n  |      ^^\n  = mm: 224 nodes\n  = in a: 0 of them"),
    (render_text, diagnose("APL104", FOLDER, help="name a file"), f"error[APL104]: {FOLDER}\n = help: name a file"),
    (render_text, diagnose("APL001", "no text", at("", 0, 0)), "error[APL001]: no text\n --> a.apl:1:1"),
    (render_text, diagnose("APL101", "no", at("save mm or", 10, 10)),
     "error[APL101]: no\n --> a.apl:1:11\n  |\n1 | save mm or\n  |           ^"),
    (render_text, diagnose("APL101", "no", at("save (mm,\n  bmm)\n", 5, 16)),
     "error[APL101]: no\n --> a.apl:1:6\n  |\n1 | save (mm,\n  |      ^^^^"),
    (render_text, NOTE, "note[APL101]: by the way\n = note: there"),
    (render_concise, diagnose("APL104", FOLDER), f"error[APL104]: {FOLDER}"),
    (render_github, NOTE, "::notice title=APL101::by the way"),
    # no columns where the lines differ, no character that would end a command, no place inside a bundled file
    (render_github, diagnose("APL101", "no", at("save (mm,\nbmm)", 5, 13)),
     "::error file=a.apl,line=1,endLine=2,title=APL101::no"),
    (render_github, diagnose("APL101", "50%", at("save mm", 0, 4, "odd,name:1%.apl"), help="more"),
     "::error file=odd%2Cname%3A1%25.apl,line=1,endLine=1,col=1,endColumn=5,title=APL101::50%25%0Ahelp: more"),
    (render_github, diagnose("APL102", "odd", at("save mm", 0, 4, "<fsdp>")), "::warning title=APL102::<fsdp>:1: odd"),
]  # fmt: skip


@pytest.mark.parametrize(("render", "diagnostic", "printed"), PRINTED)
def test_what_is_printed_of_a_diagnostic(render: Callable[..., str], diagnostic: Diagnostic, printed: str) -> None:
    assert render([diagnostic]) == printed
    assert render([]) == ""


@pytest.mark.parametrize("start", [0, 500, 5000, 9990])
def test_of_a_long_line_the_part_around_the_span_is_shown(start: int) -> None:
    text = "x" * start + "HERE" + "x" * (9996 - start)
    lines = render_text([diagnose("APL101", "no", at(text, start, start + 4))]).splitlines()
    shown, underline = lines[3], lines[4]
    assert len(shown) < 120
    assert shown[underline.index("^") : underline.rindex("^") + 1] == "HERE"


def test_of_a_long_span_the_visible_part_is_underlined() -> None:
    text = "y" * 9000
    lines = render_text([diagnose("APL003", "no", at(text, 0, 9000))]).splitlines()
    assert len(lines[4]) < 120
    assert lines[4].count("^") == lines[3].count("y")


def test_wide_and_invisible_characters_keep_the_underline_in_place() -> None:
    text = "模型\tsave\x1b[31m mn"
    start = text.index("mn")
    lines = render_text([diagnose("APL101", "no", at(text, start, start + 2))]).splitlines()
    assert "\x1b" not in "".join(lines)
    assert lines[4].index("^") == lines[3].index("mn") + 2, "two characters of two columns stand before it"


def test_json_of_nothing_and_of_what_has_no_place() -> None:
    assert json.loads(render_json([])) == {"version": 1, "diagnostics": []}
    assert json.loads(render_json([diagnose("APL104", "no")]))["diagnostics"][0]["location"] is None
