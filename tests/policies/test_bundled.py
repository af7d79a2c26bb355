"""The bundled policies: readable, clean, and right on every model they are for."""

from __future__ import annotations

from functools import cache

import pytest

import policylang
from policylang.audit.report import Report
from policylang.backends.joint import JointPartitioner
from policylang.language.resources import policies_folder
from tests.support.compiled import assert_same_as_without
from tests.support.models import HUGGING_FACE, llama
from tests.support.run_partition import Result, assert_same_result, traced, unpartitioned

POLICIES = sorted(path.stem for path in policies_folder().glob("*.apl"))
FOR_ANYTHING_WITH_BLOCKS = ("torchtitan_op_sac", "torchtitan_full", "every_2nd_layer", "memory_staged", "save_all")
FOR_TRANSFORMERS = ("llama3_sac", *FOR_ANYTHING_WITH_BLOCKS)
PAIRS = [
    *((policy, model) for model in (*HUGGING_FACE, "flex") for policy in FOR_TRANSFORMERS),
    *((policy, model) for model in ("resnet", "dropout", "mlp") for policy in FOR_ANYTHING_WITH_BLOCKS),
    *(
        (policy, model)
        for policy in ("save_all", "memory_staged")
        for model in ("shared_parameters", "aliased_output", "counter")
    ),
]
QUICK = {(policy, "llama") for policy in FOR_TRANSFORMERS} | {
    # what sets larger models apart shows in `test_flat_policies.py`, under every policy
    ("torchtitan_op_sac", "resnet"),
    ("torchtitan_full", "dropout"),
    ("every_2nd_layer", "mlp"),
    ("memory_staged", "shared_parameters"),
    *(("save_all", model) for model in ("aliased_output", "counter")),
}


def test_the_library_is_what_the_documents_say():
    fsdp = "fsdp fsdp_overlap fsdp_reshard_always fsdp_reshard_never fsdp_tp_overlap"
    torchtitan = "torchtitan_default torchtitan_eager torchtitan_full torchtitan_graph_full torchtitan_op_sac"
    others = "every_2nd_layer llama3_sac memory_staged prelude replay save_all"
    assert sorted(f"{fsdp} {torchtitan} {others}".split()) == POLICIES


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_starts_with_what_a_user_wants_to_read(name):
    text = (policies_folder() / f"{name}.apl").read_text()
    header = text[: text.index("\n\n")]
    assert all(line.startswith("#") for line in header.splitlines())
    assert header.splitlines()[0].rstrip().endswith((".", ":"))
    if name != "prelude":
        for part in ("What it does", "What it ", "Not "):
            assert f"# {part}" in header


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "prelude"])
def test_a_policy_loads_without_a_complaint_and_under_its_own_name(name):
    assert policylang.check(name).diagnostics == ()
    if not name.startswith("fsdp"):  # a part to include has no name of its own
        assert policylang.load(name).name == name


@pytest.mark.parametrize(
    ("policy", "model"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS]
)
def test_loss_and_gradients_are_bitwise_those_without_a_policy(policy, model):
    found, report = under(policy, model)
    assert_same_result(unpartitioned(model), found)
    assert any(gradient is not None and gradient.any() for gradient in found.gradients)
    assert report.audit.agrees
    assert all(rule.matched or rule.text.startswith("optional") for rule in report.rules)


def test_a_model_compiled_by_the_backend_trains_on_the_same_bits():
    assert_same_as_without(lambda: llama(1), policylang.backend("llama3_sac", inner="aot_eager"))


@cache
def under(policy: str, model: str) -> tuple[Result, Report]:
    """A step under a policy, and its report: the tests ask for the same ones."""
    found = traced(model).run(JointPartitioner(policylang.load(policy)))
    return found, policylang.report(found.partition.forward)


def report_on(policy: str, model: str):
    return under(policy, model)[1]


def by_text(report, text: str):
    (rule,) = [rule for rule in report.rules if rule.text == text]
    return rule


def test_llama3_sac_decides_what_its_comment_says():
    """Two layers of Llama: per layer q, k, v, o, gate, up and down, one attention, two residual sums."""
    report = report_on("llama3_sac", "llama")
    assert by_text(report, "save matmul in block").matched == 14
    assert by_text(report, "optional recompute every 2nd projection per block").decided == 6
    assert by_text(report, "optional save attention in block").decided == 2
    residual = by_text(report, "optional save first residual per block")
    assert (residual.matched, residual.decided) == (2, 2)
    shape = 2 * 8 * 32 * 4  # batch, length, hidden, float32
    assert residual.saved_bytes == 2 * shape


def test_full_keeps_one_hidden_state_a_block():
    report = report_on("torchtitan_full", "llama")
    boundary = by_text(report, "save everything in block where crosses block")
    assert boundary.saved_bytes == 2 * (2 * 8 * 32 * 4)


def test_save_all_recomputes_nothing():
    report = report_on("save_all", "llama")
    assert len(report.recomputed) == 0
    assert report.undecided == 0


def test_policies_keep_less_the_more_they_recompute():
    saved = [
        report_on(name, "llama").saved.bytes
        for name in ("torchtitan_full", "every_2nd_layer", "torchtitan_op_sac", "llama3_sac", "save_all")
    ]
    full, every_2nd, op_sac, sac, everything = saved
    assert full < op_sac <= sac < everything
    assert full < every_2nd < everything
