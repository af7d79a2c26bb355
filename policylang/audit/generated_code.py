"""Reads the order of communication off the Python code that Inductor generates for a half.

The code is a function ``call``, in which every kernel and every collective is a statement::

    buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(primals_1, 2, '0')
    extern_kernels.mm(primals_3, reinterpret_tensor(buf5, (64, 64), (1, 64), 0), out=buf6)
    torch.ops._c10d_functional.wait_tensor.default(buf0)

A graph that was cut in partitions calls functions ``partition_0`` and so on, which are read where they are called. The
code is parsed, never run.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from policylang.audit.communication import ELSEWHERE, CommunicationStep
from policylang.operators.work import is_wait, plain_name

_ENTRY = "call"
_PARTITIONS = "partitions"
_ARGUMENTS = "args"
_OPERATORS = "torch.ops."
_NAMESPACES = ("_c10d_functional.", "c10d_functional.", "_dtensor.")
_KERNELS = ("extern_kernels.", "aten.", "cpp_", "triton_", "multi_kernel_", "combo_kernel_")
_LAUNCH = ".run"
_BODIES = (ast.With, ast.If, ast.For, ast.While, ast.Try)


def read_code(source: str, collectives: Collection[str] = ()) -> tuple[CommunicationStep, ...] | None:
    """The steps in the order in which the code runs; None for code that is not Python's, as of the C++ wrapper.

    ``collectives``: the operators that communicate, as :func:`policylang.operators.work.plain_name` has them,
    beside those of torch's namespaces for them.
    """
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
        """By the name of what a collective fills, or of a piece or a view of that."""
        self.operators: list[str] = []
        self.kernels = 0

    def statements(self, function: ast.FunctionDef) -> Iterator[ast.stmt]:
        """Those of a function in order, of the partitions that it calls and of what stands in blocks."""
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
        """Whether a call communicates or computes."""
        function = _dotted(call.func)
        operator = function.removeprefix(_OPERATORS) if function.startswith(_OPERATORS) else ""
        if operator and self._communicates(operator):
            self._step(call, operator, made)
            return True
        if operator or function.startswith(_KERNELS) or function.endswith(_LAUNCH):
            self.kernels += 1
            for name in made:
                self.started.pop(name, None)
            return True
        return False

    def _communicates(self, operator: str) -> bool:
        return operator.startswith(_NAMESPACES) or plain_name(operator) in self.collectives

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
    called = value.func if isinstance(value, ast.Call) else None
    if isinstance(called, ast.Subscript) and isinstance(called.slice, ast.Constant):
        holder, number = called.value, called.slice.value
        if isinstance(holder, ast.Attribute) and holder.attr == _PARTITIONS and isinstance(number, int):
            return f"partition_{number}"
    return ""


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


def _dotted(value: ast.expr) -> str:
    """``torch.ops.aten.mm.default``; empty for what is not called by a dotted name."""
    parts: list[str] = []
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return ".".join(reversed([*parts, value.id])) if isinstance(value, ast.Name) else ""
