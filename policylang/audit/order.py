"""Audits the order of a changed graph: when collectives start and are awaited, and how they were bucketed.

The operators of the graph, in node order, are compared with the steps of the :class:`OrderPlan`, one by one. If they
differ, the audit names the fewest nodes that have to be moved to make both alike; computation weighs more than
communication, so that a collective that crossed one product counts as moved, not the product. Then the edges at every
collective, wait or bucket node are compared; random draws, writes and effects have to keep their order in any plan.
O(nodes + edges), and O(nodes log nodes) where the order differs.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, zip_longest
from typing import TypeVar

from attrs import define, evolve, field, frozen
from torch import fx

from policylang.audit.outcome import OUT_OF_ORDER
from policylang.audit.report import CodeOrderReport
from policylang.graph import marks
from policylang.graph.facts import MOVING, NARROWING, STARTS, Facts, Flag, StepKind
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.plain_data import OWN
from policylang.language.shown import counted
from policylang.operators.calls import describe, effects, function, group_name, written_statistics
from policylang.operators.names import GETITEM, HOST_COPY_WAIT, OFFLOAD, RUNS_WITH_RANDOM_STATE, SUM, WAITS, Category
from policylang.operators.work import is_communication, is_product, is_wait, plain_name
from policylang.planning.graph_edit import Edit
from policylang.planning.plan import OrderPlan

Item = TypeVar("Item", bound=Hashable)


@frozen
class Displaced:
    """A step in another place. ``behind`` and ``planned``: the numbers of the steps before it, among those that keep
    their places, in the order found and in the planned order; -1 for the beginning."""

    at: int
    behind: int
    planned: int


def displaced(found: Sequence[Item], planned: Sequence[Item], weight: Callable[[Item], int]) -> list[Displaced]:
    """The steps of ``found`` that are not where ``planned`` has them, of the least weight in all; in the order of
    ``found``. Both have the same steps, each once. O(n log n), and O(n) where nothing differs. What stays is a heaviest
    increasing subsequence (Fredman, 1975, of unit weights), found with a Fenwick tree of prefix maxima."""
    if list(found) == list(planned):
        return []
    position = {step: at for at, step in enumerate(planned)}
    places = [position[step] for step in found]
    stays = _heaviest_increasing(places, [weight(step) for step in found])
    kept = [at in stays for at in range(len(found))]
    before_there = _before([at if kept[at] else -1 for at in range(len(found))])
    number = {place: at for at, place in enumerate(places)}
    before_planned = _before([number[place] if kept[number[place]] else -1 for place in range(len(planned))])
    return [Displaced(at, before_there[at], before_planned[place]) for at, place in enumerate(places) if not kept[at]]


def _before(kept: Sequence[int]) -> list[int]:
    """For each place the last number that stays before it."""
    return [-1, *accumulate(kept, max)][:-1]


def _heaviest_increasing(places: Sequence[int], weights: Sequence[int]) -> frozenset[int]:
    """The numbers of the elements of a heaviest subsequence whose places rise."""
    tree: list[tuple[int, int]] = [(0, -1)] * (len(places) + 1)
    previous: list[int] = []
    top = (0, -1)
    for number, place in enumerate(places):
        best, at = (0, -1), place  # of the places before
        while at > 0:
            best = max(best, tree[at])
            at &= at - 1
        previous.append(best[1])
        total = (best[0] + weights[number], number)
        top = max(top, total)
        at = place + 1
        while at < len(tree):
            tree[at] = max(tree[at], total)
            at += at & -at
    stays, number = set(), top[1]
    while number >= 0:
        stays.add(number)
        number = previous[number]
    return frozenset(stays)


Late = tuple[str, str]
"""A node, and one that runs before it and has to run after it."""


def turned_around(facts: Facts, nodes: Sequence[fx.Node]) -> Iterator[Late]:
    """Pairs of nodes that the facts have in one order and a graph in the other, though both draw, both act, or one
    writes memory that the other reads or writes. ``nodes``: those of the facts, in the order of the graph. Linear."""
    rows = [facts.index[node.name] for node in nodes]
    flags = facts.flags
    draws = [
        row
        for row, node in zip(rows, nodes, strict=True)
        if flags[row] & Flag.RANDOM and facts.targets[row] != GETITEM and function(node) not in RUNS_WITH_RANDOM_STATE
    ]
    for like in (draws, [row for row in rows if flags[row] & Flag.EFFECTFUL]):
        for row, highest in zip(like, accumulate(like, max), strict=True):
            if row < highest:
                yield facts.names[row], facts.names[highest]
    yield from _of_memory(facts, dict(zip(rows, nodes, strict=True)))


def _of_memory(facts: Facts, nodes: Mapping[int, fx.Node]) -> Iterator[Late]:
    """In order is a node before which as many writes to its memory ran as planned. Views may run at any time."""
    roots: dict[fx.Node, fx.Node] = {}  # node to the node whose memory it views
    for _, node in sorted(nodes.items()):
        if aliased := effects(node)[0]:
            roots[node] = roots.get(aliased[0], aliased[0])
    written = {row: found for row, node in nodes.items() if (found := _memory(roots, _written(node)))}
    contested = {root for found in written.values() for root in found}
    if not contested:
        return
    touched = {
        row: [root for root in _memory(roots, node.all_input_nodes) if root in contested]
        for row, node in nodes.items()
        if row in written or not (facts.flags[row] & Flag.VIEW or facts.targets[row] == GETITEM)
    }
    writers: dict[fx.Node, list[int]] = {}
    for row in sorted(written):
        for root in written[row]:
            writers.setdefault(root, []).append(row)
    as_traced = _turns(sorted(touched), touched, written)
    for (row, root), turn in _turns(touched, touched, written).items():
        planned = as_traced[row, root]
        other = writers[root][min(turn, planned)] if turn != planned else row
        if row != other:
            behind, ahead = (row, other) if turn > planned else (other, row)
            yield facts.names[behind], facts.names[ahead]


def _memory(roots: Mapping[fx.Node, fx.Node], nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The memory that some nodes use, each once."""
    return list(dict.fromkeys(roots.get(node, node) for node in nodes))


def _written(node: fx.Node) -> list[fx.Node]:
    _, targets = effects(node)
    statistics = (node.args[at] for at in written_statistics(node))
    return [*targets, *(each for each in statistics if isinstance(each, fx.Node))]


def _turns(
    order: Iterable[int], touched: Mapping[int, Iterable[fx.Node]], written: Mapping[int, Iterable[fx.Node]]
) -> dict[tuple[int, fx.Node], int]:
    """By node and memory, the number of writes to it before the node."""
    so_far: dict[fx.Node, int] = {}
    found = {}
    for row in order:
        for root in touched[row]:
            found[row, root] = so_far.get(root, 0)
        for root in written.get(row, ()):
            so_far[root] = so_far.get(root, 0) + 1
    return found


NOT_THE_COLLECTIVES = "APL417"
DISPLACED = "APL418"
_HELP = "another pass changed the graph after the policy was applied, or this is a bug in policylang"
_MOST = 8
_COMPUTATION, _COMMUNICATION = 3, 2
"""The cost of having moved one."""
_RUN, _COPIES = StepKind.FIRST_RUN, tuple(kind for kind in StepKind if kind > StepKind.SECOND_RUN)
_SAID = {
    StepKind.COPY_TO_HOST: "the copy of `{}` to the host starts",
    StepKind.WAIT_TO_HOST: "the copy of `{}` to the host is awaited",
    StepKind.COPY_FROM_HOST: "the copy of `{}` from the host starts",
    StepKind.WAIT_FROM_HOST: "the copy of `{}` from the host is awaited",
    StepKind.SCALE: "the scales of `{}` are worked out",
    StepKind.NARROW: "`{}` is narrowed",
    StepKind.WIDEN: "`{}` is widened",
}

GraphStep = tuple[StepKind, str, int]
"""Kind of step, the node that runs or whose value is copied, and which of several copies of it."""


def audit_order(order: OrderPlan, graph: fx.Graph) -> tuple[Diagnostic, ...]:
    """The differences from the planned starts, waits and joins of collectives. They are returned, not raised. Copies to
    the host and back are compared where the plan's schedule has any. Nodes that torch adds to those of the plan are
    ignored, except for collectives and waits."""
    reader = _OrderReader(graph, order, order.facts)
    return (*reader.other_collectives(), *reader.other_edges(), *reader.other_order(), *reader.turned_around())


@define(eq=False)
class _OrderReader:
    graph: fx.Graph
    order: OrderPlan
    facts: Facts
    bucketed: Mapping[str, Edit] = field(init=False)
    """The nodes of buckets in the graph, each with its edit."""

    def __attrs_post_init__(self) -> None:
        self.bucketed = {new.name: edit for edit in self.order.edits.done for new in edit.nodes}

    # --- which collectives there are ----------------------------------------------------------------------------------

    def other_collectives(self) -> Iterator[Diagnostic]:
        """Unplanned, missing and changed collectives, and buckets that were not made."""
        facts, there = self.facts, set[str]()
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            there.add(node.name)
            called = describe(node.target)
            row = facts.index.get(node.name)
            if row is None:
                if called.flags & Category.COLLECTIVE or called.name in WAITS:
                    yield _differs(NOT_THE_COLLECTIVES, f"`{node.name}` ({called.name}) is no collective of the plan")
            elif self._is_subject(row) and called.name != facts.targets[row]:
                what = f"`{node.name}` calls {called.name}, where the plan has {facts.targets[row]}"
                yield _differs(NOT_THE_COLLECTIVES, what)
        unmade: dict[int, list[str]] = {}
        for row, op in enumerate(facts.ops):
            name = facts.names[row]
            if op != "call_function" or name in there or facts.flags[row] & Flag.RANDOM:
                continue
            if name in self.bucketed:
                unmade.setdefault(id(self.bucketed[name]), []).append(name)
            elif self._is_subject(row):
                what = f"the plan has `{name}` ({facts.targets[row]}), and the graph does not"
                yield _differs(NOT_THE_COLLECTIVES, what)
        for edit in self.order.edits.done:
            if id(edit) in unmade:
                lacks = f"the graph lacks {_list(unmade[id(edit)])}"
                what = f"the bucket of {_list(edit.collectives)} is not there: {lacks}"
                yield _differs(NOT_THE_COLLECTIVES, what)

    def _communicates(self, row: int) -> bool:
        return bool(self.facts.flags[row] & Flag.COLLECTIVE) or self.facts.targets[row] in WAITS

    def _is_subject(self, row: int) -> bool:
        return self._communicates(row) or self.facts.names[row] in self.bucketed

    # --- what they read, and who reads them ---------------------------------------------------------------------------

    def other_edges(self) -> Iterator[Diagnostic]:
        facts = self.facts
        calls = (row for row, op in enumerate(facts.ops) if op == "call_function")
        subjects = {facts.names[row] for row in calls if self._is_subject(row)}
        for node in self.graph.nodes:
            row = facts.index.get(node.name)
            if row is None or node.op == "placeholder" or facts.flags[row] & Flag.RANDOM:
                continue
            found = {self._value(read) for read in node.all_input_nodes if read.op != "get_attr"}
            planned = {facts.names[read] for read in facts.inputs[row] if facts.ops[read] != "get_attr"}
            if node.name not in subjects:
                found &= subjects
                planned &= subjects
            if found != planned:
                more, fewer = (_list(sorted(names)) or "nothing" for names in (found - planned, planned - found))
                yield _differs(NOT_THE_COLLECTIVES, f"`{node.name}` reads {more}, where the plan has it read {fewer}")

    def _value(self, node: fx.Node) -> str:
        """The plan's name for a node's result: a copy from the host is the value that was sent, as far as edges go."""
        value = node
        while value.op == "call_function" and (called := describe(value.target).name) in MOVING:
            source = value.args[1 if called == HOST_COPY_WAIT else 0]
            if not isinstance(source, fx.Node) or source.op == "placeholder":
                return str(marks.custom(node.meta).get(marks.MOVED, value.name))
            value = source
        return str(value.name)

    # --- the order ----------------------------------------------------------------------------------------------------

    def other_order(self) -> Iterator[Diagnostic]:
        """Steps in other places: the fewest that have to move to make both orders alike."""
        names = self.facts.names
        steps = ((StepKind(code), names[row]) for code, row, _ in self.order.schedule)
        there = _counted(self._steps_there())
        planned = _counted((kind if kind in _COPIES else _RUN, name) for kind, name in steps)
        both = frozenset(there) & frozenset(planned)
        found = [step for step in there if step in both]

        def weight(step: GraphStep) -> int:
            kind, name, _ = step
            light = kind in _COPIES or self._communicates(self.facts.index[name])
            return _COMMUNICATION if light else _COMPUTATION

        elsewhere = displaced(found, [step for step in planned if step in both], weight)
        for each in elsewhere[:_MOST]:
            stands, was_to = (_place(found, at) for at in (each.behind, each.planned))
            yield _differs(DISPLACED, f"{self._said(found[each.at])} {stands}, where the plan has it {was_to}")
        if len(elsewhere) > _MOST:
            more = counted(len(elsewhere) - _MOST, "more step is", "more steps are")
            yield _differs(DISPLACED, f"{more} elsewhere than planned")

    def turned_around(self) -> Iterator[Diagnostic]:
        """Nodes out of order, whatever the plan."""
        index = self.facts.index
        nodes = [node for node in self.graph.nodes if node.op == "call_function" and node.name in index]
        own = [node for node in nodes if self._is_of_plan(node, index[node.name])]
        for name, other in islice(turned_around(self.facts, own), _MOST):
            what = f"`{name}` runs behind `{other}`, which draws, writes or acts after it in the graph as traced"
            yield _differs(OUT_OF_ORDER, what)

    def _steps_there(self) -> Iterator[tuple[StepKind, str]]:
        index = self.facts.index
        with_copies = any(kind in _COPIES for kind in self.order.schedule.kinds)
        for node in self.graph.nodes:
            kind = _kind(node)
            if kind in _COPIES and with_copies:
                yield kind, self._value(node)
            elif node.op == "call_function" and node.name in index and self._is_of_plan(node, index[node.name]):
                yield _RUN, node.name

    def _is_of_plan(self, node: fx.Node, row: int) -> bool:
        """The node is the one that the plan calls by its name: torch may reuse that of an operator that it wrapped."""
        return self._is_subject(row) or describe(node.target).name == self.facts.targets[row]

    def _said(self, step: GraphStep) -> str:
        kind, name, _ = step
        if kind in _COPIES:
            return _SAID.get(kind, f"the step {kind.name.lower()} of `{{}}`").format(name)
        row = self.facts.index[name]
        if self.facts.targets[row] in WAITS:
            (awaited, *_) = self.facts.inputs[row] or (row,)
            return f"`{name}` awaits `{self.facts.names[awaited]}`"
        return f"`{name}` starts" if self._communicates(row) else f"`{name}` runs"


def _counted(steps: Iterable[tuple[StepKind, str]]) -> list[GraphStep]:
    """Several copies of one value are distinguished by number."""
    seen = Counter[tuple[StepKind, str]]()
    found = []
    for kind, name in steps:
        found.append((kind, name, seen[kind, name]))
        seen[kind, name] += kind in _COPIES
    return found


def _kind(node: fx.Node) -> StepKind:
    if node.op != "call_function":
        return _RUN
    called = describe(node.target).name
    if called != HOST_COPY_WAIT:
        return STARTS.get(called) or NARROWING.get(called, _RUN)
    start = node.args[0]
    is_out = isinstance(start, fx.Node) and start.op == "call_function" and describe(start.target).name == OFFLOAD
    return StepKind.WAIT_TO_HOST if is_out else StepKind.WAIT_FROM_HOST


def _place(steps: list[GraphStep], at: int) -> str:
    return "at the beginning" if at < 0 else f"behind `{steps[at][1]}`"


def _list(names: Iterable[str]) -> str:
    found = list(names)
    more = (f"{len(found) - _MOST} more",) if len(found) > _MOST else ()
    return ", ".join((*(f"`{name}`" for name in found[:_MOST]), *more))


def _differs(code: str, message: str) -> Diagnostic:
    return Diagnostic(code, message, None, _HELP)


OTHER_ORDER = "APL345"
NOTHING_BETWEEN = "APL346"

ELSEWHERE = -1
"""The number of a collective that no step of the same graph starts."""
_LOOK_HELP = (
    "a pass or a setting of Inductor's moved it after the graph was split: look at the passes and at the settings of "
    "`torch._inductor.config` that this program sets"
)


@frozen
class CommunicationStep:
    """A collective that starts, or a wait for one."""

    starts: bool
    number: int
    """The collective's number, by the order in which they start."""
    operator: str
    """With namespace, and without the suffix for the output: ``_c10d_functional.all_reduce``."""
    group: str = ""
    """The process group, where the call names it."""
    kernels: int = field(default=0, eq=False)
    """Compute between the previous step and this one: products in a graph, kernels in code."""
    alone: int = field(default=0, eq=False)
    """The products that Inductor does not move: it fuses a product into the sum that reads it, at the sum's place."""
    name: str = field(default="", eq=False)
    """The node, or what the code calls the result."""

    def __str__(self) -> str:
        name = self.operator.rpartition(".")[2]
        which = f" {self.number}" if self.number != ELSEWHERE else " of what another graph started"
        return f"the start of {name}{which}" if self.starts else f"the wait for {name}{which}"


def steps_of(graph: fx.Graph) -> tuple[CommunicationStep, ...]:
    """The communication steps of a forward or backward graph, in node order. Linear in nodes and edges."""
    found: list[CommunicationStep] = []
    started: dict[fx.Node, int] = {}
    operators: list[str] = []
    kernels = alone = 0
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operator = describe(node.target)
        source = next((each for each in node.all_input_nodes if each in started), None)
        if is_communication(node):
            starts = not is_wait(operator.name)
            if starts:
                number = started[node] = len(operators)
                operators.append(plain_name(operator.name))
            else:
                number = ELSEWHERE if source is None else started[source]
            name = operators[number] if number != ELSEWHERE else plain_name(operator.name)
            group = group_name(operator, node) if starts else ""
            found.append(CommunicationStep(starts, number, name, group, kernels, alone, node.name))
            kernels = alone = 0
        elif source is not None and (operator.name == GETITEM or operator.flags & Category.VIEW):
            started[node] = started[source]
        elif is_product(node):
            kernels += 1
            alone += len(node.users) != 1 or describe(next(iter(node.users)).target).name != SUM
    return tuple(found)


def between(steps: Sequence[CommunicationStep], *, alone: bool = False) -> dict[int, int]:
    """By collective, the kernels from its start to its first wait. ``alone``: only products that stay in place."""
    found: dict[int, int] = {}
    since: dict[int, int] = {}
    total = 0
    for step in steps:
        total += step.alone if alone else step.kernels
        if step.starts:
            since[step.number] = total
        elif step.number in since and step.number not in found:
            found[step.number] = total - since[step.number]
    return found


def differences(
    planned: Sequence[CommunicationStep], found: Sequence[CommunicationStep], half: str
) -> Iterator[Diagnostic]:
    """Differences between the order of communication in generated code and in its graph. ``half``: ``forward`` or
    ``backward``."""
    for at, (expected, came) in enumerate(zip_longest(planned, found)):
        # code may name a group by an object, which identifies nothing here
        named = expected and came and expected.group and came.group
        if expected is None or came is None or expected != (came if named else evolve(came, group=expected.group)):
            message = f"in the code of the {half}, step {at} of its communication is {came or 'missing'}"
            wanted = f"{expected} (`{expected.name}`)" if expected is not None else "no more"
            if expected is not None and came is not None and str(expected) == str(came):
                message, wanted = f"{message} over group `{came.group}`", f"group `{expected.group}`"
            yield diagnose(OTHER_ORDER, f"{message}; the plan has {wanted} there", help=_LOOK_HELP)
            return
    computed = between(found)
    names = {step.number: step.name for step in planned if step.starts}
    staying = between(planned, alone=True)
    bare = [number for number, products in staying.items() if products and not computed.get(number)]
    if bare:
        more = f" and {counted(len(bare) - 1, 'other collective')}" if bare[1:] else ""
        products = counted(staying[bare[0]], "product")
        message = (
            f"in the code of the {half}, nothing is computed between start and wait of `{names[bare[0]]}`{more}; "
            f"the plan has {products} there"
        )
        yield diagnose(NOTHING_BETWEEN, message, help=_LOOK_HELP)


_ENTRY = "call"
_PARTITION = re.compile(r".*\.partitions\[(\d+)\]")
_ARGUMENTS = "args"
_OPERATORS = "torch.ops."
_NAMESPACES = ("_c10d_functional.", "c10d_functional.", "_dtensor.")
_KERNELS = ("extern_kernels.", "aten.", "cpp_", "triton_", "multi_kernel_", "combo_kernel_")
_LAUNCH = ".run"
_BODIES = (ast.With, ast.If, ast.For, ast.While, ast.Try)


def read_code(source: str, collectives: Collection[str] = ()) -> tuple[CommunicationStep, ...] | None:
    """The steps in the order in which the code runs; None for code that is not Python's, as of the C++ wrapper.
    ``collectives``: the operators that communicate, as :func:`policylang.operators.work.plain_name` has them, beside
    those of torch's namespaces for them."""
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    functions = {each.name: each for each in ast.walk(module) if isinstance(each, ast.FunctionDef)}
    entry = functions.get(_ENTRY)
    if entry is None:
        return None
    reader = _CodeReader(functions, frozenset(collectives))
    for statement in reader.statements(entry):
        reader.read(statement)
    return tuple(reader.steps)


class _CodeReader:
    def __init__(self, functions: dict[str, ast.FunctionDef], collectives: frozenset[str]) -> None:
        self.functions = functions
        self.collectives = collectives
        self.steps: list[CommunicationStep] = []
        self.started: dict[str, int] = {}
        """By the name of a collective's output, or of a piece or view of it."""
        self.operators: list[str] = []
        self.kernels = 0

    def statements(self, function: ast.FunctionDef) -> Iterator[ast.stmt]:
        """The statements of a function in order, including the partitions that it calls and nested blocks."""
        pending: list[ast.stmt] = list(reversed(function.body))
        while pending:
            statement = pending.pop()
            if isinstance(statement, _BODIES):
                pending.extend(reversed([*statement.body, *getattr(statement, "orelse", ())]))
                continue
            called = self.functions.get(_partition(statement))
            if called is not None:
                pending.extend(reversed(called.body))
            else:
                yield statement

    def read(self, statement: ast.stmt) -> None:
        if isinstance(statement, (ast.Assign, ast.Expr)):
            if isinstance(statement.value, ast.Name) and statement.value.id == _ARGUMENTS:
                return  # what a partition is handed has the names that it has outside
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            made = [name for target in targets for name in _names(target)]
            if isinstance(statement.value, ast.Call) and self._call(statement.value, made):
                return
            source = next((self.started[name] for name in _names(statement.value) if name in self.started), None)
            for name in made:
                self.started.pop(name, None)
                if source is not None:
                    self.started[name] = source

    def _call(self, call: ast.Call, made: list[str]) -> bool:
        """The call communicates or computes."""
        function = ast.unparse(call.func)
        operator = function.removeprefix(_OPERATORS) if function.startswith(_OPERATORS) else ""
        if operator and (operator.startswith(_NAMESPACES) or plain_name(operator) in self.collectives):
            self._step(call, operator, made)
            return True
        if operator or function.startswith(_KERNELS) or function.endswith(_LAUNCH):
            self.kernels += 1
            for name in made:
                self.started.pop(name, None)
            return True
        return False

    def _step(self, call: ast.Call, operator: str, made: list[str]) -> None:
        given = [name for argument in call.args for name in _names(argument)]
        if is_wait(operator):
            number = next((self.started[name] for name in given if name in self.started), ELSEWHERE)
            name = self.operators[number] if number != ELSEWHERE else plain_name(operator)
            step = CommunicationStep(False, number, name, "", self.kernels, self.kernels, next(iter(given), ""))
        else:
            number, name = len(self.operators), plain_name(operator)
            self.operators.append(name)
            filled = [name for keyword in call.keywords if keyword.arg == "out" for name in _names(keyword.value)]
            in_place = operator.partition(".")[2].partition(".")[0].endswith("_")
            made = [*made, *filled, *(_names(call.args[0]) if in_place and call.args else ())]
            step = CommunicationStep(True, number, name, _group(call), self.kernels, self.kernels, next(iter(made), ""))
        for filled_name in made:
            self.started[filled_name] = number
        self.steps.append(step)
        self.kernels = 0


def _partition(statement: ast.stmt) -> str:
    """``partition_0`` for ``… = self.partitions[0](…)``; empty for another statement."""
    value = statement.value if isinstance(statement, (ast.Assign, ast.Expr)) else None
    found = _PARTITION.fullmatch(ast.unparse(value.func)) if isinstance(value, ast.Call) else None
    return f"partition_{found[1]}" if found else ""


def _group(call: ast.Call) -> str:
    """The last argument, where it is a string: it may be an object that the code has from elsewhere."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg != "out")]
    last = values[-1] if values else None
    return last.value if isinstance(last, ast.Constant) and isinstance(last.value, str) else ""


def _names(value: ast.expr) -> list[str]:
    """The variables in an expression, in order, without the functions that it calls."""
    found: list[str] = []
    pending: list[ast.AST] = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Call):
            pending.extend(reversed([*node.args, *(keyword.value for keyword in node.keywords)]))
        else:
            pending.extend(reversed(list(ast.iter_child_nodes(node))))
    return found


CANNOT_READ = "APL347"

HALVES = ("forward", "backward")
_Steps = tuple[CommunicationStep, ...]


@define(eq=False)
class CodeAudit:
    """The planned and the generated order of the forward and backward graphs of one Dynamo graph."""

    planned: dict[str, list[_Steps]] = field(factory=lambda: {half: [] for half in HALVES})
    """By graph, the steps of each partition: one, except for regions that torch partitions separately."""
    found: dict[str, CodeOrderReport] = field(factory=dict, metadata={OWN: True})
    """By graph, once it is compiled."""

    def note(self, forward: fx.Graph, backward: fx.Graph) -> None:
        """Record what was planned; called when a joint graph is split."""
        for half, graph in zip(HALVES, (forward, backward), strict=True):
            self.planned[half].append(steps_of(graph))

    def reader(self, graph: fx.Graph, *, is_backward: bool) -> Callable[[str], list[Diagnostic]]:
        """Reads a graph as Inductor receives it, and returns the check of the code that is made of it."""
        return partial(self.check, HALVES[is_backward], arrived=steps_of(graph))

    def check_loaded(self, codes: Iterable[tuple[bool, str]]) -> list[Diagnostic]:
        """Compare the code of cached graphs, each with True for the backward."""
        return [found for is_backward, source in codes for found in self.check(HALVES[is_backward], source)]

    def check(self, half: str, source: str, arrived: Iterable[CommunicationStep] = ()) -> list[Diagnostic]:
        """Compare a graph's generated code. ``arrived``: its steps as Inductor got it, which tell partitions apart."""
        candidates, order = self.planned[half], list(arrived)
        planned = next((steps for steps in candidates if list(steps) == order), candidates[-1] if candidates else ())
        operators = {step.operator for step in planned}
        code = read_code(source, operators) if source else ()
        if code is None:
            self.found[half] = CodeOrderReport(half, "not read")
            said = f"the code of the {half} is not Python, so its order of collectives is not read"
            return [diagnose(CANNOT_READ, said)]
        differing = list(differences(planned, code, half))
        status = "differs" if differing else "as planned"
        computed, products = between(code), between(planned)
        starts = sum(step.starts for step in code)
        started = [step for step in planned if step.starts and products.get(step.number)]
        kernels = {step.name: computed.get(step.number, 0) for step in started}
        self.found[half] = CodeOrderReport(half, status, starts, len(code) - starts, kernels)
        return differing

    def reports(self) -> tuple[CodeOrderReport, ...]:
        """In the order in which the graphs run."""
        compared = [half for half in HALVES if any(self.planned[half])]
        return tuple(self.found.get(half) or CodeOrderReport(half, "not compiled") for half in compared)
