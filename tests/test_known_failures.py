"""What went wrong in silence elsewhere, on joint graphs under ``torch.compile``: told by name here, or done right.

Each test names its source. The same hazards on flat graphs are in ``tests/backends/test_remat.py``; what needs
process groups (autoparallel#469: the value behind the gather chain was saved) is in ``tests/policies/test_fsdp.py``,
and what needs a second process (pytorch#194658, #169959: a changed policy was served a stale artefact) in
``tests/backends/test_compile_caches.py``. pytorch#147561 (ranks decide differently) comes down to equal digests in
every process, ``tests/planning/test_planner.py``.
"""

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.audit.report import Report
from policylang.backends.torch_compile.backend import PolicyBackend
from policylang.language.loader import parse_policy
from policylang.language.syntax import Policy
from tests.graph.captured import facts_of_model
from tests.support.compiled import Trained, assert_bitwise_equal, backend_for, train
from tests.support.drawn import slow
from tests.support.models import Example, Function, counter, gpt2, llama, mixtral, mlp, square_loss

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def trained(example: Example, backend: PolicyBackend | str, *, steps: int = 1) -> Trained:
    return train(example, lambda model: torch.compile(model, backend=backend), steps=steps)


def report_on(text: str, example: Example) -> Report:
    backend = backend_for(text)
    trained(example, backend)
    return policylang.report(backend)


# --- no effect, or the opposite one -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("save addmm in layers.*.upp", "nearest module paths: layers.0.up"),
        ("save aten.convolution", "aten.convolution: 0 nodes"),
    ],
)
def test_a_misspelt_path_or_an_operator_that_does_not_occur_is_an_error(rule: str, said: str) -> None:
    """TorchTitan's ``full_recompute_save_ops`` saved 0 nodes without a word; so did maxtext#971, DeepSpeed#5704."""
    with pytest.raises(policylang.PolicyMatchError) as caught:
        trained(mlp(), backend_for(f"recompute everything; {rule}"))
    assert f"`{rule}` matches nothing" in str(caught.value)
    assert said in str(caught.value)


def test_an_operator_without_overload_means_all_of_them() -> None:
    """pytorch#176065: the documented ``aten.mm`` matched nothing."""
    report = report_on("save aten.addmm", mlp())
    assert report.rules[0].matched == 6  # two projections in three layers


def test_the_attention_of_every_kernel_is_attention() -> None:
    """torchtitan#2091: a list without the cuDNN kernel recomputed attention on the newest machines."""
    facts = facts_of_model("llama")
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        name = f"aten._scaled_dot_product_{kernel}"
        policy = parse_policy(f"save attention except {name}").policy
        assert isinstance(policy, Policy), f"{name} is no operator"
    assert len(facts.by_target["aten._scaled_dot_product_flash_attention_for_cpu.default"]) == 2


def test_a_rule_says_what_it_does_and_does_no_more() -> None:
    """maxtext#4288, jax#23869, Megatron-LM#1225: a policy did the opposite of what it said."""
    everything = report_on("save everything", mlp())
    nothing = report_on("recompute everything", mlp())
    assert (len(everything.recomputed), len(nothing.saved)) == (0, 0)
    assert everything.saved.bytes > 0
    assert nothing.recomputed.flops > 0


def checkpointed() -> Example:
    torch.manual_seed(0)

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model.outside(checkpoint(lambda y: model.inside(y).sin().cos(), x, use_reentrant=False)).tanh()

    model = Function(forward, inside=nn.Linear(8, 8), outside=nn.Linear(8, 8))
    return Example(model, (torch.randn(4, 8),), square_loss)


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_neither_a_policy_nor_a_budget_overrides_the_users_checkpoint(budget: float) -> None:
    """pytorch#128730, #147561. The result of ``sin`` is the user's to recompute until a rule says ``override``."""
    with functorch_config.patch(activation_memory_budget=budget):
        kept = report_on("save sin; undecided -> auto", checkpointed())
        taken = report_on("override save sin; undecided -> auto", checkpointed())
    assert "sin" in kept.recomputed.names
    assert kept.rules[0].kept_by_user == 1
    assert "sin" in taken.saved.names


@pytest.mark.parametrize("budget", [1.0, 0.3, 0.0])
def test_a_budget_does_not_undo_a_rule(budget: float) -> None:
    """pytorch#197838: what a budget decides is its own affair; a rule's values stay, whatever it is set to."""
    with functorch_config.patch(activation_memory_budget=budget):
        report = report_on("save mm or addmm; undecided -> auto", mlp())
    decided = {name for name, decision in report.decisions.items() if decision.rule is not None}
    assert decided
    assert decided.isdisjoint(report.recomputed.names)


# --- wrong numbers ----------------------------------------------------------------------------------------------------
def test_dropout_is_recomputed_with_the_mask_it_drew() -> None:
    """pytorch#190758, OLMo-core#828: with a fresh one, gradients were wrong and nothing said so."""
    plain = trained(gpt2(1), "aot_eager")
    backend = backend_for("recompute everything in block")
    assert_bitwise_equal(trained(gpt2(1), backend), plain)
    report = policylang.report(backend)
    assert any("dropout" in name for name in report.recomputed.names)


def scaled() -> Example:
    """Reads a buffer, and writes it later: what was read cannot be read again."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        y = (model.first(x) * model.scale.exp()).sin()
        model.scale.add_(1)
        return y

    torch.manual_seed(0)
    model = Function(forward, first=nn.Linear(8, 8), scale=nn.Buffer(torch.ones(8)))
    return Example(model, (torch.randn(4, 8),), square_loss)


def test_a_buffer_that_is_written_after_it_was_read_is_not_read_again() -> None:
    """pytorch#197039, torchtitan#4708: the recomputation read what the step had written."""
    with pytest.raises(policylang.PolicyMatchError) as caught:
        trained(scaled(), backend_for("recompute everything"))
    said = "`recompute everything` cannot recompute `exp`: it reads memory that the graph changes"
    assert said in str(caught.value)
    uncompiled = train(scaled(), steps=2)
    assert_bitwise_equal(trained(scaled(), backend_for("optional recompute everything"), steps=2), uncompiled)


def test_counters_move_once_a_step() -> None:
    """torchtitan#1593: the update was recomputed, and the counter moved twice. The buffers are compared too.

    With the model as it runs uncompiled: torch's own partitioner reads the counter after its update (seen with 2.13).
    """
    ours = trained(counter(), backend_for("optional recompute everything"), steps=3)
    assert set(ours.buffers) == {"count", "cache"}
    assert_bitwise_equal(ours, train(counter(), steps=3))


@pytest.mark.parametrize("text", ["recompute everything", slow("recompute everything; save topk")])
def test_tokens_go_to_the_experts_they_went_to(text: str) -> None:
    """torchtitan#1117, pytorch#186572: the routing flipped between forward and recomputation."""
    plain = trained(mixtral(1), "aot_eager")
    backend = backend_for(text)
    assert_bitwise_equal(trained(mixtral(1), backend), plain)
    report = policylang.report(backend)
    assert [rule.decided for rule in report.rules[1:]] == [1][: text.count(";")]
    assert report.decisions["topk"].action == "save"
    assert "topk" not in report.recomputed.names
    assert len(report.notes) == 1 - text.count(";")


def test_attention_without_dropout_is_recomputed_as_any_other_operator() -> None:
    """pytorch#187985: SDPA is tagged random whatever its dropout, and was refused."""
    plain = trained(llama(1), "aot_eager")
    backend = backend_for("recompute everything")
    assert_bitwise_equal(trained(llama(1), backend), plain)
    recomputed = policylang.report(backend).recomputed.names
    assert sum(name.startswith("_scaled_dot_product") for name in recomputed) == 1


def test_a_changed_policy_decides_anew() -> None:
    """pytorch#194658, #169959, in one process and without a reset: each backend's own policy holds."""
    module, inputs, loss_fn = mlp()
    saved = []
    for text in ("recompute everything", "save everything", "recompute everything"):
        backend = backend_for(text)
        loss_fn(torch.compile(module, backend=backend)(*inputs)).backward()
        saved.append(len(policylang.report(backend).saved))
    assert saved[0] == saved[2] < saved[1]
