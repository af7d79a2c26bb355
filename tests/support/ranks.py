"""Tests in several processes: ``run_ranks`` runs a function on every rank of a gloo group and hands back what they say.

The ranks are forked from one server process a test run, which has imported torch and has traced and compiled a small
model: eight ranks start in the time of one import, and share its memory. (They share its hash seed too: that two
processes with different seeds decide alike is tested elsewhere.) The default store is held by the process that asks, as
torchrun holds it, on a port that the kernel chose and that is never given back in between.

A rank leaves only when all have reported, and by ``os._exit``: no peer loses a connection that it still uses, and no
destructor of torch runs beside threads of gloo. (A rank that took itself down in the usual way was once ended by
``terminate called without an active exception``, and no later run has shown why.) One that a signal ends leaves its
stacks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, frozen

from tests.support.heap import settle_new_process

HOST = "127.0.0.1"
GRACE = 10.0
"""Seconds that the others get to report after the first rank has failed: theirs are mostly consequences."""

_PRELOADED = [
    "pytest", "torch", "torch.distributed.tensor", "torch._dynamo", "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx", "policylang.backends.torch_compile.backend", "policylang.audit.outcome",
    "tests.support.warm",
]  # fmt: skip
_SILENT = "ended without a word"


class RanksFailed(Exception):
    """What every rank that failed, died or hung had to say, the first one first."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 240.0,
    gone: Iterable[int] = (),
    group: bool = True,
) -> list[Any]:
    """Run ``function(rank, *args)`` in ``world`` processes; what each returned, by rank.

    Each has a default gloo group over the loopback device and one thread; function, arguments and results are pickled.
    ``timeout`` is in seconds and covers everything: then the stacks of the ranks that still run are shown, and all are
    killed. ``gone``: the ranks that are to end without a word (killed, or by ``os._exit``); None stands for what they
    return. Without ``group`` the ranks get the environment of ``torchrun`` and no group.

    Raises ``RanksFailed`` with the traceback of every rank that raised, died or hung.
    """
    payload = pickle.dumps((function, args))
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [_Rank.start(rank, world, store.port, payload, Path(folder), group) for rank in range(world)]
        try:
            _watch(ranks, time.monotonic() + timeout, frozenset(gone))
        finally:
            for rank in ranks:
                rank.end()
    complaints = [(rank.when, rank.complaint(rank.number in gone)) for rank in ranks]
    found = [complaint for _, complaint in sorted(complaints) if complaint]
    if found:
        raise RanksFailed("\n\n" + "\n\n".join(found))
    return [rank.said.result if rank.said is not None else None for rank in ranks]


@frozen
class _Said:
    result: Any
    error: str = ""


@frozen
class _Task:
    """What a rank is told."""

    rank: int
    world: int
    port: int
    payload: bytes
    stacks: Path
    environment: dict[str, str]
    path: list[str]
    group: bool


@define(eq=False)
class _Rank:
    """A rank as the asking process sees it."""

    number: int
    process: BaseProcess
    connection: Connection
    stacks: Path
    said: _Said | None = None
    when: float = float("inf")
    ended: bool = False
    hung: str = ""
    last_stacks: str = ""

    @classmethod
    def start(cls, rank: int, world: int, port: int, payload: bytes, folder: Path, group: bool) -> _Rank:
        stacks = folder / f"{rank}"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # nobody else starts a store at that port
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
        }
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        ours, theirs = context.Pipe()
        task = _Task(rank, world, port, payload, stacks, environment, list(sys.path), group)
        process = context.Process(target=_run, args=(task, theirs), name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()
        return cls(rank, process, ours, stacks)

    def listen(self) -> None:
        """Take what the rank has sent: its result, or the end of the line."""
        self.when = time.monotonic()
        try:
            self.said = self.connection.recv()
        except (EOFError, OSError):
            self.ended = True

    @property
    def waited_for(self) -> bool:
        return self.said is None and not self.ended

    def show_stacks(self) -> None:
        """Have a rank that still runs write where it is; the file is read by :meth:`note_stacks`."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def note_stacks(self) -> None:
        self.hung = self.stacks.read_text() if self.stacks.exists() else "(before its first line)"

    def end(self) -> None:
        """Let a rank that has reported leave; kill any other."""
        if self.said is not None:
            with suppress(OSError):
                self.connection.send(None)
            self.process.join(GRACE)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()
        if self.said is None and not self.hung and self.stacks.exists():
            self.last_stacks = self.stacks.read_text()

    def complaint(self, gone: bool) -> str:
        if self.hung:
            return f"rank {self.number} hung; its stacks, the innermost call first:\n{self.hung}"
        if self.said is None:
            code = self.process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            return "" if gone else f"rank {self.number} {_SILENT}: {how}\n{self.last_stacks}"
        if self.said.error:
            return f"rank {self.number} failed:\n{self.said.error}"
        return f"rank {self.number} was to end without a word, and returned" if gone else ""


def _watch(ranks: list[_Rank], deadline: float, gone: frozenset[int]) -> None:
    """Wait until all have reported or ended, one has failed and the others had time to say so, or time is up."""
    failed = False
    while waited_for := [rank for rank in ranks if rank.waited_for]:
        ready = wait([rank.connection for rank in waited_for], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in waited_for:
            if rank.connection in ready:
                rank.listen()
                wrong = rank.number not in gone if rank.said is None else bool(rank.said.error)
                if wrong and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + GRACE)
    if waited_for:
        for rank in waited_for:
            rank.show_stacks()
        time.sleep(1.0)
        for rank in waited_for:
            rank.note_stacks()


# --- on the rank ----------------------------------------------------------------------------------------------------
def _run(task: _Task, connection: Connection) -> None:
    """One rank, from its first line to its last."""
    settle_new_process()
    os.environ.clear()
    os.environ.update(task.environment)
    sys.path[:] = task.path
    with task.stacks.open("w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        said = _call(task)
        try:
            connection.send(said)
        except Exception:  # a result that cannot be pickled
            connection.send(_Said(None, traceback.format_exc()))
        with suppress(EOFError, OSError):
            connection.recv()  # all have reported
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _call(task: _Task) -> _Said:
    try:
        torch.set_num_threads(1)
        if task.group:
            store = dist.TCPStore(HOST, task.port, is_master=False, timeout=timedelta(seconds=60))
            dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world)
        function, args = pickle.loads(task.payload)
        return _Said(function(task.rank, *args))
    except BaseException:  # SystemExit and pytest's own outcomes are failures too
        return _Said(None, traceback.format_exc())
