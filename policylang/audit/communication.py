"""The order in which a half communicates, and where the code that was generated of it differs.

What is compared is the sequence of collectives that start and of waits, each wait with the collective that it awaits;
and, where products run between the two, that something is computed there. Kernels of other operators are fused and move
with what they were fused with, so how many there are says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from attrs import asdict, evolve, field, frozen
from torch import fx

from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.wording import counted
from policylang.operators.categories import describe, group_name
from policylang.operators.communication import is_communication, is_product, is_wait, plain_name
from policylang.operators.names import GETITEM, Category

OTHER_ORDER = "APL345"
NOTHING_BETWEEN = "APL346"

ELSEWHERE = -1
"""The number of a collective that no step of the same half starts."""
_SUM = "aten.add.Tensor"
_HELP = (
    "a pass or a setting of Inductor's moved it after the graph was split: look at the passes and at the settings of "
    "`torch._inductor.config` that this program sets"
)


@frozen
class CommunicationStep:
    """A collective that starts, or a wait for one."""

    starts: bool
    number: int
    """Of the collective, by the order in which they start."""
    operator: str
    """With its namespace and without what says where its result goes: ``_c10d_functional.all_reduce``."""
    group: str = ""
    """The process group, where the call names it."""
    kernels: int = field(default=0, eq=False)
    """What computes between the step before and this one: products in a graph, kernels in code."""
    alone: int = field(default=0, eq=False)
    """Of the products, those that stay where they are: Inductor makes one of a product and the sum that it goes into,
    where the sum stands."""
    name: str = field(default="", eq=False)
    """The node, or what the code calls the result."""

    def __str__(self) -> str:
        name = self.operator.rpartition(".")[2]
        which = f" {self.number}" if self.number != ELSEWHERE else " of what another graph started"
        return f"the start of {name}{which}" if self.starts else f"the wait for {name}{which}"


def steps_of(graph: fx.Graph) -> tuple[CommunicationStep, ...]:
    """The steps of a half, in the order in which its nodes stand. Linear in nodes and edges."""
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
            alone += not _goes_into_sum(node)
    return tuple(found)


def _goes_into_sum(node: fx.Node) -> bool:
    return len(node.users) == 1 and describe(next(iter(node.users)).target).name == _SUM


def between(steps: Sequence[CommunicationStep], *, alone: bool = False) -> dict[int, int]:
    """By collective, how many kernels run between its start and the first wait for it. ``alone``: of those that stay
    where they are."""
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
    """Where generated code communicates otherwise than its half was ordered. ``half``: ``forward`` or ``backward``."""
    for at, (expected, came) in enumerate(zip_longest(planned, found)):
        if expected is None or came is None or not _same(expected, came):
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


def _same(planned: CommunicationStep, found: CommunicationStep) -> bool:
    """Code may name a group by an object, which says nothing here."""
    same = planned == evolve(found, group=planned.group)
    return same and (not found.group or not planned.group or found.group == planned.group)


def to_json(steps: Iterable[CommunicationStep]) -> list[dict[str, Any]]:
    return [asdict(step) for step in steps]


def from_json(data: Iterable[Mapping[str, Any]]) -> tuple[CommunicationStep, ...]:
    """Raises ``TypeError`` for data that is not what :func:`to_json` makes."""
    return tuple(CommunicationStep(**step) for step in data)
