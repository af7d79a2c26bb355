"""Compares the order of communication in Inductor's generated code with that of the graph it was generated from."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from attrs import asdict, define, evolve, field, frozen
from torch import fx

from policylang.audit.report import CodeOrderReport
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.shown import counted
from policylang.operators.calls import describe, group_name
from policylang.operators.names import GETITEM, SUM, Category
from policylang.operators.work import is_communication, is_product, is_wait, plain_name

OTHER_ORDER = "APL345"
NOTHING_BETWEEN = "APL346"

ELSEWHERE = -1
"""The number of a collective that no step of the same graph starts."""
_HELP = (
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
    """How the communication in generated code is ordered unlike its graph. ``half``: ``forward`` or ``backward``."""
    for at, (expected, came) in enumerate(zip_longest(planned, found)):
        # code may name a group by an object, which identifies nothing here
        named = expected and came and expected.group and came.group
        if expected is None or came is None or expected != (came if named else evolve(came, group=expected.group)):
            message = f"in the code of the {half}, step {at} of its communication is {came or 'missing'}"
            wanted = f"{expected} (`{expected.name}`)" if expected is not None else "no more"
            if expected is not None and came is not None and str(expected) == str(came):
                message, wanted = f"{message} over group `{came.group}`", f"group `{expected.group}`"
            yield diagnose(OTHER_ORDER, f"{message}; the plan has {wanted} there", help=_HELP)
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
        yield diagnose(NOTHING_BETWEEN, message, help=_HELP)


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
    found: dict[str, CodeOrderReport] = field(factory=dict)
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
        """Compare the generated code of a graph. ``arrived``: its steps as Inductor received it, which distinguish
        several partitions."""
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
        kernels = {
            step.name: computed.get(step.number, 0) for step in planned if step.starts and products.get(step.number)
        }
        self.found[half] = CodeOrderReport(half, status, starts, len(code) - starts, kernels)
        return differing

    def reports(self) -> tuple[CodeOrderReport, ...]:
        """In the order in which the graphs run."""
        return tuple(
            self.found.get(half) or CodeOrderReport(half, "not compiled") for half in HALVES if any(self.planned[half])
        )

    def to_json(self) -> dict[str, Any]:
        return {half: [[asdict(step) for step in steps] for steps in self.planned[half]] for half in HALVES}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CodeAudit:
        """Raises ``KeyError`` or ``TypeError`` for data that is not what :meth:`to_json` makes."""
        return cls(
            {half: [tuple(CommunicationStep(**step) for step in steps) for steps in data[half]] for half in HALVES}
        )
