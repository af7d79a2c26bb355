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

from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.graph.recorded import recorded_facts
from tests.support.shared_graphs import FOLDER, JOINT, ONE_DEVICE, process_groups, shared_graph

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
    facts, live = of_file(name), collect(shared_graph(name))
    for each in attrs.fields(Facts):
        if each.name in ("groups", "meshes"):  # which the live graph does not have here
            continue
        one, other = getattr(facts, each.name), getattr(live, each.name)
        assert (list(one) == list(other)) if snapshot.is_column(each.name) else one == other, each.name


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


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    result = copy.deepcopy(SMALL)
    place: Any = result
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return result


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
        (changed(["nodes", 2, 3], [{"n": "later"}]), "node 2, `mm`: it reads `later`, which does not come before it"),
        (changed(["nodes", 2, 5], {"shape": "x"}), "node 2, `mm`: "),
        (changed(["nodes", 2, 5], {**TENSOR, "dtype": "float31"}), "node 2, `mm`: torch has no `float31`"),
        (changed(["nodes", 3, 0], "mm"), "node 3, `mm`: its name is none, or is another node's"),
        (changed(["nodes", 0, 6, "desc"], "print('run')"), "node 0, `w`: `print('run')` describes no input"),
        (changed(["nodes", 2, 6, "recompute"], "MAYBE"), "node 2, `mm`: "),
        (changed(["nodes"], SMALL["nodes"][:-1]), "its last node is not the output"),
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
    mark = tmp_path / "mark"
    text = f"ParamAOTInput(target=__import__('pathlib').Path({str(mark)!r}).touch())"
    with pytest.raises(PolicyGraphError, match="describes no input"):
        imported(changed(["nodes", 0, 6, "desc"], text), tmp_path)
    assert not mark.exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PolicyGraphError) as raised:
        recorded_facts(tmp_path / "nowhere.json")
    assert raised.value.diagnostics[0].code == "APL355"
