"""What the language server costs: from an edit to its diagnostics, to a hover, to completion; and its memory.

    python -m benchmarks.lsp --json benchmarks/results/lsp.json

A real `policylang lsp` over its standard input and output, driven by a client as an editor drives it: a policy of a
hundred lines, an edit every time the one before is answered, on a snapshot of Llama-3 8B and on a recorded joint graph
of 19,655 nodes. The pause after which the server plans is its default, and is taken off where the table says so. The
peers are `ruff server`, where it is installed, on a Python file of as many lines, and `policylang check` as a process
for each edit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.cli import COMMAND, RECORDED
from benchmarks.common import seconds, table, write_results
from policylang.editor.workspace import PAUSE

ROOT = Path(__file__).resolve().parents[1]
SMALL = ROOT / "docs" / "graphs" / "llama3_8b.graph"
LINES = 100
_LONGEST = 60.0
_FORMS = (
    "optional save attention in first {n} blocks",
    "optional recompute every 2nd mm in block {n}",
    "optional save matmul in block {n} where bytes > {n} MiB",
    "optional recompute pointwise in block {n} where not is random",
    "optional save first add per block where bytes > {n} KiB",
    "optional recompute users of all_gather in block {n}",
    "optional save (cast or view) feeding mm in block {n}",
)


def policy_text() -> str:
    """A hundred lines of many forms of rules, each of which may match nothing."""
    lines = ["policy hundred_lines", "", "blocks {layers,layer,h,block,blocks}.*", "", "recompute everything in block"]
    lines += [_FORMS[at % len(_FORMS)].format(n=at % 30 + 1) for at in range(LINES - len(lines))]
    return "\n".join(lines) + "\n"


def policy_edits(text: str) -> Iterator[str]:
    """Without end: a number changed, a comment typed, a word misspelt and mended. All but that one can be planned."""
    lines = text.split("\n")
    for at in range(10**9):
        line = 5 + at * 7 % (LINES - 5)
        changed = list(lines)
        kind = at % 5
        if kind == 3:
            changed[line] = changed[line].replace("optional", "optinal")
        elif kind == 4:
            changed[line] += f"  # {at}"
        else:
            changed[line] = f"optional save mm in first {at % 31 + 1} blocks"
        yield "\n".join(changed)


def python_text() -> str:
    """As many lines of Python, with something for a linter to say."""
    body = [f"def step_{at}(x: int) -> int:\n    y = x * {at}\n    unused = {at}\n    return x + y" for at in range(19)]
    return "import os\nimport sys\n\n" + "\n\n".join(body) + "\n"


def python_edits(text: str) -> Iterator[str]:
    lines = text.split("\n")
    for at in range(10**9):
        changed = list(lines)
        line = 4 + at * 5 % 90
        changed[line] += "  # typed" if at % 5 else " ="
        yield "\n".join(changed)


class Session:
    """One server, one open document, in the protocol's own JSON: what a client makes of it is not measured."""

    def __init__(self) -> None:
        self.published: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()
        self.version = 0
        self.uri = ""
        self._answers: dict[int, asyncio.Future[Any]] = {}

    async def start(self, command: Sequence[str], folder: Path, options: dict[str, Any]) -> None:
        piped = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=piped, stdout=piped, stderr=subprocess.DEVNULL
        )
        self._reading = asyncio.create_task(self._read())
        begin = {
            "processId": os.getpid(),
            "rootUri": folder.as_uri(),
            "workspaceFolders": [{"uri": folder.as_uri(), "name": folder.name}],
            "capabilities": {"textDocument": {"publishDiagnostics": {"versionSupport": True}}},
            "initializationOptions": options,
        }
        await self.request("initialize", begin)
        self._send("initialized", {})

    def open(self, file: Path, language: str, text: str) -> None:
        self.uri, self.version = file.as_uri(), 1
        document = {"uri": self.uri, "languageId": language, "version": 1, "text": text}
        self._send("textDocument/didOpen", {"textDocument": document})

    def edit(self, text: str) -> float:
        """When it was sent."""
        self.version += 1
        sent = time.perf_counter()
        document = {"uri": self.uri, "version": self.version}
        self._send("textDocument/didChange", {"textDocument": document, "contentChanges": [{"text": text}]})
        return sent

    async def next_diagnostics(self) -> float:
        """When those of the text as it is now came; those of earlier texts are passed over."""
        while True:
            at, params = await asyncio.wait_for(self.published.get(), _LONGEST)
            if params["uri"] == self.uri and params.get("version") in (self.version, None):
                return at

    async def request(self, method: str, params: Any) -> Any:
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(method, params, id=number)
        return await asyncio.wait_for(self._answers[number], _LONGEST)

    async def asked(self, method: str, **where: Any) -> float:
        """Milliseconds that an answer about the document takes."""
        start = time.perf_counter()
        await self.request(f"textDocument/{method}", {"textDocument": {"uri": self.uri}, **where})
        return 1e3 * (time.perf_counter() - start)

    async def hints(self) -> float:
        whole = {"start": {"line": 0, "character": 0}, "end": {"line": LINES + 1, "character": 0}}
        return await self.asked("inlayHint", range=whole)

    def memory(self) -> dict[str, float]:
        """MiB that the server's process has, and had at most."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "VmHWM"))}
        return {"now MiB": kib["VmRSS"] / 1024, "most MiB": kib["VmHWM"] / 1024}

    async def end(self) -> None:
        await self.request("shutdown", None)
        self._send("exit", None)
        await self.process.wait()
        self._reading.cancel()

    def _send(self, method: str, params: Any, **more: Any) -> None:
        self._write({"method": method, "params": params, **more})

    def _write(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    async def _read(self) -> None:
        stream = self.process.stdout
        assert stream is not None
        while header := await stream.readline():
            length = int(header.split(b":")[1]) if header.lower().startswith(b"content-length") else 0
            while (await stream.readline()).strip():
                pass
            message = json.loads(await stream.readexactly(length))
            if message.get("method") == "textDocument/publishDiagnostics":
                self.published.put_nowait((time.perf_counter(), message["params"]))
            elif "method" in message and "id" in message:  # asked of an editor: it has nothing to say
                items = (message.get("params") or {}).get("items", ())
                self._write({"id": message["id"], "result": [None] * len(items) or None})
            elif message.get("id") in self._answers:
                self._answers[message["id"]].set_result(message.get("result"))


def row(what: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
    """Of milliseconds."""
    ordered = sorted(values)
    return {
        **more,
        "what": what,
        "times": len(ordered),
        "p50 ms": statistics.median(ordered),
        "p95 ms": ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
        "max ms": ordered[-1],
    }


async def on_graph(name: str, graph: Path, nodes: int, edits: int, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """The rows of one snapshot, and the memory of the server."""
    session = Session()
    await session.start((*COMMAND, "lsp"), folder, {"graph": str(graph)})
    text = policy_text()
    session.open(folder / "hundred.apl", "policylang", text)
    await session.hints()
    of_text, of_graph, hover, completion, hints = [], [], [], [], []
    for at, changed in enumerate(islice(policy_edits(text), edits)):
        _forget(session.published)
        sent = session.edit(changed)
        of_text.append(1e3 * (await session.next_diagnostics() - sent))
        if at % 5 == 3:  # it cannot be planned
            continue
        of_graph.append(1e3 * (await session.next_diagnostics() - sent))
        hints.append(await session.hints())
        hover.append(await session.asked("hover", position={"line": 5 + at % 90, "character": 10}))
        completion.append(await session.asked("completion", position={"line": 5 + at % 90, "character": 9}))
    under_way = await _while_planning(session, edits // 4)
    memory = {"graph": name, "nodes": nodes, **session.memory()}
    await session.end()
    rows = [
        row("diagnostics of the text", of_text),
        row("diagnostics of the text, while a plan is under way", under_way),
        row("diagnostics on the snapshot", of_graph),
        row("diagnostics on the snapshot, less the pause", [each - 1e3 * PAUSE for each in of_graph]),
        row("hints, once there is a plan", hints),
        row("hover", hover),
        row("completion", completion),
    ]
    return [{"graph": name, "nodes": nodes, **each} for each in rows], memory


async def _while_planning(session: Session, count: int) -> list[float]:
    """From an edit to the diagnostics of its text, where the plan of the edit before has just begun."""
    text = policy_text()
    found = []
    for at in range(count):
        session.edit(f"{text}# {at}\n")
        await asyncio.sleep(PAUSE + 0.02)
        _forget(session.published)
        sent = session.edit(f"{text}# {at} again\n")
        found.append(1e3 * (await session.next_diagnostics() - sent))
        await session.hints()
    return found


def _forget(queue: asyncio.Queue[Any]) -> None:
    while not queue.empty():
        queue.get_nowait()


async def of_peer(command: Sequence[str], edits: int, folder: Path) -> list[float]:
    """Milliseconds from an edit of a Python file to the diagnostics of another server."""
    session = Session()
    await session.start(command, folder, {})
    text = python_text()
    file = folder / "hundred.py"
    file.write_text(text)
    session.open(file, "python", text)
    await session.next_diagnostics()
    found = []
    for changed in islice(python_edits(text), edits):
        _forget(session.published)
        sent = session.edit(changed)
        found.append(1e3 * (await session.next_diagnostics() - sent))
    await session.end()
    return found


def of_process(arguments: Sequence[str], repeats: int) -> list[float]:
    """Milliseconds of a process that checks the same text."""
    command = (*COMMAND, "check", "-", *arguments)
    text = policy_text().encode()
    return [1e3 * seconds(lambda: subprocess.run(command, input=text, capture_output=True)) for _ in range(repeats)]


def peers() -> dict[str, tuple[str, ...]]:
    """The servers that are installed here, with their versions."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    ruff = shutil.which("ruff", path=beside)
    if ruff is None:
        return {}
    said = subprocess.run((ruff, "--version"), capture_output=True, text=True).stdout.split()
    return {f"ruff server {said[-1]}": (ruff, "server")}


def measure(graphs: dict[str, tuple[Path, int]], edits: int, folder: Path) -> dict[str, Any]:
    rows, memory = [], []
    for name, (graph, nodes) in graphs.items():
        found, taken = asyncio.run(on_graph(name, graph, nodes, edits, folder))
        rows += found
        memory.append(taken)
    largest, (graph, _) = list(graphs.items())[-1]
    ours = {each["what"]: each["p50 ms"] for each in rows if each["graph"] == largest}
    text, planned = ours["diagnostics of the text"], ours["diagnostics on the snapshot"]
    compared = [
        {**row(name, asyncio.run(of_peer(command, edits, folder))), "ours": "the text"}
        for name, command in peers().items()
    ]
    compared.append({**row("policylang check, a process", of_process((), 10)), "ours": "the text"})
    of_graph = of_process(("--graph", str(graph)), 10)
    compared.append({**row("policylang check --graph, a process", of_graph), "ours": "on the snapshot"})
    for each in compared:
        each["ours / peer"] = (text if each["ours"] == "the text" else planned) / each["p50 ms"]
    return {"pause ms": 1e3 * PAUSE, "lines": LINES, "rows": rows, "peers": compared, "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", type=Path, action="append", default=[], help="another snapshot, measured as well")
    parser.add_argument("--edits", type=int, default=120)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recorded = Path(folder) / "recorded.graph"
        subprocess.run((*COMMAND, "import", str(RECORDED), "-o", str(recorded)), check=True, capture_output=True)
        files = {"llama3_8b": SMALL, **{each.stem: each for each in options.graph}, "recorded": recorded}
        graphs = {name: (file, _nodes(file)) for name, file in files.items()}
        found = measure(graphs, options.edits, Path(folder))
    for part in ("rows", "peers", "memory"):
        print(table(found[part]))
    write_results(options.json, {"benchmark": "lsp", **found})


def _nodes(graph: Path) -> int:
    from policylang.api.planned_graphs import read_any

    return len(read_any(graph))


if __name__ == "__main__":
    main()
