"""A server ends with its client, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from policylang.editor import lifeline
from tests.editor.conftest import GRAPHS, SERVER

posix = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it looks into /proc, and signals processes")

CLIENT = """
import json, os, subprocess, sys, time
graph, command = sys.argv[1], sys.argv[2:]
server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
held = (server.stdin.fileno(), server.stdout.fileno())
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], pass_fds=held)
def send(method, params, **more):
    body = json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **more}).encode()
    server.stdin.write(b"Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body))
    server.stdin.flush()
send("initialize", {"processId": os.getpid(), "capabilities": {}, "initializationOptions": {"graph": graph}}, id=1)
send("initialized", {})
text = "recompute everything\\n" + "".join(f"optional save mm where bytes > {each} KiB\\n" for each in range(100))
opened = {"uri": "file:///nowhere/mine.apl", "languageId": "policylang", "version": 1, "text": text}
send("textDocument/didOpen", {"textDocument": opened})
server.stdout.readline()
print(server.pid, other.pid, flush=True)
time.sleep(100)
"""


@posix
@pytest.mark.slow
def test_a_server_ends_when_its_client_is_killed_though_another_process_holds_its_pipes() -> None:
    command = [sys.executable, "-c", CLIENT, str(GRAPHS / "llama3_8b.graph"), *SERVER]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    server, other = map(int, client.stdout.readline().split())
    try:
        assert _runs(server)
        client.kill()
        client.wait()
        for _ in range(200):
            if not _runs(server):
                break
            time.sleep(0.05)
        assert not _runs(server)
    finally:
        for each in (server, other):
            if _runs(each):
                os.kill(each, signal.SIGKILL)
        client.stdout.close()


@posix
@pytest.mark.parametrize("looks", [False, True], ids=["told", "looking"])
def test_the_end_of_a_process_is_noticed(monkeypatch, looks: bool) -> None:
    ended, forced = Event(), Event()
    monkeypatch.setattr(lifeline, "_LOOK", 0.01)
    monkeypatch.setattr(lifeline, "_GRACE", 0.0)
    monkeypatch.setattr(lifeline.os, "_exit", lambda code: forced.set())
    if looks:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    process = subprocess.Popen(["sleep", "100"])
    lifeline.end_with(process.pid, ended.set)
    assert not ended.wait(0.1)
    process.kill()
    process.wait()
    assert ended.wait(5)
    assert forced.wait(5), "what does not end by itself is ended"


@posix
def test_a_process_that_is_of_another_machine_says_nothing(monkeypatch) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    ended = Event()
    for number in (None, 0, -1, process.pid):
        lifeline.end_with(number, ended.set)
    assert not ended.wait(0.1)


def _runs(process: int) -> bool:
    """A zombie does not: whoever inherited it may never ask for it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
