"""The tables of the pages about benchmarks, made of the results files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tests.documents.outputs.pages import ROOT, Shown

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
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [[cell(row) for _, cell in columns] for row in rows]
    head, rule, *rest = lines
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "|".join(rule) + "|", *(_line(row) for row in rest)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row[key])


def label(key: str) -> Callable[[Row], str]:
    return lambda row: LABELS.get(row[key], str(row[key]))


def number(key: str, digits: int = 2, unit: str = "") -> Callable[[Row], str]:
    return lambda row: "" if row[key] is None else f"{row[key]:,.{digits}f}{unit}"


def plan_cost(which: str) -> str:
    columns = [("layers", number("layers", 0)), ("nodes", number("nodes", 0))]
    columns += [
        (name, number(f"{name} s", 3, " s")) for name in ("plan + tag", "plan + partition", "default", "min-cut")
    ]
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
        ("furthest above the bound, of the forward", _share("worst excess over the bound, of the forward", 100)),
        ("times the bound at the budget, at most", number("worst ratio to the bound above 5%", 3)),
        ("and at what is used of it", number("worst ratio to the bound of the bytes used", 3)),
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
    names = list(
        dict.fromkeys(name for row in rows.values() for name in row if name not in ("graph", "nodes", "bound"))
    )
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


_TABLES: dict[str, Callable[[str], str]] = {
    "plan-cost": plan_cost,
    "training-step": training_step,
    "eager": eager,
    "many-ranks": many_ranks,
    "compared": compared,
    "predicted-times": predicted_times,
    "tuning": tuning,
    "schedule": schedule,
    "schedule-on-ranks": schedule_on_ranks,
}


def benchmark(shown: Shown) -> str:
    _, name, *rest = shown.words
    return _TABLES[name](rest[0] if rest else "")


PRODUCERS = {"benchmark": benchmark}
