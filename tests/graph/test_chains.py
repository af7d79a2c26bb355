"""Lines of data flow against an evaluator that walks them one row at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.graph.chains import Chains
from policylang.graph.facts import COLUMNS, Facts, Flag, GraphKind, InputKind, Phase
from tests.support.drawn import examples
from tests.support.textgraph import facts_of

SPLIT, GETITEM, CAT = "aten.split.Tensor", "builtin.getitem", "aten.cat.default"


class Naive:
    """The language page's words, word by word, with no thought for time."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def users(self, row: int) -> list[int]:
        return [user for user in self.facts.users[row] if user in self.facts.forward]

    def inputs(self, row: int) -> list[int]:
        return [read for read in self.facts.inputs[row] if not self.facts.flags[read] & Flag.SYMBOLIC]

    def fan_out(self, row: int) -> list[int]:
        """The split, pieces and cat that a row belongs to, if it belongs to any."""
        for split in self.facts.forward:
            if self.facts.targets[split] != SPLIT:
                continue
            pieces = self.users(split)
            joins = {user for piece in pieces for user in self.users(piece)}
            if any(self.facts.targets[piece] != GETITEM for piece in pieces) or len(joins) != 1:
                continue
            (join,) = joins
            line = [split, *pieces, join]
            if self.facts.targets[join] == CAT and sorted(self.inputs(join)) == pieces and row in line:
                return line
        return []

    def next(self, row: int) -> int | None:
        line = self.fan_out(row)
        if line and row != line[-1]:
            return line[line.index(row) + 1]
        users = self.users(row)
        return users[0] if len(users) == 1 and self.inputs(users[0]) == [row] else None

    def previous(self, row: int) -> int | None:
        line = self.fan_out(row)
        if line and row != line[0]:
            return line[line.index(row) - 1]
        inputs = self.inputs(row)
        return inputs[0] if len(inputs) == 1 and inputs[0] in self.facts.forward else None

    def line(self, row: int | None) -> list[int]:
        found = []
        while row is not None:
            found.append(row)
            row = self.next(row)
        return found

    def after(self, rows: list[int]) -> list[int]:
        return sorted({later for row in rows for later in self.line(row)[1:]})

    def before(self, rows: list[int]) -> list[int]:
        found = set()
        for row in rows:
            earlier = self.previous(row)
            while earlier is not None:
                found.add(earlier)
                earlier = self.previous(earlier)
        return sorted(found)

    def cut(self, rows: list[int], markers: list[int], *, keep_after: bool) -> list[int]:
        found = set()
        for row in rows:
            line = self.line(row)
            at = next((place for place, here in enumerate(line) if here in markers), None)
            if at is not None:
                found.update(line[at + 1 :] if keep_after else line[:at])
        return sorted(found)

    def from_parameter(self, row: int) -> bool:
        line = self.fan_out(row)
        inputs = [line[0]] if line and row == line[-1] else self.inputs(row)
        if row not in self.facts.forward or len(inputs) != 1:
            return False
        return self.facts.input_kinds[inputs[0]] == InputKind.PARAMETER or self.from_parameter(inputs[0])


@st.composite
def graphs(draw: st.DrawFn) -> Facts:
    """Forward graphs with long lines, forks, symbolic sizes, some backward readers and some fan-outs."""
    kinds: list[int] = [InputKind.PARAMETER, InputKind.USER, InputKind.USER]
    flags: list[int] = [0, 0, int(Flag.SYMBOLIC)]
    ops, targets, inputs, phases = ["placeholder"] * 3, [""] * 3, [()] * 3, [int(Phase.INPUT)] * 3

    def add(target: str, reads: list[int], phase: Phase = Phase.FORWARD) -> int:
        ops.append("call_function")
        targets.append(target)
        inputs.append(tuple(dict.fromkeys(reads)))
        phases.append(int(phase))
        kinds.append(0)
        flags.append(0)
        return len(ops) - 1

    for _ in range(draw(st.integers(1, 14))):
        newest = len(ops) - 1
        source = draw(st.sampled_from([newest, newest, newest, *range(len(ops))]))
        step = draw(st.sampled_from(["unary", "unary", "binary", "sized", "fan", "broken fan", "backward"]))
        if phases[source] == Phase.BACKWARD and step != "backward":
            source = draw(st.sampled_from([row for row in range(len(ops)) if phases[row] != Phase.BACKWARD]))
        if step == "binary":
            add("aten.add.Tensor", [source, draw(st.sampled_from([0, 1, source]))])
        elif step == "sized":
            add("aten.view.default", [source, 2])
        elif step == "backward":
            add("aten.sin.default", [source], Phase.BACKWARD)
        elif step.endswith("fan"):
            split = add(SPLIT, [source])
            pieces = [add(GETITEM, [split]) for _ in range(draw(st.integers(1, 3)))]
            if step == "broken fan":
                add("aten.sin.default", [draw(st.sampled_from(pieces))])
            add(CAT, pieces)
        else:
            add("aten.sin.default", [source])
    count = len(ops)
    users = [tuple(row for row in range(count) if read in inputs[row]) for read in range(count)]
    own = {
        "names": [f"n{row}" for row in range(count)],
        "ops": ops,
        "targets": targets,
        "phases": phases,
        "flags": flags,
        "inputs": inputs,
        "users": users,
        "owners": range(count),
        "input_kinds": kinds,
    }
    return Facts(kind=GraphKind.JOINT, **{name: [said.blank] * count for name, said in COLUMNS.items()} | own)


@settings(max_examples=examples(60, 3000))
@given(graphs(), st.data())
def test_lines_are_what_a_walk_from_every_row_finds(facts: Facts, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.sampled_from(facts.forward), unique=True)) if facts.forward else []
    markers = data.draw(st.lists(st.sampled_from(facts.forward), unique=True)) if facts.forward else []
    naive, chains = Naive(facts), Chains(facts)
    assert chains.after(rows) == naive.after(rows)
    assert chains.before(rows) == naive.before(rows)
    assert chains.after_marker(rows, markers) == naive.cut(rows, markers, keep_after=True)
    assert chains.before_marker(rows, markers) == naive.cut(rows, markers, keep_after=False)
    found = [chains.from_parameter_mask[row] for row in facts.forward]
    assert found == [naive.from_parameter(row) for row in facts.forward]


FSDP = """
    %w = parameter
    %x = input
    %cast = prims.convert_element_type.default(%w)
    %gather = _c10d_functional.all_gather_into_tensor.default(%cast)
    %wait = _c10d_functional.wait_tensor.default(%gather)
    %split = aten.split.Tensor(%wait)
    %p0 = builtin.getitem(%split)
    %p1 = builtin.getitem(%split)
    %cat = aten.cat.default(%p0, %p1)
    %view = aten.view.default(%cat)
    %mm = aten.mm.default(%x, %view)
    ---
    %t = tangent
    %bw = aten.mm.default(%t, %view)
"""


def test_a_gathered_weight_is_one_line_to_the_matrix_product_though_the_backward_reads_it() -> None:
    facts = facts_of(FSDP)
    row, chains = facts.index, Chains(facts)

    def names(rows: list[int]) -> list[str]:
        return [facts.names[each] for each in rows]

    gather, line = [row["gather"]], ["wait", "split", "p0", "p1", "cat", "view"]
    assert facts.users[row["view"]] == (row["mm"], row["bw"])
    assert names(chains.after(gather)) == line
    assert names(chains.before(gather)) == ["cast"]
    assert names(chains.after_marker(gather, [row["wait"]])) == line[1:]
    assert names(chains.before_marker(gather, [row["wait"]])) == ["gather"]
    assert chains.after_marker(gather, [row["mm"]]) == []
    of_parameter = [each for each, inside in enumerate(chains.from_parameter_mask) if inside]
    assert names(of_parameter) == ["cast", "gather", *line]


@pytest.mark.slow
def test_a_line_of_a_hundred_thousand_nodes_is_walked_once() -> None:
    length = 100_000
    lines = ["%x = input", "%n0 = aten.sin.default(%x)"]
    lines += [f"%n{row} = aten.sin.default(%n{row - 1})" for row in range(1, length)]
    facts = facts_of("\n".join(lines))
    chains = Chains(facts)
    assert len(chains.after(facts.forward)) == length - 1
    assert len(chains.before(facts.forward)) == length - 1
    assert len(chains.after_marker(facts.forward, facts.forward[-1:])) == 0
    assert len(chains.before_marker(facts.forward, facts.forward[-1:])) == length - 1
