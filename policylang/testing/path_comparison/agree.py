"""Runs a policy on every path of one model: the function behind ``policylang agree``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import nn

from policylang.api.load import PolicyLike, policy_of
from policylang.language.syntax import Policy
from policylang.planning.capabilities import COMPARED
from policylang.testing.path_comparison import numbers, values
from policylang.testing.path_comparison.results import Agreement, Numbers, NumbersComparison, PathResult, PathRun
from policylang.testing.path_comparison.running import (
    STEPS,
    LossFn,
    Setup,
    batch_of,
    run,
    run_alone,
    run_plain,
    undisturbed,
)


def agree(
    model_factory: Callable[[], nn.Module],
    loss_fn: LossFn,
    batch: Any,
    policy: PolicyLike,
    *,
    paths: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda stage: None,
) -> Agreement:
    """Take one step of a model on every path under a policy, and compare what each decides, keeps and computes.

    ``model_factory()`` makes the model; it is called once a run, and each model gets the weights of the first.
    ``loss_fn(model, *batch)`` returns the loss, a scalar. ``paths`` are some of ``eager``
    (``policylang.checkpoint_model``), ``joint`` (``torch.compile`` without Inductor) and ``flat``
    (``policylang.trace_step``), by default all. Every run starts from ``seed`` and uses one thread, and what was
    compiled before is forgotten. ``progress`` is called with the name of each run before it begins.

    What counts as agreement is said in ``docs/agree.md``.

    Raises ``PolicyError`` for a policy that cannot be read, ``ValueError`` for a path there is not or a factory that
    does not make the same model anew each time, and what the plain model raises. A path that fails is a row of the
    result.
    """
    loaded = policy_of(policy)
    return compare_paths(Setup(model_factory, loss_fn, batch_of(batch), seed), loaded, paths, progress)


def compare_paths(
    setup: Setup, policy: Policy, paths: Sequence[str] | None, progress: Callable[[str], None]
) -> Agreement:
    """:func:`agree` on a model that can be made again; under its guard runs what is the caller's own."""
    wanted = COMPARED if paths is None else tuple(dict.fromkeys(paths))
    unknown = [path for path in wanted if path not in COMPARED]
    if unknown:
        raise ValueError(f"there is no path `{unknown[0]}`: there are {', '.join(COMPARED)}")
    with undisturbed():
        progress("the plain model")
        plain = run_plain(setup)
        results = tuple(_result(path, setup, policy, plain, progress) for path in wanted)
    ran = {result.path: result.ran for result in results if result.ran is not None}
    return Agreement(
        policy=policy.name,
        loss=plain.loss.item(),
        gradients=len(plain.gradients),
        results=results,
        account=values.compare(ran),
        torch_version=torch.__version__,
    )


def _result(path: str, setup: Setup, policy: Policy, plain: Numbers, progress: Callable[[str], None]) -> PathResult:
    progress(f"the {path} path")
    stepped = run(setup, path, policy)
    if not isinstance(stepped, PathRun):
        return PathResult(path, refused=stepped)
    return PathResult(path, ran=stepped, numbers=_compared(path, setup, plain, stepped.numbers, progress))


def _compared(
    path: str, setup: Setup, plain: Numbers, found: Numbers, progress: Callable[[str], None]
) -> NumbersComparison:
    """A path may add gradients up in another order than autograd: then the policy must not change a bit of that."""
    comparison = numbers.compare(plain, found)
    if comparison.bitwise or STEPS[path].is_plain:
        return comparison
    progress(f"the {path} path without the policy")
    return evolve(comparison, as_without_policy=numbers.compare(run_alone(setup, path), found).bitwise)
