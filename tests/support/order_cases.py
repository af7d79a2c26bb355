"""What a rank does in the rows of ``tests/distributed/test_rank_faults.py``: it orders its collectives otherwise."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx

import policylang
from policylang import TracedStep
from tests.support.rank_cases import SAVE, Net, batch, compiled, gathers_of, runs, traced
from tests.support.rank_faults import Case, Place, gradients

DEVICE = "device h100-sxm\n"
AHEAD = "prefetch all_gather 1 block ahead\n"
LATER = "delay reduce_scatter 1 block\n"
JOINED = "bucket all_gather per 2 blocks\n"
HIDDEN = "overlap collective\n"


def net(at: Place) -> Net:
    """Four blocks, each with a gather in the forward and a scatter in the backward."""
    return Net([at.group] * 4)


def scheduled(here: str, there: str, change: Callable[[fx.GraphModule], None] | None = None, **there_only: Any) -> Case:
    """A traced step; who is at fault has the policy ``there``, a pass of somebody else's before, and other arguments
    of ``apply``."""

    def case(at: Place, fault: bool) -> None:
        model = net(at)
        step = traced(model)
        if fault and change is not None:
            change(step.gm)
            step.gm.graph.lint()
            step.gm.recompile()
        runs(at, step.apply(policylang.parse(SAVE + (there if fault else here)), **there_only if fault else {}), model)

    return case


def compiled_order(here: str, there: str, **options: Any) -> Case:
    """The same under ``torch.compile``, whose halves are put in order once they are cut."""

    def case(at: Place, fault: bool) -> None:
        model = net(at)
        there_only = options if fault else {}
        at.trains(compiled(model, SAVE + (there if fault else here), **there_only), model, batch())

    return case


# --- what somebody else does to a graph before it is scheduled --------------------------------------------------------
def starts_early(gm: fx.GraphModule) -> None:
    """A scheduler of somebody else's: all gathers first."""
    first = gathers_of(gm)[0]
    for gather in gathers_of(gm)[1:]:
        for node in (*(each for each in gather.all_input_nodes if each.op == "call_function"), gather):
            first.prepend(node)


def one_more(gm: fx.GraphModule) -> None:
    """The first weight is gathered twice."""
    gather = gathers_of(gm)[0]
    (wait,) = gather.users
    user = next(iter(wait.users))
    with gm.graph.inserting_before(gather):
        more = gm.graph.call_function(gather.target, gather.args)
        awaited = gm.graph.call_function(wait.target, (more,))
    with gm.graph.inserting_after(wait):
        both = gm.graph.call_function(torch.ops.aten.maximum.default, (wait, awaited))
    for node, like in ((more, gather), (awaited, wait), (both, wait)):
        node.meta = dict(like.meta)
    user.replace_input_with(wait, both)


@cache
def _library() -> torch.library.Library:
    made = torch.library.Library("order_faults", "FRAGMENT")
    made.define("exchange(Tensor x, str group) -> Tensor")
    made.impl("exchange", lambda x, _: x.clone(), "CompositeExplicitAutograd")
    return made


def unknown_in_between(gm: fx.GraphModule) -> None:
    """An operator that communicates, by its group, and that nobody knows."""
    _library()
    gather = gathers_of(gm)[1]
    (wait,) = gather.users
    with gm.graph.inserting_after(wait):
        found = gm.graph.call_function(torch.ops.order_faults.exchange.default, (wait, gather.args[2]))
    found.meta = dict(wait.meta)
    wait.replace_all_uses_with(found, delete_user_cb=lambda user: user is not found)


# --- whole programs ---------------------------------------------------------------------------------------------------
def interleaved(at: Place, fault: bool) -> None:
    """Two models, of which one rank takes the second one first."""
    made = [Net([at.group] * 3), Net([at.group] * 4)]
    steps = [traced(model) for model in made]
    for number in (1, 0) if fault else (0, 1):
        steps[number].apply(policylang.parse(SAVE + AHEAD))
    for step, model in zip(steps, made, strict=True):
        runs(at, step, model)


def half(here: str, there: str) -> Case:
    """The forward half alone, with a policy of scheduling lines alone."""

    def case(at: Place, fault: bool) -> None:
        from tests.support.joint import capture_joint

        model = net(at)
        joint = capture_joint(model, [batch()])
        forward, _ = joint.halves(policylang.parse(SAVE), agree=False)
        policylang.apply(forward, policylang.parse(there if fault else here))
        assert gathers_of(forward)

    return case


def both_paths(at: Place, fault: bool) -> None:
    """One rank runs a traced step where the other compiles."""
    model = net(at)
    if fault:
        runs(at, traced(model).apply(policylang.parse(SAVE + AHEAD)), model)
    else:
        at.trains(compiled(model, SAVE + AHEAD), model, batch())


def another_after_an_error(at: Place, fault: bool) -> None:
    """What one rank is refused leaves nothing behind: the next graph is scheduled on all."""
    if at.faulty:
        step: TracedStep = traced(net(at))
        try:
            step.apply(policylang.parse(SAVE + (AHEAD if fault else LATER)))
        except policylang.PolicyError:
            pass
        else:
            raise AssertionError("ranks with two orders were told nothing")
    model = net(at)
    step = traced(model).apply(policylang.parse(SAVE + AHEAD + LATER))
    plain = gradients(model, model, batch())
    _, found = step(batch())
    torch.testing.assert_close({name: found[name] for name in plain}, plain)
