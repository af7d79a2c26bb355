"""How much communication does a planned order hide, beside torch's overlap scheduler on the same graph and costs?

Halves of a partition go through ``torch._inductor``'s ``schedule_overlap_bucketing`` (as it comes, with its bucketing,
and with buckets made beforehand) and ``manual_overlap_bucketing`` (a plan of the blocks' names), and through policies.
What comes out of each is read into facts and judged by one simulator with one profile: exposed time, step, peak, number
of collectives; beside it the processor time of the pass, one after the other in the same process. torch's estimator is
given our times of the nodes; how its questions to a GPU are answered says ``benchmarks/schedule_peers.py``.

    python -m benchmarks.schedule --json results.json              # a Llama-3 8B's halves, traced here, in 1d and 2d
    python -m benchmarks.schedule --layers 2                       # seconds
    python -m benchmarks.schedule --graphs forward.json.gz backward.json.gz   # graphs recorded as JSON, beside them
    python -m benchmarks.schedule --times colls64_1.table          # a table of measured collectives as another profile
    python -m benchmarks.schedule --between --graphs backward.json.gz   # products between two reduce-scatters
    python -m benchmarks.schedule --growth 2000 5000 10000 20000 50000 100000
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen
from torch import fx

import policylang
from benchmarks import schedule_peers
from benchmarks.common import growth_exponent, table, write_results
from benchmarks.schedule_graphs import Subject, process_groups, recorded_halves, synthetic_half, traced_halves
from examples.sharded_llama import LLAMA3_8B
from policylang.api.load import load_device
from policylang.errors import PolicyMatchError, PolicyMeaningError
from policylang.graph.facts import Facts, Flag, InputKind, Phase, Schedule, StepKind
from policylang.language.devices.profile import DeviceProfile, Network
from policylang.language.devices.reading import read_table
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.operators.names import SCATTER
from policylang.planning.capabilities import HALF
from policylang.planning.order.dependencies import dependencies
from policylang.planning.plan import OrderPlan
from policylang.planning.planner import plan as make_plan
from policylang.planning.schedule import build_schedule
from policylang.simulation.memory import estimate_peak
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import exposed_bound, step_time

GIB = 2**30
REFERENCE = Path(__file__).with_name("reference_device.toml")
_BUCKETS = "bucket ({gathers}) per block\noptional bucket reduce_scatter per block\n"
POLICIES: Mapping[str, str] = {
    "overlap": "overlap collective within 1 GiB of peak\n",
    "bucket + overlap": f"{_BUCKETS}overlap collective within 1 GiB of peak\n",
    "bucket + prefetch + delay": (
        f"{_BUCKETS}prefetch ({{gathers}}) 1 block ahead\noptional delay reduce_scatter 1 block\n"
    ),
}
"""``{gathers}`` are those of parameters, or of inputs where a recording does not say which are parameters."""
TORCH: Mapping[str, Mapping[str, Any]] = {
    "torch": {},
    "torch, bucketing": {"collective_bucketing": True},
    "torch, pre-bucketing": {"collective_bucketing": True, "pre_bucketing_fsdp_collectives": True},
}
MANUAL = "torch, plan of blocks"
AS_TRACED = "as traced"


# --- one contender ---------------------------------------------------------------------------------------------------


@frozen
class Outcome:
    """What a contender made of a graph."""

    facts: Facts = field(repr=False)
    schedule: Schedule = field(repr=False)
    module: fx.GraphModule = field(repr=False)
    seconds: float | None = None
    """Of processor time that its pass took: of a policy, planning."""
    most_in_block: int | None = None
    """Collectives that it left of the most of any block, of those that were to be bucketed."""


def judged(outcome: Outcome, device: DeviceProfile) -> dict[str, Any]:
    """The figures of an order, in milliseconds and GiB."""
    facts, schedule = outcome.facts, outcome.schedule
    found = step_time(facts, schedule, node_times(facts, device))
    return {
        "exposed ms": 1e3 * found.exposed,
        "step ms": 1e3 * found.step,
        "peak GiB": estimate_peak(facts, schedule).bytes / GIB,
        "by torch GiB": schedule_peers.peak_as_torch_counts(outcome.module.graph) / GIB,
        "collectives": sum(bool(facts.flags[row] & Flag.COLLECTIVE) for row in range(len(facts))),
        "most in a block": outcome.most_in_block,
        "pass s": outcome.seconds,
    }


def as_traced(subject: Subject) -> Outcome:
    return Outcome(subject.facts, build_schedule(subject.facts, ()), subject.fresh())


def of_torch(subject: Subject, device: DeviceProfile, name: str) -> Outcome:
    """Raises what torch's pass raises."""
    if name == MANUAL:
        passed = schedule_peers.manual(subject, device, blocks_of(subject.facts))
    else:
        passed = schedule_peers.overlap(subject, device, **TORCH[name])
    return Outcome(passed.facts, build_schedule(passed.facts, ()), passed.module, passed.seconds)


def of_policy(subject: Subject, device: DeviceProfile, text: str) -> Outcome:
    """Planned and carried out on the half itself, and judged by what came out. What was worked out of these facts
    before is not used again.

    Raises ``PolicyMatchError`` with what is wrong between the policy and the graph.
    """
    policy = policylang.parse(text.format(gathers=gathers_of(subject.facts)))
    facts = evolve(subject.facts)
    gc.collect()
    start = time.process_time()
    plan = make_plan(policy, facts, HALF, device=device)
    spent = time.process_time() - start
    errors = [each for each in plan.diagnostics if is_error(each)]
    if errors:
        raise PolicyMatchError(errors)
    if plan.order is None:
        raise ValueError("the policy has no scheduling lines")
    module = subject.fresh()
    with subject.mode:
        policylang.apply(module, policy, agree=False, device=device)
    facts = subject.read(module)
    return Outcome(facts, build_schedule(facts, ()), module, spent, most_in_block(plan.order))


def gathers_of(facts: Facts) -> str:
    """The selector of the gathers that a policy is about."""
    says = any(kind == InputKind.PARAMETER for kind in facts.input_kinds)
    return f"all_gather where from {'parameter' if says else 'input'}"


def most_in_block(order: OrderPlan) -> int | None:
    """Of the collectives that carry parameters and their gradients, how many the block with the most has."""
    if not order.edits.done:
        return None
    made = {node.name for edit in order.edits.done for node in edit.nodes}
    counts = Counter(
        order.block_of[row]
        for row, name in enumerate(order.facts.names)
        if name in made and order.facts.flags[row] & Flag.COLLECTIVE and order.block_of[row] >= 0
    )
    return max(counts.values(), default=0)


def blocks_of(facts: Facts) -> list[str]:
    """The modules of the numbered layers, as torch's plan names them."""
    paths = dict.fromkeys(
        ".".join(parts[: at + 1])
        for parts in (path.split(".") for path in facts.modules)
        for at, part in enumerate(parts)
        if part.isdigit()
    )
    return list(paths)


# --- one graph -------------------------------------------------------------------------------------------------------


def measure(
    subject: Subject, device: DeviceProfile, repeats: int, say: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """A row for each contender; times are medians of turns in which each has its own."""
    contenders: dict[str, Callable[[], Outcome]] = {
        **{name: lambda name=name: of_torch(subject, device, name) for name in TORCH},
        **({MANUAL: lambda: of_torch(subject, device, MANUAL)} if blocks_of(subject.facts) else {}),
        **{name: lambda text=text: of_policy(subject, device, text) for name, text in POLICIES.items()},
    }
    times = node_times(subject.facts, device)
    bound = exposed_bound(subject.facts, times)
    head = {"graph": subject.name, "nodes": len(subject.facts), "device": device.name}
    with process_groups(subject.groups):
        before = judged(as_traced(subject), device)
    rows = [{**head, "contender": AS_TRACED, "bound ms": 1e3 * bound, **before}]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in contenders}
    failures: dict[str, str] = {}
    with process_groups(subject.groups):
        for _ in range(repeats):
            for name, run in contenders.items():
                if name in failures:
                    continue
                gc.collect()
                try:
                    outcomes[name].append(run())
                except Exception as error:  # of torch's pass, or of a policy that does not fit the graph
                    failures[name] = _in_short(error)
                    say(f"  {name}: {failures[name]}")
    for name, found in outcomes.items():
        row: dict[str, Any] = {**head, "contender": name}
        if name in failures or not found:
            rows.append({**row, "fails": failures.get(name, "")})
            continue
        spent = statistics.median(each.seconds for each in found if each.seconds is not None)
        with process_groups(subject.groups):
            row |= judged(evolve(found[0], seconds=spent), device)
        rows.append({**row, "exposed / bound": row["exposed ms"] / (1e3 * bound) if bound else None})
    return rows


def _in_short(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


# --- computation between two reduce-scatters --------------------------------------------------------------------------

AT_MOST = 8
"""Products between two reduce-scatters, to which AutoParallel holds the order of torch's scheduler."""


def between_scatters(subject: Subject, device: DeviceProfile) -> Iterator[dict[str, Any]]:
    """Of each policy's order the most products between two reduce-scatters, and what the order comes to as it is and
    with at most :data:`AT_MOST` of them."""
    for name, text in POLICIES.items():
        with process_groups(subject.groups):
            facts = (outcome := of_policy(subject, device, text)).facts
        order = outcome.schedule.rows_of(StepKind.FIRST_RUN)
        row: dict[str, Any] = {"graph": subject.name, "device": device.name, "contender": name}
        for held, rows in (("", order), (" held", at_most(facts, order))):
            halves = [int(facts.phases[each] == Phase.BACKWARD) for each in rows]
            schedule = Schedule.of((StepKind.FIRST_RUN, *each) for each in zip(rows, halves, strict=True))
            row[f"most{held}"] = max(len(products) for products, _ in stretches(facts, rows))
            row[f"exposed ms{held}"] = 1e3 * step_time(facts, schedule, node_times(facts, device)).exposed
            row[f"peak GiB{held}"] = estimate_peak(facts, schedule).bytes / GIB
        yield row


def stretches(facts: Facts, order: Sequence[int]) -> Iterator[tuple[list[int], int | None]]:
    """The products before each reduce-scatter and behind the one before it, with that scatter; None behind the last."""
    products: list[int] = []
    for row in order:
        if facts.targets[row] == SCATTER:
            yield products, row
            products = []
        elif facts.flags[row] & Flag.COMPUTE:
            products.append(row)
    yield products, None


def at_most(facts: Facts, order: Sequence[int]) -> list[int]:
    """The order in which what is beyond the first of a long stretch waits for the scatter that ends it, as far as the
    scatter does not need it."""
    place = {row: at for at, row in enumerate(order)}
    needs = dependencies(facts).before
    before = {row: {each for each in needs[row] if each in place} for row in order}
    for products, scatter in stretches(facts, order):
        if scatter is not None and len(products) > AT_MOST:
            needed, pending = {scatter}, [scatter]
            while pending:
                pending += (new := before[pending.pop()] - needed)
                needed |= new
            free = [row for row in products if row not in needed]
            for row in free[max(0, AT_MOST - len(products) + len(free)) :]:
                before[row].add(scatter)
    return [order[at] for at in _in_order([sorted(place[each] for each in before[row]) for row in order])]


def _in_order(before: Sequence[Sequence[int]]) -> Iterator[int]:
    """Places such that each comes after those before it, else as given."""
    after: list[list[int]] = [[] for _ in before]
    missing = [len(each) for each in before]
    for place, each in enumerate(before):
        for earlier in each:
            after[earlier].append(place)
    ready = [place for place, count in enumerate(missing) if not count]
    while ready:
        yield (place := heappop(ready))
        for later in after[place]:
            missing[later] -= 1
            if not missing[later]:
                heappush(ready, later)


# --- growth ----------------------------------------------------------------------------------------------------------

GROWING: Mapping[str, str] = {
    "bucket": "bucket all_gather per block\n",
    "prefetch": "prefetch all_gather 1 block ahead\n",
    "overlap": "overlap collective within 1 GiB of peak\n",
}


def growth(sizes: Sequence[int], device: DeviceProfile, repeats: int) -> list[dict[str, Any]]:
    """Processor seconds of planning each statement on synthetic halves of these sizes; a last row has the exponents."""
    rows: list[dict[str, Any]] = []
    for size in sizes:
        subject = synthetic_half(size)
        row: dict[str, Any] = {"nodes": len(subject.facts)}
        for name, text in GROWING.items():
            policy = policylang.parse(f"blocks layers.*\n{text}")
            row[f"{name} s"] = statistics.median(_planning(policy, subject.facts, device) for _ in range(repeats))
        rows.append(row)
        print(table([row]), flush=True)
    return rows


def _planning(policy: policylang.Policy, facts: Facts, device: DeviceProfile) -> float:
    fresh = evolve(facts)
    gc.collect()
    start = time.process_time()
    plan = make_plan(policy, fresh, HALF, device=device)
    spent = time.process_time() - start
    errors = [each for each in plan.diagnostics if is_error(each)]
    if errors:
        raise PolicyMatchError(errors)
    return spent


def exponents(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    sizes = [row["nodes"] for row in rows]
    return {name: growth_exponent(sizes, [row[f"{name} s"] for row in rows]) for name in GROWING}


# --- all of it -------------------------------------------------------------------------------------------------------


def with_times(base: DeviceProfile, path: Path) -> DeviceProfile:
    """The profile with a table of measured collectives in place of its networks: the last group of the table lies
    within a server, the others reach beyond it."""
    rows = read_table(path, path.name)
    if isinstance(rows, Diagnostic):
        raise PolicyMeaningError([rows])
    groups = dict.fromkeys(group for group, _ in rows)
    inner = max(groups) if len(groups) > 1 else None
    within = tuple(each for group, each in rows if group == inner)
    beyond = tuple(each for group, each in rows if group != inner)
    networks = (
        *((Network(ranks=max(each.ranks for each in within), times=within),) if within else ()),
        Network(times=beyond, bandwidth=base.networks[-1].bandwidth, latency=base.networks[-1].latency),
    )
    return evolve(base, name=path.stem, networks=networks)


def subjects(options: argparse.Namespace) -> Iterator[Subject]:
    for path in options.graphs:
        yield from recorded_halves(path)
    if options.layers:
        config = evolve(LLAMA3_8B, layers=options.layers)
        yield from traced_halves("fsdp", 64, 1, config)
        yield from traced_halves("tp", 8, 8, config)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", type=Path, default=[], help="recorded graphs, .json or .json.gz")
    parser.add_argument("--layers", type=int, default=LLAMA3_8B.layers, help="of the Llama traced here; 0 for none")
    parser.add_argument("--devices", nargs="*", default=[str(REFERENCE), "h100-sxm"])
    parser.add_argument("--times", nargs="*", type=Path, default=[], help="tables of measured collectives")
    parser.add_argument("--growth", nargs="*", type=int, default=[], help="sizes of synthetic halves, in nodes")
    parser.add_argument("--between", action="store_true", help="of backward halves, how much runs between scatters")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    devices = [load_device(name) for name in options.devices]
    devices += [with_times(load_device(REFERENCE), path) for path in options.times]
    results: dict[str, Any] = {"benchmark": "schedule", "rows": []}
    for subject in subjects(options):
        for device in devices:
            if options.between:
                found = [*between_scatters(subject, device)] if SCATTER in subject.facts.targets else []
                results.setdefault("between", []).extend(found)
                print(table(found), flush=True)
                continue
            print(f"\n{subject.name}, {len(subject.facts):,} nodes, on {device.name}", flush=True)
            rows = measure(subject, device, options.repeats)
            results["rows"] += rows
            show(rows)
            write_results(options.json, results)
    if options.growth:
        results["growth"] = growth(options.growth, devices[0], options.repeats)
        print(table(results["growth"]))
        if len(options.growth) > 2:
            results["exponents"] = exponents(results["growth"])
            print(table([results["exponents"]]))
    write_results(options.json, results)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = dict.fromkeys(name for row in rows for name in row if name not in ("graph", "nodes", "device"))
    print(table([{name: row.get(name) for name in columns} for row in rows]), flush=True)


if __name__ == "__main__":
    main()
