"""The order of communication is read off Inductor's code, however it is wrapped up there."""

from __future__ import annotations

import json

import pytest
from attrs import evolve

from policylang.audit.order import ELSEWHERE, CodeAudit, CommunicationStep, between, differences, read_code

# as Inductor of torch 2.13 generated it of a function of every kind of collective, without sizes and comments
ALL_KINDS = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        cpp_fused_all_reduce_mul_0(arg0_1, buf0)
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')
        buf3 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([arg0_1, arg1_1], 2, '0')
        buf4 = buf3[0]
        assert_size_stride(buf4, (8, 4), (4, 1), 'torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default')
        buf5 = buf3[1]
        del buf3
        buf9 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        extern_kernels.mm(arg1_1, arg1_1, out=buf9)
        torch.ops._c10d_functional.wait_tensor.default(buf4)
        cpp_fused_all_reduce_coalesced_broadcast_slice_1(buf9, buf4, buf12, buf18, buf13)
        del buf9
        torch.ops._c10d_functional.all_reduce_coalesced_.default([buf12, buf13], 'sum', '0')
        buf17 = torch.ops._c10d_functional.all_to_all_single.default(arg1_1, [2, 2], [2, 2], '1')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        torch.ops._c10d_functional.wait_tensor.default(buf13)
        torch.ops._c10d_functional.wait_tensor.default(reinterpret_tensor(buf5, (4, 8), (1, 4), 0))
        torch.ops._c10d_functional.wait_tensor.default(arg0_1)
        return (buf0, buf4, buf5, buf12, buf13, buf17, )
"""


def short(source: str, *operators: str) -> list[str]:
    steps = read_code(source, operators)
    return [
        f"{'start' if step.starts else 'wait'} {step.number} {step.operator.rpartition('.')[2]} "
        f"{step.group or '-'} {step.kernels}"
        for step in steps
    ]


def test_every_kind_of_collective_is_read() -> None:
    assert short(ALL_KINDS) == [
        "start 0 all_reduce 0 1",
        "start 1 all_gather_into_tensor_coalesced 0 0",
        "wait 1 all_gather_into_tensor_coalesced - 1",
        "start 2 all_reduce_coalesced 0 1",
        "start 3 all_to_all_single 1 0",
        "wait 0 all_reduce - 0",
        "wait 2 all_reduce_coalesced - 0",
        "wait 1 all_gather_into_tensor_coalesced - 0",
        f"wait {ELSEWHERE} wait_tensor - 0",
    ]


def test_partitions_are_read_where_they_are_called() -> None:
    source = """
def partition_0(args):
    arg0, arg1 = args
    args.clear()
    triton_poi_fused_0.run(arg0, buf1, 16, stream=stream0)
    return (buf1, )
def partition_1(args):
    buf0, buf1 = args
    with torch.cuda._DeviceGuard(0):
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        extern_kernels.mm(buf0, buf1, out=buf2)
    return (buf2, )
class Runner:
    def call(self, args):
        arg0, arg1 = args
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg0, 2, '0')
        partition0_args = [arg0, arg1]
        (buf1,) = self.partitions[0](partition0_args)
        partition1_args = [buf0, buf1]
        (buf2,) = self.partitions[1](partition1_args)
        buf3 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf2, 'sum', 2, '0')
        buf4 = buf3; del buf3  # reuse
        torch.ops._c10d_functional.wait_tensor.default(buf4)
        return (buf4, )
"""
    assert short(source) == [
        "start 0 all_gather_into_tensor 0 0",
        "wait 0 all_gather_into_tensor - 1",
        "start 1 reduce_scatter_tensor 0 1",
        "wait 1 reduce_scatter_tensor - 0",
    ]


def test_a_collective_of_a_namespace_of_its_own_is_told_by_the_plan() -> None:
    source = (
        "def call(args):\n    buf0 = torch.ops.mine.exchange.default(a, '0')\n    torch.ops.aten.sort.default(buf0)\n"
    )
    assert short(source) == []
    assert short(source, "mine.exchange") == ["start 0 exchange 0 0"]


def test_a_result_that_is_filled_is_known_by_its_buffer() -> None:
    source = """
def call(args):
    torch.ops._c10d_functional.all_gather_into_tensor_out.default(arg0, 2, '0', out=buf0)
    buf1 = empty_strided_cpu((4, ), (1, ), torch.float32)
    torch.ops._c10d_functional.wait_tensor.default(buf0)
"""
    assert short(source) == ["start 0 all_gather_into_tensor 0 0", "wait 0 all_gather_into_tensor - 0"]


@pytest.mark.parametrize(
    "source", ["#include <torch/csrc/inductor/cpp_wrapper/cpu.h>\nvoid f() {}", "x = 1\n", "(" * 9]
)
def test_what_is_not_the_wrapper_in_python_is_not_read(source: str) -> None:
    assert read_code(source) is None


def test_a_half_in_another_language_is_told_to_be_unread() -> None:
    audit = CodeAudit({"forward": [PLANNED], "backward": [()]})
    (unread,) = audit.check("forward", "#include <cpp_wrapper.h>")
    assert unread.code == "APL347"
    assert [(each.half, each.status) for each in audit.reports()] == [("forward", "not read")]


def test_code_is_held_to_the_partition_that_it_is_of() -> None:
    other = gathers("s0", "w0")
    audit = CodeAudit({"forward": [PLANNED, other], "backward": []})
    source = """
def call(args):
    buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg0, 2, '0')
    torch.ops._c10d_functional.wait_tensor.default(buf0)
"""
    assert not audit.check("forward", source, other)
    (difference,) = audit.check("forward", source, PLANNED)
    assert difference.code == "APL345"
    assert CodeAudit.from_json(audit.to_json()).planned == audit.planned


def gathers(*order: str) -> tuple[CommunicationStep, ...]:
    """``s0`` starts the first gather, ``w0`` awaits it, and a number is of the products in between."""
    steps, kernels = [], 0
    for word in order:
        if word.isdecimal():
            kernels = int(word)
            continue
        starts, number = word[0] == "s", int(word[1:])
        step = CommunicationStep(starts, number, "_c10d_functional.all_gather_into_tensor", "0" if starts else "")
        steps.append(evolve(step, kernels=kernels, alone=kernels, name=f"gather_{number}"))
        kernels = 0
    return tuple(steps)


PLANNED = gathers("s0", "2", "s1", "w0", "1", "w1")


def test_what_runs_beside_a_collective_is_counted_up_to_its_first_wait() -> None:
    assert between(gathers("3", "s0", "2", "s1", "w0", "1", "w1", "4", "w1")) == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (gathers("s0", "5", "s1", "w0", "2", "w1"), ()),
        (
            gathers("s0", "w0", "s1", "w1"),
            ("step 1 of its communication is the wait for", "the start of", "`gather_1`"),
        ),
        (
            gathers("s0", "s1", "w0"),
            ("step 3 of its communication is missing", "the wait for all_gather_into_tensor 1"),
        ),
        ((*PLANNED, *gathers("s2")), ("step 4 of its communication is the start of", "the plan has no more there")),
        (
            gathers("s0", "s1", "w0", "w1"),
            ("nothing is computed", "`gather_0` and 1 other collective", "2 products there"),
        ),
        (gathers("s0", "1", "s1", "w0", "w1"), ("nothing is computed", "`gather_1`;", "1 product there")),
    ],
)
def test_differences_are_named(code: tuple[CommunicationStep, ...], said: tuple[str, ...]) -> None:
    found = [each.message for each in differences(PLANNED, code, "backward")]
    assert len(found) == bool(said)
    for words in said:
        assert words in found[0]
        assert "in the code of the backward" in found[0]


def test_another_group_is_another_order_and_one_that_is_not_named_is_not() -> None:
    other = (evolve(PLANNED[0], group="7"), *PLANNED[1:])
    (found,) = differences(PLANNED, other, "forward")
    assert "over group `7`; the plan has group `0` there" in found.message
    assert not list(differences(PLANNED, (evolve(PLANNED[0], group=""), *PLANNED[1:]), "forward"))


def test_steps_come_back_from_json_with_all_that_is_compared() -> None:
    audit = CodeAudit({"forward": [PLANNED], "backward": [()]})
    again = CodeAudit.from_json(json.loads(json.dumps(audit.to_json())))
    assert again.planned == audit.planned
    assert [step.kernels for step in again.planned["forward"][0]] == [step.kernels for step in PLANNED]
