"""Thresholds that the batch can flip: named where ranks would then run other collectives, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import policylang
from policylang.backends.joint import JointPartitioner
from policylang.graph.facts import Facts, GraphKind
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.planning.capabilities import EAGER, FLAT, HOOK, JOINT, Capabilities
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from tests.support.compiled import fresh_dynamo
from tests.support.joint import capture_joint
from tests.support.sharded import fake_ranks
from tests.support.textgraph import facts_of

GATHERED = """
    %w = parameter shape=4x64 dtype=f32
    %x = {given} shape=16x64 dtype=f32
    %g = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:{ranks} shape=16x64 dtype=f32
    %v = _c10d_functional.wait_tensor.default(%g) follows=%g shape=16x64 dtype=f32
    %t = aten.t.default(%v) view shape=64x16 dtype=f32
    %mm = aten.mm.default(%x, %t) head compute shape=16x16 dtype=f32 flops=32768
    %y = aten.sin.default(%mm) shape=16x16 dtype=f32
    ---
    %d = tangent shape=16x16 dtype=f32
    %c = aten.cos.default(%mm) shape=16x16 dtype=f32
    %b = aten.mul.Tensor(%d, %c) shape=16x16 dtype=f32
    %gw = aten.mm.default(%x, %b) shape=64x16 dtype=f32
    {more}
    output(%y, %gw{returned})
"""
"""The backward needs the product, and the weight only to compute the product again."""


def graph(
    given: str = "input", ranks: int = 4, more: str = "", returned: str = "", kind: GraphKind | None = None
) -> Facts:
    return facts_of(GATHERED.format(given=given, ranks=ranks, more=more, returned=returned), kind)


def warnings_of(text: str, facts: Facts, path: Capabilities = JOINT) -> list[Diagnostic]:
    made = plan(policylang.parse(text), facts, path)
    return [found for found in made.diagnostics if found.code == "APL386"]


RULE = "undecided -> recompute\noptional save mm where bytes > 1 KiB"


def test_the_threshold_the_value_and_the_collective_are_named() -> None:
    (warning,) = warnings_of(RULE, graph())
    assert warning.severity is Severity.WARNING
    assert warning.message == (
        "`optional save mm where bytes > 1 KiB` decides about `mm` by a size that changes with the batch: a rank that "
        "compiles for another batch alone may run `g` in its backward where the others do not, and all of them wait "
        "for ever"
    )
    assert warning.span is not None
    assert warning.span.text == "bytes > 1 KiB"
    assert warning.details == ("mm (aten.mm.default) in head: runs g again",)
    assert warning.help == (
        "decide by name or module in place of size, have every rank compile for the same sizes, or put the threshold "
        "where no batch reaches it"
    )


def test_the_two_plans_differ_in_that_collective() -> None:
    """What the warning says of two batches holds of two plans."""
    facts = graph()
    again = []
    for limit in ("1000 B", "2000 B"):  # the product has 1024 bytes here
        made = plan(policylang.parse(f"undecided -> recompute\noptional save mm where bytes > {limit}"), facts, JOINT)
        again.append([facts.names[row] for row in saved_and_recomputed(made).recomputed])
    assert again == [[], ["g", "v", "t", "mm"]]


@pytest.mark.parametrize(
    "rule",
    [
        "save mm where bytes > 1 KiB",
        "save mm where bytes <= 1 KiB",
        "save mm where numel >= 1000",
        "save mm where numel == 2560",
        "save mm where flops > 1 MFLOP",
        "save mm where shape[0] == 32",
        "save mm where shape[-2] > 8",
        "save mm where not bytes > 1 KiB",
        "save mm where users > 0 and (dtype == bf16 or bytes > 1 KiB)",
        "save everything where crosses cut per 1 KiB",
        "offload mm where bytes > 1 KiB",
        "leave mm where bytes > 1 KiB",
        "save mm except (everything where bytes < 1 KiB)",
        "save first (mm where bytes > 1 KiB) per graph",
        "save inputs of (sin where bytes > 1 KiB)",
        "save everything chain before (sin where bytes > 1 KiB)",
        "let large = mm where bytes > 1 KiB\nsave large in head",
        "save mm; recompute mm where bytes < 2 KiB",
    ],
)
def test_every_form_that_asks_for_a_size(rule: str) -> None:
    (warning,) = warnings_of("undecided -> recompute\n" + rule.replace("save", "optional save"), graph())
    assert warning.details == ("mm (aten.mm.default) in head: runs g again",)


@pytest.mark.parametrize(
    "rule",
    [
        "save mm",
        "save mm where ndim == 2 and users > 1 and inputs == 2",
        "save mm where bytes > 63",  # one row of the product has 64 bytes
        "save mm where bytes > 2 MiB",  # a thousand times 1024 bytes are less
        "save mm where flops > 2000",  # one row of it takes 2048
        "save mm where flops > 1 GFLOP",
        "save mm where numel == 2561",  # no multiple of 16
        "save mm where shape[1] == 16",  # the width is the weight's
        "save mm where shape[-1] > 16",
        "save mm where shape[0] == 1",  # of a form, not of a size
        "save mm where shape[2] == 8",
        "save mm where dtype == bf16 and bytes > 1 KiB",
        "save mm in tail where bytes > 1 KiB",
        "save bmm where bytes > 1 KiB",
        "save mm where bytes > 1 KiB\nrecompute mm",  # a later rule decides
        "save mm where bytes > 1 KiB\nsave mm",
        "recompute mm where bytes > 1 KiB",  # it is recomputed either way
        "save all_gather where bytes > 1 KiB",  # of a weight
        "save everything where crosses cut per 1 GiB",  # more than any batch makes
        "save sin where bytes > 1 KiB",  # the backward does not need it
    ],
)
def test_rules_that_no_batch_flips_or_whose_flip_changes_nothing(rule: str) -> None:
    text = "undecided -> recompute\n" + rule.replace("save", "optional save").replace("\nrec", "\noptional rec")
    assert warnings_of(text, graph()) == []


@pytest.mark.parametrize(
    "facts",
    [
        graph(given="parameter"),
        graph(given="buffer"),
        graph(ranks=1),
        graph(more="%gx = aten.mm.default(%b, %v)", returned=", %gx"),  # the weight is gathered again in any case
        facts_of(GATHERED.split("%t =")[0].format(given="input", ranks=4) + "output(%v)"),  # no backward
    ],
    ids=["of parameters", "of a buffer", "one rank", "runs either way", "no backward"],
)
def test_graphs_that_are_not_hurt(facts: Facts) -> None:
    assert warnings_of(RULE, facts) == []


def test_a_saved_value_in_between_stops_the_recomputation() -> None:
    assert warnings_of(f"{RULE}\nsave t", graph()) == []
    assert warnings_of(f"{RULE}\nsave all_gather", graph()) == []
    assert warnings_of("optional save mm where bytes > 1 KiB", graph()) == [], "min-cut repeats no collective"
    assert warnings_of("undecided -> save\nleave mm where bytes > 1 KiB", graph()) == [], "and no product"


def test_min_cut_may_repeat_what_is_cheap_and_with_it_what_is_told_to_run_again() -> None:
    facts = facts_of("""
        %b = parameter shape=4 dtype=f32
        %x = input shape=16x16 dtype=f32
        %g = _c10d_functional.all_gather_into_tensor.default(%b, 4, 0) collective group=dp:4 shape=16 dtype=f32
        %v = _c10d_functional.wait_tensor.default(%g) follows=%g shape=16 dtype=f32
        %add = aten.add.Tensor(%x, %v) shape=16x16 dtype=f32
        %y = aten.sin.default(%add) shape=16x16 dtype=f32
        ---
        %d = tangent shape=16x16 dtype=f32
        %c = aten.cos.default(%add) shape=16x16 dtype=f32
        %r = aten.mul.Tensor(%d, %c) shape=16x16 dtype=f32
        output(%y, %r)
    """)
    rule = "save add where bytes > 1 KiB"
    (warning,) = warnings_of(f"include <fsdp_reshard_always>\n{rule}", facts)
    assert warning.details == ("add (aten.add.Tensor): runs g again",)
    assert warnings_of(f"include <fsdp_reshard_never>\n{rule}", facts) == []


def test_only_paths_on_which_a_rank_compiles_again_alone() -> None:
    assert len(warnings_of(RULE, graph(), HOOK)) == 1
    assert warnings_of(RULE, graph(), EAGER) == []
    flat = graph(kind=GraphKind.FLAT)
    assert warnings_of(RULE, flat, FLAT) == warnings_of(RULE, flat) == []


def test_each_rule_once_with_all_its_values_in_order() -> None:
    text = f"{RULE}\nsave sin, mm where numel < 100"
    assert [warning.span.text for warning in warnings_of(text, graph()) if warning.span is not None] == [
        "bytes > 1 KiB",
        "numel < 100",
    ]
    assert warnings_of(text, graph()) == warnings_of(text, graph())


class Sharded(nn.Module):
    """One weight over all ranks, gathered where it is used."""

    def __init__(self, dims: int = 16) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.ones(dims // 4, 64))

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.all_gather_tensor_autograd(self.shard, 0, torch.distributed.group.WORLD)
        return torch.sin(x @ weight.t())


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_as_torch_compile_hands_it_over(dynamic: bool) -> None:
    with fake_ranks(4):
        joint = capture_joint(Sharded(), [torch.ones(24, 64)], dynamic=dynamic)
        made, grown = (
            JointPartitioner(policylang.parse(f"undecided -> recompute\noptional save mm where bytes > {limit}")).plan(
                joint.gm,
                num_fwd_outputs=joint.num_fwd_outputs,
                static_inputs=joint.static_lifetime_input_indices,
            )
            for limit in ("1 KiB", "1 GiB")
        )
    (warning,) = (found for found in made.diagnostics if found.code == "APL386")
    assert "decides about `mm` by a size that changes with the batch" in warning.message
    assert warning.details == ("mm (aten.mm.default): runs all_gather_into_tensor again",)
    assert not [found for found in grown.diagnostics if found.code == "APL386"]


def test_two_batches_compiled_one_after_the_other_run_other_collectives() -> None:
    """What the warning is about, as it happens: the second compilation is that of one rank alone."""
    backend = policylang.backend(policylang.parse(RULE), inner="aot_eager")
    with fake_ranks(4), fresh_dynamo():
        compiled = torch.compile(Sharded(), backend=backend, dynamic=False)
        for batch in (24, 2):
            compiled(torch.ones(batch, 64)).sum().backward()
        reports = [report for graph in backend.graphs for report in graph.reports]
    again = [report.recomputed.names if report.recomputed else () for report in reports]
    assert [[name for name in names if "gather" in name] for names in again] == [[], ["all_gather_into_tensor"]]
    for report in reports:
        (warning,) = report.warnings
        assert "may run `all_gather_into_tensor` in its backward where the others do not" in warning
