"""What the pages show and a run prints: one source for the tests that compare, and for the script that writes.

A block of a page that is the output of a run has a comment before it, ``<!-- output: NAME -->``; the block is what
stands in the fence behind it, or else the lines up to the next empty one. ``PRODUCERS`` has a function for the first
word of each name. ``tests/documents/test_pages.py`` compares, ``scripts/update_docs_figures.py`` writes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

import policylang
from policylang.api.load import load_device
from policylang.api.planned_graphs import on_graph
from policylang.commands.cli import main
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Source, is_error
from policylang.language.files import read_source
from policylang.language.loader import parse_policy
from policylang.language.shown import counted, format_quantity
from policylang.planning.capabilities import capabilities_for
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.worth import worth_of_rules
from policylang.report.diagnostics import render_text
from policylang.report.report_text import bytes_text

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(
    r"^<!-- output: (?P<name>[^\n]+?) -->\n(?:```[^\n]*\n(?P<fenced>.*?)^```$|(?P<plain>(?:[^\n]+\n)+))",
    flags=re.MULTILINE | re.DOTALL,
)
_TIMED = ("demo",)
_TIMES = re.compile(r" *\b\d[\d.,]* (?:ms|s)\b|\b\d+\.\d\d×")


@frozen
class Shown:
    """One block: where it stands, and what it shows now."""

    page: Path
    name: str
    start: int
    end: int
    text: str

    @property
    def words(self) -> list[str]:
        return self.name.split()

    @property
    def above(self) -> str:
        """The page up to the block."""
        return self.page.read_text(encoding="utf-8")[: self.start]

    def __str__(self) -> str:
        return f"{self.page.stem}:{self.name}"


def blocks(page: Path) -> list[Shown]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        which = "fenced" if match["fenced"] is not None else "plain"
        found.append(Shown(page, match["name"], match.start(which), match.end(which), match[which]))
    return found


def masked(shown: Shown, text: str) -> str:
    """Without times and ratios of them where a block shows some: no two runs agree about these."""
    return _TIMES.sub("(time)", text) if shown.words[0] in _TIMED else text


def rewritten(text: str, shown: Shown, by: str) -> str:
    return text[: shown.start] + by + text[shown.end :]


_PYTHON = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^<!-- file: (\S+) -->\n```[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ (?P<words>[^\n]*)$", flags=re.MULTILINE)
_GRAPH = "llama3_8b.graph"
_FIRST, _LAST = 10, 3


# --- programs ---
@cache
def printed(page: str, *blocks: int) -> str:
    """What some blocks of a page, as one program, print in the folder of the examples, where its policy lies."""
    import torch

    torch.compiler.reset()
    programs = _PYTHON.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    out = io.StringIO()
    with contextlib.chdir(ROOT / "examples"), contextlib.redirect_stdout(out):
        exec("".join(programs[at] for at in blocks), {})
    return out.getvalue()


def two_paths(shown: Shown) -> str:
    """The report of the compiled model, and what the report of the flat graph has in place of its lines."""
    compiled, flat = printed("two-paths.md", 0, 1), printed("two-paths.md", 0, 2)
    if shown.words[1] == "compiled":
        return compiled
    return "\n".join(line for line in flat.splitlines() if line not in compiled.splitlines())


def demo(shown: Shown) -> str:
    """What the demo prints behind the report."""
    found = in_process("-m", "policylang", "demo", "--steps", "6")
    return found[found.index("measured on") :]


def in_process(*words: str, cwd: Path = ROOT) -> str:
    """The standard output of Python in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    options = {"cwd": cwd, "env": environment, "capture_output": True, "text": True, "timeout": 580}
    run = subprocess.run([sys.executable, *words], **options)  # type: ignore[call-overload]
    assert run.returncode in (0, 1), run.stderr
    return str(run.stdout)


def tutorial_mistake(shown: Shown) -> str:
    """In a process that has no torch."""
    text = (ROOT / "examples" / "mine.apl").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.apl").write_text(text.replace("save attention", "save attenton"))
        found = in_process("-m", "policylang", "check", "mine.apl", cwd=Path(folder))
    return f"$ policylang check mine.apl\n{found}"


def example() -> str:
    """``examples/train.py`` itself, what it prints behind the losses."""
    found = in_process("examples/train.py")
    return found[found.index("policy ") :]


# --- commands in this process ---
def _command(*words: str) -> tuple[str, str]:
    """Both outputs of ``policylang …``."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        main(list(words))
    return out.getvalue(), told.getvalue()


def policy_tests(shown: Shown) -> str:
    with contextlib.chdir(ROOT):
        return f"$ policylang test docs/policy-tests.md\n{_command('test', 'docs/policy-tests.md')[0]}"


def console(shown: Shown) -> str:
    """Each command of the block with what it prints; ``console 12`` shows the first 12 lines of each.

    The folder has the files of the page's ``<!-- file: NAME -->`` blocks above, and the snapshots, in ``docs/graphs``.
    """
    most = int(shown.words[1]) if len(shown.words) > 1 else None
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "docs").mkdir()
        (folder / "docs" / "graphs").symlink_to(ROOT / "docs" / "graphs")
        for file, text in _FILE.findall(shown.above):
            (folder / file).write_text(text, encoding="utf-8")
        with contextlib.chdir(folder):
            for match in _COMMAND.finditer(shown.text):
                words = shlex.split(match["words"], comments=True)
                assert words[0] == "policylang"
                lines = _command(*words[1:])[0].rstrip("\n").split("\n")
                kept = lines if most is None or len(lines) <= most else [*lines[:most], "…"]
                found += [f"$ {match['words']}", *kept]
    return "\n".join(found)


@cache
def _tuned(words: tuple[str, ...]) -> str:
    """``policylang tune`` in a folder that has the graph, with both of its outputs; of a policy the text alone."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.symlink(ROOT / "docs" / "graphs" / _GRAPH, _GRAPH)
        out, told = _command("tune", "--graph", _GRAPH, *words)
    return out if out.startswith("#") else "\n".join(filter(None, (out.rstrip(), told.rstrip())))


def tune(shown: Shown) -> str:
    _, given = shown.name.split(maxsplit=1)
    return f"$ policylang tune --graph {_GRAPH} {given}\n{_tuned(tuple(shlex.split(given)))}"


def tune_rows(shown: Shown) -> str:
    """The same with the middle of a long table left out."""
    lines = tune(shown).splitlines()
    left = lines[_FIRST:-_LAST]
    return "\n".join([*lines[:_FIRST], f"… {len(left)} more …", *lines[-_LAST:]])


SLOW, LONG = (
    {"agree", "architectures", "demo", "tutorial-report", "two-paths"},
    ("$ policylang tune ", "$ policylang plan order.apl"),
)
"""First words of outputs that take more than a second or two, and what stands in others."""


if TYPE_CHECKING:
    from policylang.editor.state import State


GRAPHS = ROOT / "docs" / "graphs"
PICTURE = ROOT / "docs" / "first_policy.svg"
_POLICY = re.compile(r"^```apl graph=(?P<graph>\S+)[^\n]*\n(?P<text>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@cache
def facts_of(graph: Path) -> Facts:
    return policylang.load_snapshot(graph)


def sentence(shown: Shown) -> str:
    """One line on the policy above: what is kept, what runs again, the peak; each beside nothing recomputed. It is read
    by the operators that come with the package and not torch's registry, as on a machine without the model."""
    policy = list(_POLICY.finditer(shown.above))[-1]
    loaded = parse_policy(policy["text"])
    assert loaded.policy is not None, render_text(loaded.diagnostics)
    (plan,), told = on_graph(loaded.policy, {"": facts_of(shown.page.parent / policy["graph"])}, None, one_model=False)
    assert not any(map(is_error, told)), render_text(told)
    found = breakdown(plan)
    under, without = found.under, found.without
    saved = f"{bytes_text(under.amounts.saved_bytes)} saved, of {bytes_text(without.amounts.saved_bytes)}"
    moved = f"; {bytes_text(under.amounts.offloaded_bytes)} on the host" if under.amounts.offloaded else ""
    flops = under.amounts.recomputed_flops
    share = f", {format_quantity(flops / found.forward_flops, 'fraction')} of the forward" if flops else ""
    names = ", ".join(f"`{operator}`" for operator in found.uncounted_again or ())
    share += f" (not counting {names}, which has no formula)" if names else ""
    again = f"{format_quantity(flops, 'flops')} recomputed{share}" if flops else f"no FLOPs recomputed{share}"
    peak = f"estimated peak {bytes_text(under.peak.bytes)}, of {bytes_text(without.peak.bytes)}"
    fused = f"{counted(len(found.plan.edits.done), 'pair')} of collectives fused; " if found.plan.edits.done else ""
    return f"On `{Path(policy['graph']).stem}`: {fused}{saved}{moved}; {again}; {peak}."


def margins(shown: Shown) -> str:
    """What each rule of a bundled policy is worth on a graph: the table of the page about plans."""
    policy, graph = shown.words[1:]
    facts = facts_of(GRAPHS / f"{graph}.graph")
    (plan,), _ = on_graph(policylang.load(policy), {graph: facts}, None, one_model=False)
    rows = ["| rule | saved | recomputed | a GiB |", "|---|---|---|---|"]
    for worth in worth_of_rules(breakdown(plan).plan, capabilities_for(facts.kind, None)):
        price = "" if worth.flops_per_gib is None else format_quantity(worth.flops_per_gib, "flops")
        saved, again = signed(worth.saved_bytes, "bytes"), signed(worth.recomputed_flops, "flops")
        rows.append(f"| `{plan.policy.rules[worth.rule].text}` | {saved} | {again} | {price} |")
    return "\n".join(rows)


def signed(amount: float, dimension: str) -> str:
    return f"{'+' if amount > 0 else '−'}{format_quantity(abs(amount), dimension)}" if amount else "0"  # type: ignore[arg-type]


def nothing_matched(shown: Shown) -> str:
    """The tutorial's rule that matches nothing, on the tutorial's model."""
    text = "\n\n\n\nsave attention in decoder.*\n"
    facts = facts_of(GRAPHS / "tutorial.graph")
    _, found = on_graph(policylang.parse(text, name="typo.apl"), {"tutorial": facts}, None, one_model=False)
    return render_text(found)


def totals(shown: Shown) -> tuple[list[tuple[str, int, int]], float]:
    """Of the page's first policy on a graph: bytes kept and peak, with the policy and without; recomputed share."""
    text = re.findall(r"^```apl\n(.*?)^```$", shown.page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)[0]
    facts = facts_of(GRAPHS / f"{shown.words[1]}.graph")
    (plan,), _ = on_graph(policylang.parse(text), {"": facts}, None, one_model=False)
    found = breakdown(plan)
    under, without = found.under, found.without
    rows = [
        ("kept for the backward", under.amounts.saved_bytes, without.amounts.saved_bytes),
        ("peak of the step, weights and gradients included", under.peak.bytes, without.peak.bytes),
    ]
    return rows, under.amounts.recomputed_flops / found.forward_flops


def front_page(shown: Shown) -> str:
    rows, share = totals(shown)
    lines = [
        f"| {what} | {format_quantity(one, 'bytes')} | {format_quantity(other, 'bytes')} |" for what, one, other in rows
    ]
    head = ["| | with the policy | nothing recomputed |", "|---|---|---|"]
    return "\n".join(
        [*head, *lines, f"| FLOPs of the forward recomputed | {format_quantity(share, 'fraction')} | 0% |"]
    )


def picture_line(shown: Shown) -> str:
    """The line of the README that shows ``picture``, for readers who see no pictures too."""
    (kept, peak), share = totals(shown)
    kept_under, kept_without, peak_under, peak_without = (
        format_quantity(each, "bytes") for each in (*kept[1:], *peak[1:])
    )
    return (
        f"![Llama-3 8B on 8,192 tokens: {kept_under} of {kept_without} kept for the backward, peak {peak_under} of "
        f"{peak_without}, {format_quantity(share, 'fraction')} of the forward's FLOPs recomputed]"
        f"({PICTURE.relative_to(ROOT)})"
    )


def picture(shown: Shown) -> str:
    """``totals`` as bars, readable on a light and on a dark page."""
    rows, share = totals(shown)
    scale = 430 / max(other for _, _, other in rows)
    drawn = []
    for at, (what, one, other) in enumerate(rows):
        top = 44 + 92 * at
        drawn.append(f'<text x="10" y="{top}" class="what">{what}</text>')
        for line, (name, size) in enumerate((("with the policy", one), ("nothing recomputed", other))):
            y = top + 10 + 28 * line
            drawn.append(
                f'<text x="150" y="{y + 15}" class="name">{name}</text>'
                f'<rect x="160" y="{y}" width="{size * scale:.0f}" height="20" rx="3" class="bar{line}"/>'
                f'<text x="{170 + size * scale:.0f}" y="{y + 15}">{format_quantity(size, "bytes")}</text>'
            )
    style = (
        "text{font:13px sans-serif;fill:#57606a}.what{font-weight:600}.name{text-anchor:end}"
        ".bar0{fill:#0b7a5e}.bar1{fill:#9aa4ae}@media(prefers-color-scheme:dark){text{fill:#c9d1d9}.bar0{fill:#2fbf94}}"
    )
    again = format_quantity(share, "fraction")
    head = f'<text x="10" y="18">Llama-3 8B, 8,192 tokens; {again} of the forward recomputed</text>'
    size = 'width="700" height="214" viewBox="0 0 700 214" role="img"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style>", head, *drawn, "</svg>", ""]
    )


def architectures(shown: Shown) -> str:
    """The bundled policies on every architecture, by planning each on a traced step."""
    from tests.support.architectures import table

    return table()


# --- the editor: hints at the ends of lines, and what is under the pointer ---
_WIDEST = 64
"""Of the statements beside which hints stand in one column."""


@cache
def _state(policy: str, graph: str, device: str) -> State:
    from policylang.editor.state import Document, State, read_graph, read_text

    path = ROOT / "policies" / f"{policy}.apl"
    document = Document(path.as_uri(), 1, Source(path.name, path.read_text(encoding="utf-8")), path)
    facts = facts_of(GRAPHS / graph)
    text = read_text(document, facts, read_source)
    planned = read_graph(text, facts, graph, None, load_device(device))
    planned.look()
    planned.weigh()
    return State(document, text, planned, facts)


def hints(shown: Shown) -> str:
    """``hints POLICY GRAPH DEVICE``: the statements of a bundled policy with the figures at their ends."""
    from policylang.editor.hover import hints as made

    state = _state(*shown.words[1:])
    text = state.document.source.text
    lines = text.split("\n")
    found = [(each.position, each.label) for each in made(state, 0, len(text))]
    width = max(place.character for place, _ in found if place.character <= _WIDEST)
    return "\n".join(f"{lines[place.line][: place.character]:{width}}  {label}" for place, label in found)


RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]

LABELS = {
    "no checkpoint": "none",
    "recompute all": "PyTorch's, recompute all",
    "policylang": "policylang, the decisions above",
    "reshard": "`include <fsdp_reshard_always>`",
    "reshard, gathers fused": "and `fuse all_gather chains`",
    "reshard, gathers and scatters fused": "and `fuse reduce_scatter chains`",
    "examples/fsdp_tp.apl": "[`examples/fsdp_tp.apl`](../examples/fsdp_tp.apl)",
}
"""What a results file calls short."""


@cache
def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    cells = [[title for title, _ in columns], *([cell(row) for _, cell in columns] for row in rows)]
    head, *rest = (f"| {' | '.join(row)} |" for row in cells)
    return "\n".join([head, "|" + "---|" * len(columns), *rest])


def text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def label(key: str) -> Callable[[Row], str]:
    return lambda row: LABELS.get(row[key], str(row[key]))


def number(key: str, digits: int = 2, unit: str = "") -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:,.{digits}f}{unit}"


def plan_cost(which: str) -> str:
    columns = [("layers", number("layers", 0)), ("nodes", number("nodes", 0))]
    timed = ("plan + tag", "plan + partition", "default", "min-cut")
    columns += [(name, number(f"{name} s", 3, " s")) for name in timed]
    columns += [("plan + tag / min-cut", number("plan + tag / min-cut", 3))]
    columns += [("plan + partition / min-cut", number("plan + partition / min-cut", 2))]
    return markdown(columns, results("plan_cost")["rows"])


def training_step(which: str) -> str:
    columns: list[Column] = [("contender", text("contender"))]
    columns += [(name, number(f"{name} MiB", 2, " MiB")) for name in ("saved", "planned", "peak")]
    columns += [("step", number("step s", 3, " s")), ("peak / eager SAC", number("peak / eager SAC", 3))]
    columns += [
        ("step / SAC, same inner", lambda r: number("step / SAC, same inner", 3)(r) if "," in r["contender"] else "")
    ]
    rows = results("training_step_aot_eager")["rows"] + results("training_step_inductor")["rows"][2:]
    rows[0] = {**rows[0], "step / SAC, same inner": None}
    return markdown(columns, rows)


def eager(which: str) -> str:
    columns: list[Column] = [
        ("checkpoint", label("checkpoint")),
        ("peak of the first step", number("peak of the first step MiB", 2, " MiB")),
        ("peak of a later one", number("peak of a later one MiB", 2, " MiB")),
        ("first / later", number("first / later peak")),
        ("time, first / later", number("first / later time")),
    ]
    return markdown(columns, results("eager")["first steps"])


def many_ranks(which: str) -> str:
    rows = []
    for layout, found in zip(("tp", "fsdp"), results("llama3_8b_128_ranks")["layouts"], strict=True):
        for graph in found["graphs"]:
            peak = max(graph["peak GiB, forward"], graph["backward"])
            fused = (
                f"{graph['fused']} of {graph['fused'] + sum(graph.get('refused', {}).values())}"
                if graph.get("fused")
                else ""
            )
            rows.append({**graph, "layout": layout, "chains": fused, "peak": peak})
    columns = [("layout", text("layout")), ("policy", label("policy"))]
    columns += [(n, number(n, 0)) for n in ("forward gathers", "backward gathers", "reduce-scatters")]
    return markdown([*columns, ("chains fused", text("chains")), ("peak", number("peak", 2, " GiB"))], rows)


def compared(which: str) -> str:
    if which == "dropout":
        columns: list[Column] = [
            ("contender", text("contender")),
            ("largest difference of a gradient, of the largest gradient", _difference),
        ]
        return markdown(columns, results("compared")["dropout"])
    columns = [
        ("contender", text("contender")),
        ("keeps", text("keeps")),
        ("saved", number("saved MiB", 1, " MiB")),
        ("peak", number("peak MiB", 1, " MiB")),
        ("peak / contexts in eager", number("peak / contexts")),
        ("FLOPs / no checkpoint", number("FLOPs / no checkpoint")),
    ]
    return markdown(columns, [row for row in results("compared")["rows"] if row["how"] == which])


def budgets(which: str) -> str:
    def asked(row: Row) -> str:
        amount = number("asked", 1, " MiB")(row) if row["contender"] == "sac_milp" else f"{row['asked']:g}"
        return f"`{row['contender']}` {amount}"

    def simulated(row: Row) -> str:
        at_least = f"none fits; the least is {number(f'{ours} least MiB', 1, ' MiB')(row)}"
        return number(f"{ours} simulated MiB", 1, " MiB")(row) or at_least

    ours, taken = "policylang's", ("peak MiB", "FLOPs / plain", "simulated MiB")
    empty = dict.fromkeys([*taken, *(f"{ours} {key}" for key in taken)])
    columns: list[Column] = [("model", text("model")), ("PyTorch is asked for", asked)]
    columns += [
        ("it predicts", number("predicted MiB", 1, " MiB")),
        ("it takes", lambda row: number("peak MiB", 1, " MiB")(row) or "none fits"),
        ("FLOPs", number("FLOPs / plain", 3)),
        ("a policy is tuned", text(f"{ours} path")),
        ("for", number(f"{ours} asked MiB", 1, " MiB")),
        ("simulated", simulated),
        ("takes", lambda row: number(f"{ours} peak MiB", 1, " MiB")(row) or row.get(f"{ours} error", "")[6:12]),
        ("FLOPs", number(f"{ours} FLOPs / plain", 3)),
    ]
    rows = [row for row in results("budgets")["rows"] if row["asked"] != 1]  # the reference of the others
    return markdown(columns, [{**empty, **row} for row in rows])


def predicted_times(which: str) -> str:
    columns: list[Column] = [("model", text("model")), ("path", text("path")), ("policy", text("policy"))]
    columns += [("step, of one without", number("ratio", 3, "×")), ("predicted", number("predicted ratio", 3, "×"))]
    columns += [("extra time", number("extra s", 3, " s")), ("predicted extra", number("predicted extra s", 3, " s"))]
    rows = [row for row in results("predicted_time")["rows"] if row["policy"] != "nothing recomputed"]
    rows = [row for row in rows if row["path"] != "traced step"]
    return markdown(columns, rows)


def _difference(row: Row) -> str:
    return "none" if row["gradients differ by"] == 0 else f"{row['gradients differ by'] * 100:.0f}%"


def tuning(which: str) -> str:
    found = results("tune")
    columns: list[Column] = [
        ("graph", text("graph")),
        ("nodes", number("nodes", 0)),
        ("seconds to tune", number("seconds to tune", 1)),
        ("furthest above the optimum, of the forward", _share("worst excess over the bound, of the forward", 100)),
        ("times the optimum, at most", number("worst ratio to the bound above 1%", 3)),
        ("others that are faster at their peak", lambda row: f"{len(row['beaten'])} of {len(row['others'])}"),
        ("more memory never costs time", lambda row: "yes" if row["monotone"] and row["fits"] else "no"),
    ]
    return markdown(columns, found["graphs"])


def _share(key: str, times: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key] * times:.2f}%"


def schedule(which: str) -> str:
    """A row for each graph and a column for each contender. ``which``: ``exposed-h100-sxm``."""
    device = which.removeprefix("exposed-")
    rows: dict[str, Row] = {}
    for each in results("schedule")["rows"]:
        if each["device"] == device:
            row = rows.setdefault(each["graph"], {"graph": each["graph"], "nodes": each["nodes"]})
            row[each["contender"]] = each.get("exposed ms")
            if "bound ms" in each:
                row["bound"] = each["bound ms"]
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    names = [name for name in columns if name not in ("graph", "nodes", "bound")]
    columns: list[Column] = [
        ("graph", text("graph")),
        ("nodes", number("nodes", 0)),
        ("bound", number("bound", 1, " ms")),
    ]
    columns += [
        (name, lambda row, name=name: number(name, 1, " ms")({name: None, **row}))  # type: ignore[misc]
        for name in names
    ]
    return markdown(columns, list(rows.values()))


def schedule_on_ranks(which: str) -> str:
    columns: list[Column] = [("order", text("policy")), ("collectives", number("collectives", 0))]
    columns += [("simulated", number("simulated ms", 0, " ms")), ("measured", number("measured ms", 0, " ms"))]
    columns += [("measured / simulated", number("measured / simulated", 3)), ("loss and gradients", text("bits"))]
    return markdown(columns, results("schedule_on_ranks")["rows"])


def stages(which: str) -> str:
    """The simulated pipelines, or with ``slept`` the one that ran."""
    columns: list[Column] = [("same rules in all stages", number("same rules s", 2, " s"))]
    columns += [("tuned stages", number("step s", 2, " s")), ("falls by", number("falls by %", 1, " %"))]
    if which == "slept":
        columns += [
            ("measured", number("same rules measured s", 2, " s")),
            ("tuned, measured", number("measured s", 2, " s")),
        ]
        columns += [("falls by", number("measured falls by %", 1, " %")), ("gradients", text("gradients"))]
        return markdown(columns, [results("stages")["slept"]])
    counts: list[Column] = [("stages", number("stages", 0)), ("microbatches", number("microbatches", 0))]
    columns = [("model", text("model")), *counts, ("a rank may take", text("peak")), *columns]
    return markdown([*columns, ("tuned in", number("tuning s", 0, " s"))], results("stages")["simulated"])


def scale(which: str) -> str:
    columns: list[Column] = [("model", label("model")), ("layers", number("layers", 0)), ("nodes", number("nodes", 0))]
    times = {"whole trace": "traced whole", "trace": "traced from few", "plan": "plan", "stages": "plan, 8 stages"}
    times |= {"order": "plan and order", "tune": "tune"}
    keys = {f"{step} {unit}" for step in times for unit in ("s", "MiB")}
    rows = [{**dict.fromkeys(keys), **row} for row in results("scale")["rows"]]
    columns += [(title, number(f"{step} s", 1, " s")) for step, title in times.items()]
    columns += [
        ("most memory", number("order MiB", 0, " MiB")),
        ("tuned, most", number("tune MiB", 0, " MiB")),
        ("traced whole, most", number("whole trace MiB", 0, " MiB")),
    ]
    return markdown(columns, rows)


_TABLES: dict[str, Callable[[str], str]] = {
    "plan-cost": plan_cost, "training-step": training_step, "eager": eager, "many-ranks": many_ranks,
    "compared": compared, "predicted-times": predicted_times, "tuning": tuning, "schedule": schedule,
    "schedule-on-ranks": schedule_on_ranks, "stages": stages, "scale": scale, "budgets": budgets,
}  # fmt: skip


def benchmark(shown: Shown) -> str:
    _, name, *rest = shown.words
    return _TABLES[name](rest[0] if rest else "")


PRODUCERS: dict[str, Callable[[Shown], str]] = {
    "two-paths": two_paths,
    "eager": lambda shown: printed("eager.md", 0),
    # The tutorial's example is the model of the page about the two paths: one run serves both pages.
    "tutorial-report": lambda shown: printed("two-paths.md", 0, 1),
    "tutorial-mistake": tutorial_mistake,
    "agree": lambda shown: in_process("-m", "policylang", "agree", "llama3_sac"),
    "demo": demo,
    "policy-tests": policy_tests,
    "console": console,
    "tune": tune,
    "tune-rows": tune_rows,
    "cookbook": sentence,
    "margins": margins,
    "nothing-matched": nothing_matched,
    "front-page": front_page,
    "hints": hints,
    "picture": picture_line,
    "architectures": architectures,
    "benchmark": benchmark,
}


def produce(shown: Shown) -> str:
    """What stands in the block, if the page is right: text with a line end."""
    return PRODUCERS[shown.words[0]](shown).rstrip("\n") + "\n"
