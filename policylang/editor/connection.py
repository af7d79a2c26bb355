"""The standard input and output as a connection: nothing but messages ever stands in the output.

Whatever prints, torch's warnings and libraries written in C among it, prints to the standard error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import BinaryIO

from pygls.io_ import StdinAsyncReader, StdoutWriter, run_async

from policylang.editor.client import PolicyServer
from policylang.editor.garbage import collect_when_told
from policylang.editor.lifeline import end_with

_SWITCH = 0.0005
"""Seconds after which a thread that plans lets the one that answers run; Python's own are ten times that."""
_HEADER = 1 << 20


def serve_stdio(server: PolicyServer) -> int:
    """Serve one client until it ends the connection, or is gone. The exit code: 0 where it said that it would go."""
    sys.setswitchinterval(_SWITCH)
    collect_when_told()
    logging.getLogger("pygls").setLevel(logging.CRITICAL)  # the server itself tells what goes wrong
    taken, given = _taken_over()
    with suppress(SystemExit, BrokenPipeError, ConnectionResetError):
        asyncio.run(_run(server, taken, given))
    server.documents.close()
    with suppress(OSError, ValueError):
        given.close()
    return 0 if server.ended else 1


def _taken_over() -> tuple[BinaryIO, BinaryIO]:
    """The two streams, out of reach of everything else in the process: what is read there is nothing, and what is
    printed there goes to the standard error."""
    sys.stdout.flush()
    taken, given = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return taken, given


async def _run(server: PolicyServer, taken: BinaryIO, given: BinaryIO) -> None:
    reader = await _reader(taken)
    loop, serving = asyncio.get_running_loop(), asyncio.current_task()
    assert serving is not None

    def end() -> None:
        """From any thread: the client is gone."""
        with suppress(RuntimeError):  # it has ended meanwhile
            loop.call_soon_threadsafe(serving.cancel)

    server.protocol.set_writer(_Writer(given, end))
    server.begun_by = lambda process: end_with(process, end)
    with suppress(asyncio.CancelledError):
        await run_async(Event(), reader, server.protocol, error_handler=server.report_server_error)


class _Writer(StdoutWriter):
    """What nobody reads any more ends the connection, whoever says it: plans go on in tasks of their own."""

    def __init__(self, given: BinaryIO, end: Callable[[], None]) -> None:
        super().__init__(given)
        self._end = end

    def write(self, data: bytes) -> None:
        try:
            super().write(data)
        except OSError:
            self._end()


async def _reader(taken: BinaryIO) -> StdinAsyncReader | _MessageReader:
    """A pipe is read by the event loop itself: a thread in between would wait its turn beside one that plans."""
    kind = os.fstat(taken.fileno())
    alone = not os.path.samestat(kind, os.fstat(1))
    if not (stat.S_ISFIFO(kind.st_mode) or stat.S_ISSOCK(kind.st_mode)) or not alone:
        return StdinAsyncReader(taken)
    stream = asyncio.StreamReader(_HEADER)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), taken)
    return _MessageReader(stream)


class _MessageReader:
    """Lets what a message has begun start before the next one is read: a request is about the text at its time."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def readline(self) -> bytes:
        await asyncio.sleep(0)
        with suppress(ValueError):  # of a line without an end
            return await self._stream.readline()
        return b"\n"

    async def readexactly(self, n: int) -> bytes:
        try:
            return await self._stream.readexactly(n)
        except asyncio.IncompleteReadError:
            return b""
