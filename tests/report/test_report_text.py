"""The table a person reads, to the letter."""

from __future__ import annotations

from attrs import evolve

from policylang.audit.outcome import combined
from policylang.audit.report import (
    AuditReport,
    DecisionReport,
    Report,
    RuleReport,
    ValuesReport,
)
from policylang.language.plain_data import from_plain
from policylang.planning.plan import ExpectationOutcome

MIB = 2**20

REPORT = Report(
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

TEXT = """\
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
    rules = [evolve(rule, recomputed_seconds=each) for rule, each in zip(REPORT.rules, (2.5e-3, 0.0), strict=True)]
    recomputed = evolve(REPORT.recomputed, seconds=2.5e-3)
    timed = evolve(REPORT, rules=tuple(rules), recomputed=recomputed, device="h100-sxm", forward_seconds=0.01)
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


def test_one_graph():
    assert str(REPORT) == TEXT


def test_a_plan_without_a_partition_claims_no_bytes():
    planned = evolve(
        REPORT,
        rules=tuple(evolve(rule, saved_bytes=None, recomputed_flops=None) for rule in REPORT.rules),
        saved=None,
        recomputed=None,
        undecided_saved_bytes=None,
        audit=None,
    )
    text = str(planned)
    assert "MiB in" not in text
    assert "audit       not yet: the graph is planned, and not partitioned" in text


def test_differences_are_printed_one_by_one():
    text = str(evolve(REPORT, audit=AuditReport(False, ("`mm` was not saved", "`sin` was saved"))))
    assert "audit       `mm` was not saved\naudit       `sin` was saved" in text
    assert "do what was planned" not in text


def test_a_long_rule_is_cut_and_a_path_is_shortened():
    rule = RuleReport("/some/where/deep/p.apl:3", "save " + "mm or " * 30 + "bmm", 1, 1, 0)
    line = next(line for line in str(evolve(REPORT, rules=(rule,))).splitlines() if "p.apl:3" in line)
    assert line.startswith("p.apl:3 ")
    assert "…" in line


def test_several_graphs_are_summed_rule_by_rule():
    cached = evolve(REPORT, from_cache=True, forward_nodes=10)
    both = combined([REPORT, cached])
    assert both.graphs == (REPORT, cached)
    assert both.forward_nodes == 310
    assert both.rules[0] == RuleReport(
        "policies/llama3_sac.apl:8", "recompute everything in block", 400, 240, 160, 0, 0, 5_000_000
    )
    assert both.saved == ValuesReport(("0/mm", "0/add", "1/mm", "1/add"), 12 * MIB)
    assert both.decisions["1/mm"] == DecisionReport("save", "policies/llama3_sac.apl:9")
    assert both.warnings == REPORT.warnings
    text = str(both)
    assert text.startswith("policy llama3_sac: 310 forward values, 16 blocks, 2 graphs\n")
    assert "graph  forward values  blocks  saved  recomputed" in text
    assert "1                  10       8  6 MiB       3 MiB  from the compile cache" in text


def test_one_disagreement_among_graphs_is_a_disagreement():
    wrong = evolve(REPORT, audit=AuditReport(False, ("`mm` was not saved",)))
    assert combined([REPORT, wrong]).audit == AuditReport(False, ("graph 1: `mm` was not saved",))
