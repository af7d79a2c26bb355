"""What is kept beside Inductor's caches, and what the keys of both are made of."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

import policylang
from policylang.backends import caching
from policylang.backends.joint import JointPartitioner
from policylang.backends.torch_compile.inductor import CachedPartitioner
from policylang.graph import marks
from policylang.language.diagnostics import Diagnostic
from policylang.language.plain_data import from_plain, to_plain
from policylang.planning import statement_errors
from policylang.planning.statement_errors import Complaint
from tests.support.models import Function

KEY = "ab" * 32


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def the_file(folder: Path) -> Path:
    (path,) = (folder / "policylang").rglob("*.json")
    return path


def test_a_record_is_read_as_it_was_written_and_is_one_file(folder: Path) -> None:
    assert caching.read_sidecar(KEY) is None
    for number in range(3):
        assert caching.write_sidecar(KEY, {"partitions": [number, "ü"]})
        assert caching.read_sidecar(KEY) == {"partitions": [number, "ü"]}
    assert [path.name for path in (folder / "policylang").rglob("*") if path.is_file()] == [f"{KEY}.json"]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"format": 0}', b"[" * 100_000])
def test_a_damaged_record_is_none(folder: Path, damage: bytes) -> None:
    caching.write_sidecar(KEY, {"partitions": []})
    the_file(folder).write_bytes(damage)
    assert caching.read_sidecar(KEY) is None


def test_a_record_of_another_graph_is_none(folder: Path) -> None:
    caching.write_sidecar(KEY, {"partitions": []})
    path = the_file(folder)
    path.write_text(path.read_text().replace(KEY, "cd" * 32))
    assert caching.read_sidecar(KEY) is None


def test_a_folder_that_takes_no_files_is_no_error(folder: Path) -> None:
    (folder / "policylang").write_text("in the way")
    assert not caching.write_sidecar(KEY, {"partitions": []})
    assert caching.read_sidecar(KEY) is None


def key_of(text: str, root: str = "") -> str:
    return caching.policy_key(policylang.parse(text), root=root)


def test_the_key_has_each_word_of_a_policy_the_root_and_the_code_and_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of("save mm; recompute everything") == key_of("# why\nsave   mm\n\nrecompute everything  # because")
    before = key_of("save mm")
    for other in ("save bmm", "save mm where bytes > 1 MiB", "prefer_save mm", "optional save mm"):
        assert key_of(other) != before
    assert key_of("save mm", root="layers.0") != before
    monkeypatch.setattr(caching, "code_digest", lambda: "another version")
    assert key_of("save mm") != before


def test_the_partitioner_pickles_to_its_key_alone() -> None:
    policy = policylang.parse("# a comment\nsave mm")
    partitioner = CachedPartitioner(JointPartitioner(policy), "the key")
    assert partitioner.uuid() == "the key"
    assert b"comment" not in pickle.dumps(partitioner)
    same = CachedPartitioner(JointPartitioner(policylang.parse("save mm")), "the key")
    assert pickle.dumps(partitioner) == pickle.dumps(same)
    assert pickle.loads(pickle.dumps(partitioner)).uuid() == "the key"


def Named(name: str) -> nn.Module:
    return Function(lambda model, x: getattr(model, name)(x), **{name: Function(torch.sin)})


def dynamo_graph(function: Callable[..., object], *inputs: Tensor) -> tuple[fx.GraphModule, list[object]]:
    seen: list[tuple[fx.GraphModule, list[object]]] = []

    def keep(gm: fx.GraphModule, example_inputs: list[object]) -> fx.GraphModule:
        seen.append((gm, example_inputs))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=keep)(*inputs)
    torch._dynamo.reset()
    return seen[0]


def test_module_paths_are_in_the_context_though_not_in_the_code() -> None:
    """A module without parameters leaves no trace in the code of a graph, and rules may name it."""
    x = torch.ones(3)
    (one, inputs), (other, _), (again, _) = (dynamo_graph(Named(name), x) for name in ("attention", "mlp", "mlp"))
    assert one.code == other.code
    assert caching.context_of(one) != caching.context_of(other)
    assert caching.context_of(other) == caching.context_of(again)
    assert caching.sidecar_key("", one, inputs) == caching.sidecar_key("", other, inputs)


def test_records_of_an_earlier_partition_are_in_the_context() -> None:
    gm, _ = dynamo_graph(torch.sin, torch.ones(3))
    before = caching.context_of(gm)
    next(node for node in gm.graph.nodes if node.op == "call_function").meta["custom"] = {marks.SAVED: True}
    assert caching.context_of(gm) != before


def test_a_records_key_tells_inputs_and_surroundings_apart() -> None:
    gm, inputs = dynamo_graph(torch.sin, torch.ones(3))
    keys = {caching.sidecar_key("", gm, inputs), caching.sidecar_key("other", gm, inputs)}
    keys.add(caching.sidecar_key("", gm, [torch.ones(4)]))
    keys.add(caching.sidecar_key("", gm, [torch.ones(3, dtype=torch.float64)]))
    keys.add(caching.sidecar_key("", gm, [torch.ones(3, requires_grad=True)]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.add(caching.sidecar_key("", gm, inputs))
    with torch.no_grad():
        keys.add(caching.sidecar_key("", gm, inputs))
    assert len(keys) == 7


def test_a_deferred_complaint_survives_json_and_a_moved_rule() -> None:
    policy = policylang.parse("save mm\nsave aten.convolution where bytes > 1")
    moved = policylang.parse("# moved\nsave mm\nsave aten.convolution where bytes > 1")
    span = policy.rules[1].selector.span
    diagnostic = Diagnostic(
        "APL301", "`x` matches nothing in this graph", span, "write `optional`", details=("aten.convolution: 0 nodes",)
    )
    found = statement_errors.complaints(policy, [diagnostic])
    again = tuple(from_plain(Complaint, json.loads(json.dumps(to_plain(each)))) for each in found)
    assert again == found
    (shown,) = statement_errors.shared_by_all(moved, [("graph 0", again)], root="")
    assert shown.span.text == "aten.convolution where bytes > 1"
    assert shown.span.line == 3
    assert shown.details == ("aten.convolution: 0 nodes",)


def test_what_one_graph_answers_is_no_complaint() -> None:
    policy = policylang.parse("save mm\nsave bmm")
    found = [Diagnostic("APL301", "nothing", rule.span) for rule in policy.rules]
    first, second = (statement_errors.complaints(policy, found[start:]) for start in (0, 1))
    assert len(statement_errors.shared_by_all(policy, [("a", first)], root="")) == 2
    (left,) = statement_errors.shared_by_all(policy, [("a", first), ("b", second)], root="")
    assert left.span == policy.rules[1].span
    assert statement_errors.shared_by_all(policy, [("a", first), ("b", ())], root="") == ()
    assert statement_errors.shared_by_all(policy, [], root="") == ()
