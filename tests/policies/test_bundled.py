"""The bundled policies: readable, clean, and right on every model they are for."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import policylang
from policylang.language.resources import policies_folder
from tests.support.models import HUGGING_FACE, ZOO

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


def step(model_name: str, backend: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, of the inputs too, of one step whose forward and backward are compiled by ``backend``."""
    torch.compiler.reset()
    module, inputs, loss_fn = ZOO[model_name]()
    compiled = torch.compile(module, backend=backend)
    torch.manual_seed(7)  # what dropout draws
    loss = loss_fn(compiled(*inputs))
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    gradients |= {f"input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    buffers = {f"buffer {name}": b.clone() for name, b in module.named_buffers()}
    return loss.detach(), gradients | buffers


@pytest.fixture(scope="module")
def without_a_policy():
    known: dict[str, tuple[Tensor, dict[str, Tensor]]] = {}

    def look_up(model: str) -> tuple[Tensor, dict[str, Tensor]]:
        if model not in known:
            # Of the counter, torch's own partitioner recomputes a read of the buffer after its update: it is wrong.
            known[model] = step(model, "eager" if model == "counter" else "aot_eager")
        return known[model]

    return look_up


@pytest.mark.parametrize(
    ("policy", "model"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS],
)
def test_loss_and_gradients_are_bitwise_those_without_a_policy(policy, model, without_a_policy):
    loss, gradients = without_a_policy(model)
    (policy_loss, policy_gradients), report = under(policy, model)
    assert torch.equal(loss, policy_loss)
    assert gradients.keys() == policy_gradients.keys()
    assert len(gradients) > 0
    different = [name for name in gradients if not torch.equal(gradients[name], policy_gradients[name])]
    assert different == []
    assert report.audit.agrees
    assert all(rule.matched or rule.text.startswith("optional") for rule in report.rules)


@cache
def under(policy: str, model: str):
    """A step under a policy, and its report: the tests ask for the same ones."""
    backend = policylang.backend(policy, inner="aot_eager")
    return step(model, backend), policylang.report(backend)


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
