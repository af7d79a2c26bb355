"""Policies that cost more than they need to: each is a warning with its figures, and gone with the first fix."""

import json
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

import policylang
from policylang.api.load import load_device
from policylang.api.planned_graphs import on_graph, read_any
from policylang.commands.cli import main
from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.files import bundled_names
from policylang.language.loader import parse_policy
from policylang.language.shown import format_quantity
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.simulation.node_times import node_times
from tests.support.drawn import slow

COSTLY = tuple(f"APL70{number}" for number in range(1, 10))
FULL = "blocks model.layers.*\nundecided -> save\nrecompute everything in block"
ATTENTION = "blocks model.layers.*\nundecided -> save\nrecompute attention in block"
STAGED = "recompute everything\nsave everything where crosses cut per 2 GiB"
CROSSING = "save everything in block where crosses block"
EACH = f"recompute everything in block\n{CROSSING}"
OFFLOADED = "device h100-sxm\nundecided -> save\noffload relu"
BESIDE = f"recompute everything in block\nsave matmul or silu in block\n{CROSSING}"
NEAR = "undecided -> save\nlet large = everything where bytes >= 12.1 MiB\nrecompute large in block"
CASES = {
    "APL701": ("llama3_8b", FULL), "APL702": ("llama3_8b", "blocks model.layers\nrecompute everything in block"),
    "APL703": ("llama3_8b", ATTENTION), "APL704": ("long_context", STAGED), "APL705": ("tensor_parallel", EACH),
    "APL706": ("resnet50", OFFLOADED), "APL707": ("llama3_8b", f"{EACH}\nsave aten.scalar_tensor"),
    "APL708": ("gpt2", NEAR), "APL709": ("llama3_8b", BESIDE),
}  # fmt: skip


@cache
def graph(name: str) -> Facts:
    return read_any(f"docs/graphs/{name}.graph")


@cache
def found(text: str, name: str) -> list[Diagnostic]:
    policy = parse_policy(text).policy
    _, diagnostics = on_graph(policy, {name: graph(name)}, None, one_model=False)
    return [each for each in diagnostics if each.code in COSTLY]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "APL701",
            "`recompute everything in block` recomputes what crosses blocks too, so the backward holds several blocks "
            "at once: the peak is 72.4 GiB, and 30.7 GiB with what crosses blocks saved",
        ),
        (
            "APL702",
            "`blocks model.layers` makes 1 block of 32 numbered modules: `model.layers` is the list that holds them",
        ),
        ("APL703", "`recompute attention in block` recomputes 35.2 TFLOP and frees 32 MiB: saved views keep its 2 GiB"),
        (
            "APL704",
            "`save everything where crosses cut per 2 GiB` saves what the backward never reads: the policy saves "
            "2.1 TiB, and a step that recomputes nothing 1.9 TiB",
        ),
        (
            "APL705",
            "`recompute everything in block` recomputes 8 collectives in the backward: 512 MiB of communication in "
            "each step",
        ),
        (
            "APL706",
            "`offload relu` moves 2.3 GiB, and computation waits 66.1 ms of 100.7 ms for the copies on h100-sxm",
        ),
        (
            "APL707",
            "`save aten.scalar_tensor` decides 64 values of 128 B, and changes memory and work by less than 0.01%",
        ),
        (
            "APL708",
            "`bytes >= 12.1 MiB` is between values that are nearly alike: 36 values within 5% of it, on both sides",
        ),
        (
            "APL709",
            "`save matmul or silu in block` saves 32 values of 7 GiB, each one cheap operator away from a value that "
            "is saved too",
        ),
    ],
)
def test_it_is_a_warning_with_its_figures(code: str, message: str) -> None:
    name, text = CASES[code]
    (costly,) = found(text, name)
    assert (costly.code, costly.severity, costly.message) == (code, Severity.WARNING, message)


@pytest.mark.parametrize("code", CASES)
def test_its_first_fix_makes_it_go_away_and_it_can_be_allowed_on_its_line(code: str) -> None:
    name, text = CASES[code]
    (costly,) = found(text, name)
    mended = costly.fixes[0].applied(costly.span.source)
    assert code not in [each.code for each in found(mended, name)]
    (costly,) = found(text, name)
    lines = text.splitlines()
    at = costly.span.line - 1
    for comment, count in ((f"# allow: {code} on purpose", 0), ("#allow: APL999, " + code, 0), ("# allow: APL303", 1)):
        allowed = [*lines[:at], f"{lines[at]}  {comment}", *lines[at + 1 :]]
        assert len(found("\n".join(allowed), name)) == count


def test_the_fixes_are_lines_of_the_policy() -> None:
    fixes = {code: [fix.title for fix in found(text, name)[0].fixes] for code, (name, text) in CASES.items()}
    assert fixes == {
        "APL701": [f"write `{CROSSING}` below it"],
        "APL702": ["write `blocks model.layers.*`"],
        "APL703": ["write `recompute everything where is view` below it", "remove the line"],
        "APL704": ["write `recompute everything where not feeds backward` below it", "remove the line"],
        "APL705": ["write `save reduce_scatter_tensor` below it"],
        "APL706": ["write `up to 293.2 MiB per rank`", "remove the line"],
        "APL707": ["remove the line"],
        "APL708": ["write `10.8 MiB`", "write `13.6 MiB`"],
        "APL709": ["write `recompute silu` below it"],
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3_8b", f"{FULL}\n{CROSSING}"),
        ("llama3_8b", "recompute everything in last block"),  # what one block hands on is all that it recomputes
        ("llama3_8b", f"{ATTENTION}\nrecompute everything where is view"),
        ("llama3_8b", "blocks model.layers.0\nrecompute silu in block"),
        ("resnet50", "blocks stages.*\nrecompute relu"),  # a stage holds a list of layers, and is one of a list
        ("long_context", "recompute everything\nsave everything where crosses block"),
        ("llama3_8b", STAGED),
        ("fsdp", EACH),  # FSDP gathers weights for the backward by design
        ("tensor_parallel", f"{EACH}\nsave reduce_scatter"),
        ("tensor_parallel", f"recompute everything in block\nrecompute collective in block\n{CROSSING}"),
        ("resnet50", "undecided -> save\noffload relu"),  # nobody knows how long a copy takes
        ("llama3_8b", "device h100-sxm\nundecided -> save\noffload mm where bytes >= 64 MiB up to 8 GiB per rank"),
        ("llama3_8b", f"{EACH}\nsave rsqrt in block"),  # 2 MiB, and 8 GiB less to recompute
        ("llama3_8b", f"{EACH}\noptional save aten.scalar_tensor"),
        ("llama3_8b", "undecided -> save\nsave aten.scalar_tensor"),  # so it would be without the line
        ("llama3_8b", "undecided -> auto\nsave aten.scalar_tensor"),  # what PyTorch would do is not known
        ("llama3_8b", f"{EACH}\nsave everything in every 2nd block"),  # it asks for blocks without recomputation
        ("llama3_8b", f"{EACH}\nsave silu in block"),  # its source is recomputed, and a matmul
        ("llama3_8b", "undecided -> save\nsave silu in block"),  # a step that recomputes nothing
        ("gpt2", NEAR.replace("12.1", "10.8")),
        ("gpt2", NEAR.replace("12.1", "12.6")),  # all values near it are smaller
        ("gpt2", NEAR.replace("undecided -> save", "undecided -> recompute") + f"\n{CROSSING}"),  # no value differs
    ],
)
def test_nothing_is_said_of_policies_that_cost_what_they_need_to(name: str, text: str) -> None:
    assert found(text, name) == []


def test_without_a_rule_the_undecided_line_is_named() -> None:
    (costly,) = found("blocks model.layers.*\nundecided -> recompute", "llama3_8b")
    assert costly.code == "APL701"
    assert costly.span.text == "undecided -> recompute"


@pytest.mark.parametrize("policy", bundled_names())
@pytest.mark.parametrize("name", ["llama3_8b", "tutorial", slow("tensor_parallel"), "vit"])
def test_bundled_policies_are_clean(policy: str, name: str) -> None:
    """`memory_staged` allows APL701 on its line; where single values are larger than its stages, as on the graph of a
    long context, it does save more than no policy, and that is said."""
    assert found(f"include <{policy}>", name) == []


def test_a_comment_allows_warnings_of_texts_alone() -> None:
    text = "let unused = mm{}\nsave bmm"
    assert [each.code for each in parse_policy(text.format("")).diagnostics] == ["APL110"]
    assert parse_policy(text.format("  # allow: APL110")).diagnostics == ()
    assert parse_policy("save bmmm  # allow: APL101").diagnostics[0].code == "APL101", "an error stays"


def test_a_recomputed_collective_is_shown_with_its_time_on_a_device() -> None:
    """The time of the whole group is that of the profile; the peak that the help names is that of the mended policy."""
    text = f"device h100-sxm\n{EACH}"
    (costly,) = found(text, "tensor_parallel")
    facts, device = graph("tensor_parallel"), load_device("h100-sxm")
    seconds = node_times(facts, device).seconds
    each = {seconds[row] for target, rows in facts.by_target.items() if "reduce_scatter" in target for row in rows}
    assert len(each) == 1
    took = format_quantity(8 * each.pop(), "seconds")
    assert f"512 MiB of communication ({took} on h100-sxm) in each step" in costly.message
    plans = (plan_of(each, "tensor_parallel") for each in (costly.fixes[0].applied(costly.span.source), text))  # type: ignore[union-attr]
    mended, before = (format_quantity(plan.peak.bytes, "bytes") for plan in plans)
    assert costly.help == f"write `save reduce_scatter_tensor` below it: the peak is {mended} with it, {before} without"


def plan_of(text: str, name: str) -> Plan:
    policy = parse_policy(text).policy
    (plan,), _ = on_graph(policy, {name: graph(name)}, None, one_model=False)
    return plan


def test_saved_gathers_of_activations_leave_those_of_parameters() -> None:
    text = "recompute everything in block\nsave matmul in block"
    costly = next(each for each in found(text, "tensor_parallel") if each.code == "APL705")
    mended = costly.fixes[0].applied(costly.span.source)
    assert "\nsave (reduce_scatter_tensor or all_gather_into_tensor) where not from parameter\n" in mended
    assert [each.code for each in found(mended, "tensor_parallel")] == []


def test_without_a_rule_the_undecided_line_recomputes_the_collectives() -> None:
    (costly,) = found(f"undecided -> recompute\n{CROSSING}", "tensor_parallel")
    assert (costly.code, costly.span and costly.span.text) == ("APL705", "undecided -> recompute")


def test_the_budget_of_an_offload_is_one_that_computation_hides() -> None:
    (costly,) = found(OFFLOADED, "resnet50")
    mended = costly.fixes[0].applied(costly.span.source)
    assert mended.endswith("\noffload relu up to 293.2 MiB per rank")
    smaller = mended.replace("293.2 MiB", "100 MiB").replace("relu", "relu or add")
    assert found(smaller, "resnet50") == []
    (again,) = found(mended.replace("293.2 MiB", "2 GiB"), "resnet50")
    fixed = again.fixes[0].applied(again.span.source)
    assert fixed.count("per rank") == 1
    assert found(fixed, "resnet50") == []


def test_the_values_on_both_sides_of_a_threshold_are_named() -> None:
    (costly,) = found(NEAR, "gpt2")
    assert costly.details == (
        "12 MiB: 24 values saved, add_4, add_7, and 22 more",
        "12.4 MiB: 12 values recomputed, _scaled_dot_product_cudnn_attention, _scaled_dot_product_cudnn_attention_1, "
        "and 10 more",
    )
    for fix in costly.fixes:
        assert [each.code for each in found(fix.applied(costly.span.source), "gpt2")] == []


def test_what_is_saved_beside_its_source_is_weighed_by_a_plan_without_it() -> None:
    """What the help says to write frees what it names, for operators whose time is that of the profile; a cast whose
    source is a rule's to save is saved in the place of its source, at twice the bytes."""
    text = f"device h100-sxm\nundecided -> recompute\n{CROSSING}\nsave matmul or _to_copy"
    costly = next(each for each in found(text, "llama3_8b") if each.code == "APL709")
    plans = [plan_of(each, "llama3_8b") for each in (text, costly.fixes[0].applied(costly.span.source))]
    before, after = (saved_and_recomputed(each) for each in plans)
    assert f"it frees {format_quantity(before.saved_bytes - after.saved_bytes, 'bytes')}" in costly.help
    more = after.recomputed_operators - before.recomputed_operators
    assert f"recomputes {more} operators" in costly.help
    took = plans[1].shown_step_time.recomputed - plans[0].shown_step_time.recomputed
    assert f"({format_quantity(took, 'seconds')} on h100-sxm)" in costly.help
    assert costly.details[0].endswith("128 MiB, from add_8")


# --- what `fuse` is worth on a device ---
GRAPH = "docs/graphs/fsdp.graph"
TEXT = "optional fuse all_gather chains\nundecided -> save"


def warned(text: str, device: DeviceProfile | str | None, graph: str = GRAPH) -> list[policylang.Diagnostic]:
    found = policylang.check(policylang.parse(text), graph=graph, device=device).diagnostics
    return [each for each in found if each.code == "APL380"]


def test_a_gather_that_leaves_its_server_is_a_warning_with_its_figures() -> None:
    (found,) = warned(TEXT, "h100-sxm")
    assert found.message == (
        "`optional fuse all_gather chains` slows the step on h100-sxm, from 360.2 ms to 453.8 ms: "
        "157.4 ms of it waits for collectives, without the line 63.8 ms"
    )
    assert found.details == ("75 over 128 ranks, in place of 16 and 8",)
    assert (found.severity.value, found.span is not None) == ("warning", True)
    assert found.fixes[0].applied(found.span.source).strip() == "undecided -> save"  # type: ignore[union-attr]


def test_on_one_network_it_gains_and_without_a_device_nothing_is_said() -> None:
    device = policylang.load_device("h100-sxm")
    whole = evolve(device, networks=tuple(each for each in device.networks if each.ranks is None))
    assert not warned(TEXT, whole)
    assert not warned(TEXT, None)


def test_slices_buy_memory_with_time_and_are_named_where_they_buy_none() -> None:
    text = "chunk loss into 32\nundecided -> save"
    assert not warned(text, "h100-sxm", "docs/graphs/gpt2.graph")
    (found,) = warned(text, "h100-sxm", "docs/graphs/vit.graph")
    assert found.message == (
        "`chunk loss into 32` slows the step on h100-sxm, from 14.3 ms (0.0142726707 s) to "
        "14.3 ms (0.0143460591 s), and does not lower the peak"
    )
    assert found.help == "remove the line"


def test_a_warning_of_an_included_line_names_the_include_and_is_allowed_there(tmp_path: Path) -> None:
    (tmp_path / "cut.apl").write_text("chunk loss into 32\nundecided -> save\n")
    (tmp_path / "whole.apl").write_text('include "cut.apl"\n')
    graph = "docs/graphs/vit.graph"
    (found,) = policylang.check(tmp_path / "whole.apl", graph=graph, device="h100-sxm").diagnostics
    assert (found.code, found.related[-1].message) == ("APL380", "included from here")
    (tmp_path / "whole.apl").write_text('include "cut.apl"  # allow: APL380, the loss may grow\n')
    assert not policylang.check(tmp_path / "whole.apl", graph=graph, device="h100-sxm").diagnostics


def test_what_a_line_is_worth_is_the_step_with_it_less_the_step_without(tmp_path, capsys) -> None:
    path = tmp_path / "one.apl"
    steps = []
    for text in (TEXT, "undecided -> save\n"):
        path.write_text(text)
        main(["plan", str(path), "--graph", GRAPH, "--device", "h100-sxm", "--output-format", "json"])
        steps.append(json.loads(capsys.readouterr().out))
    under, without = steps
    assert not without["rewrites"]
    (rewrite,) = under["rewrites"]
    assert rewrite["text"] == "optional fuse all_gather chains"
    assert rewrite["rewritten"] == rewrite["fewer_collectives"] == 75
    for figure in ("step_seconds", "exposed_seconds", "saved_bytes"):
        assert rewrite["worth"][figure] == pytest.approx(under["with"][figure] - without["with"][figure])
    highest, other = (max(each["with"]["peak"][half] for half in ("forward", "backward")) for each in steps)
    assert rewrite["worth"]["peak_bytes"] == highest - other
