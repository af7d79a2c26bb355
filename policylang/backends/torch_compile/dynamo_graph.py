"""Compiles one graph of Dynamo's through AOTAutograd, and finds the decisions on a graph that comes from a cache."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from attrs import frozen
from torch import fx

from policylang.audit.code import CodeAudit
from policylang.backends.announcing import announce_cached
from policylang.backends.caching import fingerprint, sidecar
from policylang.backends.caching.cached_partitioner import CachedPartitioner
from policylang.backends.findings import Findings, findings_of, from_json, to_json, without_gradients
from policylang.backends.joint.path import Done, JointPartitioner, partitions
from policylang.backends.runtime import groups, profiler_ranges
from policylang.backends.torch_compile import order_kept
from policylang.errors import PolicyDivergenceError
from policylang.language.syntax import Policy
from policylang.ranks.comparison import RankComparison, agree_on_cached
from policylang.ranks.rank_account import RankAccount
from policylang.torch_compat import dynamo, inductor

log = logging.getLogger(__name__)

_IN_ORDER = {"reorder_for_peak_memory": False}
"""Inductor would move copies between device and host for the memory they take, which it counts alike on both: it awaits
a copy right where it starts, or fetches everything at once. Set for policies that offload, unless a user sets it."""
_MOVES_COLLECTIVES = re.compile(
    r"^(aten_distributed_optimizations\.(?!.*(log|verbose|path))|bucket_|_fuse_ddp|_micro_pipeline_tp|_collective\.auto|"
    r"reorder_(?!.*(debug|locality))|.*custom_(pre_|post_)?pass$|use_\w+_passes$)"
)
_WITHOUT_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


Compare = Callable[..., AbstractContextManager[RankComparison]]
WhyGone = Callable[[], PolicyDivergenceError | None]


@frozen
class CompiledCode:
    """What one graph of Dynamo's was compiled to."""

    run: Callable[..., Any]
    """The compiled graph."""
    findings: tuple[Findings, ...]
    """Empty where there was nothing to decide."""
    why_gone: WhyGone
    """Asked where a collective of the graph fails: why another rank takes no part in it."""
    from_cache: bool = False
    code: CodeAudit | None = None
    """What was read off the generated code, under a policy that orders; of the backward once that is compiled."""


def topic_of(doing: str, graph: str, root: str) -> str:
    """What ranks compare while Dynamo has a graph compiled: ``compiling forward (model.py:12) under layers.0``."""
    return f"{doing} {dynamo.code_location() or graph}{f' under {root}' if root else ''}"


def with_aot_eager(
    partitioner: JointPartitioner, gm: fx.GraphModule, inputs: Sequence[Any], compare: Compare
) -> CompiledCode:
    """Nothing is cached on this road, so the partitioner is called whenever a gradient is needed. ``compare``: opens
    the comparison of ranks."""
    with compare() as comparison, partitions() as done:
        inference = partitioner.rewrite_inference if rewrites_in_place(partitioner.policy) else None
        run = inductor.compile_with_aot_eager(gm, inputs, partitioner, profiler_ranges.boxed, inference)
        return CompiledCode(run, _findings(done), comparison.why_gone())


def with_inductor(
    partitioner: JointPartitioner,
    key: str,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    compare: Compare,
) -> CompiledCode:
    """Compile, and remember what was decided beside Inductor's caches; on a hit, read it from there.

    A hit whose sidecar is lost is compiled once more without the caches: a policy that was not seen to hold is not
    assumed to hold. The process groups that a cached graph names are made before it runs. A rank that has the graph in
    its caches compares the plan of the sidecar with those of ranks that partition, where these compare theirs.
    """
    policy = partitioner.policy
    inference = partitioner.rewrite_inference if rewrites_in_place(policy) else None
    if policy.offloads:
        settings = {**_IN_ORDER, **settings}
    if policy.orders and needs_gradients(gm, inputs):
        settings = order_kept.settings_to_keep(policy, settings)
    with compare(settings=partial(comparable_settings, settings)) as comparison:
        key = f"{key}:{fingerprint.context_of(gm)}:{fingerprint.groups_key(policy)}:{fingerprint.formulas_key()}"
        remembered_as = fingerprint.sidecar_key(f"{key}:{sorted(settings.items())!r}", gm, inputs)
        is_differentiated = needs_gradients(gm, inputs)
        code = CodeAudit() if policy.orders and is_differentiated else None
        watch = None if code is None else partial(order_kept.watched_half, code)
        patched = {**settings, "custom_partitioner_fn": CachedPartitioner(partitioner, key, code)}
        if code is not None:
            patched |= order_kept.last_passes(policy, settings, key)
        hits = inductor.cache_hits()
        loads: AbstractContextManager[list[tuple[bool, str]]]
        loads = nullcontext([]) if code is None else inductor.code_from_caches()
        with partitions() as done, loads as loaded:
            run = inductor.compile_with_inductor(gm, inputs, patched, watch, inference)
        if not (is_differentiated or inference):
            return CompiledCode(run, (), comparison.why_gone())
        if not done and inductor.cache_hits() > hits:
            from_sidecar = _from_sidecar(remembered_as, policy)
            if from_sidecar is not None:
                findings, code = from_sidecar
                order_kept.check_loaded(code, loaded)
                for found in findings:
                    announce_cached(found.report)
                return CompiledCode(run, findings, comparison.why_gone(), from_cache=True, code=code)
            log.debug("no sidecar says what was decided for a cached graph: compiling it again")
            with partitions() as done:
                run = inductor.compile_with_inductor(gm, inputs, {**patched, **_WITHOUT_CACHES}, watch, inference)
        findings = _findings(done)
        content = {
            "partitions": [to_json(found) for found in findings],
            "groups": groups.to_json([order for partition in done for order in partition.groups]),
            "accounts": [account.pack() for account in comparison.accounts],
            "code": None if code is None else code.to_json(),
        }
        sidecar.write(remembered_as, content)
        return CompiledCode(run, findings, comparison.why_gone(), code=code)


def comparable_settings(given: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """The settings by which Inductor moves and joins the collectives of a graph, after it was split."""
    settings = {**inductor.inductor_settings(), **given}
    chosen = {name: value for name, value in settings.items() if _MOVES_COLLECTIVES.search(name)}
    return inductor.settings_lines("torch._inductor.config", chosen)


def needs_gradients(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd will look for a backward."""
    tensors = [*gm.parameters(), *(value for value in inputs if isinstance(value, torch.Tensor))]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def rewrites_in_place(policy: Policy) -> bool:
    """Whether a policy has lines that hold on a graph without gradients."""
    return bool(without_gradients(policy).rewrites)


def _findings(done: Sequence[Done]) -> tuple[Findings, ...]:
    return tuple(findings_of(partition.carried_out) for partition in done)


def _from_sidecar(key: str, policy: Policy) -> tuple[tuple[Findings, ...], CodeAudit | None] | None:
    """What was decided for a graph that Inductor has in its caches, and in which order it was to communicate, once the
    other ranks have the same plan and the process groups that it names are there; None where no sidecar says it."""
    content = sidecar.read(key)
    if content is None:
        return None
    try:
        findings = tuple(from_json(found, policy) for found in content["partitions"])
        accounts = tuple(RankAccount.unpack(account) for account in content["accounts"])
        wanted = groups.from_json(content["groups"])
        code = CodeAudit.from_json(content["code"]) if content["code"] is not None else None
    except (KeyError, TypeError, ValueError):
        return None
    if not groups.can_ensure(wanted):
        return None
    agree_on_cached(accounts, policy)
    groups.ensure(wanted)
    return findings, code
