"""The audit has to fail where halves, checkpoints or a flat graph are not what was planned: each test spoils one."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from attrs import evolve
from torch import Tensor, fx, nn

import policylang
from policylang.audit.graphs import audit, audit_copies, audit_eager, audit_flat, is_random_state, read_halves
from policylang.audit.outcome import Audit, Found
from policylang.backends import copies as copy_operators
from policylang.backends import copies as copy_ops
from policylang.backends import finalize
from policylang.backends import joint as module
from policylang.backends.eager import region
from policylang.backends.flat import FlatPath
from policylang.backends.joint import Partition
from policylang.errors import PolicyAuditError
from policylang.graph import marks
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.planning.liveness import SavedForBackward, backward_needs
from policylang.planning.plan import Plan
from policylang.planning.value_outcome import RECOMPUTED
from tests.backends.test_partition_cases import traced
from tests.support.hand import Hand, aten, by_hand, c10d
from tests.support.models import Function
from tests.support.run_partition import Traced
from tests.support.run_partition import traced as traced_model
from tests.support.sharded import fake_ranks

POLICY = "recompute everything\nsave first cos"


DRAWS_SWAPPED = "`rand_like` runs after `rand_like_1`, which is not the order of the plan"


@pytest.fixture
def graph() -> Traced:
    return traced(lambda x: x.sin().cos().sin().cos(), torch.randn(4, 4))


@pytest.fixture
def partition(graph: Traced) -> Partition:
    return graph.partition(POLICY)


def again(graph: Traced, partition: Partition) -> Audit:
    """Audit the two graphs as they are now."""
    gradients = finalize.gradient_rows(graph.gm.graph, partition.plan.facts, graph.num_fwd_outputs)
    plan = finalize.fit(partition.plan, gradients)
    needs = backward_needs(plan.facts, plan.decisions)
    forward, backward = partition.forward.graph, partition.backward.graph
    halves = read_halves(plan, needs, forward, backward, num_fwd_outputs=graph.num_fwd_outputs)
    return audit(plan, needs, halves)


def node(graph: fx.Graph, name: str) -> fx.Node:
    return next(each for each in graph.nodes if each.name == name)


def keep(graph: fx.Graph, *values: fx.Node) -> None:
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], *values),)


def test_agrees_with_a_partition_as_it_came_out(graph: Traced, partition: Partition) -> None:
    result = again(graph, partition)
    assert result.agrees
    assert result.saved == ("cos",)
    assert result.recomputed == ("sin", "sin_1")
    assert result.saved_bytes == 64
    assert result.recomputed_bytes == 128


def test_notices_a_value_that_is_kept_beyond_the_plan(graph: Traced, partition: Partition) -> None:
    keep(partition.forward.graph, node(partition.forward.graph, "sin"))
    first = next(iter(partition.backward.graph.nodes))
    recomputed = node(partition.backward.graph, "sin")
    with partition.backward.graph.inserting_before(first):
        arrived = partition.backward.graph.placeholder("arrived")
    recomputed.replace_all_uses_with(arrived)
    partition.backward.graph.erase_node(recomputed)
    arrived.name = "sin"
    found = again(graph, partition).differences
    assert [each.code for each in found] == ["APL401", "APL404"]
    assert "`sin` (aten.sin.default) was saved" in found[0].message
    assert "recompute (`recompute everything`, <policy>:1)" in found[0].message
    assert found[0].span.text == "recompute everything"
    assert "`sin` (aten.sin.default) was not recomputed" in found[1].message


def test_notices_a_value_that_is_computed_again_instead(graph: Traced, partition: Partition) -> None:
    forward, backward = partition.forward.graph, partition.backward.graph
    (output,) = forward.find_nodes(op="output")
    output.args = (tuple(value for value in output.args[0] if value.name != "cos"),)
    arrives = node(backward, "cos")
    sine = node(backward, "sin")
    arrives.append(sine)
    with backward.inserting_after(sine):
        recomputed = backward.call_function(torch.ops.aten.cos.default, (sine,))
    arrives.replace_all_uses_with(recomputed)
    backward.erase_node(arrives)
    recomputed.name = "cos"
    found = again(graph, partition).differences
    assert [each.code for each in found] == ["APL402", "APL403"]
    assert "planned: save (`save first cos`, <policy>:2)" in found[0].message


def test_notices_what_was_never_planned(graph: Traced, partition: Partition) -> None:
    forward = partition.forward.graph
    with forward.inserting_after(node(forward, "sin")):
        stranger = forward.call_function(torch.ops.aten.exp.default, (node(forward, "sin"),))
    keep(forward, stranger)
    (found,) = again(graph, partition).differences
    assert found.code == "APL405"
    assert "`exp_default`" in found.message


def test_notices_a_dropout_that_is_not_replayed() -> None:
    graph = traced(lambda x: torch.nn.functional.dropout(x.sin(), 0.5, training=True).sin(), torch.randn(8))
    partition = graph.partition("recompute everything")
    assert again(graph, partition).agrees
    backward = partition.backward.graph
    wrapper = next(each for each in backward.nodes if getattr(each.target, "__name__", "") == "run_with_rng_state")
    with backward.inserting_before(wrapper):
        other = backward.call_function(torch.ops.aten.native_dropout.default, wrapper.args[2:])
    other.name = "some_dropout"
    wrapper.replace_all_uses_with(other)
    backward.erase_node(wrapper)
    assert [each.code for each in again(graph, partition).differences] == ["APL404"]


def two_dropouts(x: torch.Tensor) -> torch.Tensor:
    first = torch.nn.functional.dropout(x.sin(), 0.5, training=True)
    return torch.nn.functional.dropout(first.cos(), 0.5, training=True).sin()


def one_input(x: torch.Tensor) -> torch.Tensor:
    """Alike in all they read: only who reads them tells them apart."""
    return torch.rand_like(x).mul(x).sin() + torch.rand_like(x).add(x).cos()


@pytest.mark.parametrize("forward", [two_dropouts, one_input])
def test_notices_that_two_draws_were_exchanged(forward: Callable[..., torch.Tensor]) -> None:
    graph = traced(forward, torch.randn(8))
    partition = graph.partition("recompute everything")
    assert partition.audit.random_states == 2
    assert again(graph, partition).agrees
    nodes = partition.backward.graph.nodes
    wrappers = [each for each in nodes if getattr(each.target, "__name__", "") == "run_with_rng_state"]
    states = [wrapper.args[0] for wrapper in wrappers]
    for wrapper, state in zip(wrappers, reversed(states), strict=True):
        wrapper.update_arg(0, state)
    assert [each.code for each in again(graph, partition).differences] == ["APL404", "APL404"]


@pytest.mark.parametrize("forward", [two_dropouts, one_input])
def test_notices_that_two_states_were_handed_over_in_the_wrong_order(forward: Callable[..., torch.Tensor]) -> None:
    graph = traced(forward, torch.randn(8))
    partition = graph.partition("recompute everything")
    (output,) = partition.forward.graph.find_nodes(op="output")
    values = list(output.args[0])
    places = [place for place, value in enumerate(values) if is_random_state(value)]
    values[places[0]], values[places[1]] = values[places[1]], values[places[0]]
    output.args = (tuple(values),)
    assert [each.code for each in again(graph, partition).differences] == ["APL404", "APL404"]


def test_a_difference_stops_the_compilation(graph: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = module.split

    def dishonest(joint, plan, needs, **options):  # type: ignore[no-untyped-def]
        return honest(joint, plan, evolve(needs, rows={RECOMPUTED: needs.recomputed + needs.saved}), **options)

    monkeypatch.setattr(module, "split", dishonest)
    with pytest.raises(PolicyAuditError) as caught:
        graph.partition(POLICY)
    assert {each.code for each in caught.value.diagnostics} == {"APL402", "APL403"}


def test_is_plain_data(partition: Partition) -> None:
    assert pickle.loads(pickle.dumps(partition.audit)) == partition.audit


def said(graph: Traced, partition: Partition) -> list[tuple[str, str]]:
    return [(each.code, each.message) for each in again(graph, partition).differences]


def test_notices_a_random_operator_that_stands_in_the_backward_as_it_is() -> None:
    graph = traced(lambda x: torch.rand_like(x).mul(x).sin(), torch.randn(8))
    partition = graph.partition("recompute everything")
    draw_in_the_backward(partition.backward.graph)
    (found,) = again(graph, partition).differences
    assert found.code == "APL407"
    assert found.message.startswith("`rand_like` (aten.rand_like.default) draws new random numbers; planned: rec")


def test_a_draw_that_the_forward_does_without_is_made_in_the_backward_alone() -> None:
    """torch wraps no random operator that its dead-code elimination took out of the forward."""
    graph = traced(lambda x: torch.rand_like(x).mul(x).sin(), torch.randn(8))
    partition = graph.partition("recompute everything")
    draw_in_the_backward(partition.backward.graph)
    forward = partition.forward.graph
    keeper = next(each for each in forward.nodes if "run_and_save" in str(each.target))
    state, drawn = sorted(keeper.users, key=is_random_state, reverse=True)
    (output,) = forward.find_nodes(op="output")
    output.args = (tuple(value for value in output.args[0] if value is not state),)
    drawn.replace_all_uses_with(forward.find_nodes(op="placeholder")[0])
    for each in (state, drawn, keeper):
        forward.erase_node(each)
    assert again(graph, partition).agrees


def draw_in_the_backward(backward: fx.Graph) -> None:
    wrapper = next(each for each in backward.nodes if getattr(each.target, "__name__", "") == "run_with_rng_state")
    (called, *arguments) = wrapper.args[1:]
    with backward.inserting_before(wrapper):
        anew = backward.call_function(called, tuple(arguments), wrapper.kwargs)
    wrapper.replace_all_uses_with(anew)
    backward.erase_node(wrapper)
    anew.name = "rand_like"


@pytest.mark.parametrize(
    ("text", "drawn"), [("undecided -> save", "rand_like"), ("recompute everything", "run_and_save")]
)
def test_notices_that_two_draws_changed_places(text: str, drawn: str) -> None:
    """The states of those that are replayed change with them, so that the gradients are right, and every number is
    another than without a policy."""
    graph = traced(one_input, torch.randn(8))
    partition = graph.partition(text)
    first, second = [each for each in partition.forward.graph.nodes if drawn in str(each.target)]
    first.prepend(second)
    assert said(graph, partition) == [("APL410", DRAWS_SWAPPED)]


def test_notices_what_runs_before_its_argument(graph: Traced, partition: Partition) -> None:
    forward = partition.forward.graph
    node(forward, "sin").prepend(node(forward, "cos"))
    found = "`cos` runs before `sin`, which it reads, which is not the order of the plan"
    assert said(graph, partition) == [("APL410", found)]


@pytest.fixture
def gathered() -> Iterator[tuple[Traced, Partition]]:
    with fake_ranks(2):
        gather = functional.all_gather_tensor_autograd
        graph = traced(lambda x: gather(x.sin(), 0, dist.group.WORLD).cos(), torch.randn(8))
        yield graph, graph.partition("undecided -> save")


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "once_more"])
def test_notices_a_collective_that_runs_twice(gathered: tuple[Traced, Partition], name: str) -> None:
    graph, partition = gathered
    assert again(graph, partition).agrees
    backward = partition.backward.graph
    gather = node(partition.forward.graph, "all_gather_into_tensor")
    arrives = backward.find_nodes(op="placeholder")
    first = next(each for each in backward.nodes if each.op == "call_function")
    with backward.inserting_before(first):
        more = backward.call_function(gather.target, (arrives[0], *gather.args[1:]))
    more.name = name
    (found,) = said(graph, partition)
    if name == "once_more":
        said_of_it = "the graph has a node `once_more`, which the graph that was planned does not have"
        assert found == ("APL405", said_of_it)
    else:
        assert found[0] == "APL403"
        assert found[1].startswith("`all_gather_into_tensor` (_c10d_functional.all_gather_into_tensor.default)")
        assert "was recomputed; planned:" in found[1]


Crossings = dict[int, tuple[int, int]]


def offloaded(text: str = "undecided -> save\noffload gelu") -> tuple[Partition, Crossings]:
    """A partition, and where the values that it offloads cross."""
    split = traced_model("mlp").partition(text)
    facts = split.plan.facts
    rows = [facts.index[name] for name in split.audit.offloaded]
    sent = [node.name for node in split.forward.graph.output_node().args[0]]
    taken = [node.name for node in split.backward.graph.find_nodes(op="placeholder")]
    names = [f"{facts.names[row]}_host" for row in rows]
    return split, {row: (sent.index(name), taken.index(name)) for row, name in zip(rows, names, strict=True)}


def first_of(crossings: Crossings) -> tuple[int, int]:
    return next(iter(crossings.values()))


def differences(split: Partition, crossings: Crossings) -> tuple[Diagnostic, ...]:
    found, needs = Found(places=crossings), SavedForBackward.of(offloaded=tuple(crossings))
    return audit_copies(split.plan, needs, found, split.forward.graph, split.backward.graph)


def found_by_audit(split: Partition, crossings: Crossings) -> set[str]:
    return {each.code for each in differences(split, crossings)}


def copies(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def test_the_audit_reads_both_halves() -> None:
    assert found_by_audit(*offloaded()) == set()


def awaits_another(split: Partition, half: str) -> None:
    graph = getattr(split, half).graph
    wait = copies(getattr(split, half), copy_operators.WAIT_OP)[0]
    wait.args = (wait.args[0], graph.find_nodes(op="placeholder")[0], wait.args[2])


def read_where_it_lies(split: Partition, half: str) -> None:
    wait = copies(getattr(split, half), copy_operators.WAIT_OP)[0]
    next(iter(wait.users)).replace_input_with(wait, wait.args[1])


def not_awaited_at_all(split: Partition, half: str) -> None:
    wait = copies(getattr(split, half), copy_operators.WAIT_OP)[0]
    wait.replace_all_uses_with(wait.args[0])
    getattr(split, half).graph.erase_node(wait)


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("spoil", [awaits_another, not_awaited_at_all, read_where_it_lies])
def test_the_audit_sees_a_copy_that_is_not_awaited(spoil: Callable[[Partition, str], None], half: str) -> None:
    split, crossing = offloaded()
    spoil(split, half)
    assert "APL413" in found_by_audit(split, crossing)


def test_the_audit_sees_what_was_moved_and_is_kept() -> None:
    split, crossing = offloaded()
    (output,) = split.forward.graph.find_nodes(op="output")
    host = output.args[0][first_of(crossing)[0]]
    output.args = ((*output.args[0], host.args[1]),)
    assert found_by_audit(split, crossing) == {"APL412"}


def test_the_audit_sees_what_was_not_moved_and_what_nobody_planned() -> None:
    split, crossing = offloaded()
    (output,) = split.forward.graph.find_nodes(op="output")
    returned = list(output.args[0])
    returned[first_of(crossing)[0]] = returned[first_of(crossing)[0]].args[1]
    output.args = (tuple(returned),)
    assert {"APL411", "APL412"} <= found_by_audit(split, crossing)
    split, crossing = offloaded()
    assert found_by_audit(split, dict(list(crossing.items())[1:])) == {"APL411"}


def test_the_audit_sees_a_copy_that_starts_before_its_value_exists() -> None:
    split, crossing = offloaded()
    start = copies(split.forward, copy_operators.OFFLOAD_OP)[0]
    start.args[0].prepend(start)
    (found,) = differences(split, crossing)
    assert found.code == "APL410"
    said = f"`{start.name}` runs before `{start.args[0].name}`, which it reads, which is not the order of the plan"
    assert found.message == said


EAGER_POLICY = "recompute everything\nsave sin"


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, ...]]:
    """What the audit of one call was given."""
    seen: list[tuple[Any, ...]] = []

    def noted(plan: Any, needs: Any, held: Mapping[int, Sequence[Tensor]], outside: Sequence[Tensor]) -> Audit:
        seen.append((plan, needs, dict(held), list(outside)))
        return audit_eager(plan, needs, held, outside)

    monkeypatch.setattr(region, "audit_eager", noted)
    policy = policylang.parse("blocks *\n" + EAGER_POLICY)
    model = policylang.checkpoint_model(
        nn.Sequential(Function(lambda x: x.sin().cos().exp().tanh())), policy, strict=True
    )
    model(torch.randn(4, 4, requires_grad=True)).sum().backward()
    yield from seen


def named(plan: Any, name: str) -> int:
    return int(plan.facts.index[name])


def test_agrees_with_what_a_block_holds(audited: tuple[Any, ...]) -> None:
    found = audit_eager(*audited)
    assert found.agrees
    assert found.saved == ("sin",)
    assert found.saved_bytes == 64
    assert found.recomputed == ("cos", "exp", "tanh")


def test_names_a_saved_value_that_is_not_held(audited: tuple[Any, ...]) -> None:
    plan, needs, held, outside = audited
    del held[named(plan, "sin")]
    found = audit_eager(plan, needs, held, outside).differences
    assert [(each.code, each.message, each.help) for each in found] == [
        ("APL402", "`sin` (aten.sin.default) is not held, and the plan saves it", "this is a bug in policylang"),
        ("APL409", "the checkpoint holds 0 bytes, and the plan has 64", found[1].help),
    ]
    assert found[0].span is None
    assert found[0].severity is Severity.ERROR
    assert found[1].severity is Severity.WARNING


def test_names_a_recomputed_value_that_is_held(audited: tuple[Any, ...]) -> None:
    plan, needs, held, outside = audited
    held[named(plan, "cos")] = [torch.zeros(4, 4)]
    found = audit_eager(plan, needs, held, outside).differences
    assert [(each.code, each.message) for each in found] == [
        ("APL401", "`cos` (aten.cos.default) is held, and the plan does not save it"),
        ("APL409", "the checkpoint holds 128 bytes, and the plan has 64"),
    ]


def test_one_memory_counts_once_and_what_is_there_anyway_not_at_all(audited: tuple[Any, ...]) -> None:
    plan, needs, held, outside = audited
    row = named(plan, "sin")
    (value,) = held[row]
    assert audit_eager(plan, needs, {**held, row: [value, value.t()]}, outside).agrees
    found = audit_eager(plan, needs, held, [*outside, value.view(-1)])
    assert [each.code for each in found.differences] == ["APL409"]


Spoil = Callable[[fx.Graph], None]


def chain() -> fx.GraphModule:
    """A gather, two draws and two writes to a buffer, all of which the backward goes back to."""
    hand = Hand()
    x, buffer = hand.input("x"), hand.input("buffer")
    wait = hand.f(c10d.wait_tensor.default, hand.f(c10d.all_gather_into_tensor.default, x, 1, "0"))
    first = hand.f(aten.rand_like.default, wait)
    second = hand.f(aten.rand_like.default, wait)
    hand.f(aten.add_.Tensor, buffer, 1)
    hand.f(aten.mul_.Tensor, buffer, 2)
    sine = hand.f(aten.sin.default, wait)
    cosine = hand.f(aten.cos.default, sine)
    sum_ = hand.f(aten.add.Tensor, first, second)
    loss = hand.f(aten.mul.Tensor, cosine, sum_)
    back = hand.b(aten.mul.Tensor, loss, cosine)
    for value in (sine, second, first, wait):
        back = hand.b(aten.mul.Tensor, back, value)
    return hand.done(loss, back)


RECOMPUTE = "undecided -> save; recompute sin, rand_like, all_gather"
OFFLOAD = "undecided -> save; recompute rand_like; offload sin, cos"


def spoiled(text: str, spoil: Spoil) -> list[Diagnostic]:
    plan, graph = applied(text)
    assert audit_flat(plan, graph).agrees
    spoil(graph)
    return list(audit_flat(plan, graph).differences)


def applied(text: str) -> tuple[Plan, fx.Graph]:
    gm = chain()
    return FlatPath().apply(gm, policylang.parse(text)).plan, gm.graph


def at(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def told(found: list[Diagnostic]) -> list[tuple[str, str]]:
    """The codes, and what is said up to where the nodes are told apart."""
    return [(each.code, each.message) for each in found]


def saved_after_all(graph: fx.Graph) -> None:
    again = at(graph, "sin_default_recomputed")
    again.replace_all_uses_with(at(graph, "sin_default"))
    graph.erase_node(again)


def recomputed_after_all(graph: fx.Graph) -> None:
    cosine = at(graph, "cos_default")
    readers = [user for user in cosine.users if user.meta.get("custom", {}).get("phase") == "backward"]
    with graph.inserting_before(readers[0]):
        again = graph.call_function(cosine.target, cosine.args)
    again.meta = {**cosine.meta, "custom": {"phase": "backward", marks.RECOMPUTED: cosine.name}}
    for reader in readers:
        reader.replace_input_with(cosine, again)


def recomputed_without_a_mark(graph: fx.Graph) -> None:
    recomputed_after_all(graph)
    next(node for node in graph.nodes if marks.custom(node.meta).get(marks.RECOMPUTED) == "cos_default").meta = {}


def gathered_twice(graph: fx.Graph) -> None:
    again = at(graph, "all_gather_into_tensor_default_recomputed")
    with graph.inserting_after(again):
        more = graph.node_copy(again)
    assert more.meta["custom"][marks.RECOMPUTED] == "all_gather_into_tensor_default"


def draws_exchanged(graph: fx.Graph) -> None:
    one, other = at(graph, "rand_like_default_recomputed"), at(graph, "rand_like_default_1_recomputed")
    states = one.args[0], other.args[0]
    one.update_arg(0, states[1])
    other.update_arg(0, states[0])


def drawn_anew(graph: fx.Graph) -> None:
    again = at(graph, "rand_like_default_recomputed")
    again.target, again.args = aten.rand_like.default, again.args[2:]
    again.kwargs = {}


def writes_swapped(graph: fx.Graph) -> None:
    at(graph, "add__tensor").prepend(at(graph, "mul__tensor"))


def draws_swapped(graph: fx.Graph) -> None:
    at(graph, "rand_like_default").prepend(at(graph, "rand_like_default_1"))


def read_before_it_is_made(graph: fx.Graph) -> None:
    at(graph, "sin_default").prepend(at(graph, "cos_default"))


NOT_PLANNED = "which is not what was planned"
NOT_THE_ORDER = "which is not the order of the plan"
COSINE_UNSAVED = ("APL402", f"`cos_default` (aten.cos.default) was not saved, {NOT_PLANNED}")
SINE_SAVED = ("APL401", f"`sin_default` (aten.sin.default) was saved, {NOT_PLANNED}")
COSINE_AGAIN = ("APL403", f"`cos_default` (aten.cos.default) was recomputed, {NOT_PLANNED}")
STRANGER = ("APL405", "the graph has a node `cos_default_1`, which the graph that was planned does not have")
GATHER = "`all_gather_into_tensor_default` (_c10d_functional.all_gather_into_tensor.default)"
TWICE = ("APL403", f"{GATHER} was recomputed more than once for the same part of the backward, {NOT_PLANNED}")
DRAWN, DRAWN_1 = (
    ("APL407", f"`{name}` (aten.rand_like.default) draws new random numbers, {NOT_PLANNED}")
    for name in ("rand_like_default", "rand_like_default_1")
)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (saved_after_all, [SINE_SAVED]),
        (recomputed_after_all, [COSINE_UNSAVED, SINE_SAVED, COSINE_AGAIN]),
        (recomputed_without_a_mark, [COSINE_UNSAVED, STRANGER]),
        (gathered_twice, [TWICE]),
        (draws_exchanged, [DRAWN, DRAWN_1]),
        (drawn_anew, [DRAWN]),
        (writes_swapped, [("APL410", f"`add__tensor` runs after `mul__tensor`, {NOT_THE_ORDER}")]),
        (draws_swapped, [("APL410", f"`rand_like_default` runs after `rand_like_default_1`, {NOT_THE_ORDER}")]),
        (
            read_before_it_is_made,
            [("APL410", f"`cos_default` runs before `sin_default`, which it reads, {NOT_THE_ORDER}")],
        ),
    ],
)
def test_names_what_was_spoiled(spoil: Spoil, expected: list[tuple[str, str]]) -> None:
    assert sorted(told(spoiled(RECOMPUTE, spoil))) == sorted(expected)


def waits(graph: fx.Graph, ending: str) -> list[fx.Node]:
    found = graph.find_nodes(op="call_function", target=copy_ops.WAIT_OP)
    return [node for node in found if node.name.endswith(ending)]


def awaits_the_first(graph: fx.Graph) -> None:
    one, other = waits(graph, "_reloaded")
    one.args, other.args = (other.args[0], *one.args[1:]), (one.args[0], *other.args[1:])


def not_awaited(graph: fx.Graph) -> None:
    wait = waits(graph, "_host")[0]
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)


def read_on_the_host(graph: fx.Graph) -> None:
    wait = waits(graph, "_reloaded")[0]
    next(iter(wait.users)).replace_input_with(wait, wait.args[1])


def read_on_the_device(graph: fx.Graph) -> None:
    wait = waits(graph, "_reloaded")[0]
    next(iter(wait.users)).replace_input_with(wait, at(graph, wait.name.removesuffix("_reloaded")))


def started_too_early(graph: fx.Graph) -> None:
    at(graph, "sin_default").prepend(at(graph, "sin_default_offload"))


def sent_late(graph: fx.Graph) -> None:
    at(graph, "sin_default_reload").prepend(at(graph, "sin_default_host"))


def one_more(graph: fx.Graph) -> None:
    value = at(graph, "add_tensor")
    reader = next(node for node in graph.nodes if node.name == "mul_tensor_1")
    with graph.inserting_before(reader):
        out = graph.call_function(copy_ops.OFFLOAD_OP, (value,))
        host = graph.call_function(copy_ops.WAIT_OP, (out, value, copy_ops.HOST))
        back = graph.call_function(copy_ops.RELOAD_OP, (host, torch.device("cpu")))
        here = graph.call_function(copy_ops.WAIT_OP, (back, host, torch.device("cpu")))
    reader.update_arg(1, here)


RACE = "is part of a copy to the host or back that is not awaited as it has to be"
TOO_EARLY = f"`sin_default_offload` runs before `sin_default`, which it reads, {NOT_THE_ORDER}"
HELD = f"`sin_default` (aten.sin.default) was offloaded and is held on the device all the same, {NOT_PLANNED}"


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (awaits_the_first, ("APL413", f"`sin_default_reloaded` {RACE}")),
        (not_awaited, ("APL413", f"`sin_default_offload` {RACE}")),
        (read_on_the_host, ("APL413", f"`mul_tensor_1` {RACE}")),
        (read_on_the_device, ("APL401", f"`cos_default` (aten.cos.default) was saved, {NOT_PLANNED}")),
        (started_too_early, ("APL410", TOO_EARLY)),
        (one_more, ("APL411", f"`add_tensor` was offloaded, {NOT_PLANNED}")),
        (sent_late, ("APL412", HELD)),
    ],
)
def test_names_the_copy_that_was_spoiled(spoil: Spoil, expected: tuple[str, str]) -> None:
    assert expected in told(spoiled(OFFLOAD, spoil))


def test_a_copy_that_starts_before_its_memory_is_written_is_named() -> None:
    gm = by_hand(
        "x; kept = sin(x); written = add_(kept, 1); loss = exp(written); back := mul(loss, written); -> loss, back"
    )
    plan = FlatPath().apply(gm, policylang.parse("undecided -> save; optional offload everything")).plan
    assert audit_flat(plan, gm.graph).agrees
    (start,) = gm.graph.find_nodes(op="call_function", target=copy_ops.OFFLOAD_OP)
    at(gm.graph, "add__tensor").prepend(start)
    (wait,) = waits(gm.graph, "_host")
    start.update_arg(0, at(gm.graph, "sin_default"))
    wait.update_arg(1, at(gm.graph, "sin_default"))
    said_of_it = "runs before `add__tensor`, which writes to what it copies, which is not the order of the plan"
    found = told(list(audit_flat(plan, gm.graph).differences))
    assert ("APL410", f"`add__tensor_offload` {said_of_it}") in found
