"""What a tuned policy is held against: policies that people write, and PyTorch's ``activation_memory_budget``.

Every contender is a point of one plane: the simulated peak of the step and the seconds of its second runs, by the same
simulator, the same lifetimes and the same times of nodes. PyTorch's partitioner gets the same joint graph and the same
times of nodes; the values that it chooses to save are put into our schedule as if a policy had said so, row by row, and
all else that the backward reads runs again from them. Its own order of the backward does not count, nor ours for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import astuple
from typing import Any
from unittest.mock import patch

import torch._functorch.config as functorch_config
from attrs import frozen
from torch import fx
from torch._functorch import partitioners
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

import policylang
from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, Schedule
from policylang.language.diagnostics import is_error
from policylang.language.syntax import Action
from policylang.planning.capabilities import capabilities_for
from policylang.planning.liveness import SavedForBackward, backward_needs, saved_and_recomputed, with_cost
from policylang.planning.planner import plan
from policylang.planning.schedule import build_schedule
from policylang.planning.value_outcome import Decision, Why
from policylang.simulation.memory import peak_of, simulate
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import step_time

BUNDLED = (
    "every_2nd_layer",
    "fsdp_reshard_always",
    "fsdp_reshard_never",
    "llama3_sac",
    "memory_staged",
    "save_all",
    "torchtitan_default",
    "torchtitan_eager",
    "torchtitan_full",
    "torchtitan_graph_full",
    "torchtitan_op_sac",
)
UNDECIDED = ("save", "recompute")
SOLVERS = ("dp", "greedy")


@frozen
class Point:
    """One contender on one graph."""

    family: str
    name: str
    peak: int
    """Bytes, simulated."""
    saved: int
    """Bytes kept for the backward."""
    recompute: float
    """Seconds of second runs."""


def point(family: str, name: str, facts: Facts, times: NodeTimes, schedule: Schedule, saved: int) -> Point:
    peak = peak_of(simulate(facts, schedule), facts).bytes
    return Point(family, name, peak, saved, step_time(facts, schedule, times).recomputed)


# --- policies --------------------------------------------------------------------------------------------------------


def of_policy(family: str, name: str, text: str, facts: Facts, times: NodeTimes) -> Point | None:
    """None where the policy has an error on this graph, or leaves values to PyTorch's partitioner."""
    try:
        made = plan(policylang.parse(text), facts, capabilities_for(facts.kind, None))
    except policylang.PolicyError:
        return None
    if any(map(is_error, made.diagnostics)):
        return None
    needs = saved_and_recomputed(made)
    return point(family, name, made.facts, times, made.schedule, needs.saved_bytes) if needs.final else None


def bundled(facts: Facts, times: NodeTimes) -> Iterator[Point]:
    """Each policy that comes along, as it is where it decides everything, else with what it leaves open saved and
    recomputed."""
    for name in BUNDLED:
        whole = of_policy("bundled", name, f"include <{name}>\n", facts, times)
        if whole is not None:
            yield whole
            continue
        for fate in UNDECIDED:
            text = f"include <{name}>\nundecided -> {fate}\n"
            found = of_policy("bundled", f"{name}, the rest: {fate}", text, facts, times)
            if found is not None:
                yield found


def by_hand(facts: Facts, times: NodeTimes, numbers: Sequence[int] | None = None) -> Iterator[Point]:
    """What people write: operators that are saved, in all blocks, in the first or last so many, in every so manyth."""
    for name, text in hand_written(len(blocks_of(facts).names), numbers):
        found = of_policy("by hand", name, text, facts, times)
        if found is not None:
            yield found


KEPT_IN_A_BLOCK = {
    "nothing": "",
    "attention": "save attention in block\n",
    "products": "save matmul in block\n",
    "attention and products": "save attention in block\nsave matmul in block\n",
    "attention and every 2nd product": (
        "save attention in block\nsave matmul in block\nrecompute every 2nd matmul per block\n"
    ),
    "all but pointwise": "save everything in block\nrecompute pointwise in block\n",
    "all but views and casts and sums": "save everything in block\nrecompute add or mul in block\n",
}
CROSSING = "save everything in block where crosses block\n"


def hand_written(blocks: int, numbers: Sequence[int] | None = None) -> Iterator[tuple[str, str]]:
    """Names and texts; ``numbers`` of blocks that recompute, all of them by default."""
    if not blocks:
        for name, kept in KEPT_IN_A_BLOCK.items():
            yield f"keeps {name}", "recompute everything\n" + kept.replace(" in block", "").replace(" per block", "")
        return
    for outside in UNDECIDED:
        for name, kept in KEPT_IN_A_BLOCK.items():
            text = f"recompute everything in block\n{kept}{CROSSING}undecided -> {outside}\n"
            yield f"keeps {name}, outside of blocks: {outside}", text
    chosen = [number for number in numbers or range(1, blocks) if 0 < number < blocks]
    zones = [(f"{end} {number}", f"{end} {number} blocks") for number in chosen for end in ("first", "last")]
    zones += [(f"every {each}", f"every {each} block") for each in ("2nd", "3rd", "4th") if blocks > int(each[0])]
    for kept in ("nothing", "attention", "attention and products"):
        for name, zone in zones:
            within = KEPT_IN_A_BLOCK[kept].replace("in block", f"in {zone}")
            text = f"recompute everything in {zone}\n{within}{CROSSING}undecided -> save\n"
            yield f"{name} blocks keep {kept}", text.replace(" 1 blocks", " block")


# --- PyTorch's memory budget -----------------------------------------------------------------------------------------


class _Chosen(Exception):
    """All budgets have been asked for: the graph need not be split."""


def saved_by_torch(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    seconds: Mapping[str, float],
    budgets: Sequence[float],
    solvers: Sequence[str] = SOLVERS,
    **arguments: Any,
) -> dict[tuple[str, float], frozenset[str]]:
    """By solver and budget, the names of the nodes that PyTorch's partitioner chooses to save on a joint graph.

    Its function that chooses is called once a budget from within the partitioner, with what that hands to it. The
    cuts that it takes for every budget alike are solved once. ``seconds``: the time of each node, by name, which its
    knapsack weighs in place of FLOPs. Equal nodes are not merged before, so that the graph is the one we plan on.
    """
    found: dict[tuple[str, float], frozenset[str]] = {}
    choose, cut = partitioners.choose_saved_values_set, partitioners.solve_min_cut
    known: dict[Any, Any] = {}

    class Times(CustomRuntimeEstimator):  # type: ignore[misc]
        def __call__(self, node: fx.Node) -> float:
            return max(seconds.get(node.name, 0.0), 1e-9)

        def uuid(self) -> str:
            return "times"

    def cut_once(graph: fx.Graph, info: Any, options: Any, dont_ban: Any = None) -> Any:
        key = astuple(options), frozenset(node.name for node in dont_ban or ())
        if key not in known:
            known[key] = cut(graph, info, options, dont_ban)
        return known[key]

    def all_budgets(graph: fx.Graph, info: Any, memory_budget: float = 1) -> Any:
        for solver in solvers:
            with functorch_config.patch(
                activation_memory_budget_solver=solver, activation_memory_budget_runtime_estimator=Times()
            ):
                for budget in budgets:
                    found[solver, budget] = frozenset(node.name for node in choose(graph, info, budget))
        raise _Chosen

    with (
        functorch_config.patch(cse=False),
        patch.object(partitioners, "solve_min_cut", cut_once),
        patch.object(partitioners, "choose_saved_values_set", all_budgets),
    ):
        try:
            partitioners.min_cut_rematerialization_partition(gm, inputs, **arguments)
        except _Chosen:
            return found
    raise RuntimeError("the partitioner of this torch does not choose by `choose_saved_values_set`")


def of_saved(family: str, name: str, saved: Set[str], facts: Facts, times: NodeTimes) -> Point:
    """The point of a choice of values: these are kept, and all else that the backward reads runs again."""
    save, again = (Decision(action, None, Why.RULE) for action in (Action.SAVE, Action.RECOMPUTE))
    forward = [row for row in facts.forward if facts.ops[row] == "call_function"]
    decisions: list[Decision | None] = [None] * len(facts)
    for row in forward:
        decisions[row] = save if facts.names[row] in saved else again
    needs: SavedForBackward = backward_needs(facts, decisions)
    kept = with_cost(needs, facts, [-1] * len(facts), 0).saved_bytes
    schedule = build_schedule(facts, (row for row in forward if decisions[row] is again))
    return point(family, name, facts, times, schedule, kept)


def by_torch(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    facts: Facts,
    times: NodeTimes,
    budgets: Sequence[float],
    solvers: Sequence[str] = SOLVERS,
    say: Callable[[str], None] = lambda _: None,
    **arguments: Any,
) -> Iterator[Point]:
    """PyTorch's partitioner at each budget; equal choices once, by the first budget that makes them."""
    seconds = dict(zip(facts.names, times.seconds, strict=True))
    chosen = saved_by_torch(gm, inputs, seconds, budgets, solvers, **arguments)
    say(f"PyTorch chose {len(set(chosen.values()))} different sets")
    known: dict[frozenset[str], Point] = {}
    for (solver, budget), saved in chosen.items():
        name = f"{budget:.3f}, {solver}"
        if saved not in known:
            known[saved] = of_saved("torch", name, saved, facts, times)
        same = known[saved]
        yield Point("torch", name, same.peak, same.saved, same.recompute)


def untagged(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph without the tags of its model's own checkpoint: PyTorch and a policy start from the same."""
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)
    return gm
