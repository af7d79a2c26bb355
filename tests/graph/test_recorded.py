"""Recorded graphs in JSON: the facts are those of the graph, and whatever else a file holds is a diagnostic."""

from __future__ import annotations

import copy
import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch.distributed.device_mesh import init_device_mesh

from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.facts import COLUMNS, Facts, Flag, InputKind, Ref
from policylang.graph.recorded import recorded_facts
from policylang.torch_compat.graphs import operator_names
from tests.support.sharded import fake_ranks
from tests.support.shared_graphs import FOLDER, JOINT, ONE_DEVICE, process_groups, shared_facts

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


@pytest.mark.parametrize("name", [ONE_DEVICE, JOINT])
def test_the_facts_are_those_of_the_graph(name: str) -> None:
    facts, live = of_file(name), shared_facts(name)
    for each in attrs.fields(Facts):
        if each.name in ("groups", "meshes"):  # which the live graph does not have here
            continue
        one, other = getattr(facts, each.name), getattr(live, each.name)
        assert (list(one) == list(other)) if each.name in COLUMNS else one == other, each.name


def test_groups_have_their_ranks_and_their_dimension() -> None:
    facts = of_file(JOINT)
    (mesh,) = facts.meshes
    assert (mesh.dims, mesh.shape) == (("dp", "tp"), (16, 8))
    assert {name: group.ranks for name, group in facts.groups.items()} == process_groups(JOINT)
    assert {group.size: group.dim for group in facts.groups.values()} == {16: "dp", 8: "tp", 128: None}


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
        (changed(["mesh", "dims"], ["d\x1b"]), "what it says as `meshes` cannot be"),
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


def test_no_target_of_a_recording_is_run(tmp_path: Path) -> None:
    """torch writes Python from a graph, in which an input's target stands as it is."""
    mark = tmp_path / "mark"
    imported(changed(["nodes", 1, 2], f"t=__import__('pathlib').Path({str(mark)!r}).touch()"), tmp_path)
    assert not mark.exists()


def test_no_text_of_a_recording_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    text = f"ParamAOTInput(target=__import__('pathlib').Path({str(mark)!r}).touch())"
    with pytest.raises(PolicyGraphError, match="describes no input"):
        imported(changed(["nodes", 0, 6, "desc"], text), tmp_path)
    assert not mark.exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyGraphError) as raised:
        recorded_facts(tmp_path / "nowhere.json")
    assert raised.value.diagnostics[0].code == "APL355"
