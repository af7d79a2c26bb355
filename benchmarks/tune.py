"""How near is a tuned policy to the least that can be had, and does anything that people use beat it?

On recorded joint graphs of Llama-3 8B, on snapshots of whole steps and on joint graphs of Hugging Face models at full
size (without weights), on one device profile: the integer program's bound, tuned policies at many budgets, the policies
that come along, policies as people write them, and PyTorch's ``activation_memory_budget``. All are points of simulated
peak and seconds of second runs, by the same simulator and the same times of nodes (``benchmarks/tuning_peers.py`` says
how). Then the seconds that tuning takes, and how they grow with the nodes.

    python -m benchmarks.tune --recorded tests/data/llama3_8b_one_device_joint.json.gz \\
        --json benchmarks/results/tune.json --picture docs/tuned_policies.svg
    python -m benchmarks.tune --snapshots docs/graphs/resnet50.graph --models swin bamba --json …
    python -m benchmarks.tune --layers 8 18 36 --synthetic 2000 10000 20000 40000 --json …    # the growth
    python -m benchmarks.tune --models tiny --budgets 8          # seconds

The results file is written again after each graph: a graph that is measured again takes the place of its older rows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
from attrs import asdict
from torch import fx

from benchmarks.common import growth_exponent, table, write_results
from benchmarks.graphs import llama_joint, synthetic_joint
from benchmarks.tuning_graphs import MODELS, Subject, recorded, snapshot
from benchmarks.tuning_peers import SOLVERS, Point, bundled, by_hand, by_torch, untagged
from benchmarks.tuning_picture import picture
from policylang.api.load import load_device
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.planning.capabilities import capabilities_for
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.tuning.evaluation import Budget, Candidate, Infeasible
from policylang.tuning.program import Program
from policylang.tuning.tuner import Tuner

GIB = 2**30
DEVICE = "h100-sxm"
_COUNTS = 0.01
"""The share of the forward's time that is recomputed at least, where a ratio to the bound says anything."""
_EXACT: dict[str, Any] = {"mip_max_nodes": 2000, "time_limit": 30.0}
"""Options of branch and bound: mostly it ends, and the bound is the least time that any choice of values takes."""
SAME = 1e-6
"""The share of the forward's time below which two times are one."""


# --- what is measured ------------------------------------------------------------------------------------------------


def spread(low: float, high: float, count: int) -> list[float]:
    """So many budgets between two, neither of which is one: each is as far from the next."""
    return [low + (high - low) * step / (count + 1) for step in range(1, count + 1)]


def measure(
    subject: Subject,
    device: DeviceProfile,
    count: int,
    solvers: Sequence[str],
    say: Callable[[str], None],
    of_torch: int | None = None,
    numbers: Sequence[int] | None = None,
) -> dict[str, Any]:
    """One graph: the points of every contender, and the verdicts. ``of_torch``: PyTorch's budgets, if not ``count``;
    ``numbers``: of blocks that recompute in policies by hand."""
    facts = subject.facts()
    times = node_times(facts, device)
    taken = seconds_to_tune(facts, times)
    tuner = Tuner(facts, times, capabilities_for(facts.kind, None))
    forward = tuner.forward
    save_all = next(iter(by_saving(tuner)))
    say(f"{subject.name}: {len(facts)} nodes, tuned in {taken:.1f} s")
    smallest = tuner.smallest(Budget("peak", inf))
    tuned = at_budgets(tuner, "peak", spread(smallest.peak, save_all.peak, count))
    fewest = tuner.smallest(Budget("saved", 0)).saved
    kept = at_budgets(tuner, "saved", spread(fewest, save_all.saved, count))
    program = Program(tuner.spaces[0].choices(()), **_EXACT)
    bounds = [program.bound(round(limit)) for limit, _ in kept]
    say("tuned at every budget")
    others = [*bundled(facts, times), *by_hand(facts, times, numbers or few_of(tuner.spaces[0].composition.count))]
    say(f"{len(others)} policies of others")
    arguments = subject.arguments
    shares = spread(0.0, 1.0, count if of_torch is None else of_torch) if subject.gm is not None else []
    if subject.gm is not None:
        started = time.perf_counter()
        others += by_torch(subject.gm, subject.inputs, facts, times, shares, solvers, say, **arguments)
        say(f"PyTorch's budgets took {time.perf_counter() - started:.0f} s")
    held = at_their_peaks(tuner, others, [made for _, made in (*tuned, *kept) if made is not None])
    return {
        "graph": subject.name,
        "nodes": len(facts),
        "blocks": tuner.spaces[0].composition.count,
        "device": device.name,
        "budgets": count,
        "PyTorch's budgets": len(shares),
        "PyTorch's solvers": list(solvers),
        "forward s": forward,
        "seconds to tune": taken,
        "parameters and inputs GiB": sum(
            size for op, size in zip(facts.ops, facts.bytes, strict=True) if op == "placeholder"
        )
        / GIB,
        "save all peak GiB": save_all.peak / GIB,
        "smallest peak GiB": smallest.peak / GIB,
        **near_the_bound(kept, bounds, tuner),
        **fits_and_is_monotone(tuned, kept),
        "beaten": beaten(held, forward),
        "tuned": [row(budget, found) for budget, found in tuned],
        "tuned at the peaks of others": [row(each.peak, made) for each, made in held],
        "tuned saved": [
            {**row(budget, found), "bound": bound}
            for (budget, found), bound in zip(kept, bounds, strict=True)
            if found is not None
        ],
        "others": [asdict(each) for each in others],
    }


def by_saving(tuner: Tuner) -> Iterator[Candidate]:
    if tuner.save_all is None:
        raise SystemExit("`save everything` has something to be said against it on this graph")
    yield tuner.save_all


Found = list[tuple[float, Candidate | None]]


def at_budgets(tuner: Tuner, figure: Any, budgets: Sequence[float]) -> Found:
    """What is chosen for each budget; None where none fits."""
    found: Found = []
    for limit in budgets:
        made = tuner.tuned(Budget(figure, limit), detail="rules")
        found.append((limit, None if isinstance(made, Infeasible) else made.chosen))
    return found


def row(budget: float, found: Candidate | None) -> dict[str, Any]:
    if found is None:
        return {"budget": budget, "rules": None}
    return {
        "budget": budget,
        "peak": found.peak,
        "saved": found.saved,
        "recompute": found.recompute,
        "rules": found.rules,
    }


def near_the_bound(kept: Found, bounds: Sequence[float], tuner: Tuner) -> dict[str, Any]:
    """How far tuned policies for bytes kept are above the bound at their budgets."""
    excess, ratio = 0.0, 1.0
    for (_, found), bound in zip(kept, bounds, strict=True):
        if found is None:
            continue
        excess = max(excess, (found.recompute - bound) / tuner.forward)
        if found.recompute > _COUNTS * tuner.forward:
            ratio = max(ratio, found.recompute / bound)
    return {
        "worst excess over the bound, of the forward": excess,
        "worst ratio to the bound above 1%": ratio,
        "budgets in bytes kept that none meets": sum(found is None for _, found in kept),
    }


def fits_and_is_monotone(tuned: Found, kept: Found) -> dict[str, Any]:
    memory = {"peak": (tuned, "peak"), "saved": (kept, "saved")}
    fits = all(
        getattr(found, which) <= budget
        for each, which in memory.values()
        for budget, found in each
        if found is not None
    )
    monotone = True
    for each, _ in memory.values():
        times = [inf if found is None else found.recompute for _, found in each]
        monotone &= all(later <= earlier for earlier, later in pairwise(times))
    return {"fits": fits, "monotone": monotone}


def at_their_peaks(
    tuner: Tuner, others: Sequence[Point], known: Sequence[Candidate]
) -> list[tuple[Point, Candidate | None]]:
    """The points of others that none of them beats, each with a tuned policy of no higher peak: one of the ``known``
    that is as fast, or what is tuned for that peak."""
    found = []
    for each in undominated(others):
        as_fast = (made for made in known if made.peak <= each.peak and made.recompute <= each.recompute)
        made = next(as_fast, None) or at_budgets(tuner, "peak", [each.peak])[0][1]
        found.append((each, made))
    return found


def beaten(held: Sequence[tuple[Point, Candidate | None]], forward: float) -> list[dict[str, Any]]:
    """The points that take less time than what is tuned for their own peak."""
    found = []
    for each, made in held:
        ours = inf if made is None else made.recompute
        if each.recompute < ours - SAME * forward:
            by = None if made is None else (ours - each.recompute) / forward
            found.append({**asdict(each), "tuned": None if made is None else ours, "faster by": by})
    return found


def undominated(points: Sequence[Point]) -> list[Point]:
    kept: list[Point] = []
    for each in sorted(points, key=lambda each: (each.peak, each.recompute, each.family, each.name)):
        if not kept or each.recompute < kept[-1].recompute:
            kept.append(each)
    return kept


def few_of(blocks: int) -> list[int]:
    """Numbers of blocks, all of few and ever fewer of many."""
    found = {1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, blocks - 2, blocks - 1}
    return sorted(number for number in found if 0 < number < blocks)


def seconds_to_tune(facts: Facts, times: NodeTimes) -> float:
    """Of one budget in the middle, by processor time: from facts and times to the policy's text."""
    path = capabilities_for(facts.kind, None)
    save_all = Tuner(facts, times, path).save_all
    limit = 0.6 * save_all.peak if save_all is not None else inf
    start = time.process_time()
    Tuner(facts, times, path).tuned(Budget("peak", limit))
    return time.process_time() - start


def growth(
    device: DeviceProfile, layers: Sequence[int], synthetic: Sequence[int], say: Callable[[str], None]
) -> dict[str, Any]:
    """Narrow Llamas of rising depth, and graphs made by hand of 32 blocks of operators in turn."""
    made: list[tuple[str, Callable[[], fx.GraphModule]]] = [
        (f"llama, {each} layers", lambda each=each: untagged(llama_joint(each).module)) for each in layers
    ]
    made += [("32 blocks made by hand", lambda each=each: synthetic_joint(each, each // 64)) for each in synthetic]
    rows = []
    for name, make in made:
        facts = collect(make())
        rows.append({"graph": name, "nodes": len(facts), "seconds": seconds_to_tune(facts, node_times(facts, device))})
        say(f"{name}: {len(facts)} nodes in {rows[-1]['seconds']:.1f} s")
    return {"rows": rows, "exponents": {"llama": _exponent(rows, "llama"), "by hand": _exponent(rows, "32")}}


def _exponent(rows: Sequence[dict[str, Any]], kind: str) -> float | None:
    found = [each for each in rows if each["graph"].startswith(kind)]
    if len(found) < 2:
        return None
    return growth_exponent([each["nodes"] for each in found], [each["seconds"] for each in found])


# --- what is shown ---------------------------------------------------------------------------------------------------


def verdicts(result: dict[str, Any]) -> str:
    forward = result["forward s"]
    lines = [
        f"\n{result['graph']}: {result['nodes']:,} nodes, {result['blocks']} blocks, on {result['device']}; "
        f"forward {forward * 1e3:.1f} ms, tuned in {result['seconds to tune']:.1f} s",
        f"worst excess over the bound: {result['worst excess over the bound, of the forward']:.2%} of the forward",
        f"worst ratio to the bound, above 1% of the forward: {result['worst ratio to the bound above 1%']:.3f}",
        f"fits: {'yes' if result['fits'] else 'NO'}; monotone: {'yes' if result['monotone'] else 'NO'}",
        f"faster at the same peak: {len(result['beaten'])} of {len(result['others'])} others",
    ]
    lines += [
        f"  {each['family']} {each['name']} at {each['peak'] / GIB:.2f} GiB: "
        + ("where no tuned policy fits" if each["tuned"] is None else f"by {each['faster by']:.2%} of the forward")
        for each in result["beaten"]
    ]
    return "\n".join(lines)


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """At some peaks, the least time of second runs of each family, in shares of the forward's time."""
    peaks = [each["budget"] for each in result["tuned"]]
    chosen = peaks[:: max(1, len(peaks) // 10)]
    rows = []
    for limit in chosen:
        line: dict[str, Any] = {"peak GiB": limit / GIB}
        families = {"tuned": result["tuned"], **{name: [] for name in ("bundled", "by hand", "torch")}}
        for each in result["others"]:
            families[each["family"]] = [*families[each["family"]], each]
        for name, points in families.items():
            fitting = [each["recompute"] for each in points if each.get("peak", inf) <= limit]
            line[f"{name} %"] = 100 * min(fitting) / result["forward s"] if fitting else None
        rows.append(line)
    return rows


def written(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {"graphs": [], "growth": None}
    found = json.loads(path.read_text())
    return {"graphs": found["graphs"], "growth": found["growth"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recorded", type=Path, nargs="*", default=[], help="recorded joint graphs")
    parser.add_argument("--snapshots", type=Path, nargs="*", default=[], help="of steps, without PyTorch's budgets")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=[])
    parser.add_argument("--profile", default=DEVICE, metavar="NAME|FILE", help="the device profile")
    parser.add_argument("--budgets", type=int, default=6)
    parser.add_argument("--torch-budgets", type=int, help="fewer, on large graphs: each is a min-cut of seconds")
    parser.add_argument("--blocks", type=int, nargs="*", help="that recompute in policies by hand")
    parser.add_argument("--solvers", nargs="*", choices=SOLVERS, default=list(SOLVERS), help="of PyTorch's knapsack")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="of the Llamas whose growth is measured")
    parser.add_argument("--synthetic", type=int, nargs="*", default=[], help="nodes of graphs made by hand")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path, help="an SVG of the first graph in the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = load_device(options.profile)
    results = written(options.json)
    subjects: list[Callable[[], Subject]] = [lambda path=path: recorded(path) for path in options.recorded]
    subjects += [lambda path=path: snapshot(path) for path in options.snapshots]
    subjects += [lambda name=name: Subject.of(name, MODELS[name]()) for name in options.models]
    for make in subjects:
        result = measure(make(), device, options.budgets, options.solvers, print, options.torch_budgets, options.blocks)
        print(verdicts(result))
        print(table(rows_of(result)))
        results["graphs"] = [each for each in results["graphs"] if each["graph"] != result["graph"]] + [result]
        write_results(options.json, results)
    if options.layers or options.synthetic:
        results["growth"] = growth(device, options.layers, options.synthetic, print)
        print(table(results["growth"]["rows"]))
        write_results(options.json, results)
    if options.picture is not None:
        options.picture.write_text(picture(results["graphs"][0]))


if __name__ == "__main__":
    main()
