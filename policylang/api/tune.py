"""``policylang.tune``: from a budget to a policy."""

from __future__ import annotations

import os
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from policylang.api.load import DeviceLike, device_of, parse
from policylang.api.planned_graphs import checked_path, read_any, read_pipeline, with_order
from policylang.errors import (
    PolicyError,
    PolicyGraphError,
    PolicyMatchError,
    PolicyMeaningError,
    check_argument,
    check_flags,
)
from policylang.graph.expert_load import under_load
from policylang.graph.facts import Facts, uncounted_operators
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import find_device, read_device
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.resources import devices_folder
from policylang.language.shown import format_quantity
from policylang.language.syntax import Balance, Pipeline
from policylang.planning.capabilities import Capabilities, PathName, capabilities_for
from policylang.planning.expectations import BY_DATA
from policylang.planning.liveness import counted_by_data, saved_and_recomputed
from policylang.planning.statement_errors import loads_untold
from policylang.simulation.node_times import NodeTimes, lacking, node_times
from policylang.tuning import budgets
from policylang.tuning.evaluation import Allowed, Besides, Budget, Evaluation, Infeasible, Tuned
from policylang.tuning.tuned_policy import TunedPolicy, TuningSubject, fingerprint, tuned_text

if TYPE_CHECKING:
    from policylang.tuning.variants import Variants

NO_SOLVER = "APL619"
NOTHING_OFFLOADED = "APL634"
NOTHING_RECOMPUTED = "APL627"

Read = TypeVar("Read")


def tune(
    graph: Any,
    *,
    peak: budgets.Size | None = None,
    saved: budgets.Size | None = None,
    recompute_time: budgets.Share | None = None,
    device: DeviceLike,
    optimizer: budgets.Size | None = None,
    reserve: budgets.Share = 0.0,
    offload: bool = False,
    chunk: bool = True,
    order: bool = True,
    lossy: bool = False,
    balance: str | None = None,
    path: PathName | None = None,
    table: bool = False,
    schedule: str | None = None,
    stages: int | str | None = None,
    microbatches: int | None = None,
) -> TunedPolicy:
    """The policy that takes the least time within a budget of memory, or the least memory within one of time.

    Args:
        graph: a snapshot, facts, or whatever :func:`policylang.snapshot` takes.
        peak: bytes that the step may take at its highest moment, parameters and gradients included: ``"70 GiB"``.
        saved: instead, bytes that may be kept for the backward.
        recompute_time: instead, how much of the forward's time recomputation may take: ``"5%"``, or ``0.05``.
        device: a device profile, as :func:`policylang.load_device` takes it.
        optimizer: whose state takes memory beside the graph: a name of :data:`policylang.tuning.budgets.STATES` such as
            ``"adamw"``, or a size. State has the dtype of its parameter; a parameter without a gradient has none.
        reserve: the share of the memory that is set aside for what the allocator wastes: ``"5%"``.
        offload: whether values may also be copied to the host.
        chunk: whether the loss and the modules of blocks may be cut into slices, whose sums round otherwise.
        order: whether collectives may be merged, and start earlier than they were traced.
        lossy: whether values may also be kept in a narrower type.
        balance: how evenly tokens are routed to experts, as in a policy's ``balance`` line: ``"1.0"``, ``"up to 2.0"``.
        path: what will carry the policy out, as for :func:`policylang.check`.
        table: whether ``TunedPolicy.table`` is to cover the whole range of memory, which takes longer.
        schedule: of ``torch.distributed.pipelining``, such as ``"1f1b"``, where the model is trained in stages; then
            ``graph`` is one microbatch through the whole model, ``peak`` is what each rank may take, and the policy
            has lines for stages. ``order`` and ``lossy`` lines are not tuned for stages.
        stages: how many, or the first block of each: ``"0,6,14,22"``.
        microbatches: of a step.

    Needs no torch for a snapshot. The same graph, device and budget give the same text, byte for byte, everywhere.

    Raises :class:`PolicyMeaningError` for a wrong budget, size or device, :class:`PolicyGraphError` for a graph without
    anything to tune, and :class:`PolicyMatchError` if no policy meets the budget, with what is too large.
    """
    facts = read_any(graph)
    check_flags(offload=offload, chunk=chunk, order=order, lossy=lossy, table=table)
    check_argument("device", device, device is not None, "the name or the path of a device profile")
    profile = device_of(device)
    assert profile is not None
    budget = read_or_raise(budgets.read_budget(peak, saved, recompute_time))
    if budget is None:
        raise PolicyMeaningError([no_budget(profile)])
    checked_path(path)
    pipeline = read_pipeline(schedule, stages, microbatches)
    return tuned_policy(
        facts,
        Path(os.fsdecode(graph)).name if isinstance(graph, str | os.PathLike) else "",
        profile,
        budget,
        optimizer=optimizer,
        reserve=reserve,
        named=None if isinstance(device, DeviceProfile) else os.fspath(device),
        also=Allowed(offload, chunk, order, lossy),
        balance=balance,
        path=path,
        table=table,
        pipeline=None if pipeline is None else read_or_raise(pipeline),
    )


def tuned_policy(
    facts: Facts,
    graph: str,
    device: DeviceProfile,
    budget: Budget | None,
    *,
    optimizer: budgets.Size | None,
    reserve: budgets.Share,
    named: str | None,
    folder: Path = Path(),
    also: Allowed,
    balance: str | None,
    path: PathName | None,
    table: bool,
    progress: Callable[[str], None] | None = None,
    pipeline: Pipeline | None = None,
    variants: Variants | None = None,
) -> TunedPolicy:
    """:func:`tune` with its graph, device and budget read; raises as it does, and ``PolicyError`` where the solver is
    not installed.

    ``graph`` is the name of the graph's file, empty where there is none, ``named`` how the device was given, ``folder``
    the policy's folder, ``variants`` what there is to choose among, if that is known. Without a budget the trade-off is
    computed: there is no text then, and the fastest candidate is chosen.
    """
    identity, load, capabilities = fingerprint(facts), _stated_load(balance), capabilities_for(facts.kind, path)
    called = f"`{graph}`" if graph else "the graph"
    if pipeline is not None:
        pipeline = _suited(pipeline, budget, also, table=table)
    problem = budgets.unsuitable(facts, called) or budgets.decides_nothing(capabilities)
    if problem := problem or (budgets.no_copies(capabilities) if also.offload else None):
        raise (PolicyGraphError if problem.code == budgets.UNSUITABLE else PolicyMatchError)([problem])
    variants = variants or variants_of(
        facts,
        device,
        Budget("peak", inf) if budget is None else budget,
        optimizer=optimizer,
        reserve=reserve,
        named=named,
        folder=folder,
        also=also,
        balance=balance,
        path=path,
        progress=progress,
    )
    facts, times, besides = variants.facts, variants.times, variants.besides
    loads = [*loads_untold(load, facts)]
    if load is None and (by_data := counted_by_data(facts, facts.forward)):
        message, help = f"the peak counts {by_data}", "state a load: `--balance 'up to 2.0'`, or `balance=`"
        loads.append(diagnose(BY_DATA, message, help=help))
    state = optimizer.strip().lower() if isinstance(optimizer, str) else ""
    subject = TuningSubject(
        graph=graph,
        kind=facts.kind.value,
        nodes=len(facts),
        fingerprint=identity,
        device=times.device.name,
        device_named=device_in_policy(device, named, folder),
        optimizer=state if state in budgets.STATES else "",
        path=path or "",
        balance="" if load is None else load.span.text,
        priced_by_bytes=times.uncounted,
    )
    found: Tuned | Infeasible | Diagnostic
    if pipeline is None:
        found = variants.best(table=table)
    else:
        from policylang.tuning.stages import StageTuner

        how = facts, times, capabilities, pipeline, variants.budget, besides, also
        found = StageTuner(*how, shared=bool(subject.optimizer), progress=progress).best()
    if isinstance(found, Infeasible):
        found = budgets.infeasible(found, facts, times, capabilities)
    if isinstance(found, Diagnostic):
        raise PolicyMatchError([found, *loads])
    notes = [budgets.without_blocks(facts, called), *loads]
    shown = found.table if budget is None else (found.chosen,)
    if also.offload and any(each.recompute for each in shown) and not any(each.offloaded for each in shown):
        where = "on the trade-off" if budget is None else "the best within the budget"
        message = f"no policy that copies to the host is {where}: what is tuned saves and recomputes alone"
        help = "a faster link, or larger values in fewer operators, would be worth copying"
        notes.append(diagnose(NOTHING_OFFLOADED, message, help=help))
    if budget is None:
        return TunedPolicy("", found, subject, tuple(filter(None, notes)))
    if not found.chosen.recompute and not found.chosen.offloaded and budget.figure != "recompute time":
        room = format_quantity(int(budget.limit) - besides.memory(found.chosen, budget), "bytes")
        message = f"nothing has to be recomputed: with all saved, {room} of the budget are left"
        notes.append(diagnose(NOTHING_RECOMPUTED, message, help="a larger batch or fewer ranks may fit as well"))
    timed = found.stages is None and _counts(found, facts, times, capabilities)
    text = tuned_text(found, subject, timed=timed)
    return TunedPolicy(text, found, subject, tuple(filter(None, notes)))


def variants_of(
    facts: Facts,
    device: DeviceProfile,
    budget: Budget,
    *,
    optimizer: budgets.Size | None,
    reserve: budgets.Share,
    named: str | None,
    folder: Path = Path(),
    also: Allowed,
    balance: str | None,
    path: PathName | None,
    progress: Callable[[str], None] | None,
) -> Variants:
    """What there is to choose among: see :func:`tuned_policy`, which raises the same."""
    state, share = budgets.read_optimizer(optimizer, facts), budgets.read_reserve(reserve)
    besides = Besides(read_or_raise(state), read_or_raise(share))
    load = _stated_load(balance)
    facts = facts if load is None else under_load(facts, load.factor, load.is_limit)
    times = node_times(facts, device)
    if missing := lacking(times, copies=also.offload):
        raise PolicyMatchError([missing])
    try:
        from policylang.tuning.variants import Variants
    except ImportError as error:  # nothing but tuning needs it
        message = f"tuning a policy needs extra packages, and `{error.name}` is not installed"
        raise PolicyError([diagnose(NO_SOLVER, message, help=f"install it with `pip install {error.name}`")]) from None
    able, named = capabilities_for(facts.kind, path), device_in_policy(device, named, folder)
    line = f"device {named}\n" if named else ""
    return Variants(facts, times, able, budget, besides, also, device_line=line, progress=progress)


def _stated_load(balance: str | None) -> Balance | None:
    if balance is None:
        return None
    try:
        return parse(f"balance {balance}\nundecided -> save\n", name="--balance").balance
    except PolicyError as error:
        raise PolicyMeaningError(error.diagnostics) from None


def _counts(found: Tuned, facts: Facts, times: NodeTimes, capabilities: Capabilities) -> bool:
    """The time of recomputation can be promised: none of it is priced by its bytes for want of a FLOP formula."""
    if not times.uncounted or found.budget.figure != "recompute time":
        return True
    made = Evaluation(facts, times, capabilities).planned(found.chosen.rules)
    return made is not None and not uncounted_operators(made.facts, saved_and_recomputed(made).recomputed)


def _suited(pipeline: Pipeline, budget: Budget | None, also: Allowed, *, table: bool) -> Pipeline:
    """The pipeline with its order. Raises ``PolicyMeaningError`` for what is not tuned in stages, and
    ``PolicyGraphError`` where the schedule does not take its numbers."""
    what, help = "", "leave it out, or tune for a single step"
    if budget is None or budget.figure != "peak":
        what, help = "for saved bytes or for time", "give `peak`: what each rank may take"
    elif also.lossy or table:
        what = "with narrower copies" if also.lossy else "over a whole trade-off"
    if what:
        raise PolicyMeaningError([diagnose(budgets.NO_BUDGET, f"stages are not tuned {what}", help=help)])
    made = with_order(pipeline)
    if isinstance(made, Diagnostic):
        raise PolicyGraphError([made])
    return made


def no_budget(device: DeviceProfile) -> Diagnostic:
    """The error where no budget is given, with what the device has."""
    help = "give a peak, such as `70 GiB`, saved bytes, or a share of the forward's time, such as `5%`"
    if device.capacity:
        capacity = format_quantity(device.capacity, "bytes")
        help = f"`{device.name}` has {capacity}: a peak of `{capacity}`"
        help = f"{help} uses all of it; a reserve of `5%` leaves some to the allocator"
    return diagnose(budgets.NO_BUDGET, "there is no budget to tune for", help=help)


def device_in_policy(device: DeviceProfile, named: str | None, folder: Path) -> str:
    """A profile as a policy in a folder names it: bundled by name, a file by its path; empty where it is neither."""
    found = find_device(device.name if named is None else named, Path())
    if isinstance(found, Diagnostic):
        return ""
    path, _ = found
    if path.parent != devices_folder():
        return f'"{Path(os.path.relpath(path, folder)).as_posix()}"' if named is not None else ""
    bundled = read_device(path.stem)
    same = not isinstance(bundled, Diagnostic) and bundled.canonical == device.canonical
    return path.stem if same else ""


def read_or_raise(read: Read | Diagnostic) -> Read:
    """Raises ``PolicyMeaningError`` for a diagnostic in place of what was to be read."""
    if isinstance(read, Diagnostic):
        raise PolicyMeaningError([read])
    return read
