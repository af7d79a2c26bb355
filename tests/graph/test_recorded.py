"""Recorded graphs in JSON: the facts are those of the graph, and whatever else a file holds is a diagnostic."""

import copy
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.blocks import Chains, blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, LostMarker, Phase, Ref
from policylang.graph.marks import SavedMarker, find, from_annotation
from policylang.graph.recorded import recorded_facts
from policylang.torch_compat.graphs import operator_names
from tests.support.drawn import examples
from tests.support.sharded import fake_ranks
from tests.support.shared_graphs import BACKWARD, FOLDER, JOINT, ONE_DEVICE, process_groups, recorded

TENSOR = {"shape": [4, 4], "stride": [4, 1], "dtype": "float32"}
SMALL: dict[str, Any] = {
    "groups": {"0": [0, 1]},
    "mesh": {"dims": ["dp"], "shape": [2]},
    "fields": ["name", "op", "target", "args", "kwargs", "val", "meta"],
    "nodes": [
        ["w", "placeholder", "w", [], {}, TENSOR, {"desc": "ParamAOTInput(target='w')"}],
        ["t", "placeholder", "t", [], {}, TENSOR, {"desc": "TangentAOTInput(output=PlainAOTOutput(idx=0))"}],
        ["mm", "call_function", "aten.mm.default", [{"n": "w"}, {"n": "w"}], {}, TENSOR, {"phase": "is_forward"}],
        ["own", "call_function", "lab.own.default", [{"n": "mm"}, 2, {"dtype": "torch.float32"}], {}, TENSOR,
         {"phase": "is_forward", "module": "L['self'].layers.0"}],
        ["b", "call_function", "aten.mul.Tensor", [{"n": "t"}, {"n": "own"}], {}, TENSOR, {"phase": "is_backward"}],
        ["output", "output", "output", [[{"n": "own"}, {"n": "b"}]], {}, None,
         {"desc": "[PlainAOTOutput(idx=0), GradAOTOutput(grad_of=ParamAOTInput(target='w'))]"}],
    ],
}  # fmt: skip


@cache
def of_file(name: str) -> Facts:
    return recorded_facts(FOLDER / f"{name}.json.gz")


def imported(content: Any, folder: Path) -> Facts:
    path = folder / "recorded.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return recorded_facts(path)


def test_groups_blocks_waits_attention_and_tags_are_those_of_the_step() -> None:
    facts = of_file(JOINT)
    (mesh,) = facts.meshes
    assert (mesh.dims, mesh.shape) == (("dp", "tp"), (16, 8))
    assert {name: group.ranks for name, group in facts.groups.items()} == process_groups(JOINT)
    assert {group.size: group.dim for group in facts.groups.values()} == {16: "dp", 8: "tp", 128: None}
    for row in rows_of(facts, "_c10d_functional.wait_tensor.default"):
        assert facts.owners[row] == facts.inputs[row][0]
        assert facts.has(facts.owners[row], Flag.COLLECTIVE)
    regions = blocks_of(facts)
    assert len(regions.names) == 32
    bare = evolve(facts, ac_regions=[None] * len(facts))
    assert blocks_of(bare).names == tuple(f"layers.{layer}" for layer in range(32))
    rows = rows_of(facts, "aten._scaled_dot_product_flash_attention.default")
    assert len(rows) == 32
    assert not any(facts.has(row, Flag.RANDOM) for row in rows)
    tags = Counter(facts.user_tags)
    assert (tags["PREFER_RECOMPUTE"], tags["MUST_SAVE"]) == (5_282, 1_860)


def test_an_operator_that_torch_does_not_have(tmp_path: Path) -> None:
    facts = imported(SMALL, tmp_path)
    row = facts.index["own"]
    assert (facts.targets[row], facts.modules[row], facts.bytes[row]) == ("lab.own.default", "layers.0", 64)
    assert facts.input_names[:2] == ["w", ""]


def test_what_another_file_calls_decides_nothing(tmp_path: Path) -> None:
    """In torch's registry an operator is the whole process's: the first call read would say what it returns."""
    for target in ("lab.twice.default", "aten.twice.default"):
        tensors = imported(changed(["nodes", 3, 2], target), tmp_path)
        recording = changed(["nodes", 3, 2], target)
        recording["nodes"][3][3:6] = [[{"n": "mm"}, {"device": "cuda"}], {"group_name": "0"}, [TENSOR, TENSOR]]
        pairs = imported(recording, tmp_path)
        row = pairs.index["own"]
        assert not tensors.has(row, Flag.MULTI_OUTPUT | Flag.COLLECTIVE)
        assert pairs.has(row, Flag.MULTI_OUTPUT)
        assert pairs.has(row, Flag.COLLECTIVE)
        assert (pairs.group_names[row], pairs.arguments[row]) == ("0", (Ref(2), "cpu", "0"))
        assert target not in operator_names()


def test_what_this_process_is_decides_nothing(tmp_path: Path) -> None:
    recording = changed(["nodes", 3, 4], {"group_name": "7"})
    del recording["groups"], recording["mesh"]
    alone = imported(recording, tmp_path)
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        recording["nodes"][3][4]["group_name"] = own = mesh.get_group().group_name
        among = imported(recording, tmp_path)
    assert (among.rank, among.meshes, among.groups[own].ranks) == (None, (), ())
    assert (alone.rank, alone.meshes, alone.groups["7"].ranks) == (None, (), ())


def test_a_constant_that_the_graph_reads(tmp_path: Path) -> None:
    """As a graph has them with tensors that its function closed over; nothing says more of one than its value."""
    recording = changed(["nodes", 2, 3], [{"n": "w"}, {"n": "c"}])
    recording["nodes"].insert(2, ["c", "get_attr", "_tensor_constant0", [], {}, TENSOR, {}])
    recording["nodes"].insert(3, ["body", "get_attr", "body.0", [], {}, None, {}])
    facts = imported(recording, tmp_path)
    row, body = facts.index["c"], facts.index["body"]
    assert (facts.ops[row], facts.bytes[row], facts.inputs[facts.index["mm"]]) == ("get_attr", 64, (0, row))
    assert (facts.input_kinds[row], facts.input_names[row]) == (InputKind.BUFFER, "_tensor_constant0")
    assert facts.input_kinds[body] == InputKind.OTHER
    snapshot.write(facts, tmp_path / "c.graph")
    assert snapshot.load(tmp_path / "c.graph").names == facts.names


def test_a_device_by_its_name(tmp_path: Path) -> None:
    """`{"device": …}` stands for a device; an argument that is called so does not."""
    recording = changed(["nodes", 2, 2], "aten.empty.memory_format")
    recording["nodes"][2][3:5] = [[[4, 4]], {"device": "cpu", "pin_memory": False}]
    assert imported(recording, tmp_path).targets[2] == "aten.empty.memory_format"


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(SMALL)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return result


def test_a_small_file_is_no_large_recording(tmp_path: Path) -> None:
    nodes = [["x", "placeholder", "x", [], {}, None, {}]] * 40_000
    for content in (b"[" * (12 << 20), json.dumps({"fields": SMALL["fields"], "nodes": nodes}).encode()):
        with pytest.raises(PolicyGraphError, match=r"is larger than a recorded graph can be: its [\d,]+ bytes hold"):
            imported(gzip.compress(content), tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is not JSON"),
        (b"\x1f\x8bnot gzip", "it cannot be unpacked"),
        (gzip.compress(b"{" * 100, mtime=0), "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[]", "it is not a JSON object"),
        (b"{}", "it has no `fields` and `nodes`"),
        (changed(["fields"], ["name"]), "its nodes have no `op`"),
        (changed(["nodes", 2], ["mm"]), "node 2 is not a list of 7 fields"),
        (changed(["nodes", 2, 2], "aten.nothing"), "node 2, `mm`: `aten.nothing` is not the full name of an operator"),
        (changed(["nodes", 3, 4], {"x(a!)": {"n": "w"}}), "node 3, `own`: no argument can be called `x(a!)`"),
        (changed(["nodes", 2, 3], [{"n": "later"}]), "node 2, `mm`: it reads `later`, which does not come before it"),
        (changed(["nodes", 2, 5], {"shape": "x"}), "node 2, `mm`: "),
        (changed(["nodes", 2, 5], {**TENSOR, "dtype": "float31"}), "node 2, `mm`: torch has no `float31`"),
        (changed(["nodes", 3, 0], "mm"), "node 3, `mm`: its name is none, or is another node's"),
        (changed(["nodes", 0, 6, "desc"], "print('run')"), "node 0, `w`: `print('run')` describes no input"),
        (changed(["nodes", 2, 6, "recompute"], "MAYBE"), "node 2, `mm`: "),
        (changed(["nodes", 2, 1], "call"), "node 2, `mm`: there is no kind of node `call`"),
        (changed(["nodes", 2, 2], None), "node 2, `mm`: its target has no name"),
        (changed(["nodes", 2, 3], "ww"), "node 2, `mm`: its arguments are not a list and an object"),
        (changed(["nodes", 2, 6], "is_forward"), "node 2, `mm`: its `meta` is not an object"),
        (changed(["nodes", 2, 6, "module"], 3), "node 2, `mm`: its `module` cannot be `3`"),
        (changed(["mesh", "dims"], ["d\x1b"]), "its `meshes` is not valid"),
        (changed(["groups"], {"0\n::error": [-1]}), "its group `0 ::error` is not a list of ranks"),
        (changed(["nodes", 0, 6, "desc"], "5"), "node 0, `w`: `5` describes no input"),
        (changed(["nodes", 0, 6, "desc"], "GradAOTOutput(3)"), "node 0, `w`: `GradAOTOutput(3)` describes no input"),
        (changed(["nodes", 0, 6, "desc"], "ParamAOTInput(target=3)"), "has a name that is no text"),
        (changed(["nodes", 0, 6, "desc"], "PhiloxForwardSeedAOTInput()"), "the gradient of an input that has none"),
        (changed(["nodes", 5, 3], []), "its output does not return one thing"),
        (changed(["nodes"], SMALL["nodes"][:-1]), "its last node is not the output"),
        (changed(["nodes"], [*SMALL["nodes"], SMALL["nodes"][0]]), "node 6, `w`: its name is none, or is another"),
        (changed(["nodes"], [*SMALL["nodes"], ["z", *SMALL["nodes"][0][1:]]]), "node 6, `z`: it comes after the"),
        (changed(["groups"], {"0": [-1]}), "its group `0` is not a list of ranks"),
        (changed(["groups"], {"0": "all"}), "its group `0` is not a list of ranks"),
        (changed(["mesh"], {"dims": ["dp"]}), "its `mesh` is not `dims` and `shape`"),
        (changed(["mesh", "shape"], [1 << 40]), "its `mesh` has more than a million ranks"),
    ],
)
def test_what_is_no_recording_is_refused_by_name(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyGraphError) as raised:
        imported(content, tmp_path)
    (found,) = raised.value.diagnostics
    assert found.code == "APL357"
    assert said in found.message


def test_no_text_of_a_recording_is_run(tmp_path: Path) -> None:
    """torch writes Python from a graph, in which an input's target stands as it is."""
    mark = tmp_path / "mark"
    touching = f"__import__('pathlib').Path({str(mark)!r}).touch()"
    imported(changed(["nodes", 1, 2], f"t={touching}"), tmp_path)
    with pytest.raises(PolicyGraphError, match="describes no input"):
        imported(changed(["nodes", 0, 6, "desc"], f"ParamAOTInput(target={touching})"), tmp_path)
    assert not mark.exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyGraphError) as raised:
        recorded_facts(tmp_path / "nowhere.json")
    assert raised.value.diagnostics[0].code == "APL355"


REFUSED = {"APL340", "APL341", "APL357"}
KINDS = ("placeholder", "get_attr", "call_function", "call_module", "call_method", "output", "root", "")
WORDS = (
    *KINDS,
    *("mm", "w", "a.b", "__class__", "\0", "é", "\ud800", "MUST_SAVE", "is_forward", "is_backward"),
    *("aten.mm.default", "lab.nothing.default", "lab.own.default", "lab.__class__.default", "lab.mm"),
    *("<built-in function getitem>", "<built-in function exec>", "_c10d_functional.wait_tensor.default"),
    *("ParamAOTInput(target='w')", "ParamAOTInput(target=3)", "PlainAOTInput()", "GradAOTOutput(grad_of=1)"),
)
NUMBERS = (0, 1, -1, 2**31, 2**62, 2**63, 2**70, -(2**63), 1.5, float("nan"), float("inf"))
WRAPPED = (
    *({"n": "mm"}, {"n": "output"}, {"n": []}, {"dtype": "x"}, {"dtype": "bits8"}, {"device": "x"}),
    *({"slice": []}, {"slice": [1, 2, 3, 4]}, {"repr": "strided"}, {"repr": "x"}, {"scalar": []}),
    *(TENSOR, [TENSOR, TENSOR], {**TENSOR, "shape": [2**40, 2**40]}, {**TENSOR, "shape": [-1, 4]}),
    {**TENSOR, "dtype": "quint8"},
)
VALUES = st.one_of(
    st.sampled_from([None, True, [], {}, [[]], [None], [0], [1, 2, 3]]),
    *map(st.sampled_from, (WORDS, NUMBERS, WRAPPED)),
)


@cache
def of_a_model() -> dict[str, Any]:
    """The first call of each operator at the beginning of a recorded step, with what they read."""
    recording = recorded(JOINT)
    rows = {row[0]: row for row in recording["nodes"]}
    calls = [row for row in recording["nodes"] if row[1] == "call_function"][:300]
    pending = list({row[2]: row[0] for row in reversed(calls)}.values())
    wanted: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in wanted:
            wanted.add(name)
            pending.extend(reads(rows[name][3:5]))
    nodes = [row for name, row in rows.items() if name in wanted]
    output = ["output", "output", "output", [[{"n": nodes[-1][0]}]], {}, None, {}]
    return {**recording, "nodes": [*nodes, output]}


def reads(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and "n" in value:
        yield value["n"]
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from reads(part)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value holds others, from the outside in."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(value[key], (*at, key))


def damage(recording: dict[str, Any], draw: st.DataObject) -> None:
    """One change: something else in a place, nothing in it, a row twice or elsewhere, another kind of node."""
    nodes = recording.get("nodes")
    rows = nodes if isinstance(nodes, list) else []
    how = draw.draw(st.sampled_from(("change", "change", "drop", "repeat", "move", "kind")))
    row = draw.draw(st.integers(0, len(rows) - 1)) if rows else None
    if how in ("change", "drop"):
        whole = row is None or draw.draw(st.integers(0, 4)) == 0
        found = {key: each for key, each in recording.items() if key != "nodes"} if whole else rows[row or 0]
        at = list(places(found))
        if not at:
            return
        *way, last = draw.draw(st.sampled_from(at))
        place: Any = recording if whole else found
        for step in way:
            place = place[step]
        if how == "drop":
            del place[last]
        else:
            place[last] = copy.deepcopy(draw.draw(VALUES))
    elif row is not None and how == "kind":
        if isinstance(rows[row], list) and len(rows[row]) > 1:
            rows[row][1] = draw.draw(st.sampled_from(KINDS))
    elif row is not None:
        moved = copy.deepcopy(rows[row]) if how == "repeat" else rows.pop(row)
        if how == "repeat" and isinstance(moved, list) and moved and draw.draw(st.booleans()):
            moved[0] = "another"
        rows.insert(draw.draw(st.integers(0, len(rows))), moved)


@pytest.mark.parametrize("base", [lambda: SMALL, of_a_model], ids=["small", "of a model"])
def test_whatever_is_wrong_is_a_diagnostic(base: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder: Path = tmp_path_factory.mktemp("recorded")

    @settings(max_examples=examples(25, 1000))
    @given(st.data(), st.integers(1, 3))
    def check(draw: st.DataObject, changes: int) -> None:
        recording = copy.deepcopy(base())
        for _ in range(changes):
            damage(recording, draw)
        (folder / "r.json").write_text(json.dumps(recording))
        codes: set[str] = set()
        try:
            facts = recorded_facts(folder / "r.json")
        except PolicyGraphError as error:
            codes = {found.code for found in error.diagnostics}
        assert codes <= REFUSED
        if codes:
            return
        snapshot.write(facts, folder / "r.graph")
        assert list(snapshot.load(folder / "r.graph").names) == list(facts.names)

    check()


GATHER = "_c10d_functional.all_gather_into_tensor.default"


def rows_of(facts: Facts, target: str) -> list[int]:
    return [row for row in range(len(facts)) if facts.targets[row] == target]


@pytest.mark.parametrize(
    ("name", "nodes", "kind", "gathers"),
    [
        (ONE_DEVICE, 8_799, GraphKind.JOINT, 0),
        (JOINT, 19_655, GraphKind.JOINT, 481),
        pytest.param(BACKWARD, 17_217, GraphKind.BACKWARD, 480, marks=pytest.mark.slow),
    ],
)
def test_size_kind_gathers_and_phases(name: str, nodes: int, kind: GraphKind, gathers: int) -> None:
    facts, rows = of_file(name), recorded(name)["nodes"]
    assert (len(facts), facts.kind, len(rows_of(facts, GATHER))) == (nodes, kind, gathers)
    said = [(row[6] or {}).get("phase") == "is_backward" for row in rows]
    found = [phase == Phase.BACKWARD for phase in facts.phases]
    differing = [row for row, op in enumerate(facts.ops) if op == "call_function" and said[row] != found[row]]
    # one alias of the tangent, tagged forward though it depends on it
    assert len(differing) == (1 if name == ONE_DEVICE else 0)


def test_gathers_of_parameters() -> None:
    """290 of the 291 parameters are gathered in the forward, each once, each of them in one line from the parameter;
    so is the table of rotary frequencies, a buffer. The other 65 gather activations over the tensor-parallel group.
    """
    facts = of_file(JOINT)
    chains = Chains(facts)
    forward = facts.by_target[GATHER]
    assert len(forward) == 356
    of_parameters = [row for row in forward if chains.from_parameter_mask[row]]
    assert len(of_parameters) == 290
    assert Counter(facts.group_names[row] for row in of_parameters) == {"1": 190, "0": 100}
    others = [row for row in forward if not chains.from_parameter_mask[row]]
    assert Counter(facts.group_names[row] for row in others) == {"9": 65, "1": 1}
    (frequencies,) = [row for row in others if facts.group_names[row] == "1"]
    assert facts.input_kinds[facts.inputs[frequencies][0]] != InputKind.PARAMETER
    # 384 of the 481: the forward's 290 and one buffer, and 93 of weights that the backward gathers over its group.
    single = bytearray(len(facts))
    for row in range(len(facts)):
        inputs = facts.inputs[row]
        if facts.ops[row] == "call_function" and len(inputs) == 1:
            kind = facts.input_kinds[inputs[0]]
            single[row] = single[inputs[0]] or kind not in (InputKind.NOT_AN_INPUT, InputKind.TANGENT)
    assert sum(single[row] for row in rows_of(facts, GATHER)) == 384


def test_module_paths_and_parameter_names_are_the_models() -> None:
    facts = of_file(ONE_DEVICE)
    assert facts.input_names[:2] == ["tok_embeddings.weight", "layers.0.attention.wq.weight"]
    assert "layers.31.attention.wq" in set(facts.modules)
    assert not any("_" in part and part.startswith("_") for path in set(facts.modules) for part in path.split("."))


NODE = re.compile(r"(\w+)(?:=(\w+)\(([\w,]*)\)(\d?))?")
GONE = "no forward node of this graph was traced from it"


def record(name: str, number: int | None = 0, *, count: int = 1, following: str = "", **found: Any) -> SavedMarker:
    return SavedMarker("p", name, number, count=count, following=following or name, **found or {"value": True})


def found_in(text: str, *marks: SavedMarker) -> tuple[list[str], list[LostMarker]]:
    """``neg=neg(x)0`` is a node, its operator, what it reads and which of the marks it carries; what reads ``tangent``
    is backward."""
    lines = [("x", "", "", ""), *(found.groups(default="") for found in NODE.finditer(text))]
    names = [name for name, *_ in lines]
    targets = [op and ("builtin.getitem" if op == "getitem" else f"aten.{op}.default") for _, op, *_ in lines]
    inputs = [tuple(map(names.index, filter(None, reads.split(",")))) for _, _, reads, _ in lines]
    users = [tuple(row for row, reads in enumerate(inputs) if read in reads) for read in range(len(lines))]
    phases: list[int] = []
    owners: list[int] = []
    for row, name in enumerate(names):
        backward = name == "tangent" or any(phases[read] == Phase.BACKWARD for read in inputs[row])
        phases.append(Phase.BACKWARD if backward else Phase.FORWARD if targets[row] else Phase.INPUT)
        owners.append(owners[inputs[row][0]] if targets[row] == "builtin.getitem" else row)
    markers = {row: marks[int(mark)] for row, (*_, mark) in enumerate(lines) if mark}
    columns = {"names": names, "targets": targets, "phases": phases, "inputs": inputs, "users": users, "owners": owners}
    found = find(markers, SimpleNamespace(**columns))
    return [names[row] for row in dict.fromkeys(row for row, _ in found.saved)], found.lost


VALUE, COPY, BOTH = record("op"), record("op", copies=True), record("op", value=True, copies=True)
TUPLE, COPY_OF_TUPLE = record("op", value=True, several=True), record("op", copies=True, several=True)
SOFTMAX = "softmax=_softmax(x)0 detach=detach(softmax)0 mm=mm(softmax) tangent grad=mul(detach,tangent)"
SILU = "neg=neg(x)0 exp=exp(neg)0 div=div(x,exp)0 mm=mm(div) tangent sigmoid=sigmoid(x,tangent)0 grad=mul(sigmoid,div)"
CALLED_TWICE = "neg=neg(x)0 div=div(neg)0 mm=mm(div) neg_1=neg(mm)0 div_1=div(neg_1)0 mm_1=mm(div_1)"
DECOMPOSED_NORM = "sub=sub(x)0 rsqrt=rsqrt(x)0 mul=mul(sub,rsqrt)"
NORM = "norm=layer_norm(x)0 out=getitem(norm)0 mean=getitem(norm)0 mul=mul(out) tangent grad=mul(mean,tangent)"


@pytest.mark.parametrize(
    ("text", "mark", "saved", "lost"),
    [
        (SILU, VALUE, ["div"], ""),  # the result of a decomposition is what is read from outside
        (SOFTMAX, VALUE, ["softmax"], ""),
        (SOFTMAX, COPY, ["detach"], ""),
        (SOFTMAX, BOTH, ["softmax", "detach"], ""),
        ("exp=exp(x)0 div=div(exp)0 mm=mm(div)", COPY, ["div"], ""),  # a copy that is not made is the value
        ("expand=expand(x)0 clone=clone(expand)0 view=view(clone)0 mm=mm(view)", VALUE, ["view"], ""),
        ("erf=erf(x)0 mul=mul(erf)0 mm=mm(mul,erf)", VALUE, [], "it may be any of `erf`, `mul`"),
        (CALLED_TWICE, VALUE, ["div", "div_1"], ""),
        (DECOMPOSED_NORM, TUPLE, ["sub", "rsqrt"], ""),
        (NORM, TUPLE, ["out", "norm", "mean"], ""),
        (DECOMPOSED_NORM, COPY_OF_TUPLE, [], "it may be any of `sub`, `rsqrt`"),
        (
            *("norm=norm(x)0 mul=mul(norm)", evolve(TUPLE, partly=True), []),
            "some of its values were saved and others recomputed, and a decision is for all of them",
        ),
    ],
)
def test_what_was_saved_is_found_or_reported(text: str, mark: SavedMarker, saved: list[str], lost: str) -> None:
    assert found_in(text, mark) == (saved, [LostMarker("op", lost)] if lost else [])


def test_what_is_gone_is_missed_and_named() -> None:
    names = ["a", "b", "c", "d"]
    marks = [record(name, row, count=4, following=names[(row + 1) % 4]) for row, name in enumerate(names)]
    saved, lost = found_in("c=sin(x)2 end=add(c)", *marks)
    assert saved == ["c"]
    assert lost == [LostMarker(name, GONE) for name in ("value 1 of 4", "value 2 of 4", "d")]


def test_a_dropped_view_is_saved_as_what_it_views() -> None:
    base = SavedMarker("p", "mul", count=1, stands_for=(0,))
    assert found_in("mul=mul(x)0 mm=mm(mul)", base) == (["mul"], [])
    assert found_in("mul=mul(x)0 view=view(mul)1 mm=mm(view)", base, record("view")) == (["view"], [])


def test_one_piece_of_an_unsaved_tuple_does_not_stand_in() -> None:
    """A decision on the operator would save the other pieces as well."""
    base = SavedMarker("p", "topk", count=1, several=True, stands_for=(0,))
    found = found_in("topk=topk(x)0 values=getitem(topk)0 mm=mm(values)", base)
    assert found == ([], [LostMarker("value 1 of 1", GONE)])


def test_backward_nodes_carry_annotations_and_are_no_part_of_it() -> None:
    assert found_in("tangent grad=mul(x,tangent)0 out=sin(grad)", VALUE) == ([], [])


def test_an_annotation_is_read_as_it_was_written() -> None:
    mark = evolve(record("silu", 3, count=7, following="mm"), stands_for=[4, 5])
    assert from_annotation(mark.annotation()) == mark
    assert from_annotation(True) is None
    assert from_annotation({"something": "else"}) is None
