"""The type of an edit holds for any edit: random ones, one that the language lacks, and random lines of layouts."""

import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operators
from attrs import evolve, field, frozen
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode

import policylang
from policylang.audit.outcome import rewrite_reports
from policylang.backends import runtime
from policylang.backends.flat import FlatPath
from policylang.backends.rewriting import apply_edits
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Group, Phase
from policylang.language.diagnostics import Span
from policylang.language.syntax import Collapse, Policy
from policylang.operators.layouts import Tensor, contiguous
from policylang.planning.capabilities import HALF
from policylang.planning.edits.edit_planner import EditPlanner, NewNodes, RefusedError, Setting
from policylang.planning.edits.other_ranks import ConsensusRound, Grid, grid_of
from policylang.planning.edits.proof import ChainCall, Equivalence, Prover, new_call, old_calls, run_on_ranks
from policylang.planning.edits.statement_edits import EDIT_KINDS, edited
from policylang.planning.graph_edit import Edit, Edits, FusedGroup, Node, Proof, Refusal
from policylang.planning.planner import plan
from policylang.torch_compat import distributed
from tests.support.edited import assert_facts_hold
from tests.support.hand import Hand
from tests.support.lines import DIMS, Builder, EveryRank, Line, groups_of, mesh_of, planned
from tests.support.sharded import ALL_GATHER, fake_ranks
from tests.support.trees import span
from tests.support.versions import needs_groups_in_any_order

# Facts are derived from an edit alone, so they are those of the graph that comes out whatever the edit. A kind of edit
# that gathers several values at once needs a planner and its registration, and nothing else.
aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default

# --- random edits of random graphs ----------------------------------------------------------------------------------
ELEMENTS = 24
PAIR = Group("pair", (0, 1), 2)


class Random:
    """A flat graph of layout operators, gathers and pointwise operators. Every value has 24 elements, or twice that."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        first = self.graph.placeholder("x")
        with self.mode:
            first.meta["val"] = torch.empty(4, 6)
        self.forward, self.backward = [first], []
        self._gather([first], self.forward, {})
        for _ in range(draw(st.integers(3, 9))):
            self._node(self.forward, self.forward, {})
        for _ in range(draw(st.integers(2, 7))):
            self._node([*self.forward, *self.backward], self.backward, {"phase": "backward"})
        values = [*self.forward, *self.backward]
        self.graph.output(tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))))
        self.gm = fx.GraphModule(torch.nn.Module(), self.graph)

    def _node(self, known: list[fx.Node], mine: list[fx.Node], custom: dict[str, Any]) -> None:
        source = self.draw(st.sampled_from(known))
        value = source.meta["val"]
        match self.draw(st.sampled_from(("sin", "clone", "turn", "view", "split", "gather", "add"))):
            case "sin":
                self._call(mine, custom, aten.sin.default, source)
            case "clone":
                self._call(mine, custom, aten.clone.default, source, memory_format=torch.contiguous_format)
            case "turn":
                self._call(mine, custom, aten.permute.default, source, list(reversed(range(value.ndim))))
            case "view" if value.is_contiguous():
                self._call(mine, custom, aten.view.default, source, [value.numel()])
            case "split" if value.numel() == 2 * ELEMENTS and value.shape[0] % 2 == 0:
                parts: list[fx.Node] = []
                split = self._call(parts, custom, aten.split.Tensor, source, value.shape[0] // 2)
                for place in range(2):
                    self._call(mine, custom, operator.getitem, split, place)
            case "gather" if value.numel() == ELEMENTS and value.is_contiguous():
                self._gather([source], mine, custom)
            case _:
                self._call(mine, custom, aten.add.Tensor, source, source)

    def _gather(self, known: list[fx.Node], mine: list[fx.Node], custom: dict[str, Any]) -> None:
        waited: list[fx.Node] = []
        self._call(mine, custom, WAIT, self._call(waited, custom, ALL_GATHER, known[0], 2, PAIR.name))

    def _call(self, mine: list[fx.Node], custom: dict[str, Any], target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda read: read.meta["val"]), **kwargs)
        said = {"mine": True} if self.draw(st.booleans()) else {}
        node.meta["custom"] = {**custom, **said}
        node.meta["nn_module_stack"] = {"0": (f"L['self'].layers.{len(mine) % 2}", torch.nn.Linear)}
        if self.draw(st.integers(0, 4)) == 0:
            node.meta["has_backward_hook"] = True
        mine.append(node)
        return node


def random_edit(draw: Callable[[st.SearchStrategy[Any]], Any], facts: Facts) -> Edit | None:
    """One to three values of a graph, made anew from one to three others; None where the graph has none to replace."""
    size = {ELEMENTS, 2 * ELEMENTS}
    tensors = [row for row, shape in enumerate(facts.shapes) if shape is not None and facts.numel[row] in size]
    started = [row for row in tensors if not facts.group_names[row]]  # what a gather returns is awaited first
    possible = [row for row in started if facts.ops[row] == "call_function" and row > min(tensors) + 2]
    if not possible:
        return None
    results = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=3, unique=True))
    dead = set(results)
    for row in range(max(dead), 0, -1):
        users = facts.users[row]
        if facts.ops[row] == "call_function" and users and dead.issuperset(users) and draw(st.booleans()):
            dead.add(row)
    readers = [user for row in results for user in facts.users[row] if user not in dead]
    latest = min([*readers, len(facts) - 1])
    backward = all(facts.phases[row] == Phase.BACKWARD for row in results)
    earlier = (row for row in started if row < latest and row not in dead)
    sources = [row for row in earlier if backward or facts.phases[row] != Phase.BACKWARD]
    chosen = draw(st.lists(st.sampled_from(sources), min_size=1, max_size=3, unique=True))
    before = draw(st.integers(max(chosen) + 1, latest))
    setting = Setting(facts, 0, HALF, {}, Prover(), facts.groups, ConsensusRound(False))
    new = NewNodes(setting)
    whole = (ELEMENTS,)
    replaced = []
    for place, row in enumerate(results):
        shape, stride = facts.shapes[row], facts.strides[row]
        source = chosen[place % len(chosen)]
        flat = new.add("aten.clone.default", (Node(facts.names[source]), "contiguous_format"), *_as(facts, source), row)
        flat = _viewed(new, flat, (facts.numel[source],), row)
        if facts.numel[source] != ELEMENTS:
            flat = new.add("aten.slice.Tensor", (flat, 0, 0, ELEMENTS), whole, (1,), row)
        if facts.numel[row] != ELEMENTS and draw(st.booleans()):
            group = FusedGroup(PAIR.ranks, PAIR.name) if draw(st.booleans()) else FusedGroup((1, 0))
            arguments = (_viewed(new, flat, whole, row), 2, group)
            flat = new.add("_c10d_functional.all_gather_into_tensor.default", arguments, (2 * ELEMENTS,), (1,), row)
            flat = new.add("_c10d_functional.wait_tensor.default", (flat,), (2 * ELEMENTS,), (1,), row)
        elif facts.numel[row] != ELEMENTS:
            flat = new.add("aten.cat.default", ((flat, flat),), (2 * ELEMENTS,), (1,), row)
        if stride == contiguous(shape):
            made = _viewed(new, flat, shape, row)
        else:  # the reverse of one that is
            made = _viewed(new, flat, shape[::-1], row)
            order = tuple(reversed(range(len(shape))))
            made = new.add("aten.permute.default", (made, order), shape, contiguous(shape[::-1])[::-1], row)
        replaced.append((facts.names[row], made.name))
    names = facts.names
    return Edit(
        statement=0,
        kind="any",
        collectives=(names[next(row for row, group in enumerate(facts.group_names) if group)],),
        sources=tuple(names[row] for row in chosen),
        before=names[before],
        nodes=tuple(new.made),
        replaced=tuple(replaced),
        dead=tuple(names[row] for row in sorted(dead)),
        proof=Proof(2, ()),
    )


def _as(facts: Facts, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = facts.shapes[row]
    return shape, contiguous(shape)


def _viewed(new: NewNodes, value: Node, shape: Sequence[int], like: int) -> Node:
    return new.add("aten.view.default", (value, tuple(shape)), shape, contiguous(shape), like)


@settings(max_examples=25)
@given(st.data())
def test_the_facts_that_follow_from_any_edit_are_those_of_the_graph_that_comes_out(data: st.DataObject) -> None:
    gm = Random(data.draw).gm
    known = {PAIR.name: PAIR}
    before = collect(gm, kind=GraphKind.FLAT, groups=known)
    facts, done = before, []
    for _ in range(data.draw(st.integers(1, 3))):
        edit = random_edit(data.draw, facts)
        if edit is not None:
            done.append(edit)
            facts = edited(facts, [edit])
    made = plan(policylang.parse("optional collapse round_trips"), before, HALF)
    made = evolve(made, facts=facts, edits=Edits(tuple(done)))
    backend = mock.patch.object(distributed, "group_backend", return_value="gloo")
    with backend, mock.patch.object(runtime, "ensure_groups"):
        orders = apply_edits(gm, made)
    known.update({order.name: Group(order.name, order.ranks, len(order.ranks)) for order in orders})
    assert_facts_hold(gm, made, groups=known)


# --- a kind with two sources and three results ----------------------------------------------------------------------
GATHER = str(ALL_GATHER)


@frozen
class Paired(Collapse):
    """``pair all_gather``: a statement that the language does not have."""

    span: Span = field(factory=partial(span, "pair all_gather"), eq=False)

    @property
    def kind(self) -> str:
        return "pair"


class PairedGathers(EditPlanner[Paired]):
    """Two gathers over one group as one gather of both values, and what turns the second as a third result.

    ``wrong``: with the two results the other way around.
    """

    kind = "pair"
    counted = "all_gather"
    nothing_found = "no two gathers of this graph stand side by side"
    wrong = False

    def outcomes(self) -> Iterator[Edit | Refusal]:
        gathers = [row for row, target in enumerate(self.facts.targets) if target == GATHER]
        for pair in zip(gathers[::2], gathers[1::2], strict=False):
            try:
                yield self.shared(self.names_of(pair), self._groups(pair), lambda pair=pair: self._planned(*pair))
            except RefusedError as why:
                yield self.refusal(pair, why)

    def _groups(self, pair: Sequence[int]) -> tuple[str, ...]:
        return (self.facts.group_names[pair[0]],)

    def _planned(self, one: int, other: int) -> Edit:
        facts = self.facts
        (group,) = self._groups((one, other))
        grid = self.grid((group,))
        sources = [facts.arguments[row][0].row for row in (one, other)]
        waits = [facts.users[row][0] for row in (one, other)]
        (turned,) = (row for row in facts.users[waits[1]] if facts.targets[row] == "aten.permute.default")
        if any(user < other for user in facts.users[waits[0]]):
            raise RefusedError("read too early")
        (rows, columns), count = facts.shapes[sources[0]] or (0, 0), len(grid.ranks)
        new = NewNodes(self.setting)

        def add(target: str, value: Any, *arguments: Any, shape: tuple[int, ...], stride: Any = None) -> Node:
            return new.add(target, (value, *arguments), shape, stride or contiguous(shape), other)

        whole = (2 * rows * count, columns)
        both = add("aten.cat.default", tuple(map(Node, self.names_of(sources))), shape=(2 * rows, columns))
        gathered = add(GATHER, both, count, FusedGroup(grid.ranks, group), shape=whole)
        gathered = add(str(WAIT), gathered, shape=whole)
        halves = (count, 2, rows, columns)
        split = add("aten.view.default", gathered, halves, shape=halves)
        replaced: dict[int, str] = {}
        for place, wait in enumerate(reversed(waits) if self.wrong else waits):
            half = (count, 1, rows, columns)
            part = add("aten.slice.Tensor", split, 1, place, place + 1, shape=half, stride=contiguous(halves))
            part = add("aten.clone.default", part, "contiguous_format", shape=half)
            part = add("aten.view.default", part, (count * rows, columns), shape=(count * rows, columns))
            replaced[wait] = part.name
        last = add("aten.permute.default", part, (1, 0), shape=(columns, count * rows), stride=(1, columns))
        replaced[turned] = last.name
        dead = sorted((one, other, *waits, turned))
        proof = self.prove(sources, old_calls(facts, dead), new.calls(), replaced, (group,))
        new.take_names()
        return self.edit((one, other), self.names_of(sources), other, new.made, replaced, dead, proof)


@pytest.fixture
def registered() -> Iterator[None]:
    with mock.patch.dict(EDIT_KINDS, {"pair": PairedGathers}):
        yield


def asking(text: str = "") -> Policy:
    """A policy whose first statement pairs gathers."""
    policy = policylang.parse(f"optional collapse round_trips\n{text}")
    return evolve(policy, rewrites=(Paired(),))


def two_gathers(builder: Builder) -> Sequence[fx.Node]:
    one, other = (builder.call(operator, builder.shard) for operator in (aten.neg.default, aten.abs.default))
    gathered = [builder.gather(value, 0) for value in (one, other)]
    turned = builder.call(aten.permute.default, gathered[1], [1, 0])
    return (builder.call(aten.mul.Tensor, gathered[0], gathered[1]), builder.call(aten.mm.default, turned, gathered[0]))


def test_a_kind_with_two_sources_and_three_results_is_planned_proven_and_carried_out(registered: None) -> None:
    ranks = EveryRank((2, 2), two_gathers)
    before = ranks.run()
    plans = ranks.together(asking())
    assert len({made.digest for made in plans.values()}) == 1
    for made in plans.values():
        (edit,) = made.edits.done
        assert (len(edit.sources), len(edit.replaced), edit.fewer_collectives) == (2, 3, 1)
        assert (edit.proof.ranks, edit.proof.assumed, len(edit.proof.shards)) == (2, "", 2)
        assert made.diagnostics == ()
        (account,) = rewrite_reports(made.policy, made.edits)
        assert str(account) == "test.apl:1 pair all_gather: 1 rewritten, 1 collective fewer, each proven on 2 ranks"
    ranks.carry_out(plans)
    for gm in ranks.graphs.values():
        assert len(gm.graph.find_nodes(op="call_function", target=ALL_GATHER)) == 1
    for rank, values in ranks.run().items():
        assert all(map(torch.equal, values, before[rank]))


def test_a_wrong_pairing_is_caught_by_the_proof(registered: None) -> None:
    with mock.patch.object(PairedGathers, "wrong", True):
        (made, *_) = EveryRank((2, 2), two_gathers).together(asking()).values()
    (refused,) = made.edits.refused
    assert refused.reason == "the check failed"
    assert "would be another value on rank 0" in refused.detail


def test_what_a_registered_kind_looks_for_is_said_where_nothing_is_found(registered: None) -> None:
    made = plan(asking(), EveryRank((2, 2), lambda builder: [builder.scatter(builder.shard, 0)]).facts(0), HALF)
    (found,) = made.diagnostics
    assert found.details == ("all_gather: 0 nodes", "no two gathers of this graph stand side by side")


def test_the_audit_of_a_flat_graph_holds_for_it(registered: None) -> None:
    """Rules range over the nodes that came: the gather is recomputed, and everything is as planned."""
    with fake_ranks(2):
        group = dist.group.WORLD.group_name
        hand = Hand()
        x = hand.input("x")
        values = []
        with hand.mode:
            large = torch.empty(8, 4)
        for target in (aten.sin.default, aten.cos.default):
            gathered = hand.f(ALL_GATHER, hand.f(target, x), 2, group, val=large)
            values.append(hand.f(WAIT, gathered, val=large))
        with hand.mode:
            turned = hand.f(aten.permute.default, values[1], [1, 0], val=large.t())
        product = hand.f(aten.mm.default, turned, values[0])
        gradient = hand.b(aten.mm.default, product, product)
        gradients = [hand.b(aten.mm.default, values[0], gradient), hand.b(aten.mm.default, gradient, turned)]
        for node, transposed in zip(gradients, (False, True), strict=True):
            with hand.mode:
                node.meta["val"] = torch.empty(4, 8) if transposed else torch.empty(8, 4)
        gm = hand.done(product, *gradients)
        outcome = FlatPath().apply(gm, asking("recompute everything\nsave mm"))
        assert outcome.audit.agrees
        assert outcome.audit.offloaded == ()
        assert set(outcome.audit.recomputed) >= {"fused_all_gather_into_tensor", "fused_wait_tensor", "fused_cat"}
        (edit,) = outcome.plan.edits.done
        assert len(edit.replaced) == 3


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Two or three gathers over random dimensions of a random mesh, with layout operators around them."""
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3).filter(lambda each: prod(each) > 1))
    mesh = mesh_of(*shape)
    order = draw(st.permutations(DIMS[: len(shape)]))
    rank = draw(st.integers(0, prod(shape) - 1))
    line = Line(mesh, draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), rank=rank)
    for dim in order[: draw(st.integers(2, len(order)))]:
        for _ in range(draw(st.integers(0, 2))):
            _move(draw, line)
        ndim = line.node.meta["val"].ndim
        line.gather_along(dim, draw(st.integers(0, max(0, ndim - 1))))
    for _ in range(draw(st.integers(0, 2))):
        _move(draw, line)
    return line


def _move(draw: st.DrawFn, line: Line) -> None:
    value = line.node.meta["val"]
    kind = draw(st.sampled_from(("permute", "clone", "squeeze", "flatten", "cut", "turn")))
    if kind == "permute":
        line.permute(*draw(st.permutations(range(value.ndim))))
    elif kind == "turn":
        line.call(aten.transpose.int, 0, value.ndim - 1)
    elif kind == "clone":
        line.contiguous()
    elif kind == "squeeze":
        line.call(aten.unsqueeze.default, draw(st.integers(-1, value.ndim - 1)))
    elif kind == "flatten" and value.ndim > 1:
        line.contiguous().view(value.shape[0] * value.shape[1], *value.shape[2:])
    elif kind == "cut":
        length = value.shape[0]
        part = draw(st.sampled_from([each for each in range(1, length + 1) if length % each == 0]))
        line.contiguous().view(part, length // part, *value.shape[1:])


def on_all_ranks(
    facts: Facts, calls: Sequence[ChainCall], grid: Grid, names: Sequence[str], result: str
) -> dict[int, list]:
    """Without the proof's shrinking: whole shards, each element with a number of its own."""
    source = next(name for row, name in enumerate(facts.names) if facts.ops[row] == "placeholder")
    shape = facts.shapes[0]
    size = prod(shape)
    shards = {rank: Tensor.fresh(range(rank * size, rank * size + size), shape) for rank in grid.ranks}

    def groups(group: str | FusedGroup, rank: int) -> tuple[int, ...]:
        return group.ranks if isinstance(group, FusedGroup) else grid.group(names.index(group), rank)

    found = run_on_ranks(calls, {source: shards}, groups)[result]
    return {rank: [value.shape, value.elements()] for rank, value in found.items()}


@settings(max_examples=25)
@given(lines())
@needs_groups_in_any_order
def test_every_random_chain_is_one_gather_of_the_same_elements(line: Line) -> None:
    facts = line.facts(kind=GraphKind.FORWARD)
    found = planned(facts)
    count = sum(".all_gather" in target for target in facts.targets)
    allowed = ("would copy", "cuts across shards")  # a view may cut 2 gathered shards of 3 in 3
    assert [each.reason for each in found.refused if not any(phrase in each.reason for phrase in allowed)] == []
    assume(found.done and len(found.done[0].collectives) == count)
    (edit,) = found.done
    names = [facts.group_names[facts.index[gather]] for gather in edit.collectives]
    grid = grid_of(facts, names)
    assert isinstance(grid, Grid)
    until = [row for row in range(len(facts)) if facts.arguments[row] and row <= facts.index[edit.replaced[0][0]]]
    old = on_all_ranks(facts, old_calls(facts, until), grid, names, edit.replaced[0][0])
    before = [row for row in until if facts.names[row] not in edit.dead]
    calls = [*old_calls(facts, before), *map(new_call, edit.nodes)]
    assert on_all_ranks(facts, calls, grid, names, edit.replaced[0][1]) == old


@settings(max_examples=25)
@given(lines(), st.data())
def test_a_wrong_order_of_ranks_is_caught(line: Line, data: st.DataObject) -> None:
    """The proof does not take the algebra's word: swap two ranks of the group, and it says so."""
    facts = line.facts()
    done = planned(facts).done
    assume(done)
    edit: Edit = done[0]
    (group,) = edit.groups
    ranks = list(group.ranks)
    assume(len(ranks) > 1)
    one, other = data.draw(st.lists(st.integers(0, len(ranks) - 1), min_size=2, max_size=2, unique=True))
    ranks[one], ranks[other] = ranks[other], ranks[one]
    wrong = evolve(group, ranks=tuple(ranks))
    gather, *rest = edit.nodes
    nodes = [evolve(gather, arguments=(*gather.arguments[:2], wrong)), *rest]
    names = tuple(facts.group_names[facts.index[each]] for each in edit.collectives)
    grid = grid_of(facts, names)
    assert isinstance(grid, Grid)
    (source,) = edit.sources
    rows = sorted(facts.index[name] for name in edit.dead)
    shape = facts.shapes[facts.index[source]]
    assert shape is not None
    new = list(map(new_call, nodes))
    claimed = Equivalence(((source, shape),), old_calls(facts, rows), new, edit.replaced, grid, names)
    found = Prover().prove(claimed)
    assert isinstance(found, str)
    assert "would be another value on rank" in found


@settings(max_examples=25)
@given(lines())
def test_the_evaluator_does_what_torch_does(line: Line) -> None:
    """Layout operators are torch's own; of a gather, torch is handed the shards side by side."""
    gm = line.done()
    facts = collect(gm, kind=GraphKind.FORWARD, groups=line.groups)
    shape = facts.shapes[0]
    size = prod(shape)
    ranks = line.mesh.ranks
    groups = {rank: groups_of(line.mesh, rank) for rank in ranks}
    real = {"shard": {rank: torch.arange(rank * size, rank * size + size).reshape(shape) for rank in ranks}}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.name.startswith(("mm", "sin")) or node.name == "t":
            continue
        of = [read.name for read in node.all_input_nodes]
        for rank in ranks:
            if "all_gather" in node.name:
                members = groups[rank][node.args[2]].ranks
                value = torch.cat([real[of[0]][member] for member in members])
            elif "wait" in node.name:
                value = real[of[0]][rank]
            else:
                value = node.target(*torch.fx.map_arg(node.args, lambda n, r=rank: real[n.name][r]), **node.kwargs)
            real.setdefault(node.name, {})[rank] = value
    rows = [facts.index[name] for name in real if name != "shard"]
    shards = {rank: Tensor.fresh(value.flatten().tolist(), shape) for rank, value in real["shard"].items()}
    found = run_on_ranks(old_calls(facts, rows), {"shard": shards}, lambda group, rank: groups[rank][str(group)].ranks)
    for name, values in real.items():
        for rank, value in values.items():
            ours = found[name][rank]
            if isinstance(value, torch.Tensor):
                assert isinstance(ours, Tensor)
                assert (ours.shape, ours.elements()) == (tuple(value.shape), value.flatten().tolist())
                assert ours.contiguous == value.is_contiguous()


def test_values_of_unlike_shapes_are_made_small_each_for_itself() -> None:
    """A proof may start from several: how one is cut says nothing of another."""
    grid = Grid(shape=(2,), ranks=(0, 1), here=(0,), everyone=((0, 1),), dims=((),))
    sources = (("one", (6,)), ("other", (4,)))

    def calls(name: str) -> list[ChainCall]:
        return [
            ChainCall(f"{source}_{name}", "aten.view.default", (Node(source), (2, shape[0] // 2)), (2, shape[0] // 2))
            for source, shape in sources
        ]

    def proof(*pairs: tuple[str, str]) -> Proof | str:
        return Prover().prove(Equivalence(sources, calls("old"), calls("new"), pairs, grid, ()))

    assert isinstance(proof(("one_old", "one_new"), ("other_old", "other_new")), Proof)
    assert proof(("one_old", "other_new")) == "`one_old` would be another value on rank 0"
