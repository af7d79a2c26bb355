"""Facts in a file and back, as JSON that others record, as text, and on the device that a graph was traced on."""

import json
import lzma
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import strategies as st

import policylang
from policylang.errors import PolicyGraphError
from policylang.graph import snapshot
from policylang.graph.collect import collect
from policylang.graph.facts import (
    COLUMNS,
    OF_GRAPH,
    Facts,
    Flag,
    GraphKind,
    Group,
    InputKind,
    LostMarker,
    Mesh,
    Phase,
    Ref,
)
from policylang.graph.textual import read_graph
from policylang.graph.traced_device import attention_kernels, kernel_findings, traced_on
from policylang.language.diagnostics import Source
from policylang.language.loader import load_policy, parse_policy
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from tests.graph.captured import facts_of_model
from tests.support.drawn import drawn, slow
from tests.support.flat_graphs import flat_graph
from tests.support.models import ZOO
from tests.support.shared_graphs import BACKWARD, JOINT, ONE_DEVICE, shared_facts
from tests.support.textgraph import facts_of

POLICIES = tuple(path.stem for path in sorted((Path(__file__).parents[2] / "policies").glob("*.apl")))
SMALL = """
    %w = parameter
    %x = input
    %mm = aten.mm.default(%x, %w) layers.0 shape=8x8
    %sin = aten.sin.default(%mm) layers.0 shape=8x8
    %mm_1 = aten.mm.default(%sin, %w) layers.1 shape=8x8
    ---
    %b = aten.mul.Tensor(%sin, %mm_1)
    output(%mm_1, %b)
"""


def assert_same(left: Facts, right: Facts) -> None:
    for each in attrs.fields(Facts):
        one, other = getattr(left, each.name), getattr(right, each.name)
        if each.name in COLUMNS:
            one, other = list(one), list(other)
        assert one == other, each.name


def everything_said() -> Facts:
    """A graph of three nodes with a value of its own in each column, and something in all that is said of the whole."""
    facts = facts_of("%x = input\n%a = aten.sin.default(%x)\n%b = aten.add.Tensor(%a, %x)\n---\noutput(%b)")
    rows = len(facts)
    own: dict[str, Any] = {
        "modules": ["", "layers.0", "layers.1", ""], "ac_regions": [None, 3, 0, None],
        "user_tags": [None, "MUST_SAVE", None, None], "flags": [0, 1, 32767, 0], "bytes": [0, 1 << 40, 3, 0],
        "numel": [0, 1 << 39, 4, 0], "shapes": [None, (1 << 39, 1), (), None], "strides": [None, (1, 0), None, None],
        "dtypes": ["", "bfloat16", "float32", ""], "devices": ["", "cuda:0", "cpu", ""], "flops": [0, 5, 1 << 60, 0],
        "owners": [0, 1, 1, 3], "input_kinds": [1, 0, 0, 0], "input_names": ["layers.0.weight", "", "", ""],
        "arguments": [(), (Ref(0), 1, True, 1.5, None, "float32", (Ref(0), -7)), ((Ref(1), 2),), ()],
        "group_names": ["", "7", "", ""], "annotations": [(), ("ap_must_save",), ("a", "b"), ()],
        "uncounted": ["", "mylib.fused_mlp.default", "", ""], "data_sizes": [(), (96, 0, 3072), (7, 12, -1), ()],
        "data_terms": [(), (0, 32, (("u0", 8), ("u1", -8))), (-1, 0, ()), ()],
        "stages": [-1, 0, 1, -1],
    }  # fmt: skip
    assert all(len(column) == rows for column in own.values())
    return attrs.evolve(
        facts,
        **own,
        groups={"7": Group("7", (0, 8, 16), 3, "dp")},
        meshes=(Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3)),),
        rank=5,
        torch_version="2.13.0",
        lost_records=(LostMarker("value 7 of 36", "gone"),),
    )


def test_every_field_is_stored() -> None:
    """A field that is added to facts and not stored fails here: give it a value above."""
    facts = everything_said()
    assert_same(snapshot.parse(snapshot.dump(facts)), facts)
    assert snapshot.dump(facts) == snapshot.dump(everything_said())
    plain = facts_of("%x = input\n%a = aten.sin.default(%x)\n---\noutput(%a)")
    same = [each.name for each in attrs.fields(Facts) if list_of(facts, each.name) == list_of(plain, each.name)]
    assert not set(same) - {"kind", "ops"}, "these have no value of their own above"


def test_every_field_says_how_it_is_checked_when_it_is_read() -> None:
    assert {each.name for each in attrs.fields(Facts)} == COLUMNS.keys() | OF_GRAPH.keys()


def test_a_snapshot_without_annotations_is_read_and_says_so() -> None:
    facts = attrs.evolve(everything_said(), owners=[0, 1, 2, 3], annotations=())
    old = snapshot.dump(facts)
    assert "annotations" not in unpacked(old)["columns"]
    read = snapshot.parse(old)
    loaded = parse_policy("save sin where annotated ap_must_save")
    assert_same(read, facts)
    found = plan(loaded.policy, read, capabilities_for(read.kind)).diagnostics
    (nothing,) = [each for each in found if each.code == "APL301"]
    assert nothing.details == (
        "sin: 1 node",
        "where annotated ap_must_save: 0 of them; this snapshot has no annotations: an older policylang wrote it",
    )


def list_of(facts: Facts, name: str) -> Any:
    value = getattr(facts, name)
    return list(value)[:3] if name in COLUMNS else value


@pytest.mark.parametrize("kind", list(GraphKind))
def test_every_kind_of_graph(kind: GraphKind) -> None:
    facts = attrs.evolve(everything_said(), kind=kind)
    read = snapshot.parse(snapshot.dump(facts))
    assert read.kind is kind
    assert repr(list(read.arguments)) == repr(list(facts.arguments)), "whole numbers and truth values are told apart"


@pytest.mark.parametrize(
    "names", [("mm", "mm_1", "mm_3", "mm_2"), ("_1", "a_01", "a_", "a_1_2"), ("é_7", "b_9999999999", "0", "_")]
)
def test_names_of_every_form(names: tuple[str, ...]) -> None:
    facts = attrs.evolve(everything_said(), names=names)
    assert tuple(snapshot.parse(snapshot.dump(facts)).names) == names


@pytest.mark.parametrize("name", [ONE_DEVICE, *map(slow, (JOINT, BACKWARD))])
def test_a_recorded_graph_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    facts = shared_facts(name)
    path = tmp_path / "recorded.graph"
    snapshot.write(facts, path)
    read = snapshot.load(path)
    assert_same(read, facts)
    assert path.stat().st_size < min(3 * len(facts), 64 << 10), "three bytes a node"
    assert_same_plans(read, facts, POLICIES if name != ONE_DEVICE else POLICIES[:3])


def assert_same_plans(left: Facts, right: Facts, policies: Iterable[str] = POLICIES) -> None:
    for name in policies:
        policy = load_policy(name).policy
        one, other = (plan(policy, facts, capabilities_for(facts.kind)) for facts in (left, right))
        assert one.digest == other.digest, name
        assert one.diagnostics == other.diagnostics, name
        assert [each.found for each in one.expectations] == [each.found for each in other.expectations], name


LARGE = [slow(model) for model in ("llama", "mixtral", "gpt2")]


@pytest.mark.parametrize("path", ["joint", "flat"])
@pytest.mark.parametrize("model", [*LARGE, "resnet", "dropout", "counter"])
def test_a_plan_on_a_snapshot_is_the_plan_on_the_graph(model: str, path: str) -> None:
    if (model, path) == ("mixtral", "flat"):
        pytest.skip("eager's grouped product takes bfloat16 alone")
    facts = facts_of_model(model) if path == "joint" else collect(flat_graph(ZOO[model]()).gm)
    read = snapshot.parse(snapshot.dump(facts))
    assert_same(read, facts)
    assert_same_plans(read, facts)


@pytest.mark.slow
def test_a_graph_whose_nodes_are_all_alike_is_read_again() -> None:
    small, rows = everything_said(), 1 << 16
    said = {each.name: getattr(small, each.name) for each in attrs.fields(Facts)}
    alike = {name: [said[name][1]] * rows for name in said if name in COLUMNS}
    own = {"names": [f"a_{row}" for row in range(rows)], "inputs": [()] * rows, "arguments": [()] * rows}
    facts = Facts(**{**said, **alike, **own, "owners": range(rows), "users": [()] * rows})
    data = snapshot.dump(facts)
    assert snapshot.parse(data).names[-1] == f"a_{rows - 1}"


# --- files that are no snapshots ------------------------------------------------------------------------------------
def refusal(data: bytes) -> Any:
    with pytest.raises(PolicyGraphError) as raised:
        snapshot.parse(data, "g.graph")
    (diagnostic,) = raised.value.diagnostics
    return diagnostic


def packed(document: Any) -> bytes:
    return lzma.compress(document if isinstance(document, bytes) else json.dumps(document).encode())


def unpacked(data: bytes) -> Any:
    return json.loads(lzma.decompress(data))


PARTS: dict[str, Any] = {"format": 2, "graph": {}, "columns": {}}


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"", "APL353", "`g.graph` is damaged: it is empty"),
        (snapshot.MAGIC[:4], "APL353", "`g.graph` is damaged: it ends too early"),
        (snapshot.MAGIC, "APL353", "`g.graph` is damaged: it ends too early"),
        (snapshot.MAGIC + b"x" * 40, "APL353", "`g.graph` is damaged: its content cannot be unpacked"),
        (packed(PARTS) + b"x", "APL353", "`g.graph` is damaged: something follows its end"),
        (b"policy llama3\n", "APL351", "`g.graph` is not a snapshot of a graph"),
        (bytes(range(256)) * 100, "APL351", "`g.graph` is not a snapshot of a graph"),
        (packed(b"flops"), "APL353", "`g.graph` is damaged: its content is not JSON"),
        (packed(b"\xff"), "APL353", "`g.graph` is damaged: its content is not JSON"),
        (packed(b"[" * 200_000), "APL353", "`g.graph` is damaged: its values are nested too deep"),
        (packed([2]), "APL353", "`g.graph` is damaged: it does not name its format"),
        (packed({"format": True}), "APL353", "`g.graph` is damaged: it does not name its format"),
        (packed({"format": 7}), "APL352", "`g.graph` has format 7, and this policylang reads format 2"),
        (packed({"format": 2}), "APL353", "`g.graph` is damaged: it has no `graph` and `columns`"),
        (packed(PARTS), "APL353", "`g.graph` is damaged: it lacks `groups` of its graph"),
    ],
)  # fmt: skip
def test_what_is_no_snapshot_is_refused_by_name(data: bytes, code: str, said: str) -> None:
    found = refusal(data)
    assert (found.code, found.message) == (code, said)


def test_a_file_of_the_first_format_says_how_to_make_it_again() -> None:
    found = refusal(b"\x8aAPLG\r\n\x1a\1\0" + bytes(40))
    assert (found.code, found.message) == ("APL352", "`g.graph` has format 1, and this policylang reads format 2")
    assert "`policylang snapshot MODULE:FUNCTION -o FILE`" in found.help


def test_a_bomb_is_not_unpacked() -> None:
    """64 MiB of zeros in 10 KB: no more of it is made than a graph in so small a file can have."""
    data = lzma.compress(bytes(1 << 26), preset=0)
    found = refusal(data)
    assert found.code == "APL354"
    assert re.fullmatch(rf"`g.graph` is larger .*: its {len(data):,} bytes unpack to more than [\d,]+", found.message)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.graph"
    with open(path, "wb") as file:
        file.write(snapshot.MAGIC)
        file.truncate(1 << 33)  # sparse: it takes no room
    with pytest.raises(PolicyGraphError, match="it has 8,589,934,592 bytes"):
        snapshot.load(path)


def test_a_python_without_lzma_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lzma", None)
    found = refusal(DATA)
    assert found.code == "APL355"
    assert found.message == "snapshots are packed with xz, and this Python was built without `lzma`"


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no endless file here")
def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(PolicyGraphError, match="is larger than a snapshot can be"):
        snapshot.load("/dev/zero")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.graph", tmp_path):
        with pytest.raises(PolicyGraphError) as raised:
            snapshot.load(path)
        assert raised.value.diagnostics[0].code == "APL355"
    with pytest.raises(PolicyGraphError, match="cannot be written"):
        snapshot.write(facts_of(SMALL), tmp_path / "no" / "such" / "folder.graph")


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("owners", [0, 0, 2, 5, 4, 5, 6], "another producer"),
        ("owners", [0, 1, 2, 2, 3, 5, 6], "another producer"),
        ("ops", ["x"] * 7, "`ops` holds what cannot be there"),
        ("phases", [9] * 7, "`phases` holds what cannot be there"),
        ("flags", [1 << 20] * 7, "`flags` holds what cannot be there"),
        ("bytes", [-1] * 7, "`bytes` holds what cannot be there"),
        ("bytes", [True] * 7, "`bytes` holds what cannot be there"),
        ("shapes", [("x",)] * 7, "`shapes` holds what cannot be there"),
        ("group_names", ["9"] * 7, "names a process group that it does not list"),
        ("names", ["a"] * 7, "two of its nodes have one name"),
        ("targets", ["mm"] * 7, "an operator without a namespace"),
        ("groups", {"1": Group("1", ("x",), 1)}, "its `groups` is not valid"),  # type: ignore[arg-type]
        ("meshes", (Mesh(("a",), (3,), (0, 1)),), "its `meshes` is not valid"),
        ("lost_records", (1,), "its facts about the whole graph are not valid"),
        ("groups", {"1": 5}, "its facts about the whole graph are not valid"),
    ],
)
def test_facts_that_cannot_be_are_refused(column: str, values: Any, said: str) -> None:
    """Planning relies on what facts say; a file may say anything."""
    facts = facts_of(SMALL)
    own = {column: values[: len(facts)] if isinstance(values, list) else values}
    found = refusal(snapshot.dump(attrs.evolve(facts, **own)))
    assert found.code == "APL353"
    assert said in found.message


@pytest.mark.parametrize("part", ["columns", "graph"])
def test_what_a_newer_version_says_is_not_left_out(part: str) -> None:
    document = unpacked(DATA)
    document[part]["flips"] = [[], []]
    found = refusal(packed(document))
    assert (found.code, found.help) == ("APL352", "update policylang, or write the snapshot again")
    assert "`flips`" in found.message


@pytest.mark.parametrize(
    ("column", "table", "said"),
    [
        ("flops", 5, "is not values and their numbers"),
        ("flops", [[0]], "is not values and their numbers"),
        ("flops", [[0], [-1] * 4], "is not values and their numbers"),
        ("flops", [[0], ["0"] * 4], "is not values and their numbers"),
        ("flops", [[0], [1] * 4], "has values that it does not list"),
        ("flops", [{"0": 0}, [0] * 4], "has values that it does not list"),
        ("flops", [[0], [0] * 5], "different lengths"),
        ("flops", [[{}], [0] * 4], "`flops` holds what cannot be there"),
        ("owners", [[9], [0] * 4], "points outside the graph"),
        ("inputs", [[[1]], [0] * 4], "points outside the graph"),
        ("inputs", [[[0]], [0] * 4], "has a node read a later one"),
        ("inputs", [[[1, 1]], [0] * 4], "`inputs` holds what cannot be there"),
        ("arguments", [[[{"back": 1}]], [0] * 4], "points outside the graph"),
        ("arguments", [[[{"back": "1"}]], [0] * 4], "an argument in it is no value"),
        ("arguments", [[["\x1b"]], [0] * 4], "a text in it cannot be printed"),
        ("arguments", [[[0] * (1 << 20)], [0] * 4], "holds more than a graph of its size can"),
        ("names", [["a" * (1 << 20)], [0] * 4], "its names are longer than any graph's"),
        ("name_numbers", [["1"], [0] * 4], "a name in it ends in no number"),
        ("name_numbers", [[-1], [0] * 4], "a name in it ends in no number"),
    ],
)
def test_columns_that_cannot_be_are_refused(column: str, table: Any, said: str) -> None:
    document = unpacked(DATA)
    document["columns"][column] = table
    found = refusal(packed(document))
    assert found.code == "APL353"
    assert said in found.message


def planned(data: bytes) -> None:
    """Read it and plan on it; a diagnostic is an answer too."""
    try:
        facts = snapshot.parse(data)
    except PolicyGraphError:
        return
    policy = load_policy("llama3_sac").policy
    plan(policy, facts, capabilities_for(facts.kind))


DATA = snapshot.dump(everything_said())
BODY = lzma.decompress(snapshot.dump(facts_of(SMALL)))


@drawn(25, 500, st.integers(0, len(DATA) - 1))
def test_a_file_that_was_cut_short(length: int) -> None:
    assert refusal(DATA[:length]).code == "APL353"


@drawn(50, 2000, st.lists(st.tuples(st.integers(0, len(DATA) - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_file_with_changed_bytes(changes: list[tuple[int, int]]) -> None:
    data = bytearray(DATA)
    for at, change in changes:
        data[at] ^= change
    planned(bytes(data))


@drawn(100, 5000, st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.integers(0, 255)), min_size=1, max_size=3))
def test_a_file_that_was_changed_and_packed_again(changes: list[tuple[int, int]]) -> None:
    body = bytearray(BODY)
    for at, byte in changes:
        body[at] = byte
    planned(packed(bytes(body)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=3),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.sampled_from(["back", "name", ""]), each, max_size=2),
    max_leaves=12,
)


@drawn(100, 5000, st.sampled_from([*unpacked(DATA)["columns"], *unpacked(DATA)["graph"]]), JSON, st.booleans())
def test_any_values(name: str, value: Any, in_table: bool) -> None:
    document = unpacked(DATA)
    part = document["columns"] if name in document["columns"] else document["graph"]
    part[name] = [[value], [0] * 4] if in_table else value
    planned(packed(document))


GRAPH = """
# the backward stands below the line
%x = input
%w = parameter shape=8x4 dtype=bf16 name=layers.0.wq.weight
%mm = aten.mm.default(%x, %w) layers.0.wq shape=8x8 dtype=bfloat16 flops=2KFLOP   # a comment
%sdpa = aten._scaled_dot_product_flash_attention.default(%mm, %mm, 1.0) layers.0 multi_output random bytes=2KiB
%out = builtin.getitem(%sdpa, 0) layers.0
%gather = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:4
%wait = _c10d_functional.wait_tensor.default(%gather)
---
%t = tangent
%b = aten.cos.default(%t, %out)
output(%wait, %b)
"""


def collected(text: str, kind: GraphKind | None = None):
    facts, problems = read_graph(Source("graph", text), kind)
    assert problems == ()
    return facts


def said(text: str) -> list[tuple[str, str]]:
    """The code of each problem, and the text that it underlines."""
    facts, problems = read_graph(Source("graph", text))
    assert facts is None
    return [(problem.code, problem.span.text) for problem in problems]


def test_what_a_graph_says():
    facts = collected(GRAPH)
    row = facts.index
    assert facts.kind is GraphKind.JOINT
    assert facts.input_kinds[row["w"]] == InputKind.PARAMETER
    assert facts.input_names[row["w"]] == "layers.0.wq.weight"
    assert facts.modules[row["mm"]] == "layers.0.wq"
    assert (facts.shapes[row["mm"]], facts.dtypes[row["mm"]]) == ((8, 8), "bfloat16")
    assert (facts.numel[row["mm"]], facts.bytes[row["mm"]], facts.flops[row["mm"]]) == (64, 128, 2000)
    assert facts.bytes[row["sdpa"]] == 2048
    assert facts.flags[row["sdpa"]] == Flag.MULTI_OUTPUT | Flag.RANDOM | Flag.FEEDS_BACKWARD
    assert facts.owners[row["out"]] == row["sdpa"]
    assert facts.owners[row["wait"]] == row["gather"]
    assert facts.groups[facts.group_names[row["gather"]]].size == 4
    assert facts.has(row["wait"], Flag.FORWARD_OUTPUT)
    assert facts.phases[row["b"]] == Phase.BACKWARD
    assert facts.inputs[row["sdpa"]] == (row["mm"],)


def test_a_graph_without_a_backward_a_scalar_and_an_operator_that_nobody_knows_here():
    assert collected("%x = input").kind is GraphKind.FORWARD
    assert collected("%x = input", GraphKind.FLAT).kind is GraphKind.FLAT
    assert (facts := collected("%x = input shape=scalar dtype=f32")).shapes[0] == ()
    assert (facts.numel[0], facts.bytes[0]) == (1, 4)
    assert collected("%x = input\n%y = my_library.fused.default(%x)").targets[1] == "my_library.fused.default"


@pytest.mark.parametrize(
    ("line", "code", "underlined"),
    [
        ("%y = aten.mn.default(%x)", "APL503", "aten.mn.default"), ("%y = aten.mm(%x)", "APL503", "aten.mm"),
        ("%y = mm(%x)", "APL503", "mm"), ("%y = aten.sin.default(%z)", "APL502", "%z"), ("%x = input", "APL502", "%x"),
        ("%y = aten.sin.default(x)", "APL501", "x"), ("%y = aten.sin.default(%x) byte=8", "APL503", "byte=8"),
        ("%y = aten.sin.default(%x) bytes=many", "APL501", "many"),
        ("%y = aten.sin.default(%x) bytes=2GFLOP", "APL501", "2GFLOP"),
        ("%y = aten.sin.default(%x) dtype=bf17", "APL501", "bf17"),
        ("%y = aten.sin.default(%x) tag=SAVE", "APL501", "SAVE"),
        ("%y = aten.sin.default(%x) randon", "APL503", "randon"),
        ("%y = aten.sin.default(%x) layers.0 layers.1", "APL503", "layers.1"),
        ("%y = aten.sin.default(%x) follows=%z", "APL501", "%z"),
        ("%y = aten.sin.default(%x) region=9999999999", "APL501", "9999999999"),
        ("%y = aten.sin.default(%x) shape=99999999999x99999999999", "APL501", "99999999999x99999999999"),
        ("%y = aten.sin.default(%x", "APL501", "%y = aten.sin.default(%x"),
        ("aten.sin.default(%x)", "APL501", "aten.sin.default(%x)"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_read(line: str, code: str, underlined: str):
    assert said(f"  %x = input\n  {line}  # said here\n") == [(code, underlined)]


def test_all_that_is_wrong_comes_in_one_run():
    found = [code for code, _ in said("%x = inpt\n%y = aten.mn.default(%q)\n???")]
    assert found == ["APL503", "APL503", "APL502", "APL501"]


ATTENTION = """
%scores = aten.bmm.default(%x, %w) layers.0 device={device}
%soft = aten._safe_softmax.default(%scores, -1) layers.0 device={device}
"""
FUSED = "%soft = aten._scaled_dot_product_flash_attention{cpu}.default(%x, %w, %w) layers.0 multi_output"


def graph(device: str, body: str, name: str = "parameter") -> Facts:
    inputs = f"%x = input device=cpu\n%w = {name} device={device}"
    return collected(f"{inputs}\n{body.format(device=device)}\n---\n%b = aten.cos.default(%soft)")


@pytest.mark.parametrize(
    ("device", "body", "expected"),
    [
        ("meta", ATTENTION, ["APL319"]),
        ("meta", "%soft = aten.sin.default(%w)", ["APL319"]),
        ("cpu", ATTENTION, ["APL320"]),
        ("cpu", FUSED.replace("{cpu}", "_for_cpu"), []),
        ("cpu", "%soft = aten._softmax.default(%w, -1)", []),
        ("cuda:0", ATTENTION, []),
        ("cuda:0", FUSED.replace("{cpu}", ""), []),
        ("cuda:0", "%soft = aten._thnn_fused_lstm_cell.default(%w) multi_output", ["APL319"]),
        ("cpu", "%soft = aten._thnn_fused_lstm_cell.default(%w) multi_output", []),
    ],
)
def test_what_is_said(device, body, expected):
    assert [found.code for found in kernel_findings(graph(device, body))] == expected


def test_the_parameters_say_where_a_graph_was_traced_and_the_inputs_where_there_are_none():
    assert traced_on(graph("cuda:0", ATTENTION)) == {"cuda"}
    assert traced_on(graph("cuda:0", ATTENTION, name="input")) == {"cpu", "cuda"}
    assert traced_on(read_graph(Source("graph", "%x = input"))[0]) == set()


def test_attention_is_counted_by_its_kernels_and_an_empty_graph_says_nothing():
    fused = attention_kernels(graph("cuda:0", FUSED.replace("{cpu}", "")))
    assert fused == {"aten._scaled_dot_product_flash_attention.default": 1}
    assert attention_kernels(graph("cpu", ATTENTION)) == {"aten._safe_softmax.default": 1}
    empty, _ = read_graph(Source("graph", ""))
    assert not list(kernel_findings(empty))


def test_check_says_it_once_for_all_policies_of_a_graph_and_plan_as_well(tmp_path):
    policy = tmp_path / "p.apl"
    policy.write_text("policy p\nrecompute bmm\n")
    (tmp_path / "q.apl").write_text("policy q\nsave bmm\n")
    result = policylang.check(tmp_path, graph=graph("meta", ATTENTION))
    assert [found.code for found in result.diagnostics] == ["APL319"]
    assert (result.errors, result.warnings) == (0, 1)
    assert "1 attention is written out in bmm and softmax" in result.diagnostics[0].details
    assert "--device cuda" in (result.diagnostics[0].help or "")
    result = policylang.check(policy, graph=graph("cpu", ATTENTION))
    assert [found.code for found in result.diagnostics] == ["APL320"]
    assert (result.errors, result.warnings) == (0, 0)


def test_a_graph_is_taken_in_each_form_and_something_else_is_named(tmp_path):
    model, x, policy = torch.nn.Linear(4, 4), torch.ones(2, 4), policylang.parse("undecided -> save")
    step = policylang.trace_step(model, lambda model, x: model(x).sum(), x)
    (written,) = policylang.snapshot(step, tmp_path / "step.graph")
    for graph in (step, step.gm, policylang.load_snapshot(written), written, [step, written]):
        assert not policylang.check(policy, graph=graph).diagnostics
    for graph in (step, policylang.load_snapshot(written)):
        policylang.watch(model, policy, graph=graph)
    (found,) = policylang.check(policy, graph=3).diagnostics
    assert (found.code, found.message) == ("APL356", "a `int` has no graph to take a snapshot of")
    for call, code, said in (
        (lambda: policylang.load_snapshot(step), "APL356", "this is a `TracedStep`"),
        (lambda: policylang.trace_step(torch.sum, model, x), "APL328", "a step is traced of a model, and this is a"),
        (lambda: policylang.checkpoint_model(step, policy), "APL328", "this is a `TracedStep`"),
        (lambda: policylang.watch("model", policy), "APL328", "this is a `str`"),
        (lambda: policylang.check(policy, graph=step, path="jit"), "APL633", "there is no path `jit`"),
        (lambda: policylang.watch(model, policy, steps="3"), "APL251", "`steps` is a whole number from 1 on, and not"),
        (lambda: policylang.watch(model, policy, steps=0), "APL251", "and not `0`"),
        (lambda: policylang.watch(model, policy, optimizer=3), "APL251", "a `torch.optim.Optimizer`, and not `3`"),
        (lambda: policylang.watch(model, policy, to=3), "APL251", "`to` is the path of a file, and not `3`"),
        (lambda: policylang.watch(model, policy, to=tmp_path), "APL251", "in a folder that is there"),
        (lambda: policylang.watch(model, policy, graph=[]), "APL356", "a list of no stages has no graph"),
        (lambda: policylang.trace_step(model, torch.sum, x, optimizer=model), "APL251", "and not a `Linear`"),
        (lambda: policylang.trace_step(model, torch.sum, x, device=2.5), "APL613", "as on `2.5`"),
        (lambda: policylang.trace_step(model, torch.sum, x, compute_capability=9), "APL613", "`9` is no compute"),
        (lambda: policylang.snapshot(step, b"a.graph"), "APL251", "`path` is the path of a file"),
        (lambda: policylang.partition(step.gm, (), num_fwd_outputs=-1), "APL251", "and not `-1`"),
        (lambda: policylang.recompilable(model, num_fwd_outputs=1), "APL328", "this is a `Linear`"),
        (lambda: policylang.context_fn(policy, step), "APL328", "this is a `TracedStep`"),
        (lambda: policylang.context_fn(3, model), "APL104", "this is a `int`"),
        (lambda: policylang.checkpoint_model(model, policy, strict="no"), "APL251", "`strict` is True or False"),
        (lambda: policylang.parse("", name=3), "APL251", "`name` is what reports call the text"),
        (lambda: policylang.profile_device("", seconds=1), "APL251", "`path` is the path of a file, and not `''`"),
        (lambda: policylang.profile_device("x.toml", seconds="1"), "APL251", "a number of seconds, and not `'1'`"),
        (lambda: policylang.profile_device("x.toml", progress=lambda: None), "APL251", "a function of one text, and"),
        (lambda: policylang.tune(step, device=None), "APL251", "`device` is the name or the path"),
    ):
        with pytest.raises(policylang.PolicyError, match=said) as caught:
            call()
        assert [each.code for each in caught.value.diagnostics] == [code]
