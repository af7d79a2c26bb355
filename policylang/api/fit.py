"""From a model and a cluster to a policy: whether a step fits, and what neighbouring sizes would bring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

from attrs import evolve, frozen
from torch import nn

from policylang.api.apply import TracedStep, trace_step
from policylang.api.tune import tuned_policy, variants_of
from policylang.errors import PolicyError, PolicyGraphError, PolicyMatchError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic
from policylang.language.shown import format_quantity
from policylang.planning.capabilities import PathName
from policylang.tracing.configured import SIZES, Parts, StepSizes, built, read_configuration, sharded
from policylang.tracing.repeated_layers import (
    Calls,
    Repeated,
    Repetition,
    alike,
    calls_of,
    difference,
    outer_lists,
    repeated,
    shortened,
    with_all_units,
)
from policylang.tracing.step import problem
from policylang.tracing.target_device import TargetDevice, target_device
from policylang.tuning import budgets
from policylang.tuning.evaluation import Allowed, Budget, Infeasible, Tuned
from policylang.tuning.tuned_policy import TunedPolicy

if TYPE_CHECKING:
    from policylang.tuning.variants import Variants

Progress = Callable[[str], None]
_MOST_DOUBLINGS = 3
_DEEP = 24
"""The layers of a list from which a proof by few of them is cheaper than a trace of all."""
_CAPABILITIES = {"a100": (8, 0), "b200": (10, 0)}


@frozen
class Cluster:
    """What a step is fitted to, beside its sizes."""

    device: DeviceProfile
    named: str
    peak: int
    """Bytes."""
    optimizer: budgets.Size | None
    reserve: budgets.Share
    path: PathName
    balance: str | None = None
    """How evenly tokens are routed to experts, as for :func:`policylang.tune`."""

    @property
    def target(self) -> TargetDevice:
        """The device whose kernels are traced: of a profile called ``cpu…`` the CPU's, else a GPU's."""
        name = self.device.name
        if name.startswith("cpu"):
            return TargetDevice("cpu")
        known = (kept for start, kept in _CAPABILITIES.items() if name.startswith(start))
        found = target_device("cuda", next(known, (9, 0)))
        assert found is not None
        return found

    def given(self, peak: int) -> dict[str, Any]:
        """What :func:`variants_of` and :func:`tuned_policy` are given beside a graph."""
        return {
            "device": self.device,
            "budget": Budget("peak", peak),
            "optimizer": self.optimizer,
            "reserve": self.reserve,
            "named": self.named,
            "also": Allowed(),
            "balance": self.balance,
            "path": self.path,
        }


@frozen
class Answer:
    """A step at some sizes: what fits it best, or why nothing does."""

    label: str
    sizes: StepSizes
    peak: int
    """The budget, in bytes."""
    tuned: Tuned | None = None
    nearest: Infeasible | None = None
    """Where nothing fits: what comes nearest. None where the step cannot be had."""
    refused: tuple[Diagnostic, ...] = ()
    ranks: int | None = None
    """Where it does not fit, the fewest ranks in doublings on which it does."""

    @property
    def token_seconds(self) -> float | None:
        """Seconds of one rank for one token, or one image."""
        own = self.sizes.batch * (self.sizes.sequence or 1) / self.sizes.mesh.get("tp", 1)
        return None if self.tuned is None else self.tuned.chosen.step / own


@frozen(eq=False)
class Fitted:
    """The answer at the asked sizes, its policy and its graph, and the answers beside it."""

    answer: Answer
    policy: TunedPolicy | None
    facts: Facts
    beside: tuple[Answer, ...]
    blocks: tuple[str, ...]
    """In Python, the modules of each list of blocks: ``model.layers``."""
    as_compiled: str = ""
    """Why the step was traced as under a compiler for a path that has none."""


@frozen(eq=False)
class Subject:
    """A training step to fit, which is made at given sizes."""

    name: str
    make: Callable[[StepSizes], Parts | TracedStep]
    varies: frozenset[str] = frozenset()
    """The sizes, among ``sequence`` and ``batch``, that it takes."""
    loss: str = "model(**batch).loss"
    """In Python."""
    before: tuple[str, ...] = ()
    """In Python, what is done to the model first."""


def of_configuration(name: str, sizes: StepSizes, path: PathName) -> Subject:
    config, before = read_configuration(name), list[str]()
    varies = ("batch",) if sizes.sequence is None else ("batch", "sequence")
    if path == "eager" and getattr(config, "use_cache", False):  # all keys and values would live through the forward
        config.use_cache = False
        before.append("model.config.use_cache = False")
    return Subject(name, lambda sizes: built(config, sizes), frozenset(varies), before=tuple(before))


def of_function(name: str, function: Callable[..., Any]) -> Subject:
    """A function that returns ``model, loss_fn, *batch`` or a traced step; it may take ``seq`` and ``batch``."""
    try:
        takes = set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        takes = set()

    def make(sizes: StepSizes) -> Parts | TracedStep:
        given = {"seq": sizes.sequence, "batch": sizes.batch}
        found = function(**{key: value for key, value in given.items() if key in takes})
        if isinstance(found, TracedStep):
            return found
        if not (isinstance(found, tuple) and len(found) > 1 and isinstance(found[0], nn.Module) and callable(found[1])):
            message = f"`{name}` returns neither `model, loss_fn, *batch` nor a traced step"
            raise problem(SIZES, message, help="return what `policylang.trace_step` takes")
        return Parts(found[0], found[1], found[2:])

    words = {"sequence": "seq", "batch": "batch"}
    varies = frozenset(word for word, taken in words.items() if taken in takes)
    return Subject(name, make, varies, "loss_fn(model, *batch)")


def fit(
    subject: Subject, sizes: StepSizes, cluster: Cluster, graph: str, *, beside: bool = True, progress: Progress
) -> Fitted:
    """The policy for a step and its neighbours. ``graph``: the name of the snapshot that is to be written.

    Raises ``PolicyGraphError`` for sizes or a model that cannot be had, and as :func:`policylang.tune` does.
    """
    traced = _Traced(subject, cluster.target, cluster.path, progress)
    facts = traced.at(sizes)
    variants = variants_of(facts, **cluster.given(cluster.peak), progress=progress)
    policy, answer = None, Answer("as asked", sizes, cluster.peak)
    try:
        policy = tuned_policy(facts, graph, **cluster.given(cluster.peak), table=False, variants=variants)
        answer = evolve(answer, tuned=policy.tuned)
    except PolicyMatchError as error:
        nearest = variants.figures_at(cluster.peak)
        answer = evolve(answer, nearest=nearest if isinstance(nearest, Infeasible) else None, refused=error.diagnostics)

    def at(sizes: StepSizes, limit: int) -> Variants:
        return variants_of(traced.near(sizes), **cluster.given(limit), progress=progress)

    def near(label: str, other: StepSizes, limit: int) -> Answer:
        progress(f"trying {label}")
        answer, doubled = Answer(label, other, limit), other
        try:
            found = (variants if other == sizes else at(other, limit)).figures_at(limit)
            if isinstance(found, Tuned):
                return evolve(answer, tuned=found)
            answer = evolve(answer, nearest=found)
            for _ in range(_MOST_DOUBLINGS if traced.shards else 0):
                doubled = _times(doubled, 2)
                if at(doubled, limit).fits_at_all():
                    return evolve(answer, ranks=doubled.ranks)
        except PolicyError as error:
            return evolve(answer, refused=error.diagnostics)
        return answer

    rows = tuple(near(*each) for each in _neighbours(subject, sizes, cluster)) if beside else ()
    return Fitted(answer, policy, facts, rows, tuple(traced.blocks), traced.as_compiled)


def _times(sizes: StepSizes, factor: float) -> StepSizes:
    """On so many times as many ranks."""
    fsdp = int(sizes.mesh.get("fsdp", 1) * factor)
    return evolve(sizes, mesh={**sizes.mesh, "fsdp": fsdp})


def _neighbours(subject: Subject, sizes: StepSizes, cluster: Cluster) -> Iterator[tuple[str, StepSizes, int]]:
    for share in (0.9, 1.1):
        limit = round(cluster.peak * share)
        yield f"peak {format_quantity(limit, 'bytes')}", sizes, limit
    if sizes.sequence is not None and "sequence" in subject.varies:
        for longer in (sizes.sequence // 2, 2 * sizes.sequence):
            yield f"seq {longer:,}", evolve(sizes, sequence=longer), cluster.peak
    if "batch" in subject.varies:
        for batch in (*([sizes.batch // 2] if sizes.batch > 1 else []), 2 * sizes.batch):
            yield f"batch {batch}", evolve(sizes, batch=batch), cluster.peak
    for factor in (0.5, 2):
        if sizes.mesh.get("fsdp", 1) * factor >= 1:
            other = _times(sizes, factor)
            yield f"{other.ranks} GPU{'s' if other.ranks > 1 else ''}", other, cluster.peak


# --- the same step at other sizes -----------------------------------------------------------------------------------


_NODES = ("names", "ops", "targets", "inputs", "phases", "modules", "input_names")


class _Traced:
    """Traces a step with all its layers, or with few of them where these are proven to give the facts of all."""

    def __init__(self, subject: Subject, device: TargetDevice, path: PathName, progress: Progress) -> None:
        self.subject, self.device, self.progress = subject, device, progress
        self.path: Literal["eager"] | None = "eager" if path == "eager" else None
        self.as_compiled = ""
        self.blocks: list[str] = []
        self.shards = True
        self._known: tuple[StepSizes, Mapping[str, int], Facts] | None = None

    def at(self, sizes: StepSizes) -> Facts:
        self.progress(f"tracing {self.subject.name}")
        self._asked, self._found = sizes, self._all(sizes)
        self._full = self._found.whole()
        return self._full

    def near(self, sizes: StepSizes) -> Facts:
        """At other sizes, few layers are traced where they are proven to be enough at the asked ones, and have the same
        nodes here."""
        if lists := self._lists:
            made = with_all_units(self._few(sizes, lists), lists)
            if isinstance(made, Facts) and all(list(getattr(made, n)) == list(getattr(self._full, n)) for n in _NODES):
                return made
        return self._all(sizes).whole()

    @cached_property
    def _lists(self) -> Mapping[Repeated, int]:
        """The lists of layers of which few are enough."""
        if self._found.lists or not self._alike:
            return self._found.lists
        made = with_all_units(self._few(self._asked, self._alike), self._alike)
        return self._alike if isinstance(made, Facts) and difference(made, self._full) is None else {}

    def _all(self, sizes: StepSizes) -> Repetition:
        parts = self.subject.make(sizes)
        if isinstance(parts, TracedStep):
            self.shards, self._alike = False, dict[Repeated, int]()
            if sizes.ranks > 1:
                message = f"`{self.subject.name}` returns a step that is traced already, which cannot be sharded"
                raise problem(SIZES, message, help="return `model, loss_fn, *batch`, or leave out the ranks")
            return Repetition(collect(parts.gm), {})
        lists = outer_lists(parts.model)
        nested = {path for path, each in lists.items() if isinstance(each[0], nn.ModuleList)}
        inner = "(each for part in model.{} for each in part)"
        self.blocks = [inner.format(path) if path in nested else f"model.{path}" for path in lists]
        self._alike = alike(parts.model)
        deep = {run: units for run, units in self._alike.items() if run.period * units >= _DEEP}
        if deep and all(each.is_meta for each in parts.model.parameters()) and (calls := _calls(parts)) is not None:
            found = repeated(partial(self._with_calls, sizes, deep), deep, calls)
            if isinstance(found, Repetition):
                return found
        return Repetition(self._traced(parts, sizes), {})

    def _with_calls(
        self, sizes: StepSizes, lists: Mapping[Repeated, int], units: Mapping[str, int]
    ) -> tuple[Facts, Calls]:
        calls = _calls(self._shortened(sizes, lists, units)) or Calls()
        return self._few(sizes, lists, units), calls

    def _few(self, sizes: StepSizes, lists: Mapping[Repeated, int], units: Mapping[str, int] | None = None) -> Facts:
        """The step with few layers. What :meth:`near` tries is the first that a proof asks for."""
        units = {run.path: run.units for run in lists} if units is None else units
        if self._known is None or self._known[:2] != (sizes, units):
            self._known = sizes, units, self._traced(self._shortened(sizes, lists, units), sizes)
        return self._known[2]

    def _shortened(self, sizes: StepSizes, lists: Mapping[Repeated, int], units: Mapping[str, int]) -> Parts:
        parts = self.subject.make(sizes)
        assert isinstance(parts, Parts)
        shortened(parts.model, lists, units)
        return parts

    def _traced(self, parts: Parts, sizes: StepSizes) -> Facts:
        with sharded(parts, sizes, self.device.kind) as ready:
            on, capability = self.device.kind, self.device.capability
            given = ready.model, ready.loss_fn, *ready.batch
            trace = partial(trace_step, *given, device=on, compute_capability=capability)
            if not self.as_compiled:
                try:
                    return collect(trace(path=self.path).gm)
                except PolicyGraphError as error:
                    if self.path is None:
                        raise
                    self.as_compiled = error.diagnostics[0].message
            return collect(trace().gm)


def _calls(parts: Parts) -> Calls | None:
    """None where the forward fails: a trace of it fails too, and says why."""
    try:
        return calls_of(lambda: parts.loss_fn(parts.model, *parts.batch))
    except Exception:
        return None
