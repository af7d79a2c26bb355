"""Faults of single ranks as rows of a table: what a rank does otherwise, and what every rank has to be told of it.

A :class:`Fault` runs twice on the same ranks: first as its control, with nobody at fault, which has to pass with the
numbers of the plain model; then with the fault. Many share one set of processes. Nothing that one of them breaks
reaches the next: each trial has process groups of its own, whose collectives give up soon, and ranks meet between
trials through the store. What a rank says is written down at once: if a fault ends a rank, its row says so, and the
rows after it go on in new processes.
"""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from attrs import asdict, define, field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import policylang
from tests.support.ranks import RanksFailed, run_ranks

GIVES_UP = 20.0
"""Seconds after which a collective that nobody else runs fails: a fault that goes unnoticed ends so."""
LIMIT = 30.0
"""Seconds in which every rank is told, where all ranks come."""
AMISS = 90.0
"""Seconds after which a rank stops waiting for another between two trials."""
PATIENCE = "POLICYLANG_AGREE_TIMEOUT"

Codes = tuple[str, ...]
"""Codes of diagnostics, or names of exceptions that are not policylang's; any of them will do."""
Case = Callable[["Place", bool], None]
"""What a rank does; the second argument is whether it is at fault."""


@frozen
class Fault:
    """One row."""

    name: str
    case: Case
    told: Codes
    """What every rank raises; empty where all of them have to pass even so."""
    words: tuple[str, ...] = ()
    """What stands in every message; with ``a|b`` one of the two."""
    own: Codes = ()
    """What the ranks at fault raise, where that is not what the others are told."""
    never: tuple[str, ...] = ()
    """What stands in no message."""
    logged: tuple[str, ...] = ()
    """What the ranks that are not at fault log."""
    world: int = 2
    odd: tuple[int, ...] = (1,)
    """The ranks at fault."""
    spared: tuple[int, ...] = ()
    """The ranks that share nothing with those at fault: they pass."""
    gives_up: float = GIVES_UP
    """Seconds, of collectives, while somebody is at fault."""
    patience: float | None = GIVES_UP
    """Seconds, of the comparison, while somebody is at fault; None leaves it to the process groups."""
    gone: bool = False
    """Whether the ranks at fault end without a word."""
    since: tuple[int, int] = (2, 11)
    """The oldest torch."""
    fast: bool = False
    """Runs in the fast suite."""
    before: Callable[[bool], None] | None = None
    """What a rank does before there is a process group at all; whether it is at fault, as for ``case``."""

    @property
    def group(self) -> bool:
        """Whether the process group is there from the start."""
        return self.before is None


@frozen
class Outcome:
    """What became of a trial on one rank."""

    error: str = ""
    """The class; empty where it went through."""
    codes: tuple[str, ...] = ()
    text: str = ""
    seconds: float = 0.0
    logged: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        return cls(**{**data, "codes": tuple(data["codes"]), "logged": tuple(data["logged"])})

    def __str__(self) -> str:
        if not self.error:
            return f"went through in {self.seconds:.1f} s"
        lines = [line for line in self.text.splitlines() if line.strip()]
        first = lines[0] if self.codes else lines[-1]
        return f"{self.error} in {self.seconds:.1f} s: {first[:200]}"


# --- what a case is handed ------------------------------------------------------------------------------------------
@define(eq=False)
class Place:
    """Where a case runs. Its groups are made before it starts, so that whatever it does, all ranks have made the same.

    ``groups`` are two over all ranks. With two ranks ``mesh`` is over the first of them, under a name of its own; with
    four, one of 2 × 2, named ``dp`` and ``tp``.
    """

    rank: int
    world: int
    faulty: bool
    """Whether some rank is at fault in this trial."""
    label: str
    groups: tuple[dist.ProcessGroup, ...]
    mesh: DeviceMesh
    meetings: int = 0

    @property
    def group(self) -> dist.ProcessGroup:
        return self.groups[0]

    def meet(self) -> None:
        """Wait for the other ranks, without a collective."""
        self.meetings += 1
        _meet(f"{self.label}/{self.meetings}", self.world)

    def trains(self, step: Callable[..., Tensor], model: nn.Module, *batch: Tensor, plain: Any = None) -> None:
        """A forward and a backward; in a control, to the gradients of ``plain``, which is the model itself."""
        expected = None if self.faulty else gradients(plain or model, plain or model, *batch)
        found = gradients(step, model, *batch)
        if expected is not None:
            torch.testing.assert_close(found, expected)


def gradients(step: Callable[..., Tensor], model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
    """Of the mean square of what comes out. Of a sharded parameter it is this rank's part."""
    model.zero_grad()
    torch.manual_seed(5)
    step(*batch).float().square().mean().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: (grad.to_local() if isinstance(grad, DTensor) else grad).clone() for name, grad in found.items()}


# --- on the rank ----------------------------------------------------------------------------------------------------
def column(rank: int, rows: Sequence[Fault], folder: str, controls: bool = True) -> None:
    """One rank's way through the rows; what it says is a line each in a file of its own. Without ``controls`` only rows
    that all have to pass have theirs."""
    for row in rows:
        if row.before is not None:
            row.before(rank in row.odd)
            dist.init_process_group("gloo")
    world = dist.get_world_size()
    with Path(folder, str(rank)).open("a") as file:
        for row in rows:
            for faulty in (False, True) if controls or not row.told else (True,):
                label = f"{row.name}/{faulty}"
                with _environment(row, faulty):
                    place = _place(rank, world, faulty, label, row.gives_up if faulty else GIVES_UP)
                    outcome = _outcome(row, place, faulty and rank in row.odd)
                file.write(json.dumps([row.name, faulty, asdict(outcome)]) + "\n")
                file.flush()
                if row.gone and faulty:
                    return
                if not _all_as_meant(label, world, not _wrong(row, rank, outcome, faulty)):
                    return  # who knows what it has left behind
                if not outcome.error or outcome.codes:
                    _forget(place)


def _place(rank: int, world: int, faulty: bool, label: str, gives_up: float) -> Place:
    def group(*ranks: int) -> dist.ProcessGroup:
        return dist.new_group(list(ranks), timeout=timedelta(seconds=gives_up))

    groups = tuple(group(*range(world)) for _ in range(2))
    if world == 4:
        columns = {ranks: group(*ranks) for ranks in ((0, 2), (1, 3))}
        rows = {ranks: group(*ranks) for ranks in ((0, 1), (2, 3))}
        own = [next(each for ranks, each in made.items() if rank in ranks) for made in (columns, rows)]
        mesh = DeviceMesh.from_group(own, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"))
    else:
        # equal meshes share what DTensor keeps, and with it the groups of an earlier trial
        mesh = DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=(f"dp_{groups[0].group_name}",))
    return Place(rank, world, faulty, label, groups, mesh)


def _forget(place: Place) -> None:
    """Groups have threads, and there are many trials. One whose collective failed is left alone."""
    parts = [place.mesh.get_group(dim) for dim in range(place.mesh.ndim)]
    for group in {id(each): each for each in (*place.groups, *parts)}.values():
        with suppress(ValueError):
            dist.destroy_process_group(group)


def _outcome(row: Fault, place: Place, at_fault: bool) -> Outcome:
    torch._dynamo.reset()
    started = time.monotonic()
    with _listening() as logged:
        try:
            row.case(place, at_fault)
            found = Outcome()
        except policylang.PolicyError as error:
            found = Outcome(type(error).__name__, tuple(each.code for each in error.diagnostics), str(error))
        except Exception as error:
            found = Outcome(type(error).__name__, (), traceback.format_exc())
    seconds = time.monotonic() - started
    return Outcome(found.error, found.codes, found.text, seconds, tuple(logged))


@contextmanager
def _environment(row: Fault, faulty: bool) -> Iterator[None]:
    with mock.patch.dict(os.environ):
        os.environ.pop(PATIENCE, None)
        if row.patience is not None:
            os.environ[PATIENCE] = f"{row.patience if faulty else GIVES_UP:g}"
        yield


@contextmanager
def _listening() -> Iterator[list[str]]:
    """What is logged within at a level that is shown if nobody configures anything."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


def _all_as_meant(label: str, world: int, own: bool) -> bool:
    store = dist.distributed_c10d._get_default_store()
    store.add(f"faults/{label}/wrong", 0 if own else 1)
    _meet(label, world)
    return bool(store.add(f"faults/{label}/wrong", 0) == 0)


def _meet(label: str, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + AMISS
    store.add(f"faults/{label}", 1)
    while store.add(f"faults/{label}", 0) < world:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other ranks have not come to `{label}`")
        time.sleep(0.01)


# --- in the test ----------------------------------------------------------------------------------------------------
@define(eq=False)
class Found:
    """By rank, what became of a row's control and of the row; and how its processes ended, if they did not end well."""

    control: dict[int, Outcome] = field(factory=dict)
    fault: dict[int, Outcome] = field(factory=dict)
    ended: str = ""


Program = Callable[[int, list[str], str], None]
"""Runs :func:`column` on the rows of these names: rows themselves have functions that do not travel."""


def run_column(
    program: Program, rows: Sequence[Fault], folder: Path, timeout: float = 240.0, group: bool = True
) -> dict[str, Found]:
    """All rows, which have equally many ranks, in one set of processes; in another after a row that is not as meant."""
    found = {row.name: Found() for row in rows}
    left, attempt = list(rows), 0
    while left:
        attempt += 1
        place = folder / f"{attempt}"
        place.mkdir(parents=True)
        world = left[0].world
        gone = left[0].odd if left[0].gone else ()
        ended = ""
        try:
            run_ranks(program, world, [row.name for row in left], str(place), gone=gone, timeout=timeout, group=group)
        except RanksFailed as error:
            ended = str(error)
        begun = 1
        for rank in range(world):
            file = place / str(rank)
            lines = file.read_text().splitlines() if file.exists() else []
            for name, faulty, outcome in map(json.loads, lines):
                kept = found[name].fault if faulty else found[name].control
                kept[rank] = Outcome.from_json(outcome)
                begun = max(begun, 1 + [row.name for row in left].index(name))
        if ended:
            last = left[begun - 1]
            begun += len(found[last.name].fault) == world and begun < len(left)  # it ended in the one after
            found[left[begun - 1].name].ended = ended
        left = left[begun:]
    return found


def run_alone(program: Program, rows: Sequence[Fault], folder: Path) -> dict[str, Found]:
    """Each row in processes of its own, all at once: rows that wait and compute little."""

    def run(number: int) -> dict[str, Found]:
        row = rows[number]
        return run_column(program, [row], folder / f"{number}", timeout=120.0, group=row.group)

    with ThreadPoolExecutor(len(rows)) as pool:
        return {name: found for each in pool.map(run, range(len(rows))) for name, found in each.items()}


def complaints(row: Fault, found: Found) -> list[str]:
    """What is not as the row says, a line each; empty where it is."""
    wrong = []
    shown = set()
    for rank in range(row.world):
        control, fault = found.control.get(rank), found.fault.get(rank)
        wrong += _wrong(row, rank, control, False) if found.control else []
        wrong += _wrong(row, rank, fault, True)
        if fault is not None and fault.codes and not (rank in row.odd and row.own):
            shown.add(fault.codes)
    if len(shown) > 1:
        wrong.append(f"one cause, and not one message: {sorted(shown)}")
    if found.ended:
        wrong.append(f"its processes: {found.ended.strip().splitlines()[0]}")
    return wrong


def _wrong(row: Fault, rank: int, outcome: Outcome | None, faulty: bool) -> list[str]:
    """What is not as it should be about one trial on one rank."""
    at_fault = faulty and rank in row.odd
    which = f"rank {rank}" if faulty else f"control, rank {rank}"
    if at_fault and row.gone:
        return []
    if outcome is None:
        return [f"{which}: did not end"]
    found = []
    if faulty and row.told and rank not in row.spared:
        codes = (row.own if at_fault else ()) or row.told
        names = outcome.codes or (outcome.error,)
        if len(names) > 1 or names[0] not in codes:
            found.append(f"not {' or '.join(codes)}: {outcome}")
        elif codes is row.told and outcome.codes:
            missing = [word for word in row.words if not any(each in outcome.text for each in word.split("|"))]
            found += [f"does not say `{word}`: {outcome}" for word in missing]
        found += [f"says `{word}`" for word in row.never if word in outcome.text]
    elif outcome.error:
        found.append(f"has to pass: {outcome}")
    if outcome.seconds > LIMIT:
        found.append(f"too late: {outcome}")
    if faulty and not at_fault:
        missing = [word for word in row.logged if not any(word in line for line in outcome.logged)]
        found += [f"does not log `{word}`: {outcome.logged}" for word in missing]
    return [f"{which}: {each}" for each in found]


def report(rows: Sequence[Fault], found: Mapping[str, Found]) -> str:
    """Rows that are not as they should be, one paragraph each; empty if there is none."""
    lines = []
    for row in rows:
        wrong = complaints(row, found[row.name])
        if wrong:
            lines.append("\n  ".join([row.name, *wrong]))
    return "\n".join(lines) and f"{len(lines)} of {len(rows)} faults\n" + "\n".join(lines)
