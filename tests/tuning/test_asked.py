"""What a user writes as a budget, an optimizer or a reserve, and what is said of it where it is none."""

from __future__ import annotations

import attrs
import pytest
import torch

from policylang.graph.facts import InputKind
from policylang.tuning.budgets import STATES, read_budget, read_optimizer, read_reserve, trained_bytes
from policylang.tuning.evaluation import Budget
from tests.support.tuned import tuned_facts

GIB = 1 << 30


def said(found: object) -> tuple[str, str | None]:
    return found.message, found.help


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ("70 GiB", 70 * GIB),
        ("70GiB", 70 * GIB),
        (" .5 TiB ", GIB << 9),
        ("1e3 MB", 10**9),
        (70 * GIB, 70 * GIB),
        (2.5e9, 2_500_000_000),
    ],
)
def test_a_peak(given, limit):
    assert read_budget(peak=given) == Budget("peak", limit)


def test_the_other_two_budgets_and_none():
    assert read_budget(saved="6 GiB") == Budget("saved", 6 * GIB)
    assert read_budget(recompute_time="5%") == Budget("recompute time", 0.05)
    assert read_budget(recompute_time=0.05) == Budget("recompute time", 0.05)
    assert read_budget(recompute_time="0%") == Budget("recompute time", 0.0)
    assert read_budget() is None
    message, _ = said(read_budget(peak="1 GiB", recompute_time="5%"))
    assert message == "a budget is one figure, and 2 are given: peak, recompute time"


@pytest.mark.parametrize(
    ("given", "message", "help"),
    [
        ("70", "the peak of `70` has no unit", "did you mean `70 GiB`?"),
        ("70 G", "the peak of `70 G` has no unit of bytes: `G`", "did you mean `70 GiB` or `70 GB`?"),
        ("70 gib", "the peak of `70 gib` has no unit of bytes: `gib`", "did you mean `70 GiB`?"),
        ("70 sec", "the peak of `70 sec` has no unit of bytes: `sec`", "write a number and a unit: `70 GiB`"),
        ("70%", "the peak of `70%` has no unit of bytes: `%`", "write a number and a unit: `70 GiB`"),
        ("0 GiB", "the peak of `0 GiB` is zero", "a budget is more than 0: `70 GiB`"),
        ("0", "the peak of `0` is zero", "a budget is more than 0: `70 GiB`"),
        ("-3 GiB", "the peak of `-3 GiB` is negative", "a budget is more than 0: `70 GiB`"),
        ("0.1 B", "the peak of `0.1 B` is less than a byte", "a budget is more than 0: `70 GiB`"),
        ("nan GiB", "the peak of `nan GiB` is no size", "write a number and a unit: `70 GiB`"),
        ("inf GiB", "the peak of `inf GiB` is no size", "write a number and a unit: `70 GiB`"),
        ("1e999 GiB", "the peak of `1e999 GiB` is no size", "write a number and a unit: `70 GiB`"),
        ("much", "the peak of `much` is no size", "write a number and a unit: `70 GiB`"),
        ("", "the peak of `` is no size", "write a number and a unit: `70 GiB`"),
        (float("nan"), "the peak of `nan` is no number", "write a number and a unit: `70 GiB`"),
        (-1, "the peak of `-1` is negative", "a budget is more than 0: `70 GiB`"),
        (True, "the peak is a size, and not `True`", "write a number and a unit: `70 GiB`"),
        (["70 GiB"], "the peak is a size, and not `['70 GiB']`", "write a number and a unit: `70 GiB`"),
    ],
)
def test_a_peak_that_is_none(given, message, help):
    assert said(read_budget(peak=given)) == (message, help)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("5", "the recompute time of `5` has no `%`"),
        ("5 ms", "the recompute time of `5 ms` has no `%`"),
        ("-5%", "the recompute time of `-5%` is negative"),
        ("nan%", "the recompute time of `nan%` is no percentage"),
        ("little", "the recompute time of `little` is no percentage"),
        (5, "the recompute time of `5` is more than all of it"),
        (float("nan"), "the recompute time of `nan` is no number"),
    ],
)
def test_a_time_that_is_none(given, message):
    assert said(read_budget(recompute_time=given))[0] == message


def test_a_reserve():
    assert read_reserve("5%") == 0.05
    assert read_reserve(0) == 0
    assert said(read_reserve("100%")) == ("a reserve of `100%` leaves no memory", "write less, such as `5%`")
    assert said(read_reserve("-1%"))[0] == "the reserve of `-1%` is negative"
    assert said(read_reserve("5"))[1] == "did you mean `5%`?"


def test_the_state_of_an_optimizer():
    facts = tuned_facts(4)
    parameters = 4 * 2 * 8 * 1024 * 1024
    assert read_optimizer("adamw", facts) == 2 * parameters
    assert read_optimizer("AdamW", facts) == 2 * parameters
    assert read_optimizer("sgd", facts) == 0
    assert read_optimizer(None, facts) == 0
    assert read_optimizer("24 GiB", facts) == 24 * GIB
    assert read_optimizer(0, facts) == 0


def test_a_parameter_without_a_gradient_has_no_state():
    assert trained_bytes(tuned_facts(4, frozen=3)) == 2 * 8 * 1024 * 1024


def test_an_optimizer_that_nobody_knows():
    facts = tuned_facts(1)
    assert said(read_optimizer("adamv", facts)) == ("there is no optimizer `adamv`", "did you mean `adamw` or `adam`?")
    message, help = said(read_optimizer("shampoo", facts))
    assert message == "there is no optimizer `shampoo`"
    assert help.startswith("write one of `sgd`, `sgd-momentum`, ")
    assert help.endswith(", or the size of its state: `24 GiB`")
    assert said(read_optimizer("24", facts))[0] == "the optimizer's state of `24` has no unit"
    assert said(read_optimizer("-1 GiB", facts))[0] == "the optimizer's state of `-1 GiB` is negative"


def test_a_step_with_its_optimizer_has_the_state_in_it():
    facts = tuned_facts(1)
    names = ["optimizer.up.weight.exp_avg" if name == "w0" else "" for name in facts.names]
    message, help = said(read_optimizer("adamw", attrs.evolve(facts, input_names=names)))
    assert message == "the graph holds the state of its optimizer already: the update is part of the step"
    assert help == "leave `optimizer` out"


def test_a_graph_that_does_not_say_what_its_parameters_are():
    facts = tuned_facts(1)
    facts = attrs.evolve(facts, input_kinds=[min(kind, InputKind.NOT_AN_INPUT) for kind in facts.input_kinds])
    message, help = said(read_optimizer("adamw", facts))
    assert message == "the state of `adamw` is not known: the graph does not mark its parameters"
    assert help == "give the state as a size: `24 GiB`"


OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "muon": getattr(torch.optim, "Muon", None),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "adam-amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "adamw-amsgrad": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_those_of_torch(name, dtype):
    make = OPTIMIZERS.get(name)
    if make is None:
        assert name in ("lion", "muon")  # Lion is not in torch: its paper's Algorithm 2 keeps one momentum
        return
    weight = torch.nn.Parameter(torch.ones(64, 32, dtype=dtype))
    optimizer = make([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = [each for each in optimizer.state[weight].values() if isinstance(each, torch.Tensor)]
    kept = sum(each.numel() * each.element_size() for each in tensors if each.ndim)
    assert kept == STATES[name] * weight.numel() * weight.element_size()
