"""Compiles a graph through Inductor or AOTAutograd, under a key for caches, and has Inductor keep a policy's order.

Inductor's scheduler sorts what it lowers, by memory or by what it fuses, and has several passes that move or join
collectives. Two settings prevent that, and both apply to the backward too, which is compiled when the first one starts:

- the settings that move collectives are off;
- a pass that runs last on the forward and on the backward graph makes its order binding: every start of a collective
  and every wait runs after the one before it and after the products in between, and products run after the start or
  wait before them. These are torch's ``control_deps``, which its own overlap scheduler places.

Only products get dependencies, since each is a separate kernel: a dependency on a pointwise operator would prevent its
fusion. So no fused kernel pulls a collective across a product.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from attrs import frozen
from torch import fx

from policylang.audit.order import CodeAudit
from policylang.backends import caching, runtime
from policylang.backends.applied_plans import Findings, announce_cached, findings_of, respelled
from policylang.backends.joint import Done, JointPartitioner, partitions
from policylang.backends.refusals import Problem, refuse_captured_copies
from policylang.backends.torch_compile.slices import share_slices
from policylang.errors import PolicyAuditError, PolicyDivergenceError, PolicyMeaningError, PolicyWarning
from policylang.graph import marks
from policylang.language.diagnostics import Diagnostic, Span, is_error
from policylang.language.plain_data import from_plain, to_plain
from policylang.language.shown import did_you_mean, nearest
from policylang.language.syntax import Policy
from policylang.operators.calls import describe
from policylang.operators.names import HOST_COPIES
from policylang.operators.work import is_communication, is_product
from policylang.planning.decisions.rule_warnings import asks_for_record
from policylang.ranks.comparison import RankComparison, agree_on_cached
from policylang.ranks.rank_account import RankAccount
from policylang.torch_compat import compilers
from policylang.torch_compat.graphs import OpOverload


class _KeyedForCaches:
    """Is known to Inductor's caches by ``_key``, which has to cover all that its work depends on."""

    _key: str

    def uuid(self) -> str:
        return self._key

    def __getstate__(self) -> dict[str, str]:
        # Inductor hashes the pickle beside the uuid, and a policy's tree holds comments and line numbers, which decide
        # nothing. Such a pickle is only ever made for a key: the work is done in the process that traced the graph.
        return {"_key": self._key}


class KeyedPass(_KeyedForCaches, compilers.graph_pass_base()):  # type: ignore[misc]
    """A graph pass that Inductor's caches accept."""


class KeyedPartitioner(_KeyedForCaches, compilers.partitioner_base()):  # type: ignore[misc]
    """A partitioner that Inductor's caches accept."""


class CachedPartitioner(KeyedPartitioner):
    """A partitioner under a key. ``code`` receives the order of the forward and the backward graph."""

    def __init__(self, partitioner: JointPartitioner, key: str, code: CodeAudit | None = None) -> None:
        self._partitioner = partitioner
        self._key = key
        self._code = code

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = self._partitioner(gm, joint_inputs, **options)
        if self._code is not None:
            self._code.note(forward.graph, backward.graph)
        elif compilers.invoke_subgraph() is not None:
            for each in (forward, backward):
                share_slices(each)
        return forward, backward


Inner = Literal["inductor", "aot_eager"]
_INNER: tuple[str, ...] = get_args(Inner)
_OWN = ("policy", "inner", "root", "agree")
_EXAMPLE = 'options={"policy": "llama3_sac.apl"}'
BAD_OPTION = "APL250"


@frozen
class Options:
    policy: Path | Policy
    inner: Inner
    root: str
    agree: bool
    settings: dict[str, Any]
    """Inductor's own settings, passed on."""


def _bad(message: str, help: str | None = None) -> Diagnostic:
    return Diagnostic(BAD_OPTION, message, help=help)


def parse_options(options: Mapping[str, Any] | None, mode: str | None, known: Policy | None = None) -> Options:
    """``known``: a checkpoint's policy, where none is named. Raises ``PolicyMeaningError`` with all that is wrong."""
    given = dict(options or {})
    problems: list[Diagnostic] = []
    path = given.pop("policy", known)
    if path is None:
        # torch.compile takes a mode or options, not both
        with_mode = f'torch.compile(model, backend=policylang.backend("llama3_sac.apl"), mode="{mode}")'
        help = with_mode if mode else f'torch.compile(model, backend="policylang", {_EXAMPLE})'
        problems.append(_bad('the backend "policylang" needs a policy', help))
    elif not isinstance(path, (str, os.PathLike)) and path is not known:
        problems.append(_bad(f"the option `policy` is a path, not a {type(path).__name__}", f"for example {_EXAMPLE}"))
    inner = given.pop("inner", "inductor")
    root = given.pop("root", "")
    agree = given.pop("agree", True)
    problems += check_own(inner, root, agree)
    if problems:
        raise PolicyMeaningError(problems)
    policy = path if isinstance(path, Policy) else Path(path)
    return Options(policy, inner, root, agree, inductor_options(inner, mode, given))


def check_own(inner: object, root: object, agree: object) -> list[Diagnostic]:
    """Errors for the options that are policylang's own."""
    problems: list[Diagnostic] = []
    if inner not in _INNER:
        problems.append(_bad(f"unknown inner compiler `{inner}`", f"one of {', '.join(_INNER)}"))
    if not isinstance(root, str):
        kind = type(root).__name__
        problems.append(_bad(f"the option `root` is a module path, not a {kind}", 'for example root="layers.0"'))
    if not isinstance(agree, bool):
        problems.append(_bad(f"the option `agree` is True or False, not a {type(agree).__name__}"))
    return problems


def inductor_options(inner: Inner, mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Inductor's settings for ``torch.compile``'s ``mode`` and options. Raises ``PolicyMeaningError``."""
    given = dict(options or {})
    known = compilers.inductor_settings() if inner == "inductor" and given else {}
    said = f"the options are {', '.join(_OWN)}" + (" and the settings of Inductor" if known else "")
    problems: list[Diagnostic] = []
    for name in (name for name in given if name.replace("-", "_") not in known):
        near = nearest(name, [*_OWN, *known], limit=1)
        problems.append(_bad(f"unknown option `{name}`", did_you_mean(near) or said))
    named: dict[str, Any] = {}
    if mode not in (None, "default") and inner == "inductor":
        try:
            named = compilers.inductor_mode(str(mode))
        except RuntimeError as error:
            problems.append(_bad(str(error)))
    if problems:
        raise PolicyMeaningError(problems)
    return {**named, **{name.replace("-", "_"): value for name, value in given.items()}}


OPTION_AGAINST_ORDER = Problem(
    "APL342",
    "the option `{name}` of torch.compile and this line both order collectives",
    "leave out `{name}`, or this line",
)
PASS_AGAINST_ORDER = Problem(
    "APL342",
    "this torch takes one `{name}`, and this line needs one beside yours",
    "remove yours or this line; torch 2.13 and newer take both",
)
SETTING_TURNED_OFF = Problem(
    "APL343",
    "`torch._inductor.config.{name}` is set, and off for what is compiled under this policy",
    "the order is the one that this line gives",
)
TAKEN_APART = Problem(
    "APL348",
    "compiled autograd recompiles the backward, and does not keep the order of this line",
    "leave `torch._dynamo.config.compiled_autograd` off, or the line out",
)

_LAST_PASS = "post_grad_custom_post_pass"
_HARMLESS = frozenset({"reorder_for_peak_memory"})  # on by default, and what it moves it moves within what is binding


class BindingOrder(KeyedPass):
    """Makes the order of a graph's collectives binding for all that Inductor does after it."""

    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, graph: fx.Graph) -> None:
        unread = {node: [each for each in others if node not in each.users] for node, others in _after(graph).items()}
        compilers.run_after(graph, {node: others for node, others in unread.items() if others})


def _after(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """By node, the nodes it has to run after; at most as many pairs as nodes. Host copies are like collectives."""
    found: dict[fx.Node, list[fx.Node]] = {}
    last: list[fx.Node] = []
    products: list[fx.Node] = []
    for node in graph.nodes:
        if is_communication(node) or describe(node.target).name in HOST_COPIES:
            found[node] = [*last, *products]
            last, products = [node], []
        elif compilers.is_lowered_as_one(node.target):
            products.append(node)
        elif is_product(node):
            products.append(node)
            if isinstance(node.target, OpOverload):
                found[node] = last
    return found


def settings_to_keep(policy: Policy, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's settings for a policy that orders; ``given``: those of ``torch.compile``, which stay. Warns where the
    program's ask for another order; raises ``PolicyMeaningError`` where given ones do, and under compiled autograd."""
    if compilers.compiles_backwards_anew():
        raise PolicyMeaningError([TAKEN_APART.diagnostic(span=_order_span(policy))])
    keep = compilers.settings_in_order()
    against = {name: value for name, value in keep.items() if name not in _HARMLESS}
    if asked := [name for name, value in against.items() if name in given and given[name] != value]:
        span = _order_span(policy)
        raise PolicyMeaningError([OPTION_AGAINST_ORDER.diagnostic(span=span, name=name) for name in asked])
    unheard = [
        name for name, value in against.items()
        if name not in given and compilers.is_set(name) and compilers.setting(name) != value
    ]  # fmt: skip
    if unheard:
        found = [SETTING_TURNED_OFF.diagnostic(span=_order_span(policy), name=name) for name in unheard]
        warnings.warn(str(PolicyMeaningError(found)), PolicyWarning, stacklevel=2)
    return {**keep, **given}


def last_passes(policy: Policy, given: Mapping[str, Any], key: str) -> Any:
    """Inductor's last passes on a graph: the user's own, then the one that makes the order binding. Raises
    ``PolicyMeaningError`` where the user has one and this torch takes no second."""
    own = given[_LAST_PASS] if _LAST_PASS in given else compilers.setting(_LAST_PASS)
    ours = BindingOrder(f"order:{key}")
    if not own:
        return {_LAST_PASS: ours}
    if not compilers.takes_lists_of_passes():
        raise PolicyMeaningError([PASS_AGAINST_ORDER.diagnostic(span=_order_span(policy), name=_LAST_PASS)])
    return {_LAST_PASS: [*(own if isinstance(own, (list, tuple)) else (own,)), ours]}


def _raise_code_errors(found: Sequence[Diagnostic]) -> None:
    """Raise ``PolicyAuditError`` where generated code does not keep its order; warn where it cannot be read."""
    errors = [each for each in found if is_error(each)]
    if errors:
        raise PolicyAuditError(errors)
    if found:
        warnings.warn(str(PolicyAuditError(found)), PolicyWarning, stacklevel=2)


def _watched_graph(code: CodeAudit, graph: fx.Graph, is_backward: bool) -> Callable[[str], None]:
    """From a graph as Inductor receives it to the function that compares the generated code with its order: for the
    forward while it is compiled, for the backward when the first one starts."""
    read = code.reader(graph, is_backward=is_backward)
    return lambda source: _raise_code_errors(read(source))


def _order_span(policy: Policy) -> Span:
    """The first line that orders collectives."""
    return (*policy.scheduling, *policy.buckets)[0].span


log = logging.getLogger(__name__)

_IN_ORDER = {"reorder_for_peak_memory": False}
"""Inductor would move copies between device and host for the memory they take, which it counts alike on both: it awaits
a copy right where it starts, or fetches everything at once. Set for policies that offload, unless a user sets it."""
_CUDA_GRAPHS = "triton.cudagraphs"


_MOVES_COLLECTIVES = re.compile(
    r"^(aten_distributed_optimizations\.(?!.*(log|verbose|path))|bucket_|_fuse_ddp|_micro_pipeline_tp|_collective\.auto|"
    r"reorder_(?!.*(debug|locality))|.*custom_(pre_|post_)?pass$|use_\w+_passes$)"
)
_WITHOUT_CACHES = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


Compare = Callable[..., AbstractContextManager[RankComparison]]
WhyGone = Callable[[], PolicyDivergenceError | None]


@frozen
class CompiledCode:
    """The result of compiling one graph of Dynamo's."""

    run: Callable[..., Any]
    findings: tuple[Findings, ...]
    """Empty where there was nothing to decide."""
    why_gone: WhyGone
    """Asked where a collective of the graph fails: why another rank takes no part in it."""
    from_cache: bool = False
    code: CodeAudit | None = None
    """The audit of the generated code, under a policy that orders; of the backward once that is compiled."""


def topic_of(doing: str, graph: str, root: str) -> str:
    """The topic under which ranks compare a graph of Dynamo's: ``compiling forward (model.py:12) under layers.0``."""
    return f"{doing} {compilers.code_location() or graph}{f' under {root}' if root else ''}"


def with_aot_eager(
    partitioner: JointPartitioner, gm: fx.GraphModule, inputs: Sequence[Any], compare: Compare
) -> CompiledCode:
    """Compile without a cache: the partitioner is called for each gradient. ``compare``: opens ranks' comparison."""
    with compare() as comparison, partitions() as done:
        run = compilers.compile_with_aot_eager(gm, inputs, partitioner, runtime.boxed, partitioner.for_inference)
        return CompiledCode(run, _findings(done), comparison.why_gone())


def with_inductor(
    partitioner: JointPartitioner,
    key: str,
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Mapping[str, Any],
    compare: Compare,
) -> CompiledCode:
    """Compile, and store what was decided beside Inductor's caches; on a hit, read it from there. A hit whose sidecar
    is lost is compiled once more without the caches: a policy is not assumed to hold unseen. The process groups that a
    cached graph names are made before it runs, and its plan is compared with those of ranks that partition."""
    policy = partitioner.policy
    inference = partitioner.for_inference
    is_differentiated = needs_gradients(gm, inputs)
    recorded = any(marks.records_offloaded(node.meta) for node in gm.graph.nodes)
    if any(rule.action.offloads and (recorded or not asks_for_record(rule, policy)) for rule in policy.rules):
        if settings.get(_CUDA_GRAPHS, compilers.setting(_CUDA_GRAPHS)):  # without a word Inductor would capture none
            refuse_captured_copies(policy)
        settings = {**_IN_ORDER, **settings}
    if policy.orders and is_differentiated:
        settings = settings_to_keep(policy, settings)
    with compare(settings=partial(comparable_settings, settings)) as comparison:
        key = f"{key}:{caching.context_of(gm)}:{caching.groups_key(policy)}:{caching.formulas_key()}"
        remembered_as = caching.sidecar_key(f"{key}:{sorted(settings.items())!r}", gm, inputs)
        code, watch = None, None
        patched = {**settings}
        loads: AbstractContextManager[list[tuple[bool, str]]] = nullcontext([])
        if policy.orders and is_differentiated:
            code, loads = CodeAudit(), compilers.code_from_caches()
            watch = partial(_watched_graph, code)
            patched |= last_passes(policy, settings, key)
        patched["custom_partitioner_fn"] = CachedPartitioner(partitioner, key, code)
        hits = compilers.cache_hits()
        with partitions() as done, loads as loaded:
            run = compilers.compile_with_inductor(gm, inputs, patched, watch, inference)
        if not (is_differentiated or inference):
            return CompiledCode(run, (), comparison.why_gone())
        if not done and compilers.cache_hits() > hits:
            from_sidecar = _from_sidecar(remembered_as, policy)
            if from_sidecar is not None:
                findings, code = from_sidecar
                if code is not None:
                    _raise_code_errors(code.check_loaded(loaded))
                for found in findings:
                    announce_cached(found.report)
                return CompiledCode(run, findings, comparison.why_gone(), from_cache=True, code=code)
            log.debug("no sidecar has the decisions of a cached graph: compiling it again")
            with partitions() as done:
                run = compilers.compile_with_inductor(gm, inputs, {**patched, **_WITHOUT_CACHES}, watch, inference)
        findings = _findings(done)
        groups = tuple(sorted({order for partition in done for order in partition.groups}))
        accounts = tuple(account.pack() for account in comparison.accounts)
        caching.write_sidecar(remembered_as, to_plain(_Sidecar(findings, groups, accounts, code)))
        return CompiledCode(run, findings, comparison.why_gone(), code=code)


def comparable_settings(given: Mapping[str, Any] = MappingProxyType({})) -> list[str]:
    """The settings by which Inductor moves and joins the collectives of a graph, after it was split."""
    settings = {**compilers.inductor_settings(), **given}
    chosen = {name: value for name, value in settings.items() if _MOVES_COLLECTIVES.search(name)}
    return compilers.settings_lines("torch._inductor.config", chosen)


def needs_gradients(gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """True if AOTAutograd will look for a backward."""
    tensors = [*gm.parameters(), *(value for value in inputs if isinstance(value, torch.Tensor))]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _findings(done: Sequence[Done]) -> tuple[Findings, ...]:
    return tuple(findings_of(partition.applied) for partition in done)


@frozen
class _Sidecar:
    """Stored beside a graph in Inductor's caches."""

    partitions: tuple[Findings, ...]
    groups: tuple[runtime.RankOrder, ...]
    """The process groups that the graph needs."""
    accounts: tuple[str, ...]
    """The packed rank accounts."""
    code: CodeAudit | None


def _from_sidecar(key: str, policy: Policy) -> tuple[tuple[Findings, ...], CodeAudit | None] | None:
    """Decisions and order of collectives of a graph in Inductor's caches, once the other ranks have the same plan and
    its process groups exist; None without a sidecar."""
    content = caching.read_sidecar(key)
    if content is None:
        return None
    try:
        found = from_plain(_Sidecar, content)
        findings = tuple(respelled(each, policy) for each in found.partitions)
        accounts = tuple(map(RankAccount.unpack, found.accounts))
    except (KeyError, TypeError, ValueError):
        return None
    if not runtime.are_joined(found.groups):
        return None
    agree_on_cached(accounts, policy)
    runtime.ensure_groups(found.groups)
    return findings, found.code
