"""One step of a model on each path under one policy: what each saves and recomputes, its decisions and its numbers.

All start from the same weights and random numbers. ``docs/agree.md`` defines agreement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import Any

import torch
from attrs import asdict, evolve, field, frozen
from torch import Tensor, fx, nn

import policylang
from policylang.api.load import PolicyLike, policy_of
from policylang.audit.report import Report
from policylang.backends.path import path_named
from policylang.errors import PolicyError, check_argument, check_progress
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.language.shown import counted, format_quantity, joined, listed, uncounted_text
from policylang.language.syntax import Policy
from policylang.planning.capabilities import COMPARED
from policylang.report.rendering import table

LossFn = Callable[..., Tensor]


@frozen(eq=False)
class Setup:
    """A model that can be made repeatedly, and its step."""

    factory: Callable[[], nn.Module]
    loss_fn: LossFn
    batch: tuple[Any, ...]
    seed: int = 0
    state: dict[str, Tensor] = field(factory=dict, repr=False)
    """Parameters and buffers of the first model made: every later one gets these values."""
    made: list[nn.Module] = field(factory=list, repr=False)
    """The model made last: a path may leave its marks on one."""
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around what is the caller's own: the factory, and the step without a policy."""

    def fresh(self) -> nn.Module:
        """A model as the first one was. Raises ValueError where the factory makes another, or none."""
        with self.guard():
            torch.manual_seed(self.seed)
            return self._reset(self.factory())

    def _reset(self, model: nn.Module) -> nn.Module:
        if self.made and self.made[0] is model:
            raise ValueError("the factory returns one model over and over: it has to make a new one each time")
        self.made[:] = [model]
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if not self.state:
            self.state.update({name: tensor.detach().clone() for name, tensor in own.items()})
        if own.keys() != self.state.keys():
            raise ValueError("the factory returns a model with other parameters and buffers each time")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.state[name])
                tensor.grad = None
        torch.manual_seed(self.seed)
        return model


def batch_of(given: Any) -> tuple[Any, ...]:
    """The arguments of the loss beside the model: a batch that is no tuple or list is one argument."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def run(setup: Setup, path: str, policy: Policy) -> PathRun | PathRefusal:
    """Take a step on a path, or report why it cannot be taken."""
    model, step = setup.fresh(), STEPS[path]
    try:
        with step.around():
            numbers, subject = step.take(setup, model, policy)
            found = path_named(path).report(subject) or ()
            graphs = tuple((each.rewritten, each.report) for each in found if each.rewritten is not None)
            return PathRun(numbers, policylang.report(subject), graphs)
    except PolicyError as error:
        return PathRefusal(tuple(found for found in error.diagnostics if is_error(found)))
    except (Exception, SystemExit) as error:  # whatever a compiler or a tracer raises about the model is the answer
        lines = str(error).strip().splitlines()
        return PathRefusal(error=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


@contextmanager
def undisturbed() -> Iterator[None]:
    """One thread, so that sums are added up in one order, and the caller's random numbers as they were afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _compiler_to_itself() -> Iterator[None]:
    """Forget what was compiled before, and afterwards what was compiled inside, in backends as well."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def _eager(setup: Setup, model: nn.Module, policy: Policy | None) -> tuple[Numbers, nn.Module]:
    """Eager, with a checkpoint around each block."""
    if policy is not None:
        policylang.checkpoint_model(model, policy)
    return _backward(model, setup.loss_fn(model, *setup.batch)), model


def _joint(setup: Setup, model: nn.Module, policy: Policy | None) -> tuple[Numbers, Any]:
    """Under ``torch.compile``, without Inductor: decisions are compared, not kernels. Without a policy all is saved."""
    backend: Any = "aot_eager_default_partitioner"
    if policy is not None:
        backend = policylang.backend(policy, inner="aot_eager", agree=False)
    return _backward(model, setup.loss_fn(torch.compile(model, backend=backend), *setup.batch)), backend


def _flat(setup: Setup, model: nn.Module, policy: Policy | None) -> tuple[Numbers, fx.GraphModule]:
    """One graph of the whole step."""
    step = policylang.trace_step(model, setup.loss_fn, *setup.batch)
    if policy is not None:
        step.apply(policy, agree=False)
    torch.manual_seed(setup.seed)
    loss, gradients = step(*setup.batch)
    return Numbers(loss.detach(), gradients, _buffers(model)), step.gm


def _backward(model: nn.Module, loss: Tensor) -> Numbers:
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return Numbers(loss.detach(), gradients, _buffers(model))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_buffers()}


@frozen
class PathStep:
    """The function that takes a step on a path."""

    take: Callable[[Setup, nn.Module, Policy | None], tuple[Numbers, Any]]
    """The numbers, and what the path reports on."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    is_plain: bool = False
    """The path without a policy is the plain model."""


STEPS = {
    "eager": PathStep(_eager, is_plain=True),
    "joint": PathStep(_joint, _compiler_to_itself),
    "flat": PathStep(_flat),
}
"""The step function of each path that is registered as compared."""


# --- numbers ---------------------------------------------------------------------------------------------------------


def compare_numbers(plain: Numbers, found: Numbers) -> NumbersComparison:
    loss = _equality({"the loss": plain.loss}, {"the loss": found.loss})
    return NumbersComparison(loss, _equality(plain.gradients, found.gradients), _equality(plain.buffers, found.buffers))


def _equality(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Equality:
    differing: list[str] = []
    largest, close = 0.0, True
    names = list(dict.fromkeys((*left, *right)))
    for name in names:
        one, other = left.get(name), right.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            differing.append(name)
            largest, close = math.inf, False
        elif not _same_bits(one, other):
            differing.append(name)
            wide = torch.complex128 if one.is_complex() else torch.float64
            apart = (one.detach().to(wide) - other.detach().to(wide)).abs().max().item()
            largest = max(largest, math.inf if math.isnan(apart) else apart)
            try:
                torch.testing.assert_close(one.detach(), other.detach())
            except AssertionError:
                close = False
    return Equality(len(names), tuple(differing), largest, close)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to itself here, and zero is not minus zero."""
    if not one.numel():
        return True
    bits = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return bool(torch.equal(*bits))


# --- all paths -------------------------------------------------------------------------------------------------------


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
    (``policylang.trace_step``), by default all. Every run starts from ``seed``, uses one thread and clears what was
    compiled before. ``progress`` is called with the name of each run before it begins.

    ``docs/agree.md`` defines agreement.

    Raises ``PolicyError`` for a policy that cannot be read or a path that is not among these, ``ValueError`` for a
    factory that does not make a new, equal model each time, and whatever the plain model raises. A path that fails is a
    row of the result.
    """
    for name, given in (("model_factory", model_factory), ("loss_fn", loss_fn)):
        check_argument(name, given, callable(given), "a function")
    check_progress(progress)
    is_list = paths is None or (isinstance(paths, Sequence) and not isinstance(paths, str))
    for each in (paths or ()) if is_list else (paths,):
        check_argument("paths", each, is_list and each in COMPARED, f"a list of some of {', '.join(COMPARED)}")
    loaded = policy_of(policy)
    return compare_paths(Setup(model_factory, loss_fn, batch_of(batch), seed), loaded, paths, progress)


def compare_paths(
    setup: Setup, policy: Policy, paths: Sequence[str] | None, progress: Callable[[str], None]
) -> Agreement:
    """:func:`agree` on a model that can be made repeatedly; under its guard runs the caller's code."""
    wanted = COMPARED if paths is None else tuple(dict.fromkeys(paths))
    with undisturbed():
        progress("the plain model")
        model = setup.fresh()
        with setup.guard():
            plain = _backward(model, setup.loss_fn(model, *setup.batch))
        results = tuple(_result(path, setup, policy, plain, progress) for path in wanted)
    ran = {result.path: result.ran for result in results if result.ran is not None}
    return Agreement(
        policy=policy.name,
        loss=plain.loss.item(),
        gradients=len(plain.gradients),
        results=results,
        decisions=compare_decisions(ran),
        torch_version=torch.__version__,
    )


def _result(path: str, setup: Setup, policy: Policy, plain: Numbers, progress: Callable[[str], None]) -> PathResult:
    progress(f"the {path} path")
    stepped = run(setup, path, policy)
    if isinstance(stepped, PathRefusal):
        return PathResult(path, refused=stepped)
    numbers, narrowed = stepped.numbers, None
    if policy.narrowing:
        progress(f"the {path} path in full width")
        whole = run(setup, path, _in_full_width(policy))
        if isinstance(whole, PathRefusal):
            return PathResult(path, refused=whole)
        narrowed = _errors(whole.numbers.gradients, numbers.gradients)
        numbers = evolve(numbers, gradients=whole.numbers.gradients)
    comparison = evolve(compare_numbers(plain, numbers), narrowed=narrowed)
    step = STEPS[path]
    if not comparison.bitwise and not step.is_plain:
        # A path may add gradients up in another order than autograd: then the policy must not change a bit of that.
        progress(f"the {path} path without the policy")
        model = setup.fresh()
        with setup.guard(), step.around():
            alone = step.take(setup, model, None)[0]
        comparison = evolve(comparison, as_without_policy=compare_numbers(alone, numbers).bitwise)
    return PathResult(path, ran=stepped, numbers=comparison)


def _in_full_width(policy: Policy) -> Policy:
    """The policy without narrower copies, and so without what it expects of their bytes."""
    return evolve(policy, rules=tuple(evolve(rule, form=None) for rule in policy.rules), expectations=(), canonical="")


_NO_GRADIENT = 2.0**-16
"""The share of the largest gradient below which one is nothing but rounding, as that of a key's bias is."""


def _errors(whole: Mapping[str, Tensor], narrow: Mapping[str, Tensor]) -> dict[str, float]:
    sizes = {name: each.detach().double().abs().max().item() for name, each in whole.items() if each.numel()}
    least, found = max(sizes.values(), default=0.0) * _NO_GRADIENT, {}
    for name in dict.fromkeys((*whole, *narrow)):
        one, other = whole.get(name), narrow.get(name)
        if one is None or other is None or one.shape != other.shape:
            found[name] = inf
            continue
        apart = (one.detach().double() - other.detach().double()).abs().max().item() if one.numel() else 0.0
        largest = max(sizes.get(name, 0.0), least)
        found[name] = inf if math.isnan(apart) else apart / largest if largest else inf if apart else 0.0
    return found


NOTHING = "nothing"
VERSION = 1
"""The version of the plain data."""
_OF_ERRORS = ("code", "message", "help")
_NUMBERS = ("loss", "gradients", "buffers")
_MOST = 8
_HEAD = ("path", "saved", "offloaded", "recomputed", "", "loss", "gradients", "buffers")


@frozen(eq=False)
class Numbers:
    """The results of one step: tensors by name."""

    loss: Any
    gradients: Mapping[str, Any]
    buffers: Mapping[str, Any]
    """The buffers' values after the step."""


@frozen(eq=False)
class PathRun:
    """A path that carried the policy out."""

    numbers: Numbers
    report: Report
    graphs: tuple[tuple[Facts, Report], ...]


@frozen(eq=False)
class PathRefusal:
    """A path that did not: why."""

    diagnostics: tuple[Diagnostic, ...] = ()
    """The errors; empty where it was no diagnostic of policylang."""
    error: str = ""
    """``TypeError: …``, where something other than policylang refused."""


@frozen
class Equality:
    """Some tensors of a step, compared with those of another run of the step."""

    tensors: int
    differing: tuple[str, ...] = ()
    """The names of those that are not equal to the bit."""
    largest: float = 0.0
    """The largest difference of two elements; infinite where names, shapes or types are not the same."""
    close: bool = True
    """All are within the tolerance that ``torch.testing.assert_close`` has for their type."""

    @property
    def bitwise(self) -> bool:
        return not self.differing


@frozen
class NumbersComparison:
    """The numbers of a path, compared with those of the plain model."""

    loss: Equality
    gradients: Equality
    buffers: Equality
    as_without_policy: bool | None = None
    """The path gives the same bits without the policy; None where not asked: they are the plain model's."""
    narrowed: Mapping[str, float] | None = None
    """By parameter, the largest error of its gradient, relative to its largest element, that narrower copies of saved
    values bring; :attr:`gradients` is then of a run that keeps them as they are. None where nothing is narrowed."""

    @property
    def each(self) -> tuple[Equality, Equality, Equality]:
        return self.loss, self.gradients, self.buffers

    @property
    def bitwise(self) -> bool:
        return all(each.bitwise for each in self.each)

    @property
    def agrees(self) -> bool:
        """The plain model's bits; or else those of the path without the policy, and within tolerance of the model's.
        Gradients that narrower copies make something else than a number do not agree with anything."""
        if self.narrowed is not None and inf in self.narrowed.values():
            return False
        return self.bitwise or (all(each.close for each in self.each) and self.as_without_policy is True)


@frozen
class ValuePlace:
    """The place of a value in a model, whatever its node is called in a graph."""

    module: str
    operator: str
    shape: tuple[int, ...] | None


@frozen
class PathDecision:
    """The decision of one path on a value, or on all of one place."""

    action: str
    rule: str | None
    """``file:line``."""
    reason: str = ""
    count: int = 1


@frozen
class PathDifference:
    """A value that paths decide differently."""

    place: ValuePlace
    number: int | None
    """The number of the value at its place, counted from 1; None for all of them, if one path has more than another."""
    sides: dict[str, tuple[PathDecision, ...]]
    """By path. A path whose graph does not have the value is absent."""


@frozen
class DecisionComparison:
    """The values of the paths that carried the policy out, one by one."""

    alike: int = 0
    """Values that two paths or more have, decided alike on each that has them."""
    undecided: int = 0
    """Values that no rule speaks of and that the paths treat differently."""
    alone: dict[str, dict[str, int]] = field(factory=dict)
    """By path: values that no other path's graph has, counted by operator."""
    differences: tuple[PathDifference, ...] = ()


@frozen(eq=False)
class PathResult:
    path: str
    ran: PathRun | None = None
    refused: PathRefusal | None = None
    numbers: NumbersComparison | None = None

    @property
    def agrees(self) -> bool:
        """The policy was applied as planned, and the numbers are right."""
        if self.ran is None or self.numbers is None:
            return False
        audit = self.ran.report.audit
        return self.numbers.agrees and (audit is None or audit.agrees)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that the path copies to the host."""
        moved = None if self.ran is None else self.ran.report.offloaded
        return 0 if moved is None else moved.bytes


@frozen(eq=False)
class Agreement:
    """The result of :func:`policylang.testing.agree`; ``str()`` of it is the table."""

    policy: str
    loss: float
    """The loss of the plain model."""
    gradients: int
    results: tuple[PathResult, ...]
    """A path each: what it decided, kept and computed, or why it refused."""
    decisions: DecisionComparison
    """The decisions of the paths, compared value by value."""
    torch_version: str

    @property
    def agrees(self) -> bool:
        """True if every path applied the policy, computed the right numbers, and decided shared values alike."""
        return all(result.agrees for result in self.results) and not self.decisions.differences

    def __getitem__(self, path: str) -> PathResult:
        return next(result for result in self.results if result.path == path)

    def __str__(self) -> str:
        """Plain text, no line end at the end."""
        shown = dict.fromkeys(_HEAD, True)
        shown["buffers"] = not all(each.numbers is None or each.numbers.buffers.bitwise for each in self.results)
        shown["offloaded"] = any(each.offloaded_bytes for each in self.results)
        rows = [_HEAD, *map(_row, self.results)]
        rows = [tuple(cell for cell, name in zip(row, _HEAD, strict=True) if shown[name]) for row in rows]
        ran = ((each.path, each.ran.report.audit) for each in self.results if each.ran is not None)
        audits = [f"{path}: {each}" for path, audit in ran if audit is not None for each in audit.differences]
        parts = [
            f"policy {self.policy}, one step, compared with the plain model: loss {self.loss:.6g}, "
            f"{counted(self.gradients, 'gradient')}, torch {self.torch_version}",
            table(rows, right=range(1, 4 + shown["offloaded"])),
            "\n".join([*_refusals(self.results), *_number_lines(self.results), *audits]),
            "\n".join(_decision_lines(self)),
            "\n".join(_difference_lines(self.decisions.differences)),
            _verdict(self),
        ]
        return "\n\n".join(filter(None, parts))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON. Bytes and FLOPs are whole numbers; differences of numbers are absolute."""
        decisions = asdict(self.decisions)
        differences = [{**each.pop("place"), **each} for each in decisions["differences"]]
        return {
            "version": VERSION,
            "policy": self.policy,
            "torch": self.torch_version,
            "agrees": self.agrees,
            "loss": self.loss,
            "gradients": self.gradients,
            "paths": [_path(result) for result in self.results],
            "values": {**decisions, "differences": differences},
        }


def _path(result: PathResult) -> dict[str, Any]:
    plain: dict[str, Any] = {"path": result.path, "agrees": result.agrees, "refused": None}
    if result.refused is not None:
        errors = [{name: getattr(each, name) for name in _OF_ERRORS} for each in result.refused.diagnostics]
        plain["refused"] = {"diagnostics": errors, "error": result.refused.error}
    if result.ran is not None and result.numbers is not None:
        report = result.ran.report
        assert report.saved is not None  # a path that ran has been partitioned
        assert report.recomputed is not None
        numbers = asdict(result.numbers)
        for name in _NUMBERS:
            if numbers[name]["largest"] == inf:
                numbers[name]["largest"] = None  # JSON has no infinity
        if numbers["narrowed"] is not None:
            numbers["narrowed"] = {name: None if each == inf else each for name, each in numbers["narrowed"].items()}
        plain |= {
            "saved_bytes": report.saved.bytes,
            "saved_values": len(report.saved),
            "offloaded_bytes": result.offloaded_bytes,
            "recomputed_values": len(report.recomputed),
            "recomputed_flops": report.recomputed.flops,
            "uncounted_operators": report.uncounted_recomputed,
            "numbers": {"bitwise": result.numbers.bitwise, **numbers},
        }
    return plain


# --- decisions -------------------------------------------------------------------------------------------------------


def compare_decisions(paths: Mapping[str, PathRun]) -> DecisionComparison:
    """Match the values of the paths that carried the policy out, in their order.

    Nodes have other names on every path, and some have other neighbours: a compiler merges equal computations, takes a
    dropout as one operator where a trace has four, and knows nothing of the loss. A value is known by its place
    instead: its module, its operator, its shape, and which of these it is, in graph order.
    """
    decided = {path: _decided(ran) for path, ran in paths.items()} if len(paths) > 1 else {}
    alike = undecided = 0
    alone: dict[str, Counter[str]] = {}
    differences: list[PathDifference] = []
    for place in dict.fromkeys(place for values in decided.values() for place in values):
        found = {path: values[place] for path, values in decided.items() if place in values}
        lengths = sorted(map(len, found.values()))
        shared = lengths[-2] if len(lengths) > 1 else 0
        for path, sides in found.items():
            if len(sides) > shared:
                alone.setdefault(path, Counter())[place.operator] += len(sides) - shared
        every = [side for sides in found.values() for side in sides]
        # The pairing of values between paths does not matter if all are decided alike, or none by a rule.
        matched = _alike(every) or all(side.rule is None for side in every)
        if shared and lengths[0] != lengths[-1] and not matched:
            sums = {path: Counter(each).items() for path, each in found.items()}
            folded = {path: tuple(evolve(side, count=n) for side, n in each) for path, each in sums.items()}
            differences.append(PathDifference(place, None, folded))
            continue
        for number in range(shared):
            at = {path: sides[number] for path, sides in found.items() if number < len(sides)}
            if _alike(at.values()):
                alike += 1
            elif all(side.rule is None for side in at.values()):
                undecided += 1
            else:
                differences.append(PathDifference(place, number + 1, {path: (side,) for path, side in at.items()}))
    counts = {path: dict(operators) for path, operators in alone.items()}
    return DecisionComparison(alike, undecided, counts, tuple(differences))


def _alike(sides: Iterable[PathDecision]) -> bool:
    return len({side.action for side in sides}.difference({NOTHING})) <= 1


def _decided(ran: PathRun) -> dict[ValuePlace, list[PathDecision]]:
    """By place, in graph order. The values of an operator with several results are one. What a path neither holds nor
    recomputes, since no backward reads it there, is nothing, whatever is decided."""
    found: dict[ValuePlace, list[PathDecision]] = {}
    for facts, report in ran.graphs:
        values = (report.saved, report.offloaded, report.recomputed)
        kept = {name for each in values if each is not None for name in each.names}
        for row in facts.forward:
            decision = report.decisions.get(facts.names[row])
            if facts.owners[row] == row and decision is not None:
                place = ValuePlace(facts.modules[row], facts.targets[row], facts.shapes[row])
                is_kept = any(facts.names[each] in kept for each in (row, *facts.followers.get(row, ())))
                action = decision.action if is_kept else NOTHING
                found.setdefault(place, []).append(PathDecision(action, decision.rule, decision.reason))
    return found


# --- text ------------------------------------------------------------------------------------------------------------


def _row(result: PathResult) -> tuple[str, ...]:
    if result.ran is None or result.numbers is None:
        return (result.path, "refused", *[""] * (len(_HEAD) - 2))
    report = result.ran.report
    saved = format_quantity(report.saved.bytes, "bytes") if report.saved is not None else ""
    moved = format_quantity(result.offloaded_bytes, "bytes")
    again = report.recomputed
    count = counted(len(again), "value") if again is not None else ""
    flops = format_quantity(again.flops, "flops") if again is not None else ""
    return (result.path, saved, moved, count, flops, *map(_equality_text, result.numbers.each))


def _equality_text(found: Equality) -> str:
    if found.bitwise:
        return "equal to the bit"
    return f"{len(found.differing)} of {found.tensors} differ, by {found.largest:.1e} at most"


def _refusals(results: Iterable[PathResult]) -> Iterator[str]:
    for path, refused in ((result.path, result.refused) for result in results if result.refused is not None):
        if not refused.diagnostics:
            yield f"{path} cannot run the model: {refused.error}"
        for found in refused.diagnostics[:_MOST]:
            where = f"{found.span.location}: " if found.span else ""
            yield f"{path} cannot apply it: {found.code}: {where}{found.message}"
            if found.help is not None:
                yield f"  help: {found.help}"
        if len(refused.diagnostics) > _MOST:
            yield f"  and {len(refused.diagnostics) - _MOST} more reasons"


def _number_lines(results: Iterable[PathResult]) -> Iterator[str]:
    """A line or two for each path whose numbers are not those of the plain model to the bit."""
    for result in results:
        numbers = result.numbers
        if numbers is not None and numbers.narrowed is not None:
            error, name = max(((error, name) for name, error in numbers.narrowed.items()), default=(0.0, "none"))
            yield (
                f"{result.path} narrows saved values: a gradient is off by {format_quantity(error, 'fraction')} of its "
                f"largest element at most, that of {name}; the gradients above are those in full width"
            )
        if numbers is None or numbers.bitwise:
            continue
        if numbers.agrees:
            yield (
                f"{result.path} rounds differently from the plain model, within tolerance; "
                "its bits are the same with and without the policy"
            )
            continue
        if numbers.as_without_policy:
            yield f"{result.path} COMPUTES something else than the plain model, without the policy too"
        else:
            yield f"{result.path} COMPUTES something else: its bits are not those without the policy"
        names = [name for each in numbers.each for name in each.differing]
        yield f"  {listed(names, _MOST)}"


def _decision_lines(found: Agreement) -> list[str]:
    if sum(result.ran is not None for result in found.results) < 2:
        return []
    decisions = found.decisions
    lines = [
        f"decisions   {counted(decisions.alike, 'value')} decided alike, "
        f"{decisions.undecided} undecided and left to each path, {len(decisions.differences)} decided otherwise"
    ]
    for path, counts in decisions.alone.items():
        most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{operator} ×{count}" if count > 1 else operator for operator, count in most[:_MOST])
        rest = f" and {len(most) - _MOST} more operators" if len(most) > _MOST else ""
        lines.append(f"            {path} alone: {counted(sum(counts.values()), 'value')} ({shown}{rest})")
    for result in found.results:
        missing = result.ran.report.uncounted_recomputed if result.ran is not None else {}
        lines += [f"recomputed  {result.path} without {uncounted_text(missing)}"] if missing else []
    return lines


def _difference_lines(differences: Sequence[PathDifference]) -> list[str]:
    lines = []
    for each in differences[:_MOST]:
        place = each.place
        shape = "×".join(map(str, place.shape)) if place.shape is not None else "several results"
        which = "all of them" if each.number is None else f"number {each.number}"
        lines.append(f"{place.operator} in {place.module or 'no module'}, {shape}, {which}")
        lines += [f"  {path:<6} {', '.join(map(_side, sides))}" for path, sides in each.sides.items()]
    rest = len(differences) - _MOST
    return [*lines, *([f"and {counted(rest, 'more value')} decided otherwise"] if rest > 0 else [])]


def _side(side: PathDecision) -> str:
    by = side.rule or side.reason or "no rule"
    extra = f" ({side.reason})" if side.reason and side.rule else ""
    return f"{side.action}{f' ×{side.count}' if side.count > 1 else ''}  {by}{extra}"


def _verdict(found: Agreement) -> str:
    ran = [result.path for result in found.results if result.ran is not None]
    refused = [result.path for result in found.results if result.ran is None]
    wrong = [result.path for result in found.results if result.ran is not None and not result.agrees]
    if not ran:
        return "no path applies the policy to this model"
    problems = []
    if wrong:
        problems.append(f"{joined(wrong)} {'is' if len(wrong) == 1 else 'are'} not the plain model")
    if found.decisions.differences:
        problems.append(f"{counted(len(found.decisions.differences), 'value')} decided otherwise")
    if refused:
        problems.append(f"{joined(refused)} refused")
    if problems:
        return f"the paths do NOT agree: {'; '.join(problems)}"
    if len(ran) < 2:
        return f"{joined(ran)} agrees with the plain model; there is no other path to compare it with"
    return f"{joined(ran)} agree"
