"""What went wrong in silence elsewhere, on joint graphs under ``torch.compile``: told by name here, or done right.

Each test names its source. The same hazards on flat graphs are in ``tests/backends/test_remat.py``. Of joint graphs,
masks of dropout (pytorch#190758, OLMo-core#828), buffers that are read before they are written (pytorch#197039,
torchtitan#4708) and attention, which is tagged random whatever its dropout (pytorch#187985), are in
``tests/backends/test_partition_cases.py``; what needs process groups (autoparallel#469: the value behind the gather
chain was saved) is in ``tests/policies/test_fsdp.py``, and what needs a second process (pytorch#194658, #169959: a
changed policy was served a stale artefact) in ``tests/backends/test_compile_caches.py``. pytorch#147561 (ranks decide
differently) comes down to equal digests in every process, ``tests/planning/test_planner.py``.
"""

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.audit.report import Report
from policylang.backends.torch_compile.backend import PolicyBackend
from tests.support.compiled import Trained, assert_bitwise_equal, backend_for, train
from tests.support.models import Example, Function, counter, mixtral, mlp, square_loss

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def trained(example: Example, backend: PolicyBackend | str, *, steps: int = 1) -> Trained:
    return train(example, lambda model: torch.compile(model, backend=backend), steps=steps)


def report_on(text: str, example: Example) -> Report:
    backend = backend_for(text)
    trained(example, backend)
    return policylang.report(backend)


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


def test_counters_move_once_a_step() -> None:
    """torchtitan#1593: the update was recomputed, and the counter moved twice. The buffers are compared too.

    With the model as it runs uncompiled: torch's own partitioner reads the counter after its update (seen with 2.13).
    """
    ours = trained(counter(), backend_for("optional recompute everything"), steps=3)
    assert set(ours.buffers) == {"count", "cache"}
    assert_bitwise_equal(ours, train(counter(), steps=3))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["recompute everything", "recompute everything; save topk"])
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
