"""The registry of paths: each way to apply a plan, what it can do, and the class that does it.

Needs no torch, so that a plan made without torch equals the plan made with it. A new path is a folder of ``backends``
and one entry here; ``apply``, ``report``, ``agree``, ``check``, ``plan`` and the compile cache's key read the entries.
"""

from __future__ import annotations

from typing import Literal

from attrs import evolve, frozen

from policylang.graph.facts import GraphKind

PAGE = "docs/setups.md"
FSDP2_BLOCKS, WHOLE_MODEL = f"{PAGE}#fsdp2-with-compiled-blocks", f"{PAGE}#the-whole-model-compiled"
WHAT_FSDP_MEANS = f"{PAGE}#what-fsdp-means"
"""The sections that messages name."""


@frozen
class Capabilities:
    """The abilities of a path; a policy that asks for more is refused."""

    name: str
    """The name in diagnostics: ``the joint-graph partitioner``."""
    replays_random: bool = False
    offloads: bool = False
    rewrites: bool = False
    """True if it can rewrite collectives."""
    orders: bool = False
    """True if it can bucket and order collectives."""
    orders_weights: bool = False
    """FSDP2 can honour `prefetch` of weights on this path, although the path itself reorders nothing."""
    unsorted_groups: bool = True
    """True if process groups keep the order of the ranks they are made with (torch's ``sort_ranks=False``)."""
    undecided: Literal["auto", "as traced", "as checkpointed"] | None = None
    """The meaning of ``undecided -> auto`` and ``leave``: PyTorch's min-cut decides, the value stays saved as it was
    traced, or the checkpoint around it recomputes it. The plan and its report print the word. None refuses both."""
    block_by_block: bool = False
    """True if it sees one block of a model at a time. A plan of the whole graph for it refuses what counts over the
    graph, and decides nothing outside the blocks."""
    elsewhere: str = ""
    """How to apply lines about collectives that the path refuses, as a phrase; empty where there is no other place."""
    settled: str = ""
    """Why rules have nothing to decide there, as a phrase; empty where they decide."""


JOINT = Capabilities(
    "the joint-graph partitioner", replays_random=True, offloads=True, rewrites=True, orders=True, undecided="auto"
)
FLAT = Capabilities(
    "a flat graph", replays_random=True, offloads=True, rewrites=True, orders=True, undecided="as traced"
)
"""There is no min-cut there; the report counts the values that stay saved as traced."""

STAGE = evolve(
    FLAT,
    name="the graph of a stage, which is cut into forward and backward afterwards,",
    rewrites=False,
    orders=False,
    elsewhere="give the line to the graphs that gather and reduce, once the stage is cut: "
    "`policylang.apply(graphs.modules.unshard, …)` and `graphs.modules.reduce_grad`",
)
"""The flat graph of one stage of a pipeline. Its gathers and reductions become graphs that run once a step, and a slice
would be cut in two."""

HALF = Capabilities(
    "a forward or backward graph",
    rewrites=True,
    orders=True,
    undecided="auto",
    settled="what is saved was decided by the partition",
)
"""Given a policy's rewrites alone: what it saves was decided when it was cut."""

HOOK = Capabilities(name="a hook of Inductor's", replays_random=True, undecided="auto")
"""A joint graph that is tagged for min-cut. No rewrites: where Inductor takes a graph from its caches nobody is called,
and the groups that rewrites need would not be made."""

EAGER = Capabilities(
    "an eager checkpoint",
    replays_random=True,
    offloads=True,
    orders_weights=True,
    undecided="as checkpointed",
    block_by_block=True,
)
"""A block as it runs, operator by operator. What no rule saves is recomputed, as a checkpoint does."""


@frozen
class PathEntry:
    """A path, as far as it can be described without torch."""

    name: str
    """The value of ``--path``."""
    capabilities: Capabilities
    implementation: str
    """``module:Class``: a :class:`policylang.backends.path.BackendPath`, imported when it is needed."""
    kinds: tuple[GraphKind, ...] = ()
    """The kinds of graphs that it takes. ``policylang.apply`` gives a graph to the first path that takes its kind."""
    plans: bool = False
    """``check`` and ``plan`` plan for it unasked, where it takes the graph: all that it decides is in the graph."""
    compared: bool = False
    """True if ``agree`` takes a step of a model on it."""


PATHS = (
    PathEntry("eager", EAGER, "policylang.backends.eager.region:EagerPath", compared=True),
    PathEntry("joint", JOINT, "policylang.backends.joint:JointPath", (GraphKind.JOINT,), plans=True, compared=True),
    PathEntry("flat", FLAT, "policylang.backends.flat:FlatPath", (GraphKind.FLAT,), plans=True, compared=True),
    PathEntry("half", HALF, "policylang.backends.joint:HalfPath", (GraphKind.FORWARD, GraphKind.BACKWARD)),
    PathEntry("hook", HOOK, "policylang.backends.finalize:HookPath", (GraphKind.JOINT,)),
)
PLANNED = tuple(path.name for path in PATHS)
"""The names that ``--path`` takes."""
PathName = Literal["eager", "joint", "flat", "half", "hook"]
"""The names in :data:`PLANNED`, written out for type checkers."""
COMPARED = tuple(path.name for path in PATHS if path.compared)


def path_entry(name: str) -> PathEntry:
    """The path of a name. Raises ``ValueError`` for another word."""
    for path in PATHS:
        if path.name == name:
            return path
    raise ValueError(f"there is no path `{name}`; there are {', '.join(PLANNED)}")


def path_taking(kind: GraphKind) -> PathEntry:
    """The path that ``policylang.apply`` gives a graph of this kind to."""
    return next(path for path in PATHS if kind in path.kinds)


def capabilities_for(kind: GraphKind, path: str | None = None) -> Capabilities:
    """The capabilities of the named path, else of the default path for this kind of graph. A forward or backward graph
    is planned as its joint graph was, unless ``half`` is named."""
    if path is not None:
        return path_entry(path).capabilities
    found = path_taking(kind)
    return found.capabilities if found.plans else JOINT
